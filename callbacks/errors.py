"""Exceptions that end a run early, and the conversion of disk errors."""

import contextlib
import os
from collections.abc import Iterator


class Stopped(Exception):
    """Raised after the batch in which the run was asked to stop."""


class CannotSave(Exception):
    """Raised if a file of the run cannot be written; earlier files are unchanged."""


class BadLoss(Exception):
    """Raised for a loss or metric that is not finite; names step, rate and last good checkpoint."""


@contextlib.contextmanager
def saving(what: object, hint: str = "", *others: type[Exception]) -> Iterator[None]:
    """Converts an error of the disk to `CannotSave`.

    Args:
        what: the file or folder, for the message.
        hint: appended to the message.
        *others: exceptions that are treated as `OSError`.
    """
    caught: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except caught as error:
        # HDF5 and TensorFlow write several lines, and name a node or a path before the reason.
        lines = str(getattr(error, "message", error)).splitlines() or [type(error).__name__]
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else lines[0].rpartition("; ")[2][:200]
        raise CannotSave(f"{what} cannot be written: {reason}{hint}") from error
