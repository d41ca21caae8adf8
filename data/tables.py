"""Tables in CSV and TSV files, row by row; each message names the line."""

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
        path: UTF-8 with a header; a tab in the first line makes it a TSV, which has no quoting, as
            a CSV has. `.gz` is unpacked.
        *columns: Of each wanted column the names that it may have; "" among them allows it to be
            missing, and its values are "" then. Other columns are ignored.
        header: The names of the columns where the file's first line is a row already.
        skips_broken_rows: Whether a row of another length than the header is left out.

    Yields:
        Where the row begins ("path, line 7"), and its values without white space at their ends.

    Raises:
        DataError: The file cannot be read, is not UTF-8, has a row of another length than its
            header, or not each wanted column once.
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
    """Returns the fields of a table's first line, without white space at their ends.

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
    # `strict`: a quote that is never closed is an error, not one long value
    return csv.reader(lines, strict=True)


def _place(path: Path, header: list[str], names: Sequence[str]) -> int | None:
    found = [index for index, name in enumerate(header) if name in names]
    if not found and "" in names:
        return None
    if len(found) == 1:
        return found[0]
    counted = f"{len(found)} columns" if found else "no column"
    raise DataError(
        f"{path}, line 1: {counted} {' or '.join(names)}, expected one; found "
        f"{', '.join(header)[:100]!a}"
    )
