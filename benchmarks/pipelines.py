"""Compares the recipe's speed with the published tutorial and Hugging Face's Trainer.

    python benchmarks/pipelines.py [--dataset FILE] [--vocabulary FILE] [--turns 5] [--json FILE]

The same architecture, vocabulary, text, batch and threads on each side, each side trained as its
users run it (`benchmarks/sides.py`). The processes take turns: one trains while the others are
paused. A ratio is the median over the turns. The first steps, which trace and compile, are
excluded, and so is the time between two epochs. The machine should do nothing else meanwhile.

The Trainer needs PyTorch and transformers: `--trainer-python` names a Python that has them.
"""

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import sides  # noqa: E402

WARM_UP = 4  # steps
# Side, steps of a turn: some seconds each.
STEPS = {"recipe": 30, "tutorial": 6, "transformers": 4, "transformers_masked": 8}
COMPARED = ("tutorial", "transformers", "transformers_masked")


def prepare(folder: Path, dataset: str, vocabulary: Path | None, sizes: dict) -> None:
    """Writes the input of the sides: text by split, vocabulary, packed sequences, sizes."""
    import numpy as np

    from data import files, sequences, text, word_pieces
    from models import bert

    found = text.load_text(dataset, files.default_cache_dir())
    (folder / "text").mkdir(parents=True)
    for split, lines in found.splits.items():
        content = "".join(f"{line}\n" for line in lines)
        (folder / "text" / f"wiki.{split}.tokens").write_text(content, encoding="utf-8")
    if vocabulary is None:
        pieces = word_pieces.vocabulary_once(
            found, sizes["vocabulary_size"], files.default_cache_dir()
        )
    else:
        pieces = word_pieces.read_vocabulary(vocabulary)
    (folder / "vocabulary.txt").write_text("".join(f"{p}\n" for p in pieces), encoding="utf-8")
    sizes["vocabulary_size"] = len(pieces)
    # Like the recipe, and into its cache.
    found = text.load_text(str(folder / "text"), folder / "cache")
    rows = sequences.sequences_once(
        found,
        bert.tokenizer_of(pieces),
        folder / "cache",
        text_mode="packed",
        length=sizes["length"],
    )
    for split in ("train", "valid"):
        np.save(folder / f"{split}.npy", rows[split])
    (folder / "sizes.json").write_text(json.dumps(sides.BERT_TINY | sizes))


def text_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of every comparison: text, vocabulary and output file."""
    parser.add_argument("--dataset", default="auto", help="as for recipes.bert_mlm")
    parser.add_argument("--vocabulary", type=Path, help="as for recipes.bert_mlm")
    parser.add_argument("--vocabulary-size", type=int, default=30_522)
    parser.add_argument("--json", type=Path, help="file for the rows")


class Side:
    """A training in a separate process that takes steps on request.

    Args:
        name: of one of `sides.SIDES`.
        python: the command that starts Python.
        folder: the folder written by `prepare`.
        sizes: see `sides.py`.
        environ: further variables of its environment.
    """

    def __init__(self, name: str, python: str, folder: Path, sizes=None, **environ: str):
        self.name = name
        self.log = tempfile.TemporaryFile("w+")
        words = [str(ROOT / "benchmarks" / "sides.py"), name, str(folder), json.dumps(sizes or {})]
        self.process = subprocess.Popen(
            [*shlex.split(python), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environ},
        )

    def steps(self, count: int) -> dict:
        """Takes steps; returns their seconds and tokens."""
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{count}\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            said = self.log.read()[-3000:]
            raise SystemExit(f"{self.name} ended with status {self.process.wait()}:\n{said}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process, which may have ended."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.log.close()


def take_turns(started: list[Side], steps: list[int], turns: int) -> list[list[float]]:
    """Returns the tokens per second of each side in each turn of N steps."""
    rates: list[list[float]] = [[] for _ in started]
    for turn in range(turns):
        order = range(len(started))
        for number in order[:: -1 if turn % 2 else 1]:  # the order changes with the turn
            found = started[number].steps(steps[number])
            rates[number].append(found["tokens"] / found["seconds"])
        print(f"turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
    return rates


def compare(folder: Path, others: list[str], pythons: dict[str, str], turns: int) -> list[dict]:
    """Computes recipe ÷ other side in tokens per second: median, smallest, largest."""
    names = ["recipe", *others]
    started = [Side(name, pythons[name], folder, CUDA_VISIBLE_DEVICES="-1") for name in names]
    try:
        for side in started:
            side.steps(WARM_UP)
        ours, *rates = take_turns(started, [STEPS[name] for name in names], turns)
    finally:
        for side in started:
            side.close()
    return [
        row(f"recipe ÷ {other}, tokens/s", [a / b for a, b in zip(ours, theirs, strict=True)])
        | {"tokens_per_second": [round(statistics.median(each)) for each in (ours, theirs)]}
        for other, theirs in zip(others, rates, strict=True)
    ]


def row(measure: str, values: list[float]) -> dict:
    """Returns a row of the table."""
    return {
        "measure": measure,
        "median": round(statistics.median(values), 3),
        "smallest": round(min(values), 3),
        "largest": round(max(values), 3),
    }


def main() -> None:
    """Measures, prints the table, and writes it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text_options(parser)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--against", nargs="*", choices=COMPARED, default=list(COMPARED))
    parser.add_argument("--trainer-python", help="a Python with PyTorch and transformers")
    chosen = parser.parse_args()
    sizes = {
        "batch_size": chosen.batch_size,
        "length": chosen.sequence_length,
        "vocabulary_size": chosen.vocabulary_size,
    }
    pythons = dict.fromkeys(("recipe", "tutorial"), sys.executable)
    for name in ("transformers", "transformers_masked"):
        pythons[name] = chosen.trainer_python or sys.executable
    with tempfile.TemporaryDirectory(prefix="pipelines-") as temporary:
        folder = Path(temporary) / "work"
        prepare(folder, chosen.dataset, chosen.vocabulary, sizes)
        rows = compare(folder, chosen.against, pythons, chosen.turns)
    print(
        f"\nBERT, 2 layers of 128, vocabulary {sizes['vocabulary_size']:,}, batches of "
        f"{chosen.batch_size} (median of {chosen.turns} turns)\n"
    )
    for row in rows:
        ours, theirs = row["tokens_per_second"]
        print(
            f"{row['measure']:44} {row['median']:7.2f}  {row['smallest']:6.2f}  "
            f"{row['largest']:6.2f}   ({ours:,} and {theirs:,} tokens/s)"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(sizes | {"turns": chosen.turns, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
