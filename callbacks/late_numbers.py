"""Hands the numbers of each step to callbacks without reading them from the device.

Keras converts them to floats after each step, before it calls any callback. Until then a GPU has
finished the step, so it idles while the process prepares the next one.
"""

import threading
from collections.abc import MutableMapping

import keras

from callbacks.steps import StepCallback
from distribution.step import flat_results


class LateNumber:
    """A number that a device may still compute: `float(number)` waits for it.

    Any thread may read it. The tensor itself is read once, by one of them: an `EagerTensor` is not
    safe to read from several threads at once. On a GPU a run ended with `SystemError`, probably of
    that.

    Args:
        tensor: the number.
    """

    def __init__(self, tensor):
        self.tensor = tensor  # None once its number is known
        self.device: str = getattr(tensor, "device", "")
        self._number: float | None = None
        self._lock = threading.Lock()

    def __float__(self) -> float:
        with self._lock:
            if self._number is None:
                self._number = float(keras.ops.convert_to_numpy(self.tensor))
                self.tensor = None
            return self._number


class LateNumbers(dict):
    """A dict of numbers, each of which is read from the device when it is first looked up.

    Copies of it, such as `dict(numbers)`, are dicts of floats. What is no number stays as it is, as
    in Keras.

    Args:
        logs: tensors or numbers by name, as `train_function` returns them; dicts within it are
            flattened, as Keras does.
    """

    def __init__(self, logs: dict):
        pairs = sorted(flat_results(logs).items())
        super().__init__((name, LateNumber(value)) for name, value in pairs)

    def __getitem__(self, name):
        number = super().__getitem__(name)
        if not isinstance(number, LateNumber):
            return number
        try:
            return float(number)
        except (TypeError, ValueError):  # of several numbers, or none
            return number.tensor

    def __iter__(self):  # without it, dict() and ** would copy what is unread
        return super().__iter__()

    def pop(self, name, *default):
        """Removes a number and returns it."""
        if name in self:
            default = (self[name],)
        super().pop(name, *default)
        return default[0]

    def __eq__(self, other):
        return dict(self) == other

    def __ne__(self, other):
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        return repr(dict(self))

    # Those of dict do not use `__getitem__`.
    get = MutableMapping.get  # type: ignore[assignment]
    items = MutableMapping.items  # type: ignore[assignment]
    values = MutableMapping.values  # type: ignore[assignment]
    popitem = MutableMapping.popitem
    setdefault = MutableMapping.setdefault


def unread(logs: dict, name: str):
    """Returns a number of a step that may not be known yet; `float()` waits for it."""
    return dict.__getitem__(logs, name)


def _reads_late(callback: keras.callbacks.Callback, method: str) -> bool:
    """Returns whether a callback may get `LateNumbers`: it is Keras's, a run's, or does nothing.

    Others get a dict of floats, since code outside of Python may read a dict without its methods.
    """
    if isinstance(callback, StepCallback) or type(callback).__module__.startswith("keras."):
        return True
    stock, own = keras.callbacks.Callback, type(callback)
    return all(getattr(own, name) is getattr(stock, name) for name in (method, "on_batch_end"))


class CallbackList(keras.callbacks.CallbackList):
    """Calls the callbacks of `fit()` like Keras's, after a batch with `LateNumbers`."""

    def on_train_batch_end(self, batch, logs=None):
        """Calls them in their order."""
        self._call("on_train_batch_end", batch, LateNumbers(logs or {}))

    def on_test_batch_end(self, batch, logs=None):
        """Calls them in their order."""
        self._call("on_test_batch_end", batch, LateNumbers(logs or {}))

    def _call(self, method: str, batch: int, numbers: LateNumbers) -> None:
        for callback in self.callbacks:
            given = numbers if _reads_late(callback, method) else dict(numbers)
            getattr(callback, method)(batch, logs=given)
