"""Starts the processes of strategy tests, and compares their results."""

import contextlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import h5py
import numpy as np

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT)]),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
}


def start(*words: str, **environ: str) -> subprocess.Popen:
    """Starts a Python process in a new session, with captured output."""
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, **ENVIRONMENT, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


# Importing TensorFlow takes longer than most of these runs: it is imported once, and each run is a
# fork of that process, which has touched no device.
# CUDA does not survive a fork (tests/gpu).
METHOD = "forkserver" if os.environ.get("CUDA_VISIBLE_DEVICES", "-1") == "-1" else "spawn"
FORKS = multiprocessing.get_context(METHOD)
FORKS.set_forkserver_preload(
    [
        *("recipes.bert_mlm", "recipes.mnist", "recipes.dna_melting"),
        "recipes.text_classification",
    ]
)


def _run_forked(words: tuple[str, ...], cwd: str, environ: dict[str, str], output: str) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.update(environ)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.path[:0] = [cwd, str(SUPPORT), str(ROOT)]
    # The folder may be a copy of the checkout: import the modules of the copy.
    for name in [name for name in sys.modules if name.startswith("tests.")]:
        del sys.modules[name]
    # Its own forks use the same server.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None
    if words[0] == "-m":
        warnings.filterwarnings("ignore", message=".*found in sys.modules")
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


class Forked:
    """A script or a module (`-m`) in a fork, with the methods of `subprocess.Popen`."""

    def __init__(self, *words: str, cwd: Path = ROOT, **environ: str):
        self.said = tempfile.NamedTemporaryFile("r", errors="replace")
        arguments = (words, str(cwd), environ, self.said.name)
        self.process = FORKS.Process(target=_run_forked, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Waits for the end; returns the output."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout)
        with self.said:
            return self.said.read(), None

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def run_script(*words: str, status: int = 0) -> str:
    """Runs a script of this folder like `run`."""
    return _ended(Forked(*words), status)


def run(*words: str, status: int = 0, timeout: int = 1800, **environ: str) -> str:
    """Runs a Python process to its end, checks its status, and returns its output."""
    return _ended(start(*words, **environ), status, timeout)


def _ended(process: Forked | subprocess.Popen, status: int, timeout: int = 1800) -> str:
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == status, f"status {process.returncode}\n{output[-4000:]}"
    return output


def launch(workers: int, *words: str, status: int = 0, logs: Path, options=(), **more) -> str:
    """Runs a module under the launcher."""
    launcher = ("-m", "launch", "--nproc-per-node", str(workers))
    words += ("--run-dir", str(logs))
    return run(*launcher, *options, "-m", *words, status=status, **more)


def tensors(run_dir: Path) -> dict[str, np.ndarray]:
    """Returns weights and optimizer of a run's last checkpoint, by name in Keras's file."""
    return tensors_of(max((Path(run_dir) / "checkpoints").glob("step-*")) / "model.weights.h5")


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a weights file by name."""
    found = {}

    def take(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = np.array(item)

    with h5py.File(path) as file:
        file.visititems(take)
    return found


def results(run_dir: Path) -> dict:
    return json.loads((Path(run_dir) / "results.json").read_text())


def records(run_dir: Path, event: str | None = None) -> list[dict]:
    """Returns metrics.jsonl, or the lines of one event, without measured times."""
    from callbacks.throughput import is_speed

    lines = map(json.loads, (Path(run_dir) / "metrics.jsonl").open())
    return [
        {name: value for name, value in line.items() if not is_speed(name)}
        for line in lines
        if event in (None, line["event"])
    ]


def events(run_dir: Path) -> list:
    """Returns TensorBoard's sorted tags, steps and values, without measured times."""
    import tensorflow as tf

    from callbacks.throughput import is_speed

    found = []
    for path in sorted(run_dir.glob("events*")):
        for raw in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(raw)
            for value in event.summary.value:
                if not is_speed(value.tag) and value.HasField("tensor"):
                    number = tf.make_ndarray(value.tensor).tolist()
                    found.append((value.tag, event.step, number))
    return sorted(found, key=repr)


def assert_equal_tensors(ours: Path, theirs: Path, tolerance: float = 1e-9) -> float:
    """Checks that the last checkpoints of two runs are equal, by `assert_equal`.

    Returns:
        The largest max|a - b| / max(1, max|a|) of a tensor.
    """
    a, b = tensors(ours), tensors(theirs)
    assert a.keys() == b.keys()
    return max(
        assert_equal(value, b[name], f"{theirs.name}: {name}", tolerance)
        for name, value in a.items()
    )


def assert_equal(a: np.ndarray, b: np.ndarray, name: str, tolerance: float = 1e-9) -> float:
    """Checks that max|a - b| / max(1, max|a|) is at most the tolerance; returns it."""
    assert a.shape == b.shape, name
    if not a.size:
        return 0.0
    difference = np.abs(a - b).max() / max(1.0, np.abs(a).max())
    assert difference <= tolerance, (name, difference)
    return float(difference)
