import keras
import numpy as np
import pytest
import tensorflow as tf

from data import several_labels
from models.losses import smoothed_cross_entropy, weighted_binary_cross_entropy
from tests.support import forked, replicas


@pytest.mark.parametrize("shape", [(6, 3), (2, 5, 7)], ids=["classes", "tokens"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_a_smoothed_label_is_spread_over_all_classes(shape, label_smoothing):
    """As by Keras's loss of labels that are written out, and so are the gradients."""
    rng = np.random.default_rng(0)
    logits = tf.constant(9 * rng.normal(size=shape))
    labels = rng.integers(shape[-1], size=shape[:-1])
    stock = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=label_smoothing, reduction="none", dtype="float64"
    )
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(logits)
        expected = stock(np.eye(shape[-1])[labels], logits)
        found = smoothed_cross_entropy(label_smoothing)(labels, logits)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    gradients = [tape.gradient(losses, logits) for losses in (found, expected)]
    np.testing.assert_allclose(*gradients, rtol=1e-9, atol=1e-12)


def test_compiled_it_is_the_weighted_mean():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(2, 3, 5)), rng.integers(5, size=(2, 3))
    weights = np.array([[1, 1, 0], [1, 0, 0]])
    model = keras.Sequential([keras.Input((3, 5)), keras.layers.Identity(dtype="float64")])
    model.compile(loss=smoothed_cross_entropy(0.1))
    found = model.evaluate(logits, labels, sample_weight=weights, verbose=0)
    each = smoothed_cross_entropy(0.1)(labels, logits)
    assert found == pytest.approx(float(np.mean(each * weights)), rel=1e-5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_each_label_and_value_has_its_weight(label_smoothing):
    rng = np.random.default_rng(0)
    logits = tf.constant(9 * rng.normal(size=(6, 3)))
    labels, weights = rng.integers(2, size=(6, 3)), rng.random((2, 3))
    stock = keras.losses.BinaryCrossentropy(
        from_logits=True, label_smoothing=label_smoothing, reduction="none", dtype="float64"
    )
    each = stock(labels[..., None], logits[..., None])
    expected = np.mean(np.where(labels, weights[1], weights[0]) * each, axis=1)
    found = weighted_binary_cross_entropy(weights, label_smoothing)(labels, logits)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    ones = weighted_binary_cross_entropy(np.ones((2, 3)), label_smoothing)(labels, logits)
    np.testing.assert_allclose(ones, stock(labels, logits), rtol=1e-12)


def train_with_weights(count):
    """Trains and evaluates on so many replicas; the last batch of the evaluation is padded."""
    rng = np.random.default_rng(0)
    labels = (rng.random((12, 3)) < [0.2, 0.5, 0.0]).astype(np.int8)
    weights = several_labels.balanced_weights(labels)
    x, presence = rng.normal(size=(12, 4)), np.array([1.0] * 9 + [0.0] * 3)

    def build():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), weighted_binary_cross_entropy(weights))
        return model

    found = replicas.fit(
        count,
        build,
        replicas.dataset((x, labels), 6),
        evaluated=replicas.dataset((x, labels, presence), 6),
    )
    return {name: found[name] for name in ("weights", "losses", "evaluated")}


def test_weighted_labels_on_replicas_equal_one_device():
    one, two = (forked.run(train_with_weights, count) for count in (1, 2))
    for name, values in one.items():
        assert two[name] == pytest.approx(values, rel=1e-9)
