"""Words of lines, each distinct one with a number; and the ids of lines from those of words.

Workers import this module: it needs NumPy and the standard library alone.
"""

import array
import collections
import dataclasses
import itertools
import re
import string
import unicodedata
from collections.abc import Iterable

import numpy as np

UNKNOWN_IN_TEXT = "<unk>"  # what WikiText puts for a rare word

# Keras's tokenizer takes quadratic time for what stands between white space; longer chunks are cut.
MAX_CHUNK_LETTERS = 1000
# The ideographs that BERT takes for words of their own (`_is_chinese_char` in its tokenization.py).
IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


@dataclasses.dataclass(frozen=True)
class NumberedWords:
    """The words of some lines.

    Attributes:
        distinct: each word once, in the order of first appearance; none holds white space.
        numbers: int32 of shape (words,), which of them the words are, line after line.
        in_line: int32 of shape (lines,), how many words each line has.
    """

    distinct: list[str]
    numbers: np.ndarray
    in_line: np.ndarray


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The word pieces of distinct words.

    Attributes:
        ids: int32 of shape (pieces,), word after word.
        sizes: int32 of shape (words,), how many pieces each word has.
    """

    ids: np.ndarray
    sizes: np.ndarray


def words_of(line: str, split_on_cjk: bool) -> list[str]:
    """What stands between white space, cut where it is long.

    Args:
        line: the text.
        split_on_cjk: whether the tokenizer takes ideographs for words of their own.
    """
    words = line.split()
    if len(line) > MAX_CHUNK_LETTERS:
        words = [part for word in words for part in _cut(word, split_on_cjk)]
    return words


def numbered(lines: Iterable[str], split_on_cjk: bool) -> NumberedWords:
    """Numbers the words of lines; Args as `words_of`."""
    number: dict[str, int] = collections.defaultdict(itertools.count().__next__)
    parts: list[np.ndarray] = []
    in_line = array.array("i")
    for line in lines:
        words = words_of(line, split_on_cjk)
        parts.append(np.fromiter(map(number.__getitem__, words), np.int32, len(words)))
        in_line.append(len(words))
    numbers = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return NumberedWords(list(number), numbers, np.frombuffer(in_line, np.int32))


def ids_of(
    numbers: np.ndarray, in_line: np.ndarray, pieces: Pieces, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Puts the pieces of words in the place of their numbers.

    Args:
        numbers: of shape (words,), see `NumberedWords`.
        in_line: of shape (lines,), see `NumberedWords`.
        pieces: those of each distinct word.
        starts: int64 of shape (distinct words,), where each one's pieces begin.

    Returns:
        ids, int32 of shape (tokens,), and offsets, int64 of shape (lines + 1,), where each line
        begins.
    """
    sizes = pieces.sizes[numbers]
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    # Of each token: where its word's pieces begin, and how far it is from there.
    ids = pieces.ids[np.arange(total) + np.repeat(starts[numbers] - ends + sizes, sizes)]
    words_before = np.concatenate([[0], np.cumsum(in_line, dtype=np.int64)])
    offsets = np.concatenate([[0], ends])[words_before]
    return ids.astype(np.int32, copy=False), offsets.astype(np.int64, copy=False)


def _cut(chunk: str, split_on_cjk: bool) -> list[str]:
    """Cuts a long chunk where the tokenizer would: the same pieces come out.

    Args:
        chunk: text without white space.
        split_on_cjk: whether the tokenizer takes ideographs for words of their own.
    """
    if len(chunk) <= MAX_CHUNK_LETTERS:
        return [chunk]
    apart = "".join(
        re.escape(letter)
        for letter in sorted(set(chunk))
        if letter in string.punctuation
        or unicodedata.category(letter).startswith("P")
        or unicodedata.category(letter) in ("Cc", "Cf")  # white space to the tokenizer
        or (split_on_cjk and any(low <= ord(letter) <= high for low, high in IDEOGRAPHS))
    )
    parts = re.split(f"([{apart}])", chunk) if apart else [chunk]
    return [UNKNOWN_IN_TEXT if len(part) > MAX_CHUNK_LETTERS else part for part in parts if part]
