"""A run with a parameter server loses a worker in mid-epoch, and continues without a restart."""

import json
import os
import signal
import subprocess
import time

import pytest

from tests.support import processes, strategy_run


def children(parent: int) -> dict[str, int]:
    """The launcher's processes by their task."""
    words = ["ps", "-o", "pid=", "--ppid", str(parent)]
    listed = subprocess.run(words, capture_output=True, text=True).stdout.split()
    tasks = [json.loads(environ_of(pid)["TF_CONFIG"])["task"] for pid in listed]
    return {f"{t['type']}-{t['index']}": int(pid) for t, pid in zip(tasks, listed, strict=True)}


def environ_of(pid: str) -> dict[str, str]:
    entries = open(f"/proc/{pid}/environ").read().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@pytest.mark.long
def test_a_worker_of_a_parameter_server_run_dies(tmp_path):
    strategy_run.write_data(tmp_path)
    run_dir = tmp_path / "run"
    launcher = processes.start(
        *("-m", "launch", "--nproc-per-node", "2", "--ps", "1"),
        *("-m", "recipes.bert_mlm", "--dataset", str(tmp_path / "text.txt")),
        *("--preset", "scratch", "--vocabulary-size", "120", "--num-layers", "1"),
        *("--hidden-dim", "16", "--sequence-length", "16", "--epochs", "16"),
        *("--dropout", "0.1", "--log-every", "15"),
        *("--cache-dir", str(tmp_path / "cache"), "--run-dir", str(run_dir)),
    )
    try:
        log = run_dir / "metrics.jsonl"
        while not (log.exists() and log.read_text()) and launcher.poll() is None:
            time.sleep(0.1)
        assert launcher.poll() is None, launcher.communicate()[0][-3000:]
        tasks = children(launcher.pid)
        assert sorted(tasks) == ["chief-0", "ps-0", "worker-0", "worker-1"]
        os.kill(tasks["worker-1"], signal.SIGKILL)
        output, _ = launcher.communicate(timeout=1800)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, output[-3000:]
    results = processes.results(run_dir)
    assert results["strategy"] == "parameter_server" and results["workers"] == 2
    assert results["resumed_from_step"] is None, "the run was restarted"
    assert results["steps"] == max(record["step"] for record in processes.records(run_dir))
    # No update was lost; the one that the dead worker was computing may have been applied before.
    counters = [v for k, v in processes.tensors(run_dir).items() if k.endswith("optimizer/vars/0")]
    assert [int(value) - results["steps"] in (0, 1) for value in counters] == [True]
    for pid in tasks.values():
        assert not os.path.exists(f"/proc/{pid}"), "left over"
