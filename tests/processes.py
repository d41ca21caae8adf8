"""Starting the processes of strategy tests, and comparing what they leave behind."""

import glob
import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np

TESTS = Path(__file__).resolve().parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
}


def start(*words: str, **environ: str) -> subprocess.Popen:
    """A Python process in a session of its own, its output caught."""
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, **ENVIRONMENT, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=TESTS.parent,
        start_new_session=True,
    )


def run(*words: str, status: int = 0, timeout: int = 600, **environ: str) -> str:
    """Runs a Python process to its end, looks at its status, and returns its output."""
    process = start(*words, **environ)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == status, f"status {process.returncode}\n{output[-4000:]}"
    return output


def launch(workers: int, *words: str, status: int = 0, logs: Path, options=(), **more) -> str:
    """Runs a module under the launcher."""
    launcher = ("-m", "distribution.launch", "--nproc-per-node", str(workers))
    return run(*launcher, "--log-dir", str(logs), *options, "-m", *words, status=status, **more)


def tensors(run_dir: Path) -> dict[str, np.ndarray]:
    """Weights and optimizer of a run's last checkpoint, by their names in Keras's file."""
    newest = sorted(glob.glob(f"{run_dir}/checkpoints/step-*"))[-1]
    found = {}

    def take(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = np.array(item)

    with h5py.File(f"{newest}/model.weights.h5") as file:
        file.visititems(take)
    return found


def results(run_dir: Path) -> dict:
    return json.loads((Path(run_dir) / "results.json").read_text())


def records(run_dir: Path) -> list[dict]:
    """metrics.jsonl without what measures time."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if "per_second" not in name}
        for line in lines
    ]


def assert_equal(a: np.ndarray, b: np.ndarray, name: str) -> None:
    """max|a - b| <= 1e-9 max(1, max|a|)."""
    assert a.shape == b.shape, name
    if a.size:
        difference = np.abs(a - b).max()
        assert difference <= 1e-9 * max(1.0, np.abs(a).max()), (name, difference)
