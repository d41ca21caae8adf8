"""Names the strategies, and reads the cluster from TF_CONFIG and SLURM. Plain Python."""

import json
import os
from typing import Literal

from distribution.errors import DistributionError

Strategy = Literal[
    "auto", "none", "mirrored", "central_storage", "multi_worker", "parameter_server"
]
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
            all(address.rpartition(":")[2].isdecimal() for address in addresses)
            and len(set(addresses)) == len(addresses)
            and cluster.keys() <= {"chief", "worker", "ps"}
            and int(config["task"]["index"]) in own
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise DistributionError(
            "TF_CONFIG: expected a cluster of workers, parameter servers (ps) and one chief, with"
            f" different addresses and a task of it, {EXPECTED}; found {text[:500]!r}"
        )
    return cluster


def count_workers() -> int:
    """Counts the training processes in TF_CONFIG, chief and workers; 1 without a cluster."""
    cluster = cluster_spec()
    return max(1, len(cluster.get("chief", [])) + len(cluster.get("worker", [])))


def slurm_tasks() -> int:
    """Counts the tasks that `srun` started; 1 if this process is not one of them."""
    if not os.environ.get("SLURM_PROCID"):
        return 1
    return int(os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or 1)
