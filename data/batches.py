"""Chooses the examples of each batch from the seed, the step and the global batch size alone.

Position p of epoch e is example `permutation(seed, e)[p]`, and step s holds the positions
`[s * G, (s + 1) * G)` of its epoch, where G is the global batch size. So a model sees the same
batches with any number of replicas, workers or restarts, and a run resumes at any step at once.

With the lengths of examples, batches hold examples of similar length: the positions of several
updates of the weights are sorted by length, and the updates then drawn in a random order.
"""

import zlib
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from data.errors import DataError

# Batches computed in parallel, and batches prefetched; one takes a small part of a step's time.
PARALLEL_BATCHES, PREFETCHED_BATCHES = 2, 2
# Updates whose examples are sorted by length together: at most this many, and of an epoch at most
# one part in so many, so that an update has other examples in each epoch.
SORTED_UPDATES, SORTED_PART = 50, 4
# TensorFlow's four make batches of 128 of sorted data too similar from 50,000 examples on.
SHUFFLE_ROUNDS = 8
# With one of these as the last number, the operation leaves it out and has another one twice.
_UNFIT = tuple(4**power for power in range(8, 31))
# Raise it when a seed gets another order of examples: no run resumes in another one.
ORDER = 2
# The epoch that validation and test data are drawn with: their masks never change.
EVALUATION_EPOCH = -1


def stream_seed(seed: int, name: str) -> int:
    """Returns a seed for one use of randomness; non-negative, 31 bits.

    Args:
        seed: the run's seed.
        name: its use, for instance "shuffle" or "train masks".
    """
    return zlib.crc32(f"{seed}/{name}".encode()) & 0x7FFFFFFF


