"""Compares two workers on two cores with two independent trainings.

    python benchmarks/workers.py [--dataset FILE] [--vocabulary FILE] [--turns 15] [--json FILE]

One side is `python -m launch --nproc-per-node 2 -m recipes.bert_mlm`, the other two runs of
`recipes.bert_mlm` at the same time, on a core each, with as many threads as the launcher gives a
worker. They share the memory as the workers do, but do not synchronise; so their sum is an upper
bound for two workers. Batch per replica, text and model are the same. 15% of the tokens are masked.

The sides take turns of some seconds, while the other one is paused (SIGSTOP), for less than five: a
worker sends heartbeats every five seconds, and after ten without one it counts as lost. A turn's
speed is the median of its complete steps; a ratio is that of two turns that follow each other, and
the result is the median of all.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import growth, pipelines  # noqa: E402

BATCH, LENGTH = 32, 128  # per replica


class Side:
    """Trainings that run at the same time and can be paused.

    Args:
        commands: without the run's folder.
        folders: of the runs.
        one_core: whether each gets a core, and one thread.
    """

    def __init__(self, commands: list[list[str]], folders: list[Path], one_core: bool):
        self.folders = folders
        self.processes, self.errors = [], []
        for index, (command, folder) in enumerate(zip(commands, folders, strict=True)):
            environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
            if one_core:
                threads = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
                environ |= dict.fromkeys(threads, "1")
                command = ["taskset", "-c", str(index), *command]
            self.errors.append(tempfile.TemporaryFile("w+"))
            words = [*command, "--run-dir", str(folder)]
            self.processes.append(
                subprocess.Popen(
                    words, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=self.errors[-1]
                )
            )

    def wait(self, steps: int = 3) -> None:
        """Waits until each training has done N steps."""
        while not all(len(self.records(folder)) >= steps for folder in self.folders):
            for process, said in zip(self.processes, self.errors, strict=True):
                if process.poll() is not None:
                    said.seek(0)
                    raise SystemExit(f"status {process.returncode}:\n{said.read()[-3000:]}")
            time.sleep(0.05)

    def send(self, number: int) -> None:
        """Sends a signal to every process, the launcher and its workers among them."""
        for process in self.processes:
            for pid in growth.family(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def records(self, folder: Path) -> list[float]:
        """Returns the examples per second of each step so far."""
        try:
            lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        found = [json.loads(line) for line in lines]
        return [each.get("examples_per_second", 0.0) for each in found if each["event"] == "step"]

    def turn(self, seconds: float) -> float:
        """Runs one turn; returns the total tokens per second, 0 if one did no complete step."""
        before = [len(self.records(folder)) for folder in self.folders]
        self.send(signal.SIGCONT)
        time.sleep(seconds)
        self.send(signal.SIGSTOP)
        total = 0.0
        for folder, seen in zip(self.folders, before, strict=True):
            speeds = self.records(folder)[seen + 1 :]  # the first one was paused before
            if not speeds:  # it was evaluating
                return 0.0
            total += statistics.median(speeds) * LENGTH
        return total

    def end(self) -> None:
        """Ends all processes."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()


def measure(folder: Path, turns: int, seconds: float, jit: str, accumulate_steps: int) -> dict:
    """Measures the row of the table."""
    recipe = [
        *("-m", "recipes.bert_mlm", "--dataset", str(folder / "text"), "--quiet"),
        *("--vocabulary", str(folder / "vocabulary.txt"), "--cache-dir", str(folder / "cache")),
        *("--preset", "scratch", "--batch-size-per-replica", str(BATCH), "--jit", jit),
        *("--accumulate-steps", str(accumulate_steps)),
        *("--initial-mlm-probability", "0.15"),
        *("--epochs", "100000", "--checkpoint-every", "1000000", "--log-every", "1"),
    ]
    alone = [sys.executable, *recipe]
    launched = [sys.executable, "-m", "launch", "--nproc-per-node", "2", *recipe]
    two, workers, sums, sides = [folder / f"alone-{core}" for core in range(2)], [], [], []
    try:
        # First the independent ones, which tolerate long pauses.
        sides.append(Side([alone, alone], two, one_core=True))
        sides[0].wait()
        sides[0].send(signal.SIGSTOP)
        sides.append(Side([launched], [folder / "workers"], one_core=False))
        sides[1].wait()
        sides[1].send(signal.SIGSTOP)
        for _ in range(3 * turns):
            both = [side.turn(seconds) for side in sides]
            if all(both):
                sums.append(both[0])
                workers.append(both[1])
                ratio = workers[-1] / sums[-1]
                print(f"turn {len(workers)} of {turns}: {ratio:.3f}", file=sys.stderr)
            if len(workers) == turns:
                break
        else:
            raise SystemExit(f"hardly a whole step within {seconds:g} seconds")
    finally:
        for side in sides:
            side.end()
    ratios = [a / b for a, b in zip(workers, sums, strict=True)]
    about = f"2 workers ÷ two runs on a core each, tokens/s, --jit {jit}"
    if accumulate_steps > 1:
        about += f", --accumulate-steps {accumulate_steps}"
    return pipelines.row(about, ratios) | {
        "tokens_per_second": [round(statistics.median(each)) for each in (workers, sums)]
    }


def main() -> None:
    """Measures, prints the row, and writes it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pipelines.text_options(parser)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=4, help="of each side's turn, below 5")
    parser.add_argument("--jit", choices=("auto", "on", "off"), default="off")
    parser.add_argument("--accumulate-steps", type=int, default=1, help="batches of an update")
    chosen = parser.parse_args()
    sizes = {"batch_size": BATCH, "length": LENGTH, "vocabulary_size": chosen.vocabulary_size}
    with tempfile.TemporaryDirectory(prefix="workers-") as temporary:
        folder = Path(temporary) / "work"
        pipelines.prepare(folder, chosen.dataset, chosen.vocabulary, sizes)
        row = measure(folder, chosen.turns, chosen.seconds, chosen.jit, chosen.accumulate_steps)
    ours, theirs = row["tokens_per_second"]
    print(
        f"{row['measure']}: {row['median']:.2f} ({row['smallest']:.2f} to {row['largest']:.2f}; "
        f"{ours:,} and {theirs:,})"
    )
    if chosen.json:
        chosen.json.write_text(json.dumps(sizes | {"rows": [row]}, indent=2))


if __name__ == "__main__":
    main()
