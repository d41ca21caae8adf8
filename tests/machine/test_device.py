"""The device that a run reports, with fake GPUs and a fake driver tool."""

import os
import re

import pytest

from machine import device


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Puts GPUs into this process, and a tool that tells their memory in MiB."""

    def put(*names, memory):
        listed = "\n".join(f"{name}, {size}" for name, size in memory.items())
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}\nEND\n")
        tool.chmod(0o755)
        monkeypatch.setattr(device, "NVIDIA_SMI", (str(tool),))
        monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: names)
        monkeypatch.setattr(
            "tensorflow.config.experimental.get_device_details",
            lambda name: {"device_name": name, "compute_capability": (9, 0)},
        )

    return put


def test_the_processor(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    with open("/proc/cpuinfo") as file:
        (name, *_) = re.findall(r"^model name\s*: (.*)$", file.read(), re.M) or [None]
    assert device.describe() == f"{name or device._processor()}, 3 cores"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # a launched worker's
    assert device.describe().endswith(", 1 core") and device.gpu_models() == []


def test_gpus(gpus):
    gpus("NVIDIA H100", "NVIDIA H100", "T4", memory={"NVIDIA H100": 81559, "L4": 23034, "T4": "x"})
    assert device.describe() == "2 x NVIDIA H100 (79.6 GiB), T4"
    assert device.gpu_models() == [("NVIDIA H100", "9.0")] * 2 + [("T4", "9.0")]


def test_without_the_drivers_tool(gpus, monkeypatch):
    gpus("T4", memory={})
    monkeypatch.setattr(device, "NVIDIA_SMI", ("/not/there",))
    assert device.describe() == "T4"


@pytest.mark.parametrize(
    "visible, there, said", [(None, 1, True), ("-1", 1, False), (None, 0, False)]
)
def test_a_gpu_that_cannot_be_used(monkeypatch, visible, there, said):
    monkeypatch.setattr(device.glob, "glob", lambda pattern: ["/dev/nvidia0"][:there])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = device.unused_gpu()
    assert (found is not None) == said
    if said:
        assert "\n" not in found and "CUDA libraries" in found and "CPU is used" in found
    monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: ["GPU"])
    assert device.unused_gpu() is None
