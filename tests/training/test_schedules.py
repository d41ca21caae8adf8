import keras
import numpy as np
import pytest

from callbacks.plateau import ScaledSchedule
from models.metrics import MacroF1
from training.schedules import WarmUp


def to_zero(steps, peak=1.0):
    return keras.optimizers.schedules.PolynomialDecay(
        initial_learning_rate=peak, decay_steps=steps, end_learning_rate=0.0
    )


def rates(schedule, steps):
    return [float(keras.ops.convert_to_numpy(schedule(step))) for step in range(steps)]


def test_grows_to_the_peak_then_follows_the_other_schedule():
    found = rates(WarmUp(4, to_zero(8)), 13)
    expected = [0.25, 0.5, 0.75, 1.0, *(1 - np.arange(8) / 8), 0.0]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_without_warm_up_it_is_the_other_schedule():
    np.testing.assert_allclose(rates(WarmUp(0, to_zero(4)), 4), [1, 0.75, 0.5, 0.25])


def test_float64_is_not_rounded():
    keras.config.set_floatx("float64")
    for step, expected in ((0, 0.1 / 3), (3, 0.1), (7, 0.05)):
        rate = keras.ops.convert_to_numpy(WarmUp(3, to_zero(8, np.float64(0.1)))(step))
        assert rate.dtype == np.float64
        assert rate == pytest.approx(expected, rel=1e-14)


@pytest.mark.long
def test_a_compiled_model_is_saved_and_loaded(tmp_path):
    """Schedule, metric and optimizer are restored with their state."""
    schedule = ScaledSchedule(WarmUp(2, to_zero(8, np.float64(0.1))), 0.5)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(schedule), loss, weighted_metrics=[MacroF1(2)])
    x, y = np.eye(3, dtype="float32"), np.array([0, 1, 1])
    model.fit(x, y, epochs=3, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    rate = float(loaded.optimizer.learning_rate)
    assert rate == pytest.approx(0.5 * 0.1 * 7 / 8) == float(model.optimizer.learning_rate)
    for each in (model, loaded):
        each.fit(x, y, verbose=0)
    np.testing.assert_array_equal(*(each.predict(x, verbose=0) for each in (model, loaded)))
    assert loaded.evaluate(x, y, verbose=0, return_dict=True)["macro_f1"] == pytest.approx(
        model.evaluate(x, y, verbose=0, return_dict=True)["macro_f1"]
    )
