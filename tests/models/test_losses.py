import keras
import numpy as np
import pytest
import tensorflow as tf

from models.losses import smoothed_cross_entropy


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