def permuted(positions: tf.Tensor, seed: int, epoch: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the indices of the examples at these positions of an epoch.

    Args:
        positions: int64 tensor of shape (batch,), each in [0, count).
        seed: the run's seed.
        epoch: int64 scalar.
        count: number of examples.

    Returns:
        int64 tensor of shape (batch,); over a whole epoch each example appears once.
    """
    stream, is_unfit = stream_seed(seed, "shuffle"), count - 1 in _UNFIT
    found = _shuffled(positions, stream, epoch, count + is_unfit)
    if is_unfit:
        # Of one number more: where that one stands comes what stands at its own place.
        other = _shuffled(tf.constant(count, tf.int64), stream, epoch, count + 1)
        found = tf.where(found == count, other, found)
    return found


def _shuffled(positions: tf.Tensor, stream: int, number: tf.Tensor, count: tf.Tensor | int):
    """Returns what stands at these positions of a random order of the numbers in [0, count).

    `tf.random.experimental.index_shuffle` reads the lowest bits of its seed's words alone (eight
    of them up to 65,536 examples): epochs 0 and 256 would have the same order, and so would many
    seeds. It also mixes them so little that each batch of 128 of 65,536 examples has exactly 64
    of the first half. So the words are hashed, and mixed in twice as many rounds.

    Args:
        positions: int64 tensor, each in [0, count).
        stream: seed of the order, of `stream_seed()`.
        number: of the order, an int64 scalar, for instance the epoch.
        count: of the numbers; none of `_UNFIT` and one.

    Returns:
        int64 tensor of the same shape.
    """
    state = _mixed(_mixed(tf.constant(stream, tf.uint64)) ^ tf.cast(number, tf.uint64))
    thirds = [tf.bitwise.right_shift(state, tf.constant(shift, tf.uint64)) for shift in (0, 21, 42)]
    words = tf.bitwise.bitwise_and(tf.stack(thirds), tf.constant(2**21 - 1, tf.uint64))
    return tf.raw_ops.RandomIndexShuffle(
        index=positions,
        seed=tf.cast(words, tf.int32),
        max_index=tf.cast(count - 1, positions.dtype),
        rounds=SHUFFLE_ROUNDS,
    )


def of_similar_length(
    update: tf.Tensor, seed: int, size: int, updates_per_epoch: int, ranks: tf.Tensor
) -> tf.Tensor:
    """Returns the indices of the examples of an update of the weights, whose lengths are similar.

    A group of consecutive updates has the same examples as without lengths: sorted by length,
    they are cut into updates, which come in a random order.

    Args:
        update: number of the update, an int64 scalar; of epoch 1 from `updates_per_epoch` on.
        seed: the run's seed.
        size: examples of an update, the global batch or all that it accumulates.
        updates_per_epoch: updates of an epoch.
        ranks: of each example by its length, int32 of shape (examples,); the shortest have 0.

    Returns:
        int64 tensor of shape (size,), the shortest example first.
    """
    most = max(1, min(SORTED_UPDATES, updates_per_epoch // SORTED_PART))
    epoch, place = update // updates_per_epoch, update % updates_per_epoch
    first = place // most * most
    in_group = tf.minimum(tf.constant(most, tf.int64), updates_per_epoch - first)
    positions = tf.range(first * size, (first + in_group) * size)
    examples = permuted(positions, seed, epoch, len(ranks))
    examples = tf.gather(examples, tf.argsort(tf.gather(ranks, examples), stable=True))
    number = update - place + first  # of the group's first update
    drawn = _shuffled(place - first, stream_seed(seed, "updates"), number, in_group)
    return tf.ensure_shape(examples[drawn * size : (drawn + 1) * size], [size])


def training_batches(
    count: int,
    batch_size: int,
    seed: int,
    make_batch: Callable,
    *,
    batches_per_epoch: int | None = None,
    first_batch: int = 0,
    with_position: bool = False,
    lengths: np.ndarray | None = None,
    batches_per_update: int = 1,
) -> tf.data.Dataset:
    """Makes endless global batches for training.

    Args:
        count: number of examples.
        batch_size: examples of a global batch.
        seed: the run's seed.
        make_batch: maps (indices, epoch), int64 of shape (batch,) and (), to what `fit()` takes.
        batches_per_epoch: batches of an epoch; all full ones by default. (With accumulation a
            multiple of the accumulated batches.)
        first_batch: number of the batch to start at, for a resumed run.
        with_position: whether `make_batch` takes, as a third argument, how many examples all
            batches before this one have, an int64 scalar.
        lengths: of each example, integers of shape (examples,), for batches of examples of similar
            length; `make_batch` then takes, as its last argument, the largest length within the
            global batch, an int32 scalar. Or of each part of an example, (examples, parts): sorted
            by the first part, then by the second one; the largest ones have shape (parts,).
        batches_per_update: batches that an update accumulates. With lengths they hold the examples
            of one batch that is as many times as large.

    Returns:
        An infinite dataset; the incomplete last batch of each epoch is dropped. Its attribute
        `part_of_worker` makes the part of one worker alone, see
        `keras_compat.fitting.distribute_data`, whose attribute `batch_size` counts its examples; it
        raises a `DataError` for a batch that the replicas cannot share equally.

    Raises:
        DataError: There are fewer examples than an epoch needs, or `lengths` of other examples, or
            with them an epoch that ends within an update.
    """
    per_epoch = (batches_per_epoch or count // batch_size) * batch_size
    if not 0 < per_epoch <= count:
        raise DataError(
            f"{count} examples give no epoch of {batches_per_epoch or 'full'} batches of "
            f"{batch_size}"
        )

    size = batch_size * batches_per_update
    if lengths is not None:
        table, ranks = _length_table(lengths, count)
    if lengths is not None and per_epoch % size:
        raise DataError(
            f"an epoch of {per_epoch // batch_size} batches; with lengths expected a multiple of "
            f"batches_per_update, {batches_per_update}"
        )

    def batch_at(positions, first):
        epoch = first // per_epoch
        more = [first] if with_position else []
        if lengths is None:
            examples = permuted(positions % per_epoch, seed, epoch, count)
        else:
            update = of_similar_length(first // size, seed, size, per_epoch // size, ranks)
            whole = update[first % size :][:batch_size]  # the global batch
            more.append(tf.reduce_max(tf.gather(table, whole), axis=0))
            examples = tf.gather(update, positions % size)
        return make_batch(examples, epoch, *more)

    return _in_batches(first_batch * batch_size, None, batch_size, batch_at)


def evaluation_batches(
    count: int, batch_size: int, make_batch: Callable, *, lengths: np.ndarray | None = None
) -> tf.data.Dataset:
    """Makes batches of every example once; the last one is padded with examples of weight zero.

    The examples come in order, or, with lengths, from the shortest to the longest.

    Args:
        count: number of examples.
        batch_size: examples of a global batch.
        make_batch: maps (indices, epoch) to (x, y, sample_weight), or to (x, y) or x alone for
            weights of one; `epoch` is `EVALUATION_EPOCH`. Weights of several outputs may be nested.
        lengths: as in `training_batches`.

    Returns:
        Batches (x, y, sample_weight); y is None where `make_batch` returns x alone. Replicas that
        cannot share a batch equally get more padding.
    """
    total = -(-count // batch_size) * batch_size
    if lengths is not None:
        table, ranks = _length_table(lengths, count)
        order = tf.argsort(ranks, stable=True)

    def batch_at(positions, first):
        epoch = tf.constant(EVALUATION_EPOCH, tf.int64)
        examples, longest = tf.minimum(positions, count - 1), []
        if lengths is not None:
            whole = order[first : first + batch_size]  # the global batch
            longest = [tf.reduce_max(tf.gather(table, whole), axis=0)]
            examples = tf.cast(tf.gather(order, examples), tf.int64)
        batch = make_batch(examples, epoch, *longest)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        if weights is None:
            weights = tf.ones_like(positions, keras.config.floatx())

        def without_padding(weights: tf.Tensor) -> tf.Tensor:
            if weights.dtype == tf.bool:
                weights = tf.cast(weights, keras.config.floatx())
            real = tf.cast(positions < count, weights.dtype)
            return weights * tf.reshape(real, [-1] + [1] * (weights.shape.rank - 1))

        return x, y, tf.nest.map_structure(without_padding, weights)

    return _in_batches(0, total, batch_size, batch_at)


def _length_table(lengths: np.ndarray, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the lengths, and the rank of each example by them, both int32."""
    if lengths.shape[:1] != (count,) or lengths.ndim > 2:
        raise DataError(f"lengths of shape {lengths.shape}; expected one for each of {count}")
    _, ranks = np.unique(lengths, axis=0, return_inverse=True)
    return tf.constant(lengths, tf.int32), tf.constant(ranks.reshape(-1), tf.int32)


