"""Adapts Keras to tf.distribute; the file of the private names of Keras.

Each function names the problem, its upstream thread if there is one, and its solution. Patches of
the whole process are context managers, and `patch_keras_for` enters those that a strategy needs.
`make check-upstream` tells which of them the installed Keras no longer needs.
Tested with Keras 3.15.1 and TensorFlow 2.21.
"""

import collections
import contextlib
import functools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import nn as tf_nn
from keras.src.backend.tensorflow import random as tf_random
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.layers.regularization import spatial_dropout
from keras.src.layers.rnn import dropout_rnn_cell
from keras.src.losses import loss as loss_module
from keras.src.random import seed_generator
from keras.src.saving import saving_lib
from keras.src.trainers import compile_utils, epoch_iterator
from keras.src.utils import naming, rng_utils
from tensorflow.python.data.ops import skip_op
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.framework.config import is_op_determinism_enabled

from distribution import attention, kinds
from distribution.errors import DistributionError

# Layers whose seeds serve dropout alone. Lacks: no public name for the cells' and these bases.
DROPOUT = (
    keras.layers.Attention,
    keras.layers.Dropout,
    dropout_rnn_cell.DropoutRNNCell,
    spatial_dropout.BaseSpatialDropout,
)

# Batches on a GPU before their steps begin: that of the next step, and one that is being copied.
BATCHES_AHEAD = 2


