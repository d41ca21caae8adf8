"""Names the strategies, and reads the cluster from TF_CONFIG and SLURM. Plain Python."""

import json
import os
import re
from typing import Literal

from distribution.errors import DistributionError

Strategy = Literal[
    "auto", "none", "mirrored", "central_storage", "multi_worker", "parameter_server"
]
# A host's name or IPv4 address, or an IPv6 address in brackets; and a port.
ADDRESS = re.compile(r"(?:[^\s:\[\]]+|\[[0-9a-fA-F:.%\w]+\]):([0-9]{1,5})")
# A step of SLURM has 16 ports on each node: its first task the first one, and so on.
SLURM_PORTS = range(20000, 32000, 16)
# Variables of the environment: the operations that a process runs at a time; what the launchers
# set for their processes, the second where workers come and go, the third where they are started
# again: the run in their folder is then this launch's.
INTER_OP_THREADS = "TF_NUM_INTEROP_THREADS"
LAUNCHED, PLANNED_WORKERS = "KERAS_RECIPES_LAUNCHED", "KERAS_RECIPES_PLANNED_WORKERS"
RESTARTED = "KERAS_RECIPES_RESTARTED"
EXPECTED = '{"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}'


def cluster_spec() -> dict[str, list[str]]:
    """Returns the cluster of TF_CONFIG: lists of HOST:PORT by task type; empty without one.

    Raises:
        DistributionError: TF_CONFIG is not a cluster that contains this process's task, or has
            parameter servers without a chief or a worker.
    """
    text = os.environ.get("TF_CONFIG", "")
    try:
        config = json.loads(text or "{}")
        cluster = config.get("cluster")
        if not cluster:
            return {}
        addresses = [address for tasks in cluster.values() for address in tasks]
        own = range(len(cluster.get(config["task"]["type"], [])))
        is_valid = (
            all(map(_is_address, addresses))
            and len(cluster.get("chief", [])) <= 1
            and len(set(addresses)) == len(addresses)
            and cluster.keys() <= {"chief", "worker", "ps"}
            and int(config["task"]["index"]) in own
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise DistributionError(
            "TF_CONFIG: expected a cluster of workers, parameter servers (ps) and at most one chief"
            f" with distinct addresses, and one of its tasks, {EXPECTED}; found {text[:500]!r}"
        )
    chiefs, workers = len(cluster.get("chief", [])), len(cluster.get("worker", []))
    if "ps" in cluster and not (chiefs and workers):
        raise DistributionError(
            f"TF_CONFIG: parameter servers (ps) need a chief and at least one worker; found "
            f"{chiefs} and {workers}"
        )
    return cluster


def _is_address(text: str) -> bool:
    match = ADDRESS.fullmatch(text)
    return match is not None and 1 <= int(match[1]) <= 65535


def count_workers() -> int:
    """Counts the training processes in TF_CONFIG, chief and workers; 1 without a cluster."""
    cluster = cluster_spec()
    return max(1, len(cluster.get("chief", [])) + len(cluster.get("worker", [])))


def slurm_tasks() -> int:
    """Counts the tasks of this process's `srun`; 1 in a batch script or without SLURM.

    The script of `sbatch` has SLURM_PROCID and SLURM_NTASKS too, and is alone.

    Raises:
        DistributionError: SLURM's variables are not whole numbers, or contradict each other.
    """
    task, name = os.environ.get("SLURM_PROCID"), "SLURM_STEP_NUM_TASKS"
    count = os.environ.get(name)
    if not task or not count:
        return 1
    if not (task.isdecimal() and count.isdecimal() and int(task) < int(count)):
        raise DistributionError(
            f"SLURM_PROCID {task[:40]!r}, {name} {count[:40]!r}: expected the number of this task, "
            "from 0, and the number of all tasks"
        )
    return int(count)


def slurm_job() -> str:
    """Returns job and step of this process, `17.0`, if SLURM names its cluster; otherwise ""."""
    if cluster_spec() or slurm_tasks() == 1:
        return ""
    return "{}.{}".format(*_slurm_step())


def _slurm_step() -> tuple[int, int]:
    """Returns the numbers of SLURM's job and step."""
    job, step = _slurm_variable("SLURM_JOB_ID"), _slurm_variable("SLURM_STEP_ID")
    if not (job.isdecimal() and step.isdecimal()):
        raise DistributionError(
            f"SLURM_JOB_ID {job[:40]!r}, SLURM_STEP_ID {step[:40]!r}: expected whole numbers"
        )
    return int(job), int(step)


def _slurm_port() -> int:
    """Returns the port of a node's first task.

    Jobs that share a node often have neighbouring numbers; they get different ports, as do the
    first steps of a job.
    """
    job, step = _slurm_step()
    return SLURM_PORTS[(job + 100 * step) % len(SLURM_PORTS)]


def slurm_config() -> dict:
    """Returns what TF_CONFIG would be for the tasks of this process's `srun`.

    TensorFlow's `SlurmClusterResolver` sorts the nodes as texts, which is another order than that
    of the tasks from 10 nodes on, and asks for as many GPUs as tasks, whatever a node has.

    Raises:
        DistributionError: variables are missing or make no sense, or the tasks are not numbered
            node by node.
    """
    own, count = int(os.environ["SLURM_PROCID"]), slurm_tasks()
    nodes = _slurm_nodes(_slurm_variable("SLURM_STEP_NODELIST", "SLURM_NODELIST"))
    tasks = []
    for text in _slurm_variable("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", text.strip())
        if match is None:
            raise DistributionError(f"SLURM_STEP_TASKS_PER_NODE: expected 2(x3),1; found {text!r}")
        tasks += [int(match[1])] * int(match[2] or 1)
    if len(tasks) != len(nodes) or sum(tasks) != count:
        raise DistributionError(
            f"SLURM_STEP_NODELIST names {len(nodes)} nodes, SLURM_STEP_TASKS_PER_NODE {sum(tasks)} "
            f"tasks on {len(tasks)} nodes, and SLURM_STEP_NUM_TASKS is {count}: they contradict "
            "each other"
        )
    places = [(node, local) for node, there in enumerate(tasks) for local in range(there)]
    found = os.environ.get("SLURM_NODEID", ""), os.environ.get("SLURM_LOCALID", "")
    if all(found) and found != tuple(map(str, places[own])):
        raise DistributionError(
            f"SLURM: task {own} is number {found[1]} of node {found[0]}, expected number "
            f"{places[own][1]} of node {places[own][0]}; start the tasks node by node: "
            "srun --distribution=block"
        )
    port = _slurm_port()
    workers = [f"{nodes[node]}:{port + local}" for node, local in places]
    return {"cluster": {"worker": workers}, "task": {"type": "worker", "index": own}}


def _slurm_variable(*names: str) -> str:
    found = next(filter(None, map(os.environ.get, names)), None)
    if found is None:
        raise DistributionError(f"{names[0]} is missing; start the tasks with srun")
    return found


def _slurm_nodes(text: str) -> list[str]:
    """Returns the nodes of SLURM's list, `node[01-03,7],gpu1`, in its order."""
    nodes: list[str] = []
    if text.count("[") != text.count("]"):
        raise DistributionError(f"SLURM_STEP_NODELIST: cannot read {text[:200]!r}")
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            ends = [plain] if plain else []
            for each in filter(None, ranges.split(",")):
                first, _, last = each.partition("-")
                if not (first + last).isdecimal():
                    raise DistributionError(f"SLURM_STEP_NODELIST: cannot read {text[:200]!r}")
                numbers = range(int(first), int(last or first) + 1)
                ends += [str(number).zfill(len(first)) for number in numbers]
            names = [name + end for name in names for end in ends]
        nodes += names
    if len(set(nodes)) < len(nodes):
        raise DistributionError(f"SLURM_STEP_NODELIST: names a node twice, {text[:200]!r}")
    return nodes
