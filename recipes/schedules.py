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


class InverseSquareRoot(keras.optimizers.schedules.LearningRateSchedule):
    """Grows linearly, then falls with the square root of the step.

    The schedule of "Attention Is All You Need" (Vaswani et al., arXiv 1706.03762, section 5.3):
    factor * width^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), its steps counted from 1. The
    peak, at the end of the warm-up, is factor * (width * warmup_steps)^-0.5.

    Args:
        factor: what the paper's rate is multiplied by; 1 there.
        width: width of the model.
        warmup_steps: steps of the warm-up, at least 1.
    """

    def __init__(self, factor: float, width: int, warmup_steps: int):
        self.factor = factor
        self.width = width
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        """The learning rate of a step that is counted from 0; scalar."""
        step = keras.ops.cast(step, keras.config.floatx()) + 1.0
        warm = step * self.warmup_steps**-1.5
        return self.factor * self.width**-0.5 * keras.ops.minimum(keras.ops.rsqrt(step), warm)

    def get_config(self):
        """The arguments."""
        return {"factor": self.factor, "width": self.width, "warmup_steps": self.warmup_steps}
