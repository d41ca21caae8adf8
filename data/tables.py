"""Reads CSV and TSV tables row by row; each error message names the line."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from data import files
from data.errors import DataError


def read_table(
    path: Path,
    *columns: Sequence[str],
    header: Sequence[str] | None = None,
    skips_broken_rows: bool = False,
) -> Iterator[tuple[str, list[str]]]:
    """Yields the wanted columns of each row that is not empty.

    Args:
        path: UTF-8 with a header; a tab in the first line makes it a TSV. A CSV has quoting,
            a TSV has none. `.gz` is unpacked.
        *columns: The possible names of each wanted column; "" among them makes it optional: a
            missing column has the values "". Other columns are ignored.
        header: The names of the columns, if the file has no header line.
        skips_broken_rows: Whether to skip rows of another length than the header.

    Yields:
        The position of the row ("path, line 7") and its stripped values.

    Raises:
        DataError: The file cannot be read, is not UTF-8, has a row of another length than its
            header, or lacks or repeats a wanted column.
    """
    reader = _reader(_text(path))
    try:
        names = [name.strip() for name in header or next(reader, [])]
        places = [_place(path, names, wanted) for wanted in columns]
        line = reader.line_num
        for row in reader:
            where, line = f"{path}, line {line + 1}", reader.line_num
            if not any(map(str.strip, row)):
                continue
            if len(row) != len(names):
                if skips_broken_rows:
                    continue
                raise DataError(
                    f"{where}: {len(row)} fields, expected {len(names)} as in the header"
                )
            yield where, ["" if place is None else row[place].strip() for place in places]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not a row ({error})") from error


def header_of(path: Path) -> list[str]:
    """Returns the stripped fields of a table's first line.

    Raises:
        DataError: The file cannot be read, is not UTF-8, or the line is not a row.
    """
    with files.open_bytes(path) as stream:
        line = _decoded(path, stream.readline())
    try:
        return [name.strip() for name in next(_reader(line), [])]
    except csv.Error as error:
        raise DataError(f"{path}, line 1: not a row ({error})") from error


def _text(path: Path) -> str:
    with files.open_bytes(path) as stream:
        return _decoded(path, stream.read())


def _decoded(path: Path, raw: bytes) -> str:
    try:
        # Spreadsheets write a byte order mark; with plain utf-8 it would be part of the first name.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}") from error


def _reader(text: str):
    lines = io.StringIO(text, newline="")
    if "\t" in text.partition("\n")[0]:
        return csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    # `strict`: an unclosed quote is an error, not one long value
    return csv.reader(lines, strict=True)


def _place(path: Path, header: list[str], names: Sequence[str]) -> int | None:
    indices = [index for index, name in enumerate(header) if name in names]
    if not indices and "" in names:
        return None
    if len(indices) == 1:
        return indices[0]
    counted = f"{len(indices)} columns" if indices else "no column"
    raise DataError(
        f"{path}, line 1: {counted} {' or '.join(names)}, expected one; found "
        f"{', '.join(header)[:100]!a}"
    )
