"""Tokens of a text that is larger than memory, on all cores, resumed where they were stopped.

Three phases. Processes number the words of blocks of lines, each block by itself, and leave them
as parts on the disk. Then all distinct words get a number, and Keras's tokenizer makes the pieces
of each once, here. At last the parts are read one after the other and become ids, which are
appended to the files. Parts that are there are not made again, whoever was killed when.
"""

import collections
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import tqdm

from data import word_parts, workers
from data.errors import DataError
from data.lines import sizes_of
from data.words import Pieces, ids_of

LARGE_BYTES = 20_000_000  # a split of more than this is tokenised in parts
BLOCK_BYTES = 4_000_000  # of text, a part
WORDS_AT_ONCE = 50_000  # of which Keras makes the pieces, and which are saved together

Found = TypeVar("Found")


def is_large(lines: Sequence[str]) -> bool:
    """Whether lines have more than `LARGE_BYTES`."""
    return int(sizes_of(lines).sum(dtype=np.int64)) > LARGE_BYTES


def tokenize_to_files(
    lines: Sequence[str],
    split_on_cjk: bool,
    pieces_of: Callable[[list[str]], Pieces],
    parts: Path,
    ids_file: Path,
    offsets_file: Path,
    what: str,
) -> None:
    """Writes what `word_pieces.tokenize` returns to two files, without holding it.

    Memory holds the distinct words of the text with their pieces, some 200 bytes each, and of all
    else a block at a time. A process holds a block and its words. (Where a script writes no white
    space, whole clauses are such words.)

    Args:
        lines: the text.
        split_on_cjk: whether the tokenizer takes ideographs for words of their own.
        pieces_of: Keras's tokenizer: the pieces of distinct words.
        parts: the folder in which parts are kept until the caller removes it. It must belong to
            this text and this tokenizer.
        ids_file: where the ids go, a `.npy`.
        offsets_file: where the offsets go, a `.npy`.
        what: what the progress bar says.

    Raises:
        DataError: A file of the text has changed, or a part was damaged meanwhile.
        RuntimeError: A process that makes parts ended.
    """
    blocks = _blocks(lines)
    _begin(parts)
    _make_parts(lines, blocks, split_on_cjk, parts, what)
    pieces = _make_pieces(_number(parts, len(blocks)), pieces_of, parts, what)
    starts = np.cumsum(pieces.sizes, dtype=np.int64) - pieces.sizes
    with _Npy(ids_file, np.int32) as ids, _Npy(offsets_file, np.int64) as offsets:
        offsets.append(np.zeros(1, np.int64))
        with _bar(len(lines), what, "lines") as bar:
            for number in range(len(blocks)):
                words = _there(word_parts.load_part, _path(parts, number))
                place = _there(word_parts.load, parts / f"words-{number:06d}.npz")["place"]
                some, ends = ids_of(place[words.numbers], words.in_line, pieces, starts)
                offsets.append(ids.rows + ends[1:])
                ids.append(some)
                bar.update(len(words.in_line))


def _blocks(lines: Sequence[str]) -> list[tuple[int, int]]:
    """The first line of each block and the first one after it: a function of the text alone."""
    ends = np.cumsum(sizes_of(lines), dtype=np.int64)
    marks = np.arange(BLOCK_BYTES, ends[-1] if len(ends) else 0, BLOCK_BYTES)
    firsts = np.unique([0, *np.searchsorted(ends, marks)]).tolist()
    return list(zip(firsts, [*firsts[1:], len(lines)], strict=True))


def _begin(parts: Path) -> None:
    """Makes the folder of the parts, anew where it holds parts of another size."""
    made_from = json.dumps({"block_bytes": BLOCK_BYTES, "words_at_once": WORDS_AT_ONCE})
    note = parts / "made-from.json"
    try:
        if note.read_text() == made_from:
            return
    except FileNotFoundError:
        pass
    if parts.exists():
        shutil.rmtree(parts)
    parts.mkdir(parents=True)
    note.write_text(made_from)


def _path(parts: Path, number: int) -> Path:
    return parts / f"{number:06d}.npz"


def _make_parts(
    lines: Sequence[str],
    blocks: list[tuple[int, int]],
    split_on_cjk: bool,
    parts: Path,
    what: str,
) -> None:
    """Makes the parts that are missing or damaged."""
    with _bar(len(lines), f"{what}: words", "lines") as bar:
        missing = []
        for number, (first, last) in enumerate(blocks):
            if word_parts.load(_path(parts, number)) is None:
                missing.append(number)
            else:
                bar.update(last - first)
        jobs = ((lines[slice(*blocks[n])], split_on_cjk, _path(parts, n)) for n in missing)
        workers.run_jobs("data.word_parts", jobs, bar.update, at_most=len(missing))


def _number(parts: Path, count: int) -> list[str]:
    """The distinct words of all parts; which of them those of a part are is kept beside it."""
    known: dict[str, int] = collections.defaultdict(itertools.count().__next__)
    for number in range(count):
        words = _there(word_parts.load_part, _path(parts, number)).distinct
        place = np.fromiter(map(known.__getitem__, words), np.int32, len(words))
        word_parts.save(parts / f"words-{number:06d}.npz", {"place": place})
    return list(known)


def _there(load: Callable[[Path], Found | None], path: Path) -> Found:
    found = load(path)
    if found is None:
        raise DataError(f"{path}: damaged; the same command makes it again")
    return found


def _make_pieces(
    distinct: list[str], pieces_of: Callable[[list[str]], Pieces], parts: Path, what: str
) -> Pieces:
    """The pieces of all distinct words; those of some thousand words at a time are kept."""
    ids, sizes = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    with _bar(len(distinct), f"{what}: pieces", "words") as bar:
        for start in range(0, len(distinct), WORDS_AT_ONCE):
            words = distinct[start : start + WORDS_AT_ONCE]
            path = parts / f"pieces-{start // WORDS_AT_ONCE:06d}.npz"
            found = word_parts.load(path)
            if found is None:
                made = pieces_of(words)
                found = {"ids": made.ids, "sizes": made.sizes}
                word_parts.save(path, found)
            ids.append(found["ids"])
            sizes.append(found["sizes"])
            bar.update(len(words))
    return Pieces(np.concatenate(ids), np.concatenate(sizes))


def _bar(total: int, what: str, unit: str) -> tqdm.tqdm:
    # Without a terminal there is no bar.
    return tqdm.tqdm(total=total, desc=what, unit=f" {unit}", disable=None)


class _Npy:
    """A `.npy` file of one dimension that grows; closed, it is what `np.save` would have written.

    Args:
        path: the file.
        dtype: that of the array.

    Attributes:
        rows: how many were appended.
    """

    def __init__(self, path: Path, dtype: type):
        self.dtype = np.dtype(dtype)
        self.rows = 0
        self._file: BinaryIO = open(path, "wb")
        self._header()

    def append(self, array: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(array, self.dtype).data)
        self.rows += len(array)

    def __enter__(self) -> "_Npy":
        return self

    def __exit__(self, *error: object) -> None:
        with self._file:
            self._file.seek(0)
            self._header()

    def _header(self) -> None:
        # NumPy leaves room in a header for any number of rows.
        header = np.lib.format.header_data_from_array_1_0(np.zeros(0, self.dtype))
        np.lib.format.write_array_header_1_0(self._file, header | {"shape": (self.rows,)})
