import logging
from pathlib import Path

import pytest

from callbacks.errors import CannotSave
from training.log import RunLogging

log = logging.getLogger("recipes")


def test_lines_go_to_the_terminal_and_with_the_time_to_a_file(tmp_path, capsys):
    before = log.level, log.propagate, list(log.handlers)
    logging_ = RunLogging(quiet=True)
    logging_.to_file(tmp_path / "worker-0.log")
    log.info("a line")
    log.warning("a warning")
    logging_.close()
    assert capsys.readouterr().out == "a warning\n"
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["a line", "a warning"]
    assert (log.level, log.propagate, log.handlers) == before


def test_a_full_disk_is_one_error_and_no_traceback(capsys):
    logging_ = RunLogging(quiet=False)
    try:
        logging_.to_file(Path("/dev/full"))
        with pytest.raises(CannotSave, match="/dev/full cannot be written: No space left"):
            log.info("a line")
        log.info("another")  # still reaches the terminal
    finally:
        logging_.close()
    captured = capsys.readouterr()
    assert captured.out == "a line\nanother\n" and captured.err == ""
