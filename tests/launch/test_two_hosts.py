"""One launcher on each of two hosts that are joined by nothing but a link."""

import json
import os
import subprocess
import sys

import pytest

from tests.support import processes, strategy_run

pytest_plugins = ["tests.support.namespaces"]
pytestmark = pytest.mark.long


def test_training_over_the_link_ends_with_identical_weights(two_hosts, tmp_path):
    """One worker on each host; every step's all-reduce crosses the cable."""
    strategy_run.write_data(tmp_path)
    runs = ["bert_lines", "mnist", "dna", "text"]
    chosen = json.dumps({"strategy": "multi_worker", "runs": runs})
    launchers = [
        host.start(
            [
                *[sys.executable, "-m", "launch"],
                *["--hosts", ",".join(host.address for host in two_hosts)],
                *["--node-rank", str(rank), "-m", "strategy_run", chosen, str(tmp_path / "runs")],
                *["--run-dir", str(tmp_path / "logs")],
            ],
            cwd=tmp_path,
            env=os.environ | processes.ENVIRONMENT | {"STRATEGY_RUN_PRINT": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(two_hosts)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in launchers]
    assert [process.returncode for process in launchers] == [0, 0], outputs
    sums = [
        [line.split() for line in output.splitlines() if line.split()[:1] == [run]][-1][-1]
        for output in outputs
        for run in runs
    ]
    assert sums[: len(runs)] == sums[len(runs) :], outputs
    assert not two_hosts[0].processes() and not two_hosts[1].processes()
