"""Gradients of `tf.custom_gradient` die with their graphs, and work as long as these live."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from distribution.keras_compat import custom_gradients


@tf.custom_gradient
def doubled(x):
    """Returns x, whose gradient is twice as large as it should be."""
    return x, lambda upstream: 2 * upstream


def traced(function):
    """A function's graph for a vector, with the repair in force while it is traced."""
    with custom_gradients.free_gradients_with_graphs():
        return tf.function(function).get_concrete_function(tf.TensorSpec([None], "float32"))


FUNCTIONS = {
    "plain": doubled,
    "twice": lambda x: doubled(doubled(x)) / 2,
    "branch": lambda x: tf.cond(tf.size(x) > 1, lambda: doubled(x), lambda: x),
    "loop": lambda x: tf.while_loop(
        lambda step, _: step < 1, lambda step, y: (step + 1, doubled(y)), (0, x)
    )[1],
    "swish": lambda x: 2 * tf.nn.relu(x) + 0 * tf.nn.silu(x),  # TensorFlow's own
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_graphs_die(function):
    graph = weakref.ref(traced(function).graph)
    gc.collect()
    assert graph() is None


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_gradients_are_computed_after_the_run(function):
    """The backward graph is made when the function is first called under a tape."""
    graph = traced(function)
    gc.collect()
    x = tf.constant([1.0, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = graph(x)
    np.testing.assert_allclose(tape.gradient(y, x), [2, 2])


def test_nothing_stays_registered():
    registered = custom_gradients.ops.gradient_registry._registry
    function = traced(doubled)
    name = list(registered)[-1]
    assert name.startswith(custom_gradients.PREFIX)
    del function
    gc.collect()
    assert name not in registered


def test_gradients_of_operations_are_registered_as_ever():
    registered = custom_gradients.ops.gradient_registry

    def gradient(operation, upstream):
        return upstream

    with custom_gradients.free_gradients_with_graphs():
        assert tf.RegisterGradient("OperationOfATest")(gradient) is gradient
    assert registered.lookup("OperationOfATest") is gradient
    del registered._registry["OperationOfATest"]
