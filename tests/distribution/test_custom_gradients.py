"""Graphs that call `tf.custom_gradient` are freed at the end of a run."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from distribution.keras_compat import custom_gradients

registered = custom_gradients.ops.gradient_registry


@tf.custom_gradient
def doubled(x):
    """Returns x, whose gradient is twice as large as it should be."""
    return x, lambda upstream: 2 * upstream


def traced(function):
    return tf.function(function).get_concrete_function(tf.TensorSpec([None], "float32"))


FUNCTIONS = {
    "plain": doubled,
    "twice": lambda x: doubled(doubled(x)),
    "branch": lambda x: tf.cond(tf.size(x) > 1, lambda: doubled(x), lambda: x),
    "loop": lambda x: tf.while_loop(
        lambda step, _: step < 1, lambda step, y: (step + 1, doubled(y)), (0, x)
    )[1],
    "swish": tf.nn.silu,  # TensorFlow's own
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_graphs_are_freed(function):
    before = set(registered.list())
    with custom_gradients.free_custom_gradients():
        graph = weakref.ref(traced(function).graph)
        assert set(registered.list()) > before
    gc.collect()
    assert graph() is None
    assert set(registered.list()) == before


def test_gradients_from_elsewhere_stay():
    outer = traced(doubled)
    with custom_gradients.free_custom_gradients():
        within = traced(doubled)
        with custom_gradients.free_custom_gradients():
            traced(doubled)
        x = tf.constant([1.0, 3.0])
        for graph in (outer, within):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = graph(x)
            np.testing.assert_allclose(tape.gradient(y, x), [2, 2])


def test_gradients_of_operations_stay():
    try:
        with custom_gradients.free_custom_gradients():
            tf.RegisterGradient("OperationOfATest")(doubled)
        assert registered.lookup("OperationOfATest") is doubled
    finally:
        del registered._registry["OperationOfATest"]
