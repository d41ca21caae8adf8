"""Tests a whole run of the tiny recipe: nothing is lost, nothing silently wrong."""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import signal
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from callbacks import checkpoint as checkpoint_files
from callbacks.checkpoint import Checkpoint
from callbacks.errors import BadLoss, CannotSave, Stopped
from callbacks.steps import StepCallback
from callbacks.stopping import StopAtStep, StopEvaluation
from data import arrays
from distribution import strategies
from distribution.keras_compat import fitting, patches
from machine import device
from tests.support import damaged, forked, processes, tiny_recipe
from training import run as run_module
from training import signals as signals_module
from training.errors import OptionsError, RunError
from training.loaded_run import load_run
from training.log import run_logging
from training.run import start_run
from training.signals import Signals

PER_EPOCH = tiny_recipe.STEPS_PER_EPOCH


def start(folder, data=None, inside=None, extra=(), **options):
    options = tiny_recipe.Options(run_dir=folder, **options)
    return tiny_recipe.main(options, data=data, inside=inside, extra=extra)


@pytest.fixture
def at_step(monkeypatch):
    """Calls something once, after a step, before anything of that step is logged or saved."""

    def arm(step, action):
        stock = StopAtStep.on_step_end

        def on_step_end(self, now, logs):
            if now == step:
                monkeypatch.setattr(StopAtStep, "on_step_end", stock)
                action()
            stock(self, now, logs)

        monkeypatch.setattr(StopAtStep, "on_step_end", on_step_end)

    return arm


@pytest.fixture
def stopped(at_step, tmp_path):
    """Runs until a SIGTERM after a step; returns the folder."""

    def run(step, folder=tmp_path / "run", **options):
        at_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped, match="Resume with:"):
            start(folder, **options)
        assert newest(folder).step == step
        return folder

    return run


def newest(folder):
    return checkpoint_files.newest(folder / "checkpoints", set_aside=False)


def steps_saved(folder):
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def assert_as_unbroken(folder, finished):
    """The run ended like the one that nothing stopped."""
    ours, theirs = processes.results(finished), processes.results(folder)
    for name in ("weights_sha256", "history", "test", "steps"):
        assert ours[name] == theirs[name], name


