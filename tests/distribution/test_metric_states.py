"""What metrics have added up goes back to the replica that added it up."""

import keras
import numpy as np
import tensorflow as tf

from distribution import keras_compat
from distribution.metric_states import MetricStates
from tests.support import forked


def states_of_two_replicas():
    """Rows that were put in, and what was read back; then the sum of the rows of three replicas."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", weighted_metrics=[keras.metrics.MeanSquaredError("error")])
        data = tf.data.Dataset.from_tensors((tf.ones((2, 1)), tf.ones((2, 1))))
        keras_compat.build(model, data)
    states = MetricStates.of(model)
    rows = [[0.1 * (n + 1) + place for place in range(len(states.read()[0]))] for n in range(2)]
    rows = np.asarray(rows, "float32").astype("float64").tolist()
    states.write(rows)
    own = states.read()
    states.write([*rows, rows[0]])
    return rows, own, np.sum(states.read(), axis=0).tolist()


def test_two_replicas_get_their_own_numbers_back():
    rows, own, total = forked.run(states_of_two_replicas)
    assert own == rows
    # Of another number of replicas the sum is kept.
    np.testing.assert_allclose(total, 2 * np.array(rows[0]) + rows[1], rtol=1e-6)
