"""Optimizers as BERT is trained with them."""

import keras


def adamw(options, schedule, beta_1: float = 0.9, beta_2: float = 0.999):
    """AdamW that does not decay biases and layer norms.

    Args:
        options: with `weight_decay` and `clip_norm`.
        schedule: learning rate by step.
        beta_1: decay of the mean.
        beta_2: decay of the variance.

    Returns:
        A `keras.optimizers.AdamW`.
    """
    optimizer = keras.optimizers.AdamW(
        schedule,
        weight_decay=options.weight_decay,
        beta_1=beta_1,
        beta_2=beta_2,
        global_clipnorm=options.clip_norm,
    )
    # The patterns are matched against a variable's own name, not its path.
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer
