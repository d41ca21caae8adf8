"""Held against a clock that the test turns."""

import keras
import pytest

from callbacks import throughput as module
from callbacks.throughput import Throughput


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def callback(clock):
    made = Throughput().count_steps(100, 100)
    made.examples_per_step = 32
    return made


def execute(callback, clock, batch, seconds, pause=0.0):
    clock[0] += pause  # an evaluation, or saving
    callback.on_train_batch_begin(batch)
    clock[0] += seconds
    callback.on_train_batch_end(batch, {"loss": 1.0})


def test_examples_and_tokens_a_second(callback, clock):
    callback.tokens_per_example = 100.0
    assert callback.total() == {} == callback.since_last() and callback.seconds_for(1) is None
    execute(callback, clock, 0, 7.0, pause=3.0)
    assert callback.time_to_first_step == 10.0
    assert callback.total() == {} == callback.since_last()  # the first one compiles
    for batch in (1, 2):
        execute(callback, clock, batch, 0.5, pause=60.0)
    assert callback.since_last() == {"examples_per_second": 64.0, "tokens_per_second": 6400.0}
    execute(callback, clock, 3, 0.25)
    assert callback.since_last() == {"examples_per_second": 128.0, "tokens_per_second": 12800.0}
    assert callback.total()["examples_per_second"] == pytest.approx(3 * 32 / 1.25)
    assert callback.seconds_for(10) == pytest.approx(10 * 1.25 / 3)
    assert callback.time_to_first_step == 10.0


def test_it_waits_for_the_device_where_the_run_reads_the_results(callback, clock, on_device):
    """Steps that take the device a second each, of which the process sees every fifth one."""
    callback.count_steps(100, 100, read_every=(None, 5))
    on_device.clock = clock
    for step in range(1, 11):
        on_device.seconds = {1: 3.0, 2: 1.0, 5: 2.6}.get(step, 4.5)  # what it still computes
        callback.on_train_batch_begin(step - 1)
        clock[0] += 0.1
        callback.on_train_batch_end(step - 1, {"loss": on_device(step, 1.0)})
    assert on_device.reads == [1, 2, 5, 10]  # the first compiles, after the second the peak follows
    assert callback.total()["examples_per_second"] == pytest.approx(32 * 9 / 9)


def test_a_gpu_that_a_later_callback_waits_for_is_timed(callback, clock, on_device):
    """Steps of a second each, for which a callback after this one waits; and evaluations."""
    callback.count_steps(100, 100, read_every=(None, 5))
    on_device.clock = clock
    for step in range(1, 11):
        is_read = step in (1, 2, 5, 10)
        on_device.seconds = 0.9 if is_read else 0.0
        callback.on_train_batch_begin(step - 1)
        clock[0] += 0.1
        callback.on_train_batch_end(step - 1, {"loss": on_device(step, 1.0, "/device:GPU:0")})
        clock[0] += 60.0 if is_read else 0.9
    assert callback.total()["examples_per_second"] == pytest.approx(32 * 9 / 9)


def test_an_execution_of_several_steps(callback, clock):
    execute(callback, clock, 4, 5.0)
    execute(callback, clock, 9, 2.0)
    assert callback.total() == {"examples_per_second": 5 * 32 / 2.0}


@pytest.mark.parametrize(
    ("policy", "dtype"), [("float32", "float32"), ("mixed_bfloat16", "bfloat16")]
)
def test_mfu(policy, dtype, callback, clock, monkeypatch):
    """The peak is that of the products of the run's precision."""
    monkeypatch.setattr(module, "measure_peak", {dtype: 1e6}.__getitem__)
    monkeypatch.setattr(module.keras.config, "dtype_policy", lambda: keras.DTypePolicy(policy))
    callback.operations_per_example, callback.devices = 1000, 2
    for batch in range(2):
        execute(callback, clock, batch, 0.1)
    # 32,000 operations in 0.1 s, where two devices can do 200,000.
    assert callback.total()["mfu"] == pytest.approx(0.16)
    assert callback.since_last()["mfu"] == pytest.approx(0.16)
    assert callback.peak_operations_per_second == 1e6
