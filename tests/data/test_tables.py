import bz2
import decimal
import gzip
import json
import lzma
import tracemalloc

import pyarrow
import pytest
from pyarrow import parquet

from data.errors import DataError
from data.tables import header_of, read_objects, read_rows, read_table, write_csv
from tests.support.parquet_file import write_parquet


def read(path, raw, *columns):
    path.write_bytes(raw)
    return [
        (where.removeprefix(f"{path}, "), values)
        for where, values in read_table(path, *(columns or (("sentence", "text"), ("label",))))
    ]


def test_a_csv_has_quotes(tmp_path):
    raw = b'label,text\n1,"one, ""two""\nand three"\n\n0, four \n'
    assert read(tmp_path / "a.csv", raw) == [
        ("line 2", ['one, "two"\nand three', "1"]),
        ("line 5", ["four", "0"]),
    ]


def test_a_tsv_has_none(tmp_path):
    raw = '\ufeffid\tsentence\tlabel\r\n7\t"one, \u2028two\t1\r\n8\t\t0\r\n'.encode()
    expected = [("line 2", ['"one, \u2028two', "1"]), ("line 3", ["", "0"])]
    assert read(tmp_path / "a.tsv", raw) == expected
    assert read(tmp_path / "a.tsv.gz", gzip.compress(raw)) == expected


@pytest.mark.parametrize(
    "raw, expected",
    [
        (b"", "line 1: empty, expected the names of the columns"),
        (
            b"text;label\na;1\n",
            "no column sentence or text and no column label, expected one of each; found "
            "'text;label'; separate the columns by commas or tabs",
        ),
        (b"text|label\na|1\n", "found 'text|label'; separate the columns by commas or tabs"),
        (b"a;b,c\nd,e\n", "found 'a;b, c'; separate the columns by commas or tabs"),
        (b"text,label,label\nfine,1,0\n", "line 1: 2 columns label, expected one"),
        (b"text,sentence,label\nfine,a,0\n", "line 1: 2 columns sentence or text"),
        (b"Text,label\na,1\n", "found 'Text, label'; upper and lower case differ: 'Text'"),
        (b",words,label\n1,a,1\n", "found '(no name), words, label'"),
        (b"n" * 1000 + b",label\n", "found '" + "n" * 100 + "'"),
        (b"text,label\nfine,1\ncaf\xe9,0\n", "not UTF-8 at byte 21; convert it"),
        (b'text,label\n"a\nb",1\nfine\n', "line 4: 1 fields, expected 2 as in the header"),
        (b"text\tlabel\na\tb\t1\n", "line 2: 3 fields, expected 2"),
        (b'text,label\nfine,1\n"never,1\n', "line 3: not a row"),
    ],
)
def test_what_is_no_table(tmp_path, raw, expected):
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.csv", raw)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "a.csv")) and expected in message
    assert "\n" not in message


def test_a_field_may_be_a_whole_document(tmp_path):
    raw = b"text,label\n" + b"a" * 200_000 + b",1\n"
    assert read(tmp_path / "a.csv", raw) == [("line 2", ["a" * 200_000, "1"])]


def test_a_tsv_of_one_column_and_names_in_capitals(tmp_path):
    assert read(tmp_path / "a.TSV", b"text\none, two\n", ["text"]) == [("line 2", ["one, two"])]
    assert read(tmp_path / "a.NDJSON", b'{"text": "a, b"}\n', ["text"]) == [("line 1", ["a, b"])]


def test_a_list_with_a_byte_order_mark(tmp_path):
    raw = '\ufeff[{"text": "a"},\n{"text": "b"}]'.encode()
    assert read(tmp_path / "a.json", raw, ["text"]) == [("value 1", ["a"]), ("value 2", ["b"])]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_null_is_an_empty_field(tmp_path, ending):
    """Pandas writes it where a CSV has an empty field."""
    rows = [{"tm": 50.0, "dh": None}, {"tm": None, "dh": -60.0}]
    path = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        write_parquet(path, rows)
    found = read_table(path, ("tm",), ("dh", ""))
    assert [fields for _, fields in found] == [["50.0", ""], ["", "-60.0"]]


