"""Rejects metrics that a run cannot record, sum over replicas or choose a model by."""

import math
from collections.abc import Mapping

import keras
import tensorflow as tf

from callbacks.errors import BadLoss
from callbacks.metric_direction import direction
from data.errors import first_line
from distribution import kinds, step
from distribution.errors import DistributionError
from distribution.keras_compat import compiled_metrics, fitting
from training.errors import OptionsError, RunError

# Examples by which metrics are tried, and the packages whose metrics are trusted: Keras's and ours.
MOST_TRIED = 32
PACKAGES_WHOSE_METRICS_ADD_UP = ("keras", "keras_hub", "keras_nlp", "models")


def require_metric(model: keras.Model, keep_best: str | None, mode: str = "auto") -> None:
    """Rejects a `--keep-best` that the model does not measure, or whose direction is unknown.

    Raises:
        OptionsError: names the model's metrics, or the option that sets the direction.
    """
    if keep_best is None:
        return
    # Not `model.metrics`, in which one container stands for all metrics of `compile()`.
    measured = [f"val_{name}" for name in step.flat_results(model.get_metrics_result())]
    if keep_best not in measured:
        raise OptionsError(f"--keep-best {keep_best}: must be one of {', '.join(measured)}")
    if direction(keep_best, model, mode) is None:
        raise OptionsError(
            f"--keep-best {keep_best}: unknown whether a smaller or a larger value is better: add "
            "--keep-best-mode min or --keep-best-mode max"
        )


def require_sums(model: keras.Model, train_data: tf.data.Dataset) -> list[str]:
    """Rejects metrics of the user's classes that do not add up over replicas.

    Args:
        model: built, on several replicas.
        train_data: its first examples are evaluated.

    Returns:
        A note for each metric that cannot be tried.

    Raises:
        DistributionError: names the metric, and the way out.
    """
    strategy = model.distribute_strategy
    metrics = [
        (place, metric)
        for place, metric in compiled_metrics.own_metrics(model)
        if type(metric).__module__.partition(".")[0] not in PACKAGES_WHOSE_METRICS_ADD_UP
    ]
    if not metrics or kinds.name_of(strategy) in kinds.SHARED_WEIGHTS:
        return []
    notes = []
    try:
        labels, outputs = _some_outputs(model, train_data)
    except Exception as error:  # any that the model raises for fewer examples than usual
        return [_not_tried(metric, error) for _, metric in metrics]
    for place, metric in metrics:
        try:
            is_sum = compiled_metrics.adds_up(metric, strategy, labels[place], outputs[place])
        except Exception as error:  # likewise
            notes.append(_not_tried(metric, error))
            continue
        if not is_sum:
            raise DistributionError(
                f"metric {metric.name}: {type(metric).__name__} does not add up over the replicas, "
                "whose states are summed (two halves of a batch give another result than the "
                "whole; a maximum does, or a last value): keep sums and counts in its variables "
                "and divide in result(), or train on one device (--strategy none)"
            )
    return notes


def _not_tried(metric: keras.metrics.Metric, error: Exception) -> str:
    return (
        f"metric {metric.name}: could not try whether it adds up over replicas "
        f"({first_line(error)}); it must keep sums in its variables"
    )


def _some_outputs(model: keras.Model, train_data: tf.data.Dataset) -> tuple[list, list]:
    """Returns labels and outputs of some examples, by output; an even number of them."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(next(iter(train_data.take(1))))
    count = min(MOST_TRIED, len(keras.tree.flatten(x)[0])) // 2 * 2
    x, y = keras.tree.map_structure(lambda rows: rows[:count], (x, y))
    strategy, plain = model.distribute_strategy, tf.autograph.experimental.do_not_convert

    def predict():
        return strategy.run(plain(lambda: fitting.call(model, x, training=False)))

    outputs = tf.nest.map_structure(
        lambda value: strategy.experimental_local_results(value)[0], tf.function(plain(predict))()
    )
    in_order = compiled_metrics.in_order_of_outputs
    return in_order(model, y), in_order(model, outputs)


def require_single_numbers(model: keras.Model) -> None:
    """Rejects metrics with several values: a record holds one number of each metric.

    Args:
        model: built, with its metrics.

    Raises:
        RunError: names the metric.
    """
    for name, value in step.flat_results(model.get_metrics_result()).items():
        shape = tuple(keras.ops.shape(value))
        if shape != ():
            raise RunError(
                f"the metric {name} has several values, of shape {shape}: a run records one "
                "number of each metric; average them (for instance "
                "keras.metrics.F1Score(average='macro') of one-hot labels)"
            )


def as_numbers(
    argument: str, values: Mapping[str, float] | None, remedy: str = ""
) -> dict[str, float]:
    """Returns metrics as Python's numbers; those of NumPy and of TensorFlow are converted.

    Args:
        argument: of `run.finish()`, "test" or "baseline".
        values: numbers by name; None for none.
        remedy: ends the message.

    Raises:
        RunError: a value is not a number.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise RunError(
            f"run.finish({argument}=...) got a {type(values).__name__}: expected numbers by name, "
            f"as model.evaluate(..., return_dict=True) returns them{remedy}"
        )
    numbers = {}
    for name, value in values.items():
        try:
            if isinstance(value, str):  # which float() might read
                raise TypeError
            numbers[name] = float(value)
        except (TypeError, ValueError) as error:
            raise RunError(
                f"run.finish({argument}=...): {name} is {value!r:.60}, expected a number; pass "
                f"other results as further arguments{remedy}"
            ) from error
    return numbers


def require_finite(test: dict[str, float], steps: int, learning_rate: float) -> None:
    """Rejects a model whose test metrics are not finite.

    Raises:
        BadLoss: names the metric.
    """
    for name, value in test.items():
        if not math.isfinite(value):
            remedy = "use a lower --base-learning-rate and another --run-dir"
            if math.isfinite(test.get("loss", math.nan)):
                remedy = "the test's loss is finite: correct the metric, which is not a number"
            raise BadLoss(
                f"the test's {name} is {value} after {steps} steps (learning rate "
                f"{learning_rate:.3g} at the peak): no model is written; {remedy}"
            )
