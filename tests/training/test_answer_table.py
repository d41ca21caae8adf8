"""Answers beside the rows of a table, as a CSV."""

import csv
import os
import resource

import numpy as np
import pytest

from data import tables
from data.errors import DataError
from training.answer_table import AnswerTable, problems_of_csv, values_of


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], {}),
        ([{"score": np.float32(0.5)}], {"score": 0.5}),
        ([{"probability": 0.9, "class": "b"}], {"probability": 0.9, "class": "b"}),
        (
            [{"note": "dark"}, {"probability": 0.7, "class": 2}, {"probability": 0.3, "class": 1}],
            {
                "note": "dark",
                "probability": 0.7,
                "class": 2,
                "probability_1": 0.3,
                "probability_2": 0.7,
            },
        ),
        (
            [{"piece": "a", "text": "a b"}, {"piece": "c", "text": "c b"}],
            {"piece": "a", "text": "a b", "piece_2": "c", "text_2": "c b"},
        ),
        (
            [{"class": "dog", "x": 1}, {"class": "dog", "x": 3}],  # two of them in an image
            {"class": "dog", "x": 1, "class_2": "dog", "x_2": 3},
        ),
    ],
)
def test_values_of_answers(answers, expected):
    found = values_of(answers)
    assert found == expected and list(found) == list(expected)


@pytest.mark.parametrize(
    ("probabilities", "labels"),
    [
        ((0.9, 0.7, 0.1), "art|dog"),
        ((0.3, 0.2, 0.1), ""),
        ((0.4, 0.1, 0.8), '["a, b"]'),
    ],
)
def test_values_of_several_labels(probabilities, labels):
    named = zip(("dog", "art", "a, b"), probabilities, strict=True)
    found = values_of([{"probability": p, "class": name} for name, p in named], several=True)
    assert list(found) == ["labels", "probability_a, b", "probability_art", "probability_dog"]
    assert found["labels"] == labels and found["probability_dog"] == probabilities[0]
    assert values_of([{"probability": 0.5, "class": "a"}], several=True) == {
        "labels": "a",
        "probability_a": 0.5,
    }
    named = [{"probability": p, "class": name} for name, p in (("dog", 0.9), ("art", 0.4))]
    for threshold, expected in ((0.3, "art|dog"), (0.4, "art|dog"), (0.5, "dog"), (0.95, "")):
        assert values_of(named, several=True, threshold=threshold)["labels"] == expected
    assert values_of([{"error": "too long"}], several=True) == {"error": "too long"}


def test_of_many_classes_those_of_an_answer_are_numbered():
    answers = [{"probability": 0.7, "class": "b"}, {"probability": 0.3, "class": "a"}]
    assert values_of(answers, class_columns=False) == {
        "probability": 0.7,
        "class": "b",
        "probability_2": 0.3,
        "class_2": "a",
    }
    assert values_of(answers, several=True, class_columns=False) == {"labels": "b"}
    assert values_of([], several=True, class_columns=False) == {}


def test_answers_are_not_compared_with_one_another():
    """Of five thousand labels that would be twelve million comparisons for a text."""

    class Answer(dict):
        __hash__ = None
        compared = 0

        def __eq__(self, other):
            Answer.compared += 1
            return super().__eq__(other)

    answers = [Answer({"probability": 0.1, "class": str(n)}) for n in range(100)]
    assert len(values_of(answers, several=True)) == 101
    assert len(values_of(answers)) == 102
    assert not Answer.compared


def test_a_table_of_many_classes_is_not_written_again(tmp_path, monkeypatch):
    """Whenever another class is among the most likely ones, all rows would get one more column."""
    written, stock = [], tables.write_csv
    monkeypatch.setattr(tables, "write_csv", lambda *a: written.append(a) or stock(*a))
    rows = [[str(n)] for n in range(300)]
    with AnswerTable(tmp_path / "a.csv", ["in"], rows, 10, class_columns=False) as table:
        for n in range(300):
            found = [{"probability": 0.5, "class": f"c{n}"}, {"probability": 0.4, "class": f"d{n}"}]
            table.add(found)
    assert len(written) == 1
    header, *lines = read(tmp_path / "a.csv")
    assert header == ["in", "probability", "class", "probability_2", "class_2"]
    assert lines[299] == ["299", "0.5", "c299", "0.4", "d299"]


