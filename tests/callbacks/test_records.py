"""The records of a run, held against a plain list of every step's loss."""

import json
import math
import os
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callbacks.errors import CannotSave
from callbacks.evaluate_every import EvaluateEvery
from callbacks.records import Records, used_learning_rate, with_perplexity
from callbacks.throughput import Throughput
from tests.support import processes, syncs, tiny_recipe


@pytest.fixture
def made(listener, fake_model):
    fake_model.optimizer = keras.optimizers.SGD(0.5)

    def make(steps_per_epoch=3, total_steps=5, **arguments):
        made = Records(None, [listener], Throughput(), **arguments)
        made.count_steps(steps_per_epoch, total_steps)
        made.set_model(fake_model)
        return made

    return make


def train(records, losses, executions, resume_after=(), batches=1, skipped=()):
    """Calls the callback as `fit()` does, with the running mean over the epoch.

    Args:
        records: returns the callback of one process.
        losses: of each step of the run.
        executions: the last step of each execution.
        resume_after: steps after which another process resumes.
        batches: that each step accumulates.
        skipped: steps whose loss overflowed, after which the epoch's metrics begin again.
    """
    callback, done, epoch = records(), 0, -1
    length = callback.steps_per_epoch
    for step in executions:
        if (step - 1) // length != epoch:
            epoch, tracked = (step - 1) // length, []
            callback.on_epoch_begin(epoch)
        for loss in losses[done:step]:  # the batches of a step differ, their mean is its loss
            tracked += [loss + offset - (batches - 1) / 2 for offset in range(batches)]
        mean, done = sum(tracked) / len(tracked), step
        if step in skipped:
            tracked = []
        callback.on_train_batch_end(step - epoch * length - 1, {"loss": mean})
        if step % length == 0 or step == callback.total_steps:
            callback.on_epoch_end(epoch, {"loss": mean})
        if step in resume_after:
            state = json.loads(json.dumps(callback.get_state()))
            callback = records()
            callback.count_steps(length, callback.total_steps, step).set_state(state)
            if step % length:
                callback.on_epoch_begin(epoch)
    return callback


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chance=st.randoms(use_true_random=False),
    length=st.integers(1, 12),
    total=st.integers(1, 60),
    log_every=st.integers(1, 20),
    batches=st.integers(1, 3),
)
def test_the_logged_loss_is_the_mean_of_the_steps_since_the_last_log(
    chance, length, total, log_every, batches, made, listener
):
    """Whatever the lengths of epochs, log intervals, executions, accumulation and parts."""
    listener.records.clear()
    losses = [chance.uniform(0.1, 9.0) for _ in range(total)]
    execution = chance.choice([n for n in range(1, length + 1) if length % n == 0])
    executions = {min(step, total) for step in range(execution, total + execution, execution)}
    executions = sorted(executions | {step for step in range(length, total, length)})
    resumed = chance.sample(executions, min(3, len(executions)))
    train(
        lambda: made(length, total, log_every=log_every),
        losses,
        executions,
        resumed,
        batches=batches,
    )
    logged = [record for record in listener.records if record["event"] == "step"]
    assert logged[-1]["step"] == total
    before = 0
    for record in logged:
        expected = losses[before : record["step"]]
        assert record["loss"] == pytest.approx(sum(expected) / len(expected)), record
        before = record["step"]
    due = [s for s in range(log_every, total + 1, log_every)]
    due = [min(step for step in executions if step >= multiple) for multiple in due]
    assert [record["step"] for record in logged] == sorted({*due, total})


@pytest.mark.long
def test_in_a_run_whose_epochs_are_shorter_than_a_log(tmp_path, capsys):
    """The terminal, `metrics.jsonl` and TensorBoard show the same right number."""
    found = {}
    for log_every in (1, 12):
        folder = tmp_path / str(log_every)
        options = tiny_recipe.Options(run_dir=folder, epochs=4, log_every=log_every, quiet=False)
        tiny_recipe.main(options)
        found[log_every] = [r["loss"] for r in processes.records(folder, "step")]
    each = found[1]
    expected = [sum(part) / 12 for part in (each[:12], each[12:24], each[24:])]
    assert found[12] == pytest.approx(expected, rel=1e-5)
    lines = re.findall(r"step \d+/36  loss (\S+)", capsys.readouterr().out)
    assert lines[-3:] == [f"{loss:.4f}" for loss in found[12]]
    events = processes.events(tmp_path / "12")
    points = [event for event in events if event[0] == "loss/train"]
    assert [value for *_, value in points] == pytest.approx(found[12], rel=1e-6)


