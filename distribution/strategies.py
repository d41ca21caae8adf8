"""Chooses and builds the strategy: devices, cluster, and what all workers must agree on."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Sequence

import tensorflow as tf

from distribution.cluster import (
    INTER_OP_THREADS,
    PLANNED_WORKERS,
    cluster_spec,
    count_workers,
    slurm_config,
    slurm_tasks,
)
from distribution.errors import DistributionError
from distribution.keras_compat import patches
from distribution.kinds import name_of

# How many operations a process runs at a time, if the user has not said so. More than one end in an
# order that depends on what else the machine does, and TensorFlow's AddN, which sums the gradients
# of a tensor that is used several times, begins with an input that no other operation needs any
# more: the last bit of a sum of three depends on that order. (XLA's programs have none of this.)
OPERATIONS_AT_ONCE = "1"
NVIDIA_SMI_SECONDS = 10
# Of a number that counts the workers with a flag, of which a sum has several.
COUNT_BITS = 20

# The strategies of this process by name, and their number of devices.
_made: dict[str, tf.distribute.Strategy] = {}
_device_count: int | None = None

TOO_LATE = (
    "--replicas came too late: TensorFlow already runs with another number of devices in this "
    "process and cannot change that; restart the kernel (or the process)"
)


def resolve(name: str, replicas: int | None) -> str:
    """Resolves `auto` to a strategy's name; returns any other name unchanged.

    Args:
        name: a `cluster.Strategy`.
        replicas: logical devices per worker, or None for the existing devices.
    """
    if name != "auto":
        return name
    if "ps" in cluster_spec():
        return "parameter_server"
    if count_workers() > 1 or slurm_tasks() > 1:
        return "multi_worker"
    return "mirrored" if _count_devices(replicas) > 1 else "none"


def _count_devices(replicas: int | None) -> int:
    return replicas or max(1, len(tf.config.list_physical_devices("GPU")))


def problems(name: str, replicas: int | None) -> list[str]:
    """Lists conflicts between strategy, replicas and cluster, one per line."""
    messages = []
    workers, has_servers = count_workers(), "ps" in cluster_spec()
    if name == "none" and (replicas or 1) > 1:
        messages.append(f"--strategy none runs on one device; --replicas {replicas} needs mirrored")
    if name == "parameter_server" and replicas is not None:
        messages.append(
            "--replicas is incompatible with parameter servers: each of their workers trains on "
            "one device; start more workers instead"
        )
    if name == "parameter_server" and not has_servers:
        messages.append(
            "--strategy parameter_server needs a cluster with parameter servers in TF_CONFIG: "
            "start it with python -m launch --ps 1 --nproc-per-node 2 -m ..."
        )
    if name in ("none", "mirrored", "central_storage") and workers > 1:
        messages.append(
            f"TF_CONFIG names {workers} workers and --strategy {name} runs in one process: "
            "use auto or multi_worker"
        )
    if name == "multi_worker" and has_servers:
        messages.append(
            "TF_CONFIG names parameter servers: use --strategy parameter_server or auto"
        )
    return messages


def make_strategy(name: str, replicas: int | None = None) -> tf.distribute.Strategy:
    """Builds the strategy; a second call in the same process returns the same one.

    TensorFlow can neither split its devices again nor train on another number of them in the same
    process. So all strategies of a process have as many devices as the first one; only
    `none`, which uses the first device, is possible at any time.

    Args:
        name: a `cluster.Strategy` without `problems()`; `auto` is resolved.
        replicas: logical devices per worker, or None for the existing devices.

    Returns:
        A strategy; its `num_replicas_in_sync` counts the replicas in all workers. `none` is
        TensorFlow's default strategy, whose `scope()` does nothing.

    Raises:
        DistributionError: TensorFlow already runs with another number of devices.
        OSError: the port of this worker is in use.
    """
    global _device_count
    name = resolve(name, replicas)
    # A GPU has the operations in a queue, and a pipeline beside it needs threads.
    if name != "parameter_server" and not tf.config.list_physical_devices("GPU"):
        # Read when TensorFlow starts its threads.
        os.environ.setdefault(INTER_OP_THREADS, OPERATIONS_AT_ONCE)
    if name == "none":
        make_logical_devices(None)
        return tf.distribute.get_strategy()
    count = _count_devices(replicas)
    if _device_count not in (None, count):
        raise DistributionError(TOO_LATE)
    if name not in _made:
        _made[name] = _construct(name, make_logical_devices(replicas))
        _device_count = count
    return _made[name]


def _construct(name: str, devices: list[str]) -> tf.distribute.Strategy:
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    if name == "central_storage":
        return tf.distribute.experimental.CentralStorageStrategy(
            compute_devices=devices, parameter_device="CPU:0"
        )
    if name == "parameter_server":
        from distribution import parameter_server

        return parameter_server.make_strategy()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if not cluster_spec() and slurm_tasks() > 1:
        config, gpus = slurm_config(), tf.config.list_physical_devices("GPU")
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(config["cluster"]),
            task_type=config["task"]["type"],
            task_id=config["task"]["index"],
            rpc_layer="grpc",
            num_accelerators={"GPU": len(devices)} if gpus else {},
        )
    with patches.several_cpus_per_worker(len(devices)):
        try:
            return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
        except RuntimeError as error:
            raise DistributionError(
                "--strategy multi_worker came too late: TensorFlow already runs in this process;"
                " restart the kernel (or the process)"
            ) from error
        except tf.errors.UnknownError as error:  # "Could not start gRPC server"
            # Not a `DistributionError`, which is final: with --max-restarts another port is tried.
            address = resolver.cluster_spec().task_address(resolver.task_type, resolver.task_id)
            reason = f"this worker cannot listen at {address}; is its port in use?"
            raise OSError(errno.EADDRINUSE, reason) from error


# --- Devices ---


def make_logical_devices(replicas: int | None) -> list[str]:
    """Splits one GPU by memory, otherwise the CPU, into logical devices.

    Call it before TensorFlow's first op; later only the same number of devices is possible.

    Args:
        replicas: logical devices of this process; None leaves the devices alone (all physical
            GPUs, or the CPU).

    Returns:
        The names of the devices that the replicas of this process run on.

    Raises:
        DistributionError: the devices cannot be split into this number, or TensorFlow already
            runs with another one.
    """
    gpus = tf.config.list_physical_devices("GPU")
    kind = "GPU" if gpus else "CPU"
    count = _count_devices(replicas)
    if len(gpus) > 1 and count > len(gpus):
        raise DistributionError(
            f"--replicas {replicas} is more than the {len(gpus)} GPUs here; only one GPU alone "
            "is split into logical ones (CUDA_VISIBLE_DEVICES=0 picks the first)"
        )
    try:
        if count > max(1, len(gpus)) or (replicas and not gpus):
            _split(kind, count)
        elif gpus:
            if replicas:
                tf.config.set_visible_devices(gpus[:count], "GPU")
            for gpu in gpus[:count]:
                # Allocates memory as needed, so that two processes can share a GPU. The error, if
                # TensorFlow runs already or the GPU is split, does no harm.
                with contextlib.suppress(RuntimeError, ValueError):
                    tf.config.experimental.set_memory_growth(gpu, True)
    except (RuntimeError, ValueError) as error:
        raise DistributionError(TOO_LATE) from error
    return [f"{kind}:{index}" for index in range(count)]


def _split(kind: str, count: int) -> None:
    """Splits the only GPU, or the CPU, unless it is already split into that number."""
    device = tf.config.list_physical_devices(kind)[0]
    present = tf.config.get_logical_device_configuration(device)
    if len(present or [device]) == count:
        return
    part = tf.config.LogicalDeviceConfiguration()
    if kind == "GPU":
        # About 10 % remain for the CUDA context and cuDNN's workspace.
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        try:
            # The first of those that this process sees, by number or UUID.
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
            command = [*query, f"--id={first}"]
            listed = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_SECONDS
            )
            mebibytes = int(listed.stdout)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise DistributionError(
                f"--replicas {count}: nvidia-smi must report the GPU's memory in order to split it:"
                f" {error}"
            ) from error
        part = tf.config.LogicalDeviceConfiguration(memory_limit=int(mebibytes * 0.9 / count))
    tf.config.set_logical_device_configuration(device, [part] * count)


# --- Properties of a strategy ---


def gpu_without_strategy(strategy: tf.distribute.Strategy) -> str | None:
    """Returns the name of the GPU that computes the steps where no strategy does, else None."""
    if name_of(strategy) == "none" and tf.config.list_logical_devices("GPU"):
        return "GPU:0"
    return None


def workers(strategy: tf.distribute.Strategy) -> int:
    """Counts the training processes; with parameter servers only the workers."""
    if name_of(strategy) == "parameter_server":
        return len(cluster_spec()["worker"])
    return max(1, sum(len(tasks) for tasks in _cluster_of(strategy).values()))


def _cluster_of(strategy: tf.distribute.Strategy) -> dict:
    resolver = strategy.cluster_resolver
    return resolver.cluster_spec().as_dict() if resolver is not None else {}


def replicas(strategy: tf.distribute.Strategy) -> int:
    """Counts the replicas of all workers; with parameter servers one per worker."""
    if name_of(strategy) == "parameter_server":
        return workers(strategy)
    return strategy.num_replicas_in_sync


def planned_replicas(strategy: tf.distribute.Strategy) -> int:
    """Counts the planned replicas of a run, including workers that are absent for now.

    An environment variable of the launcher gives the planned number of workers. Global batch and
    learning rate follow it.
    """
    present = workers(strategy)
    planned = int(os.environ.get(PLANNED_WORKERS) or 0)
    return replicas(strategy) // present * max(present, planned)


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Tells whether this process writes shared files."""
    return worker_index(strategy) == 0


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """Returns this process's rank among the training processes; the chief's is 0."""
    cluster, resolver = _cluster_of(strategy), strategy.cluster_resolver
    if not cluster or resolver.task_type == "chief":
        return 0
    return len(cluster.get("chief", [])) + int(resolver.task_id or 0)


