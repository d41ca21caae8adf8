"""Reads CSV and TSV tables, JSON and Parquet; errors name the row. Writes CSV."""

import codecs
import contextlib
import csv
import decimal
import io
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data import files
from data.errors import DataError, listed

TSV = (".tsv", ".tsv.gz")
TABLES = (*TSV, ".csv", ".csv.gz")
JSON = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
PARQUET = (".parquet",)
ENDINGS = (*TABLES, *JSON, *PARQUET)
BLOCK = 2**20  # bytes
PARQUET_ROWS = 1024  # that are in memory at a time, besides the columns' pages
OPEN = (b"{", b"[", b",", b":")  # ends of the first line of JSON of several lines
ALONE = "expected one object per line, or one list of them: pass the list alone"
LONGEST_FIELD = 2**31 - 1  # bytes; Python's limit is 131,072


def is_table(name: str) -> bool:
    """Returns whether a file's name, in any case, is that of a CSV or a TSV."""
    return name.lower().endswith(TABLES)


def has_objects(name: str) -> bool:
    """Returns whether a file's name, in any case, is that of JSON or Parquet."""
    return name.lower().endswith((*JSON, *PARQUET))


def is_parquet(name: str) -> bool:
    """Returns whether a file's name, in any case, is that of Parquet."""
    return name.lower().endswith(PARQUET)


def read_objects(path: str | Path, columns: Collection[str]) -> Iterator[tuple[str, object]]:
    """Yields the values of JSON lines, of one JSON list, or of Parquet, and the position of each.

    Args:
        path: By its name Parquet, whose rows are dicts; otherwise JSON, in UTF-8, of which `.gz` is
            unpacked. JSON is read line by line, unless it begins with "[".
        columns: Names of the columns to read of Parquet, as far as they exist: others may have
            values that Python lacks. The objects of JSON are whole. A column of objects that have
            one of these fields is read, too.

    Raises:
        DataError: The file cannot be read, is not JSON or Parquet, repeats one of the columns, or
            has a value that Python lacks in one.
    """
    path = files.expand(path)
    if is_parquet(path.name):
        yield from _read_parquet(path, columns)
        return
    with files.open_bytes(path) as stream:
        beginning = next((line for line in stream if line.strip()), b"")
        stream.seek(0)
        if beginning.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            try:
                values = json.load(stream)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: not JSON ({_reason(error, beginning)})") from error
            yield from ((f"{path}, value {n}", value) for n, value in enumerate(values, start=1))
            return
        first = b""
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            first = first or line
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                about = f"not JSON, one object per line ({_reason(error, beginning)})"
                if line is first and line.strip()[-1:] in OPEN:
                    about = f"an object of several lines; {ALONE}"
                raise DataError(f"{path}, line {number}: {about}") from error
            rows = _list_in(value, columns) if first is line else None
            if rows is not None:
                place = stream.tell()
                if not any(map(bytes.strip, stream)):
                    raise DataError(f"{path}: one object, of which {rows!a} is a list; {ALONE}")
                stream.seek(place)
            yield f"{path}, line {number}", value


def _reason(error: Exception, beginning: bytes) -> str:
    """Returns why JSON cannot be read: of what is not text what it is."""
    is_text = not isinstance(error, UnicodeDecodeError)
    return str(error) if is_text else files.how_to_convert(beginning)


def _list_in(value, columns: Collection[str]) -> str | None:
    """Returns the name of a list of objects in an object that has none of the columns, or None."""
    if not isinstance(value, dict) or not columns or not value.keys().isdisjoint(columns):
        return None
    return next(
        (
            name
            for name, rows in value.items()
            if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
        ),
        None,
    )


def quoted(fields: Iterable[str]) -> int:
    """Counts the fields of a TSV that have the quotes of a CSV.

    Returns:
        0 if a field has quotes that a CSV would not have.
    """
    found = [field for field in fields if '"' in field]
    like_a_csv = all(re.fullmatch(r'"(?:[^"]|"")*"', field) for field in found)
    return sum('""' in field[1:-1] for field in found) if like_a_csv else 0


