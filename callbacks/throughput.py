"""Measures examples and tokens a second: training alone, without evaluation and saving."""

import time

import keras

from callbacks.steps import StepCallback
from machine import xla_cache
from machine.mfu import measure_peak

MEASURED_FROM = 100  # steps of a run; in a shorter one the peak would take too large a part


def is_speed(name: str) -> bool:
    """Returns whether a number measures time: such numbers differ from run to run."""
    return "per_second" in name or "mfu" in name


class Throughput(StepCallback):
    """Times each execution from the beginning of its batch to its end.

    Comes before every callback that evaluates or saves. The first execution, which traces and
    compiles, counts as `time_to_first_step` alone.

    Attributes:
        examples_per_step: examples of one update of the weights, over all replicas.
        tokens_per_example: tokens that carry text in an average example, or None.
        operations_per_example: floating-point operations that training on an example needs, or
            None. Then `mfu` is computed (`machine/mfu.py`), in a run of `MEASURED_FROM` steps.
        devices: how many devices the run has of the kind that the peak is measured on.
        time_to_first_step: seconds from the making of this object to the end of the first
            execution; None before.
    """

    def __init__(self):
        super().__init__()
        self.examples_per_step = 0
        self.tokens_per_example: float | None = None
        self.operations_per_example: float | None = None
        self.devices = 1
        self._peak: float | None = None  # operations a second of one device
        self.time_to_first_step: float | None = None
        self._steps, self._seconds = 0, 0.0
        self._window = (0, 0.0)  # steps and seconds since the last `since_last()`
        self._created = self._begun = time.perf_counter()

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock."""
        self._begun = time.perf_counter()

    def on_step_end(self, step, logs):
        """Stops the clock."""
        float(logs["loss"])  # waits for the device
        now = time.perf_counter()
        if self.time_to_first_step is None:
            self.time_to_first_step = now - self._created
            xla_cache.store()  # before the run is perhaps killed
            return
        if (
            self._steps == 0
            and self.operations_per_example is not None
            and self.total_steps >= MEASURED_FROM
        ):
            self._peak = measure_peak(keras.config.dtype_policy().compute_dtype)
        steps, seconds = step - self._previous, now - self._begun
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._window = (self._window[0] + steps, self._window[1] + seconds)

    def since_last(self) -> dict[str, float]:
        """Returns examples and tokens a second, and `mfu`, since the last call.

        Empty after the first step alone.
        """
        window, self._window = self._window, (0, 0.0)
        return self._per_second(*window)

    def total(self) -> dict[str, float]:
        """Returns the same of all steps of this process but the first."""
        return self._per_second(self._steps, self._seconds)

    def seconds_for(self, steps: int) -> float | None:
        """Returns how long so many steps will take; None while nothing is known."""
        return steps * self._seconds / self._steps if self._steps else None

    def _per_second(self, steps: int, seconds: float) -> dict[str, float]:
        if not seconds:
            return {}
        examples = steps * self.examples_per_step / seconds
        found = {"examples_per_second": examples}
        if self.tokens_per_example is not None:
            found["tokens_per_second"] = examples * self.tokens_per_example
        if self._peak is not None and self.operations_per_example is not None:
            operations = steps * self.examples_per_step * self.operations_per_example
            found["mfu"] = operations / seconds / (self._peak * self.devices)
        return found
