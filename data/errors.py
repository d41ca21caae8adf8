"""Defines the error for a wrong path, file or download, which the user can fix."""

import re
from collections.abc import Callable, Iterable, Sequence


class DataError(Exception):
    """Reports an unusable file, folder, download or vocabulary.

    The message is one line: it names the thing, its state and the expected one. Recipes print it
    and end with exit status 2.
    """


class InputError(DataError):
    """Reports one input of a recipe's `predict()` that cannot be answered.

    Attributes:
        index: Its place among the inputs.
    """

    def __init__(self, message: str, index: int):
        super().__init__(message)
        self.index = index


def read_each(read: Callable, inputs: Iterable) -> list:
    """Returns what `read` makes of each input of a recipe's `predict()`.

    Raises:
        InputError: It raised a DataError.
    """
    values = []
    for index, each in enumerate(inputs):
        try:
            values.append(read(each))
        except DataError as error:
            raise InputError(str(error), index) from error
    return values


def has_inputs(inputs: Sequence) -> bool:
    """Tells whether a recipe's `predict()` has inputs to answer.

    Raises:
        DataError: They are one text, of which each letter would be an input.
    """
    if isinstance(inputs, str):
        raise DataError(f"predict(): expected a list of inputs, found the text {inputs[:60]!r}")
    return len(inputs) > 0


def require_some(inputs: Iterable, message: str) -> None:
    """Refuses the rows of a table if none of them can be answered.

    Args:
        inputs: Of each row its input, "" for an empty one, or the error of one that cannot be read.
        message: Of the error, if all rows are empty.

    Raises:
        InputError: The error of the first row that is not empty.
        DataError: All are empty.
    """
    inputs = [each for each in inputs if each]
    if not inputs:
        raise DataError(message)
    if all(isinstance(each, InputError) for each in inputs):
        raise inputs[0]


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message that tells something, to quote in ours."""
    # TensorFlow's begins with where in its graph it failed.
    text = re.sub(r"^\{\{function_node \S+\}\}", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    node = next((n for n, line in enumerate(lines) if line.startswith("[[{{node")), 0)
    if node:  # TensorFlow's: what was wrong, behind where in the code
        return lines[node - 1][:200]
    return (lines or [type(error).__name__])[0][:200]


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an error means that the machine, or a device, has too little memory.

    Whoever explains any error of a library leaves this one to the command line, which says what to
    change.
    """
    # The second is TensorFlow's, which few programs import.
    return isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError"


def listed(names: Sequence[str]) -> str:
    """Lists names for a message, at most five of them."""
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)