def test_parquet_has_rows_of_objects(tmp_path):
    """Of all its groups, with fields of texts and numbers; a dictionary's values are its texts."""
    rows = [{"label": n % 2, "text": f" row {n} ", "score": n / 2, "more": [n]} for n in range(7)]
    path = write_parquet(tmp_path / "a.PARQUET", rows)
    wanted = (["sentence", "text"], ["label"], ["score"])
    found = [
        (where.removeprefix(f"{path}, "), values) for where, values in read_table(path, *wanted)
    ]
    assert found == [(f"row {n + 1}", [f"row {n}", str(n % 2), str(n / 2)]) for n in range(7)]
    assert header_of(path) == ["label", "text", "score", "more"]

    texts = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": texts}), path)
    assert [values for _, values in read_table(path, ["text"])] == [["a"], ["b"], ["a"]]


def test_a_field_of_parquet_that_is_no_text(tmp_path):
    for value, shown in ((b"raw", "b'raw'"), (["a"], "['a']")):
        path = write_parquet(tmp_path / "a.parquet", [{"text": value}, {"text": value}])
        with pytest.raises(DataError) as caught:
            list(read_table(path, ["text"]))
        message = f"{path}, row 1: text is {shown}, expected a text or a number"
        assert str(caught.value) == message


def test_damaged_parquet(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{"text": f"row {n}"} for n in range(99)])
    whole = path.read_bytes()
    for raw in (b"", b"text,label\na,1\n", whole[:-9], whole[:40] + bytes(40) + whole[80:]):
        path.write_bytes(raw)
        with pytest.raises(DataError, match=r"a.parquet: not Parquet, or damaged \(") as caught:
            list(read_table(path, ["text"]))
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        list(read_table(path, ["text"]))


