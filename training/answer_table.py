"""Writes inputs and the answers to them as a CSV, some rows at a time."""

import collections
import csv
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data import files, label_fields, tables
from data.errors import DataError

CHECKED = 16  # rows of a table that is continued
MOST_CLASS_COLUMNS = 50  # classes with a column each
PREFIX = "predicted_"  # before the name of an answer that the rows have too


class AnswerTable:
    """Writes the rows of a table with columns for the answers to each; for `with`.

    Whole rows are written at a time, so a process that is killed leaves a table. The columns of the
    answers follow those of the rows, in the order in which answers first have them; `error` is the
    last one.

    Continues a CSV that has the first of the rows and their answers. The answers to the last of
    them are added again, and compared: they may be those of another run, or by other options.

    Args:
        path: of the CSV.
        header: names of the rows' columns.
        rows: the values of each row, texts or values of JSON.
        at_once: rows that are written together.
        several: whether an answer has any number of its classes; see `values_of`.
        threshold: of several labels, see `values_of`.
        class_columns: whether each class has a column; see `values_of`.

    Attributes:
        begun: number of rows that the CSV had before.
        next: index of the row that the next answers are for.

    Raises:
        DataError: the CSV exists, and is not such a beginning or has all rows.
    """

    def __init__(
        self,
        path: Path,
        header: Sequence[str],
        rows: Sequence[Sequence[Any]],
        at_once: int,
        *,
        several: bool = False,
        threshold: float = 0.5,
        class_columns: bool = True,
    ):
        self.path, self.header, self.rows = path, list(header), rows
        self.at_once, self.several, self.threshold = at_once, several, threshold
        self.class_columns = class_columns
        self._columns: list[str] = []  # names of the answers' values
        self._values: list[dict[str, Any]] = []  # of each row so far
        if path.exists():
            self._read()
        self.begun = self._written = len(self._values)
        answered = [index for index, values in enumerate(self._values) if values]
        self.next = answered[-CHECKED:][0] if answered else 0

    def __enter__(self) -> "AnswerTable":
        return self

    def __exit__(self, *_) -> None:
        self.write()

    def add(self, answers: Sequence[dict]) -> None:
        """Adds the answers to the next row; none leave its columns empty.

        Raises:
            OSError: the file cannot be written.
            DataError: the file has other answers to the row.
        """
        values = values_of(
            answers,
            several=self.several,
            threshold=self.threshold,
            class_columns=self.class_columns,
        )
        index = self.next
        self.next += 1
        if index < self.begun:
            if not _are_equal(values, self._values[index]):
                raise DataError(
                    f"--csv: {self.path} has other answers to row {index + 1:,} than this run with "
                    "these options; remove it, or name a new one"
                )
            return
        self._values.append(values)
        if len(self._values) - self._written >= self.at_once:
            self.write()

    def write(self) -> None:
        """Writes the rows that are not in the file yet; all of them, where it lacks a column.

        Raises:
            OSError: the file cannot be written; it has whole rows.
        """
        if self._written == len(self._values):
            return
        new = [name for values in self._values[self._written :] for name in values]
        columns = sorted(dict.fromkeys([*self._columns, *new]), key=lambda name: name == "error")
        if self._written and columns == self._columns:
            _append(self.path, self._lines(self._written))
        else:
            self._columns = columns
            tables.write_csv(self.path, [self._headings(), *self._lines(0)])
        self._written = len(self._values)

    def _lines(self, first: int) -> list[list[Any]]:
        answered = zip(self.rows[first : len(self._values)], self._values[first:], strict=True)
        return [[*row, *(values.get(name) for name in self._columns)] for row, values in answered]

    def _headings(self) -> list[str]:
        """Returns the names of all columns; `predicted_` precedes one that the rows have too."""
        headings = list(self.header)
        for name in self._columns:
            while name in headings:
                name = PREFIX + name
            headings.append(name)
        return headings

    def errors(self) -> list[tuple[int, str]]:
        """Returns the index and the error of each row before the next one that has an error."""
        before = enumerate(self._values[: self.next])
        return [(index, values["error"]) for index, values in before if values.get("error")]

    def _read(self) -> None:
        """Reads the names and values of the answers in the file; a number is its text.

        Raises:
            DataError: its rows are not the first ones of the table with answers, or all of them.
        """
        known, header, count = len(self.header), _cells([self.header])[0], 0
        csv.field_size_limit(tables.LONGEST_FIELD)  # of the process
        try:
            content = self.path.read_bytes().decode() if self.path.is_file() else ""
            headings, *lines = csv.reader(io.StringIO(content, newline=""), strict=True)
            count = len(lines)
        except (ValueError, csv.Error):  # not UTF-8, no line, or not a row
            headings, lines = [], []
        is_whole = 0 < count < len(self.rows) and content.endswith("\r\n")
        if (
            not is_whole
            or headings[:known] != header
            or len(headings) == known
            or any(len(line) != len(headings) for line in lines)
            or [line[:known] for line in lines] != _cells(self.rows[:count])
        ):
            raise DataError(f"--csv: {self.path} already exists; remove it, or name a new one")
        for place in range(known, len(headings)):
            name = headings[place]
            while name.startswith(PREFIX) and name.removeprefix(PREFIX) in headings[:place]:
                name = name.removeprefix(PREFIX)
            self._columns.append(name)
        for line in lines:
            answered = zip(self._columns, line[known:], strict=True)
            self._values.append({name: cell for name, cell in answered if cell})


