"""Measures loading a large text, from a file to sequences: seconds, megabytes per second, memory.

    python benchmarks/corpus.py [--megabytes 100 1000] [--folder FOLDER] [--json FILE]

The text is synthetic: lines of words drawn by Zipf's law from 200,000 artificial ones, some with a
capital or a punctuation mark, the same for the same seed. A fresh process loads it, tokenises it
and cuts it into sequences. The vocabulary of 8,192 pieces is learned beforehand from its first
lines.

Memory is anonymous memory (RssAnon of /proc/PID/status, read every 0.05 s): its value before the
measurement (TensorFlow, KerasNLP) and its peak. Pages of mapped files do not count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}

WORDS = 200_000
LEARNED_FROM = 5_000_000  # bytes
VOCABULARY_SIZE = 8192
LENGTH = 128


def made_up_words(generator: np.random.Generator) -> np.ndarray:
    """Returns `WORDS` distinct words of one to five syllables."""
    syllables = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("", "n", "r", "s")]
    found: dict[str, None] = {}
    while len(found) < WORDS:
        sizes = generator.integers(1, 6, WORDS)
        drawn = generator.choice(syllables, (WORDS, 5))
        found |= dict.fromkeys("".join(row[:n]) for row, n in zip(drawn, sizes, strict=True))
    return np.array(sorted(list(found)[:WORDS], key=len))


def write_text(path: Path, megabytes: float, seed: int) -> None:
    """Writes the text: lines of 1 to 79 words."""
    generator = np.random.default_rng(seed)
    words = made_up_words(generator)
    share = 1 / np.arange(1, WORDS + 1)
    share = np.cumsum(share / share.sum())
    left = int(1e6 * megabytes)
    with open(path, "w", encoding="utf-8") as file:
        while left > 0:
            drawn = words[np.searchsorted(share, generator.random(200_000) * share[-1])].tolist()
            kinds = generator.random(len(drawn)).tolist()
            for at, kind in enumerate(kinds):
                if kind < 0.15:
                    drawn[at] += ",.;:!?"[int(40 * kind)]
                elif kind > 0.92:
                    drawn[at] = drawn[at].capitalize()
            lines, at = [], 0
            for size in generator.integers(1, 80, 5000).tolist():
                lines.append(" ".join(drawn[at : at + size]))
                at += size
            content = "\n".join(filter(None, lines)) + "\n"
            file.write(content[:left])
            left -= len(content)


def cut(folder: Path) -> None:
    """Runs in the fresh process; prints its seconds and results as JSON."""
    import keras_nlp

    from data import sequences, text, word_pieces

    pieces = word_pieces.read_vocabulary(folder / "vocabulary.txt")
    tokenizer = keras_nlp.models.BertTokenizer(vocabulary=pieces, lowercase=True)
    tokenizer(["a word"])
    before = anonymous(os.getpid())
    begun = time.perf_counter()
    source = text.load_text(str(folder / "text.txt"), folder / "cache")
    source.sha256  # noqa: B018
    loaded = time.perf_counter()
    options = {"text_mode": "packed", "length": LENGTH}
    found = sequences.sequences_once(source, tokenizer, folder / "cache", **options)
    end = time.perf_counter()
    print(
        json.dumps(
            {
                "lines": sum(1 for lines in source.splits.values() for _ in lines),
                "sequences": sum(map(len, found.values())),
                "load_seconds": round(loaded - begun, 1),
                "tokenize_seconds": round(end - loaded, 1),
                "before_megabytes": round(before / 1e6),
            }
        )
    )


def anonymous(process: int) -> int:
    """Returns RssAnon of a process in bytes; 0 after its end."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return sum(1024 * int(row.split()[1]) for row in status.splitlines() if "RssAnon" in row)


def measure(folder: Path, megabytes: float) -> dict:
    """Measures a row of the table."""
    words = [sys.executable, __file__, "--cut", str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.05)
    assert process.stdout is not None
    if process.returncode:
        raise SystemExit(process.returncode)
    found = json.loads(process.stdout.read())
    seconds = sum(found[f"{phase}_seconds"] for phase in ("load", "tokenize"))
    return found | {
        "megabytes": megabytes,
        "seconds": round(seconds, 1),
        "megabytes_per_second": round(megabytes / seconds, 2),
        "peak_megabytes": round(peak / 1e6),
    }


def main() -> None:
    """Makes each text, measures, prints the rows, and writes them to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[100])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="folder for the text and its tokens")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--cut", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.cut:
        cut(chosen.cut)
        return
    from data import word_pieces

    rows = []
    for megabytes in chosen.megabytes:
        with tempfile.TemporaryDirectory(prefix="corpus-", dir=chosen.folder) as temporary:
            folder = Path(temporary)
            write_text(folder / "text.txt", megabytes, chosen.seed)
            with open(folder / "text.txt", encoding="utf-8") as file:
                pieces = word_pieces.learn_vocabulary(file.readlines(LEARNED_FROM), VOCABULARY_SIZE)
            (folder / "vocabulary.txt").write_text("".join(f"{piece}\n" for piece in pieces))
            rows.append(measure(folder, megabytes))
        print(json.dumps(rows[-1], indent=1), flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
