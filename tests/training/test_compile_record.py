"""Equal arguments of `compile()` have equal records; another loss or optimizer is named."""

import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from data import files
from distribution.keras_compat import fitting, optimizers
from tests.support import replicas
from training import compile_record

LOSSES = keras.losses


def record(total_steps: int = 100, outputs: tuple = (), **arguments) -> dict:
    """Returns the record of a model that is compiled with these arguments, as a file has it."""
    inputs = keras.Input((3,))
    layers = {name: keras.layers.Dense(2, name=name) for name in outputs or ("out",)}
    answers = {name: layer(inputs) for name, layer in layers.items()}
    labels = {name: np.zeros((4, 2)) for name in answers}
    is_one = not outputs
    model = keras.Model(inputs, answers["out"] if is_one else answers)
    model.compile(**{"optimizer": "sgd", "loss": "mse"} | arguments)
    data = (np.zeros((4, 3)), labels["out"] if is_one else labels)
    fitting.build(model, tf.data.Dataset.from_tensors(data))
    found = compile_record.record_of(model, total_steps)
    return json.loads(json.dumps(found, default=files.json_value))


def squared(y_true, y_pred, factor=1.0):
    return factor * keras.ops.mean((y_true - y_pred) ** 2, axis=-1)


class Scaled(keras.losses.Loss):
    """A loss of a user, who did not write `get_config()`."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, y_true, y_pred):
        return squared(y_true, y_pred, self.factor)


class Halved(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that cannot be serialized."""

    def __call__(self, step):
        return 0.5


def decay(steps: int, rate: float = 0.1):
    return keras.optimizers.schedules.PolynomialDecay(rate, steps)


@pytest.mark.parametrize(
    "before, now",
    [
        ({"loss": "mse"}, {"loss": LOSSES.MeanSquaredError()}),
        ({"loss": ["mse"]}, {"loss": LOSSES.mean_squared_error}),
        ({"loss": {"out": "mse"}}, {"loss": LOSSES.MeanSquaredError(reduction="mean")}),
        ({"loss": "binary_crossentropy"}, {"loss": LOSSES.BinaryCrossentropy()}),
        ({"loss": lambda y, p: squared(y, p)}, {"loss": lambda y, p: squared(y, p, 1.0)}),
        ({"loss": squared}, {"loss": functools.partial(squared, factor=1)}),
        ({"loss": Scaled(2)}, {"loss": Scaled(2.0)}),
        ({"loss_weights": None}, {"loss_weights": [1.0]}),
        ({"loss_weights": [0.1]}, {"loss_weights": [np.float32(0.1)]}),
        ({"optimizer": "sgd"}, {"optimizer": keras.optimizers.SGD(0.01, name="mine")}),
        (
            {"optimizer": keras.optimizers.Adam(0.1, beta_2=0.9)},
            {"optimizer": keras.optimizers.Adam(0.1, beta_2=tf.constant(0.9))},
        ),
        (
            {"optimizer": keras.optimizers.SGD(lambda: 0.1)},
            {"optimizer": keras.optimizers.SGD(lambda: 0.2)},
        ),
        (
            {"optimizer": keras.optimizers.SGD(decay(100))},
            {"optimizer": keras.optimizers.SGD(decay(200)), "total_steps": 200},
        ),
    ],
    ids=range(13),
)
def test_forms_of_the_same(before, now):
    assert compile_record.differences(record(**before), record(**now)) == []


@pytest.mark.parametrize(
    "before, now, line",
    [
        ({"loss": "mse"}, {"loss": "mae"}, "loss: was mean_squared_error, is now mean_absolute_"),
        (
            {"loss": "binary_crossentropy"},
            {"loss": LOSSES.BinaryCrossentropy(from_logits=True, label_smoothing=0.1)},
            "loss: from_logits was False, is now True\nloss: label_smoothing was 0, is now 0.1",
        ),
        ({"loss": Scaled(2)}, {"loss": Scaled(3)}, "loss: factor was 2, is now 3"),
        (
            {"loss": squared},
            {"loss": functools.partial(squared, factor=0.5)},
            "loss: factor was 1, is now 0.5",
        ),
        ({}, {"loss": LOSSES.MeanSquaredError("sum")}, "loss: reduction was mean, is now sum"),
        ({}, {"loss_weights": [3.0]}, "loss: loss_weights was 1, is now 3"),
        ({}, {"loss": lambda y, p: squared(y, p)}, "loss: was mean_squared_error, is now <lambda>"),
        (
            {"outputs": ("a", "b"), "loss": {"a": "mse", "b": "mae"}},
            {"outputs": ("a", "b"), "loss": {"a": "mse", "b": "mse"}},
            "loss of output b: was mean_absolute_error, is now mean_squared_error",
        ),
        (
            {"outputs": ("a", "b"), "loss": {"a": "mse", "b": "mae"}, "loss_weights": [1, 1]},
            {"outputs": ("a", "b"), "loss": {"a": "mse", "b": "mae"}, "loss_weights": [1, 2]},
            "loss of output b: loss_weights was 1, is now 2",
        ),
        (
            {"optimizer": keras.optimizers.SGD(0.1)},
            {"optimizer": keras.optimizers.SGD(0.2, momentum=0.9)},
            "optimizer: learning_rate was 0.1, is now 0.2\noptimizer: momentum was 0, is now 0.9",
        ),
        (
            {"optimizer": keras.optimizers.SGD(decay(100))},
            {"optimizer": keras.optimizers.SGD(decay(100, 0.2))},
            "optimizer: learning_rate.initial_learning_rate was 0.1, is now 0.2",
        ),
        (
            {"optimizer": keras.optimizers.SGD(decay(100))},
            {"optimizer": keras.optimizers.SGD(0.1), "total_steps": 200},
            "optimizer: learning_rate was PolynomialDecay, is now 0.1",
        ),
    ],
    ids=range(12),
)
def test_a_change_is_named(before, now, line):
    changed = "\n".join(compile_record.differences(record(**before), record(**now)))
    assert changed.startswith(line) and changed.count("\n") == line.count("\n")


