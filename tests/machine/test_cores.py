"""Cores that a process may use, and a container's limit of their time."""

import pytest

from machine import cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n"}, None),
        ({"cpu.max": ""}, None),
        ({}, None),
    ],
)
def test_quota(files, expected, tmp_path, monkeypatch):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    assert cores.cpu_quota() == expected


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: {1, 5})
    assert cores.cores() == 2 and cores.format_cores("CPU core") == "2 CPU cores"
    monkeypatch.delattr(cores.os, "sched_getaffinity")
    monkeypatch.setattr(cores.os, "cpu_count", lambda: None)
    assert cores.cores() == 1 and cores.format_cores() == "1 core"
