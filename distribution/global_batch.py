"""Trains on the global batch, for any number of replicas: the mean, the order of a step, its sums.

The loss is the weighted mean over the global batch (`GlobalMean`). A step is: reduce over replicas,
finite?, unscale, clip by global norm, apply (`reduce_before_clipping`). `compute_per_replica` makes
a step of several batches, or compiles what a replica computes. What metrics have added up is read
and written replica by replica (`MetricStates`).
"""

import contextlib
import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from distribution import keras_compat
from distribution.errors import DistributionError

# --- The mean ---


_outside = threading.local()  # the ratio that is known where a sum cannot be made


@contextlib.contextmanager
def _summed_outside(ratio: tf.Tensor) -> Iterator[None]:
    """Replaces `global_sum()` by a product: what XLA compiles contains no all-reduce.

    Args:
        ratio: the weights of the global batch over those of this replica; zero where it has none.
    """
    _outside.ratio = ratio
    try:
        yield
    finally:
        _outside.ratio = None


def global_sum(weight: tf.Tensor) -> tf.Tensor:
    """Sums weights of the batch over all replicas of all workers.

    Outside `strategy.run` and with one replica it is the value itself.
    """
    ratio = getattr(_outside, "ratio", None)
    if ratio is not None:
        return weight * tf.cast(ratio, weight.dtype)
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return weight
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, weight)


def weight_sum(y_true, sample_weight, dtype) -> tf.Tensor:
    """Sums the weights of a batch over all replicas; scalar.

    Args:
        y_true: labels of this replica; without weights each of them weighs one.
        sample_weight: weights of this replica, of the labels' shape or of the examples', or None.
        dtype: the dtype of the sum.
    """
    return global_sum(_weight_here(y_true, sample_weight, dtype))


def _weight_here(y_true, sample_weight, dtype):
    if sample_weight is None:
        return keras.ops.cast(keras.ops.size(y_true), dtype)
    return keras.ops.sum(keras.ops.cast(sample_weight, dtype))


class GlobalMean(keras.losses.Loss):
    """Weighted mean of a loss over the global batch: sum(weight x value) / sum(weight).

    Keras's `sum_over_batch_size` divides by all slots, filled or not, and its
    `mean_with_sample_weight` by the weights of one replica alone. Here the sum of weights is
    all-reduced, and each replica returns its share: the sum of the shares over the replicas is the
    mean over the global batch, and the sum of their gradients, which is what Keras's optimizers
    form, is that mean's gradient.

    Example:
        >>> loss = GlobalMean(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        >>> loss([1], [[0.0, 0.0]], sample_weight=[1.0])   # log(2)
    """

    def __init__(self, loss: keras.losses.Loss):
        super().__init__(name=loss.name, reduction="sum", dtype=loss.dtype)
        self.loss = loss

    def __call__(self, y_true, y_pred, sample_weight=None):
        """Computes this replica's share of the global mean; scalar."""
        y_true = keras.ops.convert_to_tensor(y_true, dtype=self.dtype)
        y_pred = keras.ops.convert_to_tensor(y_pred, dtype=self.dtype)
        values = self.loss.call(y_true, y_pred)
        weights = sample_weight
        if weights is not None:
            weights = keras.ops.cast(weights, values.dtype)
            while len(weights.shape) > len(values.shape) and weights.shape[-1] == 1:
                weights = keras.ops.squeeze(weights, axis=-1)
            while len(weights.shape) < len(values.shape):
                weights = keras.ops.expand_dims(weights, axis=-1)
            # A weight of an example counts once for each of its values.
            weights = keras.ops.broadcast_to(weights, keras.ops.shape(values))
            values = values * weights
        total = tf.stop_gradient(weight_sum(values, weights, values.dtype))
        return keras.ops.divide_no_nan(keras.ops.sum(values), total)


# --- The order of a step ---


