import logging
import math
import threading

import keras
import numpy as np
import pytest

from callbacks.errors import BadLoss, Stopped
from callbacks.late_numbers import LateNumbers
from callbacks.stopping import StopAtStep, StopEvaluation, StopOnBadLoss
from data.errors import DataError


def test_it_ends_at_the_last_step_in_mid_epoch(fake_model):
    callback = StopAtStep().count_steps(steps_per_epoch=4, total_steps=6)
    callback.set_model(fake_model)
    for epoch, batches in ((0, 4), (1, 1)):
        callback.on_epoch_begin(epoch)
        for batch in range(batches):
            callback.on_train_batch_end(batch, {})
            assert not fake_model.stop_training
    callback.on_train_batch_end(1, {})
    assert fake_model.stop_training
    callback.on_epoch_end(1)


@pytest.mark.parametrize("batches, stopped", [(4, False), (3, True), (3, False), (0, False)])
def test_an_epoch_that_the_data_end_is_an_error(fake_model, batches, stopped):
    callback = StopAtStep().count_steps(steps_per_epoch=4, total_steps=8)
    callback.set_model(fake_model)
    callback.on_epoch_begin(0)
    for batch in range(batches):
        callback.on_train_batch_end(batch, {})
    fake_model.stop_training = stopped  # by another callback
    if batches == 4 or stopped:
        callback.on_epoch_end(0)
        return
    with pytest.raises(DataError, match=f"^train_data ended after {batches} of 8 steps: repeat"):
        callback.on_epoch_end(0)


@pytest.mark.parametrize("asked_from", [2, 9])
def test_an_evaluation_ends_after_the_batch_in_which_it_was_asked_to(asked_from):
    seen = []

    def asked_to_stop():
        seen.append(1)
        return len(seen) >= asked_from

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse", run_eagerly=True)
    options = dict(batch_size=1, verbose=0, callbacks=[StopEvaluation(asked_to_stop)])
    x = np.ones((4, 1))
    if asked_from == 2:
        with pytest.raises(Stopped):
            model.evaluate(x, x, **options)
    else:
        model.evaluate(x, x, **options)
    assert len(seen) == min(asked_from, 4)


def begun(folder, model, optimizer):
    made = StopOnBadLoss(folder).count_steps(10, 20)
    model.optimizer = optimizer
    made.set_model(model)
    made.on_train_begin()
    return made


@pytest.fixture
def callback(fake_model, tmp_path):
    (tmp_path / "step-00000001").mkdir()
    return begun(tmp_path, fake_model, keras.optimizers.SGD(0.5))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_it_names_step_rate_and_checkpoint(callback, loss):
    callback.on_train_batch_end(0, {"loss": 1.0})
    with pytest.raises(BadLoss) as caught:
        callback.on_train_batch_end(1, {"loss": loss})
    said = str(caught.value)
    assert f"the loss is {loss} at step 2 (learning rate 0.5)" in said
    assert "step-00000001; a lower" in said and "--clip-norm" in said


class TestOnADevice:
    """The loss of a step is read when the next one has begun, or at once where the run logs."""

    @pytest.fixture
    def callback(self, fake_model, tmp_path):
        made = begun(tmp_path, fake_model, keras.optimizers.SGD(0.5))
        return made.count_steps(10, 20, read_every=(None, 4))

    def test_it_reads_each_loss_once(self, callback, on_device):
        read_after = []
        for batch in range(10):
            callback.on_train_batch_end(batch, {"loss": on_device(batch + 1, 1.0)})
            read_after.append(len(on_device.reads))
        # Steps 4 and 8 are due, and step 10 ends the epoch.
        assert read_after == [0, 1, 2, 4, 4, 5, 6, 8, 8, 10]
        assert on_device.reads == list(range(1, 11))

    @pytest.mark.parametrize("bad, raised_at", [(1, 2), (3, 4), (4, 4), (10, 10)])
    def test_it_names_the_step_of_the_loss_and_its_rate(self, callback, bad, raised_at):
        decay = keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0)
        callback.model.optimizer = keras.optimizers.SGD(decay)
        callback.model.optimizer.iterations.assign(raised_at)
        for batch in range(raised_at - 1):
            callback.on_train_batch_end(batch, {"loss": math.nan if batch + 1 == bad else 1.0})
        line = rf"the loss is nan at step {bad} \(learning rate {1.1 - bad / 10:.3g}\)"
        with pytest.raises(BadLoss, match=line):
            callback.on_train_batch_end(raised_at - 1, {"loss": math.nan})

    def test_a_thread_reads_from_a_gpu_before_the_next_step_begins(self, callback, on_device):
        asked, computed = threading.Event(), threading.Event()

        def wait():
            asked.set()
            assert computed.wait(60)

        on_device.wait, gpu = wait, "/job:localhost/replica:0/task:0/device:GPU:0"
        callback.on_train_batch_end(0, LateNumbers({"loss": on_device(1, math.nan, gpu)}))
        assert asked.wait(20) and not on_device.reads  # asked for, and nothing waits for it
        computed.set()
        with pytest.raises(BadLoss, match="the loss is nan at step 1 "):
            callback.on_train_batch_end(1, LateNumbers({"loss": on_device(2, 1.0, gpu)}))
        assert on_device.reads[:1] == [1] and on_device.reads.count(1) == 1
        callback.on_train_end()
        assert not [t for t in threading.enumerate() if t.name.startswith("loss")]

    def test_a_check_reads_the_last_one(self, callback):
        callback.check()
        callback.on_train_batch_end(0, {"loss": math.nan})
        with pytest.raises(BadLoss, match="at step 1 "):
            callback.check()
        callback.check()

    def test_an_epoch_that_a_callback_has_ended_is_checked(self, callback):
        callback.on_train_batch_end(0, {"loss": math.nan})
        with pytest.raises(BadLoss, match="the loss is nan at step 1 "):
            callback.on_epoch_end(0, {"val_loss": 1.0})


def test_it_checks_the_validation(callback):
    callback.on_epoch_end(0, {"loss": math.nan, "val_loss": 1.0})
    with pytest.raises(BadLoss, match="val_accuracy is nan .*the metric itself is not a number"):
        callback.on_epoch_end(0, {"val_loss": 1.0, "val_accuracy": math.nan})
    for name in ("val_loss", "val_accuracy"):
        logs = {"val_loss": math.nan, name: math.nan}
        with pytest.raises(BadLoss, match="is nan .*a lower --base-learning-rate"):
            callback.on_epoch_end(0, logs)


class TestHalfPrecision:
    @pytest.fixture
    def callback(self, fake_model, monkeypatch, tmp_path):
        monkeypatch.setattr(logging.getLogger("recipes"), "propagate", True)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        optimizer.build([keras.Variable([1.0])])
        return begun(tmp_path, fake_model, optimizer)

    def test_a_skipped_step_is_no_bad_loss(self, callback, fake_model, caplog):
        scale = fake_model.optimizer.dynamic_scale
        scale.assign(scale / 2)
        callback.on_train_batch_end(0, {"loss": math.inf})
        assert "the step was skipped" in caplog.text and fake_model.metrics_were_reset == 1
        callback.on_train_batch_end(1, {"loss": 1.0})
        with pytest.raises(BadLoss, match="checkpoint: none"):  # nothing was skipped
            callback.on_train_batch_end(2, {"loss": math.nan})

    def test_a_scale_below_one_helps_nothing(self, callback, fake_model):
        fake_model.optimizer.dynamic_scale.assign(0.5)
        with pytest.raises(BadLoss):
            callback.on_train_batch_end(0, {"loss": math.nan})
