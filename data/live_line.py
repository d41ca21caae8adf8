"""Shows progress on a terminal, in one line that is overwritten.

If standard output or standard error is a file or a pipe, nothing is shown: logs stay clean.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator

from tqdm import tqdm

TICK_SECONDS = 1.0

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
    """Makes a tqdm bar that is shown only on a terminal and disappears at its end.

    Args:
        iterable: The iterable to count; None if `update()` is called.
        what: Name of the task, for instance "tokenising train".
        **arguments: Arguments of `tqdm.tqdm`.
    """
    settings = {"disable": not is_shown(), "leave": False, "dynamic_ncols": True, "delay": 0.5}
    return tqdm(iterable, what, **settings | arguments)


class Waiting:
    """Shows the seconds of a long task without progress; for `with`.

    Args:
        what: Name of the task, for instance "compiling the first step".
    """

    def __init__(self, what: str):
        self._bar = live_line(what=what, bar_format="{desc}, {elapsed}", delay=0)
        self._ended = threading.Event()
        if is_shown():
            # A thread: the main one runs native code, which releases the interpreter.
            threading.Thread(target=self._tick, name="live line", daemon=True).start()

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
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
def paused() -> Iterator[None]:
    """Removes live lines from the terminal while other text is written to it."""
    if not is_shown():
        yield
        return
    with tqdm.external_write_mode(file=sys.stdout):
        yield