def values_of(
    answers: Sequence[dict],
    *,
    several: bool = False,
    threshold: float = 0.5,
    class_columns: bool = True,
) -> dict[str, Any]:
    """Returns the values of the answers to an input, by the names of their columns.

    A value has its name in the answer; that of a second answer is `name_2`, and so on. Where the
    answers name different classes, `class`, `probability` and other values are those of the first
    one, and `probability_CLASS` is that of each. Of several labels `labels` are those whose
    probability is at least the threshold, as a field of a table to train on, instead of `class`
    and `probability`.

    Args:
        answers: as a recipe's `predict()` returns them, for instance
            `[{"probability": 0.9, "class": "good"}, {"probability": 0.1, "class": "bad"}]`.
        several: whether the classes are several labels: an input has any number of them.
        threshold: the smallest probability of labels that an input has.
        class_columns: whether each class has a column. Otherwise a second class is `class_2`, and
            of several labels there are `labels` alone.
    """
    classes = [answer for answer in answers if "class" in answer]
    names = {str(answer["class"]) for answer in classes}
    by_class = classes if several or 1 < len(classes) == len(names) else []
    apart = by_class if several else by_class[1:] if class_columns else []
    shown_by_class_alone = {id(answer) for answer in apart}
    found: dict[str, Any] = {}
    if several and classes:
        likely = [
            str(answer["class"]) for answer in classes if answer.get("probability", 0) >= threshold
        ]
        found["labels"] = label_fields.as_field(sorted(likely))
    counts: collections.Counter[str] = collections.Counter()
    for answer in answers:
        if id(answer) in shown_by_class_alone:
            continue
        for name, value in answer.items():
            counts[name] += 1
            found[name if counts[name] == 1 else f"{name}_{counts[name]}"] = _plain(value)
    columns = by_class if class_columns else []
    for answer in sorted(columns, key=lambda answer: str(answer["class"])):
        for name, value in answer.items():
            if name != "class":
                found[f"{name}_{answer['class']}"] = _plain(value)
    return found


def _cells(rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Returns the texts that a CSV has of rows."""
    text = io.StringIO(newline="")
    tables.write_rows(text, rows)
    read = text.getvalue().encode("utf-8", "backslashreplace").decode()
    return list(csv.reader(io.StringIO(read, newline="")))


def _are_equal(values: dict[str, Any], cells: dict[str, str]) -> bool:
    """Tells whether the values of a row are those of its cells, numbers to 1e-3 or 1e-6."""
    (texts,) = _cells([[*values.values(), ""]])  # a row without a cell would be no line
    ours = {name: text for name, text in zip(values, texts, strict=False) if text}
    if ours.keys() != cells.keys():
        return False
    for name, text in ours.items():
        try:
            is_equal = math.isclose(float(text), float(cells[name]), rel_tol=1e-3, abs_tol=1e-6)
        except ValueError:  # not numbers
            is_equal = False
        if not is_equal and text != cells[name]:
            return False
    return True


def _plain(value):
    """Returns a number of NumPy, or a tensor of one, as a number of Python."""
    if value is None or isinstance(value, str | bool | int | float | list | dict):
        return value
    return files.json_value(value)


def _append(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    """Appends whole rows to a CSV, or none of them."""
    text = io.StringIO(newline="")
    tables.write_rows(text, rows)
    size = path.stat().st_size
    try:
        with open(path, "ab") as stream:  # in one call of the system: a kill leaves no half a row
            stream.write(text.getvalue().encode("utf-8", "backslashreplace"))
    except OSError:
        os.truncate(path, size)
        raise


def problems_of_csv(path: Path | None, name: str, *, may_exist: bool = False) -> list[str]:
    """Returns a line if an option does not name a new CSV in a folder that can be written.

    Args:
        path: the value of the option.
        name: of the option.
        may_exist: whether the CSV need not be new.
    """
    if path is None:
        return []
    if path.suffix.lower() != ".csv":
        return [f"{name} {path}: must end in .csv"]
    if path.exists() and not may_exist:
        return [f"{name}: {path} already exists; remove it, or name a new one"]
    if not path.parent.is_dir():
        return [f"{name} {path}: its folder does not exist"]
    if not os.access(path.parent, os.W_OK):
        return [f"{name} {path}: its folder cannot be written"]
    if path.exists() and not os.access(path, os.W_OK):
        return [f"{name} {path}: cannot be written"]
    return []
