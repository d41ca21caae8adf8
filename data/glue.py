"""Describes the files of the GLUE benchmark (Wang et al., arXiv 1804.07461) as in its archive.

Each task names its columns differently, CoLA has no header, and the public test files have no
labels.
"""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from data import tables

PAIR = " ||| "  # between the two sentences of a pair in an input of `recipes.predict`


@dataclasses.dataclass(frozen=True)
class Columns:
    """Possible column names of a table.

    Attributes:
        text: of the sentence, or of the first one of a pair.
        second: of the second sentence; empty for single sentences.
        label: of the class, the score or the list of labels.
        flags: columns of 0 and 1 instead of `label`, one for each of several labels.
        header: the columns of a file without a header line.
        metrics: metrics of the benchmark besides accuracy and macro F1: "f1" (of the last class) or
            "matthews".
        skips_broken_rows: whether to leave out rows of another length or with an empty field.
        scores: whether the labels are scores, not classes.
    """

    text: tuple[str, ...] = ("sentence", "text")
    second: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label",)
    flags: tuple[str, ...] = ()
    header: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ()
    skips_broken_rows: bool = False
    scores: bool = False

    @property
    def labels(self) -> list[tuple[str, ...]]:
        """Returns the possible names of each column of labels."""
        return [(name,) for name in self.flags] or [self.label]


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
PAIRS = (
    Columns(second=("sentence2",)),
    Columns(text=("text",), second=("text_pair",)),
    # Of MNLI and QQP at Hugging Face.
    Columns(("premise",), ("hypothesis",)),
    Columns(("question1",), ("question2",), metrics=("f1",)),
)
# Of the text and of the label, in any of them.
TEXTS = {name for columns in (*TASKS.values(), *PAIRS) for name in columns.text}
LABELS = {name for columns in (*TASKS.values(), STS_B) for name in columns.label} | {"labels"}


def is_labelled(path: Path, text: str | None = None, label: str | None = None) -> bool:
    """Tells whether a table has a column of texts and one of labels.

    Args:
        path: a TSV, CSV, JSON or Parquet file; False where it cannot be read.
        text: name of the texts' column; None for any usual one.
        label: name of the labels' column; None for any usual one.
    """
    texts, labels = {text} if text else TEXTS, {label} if label else LABELS
    return tables.has_field(path, *texts) and tables.has_field(path, *labels)


def columns_of(path: Path, label: str | None = None) -> Columns:
    """Recognises a labelled file by its first line.

    Args:
        path: a TSV, CSV, JSON or Parquet file.
        label: name of the labels' column; None for the one of the task, or `labels`.

    Returns:
        The task's columns; those of a single sentence if no task is recognised.
    """
    header = tables.header_of(path)
    if label is None and LABELS & set(header) == {"labels"}:  # a usual name of lists
        label = "labels"
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
    -1.0; others have empty fields or lists.

    Args:
        paths: of the test split, a file or its shards.
        columns: the names of its columns.
        known: the labels of the training split; -1 may be one of them.
    """
    header = tables.header_of(paths[0])
    if columns.header is not None and set(header) & set(columns.text):
        return False  # CoLA's test file has a header, the others have none
    if columns.header is None and not set(header) & {*columns.label, *columns.flags}:
        return False
    unlabelled = {"", "[]"} if "-1" in known else {"", "[]", "-1", "-1.0"}
    labels = (
        label
        for path in paths
        for _, fields in tables.read_table(
            path,
            *columns.labels,
            header=columns.header,
            empties_broken_rows=columns.skips_broken_rows,
            list_columns=columns.label,
        )
        for label in fields
    )
    first = next(labels, None)  # None where the file has no rows, which its reader reports
    return first not in unlabelled or any(label not in unlabelled for label in labels)
