"""Ends a program whose reader has left, as `| head` does: without a message."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def silent_broken_pipe() -> Iterator[None]:
    """Exits with status 1, and prints nothing, where standard output cannot be written any more.

    Python itself would print a traceback, or `Exception ignored` when it ends.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # whatever is left is written here, not when Python ends
    except BrokenPipeError:
        discard_output()
        sys.exit(1)


def discard_output() -> None:
    """Sends what is left to be written on standard output to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
