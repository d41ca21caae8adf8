"""The doctor's report and its proof."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from launch import doctor

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*words, **environ):
    """Runs the doctor as a person would; returns exit status, output and errors."""
    done = subprocess.run(
        [sys.executable, "-m", "launch.doctor", *words],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"} | environ,
        capture_output=True,
        text=True,
        timeout=500,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.long
def test_report_of_a_worker():
    cluster = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    # KERAS_BACKEND would break every import, did the doctor not set it.
    status, output, errors = run("--quick", TF_CONFIG=cluster, KERAS_BACKEND="nonsense")
    assert status == 0, errors
    assert "auto takes multi_worker" in output and "devices: 0 GPU" in output
    assert "proof" not in output and "warning" not in output


def test_cores_of_this_process_are_counted(monkeypatch, capsys):
    """Those of the machine may be more."""
    for present, expected in (({3}, "1 CPU core"), ({3, 4, 5}, "3 CPU cores")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, present=present: present)
        doctor.report_devices()
        line = capsys.readouterr().out.splitlines()[0]
        assert line.startswith(f"devices: 0 GPU, {expected}: ")
        assert line.endswith(", " + expected.replace("CPU ", ""))


@pytest.mark.parametrize(
    ("quota", "present", "chosen", "threads"),
    [
        (2.5, {0, 1, 2}, None, 2),
        (0.5, {0, 1}, None, 1),
        (3.0, {0, 1, 2}, None, None),
        (2.5, {0, 1, 2}, "2", None),
        (None, {0, 1, 2}, None, None),
    ],
)
def test_more_threads_than_a_container_has_time_for(
    quota, present, chosen, threads, monkeypatch, capsys
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: present)
    monkeypatch.setattr(doctor, "cpu_quota", lambda: quota)
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", chosen)
    doctor.report_devices()
    output = capsys.readouterr().out
    assert ("the container has the time of" in output) == (threads is not None)
    if threads:
        assert f"each of {len(present)}: set TF_NUM_INTRAOP_THREADS={threads} and" in output


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        ([1000.0 + 5e-7, 1.0], True),  # relative to the largest of the tensor
        ([1000.0 + 5e-6, 1.0], False),
        ([1000.0, np.nan], False),
    ],
)
def test_differences(other, equal):
    one = {"a": np.array([1000.0, 1.0])}
    assert doctor.differences(one, {"a": np.array(other)}) == ([] if equal else ["a"])


def test_names_and_shapes_are_compared():
    one = {name: np.zeros((2, 3)) for name in ("same", "missing", "reshaped", "empty")}
    one["empty"] = np.zeros((0,))
    other = one | {"reshaped": np.zeros((1, 3)), "extra": np.zeros(1)}
    del other["missing"]
    assert doctor.differences(one, other) == [
        "extra (only on two workers)",
        "missing (only on one worker)",
        "reshaped (shapes (2, 3) and (1, 3))",
    ]


def test_a_process_that_hangs_is_no_proof(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PROOF_SECONDS", 0.5)
    assert not doctor.prove()
    assert "timed out after" in capsys.readouterr().out


@pytest.mark.long
def test_proof():
    status, output, errors = run()
    assert status == 0, output + errors
    assert "tensors: equal" in output


def test_the_proof_takes_two_gpus_and_keeps_the_path(monkeypatch):
    """One process would share the batch of 8 among all GPUs, and 3 cannot share it."""
    seen = {}

    def run(words, env, **more):
        seen.update(env)
        raise subprocess.SubprocessError("enough")

    monkeypatch.setattr(doctor, "visible_gpus", lambda: ["0", "1", "2"])
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("PYTHONPATH", "/a/module")
    assert not doctor.prove()
    assert seen["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert seen["PYTHONPATH"] == os.pathsep.join([str(ROOT), "/a/module"])
