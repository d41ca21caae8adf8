"""Answers beside the rows of a table, as a CSV."""

import csv
import os
import resource

import numpy as np
import pytest

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
