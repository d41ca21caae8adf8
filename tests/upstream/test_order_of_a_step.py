"""What an optimizer gets wrong because Keras sums the gradients over the replicas last."""

import keras
import numpy as np
import tensorflow as tf

from distribution.optimizers import reduce_before_clipping
from tests.upstream.support import (
    asking_keras,
    assert_close,
    batches,
    gradient,
    linear_model,
    numbers,
    repair,
    two_replicas,
    weights_of,
)


@repair(
    "WithoutReduction, reduce_before_clipping",
    "each replica clips its own gradient (keras-team/keras#19308 asks for a way to sum first)",
)
def test_a_clipped_step(repaired):
    x, y = (part[:8] for part in numbers())
    y[4:] *= -1  # so that the replicas' gradients point in different directions
    with two_replicas().scope():
        optimizer = keras.optimizers.SGD(1.0, global_clipnorm=0.1)
        model = linear_model(reduce_before_clipping(optimizer) if repaired else optimizer)
    with asking_keras():
        model.fit(batches(x, y), verbose=0)
        true = gradient(x, y, np.zeros(3))
        assert_close(weights_of(model), -0.1 * true / np.linalg.norm(true), "a step clipped to 0.1")


@repair(
    "WithoutReduction, reduce_before_clipping",
    "LossScaleOptimizer looks for an overflow on replica 0 only (no thread known)",
)
def test_an_overflow_on_replica_1_only(repaired):
    keras.config.set_dtype_policy("mixed_float16")
    x, y = (part[:8] / 100 for part in numbers())  # far from an overflow, also when scaled by 2^15
    with two_replicas().scope():
        optimizer = keras.optimizers.SGD(0.01)
        model = linear_model(reduce_before_clipping(optimizer) if repaired else optimizer)
    model.fit(batches(x, y), verbose=0)
    before = weights_of(model)
    if not np.isfinite(before).all() or not before.any():
        raise RuntimeError(f"a step without an overflow should change the weights: {before}")
    x[4:] = 60000.0
    with asking_keras():
        model.fit(batches(x, y), verbose=0)
        assert_close(weights_of(model), before, "weights after a step to skip")


@repair(
    "reduce_before_clipping",
    "the gradients of a row that is looked up twice are not added up (no thread known)",
)
def test_a_row_that_a_batch_looks_up_twice(repaired):
    table = keras.Variable(np.zeros((2, 1)), dtype="float32")
    optimizer = keras.optimizers.Adam(0.1)
    if repaired:
        optimizer = reduce_before_clipping(optimizer)
    twice = tf.IndexedSlices(tf.ones((2, 1)), tf.constant([0, 0]), tf.constant([2, 1]))
    with asking_keras():
        optimizer.apply([twice], [table])
        assert_close(keras.ops.convert_to_numpy(table)[:, 0], [-0.1, 0.0], "Adam's first step")
