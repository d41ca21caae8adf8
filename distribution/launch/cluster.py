"""Who is in the cluster, and what each process gets of a machine: ports, GPUs, cores."""

import os
import pathlib
import re
import shutil
import subprocess

from distribution.launch.plan import LaunchPlan
from distribution.launch.ports import count_ports, find_free_ports

CPUS = pathlib.Path("/sys/devices/system/cpu")


def build_cluster(plan: LaunchPlan) -> dict[str, list[str]]:
    """Names every task of the cluster, on all hosts.

    Args:
        plan: What was asked for.

    Returns:
        The cluster as `TF_CONFIG` has it: a list of HOST:PORT per task type.
    """
    workers, servers = plan.workers_per_host, plan.parameter_servers
    needed = count_ports(workers, servers)
    if plan.base_port is None:
        ports = find_free_ports(needed)
    else:
        ports = list(range(plan.base_port, plan.base_port + needed))
    cluster = {"worker": [f"{host}:{port}" for host in plan.hosts for port in ports[:workers]]}
    if servers:
        cluster["chief"] = [f"{plan.hosts[0]}:{ports[workers]}"]
        cluster["ps"] = [f"{plan.hosts[0]}:{port}" for port in ports[workers + 1 :]]
    return cluster


def visible_gpus() -> list[str]:
    """Names of the GPUs that TensorFlow would see, as CUDA_VISIBLE_DEVICES writes them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = [name.strip() for name in listed.split(",")]
        hidden = [i for i, name in enumerate(names) if name in ("", "-1")]
        return names[: hidden[0]] if hidden else names  # CUDA stops at the first invalid one
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU (\d+):", listing, flags=re.MULTILINE)


def assign_gpus(plan: LaunchPlan, task: str, index: int) -> str | None:
    """The CUDA_VISIBLE_DEVICES of a task; None leaves the environment as it is.

    All workers get equally many (collectives need that), so some may be left over. Parameter
    servers and the coordinator get none: TensorFlow would claim the memory of every GPU it sees.
    """
    if task != "worker":
        return "-1"
    if not plan.gpus:
        return None
    return ",".join(_share(plan.gpus, plan.workers_per_host, index))


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use; hardware threads of a core stand together.

    Empty where the system does not let a process choose its cores (only Linux does).
    """
    if not hasattr(os, "sched_setaffinity"):
        return []
    return sorted(os.sched_getaffinity(0), key=lambda core: (*_place_of(core), core))


def assign_cores(plan: LaunchPlan, task: str, index: int) -> list[int] | None:
    """The cores of a task; None leaves it on all of them.

    All workers get equally many: they train in step, so one with more would wait for the others.
    """
    if task != "worker" or not plan.cores:
        return None
    return _share(plan.cores, plan.workers_per_host, index)


def _share(things: list, workers: int, index: int) -> list:
    each = len(things) // workers
    first = index % workers * each
    return things[first : first + each]


def _place_of(core: int) -> tuple[int, int]:
    """Package and physical core of a core's number: two hardware threads of one share both."""
    try:
        names = ("physical_package_id", "core_id")
        package, physical = (int((CPUS / f"cpu{core}/topology" / n).read_text()) for n in names)
    except (OSError, ValueError):
        return 0, 0
    return package, physical
