"""Measures examples and tokens per second of training, without evaluation and saving."""

import time

import keras

from callbacks.late_numbers import unread
from callbacks.steps import StepCallback
from machine import xla_cache
from machine.mfu import measure_peak

MEASURED_FROM = 100  # steps; shorter runs skip it: measuring the peak would dominate


def is_speed(name: str) -> bool:
    """Returns whether a number depends on measured time, and so varies between runs."""
    return "per_second" in name or "mfu" in name


class Throughput(StepCallback):
    """Times each execution from the beginning of its batch to its end.

    Comes before every callback that evaluates or saves. The first execution, which traces and
    compiles, counts only as `time_to_first_step`. A GPU may still compute at the end of an
    execution, unless the run reads its results; until then the clock does not stop, since a later
    callback may wait for them, and the times of several executions add up to those of the GPU.

    Attributes:
        examples_per_step: examples per update of the weights, over all replicas.
        tokens_per_example: mean number of tokens per example without padding, or None.
        operations_per_example: floating-point operations of training on one example, or None. If
            set, `mfu` is computed (`machine/mfu.py`) in runs of at least `MEASURED_FROM` steps.
        devices: number of the run's devices of the kind on which the peak is measured.
        peak_operations_per_second: peak rate of one device, measured after the second execution,
            that `mfu` is relative to; None before, and where `mfu` is not computed.
        time_to_first_step: seconds from the creation of this object to the end of the first
            execution; None before.
    """

    def __init__(self):
        super().__init__()
        self.examples_per_step = 0
        self.tokens_per_example: float | None = None
        self.operations_per_example: float | None = None
        self.devices = 1
        self.peak_operations_per_second: float | None = None
        self.time_to_first_step: float | None = None
        self._steps, self._seconds = 0, 0.0
        self._window = (0, 0.0)  # steps and seconds since the last `since_last()`
        self._created = self._begun = time.perf_counter()
        self._computes = False  # the device may still compute the last execution

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock."""
        if not self._computes:
            self._begun = time.perf_counter()

    def on_step_end(self, step, logs):
        """Stops the clock."""
        loss = unread(logs, "loss")
        waits = self._steps == 0 or self.is_read()
        if waits:
            float(loss)  # waits for the device
        self._computes = not waits and "GPU" in getattr(loss, "device", "")
        now = time.perf_counter()
        if self.time_to_first_step is None:
            self.time_to_first_step = now - self._created
            xla_cache.store()  # early: the run may be killed
            return
        if (
            self._steps == 0
            and self.operations_per_example is not None
            and self.total_steps >= MEASURED_FROM
        ):
            dtype = keras.config.dtype_policy().compute_dtype
            self.peak_operations_per_second = measure_peak(dtype)
        steps, seconds = step - self._previous, now - self._begun
        self._begun = now
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._window = (self._window[0] + steps, self._window[1] + seconds)

    def leave_out(self, seconds: float) -> None:
        """Excludes what another callback did between the last steps, or within the present one."""
        self._begun += seconds

    def since_last(self) -> dict[str, float]:
        """Returns examples and tokens per second, and `mfu`, since the last call.

        Empty after only the first step.
        """
        window, self._window = self._window, (0, 0.0)
        return self._per_second(*window)

    def total(self) -> dict[str, float]:
        """Returns the same for all steps of this process except the first."""
        return self._per_second(self._steps, self._seconds)

    def seconds_for(self, steps: int) -> float | None:
        """Returns the estimated seconds for N steps; None before the first measurement."""
        return steps * self._seconds / self._steps if self._steps else None

    def _per_second(self, steps: int, seconds: float) -> dict[str, float]:
        if not seconds:
            return {}
        examples = steps * self.examples_per_step / seconds
        rates = {"examples_per_second": examples}
        if self.tokens_per_example is not None:
            rates["tokens_per_second"] = examples * self.tokens_per_example
        peak = self.peak_operations_per_second
        if peak is not None and self.operations_per_example is not None:
            operations = steps * self.examples_per_step * self.operations_per_example
            rates["mfu"] = operations / seconds / (peak * self.devices)
        return rates
