"""Counts the cores of this process; imports nothing, so that it may be asked before TensorFlow."""

import os


def cores() -> int:
    """Returns the number of cores that this process may use; exact only on Linux."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def format_cores(name: str = "core") -> str:
    """Returns their number with their name, for instance "2 cores"."""
    count = cores()
    return f"{count} {name}{'s' if count > 1 else ''}"