def reduce_before_clipping(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Makes an optimizer act on the gradient of the global batch.

    Keras reduces last. So `global_clipnorm` clips each replica's own gradient (step norm 0.1 on one
    replica, 0.17 on two), and `LossScaleOptimizer` looks for an overflow on replica 0 only: one on
    another replica goes into the weights. And Keras never adds up the gradients of a row that a
    batch looks up several times in an embedding (`tf.IndexedSlices`): Adam then adds up their
    squares, where it should square their sum, and a clipped norm is wrong in the same way.

    Under the `mixed_float16` policy the optimizer is wrapped into a `LossScaleOptimizer`, as
    `compile()` would do. Its variables, their order and their names stay as they are.

    Args:
        optimizer: created inside the strategy's scope, not yet built. Changed in place.

    Returns:
        What goes into `model.compile(optimizer=...)`.
    """
    if is_reduced(optimizer):
        return optimizer
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().compute_dtype == "float16" and not scales:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    specialize(getattr(optimizer, "inner_optimizer", optimizer), keras_compat.WithoutReduction)
    specialize(optimizer, _ReduceFirst)
    return optimizer


def is_reduced(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells whether an optimizer, as `model.optimizer` has it, reduces before all else."""
    return isinstance(optimizer, _ReduceFirst)


# A mixin calls what the optimizer has with which `specialize` puts it together.
Mixin: Any = object

# The norm of each optimizer's last gradient. Not an attribute: Keras would save it.
_norms: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def gradient_norm(optimizer: keras.optimizers.Optimizer) -> float | None:
    """Returns the norm of the last step's gradient, of the global batch and before clipping.

    Args:
        optimizer: as `model.optimizer` has it.

    Returns:
        The root of the sum of all squares; not finite before the first step and where half
        precision overflowed; None of an optimizer that was not built, or did not go through
        `reduce_before_clipping()`.
    """
    norm = _norms.get(optimizer)
    return None if norm is None else float(keras.ops.convert_to_numpy(norm))


class _ReduceFirst(Mixin):
    """An optimizer whose `apply()` begins with the sum over the replicas; a mixin."""

    def build(self, variables):
        """Builds the optimizer, and a place for the norm of the gradient."""
        super().build(variables)
        if self in _norms:
            return
        _norms[self] = keras.Variable(
            math.nan,
            trainable=False,
            dtype=keras.config.floatx(),
            synchronization="on_read",  # each replica keeps its own
            aggregation="only_first_replica",  # they are the same
            name="gradient_norm",
        )

    def apply(self, grads, trainable_variables=None):
        """Sums dense gradients over all replicas, and applies them as Keras does."""
        dense = [None if g is None else tf.convert_to_tensor(g) for g in grads]
        present = [g for g in dense if g is not None]
        replica = tf.distribute.get_replica_context()
        if replica is not None and present:
            present = replica.all_reduce(tf.distribute.ReduceOp.SUM, present)
        if self.built and present:
            self._keep_norm(present)
        sums = iter(present)
        reduced = [None if g is None else next(sums) for g in dense]
        return super().apply(reduced, trainable_variables)

    def _keep_norm(self, gradients):
        norm = tf.linalg.global_norm(gradients)
        scale = getattr(self, "dynamic_scale", None)  # of a LossScaleOptimizer
        if scale is not None:
            norm = norm / tf.cast(scale.value, norm.dtype)
        _norms[self].assign(tf.cast(norm, keras.config.floatx()))


def specialize(optimizer: keras.optimizers.Optimizer, mixin: type) -> None:
    """Makes an optimizer an instance of a subclass of its class, in which `mixin` comes first.

    The subclass bears the names of its base, under which Keras saves and loads an optimizer.
    """
    base = type(optimizer)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    optimizer.__class__ = type(base.__name__, (mixin, base), names)


# --- A step in parts ---


