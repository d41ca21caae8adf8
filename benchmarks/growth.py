"""Measures how training scales with the text, the sequences, the replicas and the workers.

    python benchmarks/growth.py [--megabytes 2 20 200] [--steps 40] [--turns 3] [--json FILE]

Every row is a run of `recipes.bert_mlm` (2 layers of 128, vocabulary 8,192, batch 32 per replica,
float32, 15% of the tokens masked, without XLA) on synthetic text, with everything in the cache.
Tokens per second exclude the first step; the seconds to the first step count from the command,
imports and all; the memory is the largest resident part of one process, the mapped file included;
the traffic is what went through the loopback device, by step, with all that starting and saving
send. The rows take turns; medians are shown. `--turns 1` is a quick test.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import corpus  # noqa: E402

SMALL = 2  # megabytes of text for the other measurements


def variants(megabytes: list[int]) -> dict[str, tuple[int, list[str], list[str]]]:
    """Returns by name: megabytes of text, options of the launcher (or none) and of the recipe."""
    found = {f"text of {size} MB": (size, [], []) for size in megabytes}
    found |= {
        f"sequences of {length}": (SMALL, [], ["--sequence-length", str(length)])
        for length in (64, 128, 256, 512)
    }
    for count in (2, 4):
        mirrored = ["--strategy", "mirrored", "--replicas", str(count)]
        found[f"{count} replicas (mirrored)"] = (SMALL, [], mirrored)
        found[f"{count} workers"] = (SMALL, ["--nproc-per-node", str(count)], [])
    found["--deterministic"] = (SMALL, [], ["--deterministic"])
    return found


def run(words: list[str], folder: Path, variant: tuple, index: int, steps: int) -> dict:
    """Trains once; returns its results, memory, seconds to the first step and traffic."""
    megabytes, launcher, options = variant
    run_dir = folder / f"run-{index}"
    if launcher:
        words = ["-m", "launch", *launcher, *words]
    words = [sys.executable, *words, "--dataset", str(folder / f"text-{megabytes}.txt")]
    words += [*options, "--run-dir", str(run_dir), "--max-steps", str(steps)]
    begun, sent = time.perf_counter(), loopback()
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    first, peak = None, 0
    while process.poll() is None:
        peak = max([peak, *(largest(pid) for pid in family(process.pid))])
        log = run_dir / "metrics.jsonl"
        if first is None and log.exists() and log.stat().st_size:
            first = time.perf_counter() - begun
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{variant}: status {process.returncode}\n{process.stderr.read()[-3000:]}")
    results = json.loads((run_dir / "results.json").read_text())
    return {
        "tokens_per_second": results["tokens_per_second"],
        "seconds_to_first_step": first,
        "megabytes_of_memory": peak / 1e6,
        "megabytes_sent_a_step": (loopback() - sent) / 1e6 / steps,
    }


def loopback() -> int:
    """Returns the bytes sent by the loopback device so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def family(pid: int) -> list[int]:
    """Returns a process and its descendants."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [pid, *(each for child in text.split() for each in family(int(child)))]


def largest(pid: int) -> int:
    """Returns the peak resident memory of a process in bytes; 0 after its end."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(x.split()[1]) for x in lines if x.startswith("VmHWM")), 0)


def main() -> None:
    """Measures, prints the table, and writes it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="*", default=[2, 20, 200])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="parts of the names of what is measured")
    parser.add_argument("--json", type=Path, help="where the table is written too")
    chosen = parser.parse_args()
    measured = {
        name: variant
        for name, variant in variants(chosen.megabytes).items()
        if not chosen.only or any(word in name for word in chosen.only)
    }
    found: dict[str, list[dict]] = {name: [] for name in measured}
    with tempfile.TemporaryDirectory(prefix="growth-") as temporary:
        folder = Path(temporary)
        for megabytes in {variant[0] for variant in measured.values()}:
            corpus.write_text(folder / f"text-{megabytes}.txt", megabytes, seed=0)
        words = ["-m", "recipes.bert_mlm", "--preset", "scratch", "--quiet", "--log-every", "1"]
        words += ["--cache-dir", str(folder / "cache"), "--jit", "off", "--epochs", "1000000"]
        words += ["--batch-size-per-replica", "32", "--checkpoint-every", "100000"]
        words += ["--vocabulary-size", "8192", "--initial-mlm-probability", "0.15"]
        lengths = [variant for variant in measured.values() if "--sequence-length" in variant[2]]
        texts = {variant[0]: (variant[0], [], []) for variant in measured.values()}
        for index, variant in enumerate([*texts.values(), *lengths]):  # fills the cache
            run(words, folder, variant, -1 - index, 1)
        for turn in range(chosen.turns):
            for index, (name, variant) in enumerate(measured.items()):
                number = turn * len(measured) + index
                found[name].append(run(words, folder, variant, number, chosen.steps))
            print(f"turn {turn + 1} of {chosen.turns}", file=sys.stderr, flush=True)
    rows = [
        {"measure": name}
        | {key: round(statistics.median(each[key] for each in turns), 1) for key in turns[0]}
        for name, turns in found.items()
    ]
    print(f"{'':28} {'tokens/s':>10} {'first step, s':>14} {'memory, MB':>11} {'sent, MB':>9}")
    for row in rows:
        print(
            f"{row['measure']:28} {row['tokens_per_second']:10,.0f} "
            f"{row['seconds_to_first_step']:14.1f} {row['megabytes_of_memory']:11,.0f} "
            f"{row['megabytes_sent_a_step']:9,.1f}"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
