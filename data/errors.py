"""Defines the error for a wrong path, file or download, which the user can fix."""

from collections.abc import Sequence


class DataError(Exception):
    """Reports an unusable file, folder, download or vocabulary.

    The message is one line: it names the thing, its state and the expected one. Recipes print it
    and end with exit status 2.
    """


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, to quote in ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def listed(names: Sequence[str]) -> str:
    """Lists names for a message, at most five of them."""
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)
