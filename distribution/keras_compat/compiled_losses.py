"""Repairs the losses of `compile()`, their weights and the penalties of layers.

Their means over replicas, and over the batches of an update, can then be averaged.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses import loss as loss_module

from distribution.errors import DistributionError
from distribution.keras_compat.replacing import replaced


@contextlib.contextmanager
def leave_losses_unscaled() -> Iterator[None]:
    """Leaves each loss the mean of its replica; `distribution.step` averages the replicas.

    Breaks: Keras multiplies some losses (its own, penalties of layers) by 1 / replicas, which
    TensorFlow rounds to float32, and others not (those that a model's `compute_loss()` computes
    from tensors): with three replicas the gradient differs by 1e-8, or is three times as large.
    Does: leaves out the factor.
    """

    def make(stock):
        return lambda value: value

    with (
        replaced(loss_module, "scale_loss_for_distribution", make),
        replaced(loss_module, "unscale_loss_for_distribution", make),
    ):
        yield


@contextlib.contextmanager
def keep_penalties_apart() -> Iterator[None]:
    """Gives each replica its own penalties of `add_loss()` and `activity_regularizer`.

    Breaks: a layer has one list for them, and the replicas are traced in threads of one process,
    which take turns wherever they add something up (batch normalization, the weights of a mask): a
    replica then reads, or clears, the penalty of another one. Does: keeps what a thread other than
    the main one adds for that thread.
    """

    class OfThread:
        """Stands for `layer._losses`."""

        def __get__(self, layer, kind=None):
            if layer is None:
                return self
            if "_losses" not in layer.__dict__:
                raise AttributeError("_losses")  # the layer is being constructed
            if threading.current_thread() is threading.main_thread():
                return layer.__dict__["_losses"]
            if not hasattr(own, "penalties"):
                own.penalties = weakref.WeakKeyDictionary()
            return own.penalties.setdefault(layer, [])

        def __set__(self, layer, value):
            layer.__dict__["_losses"] = value

    own, was = threading.local(), vars(keras.layers.Layer).get("_losses")
    keras.layers.Layer._losses = OfThread()
    try:
        yield
    finally:
        if was is None:
            del keras.layers.Layer._losses
        else:
            keras.layers.Layer._losses = was


def weigh_each_value() -> contextlib.AbstractContextManager:
    """Applies the weight of an example to each of its values.

    Breaks: weights of shape (batch,) beside losses of shape (batch, time) are multiplied along the
    wrong axis: a traceback, or wrong numbers where both are equally long. Does: appends axes.
    """

    def make(stock):
        def reduce_weighted_values(values, sample_weight=None, *args, **kwargs):
            if sample_weight is not None:
                values = keras.ops.convert_to_tensor(values)
                weights = keras.ops.convert_to_tensor(sample_weight)
                # Keras itself squeezes or expands (batch, 1) and (batch,).
                while 1 <= len(weights.shape) < len(values.shape):
                    weights = keras.ops.expand_dims(weights, axis=-1)
                if len(weights.shape) > 1 and len(weights.shape) == len(values.shape):
                    # So that the mean over values counts it equally often.
                    weights = keras.ops.broadcast_to(weights, keras.ops.shape(values))
                sample_weight = weights
            return stock(values, sample_weight, *args, **kwargs)

        return reduce_weighted_values

    return replaced(loss_module, "reduce_weighted_values", make)


def masks_of_labels(model: keras.Model, y, y_pred) -> list:
    """Returns for each output which of its labels count; None where all do.

    Breaks: a loss with `ignore_class` divides by the labels that count on one replica, in one
    batch. Does: makes them weights, which `distribution.step` divides by their global mean; see
    `prepare_losses`.

    Args:
        model: compiled and built.
        y: labels, structured like the outputs.
        y_pred: the outputs.
    """
    masks = [None] * len(keras.tree.flatten(y_pred))
    entries = losses_with_ignored(model)
    if entries:  # as Keras's losses take labels: by name or in order, whatever the outputs are
        if isinstance(y, dict) and isinstance(y_pred, list | tuple):
            y = [y.get(name) for name in model._compile_loss.output_names]
        elif isinstance(y, list | tuple) and isinstance(y_pred, dict):
            y = dict(zip(model._compile_loss.output_names, y, strict=True))
    places = keras.tree.pack_sequence_as(y_pred, list(range(len(masks))))
    for entry in entries:
        place, labels, outputs = places, y, y_pred
        for name in entry.path:
            place, labels, outputs = place[name], labels[name], outputs[name]
        labels = tf.convert_to_tensor(labels)
        if len(labels.shape) == len(outputs.shape):
            labels = tf.squeeze(labels, axis=entry.loss._fn_kwargs.get("axis", -1))
        masks[place] = labels != tf.cast(entry.loss._fn_kwargs["ignore_class"], labels.dtype)
    return masks


def losses_with_ignored(model: keras.Model) -> list:
    """Returns the entries of the losses with an `ignore_class` of a compiled and built model.

    Lacks: no public name for the losses that `compile()` made of names, functions, lists and dicts.
    """
    compiled = model._compile_loss
    if compiled is None or not compiled.built:
        return []
    kwargs = ((e, getattr(e.loss, "_fn_kwargs", {})) for e in compiled._flat_losses)
    return [entry for entry, values in kwargs if values.get("ignore_class") is not None]


class CompiledLoss(NamedTuple):
    """Describes one loss that `compile()` got.

    Attributes:
        path: keys and places of its output among the outputs; empty for the only one.
        function: of labels and outputs; of a class that is not Keras's the `keras.losses.Loss`.
        arguments: further arguments of the function, by name.
        reduction: of the loss, for instance "sum_over_batch_size".
        weight: its factor in the sum of the losses.
    """

    path: tuple
    function: Callable
    arguments: dict
    reduction: str | None
    weight: float


def losses_of(model: keras.Model) -> list[CompiledLoss]:
    """Returns the losses of a compiled and built model that `prepare_losses` has not changed yet.

    Lacks: no public name for the losses that `compile()` made of names, functions, lists and dicts.
    """
    compiled = model._compile_loss
    if compiled is None or not compiled.built:
        return []
    losses = []
    for entry in compiled._flat_losses:
        loss, function, arguments = entry.loss, entry.loss, {}
        if hasattr(loss, "fn") and type(loss).__module__.startswith("keras."):
            function, arguments = loss.fn, loss._fn_kwargs
        weight = 1.0 if entry.loss_weights is None else entry.loss_weights
        losses.append(CompiledLoss(entry.path, function, arguments, loss.reduction, weight))
    return losses


def prepare_losses(model: keras.Model, batches_per_update: int = 1) -> None:
    """Changes the losses of a built model so that their means over replicas can be averaged.

    `reduction="mean_with_sample_weight"` divides by the weights of one replica; they are divided by
    their global mean already, so it becomes the mean. A sum over the global batch is `replicas`
    times the mean of the replicas' sums, and a sum over the batches of an update so many times
    their mean. Lacks: no public name for the losses that `compile()` made of names, functions,
    lists and dicts.

    Args:
        model: compiled and built; changed in place.
        batches_per_update: batches that an update accumulates.

    Raises:
        DistributionError: a loss returns no single number and no mean, or compares the examples of
            a batch with each other, where there are several batches; or one output has several
            losses, of which Keras trains the first alone.
    """
    compiled = model._compile_loss
    if compiled is None or not compiled.built:
        return
    of_one_output = [entry.name for entry in compiled._flat_losses if not entry.path]
    if len(of_one_output) > 1:
        raise DistributionError(
            f"{len(of_one_output)} losses of one output ({', '.join(map(str, of_one_output))}), of "
            "which Keras trains the first alone; add them up in one function or keras.losses.Loss"
        )
    replicas = model.distribute_strategy.num_replicas_in_sync
    several = replicas > 1 or batches_per_update > 1
    prepared = []
    for entry in compiled._flat_losses:
        if isinstance(entry.loss, keras.losses.Loss):
            call = entry.loss.call
            while isinstance(call, functools.partial) and call.func in (_values_of, _without_mask):
                (call,) = call.args  # a loss that another model has, too
            entry.loss.call = functools.partial(_values_of, call, name=entry.name, several=several)
        if getattr(entry.loss, "_fn_kwargs", {}).get("ignore_class") is not None:
            entry.loss.call = functools.partial(_without_mask, entry.loss.call)
        if entry.loss.reduction == "mean_with_sample_weight" and several:
            entry.loss.reduction = "sum_over_batch_size"
        elif entry.loss.reduction == "sum":
            entry = entry._replace(loss=_SumOverParts(entry.loss, entry.path))
        elif entry.loss.reduction in (None, "none") and several:
            raise DistributionError(
                f"loss {entry.name} has reduction=None, which has no mean over several replicas "
                'or accumulated batches; leave it out, or write reduction="sum"'
            )
        elif several and _mixes_examples(entry.loss):
            raise DistributionError(
                f"loss {entry.name} is computed from all examples of a batch together, of which "
                "each replica, and each accumulated batch, has a part; train on one replica "
                "without --accumulate-steps, or, for Dice and Tversky, write axis=(1, 2, 3) for "
                "images: a loss for each example"
            )
        prepared.append(entry)
    compiled._flat_losses[:] = prepared
    if len(compiled.metrics) == len(prepared):
        losses = []
        for entry, metric in zip(prepared, compiled.metrics, strict=True):
            stock = type(metric).update_state.__get__(metric)
            factor = 1.0 if entry.loss_weights is None else entry.loss_weights
            metric.update_state = functools.partial(_add_loss_of_output, stock, entry.path, factor)
            losses.append((factor, metric))
        _add_up_outputs(model, losses)


def totals_of_losses(model: keras.Model, totals) -> list[tf.Tensor]:
    """Returns the sums of weights of the outputs that have a loss.

    Lacks: no public name tells which outputs have one.

    Args:
        model: compiled and built.
        totals: the sum of each output's weights, structured like the weights; None for no weights.
    """
    compiled, found = model._compile_loss, []
    if keras.tree.is_nested(totals) and compiled is not None and compiled.built:
        for entry in compiled._flat_losses:
            total = totals
            for name in entry.path:
                total = total[name]
            found.append(total)
    found = [t for t in keras.tree.flatten(found) if t is not None]
    return found or [t for t in keras.tree.flatten(totals) if t is not None]


def number_of_losses(model: keras.Model) -> int:
    """Counts the losses that one `compute_loss()` adds up, at least one.

    Lacks: no public name for the losses that `compile()` made of names, functions, lists and dicts.
    """
    compiled = model._compile_loss
    return max(1, len(compiled._flat_losses)) if compiled is not None and compiled.built else 1


class OneNumberError(DistributionError):
    """A loss has one number for a batch, so its padding would count."""


def _values_of(call: Callable, y_true, y_pred, name: str, several: bool):
    """Calls a loss, and checks that it can be averaged over the batches of this step.

    Raises:
        OneNumberError: it returns one number where there are several parts of a batch, or padding.
    """
    values = tf.convert_to_tensor(call(y_true, y_pred))
    is_padded = getattr(_outputs, "totals", None) is not None and not _outputs.is_unpadded
    if values.shape.rank == 0 and (several or is_padded):
        raise OneNumberError(
            f"loss {name} returns one number for a batch, of which each replica, and each "
            "accumulated batch, has a part: return one for each example, for instance "
            "keras.ops.mean(..., axis=-1), or train on one replica without --accumulate-steps"
        )
    return values


def _without_mask(call: Callable, y_true, y_pred):
    """Calls a loss with `ignore_class`; the labels that count are weights: `masks_of_labels`.

    Not of a `train_step` of the model, which has no such weights.
    """
    values = call(y_true, y_pred)
    return values if getattr(_outputs, "losses", None) is None else tf.identity(values)


def may_mix_examples(model: keras.Model) -> bool:
    """Tells whether the examples of a batch may change each other's losses, and so may its padding.

    Trusts Keras's losses but a few, and models with `leaves_padding_out`. Lacks: no public name for
    the losses that `compile()` made of names, functions, lists and dicts.
    """
    compiled = model._compile_loss
    if getattr(type(model), "leaves_padding_out", False):
        return False
    if has_own_methods(model):
        return True
    if compiled is None or not compiled.built:
        return False
    losses = [getattr(entry.loss, "loss", entry.loss) for entry in compiled._flat_losses]
    return any(_mixes_examples(loss) or _is_own(loss) for loss in losses)


def has_own_methods(model: keras.Model) -> bool:
    """Tells whether a model's `compute_loss()` or `compute_metrics()` may count padding."""
    kind, stock = type(model), keras.Model
    own = (
        kind.compute_loss is not stock.compute_loss
        or kind.compute_metrics is not stock.compute_metrics
    )
    return own and not getattr(kind, "leaves_padding_out", False)


