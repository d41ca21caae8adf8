"""Records the loss, the optimizer and the metrics of `compile()`, and compares them on resume.

A record is JSON: for each loss and each optimizer its name and its values, so that the name "mse",
the function and the class are equal, as are numbers and arrays of one. A function is known by its
name and the defaults of its arguments, not by its code.
"""

import functools
import inspect
import math
import warnings
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from distribution import step
from distribution.keras_compat import compiled_losses
from distribution.keras_compat.compiled_losses import CompiledLoss
from training import model_checks

PLAIN = (bool, int, float, str, type(None))
MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")  # equal in the step of a run
RATE = "learning_rate"


def record_of(model: keras.Model, total_steps: int) -> dict:
    """Returns the record of a model: JSON.

    Args:
        model: compiled and built; `distribution.step.install` has not changed its losses yet.
        total_steps: of the run, which the schedule of the learning rate may depend on.
    """
    losses = compiled_losses.losses_of(model)
    return {
        "losses": {_label(each, len(losses)): _described_loss(each) for each in losses},
        "optimizers": [
            _described(each, _config(each)) for each in model_checks.optimizers_of(model)
        ],
        "metrics": sorted(step.flat_results(model.get_metrics_result())),
        "total_steps": total_steps,
    }


def differences(before: dict, now: dict) -> list[str]:
    """Returns a line for each loss or optimizer with which a run would train differently.

    The numbers of a schedule count where the runs have as many steps. Values that one record alone
    has are those of another version of Keras.

    Args:
        before: the record of a checkpoint.
        now: the record of the model.
    """
    lines = []
    for label in dict.fromkeys([*before["losses"], *now["losses"]]):
        lines += _differences(label, before["losses"].get(label), now["losses"].get(label))
    is_as_long = before["total_steps"] == now["total_steps"]
    several = len(now["optimizers"]) > 1
    for number, (old, new) in enumerate(
        zip(before["optimizers"], now["optimizers"], strict=False), start=1
    ):
        if not is_as_long:
            old, new = map(_without_schedule, (old, new))
        lines += _differences(f"optimizer {number}" if several else "optimizer", old, new)
    return lines


def metrics_note(before: dict, now: dict) -> str | None:
    """Returns a note if the metrics of `compile()` have changed since a checkpoint, or None."""
    if before["metrics"] == now["metrics"]:
        return None
    return (
        f"the metrics of compile() were {', '.join(before['metrics'])}, and are now "
        f"{', '.join(now['metrics'])}: new ones have no values of the epochs before"
    )


def class_weights_of(class_weight: dict | None) -> dict[str, float]:
    """Returns the weights of `fit(class_weight=...)` that are not 1, by class: JSON."""
    weights = {str(int(number)): float(weight) for number, weight in (class_weight or {}).items()}
    return {number: weight for number, weight in weights.items() if weight != 1}


def class_weight_differences(before: dict[str, float], now: dict[str, float]) -> list[str]:
    """Returns a line for each class with another weight; both as of `class_weights_of`."""
    return [
        f"class {number}: weight was {before.get(number, 1.0):g}, is now {now.get(number, 1.0):g}"
        for number in sorted({*before, *now}, key=int)
        if not _is_equal(before.get(number, 1.0), now.get(number, 1.0))
    ]


def _label(loss: CompiledLoss, count: int) -> str:
    if count == 1 or not loss.path:
        return "loss"
    return f"loss of output {'/'.join(map(str, loss.path))}"


def _described_loss(loss: CompiledLoss) -> dict:
    if isinstance(loss.function, keras.losses.Loss):
        values = _config(loss.function)
    else:
        values = _arguments(loss.function) | loss.arguments
    reduction = "mean" if loss.reduction in MEANS else loss.reduction
    return _described(loss.function, values | {"reduction": reduction, "loss_weights": loss.weight})


def _described(part, values: dict) -> dict:
    """Returns the name of a function or of an object's class, and its values by dotted names."""
    flat: dict = {}
    _flatten(values, "", flat)
    return {"name": _name(part), "values": flat}


def _name(part) -> str:
    while isinstance(part, functools.partial):
        part = part.func
    return str(getattr(part, "__name__", None) or type(part).__name__)


def _arguments(function: Callable) -> dict:
    """Returns the defaults of a function's arguments, as `functools.partial` may have set them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function that is not Python's
        return {}
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _config(part) -> dict:
    """Returns the values of `get_config()`, and the plain ones of an object of the user's class."""
    values = {}
    if not type(part).__module__.startswith("keras."):  # it may lack some in get_config()
        values = _attributes(part)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns of a lambda
            return values | part.get_config()
    except Exception:  # any that a class of the user's raises, also of an optimizer's schedule
        values = _attributes(part)
    rate = getattr(part, f"_{RATE}", None)  # an optimizer's schedule, or what returns the rate
    if callable(rate):
        values[RATE] = _name(rate)
        is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
        more = _config(rate) if is_schedule else {}
        values |= {f"{RATE}.{name}": value for name, value in more.items() if name != "name"}
    return values


def _attributes(part) -> dict:
    """Returns the public attributes of an object that are numbers, texts, arrays or lists."""
    kinds = (*PLAIN, np.generic, np.ndarray, list, tuple)
    return {
        name: value
        for name, value in vars(part).items()
        if not name.startswith("_") and isinstance(value, kinds)
    }


def _flatten(value, name: str, flat: dict) -> None:
    """Adds the values within a value to `flat`, by dotted names; names of objects are left out."""
    if isinstance(value, dict) and {"class_name", "config"} <= value.keys():  # Keras's form
        flat[name] = value["class_name"]
        value = value["config"] if value["class_name"] != "__lambda__" else {}
    if isinstance(value, tf.Tensor | tf.Variable | keras.Variable):
        value = keras.ops.convert_to_numpy(value)
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple) and not _is_plain(value):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, each in value.items():
            if key != "name":
                _flatten(each, f"{name}.{key}" if name else str(key), flat)
    else:
        flat[name] = value if _is_plain(value) else _name(value)


def _is_plain(value) -> bool:
    """Tells whether a value is JSON without names: numbers and texts, also in nested lists."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _without_schedule(optimizer: dict) -> dict:
    values = optimizer["values"]
    kept = {name: value for name, value in values.items() if not name.startswith(f"{RATE}.")}
    return optimizer | {"values": kept}


def _differences(label: str, before: dict | None, now: dict | None) -> list[str]:
    if before is None or now is None or before["name"] != now["name"]:
        names = [part["name"] if part else "none" for part in (before, now)]
        return [f"{label}: was {names[0]}, is now {names[1]}"]
    old, new = before["values"], now["values"]
    return [
        f"{label}: {name} was {_short(old[name])}, is now {_short(new[name])}"
        for name in sorted(old.keys() & new.keys())
        if not _is_equal(old[name], new[name])
    ]


def _is_equal(before, now) -> bool:
    before, now = (list(each) if isinstance(each, tuple) else each for each in (before, now))
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(map(_is_equal, before, now))
    if isinstance(before, int | float) and isinstance(now, int | float):
        return math.isclose(before, now, rel_tol=1e-6) or (before != before and now != now)
    return before == now


def _short(value) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
