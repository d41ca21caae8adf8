"""When a checkpoint is taken, and which one is the best."""

import pytest

from callbacks import checkpoint as checkpoint_module
from callbacks import checkpoint_files
from callbacks.checkpoint import Checkpoint
from callbacks.errors import Stopped


@pytest.fixture
def made(tmp_path, fake_model, monkeypatch):
    """A callback within epochs of three steps, in a run of nine; no metric is read."""

    class NoStates:
        @staticmethod
        def of(model):
            return NoStates

        @staticmethod
        def read():
            return [[]]

    monkeypatch.setattr(checkpoint_module, "MetricStates", NoStates)

    def make(**arguments):
        made = Checkpoint(tmp_path / "checkpoints", **({"every": 100, "keep": 9} | arguments))
        made.count_steps(steps_per_epoch=3, total_steps=9)
        made.set_model(fake_model)
        return made

    return make


def epoch(callback, number, **logs):
    callback.on_epoch_begin(number)
    for batch in range(3):
        callback.on_train_batch_end(batch, {"loss": 1.0})
    callback.on_epoch_end(number, logs)


@pytest.mark.parametrize(
    "best, values, expected",
    [
        ("val_accuracy", [0.5, 0.7, 0.6], 2),
        ("val_loss", [0.5, 0.4, 0.6], 2),
        ("val_accuracy", [0.5, 0.5, 0.5], 1),
        ("val_loss", [0.9, 0.8, 0.7], 3),
        ("val_auc", [0.6, 0.9, 0.8], 2),
        ("val_accuracy_loss", [0.6, 0.9, 0.5], 3),
    ],
)
def test_the_best_is_kept(made, tmp_path, best, values, expected):
    callback = made(best=best)
    for number, value in enumerate(values):
        epoch(callback, number, **{best: value})
    assert checkpoint_files.read(tmp_path / "best").step == 3 * expected
    assert callback.best_value == values[expected - 1] and callback.best_epoch == expected


def test_without_a_better_one_it_ends(made, fake_model):
    callback = made(best="val_loss", patience=2)
    epoch(callback, 0, val_loss=1.0)
    epoch(callback, 1, val_loss=1.0)
    assert not fake_model.stop_training
    epoch(callback, 2, val_loss=1.5)
    assert fake_model.stop_training


def test_a_worker_that_is_not_the_chief_writes_nothing(made, tmp_path):
    callback = made(is_chief=False, best="val_loss")
    epoch(callback, 0, val_loss=1.0)
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "best").exists()
    assert callback.best_value == 1.0


def test_where_it_saves_and_how_many_are_kept(made, tmp_path):
    callback = made(every=2, keep=3)
    for number in range(3):
        epoch(callback, number)
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["step-00000006", "step-00000008", "step-00000009"]
    states = [checkpoint_files.read(tmp_path / "checkpoints" / name).state for name in found]
    assert [state["finished"] for state in states] == [False, False, True]
    assert [(s["epochs_done"], s["steps_into_epoch"]) for s in states] == [(2, 0), (2, 2), (3, 0)]


def test_a_wish_to_stop_is_heard_after_each_step_and_each_batch_of_an_evaluation(made):
    callback = made(asked_to_stop=lambda: True)
    with pytest.raises(Stopped):
        callback.on_train_batch_end(0, {"loss": 1.0})
    with pytest.raises(Stopped):
        callback.on_test_batch_end(0)


def test_it_holds_what_the_callbacks_hand_over(made, tmp_path):
    class Other:
        def get_state(self):
            return {"count": 5}

    callback = made(stateful_callbacks={"other": Other()})
    epoch(callback, 0)
    assert checkpoint_files.newest(tmp_path / "checkpoints").state["callbacks"] == {
        "other": {"count": 5}
    }


def test_a_best_copy_that_was_cut_off_is_made_up_for(made, tmp_path):
    import shutil

    epoch(made(best="val_loss"), 0, val_loss=1.0)
    shutil.rmtree(tmp_path / "best")
    restored = checkpoint_files.newest(tmp_path / "checkpoints")
    made(best="val_loss", restored=restored).on_train_begin()
    assert checkpoint_files.is_copy_of(tmp_path / "best", 3)


@pytest.mark.parametrize("content", [b"{}", b"null", b"\xff", b""])
def test_a_best_copy_that_is_damaged_is_made_again(made, tmp_path, content):
    epoch(made(best="val_loss"), 0, val_loss=1.0)
    (tmp_path / "best" / "state.json").write_bytes(content)
    restored = checkpoint_files.newest(tmp_path / "checkpoints")
    made(best="val_loss", restored=restored).on_train_begin()
    assert checkpoint_files.is_copy_of(tmp_path / "best", 3)


def test_another_metric_begins_anew(made, tmp_path):
    epoch(made(best="val_loss"), 0, val_loss=4.6)
    restored = checkpoint_files.newest(tmp_path / "checkpoints")
    callback = made(best="val_accuracy", patience=1, restored=restored)
    assert callback.best_value is None and callback.best_epoch == 1
    epoch(callback, 1, val_accuracy=0.1)
    assert callback.best_value == 0.1 and not callback.model.stop_training
