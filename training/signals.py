"""SIGTERM and SIGINT: the first asks a run to save and stop, the second ends it at once.

On the command line that is the end of the process. A notebook's kernel lives on.
"""

import os
import signal
import sys
import threading
import time

from training.options import in_notebook

# Supervisors tend to signal a process and its group: that is one request.
SAME_REQUEST_SECONDS = 0.5


class StopRequested(KeyboardInterrupt):
    """SIGTERM or SIGINT outside of training, or the second one: nothing is saved."""


class Signals:
    """Takes over both signals while a run is open.

    Attributes:
        asked: whether a signal was received.
        training: whether the run can save: then the request is only noted, and the run looks at
            `asked`. Otherwise `StopRequested` is raised.
    """

    def __init__(self):
        self.asked = False
        self.training = False
        self._first = 0.0
        self._before: dict = {}

    def install(self) -> None:
        """Takes over both signals; does nothing outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.signal(number, self._handle)
            if before != self._handle:  # TensorFlow's strategies put handlers of their own
                self._before.setdefault(number, before)

    def restore(self) -> None:
        """Puts back the handlers from before `install()`, and forgets what was asked."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
        self.asked = self.training = False

    def _handle(self, number, frame):
        if self.asked:
            if time.monotonic() - self._first > SAME_REQUEST_SECONDS:
                if in_notebook():
                    raise StopRequested("not saved: it was interrupted twice")
                os._exit(128 + number)
            return
        self.asked, self._first = True, time.monotonic()
        name = signal.Signals(number).name
        print(f"\n{name}: saving and stopping; a second one stops immediately", file=sys.stderr)
        if not self.training:
            raise StopRequested


signals = Signals()
