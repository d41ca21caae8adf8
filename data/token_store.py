"""Sequences of token ids in a file that is mapped into memory: corpora larger than memory train.

A file holds rows of equal length, one after the other and nothing else: 2 bytes an id while the
vocabulary allows it, otherwise 4, little-endian. `store.json` beside it says shape and type. It
lies in the cache, so its checksum is verified before it is used. All processes of a machine that
map it share one copy, which the operating system may drop and read again.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from data import cache
from data.errors import DataError


def store_once(
    target: Path,
    splits: Mapping[str, Callable[[], Iterable[np.ndarray]]],
    length: int,
    vocabulary_size: int,
) -> dict[str, np.ndarray]:
    """Writes the sequences of all splits, or takes what is there.

    Args:
        target: the folder, in the cache.
        splits: by name, a function that gives blocks of sequences, integers of shape
            (sequences, length); one block at a time is in memory.
        length: tokens of a sequence.
        vocabulary_size: ids are below it.

    Returns:
        Mapped, read-only arrays of shape (sequences, length) by split, uint16 or int32.
    """
    dtype = np.dtype("<u2" if vocabulary_size <= 2**16 else "<i4")

    def build(folder: Path) -> None:
        folder.mkdir()
        rows = {}
        for split, blocks in splits.items():
            rows[split] = 0
            with open(folder / f"{split}.bin", "wb") as file:
                for block in blocks():
                    file.write(np.ascontiguousarray(block, dtype).data)
                    rows[split] += len(block)
        facts = {"rows": rows, "length": length, "dtype": dtype.str}
        (folder / "store.json").write_text(json.dumps(facts))

    cache.build_once(target, build, "sequences")
    facts = json.loads((target / "store.json").read_text())
    found = facts["length"], facts["dtype"], set(facts["rows"])
    if found != (length, dtype.str, set(splits)):
        raise DataError(f"sequences: {target} holds others than those asked for; remove it")
    return {
        split: _mapped(target / f"{split}.bin", dtype, (rows, length))
        for split, rows in facts["rows"].items()
    }


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, int]) -> np.ndarray:
    if not shape[0]:  # an empty file cannot be mapped
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", shape=shape)


def as_tensor(sequences: np.ndarray) -> tf.Tensor:
    """The sequences for `tf.gather` inside `tf.data`: without a copy where a file is mapped.

    (TensorFlow's own `ImmutableConst` maps a file too, but makes a copy on the way, whose memory
    it keeps.)

    Args:
        sequences: of shape (sequences, length); if `store_once` made it, or it is made of the first
            rows of such an array, the tensor is the mapped file.

    Returns:
        A tensor of that shape and type.
    """
    if not isinstance(sequences, np.memmap) or not _begins_its_file(sequences):
        return tf.constant(sequences)
    # "c", private pages: TensorFlow takes no array that cannot be written. Nobody writes to it.
    mapped = np.memmap(str(sequences.filename), sequences.dtype, "c", shape=sequences.shape)
    return tf.experimental.dlpack.from_dlpack(mapped.__dlpack__())


def _begins_its_file(sequences: np.memmap) -> bool:
    # A slice keeps the offset of the whole array, so addresses are compared.
    mapped = sequences
    while isinstance(mapped.base, np.memmap):
        mapped = mapped.base
    return (
        sequences.ctypes.data == mapped.ctypes.data
        and mapped.offset == 0
        and sequences.flags.c_contiguous
        and sequences.filename is not None
    )


def in_blocks(sequences: np.ndarray, rows: int = 16_384) -> Iterable[np.ndarray]:
    """Some sequences at a time, so that what is computed of them needs little memory."""
    for start in range(0, len(sequences), rows):
        yield np.asarray(sequences[start : start + rows])
