"""Computes layers a second time for their gradients, so that memory need not keep them."""

import collections
import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state

from distribution.keras_compat.replacing import replaced

# What Keras keeps per thread while a layer is called: of whose call `training` is an argument, and
# the precision of the weights.
CONTEXTS = ("current_call_ctx", "autocast_scope")


def repeated_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the layers that a model repeats, such as the blocks of a Transformer.

    Of the layers that contain others, the outermost ones of whose class there are several, or that
    a functional model calls several times (ALBERT's). Inner models are looked into, since a
    preset's backbone is one.

    Lacks: no public name tells how often a layer is called.
    """
    found: list[keras.layers.Layer] = []

    def collect(layer: keras.layers.Layer) -> None:
        inner = list(layer._flatten_layers(recursive=False, include_self=False))
        if isinstance(layer, keras.Model):
            for each in inner:
                collect(each)
        elif inner and not any(layer is each for each in found):
            found.append(layer)

    collect(model)
    counts = collections.Counter(type(layer) for layer in found)
    return [e for e in found if counts[type(e)] > 1 or len(e._inbound_nodes) > 1]


@contextlib.contextmanager
def recomputed(layers: list[keras.layers.Layer]) -> Iterator[None]:
    """Keeps only the inputs of layers that are called within this context, not what is inside.

    The gradient computes each layer once more (gradient checkpointing; Chen et al. 2016,
    arXiv 1604.06174), with the same random numbers, and changes its state once.

    Breaks: `keras.RematScope` raises an error in `fit()` with TensorFlow, whose
    `tf.recompute_grad` takes no keyword arguments in a graph, and draws other dropout masks the
    second time. Does: has `tf.custom_gradient` call the layer in a `keras.StatelessScope`.

    Args:
        layers: built, not within each other.
    """
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, "call", lambda stock, layer=layer: _twice(layer)))
        yield


class _States(keras.StatelessScope):
    """Collects the losses that layers add, and the variables that they change."""

    def __init__(self, state_mapping=None):
        super().__init__(state_mapping, collect_losses=True)
        self.changed: list[keras.Variable] = []

    def add_update(self, update):
        variable, _ = update
        if not any(variable is other for other in self.changed):
            self.changed.append(variable)
        super().add_update(update)


def _twice(layer: keras.layers.Layer):
    """Makes a layer's `call()` that the gradient computes a second time."""
    stock = layer.call

    def call(*args, **kwargs):
        arguments = _Arguments(args, kwargs)
        contexts = [global_state.get_global_attribute(name) for name in CONTEXTS]
        found = None  # what the layer returns, and the losses that it adds

        def compute(tensors, states: _States) -> list:
            """Computes the layer; returns all tensors of its results."""
            nonlocal found
            args, kwargs = arguments.of(tensors)
            with states:
                outputs = stock(*args, **kwargs)
            found = (outputs, states.losses)
            return [leaf for leaf in keras.tree.flatten(found) if tf.is_tensor(leaf)]

        @tf.custom_gradient
        def checkpointed(*tensors):
            first = _States()
            outputs = compute(tensors, first)
            before = [(variable, tf.identity(variable.value)) for variable in first.changed]
            for variable in first.changed:
                variable.assign(first.get_current_value(variable))

            def gradient(*upstream, variables=None):
                zero = _zero_after(upstream)
                again = [t + tf.cast(zero, t.dtype) if _is_float(t) else t for t in tensors]
                with _within(contexts), tf.GradientTape() as tape:
                    tape.watch([t for t in again if _is_float(t)])
                    targets = compute(again, _States(before))
                wanted = [
                    (target, of_target)
                    for target, of_target in zip(targets, upstream, strict=True)
                    if _is_float(target) and of_target is not None
                ]
                gradients = iter(
                    tape.gradient(
                        [target for target, _ in wanted],
                        [t for t in again if _is_float(t)] + list(variables or []),
                        output_gradients=[of_target for _, of_target in wanted],
                    )
                )
                of_tensors = [next(gradients) if _is_float(t) else None for t in again]
                return of_tensors if variables is None else (of_tensors, list(gradients))

            return outputs, gradient

        results = iter(checkpointed(*arguments.tensors))

        def result(leaf):
            return _with_mask(next(results), leaf) if tf.is_tensor(leaf) else leaf

        outputs, losses = keras.tree.map_structure(result, found)
        for loss in losses:
            layer.add_loss(loss)
        return outputs

    return call


class _Arguments:
    """Splits the arguments of a call into its tensors and the rest.

    Attributes:
        tensors: the tensors among the arguments, nested ones included.
    """

    def __init__(self, args: tuple, kwargs: dict):
        self._all = (args, kwargs)
        self.tensors = [leaf for leaf in keras.tree.flatten(self._all) if tf.is_tensor(leaf)]
        # Now: layers take masks off the tensors that they are given.
        self._masks = [backend.get_keras_mask(tensor) for tensor in self.tensors]

    def of(self, tensors) -> tuple[tuple, dict]:
        """Returns the arguments with other tensors, which get the masks of the first ones."""
        others = iter([tf.identity(tensor) for tensor in tensors])
        masks = iter(self._masks)

        def other(leaf):
            if not tf.is_tensor(leaf):
                return leaf
            tensor, mask = next(others), next(masks)
            if mask is not None:
                backend.set_keras_mask(tensor, mask)
            return tensor

        return keras.tree.map_structure(other, self._all)


def _is_float(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating


def _with_mask(tensor: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    mask = backend.get_keras_mask(other)
    if mask is not None:
        backend.set_keras_mask(tensor, mask)
    return tensor


def _zero_after(upstream: tuple) -> tf.Tensor:
    """Returns a zero that no compiler can have before the gradient of the outputs.

    XLA knows no control dependencies: it would compute the layers a second time at once, and keep
    them. A sum that is not a number gives one, as the gradient then does.
    """
    total = tf.add_n([tf.reduce_sum(tf.cast(g, tf.float32)) for g in upstream if g is not None])
    return tf.where(tf.equal(total, total), 0.0, float("nan"))


@contextlib.contextmanager
def _within(contexts: list) -> Iterator[None]:
    """Restores what Keras knew while it called a layer."""
    now = [global_state.get_global_attribute(name) for name in CONTEXTS]
    for name, value in zip(CONTEXTS, contexts, strict=True):
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in zip(CONTEXTS, now, strict=True):
            global_state.set_global_attribute(name, value)
