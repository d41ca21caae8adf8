"""Rejects data that a run cannot resume or evaluate exactly; computes their fingerprints."""

import hashlib
import math
import re
import zlib
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from data.errors import first_line
from distribution.keras_compat import randomness
from training.errors import OptionsError, RunError
from training.options import SharedOptions, flag

# Batches that identify where the training data begin.
FINGERPRINT_BATCHES = 3
# Of a tensor's values those that identify it; millionths by which two processors may round it.
TRAIT_VALUES, ROUNDING = 2**16, 100


def require_splits(options: SharedOptions, validation, test) -> None:
    """Rejects options that evaluate on a split that the recipe does not have.

    Args:
        options: the options.
        validation: the validation data of `run.prepare()`, or None.
        test: its test data, or None.

    Raises:
        OptionsError: names the options, one line for each split.
        RunError: the data of a split have no end, or can be read only once.
    """
    for split, data in {"validation": validation, "test": test}.items():
        if isinstance(data, Iterator):
            raise RunError(
                f"run.prepare({split}=...) got a {type(data).__name__}, which can be read only "
                "once, and each evaluation reads the split again: pass "
                "data.arrays.evaluation_data(), or another tf.data.Dataset"
            )
        # Keras takes arrays and a `PyDataset`, too.
        is_endless = (
            isinstance(data, tf.data.Dataset) and data.cardinality() == tf.data.INFINITE_CARDINALITY
        )
        if is_endless:
            raise RunError(
                f"run.prepare({split}=...): the data have no end, and an evaluation would have "
                "none; leave out repeat(), or pass data.arrays.evaluation_data()"
            )
    users = {
        "validation": (
            "keep_best",
            "max_validation_examples",
            "reduce_on_plateau",
            "validate_every",
        ),
        "test": ("test_every",),
    }
    problems = []
    for split, data in {"validation": validation, "test": test}.items():
        flags = [flag(name) for name in users[split] if getattr(options, name) is not None]
        if data is None and flags:
            problems.append(
                f"{', '.join(flags)}: this recipe has no {split} data "
                f"(run.prepare({split}=None)); leave it out"
            )
    if problems:
        raise OptionsError("\n".join(problems))


