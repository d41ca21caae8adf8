"""Losses that Keras does not have."""

from collections.abc import Callable

import keras


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
