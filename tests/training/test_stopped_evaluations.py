"""A run that is stopped during an evaluation repeats it exactly, and what cannot is refused."""

import dataclasses
import json
import os
import signal

import keras
import pytest

from callbacks import stopping
from callbacks.errors import Stopped
from tests.support import tiny_recipe


@keras.saving.register_keras_serializable("tests")
class Sample(keras.layers.Layer):
    """Adds noise also in evaluations, as a variational autoencoder does."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, x):
        noise = keras.random.normal(keras.ops.shape(x), seed=self.seed_generator)
        return x + 0.3 * noise


def build(options):
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            Sample(),
            keras.layers.Dense(2),
        ]
    )


def train(folder, extra=(), build=build, **options):
    keras.backend.clear_session()
    options = tiny_recipe.Options(run_dir=folder, **options)
    return tiny_recipe.main(options, build=build, extra=extra)


def lines(folder):
    """The lines of metrics.jsonl, without speeds, with the order of their keys."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [[(k, v) for k, v in each.items() if "per_second" not in k] for each in records]


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"validate_every": 4}, marks=pytest.mark.long)]
)
def test_what_draws_in_evaluations_draws_the_same_again(tmp_path, monkeypatch, options):
    whole = train(tmp_path / "whole", **options)
    stock, batches = stopping.StopEvaluation.on_test_batch_end, []

    def on_test_batch_end(self, batch, logs=None):
        batches.append(batch)
        if len(batches) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        stock(self, batch, logs)

    monkeypatch.setattr(stopping.StopEvaluation, "on_test_batch_end", on_test_batch_end)
    with pytest.raises(Stopped):
        train(tmp_path / "broken", **options)
    broken = train(tmp_path / "broken", **options)
    assert broken["resumed_from_step"] == (4 if options else 9)
    assert lines(tmp_path / "broken") == lines(tmp_path / "whole")
    for name in ("weights_sha256", "history", "test"):
        assert broken[name] == whole[name]


@keras.saving.register_keras_serializable("tests")
class Jitter(keras.layers.Layer):
    """Adds noise from Keras's global generator."""

    def call(self, x, training=False):
        return x + keras.random.normal(keras.ops.shape(x)) if training else x


def build_stateful(options):
    return keras.Sequential(
        [
            keras.Input((6,), batch_size=8),
            keras.layers.Reshape((3, 2)),
            keras.layers.Bidirectional(keras.layers.LSTM(4, stateful=True)),
            keras.layers.Dense(2),
        ]
    )


def build_jittered(options):
    return keras.Sequential([keras.Input((6,)), Jitter(), keras.layers.Dense(2)])


class StopAtStep(keras.callbacks.Callback):
    """Stops the run, as a signal of the scheduler does."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.long
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(build_stateful, id="stateful"),
        pytest.param(build_jittered, id="global", marks=pytest.mark.long),
    ],
)
def test_states_of_layers_and_of_the_global_generator_resume(build, tmp_path):
    whole = train(tmp_path / "whole", build=build)
    with pytest.raises(Stopped):
        train(tmp_path / "broken", build=build, extra=[StopAtStep()])
    broken = train(tmp_path / "broken", build=build)
    assert broken["resumed_from_step"] == 6
    assert lines(tmp_path / "broken") == lines(tmp_path / "whole")
    for name in ("weights_sha256", "history", "test"):
        assert broken[name] == whole[name]


class EndAtStep(keras.callbacks.Callback):
    """Ends training in mid-epoch, as `keras.callbacks.TerminateOnNaN` may."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 3


@pytest.mark.long
def test_a_run_that_a_callback_ended_in_mid_epoch_ends_there_again(tmp_path, monkeypatch):
    whole = train(tmp_path / "whole", extra=[EndAtStep()])
    stock = stopping.StopEvaluation.on_test_batch_end

    def on_test_batch_end(self, batch, logs=None):
        os.kill(os.getpid(), signal.SIGTERM)
        stock(self, batch, logs)

    with monkeypatch.context() as patch:
        patch.setattr(stopping.StopEvaluation, "on_test_batch_end", on_test_batch_end)
        with pytest.raises(Stopped):
            train(tmp_path / "broken", extra=[EndAtStep()])
    broken = train(tmp_path / "broken", extra=[EndAtStep()])
    assert broken["resumed_from_step"] == broken["steps"] == whole["steps"] == 4
    assert lines(tmp_path / "broken") == lines(tmp_path / "whole")
    for name in ("weights_sha256", "history", "test"):
        assert broken[name] == whole[name]


@pytest.mark.long
def test_a_run_that_a_callback_ended_in_mid_epoch_is_extended(tmp_path):
    """The epoch that was cut is completed, as in a run that nothing ended."""
    assert train(tmp_path / "run", extra=[EndAtStep()])["steps"] == 4
    longer = train(tmp_path / "run", epochs=2, resume="extend")
    whole = train(tmp_path / "whole", epochs=2)
    assert longer["resumed_from_step"] == 4
    assert longer["steps"] == whole["steps"] and longer["epochs"] == 2
    assert [len(values) for values in longer["history"].values()] == [2] * len(whole["history"])


def rising_rate(options, learning_rate):
    """SGD whose last steps ruin the weights."""
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([20], [0.5, 30.0])
    arguments = tiny_recipe.compile_arguments(options, learning_rate)
    return arguments | {"optimizer": keras.optimizers.SGD(schedule)}


@pytest.mark.long
def test_an_extended_run_ends_on_the_best_weights_of_the_epoch_that_was_cut(tmp_path):
    """The best epoch, the third, ended at step 20; extended it ends at step 27, worse."""
    options = dict(epochs=3, keep_best="val_loss", early_stopping=2, run_dir=tmp_path)
    cut = tiny_recipe.Options(max_steps=20, **options)
    tiny_recipe.main(cut, arguments=rising_rate)
    keras.backend.clear_session()
    extended = tiny_recipe.Options(max_steps=27, resume="extend", **options)
    results = tiny_recipe.main(extended, arguments=rising_rate)
    assert results["steps"] == 27 and results["weights_of_step"] == 20
    assert results["test"]["loss"] < 1


@pytest.mark.long
def test_an_extension_that_ended_early_is_found_finished_by_its_command(tmp_path, monkeypatch):
    options = dict(keep_best="val_loss", early_stopping=1, run_dir=tmp_path)
    tiny_recipe.main(tiny_recipe.Options(epochs=2, **options), arguments=rising_rate)
    extended = tiny_recipe.Options(epochs=9, resume="extend", **options)
    results = tiny_recipe.main(extended, arguments=rising_rate)
    assert 18 < results["steps"] < 81
    monkeypatch.setattr(keras.Model, "fit", lambda *_, **__: pytest.fail("it trains"))
    for resume in ("extend", "auto"):
        again = dataclasses.replace(extended, resume=resume)
        assert tiny_recipe.main(again, arguments=rising_rate)["steps"] == results["steps"]
