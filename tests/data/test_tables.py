import gzip

import pytest

from data.errors import DataError
from data.tables import read_table


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
            "no column sentence or text, expected one; found 'text;label'; separate the columns by "
            "commas or tabs",
        ),
        (b"text|label\na|1\n", "found 'text|label'; separate the columns by commas or tabs"),
        (b"a;b,c\nd,e\n", "found 'a;b, c'; separate the columns by commas or tabs"),
        (b"text,label,label\nfine,1,0\n", "line 1: 2 columns label, expected one"),
        (b"text,sentence,label\nfine,a,0\n", "line 1: 2 columns sentence or text"),
        (b"n" * 1000 + b",label\n", "found '" + "n" * 100 + "'"),
        (b"text,label\nfine,1\ncaf\xe9,0\n", "not UTF-8 at byte 21"),
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
