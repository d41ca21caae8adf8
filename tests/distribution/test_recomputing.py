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
        self.dense = keras.layers.Dense(WIDTH, activation="tanh")
        self.dropout = keras.layers.Dropout(0.3, seed=1)
        self.norm = keras.layers.BatchNormalization()

    def build(self, shape):
        for layer in (self.dense, self.dropout, self.norm):
            layer.build(shape)

    def compute_output_shape(self, shape, *_):
        return shape

    def call(self, inputs, shift=None, mask=None):  # Keras knows whether the model is training
        out = self.norm(self.dropout(self.dense(inputs)))
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
    settings = installed | {"epochs": 2, "evaluated": data()}
    return [
        replicas.fit(count, build, data(), gradient_checkpointing=way, **settings)
        for way in (False, True)
    ]


CASES = {
    "one device": (1, {}),
    "XLA": (1, {"jit_compile": True}),
    "two replicas": (2, {}),
    "two batches per update": (1, {"batches_per_update": 2}),
}


@pytest.mark.parametrize(
    "case",
    [
        "one device",
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in ("XLA", "two replicas", "two batches per update")
        ),
    ],
)
def test_losses_weights_and_states_are_the_same(case):
    kept, recomputed = forked.run(trained_both_ways, *CASES[case])
    np.testing.assert_allclose(recomputed["losses"], kept["losses"], rtol=1e-13)
    np.testing.assert_allclose(recomputed["steps"], kept["steps"], rtol=1e-11, atol=1e-14)
    assert recomputed["evaluated"] == pytest.approx(kept["evaluated"], rel=1e-12)
    assert len(set(kept["losses"])) > 1


def test_inputs_alone_are_kept_until_the_gradient():
    """A block is computed again, after the gradient of its outputs."""
    model, tokens = build(), np.ones((2, 3), "int32")

    def gradient(layers):
        with recomputing.recomputed(layers), tf.GradientTape() as tape:
            out = model(tokens, training=True)
        return tape.gradient(out, [v.value for v in model.trainable_variables])

    for layers in ([], recomputing.repeated_layers(model)):
        operations = tf.function(gradient).get_concrete_function(layers).graph.get_operations()
        computed = [each for each in operations if each.type == "Tanh"]
        read = [each.inputs[0].op for each in operations if each.type == "TanhGrad"]
        assert len(read) == 2 and len(computed) == 2 + len(layers)
        if layers:
            assert not set(read) & set(computed[:2]), "the gradient reads the second ones"
            for each in computed[2:]:
                assert any("gradient_tape" in other.name for other in _before(each))


def _before(operation):
    """Returns the operations whose results an operation needs."""
    found, left = set(), [operation]
    while left:
        for tensor in left.pop().inputs:
            if tensor.op not in found:
                found.add(tensor.op)
                left.append(tensor.op)
    return found


def test_the_outermost_layers_of_which_there_are_several_are_repeated():
    assert [layer.name for layer in recomputing.repeated_layers(build())] == ["block_0", "block_1"]
    inner = build()
    outer = keras.Sequential([inner, keras.layers.Softmax()])
    names = [layer.name for layer in recomputing.repeated_layers(outer)]
    assert names == ["block_0", "block_1"], "those of an inner model"
    single = keras.Sequential([keras.Input((None, WIDTH)), Block()])
    assert recomputing.repeated_layers(single) == []
    inputs, shared = keras.Input((None, WIDTH)), Block(name="shared")
    twice = keras.Model(inputs, shared(shared(inputs)))
    assert [layer.name for layer in recomputing.repeated_layers(twice)] == ["shared"]


def test_what_cannot_be_computed_twice_is_refused():
    plain = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)], name="plain")
    plain.compile(loss="mse")
    with pytest.raises(DistributionError, match="the model plain repeats no layer"):
        step.install(plain, gradient_checkpointing=True)

    class Own(keras.Model):
        def train_step(self, data):
            return {}

    blocks = build()
    own = Own(blocks.inputs, blocks.outputs)
    own.compile(loss="mse")
    with pytest.raises(DistributionError, match="Own overrides train_step, which computes the gr"):
        step.install(own, gradient_checkpointing=True)


def test_a_layer_is_called_as_before_afterwards():
    model = build()
    layers = recomputing.repeated_layers(model)
    before = model(np.ones((2, 3)))
    with recomputing.recomputed(layers):
        pass
    assert "call" not in vars(layers[0])
    np.testing.assert_array_equal(model(np.ones((2, 3))), before)
