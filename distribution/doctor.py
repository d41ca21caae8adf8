"""Reports devices and versions, and proves that training on two workers equals training on one.

    python -m distribution.doctor [--quick]

The proof compares all weights of a small model in float64, in about a minute; `--quick` leaves it
out. Exit status 0, or 1 if they differ.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np

from distribution.cluster import cluster_spec
from distribution.errors import DistributionError
from distribution.launch import usable_cores, visible_gpus
from distribution.quiet_start import start_quietly
from distribution.version import version_line

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("keras", "keras-nlp", "tensorflow", "tensorflow-text", "numpy")
PROOF_SECONDS = 120  # for each of the two


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m distribution.doctor",
        description="Report devices and versions; prove that two workers train as one does.",
    )
    parser.add_argument("--quick", action="store_true", help="leave the proof out")
    parser.add_argument("--train", help=argparse.SUPPRESS)  # the proof's own processes
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    start_quietly()
    # Read when TensorFlow and Keras are imported, which is why the functions below import them.
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if options.train:
        train(options.train, options.run_dir)
        return 0
    print(version_line())
    for problem in version_problems((ROOT / "requirements.lock").read_text(encoding="utf-8")):
        print(f"warning: {problem}")
    report_devices()
    return 0 if options.quick or prove() else 1


def version_problems(lock: str) -> list[str]:
    """Lists how the installed packages differ from those of `requirements.lock`."""
    pins = dict(line.lower().split("==") for line in lock.split() if "==" in line)
    installed = {d.name.lower(): d.version for d in metadata.distributions()}
    return [
        f"{name} {installed.get(name, 'none')} is installed, {pins[name]} was tested"
        for name in PACKAGES
        if installed.get(name) != pins[name]
    ]


def report_devices() -> None:
    """Prints devices, the strategy of `--strategy auto` and its all-reduce."""
    import tensorflow as tf

    from distribution import strategies

    gpus = tf.config.list_physical_devices("GPU")
    print(f"devices: {len(gpus)} GPU, {len(usable_cores()) or os.cpu_count()} CPU cores")
    try:
        name = strategies.resolve("auto", None)
        print(f"strategy: auto takes {name}{' (TF_CONFIG)' if cluster_spec() else ''}")
        if name in ("none", "mirrored"):  # the others would wait for their other processes
            strategy = strategies.make_strategy(name)
            print(f"all-reduce: {strategies.all_reduce_in_use(strategy)}")
    except DistributionError as error:
        print(f"warning: {error}")


def prove() -> bool:
    """Trains on one worker and on two, compares, and says whether they are equal."""
    cluster = [name for name in os.environ if name == "TF_CONFIG" or name.startswith("SLURM_")]
    environ = {name: value for name, value in os.environ.items() if name not in cluster}
    environ["PYTHONPATH"] = str(ROOT)
    if len(visible_gpus()) < 2:
        environ["CUDA_VISIBLE_DEVICES"] = "-1"
    launcher = ["distribution.launch", "--nproc-per-node", "2", "-m"]
    print("proof: fit() on one worker and on two, in float64 ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        for name, words in (("none", []), ("multi_worker", launcher)):
            words = [sys.executable, "-m", *words, "distribution.doctor"]
            words += ["--train", name, "--run-dir", folder]
            try:
                subprocess.run(words, env=environ, check=True, timeout=PROOF_SECONDS)
            except subprocess.SubprocessError as error:  # it failed, or did not end
                print(f"NOT proved: {error}")
                return False
        one, *others = (dict(np.load(path)) for path in sorted(Path(folder).glob("*.npz"))[::-1])
    unequal = [name for other in others for name in differences(one, other)]
    found = f"NOT equal: {', '.join(unequal)}" if unequal else "equal (to 1e-9)"
    print(f"{len(one)} tensors of {len(others)} workers: {found}")
    return not unequal


def differences(one: dict, other: dict) -> list[str]:
    """Lists the tensors for which not max|a-b| <= 1e-9 max(1, max|a|), or that only one has."""
    unequal = sorted(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        bound = 1e-9 * max(1.0, abs(a).max())
        if a.shape != b.shape or not abs(a - b).max() <= bound < float("inf"):
            unequal.append(name)
    return unequal


def train(name: str, folder: Path) -> None:
    """Trains a small model under a strategy and writes NAME-RANK.npz: one of the processes."""
    import keras
    import tensorflow as tf

    from distribution import keras_compat, strategies
    from distribution.agree import Agreement
    from distribution.global_batch import GlobalMean, reduce_before_clipping

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    strategy = strategies.make_strategy(name)
    x = np.random.default_rng(0).integers(50, size=(80, 6))
    # They differ from replica to replica: a mean that each computes for itself would show.
    weights = np.ones(x.shape) * (np.arange(len(x)) % 8 + 1)[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, (3 * x + 1) % 50, weights))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = data.batch(8, drop_remainder=True).with_options(options)
    with keras_compat.patch_keras_for(strategy), strategy.scope():
        layers = [keras.layers.Embedding(50, 16), keras.layers.Dense(50)]
        model = keras.Sequential([keras.layers.Input((6,), dtype="int32"), *layers])
        model.compile(
            optimizer=reduce_before_clipping(keras.optimizers.AdamW(0.03, global_clipnorm=0.5)),
            loss=GlobalMean(keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
        )
        keras_compat.build(model, data)
        model.fit(data, epochs=2, shuffle=False, verbose=0)
    found = {v.path: keras.ops.convert_to_numpy(v) for v in model.trainable_variables}
    path = folder / f"{name}-{strategies.worker_index(strategy)}.npz"
    np.savez(path, **found)
    # Nobody leaves before the others are done.
    Agreement(strategy, strategies.workers(strategy), strategies.is_chief(strategy)).barrier()


if __name__ == "__main__":
    sys.exit(main())
