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

    Of the layers that contain others, the outermost ones of whose class there are several. Inner
    models are looked into, since a preset's backbone is one.
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
    return [layer for layer in found if counts[type(layer)] > 1]


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
        self.changed: dict[int, keras.Variable] = {}

    def add_update(self, update):
        self.changed[id(update[0])] = update[0]
        super().add_update(update)


def _twice(layer: keras.layers.Layer):
    """Makes a layer's `call()` that the gradient computes a second time."""
    stock = layer.call

    def call(*args, **kwargs):
        leaves = keras.tree.flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if tf.is_tensor(leaf)]
        masks = [backend.get_keras_mask(leaf) for leaf in leaves]
        contexts = [global_state.get_global_attribute(name) for name in CONTEXTS]
        found: dict = {}

        def compute(tensors: list, states: _States):
            """Returns the layer's outputs and losses, and those of them that are tensors."""
            given = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tf.identity(tensor)
                if masks[place] is not None:
                    backend.set_keras_mask(given[place], masks[place])
            arguments, named = keras.tree.pack_sequence_as((args, kwargs), given)
            with states:
                outputs = stock(*arguments, **named)
            outputs = (outputs, states.losses)
            return outputs, [leaf for leaf in keras.tree.flatten(outputs) if tf.is_tensor(leaf)]

        @tf.custom_gradient
        def checkpointed(*tensors):
            first = _States()
            found["outputs"], kept = compute(tensors, first)
            before = [(v, tf.identity(v.value)) for v in first.changed.values()]
            for variable in first.changed.values():
                variable.assign(first.get_current_value(variable))

            def gradient(*upstream, variables=None):
                floating = [place for place, t in enumerate(tensors) if t.dtype.is_floating]
                start = _zero_after(upstream)
                again = [tensors[place] + tf.cast(start, tensors[place].dtype) for place in floating]
                with _within(contexts), tf.GradientTape() as tape:
                    tape.watch(again)
                    given = list(tensors)
                    for place, tensor in zip(floating, again, strict=True):
                        given[place] = tensor
                    _, outputs = compute(given, _States(before))
                wanted = [
                    (output, grad)
                    for output, grad in zip(outputs, upstream, strict=True)
                    if output.dtype.is_floating and grad is not None
                ]
                of_inputs, of_variables = tape.gradient(
                    [output for output, _ in wanted],
                    (again, list(variables or [])),
                    output_gradients=[grad for _, grad in wanted],
                )
                by_place = dict(zip(floating, of_inputs, strict=True))
                found_gradients = [by_place.get(place) for place in range(len(tensors))]
                return (found_gradients, of_variables) if variables is not None else found_gradients

            return kept, gradient

        tensors = [leaves[place] for place in places]
        kept = iter(checkpointed(*tensors))

        def outside(leaf):
            if not tf.is_tensor(leaf):
                return leaf
            tensor, mask = next(kept), backend.get_keras_mask(leaf)
            if mask is not None:
                backend.set_keras_mask(tensor, mask)
            return tensor

        outputs, losses = keras.tree.map_structure(outside, found["outputs"])
        for loss in losses:
            layer.add_loss(loss)
        return outputs

    return call


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