# --- Agreement between workers ---


class Agreement:
    """Small integers agreed on by all workers; every worker must call at the same point.

    With one worker nothing is sent.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self.strategy = strategy
        self.workers = workers(strategy) if name_of(strategy) == "multi_worker" else 1
        number = tf.TensorSpec((), tf.int64)
        self._add_up = tf.function(self._sum, input_signature=[number])

    def _sum(self, number):
        per_replica = self.strategy.run(lambda: tf.identity(number))
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

    def total(self, value: int) -> int:
        """Sums a value over all workers.

        Raises:
            DistributionError: the workers have different numbers of devices.
        """
        if self.workers == 1:
            return value
        devices = self.strategy.extended.worker_devices
        try:
            total = self._add_up(tf.constant(value, tf.int64)).numpy()
        except tf.errors.InternalError as error:
            if "joining a group with" not in str(error):
                raise
            raise DistributionError(
                f"the workers have different devices (this one: {len(devices)}); pass the same "
                "--replicas to all of them, or give each the same number of GPUs"
            ) from error
        return int(total) // len(devices)

    def on_any_worker(self, *flags: bool) -> list[bool]:
        """Tells of each flag whether it is set on at least one worker; all by one sum."""
        total = self.total(sum(int(flag) << COUNT_BITS * n for n, flag in enumerate(flags)))
        return [(total >> COUNT_BITS * n) % 2**COUNT_BITS > 0 for n in range(len(flags))]

    def any_worker(self, flag: bool) -> bool:
        """Tells whether the flag is set on at least one worker."""
        return self.on_any_worker(flag)[0]

    def broadcast_from_chief(self, value: int) -> int:
        """Returns the chief's value, on every worker."""
        return self.total(value if self.workers == 1 or is_chief(self.strategy) else 0)

    def everyone_has(self, value: int) -> bool:
        """Tells whether all workers have the same value."""
        return not self.any_worker(value != self.broadcast_from_chief(value))

    def everyone_is_near(self, values: Sequence[int], tolerance: int) -> bool:
        """Tells whether each of a worker's values differs from the chief's by no more than this."""
        near = [abs(value - self.broadcast_from_chief(value)) <= tolerance for value in values]
        return not self.any_worker(not all(near))

    def barrier(self) -> None:
        """Waits until every worker has called it."""
        self.total(0)
