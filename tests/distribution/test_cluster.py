"""TF_CONFIG and SLURM's variables, of every shape."""

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
        ("", 1, None),
        (" \n", 1, None),
        ("{}", 1, None),
        ('{"cluster": {}, "task": {"type": "worker", "index": 0}}', 1, None),
        (config(), 2, 0),
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
        ("{", "no JSON;"),
        ("worker", "no JSON;"),
        ("[" * 100_000, "no JSON;"),
        ('{"task": {"index": 1' + "0" * 5000 + "}}", "no JSON;"),
        ("[]", "no JSON object"),
        ("5", "no JSON object"),
        ("null", "no JSON object"),
        ('"text"', "no JSON object"),
        (config([]), "cluster must be an object"),
        (config("a:1"), "cluster must be an object"),
        (config(["a:1", "b:1"]), "cluster must be an object"),
        (config(None), "cluster must be an object"),
        (config({"worker": "a:1,b:1"}), "worker must be a list of addresses"),
        (config({"worker": {"0": "a:1"}}), "worker must be a list of addresses"),
        (config({"worker": None}), "worker must be a list of addresses"),
        (config({"wroker": ["a:1", "b:1"]}, "wroker"), "'wroker' is none of chief, worker, ps"),
        (config({"worker": ["a:1"], "evaluator": ["b:1"]}, "evaluator"), "'evaluator' is none of"),
        (config({"worker": ["a"]}), "'a' is no HOST:PORT"),
        (config({"worker": [":1"]}), "no HOST:PORT"),
        (config({"worker": ["a:"]}), "no HOST:PORT"),
        (config({"worker": ["a:0"]}), "'a:0' is no HOST:PORT"),
        (config({"worker": ["a:99999"]}), "'a:99999' is no HOST:PORT"),
        (config({"worker": ["a:-1"]}), "no HOST:PORT"),
        (config({"worker": ["a:http"]}), "no HOST:PORT"),
        (config({"worker": ["a:1 "]}), "no HOST:PORT"),
        (config({"worker": ["a:1\n"]}), "no HOST:PORT"),
        (config({"worker": ["a:1,b:1"]}), "no HOST:PORT"),
        (config({"worker": ["grpc://a:1"]}), "no HOST:PORT"),
        (config({"worker": ["fe80::1:80"]}), "no HOST:PORT"),
        (config({"worker": ["a:" + "1" * 500]}), "no HOST:PORT"),
        (config({"worker": [22200]}), "22200 is no HOST:PORT"),
        (config({"worker": [["a:1"]]}), "no HOST:PORT"),
        (config({"worker": ["a:1", "a:1"]}), "'a:1' stands there twice"),
        (config({"worker": ["a:1"], "ps": ["a:1"]}), "'a:1' stands there twice"),
        (config({"chief": ["a:1", "b:1"]}, "chief"), "2 chiefs"),
        (json.dumps({"cluster": TWO}), "the task is missing"),
        (json.dumps({"cluster": TWO, "task": []}), "the task is missing"),
        (json.dumps({"cluster": TWO, "task": {"index": 0}}), "task type None is not in"),
        (json.dumps({"cluster": TWO, "task": {"type": "worker"}}), "index None is no whole number"),
        (config(kind="chief"), "task type 'chief' is not in the cluster"),
        (config(kind=["worker"]), "is not in the cluster"),
        (config({"worker": []}), "task index 0: the cluster has 0 of type worker"),
        (config(index=2), "task index 2: the cluster has 2"),
        (config(index=-1), "task index -1: the cluster has 2"),
        (config(index="-1"), "task index '-1' is no whole number"),
        (config(index=10**400), "task index 1000"),
        (config(index=1.0), "task index 1.0 is no whole number"),
        (config(index=True), "task index True is no whole number"),
        (config(index="one"), "task index 'one' is no whole number"),
        (config(index=""), "task index '' is no whole number"),
        (config(index=[0]), "is no whole number"),
    ],
)
def test_bad_ones_end_in_one_line(text, words):
    with pytest.raises(DistributionError) as error:
        cluster_spec({"TF_CONFIG": text})
    message = str(error.value)
    assert message.startswith("TF_CONFIG: ") and words in message
    assert "\n" not in message and len(message) < 400


@pytest.mark.parametrize(
    ("variables", "tasks"),
    [
        ({}, 1),
        ({"NTASKS": "4"}, 1),  # no process of `srun`
        ({"PROCID": "", "NTASKS": "x"}, 1),
        ({"PROCID": "0"}, 1),
        ({"PROCID": "3", "NTASKS": "4"}, 4),
        ({"PROCID": "0", "NTASKS": "4", "STEP_NUM_TASKS": "1"}, 1),
    ],
)
def test_slurm(variables, tasks):
    assert slurm_tasks({f"SLURM_{name}": value for name, value in variables.items()}) == tasks


@pytest.mark.parametrize("bad", ["x", "-1", "1.5", "4(x2)", "1" * 400, "٣"])
@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"])
def test_slurm_numbers_that_are_none(name, bad):
    good = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
    with pytest.raises(DistributionError) as error:
        slurm_tasks(good | {name: bad})
    message = str(error.value)
    assert message.startswith(f"{name} is") and "\n" not in message and len(message) < 200


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "0"}, "SLURM_NTASKS is '0'"),
        ({"SLURM_PROCID": "4", "SLURM_NTASKS": "4"}, "SLURM_PROCID is 4, and SLURM runs 4 tasks"),
        ({"SLURM_PROCID": "1"}, "SLURM_PROCID is 1, and SLURM runs 1 tasks"),
    ],
)
def test_slurm_numbers_that_do_not_fit(variables, words):
    with pytest.raises(DistributionError, match=words):
        slurm_tasks(variables)


def test_needs_no_tensorflow():
    code = "import sys, distribution.cluster; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
