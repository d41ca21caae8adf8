import keras
import numpy as np
import pytest

from callbacks.plateau import ScaledSchedule
from models.metrics import MacroF1
from training.options import TransformerOptions
from training.plan import make_plan
from training.schedules import Hold, WarmUp, reshaped


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


def make_schedule(options, plan):
    """As the recipes."""
    decay = keras.optimizers.schedules.PolynomialDecay(
        plan.learning_rate, plan.decay_steps, plan.end_learning_rate
    )
    return WarmUp(plan.warmup_steps, reshaped(decay, options, plan))


def of_options(**options):
    """The rates of a run of 20 steps with a warm-up of 4, and that after its end; peak 1."""
    given = TransformerOptions(max_steps=20, warmup_steps=4, **options)
    sizes = dict(replicas=1, examples=2000, batch_size_per_replica=32, warmup_steps=0)
    plan = make_plan(given, **sizes, base_learning_rate=1.0)
    return np.array(rates(make_schedule(given, plan), 21))


FALL = np.arange(17) / 16  # the share of the steps after the warm-up that are done


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1 - FALL),
        ({"min_lr_ratio": 0.1}, 1 - 0.9 * FALL),
        ({"lr_schedule": "cosine"}, (1 + np.cos(np.pi * FALL)) / 2),
        (
            {"lr_schedule": "cosine", "min_lr_ratio": 0.1},
            0.1 + 0.9 * (1 + np.cos(np.pi * FALL)) / 2,
        ),
        ({"lr_schedule": "constant"}, np.ones(17)),
        ({"lr_schedule": "wsd"}, [1] * 13 + [0.75, 0.5, 0.25, 0]),
        ({"lr_schedule": "wsd", "lr_decay_steps": 2}, [1] * 15 + [0.5, 0]),
        ({"lr_schedule": "wsd", "lr_decay_steps": 16, "min_lr_ratio": 0.5}, 1 - 0.5 * FALL),
    ],
)
def test_the_schedule_of_the_options(options, expected):
    found = of_options(**options)
    np.testing.assert_allclose(found[:4], [0.25, 0.5, 0.75, 1], atol=1e-6)
    np.testing.assert_allclose(found[4:], expected, atol=1e-6)


@pytest.mark.parametrize("name", ["cosine", "constant", "wsd"])
def test_schedules_of_the_options_are_not_rounded_and_are_loaded(name):
    keras.config.set_floatx("float64")
    given = TransformerOptions(max_steps=9, warmup_steps=0, lr_schedule=name, min_lr_ratio=0.0)
    sizes = dict(replicas=1, examples=2000, batch_size_per_replica=32, warmup_steps=0)
    schedule = make_schedule(given, make_plan(given, **sizes, base_learning_rate=0.1))
    again = WarmUp.from_config(schedule.get_config())
    for step in (0, 4, 8):
        rate = keras.ops.convert_to_numpy(schedule(step))
        assert rate.dtype == np.float64 and rate == keras.ops.convert_to_numpy(again(step))
    assert keras.ops.convert_to_numpy(schedule(0)) == pytest.approx(0.1, rel=1e-15)


@pytest.mark.parametrize("name", ["linear", "cosine", "constant", "wsd"])
def test_a_run_without_steps_has_a_schedule(name):
    given = TransformerOptions(epochs=0, lr_schedule=name, lr_decay_steps=5, warmup_steps=5)
    sizes = dict(replicas=1, examples=2000, batch_size_per_replica=32, warmup_steps=0)
    plan = make_plan(given, **sizes, base_learning_rate=1.0)
    assert rates(make_schedule(given, plan), 1) == [1.0]


def test_a_rate_is_held():
    np.testing.assert_allclose(rates(Hold(3, to_zero(4)), 8), [1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


def test_options_of_other_schedules_are_refused():
    assert TransformerOptions(lr_decay_steps=5).problems() == [
        "--lr-decay-steps: needs --lr-schedule wsd"
    ]
    (problem,) = TransformerOptions(lr_schedule="constant", min_lr_ratio=0.1).problems()
    assert problem == "--min-lr-ratio: --lr-schedule constant ends at the peak; leave it out"


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
