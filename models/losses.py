"""Losses that Keras does not have."""

from collections.abc import Callable

import keras
import numpy as np


def smoothed_cross_entropy(label_smoothing: float) -> Callable:
    """Returns a loss with smoothed labels (Szegedy et al., arXiv 1512.00567, section 7).

    That of `keras.losses.CategoricalCrossentropy`, for labels that are numbers of classes: Keras's
    `SparseCategoricalCrossentropy` has no `label_smoothing`.

    Args:
        label_smoothing: probability of a label to spread evenly over all classes.

    Returns:
        A function of labels, of shape (...), and logits, of shape (..., classes), for `compile()`;
        it returns the cross-entropy of each label.
    """

    def cross_entropy(labels, logits):
        numbers = keras.ops.cast(labels, "int32")
        plain = keras.ops.sparse_categorical_crossentropy(numbers, logits, from_logits=True)
        own = keras.ops.take_along_axis(logits, numbers[..., None], axis=-1)[..., 0]
        # Without targets of the logits' shape, which a vocabulary makes large.
        return plain + label_smoothing * (own - keras.ops.mean(logits, axis=-1))

    return cross_entropy


def weighted_binary_cross_entropy(weights: np.ndarray, label_smoothing: float = 0.0) -> Callable:
    """Returns the binary cross-entropy of several labels, with a weight for each label and value.

    Keras's `fit(class_weight=)` takes labels of this shape for one-hot ones, and a `sample_weight`
    of each label needs an output of another shape.

    Args:
        weights: float of shape (2, labels): of the labels that are 0, and of those that are 1.
        label_smoothing: as of `keras.losses.BinaryCrossentropy`.

    Returns:
        A function of labels, 0 or 1, and logits, both of shape (batch, labels), for `compile()`; it
        returns the mean over the labels of each example.
    """

    def cross_entropy(labels, logits):
        labels = keras.ops.cast(labels, logits.dtype)
        negative, positive = (keras.ops.cast(row, logits.dtype) for row in weights)
        targets = labels * (1 - label_smoothing) + label_smoothing / 2
        losses = keras.ops.binary_crossentropy(targets, logits, from_logits=True)
        return keras.ops.mean(keras.ops.where(labels > 0, positive, negative) * losses, axis=-1)

    return cross_entropy
