"""Writes a TensorBoard profile of a few steps: which op ran when, on which device, how long."""

import logging
from pathlib import Path

import tensorflow as tf

from callbacks.errors import saving
from callbacks.steps import StepCallback

log = logging.getLogger("recipes")


class Profile(StepCallback):
    """Profiles the steps from `first` to `last`, both counted from 1 and both included.

    An execution of several steps is profiled as a whole.

    Args:
        folder: the run's folder, in which TensorBoard looks for profiles; None where this process
            profiles nothing.
        first: the first step.
        last: the last step.
    """

    def __init__(self, folder: Path | None, first: int, last: int):
        super().__init__()
        self.folder = folder
        self.first, self.last = first, last
        self._trace: tf.profiler.experimental.Trace | None = None
        self._runs = False

    def on_train_batch_begin(self, batch, logs=None):
        """Starts with the execution that contains the first step."""
        if self.folder is None:
            return
        step = self.epoch * self.steps_per_epoch + batch + 1
        ends = step + self.model.steps_per_execution - 1
        if not self._runs and step <= self.last and ends >= self.first:
            tf.profiler.experimental.start(str(self.folder))
            self._runs = True
        if self._runs:
            self._trace = tf.profiler.experimental.Trace("train", step_num=step, _r=1)
            self._trace.__enter__()

    def on_step_end(self, step, logs):
        """Stops after the last step."""
        if self._trace is not None:
            float(logs["loss"])  # waits for the device
            self._trace.__exit__(None, None, None)
            self._trace = None
        if step >= self.last:
            self.close()

    def on_train_end(self, logs=None):
        """Stops where the run ended early."""
        self.close()

    def close(self) -> None:
        """Writes what was profiled, also of a run that is stopped.

        Raises:
            CannotSave: the disk is full, or the folder is gone or not writable.
        """
        if not self._runs:
            return
        self._runs = False
        with saving(f"the profile in {self.folder}", "", tf.errors.OpError):
            tf.profiler.experimental.stop()
        log.info("profile of steps %d to %d in %s", self.first, self.last, self.folder)
