"""Tests what `recipes.predict` reads from a file."""

import json
import os

import pytest

from data import inputs
from data.errors import DataError


def write(path, content: bytes):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'review\n"good"\n""\n"bad"\n'),
        ("a.csv", "review,n\ngood,1\n,\nbad,2\n\n"),
        ("a.tsv", "review\tn\ngood\t1\n\t\nbad\t2\n"),
        ("a.jsonl", '{"review": "good"}\n{"review": null}\n{"review": "bad"}\n'),
    ],
)
def test_a_row_without_a_text_keeps_its_place(name, content, tmp_path):
    table = write(tmp_path / name, content.encode())
    assert inputs.read_columns(table, "review") == ("good", "", "bad")


def test_json_of_lists_is_read_by_lines(tmp_path):
    """Of a chat's messages for example."""
    lines = ('[{"role": "user", "content": "a"}]', '[{"role": "user", "content": "b"}]')
    chats = write(tmp_path / "chats.jsonl", "\n".join(lines).encode())
    assert inputs.read_inputs(chats) == lines
    assert inputs.read_inputs(write(tmp_path / "chat.jsonl", lines[0].encode())) == lines[:1]


def test_a_json_list_of_rows_is_a_table_whatever_its_name(tmp_path):
    rows = ('[{"a": "b"}, {"a": "c"}]', '[{"a": "b"}, 2]', '[\n {"a": "b"},\n {"a": "c"}\n]\n')
    for content in rows:
        with pytest.raises(DataError, match="a table; name the column .*it has a"):
            inputs.read_inputs(write(tmp_path / "rows.jsonl", content.encode()))


def test_json_of_texts_is_no_line_each(tmp_path):
    for name, content in (
        ("a.json", '["good", "bad"]'),
        ("b.jsonl", '"good"\n"bad"\n'),
        ("c.jsonl", '["the role"]'),
    ):
        with pytest.raises(DataError, match=f"{name}: JSON of texts; write one text per line"):
            inputs.read_inputs(write(tmp_path / name, content.encode()))


def test_pairs_of_a_table(tmp_path):
    table = write(tmp_path / "a.tsv", b"n\tone\ttwo\n1\ta film\tgood\n2\t\t\n")
    assert inputs.read_columns(table, "one") == ("a film", "")
    assert inputs.read_columns(table, "one", "two") == (("a film", "good"), "")
    half = write(tmp_path / "b.csv", b"one,two\na film,\n")
    with pytest.raises(DataError, match="line 2: one sentence of the pair is empty"):
        inputs.read_columns(half, "one", "two")


def test_a_field_may_be_the_turns_of_a_chat(tmp_path):
    turns = [{"role": "user", "content": "é?"}]
    rows = [{"messages": turns}, {"messages": []}, {"messages": None}, {"messages": "plain"}]
    chats = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    first, *others = inputs.read_columns(chats, "messages", takes_chats=True)
    assert json.loads(first) == turns and others == ["", "", "plain"]
    with pytest.raises(DataError, match="line 1: messages is .*, expected a text or a number"):
        inputs.read_columns(chats, "messages")
    texts = write(tmp_path / "b.jsonl", b'{"messages": ["a", "b"]}')
    with pytest.raises(DataError, match="expected a text or a number"):
        inputs.read_columns(texts, "messages", takes_chats=True)


def test_a_pipe_is_not_a_table(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(writer, b"review\ngood\n")
    with pytest.raises(DataError, match="pipe: a table must be a file, not a pipe"):
        inputs.read_columns(tmp_path / "pipe", "review")
    os.close(writer)
