"""Compares an export with the Keras model that it was written from."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

TEXTS = ("a", "b", "a text of more words", "")
# Largest difference that another order of summation explains, relative to the largest output where
# that is above 1.
TOLERANCE = 1e-3


class Differs(Exception):
    """Raised if an export's outputs differ from the model's; the message says by how much."""


def symbolic_inputs(model: keras.Model) -> Any:
    """Returns the structure of a model's inputs; None if it is not known.

    A subclass of `keras.Model` does not declare its inputs: their shapes are those that it was
    built with, their type is the model's.
    """
    if isinstance(model, keras.Sequential):
        return getattr(model, "inputs", [None])[0]
    if declares_inputs(model):
        return model.input
    shapes = (model.get_build_config() or {}).get("input_shape")
    return None if shapes is None else _tensors(shapes, model.input_dtype)


def declares_inputs(model: keras.Model) -> bool:
    """Tells whether a model was made of `keras.Input`, not by a `call()` of its class."""
    return hasattr(model, "input")


def _tensors(shapes, dtype: str) -> Any:
    """Returns a tensor of any batch size for each shape of a structure."""
    if isinstance(shapes, dict):
        return {name: _tensors(each, dtype) for name, each in shapes.items()}
    if all(size is None or isinstance(size, int) for size in shapes):
        return keras.KerasTensor((None, *shapes[1:]), dtype)
    return [_tensors(each, dtype) for each in shapes]


def random_inputs(model: keras.Model, seed: int = 0) -> Any:
    """Returns two examples in the structure of the model's inputs.

    Args:
        model: one whose `symbolic_inputs` are known.
        seed: seed of the random numbers.

    Returns:
        Arrays: floats from a standard normal distribution, integers 0 and 1, token ids from the
        vocabulary of a KerasNLP task; tensors where one of them has texts. Free dimensions have
        size 2 (batch) or 8, fewer where a model takes fewer tokens. In the first column integers
        are 1, since it may be a mask.
    """
    rng = np.random.default_rng(seed)
    backbone = getattr(model, "backbone", None)
    vocabulary_size = getattr(backbone, "vocabulary_size", 2)
    free = min(8, getattr(backbone, "max_sequence_length", None) or 8)

    def make(tensor):
        shape = [size or free for size in tensor.shape]
        shape[0] = tensor.shape[0] or 2
        if tensor.dtype == "string":
            return tf.constant(rng.choice(TEXTS, shape))
        if keras.backend.is_float_dtype(tensor.dtype):
            return rng.standard_normal(shape).astype(tensor.dtype)
        highest = vocabulary_size if tensor.name.split(":")[0] == "token_ids" else 2
        values = rng.integers(0, highest, shape)
        if len(shape) > 1:
            values[:, 0] = 1
        return values.astype(tensor.dtype)

    inputs = keras.tree.map_structure(make, symbolic_inputs(model))
    if any(map(tf.is_tensor, keras.tree.flatten(inputs))):  # Keras does not take both
        inputs = keras.tree.map_structure(tf.convert_to_tensor, inputs)
    return inputs


def require_equal(exported: Sequence, expected: Any) -> float:
    """Compares outputs and returns their largest difference.

    Args:
        exported: the export's outputs, in the order of the model's.
        expected: the model's outputs, in any structure.

    Raises:
        Differs: it is too large, or the number or shapes of the outputs differ.
    """
    pairs = [
        (np.asarray(ours, np.float64), np.asarray(keras.ops.convert_to_numpy(theirs), np.float64))
        for ours, theirs in zip(exported, keras.tree.flatten(expected), strict=False)
    ]
    shapes = [[ours.shape for ours, _ in pairs], [theirs.shape for _, theirs in pairs]]
    count = len(keras.tree.flatten(expected))
    if len(exported) != count or shapes[0] != shapes[1]:
        raise Differs(
            f"it has {len(exported)} outputs of shapes {shapes[0]}, the Keras model {count} of "
            f"{shapes[1]}"
        )
    largest = max(float(np.abs(ours - theirs).max(initial=0.0)) for ours, theirs in pairs)
    scale = max(1.0, *(float(np.abs(theirs).max(initial=0.0)) for _, theirs in pairs))
    if not largest <= TOLERANCE * scale:  # also where it is not a number
        raise Differs(
            f"its outputs differ by {largest:.3g} from the Keras model's, at most "
            f"{TOLERANCE * scale:.3g} is rounding"
        )
    return largest