def _is_own(loss) -> bool:
    """Tells whether a loss, or its function, is not one of Keras."""
    parts = (type(loss), getattr(loss, "fn", type(loss)))
    modules = [getattr(part, "__module__", None) or type(part).__module__ for part in parts]
    return not all(module.startswith("keras.") for module in modules)


def _mixes_examples(loss) -> bool:
    """Tells whether one of Keras's losses has no value for each example.

    Lacks: such a loss is known by its function and the axes it is given, which have no public name.
    """
    function = getattr(loss, "fn", None)
    if function in (keras.losses.dice, keras.losses.tversky):
        axis = loss._fn_kwargs.get("axis")
        return axis is None or 0 in np.atleast_1d(axis)
    return function is keras.losses.circle


# The weights of each output of a batch and their sums, its losses, and how many parts of a batch
# these are averaged over.
_outputs = threading.local()


@contextlib.contextmanager
def outputs_count(
    totals, parts: int = 1, is_unpadded: bool = False, weights=None
) -> Iterator[list]:
    """Counts the loss of each output in the logs by its weights, while a batch is evaluated.

    Breaks: the logs of several losses count each batch by its number of examples, so a padded last
    one counts as a full one. Does: hands the weights to the metrics that `prepare_losses` changed.

    Args:
        totals: the sum of each output's weights, structured like the weights; None for Keras's
            numbers.
        parts: of what the mean is taken over: replicas, and in training the batches of an update.
        is_unpadded: whether the padding was removed from the batch.
        weights: those of the data, for the losses that are sums.

    Yields:
        A list that gets the loss of each output, times its `loss_weights`; of several outputs.
    """
    _outputs.totals, _outputs.losses, _outputs.parts = totals, [], parts
    _outputs.is_unpadded, _outputs.weights = is_unpadded, weights
    try:
        yield _outputs.losses
    finally:
        _outputs.totals, _outputs.losses, _outputs.parts = None, None, 1
        _outputs.weights = None


