"""What this machine would do, and whether training on two workers equals training on one here.

    python -m distribution.doctor [--quick]

Reports devices, strategy, all-reduce and versions; then `fit()` trains a small model once on one
worker and once on two, in float64, and the weights are compared. Takes about a minute; `--quick`
leaves the training out. Exit status 0, or 1 if the two differ or did not end within two minutes.
"""

import argparse
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from distribution import cluster
from distribution.launch import usable_cores, visible_gpus
from distribution.version import version_line

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
PACKAGES = ("keras", "keras-nlp", "tensorflow", "tensorflow-text", "numpy")
PYTHONS = ((3, 11), (3, 13))  # oldest and newest that the package was made for
PROOF_SECONDS = 120
STEPS = 20
TOLERANCE = 1e-9


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m distribution.doctor",
        description="Devices, strategy, all-reduce and versions; proves that `fit` on 2 workers"
        " equals `fit` on one.",
    )
    parser.add_argument("--version", action="version", version=version_line())
    parser.add_argument("--quick", action="store_true", help="leave the proof out")
    # What the proof's own processes are told.
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    # Read when TensorFlow and Keras are imported, which is why the functions below import them.
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if options.train:
        train(options.train, options.run_dir)
        return 0
    say("versions", ", ".join(f"{name} {version}" for name, version in installed().items()))
    warn(version_problems(installed(), pinned(LOCK)))
    report_devices()
    return 0 if options.quick or prove() else 1


def say(subject: str, text: str) -> None:
    """Prints a line of the report."""
    print(f"{subject:<12}{text}", flush=True)


def warn(problems: list[str]) -> None:
    """Prints a line for each thing that is not as it should be."""
    for problem in problems:
        say("warning", problem)


# --- Versions ---


def installed() -> dict[str, str]:
    """Versions of Python and of what the results depend on; empty where a package is missing."""
    versions = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def pinned(lock: pathlib.Path) -> dict[str, str] | None:
    """Versions by package as `requirements.lock` has them; None without such a file."""
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    pairs = (line.split("#")[0].strip().partition("==") for line in lines)
    return {name.lower(): version for name, equals, version in pairs if equals}


def version_problems(found: dict[str, str], pins: dict[str, str] | None) -> list[str]:
    """How the installed versions differ from the tested ones, a line each."""
    problems = []
    oldest, newest = PYTHONS
    if not oldest <= tuple(int(part) for part in found["python"].split(".")[:2]) <= newest:
        problems.append(
            f"python {found['python']} runs, {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]} "
            "were meant"
        )
    if pins is None:
        return [*problems, f"{LOCK.name} was not found: versions are not compared"]
    for name in PACKAGES:
        if not found[name]:
            problems.append(f"{name} is not installed, {LOCK.name} has {pins.get(name, 'no pin')}")
        elif name in pins and found[name] != pins[name]:
            problems.append(f"{name} {found[name]} is installed, {pins[name]} was tested")
    return problems


# --- Devices, strategy, all-reduce ---


def report_devices() -> None:
    """Prints devices, the strategy of `--strategy auto` and its all-reduce."""
    import tensorflow as tf

    from distribution import strategies
    from distribution.errors import DistributionError

    # Before TensorFlow touches its devices: how much memory of a GPU it takes.
    strategies.make_logical_devices(None)
    several = local_multi_worker()
    kinds = {}
    for kind in ("GPU", "CPU"):
        physical = len(tf.config.list_physical_devices(kind))
        kinds[kind] = f"{physical} {kind} ({len(tf.config.list_logical_devices(kind))} logical)"
    say("devices", f"{kinds['GPU']}, {kinds['CPU']}, {len(usable_cores()) or os.cpu_count()} cores")
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        say("", f"{gpu.name}: {details.get('device_name', 'unknown')}")

    try:
        name = strategies.resolve("auto", None)
        config = cluster.cluster_spec()
        say("strategy", f"auto takes {name}: {why(name, config, os.environ)}")
        warn(strategies.problems(name, None))
        # The strategies of a cluster would wait for its other processes, and are not built here.
        if name == "parameter_server":
            mine = "none (parameter servers apply each worker's gradient)"
        elif name == "multi_worker":
            mine = strategies.all_reduce_in_use(several)
        else:
            mine = strategies.all_reduce_in_use(strategies.make_strategy(name))
        if mine.startswith("Nccl") and "(" not in mine:
            mine += " (each replica has a whole GPU)"
        say("all-reduce", mine)
        if name in ("none", "mirrored"):
            say("", f"with several workers: {strategies.all_reduce_in_use(several)}")
    except DistributionError as error:
        say("strategy", "none of them would start")
        warn([str(error)])


