"""Measures examples and tokens a second: training alone, without evaluation and saving."""

import time

from callbacks.steps import StepCallback


class Throughput(StepCallback):
    """Times each execution from the beginning of its batch to its end.

    Stands before every callback that evaluates or saves. The first execution, which traces and
    compiles, counts as `time_to_first_step` alone.

    Attributes:
        examples_per_step: examples of one update of the weights, over all replicas.
        tokens_per_example: tokens that carry text in an average example, or None.
        time_to_first_step: seconds from the making of this object to the end of the first
            execution; None before.
    """

    def __init__(self, examples_per_step: int = 0, tokens_per_example: float | None = None):
        super().__init__()
        self.examples_per_step = examples_per_step
        self.tokens_per_example = tokens_per_example
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
            return
        steps, seconds = step - self._previous, now - self._begun
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._window = (self._window[0] + steps, self._window[1] + seconds)

    def since_last(self) -> dict[str, float]:
        """Examples and tokens a second since the last call; empty after the first step alone."""
        window, self._window = self._window, (0, 0.0)
        return self._per_second(*window)

    def total(self) -> dict[str, float]:
        """Examples and tokens a second of all steps of this process but the first."""
        return self._per_second(self._steps, self._seconds)

    def seconds_for(self, steps: int) -> float | None:
        """How long so many steps will take; None while nothing is known."""
        return steps * self._seconds / self._steps if self._steps else None

    def _per_second(self, steps: int, seconds: float) -> dict[str, float]:
        if not steps or not seconds:
            return {}
        examples = steps * self.examples_per_step / seconds
        found = {"examples_per_second": examples}
        if self.tokens_per_example is not None:
            found["tokens_per_second"] = examples * self.tokens_per_example
        return found
