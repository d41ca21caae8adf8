import keras
import numpy as np
import pytest
import tensorflow as tf

from distribution.global_loss import GlobalMean, global_sum, is_global, weight_sum

generator = np.random.default_rng(0)
LOGITS = generator.normal(size=(4, 3, 7)).astype("float32")
LABELS = generator.integers(0, 7, (4, 3))
WEIGHTS = generator.integers(0, 2, (4, 3)).astype("float32") * 0.5
TARGETS = generator.normal(size=(6,)).astype("float32")
OUTPUTS = generator.normal(size=(6, 1)).astype("float32")


def cross_entropies():
    shifted = LOGITS.astype("float64") - LOGITS.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probabilities, LABELS[..., None], -1)[..., 0]


def sparse():
    return GlobalMean(keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class TestOneReplica:
    def test_is_the_weighted_mean(self):
        values = cross_entropies()
        expected = (WEIGHTS * values).sum() / WEIGHTS.sum()
        assert float(sparse()(LABELS, LOGITS, WEIGHTS)) == pytest.approx(expected, rel=1e-6)

    def test_without_weights_it_is_the_mean(self):
        found = float(sparse()(LABELS, LOGITS))
        assert found == pytest.approx(cross_entropies().mean(), rel=1e-6)

    def test_a_weight_of_an_example_counts_for_each_of_its_values(self):
        weights = np.array([1.0, 0.0, 2.0, 0.5], "float32")
        values = cross_entropies()
        expected = (weights[:, None] * values).sum() / (3 * weights.sum())
        assert float(sparse()(LABELS, LOGITS, weights)) == pytest.approx(expected, rel=1e-6)
        assert float(sparse()(LABELS, LOGITS, weights[:, None])) == pytest.approx(expected, 1e-6)

    def test_what_weighs_zero_changes_nothing(self):
        weights = np.array([[1, 1, 0]] * 4, "float32")
        other = LOGITS.copy()
        other[:, 2] += 100 * generator.normal(size=(4, 7))
        assert float(sparse()(LABELS, LOGITS, weights)) == float(sparse()(LABELS, other, weights))

    def test_all_weights_zero_give_zero_and_no_gradient(self):
        logits = tf.Variable(LOGITS)
        with tf.GradientTape() as tape:
            loss = sparse()(LABELS, logits, np.zeros_like(WEIGHTS))
        assert float(loss) == 0.0
        assert not tape.gradient(loss, logits).numpy().any()

    def test_the_gradient_is_that_of_the_mean(self):
        logits = tf.Variable(LOGITS)
        with tf.GradientTape() as tape:
            loss = sparse()(LABELS, logits, WEIGHTS)
        gradient = tape.gradient(loss, logits).numpy()
        probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
        expected = WEIGHTS[..., None] * (probabilities - np.eye(7)[LABELS]) / WEIGHTS.sum()
        np.testing.assert_allclose(gradient, expected, atol=1e-6)

    def test_the_shape_trap_of_regression(self):
        # (batch,) against (batch, 1) must not become (batch, batch).
        loss = GlobalMean(keras.losses.MeanSquaredError())
        expected = np.square(TARGETS - OUTPUTS[:, 0])
        for y_true, y_pred in ((TARGETS, OUTPUTS), (TARGETS[:, None], OUTPUTS)):
            assert float(loss(y_true, y_pred)) == pytest.approx(expected.mean(), rel=1e-5)
            weights = np.array([1, 1, 0, 2, 0, 1], "float32")
            found = float(loss(y_true, y_pred, weights))
            assert found == pytest.approx((weights * expected).sum() / weights.sum(), rel=1e-5)

    def test_float64_is_not_rounded(self):
        keras.config.set_floatx("float64")
        found = sparse()(LABELS, LOGITS.astype("float64"), WEIGHTS.astype("float64"))
        assert found.dtype == "float64"
        expected = (WEIGHTS * cross_entropies()).sum() / WEIGHTS.sum()
        assert float(found) == pytest.approx(expected, rel=1e-14)


def test_sums():
    assert float(global_sum(tf.constant(3.0))) == 3.0
    assert float(weight_sum(LABELS, None, "float32")) == 12
    assert float(weight_sum(LABELS, WEIGHTS, "float32")) == WEIGHTS.sum()


def test_serialises():
    loss = GlobalMean(keras.losses.SparseCategoricalCrossentropy(from_logits=True), name="mine")
    again = GlobalMean.from_config(loss.get_config())
    assert again.name == "mine"
    assert float(again(LABELS, LOGITS, WEIGHTS)) == float(loss(LABELS, LOGITS, WEIGHTS))
    assert GlobalMean(keras.losses.Huber()).name == keras.losses.Huber().name


def test_is_global():
    one, stock = GlobalMean(keras.losses.Huber()), keras.losses.Huber()
    assert all(is_global(loss) for loss in (one, [one, one], {"a": one, "b": None}))
    assert not any(is_global(loss) for loss in (stock, "mse", None, [one, stock], {"a": "mse"}))


def test_fit_minimises_the_weighted_mean():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.1), loss=GlobalMean(keras.losses.MeanSquaredError()))
    x, y = np.array([[1.0, 0], [0, 1], [1, 1]]), np.array([1.0, 2, 100])
    start = model.get_weights()[0][:, 0]
    model.fit(x, y, sample_weight=np.array([1.0, 3, 0]), batch_size=3, epochs=1, verbose=0)
    gradient = 2 * np.array([1 * (start[0] - 1), 3 * (start[1] - 2)]) / 4
    np.testing.assert_allclose(model.get_weights()[0][:, 0], start - 0.1 * gradient, rtol=1e-5)
