"""Tries whether the loss of a batch is the mean of the losses of its parts.

Each replica, and each batch of an update, computes the loss of a part. A loss or a layer that
compares the examples of a batch (in-batch negatives, batch-hard triplets), a `compute_loss()` that
adds them up, and one that divides by its own sum of weights, give other numbers for the parts, and
would train another model without a word.
"""

import contextlib
import copy
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from distribution.keras_compat import fitting, randomness
from distribution.keras_compat.replacing import replaced
from distribution.metric_states import MetricStates

MOST_TRIED = 32  # examples
EXCHANGES = ("all_gather", "all_reduce", "merge_call")  # of `tf.distribute.ReplicaContext`


def losses(step, batch) -> tuple[float, float] | None:
    """Computes the loss of a batch, and the mean of the losses of its parts; trains nothing.

    Args:
        step: the `distribution.step.Step` of a model, for several replicas or batches per update.
        batch: a global batch of the training data, whose first examples are used.

    Returns:
        The loss of the whole, and the mean of the parts, without dropout; None where they cannot be
        compared: they draw random numbers, the model gathers what other replicas computed, or there
        are fewer examples than parts.
    """
    strategy, replicas = step.strategy, step.replicas
    batches = min(2, step.batches_per_update)
    size = min(MOST_TRIED, len(keras.tree.flatten(batch)[0])) // (batches * replicas)
    if size == 0:
        return None
    whole, part = copy.copy(step), copy.copy(step)
    whole.replicas = whole.batches_per_update = 1
    part.batches_per_update = batches

    def of_whole():
        with randomness.drawn_as_on_one_device():
            return _mean_loss(whole, [_rows(batch, 0, batches * replicas * size)])

    def of_parts():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        return _mean_loss(
            part,
            [_rows(batch, (index + number * replicas) * size, size) for number in range(batches)],
        )

    with _communication() as calls:
        compute_whole = _traced(strategy, of_whole)
    if calls:
        return None
    compute_parts = _traced(strategy, of_parts)
    with _kept_states(step.model, [compute_whole.graph, compute_parts.graph]):
        one, other, parts = compute_whole(), compute_whole(), compute_parts()
        mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, parts, axis=None)
    one, other = (float(strategy.experimental_local_results(each)[0]) for each in (one, other))
    return None if one != other else (one, float(mean))


def _mean_loss(step, batches: list) -> tf.Tensor:
    """Returns a replica's loss of the batches of an update. Runs on each replica."""
    sums = step._mean_sums(tuple(batches))
    total = weight_of_all = tf.zeros((), step.floatx)
    for data in batches:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with randomness.part_of_batch(x):
            y_pred = fitting.call(step.model, x, training=False)
            loss, weight, _ = step.loss(x, y, y_pred, sample_weight, sums, training=True)
        weight = tf.cast(weight, step.floatx)
        total += tf.cast(loss, step.floatx) * weight
        weight_of_all += weight
    return tf.math.divide_no_nan(total, weight_of_all)


def _rows(batch, begin, size: int):
    def rows(values):
        more = values.shape.rank - 1
        return tf.slice(values, [begin] + [0] * more, [size] + [-1] * more)

    return keras.tree.map_structure(lambda part: None if part is None else rows(part), batch)


def _traced(strategy: tf.distribute.Strategy, function):
    plain = tf.autograph.experimental.do_not_convert
    run = tf.function(plain(lambda: strategy.run(plain(function))))
    return run.get_concrete_function()


@contextlib.contextmanager
def _communication() -> Iterator[list[str]]:
    """Lists the calls by which replicas exchange values while a function is traced."""
    calls: list[str] = []

    def noticed(name):
        def make(stock):
            def call(self, *args, **kwargs):
                calls.append(name)
                return stock(self, *args, **kwargs)

            return call

        return make

    with contextlib.ExitStack() as stack:
        for name in EXCHANGES:
            stack.enter_context(replaced(tf.distribute.ReplicaContext, name, noticed(name)))
        yield calls


@contextlib.contextmanager
def _kept_states(model: keras.Model, graphs: list[tf.Graph]) -> Iterator[None]:
    """Puts back what the functions of these graphs change: metrics, seeds, states of layers."""
    metrics = MetricStates.of(model)
    of_metrics = {id(variable) for variable in metrics.variables}
    others = [v for v in model.variables if id(v) not in of_metrics] + randomness.global_seed()
    changed = [v for v in others if any(randomness.changes(graph, v) for graph in graphs)]
    sums, values = metrics.read(), [np.array(variable) for variable in changed]
    try:
        yield
    finally:
        metrics.write(sums)
        with model.distribute_strategy.scope():
            for variable, value in zip(changed, values, strict=True):
                variable.assign(value)