def test_rows_are_written_whole_as_they_are_answered(tmp_path):
    path, text = tmp_path / "a.csv", 'one, "two"\r\nthree'
    table = AnswerTable(path, ["id", "text"], [["1", text], ["2", ""], ["3", "c"], ["4", "d"]], 2)
    with table:
        table.add([{"text": "x\ny", "p": 0.1 + 0.2}])
        assert not path.exists()
        table.add([])
        header = ["id", "text", "predicted_text", "p"]
        first = [header, ["1", text, "x\ny", "0.30000000000000004"], ["2", "", "", ""]]
        assert read(path) == first
        table.add([{"text": "z", "p": 1}])
    assert read(path) == [*first, ["3", "c", "z", "1"]]


def test_a_column_that_comes_later(tmp_path):
    path = tmp_path / "a.csv"
    with AnswerTable(path, ["in"], [["a"], ["b"], ["c"]], 1) as table:
        table.add([{"x": 1}])
        table.add([{"x": 2, "note": "odd"}])
        assert read(path) == [["in", "x", "note"], ["a", "1", ""], ["b", "2", "odd"]]
        table.add([{"note": "no x"}])
    assert read(path)[-1] == ["c", "", "no x"]
    assert os.listdir(tmp_path) == ["a.csv"]


def test_errors_are_the_last_column(tmp_path):
    path = tmp_path / "a.csv"
    with AnswerTable(path, ["in"], [["a"], ["b"], ["c"]], 1) as table:
        table.add([{"error": "too long"}])
        table.add([{"x": 2, "y": 3}])
        table.add([{"error": "empty"}])
    assert read(path)[0] == ["in", "x", "y", "error"]
    assert read(path)[1:] == [
        ["a", "", "", "too long"],
        ["b", "2", "3", ""],
        ["c", "", "", "empty"],
    ]


def test_what_was_answered_before_an_error_is_kept(tmp_path):
    path = tmp_path / "a.csv"
    with (
        pytest.raises(KeyError),
        AnswerTable(path, ["in"], [["a"], ["b"]], 256) as table,
    ):
        table.add([{"x": 1}])
        raise KeyError
    assert read(path) == [["in", "x"], ["a", "1"]]
    with pytest.raises(KeyError), AnswerTable(tmp_path / "b.csv", ["in"], [["a"]], 256):
        raise KeyError
    assert not (tmp_path / "b.csv").exists()


