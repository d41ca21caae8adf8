"""Turns arrays in memory into batches, for recipes whose examples are rows."""

from collections.abc import Callable
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from data import batches
from data.errors import DataError

# Time steps that batches of rows with lengths are cut to, where their arrays are longer: few enough
# that XLA, which compiles each of them, does so in time.
LENGTHS = tuple(length * 2**octave for octave in range(11) for length in (8, 12))

Examples = TypeVar("Examples", list[str], np.ndarray)
Arrays = np.ndarray | dict[str, np.ndarray] | list[np.ndarray] | tuple[np.ndarray, ...]


def training_data(
    x: Arrays,
    y: Arrays | None = None,
    sample_weight: Arrays | None = None,
    *,
    seed: int,
    batch_size: int,
    batches_per_epoch: int | None = None,
    first_batch: int = 0,
    change: Callable | None = None,
    lengths: np.ndarray | None = None,
    batches_per_update: int = 1,
) -> tf.data.Dataset:
    """Makes endless global batches, shuffled differently in each epoch.

    Example:
    ```python
    data = arrays.training_data(pixels, labels, seed=0, batch_size=32)
    model.fit(data, steps_per_epoch=len(labels) // 32)
    ```

    Args:
        x: An array of shape (examples, ...), or several in a dict, list or tuple; a list becomes
            a tuple. Tensors, and tables and columns of pandas, are arrays, too.
        y: An array of shape (examples, ...), or several. A regression with one output needs a
            column, (examples, 1), the shape of the model's output. None for a model whose
            `compute_loss()` needs no labels.
        sample_weight: Weights of the examples, (examples,), or of their time steps,
            (examples, time), one array or one per output; None for ones.
        seed: The run's seed.
        batch_size: Examples of a global batch.
        batches_per_epoch: Batches of an epoch, see `batches.training_batches`.
        first_batch: Number of the batch to start at, for a resumed run.
        change: Changes the inputs of a batch, for instance to augment them. Called with x, the
            examples' indices and the epoch, int64 of shape (batch,) and (), and must depend on
            nothing else, so that a run resumes bit for bit; draw with `batches.uniform`.
        lengths: Length of each example, integers of shape (examples,), if each array of x has
            shape (examples, time, ...) and is padded at the end. Batches then hold examples of
            similar length, and x is cut after the longest one, at one of `LENGTHS`.
        batches_per_update: Batches that an update accumulates, see `batches.training_batches`.

    Returns:
        Batches (x, y), or (x, y, weights) if `sample_weight` is given; without `y` batches (x,),
        or (x, None, weights). Floats become `keras.config.floatx()`, integers and booleans int32;
        weights have dtype `floatx`.

    Raises:
        DataError: An array has texts, objects or integers outside int32; its name is its key, or x,
            y or x[0]. Or the arrays have different lengths, or fewer examples than an epoch needs.
    """
    x, y, sample_weight = map(_as_arrays, (x, y, sample_weight))
    return batches.training_batches(
        _count(x, y, sample_weight),
        batch_size,
        seed,
        _gather(x, y, sample_weight, change, lengths),
        batches_per_epoch=batches_per_epoch,
        first_batch=first_batch,
        lengths=lengths,
        batches_per_update=batches_per_update,
    )


def evaluation_data(
    x: Arrays,
    y: Arrays | None = None,
    sample_weight: Arrays | None = None,
    *,
    batch_size: int,
    lengths: np.ndarray | None = None,
) -> tf.data.Dataset:
    """Makes batches of every example once, in order or, with lengths, the shortest first.

    Args:
        x: As for `training_data`.
        y: As for `training_data`.
        sample_weight: As for `training_data`.
        batch_size: Examples of a global batch; the last one is padded with examples of weight zero.
        lengths: As for `training_data`.

    Returns:
        Batches (x, y, weights) as from `training_data`; without `sample_weight` they are ones, and
        without `y` it is None.

    Raises:
        DataError: As `training_data`.
    """
    x, y, sample_weight = map(_as_arrays, (x, y, sample_weight))
    count = _count(x, y, sample_weight)
    make_batch = _gather(x, y, sample_weight, lengths=lengths)
    return batches.evaluation_batches(count, batch_size, make_batch, lengths=lengths)


