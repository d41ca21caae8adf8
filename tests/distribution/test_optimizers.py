import keras
import numpy as np
import pytest
import tensorflow as tf

from distribution.optimizers import bound_adam, in_order, largest_adam_step

BETAS = [(0.9, 0.98), (0.9, 0.999), (0.5, 0.9)]


def train(gradients, betas, bounded, between=lambda optimizer: None):
    """The weights after each step."""
    weight = keras.Variable(np.zeros(gradients.shape[1]), dtype="float64")
    optimizer = keras.optimizers.AdamW(0.1, beta_1=betas[0], beta_2=betas[1], epsilon=1e-12)
    optimizer.build([weight])
    if bounded:
        bound_adam(optimizer)
    seen = [np.zeros(gradients.shape[1])]
    for gradient in gradients:
        between(optimizer)
        optimizer.apply([keras.ops.convert_to_tensor(gradient, "float64")])
        seen.append(keras.ops.convert_to_numpy(weight))
    return np.array(seen)


@pytest.mark.parametrize("betas", BETAS)
def test_a_single_writer_never_reaches_the_bound(betas):
    """Gradients that come rarely, grow, and keep their sign make Adam's longest steps."""
    rng = np.random.default_rng(0)
    keras.config.set_floatx("float64")
    time = np.arange(60)[:, None]
    gradients = np.concatenate(
        [
            rng.normal(size=(60, 20)) * 10.0 ** rng.uniform(-6, 3, (60, 20)),
            (rng.random((60, 20)) < 0.05) * 1.0,
            # b1 / b2 to the power of the age: the equality of the bound.
            (betas[1] / betas[0]) ** (time * np.linspace(0, 2, 20)),
        ],
        axis=1,
    )
    stock = train(gradients, betas, bounded=False)
    np.testing.assert_array_equal(stock, train(gradients, betas, bounded=True))
    longest = np.abs(np.diff(stock, axis=0)).max() / 0.1
    limit = largest_adam_step(*betas)
    assert limit / 10 < longest <= limit * 1.01


def test_a_mean_without_its_square_moves_no_weight_far():
    """What another worker's half-written update looks like: m is there, v is not."""

    def half_written(optimizer):
        index = [v.path.split("/")[-1] for v in optimizer.variables]
        momentum = next(i for i, name in enumerate(index) if "momentum" in name)
        optimizer.variables[momentum].assign(np.ones(3))

    gradients = np.full((1, 3), 1e-6)
    stock = train(gradients, (0.9, 0.98), False, half_written)
    bounded = train(gradients, (0.9, 0.98), True, half_written)
    assert np.abs(stock).max() > 1000
    assert np.abs(bounded).max() <= 1.02 * 0.1 * largest_adam_step(0.9, 0.98)


def test_betas_without_a_bound():
    assert largest_adam_step(0.99, 0.9) == np.inf


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_row_that_a_batch_looks_up_twice_has_the_sum_of_its_gradients(clip_norm):
    """Else Adam's v adds up their squares, and the step is sqrt(2) times too long."""
    steps = []
    for sparse in (True, False):
        weight = keras.Variable(np.zeros((3, 2)), dtype="float64")
        optimizer = in_order(keras.optimizers.Adam(0.1, global_clipnorm=clip_norm))
        for first in (1.0, 2.0):
            gradient = tf.IndexedSlices(
                tf.constant([[first, 1.0], [3.0, -1.5], [1.0, 1.0]], "float64"),
                tf.constant([0, 0, 2]),
                tf.constant([3, 2]),
            )
            if not sparse:
                gradient = tf.convert_to_tensor(gradient)
            optimizer.apply([gradient], [weight])
        steps.append(keras.ops.convert_to_numpy(weight))
    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-12)
