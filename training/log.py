"""Sends the run's log to standard output, and to a file for each worker."""

import contextlib
import logging
import sys
from pathlib import Path

import tqdm

from callbacks.errors import CannotSave
from callbacks.terminal_log import RESULT

log = logging.getLogger("recipes")
# In a notebook TensorFlow logs its devices and how it reduces; elsewhere it does not.
tensorflow_log = logging.getLogger("tensorflow")


class TerminalHandler(logging.Handler):
    """Writes lines to the standard output of this moment, above the bar of a download.

    Args:
        quiet: only warnings and results are written.
    """

    def __init__(self, quiet: bool):
        super().__init__(RESULT if quiet else logging.INFO)

    def emit(self, record):
        """Writes one line."""
        tqdm.tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


class LogFile(logging.FileHandler):
    """Appends lines to a file, with the time; a full disk is an error of the run, in one line."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def handleError(self, record):  # noqa: N802 (logging's name; its own prints a traceback)
        """Reports once what is wrong.

        Raises:
            CannotSave: the line could not be written.
        """
        error = sys.exc_info()[1]
        log.removeHandler(self)  # later lines still reach the terminal
        reason = getattr(error, "strerror", None) or error
        raise CannotSave(f"{self.baseFilename} cannot be written: {reason}") from error

    def close(self):
        """Closes the file; a line that did not fit was reported."""
        with contextlib.suppress(OSError):
            super().close()


class RunLogging:
    """Sends the log "recipes" to the terminal, and to a file, until it is closed.

    Args:
        quiet: the terminal gets warnings and results only.
    """

    def __init__(self, quiet: bool):
        self._before = (log.level, log.propagate, tensorflow_log.level)
        self._handlers: list[logging.Handler] = []
        log.setLevel(logging.INFO)
        self._add(TerminalHandler(quiet))
        log.propagate = False
        tensorflow_log.setLevel(max(logging.WARNING, tensorflow_log.level))

    def to_file(self, path: Path) -> None:
        """Appends all lines to a file too, with the time.

        Raises:
            OSError: it cannot be written.
        """
        self._add(LogFile(path))

    def _add(self, handler: logging.Handler) -> None:
        self._handlers.append(handler)
        log.addHandler(handler)

    def close(self) -> None:
        """Takes the handlers away and puts the logger back."""
        for handler in self._handlers:
            log.removeHandler(handler)
            handler.close()
        level, log.propagate, of_tensorflow = self._before
        log.setLevel(level)
        tensorflow_log.setLevel(of_tensorflow)
