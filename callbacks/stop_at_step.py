"""Ends `fit()` at the run's last step, which may lie in mid-epoch."""

from callbacks.steps import StepCallback


class StopAtStep(StepCallback):
    """Ends `fit()` after the run's last step, which `--max-steps` may put into mid-epoch."""

    def on_step_end(self, step, logs):
        """Ends the epoch at the last step."""
        if step >= self.total_steps:
            self.model.stop_training = True
