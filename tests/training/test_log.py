"""The run's log on a terminal, with --quiet, and in worker-0.log."""

import logging
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from callbacks.errors import CannotSave
from callbacks.terminal_log import RESULT
from tests.support.launched import ROOT
from training.log import RunLogging

log = logging.getLogger("recipes")
# Nobody who trains asked for these.
TENSORFLOW = re.compile(r"oneDNN|cuInit|absl|cuda|cpu_feature|INFO:|WARNING|[IWE]0000 ", re.I)


def write_a_line_of_each_kind():
    log.info("of a step")
    log.log(RESULT, "a result")
    log.warning("a warning")


@pytest.mark.parametrize(
    ("quiet", "shown"),
    [
        (False, ["of a step", "a result", "a warning"]),
        (True, ["a result", "a warning"]),
    ],
)
def test_file_gets_all_and_the_terminal_what_is_asked_for(quiet, shown, tmp_path, capsys):
    run = RunLogging(quiet)
    run.to_file(tmp_path / "worker-0.log")
    write_a_line_of_each_kind()
    run.close()
    assert capsys.readouterr().out.splitlines() == shown
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["of a step", "a result", "a warning"]


def test_closed_log_is_as_it_was(tmp_path):
    tensorflow = logging.getLogger("tensorflow")

    def state():
        handlers = log.handlers[:], tensorflow.handlers[:]
        return *handlers, log.level, log.propagate, tensorflow.level

    before = state()
    run = RunLogging(quiet=False)
    run.to_file(tmp_path / "worker-0.log")
    assert log.isEnabledFor(logging.INFO) and state() != before
    run.close()
    assert state() == before


def environment():
    """A person's, not that of the tests."""
    hidden = ("TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES", "TF_CONFIG")
    return {k: v for k, v in os.environ.items() if k not in hidden} | {"PYTHONPATH": str(ROOT)}


@pytest.mark.long
def test_a_terminal_shows_lines_and_with_quiet_the_results_only(tmp_path):
    # Two runs of one process, on the two replicas whose sum TensorFlow likes to talk about.
    program = f"""
from recipes import mnist
shared = dict(dataset="digits", max_examples=640, max_steps=30, strategy="mirrored", replicas=2)
mnist.main(mnist.Options(run_dir={str(tmp_path / "a")!r}, **shared))
print("second run")
mnist.main(mnist.Options(run_dir={str(tmp_path / "b")!r}, quiet=True, **shared))
"""
    shown, returncode = on_a_terminal(program)
    assert returncode == 0, shown
    assert not TENSORFLOW.search(shown)
    loud, quiet = shown.replace("\r\n", "\n").split("second run\n")
    assert re.search(r"^step 30/30  loss [\d.]+ .* examples/s  0 s left$", loud, re.M)
    assert re.search(r"^epoch 1  ", loud, re.M)
    assert [line.split()[0] for line in quiet.splitlines()] == [
        *("step", "baseline", "verdict", "model", "logs", "results")
    ]
    assert "\nverdict        beats the most frequent class in accuracy\n" in quiet
    assert quiet.startswith("step 30  test  ")
    assert "\r" not in quiet


def on_a_terminal(program: str) -> tuple[str, int]:
    """What a process shows on its terminal, and its exit status."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 120))
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=environment(), stdout=its, stderr=its
        )
        os.close(its)
        shown = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not more:
                break
            shown += more
    finally:
        os.close(ours)
    return shown.decode(), process.wait()


def test_a_full_disk_is_one_error_and_no_traceback(capsys):
    run = RunLogging(quiet=False)
    try:
        run.to_file(Path("/dev/full"))
        with pytest.raises(CannotSave, match="/dev/full cannot be written: No space left"):
            log.info("a line")
        log.info("another")  # still reaches the terminal
    finally:
        run.close()
    captured = capsys.readouterr()
    assert captured.out == "a line\nanother\n" and captured.err == ""
