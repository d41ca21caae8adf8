"""Handles SIGTERM, SIGINT and SIGHUP: the first saves and stops the run, a second ends it at once.

On the command line the process ends. A notebook's kernel keeps running.

Python calls a handler only between two of its own instructions, so not while TensorFlow compiles a
step, which may take minutes. A thread therefore reads the signals (`signal.set_wakeup_fd`): it
acknowledges the first one at once, and a second one ends the process at any time.
"""

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from data import live_line
from training.options import in_notebook

# Supervisors often signal both the process and its group, as `timeout` does; count that once.
SAME_REQUEST_SECONDS = 0.5
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed
END = b"\0"  # no signal has this number


class StopRequested(KeyboardInterrupt):
    """Raised for a signal outside of training, or a second one: nothing is saved."""


class Signals:
    """Takes over these signals while a run is open.

    Attributes:
        asked: whether a signal was received.
        training: whether the run can save: then a signal only sets `asked`, which the run checks.
            Otherwise it raises `StopRequested`.
        finished: whether this worker has finished and at most waits for the chief, which writes the
            model: then a signal only sets `asked`, and the run ends as if there was none.
    """

    def __init__(self):
        self.asked = False
        self.training = self.finished = False
        self._first: float | None = None  # when the first signal was acknowledged
        self._before: dict = {}
        self._wakeup_before = -1
        self._reader: threading.Thread | None = None
        self._sender: socket.socket | None = None

    def install(self) -> None:
        """Takes over the signals, but not ignored ones; only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in HANDLED:
            before = signal.getsignal(number)
            if before != self._handle:  # TensorFlow's strategies install their own handlers
                self._before.setdefault(number, before)
            is_ignored = self._before.get(number) == signal.SIG_IGN  # nohup, the background
            signal.signal(number, signal.SIG_IGN if is_ignored else self._handle)
        if self._reader is None and not in_notebook():  # its event loop reads the wake-up socket
            receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(
                self._sender.fileno(), warn_on_full_buffer=False
            )
            self._reader = threading.Thread(
                target=self._read, args=(receiver,), name="signals", daemon=True
            )
            self._reader.start()

    def restore(self) -> None:
        """Restores the handlers from before `install()`, and clears the request."""
        if self._reader is not None and self._sender is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self._sender.send(END)
            self._reader.join()
            self._sender.close()
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
        self.asked = self.training = self.finished = False
        self._first = self._reader = self._sender = None

    def forget_reader(self) -> None:
        """Drops the reader in a forked process; the parent keeps it."""
        if self._reader is not None:
            signal.set_wakeup_fd(-1)
            self._reader = self._sender = None

    def _read(self, receiver: socket.socket) -> None:
        with receiver:
            while (numbers := receiver.recv(64)) and END not in numbers:
                for number in numbers:
                    if number in HANDLED:
                        self._acknowledge(number)

    def _acknowledge(self, number: int) -> None:
        if self._first is None:
            self._first = time.monotonic()
            name = signal.Signals(number).name
            with contextlib.suppress(OSError), live_line.paused():  # the terminal may be closed
                print(
                    f"\n{name}: saving and stopping; a second one stops immediately",
                    file=sys.stderr,
                    flush=True,
                )
        elif time.monotonic() - self._first > SAME_REQUEST_SECONDS:
            if in_notebook():
                raise StopRequested("not saved: it was interrupted twice")
            os._exit(128 + number)

    def _handle(self, number, frame):
        if self._reader is None:
            self._acknowledge(number)
        before, self.asked = self.asked, True
        if not before and not (self.training or self.finished):
            raise StopRequested


@contextlib.contextmanager
def all_interrupt() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise `KeyboardInterrupt` as Ctrl-C does, unless they are ignored.

    For programs that do not train: what they were writing is removed.
    """
    last = -math.inf

    def interrupt(number, frame):
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt

    taken = [number for number in HANDLED if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


signals = Signals()
os.register_at_fork(after_in_child=signals.forget_reader)
