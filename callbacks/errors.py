"""Exceptions that end a run early; each message is for a person."""

import contextlib
import os
from collections.abc import Iterator


class Stopped(Exception):
    """The run was asked to stop, and ends after the batch in which it noticed."""


class CannotSave(Exception):
    """Something of the run could not be written; what was written before is unchanged."""


class BadLoss(Exception):
    """A number is not finite; the message names step, learning rate and last good checkpoint."""


@contextlib.contextmanager
def saving(what: object, hint: str = "", *others: type[Exception]) -> Iterator[None]:
    """Turns an error of the disk into `CannotSave`.

    Args:
        what: what is written, for the message.
        hint: appended to the message.
        *others: exceptions that mean the same as `OSError`.
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
