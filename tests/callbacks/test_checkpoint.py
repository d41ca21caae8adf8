"""Tests when a checkpoint is saved, that it is whole on disk, and that every part is restored."""

import contextlib
import math
import os
import shutil

import keras
import numpy as np
import pytest

from callbacks import checkpoint as module
from callbacks.checkpoint import Checkpoint, Restore, dropout_seeds, newest, read, reopened, write
from callbacks.errors import BadLoss, CannotSave, Stopped
from data import files
from distribution.metric_states import MetricStates
from tests.support import damaged
from tests.support.tiny_recipe import Counter

RECORDS = {"history": {"loss": [3.0, 2.0, 1.0]}}


def save(folder, step, content=b"weights", **more):
    state = {"step": step, "epochs_done": 0, "steps_into_epoch": step} | more
    target = folder / f"step-{step:08d}"
    write(target, state, lambda path: path.write_bytes(content), target.parent)
    return target


def names(folder):
    return sorted(os.listdir(folder))


class TestOnDisk:
    def test_nothing_is_written_in_its_place(self, tmp_path):
        """While the weights are written, what is there is the old checkpoint."""
        target = save(tmp_path, 3, b"old")

        def write_new(path):
            assert (target / "model.weights.h5").read_bytes() == b"old"
            assert newest(tmp_path, set_aside=False).step == 3
            path.write_bytes(b"new")

        write(
            target, {"step": 3, "epochs_done": 1, "steps_into_epoch": 0}, write_new, target.parent
        )
        assert newest(tmp_path).epochs_done == 1 and names(tmp_path) == ["step-00000003"]
        assert (target / "model.weights.h5").read_bytes() == b"new"

    def test_a_kill_between_the_two_renames_loses_nothing(self, tmp_path, monkeypatch):
        save(tmp_path, 3, b"old")

        def replace(source, target):
            os._exit(0)

        monkeypatch.setattr(os, "replace", replace)
        if os.fork() == 0:
            save(tmp_path, 3, b"new")
        os.wait()
        monkeypatch.undo()
        assert newest(tmp_path, set_aside=False) is None
        assert (newest(tmp_path).folder / "model.weights.h5").read_bytes() == b"old"
        save(tmp_path, 4)
        assert names(tmp_path) == ["step-00000003", "step-00000004"], "what was left is removed"

    def test_a_disk_that_is_full(self, tmp_path):
        save(tmp_path, 1)

        def full(path):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        with pytest.raises(CannotSave, match="No space left on device.*step-00000001"):
            write(tmp_path / "step-00000002", {"step": 2}, full, tmp_path)
        with pytest.raises(CannotSave, match="best cannot be written.*step-00000001"):
            write(tmp_path.parent / "best", {"step": 2}, full, tmp_path)
        assert names(tmp_path) == ["step-00000001"]

    def test_damaged_ones_are_set_aside(self, tmp_path, caplog):
        save(tmp_path, 1)
        damaged.flip_a_bit(save(tmp_path, 2) / "model.weights.h5")
        (save(tmp_path, 3) / "state.json").unlink()
        (save(tmp_path, 4) / "SHA256SUMS").write_text("nonsense")
        assert newest(tmp_path, set_aside=False).step == 1 and "step-00000004" in names(tmp_path)
        assert newest(tmp_path).step == 1
        aside = [f"damaged-step-0000000{step}" for step in (2, 3, 4)]
        assert names(tmp_path) == [*aside, "step-00000001"]
        damaged.flip_a_bit(tmp_path / "step-00000001" / "state.json")
        assert newest(tmp_path) is None
        ends = [message.rpartition(": ")[2] for message in caplog.messages]
        assert ends == ["the one before is used"] * 6 + ["no other one is left"]

    def test_copies_and_archives_of_a_user_are_not_checkpoints(self, tmp_path):
        shutil.copytree(save(tmp_path, 8), tmp_path / "step-00000008-backup")
        (tmp_path / "step-00000009.tar.gz").touch()
        (tmp_path / "step-00000009").touch()  # not a folder
        before = names(tmp_path)
        assert newest(tmp_path).folder == tmp_path / "step-00000008"
        assert names(tmp_path) == before, "nothing is set aside"

    def test_the_newest_has_the_largest_step(self, tmp_path):
        for step in (99_999_999, 100_000_000):
            save(tmp_path, step)
        assert newest(tmp_path).step == 100_000_000

    def test_a_finished_run_is_reopened_within_its_epoch(self, tmp_path):
        save(tmp_path, 20, epochs_done=3, callbacks={"records": RECORDS})
        found = reopened(newest(tmp_path), 9)
        assert (found.epochs_done, found.steps_into_epoch) == (2, 2)
        assert found.state["callbacks"]["records"]["history"] == {"loss": [3.0, 2.0]}
        some = {"history": {"val_loss": [3.0, 2.0]}, "epochs": {"val_loss": [2, 3]}}
        save(tmp_path, 20, epochs_done=3, callbacks={"records": some})
        found = reopened(newest(tmp_path), 9).state["callbacks"]["records"]
        assert found == {"history": {"val_loss": [3.0]}, "epochs": {"val_loss": [2]}}
        save(tmp_path, 20, epochs_done=3, callbacks={"records": RECORDS})
        whole = reopened(newest(tmp_path), 10)
        assert (whole.epochs_done, whole.steps_into_epoch) == (2, 0)
        assert whole.state["callbacks"]["records"] == RECORDS


