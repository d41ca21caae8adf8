"""Ends a program silently after its reader has closed the pipe, as `| head` does."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def silent_broken_pipe() -> Iterator[None]:
    """Exits silently with status 1 once standard output is closed.

    Python itself would print a traceback, or `Exception ignored` when it ends.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # flush now, not when Python ends
    except BrokenPipeError:
        discard_output()
        sys.exit(1)


def discard_output() -> None:
    """Discards the buffered rest of standard output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
