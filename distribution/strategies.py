"""Which strategy a run takes, its devices, and what does not go together."""

import functools
import json
import os
from collections.abc import Mapping

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

from distribution import keras_compat
from distribution.errors import DistributionError

NAMES = ("auto", "none", "mirrored", "central_storage", "multi_worker", "parameter_server")


def cluster_spec(environ: Mapping[str, str] | None = None) -> dict:
    """What TF_CONFIG says, {"cluster": {...}, "task": {...}}; empty where there is no cluster.

    Raises:
        DistributionError: TF_CONFIG is no JSON object, or lacks the task.
    """
    text = (os.environ if environ is None else environ).get("TF_CONFIG", "")
    if not text.strip():
        return {}
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError("not an object")
        if config.get("cluster"):
            config["task"]["type"], int(config["task"]["index"])
            config["cluster"][config["task"]["type"]][int(config["task"]["index"])]
    except (ValueError, KeyError, IndexError, TypeError) as fault:
        raise DistributionError(
            "TF_CONFIG must be JSON with a cluster and this process's own task "
            f"(type and index within the cluster); found {text[:200]!r} ({fault!r})"
        ) from fault
    return config if config.get("cluster") else {}


def workers_in(config: dict) -> int:
    """Processes that train: the chief and the workers of a cluster; 1 without a cluster."""
    cluster = config.get("cluster", {})
    return max(1, len(cluster.get("chief", [])) + len(cluster.get("worker", [])))


def resolve(name: str, replicas: int | None, environ: Mapping[str, str] | None = None) -> str:
    """The strategy that `auto` stands for here; any other name is returned as it is.

    Args:
        name: one of `NAMES`.
        replicas: logical devices per worker that were asked for, or None.
        environ: where TF_CONFIG and SLURM's variables are looked for; the process's own by default.
    """
    if name != "auto":
        return name
    environ = os.environ if environ is None else environ
    config = cluster_spec(environ)
    if config.get("cluster", {}).get("ps"):
        return "parameter_server"
    if workers_in(config) > 1 or slurm_tasks(environ) > 1:
        return "multi_worker"
    if replicas is None:
        devices = len(tf.config.list_physical_devices("GPU"))
    else:
        devices = replicas
    return "mirrored" if devices > 1 else "none"


def slurm_tasks(environ: Mapping[str, str]) -> int:
    """How many tasks `srun` started; 1 where this process is none of SLURM's."""
    if "SLURM_PROCID" not in environ:
        return 1
    return int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1")))


def faults(name: str, replicas: int | None, environ: Mapping[str, str] | None = None) -> list[str]:
    """What does not go together about strategy, replicas and cluster, a line each."""
    found = []
    config = cluster_spec(environ)
    workers = workers_in(config)
    parameter_servers = len(config.get("cluster", {}).get("ps", []))
    if name == "none" and (replicas or 1) > 1:
        found.append(f"--strategy none runs on one device; --replicas {replicas} needs mirrored")
    if name == "parameter_server" and replicas is not None:
        found.append(
            "--replicas does not go with parameter servers: each of their workers trains on one "
            "device; start more workers instead"
        )
    if name == "parameter_server" and not parameter_servers:
        found.append(
            "--strategy parameter_server needs a cluster with parameter servers in TF_CONFIG: "
            "start it with python -m distribution.launch --ps 1 --nproc-per-node 2 -m ..."
        )
    if name in ("none", "mirrored", "central_storage") and workers > 1:
        found.append(
            f"TF_CONFIG names {workers} workers and --strategy {name} runs in one process alone: "
            "use auto or multi_worker"
        )
    if name == "multi_worker" and parameter_servers:
        found.append("TF_CONFIG names parameter servers: use --strategy parameter_server or auto")
    return found


def make_logical_devices(replicas: int | None) -> list[str]:
    """Splits one GPU by memory, otherwise the CPU, into logical devices.

    Must run before TensorFlow has touched its devices.

    Args:
        replicas: how many logical devices this process shall have; None leaves the devices alone
            (all physical GPUs, or the CPU).

    Returns:
        The names of the devices that the replicas of this process run on.

    Raises:
        DistributionError: the devices cannot be split into so many, or TensorFlow already runs.
    """
    gpus = tf.config.list_physical_devices("GPU")
    kind = "GPU" if gpus else "CPU"
    if replicas is None or (gpus and replicas <= len(gpus)):
        if gpus and replicas:
            tf.config.set_visible_devices(gpus[:replicas], "GPU")
        # The memory of a GPU is taken as it is needed, so that two processes can share it.
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        count = replicas or max(1, len(gpus))
        return [f"{kind}:{index}" for index in range(count)]
    try:
        if len(gpus) > 1:
            raise DistributionError(
                f"--replicas {replicas} is more than the {len(gpus)} GPUs here; only one GPU alone "
                "is split into logical ones (CUDA_VISIBLE_DEVICES=0 picks the first)"
            )
        if gpus:
            # Some 10 % stay for the CUDA context and cuDNN's workspace.
            total = tf.config.experimental.get_device_details(gpus[0]).get("memory_limit")
            memory = int((total or _gpu_memory_mib()) * 0.9 / replicas)
            parts = [tf.config.LogicalDeviceConfiguration(memory_limit=memory)] * replicas
            tf.config.set_logical_device_configuration(gpus[0], parts)
        else:
            cpu = tf.config.list_physical_devices("CPU")[0]
            wanted = [tf.config.LogicalDeviceConfiguration()] * replicas
            present = tf.config.get_logical_device_configuration(cpu)
            if present is None or len(present) != replicas:
                tf.config.set_logical_device_configuration(cpu, wanted)
    except RuntimeError as fault:
        raise DistributionError(
            f"--replicas {replicas} must be set before TensorFlow touches its devices: start a new "
            "process (in a notebook: restart the runtime)"
        ) from fault
    return [f"{kind}:{index}" for index in range(replicas)]


