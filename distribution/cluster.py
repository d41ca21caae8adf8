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
EXPECTED = '{"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}'


def cluster_spec() -> dict[str, list[str]]:
    """Returns the cluster of TF_CONFIG: lists of HOST:PORT by task type; empty without one.

    Raises:
        DistributionError: TF_CONFIG is not a cluster that contains this process's task.
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
