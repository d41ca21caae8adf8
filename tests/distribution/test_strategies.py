"""The choice of `auto`, refusals, limits of a process, and agreement of the workers."""

import glob
import itertools
import json
import os
import socket
import types
from pathlib import Path

import pytest
import tensorflow as tf

from distribution import strategies
from distribution.errors import DistributionError
from tests.support import forked, processes


def tf_config(kind="worker", index=0, **tasks):
    ports = itertools.count(2000)
    cluster = {name: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for name, n in tasks.items()}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.fixture
def set_environ(monkeypatch):
    """Sets what names a cluster; without TF_CONFIG and SLURM's variables there is none."""

    def set_environ(environ):
        for name in ("TF_CONFIG", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
            monkeypatch.setenv(name, environ.get(name, ""))

    return set_environ


@pytest.mark.parametrize(
    ("environ", "replicas", "expected"),
    [
        ({}, None, "none"),
        ({}, 2, "mirrored"),
        (tf_config(worker=2), None, "multi_worker"),
        (tf_config(worker=1), None, "none"),
        (tf_config("chief", chief=1, worker=1), None, "multi_worker"),
        (tf_config("chief", chief=1, worker=2, ps=1), None, "parameter_server"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, None, "multi_worker"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None, "none"),
    ],
)
def test_auto(environ, replicas, expected, set_environ):
    set_environ(environ)
    assert strategies.resolve("auto", replicas) == expected
    assert not strategies.problems(expected, replicas)


@pytest.mark.parametrize(
    ("name", "replicas", "environ", "words"),
    [
        ("none", 2, {}, "needs mirrored"),
        ("parameter_server", 2, tf_config("chief", chief=1, worker=1, ps=1), "--replicas"),
        ("parameter_server", None, {}, "needs a cluster with parameter servers"),
        ("mirrored", 2, tf_config(worker=2), "2 workers"),
        ("multi_worker", None, tf_config("chief", chief=1, worker=1, ps=1), "parameter servers"),
    ],
)
def test_what_does_not_go_together(name, replicas, environ, words, set_environ):
    set_environ(environ)
    (found,) = strategies.problems(name, replicas)
    assert words in found


PROCESS = """
import json, sys
from distribution import kinds, strategies
from distribution.errors import DistributionError
import tensorflow as tf
for name, replicas in json.loads(sys.argv[1]):
    if name == "op":
        tf.zeros(1)
        continue
    try:
        strategy = strategies.make_strategy(name, replicas)
        assert kinds.name_of(strategy) == name
        # TensorFlow would put what a missing device shall do onto another one, without a word.
        assert len(tf.config.list_logical_devices("CPU")) >= (replicas or 1)
        with strategy.scope():
            x = tf.Variable(1.0)
        total = strategy.reduce("SUM", strategy.run(lambda: x + 1.0), axis=None)
        print("said: sum", total.numpy())
    except DistributionError as error:
        print("said:", error)
"""


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (
            [("mirrored", 2), ("none", None), ("mirrored", 2), ("none", 1), ("mirrored", 3)],
            ["sum 4.0", "sum 2.0", "sum 4.0", "sum 2.0", "--replicas came too late: TensorFlow"],
        ),
        (
            [("central_storage", 2), ("mirrored", 2), ("mirrored", None)],
            ["sum 4.0", "sum 4.0", "--replicas came too late"],
        ),
        (
            [("op", None), ("mirrored", 3), ("multi_worker", None)],
            ["--replicas came too late", "sum 2.0"],
        ),
    ],
)
def test_strategies_one_after_another_in_a_process(calls, expected, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROCESS)
    output = processes.run_script(str(script), json.dumps(calls))
    lines = [line for line in output.splitlines() if line.startswith("said:")]
    assert len(lines) == len(expected), output
    for line, words in zip(lines, expected, strict=True):
        assert words in line, output


