import keras
import numpy as np
import pytest

from callbacks import averages
from callbacks.predictions import Predictions
from callbacks.tensorboard import TensorBoard


@pytest.fixture
def trained():
    """A model, its data, and its weights after one step and after two, with momentum 0.5."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5), "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 3)).astype(np.float32), rng.normal(size=(8, 2)).astype(np.float32)
    model.fit(x, y, batch_size=8, verbose=0)
    first = model.get_weights()  # the first average is the weights themselves
    model.train_on_batch(x, y)
    averages.evaluate_averages(model)
    return model, x, y, first, model.get_weights()


def assert_equal(model, weights):
    for found, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_they_are_evaluated_and_the_weights_stay(trained):
    model, x, y, first, second = trained
    found = model.evaluate(x, y, batch_size=8, verbose=0)
    assert_equal(model, second)
    model.set_weights([0.5 * a + 0.5 * b for a, b in zip(first, second, strict=True)])
    expected = keras.Model.evaluate(model, x, y, batch_size=8, verbose=0)
    assert found == pytest.approx(expected, abs=1e-6)
    model.set_weights(second)
    assert abs(keras.Model.evaluate(model, x, y, batch_size=8, verbose=0) - found) > 1e-4


def test_callbacks_predict_with_it(trained):
    model, x, _, first, second = trained
    raw = model(x, training=False)
    callback = Predictions(TensorBoard(None), x)
    callback.set_model(model)
    found = callback.outputs()
    assert np.abs(found - raw).max() > 1e-4
    assert_equal(model, second)
    model.set_weights([0.5 * a + 0.5 * b for a, b in zip(first, second, strict=True)])
    np.testing.assert_allclose(found, model(x, training=False), rtol=1e-5, atol=1e-6)


def test_an_evaluation_that_is_given_up_puts_the_weights_back(trained):
    model, x, y, _, second = trained

    class Stop(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.evaluate(x, y, verbose=0, callbacks=[Stop()])
    assert_equal(model, second)


@pytest.mark.parametrize("optimizer", ["adam", None])
def test_a_model_without_averages_is_left_as_it_is(optimizer):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    if optimizer is not None:
        model.compile(optimizer, "mse")
        model.train_on_batch(np.ones((2, 3)), np.ones((2, 2)))
    assert not averages.has_averages(model)
    before = model.get_weights()
    with averages.averaged(model):
        assert_equal(model, before)


def test_averages_of_one_of_several_optimizers():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(2, name="averaged"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    parts = keras.optimizers.OptimizerMap(default_optimizer=keras.optimizers.SGD(0.1))
    parts[".*averaged.*"] = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    model.compile(keras.optimizers.MultiOptimizer(parts), "mse")
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    model.train_on_batch(x, y)
    first = model.get_weights()
    model.train_on_batch(x, y)
    second = model.get_weights()
    assert averages.has_averages(model)
    with averages.averaged(model):
        for found, *both in zip(model.get_weights()[:2], first, second, strict=False):
            np.testing.assert_allclose(found, np.mean(both, axis=0), rtol=1e-6)
        np.testing.assert_array_equal(model.get_weights()[2], second[2])
    assert_equal(model, second)


def test_averages_behind_a_loss_scale_are_found():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(use_ema=True))
    model.compile(scaled, "mse")
    assert averages.has_averages(model)