def compute_per_replica(
    model: keras.Model,
    *,
    batches_per_step: int = 1,
    steps_per_execution: int = 1,
    jit_compile: bool = False,
) -> None:
    """Makes `fit()` compute gradients on each replica, and reduce and apply them apart from that.

    XLA compiles no all-reduce, so Keras compiles nothing under several replicas, nor where
    operations are deterministic; here each replica's forward and backward pass is compiled, and
    what it computes of an evaluation. Keras's execution of several steps crashes
    under several replicas; here it does not. Keras also refuses to accumulate under a
    strategy (keras-team/keras#20582, open); here several batches make one update. It is that of one
    batch of all their examples: each batch's mean gradient counts by the batch's sum of weights. A
    step of `fit()` stays an update of the weights, and takes `batches_per_step` elements of the
    dataset. The model must be built and compiled, with one `GlobalMean` as its loss, under the
    strategy's scope, and without `jit_compile`.

    Args:
        model: the compiled model; it gets a training and a test function. Compiled again, it needs
            them again.
        batches_per_step: batches of one update.
        steps_per_execution: updates of one call of the training function.
        jit_compile: whether XLA compiles the forward and backward pass, the update, and what a
            replica computes of an evaluation.

    Raises:
        DistributionError: the model has several losses, or a layer that XLA cannot compile.
    """
    if not isinstance(model.loss, GlobalMean):
        raise DistributionError(
            "--accumulate-steps needs a model with one loss, and so does XLA on several replicas "
            "or with --deterministic (--jit off leaves it out)"
        )
    refused = keras_compat.not_for_xla(model)
    if jit_compile and refused:
        raise DistributionError(f"--jit on: XLA cannot compile {refused[0]} here; use auto")
    strategy, optimizer = model.distribute_strategy, model.optimizer
    floatx, variables = keras.config.floatx(), model.trainable_variables
    loss_tracker = next(metric for metric in model.metrics if metric.name == "loss")

    def forward_and_backward(data, ratio):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape, _summed_outside(ratio):
            y_pred = model(x, training=True)
            loss = model.compute_loss(x, y, y_pred, sample_weight, training=True)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [v.value for v in variables])
        model.compute_metrics(x, y, y_pred, sample_weight)
        return loss, [None if g is None else tf.convert_to_tensor(g) for g in gradients]

    def evaluate(data, ratio):
        with _summed_outside(ratio):
            return model.test_step(data)

    if jit_compile:
        forward_and_backward = tf.function(forward_and_backward, jit_compile=True)
        evaluate = tf.function(evaluate, jit_compile=True)
        getattr(optimizer, "inner_optimizer", optimizer).jit_compile = True

    def weight_and_ratio(data):
        _, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        local = _weight_here(y, sample_weight, floatx)
        weight = global_sum(local)
        return weight, tf.math.divide_no_nan(weight, local)

    def compute(data):
        weight, ratio = weight_and_ratio(data)
        return weight, *forward_and_backward(data, ratio)

    def apply(gradients, loss):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        # Each replica has its share of the mean, as in Keras's own train_step.
        loss_tracker.update_state(tf.cast(loss, floatx) * replicas)
        return model.get_metrics_result()

    def one_batch(data):
        _, loss, gradients = compute(data)
        return apply(gradients, loss)

    # Each replica adds up its own gradients; they are reduced once, when they are applied.
    sums, totals = [], []
    if batches_per_step > 1:
        sums = [_local(tf.zeros(v.shape, v.dtype)) for v in variables]
        totals = [_local(tf.zeros((), floatx)) for _ in range(2)]

    def start():
        for variable in (*sums, *totals):
            variable.assign(tf.zeros_like(variable))

    def add_batch(data):
        weight, loss, gradients = compute(data)
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(gradient * tf.cast(weight, gradient.dtype))
        for total, value in zip(totals, (weight, tf.cast(loss, floatx) * weight), strict=True):
            total.assign_add(value)

    def apply_sums():
        weight, loss = totals
        gradients = [tf.math.divide_no_nan(s, tf.cast(weight, s.dtype)) for s in sums]
        return apply(gradients, tf.math.divide_no_nan(loss, weight))

    def one_step(iterator):
        if batches_per_step == 1:
            return strategy.run(one_batch, args=(next(iterator),))
        strategy.run(start)
        for _ in tf.range(batches_per_step):
            # One batch after the other: for the memory, and for the order of collectives.
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            strategy.run(add_batch, args=(next(iterator),))
        return strategy.run(apply_sums)

    @tf.function
    def execute(iterator):
        for _ in tf.range(steps_per_execution - 1):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            one_step(iterator)
        return keras_compat.logs_of_replicas(strategy, one_step(iterator))

    # Where `fit()` keeps the function that `make_train_function()` made; it takes what is there. A
    # plain function, as Keras's own: a tf.function would become a part of what is exported.
    model.train_function = lambda iterator: execute(iterator)

    @tf.function
    def test_step(data):
        outputs = strategy.run(lambda part: evaluate(part, weight_and_ratio(part)[1]), args=(data,))
        return keras_compat.logs_of_replicas(strategy, outputs)

    def test(iterator):
        logs = test_step(next(iterator))
        for _, data in zip(range(steps_per_execution - 1), iterator, strict=False):
            logs = test_step(data)
        return logs

    model.test_function = test


