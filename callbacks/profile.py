"""Profiles some steps of a run for TensorBoard's Profile page."""

import logging
import time
from pathlib import Path

import tensorflow as tf

from callbacks.errors import saving
from callbacks.steps import StepCallback
from callbacks.throughput import Throughput

log = logging.getLogger("recipes")


class Profile(StepCallback):
    """Profiles host and devices from one step to another.

    Args:
        folder: the run's folder; the profile is stored in its `plugins/profile`.
        window: first and last step of the run, counted from 1; None for no profile.
        throughput: excludes the seconds of the profiler's start and end.
    """

    def __init__(self, folder: Path, window: tuple[int, int] | None, throughput: Throughput):
        super().__init__()
        self.folder = folder
        self.window = window
        self.throughput = throughput
        self._running = False

    def on_train_batch_begin(self, batch, logs=None):
        """Starts before the execution that contains the first step of the window."""
        if self.window is None or self._running:
            return
        first, last = self.window
        if self.step < last and first <= self.step + self.model.steps_per_execution:
            begun = time.perf_counter()
            with saving(self.folder, "", tf.errors.OpError):
                tf.profiler.experimental.start(str(self.folder))
            self._running = True
            self.throughput.leave_out(time.perf_counter() - begun)

    def on_step_end(self, step, logs):
        """Ends after the last step of the window."""
        if self._running and self.window is not None and step >= self.window[1]:
            float(logs["loss"])  # waits for the device
            begun = time.perf_counter()
            self.close()
            self.throughput.leave_out(time.perf_counter() - begun)

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
