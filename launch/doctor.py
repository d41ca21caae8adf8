"""Reports devices and versions, and proves that training on two workers equals training on one.

    python -m launch.doctor [--quick]

The proof trains a small model of `recipes.dna_melting` in float64, and compares all weights and the
optimizer's variables, in about a minute; `--quick` leaves it out. Exit status 0, or 1 if they
differ.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np

from launch.processes import visible_gpus
from machine import requirements
from machine.cores import cores, cpu_quota, format_cores
from machine.late_modules import import_late
from machine.output import silent_broken_pipe
from machine.quiet_start import start_quietly

RECIPE = """
    -m recipes.dna_melting --oligos 200 --num-layers 1 --num-heads 2 --hidden-dim 8 --dropout 0
    --precision float64 --global-batch-size 8 --lr-scaling none --max-steps 20 --warmup-steps 5
    --clip-norm 0.5 --jit off --quiet --run-dir
""".split()
LAUNCHER = ["-m", "launch", "--nproc-per-node", "2"]
PROOF_SECONDS = 180  # for each of the two


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.doctor",
        description="Report devices and versions; prove that two workers train as one does.",
    )
    parser.add_argument("--quick", action="store_true", help="Skip the proof.")
    options = parser.parse_args(argv)
    print(requirements.version_line())
    for line in requirements.missing():
        print(f"warning: {line} was tested; another version is installed, or none")
    report_devices()
    return 0 if options.quick or prove() else 1


def report_devices() -> None:
    """Prints the devices, and the strategy of `--strategy auto`."""
    start_quietly()
    import_late()
    # Keras reads it at import.
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    from distribution import strategies
    from distribution.errors import DistributionError
    from machine import device

    gpus = tf.config.list_physical_devices("GPU")
    print(f"devices: {len(gpus)} GPU, {format_cores('CPU core')}: {device.describe()}")
    quota = cpu_quota()
    if quota is not None and quota < cores() and "TF_NUM_INTRAOP_THREADS" not in os.environ:
        threads = max(1, int(quota))
        print(
            f"warning: the container has the time of {quota:g} cores, and TensorFlow a thread for "
            f"each of {cores()}: set TF_NUM_INTRAOP_THREADS={threads} and OMP_NUM_THREADS={threads}"
        )
    unused = device.unused_gpu()
    if unused:
        print(f"warning: {unused}")
    try:
        print(f"strategy: auto takes {strategies.resolve('auto', None)}")
    except DistributionError as error:
        print(f"warning: {error}")


def prove() -> bool:
    """Trains on one worker and on two, compares them, and returns whether they are equal."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("TF_CONFIG", "SLURM_"))}
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]
    environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    # Two at most: the batch is shared by all GPUs that one process sees.
    gpus = visible_gpus()[:2]
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus) if len(gpus) == 2 else "-1"
    print("proof: fit() on one worker and on two, in float64 ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        runs = Path(folder, "one"), Path(folder, "two")
        for launcher, run in zip(([], LAUNCHER), runs, strict=True):
            words = [sys.executable, *launcher, *RECIPE, str(run)]
            try:
                subprocess.run(
                    words, env=environ, stdout=subprocess.DEVNULL, check=True, timeout=PROOF_SECONDS
                )
            except subprocess.SubprocessError as error:  # it failed, or timed out
                print(f"NOT proved: {error}")
                return False
        one, two = map(last_tensors, runs)
    unequal = differences(one, two)
    verdict = f"NOT equal: {', '.join(unequal)}" if unequal else "equal (to 1e-9)"
    print(f"{len(one)} tensors: {verdict}")
    return not unequal


def last_tensors(run: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a run's last checkpoint by name."""
    tensors = {}

    def take(name, item):
        if isinstance(item, h5py.Dataset):
            tensors[name] = np.array(item)

    with h5py.File(max(run.glob("checkpoints/step-*/model.weights.h5"))) as file:
        file.visititems(take)
    return tensors


def differences(one: dict, other: dict) -> list[str]:
    """Lists the tensors that only one run has, or that differ in shape or value.

    Values are equal if max|a-b| <= 1e-9 max(1, max|a|).

    Args:
        one: arrays by name.
        other: likewise.
    """
    unequal = []
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            unequal.append(f"{name} (only on {'one worker' if name in one else 'two workers'})")
        elif one[name].shape != other[name].shape:
            unequal.append(f"{name} (shapes {one[name].shape} and {other[name].shape})")
        elif one[name].size:
            a, b = one[name], other[name]
            if not abs(a - b).max() <= 1e-9 * max(1.0, abs(a).max()):  # NaN and infinity differ too
                unequal.append(name)
    return unequal


if __name__ == "__main__":
    with silent_broken_pipe():
        sys.exit(main())
