"""Shows on a terminal, in one line that is written over, how far something is.

Where standard output or standard error is a file or a pipe, nothing is shown: logs stay logs.
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
    """Shows no live line within it if `wanted`, for `--quiet`."""
    global _quiet
    before, _quiet = _quiet, wanted
    try:
        yield
    finally:
        _quiet = before


def is_shown() -> bool:
    """Returns whether live lines are shown: both outputs are a terminal, and not `--quiet`."""
    return not _quiet and sys.stdout.isatty() and sys.stderr.isatty()


def live_line(iterable=None, what: str | None = None, **arguments) -> tqdm:
    """Makes a bar of tqdm that is shown on a terminal alone, and disappears when it is done.

    Args:
        iterable: What is counted; None where `update()` is called.
        what: What is done, for instance "tokenising train".
        **arguments: Of `tqdm.tqdm`.
    """
    settings = {"disable": not is_shown(), "leave": False, "dynamic_ncols": True, "delay": 0.5}
    return tqdm(iterable, what, **settings | arguments)


class Waiting:
    """Counts the seconds of something that takes long and reports nothing; for `with`.

    Args:
        what: What is done, for instance "compiling the first step".
    """

    def __init__(self, what: str):
        self._bar = live_line(what=what, bar_format="{desc}, {elapsed}", delay=0)
        self._ended = threading.Event()
        if is_shown():
            # The main thread is within native code, which lets other threads run.
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
    """Takes live lines from the terminal while something else is written to it."""
    if not is_shown():
        yield
        return
    with tqdm.external_write_mode(file=sys.stdout):
        yield
