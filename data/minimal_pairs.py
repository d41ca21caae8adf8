"""Scores minimal pairs, such as BLiMP's: an acceptable sentence and a similar unacceptable one.

Warstadt et al., arXiv 1912.00582. The accuracy is the share of pairs whose good sentence is more
likely. A tie counts as wrong, so chance is at most 50 %.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data import files
from data.baselines import standard_error
from data.errors import DataError


@dataclasses.dataclass(frozen=True)
class PairSet:
    """The minimal pairs of one file."""

    name: str  # the file's, without .jsonl
    pairs: list[tuple[str, str]]  # (good, bad) sentences
    field: str = ""  # BLiMP's `field`: "syntax" ...; empty if the file has none
    phenomenon: str = ""  # BLiMP's `linguistics_term`: "island_effects" ...


def read_pairs(folder: Path) -> list[PairSet]:
    """Reads the `*.jsonl` files of a folder, in the order of their names.

    Raises:
        DataError: there are none, or a line has another format.
    """
    sets = []
    for path in sorted(files.expand(folder).glob("*.jsonl")):
        groups: dict[tuple[str, ...], list] = {}  # a file may have several sets
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                pair = row["sentence_good"], row["sentence_bad"]
                if not all(isinstance(text, str) and text.strip() for text in pair):
                    raise ValueError
                "".join(pair).encode()  # half of a surrogate pair is not text
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number}: expected JSON with sentence_good and sentence_bad, "
                    "texts that are not empty"
                ) from error
            named = (str(row.get(key, "")) for key in ("UID", "field", "linguistics_term"))
            groups.setdefault(tuple(named), []).append(pair)
        for (name, field, phenomenon), pairs in groups.items():
            several = len(groups) > 1 and name
            sets.append(PairSet(name if several else path.stem, pairs, field, phenomenon))
    if not sets:
        raise DataError(f"--on {folder}: no pairs in *.jsonl files there")
    return sets


def sentences(sets: Sequence[PairSet]) -> list[str]:
    """Returns all sentences: the good one of each pair, then the bad one."""
    return [sentence for pair_set in sets for pair in pair_set.pairs for sentence in pair]


def score(sets: Sequence[PairSet], likelihoods: Mapping[str, Sequence[float]]) -> list[dict]:
    """Counts the pairs whose good sentence is more likely.

    Args:
        sets: The pairs.
        likelihoods: By model, the log-likelihoods of `sentences(sets)`.

    Returns:
        A row per phenomenon, followed by its sets, and one for all pairs: `part`
        ("phenomenon", "set" or "all"), `name`, `field`, `pairs` (their number), and for each model
        `accuracy` and `standard_error`, both in [0, 1]. Sets without a phenomenon come last.
    """
    ends = np.cumsum([len(pair_set.pairs) for pair_set in sets])[:-1]
    right = {}
    for model, values in likelihoods.items():
        good, bad = np.reshape(values, (-1, 2)).T
        right[model] = np.split(good > bad, ends)

    def row(part: str, name: str, chosen: Sequence[int]) -> dict:
        numbers: dict = {"part": part, "name": name, "field": sets[chosen[0]].field}
        numbers["pairs"] = sum(len(sets[i].pairs) for i in chosen)
        for model, parts in right.items():
            share = float(np.mean(np.concatenate([parts[i] for i in chosen])))
            error = standard_error(share, numbers["pairs"])
            numbers[model] = {"accuracy": share, "standard_error": error}
        return numbers

    rows = []
    for phenomenon in sorted(
        {pair_set.phenomenon for pair_set in sets}, key=lambda name: (not name, name)
    ):
        chosen = [i for i, pair_set in enumerate(sets) if pair_set.phenomenon == phenomenon]
        if phenomenon:
            rows.append(row("phenomenon", phenomenon, chosen))
        rows += [row("set", sets[i].name, [i]) for i in chosen]
    return [*rows, row("all", "all pairs", range(len(sets))) | {"field": ""}]


def format_table(rows: Sequence[dict], models: Sequence[str]) -> str:
    """Returns one line per row of `score()`: accuracies ± standard errors, in percent.

    Args:
        rows: The rows of `score()`.
        models: The columns, each a key of the rows.
    """
    lines = [["", "pairs", *models]]
    for row in rows:
        name = f"  {row['name']}" if row["part"] == "set" else row["name"]
        if row["part"] == "phenomenon" and row["field"]:
            name += f" ({row['field']})"
        percent = [
            f"{100 * row[model]['accuracy']:.1f} ± {100 * row[model]['standard_error']:.1f}"
            for model in models
        ]
        lines.append([name, f"{row['pairs']:,}", *percent])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [
                f"{line[0]:<{widths[0]}}",
                *(f"{c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True)),
            ]
        )
        for line in lines
    )
