"""Names the device of a run, and reports an unused GPU."""

import collections
import contextlib
import glob
import os
import platform
import subprocess

import tensorflow as tf

from machine.cores import format_cores

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
NVIDIA_SMI_SECONDS = 10


def describe() -> str:
    """Returns the GPUs with their memory, otherwise the processor with its cores.

    For instance "2 x NVIDIA H100 80GB HBM3 (79.6 GiB)", or "AMD EPYC, 2 cores".
    """
    counts = collections.Counter(name for name, _ in gpu_models())
    if not counts:
        return f"{_processor()}, {format_cores()}"
    memory = _gpu_memory()
    models = []
    for name, count in counts.items():
        several = f"{count} x " if count > 1 else ""
        models.append(several + name + (f" ({memory[name]})" if name in memory else ""))
    return ", ".join(models)


def gpu_models() -> list[tuple[str, str]]:
    """Returns the name and compute capability (for instance "9.0") of each GPU of this process."""
    models = []
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability", ())))
        models.append((details.get("device_name", "GPU"), capability))
    return models


def unused_gpu() -> str | None:
    """Returns one line if the machine has a GPU that TensorFlow cannot use, else None."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    device_files = glob.glob("/dev/nvidia[0-9]*")
    if hidden or not device_files or tf.config.list_physical_devices("GPU"):
        return None
    return (
        f"{len(device_files)} GPU(s) are there, but TensorFlow cannot use them: its CUDA "
        "libraries are missing or do not fit the driver (pip install 'tensorflow[and-cuda]=="
        f"{tf.__version__}'); the CPU is used instead"
    )


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu_memory() -> dict[str, str]:
    """Returns the memory of each model; empty if the driver's tool fails."""
    try:
        ended = subprocess.run(
            NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    memory = {}
    for line in ended.stdout.splitlines():
        name, _, mebibytes = line.rpartition(",")
        with contextlib.suppress(ValueError):
            memory[name.strip()] = f"{float(mebibytes) / 1024:.1f} GiB"
    return memory
