"""Reads fields of tables that hold several labels of one example."""

import json
import re
from collections.abc import Sequence

from data.errors import DataError

SEPARATORS = re.compile("[,|]")
FLAGS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


def names_of(where: str, field: str) -> list[str]:
    """Returns the different names in a field: a JSON list, or names separated by "," or "|".

    Args:
        where: Of the row, for an error.
        field: A JSON list if it begins with "["; empty for no label.

    Raises:
        DataError: It is not a list of texts or integers, or a name is empty.
    """
    names = SEPARATORS.split(field) if field else []
    if field.startswith("["):
        try:
            names = json.loads(field)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: the labels {field[:60]!r} are not a list of JSON; names may also be "
                "separated by , or |, without brackets"
            ) from error
        if not all(isinstance(name, str | int) and not isinstance(name, bool) for name in names):
            raise DataError(f"{where}: the labels {field[:60]!r} are not texts or integers")
    names = [str(name).strip() for name in names]
    if not all(names) or any(name != name.encode(errors="ignore").decode() for name in names):
        raise DataError(f"{where}: one of the labels {field[:60]!r} is empty, or not UTF-8 text")
    return sorted(set(names))


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
