"""Prints the learning rate at the end of each epoch."""

import logging

import keras

from distribution import keras_compat

log = logging.getLogger("recipes")


def used_learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """The rate of the optimizer's last update; under a schedule that of the step before."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    schedule = keras_compat.learning_rate_of(inner)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        done = keras.ops.convert_to_numpy(inner.iterations)
        return float(keras.ops.convert_to_numpy(schedule(max(int(done) - 1, 0))))
    return float(keras.ops.convert_to_numpy(inner.learning_rate))


class LearningRatePrinter(keras.callbacks.Callback):
    """Prints, at each epoch's end, the learning rate that the optimizer just used."""

    def on_epoch_end(self, epoch, logs=None):
        """Prints one line."""
        rate = used_learning_rate(self.model.optimizer)
        log.info("epoch %d: learning rate %.3g", epoch + 1, rate)
