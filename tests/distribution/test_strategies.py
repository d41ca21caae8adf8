"""What `auto` chooses, what is refused before anything is built, and what a process allows."""

import itertools
import json
import os
import subprocess
import sys

import pytest

from distribution import strategies
from distribution.errors import DistributionError
from tests.support import processes


def tf_config(kind="worker", index=0, **tasks):
    ports = itertools.count(2000)
    cluster = {name: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for name, n in tasks.items()}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("environ", "replicas", "expected"),
    [
        ({}, None, "none"),
        ({}, 1, "none"),
        ({}, 2, "mirrored"),
        (tf_config(worker=2), None, "multi_worker"),
        (tf_config(worker=2), 2, "multi_worker"),
        (tf_config(worker=1), None, "none"),
        (tf_config("chief", chief=1, worker=1), None, "multi_worker"),
        (tf_config("chief", chief=1, worker=2, ps=1), None, "parameter_server"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, None, "multi_worker"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None, "none"),
        ({"TF_CONFIG": "{}"}, None, "none"),
    ],
)
def test_auto(environ, replicas, expected):
    assert strategies.resolve("auto", replicas, environ) == expected
    assert not strategies.problems(expected, replicas, environ)


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
def test_what_does_not_go_together(name, replicas, environ, words):
    (found,) = strategies.problems(name, replicas, environ)
    assert words in found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(strategy="central_storage", replicas=2, jit="on"), "XLA"),
        (dict(strategy="mirrored", replicas=3, global_batch_size=32), "cannot be shared"),
        (dict(strategy="none", replicas=2), "mirrored"),
    ],
)
def test_recipes_refuse_it_before_they_load_anything(options, words):
    from training.checks import refuse_pairs
    from training.errors import OptionsError
    from training.options import SharedOptions

    with pytest.raises(OptionsError, match=words):
        refuse_pairs(SharedOptions(**options))


PROCESS = """
import json, sys
from distribution import strategies
from distribution.errors import DistributionError
import tensorflow as tf
for name, replicas in json.loads(sys.argv[1]):
    if name == "op":
        tf.zeros(1)
        continue
    try:
        strategy = strategies.make_strategy(name, replicas)
        assert strategies.name_of(strategy) == name
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
            ["sum 4.0", "sum 2.0", "sum 4.0", "sum 2.0", "--replicas 3 came too late: TensorFlow "
             "already runs with 2 device(s) in this process and cannot change that; restart the "
             "kernel (or the process)"],
        ),
        (
            [("central_storage", 2), ("mirrored", 2), ("mirrored", None)],
            ["sum 4.0", "sum 4.0", "no --replicas came too late: TensorFlow already runs with 2"],
        ),
        (
            [("none", None), ("mirrored", 2), ("mirrored", 1), ("none", None)],
            ["sum 2.0", "--replicas 2 came too late: TensorFlow already "
             "runs with 1 device(s) in this process",
             "sum 2.0", "sum 2.0"],
        ),
        (
            [("op", None), ("mirrored", 3), ("multi_worker", None)],
            ["--replicas 3 came too late", "sum 2.0"],
        ),
    ],
)  # fmt: skip
def test_strategies_one_after_another_in_a_process(calls, expected, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROCESS)
    output = processes.run_script(str(script), json.dumps(calls))
    lines = [line for line in output.splitlines() if line.startswith("said:")]
    assert len(lines) == len(expected), output
    for line, words in zip(lines, expected, strict=True):
        assert words in line, output


def test_several_workers_come_first_in_a_process():
    code = PROCESS.replace("import tensorflow as tf", "import tensorflow as tf; tf.zeros(1)")
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([("multi_worker", None)])],
        capture_output=True,
        text=True,
        env=os.environ | tf_config(worker=2),
    )
    assert "--strategy multi_worker came too late" in done.stdout, done.stderr


def test_slurm_without_a_list_of_nodes(monkeypatch):
    for name in ("SLURM_STEP_NODELIST", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(DistributionError, match="SLURM_STEP_NODELIST not found"):
        strategies.make_strategy("auto")


@pytest.mark.parametrize(
    ("planned", "expected"), [("", 2), ("4", 8), ("1", 2), ("0", 2), ("x", 2), ("2", 4)]
)
def test_replicas_that_are_away_are_planned_for(monkeypatch, planned, expected):
    """One worker of two replicas is here."""
    monkeypatch.setattr(strategies, "replicas", lambda strategy: 2)
    monkeypatch.setenv("KERAS_RECIPES_PLANNED_WORKERS", planned)
    assert strategies.planned_replicas(strategies.tf.distribute.get_strategy()) == expected


def test_more_replicas_than_gpus(monkeypatch):
    monkeypatch.setattr(
        strategies.tf.config, "list_physical_devices", lambda kind=None: ["GPU:0", "GPU:1"]
    )
    with pytest.raises(DistributionError, match="--replicas 3 is more than the 2 GPUs here"):
        strategies.make_logical_devices(3)