def local_multi_worker():
    """A MultiWorkerMirroredStrategy of this process alone, whatever TF_CONFIG says."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)


def why(name: str, config: dict, environ: Mapping[str, str]) -> str:
    """The reason for the strategy that `auto` takes.

    Args:
        name: what `strategies.resolve("auto", None)` gave.
        config: what TF_CONFIG says; empty without a cluster.
        environ: the environment, for SLURM's variables.
    """
    import tensorflow as tf

    gpus = len(tf.config.list_physical_devices("GPU"))
    if name == "parameter_server":
        return f"TF_CONFIG names {len(config['cluster']['ps'])} parameter servers"
    if name == "multi_worker" and config:
        return f"TF_CONFIG names {cluster.workers_in(config)} workers"
    if name == "multi_worker":
        return f"SLURM runs {cluster.slurm_tasks(environ)} tasks"
    if name == "mirrored":
        return f"{gpus} GPUs, one worker"
    where = "TF_CONFIG names one worker" if config else "no TF_CONFIG, no SLURM tasks"
    return f"{where}, {'one GPU' if gpus else 'no GPU'}"


# --- The proof ---


def prove() -> bool:
    """Trains on one worker and on two, compares, and says whether they are equal."""
    import numpy as np

    environ = bare_environment()
    if len(visible_gpus()) < 2:
        environ["CUDA_VISIBLE_DEVICES"] = "-1"
    where = "CPU" if environ.get("CUDA_VISIBLE_DEVICES") == "-1" else "GPUs"
    say("proof", f"fit on one worker and on two, {STEPS} steps in float64 on {where} ...")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        for workers, name in ((1, "none"), (2, "multi_worker")):
            left = PROOF_SECONDS - (time.monotonic() - begin)
            module = ["distribution.doctor", "--train", name]
            status, text = run_processes(workers, module, folder, environ, left)
            if status is None:
                say("", f"NOT proved: no end on {workers} worker(s) within {PROOF_SECONDS} s")
            elif status:
                say("", f"NOT proved: exit status {status} on {workers} worker(s)")
            if status != 0:
                print(text, end="", flush=True)
                return False
        one, *others = (
            dict(np.load(pathlib.Path(folder, name)))
            for name in ("none-0.npz", "multi_worker-0.npz", "multi_worker-1.npz")
        )
    compared = [compare(one, other) for other in others]
    largest = max(difference for difference, _ in compared)
    unequal = sorted({name for _, names in compared for name in names})
    losses = one["history/loss"]
    say("", f"loss {losses[0]:.4f}, then {losses[-1]:.4f}; {len(one)} tensors of each worker")
    say(
        "",
        f"largest difference {largest:.1e}: {'NOT equal' if unequal else 'equal'} "
        f"({time.monotonic() - begin:.0f} s)",
    )
    warn([f"{name} differs" for name in unequal])
    return not unequal


def compare(one: dict, other: dict) -> tuple[float, list[str]]:
    """Holds two runs against each other, tensor by tensor.

    Args:
        one: arrays by name.
        other: arrays of the same names.

    Returns:
        The largest difference, and the names of what is not equal: max|a-b| > 1e-9 max(1, max|a|),
        another shape, a number that is not finite, or there in only one of them.
    """
    unequal = sorted(one.keys() ^ other.keys())
    largest = 0.0
    for name in sorted(one.keys() & other.keys()):
        a, b = one[name], other[name]
        difference = float(abs(a - b).max(initial=0)) if a.shape == b.shape else math.inf
        bound = TOLERANCE * max(1.0, float(abs(a).max(initial=0)))
        if not math.isfinite(difference) or difference > bound:
            unequal.append(name)
            difference = difference if math.isfinite(difference) else math.inf
        largest = max(largest, difference)
    return largest, unequal


def bare_environment() -> dict[str, str]:
    """The environment without the cluster that this process may be part of."""
    return {
        name: value
        for name, value in os.environ.items()
        if name != "TF_CONFIG" and not name.startswith("SLURM_")
    }


def run_processes(
    workers: int, module: list[str], folder: str, environ: dict[str, str], seconds: float
) -> tuple[int | None, str]:
    """Runs a module in a process, or through the launcher in several; leaves none behind.

    Args:
        workers: how many processes.
        module: the module and its options; `--run-dir FOLDER` is added.
        folder: where logs and results go.
        environ: environment of the processes.
        seconds: time after which they are stopped.

    Returns:
        The exit status (None: they were stopped) and what was printed.
    """
    command = [sys.executable]
    if workers > 1:
        command += ["-m", "distribution.launch", "--nproc-per-node", str(workers)]
    command += ["-m", *module, "--run-dir", folder]
    output = pathlib.Path(folder, "output.txt")
    # A SIGTERM, like Ctrl-C, must reach the `finally` below.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with open(output, "wb") as file:
            process = subprocess.Popen(
                command,
                env=environ,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            status = process.wait(timeout=max(0.0, seconds))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            stop(process)
    finally:
        signal.signal(signal.SIGTERM, before)
    return status, output.read_text(encoding="utf-8", errors="replace")


def stop(process: subprocess.Popen) -> None:
    """Ends a process, or a launcher with its processes, if it still runs."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()  # the launcher's processes die with it
            process.wait()


