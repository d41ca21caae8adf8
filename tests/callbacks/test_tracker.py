import json
import math

import pytest

from callbacks.errors import CannotSave
from callbacks.tracker import Tracker


class Fake(Tracker):
    """A tracker whose other side is a list that outlives the process."""

    name = "fake"

    def __init__(self, run_dir, there):
        super().__init__(run_dir, {"seed": 0})
        self.there = there

    def open_run(self, run_id):
        self.there.append(("open", run_id))
        return run_id or "number 7"

    def send(self, step, row):
        self.there.append((step, row))

    def close_run(self, finished):
        self.there.append(("close", finished))


def step(number, **numbers):
    return {"event": "step", "step": number, "epoch": 1, "loss": float(number)} | numbers


@pytest.fixture
def there():
    return []


def begin(tmp_path, there, state=None):
    tracker = Fake(tmp_path, there)
    if state is not None:
        tracker.set_state(json.loads(json.dumps(state)))
    tracker.on_train_begin()
    return tracker


def test_all_of_a_step_is_one_row_named_by_split(tmp_path, there):
    tracker = begin(tmp_path, there)
    tracker.on_record(step(1, learning_rate=0.5))
    tracker.on_record({"event": "epoch", "step": 1, "epoch": 1, "loss": 2.0, "val_loss": 3.0})
    tracker.on_record({"event": "evaluation", "step": 1, "epoch": 1, "split": "test", "loss": 4.0})
    assert there == [("open", None)]  # the step may have more to come
    tracker.on_record(step(2, loss=math.nan))
    row = {"train/loss": 1.0, "train/learning_rate": 0.5, "train/epoch_loss": 2.0}
    assert there[1:] == [(1, row | {"validation/loss": 3.0, "test/loss": 4.0})]
    tracker.on_record(step(3))
    tracker.finish()
    tracker.close()  # once is enough
    assert there[2:] == [(3, {"train/loss": 3.0}), ("close", True)]  # a row without numbers is none


def test_a_killed_run_resumes_the_same_run_without_a_double_or_a_gap(tmp_path, there):
    """Killed at step 5, after a checkpoint at step 3 whose row had more to come."""
    first = begin(tmp_path, there)
    for number in (1, 2, 3):
        first.on_record(step(number))
    state = first.get_state()
    first.on_record({"event": "evaluation", "step": 3, "epoch": 1, "split": "test", "loss": 9.0})
    first.on_record(step(4))
    first.on_record(step(5))  # never sent: killed

    second = begin(tmp_path, there, state)
    second.on_record({"event": "evaluation", "step": 3, "epoch": 1, "split": "test", "loss": 9.0})
    for number in (4, 5, 6):
        second.on_record(step(number))
    second.finish()
    assert [item[1] for item in there if item[0] == "open"] == [None, "number 7"]
    rows = [item for item in there if isinstance(item[0], int)]
    assert [number for number, _ in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[2][1] == {"train/loss": 3.0, "test/loss": 9.0}


def test_the_row_under_way_of_a_stopped_run_is_sent_by_the_resumed_one(tmp_path, there):
    first = begin(tmp_path, there)
    first.on_record(step(1))
    state = first.get_state()
    first.close()
    assert there[-1] == ("close", False)
    second = begin(tmp_path, there, state)
    second.on_record({"event": "epoch", "step": 1, "epoch": 1, "loss": 2.0})
    second.finish()
    assert there[3:] == [(1, {"train/loss": 1.0, "train/epoch_loss": 2.0}), ("close", True)]


def test_only_the_chief_sends(there, tmp_path):
    tracker = Fake(None, there)
    for silent in (tracker, Tracker(tmp_path)):
        silent.on_train_begin()
        silent.on_record(step(1))
        silent.finish()
        silent.close()
        assert silent.get_state() == {"row": {}, "step": 0}
    assert there == [] and list(tmp_path.iterdir()) == []


def test_a_tracker_that_refuses_stops_the_run_before_it_trains(tmp_path, there):
    tracker = Fake(tmp_path, there)
    tracker.open_run = lambda run_id: 1 / 0
    with pytest.raises(CannotSave, match="^--tracker fake: division by zero$"):
        tracker.on_train_begin()
    tracker.close()
    assert there == []


def test_a_tracker_that_goes_away_stops_nothing(tmp_path, there, caplog):
    tracker = begin(tmp_path, there)
    send, tracker.send = tracker.send, lambda step, row: 1 / 0
    tracker.on_record(step(1))
    tracker.on_record(step(2))
    tracker.send = send
    tracker.on_record(step(3))
    tracker.finish()
    assert "--tracker fake: division by zero; the row of step 1 is lost" in caplog.text
    assert [item[0] for item in there] == ["open", 2, 3, "close"]
