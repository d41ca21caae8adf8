"""Lowers the learning rate when a metric of the validation split no longer improves."""

import logging

import keras

from callbacks.metric_direction import direction
from callbacks.steps import StepCallback
from distribution.keras_compat import inspection

log = logging.getLogger("recipes")

FACTOR = 0.5


@keras.saving.register_keras_serializable("keras_recipes")
class ScaledSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Multiplies the learning rate of another schedule by a factor that may change.

    Args:
        schedule: the schedule, or a constant rate.
        factor: the initial factor.

    Attributes:
        factor: scalar variable in Keras's float type.
    """

    def __init__(self, schedule, factor: float = 1.0):
        self.schedule = schedule
        self.factor = keras.Variable(
            factor,
            dtype=keras.config.floatx(),  # a number alone would make it float32
            trainable=False,
            name="rate_factor",
            aggregation="only_first_replica",
        )

    def __call__(self, step):
        """Returns the learning rate of a step, counted from 0; scalar."""
        if isinstance(self.schedule, keras.optimizers.schedules.LearningRateSchedule):
            return keras.ops.cast(self.schedule(step), self.factor.dtype) * self.factor
        # Not cast: that rounds a number to float32 first.
        return self.schedule * self.factor

    def get_config(self):
        """Returns the arguments of the constructor, as JSON values."""
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"schedule": schedule, "factor": float(keras.ops.convert_to_numpy(self.factor))}

    @classmethod
    def from_config(cls, config):
        """Builds the schedule from the return value of `get_config()`."""
        schedule = keras.saving.deserialize_keras_object(config["schedule"])
        return cls(schedule, config["factor"])


class ReduceOnPlateau(StepCallback):
    """Multiplies the learning rate after epochs without a better value of a metric.

    The optimizer's schedule continues; the factor multiplies its rate. Keras's `ReduceLROnPlateau`
    only works without a schedule, and no checkpoint keeps its state.

    Create it after `compile()` and before the model is built, under the strategy. Comes before
    `Checkpoint` among the callbacks.

    Args:
        model: compiled; its optimizer gets a `ScaledSchedule`.
        patience: epochs without an improvement after which the rate is lowered.
        metric: validation metric, for instance "val_loss".
        factor: multiplies the rate, in (0, 1).
        mode: "min" or "max", or "auto" to decide by the metric.
    """

    def __init__(
        self,
        model: keras.Model,
        patience: int,
        metric: str = "val_loss",
        factor: float = FACTOR,
        mode: str = "auto",
    ):
        super().__init__()
        self.patience, self.metric, self.factor, self.mode = patience, metric, factor, mode
        self.best: float | None = None
        self.waited = 0  # epochs
        optimizer = model.optimizer
        rate = inspection.learning_rate_of(getattr(optimizer, "inner_optimizer", optimizer))
        if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = keras.ops.convert_to_numpy(rate).item()
        with model.distribute_strategy.scope():
            self._schedule = ScaledSchedule(rate)
            optimizer.learning_rate = self._schedule

    def on_epoch_end(self, epoch, logs=None):
        """Compares the metric with the best value, and lowers the rate if it is due."""
        if self.metric not in logs:  # an epoch without validation: fit(validation_freq=...)
            return
        value = float(logs[self.metric])
        highest = direction(self.metric, self.model, self.mode) == "max"
        if self.best is None or (value > self.best if highest else value < self.best):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited < self.patience:
            return
        self.waited = 0
        factor = self._factor() * self.factor
        self._schedule.factor.assign(factor)
        log.info(
            "epoch %d: %s not better than %.4f in %d epoch(s): learning rate x %.3g",
            epoch + 1,
            self.metric,
            self.best,
            self.patience,
            factor,
        )

    def _factor(self) -> float:
        return keras.ops.convert_to_numpy(self._schedule.factor).item()

    def get_state(self) -> dict:
        """Returns the factor, the best value and the epochs since then."""
        return {"factor": self._factor(), "best": self.best, "waited": self.waited}

    def set_state(self, state: dict) -> None:
        """Restores the state."""
        self.best, self.waited = state["best"], state["waited"]
        self._schedule.factor.assign(state["factor"])