@contextlib.contextmanager
def patch_keras_for(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Makes `fit()` and `evaluate()` work under this strategy within it; restores Keras afterwards.

    Create the model within it too. It may be entered again, also for another strategy.
    """
    name = kinds.name_of(strategy)
    shares_weights = name in kinds.SHARED_WEIGHTS
    patches = [
        use_what_is_built,
        count_from_mid_epoch,
        write_weights_at_once,
        leave_losses_unscaled,
        weigh_each_value,
        leave_gradients_reduced,
        drop_out_by_place,
        normalise_unmasked_together,
        keep_penalties_apart,
    ]
    if name in ("mirrored", "multi_worker", "parameter_server"):
        patches += [distribute_data]
    elif not shares_weights:
        patches += [copy_batches_ahead]
    if shares_weights:
        patches += [share_states, add_in_place]
    else:
        patches += [update_together]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch())
        yield


@contextlib.contextmanager
def _replaced(owner, name: str, make: Callable) -> Iterator[None]:
    """Replaces a function of a class or module by `make(stock)`, and restores it."""
    stock = getattr(owner, name)
    is_own = name in vars(owner)  # else it is inherited
    setattr(owner, name, functools.wraps(stock)(make(stock)))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, stock)
        else:
            delattr(owner, name)


# The counters of automatic names when `name_metrics_as_in_first_run` was first entered.
_first_counts: dict[str, int] | None = None


@contextlib.contextmanager
def name_metrics_as_in_first_run() -> Iterator[None]:
    """Gives the metrics that are created within it the names that they have in a first run.

    Breaks: Keras counts its automatic names in the whole process (`auc`, then `auc_1`), so in a
    notebook a resumed run has other metrics than its history, and `--keep-best val_auc` fails.
    Does: starts from the counts of the first time. Those of layers go on: a model may have layers
    of an earlier run, and cannot have two of one name.
    """
    global _first_counts
    before = _name_counts()
    if _first_counts is None:
        _first_counts = before
    names = set(map(naming.to_snake_case, _names_of_subclasses(keras.metrics.Metric)))
    kept = {name: count for name, count in before.items() if name not in names}
    first = {name: count for name, count in _first_counts.items() if name in names}
    _set_name_counts(kept | first)
    try:
        yield
    finally:
        within = _name_counts()
        _set_name_counts(
            {name: max(before.get(name, 0), within.get(name, 0)) for name in before | within}
        )


def _names_of_subclasses(kind: type) -> Iterator[str]:
    subclasses: list[type] = kind.__subclasses__()
    for each in subclasses:
        yield each.__name__
        yield from _names_of_subclasses(each)


def _name_counts() -> dict[str, int]:
    return dict(global_state.get_global_attribute("object_name_uids") or {})


def _set_name_counts(counts: dict[str, int]) -> None:
    made = collections.defaultdict(int, counts)
    global_state.set_global_attribute("object_name_uids", made)


def write_weights_at_once() -> contextlib.AbstractContextManager:
    """Makes writing a weights file to a full disk fail like other files.

    Breaks: HDF5 keeps unwritten data and tries again whenever an object of the file is deleted: a
    hundred lines of "Exception ignored", and at the end of the process a segmentation fault.
    Does: makes Keras build the file in memory, as for an archive, and write it at once.
    """

    class Disk:
        """Stands for the archive."""

        @staticmethod
        def writestr(path, content):
            Path(path).write_bytes(content)

    def make(stock):
        def init(self, path_or_io, archive=None, mode="r"):
            is_plain = type(self) is saving_lib.H5IOStore and archive is None
            if mode == "w" and is_plain and isinstance(path_or_io, str | Path):
                archive = Disk
            stock(self, path_or_io, archive, mode)

        return init

    return _replaced(saving_lib.H5IOStore, "__init__", make)


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
        _replaced(loss_module, "scale_loss_for_distribution", make),
        _replaced(loss_module, "unscale_loss_for_distribution", make),
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

    return _replaced(loss_module, "reduce_weighted_values", make)


def leave_gradients_reduced() -> contextlib.AbstractContextManager:
    """Makes an optimizer treat its gradients as already summed over the replicas.

    Breaks: Keras sums them in the innermost part of `apply()`, after clipping and after the check
    for an overflow, and has no public way to skip it (keras-team/keras#19308, open). Does:
    leaves it out.
    """

    def make(stock):
        return lambda self, grads_and_vars: grads_and_vars

    return _replaced(TFOptimizer, "_all_reduce_sum_gradients", make)


def drop_out_by_place() -> contextlib.AbstractContextManager:
    """Makes a dropout mask a function of seed, step and place in the global batch.

    Breaks: all replicas draw the same mask, so the noise of a global batch repeats, and it
    changes with the number of replicas. Does: draws on each replica its rows of the mask
    that one replica would draw for the whole global batch. TensorFlow's generator (Philox) counts
    in blocks of numbers, so a replica starts at the block of its first row; no number is drawn
    twice.
    """

    def make(stock):
        def dropout(inputs, rate, noise_shape=None, seed=None):
            replica = tf.distribute.get_replica_context()
            several = replica is not None and replica.num_replicas_in_sync > 1
            shape = tf_random._get_concrete_noise_shape(inputs, noise_shape)
            shape = tf.shape(inputs) if shape is None else tf.convert_to_tensor(shape)
            # A mask with one row is the same for all examples, on every replica.
            shared = noise_shape is not None and noise_shape[0] == 1
            shared = shared or (len(inputs.shape) > 0 and inputs.shape[0] == 1)
            if not several or shared or not 0.0 < rate < 1.0 or len(inputs.shape) == 0:
                return stock(inputs, rate, noise_shape, seed)
            seed = tf_random._cast_seed(tf_random.draw_seed(seed))
            index = replica.replica_id_in_sync_group
            drawn = _uniform_rows(shape, seed, inputs.dtype, index)
            scaled = inputs * tf.constant(1.0 / (1.0 - rate), inputs.dtype)
            return tf.where(drawn >= tf.constant(rate, inputs.dtype), scaled, tf.zeros_like(scaled))

        return dropout

    return _replaced(tf_random, "dropout", make)


def normalise_unmasked_together() -> contextlib.AbstractContextManager:
    """Makes batch normalization use the global batch where it is synchronized.

    Breaks: with a mask Keras ignores `synchronized`, so each replica's part is normalised by
    itself. Without one it computes the variance as E[x^2] - E[x]^2, which in float32 has no correct
    digit where the mean is some thousand times the deviation; on one device it does not (no thread
    known). Does: adds up the unmasked values over the replicas, in the formula of one device.
    """

    def make(stock):
        def moments(self, inputs, mask):
            replica = tf.distribute.get_replica_context()
            several = replica is not None and replica.num_replicas_in_sync > 1
            if not self.synchronized or not several:
                return stock(self, inputs, mask)
            counts = None
            if mask is not None:
                counts = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))

            def global_sum(values):
                if counts is not None:
                    values = tf.where(counts, values, tf.zeros_like(values))
                own = tf.reduce_sum(values, self._reduction_axes, keepdims=True)
                return replica.all_reduce(tf.distribute.ReduceOp.SUM, own)

            number = global_sum(tf.ones_like(inputs))
            if mask is not None:  # as Keras divides
                number += keras.config.epsilon()
            mean = global_sum(inputs) / number
            variance = global_sum(tf.square(inputs - mean)) / number
            axes = self._reduction_axes
            return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

        return moments

    return _replaced(keras.layers.BatchNormalization, "_moments", make)


def _uniform_rows(shape, seed, dtype: tf.DType, index) -> tf.Tensor:
    """Draws rows [index rows, (index + 1) rows) of `tf.random.stateless_uniform`.

    Args:
        shape: int32 tensor; its first element is the number of rows.
        seed: of shape (2,).
        dtype: of the numbers, which are in [0, 1).
        index: number of the part of the rows, from 0.
    """
    block = 2 if dtype == tf.float64 else 4  # numbers per block of the generator
    count = tf.reduce_prod(shape)
    first = tf.cast(index, tf.int64) * tf.cast(count, tf.int64)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    low = counter[0] + tf.cast(first // block, tf.uint64)
    high = counter[1] + tf.cast(low < counter[0], tf.uint64)
    drawn = tf.raw_ops.StatelessRandomUniformV2(
        shape=tf.stack([count + block]),  # its first row may begin within a block
        key=key,
        counter=tf.stack([low, high]),
        alg=tf.random.Algorithm.AUTO_SELECT.value,
        dtype=dtype,
    )
    skipped = tf.cast(first % block, tf.int32)
    return tf.reshape(tf.slice(drawn, [skipped], [count]), shape)


@contextlib.contextmanager
def add_in_place() -> Iterator[None]:
    """Makes metrics and counters correct under CentralStorage- and ParameterServerStrategy.

    Breaks: Keras's `variable.assign_add(x)` assigns `variable + x`, as metrics like AUC do
    themselves. Where all replicas share one copy, the sum over n replicas counts the old value n
    times, and workers that do not wait for each other lose updates. Does: in a replica, adds in
    place what the value has more than the variable. Outside of them, such as where a saved sum is
    put back, a value is assigned as it is: a difference would round it.
    """

    def make(stock):
        def assign_add(self, value):
            if self._value is None:
                return stock(self, value)
            with _one_line_of_weights():
                self._value.assign_add(tf.cast(value, self._value.dtype))
            return None

        return assign_add

    def make_assign(stock):
        def assign(self, value):
            is_sum = self._value is not None and self.aggregation == "sum"
            # Without a strategy's scope TensorFlow's default one says that it is in a replica.
            in_replica = (
                tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
            )
            if not (is_sum and in_replica):
                with _one_line_of_weights():
                    return stock(self, value)
            value = tf.cast(tf.convert_to_tensor(value), self._value.dtype)
            self._value.assign_add(value - self._value)
            return value

        return assign

    with _replaced(Variable, "assign_add", make), _replaced(Variable, "assign", make_assign):
        yield


@contextlib.contextmanager
def _one_line_of_weights() -> Iterator[None]:
    """Explains that replicas which share one copy of a weight cannot assign to it."""
    try:
        yield
    except ValueError as error:
        if "aggregation method" not in str(error):
            raise
        raise DistributionError(
            "a layer or the model assigns to a weight in the step, which replicas that share one "
            "copy of each weight cannot: use --strategy mirrored"
        ) from error


def distribute_data() -> contextlib.AbstractContextManager:
    """Makes each of several workers compute only its part of a global batch.

    Breaks: `TFEpochIterator` hands the dataset to `experimental_distribute_dataset`, which computes
    each global batch on every worker, copies the arrays and the mapped files that the pipeline
    reads into memory, on one worker too, and which ParameterServerStrategy refuses
    (keras-team/keras#18624). Does: where a dataset has `part_of_worker(index, workers, replicas)`,
    which returns the part of one worker, this worker uses it (and its attribute `batch_size` where
    TensorFlow does not know the size); beside parameter servers the coordinator iterates over the
    dataset itself.
    """

    def make(stock):
        def init(self, distribute_strategy=None, *args, **kwargs):
            stock(self, _OwnPart(distribute_strategy), *args, **kwargs)

        return init

    return _replaced(tf_trainer.TFEpochIterator, "__init__", make)


class _OwnPart:
    """Stands for the strategy while the iterator is made."""

    def __init__(self, strategy):
        self.strategy = strategy

    def experimental_distribute_dataset(self, dataset):
        if kinds.name_of(self.strategy) == "parameter_server":
            return dataset
        if not hasattr(dataset, "part_of_worker"):
            policies = tf.data.experimental.AutoShardPolicy
            if dataset.options().experimental_distribute.auto_shard_policy == policies.AUTO:
                # Each worker would read other files, and so other batches than one device.
                options = tf.data.Options()
                options.experimental_distribute.auto_shard_policy = policies.DATA
                dataset = dataset.with_options(options)
            return self.strategy.experimental_distribute_dataset(dataset)

        def make(context):
            workers = context.num_input_pipelines
            replicas = context.num_replicas_in_sync // workers
            part = dataset.part_of_worker(context.input_pipeline_id, workers, replicas)
            batch_size = keras.tree.flatten(part.element_spec)[0].shape[0] or part.batch_size
            return part.rebatch(batch_size // replicas) if replicas > 1 else part

        return self.strategy.distribute_datasets_from_function(make)


# Operations of tf.random and of random generators; those of `data.batches` have none of them.
_RANDOM = re.compile(
    r"Random(Uniform|UniformInt|StandardNormal|Shuffle|Gamma|Poisson|PoissonV2)|TruncatedNormal"
    r"|ParameterizedTruncatedNormal|Multinomial|SampleDistortedBoundingBox(V2)?"
    r"|Stateful(Uniform|StandardNormal|TruncatedNormal|RandomBinomial).*|RngReadAndSkip"
    r"|\w*CandidateSampler"
)
_CHANGES_A_VARIABLE = re.compile(r"Assign(Add|Sub)?VariableOp")


def random_operation(data: tf.data.Dataset) -> str | None:
    """Returns an operation of a pipeline's functions that gives other numbers after a resume.

    It draws from a random stream, which starts again with each iterator, or changes a variable, as
    the seed of Keras's random layers. What `skip(first_batch)` stands on is read again from its
    start, and gives the same numbers. What a `tf.py_function` does cannot be seen.

    Args:
        data: the pipeline.
    """
    datasets, seen = [data], set()
    while datasets:
        dataset = datasets.pop()
        if id(dataset) in seen:
            continue
        seen.add(id(dataset))
        if isinstance(dataset, skip_op._SkipDataset):
            continue
        datasets += dataset._inputs()
        for wrapper in dataset._functions():
            for operation in _operations_in(wrapper.function.graph):
                if _RANDOM.fullmatch(operation) or _CHANGES_A_VARIABLE.fullmatch(operation):
                    return operation
    return None


def random_operation_of_step() -> str | None:
    """Returns an operation of the function that is being traced that draws from a random stream.

    No checkpoint keeps where the stream is.
    """
    operations = _operations_in(tf.compat.v1.get_default_graph())
    return next(filter(_RANDOM.fullmatch, operations), None)


def changed_variables(graph: tf.Graph, kept: list[keras.Variable]) -> list[str]:
    """Returns the names of the variables that a traced step changes, other than the kept ones.

    Args:
        graph: of the step's function, whose trace may not be over.
        kept: variables that checkpoints keep, or that each step sets.
    """
    handles = {id(part.handle) for variable in kept for part in _parts(variable)}
    written = set()
    for operation in graph.get_operations():
        _, writes = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        written |= {id(tensor) for tensor in writes}
    changed = {id(outer) for outer, within in graph.captures if id(within) in written} - handles
    watched = graph._watched_variables  # `graph.variables` is empty until the trace is over
    return sorted(each.name.removesuffix(":0") for each in watched if id(each.handle) in changed)


def _parts(variable) -> tuple:
    """Returns the variable of each replica on this worker, or the one that all of them share."""
    value = getattr(variable, "value", variable) if hasattr(variable, "path") else variable
    return getattr(value, "values", None) or (getattr(value, "_v", value),)


def _operations_in(graph: tf.Graph) -> Iterator[str]:
    """Yields the types of the operations of a graph and of the functions that it calls."""
    definition = graph.as_graph_def()
    for nodes in (definition.node, *(each.node_def for each in definition.library.function)):
        yield from (node.op for node in nodes)


def copy_batches_ahead() -> contextlib.AbstractContextManager:
    """Makes a run on one GPU copy its batches there while the steps before them are computed.

    Breaks: without a strategy a step begins by copying its batch. TensorFlow starts a copy to a GPU
    when all computing that it was given before has ended, and the step when the copy has: between
    two steps the GPU waits for the process. (Under a strategy, TensorFlow copies ahead.) Does:
    where a dataset has `copied_ahead`, the name of a device, prefetches it to that device.
    """

    def make(stock):
        def init(self, *args, **kwargs):
            stock(self, *args, **kwargs)
            device = getattr(kwargs.get("x"), "copied_ahead", None)
            if device and not hasattr(self, "copied_to"):  # by this patch, applied twice
                self.copied_to = device
                self._distributed_dataset = self._distributed_dataset.apply(
                    tf.data.experimental.prefetch_to_device(device, BATCHES_AHEAD)
                )

        return init

    return _replaced(tf_trainer.TFEpochIterator, "__init__", make)


@contextlib.contextmanager
def attend_by_cudnn() -> Iterator[None]:
    """Makes attention that is traced within it use the fast kernels of GPUs; for XLA alone.

    Breaks: Keras's flash attention exists on JAX and PyTorch only (no thread known), and
    `MultiHeadAttention` computes query, key and value by three products, which a GPU computes more
    slowly than one of three times the columns. Does: lets cuDNN compute the attention that
    `attention.takes`, and computes the three by one product where they are made of one tensor. The
    weights stay those of Keras.
    """
    projected: dict[int, tf.Tensor] = {}  # by the layer of the projection
    graph = tf.compat.v1.get_default_graph()

    def make_attention(stock):
        def dot_product_attention(
            query, key, value, bias=None, mask=None, scale=None, is_causal=False, *others, **named
        ):
            # The program of a `tf.function` of the user's is kept for what is not compiled.
            is_ours = tf.compat.v1.get_default_graph() is graph
            of_default = all(each is None for each in (bias, *others, *named.values()))
            if is_ours and of_default and isinstance(scale, float | None):
                query, key, value = map(tf.convert_to_tensor, (query, key, value))
                mask = None if mask is None else tf.convert_to_tensor(mask)
                if attention.takes(query, key, value, mask):
                    return attention.attention(query, key, value, scale, mask, is_causal)
            return stock(query, key, value, bias, mask, scale, is_causal, *others, **named)

        return dot_product_attention

    def make_call(stock):
        def call(self, query, value, key=None, *others, **named):
            found = {}
            if value is query and (key is None or key is query):
                found = _projections(self, query)
            projected.update(found)
            try:
                return stock(self, query, value, key, *others, **named)
            finally:
                for layer in found:
                    projected.pop(layer, None)

        return call

    def make_einsum(stock):
        def call(self, inputs, *args, **named):
            found = projected.pop(id(self), None)
            return stock(self, inputs, *args, **named) if found is None else found

        return call

    with (
        _replaced(tf_nn, "dot_product_attention", make_attention),
        _replaced(keras.layers.MultiHeadAttention, "call", make_call),
        _replaced(keras.layers.EinsumDense, "call", make_einsum),
    ):
        yield


def attends_by_itself(layer: keras.layers.Layer) -> bool:
    """Tells whether a layer computes attention without Keras's function, on TensorFlow.

    Breaks: KerasHub's attention of Llama, Mistral, Gemma, Qwen and others asks whether there is
    flash attention, and multiplies itself where there is none, as on TensorFlow. Does: recognises
    the modules that ask, so that no run waits for the comparison of what it does not use.
    """
    return hasattr(sys.modules[type(layer).__module__], "fused_attention_op_available")


def _projections(layer: keras.layers.MultiHeadAttention, inputs) -> dict[int, tf.Tensor]:
    """Computes query, key and value of self-attention by one product; by the layer's id.

    Returns nothing where they differ in more than their weights, or the shapes are not fixed.
    """
    names = ("_query_dense", "_key_dense", "_value_dense")
    layers = [getattr(layer, name) for name in names]
    one = layers[0]
    are_alike = all(
        type(each) is keras.layers.EinsumDense
        and each.quantization_mode is None
        and each.activation in (None, keras.activations.linear)
        and each.compute_dtype == layer.compute_dtype
        and each.equation == "abc,cde->abde"
        and each.kernel.shape == one.kernel.shape
        and (each.bias is None) == (one.bias is None)
        and (each.bias is None or each.bias.shape == each.kernel.shape[1:])
        for each in layers
    )
    is_half = layer.compute_dtype in ("bfloat16", "float16")
    if not (are_alike and is_half and None not in inputs.shape and len(inputs.shape) == 3):
        return {}
    kernel = tf.stack([tf.convert_to_tensor(each.kernel) for each in layers], axis=1)
    found = tf.einsum("btd,dcnh->btcnh", tf.cast(inputs, kernel.dtype), kernel)
    if one.bias is not None:
        found += tf.stack([tf.convert_to_tensor(each.bias) for each in layers])
    return dict(zip(map(id, layers), tf.unstack(found, axis=2), strict=True))


def share_states() -> contextlib.AbstractContextManager:
    """Makes dropout and batch normalization work where replicas share one copy of a variable.

    Breaks: the seed variable and the moving statistics have `aggregation="none"`, which
    CentralStorageStrategy and ParameterServerStrategy refuse to assign in a replica. Does: creates
    them with `aggregation="only_first_replica"`; all replicas assign the same values.
    """
    names = (
        *("seed_generator_state", "moving_mean", "moving_variance", "moving_stddev"),
        *("renorm_mean", "renorm_stddev"),
    )

    def make(stock):
        def init(self, *args, **kwargs):
            if kwargs.get("name") in names:
                kwargs["aggregation"] = "only_first_replica"
            stock(self, *args, **kwargs)

        return init

    return _replaced(Variable, "__init__", make)


_batches_done = 0  # of the next epoch


@contextlib.contextmanager
def count_from_mid_epoch() -> Iterator[None]:
    """Makes `start_in_mid_epoch` set the first batch of an epoch of `fit()`.

    Breaks: `fit(initial_epoch=...)` starts at an epoch's first batch only, and so
    `BackupAndRestore` repeats the interrupted epoch. Does: drops the first counts of the
    epoch, and shortens an execution of several steps that are partly done; the dataset must begin
    at that batch.
    """

    def make_init(stock):
        def init(self, *args, **kwargs):
            stock(self, *args, **kwargs)
            # `fit()` makes its iterator before the epoch begins; one that is made while the first
            # batch is waiting belongs to an evaluation in a callback.
            self.counts_from_zero = _batches_done > 0

        return init

    def make(stock):
        def enumerate_iterator(self):
            global _batches_done
            done = 0
            if not self.counts_from_zero:
                done, _batches_done = _batches_done, 0
            for begin, end, iterator in stock(self):
                # The last execution of an epoch may be shorter than its count.
                last = min(end, self.steps_per_epoch - 1) if self.steps_per_epoch else end
                if last >= done:
                    yield max(begin, done), end, iterator
                else:  # Keras ends data of a known length by the batches that it has counted
                    self._steps_seen -= self.steps_per_execution

        return enumerate_iterator

    iterators = epoch_iterator.EpochIterator
    start_in_mid_epoch(0)
    try:
        with (
            _replaced(iterators, "__init__", make_init),
            _replaced(iterators, "_enumerate_iterator", make),
        ):
            yield
    finally:
        start_in_mid_epoch(0)


def start_in_mid_epoch(batch: int) -> None:
    """Makes the next epoch of `fit()` count from a batch other than 0.

    Call it within `patch_keras_for`, in a callback's `on_epoch_begin`.

    Args:
        batch: number of finished batches of the epoch. The dataset must begin at the next one.
    """
    global _batches_done
    _batches_done = batch


# The optimizer and metrics that `build` has built, by model.
_built: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def build(model: keras.Model, data: tf.data.Dataset) -> None:
    """Builds the optimizer and the metrics of a compiled model before `fit()`.

    Breaks: without a strategy Keras builds them while it traces the first step, which is too late
    to restore a checkpoint, and traces the step twice. Does: builds them
    from the dataset's specification.

    Args:
        model: a compiled model. Compiled again, it needs this again.
        data: the dataset for `fit()`.
    """
    spec = tf.nest.map_structure(
        lambda part: None if isinstance(part, tf.NoneTensorSpec) else part, data.element_spec
    )
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=spec)
    _built[model] = (model.optimizer, model._compile_metrics)


def use_what_is_built() -> contextlib.AbstractContextManager:
    """Makes `fit()` and `evaluate()` use the optimizer and the metrics that `build` has built.

    Breaks: under a strategy each `fit()` and `evaluate()` sets its data up on all replicas once
    more, only to read a batch's shapes; with several workers it cannot use that batch
    (keras-team/keras#20585, open). Does: leaves that out for a model that is built.
    """

    def make(stock):
        def maybe_symbolic_build(self, iterator=None, data_batch=None):
            if _built.get(self) != (self.optimizer, self._compile_metrics):
                stock(self, iterator, data_batch)

        return maybe_symbolic_build

    return _replaced(tf_trainer.TensorFlowTrainer, "_maybe_symbolic_build", make)


def several_cpus_per_worker(count: int) -> contextlib.AbstractContextManager:
    """Makes MultiWorkerMirroredStrategy train on several logical CPUs in each worker.

    Breaks: TensorFlow uses all logical GPUs of a worker, but only one CPU, even if there are more.
    Does: names them all. It is needed while the strategy is constructed, not later.

    Args:
        count: number of logical CPUs of this process; ignored with GPUs.
    """

    def make(stock):
        def initialize_local_devices(self, cluster_resolver, worker_device):
            devices, kind = stock(self, cluster_resolver, worker_device)
            if kind == "CPU":
                devices = tuple(f"{worker_device}/device:CPU:{index}" for index in range(count))
            return devices, kind

        return initialize_local_devices

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    return _replaced(extended, "_initialize_local_devices", make)


@contextlib.contextmanager
def update_together() -> Iterator[None]:
    """Decays and updates all weights of a replica in one call.

    Breaks: Keras makes a call for each weight and traces the schedule again for each decay, which
    takes up to two seconds with two replicas; and unless XLA compiles the whole step, each op of an
    update is a separate kernel. Does: makes one call, which XLA compiles where the optimizer's
    `jit_compile` is set.
    """

    def leave_decay(stock):
        def apply_weight_decay(self, variables):
            # Not called for an optimizer with a different decay, such as Muon.
            self.decays = self.weight_decay is not None

        return apply_weight_decay

    def make_update(stock):
        def update_all(self, strategy, gradients_and_variables, rate):
            gradients, variables = zip(*gradients_and_variables, strict=True)

            def update(gradients, rate):
                for gradient, variable in zip(gradients, variables, strict=True):
                    if getattr(self, "decays", False) and self._use_weight_decay(variable):
                        decay = variable * tf.cast(self.weight_decay, variable.dtype)
                        variable.assign_sub(decay * tf.cast(rate, variable.dtype))
                    # Muon does not cast a schedule's rate, which is float32, to float64.
                    self.update_step(gradient, variable, tf.cast(rate, variable.dtype))

            def on_replica(_, gradients, rate):
                jit_compile = getattr(self, "jit_compile", False)
                function = tf.function(update, jit_compile=True) if jit_compile else update
                function(gradients, tf.convert_to_tensor(rate))

            # TensorFlow takes the devices from one variable; the others are on the same ones.
            strategy.extended.update(variables[0], on_replica, (list(gradients), rate), group=False)

        return update_all

    with (
        _replaced(TFOptimizer, "_apply_weight_decay", leave_decay),
        _replaced(TFOptimizer, "_distributed_tf_update_step", make_update),
    ):
        yield


@contextlib.contextmanager
def patch_generation_for(length: int) -> Iterator[None]:
    """Makes `generate()` of KerasHub's families continue a text as a forward pass of it would.

    Args:
        length: of the rows, in tokens: prompts and what is generated.
    """
    with (
        integers_of_32_bits(),
        slide_windows_while_generating(),
        read_prompts_once(),
        rotate_by_length(length),
        rotate_by_place(),
    ):
        yield


@contextlib.contextmanager
def integers_of_32_bits() -> Iterator[None]:
    """Makes `keras.ops.arange()` of Python integers int32 where floatx is float64, too.

    Breaks: with floatx float64 they are int64, which the sliding windows of KerasHub's Mistral and
    Mixtral add to the int32 position of `generate()`: a TypeError. Does: sets floatx to float32;
    layers keep the dtype that they were made with. Generate within it.
    """
    floatx = keras.config.floatx()
    keras.config.set_floatx("float32")
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)


@contextlib.contextmanager
def slide_windows_while_generating() -> Iterator[None]:
    """Makes KerasHub's Qwen and Qwen MoE generate with sliding windows.

    Breaks: their attention asks `if cache_update_index`, which is a tensor in `generate()`: an
    OperatorNotAllowedInGraphError (no thread known). Does: computes it by the function of Qwen 3,
    which asks `is not None` and is the same otherwise. Generate within it.
    """
    from keras_hub.src.models.qwen import qwen_attention
    from keras_hub.src.models.qwen3 import qwen3_attention
    from keras_hub.src.models.qwen_moe import qwen_moe_attention

    def make(stock):
        def _compute_attention(self, *arguments, **named):
            if not self.use_sliding_window_attention:
                return stock(self, *arguments, **named)
            named.pop("training", None)  # Qwen MoE's, which does not use it
            return qwen3_attention.Qwen3Attention._compute_attention(self, *arguments, **named)

        return _compute_attention

    with (
        _replaced(qwen_attention.QwenAttention, "_compute_attention", make),
        _replaced(qwen_moe_attention.QwenMoeAttention, "_compute_attention", make),
    ):
        yield


@contextlib.contextmanager
def read_prompts_once() -> Iterator[None]:
    """Makes KerasHub's Qwen 3.5 and Qwen 3.5 MoE generate with the states of their linear layers.

    Breaks: `generate()` reads the whole rows, then the tokens from the end of the shortest prompt
    on again. Keys are replaced, but these layers carry a state along a row, which then has tokens
    twice; and it fades at each padding, since their rule ignores its mask (no thread known). Does:
    reads that end but once, and lets padding change nothing. Generate within it.
    """
    import keras_hub
    from keras_hub.src.models.qwen3_5 import qwen3_5_gated_delta_net as linear

    def make_rule(stock):
        def _chunk_gated_delta_rule(*arguments, g, beta, padding_mask=None, **named):
            if padding_mask is not None:
                is_text = tf.cast(padding_mask, tf.bool)[:, :, None]
                g, beta = (tf.where(is_text, part, tf.zeros_like(part)) for part in (g, beta))
            return stock(*arguments, g=g, beta=beta, padding_mask=padding_mask, **named)

        return _chunk_gated_delta_rule

    def make(stock):
        def _build_cache(self, token_ids, padding_mask, **named):
            lengths = tf.reduce_sum(tf.cast(padding_mask, tf.int32), axis=1)
            is_read_later = tf.range(tf.shape(token_ids)[1]) >= tf.reduce_min(lengths) - 1
            padding_mask = tf.where(is_read_later, tf.zeros_like(padding_mask), padding_mask)
            return stock(self, token_ids, padding_mask, **named)

        return _build_cache

    kinds = (keras_hub.models.Qwen3_5CausalLM, keras_hub.models.Qwen3_5MoeCausalLM)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(linear, "_chunk_gated_delta_rule", make_rule))
        for kind in kinds:
            stack.enter_context(_replaced(kind, "_build_cache", make))
        yield


def rotate_by_length(length: int) -> contextlib.AbstractContextManager:
    """Makes KerasHub's Phi-3 rotate all places of a generated text by the same factors.

    Breaks: scaling of the type "su" has other factors beyond the length of the pretraining.
    `generate()` reads prompts in rows as long as the text may become, but each new token by its own
    place: queries and keys are rotated by different factors (no thread known). Does: chooses by
    the length of the rows, as in training. Generate within it.

    Args:
        length: of the rows, in tokens.
    """
    from keras_hub.src.models.phi3.phi3_rotary_embedding import Phi3SuScaledRotaryEmbedding

    def make(stock):
        def _compute_cos_sin_embedding(self, inputs, start_index=0, positions=None):
            if positions is None:
                positions = self._compute_positions(inputs, start_index)
            return stock(self, inputs, length - keras.ops.shape(inputs)[1], positions)

        return _compute_cos_sin_embedding

    return _replaced(Phi3SuScaledRotaryEmbedding, "_compute_cos_sin_embedding", make)


@contextlib.contextmanager
def rotate_by_place() -> Iterator[None]:
    """Makes KerasHub's GPT-NeoX rotate the query of a generated token by its place.

    Breaks: it is rotated as the first one of a text (keras-hub#2870, open). Does: rotates it
    further, by where its row begins in the cache. Generate within it.
    """
    from keras_hub.src.models.gpt_neo_x.gpt_neo_x_attention import GPTNeoXAttention

    begin = None

    def make_call(stock):
        def call(self, *arguments, cache_update_index=None, **named):
            nonlocal begin
            begin = cache_update_index
            return stock(self, *arguments, cache_update_index=cache_update_index, **named)

        return call

    def make(stock):
        def _compute_attention(self, query, *arguments, **named):
            if begin is not None:
                rotated, rest = query[..., : self.rotary_dim], query[..., self.rotary_dim :]
                places = tf.fill([keras.ops.shape(query)[1]], begin)
                rotated = self.rotary_embedding_layer(rotated, positions=places)
                query = tf.concat([rotated, rest], axis=-1)
            return stock(self, query, *arguments, **named)

        return _compute_attention

    with (
        _replaced(GPTNeoXAttention, "call", make_call),
        _replaced(GPTNeoXAttention, "_compute_attention", make),
    ):
        yield


def convert_without(part: str) -> contextlib.AbstractContextManager:
    """Makes KerasHub leave weights of models of `transformers` as they are initialised.

    Args:
        part: occurs in the names of their tensors, which the model may lack.
    """
    from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader

    def make(stock):
        def port_weight(self, keras_variable, hf_weight_key, hook_fn=None):
            if part not in hf_weight_key:
                stock(self, keras_variable, hf_weight_key, hook_fn)

        return port_weight

    return _replaced(SafetensorLoader, "port_weight", make)


def convert_llama() -> contextlib.AbstractContextManager:
    """Makes KerasHub read two settings of a Llama in the format of `transformers`.

    Breaks: its converter leaves out `rms_norm_eps`, so every Llama has 1e-6 instead of 1e-5, and
    the scaling of rotary positions where `transformers` 5 writes it, in `rope_parameters` (no
    thread known). Does: passes both on.
    """
    from keras_hub.src.utils.transformers import convert_llama3

    def make(stock):
        def convert_backbone_config(config):
            rope = config.get("rope_parameters") or {}
            if rope.get("rope_type") == "llama3":
                config = config | {"rope_scaling": rope}
            found = stock(config)
            if "rms_norm_eps" in config:
                found["layer_norm_epsilon"] = config["rms_norm_eps"]
            return found

        return convert_backbone_config

    return _replaced(convert_llama3, "convert_backbone_config", make)


# Tokenizers of KerasHub whose families split a text into words as GPT-2, Llama 3 or Qwen 2 do.
LIKE_GPT2 = ("GPT2", "Roberta", "Bart", "OPT", "GPTNeoX")
LIKE_LLAMA3 = ("Llama3", "SmolLM3")
LIKE_QWEN2 = ("Qwen2", "Qwen", "QwenMoe", "Qwen3", "Qwen3Moe")


def split_words(tokenizer) -> None:
    """Makes a byte-pair tokenizer of KerasHub split a text into words before it merges pairs.

    Breaks: `BytePairTokenizer` passes its pattern of words to `tokenizers` as a text to look for,
    not as a `Regex` (no thread known), so a text is one word: runs of spaces and long numbers get
    other tokens than in the pretraining of a preset, and than in a `tf.data` pipeline of KerasHub's
    own. Does: splits as the family's own tokenizer does. Families with yet other rules, and
    tokenizers of other kinds, stay as they are.

    Args:
        tokenizer: of a preset that was pretrained elsewhere, or of a run from one.
    """
    import tokenizers
    from keras_hub.src.tokenizers.byte_pair_tokenizer import SPLIT_PATTERN_TOKENIZERS

    parts = tokenizers.pre_tokenizers
    family = type(tokenizer).__name__.removesuffix("Tokenizer")
    merges = getattr(tokenizer, "_tokenizer", None)
    if not isinstance(merges, tokenizers.Tokenizer):
        return
    if family in LIKE_GPT2:  # the pattern that ByteLevel has itself
        words: Any = parts.ByteLevel(tokenizer.add_prefix_space, use_regex=True)
    elif family in (*LIKE_LLAMA3, *LIKE_QWEN2):
        pattern = SPLIT_PATTERN_TOKENIZERS
        if family in LIKE_QWEN2:  # a digit is a word
            pattern = pattern.replace(r"\p{N}{1,3}", r"\p{N}")
        words = parts.Sequence(
            [
                parts.Split(tokenizers.Regex(pattern), "isolated"),
                parts.ByteLevel(tokenizer.add_prefix_space, use_regex=False),
            ]
        )
    else:
        return
    merges.pre_tokenizer = words
    if family == "Llama3":  # a word that is a token is not merged from parts
        merges.model.ignore_merges = True
    if family in (*LIKE_QWEN2, "GPTNeoX"):
        merges.normalizer = tokenizers.normalizers.NFC()
    tokenizer.splits_words = True


# What SmolLM 3 and RoFormer-v2 call the layers that other families call query and value. GPT-NeoX
# has one layer for queries, keys and values; peft adapts it as a whole, too.
QUERIES_AND_VALUES = ("q_proj", "v_proj", "q_dense_layer", "v_dense_layer", "query_key_value")


def enable_lora(backbone, rank: int) -> None:
    """Adds low-rank adapters to a KerasNLP backbone, in float64 where its weights are.

    Breaks: Keras makes adapters in float32, and adds the norms of all gradients, which fails with
    float64. Does: makes them in float64 beside weights of float64.

    Args:
        backbone: as `from_preset()` returns it.
        rank: of the adapters.
    """

    def make(stock):
        def add_weight(self, *args, name=None, dtype=None, **kwargs):
            if str(name).startswith("lora_") and self.variable_dtype == "float64":
                dtype = "float64"
            return stock(self, *args, name=name, dtype=dtype, **kwargs)

        return add_weight

    with _replaced(keras.layers.Layer, "add_weight", make):
        # By their names in KerasNLP; it knows those of some families only.
        names = [*backbone.default_lora_layer_names(), *QUERIES_AND_VALUES]
        backbone.enable_lora(rank, target_layer_names=names)


def scale_learning_rates(optimizer: keras.optimizers.Optimizer, factors: dict[int, float]) -> None:
    """Multiplies the learning rate and the weight decay of some variables.

    Breaks: a Keras optimizer has one rate for all variables (keras-team/keras#21741, open). Does:
    scales it in `update_step()`. The weight decay follows this rate, so it moves there too.

    Args:
        optimizer: not yet built; changed in place. Its `weight_decay` is None afterwards.
        factors: by the `id()` of the variable; any other keeps the rate.
    """
    base, weight_decay = type(optimizer), optimizer.weight_decay
    by_index: list[float] = []

    class ScaledRates(base):  # type: ignore[misc,valid-type]
        def build(self, variables):
            super().build(variables)
            by_index[:] = [factors.get(id(variable), 1.0) for variable in variables]

        def update_step(self, gradient, variable, learning_rate):
            factor = by_index[self._get_variable_index(variable)]
            rate = tf.cast(learning_rate, variable.dtype) * factor
            if weight_decay is not None and self._use_weight_decay(variable):
                variable.assign_sub(variable * tf.cast(weight_decay, variable.dtype) * rate)
            super().update_step(gradient, variable, rate)

    change_class(optimizer, ScaledRates)
    optimizer.weight_decay = None


def orthogonalize_heads(optimizer: keras.optimizers.Muon, width: int | None = None) -> None:
    """Makes Muon update the kernels of attention layers, each head's matrix on its own.

    Breaks: `keras.optimizers.Muon` updates whatever has two dimensions, so AdamW updates the
    kernels of attention layers, whose shape is (width, heads, width of a head), in Gemma (heads,
    width, width of a head), or (heads, width of a head, width) after it, and Muon their biases;
    and it assigns weights to decay them, which TensorFlow refuses in a replica where all replicas
    share one copy. Does: orthogonalizes such a kernel as a stack of matrices, one of each head,
    leaves the biases to AdamW, and decays weights as Keras's other optimizers do.

    Args:
        optimizer: not yet built; changed in place. Both of its weight decays are equal.
        width: of the model, to tell Gemma's kernels from the others'; None if it has none of them.
    """
    base = type(optimizer)
    orders: dict[int, tuple] = {}  # by index of the variable: its axes, heads first

    class MuonOfHeads(base):  # type: ignore[misc,valid-type]
        def build(self, variables):
            super().build(variables)
            # At an update a variable is TensorFlow's, without its path.
            for index, variable in enumerate(variables):
                if _is_of_heads(variable):
                    heads_first = variable.shape[1] == width != variable.shape[0]
                    is_output = "output" in variable.path or "o_proj" in variable.path
                    orders[index] = (0, 1, 2) if is_output or heads_first else (1, 0, 2)

        def _apply_weight_decay(self, variables):
            super(keras.optimizers.Muon, self)._apply_weight_decay(variables)

        def _should_use_adamw(self, variable):
            if _is_of_heads(variable):
                return False
            return "bias" in variable.name or super()._should_use_adamw(variable)

        def _muon_update_step(self, gradient, variable, lr, m):
            order = orders.get(self._get_variable_index(variable))
            if order is None:
                return super()._muon_update_step(gradient, variable, lr, m)
            self.assign_add(m, gradient + m * (self.momentum - 1))
            update = gradient + self.momentum * m if self.nesterov else m
            update = tf.transpose(update, order)
            rows, columns = update.shape[1:]
            update = self.zeropower_via_newtonschulz5(update, self.ns_steps)
            if self.rms_rate is not None:
                update *= self.rms_rate * max(rows, columns) ** 0.5
            self.assign_sub(variable, lr * tf.transpose(update, order))

    change_class(optimizer, MuonOfHeads)


def _is_of_heads(variable) -> bool:
    # The path of SmolLM3's output projection is o_proj/kernel.
    is_of_attention = "attention" in variable.path or "o_proj" in variable.path
    return len(variable.shape) == 3 and variable.name == "kernel" and is_of_attention


def change_class(optimizer: keras.optimizers.Optimizer, changed: type) -> None:
    """Gives an optimizer a subclass of its class, under the name by which Keras saves it."""
    base = type(optimizer)
    changed.__name__, changed.__qualname__ = base.__name__, base.__qualname__
    changed.__module__ = base.__module__
    optimizer.__class__ = changed


def own_steps(model: keras.Model) -> list[str]:
    """Returns which of `train_step` and `test_step` a model overrides."""
    stock = tf_trainer.TensorFlowTrainer
    names = ("train_step", "test_step")
    return [name for name in names if getattr(type(model), name) is not getattr(stock, name)]


def call(model: keras.Model, x, training: bool):
    """Calls a model like `train_step`: passes `training` if it is an argument.

    Lacks: no public name tells whether it is.
    """
    return model(x, training=training) if model._call_has_training_arg else model(x)


def compute_loss(model: keras.Model, x, y, y_pred, sample_weight, training: bool):
    """Calls `compute_loss()`, also an older one without `training`.

    Lacks: no public name tells whether it has.
    """
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )


def mask_of(output) -> tf.Tensor | None:
    """Returns the mask that a layer put on its output, or None.

    Lacks: `keras.Layer.compute_mask()` needs the inputs' masks.
    """
    return backend.get_keras_mask(output)


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
    entries = _losses_with_ignored(model)
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


def _losses_with_ignored(model: keras.Model) -> list:
    compiled = model._compile_loss
    if compiled is None or not compiled.built:
        return []
    kwargs = ((e, getattr(e.loss, "_fn_kwargs", {})) for e in compiled._flat_losses)
    return [entry for entry, values in kwargs if values.get("ignore_class") is not None]


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of all metrics of a model and of its layers.

    Lacks: `model.metrics_variables` leaves out those of inner models, and those that an overridden
    `metrics` does not return, such as Keras's own mean of the loss.
    """
    found = list(model._get_own_metrics())
    for layer in layers_of(model):
        found += layer._metrics
    return [variable for metric in found for variable in metric.variables]


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """Returns the metric `loss`.

    Lacks: `model.metrics` has it by its name alone, which a metric of the model may have too.
    """
    return model._loss_tracker


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
        if entry.loss.reduction == "mean_with_sample_weight":
            entry.loss.reduction = "sum_over_batch_size"
        elif entry.loss.reduction == "sum":
            entry = entry._replace(loss=_SumOverParts(entry.loss, replicas, entry.path))
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


def needs_labels(model: keras.Model) -> bool:
    """Tells whether Keras compares the outputs with labels, for a loss or a metric of `compile()`.

    Lacks: no public name for the metrics of `compile()`.

    Args:
        model: compiled.
    """
    kind = type(model)
    if own_steps(model):
        return False
    by_loss = kind.compute_loss is keras.Model.compute_loss and model.loss is not None
    by_metrics = kind.compute_metrics is keras.Model.compute_metrics
    return by_loss or (by_metrics and model._compile_metrics is not None)


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
    """Calls a loss with `ignore_class`; the labels that count are weights: `masks_of_labels`."""
    return tf.identity(call(y_true, y_pred))


def _mixes_examples(loss) -> bool:
    """Tells whether one of Keras's losses has no value for each example.

    Lacks: such a loss is known by its function and the axes it is given, which have no public name.
    """
    function = getattr(loss, "fn", None)
    if function in (keras.losses.dice, keras.losses.tversky):
        axis = loss._fn_kwargs.get("axis")
        return axis is None or 0 in np.atleast_1d(axis)
    return function is keras.losses.circle


# The weights of each output of a batch and their sums, its losses, and how many batches these are
# averaged over.
_outputs = threading.local()


@contextlib.contextmanager
def outputs_count(
    totals, batches: int = 1, is_unpadded: bool = False, weights=None
) -> Iterator[list]:
    """Counts the loss of each output in the logs by its weights, while a batch is evaluated.

    Breaks: the logs of several losses count each batch by its number of examples, so a padded last
    one counts as a full one. Does: hands the weights to the metrics that `prepare_losses` changed.

    Args:
        totals: the sum of each output's weights, structured like the weights; None for Keras's
            numbers.
        batches: batches of an update in training, whose mean is applied; 1 in an evaluation.
        is_unpadded: whether the padding was removed from the batch.
        weights: those of the data, for the losses that are sums.

    Yields:
        A list that gets the loss of each output, times its `loss_weights`; of several outputs.
    """
    _outputs.totals, _outputs.losses, _outputs.batches = totals, [], batches
    _outputs.is_unpadded, _outputs.weights = is_unpadded, weights
    try:
        yield _outputs.losses
    finally:
        _outputs.totals, _outputs.losses, _outputs.batches = None, None, 1
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

    def __init__(self, loss, replicas: int, path: tuple):
        self.loss, self.replicas, self.path = loss, replicas, path
        self._fn_kwargs = getattr(loss, "_fn_kwargs", {})

    def __call__(self, y_true, y_pred, sample_weight=None):
        parts = self.replicas * getattr(_outputs, "batches", 1)
        weights = getattr(_outputs, "weights", None)
        if sample_weight is not None and weights is not None:
            for name in self.path if keras.tree.is_nested(weights) else ():
                weights = weights[name]
            sample_weight = weights
        return parts * self.loss(y_true, y_pred, sample_weight=sample_weight)


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

    Lacks: no public name for the metrics of names, lists and dicts.
    """
    compiled = model._compile_metrics
    if compiled is None or not compiled.built:
        return
    compiled._flat_metrics = [
        m and _OfExamples(m.metrics, output_name=m.output_name) for m in compiled._flat_metrics
    ]
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return
    for found in (*compiled._flat_metrics, *compiled._flat_weighted_metrics):
        for metric in found.metrics if found else ():
            if _is_own_function(metric):
                metric._fn = functools.partial(_value_of_metric, metric._fn, metric.name)


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


def _value_of_metric(function: Callable, name: str, y_true, y_pred, **kwargs):
    """Calls a metric's function on several replicas.

    Raises:
        DistributionError: it returns one number for a part of a batch.
    """
    values = tf.convert_to_tensor(function(y_true, y_pred, **kwargs))
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


def is_deterministic() -> bool:
    """Tells whether `tf.config.experimental.enable_op_determinism()` was called.

    Lacks: no public API reports this.
    """
    return is_op_determinism_enabled()


def learning_rate_of(optimizer: keras.optimizers.Optimizer):
    """Returns the optimizer's schedule, or its rate if it has none.

    Lacks: `optimizer.learning_rate` returns the rate of the next step; there is no public name for
    the schedule itself.
    """
    return optimizer._learning_rate


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns all layers of a model, also those within other layers.

    Lacks: `model.layers` has only the outermost ones.
    """
    return list(model._flatten_layers())


def seeds_of(layer: keras.layers.Layer) -> list[keras.random.SeedGenerator]:
    """Returns the generators of a layer, also those in lists and dicts, but not of inner layers.

    Lacks: no public name for them.
    """
    return layer._seed_generators


def states_of_layers(model: keras.Model) -> list[keras.Variable]:
    """Returns the states of a model's stateful layers, which neither weights nor files hold.

    Lacks: Keras keeps them in `layer.states` alone.
    """
    layers = [e for e in layers_of(model) if isinstance(e, keras.layers.RNN) and e.stateful]
    return [state for layer in layers for state in keras.tree.flatten(layer.states)]


def global_seed(create: bool = False) -> list[keras.Variable]:
    """Returns the state of the generator of draws without a `SeedGenerator`, if there is one.

    Lacks: no public API names it.

    Args:
        create: whether to make one if nothing was drawn yet.
    """
    if not create and global_state.get_global_attribute("global_seed_generator") is None:
        return []
    return [seed_generator.global_seed_generator().state]


def random_seed() -> int | None:
    """Returns the seed of `keras.utils.set_random_seed()`; None after `clear_session()`.

    Lacks: no public API reports it.
    """
    return rng_utils.get_random_seed()


def not_for_xla(model: keras.Model) -> list[str]:
    """Returns the names of a model's layers that XLA cannot compile in this process.

    What Keras marks so, such as `RandomRotation` and `StringLookup`. With several replicas what
    sums over them: batch normalization, and layers whose mask, or losses whose `ignore_class`,
    decides which values count. Max pooling where operations are deterministic. Lacks: no public API
    reports any of it.
    """
    several = model.distribute_strategy.num_replicas_in_sync > 1
    names = []
    for layer in layers_of(model):
        normalises = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        pools = is_op_determinism_enabled() and "MaxPooling" in type(layer).__name__
        if not layer.supports_jit or (several and normalises) or pools:
            names.append(layer.name)
    if several and getattr(model, "outputs", None):  # not of a subclass of keras.Model
        masked = [output for output in model.outputs if mask_of(output) is not None]
        names += [output._keras_history.operation.name for output in masked]
    if several:
        names += [f"the ignore_class of {entry.name}" for entry in _losses_with_ignored(model)]
    return names


def metric_direction(model: keras.Model, name: str) -> str | None:
    """Returns the direction in which a compiled metric improves; None if Keras does not mark it.

    Lacks: the mark by which Keras's own `EarlyStopping` decides has no public name.
    """
    metrics = [m for group in model.metrics for m in getattr(group, "metrics", [group])]
    for metric in sorted(metrics, key=lambda metric: len(metric.name), reverse=True):
        if f"_{name}".endswith(f"_{metric.name}"):  # the name of an output may stand before it
            marks = {"up": "max", "down": "min"}
            return marks.get(getattr(metric, "_direction", ""))
    return None


def transform_of(head) -> list[keras.layers.Layer]:
    """Returns the layers of a `keras_nlp.layers.MaskedLMHead` before its logits.

    Lacks: the head has no public name for them.
    """
    return [head._intermediate_dense, head._intermediate_layer_norm]


def output_bias_of(head) -> keras.Variable:
    """Returns the bias of a `keras_nlp.layers.MaskedLMHead`, of shape (vocabulary size,).

    Lacks: the head has no public name for it.
    """
    return head._bias
