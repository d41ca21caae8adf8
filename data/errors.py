"""The one kind of error that a person can repair: a wrong path, file or download."""


class DataError(Exception):
    """A file, folder, download or vocabulary is not what it should be.

    The message is one line for a person: it names the thing, what was found and what was expected.
    Recipes print it and end with exit status 2.
    """


def first_line(error: Exception) -> str:
    """Returns the beginning of an error's message, for a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
