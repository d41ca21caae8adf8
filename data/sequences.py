"""Sequences of equal length, cut from the tokens of lines, once for all runs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data import token_store, word_pieces
from data.masked_lm import SpecialTokens
from data.text import Text

# What is in memory at once: at most so many lines, and no more tokens than these, or one line.
LINES_AT_ONCE = 10_000
TOKENS_AT_ONCE = 2_000_000


def packed(
    ids: np.ndarray, offsets: np.ndarray, length: int, special: SpecialTokens
) -> Iterator[np.ndarray]:
    """Joins lines by [SEP] and cuts them into full sequences, [CLS] first.

    Args:
        ids: int32 of shape (tokens,), all lines concatenated.
        offsets: int64 of shape (lines + 1,), where each line begins.
        length: tokens of a sequence, [CLS] counted.
        special: the ids of the special tokens.

    Yields:
        int32 of shape (sequences, length), those that some lines fill up; the incomplete last
        sequence of all is dropped.
    """
    rest = np.zeros(0, np.int32)
    for part, lengths in _blocks_of_lines(ids, offsets):
        kept = lengths > 0
        ends = np.cumsum(lengths[kept] + 1) - 1
        stream = np.full(int(lengths.sum() + kept.sum()), special.sep, np.int32)
        is_text = np.ones(len(stream), bool)
        is_text[ends] = False
        stream[is_text] = part
        stream = np.concatenate([rest, stream])
        body = length - 1
        count = len(stream) // body
        sequences = np.full((count, length), special.cls, np.int32)
        sequences[:, 1:] = stream[: count * body].reshape(count, body)
        rest = stream[count * body :]
        yield sequences


def lines(
    ids: np.ndarray, offsets: np.ndarray, length: int, special: SpecialTokens
) -> Iterator[np.ndarray]:
    """One line per sequence: [CLS], the line cut to fit, [SEP], padding; empty lines give none.

    Args and Yields as `packed`.
    """
    for part, all_lengths in _blocks_of_lines(ids, offsets):
        kept = all_lengths > 0
        starts = (np.cumsum(all_lengths) - all_lengths)[kept]
        lengths = np.minimum(all_lengths[kept], length - 2)
        place = np.arange(length - 2)
        inside = place[None, :] < lengths[:, None]
        sequences = np.full((len(starts), length), special.pad, np.int32)
        sequences[:, 0] = special.cls
        source = np.minimum(starts[:, None] + place[None, :], max(len(part) - 1, 0))
        sequences[:, 1:-1] = np.where(inside, part[source] if len(part) else 0, special.pad)
        sequences[np.arange(len(starts)), lengths + 1] = special.sep
        yield sequences


CUT = {"packed": packed, "lines": lines}


def cut(
    text_mode: str, ids: np.ndarray, offsets: np.ndarray, length: int, special: SpecialTokens
) -> np.ndarray:
    """All sequences at once, int32 of shape (sequences, length); Args as `packed`."""
    blocks = CUT[text_mode](ids, offsets, length, special)
    return np.concatenate([np.zeros((0, length), np.int32), *blocks])


def sequences_once(
    text: Text, tokenizer, cache_dir: Path, *, text_mode: str, length: int
) -> dict[str, np.ndarray]:
    """Tokenises a text and cuts it into sequences, or takes them from the cache.

    Args:
        text: a `data.text.Text`.
        tokenizer: a `keras_nlp.models.BertTokenizer`.
        cache_dir: where `tokens/` and `sequences/` lie.
        text_mode: "packed" or "lines"; the latter leaves out lines of 100 bytes or fewer.
        length: tokens of a sequence.

    Returns:
        By split, token ids of shape (sequences, length), uint16 or int32: files that are mapped
        into memory (`token_store`).
    """
    drop_short = text_mode == "lines"
    key = word_pieces.tokens_key(text, tokenizer, drop_short)
    special = SpecialTokens.of(tokenizer)

    def blocks_of(split: str):
        def blocks() -> Iterator[np.ndarray]:
            tokens = word_pieces.tokenize_once(text, tokenizer, cache_dir, drop_short)
            return CUT[text_mode](*tokens[split], length, special)

        return blocks

    return token_store.store_once(
        Path(cache_dir) / "sequences" / f"{key}-{length}",
        {split: blocks_of(split) for split in text.splits},
        length,
        len(tokenizer.vocabulary),
    )


def _blocks_of_lines(
    ids: np.ndarray, offsets: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The ids of some lines at a time, and the lengths of these lines."""
    start = 0
    while start < len(offsets) - 1:
        some = np.asarray(offsets[start : start + LINES_AT_ONCE + 1])
        fit = int(np.searchsorted(some, some[0] + TOKENS_AT_ONCE, "right"))
        some = some[: max(2, fit)]
        yield np.asarray(ids[some[0] : some[-1]]), np.diff(some)
        start += len(some) - 1