def _add_loss_of_output(update_state: Callable, path, factor: float, value, sample_weight=None):
    value = tf.reduce_sum(value)  # of a replica without examples it has shape (0,): no mean
    totals = getattr(_outputs, "totals", None)
    if totals is not None:
        for name in path if keras.tree.is_nested(totals) else ():
            totals = totals[name]
        sample_weight = totals
    if getattr(_outputs, "losses", None) is not None:
        _outputs.losses.append(value * factor)
    return update_state(value, sample_weight=sample_weight)


def weigh_by_examples(model: keras.Model) -> None:
    """Makes the mean losses of a model's own `test_step` count batches by their examples.

    Breaks: the loss of each output counts a batch by its static size, which a batch without its
    padding does not have, so a smaller last one counts as a full one; so does `loss` where a
    `test_step` gives its mean no weight. Does: counts one number for a batch by the examples that
    `examples_of()` tells.

    Args:
        model: compiled and built; changed in place.
    """
    compiled = model._compile_loss
    of_outputs = compiled.metrics if compiled is not None and compiled.built else []
    for metric in (model._loss_tracker, *of_outputs):
        if metric is not None:
            _count_by_examples(metric)


def weigh_own_by_examples(model: keras.Model) -> None:
    """Makes metrics that a model's own methods update with one number count by their examples.

    Breaks: a `compute_loss()` that adds the mean of a batch to a metric counts a smaller last
    batch, and the smaller part of a replica, as a full one. Does: as `weigh_by_examples`. Lacks: no
    public name for the metrics of a model alone, without those of `compile()`.

    Args:
        model: compiled and built; changed in place.
    """
    for metric in model._metrics:
        if type(metric) is keras.metrics.Mean:
            _count_by_examples(metric)


