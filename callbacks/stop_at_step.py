"""Ends `fit()` at the run's last step, which may lie in mid-epoch."""

from callbacks.steps import StepCallback


class StopAtStep(StepCallback):
    """Ends `fit()` after the run's last step, which `--max-steps` may put into mid-epoch.

    Args:
        steps_per_epoch: updates of the weights in an epoch.
        last_step: the run's last step.
    """

    def __init__(self, steps_per_epoch: int, last_step: int):
        super().__init__(steps_per_epoch, last_step)
        self.last_step = last_step

    def on_step_end(self, step, logs):
        """Ends the epoch at the last step."""
        if step >= self.last_step:
            self.model.stop_training = True
