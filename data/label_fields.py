"""Reads fields of tables that hold several labels of one example."""

import ast
import json
import re
from collections.abc import Collection, Sequence

from data.errors import DataError

SEPARATORS = re.compile("[,|]")
BESIDE = re.compile(r"""['"]\s+['"]""")  # texts of NumPy's lists, which Python would join
LIST = re.compile(r"""\[\s*["'0-9\]]""")  # how one begins; [SPAM] is a name
FLAGS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}

AS_NAMES = (
    "write the names of the labels that are 1, or a column of 0 and 1 for each label "
    "(--label-column A B)"
)


def names_of(where: str, field: str) -> list[str]:
    """Returns the names in a field in its order: a list, or names separated by "," or "|".

    Args:
        where: Of the row, for an error.
        field: A list of JSON, or of Python as pandas writes it to a CSV, if it begins with "[";
            empty for no label.

    Raises:
        DataError: It is not a list of texts or integers, or a name is empty.
    """
    names = SEPARATORS.split(field) if field else []
    if field.startswith("["):
        try:
            names = _list_of(field)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise DataError(
                f"{where}: the labels {field[:60]!r} are not a list of JSON or Python; names may "
                "also be separated by , or |, without brackets"
            ) from error
        if not all(isinstance(name, str | int) and not isinstance(name, bool) for name in names):
            hint = f"; {AS_NAMES}" if all(str(name).casefold() in FLAGS for name in names) else ""
            raise DataError(f"{where}: the labels {field[:60]!r} are not texts or integers{hint}")
    names = [str(name).strip() for name in names]
    if not all(names) or any(name != name.encode(errors="ignore").decode() for name in names):
        raise DataError(f"{where}: one of the labels {field[:60]!r} is empty, or not UTF-8 text")
    return names


def _list_of(field: str) -> list:
    try:
        return json.loads(field)
    except ValueError:
        if BESIDE.search(field):
            raise
        return list(ast.literal_eval(field))


def are_like_lists(fields: Collection[str]) -> bool:
    """Returns whether different fields seem to have several names each.

    Args:
        fields: All are lists, or they are combinations of fewer names; empty for no label.
    """
    if all(LIST.match(field) for field in fields if field):
        return any(fields)
    names = {name.strip() for field in fields if field for name in SEPARATORS.split(field)}
    return len(names) < len(fields) and any(map(SEPARATORS.search, fields))


def length_of_flags(lists: Collection[Sequence[str]]) -> int | None:
    """Returns the length of lists with 0 or 1 for each label, or None of lists of names.

    Args:
        lists: Of names. They are flags if all have one length, and a list repeats 0 or 1.
    """
    lengths = set(map(len, lists))
    are_flags = len(lengths) == 1 and all(name in ("0", "1") for names in lists for name in names)
    repeats = any(len(set(names)) < len(names) for names in lists)
    return lengths.pop() if are_flags and repeats else None


def flagged(where: str, columns: Sequence[str], fields: Sequence[str]) -> list[str]:
    """Returns the names of the columns, one for each label, whose field is 1.

    Args:
        where: Of the row, for an error.
        columns: Their names.
        fields: Theirs, 0 or 1.

    Raises:
        DataError: A field is something else.
    """
    for column, field in zip(columns, fields, strict=True):
        if field.casefold() not in FLAGS:
            raise DataError(f"{where}: {column} is {field[:100]!r}, expected 0 or 1")
    pairs = zip(columns, fields, strict=True)
    return [column for column, field in pairs if FLAGS[field.casefold()]]


def as_field(names: Sequence[str]) -> str:
    """Returns the field that `names_of` reads as these names."""
    if any(SEPARATORS.search(name) or name.startswith("[") for name in names):
        return json.dumps(names, ensure_ascii=False)
    return "|".join(names)
