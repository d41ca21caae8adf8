"""Sends the run's log to standard output, and to a file for each worker."""

import contextlib
import errno
import logging
from collections.abc import Iterator
from pathlib import Path

from callbacks.errors import saving
from callbacks.terminal_log import RESULT
from data import live_line
from machine.output import discard_output
from training.signals import signals

log = logging.getLogger("recipes")
# In a notebook TensorFlow logs its devices and how it reduces; elsewhere it does not.
tensorflow_log = logging.getLogger("tensorflow")
CLOSED = (errno.EPIPE, errno.EIO)  # errors of a pipe without a reader, and of a closed terminal


class TerminalHandler(logging.Handler):
    """Writes lines to the current standard output.

    Args:
        quiet: write only warnings and results.
    """

    def __init__(self, quiet: bool):
        super().__init__(RESULT if quiet else logging.INFO)

    def emit(self, record):
        """Writes one line, above the live line.

        Raises:
            OSError: it cannot be written. During the training, closed output is discarded instead.
        """
        try:
            with live_line.paused():
                print(self.format(record), flush=True)
        except OSError as error:
            if error.errno not in CLOSED or not signals.training:
                raise
            discard_output()
            log.warning("standard output is closed; the training continues, with this log")


class LogFile(logging.FileHandler):
    """Appends lines with the time to a file; a full disk ends the run with a one-line error."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def handleError(self, record):  # noqa: N802 (logging's name; its own prints a traceback)
        """Reports the first error and closes the file.

        Raises:
            CannotSave: the line could not be written.
        """
        for logger in (log, tensorflow_log):  # later lines still reach the terminal
            logger.removeHandler(self)
        self.close()
        with saving(self.baseFilename):
            raise

    def close(self):
        """Closes the file; a line that could not be written was reported."""
        with contextlib.suppress(OSError):
            super().close()


def log_to_file(path: Path) -> None:
    """Appends the run's log and TensorFlow's warnings to a file, until `run_logging` ends.

    Raises:
        OSError: it cannot be opened.
    """
    handler = LogFile(path)
    for logger in (log, tensorflow_log):
        logger.addHandler(handler)


@contextlib.contextmanager
def run_logging(quiet: bool) -> Iterator[None]:
    """Sends the log "recipes" to the terminal; closes all handlers that a run adds to it.

    Args:
        quiet: print only warnings and results.
    """
    before = log.level, log.propagate, tensorflow_log.level
    count = len(log.handlers)
    log.setLevel(logging.INFO)
    log.addHandler(TerminalHandler(quiet))
    log.propagate = False
    tensorflow_log.setLevel(max(logging.WARNING, tensorflow_log.level))
    try:
        with live_line.quiet(quiet):
            yield
    finally:
        for handler in log.handlers[count:]:
            for logger in (log, tensorflow_log):
                logger.removeHandler(handler)
            handler.close()
        level, log.propagate, of_tensorflow = before
        log.setLevel(level)
        tensorflow_log.setLevel(of_tensorflow)