@pytest.fixture
def made(tmp_path, fake_model, monkeypatch):
    """A callback within epochs of three steps; no metric is read."""

    class NoStates:
        @staticmethod
        def of(model):
            return NoStates

        @staticmethod
        def read():
            return [[]]

    monkeypatch.setattr(module, "MetricStates", NoStates)

    def make(total_steps=9, **arguments):
        made = Checkpoint(tmp_path / "checkpoints", **({"every": 100, "keep": 9} | arguments))
        made.count_steps(steps_per_epoch=3, total_steps=total_steps)
        made.set_model(fake_model)
        return made

    return make


def epoch(callback, number, steps=3, **logs):
    callback.on_epoch_begin(number)
    for batch in range(steps):
        callback.on_train_batch_end(batch, {"loss": 1.0})
    callback.on_epoch_end(number, logs)


class TestWhen:
    @pytest.mark.parametrize(
        "best, mode, values, expected",
        [
            ("val_accuracy", "auto", [0.5, 0.7, 0.6], 2),
            ("val_loss", "auto", [0.5, 0.4, 0.6], 2),
            ("val_accuracy", "auto", [0.5, 0.5, 0.5], 1),
            ("val_loss", "auto", [0.9, 0.8, 0.7], 3),
            ("val_auc", "auto", [0.6, 0.9, 0.8], 2),
            ("val_accuracy_loss", "auto", [0.6, 0.9, 0.5], 3),
            ("val_loss", "max", [0.1, 0.3, 0.2], 2),
        ],
    )
    def test_the_best_is_kept(self, made, tmp_path, best, mode, values, expected):
        callback = made(best=best, best_mode=mode)
        for number, value in enumerate(values):
            epoch(callback, number, **{best: value})
        assert read(tmp_path / "best").step == 3 * expected
        assert callback.best_value == values[expected - 1] and callback.best_epoch == expected
        assert files.damage(tmp_path / "best", ("model.weights.h5", "state.json")) is None

    def test_a_best_epoch_that_the_run_cuts_short_is_kept(self, made, tmp_path):
        callback = made(total_steps=8, best="val_loss")
        for number, steps in enumerate((3, 3, 2)):
            epoch(callback, number, steps, val_loss=1.0 - number)
        assert read(tmp_path / "best").step == 8
        assert newest(tmp_path / "checkpoints").state["finished"]

    def test_without_a_better_one_it_ends(self, made, fake_model, tmp_path):
        callback = made(best="val_loss", patience=2)
        epoch(callback, 0, val_loss=1.0)
        epoch(callback, 1, val_loss=1.0)
        assert not fake_model.stop_training
        epoch(callback, 2, val_loss=1.5)
        assert fake_model.stop_training and newest(tmp_path / "checkpoints").state["finished"]

    def test_another_metric_begins_again(self, made, tmp_path):
        epoch(made(best="val_loss"), 0, val_loss=4.6)
        restored = newest(tmp_path / "checkpoints")
        assert made(best="val_loss", restored=restored).best_value == 4.6
        callback = made(best="val_accuracy", patience=1, restored=restored)
        assert callback.best_value is None and callback.best_epoch == 1
        epoch(callback, 1, val_accuracy=0.1)
        assert callback.best_value == 0.1 and not callback.model.stop_training

    @pytest.mark.parametrize(
        "mode, better", [("min", "epoch 2 had a better val_loss (1.0000)"), ("max", None)]
    )
    def test_one_that_is_added_compares_the_epochs_from_then_on(
        self, made, tmp_path, caplog, monkeypatch, mode, better
    ):
        history = Counter()
        history.get_state = lambda: {"history": {"val_loss": [3.0, 1.0]}}
        callback = made(total_steps=6, stateful_callbacks={"records": history})
        for number in range(2):
            epoch(callback, number, val_loss=1.0)
        arguments = dict(best="val_loss", best_mode=mode, patience=9, every=100)
        arguments["stateful_callbacks"] = {"records": history}
        for number, value in ((2, 4.0), (3, 5.0)):
            callback = made(
                total_steps=12, restored=newest(tmp_path / "checkpoints"), **arguments
            ).count_steps(3, 12, 3 * number)
            epoch(callback, number, val_loss=value)
        monkeypatch.setattr(callback, "_best_checkpoint", lambda: None)
        with caplog.at_level("INFO", logger="recipes"):
            callback.on_train_end()
        if better is None:
            assert callback.notes == [] and "the best of epochs 3 to 4" in caplog.text
        else:
            assert callback.notes[0].startswith(better)
            assert callback.notes[0].endswith("--keep-best was added or changed after epoch 2")

    def test_another_direction_begins_again(self, made, tmp_path):
        callback = made(best="val_loss")
        for number, value in enumerate((4.6, 2.0)):
            epoch(callback, number, val_loss=value)
        restored = newest(tmp_path / "checkpoints")
        for mode, best in (("auto", 2.0), ("min", 2.0), ("max", 1.0)):
            callback = made(best="val_loss", best_mode=mode, restored=restored)
            callback.on_epoch_begin(2)
            callback.on_epoch_end(2, {"val_loss": 3.0 if mode != "max" else 1.0})
            assert callback.best_value == best

    def test_a_worker_that_is_not_the_chief_writes_nothing(self, made, tmp_path):
        callback = made(is_chief=False, best="val_loss")
        epoch(callback, 0, val_loss=1.0)
        assert names(tmp_path) == [] and callback.best_value == 1.0

    def test_where_it_saves_and_how_many_are_kept(self, made, tmp_path):
        callback = made(every=2, keep=3)
        for number in range(3):
            epoch(callback, number)
        folder = tmp_path / "checkpoints"
        assert names(folder) == ["step-00000006", "step-00000008", "step-00000009"]
        states = [read(folder / name).state for name in names(folder)]
        assert [state["finished"] for state in states] == [False, False, True]
        found = [(s["epochs_done"], s["steps_into_epoch"]) for s in states]
        assert found == [(2, 0), (2, 2), (3, 0)]

    def test_a_copy_of_a_user_is_not_removed(self, made, tmp_path):
        callback = made(keep=1)
        epoch(callback, 0)
        folder = tmp_path / "checkpoints"
        shutil.copytree(folder / "step-00000003", folder / "step-00000003.good")
        epoch(callback, 1)
        assert names(folder) == ["step-00000003.good", "step-00000006"]

    def test_a_stop_is_noticed_after_each_step(self, made):
        callback = made(asked_to_stop=lambda: True)
        with pytest.raises(Stopped):
            callback.on_train_batch_end(0, {"loss": 1.0})

    @pytest.mark.parametrize("asked", [False, True])
    def test_a_stop_checks_the_loss_that_nothing_has_read(self, asked, made):
        def bad_loss():
            raise BadLoss

        callback = made(asked_to_stop=lambda: asked, check_loss=bad_loss)
        with pytest.raises(BadLoss) if asked else contextlib.nullcontext():
            callback.on_train_batch_end(0, {"loss": math.nan})


