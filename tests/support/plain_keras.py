"""Trains models as plain Keras does, with `compile()` and `fit()`."""

from collections.abc import Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

from data import batches, sentences

STEPS, LEARNING_RATE = 5, 0.01
# Options of a recipe that trains like `compile()` below.
COMMON = dict(
    max_steps=STEPS,
    weight_decay=0.0,
    warmup_steps=0,
    lr_scaling="none",
    base_learning_rate=LEARNING_RATE,
    precision="float64",
    jit="off",
    strategy="none",
    quiet=True,
)


def each_family(families: Sequence[str], quick: Sequence[str]) -> list:
    """Returns parameters of a test, all but the quick ones marked as long."""
    return [
        pytest.param(family, marks=() if family in quick else pytest.mark.long)
        for family in families
    ]


class AddingRows(keras.optimizers.AdamW):
    """Adds up the gradients of an embedding's row, which Keras's optimizers leave apart."""

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.convert_to_tensor(grad) for grad in grads], trainable_variables)


def compile_plainly(model: keras.Model, **adamw) -> None:
    """Compiles a model of logits; the rate falls to zero over `STEPS`."""
    rate = np.dtype(keras.config.floatx()).type(LEARNING_RATE)
    schedule = keras.optimizers.schedules.PolynomialDecay(rate, STEPS, 0.0)
    model.compile(
        AddingRows(schedule, weight_decay=0.0, **adamw),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
        jit_compile=False,
    )


def in_full(inputs: dict[str, np.ndarray], labels: np.ndarray, **more) -> tf.data.Dataset:
    """Makes the training batches of text_classification with all of their padding.

    Args:
        inputs: encoded sentences.
        labels: theirs.
        **more: `seed`, `batch_size` and others of `batches.training_batches`, and a `change` as
            that of `arrays.training_data`.
    """
    change = more.pop("change", None)
    floatx = keras.config.floatx()
    rows = {name: tf.constant(value, tf.int32) for name, value in inputs.items()}
    answers = tf.constant(labels, floatx if labels.dtype.kind == "f" else tf.int32)

    def make_batch(indices, epoch, longest=None):
        x = {name: tf.gather(value, indices) for name, value in rows.items()}
        return change(x, indices, epoch) if change else x, tf.gather(answers, indices)

    return batches.training_batches(
        len(labels),
        more.pop("batch_size"),
        more.pop("seed"),
        make_batch,
        lengths=sentences.lengths(inputs),
        **more,
    )


def fit(model: keras.Model, data: tf.data.Dataset) -> None:
    """Trains `STEPS` batches; not by the `fit()` of KerasNLP's tasks, which takes texts."""
    keras.Model.fit(model, data.take(STEPS), shuffle=False, verbose=0)