def draw(count: int, most: int | None, seed: int) -> np.ndarray:
    """Returns the sorted indices of at most `most` random examples.

    Drawn at random since a file may be sorted by its labels. A larger `most` keeps the examples
    that a smaller one draws.

    Args:
        count: Number of examples.
        most: Number of examples wanted; None for all.
        seed: The run's seed.
    """
    return np.sort(np.random.default_rng(seed).permutation(count)[:most])


def spaced(count: int, most: int | None) -> np.ndarray:
    """Returns the sorted indices of at most `most` examples spread over all, int64.

    One random example of each of `most` equal parts, since a file may be sorted by its labels, or
    alternate between them. The same for every seed, so that runs of several seeds are compared on
    the same examples.

    Args:
        count: Number of examples.
        most: Number of examples wanted; None for all.
    """
    most = count if most is None else min(count, most)
    starts = np.arange(most + 1) * count // max(1, most)
    return np.random.default_rng(0).integers(starts[:-1], starts[1:])


def draw_examples(
    splits: dict[str, tuple[Examples, np.ndarray]],
    most: int | None,
    seed: int,
    most_validation: int | None = None,
) -> dict[str, tuple[Examples, np.ndarray]]:
    """Returns the splits with fewer examples in training and validation.

    Args:
        splits: Examples and labels by split; the test split stays whole.
        most: Number of training examples, drawn at random (see `draw`); None keeps all.
        seed: The run's seed.
        most_validation: Number of validation examples (see `spaced`); None keeps all.
    """
    kept = {}
    if most is not None:
        kept["train"] = draw(len(splits["train"][1]), most, seed)
    if most_validation is not None:
        kept["valid"] = spaced(len(splits["valid"][1]), most_validation)
    fewer = dict(splits)
    for split, indices in kept.items():
        x, y = splits[split]
        x = x[indices] if isinstance(x, np.ndarray) else [x[i] for i in indices]
        fewer[split] = (x, y[indices])
    return fewer


def _as_arrays(arrays):
    """Returns NumPy arrays for tensors, and for tables and columns of pandas, as Keras does."""

    def converted(part):
        is_other = hasattr(part, "__array__") and not isinstance(part, np.ndarray | np.generic)
        return np.asarray(part) if is_other else part

    return tf.nest.map_structure(converted, arrays)


def _count(*arrays: Arrays | None) -> int:
    for array in tf.nest.flatten(arrays):
        if not isinstance(array, np.ndarray | None):
            kind = type(array).__name__
            article = "an" if kind[0] in "aeiou" else "a"
            raise DataError(
                f"{article} {kind}; expected NumPy arrays, one row per example: np.array() makes "
                "one of a list of numbers; rows of unequal length are padded with zeros "
                "(keras.utils.pad_sequences), which Embedding(..., mask_zero=True) masks"
            )
    lengths = [len(array) for array in tf.nest.flatten(arrays) if array is not None]
    if len(set(lengths)) > 1:
        raise DataError(f"arrays of different lengths: {lengths}; expected one example per row")
    return lengths[0]


