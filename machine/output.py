"""Makes a program work without its standard streams, and end silently after `| head`."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator


def prepare_streams() -> None:
    """Makes standard output take every text, and opens the streams that are closed.

    What the encoding of the locale lacks is written as an escape, as on standard error.
    """
    open_closed_streams()
    # Python's answers to what cannot be encoded; the second one is that of the locale C.
    stock = ("strict", "surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in stock:
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def silent_broken_pipe() -> Iterator[None]:
    """Exits silently with status 1 once standard output is closed.

    Python itself would print a traceback, or `Exception ignored` when it ends.
    """
    prepare_streams()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # flush now, not when Python ends
    except BrokenPipeError:
        discard_output()
        sys.exit(1)


def open_closed_streams() -> None:
    """Opens /dev/null for each standard stream that this process was started without (`>&-`).

    Otherwise the next file or connection that it opens gets that number, and native code's messages
    go there.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # The lowest free number is the stream's. Child processes inherit it.
            stream = open(os.devnull, "r" if name == "stdin" else "w")
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def discard_output() -> None:
    """Discards the buffered rest of standard output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
