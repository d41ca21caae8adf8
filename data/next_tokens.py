"""Rows of tokens for models that predict each next one: documents packed, or one per row.

A document is a line of text, or a prompt with its response. It becomes [start] tokens [end], with
the special tokens of the model's family: GPT-2 has one token for both ends, others two, some none
at the start. A model predicts every token of a document except the first, so also the end.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from data import arrays, files, sequences, word_pieces
from data.errors import DataError
from data.live_line import live_line
from data.text import Text

LINES_AT_ONCE = 1000
NEVER = r"(?!)"  # a pattern


@dataclasses.dataclass(frozen=True)
class Ends:
    """The tokens around a document; `start` is None, or equal to `end`, in some families."""

    start: int | None
    end: int

    @classmethod
    def of(cls, tokenizer) -> "Ends":
        """Returns those of a KerasNLP tokenizer, as its model's `generate()` uses them."""
        return cls(getattr(tokenizer, "start_token_id", None), tokenizer.end_token_id)

    def around(self, ids: list[int]) -> list[int]:
        """Returns a whole document."""
        return [*([] if self.start is None else [self.start]), *ids, self.end]


def tokenize(lines: Iterable[str], tokenizer) -> Iterator[list[int]]:
    """Yields the token ids of each line, without the white space around it.

    A line that consists of names of special tokens, such as a separator <|endoftext|>, has none:
    rows have such tokens between documents anyway.

    Args:
        lines: Texts; `LINES_AT_ONCE` of them are in memory.
        tokenizer: A KerasNLP tokenizer.
    """
    lines, separator = iter(lines), separators(tokenizer)
    while block := [line.strip() for line in itertools.islice(lines, LINES_AT_ONCE)]:
        encoded = tokenizer(["" if separator.fullmatch(line) else line for line in block])
        for ids in word_pieces.as_lists(encoded):
            yield [int(token) for token in ids]


def names_in_text(tokenizer) -> list[str]:
    """Returns the names of special tokens that a KerasNLP tokenizer reads as these tokens.

    Tokenizers of SentencePiece read them as text.
    """
    return [name for name in tokenizer.special_tokens if len(tokenizer(name)) == 1]


def separators(tokenizer) -> re.Pattern:
    """Returns a pattern of the whole lines that are names of special tokens alone."""
    names = "|".join(map(re.escape, names_in_text(tokenizer)))
    return re.compile(rf"\s*({names})+\s*" if names else NEVER)


def has_ends_within(lines: Iterable[str], tokenizer) -> bool:
    """Tells whether a line contains the name of the token that ends a document.

    What follows it in the line begins another document, whose first token may not be predicted.

    Args:
        lines: Lines of text; those that `tokenize` leaves out do not count.
        tokenizer: A KerasNLP tokenizer.
    """
    end, separator = Ends.of(tokenizer).end, separators(tokenizer)
    names = [name for name in names_in_text(tokenizer) if int(tokenizer(name)[0]) == end]
    return any(
        any(name in line for name in names) and not separator.fullmatch(line) for line in lines
    )


def special_note(texts: Iterable[str], tokenizer) -> str | None:
    """Returns a line about training prompts and responses with names of special tokens, if any.

    Args:
        texts: The prompts and responses of the training split.
        tokenizer: A KerasNLP tokenizer.
    """
    names = names_in_text(tokenizer)
    count = 0
    for text in live_line(texts, "searching for special tokens"):
        count += any(name in text for name in names)
    if not count:
        return None
    return (
        f"{count:,} training prompts and responses contain the name of a special token "
        f"({', '.join(names)}), which is read as the token"
    )


def special_notes(lines: Iterable[str], tokenizer) -> list[str]:
    """Returns notes about training lines with names of special tokens.

    Args:
        lines: The lines of the training split.
        tokenizer: A KerasNLP tokenizer.
    """
    names, separator = names_in_text(tokenizer), separators(tokenizer)
    alone = within = 0
    for line in lines:
        if any(name in line for name in names):
            is_alone = separator.fullmatch(line) is not None
            alone += is_alone
            within += not is_alone
    notes = []
    if alone:
        notes.append(
            f"{alone:,} training lines are left out, as such lines of the other splits: they are "
            f"names of special tokens alone ({', '.join(names)})"
        )
    if within:
        notes.append(
            f"{within:,} training lines contain the name of a special token "
            f"({', '.join(names)}), which is read as the token"
        )
    return notes


def packed(documents: Iterable[list[int]], length: int, ends: Ends) -> Iterator[np.ndarray]:
    """Joins documents and cuts the stream into rows that overlap by one token.

    So each token is predicted once. Where one token both ends and starts a document, it stands
    between two of them once.

    Args:
        documents: Token ids of each; those without any are left out.
        length: Predictions of a row.
        ends: The tokens around a document.

    Yields:
        int32 of shape (rows, length + 1); the last row of all is padded with `end`.
    """
    rest = [ends.end] if ends.start == ends.end else []
    for document in filter(None, documents):
        rest += [*document, ends.end] if ends.start == ends.end else ends.around(document)
        if len(rest) > 100 * length:
            count = (len(rest) - 1) // length
            stream = np.array(rest[: count * length + 1], np.int32)
            yield np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::length]
            rest = rest[count * length :]
    count = -(-(len(rest) - 1) // length)
    stream = np.full(max(count, 0) * length + 1, ends.end, np.int32)
    stream[: len(rest)] = rest
    if count > 0:
        yield np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::length]


