"""A loss that is the weighted mean over the global batch, for any number of replicas."""

import keras
import tensorflow as tf


def global_sum(value: tf.Tensor) -> tf.Tensor:
    """The sum of a value over all replicas of all workers, on each of them.

    Outside `strategy.run` and with one replica it is the value itself.
    """
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return value
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, value)


def weight_sum(y_true, sample_weight, dtype) -> tf.Tensor:
    """The sum of the weights of a batch over all replicas; scalar.

    Args:
        y_true: labels of this replica; where there are no weights each of them weighs one.
        sample_weight: weights of this replica, of the labels' shape or of the examples', or None.
        dtype: the dtype of the sum.
    """
    if sample_weight is None:
        local = keras.ops.cast(keras.ops.size(y_true), dtype)
    else:
        local = keras.ops.sum(keras.ops.cast(sample_weight, dtype))
    return global_sum(local)


class GlobalMean(keras.losses.Loss):
    """Weighted mean of a loss over the global batch: sum(weight x value) / sum(weight).

    Keras's `sum_over_batch_size` divides by all slots, filled or not, and its
    `mean_with_sample_weight` by the weights of one replica alone. Here the sum of weights is
    all-reduced, and each replica returns its share: the sum of the shares over the replicas is the
    mean over the global batch, and the sum of their gradients, which is what Keras's optimizers
    form, is that mean's gradient.

    Example:
        >>> loss = GlobalMean(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        >>> loss([1], [[0.0, 0.0]], sample_weight=[1.0])   # log(2)
    """

    def __init__(self, loss: keras.losses.Loss, name: str | None = None):
        super().__init__(name=name or loss.name, reduction="sum", dtype=loss.dtype)
        self.loss = loss

    def __call__(self, y_true, y_pred, sample_weight=None):
        """This replica's share of the global mean; scalar."""
        # The shape trap of regression: (batch,) against (batch, 1) would broadcast to
        # (batch, batch). keras.losses.Loss squeezes in __call__, and so it is done here.
        y_true = keras.ops.convert_to_tensor(y_true)
        y_pred = keras.ops.convert_to_tensor(y_pred, dtype=self.dtype)
        values = self.loss.call(*_same_rank(y_true, y_pred, self.loss))
        weights = sample_weight
        if weights is not None:
            weights = keras.ops.cast(weights, values.dtype)
            while len(weights.shape) > len(values.shape) and weights.shape[-1] == 1:
                weights = keras.ops.squeeze(weights, axis=-1)
            while len(weights.shape) < len(values.shape):
                weights = keras.ops.expand_dims(weights, axis=-1)
            # A weight of an example counts once for each of its values.
            weights = keras.ops.broadcast_to(weights, keras.ops.shape(values))
            values = values * weights
        total = tf.stop_gradient(weight_sum(values, weights, values.dtype))
        return keras.ops.divide_no_nan(keras.ops.sum(values), total)

    def get_config(self):
        """The wrapped loss, serialised."""
        return {"loss": keras.losses.serialize(self.loss), "name": self.name}

    @classmethod
    def from_config(cls, config):
        """Rebuilds the loss from `get_config()`."""
        return cls(keras.losses.deserialize(config["loss"]), name=config["name"])


def is_global(loss) -> bool:
    """Whether a loss, as `model.loss` has it, is a mean over the global batch.

    Args:
        loss: a loss, or a list or dict of losses (None for an output without one).
    """
    losses = [part for part in keras.tree.flatten(loss) if part is not None]
    return bool(losses) and all(isinstance(part, GlobalMean) for part in losses)


def _same_rank(y_true, y_pred, loss):
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        return y_true, y_pred
    y_true = keras.ops.cast(y_true, y_pred.dtype)
    if len(y_pred.shape) == len(y_true.shape) + 1 and y_pred.shape[-1] == 1:
        y_pred = keras.ops.squeeze(y_pred, axis=-1)
        y_true = keras.ops.expand_dims(y_true, axis=-1)
        y_pred = keras.ops.expand_dims(y_pred, axis=-1)
    return y_true, y_pred
