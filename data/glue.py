"""The files of the GLUE benchmark (Wang et al., arXiv 1804.07461) as its archive has them.

Each task names its columns differently, CoLA has no header, and the public test files have no
labels.
"""

import dataclasses
from pathlib import Path

from data import tables
from data.errors import DataError


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names that the columns of a table may have.

    Attributes:
        text: of the sentence, or of the first of two.
        second: of the second sentence; empty where there is one.
        label: of the class.
        header: the columns of a file without a header line.
        metrics: what the benchmark reports beside accuracy and macro F1: "f1" (of the class that
            comes last) or "matthews".
        skips_broken_rows: whether rows of another length, or with an empty field, are left out.
    """

    text: tuple[str, ...] = ("sentence", "text")
    second: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label",)
    header: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ()
    skips_broken_rows: bool = False


COLA_HEADER = ("source", "label", "star", "sentence")

# In this order: the first whose columns are all in the header.
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

# By split, the names that GLUE gives its files.
FILES = {
    "train": ("train.tsv",),
    "valid": ("dev.tsv", "dev_matched.tsv"),
    "test": ("test.tsv", "test_matched.tsv"),
}


def file_of(folder: Path, split: str) -> Path:
    """Returns the file of a split; where there is none, the one that is expected."""
    paths = [folder / name for name in FILES[split]]
    return next((path for path in paths if path.exists()), paths[0])


def columns_of(path: Path) -> Columns:
    """Recognises a labelled file by its first line.

    Args:
        path: a TSV or CSV file.

    Returns:
        The task's columns; those of a single sentence where none is recognised.

    Raises:
        DataError: it is STS-B, whose labels are no classes.
    """
    header = tables.header_of(path)
    if {"sentence1", "sentence2", "score"} <= set(header):
        raise DataError(f"{path}: STS-B has scores, not classes; this recipe takes classes alone")
    for columns in TASKS.values():
        groups = (columns.text, columns.second, columns.label)
        if all(set(names) & set(header) for names in groups if names):
            return columns
    if len(header) == len(COLA_HEADER) and header[1] in ("0", "1") and header[2] in ("", "*"):
        return Columns(header=COLA_HEADER, metrics=("matthews",))
    return Columns()


def has_labels(path: Path, columns: Columns) -> bool:
    """Tells whether a file has the column of the labels, as GLUE's test files have not."""
    header = tables.header_of(path)
    if columns.header is not None and set(header) & set(columns.text):
        return False  # CoLA's test file has a header, the others have none
    return columns.header is not None or bool(set(header) & set(columns.label))
