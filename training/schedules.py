"""Learning rate schedules that keras.optimizers.schedules lacks."""

import keras


@keras.saving.register_keras_serializable("keras_recipes")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Grows linearly to the initial rate of another schedule, then follows it.

    Args:
        warmup_steps: steps of the warm-up; step s (from 0) has the share (s + 1) / warmup_steps.
        after: schedule that starts, at its step 0, when the warm-up ends.

    Example:
        WarmUp(200, keras.optimizers.schedules.PolynomialDecay(1e-3, 9800, 0.0))
    """

    def __init__(self, warmup_steps: int, after):
        self.warmup_steps = warmup_steps
        self.after = after

    def __call__(self, step):
        """Returns the learning rate of a step, counted from 0; scalar."""
        dtype = keras.config.floatx()
        step = keras.ops.cast(step, dtype)
        warm = keras.ops.cast(self.after(0), dtype) * (step + 1.0) / max(self.warmup_steps, 1)
        later = self.after(keras.ops.maximum(step - self.warmup_steps, 0.0))
        return keras.ops.where(step < self.warmup_steps, warm, keras.ops.cast(later, dtype))

    def get_config(self):
        """Returns the arguments of the constructor, as JSON values."""
        after = keras.saving.serialize_keras_object(self.after)
        return {"warmup_steps": self.warmup_steps, "after": after}

    @classmethod
    def from_config(cls, config):
        """Builds the schedule from the return value of `get_config()`."""
        after = keras.saving.deserialize_keras_object(config["after"])
        return cls(config["warmup_steps"], after)
