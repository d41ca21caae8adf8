"""TF_CONFIG and SLURM's variables."""

import json
import subprocess
import sys

import pytest

from distribution.cluster import cluster_spec, count_workers, slurm_config, slurm_job, slurm_tasks
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
    ("cluster", "kind"),
    [
        ({"worker": ["a:1"], "ps": ["b:1"]}, "worker"),  # it would wait for ever
        ({"chief": ["a:1"], "ps": ["b:1"]}, "chief"),
        ({"ps": ["b:1"]}, "ps"),
    ],
)
def test_parameter_servers_without_chief_or_worker(cluster, kind, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config(cluster, kind))
    with pytest.raises(DistributionError, match="need a chief and at least one worker; found"):
        cluster_spec()


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


def slurm(monkeypatch, **variables):
    for name in ("NODEID", "LOCALID", "STEP_NODELIST", "STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in (dict(JOB_ID="750", STEP_ID="0") | variables).items():
        monkeypatch.setenv(f"SLURM_{name}", value)


@pytest.mark.parametrize(
    ("nodes", "tasks", "workers"),
    [
        ("node[9-10]", "1(x2)", ["node9:20000", "node10:20000"]),
        ("a,b", "2,1", ["a:20000", "a:20001", "b:20000"]),
        (
            "gpu[08-09,11],login",
            "1(x4)",
            [f"{n}:20000" for n in ("gpu08", "gpu09", "gpu11", "login")],
        ),
        ("r[1-2]n[1-2].lan", "1(x4)", [f"r{r}n{n}.lan:20000" for r in "12" for n in "12"]),
        ("127.0.0.1", "2", ["127.0.0.1:20000", "127.0.0.1:20001"]),
    ],
)
def test_the_tasks_of_slurm_are_workers_in_its_order(nodes, tasks, workers, monkeypatch):
    last = str(len(workers) - 1)
    slurm(
        monkeypatch,
        **{"PROCID": last, "STEP_NUM_TASKS": str(len(workers))},
        STEP_NODELIST=nodes,
        STEP_TASKS_PER_NODE=tasks,
    )
    assert slurm_config() == {
        "cluster": {"worker": workers},
        "task": {"type": "worker", "index": int(last)},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(slurm_config()))
    assert count_workers() == len(workers)


def test_steps_of_slurm_on_one_node_have_different_ports(monkeypatch):
    """Jobs that begin together have neighbouring numbers; TensorFlow would share a port."""
    tasks = dict(PROCID="0", STEP_NUM_TASKS="2", STEP_NODELIST="a", STEP_TASKS_PER_NODE="2")
    ports, jobs = set(), set()
    for job in (8_000_000, 8_000_001, 8_000_099):
        for step in range(3):
            slurm(monkeypatch, **tasks, JOB_ID=str(job), STEP_ID=str(step))
            addresses = slurm_config()["cluster"]["worker"]
            assert addresses == slurm_config()["cluster"]["worker"]  # the same in each task
            ports |= {int(address.removeprefix("a:")) for address in addresses}
            jobs.add(slurm_job())
    assert len(ports) == 18 and min(ports) >= 20000 and max(ports) < 32000
    assert len(jobs) == 9 and "8000001.2" in jobs
    monkeypatch.setenv("TF_CONFIG", json.dumps(slurm_config()))
    assert slurm_job() == ""  # TF_CONFIG names the cluster


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"STEP_NODELIST": "a,b,c"},
            "3 nodes, .* 4 tasks on 2 nodes, and .* is 4: they contradict",
        ),
        (
            {"STEP_TASKS_PER_NODE": "2,1"},
            "2 nodes, .* 3 tasks on 2 nodes, and .* is 4: they contradict",
        ),
        ({"STEP_TASKS_PER_NODE": "many"}, "expected 2[(]x3[)],1; found 'many'"),
        ({"STEP_NODELIST": "a[1-x]"}, "cannot read 'a.1-x.'"),
        ({"STEP_NODELIST": "a[1,2"}, "cannot read 'a.1,2'"),
        ({"STEP_NODELIST": "a,a"}, "names a node twice, 'a,a'"),
        ({"STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is missing; start the tasks with srun"),
        ({"STEP_ID": ""}, "SLURM_STEP_ID is missing; start the tasks with srun"),
        ({"JOB_ID": "A"}, "SLURM_JOB_ID 'A', SLURM_STEP_ID '0': expected whole numbers"),
        (
            {"NODEID": "1", "LOCALID": "0"},  # cyclic
            "task 1 is number 0 of node 1, expected number 1 of node 0; .* --distribution=block",
        ),
    ],
)
def test_tasks_of_slurm_whose_places_are_unknown(variables, said, monkeypatch):
    usual = dict(PROCID="1", STEP_NUM_TASKS="4", STEP_NODELIST="a,b", STEP_TASKS_PER_NODE="2(x2)")
    slurm(monkeypatch, **(usual | dict(NODEID="0", LOCALID="1") | variables))
    with pytest.raises(DistributionError, match=said) as error:
        slurm_config()
    assert "\n" not in str(error.value)
