import logging
import math

import keras
import pytest

from callbacks.errors import BadLoss
from callbacks.stop_on_bad_loss import StopOnBadLoss


@pytest.fixture
def callback(fake_model):
    fake_model.optimizer = keras.optimizers.SGD(0.5)
    made = StopOnBadLoss(lambda: "the/last/checkpoint").count_steps(10, 20)
    made.set_model(fake_model)
    made.on_train_begin()
    return made


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_it_names_step_rate_and_checkpoint(callback, loss):
    callback.on_train_batch_end(0, {"loss": 1.0})
    with pytest.raises(BadLoss) as caught:
        callback.on_train_batch_end(1, {"loss": loss})
    said = str(caught.value)
    assert f"the loss is {loss} at step 2 (learning rate 0.5)" in said
    assert "the last good checkpoint is the/last/checkpoint" in said and "--clip-norm" in said


def test_without_a_checkpoint_it_says_so(fake_model):
    fake_model.optimizer = keras.optimizers.SGD(0.5)
    callback = StopOnBadLoss().count_steps(10, 20)
    callback.set_model(fake_model)
    with pytest.raises(BadLoss, match="no checkpoint yet"):
        callback.on_train_batch_end(0, {"loss": math.nan})


def test_it_looks_at_the_validation(callback):
    callback.on_epoch_end(0, {"loss": math.nan, "val_loss": 1.0})
    with pytest.raises(BadLoss, match="val_accuracy is nan"):
        callback.on_epoch_end(0, {"val_loss": 1.0, "val_accuracy": math.nan})


class TestHalfPrecision:
    @pytest.fixture
    def callback(self, fake_model, caplog, monkeypatch):
        monkeypatch.setattr(logging.getLogger("recipes"), "propagate", True)
        fake_model.optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        fake_model.optimizer.build([keras.Variable([1.0])])
        made = StopOnBadLoss().count_steps(10, 20)
        made.set_model(fake_model)
        made.on_train_begin()
        return made

    def test_a_skipped_step_is_no_bad_loss(self, callback, fake_model, caplog):
        scale = fake_model.optimizer.dynamic_scale
        scale.assign(scale / 2)
        callback.on_train_batch_end(0, {"loss": math.inf})
        assert "the step was skipped" in caplog.text and fake_model.metrics_were_reset == 1
        callback.on_train_batch_end(1, {"loss": 1.0})

    def test_a_bad_loss_that_was_not_skipped_is_one(self, callback):
        with pytest.raises(BadLoss):
            callback.on_train_batch_end(0, {"loss": math.nan})

    def test_a_scale_below_one_helps_nothing(self, callback, fake_model):
        fake_model.optimizer.dynamic_scale.assign(0.5)
        with pytest.raises(BadLoss):
            callback.on_train_batch_end(0, {"loss": math.nan})