def _gpu_memory_mib() -> int:
    import subprocess

    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as fault:
        raise DistributionError(
            f"the memory of the GPU is not known (nvidia-smi: {fault}), so it cannot be split"
        ) from fault


@functools.cache
def make_strategy(name: str, replicas: int | None = None) -> tf.distribute.Strategy:
    """Builds the strategy and fits Keras to it; asked again, it gives the same one.

    Args:
        name: one of `NAMES`; `auto` is resolved.
        replicas: logical devices per worker, or None for the devices that are there.

    Returns:
        A strategy; its `num_replicas_in_sync` counts the replicas in all workers. `none` is
        TensorFlow's default strategy, whose `scope()` does nothing.

    Raises:
        DistributionError: strategy, replicas and cluster do not go together.
    """
    name = resolve(name, replicas)
    found = faults(name, replicas)
    if found:
        raise DistributionError("; ".join(found))
    devices = make_logical_devices(replicas)
    if name == "none":
        strategy = tf.distribute.get_strategy()
    elif name == "mirrored":
        strategy = tf.distribute.MirroredStrategy(devices)
    elif name == "central_storage":
        strategy = tf.distribute.experimental.CentralStorageStrategy(
            compute_devices=devices, parameter_device="CPU:0"
        )
    elif name == "multi_worker":
        strategy = _multi_worker(len(devices))
    else:
        from distribution import parameter_server

        strategy = parameter_server.make_strategy(cluster_spec())
    keras_compat.fit_keras_to(strategy)
    return strategy


def _multi_worker(devices: int) -> tf.distribute.Strategy:
    # TensorFlow takes all logical GPUs of a worker, but one CPU only, also where there are more.
    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    stock = extended._initialize_local_devices

    def local_devices(self, cluster_resolver, worker_device):
        found, kind = stock(self, cluster_resolver, worker_device)
        if kind == "CPU":
            found = tuple(f"{worker_device}/device:CPU:{index}" for index in range(devices))
        return found, kind

    extended._initialize_local_devices = local_devices
    resolver = None
    if not cluster_spec() and slurm_tasks(os.environ) > 1:
        # On nodes without GPUs the resolver would call nvidia-smi, or find 0 GPUs and fail; the
        # devices of a worker are TensorFlow's to find, so one GPU a task is named and not set.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            gpus_per_node=1, gpus_per_task=1, auto_set_gpu=False
        )
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)


def workers(strategy: tf.distribute.Strategy) -> int:
    """Processes that train together; with parameter servers, those that compute gradients."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return len(cluster_spec()["cluster"].get("worker", []))
    return max(1, sum(len(tasks) for tasks in _cluster(strategy).values()))


def _cluster(strategy: tf.distribute.Strategy) -> dict:
    resolver = strategy.cluster_resolver
    return resolver.cluster_spec().as_dict() if resolver is not None else {}


def replicas(strategy: tf.distribute.Strategy) -> int:
    """Replicas in all workers; with parameter servers each worker is one."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return workers(strategy)
    return strategy.num_replicas_in_sync


def name_of(strategy: tf.distribute.Strategy) -> str:
    """The name, one of `NAMES`, of a strategy."""
    for kind, name in (
        (tf.distribute.MultiWorkerMirroredStrategy, "multi_worker"),
        (tf.distribute.MirroredStrategy, "mirrored"),
        (tf.distribute.experimental.CentralStorageStrategy, "central_storage"),
        (tf.distribute.ParameterServerStrategy, "parameter_server"),
    ):
        if isinstance(strategy, kind):
            return name
    return "none"


def serves_others(strategy: tf.distribute.Strategy | None) -> bool:
    """Whether this process only served a coordinator elsewhere, and is done."""
    return strategy is None


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process writes what is shared."""
    return worker_index(strategy) == 0


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """This process's rank among those that train together; the chief's is 0."""
    cluster = _cluster(strategy)
    if not cluster or isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return 0
    resolver = strategy.cluster_resolver
    if resolver.task_type == "chief":
        return 0
    return len(cluster.get("chief", [])) + int(resolver.task_id or 0)


def all_reduce_in_use(strategy: tf.distribute.Strategy) -> str:
    """Which all-reduce adds up the gradients, and why; one line for the plan."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        gpus = tf.config.list_logical_devices("GPU")
        if gpus and len(gpus) == len(tf.config.list_physical_devices("GPU")):
            return "NCCL or RING, TensorFlow's choice, over gRPC (GPUs)"
        return "RING over gRPC (NCCL needs whole GPUs)"
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return "none (parameter servers apply each worker's gradient)"
    if strategy.num_replicas_in_sync == 1:
        return "none (one replica)"
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        chosen = type(strategy.extended._cross_device_ops).__name__  # no public name for it
        if len(tf.config.list_physical_devices("GPU")) != len(
            tf.config.list_logical_devices("GPU")
        ):
            return f"{chosen} (a split GPU: NCCL refuses two ranks on one GPU)"
        if not tf.config.list_logical_devices("GPU"):
            return f"{chosen} (CPU devices: no NCCL)"
        return chosen
    return "ReductionToOneDevice (the CPU holds the variables)"