def train(name: str, folder: pathlib.Path) -> None:
    """Trains a small model under a strategy and writes weights and history: one of the processes.

    Args:
        name: the strategy's name.
        folder: where NAME-RANK.npz goes.
    """
    if hasattr(signal, "alarm"):
        signal.alarm(PROOF_SECONDS)  # the end, should nobody be left to stop this process

    import keras
    import numpy as np

    from distribution import keras_compat, strategies
    from distribution.agree import Agreement

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    strategy = strategies.make_strategy(name)
    with keras_compat.patch_keras_for(strategy):
        model, history = fit_small_model(strategy)
    rank = strategies.worker_index(strategy)
    found: dict[str, Any] = {
        **{f"history/{key}": np.array(values) for key, values in history.history.items()},
        **{f"weights/{v.path}": keras.ops.convert_to_numpy(v) for v in model.trainable_variables},
    }
    np.savez(folder / f"{name}-{rank}.npz", **found)
    # Nobody leaves before the others are done.
    Agreement(strategy, strategies.workers(strategy), strategies.is_chief(strategy)).barrier()


def fit_small_model(strategy):
    """Fits a model that learns each token's successor; returns it and its history.

    Weights of the examples differ from replica to replica, so that a mean which each replica forms
    for itself would show.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    from distribution import keras_compat
    from distribution.global_batch import GlobalMean, reduce_before_clipping

    tokens, length, batch, epochs = 50, 6, 8, 2
    numbers = np.random.default_rng(0)
    x = numbers.integers(tokens, size=(batch * STEPS // epochs, length))
    y = (3 * x + 1) % tokens
    weights = numbers.integers(3, size=x.shape) * (np.arange(len(x)) % batch + 1)[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, y, weights.astype("float64")))
    data = data.batch(batch, drop_remainder=True)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    options.autotune.enabled = False  # see data/batches.py
    data = data.with_options(options)

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((length,), dtype="int32"),
                keras.layers.Embedding(tokens, 16),
                keras.layers.Dense(tokens),
            ]
        )
        model.compile(
            optimizer=reduce_before_clipping(keras.optimizers.AdamW(0.03, global_clipnorm=0.5)),
            loss=GlobalMean(keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
            weighted_metrics=[
                keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True),
                keras.metrics.SparseCategoricalAccuracy("accuracy"),
            ],
        )
    keras_compat.build(model, data)
    history = model.fit(data, validation_data=data, epochs=epochs, shuffle=False, verbose=0)
    return model, history


if __name__ == "__main__":
    sys.exit(main())
