"""The order of a step: reduce over replicas, finite?, unscale, clip by global norm, apply."""

import math

import keras
import tensorflow as tf

from distribution.keras_compat import reduce_before_all_else


def in_order(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Makes an optimizer act on the gradient of the global batch.

    Under the `mixed_float16` policy it is wrapped into a `LossScaleOptimizer`, as `compile()` would
    do. Its `global_clipnorm` then clips the reduced gradient, and all replicas skip the same steps.

    Args:
        optimizer: created inside the strategy's scope, not yet built.

    Returns:
        What goes into `model.compile(optimizer=...)`.
    """
    if keras.config.dtype_policy().compute_dtype == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return reduce_before_all_else(optimizer)


def largest_adam_step(beta_1: float, beta_2: float) -> float:
    """How far Adam can move a weight in one step, in learning rates.

    With m = (1 - b1) sum b1^(t-i) g_i and v = (1 - b2) sum b2^(t-i) g_i^2 the Cauchy-Schwarz
    inequality gives |m| / sqrt(v) <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)); the corrections of
    both for their start multiply it by at most max(1, sqrt(1 - b2) / (1 - b1)). (A sharper form of
    section 2.1 of Kingma and Ba, "Adam", arXiv 1412.6980.) Infinite unless b1^2 < b2.
    """
    if not beta_1**2 < beta_2 < 1:
        return math.inf
    ratio = (1 - beta_1) / math.sqrt((1 - beta_2) * (1 - beta_1**2 / beta_2))
    return ratio * max(1.0, math.sqrt(1 - beta_2) / (1 - beta_1))


def bound_adam(optimizer: keras.optimizers.Optimizer) -> None:
    """Holds Adam to its largest step where several workers write its two means without waiting.

    One worker may read a mean m that another one has just raised, and a v that it has not raised
    yet. Where v is nearly zero, as for a rare word piece, the step m / sqrt(v) is then far too
    long, and one such step can spoil a run. With a single writer the bound is never reached.

    Args:
        optimizer: changed in place if it is an Adam or AdamW.
    """
    if not isinstance(optimizer, keras.optimizers.Adam) or optimizer.amsgrad:
        return
    # A little room for the rounding of the two means.
    factor = 1.01 * largest_adam_step(optimizer.beta_1, optimizer.beta_2)
    if math.isinf(factor):
        return
    update_step, assign_sub = optimizer.update_step, optimizer.assign_sub
    limits = []

    def bounded_update_step(gradient, variable, learning_rate):
        limits.append(factor * tf.cast(learning_rate, variable.dtype))
        update_step(gradient, variable, learning_rate)
        limits.pop()

    def bounded_assign_sub(variable, value):
        if limits:
            value = tf.clip_by_value(value, -limits[-1], limits[-1])
        assign_sub(variable, value)

    optimizer.update_step, optimizer.assign_sub = bounded_update_step, bounded_assign_sub