@pytest.mark.long
@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv"])
def test_a_table_is_not_held_in_memory(tmp_path, ending):
    separator = "\t" if ending == "tsv" else ","
    line = f"a line of text with an \U0001f600{separator}1\n"
    raw = (f"text{separator}label\n" + line * 50_000).encode()
    path = tmp_path / f"a.{ending}"
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    tracemalloc.start()
    count = sum(1 for _ in read_table(path, ["text"], ["label"]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 50_000 and peak < len(raw) / 4


@pytest.mark.parametrize("place", [30, 2**20 - 2, 2**20, 2**20 + 1, 3 * 2**20])
def test_a_byte_that_is_not_utf_8_is_found_where_it_is(tmp_path, place):
    """Also behind and within characters at the ends of the blocks that are read."""
    path = tmp_path / "a.csv"
    begin = b"text\n" + b"a" * (place % 2 + 1)
    path.write_bytes(begin + "\u00e9".encode() * ((place - len(begin)) // 2) + b"\xff\n")
    at = path.read_bytes().index(b"\xff")
    with pytest.raises(DataError, match=f"not UTF-8 at byte {at};"):
        list(read_table(path, ["text"]))


def test_a_path_may_be_a_text_with_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.csv").write_text("text\nfine\n")
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n')
    for name in ("~/a.csv", "~/a.jsonl", str(tmp_path / "a.csv")):
        assert [values for _, values in read_table(name, ("text",))] == [["fine"]]
        assert header_of(name) == ["text"]
    assert [value for _, value in read_objects("~/a.jsonl", ())] == [{"text": "fine"}]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_all_columns_of_a_table(ending, tmp_path):
    path = tmp_path / f"a.{ending}"
    objects = [{"n": 1, "text": "one"}, {"n": None, "text": ""}, {"n": 3, "text": "three"}]
    if ending == "parquet":
        write_parquet(path, objects)
    elif ending in ("json", "jsonl"):
        del objects[1]["n"]
        lines = map(json.dumps, objects)
        path.write_text(json.dumps(objects) if ending == "json" else "\n".join(lines))
    else:
        tab = {"csv": ",", "tsv": "\t"}[ending]
        path.write_text(f"n{tab} text\n1{tab}one\n\n{tab}\n3{tab}three\n")
    names, rows = read_rows(str(path))
    texts = [["" if value is None else str(value) for value in row] for row in rows]
    assert names == ["n", "text"] and texts == [["1", "one"], ["", ""], ["3", "three"]]
    found = read_table(path, ("text",), keeps_empty_rows=True)
    assert [text for _, (text,) in found] == [text for _, text in texts]


def test_columns_without_a_name_and_of_the_same_one(tmp_path):
    (tmp_path / "a.csv").write_text(",text,x,x\n0,a,1,2\n")
    assert read_rows(tmp_path / "a.csv") == (["", "text", "x", "x"], [["0", "a", "1", "2"]])


def test_a_csv_is_read_as_it_was_written(tmp_path):
    rows = [["a, b", 'c "d"\r\ne\nf\rg'], ["", 0.1 + 0.2], [[1, {"é": None}], None], ["\ud800", 1]]
    write_csv(tmp_path / "a.csv", [["one", "two"], *rows])
    names, found = read_rows(tmp_path / "a.csv")
    assert names == ["one", "two"] and found == [
        rows[0],
        ["", "0.30000000000000004"],
        ['[1, {"é": null}]', ""],
        ["\\ud800", "1"],
    ]


def test_an_object_is_expected(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n2\n')
    with pytest.raises(DataError, match="line 2: expected an object, found 2"):
        read_rows(tmp_path / "a.jsonl")


def write_columns(path, **columns):
    """Parquet; a list of pairs of a name and values may repeat a name."""
    arrays = [pyarrow.array(*values) for values in columns.values()]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, names=list(columns)), path)
    return path


NANOSECONDS = ([1, 1], pyarrow.timestamp("ns"))
LATE = ([1, 2**62], pyarrow.timestamp("us"))  # beyond the year 9999


def latin(*texts):
    """Texts that say they are UTF-8."""
    raw = pyarrow.array([text.encode("latin1") for text in texts])
    return pyarrow.Array.from_buffers(pyarrow.string(), len(texts), raw.buffers())


@pytest.mark.parametrize("values", [NANOSECONDS, LATE, (latin("a", "caf\xe9"),)])
def test_a_column_of_parquet_is_only_read_where_it_is_wanted(tmp_path, values):
    """Python lacks some of its values."""
    path = write_columns(tmp_path / "a.parquet", text=(["a", "b"],), when=values)
    assert header_of(path) == ["text", "when"]
    assert [fields for _, fields in read_table(path, ["text"])] == [["a"], ["b"]]
    row = 1 if values is NANOSECONDS else 2
    with pytest.raises(DataError, match=rf"a.parquet, row {row}: when cannot be read \("):
        list(read_table(path, ["when"], ["text"]))


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (NANOSECONDS, ["1970-01-01 00:00:00.000000001"]),
        ((latin("a", "caf\xe9"),), ["a", "caf\\xe9"]),
    ],
)
def test_whole_rows_of_parquet_have_texts_where_python_lacks_values(tmp_path, values, texts):
    path = write_columns(tmp_path / "a.parquet", n=([1, 2],), when=values)
    header, rows = read_rows(path)
    assert header == ["n", "when"] and [row[0] for row in rows] == [1, 2]
    assert [row[1] for row in rows][: len(texts)] == texts


def test_whole_rows_of_parquet_with_lists_that_python_lacks(tmp_path):
    times = pyarrow.array([[1], [2]], pyarrow.list_(pyarrow.timestamp("ns")))
    path = write_columns(tmp_path / "a.parquet", text=(["a", "b"],), when=(times,))
    with pytest.raises(DataError, match=r"a.parquet: when has no values for a CSV \(Unsupp"):
        read_rows(path)


def test_whole_rows_of_parquet_with_a_column_twice(tmp_path):
    path = tmp_path / "a.parquet"
    arrays = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array([None], pyarrow.int64())]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, names=["x", "x", "n"]), path)
    assert read_rows(path) == (["x", "x", "n"], [["a", "b", None]])


def test_a_column_of_parquet_that_stands_there_twice_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    arrays = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array([1])]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, names=["text", "text", "n"]), path)
    with pytest.raises(DataError, match="2 columns text, expected one; found 'text, text, n'"):
        list(read_table(path, ["text"]))
    assert [fields for _, fields in read_table(path, ["n"])] == [["1"]]
    with pytest.raises(DataError, match="no column label, expected one; found 'text, text, n'"):
        list(read_table(path, ["label"]))


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_a_number_that_is_none_is_a_gap(tmp_path, ending):
    """As pandas writes null in a column of numbers."""
    rows = [{"text": "a", "tm": 1.5}, {"text": float("nan"), "tm": float("nan")}]
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        write_columns(path, text=(["a", None],), tm=([1.5, float("nan")],))
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if ending == "jsonl" else json.dumps(rows))
    assert [fields for _, fields in read_table(path, ["tm", ""])] == [["1.5"], [""]]
    empty = read_table(path, ["text"], ["tm"])
    assert [fields for _, fields in empty] == [["a", "1.5"], ["", ""]]


def test_decimals_are_numbers(tmp_path):
    values = [decimal.Decimal("4.50"), decimal.Decimal("1E+2"), None]
    path = write_parquet(tmp_path / "a.parquet", [{"price": value} for value in values])
    assert [fields for _, fields in read_table(path, ["price"])] == [["4.50"], ["100.00"], [""]]