def new_model(half=False):
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    optimizer = keras.optimizers.Adam()
    if half:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=2)
    model.compile(optimizer, "mse", weighted_metrics=["mae"], jit_compile=False)
    return model


def train(model, batches):
    rng = np.random.default_rng(0)
    for _ in range(batches):
        x = rng.normal(size=(4, 2)).astype("float32")
        model.train_on_batch(x, x.sum(axis=1, keepdims=True))


def saved(model, folder):
    """Three steps of a first epoch of five, and their checkpoint."""
    train(model, 3)
    counter = Counter()
    counter.count = 3
    checkpoint = Checkpoint(folder, every=1, stateful_callbacks={"Counter": counter})
    checkpoint.count_steps(5, 10, 3).set_model(model)
    checkpoint.save()
    return newest(folder)


def arrays(variables):
    return [keras.ops.convert_to_numpy(v) for v in variables]


class TestRestore:
    @pytest.mark.parametrize("half", [False, True], ids=["float32", "loss scale"])
    def test_everything_comes_back(self, half, tmp_path, monkeypatch):
        model = new_model(half)
        info = saved(model, tmp_path)
        assert (info.step, info.epochs_done, info.steps_into_epoch) == (3, 0, 3)
        other = new_model(half)
        train(other, 1)  # builds optimizer and metrics
        if half:  # both have left their first values
            scales = [(m.optimizer.dynamic_scale, m.optimizer.step_counter) for m in (model, other)]
            assert [[float(v) for v in pair] for pair in scales] == [[2**16, 1], [2**15, 1]]
            other.optimizer.step_counter.assign(0)
        counter = Counter()
        new = Counter()  # was not there when the run began
        restore = Restore(info, {"Counter": counter, "new": new}).count_steps(5, 10, 3)
        restore.set_model(other)
        restore.on_train_begin()
        for ours, theirs in (
            (model.weights, other.weights),
            (model.optimizer.variables, other.optimizer.variables),
            (dropout_seeds(model), dropout_seeds(other)),
        ):
            assert len(ours) == len(theirs) > 0
            for a, b in zip(arrays(ours), arrays(theirs), strict=True):
                np.testing.assert_array_equal(a, b)
        if half:
            assert [float(v) for v in scales[1]] == [2**16, 1]
        assert (counter.count, new.count) == (3, 0)
        begun = []
        monkeypatch.setattr(module.fitting, "start_in_mid_epoch", begun.append)
        restore.on_epoch_begin(1)
        assert begun == []
        restore.on_epoch_begin(0)
        assert begun == [3]
        assert MetricStates.of(other).read() == MetricStates.of(model).read()

    def test_a_state_of_numpy_comes_back_as_numbers_and_lists(self, tmp_path):
        class Sums(Counter):
            def get_state(self):
                return {"count": np.int64(3), "sums": np.array([0.25, 2], np.float32)}

        model = new_model()
        train(model, 1)
        checkpoint = Checkpoint(tmp_path, every=1, stateful_callbacks={"Sums": Sums()})
        checkpoint.count_steps(5, 10, 1).set_model(model)
        checkpoint.save()
        assert newest(tmp_path).state["callbacks"]["Sums"] == {"count": 3, "sums": [0.25, 2.0]}

    def test_an_epochs_metrics_are_those_from_before_the_validation(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module.fitting, "start_in_mid_epoch", lambda batch: None)
        model = new_model()
        train(model, 5)
        expected = {name: float(value) for name, value in model.get_metrics_result().items()}
        checkpoint = Checkpoint(tmp_path, every=1).count_steps(5, 10, 4)
        checkpoint.set_model(model)
        model.stop_training = False
        checkpoint.on_train_batch_end(4)
        model.evaluate(np.ones((4, 2), "float32"), np.zeros((4, 1), "float32"), verbose=0)
        checkpoint.save_stopped()
        restore = Restore(newest(tmp_path), {}).count_steps(5, 10, 5)
        restore.set_model(model)
        for epoch_number, logs, found in (
            (0, {"val_loss": 1.0}, {"val_loss": 1.0} | expected),
            (1, {"loss": 2.0}, {"loss": 2.0}),
        ):
            restore.on_epoch_begin(epoch_number)
            restore.on_epoch_end(epoch_number, logs)
            assert logs == found
