"""Cuts a text into sequences of equal length once, and maps them: a corpus may exceed the memory.

A file contains rows of equal length without a header, little-endian: 2 bytes per id if the
vocabulary allows it, otherwise 4. All processes of a machine share one mapped copy, which the
operating system may drop and read again.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from data import files, word_pieces
from data.errors import DataError
from data.live_line import live_line
from data.text import Text
from data.word_pieces import SpecialTokens

FEW_FULL = 0.01  # share of the texts that may fill their sequences without a note


def packed(
    blocks: Iterable[tuple[np.ndarray, np.ndarray]], length: int, special: SpecialTokens
) -> Iterator[np.ndarray]:
    """Joins lines by [SEP] and cuts them into full sequences, [CLS] first.

    Args:
        blocks: Ids and lengths of blocks of lines, see `word_pieces.tokenize`.
        length: Tokens of a sequence, including [CLS].
        special: The ids of the special tokens.

    Yields:
        int32 of shape (sequences, length), per block; the incomplete last sequence is dropped.
    """
    rest = np.zeros(0, np.int32)
    for ids, lengths in blocks:
        ends = np.cumsum(lengths)[lengths > 0]
        stream = np.concatenate([rest, np.insert(ids, ends, special.sep)])
        body = length - 1
        count = len(stream) // body
        sequences = np.full((count, length), special.cls, np.int32)
        sequences[:, 1:] = stream[: count * body].reshape(count, body)
        rest = stream[count * body :]
        yield sequences


def lines(
    blocks: Iterable[tuple[np.ndarray, np.ndarray]], length: int, special: SpecialTokens
) -> Iterator[np.ndarray]:
    """Yields one sequence per line: [CLS], the truncated line, [SEP], padding; skips empty lines.

    Args and Yields as `packed`.
    """
    for ids, lengths in blocks:
        rows = np.split(ids, np.cumsum(lengths)[:-1])
        rows = [row[: length - 2] for row in rows if len(row)]
        sequences = np.full((len(rows), length), special.pad, np.int32)
        sequences[:, 0] = special.cls
        for sequence, row in zip(sequences, rows, strict=True):
            sequence[1 : len(row) + 1] = row
            sequence[len(row) + 1] = special.sep
        yield sequences


CUT = {"packed": packed, "lines": lines}


def sequences_once(
    text: Text,
    tokenizer,
    cache_dir: Path,
    *,
    text_mode: str,
    length: int,
    min_line_bytes: int = 0,
) -> dict[str, np.ndarray]:
    """Tokenises a text and cuts it into sequences, or takes them from the cache.

    Args:
        text: A `data.text.Text`.
        tokenizer: Of KerasNLP, of a family with a `MaskedLM`.
        cache_dir: The cache; sequences are stored in its folder `sequences`.
        text_mode: "packed" or "lines".
        length: Tokens of a sequence.
        min_line_bytes: Lines of fewer bytes are skipped.

    Returns:
        Token ids of shape (sequences, length) by split, uint16 or int32, mapped from files.

    Raises:
        DataError: A split has no sequence.
    """
    made_from = (text.sha256, text_mode, length, min_line_bytes, word_pieces.rules_of(tokenizer))
    target = place(cache_dir, made_from)
    dtype = dtype_of(tokenizer.vocabulary_size())

    def build(folder: Path) -> None:
        folder.mkdir()
        for split, source in text.splits.items():
            source = live_line(source, f"tokenising {split}")
            if min_line_bytes:
                source = (line for line in source if len(line.encode()) >= min_line_bytes)
            tokens = word_pieces.tokenize(source, tokenizer)
            blocks = CUT[text_mode](tokens, length, SpecialTokens.of(tokenizer))
            write(folder / f"{split}.bin", blocks, dtype)

    files.build_once(target, build, "sequences")
    sequences = {split: mapped(target / f"{split}.bin", dtype, length) for split in text.splits}
    for split, rows in sequences.items():
        if not len(rows):
            raise DataError(
                f"{text.name}: the {split} split gives no sequence of {length} tokens; use more "
                "text" + (" or a shorter --sequence-length" if text_mode == "packed" else "")
            )
    return sequences


def place(cache_dir: Path, made_from: tuple) -> Path:
    """Returns the folder in the cache for what is made from these values.

    Args:
        cache_dir: The cache; sequences are stored in its folder `sequences`.
        made_from: Everything that the content depends on, of types whose `repr` is the same in
            every process.
    """
    key = hashlib.sha256(repr(made_from).encode(errors="surrogatepass")).hexdigest()[:24]
    return Path(cache_dir) / "sequences" / key


def sha256_of(texts: Sequence, depth: int = 1) -> str:
    """Returns a checksum of texts, or of anything that is JSON, in their order (hex).

    It is that of their JSON list, which is never whole in memory.

    Args:
        texts: The texts.
        depth: 2 for lists of lists of many texts.
    """
    digest = hashlib.sha256()
    for part in _json_parts(texts, depth):
        digest.update(part.encode())
    return digest.hexdigest()


def _json_parts(value, depth: int) -> Iterator[str]:
    if not depth:
        yield json.dumps(value)
        return
    for number, each in enumerate(value):
        yield ", " if number else "["
        yield from _json_parts(each, depth - 1)
    yield "]" if len(value) else "[]"


def arrays_once(
    cache_dir: Path, made_from: tuple, make: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Makes arrays by name, or takes them from the cache.

    Args:
        cache_dir: As of `place`.
        made_from: As of `place`.
        make: Makes the arrays, none of which is empty.

    Returns:
        The arrays, mapped from files and copy-on-write, like those of `mapped`.
    """

    def build(folder: Path) -> None:
        folder.mkdir()
        for name, array in make().items():
            with open(folder / f"{name}.npy", "wb") as file:
                _write_header(file, array.shape, array.dtype)
                file.write(np.ascontiguousarray(array).data)

    return _built_arrays(place(cache_dir, made_from), build)