class Constant(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of a user, who did not write `get_config()`."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate


@pytest.mark.parametrize(
    "before, now, lines",
    [
        ((Halved(),), (Halved(),), []),
        ((Halved(),), (Constant(0.5),), ["learning_rate was Halved, is now Constant"]),
        ((Constant(0.5),), (Constant(0.1),), ["learning_rate.rate was 0.5, is now 0.1"]),
        ((Halved(), 0.1), (Halved(), 0.9), ["momentum was 0.1, is now 0.9"]),
        ((lambda: 0.1, 0.1), (lambda: 0.2, 0.9), ["momentum was 0.1, is now 0.9"]),
    ],
    ids=range(5),
)
def test_a_schedule_that_cannot_be_serialized(before, now, lines):
    found = [record(optimizer=keras.optimizers.SGD(*each)) for each in (before, now)]
    assert compile_record.differences(*found) == [f"optimizer: {line}" for line in lines]


@pytest.mark.parametrize(
    "before, now",
    [
        ([1, 2], [1, 3]),
        (np.float32(1), np.float32(5)),
        (np.eye(2), 2 * np.eye(2)),
        (None, np.eye(2)),
        ("mean", "max"),
    ],
    ids=range(5),
)
def test_values_of_an_object_of_the_users(before, now):
    """Whose class has no `get_config()`."""

    class Holds(keras.losses.Loss):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def call(self, y_true, y_pred):
            return squared(y_true, y_pred)

    first, again, other = (record(loss=Holds(value)) for value in (before, before, now))
    assert compile_record.differences(first, again) == []
    (line,) = compile_record.differences(first, other)
    assert line.startswith("loss: value was ")


def test_a_class_as_a_value():
    def loss(y_true, y_pred, dtype=np.float32):
        return squared(y_true, y_pred)

    assert record(loss=loss)["losses"]["loss"]["values"]["dtype"] == "float32"


def test_values_that_a_version_of_keras_lacks_are_not_compared():
    before, now = record(), record()
    del before["optimizers"][0]["values"]["nesterov"], now["losses"]["loss"]["values"]["reduction"]
    assert compile_record.differences(before, now) == []


def test_the_decay_of_an_optimizer_with_rates_by_variable():
    def scaled(weight_decay):
        optimizer = keras.optimizers.AdamW(0.1, weight_decay=weight_decay)
        optimizers.scale_learning_rates(optimizer, {})
        return record(optimizer=optimizer)

    changed = compile_record.differences(scaled(0.1), scaled(0.2))
    assert changed == ["optimizer: weight_decay was 0.1, is now 0.2"]


def test_two_replicas_have_the_record_of_one_device():
    def on(count):
        with replicas.strategy_of(count).scope():
            return record(optimizer=keras.optimizers.Adam(decay(10)), loss_weights=[0.3])

    assert on(1) == on(2)


def test_weights_of_classes():
    weights = compile_record.class_weights_of({np.int64(0): 1, 1: np.float32(3), 2: 0.5})
    assert weights == {"1": 3.0, "2": 0.5} and compile_record.class_weights_of(None) == {}
    differences = compile_record.class_weight_differences
    assert differences(weights, {"1": 3.0000001, "2": 0.5}) == []
    assert differences(weights, {"1": 3.0, "10": 2.0}) == [
        "class 2: weight was 0.5, is now 1",
        "class 10: weight was 1, is now 2",
    ]


def test_metrics_are_noted():
    before, now = record(metrics=["mae"]), record(metrics=["mae", "mse"])
    assert compile_record.metrics_note(before, before) is None
    said = compile_record.metrics_note(before, now)
    assert said.startswith("the metrics of compile() were loss, mae, and are now loss, mae, mse: ")