@pytest.mark.parametrize(("planned", "expected"), [("", 2), ("4", 8), ("1", 2), ("2", 4)])
def test_replicas_that_are_away_are_planned_for(monkeypatch, planned, expected):
    """One worker of two replicas is here."""
    monkeypatch.setattr(strategies, "replicas", lambda strategy: 2)
    monkeypatch.setenv("KERAS_RECIPES_PLANNED_WORKERS", planned)
    assert strategies.planned_replicas(strategies.tf.distribute.get_strategy()) == expected


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_the_gpu_that_batches_are_copied_to(monkeypatch, gpus):
    """Under a strategy TensorFlow copies them."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["GPU"] * gpus)
    mirrored = object.__new__(tf.distribute.MirroredStrategy)
    assert strategies.gpu_without_strategy(mirrored) is None
    expected = "GPU:0" if gpus else None
    assert strategies.gpu_without_strategy(tf.distribute.get_strategy()) == expected


@pytest.fixture
def limits(monkeypatch):
    """Returns the memory limits of the parts into which the only GPU is split."""
    limits = []
    config = types.SimpleNamespace(
        list_physical_devices=lambda kind: ["GPU:0"],
        get_logical_device_configuration=lambda device: None,
        set_logical_device_configuration=lambda device, parts: limits.extend(parts),
        LogicalDeviceConfiguration=lambda memory_limit=None: memory_limit,
    )
    monkeypatch.setattr(strategies, "tf", types.SimpleNamespace(config=config))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return limits


@pytest.mark.parametrize(("visible", "asked"), [(None, "0"), ("2,1", "2"), ("GPU-ab", "GPU-ab")])
def test_the_memory_that_is_split_is_that_of_the_gpu_in_use(limits, monkeypatch, visible, asked):
    def run(command, **_):
        return types.SimpleNamespace(stdout={f"--id={asked}": "10000"}[command[-1]])

    monkeypatch.setattr(strategies.subprocess, "run", run)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert strategies.make_logical_devices(2) == ["GPU:0", "GPU:1"]
    assert limits == [4500, 4500]


@pytest.mark.parametrize(
    ("command", "reason"),
    [("echo '[N/A]'", r"invalid literal .*\[N/A\]"), ("sleep 5", "timed out after 0.2 seconds")],
)
def test_a_gpu_that_does_not_tell_its_memory(limits, monkeypatch, tmp_path, command, reason):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nexec {command}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if "sleep" in command:
        monkeypatch.setattr(strategies, "NVIDIA_SMI_SECONDS", 0.2)
    message = "--replicas 2: nvidia-smi must report the GPU's memory in order to split it: .*"
    with pytest.raises(DistributionError, match=message + reason):
        strategies.make_logical_devices(2)
    assert limits == []


def test_more_replicas_than_gpus(monkeypatch):
    monkeypatch.setattr(
        strategies.tf.config, "list_physical_devices", lambda kind=None: ["GPU:0", "GPU:1"]
    )
    with pytest.raises(DistributionError, match="--replicas 3 is more than the 2 GPUs here"):
        strategies.make_logical_devices(3)


def agreed():
    """The results of one worker, by name."""
    strategy = strategies.make_strategy("multi_worker")
    own = strategies.worker_index(strategy)
    agreement = strategies.Agreement(strategy)
    return {
        "chief": strategies.is_chief(strategy),
        "total": agreement.total(own + 1),
        "one wishes": agreement.any_worker(own == 1),
        "none wishes": agreement.any_worker(False),
        "each": agreement.on_any_worker(False, own == 1, True),
        "near": agreement.everyone_is_near([5, 100 + own], 1),
        "far": agreement.everyone_is_near([5, 100 + 2 * own], 1),
        "the chief's": agreement.broadcast_from_chief(100 + 10 * own),
        "alike": agreement.everyone_has(5),
        "0 and 2": agreement.everyone_has(2 * own),
        "2 and 3": agreement.everyone_has(2 + own),
    }


def test_what_two_workers_agree_on():
    chief, other = forked.run(agreed, workers=2, cpus=1)
    assert chief.pop("chief") and not other.pop("chief")
    assert chief == other
    expected = {"total": 3, "one wishes": True, "none wishes": False, "the chief's": 100}
    expected |= {"each": [False, True, True], "near": True, "far": False}
    assert chief == expected | {"alike": True, "0 and 2": False, "2 and 3": False}


def operations_at_a_time(name, chosen):
    os.environ.pop(strategies.INTER_OP_THREADS, None)
    if chosen:
        os.environ[strategies.INTER_OP_THREADS] = chosen
    strategy = strategies.make_strategy(name, 2 if name == "mirrored" else None)
    with strategy.scope():
        tf.function(lambda a: a @ a)(tf.ones((8, 8)))
    names = [Path(path).read_text().strip() for path in glob.glob("/proc/self/task/*/comm")]
    return names.count("tf_Compute")


@pytest.mark.parametrize("name", ["none", "mirrored"])
@pytest.mark.parametrize(("chosen", "threads"), [("", 1), ("3", 3)])
def test_one_operation_runs_at_a_time(name, chosen, threads):
    """Several end in an order that depends on the machine, and with it the last bit of AddN."""
    cpus = 2 if name == "mirrored" else 1
    assert forked.run(operations_at_a_time, name, chosen, cpus=cpus) == threads


def connect_at_a_port_in_use():
    """The error of a worker whose port another program has taken since it was chosen."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        address = f"localhost:{other.getsockname()[1]}"
        cluster = {"worker": [address, "localhost:1"]}
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": cluster, "task": {"type": "worker", "index": 0}}
        )
        try:
            strategies.make_strategy("multi_worker", None)
        except OSError as error:
            return address, error.strerror
    return address, None


def test_a_port_in_use_is_named_in_one_line():
    address, said = forked.run(connect_at_a_port_in_use)
    assert said == f"this worker cannot listen at {address}; is its port in use?"
