import json

import pytest

from callbacks.errors import CannotSave
from callbacks.metrics_file import MetricsFile


@pytest.fixture
def file(tmp_path):
    return MetricsFile(tmp_path / "metrics.jsonl")


def lines(file):
    return [json.loads(line) for line in file.path.read_text().splitlines()]


def test_a_line_each(file):
    file.on_record({"event": "step", "step": 1, "loss": 0.5})
    file.on_record({"event": "step", "step": 2, "loss": float("nan")})
    assert lines(file) == [
        {"event": "step", "step": 1, "loss": 0.5},
        {"event": "step", "step": 2, "loss": "nan"},  # JSON has no NaN
    ]


def test_what_came_after_the_checkpoint_is_cut_off(file):
    assert file.get_state() == {"bytes": 0}
    file.on_record({"step": 1})
    state = file.get_state()
    file.on_record({"step": 2})
    again = MetricsFile(file.path)
    again.set_state(state)
    again.on_record({"step": 3})
    assert lines(file) == [{"step": 1}, {"step": 3}]
    again.set_state({"bytes": 1000})  # it is shorter: nothing is filled up
    assert lines(file) == [{"step": 1}, {"step": 3}]


@pytest.mark.parametrize("path, why", [("gone/a", "No such file"), ("/dev/full", "No space left")])
def test_what_cannot_be_written_is_named(tmp_path, path, why):
    with pytest.raises(CannotSave, match=f"{path} cannot be written: {why}"):
        MetricsFile(tmp_path / path).on_record({"step": 1})


def test_a_worker_that_is_not_the_chief_writes_nothing():
    file = MetricsFile(None)
    file.on_record({"step": 1})
    file.set_state({"bytes": 0})
    assert file.get_state() == {"bytes": 0}
