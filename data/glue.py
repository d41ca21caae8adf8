"""Describes the files of the GLUE benchmark (Wang et al., arXiv 1804.07461) as in its archive.

Each task names its columns differently, CoLA has no header, and the public test files have no
labels.
"""

import dataclasses
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from data import tables
from data.errors import DataError
from data.splits import EXAMPLE, SHARD, as_one_file

PAIR = " ||| "  # between the two sentences of a pair in an input of `recipes.predict`


@dataclasses.dataclass(frozen=True)
class Columns:
    """Possible column names of a table.

    Attributes:
        text: of the sentence, or of the first one of a pair.
        second: of the second sentence; empty for single sentences.
        label: of the class or the score.
        header: the columns of a file without a header line.
        metrics: metrics of the benchmark besides accuracy and macro F1: "f1" (of the last class) or
            "matthews".
        skips_broken_rows: whether to leave out rows of another length or with an empty field.
        scores: whether the labels are scores, not classes.
    """

    text: tuple[str, ...] = ("sentence", "text")
    second: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label",)
    header: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ()
    skips_broken_rows: bool = False
    scores: bool = False


COLA_HEADER = ("source", "label", "star", "sentence")

STS_B = Columns(("sentence1",), ("sentence2",), ("score",), scores=True)

# Tried in this order: the first task whose columns are all in the header.
TASKS = {
    "MRPC": Columns(("#1 String",), ("#2 String",), ("Quality",), metrics=("f1",)),
    # A few of its rows are cut short.
    "QQP": Columns(
        ("question1",),
        ("question2",),
        ("is_duplicate",),
        metrics=("f1",),
        skips_broken_rows=True,
    ),
    "MNLI": Columns(("sentence1",), ("sentence2",), ("gold_label",)),
    "QNLI": Columns(("question",), ("sentence",)),
    "RTE": Columns(("sentence1",), ("sentence2",)),
    "SST-2": Columns(("sentence", "text")),
}
# Usual names of pairs besides those of GLUE, tried before a single sentence.
PAIRS = (Columns(second=("sentence2",)), Columns(text=("text",), second=("text_pair",)))

# GLUE's names of the splits' files and usual other ones, without their endings.
FILES = {
    "train": ("train",),
    "valid": ("dev", "dev_matched", "valid", "validation", "val"),
    "test": ("test", "test_matched"),
}


def files_of(folder: Path, split: str) -> list[Path]:
    """Returns the file of a split, a TSV, CSV, JSON or Parquet, or its shards in their order.

    Raises:
        DataError: there are several, or a shard is missing.
    """
    names, endings = "|".join(FILES[split]), "|".join(map(re.escape, tables.ENDINGS))
    pattern = re.compile(f"({names})({SHARD})?({endings})")
    found = [path for path in sorted(folder.iterdir()) if pattern.fullmatch(path.name)]
    whole = as_one_file(found, str(folder)) if found else []
    if whole is None:
        raise DataError(
            f"{folder}: several {split} files, {', '.join(path.name for path in found[:5])}; "
            f"expected one, or its shards, called for instance {EXAMPLE}"
        )
    return whole


def columns_of(path: Path, label: str | None = None) -> Columns:
    """Recognises a labelled file by its first line.

    Args:
        path: a TSV, CSV, JSON or Parquet file.
        label: name of the labels' column; None for the one of the task.

    Returns:
        The task's columns; those of a single sentence if no task is recognised.
    """
    header = tables.header_of(path)
    asked = label == "score" or (label is None and "label" not in header)
    if asked and {"sentence1", "sentence2", "score"} <= set(header):
        return STS_B
    *pairs, single = TASKS.values()
    for columns in (*pairs, *PAIRS, single):
        if label is not None:
            columns = dataclasses.replace(columns, label=(label,))
        groups = (columns.text, columns.second, columns.label)
        if all(set(names) & set(header) for names in groups if names):
            return columns
    is_cola = label in (None, COLA_HEADER[1]) and len(header) == len(COLA_HEADER)
    if is_cola and header[1] in ("0", "1") and header[2] in ("", "*"):
        return Columns(header=COLA_HEADER, metrics=("matthews",))
    return Columns(label=(label,)) if label is not None else Columns()


def has_labels(paths: Sequence[Path], columns: Columns, known: Collection[str] = ()) -> bool:
    """Tells whether a split has labels.

    GLUE's test files have no such column, those of Hugging Face's copies have -1 in each row, or
    -1.0.

    Args:
        paths: of the test split, a file or its shards.
        columns: the names of its columns.
        known: the labels of the training split; -1 may be one of them.
    """
    header = tables.header_of(paths[0])
    if columns.header is not None and set(header) & set(columns.text):
        return False  # CoLA's test file has a header, the others have none
    if columns.header is None and not set(header) & set(columns.label):
        return False
    if "-1" in known:
        return True
    labels = (
        label
        for path in paths
        for _, (label,) in tables.read_table(
            path, columns.label, header=columns.header, empties_broken_rows=True
        )
    )
    first = next(labels, None)  # None where the file has no rows, which its reader reports
    unlabelled = ("-1", "-1.0")
    return first not in unlabelled or any(label not in unlabelled for label in labels)
