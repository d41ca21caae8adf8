"""Accumulated batches against one batch of all their examples."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from distribution import keras_compat
from distribution.accumulate import accumulate
from distribution.global_loss import GlobalMean
from distribution.optimizers import reduce_before_clipping
from tests.support import forked


def weighted_examples():
    """Three batches of 4 examples, whose weights sum up to 20, 0.7 and 0."""
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(12, 3)), numbers.normal(size=(12, 1))
    weights = np.array([8.0, 1, 4, 7, 0.1, 0, 0.6, 0, 0, 0, 0, 0])
    return x, y, weights


def one_update(strategy, batch, steps, weighted):
    """Weights and logs after one update, of K batches."""
    x, y, weights = weighted_examples()
    examples = (x, y, weights) if weighted else (x, y)
    data = tf.data.Dataset.from_tensor_slices(examples).batch(batch)
    with keras_compat.patch_keras_for(strategy):
        with strategy.scope():
            layers = [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")]
            model = keras.Sequential(layers)
            model.compile(
                optimizer=reduce_before_clipping(keras.optimizers.SGD(0.1, global_clipnorm=0.5)),
                loss=GlobalMean(keras.losses.MeanSquaredError()),
                weighted_metrics=[keras.metrics.MeanSquaredError("error")],
            )
            keras_compat.build(model, data)
            if steps > 1:
                accumulate(model, steps)
        history = model.fit(data, steps_per_epoch=1, shuffle=False, verbose=0).history
        evaluated = model.evaluate(data, verbose=0, return_dict=True)
    return {
        "weights": np.concatenate([w.reshape(-1) for w in model.get_weights()]),
        "loss": history["loss"][0],
        "error": history["error"][0],
        "evaluated": evaluated["error"],
        "iterations": int(keras.ops.convert_to_numpy(model.optimizer.iterations)),
    }


def two_updates(weighted):
    """The same examples in three batches, and in one; on two replicas."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    return [one_update(strategy, 4, 3, weighted), one_update(strategy, 12, 1, weighted)]


def by_hand(weighted):
    """The same update in numpy: the clipped gradient of the weighted mean."""
    x, y, weights = weighted_examples()
    weights = weights if weighted else np.ones(12)
    x = np.concatenate([x, np.ones((12, 1))], axis=1)
    w = np.array([1.0, 1, 1, 0])
    errors = x @ w - y[:, 0]
    gradient = 2 * (weights * errors) @ x / weights.sum()
    gradient *= 0.5 / max(0.5, np.linalg.norm(gradient))
    return w - 0.1 * gradient, (weights * errors**2).sum() / weights.sum()


@pytest.mark.parametrize("weighted", [True, False], ids=["unequal weights", "no weights"])
def test_k_batches_make_the_update_of_one_batch_of_all_examples(weighted):
    weights, loss = by_hand(weighted)
    accumulated, at_once = forked.run(two_updates, weighted)
    for found in (accumulated, at_once):
        assert found["iterations"] == 1
        np.testing.assert_allclose(found["weights"], weights, rtol=1e-12)
        np.testing.assert_allclose([found["loss"], found["error"]], loss, rtol=1e-12)
    assert accumulated["evaluated"] == pytest.approx(at_once["evaluated"], rel=1e-12)
