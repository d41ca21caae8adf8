import logging

import keras
import pytest

from callbacks.learning_rate import LearningRatePrinter, used_learning_rate


def optimizer_at(iterations, learning_rate):
    optimizer = keras.optimizers.Adam(learning_rate)
    optimizer.iterations.assign(iterations)
    return optimizer


def decay():
    return keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0)


@pytest.mark.parametrize("done, rate", [(0, 1.0), (1, 1.0), (2, 0.9), (10, 0.1)])
def test_the_rate_of_the_update_before(done, rate):
    assert used_learning_rate(optimizer_at(done, decay())) == pytest.approx(rate)


def test_a_constant_rate_and_a_loss_scale_around_it():
    assert used_learning_rate(optimizer_at(5, 0.25)) == pytest.approx(0.25)
    outer = keras.optimizers.LossScaleOptimizer(optimizer_at(3, decay()))
    assert used_learning_rate(outer) == pytest.approx(0.8)


def test_it_is_printed_after_each_epoch(fake_model, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("recipes"), "propagate", True)
    fake_model.optimizer = optimizer_at(6, decay())
    callback = LearningRatePrinter()
    callback.set_model(fake_model)
    with caplog.at_level("INFO", logger="recipes"):
        callback.on_epoch_end(1)
    assert caplog.messages == ["epoch 2: learning rate 0.5"]
