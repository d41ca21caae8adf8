"""Repairs variables that replicas assign in a step, and batch normalization over replicas."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable

from distribution.errors import DistributionError
from distribution.keras_compat.replacing import replaced


def normalise_unmasked_together() -> contextlib.AbstractContextManager:
    """Makes batch normalization use the global batch where it is synchronized.

    Breaks: with a mask Keras ignores `synchronized`, so each replica's part is normalised by
    itself. Without one it computes the variance as E[x^2] - E[x]^2, which in float32 has no correct
    digit where the mean is some thousand times the deviation; on one device it does not (no thread
    known). Does: adds up the unmasked values over the replicas, in the formula of one device.
    """

    def make(stock):
        def moments(self, inputs, mask):
            replica = tf.distribute.get_replica_context()
            several = replica is not None and replica.num_replicas_in_sync > 1
            if not self.synchronized or not several:
                return stock(self, inputs, mask)
            counts = None
            if mask is not None:
                counts = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))

            def global_sum(values):
                if counts is not None:
                    values = tf.where(counts, values, tf.zeros_like(values))
                own = tf.reduce_sum(values, self._reduction_axes, keepdims=True)
                return replica.all_reduce(tf.distribute.ReduceOp.SUM, own)

            number = global_sum(tf.ones_like(inputs))
            if mask is not None:  # as Keras divides
                number += keras.config.epsilon()
            mean = global_sum(inputs) / number
            variance = global_sum(tf.square(inputs - mean)) / number
            axes = self._reduction_axes
            return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

        return moments

    return replaced(keras.layers.BatchNormalization, "_moments", make)


@contextlib.contextmanager
def add_in_place() -> Iterator[None]:
    """Makes metrics and counters correct under CentralStorage- and ParameterServerStrategy.

    Breaks: Keras's `variable.assign_add(x)` assigns `variable + x`, as metrics like AUC do
    themselves. Where all replicas share one copy, the sum over n replicas counts the old value n
    times, and workers that do not wait for each other lose updates. Does: in a replica, adds in
    place what the value has more than the variable. Outside of them, such as where a saved sum is
    put back, a value is assigned as it is: a difference would round it.
    """

    def make(stock):
        def assign_add(self, value):
            if self._value is None:
                return stock(self, value)
            with _one_line_of_weights():
                self._value.assign_add(tf.cast(value, self._value.dtype))
            return None

        return assign_add

    def make_assign(stock):
        def assign(self, value):
            is_sum = self._value is not None and self.aggregation == "sum"
            # Without a strategy's scope TensorFlow's default one says that it is in a replica.
            in_replica = (
                tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
            )
            if not (is_sum and in_replica):
                with _one_line_of_weights():
                    return stock(self, value)
            value = tf.cast(tf.convert_to_tensor(value), self._value.dtype)
            self._value.assign_add(value - self._value)
            return value

        return assign

    with replaced(Variable, "assign_add", make), replaced(Variable, "assign", make_assign):
        yield


@contextlib.contextmanager
def _one_line_of_weights() -> Iterator[None]:
    """Explains that replicas which share one copy of a weight cannot assign to it."""
    try:
        yield
    except ValueError as error:
        if "aggregation method" not in str(error):
            raise
        raise DistributionError(
            "a layer or the model assigns to a weight in the step, which replicas that share one "
            "copy of each weight cannot: use --strategy mirrored"
        ) from error


def share_states() -> contextlib.AbstractContextManager:
    """Makes dropout and batch normalization work where replicas share one copy of a variable.

    Breaks: the seed variable and the moving statistics have `aggregation="none"`, which
    CentralStorageStrategy and ParameterServerStrategy refuse to assign in a replica. Does: creates
    them with `aggregation="only_first_replica"`; all replicas assign the same values.
    """
    names = (
        *("seed_generator_state", "moving_mean", "moving_variance", "moving_stddev"),
        *("renorm_mean", "renorm_stddev"),
    )

    def make(stock):
        def init(self, *args, **kwargs):
            if kwargs.get("name") in names:
                kwargs["aggregation"] = "only_first_replica"
            stock(self, *args, **kwargs)

        return init

    return replaced(Variable, "__init__", make)
