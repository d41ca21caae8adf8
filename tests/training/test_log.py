"""The run's log on standard output, with --quiet, and in worker-0.log."""

import contextlib
import errno
import logging
import os
import sys
from pathlib import Path

import pytest

from callbacks.errors import CannotSave
from callbacks.terminal_log import RESULT
from training.log import log_to_file, run_logging
from training.signals import signals

log = logging.getLogger("recipes")


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
    with run_logging(quiet):
        log_to_file(tmp_path / "worker-0.log")
        write_a_line_of_each_kind()
    assert capsys.readouterr().out.splitlines() == shown
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["of a step", "a result", "a warning"]


def test_tensorflows_warnings_are_in_the_file(tmp_path):
    tensorflow = logging.getLogger("tensorflow")
    before = list(tensorflow.handlers)
    with run_logging(quiet=True):
        log_to_file(tmp_path / "worker-0.log")
        tensorflow.warning("about a kernel")
        tensorflow.info("how it reduces")
    tensorflow.warning("after the run")
    (line,) = (tmp_path / "worker-0.log").read_text().splitlines()
    assert line.endswith(" about a kernel") and tensorflow.handlers == before


def test_a_full_disk_is_one_error_and_no_traceback(capsys):
    with run_logging(quiet=False):
        log_to_file(Path("/dev/full"))
        with pytest.raises(CannotSave, match="/dev/full cannot be written: No space left"):
            log.info("a line")
        log.info("another")  # still reaches the terminal
    captured = capsys.readouterr()
    assert captured.out == "a line\nanother\n" and captured.err == ""


@contextlib.contextmanager
def closed_output(opened):
    """A standard output whose reader has left: of `os.pipe` or `os.openpty`."""
    read, write = opened()
    os.close(read)
    with open(write, "w") as stream, contextlib.redirect_stdout(stream):
        yield
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # for the rest of its buffer


@pytest.mark.parametrize("opened", [os.pipe, os.openpty])
def test_a_reader_that_leaves_does_not_end_a_training(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "training", True)
    with closed_output(opened), run_logging(quiet=False):
        log_to_file(tmp_path / "worker-0.log")
        log.info("of a step")
        log.info("of the next one")
        sys.stdout.flush()  # as at the end of the process: status 0
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "standard output is closed; the training continues, with this log",
        "of a step",
        "of the next one",
    ]


@pytest.mark.parametrize("opened", [os.pipe, os.openpty])
def test_a_reader_that_leaves_before_the_training_ends_it(opened):
    with closed_output(opened), run_logging(quiet=False), pytest.raises(OSError) as caught:
        log.info("of the plan")
    assert caught.value.errno in (errno.EPIPE, errno.EIO)
