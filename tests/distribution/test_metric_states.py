"""The sums of metrics are restored on the replica that they came from."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from distribution import step
from distribution.keras_compat import fitting, patches
from distribution.metric_states import MetricStates
from tests.support import forked, replicas


def states_of_two_replicas():
    """Rows that were put in, and what was read back; then the sum of the rows of three replicas."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", weighted_metrics=[keras.metrics.MeanSquaredError("error")])
        data = tf.data.Dataset.from_tensors((tf.ones((2, 1)), tf.ones((2, 1))))
        fitting.build(model, data)
    states = MetricStates.of(model)
    rows = [[0.1 * (n + 1) + place for place in range(len(states.read()[0]))] for n in range(2)]
    rows = np.asarray(rows, "float32").astype("float64").tolist()
    states.write(rows)
    own = states.read()
    states.write([*rows, rows[0]])
    return rows, own, states.read()


def test_two_replicas_get_their_own_numbers_back():
    rows, own, parts = forked.run(states_of_two_replicas)
    assert own == rows
    assert parts[0] == parts[1]  # after a step the mean of their results is shown
    total = np.sum(parts, axis=0)
    # Of another number of replicas the sum is kept.
    np.testing.assert_allclose(total, 2 * np.array(rows[0]) + rows[1], rtol=1e-6)


def counts_of_another_number_of_replicas():
    """The odd counts of one replica, integers, divided between two."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", metrics=[keras.metrics.MeanIoU(2, sparse_y_pred=False)])
        data = tf.data.Dataset.from_tensors((tf.ones((2, 1)), tf.ones((2, 1))))
        fitting.build(model, data)
    states = MetricStates.of(model)
    row = [2.0 * place + 1 for place in range(sum(states.sizes))]
    states.write([row])
    return row, np.sum(states.read(), axis=0).tolist()


def test_no_count_is_lost_where_the_number_of_replicas_changes():
    row, total = forked.run(counts_of_another_number_of_replicas)
    assert total == row


def a_state_over_another_one():
    """A state that replaces another one under central storage, and what was read back."""
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    with patches.patch_keras_for(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", weighted_metrics=[keras.metrics.MeanSquaredError("error")])
        fitting.build(model, tf.data.Dataset.from_tensors((tf.ones((2, 1)), tf.ones((2, 1)))))
        states = MetricStates.of(model)
        size = len(states.read()[0])
        states.write([[1000.0] * size])
        state = np.linspace(0.1, 0.9, size, dtype="float32").astype("float64").tolist()
        states.write([state])
        return state, states.read()[0]


def test_a_state_replaces_another_one_exactly_under_central_storage():
    """An evaluation in mid-epoch leaves its own sums, which no difference may be taken from."""
    state, read = forked.run(a_state_over_another_one)
    assert read == state


def test_a_model_that_is_compiled_again_has_the_states_of_its_new_metrics():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    data = tf.data.Dataset.from_tensors((tf.ones((2, 1)), tf.ones((2, 1))))
    for metrics in ([], [keras.metrics.MeanSquaredError("error")]):
        model.compile("sgd", "mse", weighted_metrics=metrics)
        fitting.build(model, data)
        states = MetricStates.of(model)
        assert [*map(id, states.variables)] == [*map(id, model.metrics_variables)]
        assert MetricStates.of(model) is states


def part_of_an_epoch(count, first, last, state=None):
    """The metrics after some of six batches, and their state, which resumes from another one."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(24, 2)), numbers.normal(size=(24, 1))
    data = replicas.dataset((x, y), 4).skip(first)
    strategy = replicas.strategy_of(count)
    with patches.patch_keras_for(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
        fitting.build(model, data)
        model.set_weights([np.ones((2, 1)), np.zeros(1)])
        step.install(model)
        states = MetricStates.of(model)
        if state is not None:
            states.write(state)
        batches = iter(strategy.experimental_distribute_dataset(data))
        for _ in range(first, last):
            logs = model.train_function(batches)
        return {name: float(value) for name, value in logs.items()}, states.read()


@pytest.mark.long
def test_an_epoch_that_goes_on_with_another_number_of_replicas_has_the_same_metrics():
    """Each step counts the same, whichever number of replicas made it."""
    whole, _ = part_of_an_epoch(1, 0, 6)
    _, state = forked.run(part_of_an_epoch, 2, 0, 4)
    assert part_of_an_epoch(1, 4, 6, state)[0] == pytest.approx(whole, rel=1e-12)
