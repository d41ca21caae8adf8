"""Learning rate schedules that keras.optimizers.schedules has no class for."""

import keras


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Grows linearly to the peak, then follows another schedule.

    Args:
        peak: learning rate at the end of the warm-up.
        warmup_steps: steps of the warm-up; step s (from 0) has the rate peak * (s + 1) / steps.
        after: schedule that begins, at its step 0, when the warm-up ends.
    """

    def __init__(self, peak: float, warmup_steps: int, after):
        self.peak = peak
        self.warmup_steps = warmup_steps
        self.after = after

    def __call__(self, step):
        """The learning rate of a step that is counted from 0; scalar."""
        dtype = keras.config.floatx()
        step = keras.ops.cast(step, dtype)
        warm = self.peak * (step + 1.0) / max(self.warmup_steps, 1)
        later = self.after(keras.ops.maximum(step - self.warmup_steps, 0.0))
        return keras.ops.where(
            step < self.warmup_steps, keras.ops.cast(warm, dtype), keras.ops.cast(later, dtype)
        )

    def get_config(self):
        """The arguments, `after` serialised."""
        return {
            "peak": self.peak,
            "warmup_steps": self.warmup_steps,
            "after": keras.optimizers.schedules.serialize(self.after),
        }

    @classmethod
    def from_config(cls, config):
        """Rebuilds the schedule from `get_config()`."""
        after = keras.optimizers.schedules.deserialize(config["after"])
        return cls(config["peak"], config["warmup_steps"], after)
