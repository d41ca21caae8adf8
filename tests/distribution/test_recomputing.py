"""Layers that the gradient computes a second time: the same numbers, and less memory."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from distribution import step
from distribution.errors import DistributionError
from distribution.keras_compat import recomputing
from tests.support import forked, replicas

ROWS, WIDTH = 4, 6


class Block(keras.layers.Layer):
    """A block with dropout, a mask, a state, a loss and a second, optional input."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.dense = keras.layers.Dense(WIDTH, activation="gelu")
        self.dropout = keras.layers.Dropout(0.3, seed=1)
        self.norm = keras.layers.BatchNormalization()

    def build(self, shape):
        for layer in (self.dense, self.dropout, self.norm):
            layer.build(shape)

    def compute_output_shape(self, shape, *_):
        return shape

    def call(self, inputs, shift=None, mask=None, training=None):
        out = self.norm(self.dropout(self.dense(inputs), training=training), training=training)
        if mask is not None:
            out = out * keras.ops.cast(mask, out.dtype)[..., None]
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(out)))
        return inputs + out if shift is None else inputs + out * shift


def build(optimizer="sgd"):
    inputs = keras.Input((None,), dtype="int32")
    embedded = keras.layers.Embedding(9, WIDTH, mask_zero=True)(inputs)
    first = Block(name="block_0")(embedded)
    second = Block(name="block_1")(first, shift=keras.layers.Dense(WIDTH)(embedded))
    model = keras.Model(inputs, keras.layers.Dense(3)(second))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.get(optimizer), loss=loss)
    return model


def data(size=8):
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 9, (3 * size, 5))
    tokens[:, 0] = 1
    labels = generator.integers(0, 3, (3 * size, 5))
    return tf.data.Dataset.from_tensor_slices((tokens, labels)).batch(size, drop_remainder=True)


def trained_both_ways(count, installed):
    ways = (False, True)
    return [
        replicas.fit(
            count, build, data(), epochs=2, evaluated=data(), gradient_checkpointing=way, **installed
        )
        for way in ways
    ]


CASES = {
    "one device": (1, {}),
    "XLA": (1, {"jit_compile": True}),
    "two replicas": (2, {}),
    "two batches per update": (1, {"batches_per_update": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_weights_and_states_are_the_same(case):
    kept, recomputed = forked.run(trained_both_ways, *CASES[case])
    np.testing.assert_allclose(recomputed["losses"], kept["losses"], rtol=1e-13)
    np.testing.assert_allclose(recomputed["steps"], kept["steps"], rtol=1e-11, atol=1e-14)
    assert recomputed["evaluated"] == pytest.approx(kept["evaluated"], rel=1e-12)
    assert len(set(kept["losses"])) > 1
