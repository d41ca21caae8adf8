"""Writes inputs and the answers to them as a CSV, some rows at a time."""

import collections
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data import files, tables


class AnswerTable:
    """Writes the rows of a table with columns for the answers to each; for `with`.

    Whole rows are written at a time, so a process that is killed leaves a table. The columns of the
    answers follow those of the rows, in the order in which answers first have them; `error` is the
    last one.

    Args:
        path: of the CSV; one that exists is replaced.
        header: names of the rows' columns.
        rows: the values of each row, texts or values of JSON.
        at_once: rows that are written together.
    """

    def __init__(
        self, path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]], at_once: int
    ):
        self.path, self.header, self.rows = path, list(header), rows
        self.at_once = at_once
        self._columns: list[str] = []  # names of the answers' values
        self._values: list[dict[str, Any]] = []  # of each row so far
        self._written = 0  # rows

    def __enter__(self) -> "AnswerTable":
        return self

    def __exit__(self, *_) -> None:
        self.write()

    def add(self, answers: Sequence[dict]) -> None:
        """Adds the answers to the next row; none leave its columns empty.

        Raises:
            OSError: the file cannot be written.
        """
        self._values.append(values_of(answers))
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
                name = f"predicted_{name}"
            headings.append(name)
        return headings


def values_of(answers: Sequence[dict]) -> dict[str, Any]:
    """Returns the values of the answers to an input, by the names of their columns.

    A value has its name in the answer; that of a second answer is `name_2`, and so on. Where the
    answers name different classes, `class`, `probability` and other values are those of the first
    one, and `probability_CLASS` is that of each.

    Args:
        answers: as a recipe's `predict()` returns them, for instance
            `[{"probability": 0.9, "class": "good"}, {"probability": 0.1, "class": "bad"}]`.
    """
    classes = [answer for answer in answers if "class" in answer]
    names = {str(answer["class"]) for answer in classes}
    by_class = classes if 1 < len(classes) == len(names) else []
    found: dict[str, Any] = {}
    counts: collections.Counter[str] = collections.Counter()
    for answer in answers:
        if answer in by_class[1:]:
            continue
        for name, value in answer.items():
            counts[name] += 1
            found[name if counts[name] == 1 else f"{name}_{counts[name]}"] = _plain(value)
    for answer in sorted(by_class, key=lambda answer: str(answer["class"])):
        for name, value in answer.items():
            if name != "class":
                found[f"{name}_{answer['class']}"] = _plain(value)
    return found


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


def problems_of_csv(path: Path | None, name: str) -> list[str]:
    """Returns a line if an option does not name a new CSV in a folder that exists."""
    if path is None:
        return []
    if path.suffix.lower() != ".csv":
        return [f"{name} {path}: must end in .csv"]
    if path.exists():
        return [f"{name}: {path} already exists; remove it, or name a new one"]
    if not path.parent.is_dir():
        return [f"{name} {path}: its folder does not exist"]
    return []
