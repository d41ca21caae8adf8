"""The order of a step: reduce over replicas, finite?, unscale, clip by global norm, apply."""

import keras

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