def files_below(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@keras.saving.register_keras_serializable("tests")
class TwoOptimizers(keras.Model):
    """Trains each of its layers with its own optimizer, like a GAN of keras.io."""

    def __init__(self, **named):
        super().__init__(**named)
        self.hidden, self.out = keras.layers.Dense(4), keras.layers.Dense(2)

    def compile(self, rate):
        super().compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self.hidden_optimizer = keras.optimizers.Adam(rate)
        self.others = {"out": keras.optimizers.Adam(rate)}

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for optimizer, part in (self.hidden_optimizer, self.hidden), (self.others["out"], self.out):
            count = len(part.trainable_variables)
            optimizer.apply(gradients[:count], part.trainable_variables)
            gradients = gradients[count:]
        return {"loss": loss}


class BatchesSeen(keras.metrics.Metric):
    """Counts the batches of all epochs and evaluations: a reset keeps their number."""

    def __init__(self):
        super().__init__(name="seen")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(1)

    def result(self):
        return self.count

    def reset_state(self):
        pass


EVALUATIONS = dict(validate_every=3, test_every=4)  # of the fixture `finished`


def device_of_batches():
    """The devices on which the step of each batch finds it, where they are copied to the second."""
    data = tf.data.Dataset.from_tensors((np.ones((2, 1), "float32"),) * 2).repeat(2)
    data.copied_ahead = "CPU:1"
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    devices = []

    def train_function(iterator):
        devices.extend({part.device[-5:] for part in next(iterator)})
        return {"loss": 0.0}

    fitting.build(model, data)
    with patches.patch_keras_for(strategies.make_strategy("none")):
        model.train_function = train_function
        model.fit(data, verbose=0, steps_per_epoch=2)
    return devices


class TestBatchesAhead:
    """On one GPU a batch is there before its step begins; a logical CPU stands for it."""

    @pytest.fixture
    def copies_to(self, monkeypatch):
        """Lets runs copy batches to a device; returns the datasets that were copied from."""
        copied, stock = [], tf.data.experimental.prefetch_to_device

        def prefetch_to_device(device, count):
            copied.append((device, count))
            return stock(device, count)

        def to(device):
            monkeypatch.setattr(strategies, "gpu_without_strategy", lambda strategy: device)
            monkeypatch.setattr(tf.data.experimental, "prefetch_to_device", prefetch_to_device)
            return copied

        return to

    @pytest.mark.long
    def test_same_numbers_also_when_it_resumes(self, finished, copies_to, stopped):
        copied = copies_to("CPU:0")
        folder = stopped(13, **EVALUATIONS)
        assert copied == [("CPU:0", 2)]  # that of `fit()`, not those of its evaluations
        start(folder, **EVALUATIONS)
        assert_as_unbroken(folder, finished)
        assert len(copied) == 2

    @pytest.mark.long
    def test_steps_of_an_execution(self, tmp_path, copies_to):
        copied = copies_to("CPU:0")
        together = start(tmp_path / "together", steps_per_execution=3)
        assert copied
        copies_to(None)
        assert start(tmp_path / "alone")["weights_sha256"] == together["weights_sha256"]

    @pytest.mark.long
    def test_the_devices(self, copies_to):
        assert forked.run(device_of_batches, cpus=2) == ["CPU:1"] * 2


class TestNumbers:
    def test_the_device_is_named(self, finished):
        named = device.describe()
        assert processes.results(finished)["device"] == named
        assert f"device         {named}\n" in (finished / "worker-0.log").read_text()

    @pytest.mark.long
    @pytest.mark.parametrize("baseline", [{}, {"accuracy": 0.5}])
    def test_what_it_prints_at_its_end(self, baseline, tmp_path, capsys, monkeypatch):
        stock = run_module.Run.finish

        def finish(self, model, test, **named):
            return stock(self, model, test=test, baseline=baseline)

        monkeypatch.setattr(run_module.Run, "finish", finish)
        monkeypatch.setattr(tiny_recipe, "predict", lambda run, inputs: [], raising=False)
        folder = tmp_path / "a run"
        start(folder, max_steps=2)
        lines = capsys.readouterr().out.splitlines()
        assert sum(line.startswith("baseline ") for line in lines) == len(baseline)
        assert f"logs     tensorboard --logdir '{folder}'" in lines
        assert lines[-1].startswith("predict  ")
        assert f"-m recipes.predict '{folder}' " in lines[-1]

    def test_a_gpu_that_cannot_be_used_is_noted(self, tmp_path, monkeypatch):
        monkeypatch.setattr(device, "unused_gpu", lambda: "a GPU is there")
        results = start(tmp_path / "run", max_steps=1)
        assert results["notes"] == ["a GPU is there"]
        # The first step is not measured.
        assert results["examples_per_second"] is results["tokens_per_second"] is None

    def test_evaluations_in_mid_epoch_are_each_of_their_split(self, finished):
        """Held against NumPy on the weights of that step."""
        data = tiny_recipe.splits()
        model = tiny_recipe.build_model(tiny_recipe.Options())
        evaluations = processes.records(finished, "evaluation")
        seen = set()
        for record in evaluations:
            weights = finished / "checkpoints" / f"step-{record['step']:08d}"
            if weights.exists():
                model.load_weights(weights / "model.weights.h5")
                x, y = data[{"validation": "valid", "test": "test"}[record["split"]]]
                logits = keras.ops.convert_to_numpy(model(x, training=False)).astype(np.float64)
                log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
                loss = -log_p[np.arange(len(y)), y].mean()
                assert record["cross_entropy"] == pytest.approx(loss, rel=1e-5)
                assert record["accuracy"] == pytest.approx((logits.argmax(axis=1) == y).mean())
                seen.add((record["split"], record["step"]))
        assert {("test", 12), ("test", 16), ("validation", 9), ("validation", 12)} <= seen
        steps = [(r["split"], r["step"]) for r in evaluations]
        assert [s for split, s in steps if split == "test"] == [4, 8, 12, 16, 18]
        assert [s for split, s in steps if split == "validation"] == [3, 6, 9, 12, 15, 18]

    @pytest.mark.long
    def test_test_metrics_that_are_no_numbers(self, tmp_path):
        data = tiny_recipe.splits()
        data["test"][0][7] = np.nan
        with pytest.raises(BadLoss, match="the test's (loss|cross_entropy) is nan after 18 steps"):
            start(tmp_path / "run", data=data)
        assert not (tmp_path / "run" / "results.json").exists()
        assert not (tmp_path / "run" / "model").exists()

    def test_a_bad_loss_ends_it_at_once(self, tmp_path):
        data = tiny_recipe.splits()
        data["train"][0][:] = np.nan
        with pytest.raises(BadLoss, match="the loss is nan at step 1 .*checkpoint: none"):
            start(tmp_path / "run", data=data)

    def test_a_stop_after_a_bad_loss_saves_nothing(self, tmp_path, at_step):
        data = tiny_recipe.splits()
        data["train"][0][:] = np.nan
        at_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(BadLoss, match="the loss is nan at step 1 .*checkpoint: none"):
            start(tmp_path / "run", data=data)
        assert newest(tmp_path / "run") is None

    @pytest.mark.long
    def test_callbacks_know_after_which_steps_the_results_are_read(self, tmp_path):
        read = []

        class Readers(StepCallback):
            def on_step_end(self, step, logs):
                read.extend([step] * self.is_read())

        every = dict(log_every=7, checkpoint_every=11, validate_every=8)
        start(tmp_path / "run", extra=[Readers()], **every)
        due = {n for n in range(1, 2 * PER_EPOCH + 1) if n % 7 == 0 or n % 11 == 0 or n % 8 == 0}
        assert read == sorted(due | {PER_EPOCH, 2 * PER_EPOCH})

    def test_callbacks_of_keras_get_numbers(self, tmp_path):
        losses, lines = [], tmp_path / "epochs.csv"
        extra = [
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: losses.append(json.loads(json.dumps(logs)))
            ),
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.TensorBoard(str(tmp_path / "keras"), histogram_freq=1),
            keras.callbacks.CSVLogger(str(lines), append=True),
            keras.callbacks.ProgbarLogger(),
        ]
        start(tmp_path / "run", extra=extra)
        assert len(losses) == 2 * PER_EPOCH and all(type(each["loss"]) is float for each in losses)
        assert len(lines.read_text().splitlines()) == 3

    def test_a_step_that_is_not_logged_is_read_after_the_next_one_has_begun(self, tmp_path):
        events = []

        class Number:
            device = "CPU"

            def __init__(self, step, value):
                self.step, self.value = step, value

            def __array__(self, dtype=None, copy=None):
                events.append(("read", self.step))
                return np.asarray(self.value)

            def __float__(self):
                return float(np.asarray(self))

        class Device(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                train_function = self.model.train_function

                def watched(iterator):
                    step = sum(what == "begins" for what, _ in events) + 1
                    events.append(("begins", step))
                    logs = train_function(iterator)
                    return {name: Number(step, value) for name, value in logs.items()}

                self.model.train_function = watched

        start(tmp_path / "run", extra=[Device()], log_every=4)
        late = [
            step
            for step in range(1, PER_EPOCH)
            if events.index(("read", step)) > events.index(("begins", step + 1))
        ]
        # The clock waits for the first step, which compiles, and for the second, its first.
        assert late == [step for step in range(3, PER_EPOCH) if step % 4]


class TestCheckpoints:
    @pytest.mark.long
    def test_damaged_ones_do_not_count(self, stopped, finished, capsys):
        """All are damaged; those that follow must not be pruned in their place."""
        folder = stopped(14, keep_checkpoints=2)
        assert steps_saved(folder) == [12, 14]
        for path in (folder / "checkpoints").glob("step-*/model.weights.h5"):
            path.write_bytes(path.read_bytes()[:-1])
        stopped(3, keep_checkpoints=2)
        assert "step-00000014 is damaged" in capsys.readouterr().out
        assert (folder / "checkpoints" / "damaged-step-00000012").is_dir()
        assert steps_saved(folder) == [3]
        results = start(folder, keep_checkpoints=2)
        assert results["resumed_from_step"] == 3
        assert_as_unbroken(folder, finished)

    @pytest.mark.long
    def test_early_stopping_ends_on_the_best_weights(self, tmp_path, capsys):
        """A val_loss that should grow: the first epoch is the best one, two more are waited for."""
        options = dict(keep_best="val_loss", keep_best_mode="max", early_stopping=2, epochs=5)
        folder = tmp_path / "run"
        found = start(folder, **options)
        assert (found["steps"], found["weights_of_step"]) == (3 * PER_EPOCH, PER_EPOCH)
        best = checkpoint_files.read(folder / "best")
        value = found["history"]["val_loss"][0]
        line = f"weights        of epoch 1, the best of 3 (val_loss {value:.4f})\n"
        assert line in capsys.readouterr().out
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        tested = [each for each in records if each["event"] == "evaluation"]
        assert [(each["step"], each["epoch"]) for each in tested] == [(PER_EPOCH, 1)]
        model = tiny_recipe.build_model(tiny_recipe.Options())
        model.load_weights(best.folder / "model.weights.h5")
        stored = load_run(folder, trust_module=tiny_recipe.__name__).load_model()
        for ours, theirs in zip(stored.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        x, y = tiny_recipe.splits()["test"]
        logits = keras.ops.convert_to_numpy(model(x))
        assert found["test"]["accuracy"] == pytest.approx((logits.argmax(axis=1) == y).mean())
        # Killed before its results were written.
        shutil.rmtree(folder / "model")
        (folder / "results.json").unlink()
        again = start(folder, **options)
        assert (again["test"], again["weights_of_step"]) == (found["test"], PER_EPOCH)
        assert again["weights_sha256"] == found["weights_sha256"]

    @pytest.mark.long
    def test_the_best_weights_may_be_within_an_epoch(self, tmp_path, stopped, capsys):
        """A val_loss that should grow, looked at every 4 steps: the first look is the best."""
        options = dict(keep_best="val_loss", keep_best_mode="max", early_stopping=2, epochs=5)
        options |= dict(validate_every=4, checkpoint_every=5)
        found = start(tmp_path / "whole", **options)
        assert (found["steps"], found["weights_of_step"]) == (3 * PER_EPOCH, 4)
        assert checkpoint_files.read(tmp_path / "whole" / "best").step == 4
        records = map(json.loads, (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines())
        looked = {r["step"]: r for r in records if r.get("split") == "validation"}
        line = (
            f"weights        of step 4 in epoch 1, the best of 3 (val_loss {looked[4]['loss']:.4f})"
        )
        assert line in capsys.readouterr().out
        # Stopped before the step is looked at, in that evaluation, and afterwards.
        for step in (3, 4, 5, 20):
            folder = stopped(step, tmp_path / f"at-{step}", **options)
            again = start(folder, **options)
            assert again["weights_of_step"] == 4
            assert again["weights_sha256"] == found["weights_sha256"]
            assert again["history"] == found["history"] and again["test"] == found["test"]

    def test_an_epochs_end_decides_about_its_last_step(self, tmp_path):
        """It is validated there twice, and is one look."""
        options = dict(keep_best="val_loss", validate_every=PER_EPOCH, epochs=2)
        start(tmp_path / "run", **options)
        info = checkpoint_files.read(tmp_path / "run" / "best")
        assert info.step in (PER_EPOCH, 2 * PER_EPOCH) and info.steps_into_epoch == 0

    @pytest.mark.long
    @pytest.mark.parametrize("which", [["best"], ["best", "checkpoints/step-00000009"]])
    def test_a_damaged_best_is_replaced_by_the_checkpoint_of_its_step(self, tmp_path, which):
        class Damage(keras.callbacks.Callback):
            def on_train_end(self, logs=None):
                for name in which:
                    damaged.flip_a_bit(tmp_path / "run" / name / "model.weights.h5")

        options = dict(keep_best="val_loss", keep_best_mode="max", early_stopping=1, epochs=5)
        found = start(tmp_path / "run", extra=[Damage()], **options)
        assert found["steps"] == 2 * PER_EPOCH
        if len(which) == 1:
            assert (found["weights_of_step"], found["notes"]) == (PER_EPOCH, [])
            whole = start(tmp_path / "whole", **options)
            assert whole["weights_sha256"] == found["weights_sha256"]
        else:
            (note,) = found["notes"]
            assert "best is damaged" in note and note.endswith(": the last weights are kept")
            assert found["weights_of_step"] == 2 * PER_EPOCH

    @pytest.mark.long
    def test_a_best_of_another_step_is_not_used(self, tmp_path):
        """A run that was killed behind it, and resumed to an earlier end, has not come to it."""

        class Later(keras.callbacks.Callback):
            def on_train_end(self, logs=None):
                best = tmp_path / "run" / "best"
                shutil.rmtree(best)
                shutil.copytree(best.parent / "checkpoints" / f"step-{2 * PER_EPOCH:08d}", best)

        options = dict(keep_best="val_loss", keep_best_mode="max", early_stopping=1, epochs=5)
        found = start(tmp_path / "run", extra=[Later()], **options)
        assert found["weights_of_step"] == PER_EPOCH
        whole = start(tmp_path / "whole", **options)
        assert whole["weights_sha256"] == found["weights_sha256"]

    @pytest.mark.long
    @pytest.mark.parametrize("window, missed", [("2:40", False), ("19:25", True)])
    def test_a_profile_after_the_last_step_is_noted(self, tmp_path, window, missed, monkeypatch):
        monkeypatch.setattr(run_module.Profile, "on_train_batch_begin", lambda *_, **__: None)
        notes = start(tmp_path / "run", profile=window)["notes"]
        said = f"--profile {window}: nothing is profiled, the run ends at step 18"
        assert notes == ([said] if missed else [])

    @pytest.mark.long
    @pytest.mark.parametrize("window, missed", [("8:10", False), ("2:9", True)])
    def test_a_profile_before_a_resumed_run_is_noted(self, tmp_path, window, missed, monkeypatch):
        monkeypatch.setattr(run_module.Profile, "on_train_batch_begin", lambda *_, **__: None)
        start(tmp_path / "run", epochs=1)
        notes = start(tmp_path / "run", epochs=2, resume="extend", profile=window)["notes"]
        said = f"--profile {window}: nothing is profiled, the run resumes at step 9"
        assert notes == ([said] if missed else [])

    @pytest.mark.long
    def test_early_stopping_ends_on_the_best_average(self, tmp_path):
        """With `use_ema` the best epoch's average is tested and saved, not its last weights."""

        def arguments(options, learning_rate):
            made = tiny_recipe.compile_arguments(options, learning_rate)
            return made | {"optimizer": keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)}

        folder = tmp_path / "run"
        options = tiny_recipe.Options(
            run_dir=folder, keep_best="val_loss", keep_best_mode="max", early_stopping=1, epochs=4
        )
        tiny_recipe.main(options, arguments=arguments)
        averages = [
            tensor
            for name, tensor in processes.tensors_of(folder / "best" / "model.weights.h5").items()
            if name.startswith("optimizer/") and tensor.ndim == 2
        ]
        kernels = [
            w
            for w in load_run(folder, trust_module=tiny_recipe.__name__).load_model().get_weights()
            if w.ndim == 2
        ]
        assert all(any(np.array_equal(a, kernel) for a in averages) for kernel in kernels)

    @pytest.mark.long
    def test_a_lowered_rate_is_lowered_in_a_run_that_resumes(self, stopped, tmp_path):
        """A val_loss that should grow never does: the rate is halved after each epoch but one."""
        options = dict(keep_best="val_loss", keep_best_mode="max", reduce_on_plateau=1, epochs=4)
        unbroken = start(tmp_path / "unbroken", **options)
        found = [r["learning_rate"] for r in processes.records(tmp_path / "unbroken", "epoch")]
        schedule = [0.01 * (1 - (PER_EPOCH * epoch - 1) / 100) for epoch in (1, 2, 3, 4)]
        expected = [rate * factor for rate, factor in zip(schedule, (1, 1, 0.5, 0.25), strict=True)]
        assert found == pytest.approx(expected, rel=1e-5)
        folder = stopped(2 * PER_EPOCH + 3, **options)
        assert start(folder, **options)["weights_sha256"] == unbroken["weights_sha256"]
        assert processes.records(folder) == processes.records(tmp_path / "unbroken")

    def test_the_metric_that_decides_the_rate_stays_the_same(self, stopped):
        """An accuracy of 0.9 would never be better than by a loss of 1.2, and lower the rate."""
        folder = stopped(2 * PER_EPOCH + 3, reduce_on_plateau=1, epochs=4)
        with pytest.raises(RunError, match="plateau_metric: was val_loss .auto., is now val_accur"):
            start(folder, reduce_on_plateau=1, epochs=4, keep_best="val_accuracy")

    def test_the_best_has_the_highest_accuracy(self, tmp_path):
        found = start(tmp_path / "run", epochs=4, base_learning_rate=0.1, keep_best="val_accuracy")
        accuracies = found["history"]["val_accuracy"]
        assert len(set(accuracies)) > 1
        best = checkpoint_files.read(tmp_path / "run" / "best")
        assert best.step == PER_EPOCH * (int(np.argmax(accuracies)) + 1)
        assert best.state["best"] == max(accuracies)
        model = tiny_recipe.build_model(tiny_recipe.Options())
        model.load_weights(best.folder / "model.weights.h5")
        x, y = tiny_recipe.splits()["valid"]
        guessed = keras.ops.convert_to_numpy(model(x)).argmax(axis=1)
        assert (guessed == y).mean() == pytest.approx(max(accuracies))


def require_the_same_after_a_stop(train, folder):
    """Trains without a break, and with one at the sixth step of the run in `folder / "run"`."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise KeyboardInterrupt

    unbroken = train(folder / "unbroken")
    with pytest.raises(KeyboardInterrupt):
        train(folder / "run", extra=[Stop()])
    resumed = train(folder / "run")
    assert resumed["resumed_from_step"] == 4
    assert resumed["weights_sha256"] == unbroken["weights_sha256"]


class TestResume:
    def test_a_signal_saves_and_the_same_command_resumes(self, stopped, finished):
        folder = stopped(6, **EVALUATIONS)
        assert start(folder, **EVALUATIONS)["resumed_from_step"] == 6
        assert_as_unbroken(folder, finished)
        assert processes.records(folder) == processes.records(finished)
        assert processes.events(folder) == processes.events(finished)

    @pytest.mark.long
    def test_several_optimizers_resume_identically(self, tmp_path):
        def arguments(options, rate):
            several = keras.optimizers.OptimizerMap(
                keras.optimizers.SGD(rate / 2), {"dense/.*": keras.optimizers.Adam(rate)}
            )
            optimizer = keras.optimizers.MultiOptimizer(several)
            return tiny_recipe.compile_arguments(options, rate) | {"optimizer": optimizer}

        def build(options):
            layers = [keras.layers.Dense(4, name="dense"), keras.layers.Dense(2, name="out")]
            return keras.Sequential([keras.Input((6,)), *layers])

        def train(folder, extra=()):
            options = tiny_recipe.Options(run_dir=folder)
            return tiny_recipe.main(options, arguments=arguments, build=build, extra=extra)

        require_the_same_after_a_stop(train, tmp_path)
        rates = [r["learning_rate"] for r in processes.records(tmp_path / "run", "step")]
        assert rates == pytest.approx([0.01] * 9)

    @pytest.mark.long
    def test_optimizers_of_the_model_resume_identically(self, tmp_path):
        def train(folder, extra=()):
            return tiny_recipe.main(
                tiny_recipe.Options(run_dir=folder),
                arguments=lambda options, rate: {"rate": rate},
                build=lambda options: TwoOptimizers(),
                extra=extra,
            )

        require_the_same_after_a_stop(train, tmp_path)
        fingerprint = newest(tmp_path / "run").state["fingerprint"]["optimizer"]
        assert fingerprint["name"] == "RMSprop, Adam, Adam"

    @pytest.mark.long
    @pytest.mark.parametrize("step", [PER_EPOCH + 1, 2 * PER_EPOCH - 1])
    def test_a_metric_that_keeps_something_between_epochs(self, step, tmp_path, at_step):
        def train(folder):
            arguments = tiny_recipe.compile_arguments
            return tiny_recipe.main(
                tiny_recipe.Options(run_dir=folder, checkpoint_every=PER_EPOCH),
                arguments=lambda *them: arguments(*them) | {"metrics": [BatchesSeen()]},
            )

        def kill():
            raise KeyboardInterrupt

        unbroken = train(tmp_path / "unbroken")
        assert unbroken["history"]["seen"] == [12, 24]  # with those of the validation, three
        at_step(step, kill)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run")
        assert train(tmp_path / "run")["resumed_from_step"] == PER_EPOCH
        assert_as_unbroken(tmp_path / "run", tmp_path / "unbroken")

    @pytest.mark.long
    def test_it_keeps_what_auto_meant(self, stopped):
        folder, seen = stopped(6), []
        start(folder, inside=lambda run, model: seen.append((run.options.dataset, run.dataset)))
        assert seen == [("auto", "numbers")]

    def test_a_finished_run_has_nothing_to_do(self, finished, capsys):
        before = files_below(finished / "checkpoints") | files_below(finished / "model")
        results = start(finished, **EVALUATIONS)
        assert results == processes.results(finished)
        said = capsys.readouterr().out  # with --quiet
        assert said == f"the run in {finished} is finished: nothing to do\n"
        assert before == files_below(finished / "checkpoints") | files_below(finished / "model")

    def test_of_a_finished_run_options_that_change_nothing_are_named(self, finished, capsys):
        same = dict(resume="auto", quiet=False, cache_dir=finished / "cache")
        start(finished, **EVALUATIONS, **same)
        assert capsys.readouterr().out.count("\n") == 1
        changed = dict(validate_every=None, keep_best="val_loss", quiet=True)
        results = start(finished, **EVALUATIONS | changed)
        assert results == processes.results(finished)
        assert capsys.readouterr().out.splitlines()[1:] == [
            "these options changed, without effect on a finished run; another --run-dir trains "
            "with them: --validate-every: was 3, is now None; --keep-best: was None, is now "
            "val_loss"
        ]

    def test_an_extension_that_is_refused_leaves_it_finished(self, copied):
        with pytest.raises(OptionsError, match="--keep-best val_nothing"):
            start(copied, **EVALUATIONS, resume="extend", epochs=3, keep_best="val_nothing")
        assert start(copied, **EVALUATIONS) == processes.results(copied)

    def test_an_extension_that_is_killed_before_its_results(self, copied, monkeypatch):
        """The model is the longer run's, the results are those from before."""
        stock = run_module.RunFolder.write_json

        def write_json(self, name, content):
            if name == "results.json":
                raise KeyboardInterrupt
            stock(self, name, content)

        with monkeypatch.context() as patched:
            patched.setattr(run_module.RunFolder, "write_json", write_json)
            with pytest.raises(KeyboardInterrupt):
                start(copied, **EVALUATIONS, resume="extend", epochs=3)
        with pytest.raises(RunError, match="was stopped while it was extended; the same command"):
            load_run(copied, trust_module=tiny_recipe.__name__)
        start(copied, **EVALUATIONS, epochs=3)
        assert load_run(copied, trust_module=tiny_recipe.__name__).results["steps"] == 27

    def test_a_model_that_is_gone_is_written_again(self, finished, copied, capsys):
        model = files_below(copied / "model")
        shutil.rmtree(copied / "model")
        start(copied, **EVALUATIONS)
        said = "its model/ is damaged (SHA256SUMS is missing); rewriting"
        assert said in capsys.readouterr().out
        assert files_below(copied / "model").keys() == model.keys()
        load_run(copied, trust_module="tests.support.tiny_recipe")  # whole
        assert_as_unbroken(copied, finished)
        assert processes.results(copied)["resumed_from_step"] == 18


def test_a_second_training_in_one_run_is_refused(tmp_path):
    """Its checkpoints would replace those of the first."""

    def again(run, model):
        data = arrays.evaluation_data(*tiny_recipe.splits()["valid"], batch_size=8)
        run.prepare(model, data, validation=data, test=data)

    with pytest.raises(RunError, match="called a second time: .* make two runs") as caught:
        start(tmp_path / "run", inside=again)
    assert "keras.saving.load_model()" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


class TestFolder:
    @pytest.mark.long
    def test_removed_while_it_trains(self, at_step, tmp_path):
        """The next record or checkpoint fails; the folder is not created again."""
        for log_every in (2, 1000):
            folder = tmp_path / f"run-{log_every}"
            at_step(5, lambda folder=folder: shutil.rmtree(folder))
            with pytest.raises(CannotSave, match=f"run-{log_every}"):
                start(folder, log_every=log_every)
            assert not folder.exists()

    def test_what_a_run_changes_in_the_process_is_put_back(self, tmp_path):
        logger = logging.getLogger("recipes")

        def state():
            return (
                [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
                (logger.level, logger.propagate, list(logger.handlers)),
                (keras.config.floatx(), keras.config.dtype_policy().name),
                [keras.Model.fit, keras.Model.evaluate],
            )

        before = state()
        within = []
        inside = lambda run, model: within.append(state())  # noqa: E731
        start(tmp_path / "run", max_steps=2, precision="float64", inside=inside)
        assert state() == before
        assert all(a != b for a, b in zip(within[0][:3], before[:3], strict=True))


def fill(disk, spare=0):
    """Fills a disk but for some bytes, with a file `filler`."""
    with open(disk / "filler", "wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                pass
        file.truncate(file.tell() - spare)


# What HDF5 says from within a destructor, pytest would take away.
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
class TestFullDisk:
    @pytest.mark.long
    @pytest.mark.parametrize(
        "when",
        [0, *(pytest.param(when, marks=pytest.mark.long) for when in (1, 5, 9, 17))],
    )
    def test_one_message_and_the_same_end(self, when, small_disk, at_step, finished, as_command):
        """Full before the first file, at the first event file, at a record, at an epoch's end."""
        folder = small_disk / "run"
        if when:
            at_step(when, lambda: fill(small_disk))
        else:
            fill(small_disk)
        line = ["--run-dir", folder, "--validate-every", "3", "--test-every", "4"]
        status, output, errors = as_command(*line)
        assert status in (1, 2), errors
        assert errors.count("\n") == 1 and errors.startswith("tiny_recipe: "), errors
        assert "out of memory" not in errors and "cannot be written" in errors
        (small_disk / "filler").unlink()
        status, output, errors = as_command(*line)
        assert status == 0, errors
        assert_as_unbroken(folder, finished)
        assert processes.records(folder) == processes.records(finished)
        assert processes.events(folder) == processes.events(finished)

    def test_in_the_midst_of_the_weights(self, small_disk, monkeypatch, finished, as_command):
        stock, folder = Checkpoint.save, small_disk / "run"

        def save(self, *arguments, **named):
            if self.step == 8:
                fill(small_disk, spare=16384)  # for a half of them
            stock(self, *arguments, **named)

        line = ["--run-dir", folder, "--validate-every", "3", "--test-every", "4"]
        with monkeypatch.context() as patched:
            patched.setattr(Checkpoint, "save", save)
            status, _, errors = as_command(*line)
        assert status == 1 and errors.count("\n") == 1, errors
        assert "step-00000008 cannot be written" in errors and "step-00000004" in errors
        assert not list((folder / "checkpoints").glob(".*"))
        (small_disk / "filler").unlink()
        assert as_command(*line)[0] == 0
        assert_as_unbroken(folder, finished)


@pytest.mark.long
def test_a_callback_of_the_recipe_gets_every_record(tmp_path):
    class Tracker(keras.callbacks.Callback):
        seen = []

        def on_record(self, record):
            self.seen.append(record)

    tracker = Tracker()
    start(tmp_path / "run", extra=[tracker], validate_every=4, profile="2:3")
    lines = [json.loads(line) for line in open(tmp_path / "run" / "metrics.jsonl")]
    assert tracker.seen == lines and {r["event"] for r in lines} == {"step", "epoch", "evaluation"}
    assert list(tmp_path.glob("run/plugins/profile/*/*.xplane.pb"))


@pytest.mark.long
@pytest.mark.parametrize(
    "step", [3, *(pytest.param(step, marks=pytest.mark.long) for step in (12, 9))]
)
def test_a_stop_ends_an_evaluation_in_mid_epoch(step, tmp_path, finished, monkeypatch):
    """A run that resumes repeats it, with the numbers and the place that it would have had."""
    stock, batches, checkpoint = StopEvaluation.on_test_batch_end, [], None

    def on_test_batch_end(self, batch, logs=None):
        # The callbacks before it are at this step.
        if checkpoint.saved_step < step <= checkpoint.step + 1:
            batches.append(batch)
            if len(batches) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        stock(self, batch, logs)

    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(StopEvaluation, "on_test_batch_end", on_test_batch_end)

        def inside(run, model):
            nonlocal checkpoint
            checkpoint = run.checkpoint

        with pytest.raises(Stopped):
            start(folder, inside=inside, **EVALUATIONS)
    assert batches == [0] * (2 if step == 12 else 1)  # the test split's too
    assert newest(folder).step == step
    assert step not in [record["step"] for record in processes.records(folder, "evaluation")]
    start(folder, **EVALUATIONS)
    assert_as_unbroken(folder, finished)
    assert processes.records(folder) == processes.records(finished)
    assert processes.events(folder) == processes.events(finished)


class TestSignals:
    @pytest.fixture
    def left(self, monkeypatch):
        """The status with which the process would have ended at once."""
        statuses, now = [], [100.0]
        monkeypatch.setattr(signals_module.os, "_exit", statuses.append)
        monkeypatch.setattr(signals_module.time, "monotonic", lambda: now[0])
        return statuses, now

    def test_the_second_one_ends_the_process(self, left, capsys):
        statuses, now = left
        signals = Signals()
        signals.training = True
        signals._handle(signal.SIGTERM, None)
        assert signals.asked and not statuses
        now[0] += 0.4  # a supervisor signals the process and its group: one request
        signals._handle(signal.SIGTERM, None)
        assert not statuses
        now[0] += 0.2
        signals._handle(signal.SIGTERM, None)
        assert statuses == [128 + signal.SIGTERM]
        assert capsys.readouterr().err.count("a second one stops immediately") == 1

    def test_it_is_acknowledged_while_native_code_runs(self, left, monkeypatch):
        """Python calls no handler then: for minutes while a large model compiles."""
        statuses, now = left
        heard = []
        monkeypatch.setattr(signals_module, "print", lambda *words, **_: heard.append(words), False)
        signals = Signals()
        signals.install()
        signals.training = True
        compiled = threading.Event()
        seen = []

        def person():
            for status in (None, 128 + signal.SIGINT):
                os.kill(os.getpid(), signal.SIGINT)
                while not compiled.is_set() and not (statuses if status else heard):
                    time.sleep(0.005)
                seen.append((len(heard), list(statuses), compiled.is_set()))
                now[0] += 1.0

        thread = threading.Thread(target=person)
        try:
            thread.start()
            hashlib.pbkdf2_hmac("sha256", b"native code", b"", 1_000_000)
            compiled.set()
            thread.join()
        finally:
            signals.restore()
        assert seen == [(1, [], False), (1, [128 + signal.SIGINT], False)]
        assert signal.getsignal(signal.SIGINT) != signals._handle

    def test_a_forked_process_leaves_the_signals_of_its_parent(self):
        signals = signals_module.signals
        signals.install()
        signals.training = True
        try:
            child = os.fork()
            if child == 0:
                signals.training = True
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0 if signals.asked else 1)
            assert os.waitpid(child, 0)[1] == 0
            time.sleep(0.05)
            assert not signals.asked and signals._first is None
        finally:
            signals.restore()

    def test_outside_of_training_it_raises(self, left):
        with pytest.raises(signals_module.StopRequested):
            Signals()._handle(signal.SIGINT, None)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_an_ignored_signal_stays_ignored(self, number):
        """As after nohup; a strategy of TensorFlow may have installed its own handler since."""
        before, signals = signal.signal(number, signal.SIG_IGN), Signals()
        try:
            signals.install()
            signal.signal(number, lambda number, frame: None)
            signals.install()
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) == signal.SIG_IGN and not signals.asked
        finally:
            signals.restore()
            assert signal.signal(number, before) == signal.SIG_IGN

    def test_only_the_launcher_names_the_command(self, at_step, tmp_path, monkeypatch):
        monkeypatch.setenv("KERAS_RECIPES_LAUNCHED", "1")
        at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Stopped, match="^stopped and saved$"):
            start(tmp_path / "run")

    def test_a_terminal_that_closes_saves_and_stops(self, at_step, tmp_path):
        master, terminal = os.openpty()

        def close():
            os.close(master)
            os.kill(os.getpid(), signal.SIGHUP)

        at_step(5, close)
        with open(terminal, "w") as out, open(os.dup(terminal), "w") as err:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                with pytest.raises(Stopped):
                    start(tmp_path / "run", quiet=False)
            for stream in (out, err):  # for the rest of their buffers
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        assert newest(tmp_path / "run").step == 5

    def test_the_run_ends_well_if_it_has_finished(self, tmp_path, monkeypatch):
        """A worker waits while the chief writes the model."""
        from distribution.strategies import Agreement

        def signalled(self):
            os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(Agreement, "barrier", signalled)
        assert start(tmp_path / "run")["steps"] == 2 * PER_EPOCH


def test_a_disk_that_all_workers_share(tmp_path, monkeypatch):
    """Workers that find different checkpoints must not begin."""
    from distribution.strategies import Agreement

    answers = iter([True, False])  # the same options, different checkpoints
    monkeypatch.setattr(Agreement, "everyone_has", lambda self, value: next(answers))
    with pytest.raises(RunError, match="the workers see different checkpoints there"):
        start(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("asked", [True, False])
def test_a_worker_that_is_gone_is_no_error_after_a_signal(tmp_path, at_step, asked):
    """The other one may have got the signal before it could save; the run resumes."""

    def gone():
        if asked:
            signals_module.signals.asked = True
        raise tf.errors.UnavailableError(None, None, "Socket closed")

    at_step(6, gone)
    with pytest.raises(Stopped if asked else tf.errors.UnavailableError) as caught:
        start(tmp_path / "run")
    if asked:
        assert str(caught.value).startswith("stopped: another worker ended first;")
    assert newest(tmp_path / "run").step == 4
    assert start(tmp_path / "run")["resumed_from_step"] == 4


def test_data_that_all_workers_share(tmp_path, monkeypatch):
    """Workers that loaded different data must not begin; equal facts have equal checksums."""
    from distribution.strategies import Agreement

    seen = []
    monkeypatch.setattr(
        Agreement, "everyone_has", lambda self, value: seen.append(value) or len(seen) % 3 > 0
    )
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        with pytest.raises(RunError, match="the workers have different data or presets"):
            start(tmp_path / name, data=tiny_recipe.splits(seed))
        assert not (tmp_path / name).exists()
    assert seen[2] == seen[5] != seen[8]


class TestOptionsThatAllWorkersShare:
    """Workers with different options would train different replicas, or wait for each other."""

    @pytest.fixture
    def chief(self, monkeypatch):
        """Lets this worker meet a chief that has other checksums in this order."""
        from distribution.strategies import Agreement

        def meet(*checksums):
            others = iter(checksums)
            monkeypatch.setattr(
                Agreement, "everyone_has", lambda self, value: value == next(others)
            )

        return meet

    @pytest.fixture
    def checksums(self, monkeypatch, tmp_path):
        """Returns the checksums of a worker that agrees with no other one."""
        from distribution.strategies import Agreement

        def of(**options):
            seen = []
            with monkeypatch.context() as patch:
                patch.setattr(
                    Agreement,
                    "everyone_has",
                    lambda self, value: seen.append(value) or len(seen) == 2,
                )
                with pytest.raises(RunError):
                    start(tmp_path / "other", **options)
            return seen

        return of

    def test_options_that_differ_are_named(self, tmp_path, chief, checksums):
        chief(*checksums(seed=1, quiet=False, cache_dir=tmp_path))
        with pytest.raises(RunError) as error:
            start(tmp_path / "run", seed=2, clip_norm=0.5)
        assert str(error.value).startswith("the workers have different options;")
        assert str(error.value).endswith("This one has --clip-norm 0.5, --seed 2")
        assert not (tmp_path / "run").exists()

    def test_paths_may_differ(self, tmp_path, chief, checksums):
        same = checksums(quiet=False, cache_dir=tmp_path, dataset="auto")[0]
        assert same == checksums(dataset="novels")[0] != checksums(seed=1)[0]

    def test_another_job_is_refused(self, tmp_path, chief, monkeypatch):
        chief(1, 2)
        monkeypatch.setattr(run_module, "slurm_job", lambda: "17.0")
        with pytest.raises(RunError, match="This one runs tiny.* in SLURM's job and step 17.0$"):
            start(tmp_path / "run")


def test_the_chief_names_the_folder_whatever_the_time_zone(monkeypatch, tmp_path):
    from distribution.strategies import Agreement

    monkeypatch.chdir(tmp_path)

    def broadcast(self, value):
        return 20261126003015 if value > 10**13 else value  # another time there

    strategy = strategies.make_strategy("none", None)
    monkeypatch.setattr(Agreement, "broadcast_from_chief", broadcast)
    monkeypatch.setattr(strategies, "workers", lambda strategy: 2)
    run = run_module.Run("tiny", tiny_recipe.Options(), strategy)
    assert str(run.folder.path) == "runs/tiny/20261126-003015"
    assert not list(tmp_path.iterdir())  # the chief makes it


def test_any_workers_wish_to_stop_is_shared(tmp_path, monkeypatch):
    from distribution.strategies import Agreement

    asked = []

    def on_any_worker(self, *flags):
        asked.append(flags)
        return [len(asked) == 8, *flags[1:]]  # another worker's; three are asked before training

    monkeypatch.setattr(Agreement, "on_any_worker", on_any_worker)
    with pytest.raises(Stopped):
        start(tmp_path / "run")
    assert asked == [(False,)] * 3 + [(False, False)] * 5 and newest(tmp_path / "run").step == 5


def test_a_batch_that_replicas_cannot_share_is_refused_before_data_are_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(strategies, "replicas", lambda strategy: 3)
    options = tiny_recipe.Options(run_dir=tmp_path / "run", global_batch_size=8)
    with pytest.raises(OptionsError, match="multiple of 3, for instance 6 or 9"):
        with start_run(tiny_recipe.NAME, options):
            pytest.fail("data would be loaded here")


@dataclasses.dataclass(kw_only=True)
class Averaged(tiny_recipe.Options):
    ema: float | None = None


def averaging(options, learning_rate):
    """Returns arguments of compile() with an optimizer that averages the weights."""
    made = tiny_recipe.compile_arguments(options, learning_rate)
    return made | {"optimizer": keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)}


def test_epochs_are_compared_by_the_averages_that_are_tested(tmp_path):
    """Of the same examples the last validation and the test have the same results."""
    data = tiny_recipe.splits()
    data["test"] = data["valid"]
    options = tiny_recipe.Options(run_dir=tmp_path / "run", epochs=1, keep_best="val_loss")
    results = tiny_recipe.main(options, data=data, arguments=averaging)
    validated = {name: values[-1] for name, values in results["history"].items()}
    for name, value in results["test"].items():
        assert value == pytest.approx(validated[f"val_{name}"], rel=1e-6)
    remedy = "best/ serves to resume only, not for recipes.evaluate --best; --early-stopping puts "
    note = f"--keep-best with the optimizer's use_ema: {remedy}the best weights into model/"
    assert results["notes"] == [note]
    with pytest.raises(RunError, match="with the optimizer's use_ema, so its best/ serves to res"):
        load_run(tmp_path / "run", best=True, trust_module=tiny_recipe.__name__)


@pytest.mark.long
def test_a_best_checkpoint_that_only_resumes_is_noted_at_the_start(tmp_path):
    """Otherwise recipes.evaluate --best refuses it after hours of training."""
    noted = {"keep_best": "val_loss", "ema": 0.9}
    for name, changes, is_noted in (
        ("noted", {}, True),
        ("whole", {"ema": None}, False),
        ("none", {"keep_best": None}, False),
        ("model", {"early_stopping": 5}, False),  # ends with the best weights in model/
    ):
        options = Averaged(run_dir=tmp_path / name, max_steps=1, **noted | changes)
        notes = tiny_recipe.main(options)["notes"]
        assert [note[:24] for note in notes] == ["--keep-best with --ema: "] * is_noted


@pytest.mark.long
def test_notes_about_the_data_outlive_what_led_to_them(tmp_path):
    """A run that resumes reads what `auto` resolved to, and falls back on nothing."""
    options = tiny_recipe.Options(run_dir=tmp_path / "run", max_steps=2)
    line = "digits are used instead"
    assert tiny_recipe.main(options, notes=[line])["notes"] == [line]
    longer = dataclasses.replace(options, max_steps=3, resume="extend")
    assert tiny_recipe.main(longer)["notes"] == [line]
    longer.max_steps = 4
    assert tiny_recipe.main(longer, notes=[line, "another"])["notes"] == [line, "another"]


def test_steps_that_the_epochs_do_not_have_are_noted(tmp_path):
    options = tiny_recipe.Options(run_dir=tmp_path / "run", epochs=1, max_steps=1000)
    results = tiny_recipe.main(options)
    steps = results["steps"]
    assert steps < 1000 and results["notes"] == [
        f"--max-steps 1000: --epochs 1 ends the run at step {steps}; pass more --epochs for more "
        "steps"
    ]


@pytest.mark.long
def test_each_run_of_a_process_has_the_same_automatic_names(tmp_path):
    """As a cell of a notebook that is run again: its history has one list per metric."""

    def arguments(options, rate):
        unnamed = [keras.metrics.MeanMetricWrapper(keras.losses.sparse_categorical_crossentropy)]
        return tiny_recipe.compile_arguments(options, rate) | {"metrics": unnamed}

    def run(**options):
        options = tiny_recipe.Options(run_dir=tmp_path / "run", **options)
        return list(tiny_recipe.main(options, arguments=arguments)["history"])

    metrics = run(epochs=1)
    assert run(epochs=2, resume="extend") == metrics
    shutil.rmtree(tmp_path / "run")
    assert run(epochs=1, keep_best=metrics[-1]) == metrics


class TestFurtherValues:
    """Values that a recipe adds to those of `run.plan()` and `run.finish()`."""

    @pytest.fixture
    def adds(self, monkeypatch):
        def add(name, **values):
            stock = getattr(run_module.Run, name)

            @functools.wraps(stock)
            def method(self, *arguments, **named):
                return stock(self, *arguments, **(named | values))

            monkeypatch.setattr(run_module.Run, name, method)

        return add

    def test_results_keep_their_own(self, adds, tmp_path, monkeypatch):
        folder = tmp_path / "run"
        adds("finish", steps=999, mine=1, seed=7)
        with pytest.raises(RunError, match=r"^run.finish\(steps=..., seed=...\): ") as refused:
            start(folder, max_steps=2)
        monkeypatch.undo()
        assert f"--run-dir {folder}" in str(refused.value)
        assert not (folder / "model").exists() and not (folder / "results.json").exists()
        adds("finish", mine=np.float32(1))  # corrected: the training is not repeated
        results = start(folder, max_steps=2)
        assert (results["resumed_from_step"], results["seed"], results["mine"]) == (2, 0, 1)
        assert processes.results(folder)["mine"] == 1

    def test_metrics_are_numbers_of_any_kind(self, adds, tmp_path):
        test = {"loss": np.float32(0.5), "accuracy": tf.constant(0.25), "count": np.int64(3)}
        adds("finish", test=test, baseline=None)
        start(tmp_path / "run", max_steps=1)
        results = processes.results(tmp_path / "run")
        assert results["test"] == {"loss": 0.5, "accuracy": 0.25, "count": 3.0}
        assert results["baseline"] == {}
        records = processes.records(tmp_path / "run", "evaluation")
        assert [record["accuracy"] for record in records if record["split"] == "test"] == [0.25]

    @pytest.mark.parametrize("argument", ["test", "baseline"])
    def test_metrics_that_are_no_numbers(self, argument, adds, tmp_path):
        adds("finish", **{argument: {"recall": [0.5, 1.0]}})
        with pytest.raises(RunError, match=rf"^run.finish\({argument}=...\): recall is") as refused:
            start(tmp_path / "run", max_steps=1)
        assert f"--run-dir {tmp_path / 'run'}" in str(refused.value)
        assert not (tmp_path / "run" / "model").exists()

    @pytest.mark.parametrize("name", ["run_dir", "examples", "test_file", "test_standard_error"])
    def test_results_of_an_evaluation_too(self, adds, tmp_path, name):
        adds("finish", **{name: 1})
        with pytest.raises(RunError, match=rf"^run.finish\({name}=...\): "):
            start(tmp_path / "run", max_steps=1)

    @pytest.mark.parametrize(
        ("value", "found"),
        [
            (dict(example_table=lambda: []), "example_table=.*'function'.*examples_table="),
            (dict(metadata={"path": os}), "metadata=.*'module'"),
        ],
    )
    def test_results_are_json(self, adds, tmp_path, value, found):
        adds("finish", **value)
        with pytest.raises(RunError, match=rf"^run.finish\({found}"):
            start(tmp_path / "run", max_steps=1)
        assert not (tmp_path / "run" / "model").exists()

    @pytest.mark.parametrize(
        ("value", "found"),
        [
            (dict(learning_rate=0.5), "learning_rate=...\\): "),
            (dict(tokenizer=print), "tokenizer=.*not JSON"),
        ],
    )
    def test_facts_are_not_those_of_the_plan_and_json(self, adds, tmp_path, value, found):
        adds("plan", **value)
        with pytest.raises(RunError, match=rf"^run.plan\({found}"):
            start(tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_a_name_like_that_of_an_argument_is_noted(self, adds, tmp_path):
        adds("plan", tokens_per_exmple=3.0, tokenizer="mine")
        (note,) = start(tmp_path / "run", max_steps=1)["notes"]
        assert note.startswith("run.plan(tokens_per_exmple=...): ")
        assert "tokens_per_example=" in note


class TestIgnoredDataset:
    def test_is_refused(self, tmp_path):
        with pytest.raises(OptionsError, match="--dataset nope.csv: this recipe ignores it"):
            start(tmp_path / "run", dataset="nope.csv")
        assert not (tmp_path / "run").exists()

    @pytest.mark.long
    @pytest.mark.parametrize("name", ["plan", "prepare"])  # data may be loaded before or after
    def test_not_in_a_recipe_that_reads_it(self, tmp_path, monkeypatch, name):
        stock = getattr(run_module.Run, name)

        def reads_it(self, *arguments, **named):
            assert self.dataset
            return stock(self, *arguments, **named)

        monkeypatch.setattr(run_module.Run, name, reads_it)
        assert start(tmp_path / "run", dataset="mine.csv", max_steps=1)["steps"] == 1

    @pytest.mark.long
    def test_nor_where_it_names_the_data_of_the_recipe(self, tmp_path):
        for name in ("auto", "numbers"):
            assert start(tmp_path / name, dataset=name, max_steps=1)["dataset"] == "numbers"

    def test_nor_a_default_of_the_recipe(self, tmp_path):
        @dataclasses.dataclass(kw_only=True)
        class Own(tiny_recipe.Options):
            dataset: str = "built-in"

        assert tiny_recipe.main(Own(run_dir=tmp_path / "run", max_steps=1))["steps"] == 1


class TestIgnoredRate:
    """A recipe whose optimizer does not get the rate of the plan."""

    @pytest.fixture
    def train(self, tmp_path, monkeypatch):
        stock = run_module.Run.prepare

        def prepare(self, *arguments, **named):
            self._recipe_plan = type(self._recipe_plan)(**vars(self._plan))  # not read
            return stock(self, *arguments, **named)

        monkeypatch.setattr(run_module.Run, "prepare", prepare)

        def train(optimizer, **options):
            return tiny_recipe.main(
                tiny_recipe.Options(run_dir=tmp_path / "run", max_steps=1, **options),
                arguments=lambda *them: (
                    tiny_recipe.compile_arguments(*them) | {"optimizer": optimizer}
                ),
            )

        return train

    def test_an_option_is_refused(self, train, tmp_path):
        with pytest.raises(OptionsError, match="^--base-learning-rate 0.5: this recipe ignores it"):
            train("adam", base_learning_rate=0.5)
        assert not (tmp_path / "run").exists()

    def test_the_rate_that_was_used_is_reported(self, train, tmp_path):
        results = train("adam")
        assert results["learning_rate"] == pytest.approx(0.001)
        (note,) = results["notes"]
        assert note.startswith("learning rate: 0.001, with which the recipe's optimizer begins")
        assert "not the planned 0.01" in note
        (used,) = [r["learning_rate"] for r in processes.records(tmp_path / "run", "step")]
        assert used == pytest.approx(0.001)

    @pytest.mark.parametrize("kind", ["schedule", "several"])
    def test_not_of_what_has_no_single_rate(self, kind, train):
        schedules = keras.optimizers.schedules
        optimizer = keras.optimizers.SGD(schedules.CosineDecay(0.0, 9, warmup_target=0.5))
        if kind == "several":
            parts = [keras.optimizers.SGD(rate) for rate in (0.1, 0.2)]
            optimizer = keras.optimizers.MultiOptimizer(
                lambda variable: parts["kernel" in variable.path]
            )
        results = train(optimizer, base_learning_rate=0.3)
        assert (results["learning_rate"], results["notes"]) == (0.3, [])

    @pytest.mark.long
    def test_not_one_that_equals_the_plan(self, train):
        results = train(keras.optimizers.SGD(0.5), base_learning_rate=0.5)
        assert (results["learning_rate"], results["notes"]) == (0.5, [])

    def test_nor_one_that_the_recipe_computed_from_it(self, tmp_path):
        def arguments(options, rate):
            schedule = keras.optimizers.schedules.CosineDecay(0.0, 5, warmup_target=rate / 2)
            made = tiny_recipe.compile_arguments(options, rate)
            return made | {"optimizer": keras.optimizers.SGD(schedule)}

        options = tiny_recipe.Options(run_dir=tmp_path / "run", max_steps=1, base_learning_rate=0.5)
        results = tiny_recipe.main(options, arguments=arguments)
        assert (results["learning_rate"], results["notes"]) == (0.5, [])


def test_max_examples_that_a_recipe_does_not_apply_are_refused(tmp_path):
    with pytest.raises(OptionsError, match="ignores it .* 72 examples"):
        start(tmp_path / "run", max_examples=50)


@pytest.mark.long
def test_what_is_drawn_while_data_are_loaded_does_not_reach_the_weights(tmp_path, monkeypatch):
    """The first weights are a function of the seed alone."""
    stock, shas = tiny_recipe.splits, []

    def splits():
        keras.layers.Dense(2).build((3, 2))  # draws a seed, as a preprocessor may
        return stock()

    for name, load in (("plain", stock), ("draws", splits)):
        monkeypatch.setattr(tiny_recipe, "splits", load)
        shas.append(start(tmp_path / name, max_steps=1)["weights_sha256"])
    assert shas[0] == shas[1]


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    """As those of a loop in a shell, which get no --run-dir."""
    seconds = iter(["20260101-000000"] * 2 + ["20260101-000001"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: next(seconds))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    strategy = strategies.make_strategy("none", None)
    runs = [run_module.Run("tiny", tiny_recipe.Options(), strategy) for _ in range(2)]
    assert [run.folder.path.name for run in runs] == ["20260101-000000", "20260101-000001"]
    for run in runs:
        with run_logging(quiet=True):
            run.open()
        assert list(run.folder.path.iterdir())
        run.folder.discard()
        run.folder.close()
    # One that is refused before it trains leaves nothing behind.
    assert [path for path in (tmp_path / "runs").rglob("*") if path.is_dir()] == [
        tmp_path / "runs/tiny"
    ]


def test_a_run_without_a_folder_that_is_refused_leaves_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = run_module.Run("tiny", tiny_recipe.Options(), strategies.make_strategy("none", None))
    with run_logging(quiet=True):
        run.open()
    assert run.folder.path.is_dir()
    run.folder.discard()
    run.folder.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, is_kept", [("too/long/a/name", False), (None, True)])
def test_a_file_that_cannot_be_used_leaves_no_folder(tmp_path, name, is_kept):
    """The other errors, such as standard output without a reader, say nothing about options."""

    def fail(run, model):
        raise OSError(errno.ENAMETOOLONG, "File name too long", name)

    with pytest.raises(OSError, match="File name too long"):
        tiny_recipe.main(tiny_recipe.Options(run_dir=tmp_path / "new" / "run"), inside=fail)
    assert (tmp_path / "new").exists() == is_kept
