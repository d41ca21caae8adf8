"""Kills runs at random moments, over all recipes and synchronous strategies, and compares.

    make soak                                  50 kills
    make soak ARGS="--kills 500 --seed 7"
    make soak ARGS="--folder /tmp/soak"        goes on where an earlier soak stopped

Each round takes a recipe and a strategy, runs it unbroken once, then again under SIGKILL or SIGTERM
after a random time until it gets through, and asks for the same weights, history, records and
TensorBoard logs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tests.support import killed_run, processes, strategy_run  # noqa: E402

STRATEGIES = {
    "none": (1, {"strategy": "none"}),
    "mirrored-2": (1, {"strategy": "mirrored", "replicas": 2}),
    "central-2": (1, {"strategy": "central_storage", "replicas": 2}),
    "workers-2": (2, {"strategy": "multi_worker"}),
}


def command(workers: int, chosen: dict, output: Path) -> list[str]:
    words = [json.dumps(chosen), str(output)]
    if workers == 1:
        return ["tests/support/killed_run.py", *words]
    launcher = ["-m", "distribution.launch", "--nproc-per-node", str(workers)]
    return [*launcher, "--log-dir", f"{output}-logs", "-m", "killed_run", *words]


def finish(words: list[str], seconds: float | None, number: int) -> tuple[int, str]:
    """Runs a process; after so many seconds it gets the signal. Returns status and output."""
    process = processes.start(*words)
    try:
        output, _ = process.communicate(timeout=seconds or 600)
    except subprocess.TimeoutExpired:
        # The launcher dies with its workers, a single process alone.
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    return process.returncode, output


def compare(broken: Path, whole: Path) -> str | None:
    ours, theirs = processes.results(whole), processes.results(broken)
    for name in ("weights_sha256", "history", "test", "steps"):
        if ours[name] != theirs[name]:
            return f"{name} differs"
    if processes.records(whole) != processes.records(broken):
        return "metrics.jsonl differs"
    if processes.events(whole) != processes.events(broken):
        return "the TensorBoard logs differ"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="repeats a soak's choices")
    parser.add_argument("--folder", type=Path, default=None, help="kept; a soak there goes on")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    state_path = folder / "soak.json"
    if state_path.exists():
        state = json.loads(state_path.read_text())
        print(f"goes on: {state['kills']} kills and {state['rounds']} rounds are done")
    else:
        seed = options.seed if options.seed is not None else int(time.time())
        state = {"seed": seed, "kills": 0, "rounds": 0}
        strategy_run.write_data(folder)
    print(f"--seed {state['seed']} --folder {folder}", flush=True)
    chosen_runs = [name for name in killed_run.RUNS if name != "bert_exact"]
    while state["kills"] < options.kills:
        choice = random.Random(f"{state['seed']}/{state['rounds']}")
        name, (workers, where) = choice.choice(list(STRATEGIES.items()))
        no_half = name == "central-2"  # refuses half precision
        run = choice.choice([run for run in chosen_runs if not (no_half and run == "bert_half")])
        whole = folder / f"whole-{run}-{name}"
        broken = folder / f"broken-{state['rounds']}"
        for left in (broken, Path(f"{broken}-logs")):
            shutil.rmtree(left, ignore_errors=True)
        chosen = {"run": run} | where
        begun = time.time()
        if not (whole / "results.json").exists():
            status, output = finish(command(workers, chosen, whole), None, 0)
            if status:
                print(output[-3000:])
                return 1
            state[str(whole.name)] = time.time() - begun
        seconds = state[str(whole.name)]
        kills = 0
        while True:
            # At most 6 kills a round, so that each round ends.
            number = choice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            after = choice.uniform(0.2, 1.0) * seconds if kills < 6 else None
            status, output = finish(command(workers, chosen, broken), after, number)
            if status == 0:
                break
            if status not in (-signal.SIGKILL, 75, 128 + signal.SIGTERM, -signal.SIGTERM):
                print(f"round {state['rounds']} {run} {name}: status {status}\n{output[-3000:]}")
                return 1
            kills += 1
        fault = compare(broken, whole)
        state["kills"] += kills
        state["rounds"] += 1
        print(f"{run} {name}: {kills} kills, {fault or 'identical'}", flush=True)
        if fault:
            print(f"kept: {broken} and {whole}")
            return 1
        for left in (broken, Path(f"{broken}-logs")):
            shutil.rmtree(left, ignore_errors=True)
        temporary = state_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        os.replace(temporary, state_path)
    print(f"{state['kills']} kills in {state['rounds']} rounds: every run identical")
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
