"""TF_CONFIG and SLURM's variables."""

import json
import subprocess
import sys

import pytest

from distribution.cluster import cluster_spec, count_workers, slurm_tasks
from distribution.errors import DistributionError

TWO = {"worker": ["a:1", "b:65535"]}


def config(cluster=TWO, kind="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("", 1),
        ('{"cluster": {}, "task": {"type": "worker", "index": 0}}', 1),
        (config(index=1), 2),
        (config({"chief": ["a.b-c.d:80"], "worker": ["[fe80::1]:80"], "ps": ["a:2"]}, "ps"), 2),
    ],
)
def test_good_ones(text, workers, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    assert count_workers() == workers
    assert cluster_spec() == (json.loads(text)["cluster"] if text else {})


@pytest.mark.parametrize(
    "text",
    [
        "worker",
        "[]",
        json.dumps({"cluster": TWO}),
        config({"worker": "a:1,b:1"}),
        config({"worker": ["a", "b"]}),
        config({"worker": ["a:1"], "ps": ["a:1"]}),
        config({"wroker": ["a:1", "b:1"]}, "wroker"),
        config({"worker": ["a:0", "b:1"]}),
        config({"worker": ["a:1", "b:65536"]}),
        config({"worker": ["a:1", "b:²"]}),
        config({"worker": [":1", "b:1"]}),
        config({"worker": ["fe80::1:80", "b:1"]}),
        config({"chief": ["a:1", "b:1"], "worker": ["c:1"]}),
        config({"worker": ["a:1", 2]}),
        config(kind="chief"),
        config(index=-1),
        config(index=2),
    ],
)
def test_bad_ones_end_in_one_line(text, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(DistributionError, match="^TF_CONFIG: expected a cluster") as error:
        cluster_spec()
    message = str(error.value)
    assert "\n" not in message and len(message) < 1000


@pytest.mark.parametrize(
    ("variables", "tasks"),
    [
        ({"NTASKS": "4"}, 1),
        ({"PROCID": "0", "NTASKS": "4"}, 1),  # the script of `sbatch`
        ({"PROCID": "3", "NTASKS": "4", "STEP_NUM_TASKS": "4"}, 4),
        ({"PROCID": "0", "NTASKS": "4", "STEP_NUM_TASKS": "1"}, 1),
    ],
)
def test_slurm(variables, tasks, monkeypatch):
    for name in ("PROCID", "NTASKS", "STEP_NUM_TASKS"):
        monkeypatch.setenv(f"SLURM_{name}", variables.get(name, ""))
    assert slurm_tasks() == tasks


def test_needs_no_tensorflow():
    code = "import sys, distribution.cluster; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "variables",
    [
        {"PROCID": "first", "STEP_NUM_TASKS": "4"},
        {"PROCID": "0", "STEP_NUM_TASKS": "four"},
        {"PROCID": "0", "STEP_NUM_TASKS": "2.0", "NTASKS": "2"},
        {"PROCID": "0", "STEP_NUM_TASKS": "0"},
        {"PROCID": "-1", "STEP_NUM_TASKS": "4"},
        {"PROCID": "4", "STEP_NUM_TASKS": "4"},
    ],
)
def test_slurms_variables_that_make_no_sense_end_in_one_line(variables, monkeypatch):
    for name in ("PROCID", "NTASKS", "STEP_NUM_TASKS"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(DistributionError, match="^SLURM_PROCID '.+', SLURM_") as error:
        slurm_tasks()
    assert "\n" not in str(error.value)
