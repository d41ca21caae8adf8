"""Shows progress on a terminal, in one line that is overwritten, or as some lines of the log.

If standard output or standard error is a file or a pipe, what takes long writes a line a minute.
"""

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Iterator

from tqdm import tqdm

log = logging.getLogger("recipes")

TICK_SECONDS = 1.0
LOG_SECONDS = 60.0

_quiet = False


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Hides live lines within this context if `wanted`, for `--quiet`."""
    global _quiet
    before, _quiet = _quiet, wanted
    try:
        yield
    finally:
        _quiet = before


def is_shown() -> bool:
    """Returns whether live lines are shown: on a terminal and without `--quiet`."""
    return not _quiet and sys.stdout.isatty() and sys.stderr.isatty()


def live_line(iterable=None, what: str | None = None, **arguments) -> tqdm:
    """Makes a tqdm bar that disappears at its end; elsewhere than on a terminal it writes lines.

    These lines come once a minute, so a short task has none. `--quiet` hides both.

    Args:
        iterable: The iterable to count; None if `update()` is called.
        what: Name of the task, for instance "tokenising train".
        **arguments: Arguments of `tqdm.tqdm`.
    """
    if not is_shown():
        return _LogLines(iterable, what, **arguments)
    # Position 0: there is one line, and a bar whose task has failed may not have been closed yet.
    settings = {"leave": False, "dynamic_ncols": True, "delay": 0.5, "position": 0}
    return tqdm(iterable, what, **settings | arguments)


class _LogLines(tqdm):
    """Stands for a live line where none can be shown."""

    monitor_interval = 0  # no thread that redraws more often

    def __init__(self, iterable=None, what: str | None = None, **arguments):
        settings = {
            "disable": _quiet,
            "leave": False,
            "file": io.StringIO(),  # what tqdm itself writes: line ends
            "mininterval": LOG_SECONDS,
            "delay": LOG_SECONDS,
            "ncols": 80,
            "position": 0,
            "bar_format": "{desc}: {percentage:.0f}%, {elapsed}, {remaining} left",
        }
        known = arguments.get("total") or (hasattr(iterable, "__len__") and len(iterable))
        if not known:
            settings |= {"bar_format": "{desc}: {n:,}{unit}, {elapsed}", "unit": ""}
        names = {"total", "unit", "bar_format"} & arguments.keys()
        chosen = {name: arguments[name] for name in names}
        super().__init__(iterable, what, **settings | chosen)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Writes a line to the log; nothing when the line is to be removed."""
        if msg is None:
            log.info("%s", self)
        return True


class Waiting:
    """Shows the seconds of a long task without progress; for `with`.

    Args:
        what: Name of the task, for instance "compiling the first step".
    """

    def __init__(self, what: str):
        self._bar = live_line(what=what, bar_format="{desc}, {elapsed}", delay=0)
        self._ended = threading.Event()
        if not _quiet:
            # A thread: the main one runs native code, which releases the interpreter.
            threading.Thread(target=self._tick, name="live line", daemon=True).start()

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS if is_shown() else LOG_SECONDS):
            self._bar.refresh()

    def close(self) -> None:
        """Removes the line."""
        self._ended.set()
        self._bar.close()

    def __enter__(self) -> "Waiting":
        return self

    def __exit__(self, *_) -> None:
        self.close()


@contextlib.contextmanager
def log_on_stderr() -> Iterator[None]:
    """Writes the log "recipes" to standard error within this context.

    For programs whose standard output is an answer; a run's log goes to standard output.
    """
    before = log.level, log.propagate
    handler = logging.StreamHandler()
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before[1]
        log.setLevel(before[0])


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Removes live lines from the terminal while other text is written to it."""
    if not is_shown():
        yield
        return
    with tqdm.external_write_mode(file=sys.stdout):
        yield
