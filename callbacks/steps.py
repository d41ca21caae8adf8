"""Counts steps, which are updates of the weights; the base class of the run's callbacks."""

from collections.abc import Sequence

import keras


class StepCallback(keras.callbacks.Callback):
    """Calls `on_step_end` with the step of the run, counted from 1 over all epochs.

    Subclasses implement `on_step_end(step, logs)`, which is called after each execution (with
    `steps_per_execution` above 1, after its last step). State that must survive a stop is returned
    by `get_state()`, stored in checkpoints, and passed to `set_state()` when a run resumes.

    Attributes:
        steps_per_epoch: updates of the weights per epoch. The run sets it before `fit()`.
        total_steps: updates of the weights in the whole run. The run sets it before `fit()`.
        read_every: the run logs, evaluates or saves after multiples of these numbers of steps.
        epoch: the current epoch, counted from 0.
        step: completed steps of the run.

    Example:
        class Shout(StepCallback):
            def on_step_end(self, step, logs):
                print(f"step {step} of {self.total_steps}: {logs['loss']}")
    """

    def __init__(self):
        super().__init__()
        self.steps_per_epoch: int = 0
        self.total_steps: int = 0
        self.read_every: Sequence[int | None] = (1,)
        self.epoch = 0
        self.step = 0
        self._previous = 0

    def count_steps(
        self,
        steps_per_epoch: int,
        total_steps: int,
        steps_done: int = 0,
        read_every: Sequence[int | None] = (1,),
    ) -> "StepCallback":
        """Sets the lengths of an epoch and of the run; returns the callback."""
        self.steps_per_epoch, self.total_steps = steps_per_epoch, total_steps
        self.read_every = read_every
        self.step = steps_done
        # The epoch of that step: after the run's last one no epoch begins.
        self.epoch = max(steps_done - 1, 0) // steps_per_epoch
        return self

    def on_epoch_begin(self, epoch, logs=None):
        """Stores the epoch."""
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        """Converts the batch of the epoch to the step of the run."""
        step = self.epoch * self.steps_per_epoch + min(batch + 1, self.steps_per_epoch)
        self._previous, self.step = self.step, min(step, self.total_steps)
        self.on_step_end(self.step, logs or {})

    def on_step_end(self, step: int, logs: dict) -> None:
        """Handles the end of a step; `logs` are the running means of its epoch."""

    def last_step_of_epoch(self) -> int:
        """Returns the step of the run that ends the epoch; the run may end within it."""
        return min((self.epoch + 1) * self.steps_per_epoch, self.total_steps)

    def is_due(self, every: int | None) -> bool:
        """Returns whether a multiple of `every` is among the steps of the last execution."""
        return every is not None and self.step // every > self._previous // every

    def is_read(self) -> bool:
        """Returns whether the run reads the results of the last execution at once.

        Where it does not, a callback that reads `logs` makes the device wait: on a GPU the next
        execution begins only when the loss of this one is known.
        """
        return self.step >= self.last_step_of_epoch() or any(map(self.is_due, self.read_every))

    def get_state(self) -> dict:
        """Returns the state to store in a checkpoint: JSON values.

        Numbers and arrays of NumPy are stored as numbers and lists.
        """
        return {}

    def set_state(self, state: dict) -> None:
        """Restores the return value of `get_state()`."""
