"""The doctor's report and its proof."""

import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from distribution import doctor

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*module, **environ):
    """Runs a module as a person would; returns exit status, output and errors."""
    done = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=ROOT,
        env=doctor.bare_environment() | {"CUDA_VISIBLE_DEVICES": "-1"} | environ,
        capture_output=True,
        text=True,
        timeout=400,
    )
    return done.returncode, done.stdout, done.stderr


def test_report_of_a_worker():
    cluster = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    # KERAS_BACKEND would break every import, did the doctor not set it.
    status, output, errors = run(
        "distribution.doctor", "--quick", TF_CONFIG=cluster, KERAS_BACKEND="nonsense"
    )
    assert status == 0, errors
    assert "auto takes multi_worker: TF_CONFIG names 2 workers" in output
    assert "all-reduce  RING over gRPC (NCCL needs whole GPUs)" in output
    assert f"0 GPU (0 logical), 1 CPU (1 logical), {len(os.sched_getaffinity(0))} cores" in output
    assert "proof" not in output


def test_why():
    assert doctor.why("none", {}, {}) == "no TF_CONFIG, no SLURM tasks, no GPU"
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert doctor.why("multi_worker", {}, slurm) == "SLURM runs 4 tasks"
    config = {"cluster": {"ps": ["a:1"], "worker": ["b:1"], "chief": ["c:1"]}}
    assert doctor.why("parameter_server", config, {}) == "TF_CONFIG names 1 parameter servers"


def test_versions(tmp_path):
    lock = tmp_path / "requirements.lock"
    lock.write_text("Keras==3.0.0  # tested\nnumpy==2.0.0\n\n# a comment\n")
    pins = doctor.pinned(lock)
    assert pins == {"keras": "3.0.0", "numpy": "2.0.0"}
    found = dict.fromkeys(doctor.PACKAGES, "1.0") | {"python": "3.11.2", "numpy": "2.0.0"}
    assert doctor.version_problems(found, pins) == ["keras 1.0 is installed, 3.0.0 was tested"]
    old = doctor.version_problems(found | {"python": "3.9.1", "keras": ""}, pins)
    assert old[0].startswith("python 3.9.1 runs, 3.11 to 3.13")
    assert old[1] == "keras is not installed, requirements.lock has 3.0.0"
    assert doctor.pinned(tmp_path / "none.lock") is None
    assert "not found" in doctor.version_problems(found, None)[0]


def test_the_pins_of_the_checkout_are_found():
    assert set(doctor.PACKAGES) <= doctor.pinned(doctor.LOCK).keys()


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        ([1000.0, 1.0], True),
        ([1000.0 + 5e-7, 1.0], True),  # relative to the largest of the tensor
        ([1000.0 + 5e-6, 1.0], False),
        ([1000.0, np.nan], False),
        ([1000.0, np.inf], False),
        ([1000.0], False),
    ],
)
def test_compare(other, equal):
    one = {"weights/a": np.array([1000.0, 1.0])}
    largest, unequal = doctor.compare(one, {"weights/a": np.array(other)})
    assert unequal == ([] if equal else ["weights/a"])
    assert largest < 1e-6 if equal else largest > 1e-6


def test_compare_what_only_one_has_and_what_is_infinite_in_both():
    with np.errstate(invalid="ignore"):
        inf = {"a": np.array([np.inf])}
        assert doctor.compare(inf, inf)[1] == ["a"]
    assert doctor.compare({"a": np.zeros(1)}, {})[1] == ["a"]


def test_a_hang_ends(tmp_path):
    begin = time.monotonic()
    program = "import sys, time; print('waiting', flush=True); time.sleep(600)"
    (tmp_path / "hangs.py").write_text(program)
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    environ.pop("TF_CONFIG", None)
    status, text = doctor.run_processes(2, ["hangs"], str(tmp_path), environ, 3)
    assert status is None
    assert "waiting" in text
    assert time.monotonic() - begin < 120
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in left


@pytest.mark.long
def test_proof():
    status, output, errors = run("distribution.doctor")
    assert status == 0, output + errors
    assert ": equal" in output and "warning" not in output