def test_a_skipped_step_counts_in_no_mean(made, listener, fake_model):
    """Half precision: the loss of step 3 overflowed, and the epoch's metrics began again."""
    fake_model.optimizer = keras.optimizers.LossScaleOptimizer(fake_model.optimizer)
    fake_model.optimizer.build([keras.Variable([1.0])])
    losses = [6.0, 2.0, math.inf, 1.0, 3.0, 8.0]
    train(lambda: made(6, 6, log_every=5), losses, range(1, 7), (3, 4), skipped=(3,))
    logged = [r["loss"] for r in listener.records if r["event"] == "step"]
    assert logged == pytest.approx([(6 + 2 + 1 + 3) / 4, 8.0])


def test_it_waits_for_the_device_only_where_it_records(made, on_device):
    """Step 3 of an epoch of three and step 5, the run's last one; `loss_now` reads the newest."""
    records = made(3, 5, log_every=100)
    for epoch, batches in ((0, 3), (1, 2)):
        records.on_epoch_begin(epoch)
        for batch in range(batches):
            records.on_train_batch_end(batch, {"loss": on_device(3 * epoch + batch + 1, 2.0)})
    assert on_device.reads == [3, 5]
    records = made(3, 5, log_every=100)
    records.on_epoch_begin(0)
    for batch, mean in enumerate((1.0, 2.0)):
        records.on_train_batch_end(batch, {"loss": on_device(batch + 1, mean)})
    assert records.loss_now == 2.0 == records.loss_now and on_device.reads[2:] == [2, 2]


def test_epochs_go_into_the_history(made, listener):
    records = made()
    records.perplexity_of = "cross_entropy"
    for epoch, value in enumerate((2.0, 1.0)):
        records.on_epoch_begin(epoch)
        records.on_train_batch_end(0, {"loss": 1.0})
        records.on_epoch_end(epoch, {"loss": 9.0, "cross_entropy": value, "val_cross_entropy": 0.0})
    assert records.history == {
        "loss": [9.0, 9.0],
        "cross_entropy": [2.0, 1.0],
        "val_cross_entropy": [0.0, 0.0],
        "perplexity": pytest.approx([math.exp(2), math.e]),
        "val_perplexity": [1.0, 1.0],
    }
    found = [(r["event"], r["step"], r["epoch"], r["learning_rate"]) for r in listener.records]
    assert found == [("epoch", 1, 1, 0.5), ("epoch", 4, 2, 0.5)]


def test_a_perplexity_too_large_for_a_float():
    assert with_perplexity({"x": 1e6}, "x") == {"x": 1e6, "perplexity": math.inf}


def test_who_trained_which_steps(made):
    """A run that loses a worker after its checkpoint of step 4, and gets it back after step 9."""
    state = None
    for workers, begin, end, kept in ((2, 1, 8, 4), (1, 5, 9, 9), (1, 10, 9, 9), (2, 10, 12, 12)):
        records = made(6, 20, workers=workers)
        if state is not None:
            records.count_steps(6, 20, begin - 1).set_state(state)
        for step in range(begin, end + 1):
            records.epoch = (step - 1) // 6
            records.on_train_batch_end((step - 1) % 6, {"loss": 1.0})
            if step == kept:
                state = json.loads(json.dumps(records.get_state()))
    assert records.workers_by_step == [
        {"from_step": 1, "workers": 2},
        {"from_step": 5, "workers": 1},
        {"from_step": 10, "workers": 2},
    ]


def optimizer_at(iterations, learning_rate):
    optimizer = keras.optimizers.Adam(learning_rate)
    optimizer.iterations.assign(iterations)
    return optimizer


def test_the_rate_of_the_update_before():
    decay = keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0)
    for done, rate in ((0, 1.0), (1, 1.0), (2, 0.9), (10, 0.1)):
        assert used_learning_rate(optimizer_at(done, decay)) == pytest.approx(rate)
        assert used_learning_rate(optimizer_at(done + 2, decay), 2) == pytest.approx(rate)
    assert used_learning_rate(optimizer_at(5, 0.25)) == pytest.approx(0.25)
    outer = keras.optimizers.LossScaleOptimizer(optimizer_at(3, decay))
    assert used_learning_rate(outer) == pytest.approx(0.8)
    first, second = optimizer_at(3, decay), optimizer_at(5, 0.25)
    several = keras.optimizers.OptimizerMap(second, {"x": first})
    assert used_learning_rate(keras.optimizers.MultiOptimizer(several)) == pytest.approx(0.8)


