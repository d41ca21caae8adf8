"""Reads the inputs of `recipes.predict` from a file: one per line, or fields of a table."""

import codecs
import contextlib
import json
import sys
from pathlib import Path

from data import files, tables
from data.errors import DataError, InputError, listed, require_some


def read_inputs(path: Path) -> tuple[str, ...]:
    """Returns the lines of a file, or of standard input for "-", without empty ones at its end.

    Raises:
        DataError: it cannot be read, is not UTF-8, has no line with an input, or is a table.
    """
    _require_lines(path)
    if str(path) == "-":
        content = sys.stdin.buffer.read()
    else:
        with files.open_bytes(files.expand(path)) as stream:
            content = stream.read()
    try:
        lines = content.decode("utf-8-sig").rstrip().split("\n")
    except UnicodeDecodeError as error:
        hint = files.how_to_convert(content)
        raise DataError(f"--file {path}: not UTF-8 at byte {error.start}; {hint}") from error
    inputs = tuple(line.strip() for line in lines)
    if not any(inputs):
        raise DataError(f"--file {path}: no line with an input")
    return inputs


def read_columns(
    path: Path, column: str, second: str | None = None, *, takes_chats: bool = False
) -> tuple[str | tuple[str, ...] | InputError, ...]:
    """Returns the fields of a table's column, or pairs of those of two columns.

    One empty sentence of a pair is an error of its row, in its place.

    Args:
        path: as in `tables.read_table`.
        column: the column of the inputs.
        second: the column of the second sentences, or None.
        takes_chats: whether a field may be the turns of a chat, which becomes their JSON.

    Raises:
        DataError: it cannot be read, lacks the column, or has no row with an input.
    """
    wanted = [(column,)] if second is None else [(column,), (second,)]
    inputs: list[str | tuple[str, ...] | InputError] = []
    # An empty field keeps its place.
    rows = tables.read_table(
        files.expand(path), *wanted, keeps_empty_rows=True, takes_chats=takes_chats
    )
    for where, fields in rows:
        if all(fields):
            inputs.append(fields[0] if second is None else tuple(fields))
        elif any(fields):
            about = f"{where}: one sentence of the pair is empty"
            inputs.append(InputError(about, len(inputs)))
        else:
            inputs.append("")
    require_some(inputs, f"--file {path}: no row with an input")
    return tuple(inputs)


def _is_a_list_a_line(path: Path) -> bool:
    """Tells whether the first of a file of JSON lines is a list, and may be the only line."""
    if not path.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        return False
    with files.open_bytes(files.expand(path)) as stream:
        beginning = next((line for line in stream if line.strip()), b"")
    try:
        value = json.loads(beginning.removeprefix(codecs.BOM_UTF8))
    except ValueError:  # the list continues in the next line
        return False
    # Of turns; a list of rows is a table.
    return isinstance(value, list) and all(
        isinstance(each, dict) and "role" in each for each in value
    )


def _require_lines(path: Path) -> None:
    """Refuses a table, or JSON of objects, whose lines are not inputs.

    JSON that is a list a line, for instance a chat's messages, has such lines.

    Raises:
        DataError: it is one, or a JSON list of texts.
    """
    fields: list[str] = []
    first: object = None
    if tables.is_table(path.name) or tables.is_parquet(path.name):
        fields = tables.header_of(files.expand(path))
    elif tables.has_objects(path.name):
        with contextlib.suppress(DataError):
            _, first = next(tables.read_objects(files.expand(path), ()), ("", None))
        if isinstance(first, dict) and not _is_a_list_a_line(path):
            fields = list(first)
    if isinstance(first, str) and not _is_a_list_a_line(path):
        raise DataError(
            f"--file {path}: JSON of texts; write one text per line, without quotes, into a file "
            "with another ending"
        )
    if fields:
        raise DataError(
            f"--file {path}: a table; name the column of the inputs with --text-column (it has "
            f"{listed(fields)}); where each line is an input, give the file another ending"
        )