def test_a_full_disk_leaves_whole_rows(tmp_path):
    path, limit = tmp_path / "a.csv", resource.getrlimit(resource.RLIMIT_FSIZE)
    table = AnswerTable(path, ["in"], [["a"], ["b" * 100_000]], 1)
    table.add([{"x": 1}])
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            table.add([{"x": 2}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before


def test_the_file_is_a_new_csv(tmp_path):
    (tmp_path / "old.csv").touch()
    for name, problem in (
        ("new.csv", None),
        ("new.CSV", None),
        ("new.tsv", "must end in .csv"),
        ("old.csv", "already exists; remove it, or name a new one"),
        ("no/new.csv", "its folder does not exist"),
    ):
        found = problems_of_csv(tmp_path / name, "--csv")
        assert [problem is not None and problem in line for line in found] == [True] * bool(problem)
    assert problems_of_csv(None, "--csv") == []


class TestContinued:
    """A table that was begun: by a command that was stopped."""

    ROWS = [
        ["1", 'one, "two"\r\nthree'],
        ["2", ""],
        ["3", ["é", {"a": None}]],
        ["4", 5.5],
        ["6", ""],
    ]

    def begin(self, path, count=3):
        with AnswerTable(path, ["id", "text"], self.ROWS, 2) as table:
            for number in range(count):
                table.add([] if number == 1 else [{"text": "", "p": number + 0.1 + 0.2}])

    def test_the_other_rows_are_appended(self, tmp_path):
        path, whole = tmp_path / "a.csv", tmp_path / "whole.csv"
        self.begin(whole, 5)
        self.begin(path)
        begun = path.read_bytes()
        with AnswerTable(path, ["id", "text"], self.ROWS, 2) as table:
            assert (table.begun, table.next, table.errors()) == (3, 0, [])
            table.add([{"text": None, "p": 0.30001}])
            table.add([])
            table.add([{"text": None, "p": 2.3}])
            assert path.read_bytes() == begun
            table.add([{"text": "", "p": 3.3000000000000003}])
            table.add([{"text": "", "p": 4.3}])
        assert path.read_bytes() == whole.read_bytes()

    def test_a_column_that_comes_later(self, tmp_path):
        path = tmp_path / "a.csv"
        rows = [["a"], ["b"], ["c"]]
        with AnswerTable(path, ["x"], rows, 1) as table:
            table.add([{"x": 1, "error": "too long"}])
            table.add([{"x": 2}])
        with AnswerTable(path, ["x"], rows, 1) as table:
            table.add([{"x": 1, "error": "too long"}])
            table.add([{"x": 2}])
            assert table.errors() == [(0, "too long")]
            table.add([{"x": 3, "note": "odd"}])
        assert read(path) == [
            ["x", "predicted_x", "note", "error"],
            ["a", "1", "", "too long"],
            ["b", "2", "", ""],
            ["c", "3", "odd", ""],
        ]

    def test_the_last_answers_are_compared_and_the_others_are_not_asked_for(self, tmp_path):
        path, rows = tmp_path / "a.csv", [[str(number)] for number in range(100)]
        with AnswerTable(path, ["x"], rows, 256) as table:
            for number in range(50):
                table.add([{"y": number}] if number < 40 else [])
        with AnswerTable(path, ["x"], rows, 256) as table:
            assert (table.begun, table.next) == (50, 40 - 16)
            table.add([{"y": 24}])
            for other in ({"y": 25.1}, {"y": "25 or so"}, {"z": 25}, {"y": 25, "z": 1}):
                table.next = 25
                with pytest.raises(DataError, match="a.csv has other answers to row 26 than this"):
                    table.add([other])

    @pytest.mark.parametrize(
        "change",
        [
            lambda content: content + content.splitlines(keepends=True)[1] * 9,
            lambda content: content.replace(b"id,", b"ID,"),
            lambda content: content.replace(b"3,", b"7,"),
            lambda content: content[:-2],  # half of a row
            lambda content: content + b'4,"',
            lambda content: content + b"4,x\r\n",
            lambda content: content + b"\xff\r\n",
            lambda content: b"",
            lambda content: content.splitlines(keepends=True)[0],
        ],
    )
    def test_another_file_is_left_as_it_is(self, change, tmp_path):
        path = tmp_path / "a.csv"
        self.begin(path)
        path.write_bytes(change(path.read_bytes()))
        before = path.read_bytes()
        with pytest.raises(DataError, match="a.csv already exists; remove it, or name a new one"):
            AnswerTable(path, ["id", "text"], self.ROWS, 2)
        assert path.read_bytes() == before

    def test_a_table_with_all_rows_or_without_answers_is_not_continued(self, tmp_path):
        self.begin(tmp_path / "a.csv", 5)
        (tmp_path / "b.csv").write_bytes(b"id,text\r\n1,x\r\n")
        (tmp_path / "c.csv").mkdir()
        for name, rows in (
            ("a.csv", self.ROWS),
            ("b.csv", [["1", "x"], ["2", "y"]]),
            ("c.csv", []),
        ):
            with pytest.raises(DataError, match=f"{name} already exists"):
                AnswerTable(tmp_path / name, ["id", "text"], rows, 2)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "old.csv").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    (line,) = problems_of_csv(tmp_path / "new.csv", "--csv")
    assert line == f"--csv {tmp_path / 'new.csv'}: its folder cannot be written"
    monkeypatch.setattr(os, "access", lambda path, mode: path == tmp_path)
    (line,) = problems_of_csv(tmp_path / "old.csv", "--csv", may_exist=True)
    assert line == f"--csv {tmp_path / 'old.csv'}: cannot be written"
    assert problems_of_csv(tmp_path / "new.csv", "--csv", may_exist=True) == []
