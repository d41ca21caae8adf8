"""Two workers on two cores beside two trainings that know nothing of each other.

    python benchmarks/workers.py [--dataset FILE] [--vocabulary FILE] [--turns 5] [--json FILE]

One side is `python -m distribution.launch --nproc-per-node 2 -m recipes.bert_mlm`, the other two
runs of `recipes.bert_mlm` at the same time, on a core each, with as many threads as the launcher
gives a worker. They share the memory as the workers do, and have nothing to agree upon; so their
sum is what two workers could reach at best. Batch per replica, text and model are the same. The
sides take turns; a ratio is the median. The first step of each run is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import pipelines  # noqa: E402

BATCH = 32  # per replica


def run(words: list[list[str]], folders: list[Path], one_core: bool) -> float:
    """Runs commands at the same time; returns the sum of their tokens a second."""
    running = []
    for index, (command, folder) in enumerate(zip(words, folders, strict=True)):
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
        if one_core:
            threads = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
            environ |= dict.fromkeys(threads, "1")
            command = ["taskset", "-c", str(index), *command]
        running.append(
            subprocess.Popen(
                [*command, "--run-dir", str(folder)],
                cwd=ROOT,
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for process in running:
        _, said = process.communicate()
        if process.returncode:
            raise SystemExit(f"status {process.returncode}:\n{said[-3000:]}")
    found = [json.loads((folder / "results.json").read_text()) for folder in folders]
    return sum(each["tokens_per_second"] or 0.0 for each in found)  # none in a single step


def measure(folder: Path, turns: int, steps: int, jit: str) -> dict:
    """The row of the table."""
    recipe = [
        *("-m", "recipes.bert_mlm", "--dataset", str(folder / "text"), "--quiet"),
        *("--vocabulary", str(folder / "vocabulary.txt"), "--cache-dir", str(folder / "cache")),
        *("--preset", "scratch", "--batch-size-per-replica", str(BATCH), "--jit", jit),
        *("--max-steps", str(steps), "--checkpoint-every", str(10 * steps), "--epochs", "9"),
    ]
    alone = [sys.executable, *recipe]
    launched = [sys.executable, "-m", "distribution.launch", "--nproc-per-node", "2", *recipe]
    # The cache is filled by a run that does not count.
    run([[*alone, "--max-steps", "1"]], [folder / "first"], one_core=False)
    workers, sums = [], []
    for turn in range(turns):
        for side in (0, 1) if turn % 2 else (1, 0):
            if side:
                workers.append(run([launched], [folder / f"workers-{turn}"], one_core=False))
            else:
                folders = [folder / f"alone-{turn}-{core}" for core in range(2)]
                sums.append(run([alone, alone], folders, one_core=True))
        print(f"turn {turn + 1} of {turns}: {workers[-1] / sums[-1]:.3f}", file=sys.stderr)
    ratios = [a / b for a, b in zip(workers, sums, strict=True)]
    return {
        "measure": f"2 workers ÷ two runs on a core each, tokens/s, --jit {jit}",
        "median": round(statistics.median(ratios), 3),
        "smallest": round(min(ratios), 3),
        "largest": round(max(ratios), 3),
        "tokens_per_second": [round(statistics.median(each)) for each in (workers, sums)],
    }


def main() -> None:
    """Measures, prints the row, and writes it where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pipelines.text_options(parser)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--jit", choices=("auto", "on", "off"), default="off")
    chosen = parser.parse_args()
    sizes = {"batch_size": BATCH, "length": 128, "vocabulary_size": chosen.vocabulary_size}
    with tempfile.TemporaryDirectory(prefix="workers-") as temporary:
        folder = Path(temporary) / "work"
        pipelines.prepare(folder, chosen.dataset, chosen.vocabulary, sizes)
        row = measure(folder, chosen.turns, chosen.steps, chosen.jit)
    ours, theirs = row["tokens_per_second"]
    print(
        f"{row['measure']}: {row['median']:.2f} ({row['smallest']:.2f} to {row['largest']:.2f}; "
        f"{ours:,} and {theirs:,})"
    )
    if chosen.json:
        chosen.json.write_text(json.dumps(sizes | {"rows": [row]}, indent=2))


if __name__ == "__main__":
    main()
