"""Names the strategies, and reads from TF_CONFIG and SLURM who trains together. Plain Python."""

import json
import os
import re
from collections.abc import Mapping
from typing import Literal

from distribution.errors import DistributionError

Strategy = Literal[
    "auto", "none", "mirrored", "central_storage", "multi_worker", "parameter_server"
]
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s\[\]:/,]+):[0-9]{1,5}", re.ASCII)
EXPECTED = '{"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}'


def cluster_spec(environ: Mapping[str, str] | None = None) -> dict:
    """Returns what TF_CONFIG says; empty where there is no cluster.

    Args:
        environ: the process's own environment by default.

    Returns:
        `cluster` has a list of HOST:PORT per task type, `task` this process's `type` and `index`.

    Raises:
        DistributionError: TF_CONFIG is no cluster with this process's own task in it.
    """
    text = (os.environ if environ is None else environ).get("TF_CONFIG", "")
    if not text.strip():
        return {}
    try:
        config = json.loads(text)
        cluster = config.get("cluster")
        if not cluster:
            return {}
        task = {"type": config["task"]["type"], "index": int(config["task"]["index"])}
        problem = _find_problem(cluster, **task)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        problem = "not a cluster with a task, in JSON"
    if problem:
        raise DistributionError(f"TF_CONFIG: {problem}; expected {EXPECTED}, found {text[:200]!r}")
    return {"cluster": cluster, "task": task}


def _find_problem(cluster: dict, type: str, index: int) -> str | None:
    addresses = [address for tasks in cluster.values() for address in tasks]
    for address in addresses:
        if not ADDRESS.fullmatch(address):
            return f"{address[:60]!r} is not HOST:PORT"
        if addresses.count(address) > 1:
            return f"{address} is there twice"
    if not cluster.keys() <= {"chief", "worker", "ps"} or len(cluster.get("chief", [])) > 1:
        return "task types are worker, ps and one chief"
    if not 0 <= index < len(cluster.get(type, [])):
        return f"the cluster has no {type[:60]} {index}"
    return None


def workers_in(config: dict) -> int:
    """Counts the processes that train, chief and workers; 1 without a cluster."""
    cluster = config.get("cluster", {})
    return max(1, len(cluster.get("chief", [])) + len(cluster.get("worker", [])))


def slurm_tasks(environ: Mapping[str, str]) -> int:
    """Counts the tasks that `srun` started; 1 where this process is none of them.

    Raises:
        DistributionError: SLURM's variable is no number.
    """
    if not environ.get("SLURM_PROCID"):
        return 1
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    if not tasks.isdecimal():
        raise DistributionError(f"SLURM_NTASKS: expected a whole number, found {tasks[:60]!r}")
    return int(tasks)