def _local(value: tf.Tensor) -> tf.Variable:
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


# --- What metrics have added up ---


class MetricStates:
    """Reads and writes the variables of a model's metrics.

    Each replica adds up its own numbers, which are summed when a metric is read. To resume bit for
    bit, each replica must get its own numbers back. All workers call together.

    Args:
        model: a built and compiled model.
    """

    _known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, model: keras.Model) -> "MetricStates":
        """Returns the one of this model: its functions are traced once."""
        if model not in cls._known:
            cls._known[model] = cls(model)
        return cls._known[model]

    def __init__(self, model: keras.Model):
        self.strategy = model.distribute_strategy
        self.variables = list(model.metrics_variables)
        self.replicas = self.strategy.num_replicas_in_sync
        # CentralStorageStrategy and ParameterServerStrategy hold one copy for all replicas.
        self.one_copy = self.replicas == 1 or not isinstance(
            self.strategy,
            (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy),
        )
        self.sizes = [int(np.prod(v.shape, dtype=int)) for v in self.variables]
        self._read = tf.function(self._read_all)
        self._write = tf.function(self._write_all)

    def read(self) -> list[list[float]]:
        """Returns a row for each replica (one row where there is one copy)."""
        if self.one_copy:
            parts = [keras.ops.convert_to_numpy(v).reshape(-1) for v in self.variables]
            return [np.concatenate(parts).astype(np.float64).tolist() if parts else []]
        return self._read().numpy().tolist()

    def write(self, rows: list[list[float]]) -> None:
        """Puts rows back; of another number of replicas only their sum is kept."""
        values = np.asarray(rows, np.float64)
        if self.one_copy or len(values) != self.replicas:
            total = np.split(values.sum(0), np.cumsum(self.sizes)[:-1])
            for variable, value in zip(self.variables, total, strict=True):
                variable.assign(value.reshape(variable.shape).astype(variable.dtype))
        else:
            self._write(tf.constant(values))

    def _read_all(self):
        def read():
            parts = [
                tf.cast(tf.reshape(tf.convert_to_tensor(v.value), [-1]), tf.float64)
                for v in self.variables
            ]
            return tf.concat(parts, 0)[None]

        return self.strategy.gather(self.strategy.run(read), axis=0)

    def _write_all(self, values):
        def write():
            row = values[tf.distribute.get_replica_context().replica_id_in_sync_group]
            for variable, value in zip(self.variables, tf.split(row, self.sizes), strict=True):
                local = tf.cast(tf.reshape(value, variable.shape), variable.dtype)
                variable.value.assign(local)

        self.strategy.run(write)
