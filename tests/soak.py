"""Kills runs at random moments, over all recipes and synchronous strategies, and compares.

    make soak                                  50 kills
    make soak ARGS="--kills 200 --seed 7"
    make soak ARGS="--folder /tmp/soak"        resumes an earlier soak

Each round draws a recipe (ours, the tests' tiny one, or that of docs/write_a_recipe.md) and
a strategy, runs it unbroken once, then again under SIGKILL or SIGTERM at random moments until it
ends, and compares weights, history, records and TensorBoard logs. Between some kills and the
restart a bit is flipped in a checkpoint or in the cache, or the newest checkpoint is cut.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tests.support import killed_run, processes, strategy_run  # noqa: E402

STRATEGIES = {
    "none": {"strategy": "none"},
    "mirrored-2": {"strategy": "mirrored", "replicas": 2},
    "central-2": {"strategy": "central_storage", "replicas": 2},
    "workers-2": {"strategy": "multi_worker"},
}
# How often each is drawn: a launcher's workers import TensorFlow at each start, the others are
# forks of a process that has.
SHARES = (3, 3, 2, 1)
KILLS_PER_ROUND = 4  # at most, so that each round ends
STOPPED = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM, 75)
SECONDS = 1800
PAGE = {"epochs": 2, "checkpoint_every": 5, "log_every": 3, "global_batch_size": 32}
RUNS = {name: run for name, run in killed_run.RUNS.items() if not name.endswith("_exact")}
RUNS["page"] = ("tumours", PAGE)


class Failed(Exception):
    """A run ended as none may, or differs from the unbroken one."""


def write_page_recipe(folder: Path) -> None:
    """Saves the recipe of the page, as a reader would."""
    page = (ROOT / "docs" / "write_a_recipe.md").read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (recipe,) = [code for code in found if "def predict(" in code]
    (folder / "tumours.py").write_text(recipe, encoding="utf-8")


def command(name: str, strategy: str, folder: Path, output: Path) -> list[str]:
    """Returns what to run: a module and its options, under the launcher where there are workers."""
    module, options = RUNS[name]
    options = options | STRATEGIES[strategy] | {"run_dir": output, "cache_dir": folder / "cache"}
    if module == "tiny_recipe":
        module = "tests.support.tiny_recipe"
    elif module != "tumours":
        options |= strategy_run.data_options(module, folder)
        module = f"recipes.{module}"
    words = ["-m", module]
    for option, value in options.items():
        flag = option.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    if strategy == "workers-2":
        launcher = ["-m", "launch", "--nproc-per-node", "2"]
        words = [*launcher, *words]
    return words


def finish(words: list[str], folder: Path, seconds: float, number: int = 0) -> tuple[int, str]:
    """Runs a process, which gets a signal after some seconds; returns its status and output."""
    if words[1] == "launch":
        path = os.pathsep.join([str(ROOT), str(folder)])
        process = processes.start(*words, PYTHONPATH=path)
    else:
        process = processes.Forked(*words, cwd=folder)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        if not number:
            process.kill()
            raise Failed(f"no end within {seconds} s") from None
        process.send_signal(number)
        output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


def damage(choice: random.Random, output: Path, cache: Path) -> str | None:
    """Flips a bit of a file, or cuts the newest checkpoint; returns what was done."""
    checkpoints = sorted((output / "checkpoints").glob("step-*"))
    if choice.random() < 0.4 and checkpoints:
        os.truncate(checkpoints[-1] / "model.weights.h5", choice.randrange(1000))
        return f"{checkpoints[-1].name} cut"
    found = [p for f in (output / "checkpoints", cache) for p in sorted(f.rglob("*"))]
    files = [path for path in found if path.is_file() and path.stat().st_size]
    if not files:
        return None
    path = choice.choice(files)
    content = bytearray(path.read_bytes())
    content[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
    path.write_bytes(content)
    return f"bit flipped in {path.parent.name}/{path.name}"


def compare(broken: Path, whole: Path) -> None:
    ours, theirs = processes.results(whole), processes.results(broken)
    for name in ("weights_sha256", "history", "test", "steps"):
        if ours[name] != theirs[name]:
            raise Failed(f"{name} differs")
    if processes.records(whole) != processes.records(broken):
        raise Failed("metrics.jsonl differs")
    if processes.events(whole) != processes.events(broken):
        raise Failed("the TensorBoard logs differ")


def one_round(folder: Path, state: dict, only: str | None) -> int:
    """Draws a run and a strategy, and compares; returns the number of kills."""
    choice = random.Random(f"{state['seed']}/{state['rounds']}")
    strategy = choice.choices(list(STRATEGIES), SHARES)[0]
    # Central storage refuses half precision and XLA.
    in_central = ("bert_half", "tiny_half", "bert_xla", "tiny_xla")
    refused = in_central if strategy == "central-2" else ()
    run = choice.choice([name for name in RUNS if name not in refused])
    if only:
        run = only
    whole, broken = folder / f"whole-{run}-{strategy}", folder / f"broken-{state['rounds']}"
    seconds = state["seconds"].get(whole.name)
    if seconds is None:
        shutil.rmtree(whole, ignore_errors=True)
        begun = time.monotonic()
        status, output = finish(command(run, strategy, folder, whole), folder, SECONDS)
        if status:
            raise Failed(f"the unbroken {whole.name}: status {status}\n{output[-3000:]}")
        seconds = state["seconds"][whole.name] = time.monotonic() - begun

    shutil.rmtree(broken, ignore_errors=True)
    words, kills, done = command(run, strategy, folder, broken), 0, []
    while True:
        is_last = kills == KILLS_PER_ROUND
        number = 0 if is_last else choice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        after = SECONDS if is_last else choice.uniform(0.1, 0.8) * seconds
        status, output = finish(words, folder, after, number)
        if status == 0:
            break
        if is_last or status not in STOPPED:
            raise Failed(f"{run} {strategy}: status {status}, {done}\n{output[-3000:]}")
        kills += 1
        if choice.random() < 0.4:
            done.append(damage(choice, broken, folder / "cache"))
    try:
        compare(broken, whole)
    except Failed as failed:
        raise Failed(f"{run} {strategy}, {done}: {failed}; kept: {broken} and {whole}") from None
    said = "".join(f"; {what}" for what in done if what)
    print(f"{run} {strategy}: {kills} kills{said}: identical", flush=True)
    shutil.rmtree(broken, ignore_errors=True)
    return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="ends after so many")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="repeats a soak's choices"
    )
    parser.add_argument("--only", choices=list(RUNS), help="this run alone")
    parser.add_argument("--folder", type=Path, default=None, help="kept; a soak there resumes")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="soak-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    state_path = folder / "soak.json"
    if state_path.exists():
        state = json.loads(state_path.read_text())
        print(f"resumes: {state['kills']} kills in {state['rounds']} rounds are done")
    else:
        state = {"seed": options.seed, "kills": 0, "rounds": 0, "seconds": {}}
        strategy_run.write_data(folder)
        write_page_recipe(folder)
    print(f"--seed {state['seed']} --folder {folder}", flush=True)
    processes.run_script("-m", "platform")  # the forks' server has imported everything after it
    while state["kills"] < options.kills:
        try:
            state["kills"] += one_round(folder, state, options.only)
        except Failed as failed:
            print(f"round {state['rounds']}: {failed}")
            return 1
        state["rounds"] += 1
        state_path.write_text(json.dumps(state))
    print(f"{state['kills']} kills in {state['rounds']} rounds: every run identical")
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
