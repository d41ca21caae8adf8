"""Counts the cores of this process; may be asked before TensorFlow is imported."""

import contextlib
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def cores() -> int:
    """Returns the number of cores that this process may use; exact only on Linux.

    TensorFlow starts a thread for each of them, also where a container's `cpu_quota()` is smaller.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def format_cores(name: str = "core") -> str:
    """Returns their number with their name, for instance "2 cores"."""
    count = cores()
    return f"{count} {name}{'s' if count > 1 else ''}"


def cpu_quota() -> float | None:
    """Returns how many cores' time the container may use; None where it is not limited.

    Reads what Linux's control groups, of version 2 or 1, show as the container's own.
    """
    old = CGROUPS / "cpu"
    for paths in ([CGROUPS / "cpu.max"], [old / "cpu.cfs_quota_us", old / "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # not that version, or no limit: "max"
            quota, period = (int(word) for path in paths for word in path.read_text().split())
            if quota > 0 and period > 0:  # -1: no limit
                return quota / period
    return None
