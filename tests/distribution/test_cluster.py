"""TF_CONFIG and SLURM's variables."""

import json
import subprocess
import sys

import pytest

from distribution.cluster import cluster_spec, slurm_tasks, workers_in
from distribution.errors import DistributionError

TWO = {"worker": ["a:1", "b:65535"]}


def config(cluster=TWO, kind="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    ("text", "workers", "index"),
    [
        (" \n", 1, None),
        ("{}", 1, None),
        ('{"cluster": {}, "task": {"type": "worker", "index": 0}}', 1, None),
        (config(index=1), 2, 1),
        (config(index="1"), 2, 1),
        (config({"chief": ["a.b-c.d:80"], "worker": ["[fe80::1]:80"], "ps": ["a:2"]}, "ps"), 2, 0),
    ],
)
def test_good_ones(text, workers, index):
    found = cluster_spec({"TF_CONFIG": text})
    assert workers_in(found) == workers
    assert (found["task"]["index"] if found else None) == index


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker", "in JSON;"),
        ("[" * 100_000, "in JSON;"),
        ("[]", "in JSON;"),
        (config("a:1"), "in JSON;"),
        (config({"worker": [22200]}), "in JSON;"),
        (json.dumps({"cluster": TWO}), "not a cluster with a task"),
        (config(index="one"), "not a cluster with a task"),
        (config({"worker": "a:1,b:1"}), "'a' is not HOST:PORT"),
        (config({"worker": ["grpc://a:1"]}), "not HOST:PORT"),
        (config({"worker": ["a:" + "1" * 500]}), "not HOST:PORT"),
        (config({"worker": ["a:1"], "ps": ["a:1"]}), "a:1 is there twice"),
        (config({"wroker": ["a:1", "b:1"]}, "wroker"), "task types are worker, ps and one chief"),
        (config({"chief": ["a:1", "b:1"]}, "chief"), "one chief"),
        (config(kind="chief"), "the cluster has no chief 0"),
        (config(index=2), "the cluster has no worker 2"),
        (config(index=-1), "the cluster has no worker -1"),
    ],
)
def test_bad_ones_end_in_one_line(text, words):
    with pytest.raises(DistributionError) as error:
        cluster_spec({"TF_CONFIG": text})
    message = str(error.value)
    assert message.startswith("TF_CONFIG: ") and words in message
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    ("variables", "tasks"),
    [
        ({"NTASKS": "4"}, 1),  # no process of `srun`
        ({"PROCID": "0"}, 1),
        ({"PROCID": "3", "NTASKS": "4"}, 4),
        ({"PROCID": "0", "NTASKS": "4", "STEP_NUM_TASKS": "1"}, 1),
    ],
)
def test_slurm(variables, tasks):
    assert slurm_tasks({f"SLURM_{name}": value for name, value in variables.items()}) == tasks


def test_a_number_of_tasks_that_is_none():
    with pytest.raises(DistributionError, match=r"expected a whole number, found '4\(x2\)'"):
        slurm_tasks({"SLURM_PROCID": "0", "SLURM_NTASKS": "4(x2)"})


def test_needs_no_tensorflow():
    code = "import sys, distribution.cluster; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
