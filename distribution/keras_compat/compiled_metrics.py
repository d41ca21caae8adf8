"""Finds the metrics of `compile()`, keeps padding out of them, tries whether they add up."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.trainers import compile_utils

from distribution import kinds
from distribution.errors import DistributionError

# Which examples of a replica's batch are not padding. Each replica is traced in a separate thread,
# several at a time.
_evaluated = threading.local()


@contextlib.contextmanager
def padding_left_out(sample_weight) -> Iterator[None]:
    """Excludes examples without any weight from `metrics=` while a batch is evaluated.

    Breaks: `compile(metrics=...)` counts each example of a batch, also the padding of the last
    one. Does: passes a weight of 1 or 0 per example to metrics prepared by `prepare_metrics`.
    """
    _evaluated.present = rows_with_weight(sample_weight)
    try:
        yield
    finally:
        _evaluated.present = None


def rows_with_weight(sample_weight) -> tf.Tensor | None:
    """Returns whether each example has a weight that is not 0; None where there are no weights."""
    present = None
    for leaf in keras.tree.flatten(sample_weight):
        if leaf is not None:
            counts = tf.reshape(tf.cast(leaf, tf.bool), [tf.shape(leaf)[0], -1])
            rows = tf.reduce_any(counts, axis=1)
            present = rows if present is None else present | rows
    return present


def prepare_metrics(model: keras.Model) -> None:
    """Prepares the metrics of `compile(metrics=...)` of a built model for `padding_left_out`.

    Those that are functions with one number for a batch count it by its examples; Keras counts it
    once, also a smaller last one. Lacks: no public name for the metrics of names, lists and dicts.
    """
    compiled = model._compile_metrics
    if compiled is None or not compiled.built:
        return
    compiled._flat_metrics = [
        m and _OfExamples(m.metrics, output_name=m.output_name) for m in compiled._flat_metrics
    ]
    several = model.distribute_strategy.num_replicas_in_sync > 1
    for found in (*compiled._flat_metrics, *compiled._flat_weighted_metrics):
        for metric in found.metrics if found else ():
            if _is_own_function(metric):
                metric._fn = functools.partial(_value_of_metric, metric._fn, metric.name, several)


def own_metrics(model: keras.Model) -> list[tuple[int, keras.metrics.Metric]]:
    """Returns the metrics of `compile()` whose class is not Keras's, with the place of the output.

    Lacks: no public name for the metrics of names, lists and dicts.
    """
    compiled = model._compile_metrics
    if compiled is None or not compiled.built:
        return []
    return [
        (place, metric)
        for of_outputs in (compiled._flat_metrics, compiled._flat_weighted_metrics)
        for place, found in enumerate(of_outputs)
        for metric in (found.metrics if found else ())
        if _is_own_class(metric)
    ]


def in_order_of_outputs(model: keras.Model, values) -> list:
    """Returns labels or outputs in the order of `own_metrics()`.

    Lacks: no public name for the order in which Keras compares them.
    """
    return model._compile_metrics._flatten_y(values)


def adds_up(metric: keras.metrics.Metric, strategy, y_true, y_pred) -> bool:
    """Tells whether the sum of a metric's states of two halves of a batch serves for the whole.

    Breaks: each replica has its own state, and a metric reads their sum: one that keeps a maximum
    is multiplied by the replicas. Does: compares the states, and what results from them; one that
    draws random numbers cannot be compared, and is trusted.

    Args:
        metric: built, under the strategy's scope; it keeps its state.
        strategy: whose replicas have a state each.
        y_true: labels of an even number of examples.
        y_pred: outputs.
    """
    variables = [variable.value for variable in metric.variables]
    half, whole = len(y_true) // 2, len(y_true)

    def compare():
        before = [tf.identity(variable) for variable in variables]

        def put(values):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

        def state(first, last):
            put(before)
            metric.update_state(y_true[first:last], y_pred[first:last])
            return [tf.identity(variable) for variable in variables]

        def result(values):
            put(values)
            return [tf.identity(value) for value in keras.tree.flatten(metric.result())]

        one, other = state(0, whole), state(0, whole)
        parts = [a + b for a, b in zip(state(0, half), state(half, whole), strict=True)]
        found = one, other, parts, result(one), result(parts)
        put(before)
        return found

    plain = tf.autograph.experimental.do_not_convert
    found = tf.function(plain(lambda: strategy.run(plain(compare))))()
    of_replica = tf.nest.map_structure(
        lambda value: np.asarray(strategy.experimental_local_results(value)[0], np.float64), found
    )
    one, other, parts, result_of_one, result_of_parts = of_replica
    are_random = not _close(one, other)
    return are_random or _close(one, parts) or _close(result_of_one, result_of_parts)


def _close(some: list, others: list) -> bool:
    """Tells whether arrays differ by no more than rounding, also in half precision."""
    return all(
        np.allclose(a, b, rtol=0, atol=0.01 * np.max(np.abs(a), initial=0), equal_nan=True)
        for a, b in zip(some, others, strict=True)
    )


def has_own_metrics(model: keras.Model) -> bool:
    """Tells whether a metric of `compile()` is not one of Keras: it may take a batch as a whole.

    A class among the `weighted_metrics` is trusted to use the weights. Lacks: no public name for
    the metrics of names, lists and dicts.
    """
    compiled = model._compile_metrics
    if compiled is None or not compiled.built:
        return False
    unweighted = [m for each in compiled._flat_metrics if each for m in each.metrics]
    weighted = [m for each in compiled._flat_weighted_metrics if each for m in each.metrics]
    return any(map(_is_own_class, unweighted)) or any(map(_is_own_function, unweighted + weighted))


def _is_own_class(metric: keras.metrics.Metric) -> bool:
    return not type(metric).__module__.startswith("keras.")


def _is_own_function(metric: keras.metrics.Metric) -> bool:
    function = getattr(metric, "_fn", None)
    module = getattr(function, "__module__", None) or type(function).__module__
    return function is not None and not module.startswith("keras.")


def _value_of_metric(function: Callable, name: str, several: bool, y_true, y_pred, **kwargs):
    """Calls a metric's function; one number for a batch is that of each of its examples.

    Raises:
        DistributionError: it returns one number for a part of a batch, on several replicas.
    """
    values = tf.convert_to_tensor(function(y_true, y_pred, **kwargs))
    if values.shape.rank == 0 and not several:
        return tf.fill(tf.shape(y_pred)[:1], values)
    if values.shape.rank == 0:
        raise DistributionError(
            f"metric {name} returns one number for a batch, of which each replica has a part: "
            "return one for each example, or write a keras.metrics.Metric that adds up"
        )
    return values


class _OfExamples(compile_utils.MetricsList):
    """The metrics of one output, without padding: examples weigh 1 or 0, or are left out."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        present = getattr(_evaluated, "present", None)
        if present is None:
            super().update_state(y_true, y_pred, sample_weight=sample_weight)
            return
        weights = tf.cast(present, keras.config.floatx())
        mask = backend.get_keras_mask(y_pred)
        if mask is not None:
            rows = tf.reshape(weights, [-1] + [1] * (len(mask.shape) - 1))
            weights = tf.broadcast_to(rows, tf.shape(mask))
        for metric in self.metrics:
            if _is_own_class(metric):  # it may ignore the weights
                _add_present(metric, y_true, y_pred, mask, present)
            else:
                metric.update_state(
                    y_true, y_pred, sample_weight=_weights_of_values(metric, weights, y_true)
                )