def unnested(row: dict, names: Collection[str]) -> dict:
    """Returns a row with the fields of an object in it, if that has one of these names.

    Args:
        row: For instance {"translation": {"en": "yes", "de": "ja"}}.
        names: Of fields that the row itself lacks.
    """
    for name, value in row.items():
        if isinstance(value, dict) and not value.keys().isdisjoint(names):
            return value | {other: row[other] for other in row if other != name}
    return row


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Opens Parquet as a `ParquetFile`, for `with`; turns what is wrong into a `DataError`."""
    import pyarrow
    from pyarrow import parquet

    with files.open_bytes(path) as stream:
        try:
            yield parquet.ParquetFile(stream)
        except (pyarrow.ArrowException, OSError) as error:
            about = " ".join(str(error).split())  # of several lines
            raise DataError(f"{path}: not Parquet, or damaged ({about})") from error


def _read_parquet(path: Path, columns: Collection[str]) -> Iterator[tuple[str, object]]:
    import pyarrow

    header = header_of(path)
    _places(str(path), header, [(name, "") for name in columns], "", any_case=False)
    number = 0
    with _parquet(path) as file:
        objects = [
            field.name
            for field in file.schema_arrow
            if pyarrow.types.is_struct(field.type)
            and not {inside.name for inside in field.type}.isdisjoint(columns)
        ]
        for rows in file.iter_batches(PARQUET_ROWS, columns=[*dict.fromkeys([*columns, *objects])]):
            try:
                values = rows.to_pylist()
            except (ValueError, OverflowError) as error:
                index, name = _unreadable(rows)
                where = f"{path}, row {number + index + 1}"
                raise DataError(f"{where}: {name} cannot be read ({error})") from error
            for row in values:
                number += 1
                yield f"{path}, row {number}", row


def _unreadable(rows) -> tuple[int, str]:
    """Returns the first place of a value that Python lacks in rows of Parquet, and its column."""
    for index in range(rows.num_rows):
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            try:
                column[index].as_py()
            except (ValueError, OverflowError):
                return index, name
    raise AssertionError("all values can be read")


def read_table(
    path: str | Path,
    *columns: Sequence[str],
    header: Sequence[str] | None = None,
    empties_broken_rows: bool = False,
    keeps_empty_rows: bool = False,
    any_case: bool = False,
    takes_chats: bool = False,
    list_columns: Collection[str] = (),
    hint: str = "",
) -> Iterator[tuple[str, list[str]]]:
    """Yields the wanted columns of each row, by default without empty rows.

    Args:
        path: UTF-8 with a header; `.tsv`, or a tab in the first line, makes it a TSV. A CSV has
            quoting, a TSV has none. JSON and Parquet, by their names, have objects whose fields are
            texts or numbers; null is "". `.gz` is unpacked.
        *columns: The possible names of each wanted column; "" among them makes it optional: a
            missing column has the values "". Other columns are ignored.
        header: The names of the columns, if the file has no header line.
        empties_broken_rows: Whether rows of another length than the header have the values "".
        keeps_empty_rows: Whether a row of a table whose fields are all empty is yielded too.
        any_case: Whether names that differ by case and outer spaces alone are the same.
        takes_chats: Whether a field may be a list of objects, the turns of a chat: its value is
            their JSON.
        list_columns: Names of columns whose fields may be lists: their values are JSON.
        hint: What the message about a missing or repeated column ends with.

    Yields:
        The position of the row ("path, line 7") and its stripped values.

    Raises:
        DataError: The file cannot be read, is not UTF-8, has a row of another length than its
            header, or lacks or repeats a wanted column.
    """
    path = files.expand(path)
    if has_objects(path.name):
        read = [name for names in columns for name in names if name]
        if is_parquet(path.name):
            keys = header_of(path)
            places = _places(str(path), keys, columns, hint, any_case)
            read = [keys[place] for place in places if place is not None]
        for where, row in read_objects(path, read):
            if not isinstance(row, dict):
                raise DataError(f"{where}: expected an object, found {row!r:.40}")
            keys = list(row)
            fields = [
                None if place is None else keys[place]
                for place in _places(where, keys, columns, hint, any_case)
            ]
            yield where, [_field(where, row, name, takes_chats, list_columns) for name in fields]
        return
    with _rows(path) as reader:
        names = [name.strip() for name in header or next(reader, [])]
        if not names:
            raise DataError(f"{path}, line 1: empty, expected the names of the columns")
        if any(";" in name for name in names) or (len(names) == 1 and "|" in names[0]):
            hint = "; separate the columns by commas or tabs"
        elif not header and any(map(_is_value, names)):
            hint = f"{hint}; the first line must name the columns"
        places = _places(f"{path}, line 1", names, columns, hint, any_case)
        line = reader.line_num
        for row in reader:
            where, line = f"{path}, line {line + 1}", reader.line_num
            is_whole = len(row) == len(names)
            if not any(map(str.strip, row)) and not (keeps_empty_rows and is_whole):
                continue
            if not is_whole:
                if empties_broken_rows:
                    yield where, [""] * len(places)
                    continue
                raise DataError(
                    f"{where}: {len(row)} fields, expected {len(names)} as in the header"
                )
            yield where, ["" if place is None else row[place].strip() for place in places]


def header_of(path: str | Path) -> list[str]:
    """Returns the stripped fields of a table's first line, or the names in the first object.

    Raises:
        DataError: The file cannot be read, is not UTF-8, or the line is not a row.
    """
    path = files.expand(path)
    if is_parquet(path.name):
        with _parquet(path) as file:
            return list(file.schema_arrow.names)
    if has_objects(path.name):
        _, first = next(read_objects(path, ()), ("", None))
        return list(first) if isinstance(first, dict) else []
    with _rows(path) as reader:
        return [name.strip() for name in next(reader, [])]


def read_rows(path: str | Path) -> tuple[list[str], list[list[Any]]]:
    """Returns the names of all columns of a table and its rows, those that are empty too.

    They are the rows of `read_table(keeps_empty_rows=True)`.

    Args:
        path: As in `read_table`; a name may be repeated or empty.

    Returns:
        The names; and the values of each row: texts, or of JSON and Parquet what an object has,
        None where it lacks a field; texts of a column of Parquet that has values that Python lacks.

    Raises:
        DataError: The file cannot be read, is not UTF-8, has a value that is not an object, or a
            column of lists or objects that have values that Python lacks.
    """
    path = files.expand(path)
    if is_parquet(path.name):
        with _parquet(path) as file:
            table = file.read()
            names = table.column_names  # may repeat one
            columns = [_values(path, name, table.column(n)) for n, name in enumerate(names)]
            return names, [list(row) for row in zip(*columns, strict=True)]
    if has_objects(path.name):
        objects: list[dict] = []
        for where, row in read_objects(path, ()):
            if not isinstance(row, dict):
                raise DataError(f"{where}: expected an object, found {row!r:.40}")
            objects.append(row)
        names = list(dict.fromkeys(name for row in objects for name in row))
        return names, [[row.get(name) for name in names] for row in objects]
    with _rows(path) as reader:
        names = [name.strip() for name in next(reader, [])]
        return names, [row for row in reader if len(row) == len(names)]


def _values(path: Path, name: str, column) -> list[Any]:
    """Returns the values of a column of Parquet, or Arrow's texts of all if Python lacks one."""
    import pyarrow

    try:
        return column.to_pylist()
    except (ValueError, OverflowError):
        pass
    try:
        texts = column.cast(pyarrow.string()).cast(pyarrow.binary()).to_pylist()
    except pyarrow.ArrowNotImplementedError as error:
        raise DataError(f"{path}: {name} has no values for a CSV ({error})") from error
    # A text may be said to be UTF-8, and not be it.
    return [None if each is None else each.decode("utf-8", "backslashreplace") for each in texts]


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Writes a CSV whole or not at all; an existing one is replaced.

    Args:
        path: In UTF-8.
        rows: The header, and the values of each row as of `write_rows`.

    Raises:
        OSError: It cannot be written.
    """
    with (
        files.atomic(path) as temporary,
        open(temporary, "w", encoding="utf-8", errors="backslashreplace", newline="") as stream,
    ):
        write_rows(stream, rows)


def write_rows(stream, rows: Iterable[Sequence[Any]]) -> None:
    """Writes rows of a CSV; quotes fields with commas, quotes and line breaks.

    Args:
        stream: Takes texts; its line ends are left as they are (`newline=""`).
        rows: Texts and numbers, which are not rounded; None is empty, and lists and dicts are
            written as JSON.
    """
    writer = csv.writer(stream)
    for row in rows:
        writer.writerow(map(_cell, row))


def _cell(value):
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value


def has_lists(path: Path, names: Collection[str]) -> bool:
    """Returns whether JSON or Parquet has lists in one of these fields.

    Parquet says so; of JSON the first row decides in which one of them is not null.
    """
    if not has_objects(path.name):
        return False
    if is_parquet(path.name):
        from pyarrow import types

        are_lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        with _parquet(path) as file:
            kinds = [field.type for field in file.schema_arrow if field.name in names]
        return any(is_list(kind) for kind in kinds for is_list in are_lists)
    for _, row in read_objects(path, ()):
        fields = [row.get(name) for name in names] if isinstance(row, dict) else []
        if any(field is not None for field in fields):
            return any(isinstance(field, list) for field in fields)
    return False


def has_field(path: Path, *names: str) -> bool:
    """Returns whether the first row has one of these fields; False where it cannot be read."""
    try:
        return not set(names).isdisjoint(header_of(path))
    except DataError:
        return False


def unread_note(
    folder: Path,
    read: Collection[Path],
    fields: Collection[str],
    endings: tuple[str, ...] = ENDINGS,
) -> str | None:
    """Returns a line that names the data files of a folder that are not read, or None.

    Args:
        folder: Other files and hidden ones are not named.
        read: Files that are read.
        fields: Files that end in `.json` are named if they have one of them; others are settings.
        endings: Endings of names of data files, in small letters.
    """
    known = {path.resolve() for path in read}  # a file may be named relative to another folder
    names = [
        path.name
        for path in sorted(folder.iterdir())
        if path.resolve() not in known
        and path.name.lower().endswith(endings)
        and not path.name.startswith(".")
        and (not re.search(r"\.json(\.gz)?$", path.name.lower()) or has_field(path, *fields))
    ]
    return f"files that are not read: {listed(names)}" if names else None


@contextlib.contextmanager
def _rows(path: Path) -> Iterator[Any]:
    """Opens a table as a reader of `csv`, for `with`; turns what is wrong into a `DataError`."""
    with files.open_bytes(path) as stream:
        first = stream.readline()
        stream.seek(0)
        # Spreadsheets write a byte order mark; with plain utf-8 it would be part of the first name.
        lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        csv.field_size_limit(LONGEST_FIELD)  # of the process
        if path.name.lower().endswith(TSV) or b"\t" in first:
            reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        else:  # `strict`: an unclosed quote is an error, not one long value
            reader = csv.reader(lines, strict=True, skipinitialspace=True)
        try:
            yield reader
        except csv.Error as error:
            hint = '; write a quote in a field twice (""), or JSONL'
            hint = hint if "expected after" in str(error) else ""
            raise DataError(f"{path}, line {reader.line_num}: not a row ({error}){hint}") from error
        except UnicodeDecodeError as error:
            place = f"{path}: not UTF-8 at byte {_undecodable(path)}"
            raise DataError(f"{place}; {files.how_to_convert(first)}") from error


def _undecodable(path: Path) -> int:
    """Returns the place of the first byte of a file that is not UTF-8."""
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    with files.open_bytes(path) as stream:
        while block := stream.read(BLOCK):
            left = len(decoder.getstate()[0])  # bytes of a character that the last block began
            try:
                decoder.decode(block, final=len(block) < BLOCK)
            except UnicodeDecodeError as error:
                return done - left + error.start
            done += len(block)
    return done - len(decoder.getstate()[0])


def _field(
    where: str, row: dict, name: str | None, takes_chats: bool, list_columns: Collection[str]
) -> str:
    """Returns a field of an object as a table would have it; "" without a name."""
    if name is None:
        return ""
    value = row[name]
    # What pandas writes for a gap in a column of numbers.
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, decimal.Decimal):
        value = f"{value:f}"
    if isinstance(value, bool | int | float):
        value = str(value)
    if takes_chats and isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        value = json.dumps(value, default=str) if value else ""
    if name in list_columns and isinstance(value, list):
        value = json.dumps(value, default=str)
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {value!r:.40}, expected a text or a number")
    if value != value.encode(errors="ignore").decode():  # half of a surrogate pair
        raise DataError(f"{where}: {name} is not UTF-8 text")
    return value.strip()


def _is_value(name: str) -> bool:
    """Returns whether a field of a first line is a number or a sentence, not a column's name."""
    return re.fullmatch(r"[-+]?\d+(\.\d+)?", name) is not None or len(name.split()) > 5


