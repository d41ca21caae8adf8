"""Ends `fit()` at the run's last step or on a bad loss, and an evaluation on a signal."""

import concurrent.futures
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import SupportsFloat

from callbacks.checkpoint import newest_path
from callbacks.errors import BadLoss, Stopped
from callbacks.late_numbers import unread
from callbacks.records import loss_scale, used_learning_rate
from callbacks.steps import StepCallback
from data.errors import DataError

log = logging.getLogger("recipes")

WEIGHTS_REMEDY = "a lower --base-learning-rate or --clip-norm 1 may help"
METRIC_REMEDY = "val_loss is finite: the metric itself is not a number (a division by zero?)"


class StopAtStep(StepCallback):
    """Ends `fit()` after the run's last step, which `--max-steps` may move into mid-epoch.

    Comes before callbacks that record or save an epoch.
    """

    def on_step_end(self, step, logs):
        """Ends the epoch at the last step."""
        if step >= self.total_steps:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        """Raises `DataError` where the data ended the epoch: Keras only warns, and continues."""
        if self.step < self.last_step_of_epoch() and not self.model.stop_training:
            raise DataError(
                f"train_data ended after {self.step} of {self.total_steps} steps: repeat() it"
            )


class StopEvaluation(StepCallback):
    """Interrupts an evaluation when the run is asked to stop; the resumed run repeats it.

    Args:
        asked_to_stop: returns, equally on all workers, whether the run should stop.
    """

    def __init__(self, asked_to_stop: Callable[[], bool]):
        super().__init__()
        self.asked_to_stop = asked_to_stop

    def on_test_batch_end(self, batch, logs=None):
        """Raises `Stopped` after the batch."""
        if self.asked_to_stop():
            raise Stopped


class StopOnBadLoss(StepCallback):
    """Raises `BadLoss` when the loss, or a metric of the validation split, is not finite.

    A step that `LossScaleOptimizer` skipped (it lowered its scale) is not a bad loss: the weights
    did not change. If the loss itself was not finite in that step, the epoch's metrics are reset.

    Args:
        checkpoints: the run's folder of checkpoints.
    """

    def __init__(self, checkpoints: Path):
        super().__init__()
        self.checkpoints = checkpoints
        self._scale = 0.0
        self._unread: tuple[int, SupportsFloat] | None = None  # the last step and its loss
        self._reader: concurrent.futures.Executor | None = None

    def on_train_begin(self, logs=None):
        """Stores the loss scale."""
        self._scale, self._unread = loss_scale(self.model.optimizer), None

    def on_train_end(self, logs=None):
        """Ends the thread that reads."""
        if self._reader is not None:
            self._reader.shutdown()
            self._reader = None

    def _begin_to_read(self, loss):
        """Lets a thread read a loss from a GPU at once.

        TensorFlow copies from a GPU after all that was given to it before the copy, so a copy that
        is asked for when the next execution has begun waits for that, too. An error of that thread
        is left to whoever reads the loss next.
        """
        if "GPU" not in getattr(loss, "device", ""):
            return
        if self._reader is None:
            self._reader = concurrent.futures.ThreadPoolExecutor(1, "loss")
        self._reader.submit(float, loss)

    def on_step_end(self, step, logs):
        """Checks the loss of the execution before, and this one's where the run reads it anyway.

        So a device computes while the loss before is read. Without loss scaling nothing is lost:
        the loss is the epoch's running mean, which stays non-finite.
        """
        self.check()
        loss = unread(logs, "loss")
        self._begin_to_read(loss)
        self._unread = (step, loss)
        if self._scale or self.is_read():
            self.check()

    def check(self) -> None:
        """Raises `BadLoss` if the last loss that was not read is not finite."""
        if self._unread is None:
            return
        (step, number), self._unread = self._unread, None
        loss, before = float(number), self._scale
        self._scale = loss_scale(self.model.optimizer)
        if math.isfinite(loss):
            return
        if not 1.0 <= self._scale < before:
            self._raise("the loss", loss, step)
        log.warning(
            "step %d: the loss overflowed in half precision; the step was skipped, the loss scale "
            "is now %g, and the epoch's metrics begin again",
            step,
            self._scale,
        )
        self.model.reset_metrics()

    def on_epoch_end(self, epoch, logs=None):
        """Checks the validation metrics: the last step may have broken the weights.

        And the loss, if a callback has ended the epoch after a step that the run does not read.
        """
        self.check()
        for name, value in logs.items():
            if name.startswith("val_") and not math.isfinite(float(value)):
                # The weights are well where the loss of the same evaluation is finite.
                of_metric = math.isfinite(float(logs.get("val_loss", math.nan)))
                self._raise(name, value, self.step, METRIC_REMEDY if of_metric else WEIGHTS_REMEDY)

    def _raise(self, name: str, value, step: int, remedy: str = WEIGHTS_REMEDY) -> None:
        rate = used_learning_rate(self.model.optimizer, self.step - step)
        raise BadLoss(
            f"{name} is {float(value)} at step {step} (learning rate {rate:.3g}); the last "
            f"good checkpoint: {newest_path(self.checkpoints) or 'none'}; {remedy}"
        )