def one_per_row(documents: Iterable[list[int]], length: int, ends: Ends) -> Iterator[np.ndarray]:
    """Gives each document rows for itself, padded with `end`; a long one has several.

    Args and Yields as `packed`.
    """
    for document in filter(None, documents):
        yield from packed([document], length, ends)


CUT = {True: packed, False: one_per_row}


def is_predicted(rows, ends: Ends):
    """Marks the predicted tokens: neither padding nor the first token of a document.

    A token that both ends one document and starts the next is predicted.

    Args:
        rows: Integers of shape (rows, length + 1), an array or a tensor.
        ends: The tokens around a document.

    Returns:
        Booleans of shape (rows, length), for the tokens from the second on.
    """
    after_end = rows[:, :-1] == ends.end
    if ends.start == ends.end:
        return ~(after_end & (rows[:, 1:] == ends.end))
    return ~after_end


class Rows:
    """Rows of tokens, with what is predicted in them.

    Args:
        tokens: Token ids of shape (rows, length + 1).
        ends: The tokens around a document.
        together: Whether documents share a row.
        context: "document", or "row" to let a token read the earlier documents of its row.
    """

    def __init__(self, tokens: np.ndarray, ends: Ends, together: bool, context: str = "document"):
        self.tokens, self.ends, self.together, self.context = tokens, ends, together, context

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int | None) -> "Rows":
        """Returns the first `count` rows, or all."""
        return Rows(self.tokens[:count], self.ends, self.together, self.context)

    def spaced(self, count: int | None) -> "Rows":
        """Returns `count` rows spread over all of them, or all."""
        if count is None:
            return self
        kept = self.tokens[arrays.spaced(len(self), count)]
        return Rows(kept, self.ends, self.together, self.context)

    def make_batch(self) -> Callable:
        """Returns a function from indices to (inputs, next tokens, weights of one or zero).

        The inputs are those of a KerasNLP causal model. `padding_mask` holds zero for padding and,
        where documents share a row and are apart, the number of each token's document in the row,
        from 1 on, which `models.decoders` needs for that; any other model reads it as true and
        false. Where the row is the context, all of its tokens are read as one document.
        """
        table, floatx = arrays.as_tensor(self.tokens), keras.config.floatx()
        start, end = self.ends.start, self.ends.end

        def batch_of(indices, epoch):
            tokens = tf.cast(tf.gather(table, indices), tf.int32)
            ids, predicted = tokens[:, :-1], is_predicted(tokens, self.ends)
            document = tf.cast(predicted, tf.int32)
            if self.together and self.context == "row":
                document = tf.ones_like(ids)
            elif self.together:
                begins = ids == start
                if start is None:
                    begins = tf.pad(ids[:, :-1] == end, [[0, 0], [1, 0]])
                document = 1 + tf.cumsum(tf.cast(begins, tf.int32), axis=1)
            inputs = {"token_ids": ids, "padding_mask": document}
            return inputs, tokens[:, 1:], tf.cast(predicted, floatx)

        return batch_of

    def labels(self) -> Iterator[np.ndarray]:
        """Yields the tokens that are predicted, integers of shape (tokens,), some at a time."""
        for block in sequences.in_blocks(self.tokens):
            yield block[:, 1:][is_predicted(block, self.ends)]


def rows_once(
    text: Text,
    tokenizer,
    cache_dir: Path,
    *,
    length: int,
    together: bool,
    context: str = "document",
) -> dict[str, Rows]:
    """Tokenises a text and cuts it into rows, or takes them from the cache.

    Args:
        text: A `data.text.Text`, whose lines are the documents.
        tokenizer: A KerasNLP tokenizer.
        cache_dir: The cache; rows are stored in its folder `sequences`.
        length: Predictions of a row.
        together: Whether documents share a row.
        context: see `Rows`.

    Returns:
        By split, `Rows` of uint16 or int32: files that are mapped into memory.

    Raises:
        DataError: A split has no tokens.
    """
    ends = Ends.of(tokenizer)
    rules = word_pieces.rules_of(tokenizer)
    target = sequences.place(
        cache_dir, (text.sha256, "next tokens 2", length, rules, ends, together)
    )
    dtype = sequences.dtype_of(word_pieces.number_of_ids(tokenizer))

    def build(folder: Path) -> None:
        folder.mkdir()
        for split, lines in text.splits.items():
            documents = tokenize(live_line(lines, f"tokenising {split}"), tokenizer)
            sequences.write(folder / f"{split}.bin", CUT[together](documents, length, ends), dtype)

    files.build_once(target, build, "sequences")
    rows_of = {
        split: Rows(
            sequences.mapped(target / f"{split}.bin", dtype, length + 1), ends, together, context
        )
        for split in text.splits
    }
    for split, rows in rows_of.items():
        if not len(rows):
            raise DataError(f"{text.name}: the {split} split has no tokens; use more text")
    return rows_of


def measure(lines: Iterable[str], tokenizer) -> dict[str, int]:
    """Counts what perplexities are given for: words, and UTF-8 bytes, of lines that have any.

    Each line's end counts as a word and as a byte; the white space around a line does not count,
    nor do lines that `tokenize` leaves out.

    Returns:
        `word` and `byte`.
    """
    counts, separator = {"word": 0, "byte": 0}, separators(tokenizer)
    for line in lines:
        if line.strip() and not separator.fullmatch(line):
            counts["word"] += len(line.split()) + 1
            counts["byte"] += len(line.strip().encode()) + 1
    return counts