def _in_batches(first: int, end: int | None, batch_size: int, batch_at: Callable):
    """Makes batches of the positions from `first` on.

    Args:
        first: first position of the first batch.
        end: position after the last batch; None for batches without an end.
        batch_size: examples of a global batch.
        batch_at: maps positions, int64 of shape (batch,), and the first one of their global batch
            to a batch. Positions from `end` on are padding.
    """
    batch_at = tf.autograph.experimental.do_not_convert(batch_at)  # no loops; starts sooner

    def part_of_worker(index: int, workers: int, replicas: int = 1) -> tf.data.Dataset:
        """Computes only this worker's part of each global batch.

        A batch of an evaluation that all replicas cannot share equally is padded.

        Args:
            index: of the worker, from 0.
            workers: number of workers.
            replicas: replicas of each worker.

        Raises:
            DataError: they cannot share a batch for training.
        """
        parts = workers * replicas
        padding = -batch_size % parts
        if padding and end is None:
            larger = batch_size + padding
            nearest = [size for size in (larger - parts, larger) if size > 0]
            raise DataError(
                f"training data with batch_size {batch_size} cannot be shared by {parts} replicas: "
                f"it must be a multiple of {parts}, for instance {' or '.join(map(str, nearest))}"
            )
        own = (batch_size + padding) // workers

        def own_batch(positions: tf.Tensor):
            begin = positions[0]
            if padding:
                positions = tf.pad(positions, [[0, padding]], constant_values=end)
            if workers > 1:
                positions = positions[index * own : (index + 1) * own]
            return batch_at(positions, begin)

        dataset = tf.data.Dataset.range(first, np.iinfo(np.int64).max if end is None else end)
        dataset = dataset.batch(batch_size, drop_remainder=True)
        dataset = dataset.map(own_batch, num_parallel_calls=PARALLEL_BATCHES, deterministic=True)
        dataset = dataset.prefetch(PREFETCHED_BATCHES).with_options(_options())
        dataset.batch_size = own  # a tf.numpy_function in `batch_at` hides it from TensorFlow
        return dataset

    dataset = part_of_worker(0, 1)
    dataset.part_of_worker = part_of_worker
    return dataset


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    # TensorFlow 2.21 can miss the end of an iterator with autotuning: its thread is woken before
    # the flag that it reads is set, and sleeps for up to a minute, while the code that deletes the
    # iterator (at the end of an epoch's evaluation) waits for it.
    options.autotune.enabled = False
    # Graph rewrites copy the tensors that the pipeline reads, mapped files too, and gain nothing.
    options.experimental_optimization.apply_default_optimizations = False
    return options


# splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def uniform(seed: int, *keys: tf.Tensor) -> tf.Tensor:
    """Draws random numbers that depend on the seed and on integer keys alone.

    TensorFlow's stateless generators take one seed per tensor. The masks of an example must not
    depend on its batch, so each number has its own keys, which splitmix64 hashes.

    Args:
        seed: non-negative integer.
        keys: int64 tensors that broadcast against each other, for instance epoch, example, place.

    Returns:
        float32 tensor of the broadcast shape, in [0, 1), with 24 random bits.
    """
    state = tf.constant(seed, tf.uint64)
    for key in keys:
        state = _mixed(state ^ tf.cast(key, tf.uint64))
    bits = tf.bitwise.right_shift(state, tf.constant(40, tf.uint64))
    return tf.cast(tf.cast(bits, tf.int64), tf.float32) * 2.0**-24


def _mixed(state: tf.Tensor) -> tf.Tensor:
    state += tf.constant(_GAMMA, tf.uint64)
    for shift, factor in _MIX:
        state ^= tf.bitwise.right_shift(state, tf.constant(shift, tf.uint64))
        state *= tf.constant(factor, tf.uint64)
    return state ^ tf.bitwise.right_shift(state, tf.constant(31, tf.uint64))