def _add_present(metric: keras.metrics.Metric, y_true, y_pred, mask, present: tf.Tensor) -> None:
    """Updates a metric with the examples that are present; of a replica without any, it is not."""

    def add() -> tf.Tensor:
        labels, outputs = (tf.boolean_mask(each, present) for each in (y_true, y_pred))
        if mask is not None:  # of the values within an example
            backend.set_keras_mask(outputs, tf.boolean_mask(mask, present))
        metric.update_state(labels, outputs)
        return tf.constant(True)

    if kinds.name_of(tf.distribute.get_strategy()) in kinds.SHARED_WEIGHTS:
        add()  # replicas that share a metric's sums update them together
    else:
        # The mean over no examples is not a number.
        tf.cond(tf.reduce_any(present), add, lambda: tf.constant(False))


# Metrics of Keras that count values one by one: weights of examples do not fit them.
_COUNT_VALUES = (
    *(keras.metrics.TruePositives, keras.metrics.TrueNegatives, keras.metrics.FalsePositives),
    *(keras.metrics.FalseNegatives, keras.metrics.Precision, keras.metrics.Recall),
    *(keras.metrics.PrecisionAtRecall, keras.metrics.RecallAtPrecision, keras.metrics.AUC),
    *(keras.metrics.SensitivityAtSpecificity, keras.metrics.SpecificityAtSensitivity),
    keras.metrics.IoU,
)


def _weights_of_values(metric: keras.metrics.Metric, weights: tf.Tensor, y_true) -> tf.Tensor:
    """Returns a weight for each label where a metric needs it, otherwise the weights as they are.

    Breaks: metrics of confusion matrices align weights of shape (batch,) with the last axis of
    labels that have three or more, and an IoU wants one weight per label.

    Args:
        metric: of Keras.
        weights: of the examples, or of the values that a mask of the output has.
        y_true: labels.
    """
    labels = tf.convert_to_tensor(y_true)
    is_iou = isinstance(metric, keras.metrics.IoU)
    if not isinstance(metric, _COUNT_VALUES) or (len(labels.shape) < 3 and not is_iou):
        return weights
    if is_iou and not metric.sparse_y_true:  # it takes the class of each one-hot row
        labels = tf.reduce_max(labels, axis=metric.axis)
    if is_iou:  # it counts in integers
        weights = tf.cast(weights, tf.int32)
    ones = [1] * (len(labels.shape) - len(weights.shape))
    rows = tf.reshape(weights, tf.concat([tf.shape(weights), tf.constant(ones, tf.int32)], 0))
    return tf.broadcast_to(rows, tf.shape(labels))
