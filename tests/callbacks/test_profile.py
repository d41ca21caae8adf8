"""A profile of some steps; one test uses TensorFlow's profiler, the others a fake one."""

import time
import types

import pytest
import tensorflow as tf

from callbacks.profile import Profile
from callbacks.throughput import Throughput


@pytest.fixture
def calls(monkeypatch):
    found = []
    profiler = tf.profiler.experimental
    monkeypatch.setattr(profiler, "start", lambda folder: found.append(["start", folder]))
    monkeypatch.setattr(profiler, "stop", lambda: found.append(["stop"]))
    return found


def steps(callback, first, last, each=1):
    """Runs the steps; returns after which of them the profiler was started and stopped."""
    callback.set_model(types.SimpleNamespace(steps_per_execution=each))
    callback.count_steps(100, 100, first - 1)
    for step in range(first, last + 1, each):
        callback.on_train_batch_begin(step - 1)
        callback.on_train_batch_end(step + each - 2, {"loss": 1.0})
        yield step + each - 1


@pytest.mark.parametrize(
    "window, run, expected",
    [
        ((3, 4), (1, 9, 1), {3: 1, 4: 2}),
        ((1, 1), (1, 3, 1), {1: 2}),
        ((3, 4), (4, 9, 1), {4: 2}),  # a run that resumes within it
        ((3, 4), (5, 9, 1), {}),
        ((3, 4), (1, 9, 3), {3: 1, 6: 2}),  # executions of three steps
        ((5, 5), (1, 9, 3), {6: 2}),  # within one
        ((4, 6), (1, 9, 3), {6: 2}),
        (None, (1, 9, 1), {}),
    ],
)
def test_the_steps_of_the_window(calls, tmp_path, window, run, expected):
    callback, seen = Profile(tmp_path, window, Throughput()), {}
    for step in steps(callback, *run):
        if len(calls) > max(seen.values(), default=0):
            seen[step] = len(calls)
    assert seen == expected
    assert calls in ([], [["start", str(tmp_path)], ["stop"]])


def test_a_run_that_ends_within_it_writes_it(calls, tmp_path):
    callback = Profile(tmp_path, (2, 50), Throughput())
    assert list(steps(callback, 1, 3)) and len(calls) == 1
    callback.on_train_end()
    callback.close()
    assert calls[1:] == [["stop"]]


def test_the_profilers_own_seconds_are_no_training(monkeypatch, tmp_path):
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for name in ("start", "stop"):
        monkeypatch.setattr(
            tf.profiler.experimental, name, lambda *_: now.__setitem__(0, now[0] + 100)
        )
    throughput = Throughput().count_steps(100, 100)
    throughput.examples_per_step = 32
    profile = Profile(tmp_path, (3, 4), throughput)
    profile.set_model(types.SimpleNamespace(steps_per_execution=1))
    profile.count_steps(100, 100)
    for step in range(9):
        for callback in (throughput, profile):
            callback.on_train_batch_begin(step)
        now[0] += 0.5
        for callback in (throughput, profile):
            callback.on_train_batch_end(step, {"loss": 1.0})
    assert now[0] > 1200
    assert throughput.total()["examples_per_second"] == pytest.approx(64)


def test_what_is_written(tmp_path):
    callback = Profile(tmp_path, (1, 1), Throughput())
    list(steps(callback, 1, 1))
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