class TestFile:
    """metrics.jsonl."""

    @pytest.fixture
    def records(self, tmp_path):
        return lambda name="metrics.jsonl": Records(tmp_path / name, [], Throughput())

    def test_what_came_after_the_checkpoint_is_cut_off(self, records):
        made = records()
        state = made.get_state()
        assert state["bytes"] == 0
        made.record_evaluation("test", 1, {"loss": math.nan})
        for step, keep in ((2, True), (3, False), (4, True)):
            made.record_evaluation("test", step, {"loss": 0.5})
            if keep:
                state = made.get_state()
            else:
                made = records()
                made.set_state(state)
        found = [json.loads(line) for line in made.path.read_text().splitlines()]
        # JSON has no NaN.
        assert [(r["step"], r["loss"]) for r in found] == [(1, "NaN"), (2, 0.5), (4, 0.5)]
        made.set_state(state | {"bytes": 1000})  # the file is shorter: nothing is filled up
        assert made.get_state() == state
        made.path.unlink()
        made.set_state(state)
        assert made.get_state() == state | {"bytes": 0}

    def test_half_a_record_is_cut_off(self, records, caplog):
        """A power failure kept the checkpoint and lost the end of the file."""
        made = records()
        made.record_evaluation("test", 1, {"loss": 1.0})
        made.record_evaluation("test", 2, {"loss": 1.0})
        state = made.get_state()
        os.truncate(made.path, state["bytes"] - 5)
        made = records()
        made.set_state(state)
        assert f"{made.path}: shorter than at the checkpoint" in caplog.text
        made.record_evaluation("test", 3, {"loss": 1.0})
        found = [json.loads(line)["step"] for line in made.path.read_text().splitlines()]
        assert found == [1, 3]

    def test_it_is_on_disk_before_a_checkpoint_remembers_its_length(self, records, monkeypatch):
        made = records()
        made.record_evaluation("test", 1, {"loss": 1.0})
        order = syncs.recorded(monkeypatch)
        made.get_state()
        assert order == [("sync", "metrics.jsonl")]

    @pytest.mark.parametrize(
        "path, why", [("gone/a", "No such file"), ("/dev/full", "No space left")]
    )
    def test_what_cannot_be_written_is_named(self, records, path, why):
        with pytest.raises(CannotSave, match=f"{path} cannot be written: {why}"):
            records(path).record_evaluation("test", 1, {})


class TestEvaluateEvery:
    @pytest.fixture
    def model(self):
        made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        made.compile("sgd", "mse", weighted_metrics=["mae"], jit_compile=False)
        made.train_on_batch(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))
        return made

    @pytest.fixture
    def evaluator(self, model, listener):
        x, y = np.full((6, 2), 3.0, "float32"), np.zeros((6, 1), "float32")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(3)

        def make(every):
            records = Records(None, [listener], Throughput())
            made = EvaluateEvery(records, data, "test", every).count_steps(5, 10)
            made.set_model(model)
            return made

        return make

    def metrics(self, model):
        return {name: float(value) for name, value in model.get_metrics_result().items()}

    def test_it_evaluates_where_it_is_due_and_leaves_the_epoch_alone(
        self, evaluator, model, listener
    ):
        before, made, never = self.metrics(model), evaluator(2), evaluator(None)
        for batch in range(5):
            made.on_train_batch_end(batch, {})
            never.on_train_batch_end(batch, {})
        assert [(r["split"], r["step"]) for r in listener.records] == [("test", 2), ("test", 4)]
        assert self.metrics(model) == before
        found = model.evaluate(made.data, verbose=0, return_dict=True)
        assert {name: listener.records[0][name] for name in found} == pytest.approx(found)
        assert found != before

    def test_arrays_are_evaluated_like_a_dataset(self, evaluator, listener):
        made = evaluator(2)
        x, y = (np.concatenate(parts) for parts in zip(*made.data.as_numpy_iterator(), strict=True))
        for batch, data in ((1, made.data), (3, (x, y))):
            made.data = data
            made.on_train_batch_end(batch, {})
        first, second = listener.records
        assert first["loss"] == pytest.approx(second["loss"])