def _count_by_examples(metric: keras.metrics.Metric) -> None:
    stock = type(metric).update_state.__get__(metric)
    metric.update_state = functools.partial(_add_by_examples, stock)


@contextlib.contextmanager
def examples_of(x) -> Iterator[None]:
    """Tells the examples of a batch while the model's own methods evaluate it."""
    first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    _outputs.examples = tf.shape(first)[0]
    try:
        yield
    finally:
        _outputs.examples = None


def _add_by_examples(update_state: Callable, values, sample_weight=None):
    examples = getattr(_outputs, "examples", None)
    is_one_number = tf.convert_to_tensor(values).shape.rank == 0
    if examples is not None and sample_weight is None and is_one_number:
        sample_weight = examples
    return update_state(values, sample_weight=sample_weight)


def _add_up_outputs(model: keras.Model, losses: list) -> None:
    """Makes `loss` the sum of what its metric has and of the losses of the outputs, in evaluations.

    Breaks: one mean has the losses of all outputs, which have different weights. Does: adds
    the mean loss of each output, times its factor, to the metric's result within `evaluate()`,
    whose step leaves them out of that metric.

    Args:
        model: compiled, with several outputs; changed in place.
        losses: the factor and the metric of each output.
    """
    tracker, evaluate_stock = model._loss_tracker, model.evaluate
    result_stock = tracker.result
    evaluating = False

    def result():
        value = result_stock()
        if evaluating:
            value += sum(factor * metric.result() for factor, metric in losses)
        return value

    def evaluate(*args, **kwargs):
        nonlocal evaluating
        evaluating = True
        try:
            return evaluate_stock(*args, **kwargs)
        finally:
            evaluating = False

    tracker.result, model.evaluate = result, evaluate


class _SumOverParts:
    """A loss whose mean over replicas, and over the batches of an update, is its sum over them.

    A sum has the weights of the data, which are not divided by their mean.
    """

    reduction = "sum_over_parts"

    def __init__(self, loss, path: tuple):
        self.loss, self.path = loss, path
        self._fn_kwargs = getattr(loss, "_fn_kwargs", {})

    def __call__(self, y_true, y_pred, sample_weight=None):
        parts = getattr(_outputs, "parts", 1)
        weights = getattr(_outputs, "weights", None)
        if sample_weight is not None and weights is not None:
            for name in self.path if keras.tree.is_nested(weights) else ():
                weights = weights[name]
            sample_weight = weights
        return parts * self.loss(y_true, y_pred, sample_weight=sample_weight)
