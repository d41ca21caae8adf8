"""Hands the numbers of each step to callbacks without reading them from the device.

Keras converts them to floats after each step, before it calls any callback. Until then a GPU has
finished the step, so it idles while the process prepares the next one.
"""

from collections.abc import Iterator

import keras


class LateNumbers(dict):
    """A dict of numbers, each of which is read from the device when it is first looked up.

    Copies of it, such as `dict(numbers)`, are plain dicts of floats. What is no number stays as it
    is, as in Keras.

    Args:
        logs: tensors or numbers by name, as `train_function` returns them; dicts within it are
            flattened, as Keras does.
    """

    def __init__(self, logs: dict):
        super().__init__(sorted(_flat(logs), key=lambda pair: pair[0]))

    def __getitem__(self, name):
        value = super().__getitem__(name)
        if not isinstance(value, float):
            try:
                value = float(keras.ops.convert_to_numpy(value))
            except (TypeError, ValueError):  # of several numbers, or none
                return value
            self[name] = value
        return value

    def _read(self) -> dict:
        return {name: self[name] for name in self}

    def __iter__(self):  # without it, dict() and ** would copy what is unread
        return super().__iter__()

    def get(self, name, default=None):
        """Returns a number, or the default."""
        return self[name] if name in self else default

    def items(self):
        """Returns the pairs of names and numbers."""
        return self._read().items()

    def values(self):
        """Returns the numbers."""
        return self._read().values()

    def copy(self) -> dict:
        """Returns a plain dict of the numbers."""
        return self._read()

    def pop(self, name, *default):
        """Removes a number and returns it."""
        if name in self:
            default = (self[name],)
        super().pop(name, *default)
        return default[0]

    def __eq__(self, other):
        return self._read() == other

    __hash__ = None

    def __or__(self, other):
        return self._read() | other

    def __ror__(self, other):
        return other | self._read()

    def __repr__(self) -> str:
        return repr(self._read())


def _flat(logs: dict) -> Iterator[tuple]:
    for name, value in logs.items():
        yield from _flat(value) if isinstance(value, dict) else [(name, value)]


def unread(logs: dict, name: str):
    """Returns a number of a step as it is: a tensor that the device may still compute."""
    return dict.__getitem__(logs, name)


class CallbackList(keras.callbacks.CallbackList):
    """Calls the callbacks of `fit()` like Keras's, after a training batch with `LateNumbers`."""

    def on_train_batch_end(self, batch, logs=None):
        """Calls them in their order."""
        numbers = LateNumbers(logs or {})
        for callback in self.callbacks:
            callback.on_train_batch_end(batch, logs=numbers)
