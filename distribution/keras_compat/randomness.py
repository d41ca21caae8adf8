"""Draws random numbers by place, and finds those, and states, that no checkpoint keeps."""

import contextlib
import re
import threading
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import random as tf_random
from keras.src.random import seed_generator
from keras.src.utils import rng_utils
from tensorflow.python.data.ops import skip_op
from tensorflow.python.framework import auto_control_deps_utils

from distribution.keras_compat.replacing import replaced

# Layers of Keras that mix examples, or draw numbers for a whole batch.
MIXING = (
    *(keras.layers.AugMix, keras.layers.CutMix, keras.layers.MixUp, keras.layers.RandAugment),
    keras.layers.RandomElasticTransform,
)


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
            shape = tf_random._get_concrete_noise_shape(inputs, noise_shape)
            shape = tf.shape(inputs) if shape is None else tf.convert_to_tensor(shape)
            # A mask with one row is the same for all examples, on every replica.
            shared = noise_shape is not None and noise_shape[0] == 1
            shared = shared or (len(inputs.shape) > 0 and inputs.shape[0] == 1)
            if not _takes_part() or shared or not 0.0 < rate < 1.0 or len(inputs.shape) == 0:
                return stock(inputs, rate, noise_shape, seed)
            seed = tf_random._cast_seed(tf_random.draw_seed(seed))
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            drawn = _uniform_rows(shape, seed, inputs.dtype, index)
            scaled = inputs * tf.constant(1.0 / (1.0 - rate), inputs.dtype)
            return tf.where(drawn >= tf.constant(rate, inputs.dtype), scaled, tf.zeros_like(scaled))

        return dropout

    return replaced(tf_random, "dropout", make)


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


# Functions of `keras.random` whose first argument is the shape of what they draw.
DRAWS = ("normal", "uniform", "truncated_normal", "randint", "gamma", "beta", "binomial")

# How many examples a replica's part of a batch has. Each replica is traced in a separate thread.
_part = threading.local()


@contextlib.contextmanager
def part_of_batch(x, place: tuple[tf.Tensor, tf.Tensor] | None = None) -> Iterator[None]:
    """Tells `draw_by_place` which examples a replica has, while its step is traced.

    Args:
        x: the inputs of the replica's part of a batch.
        place: of its first example in the global batch, and the number of examples of all replicas,
            int32 scalars; None where all of them have as many.
    """
    before, leaf = dict(vars(_part)), keras.tree.flatten(x)[0]
    known = leaf.shape[0] if leaf.shape.rank else None
    _part.rows, _part.place = tf.shape(leaf)[0] if known is None else known, place
    try:
        yield
    finally:
        _part.rows, _part.place = before.get("rows"), before.get("place")


@contextlib.contextmanager
def drawn_as_on_one_device() -> Iterator[None]:
    """Makes a replica that has a whole global batch draw its numbers as one device does."""
    _part.is_whole = True
    try:
        yield
    finally:
        _part.is_whole = False


def _takes_part() -> bool:
    """Tells whether what is traced has a part of a batch, as one of several replicas."""
    replica = tf.distribute.get_replica_context()
    several = replica is not None and replica.num_replicas_in_sync > 1
    return several and not getattr(_part, "is_whole", False)


@contextlib.contextmanager
def draw_by_place() -> Iterator[None]:
    """Makes random numbers of examples a function of seed, step and place in the global batch.

    Breaks: all replicas draw the same numbers, so those of a global batch repeat, and change with
    the number of replicas. Does: where the first axis of what is drawn is the batch, draws the
    numbers of the whole global batch on each replica, which takes its rows.
    """

    def make(stock):
        def draw(shape, *args, **kwargs):
            if not _takes_part():
                return stock(shape, *args, **kwargs)
            sizes = tf.unstack(shape) if tf.is_tensor(shape) else list(shape)
            parameters = [*args, *(value for name, value in kwargs.items() if name != "seed")]
            if not _is_of_examples(sizes) or any(map(_has_axes, parameters)):
                return stock(shape, *args, **kwargs)
            if _part.place is not None:
                first, of_all = _part.place
                return stock([of_all, *sizes[1:]], *args, **kwargs)[first : first + sizes[0]]
            replica = tf.distribute.get_replica_context()
            replicas = replica.num_replicas_in_sync
            drawn = stock([replicas * sizes[0], *sizes[1:]], *args, **kwargs)
            return tf.reshape(drawn, [replicas, *sizes])[replica.replica_id_in_sync_group]

        return draw

    with contextlib.ExitStack() as stack:
        for name in DRAWS:
            stack.enter_context(replaced(tf_random, name, make))
        yield


def _is_of_examples(sizes: list) -> bool:
    """Tells whether the first size of a shape is that of the replica's part of the batch.

    Sizes that are known while the step is traced are compared; one that is not known, such as
    `keras.ops.shape(x)[0]` of batches of several sizes, is taken for the batch's.
    """
    rows = getattr(_part, "rows", None)
    if rows is None or not sizes:
        return False
    first = tf.get_static_value(sizes[0])
    return first is None or first == tf.get_static_value(rows)


def _has_axes(parameter) -> bool:
    """Tells whether a parameter of what is drawn, such as a mean, has several values."""
    return isinstance(parameter, list | tuple) or len(getattr(parameter, "shape", ())) > 0


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
    changed = _written_handles(graph) - handles
    watched = graph._watched_variables  # `graph.variables` is empty until the trace is over
    return sorted(each.name.removesuffix(":0") for each in watched if id(each.handle) in changed)


def changes(graph: tf.Graph, variable: keras.Variable) -> bool:
    """Tells whether a traced function changes a variable."""
    return not _written_handles(graph).isdisjoint(id(part.handle) for part in _parts(variable))


def _written_handles(graph: tf.Graph) -> set[int]:
    written = set()
    for operation in graph.get_operations():
        _, writes = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        written |= {id(tensor) for tensor in writes}
    return {id(outer) for outer, within in graph.captures if id(within) in written}


def _parts(variable) -> tuple:
    """Returns the variable of each replica on this worker, or the one that all of them share."""
    value = getattr(variable, "value", variable) if hasattr(variable, "path") else variable
    return getattr(value, "values", None) or (getattr(value, "_v", value),)


def _operations_in(graph: tf.Graph) -> Iterator[str]:
    """Yields the types of the operations of a graph and of the functions that it calls."""
    definition = graph.as_graph_def()
    for nodes in (definition.node, *(each.node_def for each in definition.library.function)):
        yield from (node.op for node in nodes)


def draws_by_place(layer: keras.layers.Layer) -> bool:
    """Tells whether a layer draws what `drop_out_by_place` and `draw_by_place` make exact."""
    is_stock = type(layer).__module__.partition(".")[0] in ("keras", "keras_hub", "keras_nlp")
    return is_stock and not isinstance(layer, MIXING)


def seeds_of(layer: keras.layers.Layer) -> list[keras.random.SeedGenerator]:
    """Returns the generators of a layer, also those in lists and dicts, but not of inner layers.

    Lacks: no public name for them.
    """
    return layer._seed_generators


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