def folded(name: str) -> str:
    """Returns the name of a column with case and outer spaces normalised."""
    return name.strip().casefold()


def _places(
    where: str, header: list[str], columns: Sequence[Sequence[str]], hint: str, any_case: bool
) -> list[int | None]:
    """Returns the place of each wanted column in a header, None for an optional one it lacks.

    Args:
        where: What an error begins with.
        header: The names of the columns.
        columns: The possible names of each wanted column, as in `read_table`.
        hint: What an error ends with.
        any_case: As in `read_table`.

    Raises:
        DataError: Names all columns that are not there, or more than once.
    """
    form = folded if any_case else str
    places: list[int | None] = []
    wrong, similar = [], []
    for names in columns:
        wanted = {form(name) for name in names if name}
        indices = [index for index, name in enumerate(header) if form(name) in wanted]
        if len(indices) == 1 or (not indices and "" in names):
            places.append(indices[0] if indices else None)
            continue
        counted = f"{len(indices)} columns" if indices else "no column"
        wrong.append(f"{counted} {' or '.join(filter(None, names))}")
        if not indices:
            others = {folded(name) for name in names if name}
            similar += [name for name in header if folded(name) in others]
    if not wrong:
        return places
    if similar:
        hint = f"; upper and lower case differ: {similar[0][:100]!a}{hint}"
    shown = ", ".join(name or "(no name)" for name in header)
    raise DataError(
        f"{where}: {' and '.join(wrong)}, expected one{' of each' if len(wrong) > 1 else ''}; "
        f"found {shown[:100]!a}{hint}"
    )
