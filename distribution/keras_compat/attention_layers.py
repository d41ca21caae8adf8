"""Makes attention layers use cuDNN, in what XLA compiles for a GPU."""

import contextlib
import sys
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn as tf_nn

from distribution import attention
from distribution.keras_compat.replacing import replaced


@contextlib.contextmanager
def attend_by_cudnn() -> Iterator[None]:
    """Makes attention that is traced within it use the fast kernels of GPUs; for XLA alone.

    Breaks: Keras's flash attention exists on JAX and PyTorch only (no thread known), and
    `MultiHeadAttention` computes query, key and value by three products, which a GPU computes more
    slowly than one of three times the columns. Does: lets cuDNN compute the attention that
    `attention.takes`, and computes the three by one product where they are made of one tensor. The
    weights stay those of Keras.
    """
    projected: dict[int, tf.Tensor] = {}  # by the layer of the projection
    graph = tf.compat.v1.get_default_graph()

    def make_attention(stock):
        def dot_product_attention(
            query, key, value, bias=None, mask=None, scale=None, is_causal=False, *others, **named
        ):
            # The program of a `tf.function` of the user's is kept for what is not compiled.
            is_ours = tf.compat.v1.get_default_graph() is graph
            of_default = all(each is None for each in (bias, *others, *named.values()))
            if is_ours and of_default and isinstance(scale, float | None):
                query, key, value = map(tf.convert_to_tensor, (query, key, value))
                mask = None if mask is None else tf.convert_to_tensor(mask)
                if attention.takes(query, key, value, mask):
                    return attention.attention(query, key, value, scale, mask, is_causal)
            return stock(query, key, value, bias, mask, scale, is_causal, *others, **named)

        return dot_product_attention

    def make_call(stock):
        def call(self, query, value, key=None, *others, **named):
            found = {}
            if value is query and (key is None or key is query):
                found = _projections(self, query)
            projected.update(found)
            try:
                return stock(self, query, value, key, *others, **named)
            finally:
                for layer in found:
                    projected.pop(layer, None)

        return call

    def make_einsum(stock):
        def call(self, inputs, *args, **named):
            found = projected.pop(id(self), None)
            return stock(self, inputs, *args, **named) if found is None else found

        return call

    with (
        replaced(tf_nn, "dot_product_attention", make_attention),
        replaced(keras.layers.MultiHeadAttention, "call", make_call),
        replaced(keras.layers.EinsumDense, "call", make_einsum),
    ):
        yield


def attends_by_itself(layer: keras.layers.Layer) -> bool:
    """Tells whether a layer computes attention without Keras's function, on TensorFlow.

    Breaks: KerasHub's attention of Llama, Mistral, Gemma, Qwen and others asks whether there is
    flash attention, and multiplies itself where there is none, as on TensorFlow. Does: recognises
    the modules that ask, so that no run waits for the comparison of what it does not use.
    """
    return hasattr(sys.modules[type(layer).__module__], "fused_attention_op_available")


def _projections(layer: keras.layers.MultiHeadAttention, inputs) -> dict[int, tf.Tensor]:
    """Computes query, key and value of self-attention by one product; by the layer's id.

    Returns nothing where they differ in more than their weights, or the shapes are not fixed.
    """
    names = ("_query_dense", "_key_dense", "_value_dense")
    layers = [getattr(layer, name) for name in names]
    one = layers[0]
    are_alike = all(
        type(each) is keras.layers.EinsumDense
        and each.quantization_mode is None
        and each.activation in (None, keras.activations.linear)
        and each.compute_dtype == layer.compute_dtype
        and each.equation == "abc,cde->abde"
        and each.kernel.shape == one.kernel.shape
        and (each.bias is None) == (one.bias is None)
        and (each.bias is None or each.bias.shape == each.kernel.shape[1:])
        for each in layers
    )
    is_half = layer.compute_dtype in ("bfloat16", "float16")
    if not (are_alike and is_half and None not in inputs.shape and len(inputs.shape) == 3):
        return {}
    kernel = tf.stack([tf.convert_to_tensor(each.kernel) for each in layers], axis=1)
    found = tf.einsum("btd,dcnh->btcnh", tf.cast(inputs, kernel.dtype), kernel)
    if one.bias is not None:
        found += tf.stack([tf.convert_to_tensor(each.bias) for each in layers])
    return dict(zip(map(id, layers), tf.unstack(found, axis=2), strict=True))
