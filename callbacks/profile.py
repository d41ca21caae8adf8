"""Profiles some steps of a run for TensorBoard's Profile page."""

import logging
from pathlib import Path

import tensorflow as tf

from callbacks.errors import saving
from callbacks.steps import StepCallback

log = logging.getLogger("recipes")


class Profile(StepCallback):
    """Profiles host and devices from one step to another.

    Args:
        folder: the run's folder; the profile is stored in its `plugins/profile`.
        window: first and last step of the run, counted from 1; None for no profile.
    """

    def __init__(self, folder: Path, window: tuple[int, int] | None):
        super().__init__()
        self.folder = folder
        self.window = window
        self._running = False

    def on_train_batch_begin(self, batch, logs=None):
        """Starts before the execution that contains the first step of the window."""
        if self.window is None or self._running:
            return
        first, last = self.window
        if self.step < last and first <= self.step + self.model.steps_per_execution:
            with saving(self.folder, "", tf.errors.OpError):
                tf.profiler.experimental.start(str(self.folder))
            self._running = True

    def on_step_end(self, step, logs):
        """Ends after the last step of the window."""
        if self._running and self.window is not None and step >= self.window[1]:
            float(logs["loss"])  # waits for the device
            self.close()

    def on_train_end(self, logs=None):
        """Ends the profile if the run is shorter than the window."""
        self.close()

    def close(self) -> None:
        """Writes the profile; the run calls it, since an exception may have ended the training."""
        if self._running:
            self._running = False
            with saving(self.folder, "", tf.errors.OpError):
                tf.profiler.experimental.stop()
            log.info("profile of the steps: %s", self.folder / "plugins" / "profile")
