"""What `test_resume` shows of whole runs, piece by piece: each part of a checkpoint comes back."""

import dataclasses

import keras
import numpy as np
import pytest

from callbacks import checkpoint_files
from callbacks import restore as restore_module
from callbacks.checkpoint import Checkpoint, dropout_seeds
from callbacks.restore import Restore
from distribution.global_batch import MetricStates
from tests.support.tiny_recipe import Counter


def new_model():
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile("adam", "mse", weighted_metrics=["mae"], jit_compile=False)
    return model


def train(model, batches):
    rng = np.random.default_rng(0)
    for _ in range(batches):
        x = rng.normal(size=(4, 2)).astype("float32")
        model.train_on_batch(x, x.sum(axis=1, keepdims=True))


@pytest.fixture
def saved(tmp_path):
    """A model after three steps of a first epoch of five, and its checkpoint."""
    model = new_model()
    train(model, 3)
    counter = Counter()
    counter.count = 3
    checkpoint = Checkpoint(
        tmp_path / "checkpoints", every=1, stateful_callbacks={"Counter": counter}
    ).count_steps(5, 10)
    checkpoint.set_model(model)
    checkpoint.step = 3
    checkpoint.save()
    return model, checkpoint_files.newest(tmp_path / "checkpoints")


def arrays(variables):
    return [keras.ops.convert_to_numpy(v) for v in variables]


def test_everything_comes_back(saved, monkeypatch):
    model, info = saved
    assert (info.step, info.epochs_done, info.steps_into_epoch) == (3, 0, 3)
    other = new_model()
    train(other, 1)  # builds optimizer and metrics
    counter = Counter()
    new = Counter()  # was not there when the run began
    restore = Restore(info, {"Counter": counter, "new": new}).count_steps(5, 10)
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
    assert (counter.count, counter.step) == (3, 3)
    assert new.step == 3 and new.count == 0
    begun = []
    monkeypatch.setattr(restore_module.keras_compat, "start_in_mid_epoch", begun.append)
    restore.on_epoch_begin(1)
    assert begun == []
    restore.on_epoch_begin(0)
    assert begun == [3]
    assert MetricStates.of(other).read() == MetricStates.of(model).read()
    assert counter.epoch == 0


def test_an_epochs_metrics_are_those_from_before_the_validation(saved):
    _, info = saved
    info.state["epoch_logs"] = {"loss": 0.5}
    restore = Restore(info, {})
    logs = {"val_loss": 1.0}
    restore.on_epoch_end(0, logs)
    assert logs == {"val_loss": 1.0, "loss": 0.5}
    logs = {"loss": 2.0}
    restore.on_epoch_end(1, logs)
    assert logs == {"loss": 2.0}


def test_without_a_checkpoint_it_does_nothing():
    restore = Restore(None, {})
    restore.on_train_begin()
    restore.on_epoch_begin(0)
    restore.on_epoch_end(0, {})


@pytest.mark.parametrize("step, epoch", [(0, 0), (5, 0), (6, 1), (10, 1)])
def test_the_epoch_of_a_run_in_which_no_epoch_begins_any_more(saved, step, epoch):
    model, info = saved
    counter = Counter()
    info = dataclasses.replace(info, step=step)
    restore = Restore(info, {"Counter": counter}).count_steps(5, 10)
    restore.set_model(model)
    restore.on_train_begin()
    assert counter.epoch == epoch
