"""Shows the progress of a run in one live line on a terminal."""

import time
from collections.abc import Callable

from tqdm import tqdm

from callbacks.records import Records, used_learning_rate
from callbacks.steps import StepCallback
from callbacks.terminal_log import format_loss, format_seconds, speed_of
from callbacks.throughput import Throughput
from data.live_line import Waiting, is_shown, live_line

REDRAW_SECONDS = 0.5  # shortest interval: drawing waits for the device
LINE = "{bar:8} {desc}"  # 80 columns, unless a number is extreme


class EvaluationProgress(StepCallback):
    """Shows the number of evaluated batches; on a terminal only."""

    def __init__(self):
        super().__init__()
        self._evaluation: tqdm | None = None

    def on_test_batch_end(self, batch, logs=None):
        """Counts a batch."""
        if self._evaluation is None:
            self._evaluation = live_line(what="evaluating", unit=" batches")
        self._evaluation.update(batch + 1 - self._evaluation.n)

    def on_test_end(self, logs=None):
        """Removes the line."""
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None


class Progress(EvaluationProgress):
    """Shows step, loss, learning rate, speed and remaining time; on a terminal only.

    The first step traces and compiles the model, which may take minutes: the line says so and
    counts the seconds. After that it is redrawn at most twice a second. The loss is the mean since
    the last line of the log. Evaluations within `fit()` are shown in the same line.

    Comes after `records` among the callbacks of `fit()`; also a callback of `evaluate()`.

    Args:
        throughput: source of the speed.
        records: source of the loss.
    """

    def __init__(self, throughput: Throughput, records: Records):
        super().__init__()
        self.throughput = throughput
        self.records = records
        self._compiling: Waiting | None = None
        self._steps: tqdm | None = None
        self._drawn = 0.0

    def on_train_begin(self, logs=None):
        """Shows that the first step compiles."""
        if is_shown() and self.step < self.total_steps:
            name = f"step {self.step + 1}/{self.total_steps}"
            self._compiling = Waiting(f"{name}  compiling the first step")

    def on_step_end(self, step, logs):
        """Draws the step."""
        if self._compiling is not None:
            self._compiling.close()
            self._compiling = None
            self._steps = live_line(
                what=self._line(), total=self.total_steps, initial=step, bar_format=LINE, delay=0
            )
        elif self._steps is not None:
            self._draw(self._line, step >= self.total_steps)

    def _draw(self, line: Callable[[], str], at_once: bool = False) -> None:
        now = time.monotonic()
        if self._steps is not None and (at_once or now - self._drawn >= REDRAW_SECONDS):
            self._drawn, self._steps.n = now, self.step
            self._steps.set_description_str(line())

    def _line(self) -> str:
        rate = used_learning_rate(self.model.optimizer)
        parts = [self._place(), f"loss {format_loss(self.records.loss_now)}", f"lr {rate:.3g}"]
        parts += speed_of(self.throughput.total())
        seconds = self.throughput.seconds_for(self.total_steps - self.step)
        if seconds is not None:
            parts.append(f"{format_seconds(seconds)} left")
        return "  ".join(parts)

    def _place(self) -> str:
        return f"step {self.step}/{self.total_steps}"

    def on_test_begin(self, logs=None):
        """Shows that an evaluation begins; the first one has to compile."""
        self._draw(lambda: f"{self._place()}  evaluating", at_once=True)

    def on_test_batch_end(self, batch, logs=None):
        """Counts the batches of an evaluation: within `fit()` in the line of the step."""
        if self._steps is not None:
            self._draw(lambda: f"{self._place()}  evaluating, batch {batch + 1}")
        elif self._compiling is None:
            super().on_test_batch_end(batch, logs)

    def on_train_end(self, logs=None):
        """Removes the line."""
        self.close()

    def close(self) -> None:
        """Removes all lines; the run calls it, since an exception may have ended the training."""
        self.on_test_end()
        for line in (self._compiling, self._steps):
            if line is not None:
                line.close()
        self._compiling = self._steps = None
