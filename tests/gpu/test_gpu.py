"""Tests that need a GPU: `make test-gpu`.

Where there is none, GPU_TESTS_ON=CPU tries the tests themselves, on logical CPUs.
"""

import json
import os
import signal

import numpy as np
import pytest

from tests.distribution import test_overflow, test_step
from tests.support import forked, processes, strategy_run
from tests.training.test_resume import assert_identical, killed_run

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("GPU_TESTS_ON", "GPU")
# Measured: operations a second of a bfloat16 product of 8192^3 in PyTorch.
KNOWN_PEAKS = {"NVIDIA H100 80GB HBM3": 791e12}


@pytest.fixture(scope="module", autouse=True)
def device():
    """Ends the session where there is no such device."""
    import tensorflow as tf

    if not tf.config.list_physical_devices(DEVICE):
        pytest.exit(f"no {DEVICE} here: nothing was tested", returncode=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    strategy_run.write_data(folder)
    return folder


def train_bert(options: dict) -> tuple[dict, list[str]]:
    """The results of the recipe, and the devices that hold its weights."""
    from recipes import bert_mlm

    stock, devices = bert_mlm.build_model, []

    def build_model(*arguments):
        model = stock(*arguments)
        devices.extend(variable.value.device for variable in model.trainable_variables)
        return model

    bert_mlm.build_model = build_model
    return bert_mlm.main(bert_mlm.Options(**options)), devices


def test_auto_takes_the_device_and_measures_mfu(folder):
    options = strategy_run.TINY_TEXT | strategy_run.data_options("bert_mlm", folder)
    options |= dict(run_dir=str(folder / "auto"), cache_dir=str(folder / "cache"), jit="auto")
    options |= dict(strategy="auto", precision="float32", max_steps=120, epochs=100)
    results, devices = forked.run(train_bert, options, cpus=1, seconds=300)
    assert devices and all(device.endswith(f"{DEVICE}:0") for device in devices)
    assert (results["strategy"], results["replicas"], results["steps"]) == ("none", 1, 120)
    assert results["test"]["cross_entropy"] < results["baseline"]["unigram_cross_entropy"]
    assert 0 < results["mfu"] < 1


def mfu_of_products(dtype: str, side: int, products: int) -> tuple[float, float, str]:
    """`mfu` of steps that are nothing but matrix products, the peak, and the device's name."""
    import keras
    import tensorflow as tf

    from callbacks.throughput import Throughput
    from machine import mfu

    keras.config.set_dtype_policy(dtype)
    multiply = mfu.matrix_products(side, products, dtype)
    throughput = Throughput().count_steps(100, 100)
    throughput.examples_per_step, throughput.operations_per_example = products, 2 * side**3
    for step in range(21):
        throughput.on_train_batch_begin(step)
        multiply()
        throughput.on_train_batch_end(step, {"loss": 0.0})
    [device] = tf.config.list_physical_devices(DEVICE)
    name = tf.config.experimental.get_device_details(device).get("device_name", "")
    return throughput.total()["mfu"], mfu.measure_peak(dtype), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if DEVICE == "GPU" else ["float32"])
def test_mfu_of_products_alone_is_near_1(dtype):
    """Products of another size than those that the peak is measured with, with little around."""
    size = (6144, 10) if DEVICE == "GPU" else (1024, 2)
    found, peak, name = forked.run(mfu_of_products, dtype, *size, cpus=1)
    # Two slow cores that do other work too tell the order of magnitude alone.
    assert found == pytest.approx(1, rel=0.25 if DEVICE == "GPU" else 0.7)
    if dtype == "bfloat16" and name in KNOWN_PEAKS:
        assert peak == pytest.approx(KNOWN_PEAKS[name], rel=0.1)


def test_two_replicas_of_the_split_device_are_equal_to_one(folder):
    names = ["bert_together", "mnist"]
    split = {"strategy": "mirrored", "replicas": 2}
    for output, options in (("one", {"strategy": "none"}), ("two", split)):
        words = (json.dumps(options | {"runs": names}), str(folder / output))
        processes.run_script("tests/support/strategy_run.py", *words)
    for run in names:
        one, two = folder / "one" / run, folder / "two" / run
        processes.assert_equal_tensors(one, two)
        ours, theirs = processes.results(one), processes.results(two)
        assert (ours["replicas"], theirs["replicas"]) == (1, 2)
        for metric, value in ours["test"].items():
            processes.assert_equal(np.array(value), np.array(theirs["test"][metric]), metric)


def test_what_xla_compiles_under_replicas_is_equal_to_what_it_does_not():
    test_step.test_what_xla_compiles_on_each_replica_is_equal_to_what_it_does_not()
    test_step.test_k_batches_make_the_update_of_one_batch_of_all_examples(True)


@pytest.mark.parametrize("run", ["bert", "bert_xla"])
def test_deterministic_runs_are_identical_also_after_a_kill(run, folder):
    runs = [folder / f"deterministic-{run}-{number}" for number in range(3)]
    kill = {"at": "step", "step": 15}
    killed_run(runs[2], run, status=-signal.SIGKILL, kill=kill, deterministic=True)
    for run_dir in runs:
        killed_run(run_dir, run, deterministic=True)
    assert_identical(runs[2], runs[0])
    first, second = (processes.results(run_dir)["weights_sha256"] for run_dir in runs[:2])
    assert first == second


def test_an_overflow_on_one_replica_skips_the_step_on_all():
    for jit_compile in (False, True):
        test_overflow.test_an_overflow_on_the_last_replica_only(1, jit_compile)


def attention_on_the_device(precision: str) -> tuple[bool, list[str]]:
    """Returns `attention.works` of a precision, and the messages that it logged."""
    import logging

    from distribution import attention

    said = []
    logging.getLogger("recipes").addFilter(lambda record: said.append(record.getMessage()))
    return attention.works(precision), said


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_attention_of_cudnn_is_right_on_hopper(precision):
    """`works()` compares it with the plain one: masked, causal, and with gradients."""
    from distribution import attention

    found, said = forked.run(attention_on_the_device, precision, cpus=1)
    assert (found, said) == (attention.has_hopper_gpus(), [])


def train_counting_attention(options: dict) -> tuple[float, int]:
    """The recipe's cross-entropy, and how often cuDNN's attention was traced."""
    from distribution import attention

    stock, traced = attention.attention, []

    def counted(*arguments, **named):
        traced.append(arguments)
        return stock(*arguments, **named)

    attention.attention = counted
    results, _ = train_bert(options)
    return results["test"]["cross_entropy"], len(traced)


def test_a_compiled_run_in_half_precision_learns_what_an_uncompiled_one_does(folder):
    """On a GPU with batches copied ahead, and on Hopper with cuDNN's attention."""
    from distribution import attention

    options = strategy_run.TINY_TEXT | strategy_run.data_options("bert_mlm", folder)
    options |= dict(cache_dir=str(folder / "cache"), strategy="none", precision="mixed_bfloat16")
    options |= dict(max_steps=60, epochs=100, dropout=0.0)
    losses = []
    for jit in ("on", "off"):
        words = options | dict(jit=jit, run_dir=str(folder / f"half-{jit}"))
        loss, traced = forked.run(train_counting_attention, words, cpus=1, seconds=300)
        losses.append(loss)
        assert bool(traced) == (jit == "on" and attention.has_hopper_gpus())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
