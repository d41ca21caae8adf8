"""Two sides that take turns: who stands still does no step, and nobody stays behind."""

import os
import signal
import sys
import time

import pytest

from benchmarks import workers

# Says that it does ten examples a second; now and then it evaluates.
TRAINING = """
import json, os, sys, time
folder = sys.argv[sys.argv.index("--run-dir") + 1]
os.mkdir(folder)
with open(folder + "/metrics.jsonl", "w") as file:
    for step in range(10_000):
        time.sleep(0.02)
        event = "evaluation" if step % 5 == 4 else "step"
        print(json.dumps({"event": event, "examples_per_second": 10.0}), file=file, flush=True)
"""


@pytest.fixture
def two(tmp_path):
    command = [sys.executable, "-c", TRAINING]
    side = workers.Side([command, command], [tmp_path / "a", tmp_path / "b"], one_core=True)
    yield side
    side.end()


def test_turns(two):
    two.wait()
    assert two.turn(2.0) == 2 * 10.0 * workers.LENGTH
    done = [len(two.records(folder)) for folder in two.folders]
    time.sleep(0.3)
    assert [len(two.records(folder)) for folder in two.folders] == done, "it stands still"
    assert two.turn(2.0) == 2 * 10.0 * workers.LENGTH
    assert two.turn(0.0) == 0.0, "no whole step"


def test_none_is_left(two):
    two.wait(1)
    two.send(signal.SIGSTOP)
    two.end()
    for process in two.processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_one_that_ends_is_told(tmp_path):
    side = workers.Side([[sys.executable, "-c", "raise SystemExit('no')"]], [tmp_path], False)
    with pytest.raises(SystemExit, match="status 1:\nno"):
        side.wait()
