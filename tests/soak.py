"""Breaks runs at random moments, over all recipes and synchronous strategies, and compares.

    make soak                                  50 kills
    make soak ARGS="--rounds 200 --seed 7"
    make soak ARGS="--folder /tmp/soak"        resumes an earlier soak

Each round takes a recipe (or the tests' tiny one) and a strategy, runs it unbroken once, then again
under SIGKILL or SIGTERM after a random time until it gets through, and asks for the same weights,
history, records and TensorBoard logs. Before some kills a process stands still for a while
(SIGSTOP, SIGCONT), or the disk is full for a while; between some kills and the restart a bit is
flipped in a file of the checkpoints or of the caches, or the newest checkpoint is cut; in some
rounds the clock jumps.
"""

import argparse
import contextlib
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

from tests.support import killed_run, processes, small_disk, strategy_run  # noqa: E402

STRATEGIES = {
    "none": (1, {"strategy": "none"}),
    "mirrored-2": (1, {"strategy": "mirrored", "replicas": 2}),
    "central-2": (1, {"strategy": "central_storage", "replicas": 2}),
    "workers-2": (2, {"strategy": "multi_worker"}),
}
# How often each is drawn, in this order: a launcher's workers import TensorFlow anew at each start,
# the others are forks of a process that has.
SHARES = (3, 3, 2, 1)
RUNS = [name for name in killed_run.RUNS if not name.endswith("_exact")]
# How often the tests' tiny recipe is drawn: it is quick, and has all that a run looks after.
TINY_SHARE = 0.8
KILLS_IN_A_ROUND = 4  # at most, so that each round ends
STOPPED = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM, 75)


class Failed(Exception):
    """A run ended as none may, or differs from the unbroken one."""


def command(workers: int, chosen: dict, output: Path) -> list[str]:
    words = [json.dumps(chosen), str(output)]
    if workers == 1:
        return ["tests/support/killed_run.py", *words]
    launcher = ["-m", "distribution.launch", "--nproc-per-node", str(workers)]
    return [*launcher, "--log-dir", f"{output}-logs", "-m", "killed_run", *words]


def finish(words: list[str], breaks: list[tuple]) -> tuple[int, str]:
    """Runs a process and breaks it; returns its status and output.

    A break is (seconds after the one before, what is done to the process).
    """
    is_launcher = words[0] == "-m"
    process = processes.start(*words) if is_launcher else processes.Forked(*words)
    for seconds, do in breaks:
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output  # it was faster
        except subprocess.TimeoutExpired:
            do(process)
    output, _ = process.communicate(timeout=1800)
    return process.returncode, output


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [pid, *(each for child in found.stdout.split() for each in family(int(child)))]


def stand_still(choice: random.Random):
    """One of the processes stands still for a while."""
    place, seconds = choice.random(), choice.uniform(0.5, 5.0)

    def do(process):
        pids = family(process.pid)
        pid = pids[int(place * len(pids))]
        try:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass  # it had just ended

    return do


def flip_a_bit(choice: random.Random, folders: list[Path]) -> str | None:
    """Flips a bit of a file in one of these folders; returns what was done."""
    files = [p for f in folders for p in sorted(f.rglob("*")) if p.is_file() and p.stat().st_size]
    if not files:
        return None
    path = choice.choice(files)
    content = bytearray(path.read_bytes())
    place = choice.randrange(len(content))
    content[place] ^= 1 << choice.randrange(8)
    path.write_bytes(content)
    return f"bit flipped in {path.parent.name}/{path.name}"


def cut_the_newest(choice: random.Random, checkpoints: Path) -> str | None:
    """Cuts the weights of the newest checkpoint; returns what was done."""
    found = sorted(checkpoints.glob("step-*"))
    if not found:
        return None
    os.truncate(found[-1] / "model.weights.h5", choice.randrange(1000))
    return f"{found[-1].name} cut"


def compare(broken: Path, whole: Path) -> None:
    ours, theirs = processes.results(whole), processes.results(broken)
    for name in ("weights_sha256", "history", "test", "steps"):
        if ours[name] != theirs[name]:
            raise Failed(f"{name} differs")
    if processes.records(whole) != processes.records(broken):
        raise Failed("metrics.jsonl differs")
    if processes.events(whole) != processes.events(broken):
        raise Failed("the TensorBoard logs differ")


