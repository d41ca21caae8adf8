"""The devices of this process: all GPUs, a GPU split by memory, or the CPU split into parts."""

import contextlib
import subprocess

import tensorflow as tf

from distribution.errors import DistributionError


def make_logical_devices(replicas: int | None) -> list[str]:
    """Splits one GPU by memory, otherwise the CPU, into logical devices.

    Comes before TensorFlow's first op; later the same number of devices is still fine.

    Args:
        replicas: how many logical devices this process shall have; None leaves the devices alone
            (all physical GPUs, or the CPU).

    Returns:
        The names of the devices that the replicas of this process run on.

    Raises:
        DistributionError: the devices cannot be split into so many, or TensorFlow already runs
            with another number.
    """
    gpus = tf.config.list_physical_devices("GPU")
    kind = "GPU" if gpus else "CPU"
    count = replicas or max(1, len(gpus))
    if replicas and len(gpus) > 1 and replicas > len(gpus):
        raise DistributionError(
            f"--replicas {replicas} is more than the {len(gpus)} GPUs here; only one GPU alone "
            "is split into logical ones (CUDA_VISIBLE_DEVICES=0 picks the first)"
        )
    try:
        if count > max(1, len(gpus)) or (replicas and not gpus):
            _split(kind, count)
        else:
            if gpus and replicas:
                tf.config.set_visible_devices(gpus[:replicas], "GPU")
            _share_memory(gpus)
    except (RuntimeError, ValueError) as error:
        running = len(tf.config.list_logical_devices(kind))
        raise DistributionError(
            f"{asked_for(replicas)}: make_logical_devices({replicas}) came too late; "
            + already_runs(running, kind)
        ) from error
    return [f"{kind}:{index}" for index in range(count)]


def asked_for(replicas: int | None) -> str:
    """The option as a person gave it, for messages."""
    return f"--replicas {replicas}" if replicas else "no --replicas"


def already_runs(count: int, kind: str = "device") -> str:
    """Why the number of devices cannot change, and what to do."""
    return (
        f"TensorFlow already runs with {count} {kind}{'s' if count > 1 else ''} in this process, "
        "and cannot change that: restart the kernel (or the process)"
    )


def _share_memory(gpus: list) -> None:
    """Lets the memory of GPUs be taken as it is needed, so that two processes can share them."""
    for gpu in gpus:
        # Too late, or the GPU is split: it works all the same.
        with contextlib.suppress(RuntimeError, ValueError):
            tf.config.experimental.set_memory_growth(gpu, True)


def _split(kind: str, count: int) -> None:
    """Splits the only GPU, or the CPU, unless it is split into as many already."""
    device = tf.config.list_physical_devices(kind)[0]
    present = tf.config.get_logical_device_configuration(device)
    if len(present or [device]) == count:
        return
    part = tf.config.LogicalDeviceConfiguration()
    if kind == "GPU":
        # Some 10 % stay for the CUDA context and cuDNN's workspace.
        total = tf.config.experimental.get_device_details(device).get("memory_limit")
        memory = int((total or _gpu_memory_mib()) * 0.9 / count)
        part = tf.config.LogicalDeviceConfiguration(memory_limit=memory)
    tf.config.set_logical_device_configuration(device, [part] * count)


def _gpu_memory_mib() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise DistributionError(
            f"the memory of the GPU is not known (nvidia-smi: {error}), so it cannot be split"
        ) from error
