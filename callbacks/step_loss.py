"""Computes the loss of some steps from the running mean of an epoch."""

import math


class StepLoss:
    """Computes the mean loss of the steps since the last record, from the running means of Keras.

    Keras reports the mean over the epoch so far, in which each step counts the same: `n` steps of
    mean `m` have the sum `n * m`, and a step adds the difference of two such sums. A step whose
    loss is not finite (half precision skipped it, and `StopOnBadLoss` reset the epoch's metrics)
    counts in no mean.
    """

    def __init__(self):
        self.total, self.steps = 0.0, 0  # since the last record
        self.epoch = self.begin = self.done = 0  # first and last step of the running mean
        self.sum = 0.0  # of the losses from `begin` to `done`
        self.last = 0.0  # last value of `since_last()`

    def add(self, epoch: int, done: int, mean) -> None:
        """Adds the steps up to one; each step of an epoch is added with a later one or before.

        Args:
            epoch: the epoch, counted from 0.
            done: steps of the epoch that are done.
            mean: the epoch's running mean; a number, or a tensor, which is read.
        """
        mean = float(mean)
        if epoch != self.epoch:
            self.epoch, self.begin, self.done, self.sum = epoch, 0, 0, 0.0
        if not math.isfinite(mean):
            self.begin, self.done, self.sum = done, done, 0.0
            return
        before, self.sum = self.sum, (done - self.begin) * mean
        self.total += self.sum - before
        self.steps += done - self.done
        self.done = done

    def since_last(self) -> float:
        """Returns the mean since the last call; NaN where no step counts."""
        self.last = self.total / self.steps if self.steps else math.nan
        self.total, self.steps = 0.0, 0
        return self.last

    def so_far(self) -> float:
        """Returns the mean since the last call of `since_last()`; right after it, the same mean."""
        return self.total / self.steps if self.steps else self.last