def require_forms(train_data: tf.data.Dataset, splits: dict, needs_labels: bool = True) -> None:
    """Rejects a split that has no labels or no batches, which `fit()` would find after an epoch.

    Args:
        train_data: the training data.
        splits: data of `run.prepare()` by its argument; may contain None. What Keras alone knows
            the form of, such as a `PyDataset`, is left to it.
        needs_labels: whether the loss or the metrics of `compile()` compare outputs with labels.

    Raises:
        RunError: names the split and the remedy.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(train_data.element_spec)
    for split, data in splits.items():
        form = data.element_spec if isinstance(data, tf.data.Dataset) else data
        if not isinstance(form, tuple | list | dict | np.ndarray | tf.Tensor | tf.TensorSpec):
            continue
        if isinstance(form, dict) and form.keys() <= {"x", "y", "sample_weight"}:
            raise RunError(
                f"run.prepare({split}=...) is a dict of {', '.join(form)}: pass a tuple (x, y)"
            )
        ours, labels, _ = keras.utils.unpack_x_y_sample_weight(form)
        if needs_labels and isinstance(labels, tf.NoneTensorSpec | None):
            raise RunError(
                f"run.prepare({split}=...) has no labels, which train_data has: pass (x, y), or "
                "data.arrays.evaluation_data(x, y, ...)"
            )
        shapes = [[getattr(leaf, "shape", None) for leaf in tf.nest.flatten(e)] for e in (ours, x)]
        for mine, theirs in zip(*shapes, strict=False):
            ranks = [tf.TensorShape(shape).rank for shape in (mine, theirs)]
            # Keras itself adds an axis of 1 to inputs of shape (batch,).
            if None not in ranks and ranks[0] == ranks[1] - 1 and theirs[-1] != 1:
                raise RunError(
                    f"run.prepare({split}=...) has inputs of shape {tuple(mine)}, train_data of "
                    f"{tuple(theirs)}: batch() it, or pass data.arrays.evaluation_data(x, y, ...)"
                )


def require_batch_size(train_data: tf.data.Dataset, batch_size: int) -> None:
    """Rejects batches that are not the plan's, such as single examples.

    Args:
        train_data: the training data.
        batch_size: examples of a global batch, as planned.

    Raises:
        RunError: has both sizes.
    """
    for batch in train_data.take(1):
        first = keras.tree.flatten(batch)[0]
        if first.shape.rank == 0 or len(first) != batch_size:
            raise RunError(
                f"train_data begins with a tensor of shape {tuple(first.shape)}, and the plan has "
                f"batches of {batch_size} examples: batch() them by plan.batches['batch_size'], "
                "with drop_remainder=True"
            )


def require_fewer(options: SharedOptions, validation) -> None:
    """Rejects validation data with more examples than `--max-validation-examples`.

    Args:
        options: the options.
        validation: batches of the validation split; of None `require_splits` has said so.

    Raises:
        OptionsError: the recipe ignores the option.
    """
    most = options.max_validation_examples
    if most is None:
        return
    examples = 0  # of the batches before: the last one may be padded
    if isinstance(validation, tf.data.Dataset):
        for batch in validation:
            if examples >= most:
                break
            examples += len(keras.tree.flatten(batch)[0])
        else:
            return
    raise OptionsError(
        f"--max-validation-examples {most}: this recipe ignores it (its validation split has more "
        "examples); a recipe applies it with data.arrays.draw_examples(splits, "
        "options.max_examples, options.seed, options.max_validation_examples)"
    )


def fits_on_a_gpu(data: tf.data.Dataset) -> bool:
    """Tells whether a GPU can hold what a dataset has: tensors, and not of strings."""
    specs = tf.nest.flatten(data.element_spec)
    return all(isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string for spec in specs)


def first_batches_sha256(train_data: tf.data.Dataset) -> list[str]:
    """Returns the checksums of the first batches; rejects data that begin differently each time.

    Raises:
        RunError: the data are empty, have a negative weight, begin with other batches, or draw
            numbers that would be others after a resume.
    """
    operation = randomness.random_operation(train_data)
    if operation:
        raise RunError(
            f"train_data draws random numbers or changes variables as it is read ({operation} in "
            "the function of a map() or the like), which start again where a run resumes: it would "
            "train on other examples; draw them from data.batches.uniform(), by epoch and example"
        )
    # Batches of `data.batches` are a function of the step; any other pipeline is read twice.
    first = _first_batches(train_data)
    if not first:
        raise RunError("train_data has no batch for the next step: repeat() it")
    if not is_function_of_step(train_data) and first != _first_batches(train_data):
        raise RunError(
            "train_data begins with another batch each time it is iterated: a resumed run would "
            "train on other batches; use data.arrays.training_data(..., **plan.batches), or build "
            "on data.batches.training_batches(), whose batches are functions of (seed, step)"
        )
    return first


def _first_batches(train_data: tf.data.Dataset) -> list[str]:
    checksums = []
    for batch in _taken(train_data):
        digest = hashlib.sha256()
        for tensor in tf.nest.flatten(batch, expand_composites=True):
            if tensor is not None:  # labels of a model without any
                digest.update(tf.io.serialize_tensor(tensor).numpy())
        checksums.append(digest.hexdigest())
        _, _, weights = keras.utils.unpack_x_y_sample_weight(batch)
        leaves = [leaf for leaf in tf.nest.flatten(weights) if leaf is not None]
        if any(bool(tf.reduce_any(tf.cast(leaf, tf.float32) < 0)) for leaf in leaves):
            raise RunError(
                "train_data has a negative sample weight: the loss is a mean, divided by the sum "
                "of the weights; put the sign into the labels or into compute_loss()"
            )
    return checksums


def _taken(train_data: tf.data.Dataset) -> Iterator:
    try:
        yield from train_data.take(FINGERPRINT_BATCHES)
    except tf.errors.AlreadyExistsError as error:  # of a cache(FILE)
        lock = re.search(r"'([^']+\.lockfile)'", str(error))
        raise RunError(
            f"train_data has a cache that is locked, {lock[1] if lock else first_line(error)}: a "
            "run that was killed leaves such a file behind; remove it if no other process uses it, "
            "and leave out cache(FILE)"
        ) from error


def traits(data, count: int) -> tuple[list[str], list[int]] | None:
    """Returns what the first batches of a split have on each worker, whatever its processor.

    Processors round differently, so a checksum of numbers might differ.

    Args:
        data: global batches.
        count: of the batches that are read.

    Returns:
        Dtype and shape of each tensor, and two numbers of each, millionths, that other values or
        another order of them change by more than `ROUNDING`; None where each worker may have its
        own data, or the batches cannot be read now.
    """
    own = tf.data.experimental.AutoShardPolicy.OFF
    if not isinstance(data, tf.data.Dataset) or (
        data.options().experimental_distribute.auto_shard_policy == own
    ):
        return None
    forms, numbers = [], []
    try:
        for batch in data.take(count):
            for tensor in tf.nest.flatten(batch, expand_composites=True):
                if tensor is not None:
                    forms.append(f"{tensor.dtype.name} {tuple(tensor.shape)}")
                    numbers += _traits_of(tensor.numpy())
    except tf.errors.AlreadyExistsError:  # a cache(FILE) that another worker writes
        return None
    return forms, numbers


def _traits_of(values: np.ndarray) -> list[int]:
    """Returns the size of a tensor's values, and a weighted mean that knows their order."""
    flat = values.reshape(-1)
    flat = flat[:: max(1, len(flat) // TRAIT_VALUES)]
    if values.dtype.kind in "OSU":
        return [zlib.crc32(repr(flat.tolist()).encode()), 0]
    flat = np.nan_to_num(flat.astype(np.float64), posinf=0.0, neginf=0.0)
    weights = np.cos(np.arange(len(flat)))
    size = np.abs(flat) @ np.abs(weights) + 1e-30
    return [round(1e6 * math.log(size)), round(1e6 * float(flat @ weights / size))]


def is_function_of_step(train_data: tf.data.Dataset) -> bool:
    """Returns whether the batches come from `data.batches`, in another order in each epoch."""
    return hasattr(train_data, "part_of_worker")