def blocks_once(
    cache_dir: Path,
    made_from: tuple,
    make_blocks: Callable[[], Iterable[dict[str, np.ndarray]]],
    count: int,
) -> dict[str, np.ndarray]:
    """Makes arrays of many rows as `arrays_once` does, with one block of rows in memory.

    Args:
        cache_dir: As of `place`.
        made_from: As of `place`.
        make_blocks: Makes the blocks in their order: some rows of each array.
        count: Rows of all blocks together, at least one.
    """

    def build(folder: Path) -> None:
        folder.mkdir()
        opened: dict[str, IO[bytes]] = {}
        with contextlib.ExitStack() as stack:
            for block in make_blocks():
                for name, rows in block.items():
                    if name not in opened:
                        opened[name] = stack.enter_context(open(folder / f"{name}.npy", "wb"))
                        _write_header(opened[name], (count, *rows.shape[1:]), rows.dtype)
                    opened[name].write(np.ascontiguousarray(rows).data)

    return _built_arrays(place(cache_dir, made_from), build)


def _built_arrays(target: Path, build: Callable[[Path], None]) -> dict[str, np.ndarray]:
    files.build_once(target, build, "sequences")
    return {path.stem: np.load(path, mmap_mode="c") for path in sorted(target.glob("*.npy"))}


def _write_header(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Writes the beginning of a `.npy` file, whose values follow.

    `np.save()` does not say that the disk is full.
    """
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)


def dtype_of(vocabulary_size: int) -> np.dtype:
    """Returns the type of the ids in a file."""
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<i4")


def write(path: Path, blocks: Iterable[np.ndarray], dtype: np.dtype) -> None:
    """Writes blocks of sequences, integers of shape (sequences, length)."""
    with open(path, "wb") as file:
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data)


def mapped(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    """Maps a file of sequences into memory, of shape (sequences, length).

    The array is copy-on-write, since TensorFlow accepts no read-only array: changes do not reach
    the file.
    """
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.zeros((0, length), dtype)
    return np.memmap(path, dtype, "c").reshape(-1, length)


def cut_note(
    sequences: np.ndarray,
    pad: int,
    what: str,
    split: str = "training",
    option: str = "--sequence-length",
) -> str | None:
    """Returns a line about texts that fill their sequences, if these are more than a few.

    Args:
        sequences: Token ids of a split, (sequences, length), each of one text.
        pad: The id of padding.
        what: Name of the texts, for instance "sentences".
        split: Name of the split.
        option: The one that sets the length.
    """
    length = sequences.shape[1]
    full = int((np.asarray(sequences[:, -1]) != pad).sum())
    if full <= FEW_FULL * len(sequences):
        return None
    return (
        f"{full:,} of {len(sequences):,} {split} {what} have {length} tokens or more: what is "
        f"beyond {option} {length} is cut"
    )


def in_blocks(sequences: np.ndarray, rows: int = 16_384) -> Iterator[np.ndarray]:
    """Yields blocks of sequences, so that computations over all of them need little memory."""
    for start in range(0, len(sequences), rows):
        yield np.asarray(sequences[start : start + rows])
