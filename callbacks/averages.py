"""Evaluates a model with the moving averages of its weights that its optimizer keeps (`use_ema`).

Keras puts the averages into the model when `fit()` ends, and validates the weights as they are
until then: epochs would be compared by other weights than those that are tested and saved.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from distribution.step import inner_optimizers


def has_averages(model: keras.Model) -> bool:
    """Tells whether the optimizer of a compiled model keeps averages of its weights."""
    optimizer = _unscaled(model)
    if optimizer is None:
        return False
    return any(getattr(each, "use_ema", False) for each in inner_optimizers(optimizer))


def evaluate_averages(model: keras.Model) -> None:
    """Makes `model.evaluate()` use the averages; the weights stay.

    Args:
        model: compiled with an optimizer that keeps averages.
    """
    # Replaces the instance's method, so that `fit()` and every callback evaluate the average, and
    # an interrupted evaluation restores the weights. keras.callbacks.SwapEMAWeights swaps by sums
    # and differences, which changes the weights by rounding.
    stock = model.evaluate

    def evaluate(*args, **kwargs):
        with averaged(model):
            return stock(*args, **kwargs)

    model.evaluate = evaluate


@contextlib.contextmanager
def averaged(model: keras.Model) -> Iterator[None]:
    """Replaces the weights by their averages within this context.

    Args:
        model: compiled; unchanged if it has no averages, or before its first step.
    """
    optimizer = _unscaled(model)
    if not has_averages(model) or not optimizer.built or not int(_number(optimizer.iterations)):
        yield
        return
    variables = model.trainable_variables
    before = [_number(variable) for variable in variables]
    optimizer.finalize_variable_values(variables)
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def _unscaled(model: keras.Model) -> Any:
    """Returns the optimizer, without the one that scales the loss, or None before `compile()`."""
    optimizer = getattr(model, "optimizer", None)
    return getattr(optimizer, "inner_optimizer", optimizer)


def _number(variable) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable))