@pytest.mark.parametrize(
    ("first", "is_hinted"),
    [
        ("a film that one does not forget,1", True),
        ("__label__1 a film that one does not forget", True),
        ("fine,1", True),
        ("review,mood", False),
        (",review,stars 1 to 5", False),
    ],
)
def test_a_first_line_of_values_is_hinted_at(first, is_hinted, tmp_path):
    with pytest.raises(DataError, match="no column text, expected one; found .*; others") as caught:
        (tmp_path / "a.csv").write_text(f"{first}\n")
        list(read_table(tmp_path / "a.csv", ["text"], hint="; others"))
    assert str(caught.value).endswith("; the first line must name the columns") == is_hinted


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (json.dumps({"data": [{"text": "a"}, {"text": "b"}]}), "a.json: one object, of which 'dat"),
        (json.dumps({"data": [{"text": "a"}]}, indent=1), "line 1: an object of several lines; ex"),
        ('{"data": [\n{"text": "a"}]}', "line 1: an object of several lines; expected one object "),
    ],
)
def test_a_list_inside_of_an_object_is_hinted_at(value, message, tmp_path):
    with pytest.raises(DataError, match="pass the list alone$") as caught:
        read(tmp_path / "a.json", value.encode(), ["text"])
    assert message in str(caught.value)


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_all_missing_columns_are_named_at_once(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        write_parquet(path, [{"review": "a", "Label": "b", "n": "1"}])
    else:
        lines = {"csv": "review,Label,n\na,b,1", "jsonl": '{"review": "a", "Label": "b", "n": 1}'}
        path.write_text(f"{lines[ending]}\n")
    with pytest.raises(DataError) as caught:
        list(
            read_table(path, ["sentence", "text"], ["n"], ["label"], ["more", ""], hint="; others")
        )
    assert str(caught.value).partition(": ")[2] == (
        "no column sentence or text and no column label, expected one of each; found 'review, "
        "Label, n'; upper and lower case differ: 'Label'; others"
    )


def test_a_field_may_be_a_list_of_objects(tmp_path):
    rows = [{"text": "a", "spans": [{"at": 1}]}, {"text": "b", "spans": []}]
    lines = "\n".join(map(json.dumps, rows)).encode()
    assert [fields for _, fields in read(tmp_path / "a.jsonl", lines, ["text"])] == [["a"], ["b"]]
    # The message about a missing column is that of any row.
    with pytest.raises(DataError, match="line 1: no column label, expected one; found 'text, sp"):
        read(tmp_path / "a.jsonl", lines, ["label"])


def test_backslashes_before_quotes_are_hinted_at(tmp_path):
    raw = b'text,label\n"he said \\"yes\\" to it",1\n'
    with pytest.raises(DataError, match=r'line 2: not a row .*; write a quote .* \(""\), or JSONL'):
        read(tmp_path / "a.csv", raw, ["text"])


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"PK\3\4\x14\0\xff\xff", "it is a zip archive, or a file of Excel: unpack it, or save"),
        (bz2.compress(b"text"), "it is packed by bzip2: unpack it"),
        (lzma.compress(b"text"), "it is packed by xz: unpack it"),
        (gzip.compress(b"text"), "it is packed by gzip: its name must end in .gz"),
        (b"\x28\xb5\x2f\xfd\x04", "it is packed by Zstandard: unpack it"),
        (b"a\0\xff", "it has bytes that are zero: it is not a text file"),
    ],
    ids=["zip", "bzip2", "xz", "gzip", "zstandard", "zeros"],
)
def test_what_is_not_text_is_told_what_it_is(name, raw, message, tmp_path):
    with pytest.raises(DataError, match=f"{name}.*: not (UTF-8|JSON).*{message}"):
        read(tmp_path / name, raw, ["text"])


def test_utf_16_is_named(tmp_path):
    with pytest.raises(DataError, match="it is UTF-16: convert it, .*iconv -f UTF-16 -t UTF-8"):
        read(tmp_path / "a.csv", "text,label\na,1\n".encode("utf-16"))


def test_a_column_of_parquet_that_is_wanted_twice(tmp_path):
    path = write_columns(tmp_path / "a.parquet", text=(["a", "b"],), n=([1, 2],))
    found = read_table(path, ["n"], ["text"], ["n"])
    assert [fields for _, fields in found] == [["1", "a", "1"], ["2", "b", "2"]]
