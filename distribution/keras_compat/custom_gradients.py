"""Frees the gradients of `tf.custom_gradient`, and their graphs, at the end of a run."""

import contextlib
from collections.abc import Iterator

from tensorflow.python.framework import ops

PREFIX = "CustomGradient-"  # of the names that `tf.custom_gradient` makes


@contextlib.contextmanager
def free_custom_gradients() -> Iterator[None]:
    """Frees the gradients of `tf.custom_gradient` that graphs have registered within it.

    Breaks: `tf.custom_gradient` registers the gradient of each call in a graph, under a new name,
    until the process ends. The gradient refers to the graph, perhaps to the model: each training
    in a process leaves its graphs in memory, 20 MB for the smallest BERT with our head and more
    for deeper models (no thread known). Does: removes them from the registry at the end. A step
    computes its gradient in its own graph. What was traced within it for a prediction has no
    gradient any more where it calls such a function; models that are called eagerly have one.
    """
    registered = ops.gradient_registry._registry
    before = set(registered)
    try:
        yield
    finally:
        for name in registered.keys() - before:
            if name.startswith(PREFIX):
                del registered[name]
