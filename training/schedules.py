"""Learning rate schedules that keras.optimizers.schedules lacks, and that of `--lr-schedule`."""

import keras
from keras.optimizers.schedules import CosineDecay, LearningRateSchedule, PolynomialDecay

from training.plan import Plan


def reshaped(decay: PolynomialDecay, options, plan: Plan) -> LearningRateSchedule:
    """Returns the schedule that `--lr-schedule` names, with the rates and steps of a linear decay.

    Args:
        decay: from the peak rate to that of the run's end, in the steps after the warm-up.
        options: a `TransformerOptions`, with `lr_schedule` and `min_lr_ratio`.
        plan: the steps of the decay of "wsd".
    """
    peak, steps = decay.initial_learning_rate, decay.decay_steps
    if options.lr_schedule == "cosine":
        return CosineDecay(peak, steps, alpha=options.min_lr_ratio)
    if options.lr_schedule == "constant":
        return PolynomialDecay(peak, steps, peak)
    if options.lr_schedule == "wsd":  # warm-up, stable, decay
        last = PolynomialDecay(peak, plan.lr_decay_steps, decay.end_learning_rate)
        return Hold(steps - plan.lr_decay_steps, last)
    return decay


@keras.saving.register_keras_serializable("keras_recipes")
class WarmUp(LearningRateSchedule):
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


@keras.saving.register_keras_serializable("keras_recipes")
class Hold(LearningRateSchedule):
    """Keeps the initial rate of another schedule for some steps, then follows it.

    Args:
        steps: steps with that rate.
        after: schedule that starts, at its step 0, after them.
    """

    def __init__(self, steps: int, after):
        self.steps = steps
        self.after = after

    def __call__(self, step):
        """Returns the learning rate of a step, counted from 0; scalar."""
        step = keras.ops.cast(step, keras.config.floatx())
        return self.after(keras.ops.maximum(step - self.steps, 0.0))

    def get_config(self):
        """Returns the arguments of the constructor, as JSON values."""
        return {"steps": self.steps, "after": keras.saving.serialize_keras_object(self.after)}

    @classmethod
    def from_config(cls, config):
        """Builds the schedule from the return value of `get_config()`."""
        return cls(config["steps"], keras.saving.deserialize_keras_object(config["after"]))
