import json
import logging

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


@pytest.mark.parametrize("left", [0, 1, 9, 14, 15, 24])
def test_a_file_that_somebody_cut_keeps_its_whole_lines(file, left, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("recipes"), "propagate", True)
    for step in (1, 2, 3):
        file.on_record({"step": step})  # 12 bytes each
    state = file.get_state()
    content = file.path.read_bytes()
    file.path.write_bytes(content[:left])
    file.set_state(state)
    assert f"{left} bytes, but the checkpoint was taken at {len(content)}" in caplog.text
    file.on_record({"step": 4})
    whole = content[:left].count(b"\n")
    assert lines(file) == [*({"step": n} for n in range(1, whole + 1)), {"step": 4}]


def test_a_file_that_is_gone(file, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("recipes"), "propagate", True)
    file.set_state({"bytes": 100})
    assert "something cut it" in caplog.text and not file.path.exists()


def test_what_cannot_be_written_is_named(file, tmp_path):
    file.path = tmp_path / "gone" / "metrics.jsonl"
    with pytest.raises(CannotSave, match="metrics.jsonl cannot be written: No such file"):
        file.on_record({"step": 1})


def test_a_full_disk():
    file = MetricsFile("/dev/full")
    with pytest.raises(CannotSave, match="/dev/full cannot be written: No space left on device"):
        file.on_record({"step": 1})


def test_a_worker_that_is_not_the_chief_writes_nothing():
    file = MetricsFile(None)
    file.on_record({"step": 1})
    file.set_state({"bytes": 5})
    assert file.get_state() == {"bytes": 0}