def _gather(
    x: Arrays,
    y: Arrays | None,
    sample_weight: Arrays | None,
    change: Callable | None = None,
    lengths: np.ndarray | None = None,
) -> Callable:
    if lengths is not None:
        _require_times(x, lengths)
    floatx = keras.config.floatx()
    inputs, answers = _tables(x, "x"), None if y is None else _tables(y, "y")
    weights = None
    if sample_weight is not None:
        weights = tf.nest.map_structure(lambda w: np.asarray(w, floatx), _no_list(sample_weight))
        weights = _tables(weights, "sample_weight")

    def make_batch(indices: tf.Tensor, epoch: tf.Tensor, longest: tf.Tensor | None = None) -> tuple:
        def rows(table: tf.Tensor) -> tf.Tensor:
            gathered = tf.gather(table, indices)
            return tf.cast(gathered, floatx if table.dtype.is_floating else tf.int32)

        batch = tf.nest.map_structure(rows, inputs)
        if change is not None:
            batch = change(batch, indices, epoch)
        if longest is not None:
            batch = tf.nest.map_structure(lambda rows: cut(rows, longest), batch)
        labels = None if answers is None else tf.nest.map_structure(rows, answers)
        if weights is None:
            return (batch,) if labels is None else (batch, labels)
        return batch, labels, tf.nest.map_structure(rows, weights)

    return make_batch


def cut(rows: tf.Tensor, longest: tf.Tensor) -> tf.Tensor:
    """Cuts padded rows at the first of `LENGTHS` that none of them exceeds.

    Args:
        rows: a tensor of shape (batch, time, ...).
        longest: length of the longest row, an int32 scalar.

    Returns:
        A tensor of shape (batch, at most time, ...).
    """
    steps = steps_of(rows.shape[1])
    return rows[:, : tf.gather(steps, tf.searchsorted(steps, [longest])[0])]


def steps_of(most: int) -> list[int]:
    """Returns the time steps that rows of at most `most` are cut to, in ascending order."""
    return [length for length in LENGTHS if length < most] + [most]


def _require_times(x: Arrays, lengths: np.ndarray) -> None:
    shapes = [array.shape for array in tf.nest.flatten(x)]
    longest = int(lengths.max(initial=0))
    if any(len(shape) < 2 or shape[1] < longest for shape in shapes):
        raise DataError(
            f"arrays of shape {', '.join(map(str, shapes))} with lengths of up to {longest}; "
            "expected (examples, time, ...) with at least so many time steps"
        )


def _no_list(arrays: Arrays) -> Arrays:
    """Returns a tuple instead of a list, which tf.data would stack into one tensor."""
    return tuple(arrays) if isinstance(arrays, list) else arrays


def _tables(arrays: Arrays, name: str):
    if isinstance(arrays, dict):
        return {key: _tables(part, str(key)) for key, part in arrays.items()}
    if isinstance(arrays, list | tuple):
        return tuple(_tables(part, f"{name}[{index}]") for index, part in enumerate(arrays))
    return _table(arrays, name)


def as_tensor(array: np.ndarray) -> tf.Tensor:
    """Makes a tensor for `tf.gather` inside `tf.data`, without a copy if a file is mapped.

    (TensorFlow's `ImmutableConst` maps a file too, but makes a copy and keeps its memory.)

    Args:
        array: Numbers; for an array of `sequences.mapped()`, or its first rows, the tensor is the
            mapped file.

    Returns:
        A tensor of its shape and type.
    """
    is_aligned = array.flags.c_contiguous and array.ctypes.data % 64 == 0
    # DLPack passes on neither what is read-only nor numbers of another byte order.
    can_share = array.flags.writeable and array.dtype.kind in "iuf" and array.dtype.isnative
    if isinstance(array, np.memmap) and is_aligned and can_share:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.constant(array)


def _table(array: np.ndarray, name: str) -> tf.Tensor:
    # Keeps the dtype and casts batch by batch: bytes stay bytes in memory.
    if array.dtype.kind in "SUT" or (array.size and isinstance(array.flat[0], str)):
        raise DataError(
            f"`{name}` has texts: number them first, for instance with "
            "keras.layers.StringLookup outside of the model"
        )
    if array.dtype.kind not in "fiub":
        raise DataError(f"`{name}` has dtype {array.dtype}; expected numbers or booleans")
    if array.dtype.kind in "iu" and array.size and not np.can_cast(array.dtype, np.int32):
        limits = np.iinfo(np.int32)
        if array.min() < limits.min or array.max() > limits.max:
            raise DataError(f"`{name}` has integers that int32 does not hold")
    return as_tensor(array)
