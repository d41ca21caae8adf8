"""The learning rate after epochs without a better value."""

import logging

import keras
import pytest

from callbacks.plateau import ReduceOnPlateau
from callbacks.records import used_learning_rate
from distribution.keras_compat import inspection


def make(rate=0.8, **arguments):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(rate)
    if arguments.pop("half", False):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse")
    callback = ReduceOnPlateau(model, **({"patience": 2} | arguments))
    callback.set_model(model)
    return callback


def rates(callback, values, metric="val_loss"):
    """The rate after each epoch."""
    found = []
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {metric: value})
        found.append(used_learning_rate(callback.model.optimizer))
    return found


@pytest.mark.parametrize("half", [False, True])
def test_it_waits_for_a_better_value(half, caplog):
    caplog.set_level(logging.INFO, "recipes")
    found = rates(make(half=half), [3.0, 2.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert found == pytest.approx([0.8] * 3 + [0.4] * 3 + [0.2] * 2 + [0.1])
    assert caplog.messages[0] == (
        "epoch 4: val_loss not better than 2.0000 in 2 epoch(s): learning rate x 0.5"
    )
    assert len(caplog.messages) == 3


@pytest.mark.parametrize(
    "metric, mode, first", [("val_accuracy", "auto", 0.4), ("val_accuracy", "min", 0.8)]
)
def test_the_direction_of_the_metric(metric, mode, first):
    callback = make(patience=1, metric=metric, mode=mode)
    assert rates(callback, [0.5, 0.4], metric)[-1] == pytest.approx(first)


def test_an_epoch_without_validation_does_not_count():
    """`fit(validation_freq=2)` evaluates every second epoch."""
    callback = make(patience=1)
    callback.on_epoch_end(0, {"loss": 1.0})
    assert rates(callback, [2.0, 2.0]) == pytest.approx([0.8, 0.4])
    callback.on_epoch_end(3, {"loss": 1.0})
    assert rates(callback, [1.0]) == pytest.approx([0.4])


def test_it_multiplies_what_a_schedule_gives():
    callback = make(
        keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0), patience=1, factor=0.1
    )
    rates(callback, [1.0, 1.0])
    schedule = inspection.learning_rate_of(callback.model.optimizer)
    assert [float(schedule(step)) for step in (0, 5, 10)] == pytest.approx([0.1, 0.05, 0.0])


def test_a_constant_rate_in_float64_keeps_its_digits():
    keras.config.set_floatx("float64")
    callback = make(0.1, patience=1)
    schedule = inspection.learning_rate_of(callback.model.optimizer)
    assert float(schedule(0)) == 0.1
    rates(callback, [1.0, 1.0])
    assert float(schedule(0)) == 0.05


def test_a_run_that_resumes_lowers_it_in_the_same_epochs():
    values = [3.0, 3.5, 3.5, 2.9, 3.0, 3.0, 3.0]
    expected = rates(make(), values)
    for cut in range(1, len(values)):
        first, second = make(), make()
        found = rates(first, values[:cut])
        second.set_state(first.get_state())
        assert found + rates(second, values[cut:]) == pytest.approx(expected)
