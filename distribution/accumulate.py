"""Gradient accumulation under any synchronous strategy: K global batches, one update.

Keras refuses to accumulate under a strategy (keras-team/keras#20582, open).
"""

import keras
import tensorflow as tf

from distribution import keras_compat
from distribution.global_loss import weight_sum


def accumulate(model: keras.Model, batches_per_step: int) -> None:
    """Makes each step of `fit()` take in several global batches.

    The update is that of one batch of all their examples: each batch's mean gradient counts by the
    batch's sum of weights. A step of `fit()` stays an update of the weights, and takes
    `batches_per_step` elements from the dataset. The model must be built and compiled, with
    `GlobalMean` as its loss, under the strategy's scope.

    Args:
        model: the compiled model; it gets a training function. Compiled anew, it needs it anew.
        batches_per_step: K, at least 2.
    """
    strategy = model.distribute_strategy
    # Each replica adds up its own gradients; they are reduced once, when they are applied.
    sums = [_local(tf.zeros(v.shape, v.dtype)) for v in model.trainable_variables]
    weights, losses = (_local(tf.zeros((), keras.config.floatx())) for _ in range(2))
    loss_tracker = next(metric for metric in model.metrics if metric.name == "loss")

    def start():
        for variable in (*sums, weights, losses):
            variable.assign(tf.zeros_like(variable))

    def add_batch(data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            loss = model.compute_loss(x, y, y_pred, sample_weight, training=True)
            scaled = model.optimizer.scale_loss(loss)
        # After the loss's own all-reduce on every replica: TensorFlow does not order collectives,
        # and two that replicas begin in different order wait for each other for ever.
        with tf.control_dependencies([loss]):
            if sample_weight is not None:
                sample_weight = tf.identity(sample_weight)
            weight = weight_sum(y, sample_weight, weights.dtype)
        gradients = tape.gradient(scaled, [v.value for v in model.trainable_variables])
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                dense = tf.convert_to_tensor(gradient)
                total.assign_add(dense * tf.cast(weight, dense.dtype))
        weights.assign_add(weight)
        losses.assign_add(tf.cast(loss, losses.dtype) * weight)
        model.compute_metrics(x, y, y_pred, sample_weight)

    def apply():
        gradients = [tf.math.divide_no_nan(s, tf.cast(weights, s.dtype)) for s in sums]
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        # Each replica holds its share of the mean, as in Keras's own train_step.
        loss = tf.math.divide_no_nan(losses, weights) * tf.cast(replicas, losses.dtype)
        loss_tracker.update_state(loss)
        return model.get_metrics_result()

    @tf.function
    def one_step(iterator):
        strategy.run(start)
        for _ in tf.range(batches_per_step):
            # One batch after the other: for the memory, and for the order of collectives.
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            strategy.run(add_batch, args=(next(iterator),))
        return keras_compat.logs_of_replicas(strategy, strategy.run(apply))

    # Where `fit()` keeps the function that `make_train_function()` made; it takes what is there. A
    # plain function, as Keras's own: a tf.function would become a part of what is exported.
    model.train_function = lambda iterator: one_step(iterator)


def _local(value: tf.Tensor) -> tf.Variable:
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