def broken_run(
    choice: random.Random, words: list[str], output: Path, seconds: float, is_small: bool
) -> tuple[int, list[str]]:
    """Runs until it gets through; returns the number of kills and what else was done."""
    kills, done = 0, []
    while True:
        breaks = []
        if kills < KILLS_IN_A_ROUND:
            number = choice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            after = choice.uniform(0.1, 0.8) * seconds
            if choice.random() < 0.3:
                breaks.append((after * choice.random(), stand_still(choice)))
                done.append("stood still")
            if is_small and choice.random() < 0.4:
                full = small_disk.full_for(output, choice.uniform(0.5, 6.0))
                breaks.append((after * choice.random(), full))
                done.append("disk full")
            # The launcher dies with its workers, a single process alone.
            breaks.append((after, lambda process, number=number: process.send_signal(number)))
        status, said = finish(words, breaks)
        if status == 0:
            return kills, done
        was_full = is_small and status in (1, 2) and any(why in said for why in small_disk.FULL)
        if not breaks or (status not in STOPPED and not was_full):
            raise Failed(f"status {status}, {done}\n{said[-3000:]}")
        kills += 1
        fault = choice.random()
        if fault < 0.3:
            done.append(flip_a_bit(choice, [output / "checkpoints", output.parent / "cache"]))
        elif fault < 0.5:
            done.append(cut_the_newest(choice, output / "checkpoints"))


def remove(path: Path) -> None:
    """Removes a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def make_whole(whole: Path, workers: int, chosen: dict, state: dict) -> None:
    """Trains a run without a stop, unless an earlier round has."""
    if whole.name not in state["seconds"]:
        begun = time.time()
        shutil.rmtree(whole, ignore_errors=True)
        status, output = finish(command(workers, chosen, whole), [])
        if status:
            raise Failed(f"the unbroken {whole.name}: status {status}\n{output[-3000:]}")
        state["seconds"][whole.name] = time.time() - begun


def one_round(folder: Path, state: dict) -> int:
    """Draws a run and a strategy, and compares; returns the number of kills."""
    choice = random.Random(f"{state['seed']}/{state['rounds']}")
    name = choice.choices(list(STRATEGIES), SHARES)[0]
    workers, where = STRATEGIES[name]
    # Central storage refuses half precision, and several replicas XLA.
    half = ("bert_half", "tiny_half") if name == "central-2" else ()
    refused = () if name == "none" else ("bert_xla", *half)
    tiny = choice.random() < TINY_SHARE
    runs = [run for run in RUNS if run.startswith("tiny") == tiny and run not in refused]
    run = choice.choice(runs)
    whole, broken = folder / f"whole-{run}-{name}", folder / f"broken-{state['rounds']}"
    logs = Path(f"{broken}-logs")
    small_disk.unmount(broken)  # of a soak that was stopped
    for left in (broken, logs):
        shutil.rmtree(left, ignore_errors=True)
    chosen = {"run": run} | where
    make_whole(whole, workers, chosen, state)
    is_small = small_disk.why_not() is None and choice.random() < 0.3
    jumps = {"clock_jumps": state["rounds"]} if choice.random() < 0.2 else {}
    words = command(workers, chosen | jumps, broken)
    seconds = state["seconds"][whole.name]
    try:
        with small_disk.small_disk(broken) if is_small else contextlib.nullcontext():
            kills, done = broken_run(choice, words, broken, seconds, is_small)
            compare(broken, whole)
    except Failed as failed:
        raise Failed(f"round {state['rounds']}, {run} {name}: {failed}\nkept: {broken}") from None
    said = "; ".join(what for what in [*done, "the clock jumps" if jumps else None] if what)
    print(f"{run} {name}: {kills} kills{', ' + said if said else ''}: identical", flush=True)
    for left in (broken, logs):
        shutil.rmtree(left, ignore_errors=True)
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=None, help="ends after so many (default: 50)")
    parser.add_argument("--rounds", type=int, default=None, help="ends after so many, instead")
    parser.add_argument("--seed", type=int, default=None, help="repeats a soak's choices")
    parser.add_argument("--folder", type=Path, default=None, help="kept; a soak there resumes")
    options = parser.parse_args()
    if options.kills is None and options.rounds is None:
        options.kills = 50
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="soak-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    state_path = folder / "soak.json"
    if state_path.exists():
        state = json.loads(state_path.read_text())
        print(f"resumes: {state['kills']} kills in {state['rounds']} rounds are done")
    else:
        seed = options.seed if options.seed is not None else int(time.time())
        state = {"seed": seed, "kills": 0, "rounds": 0, "seconds": {}}
        strategy_run.write_data(folder)
    print(f"--seed {state['seed']} --folder {folder}", flush=True)
    while (options.kills is not None and state["kills"] < options.kills) or (
        options.rounds is not None and state["rounds"] < options.rounds
    ):
        try:
            state["kills"] += one_round(folder, state)
        except Failed as failed:
            print(failed)
            return 1
        state["rounds"] += 1
        temporary = state_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        os.replace(temporary, state_path)
    print(f"{state['kills']} kills in {state['rounds']} rounds: every run identical")
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
