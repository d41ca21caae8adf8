"""The pieces of distinct words, by Keras's tokenizer in its two ways: in Python, and in a graph.

Both are meant to give the same. The second is thirty times as quick, and takes the words of letters
for which a test compares them one by one; the others may depend on the Unicode versions of the two.
"""

import functools
import re
from collections.abc import Callable

import numpy as np

from data.words import UNKNOWN_IN_TEXT, Pieces

# ASCII, Latin, Cyrillic, and the quotation marks and dashes of print; no marks that combine.
PLAIN_WORD = re.compile(r"[!-~\u00a1-\u00ac\u00ae-\u02af\u0400-\u0481\u048a-\u052f\u2010-\u2027]+")
MANY_WORDS = 10_000  # fewer are done before the graph is traced


@functools.lru_cache(maxsize=1)  # tracing the graph takes as long as some megabytes of text
def pieces_by(tokenizer) -> Callable[[list[str]], Pieces]:
    """A function that gives the pieces of words.

    Args:
        tokenizer: a `keras_nlp.models.BertTokenizer`.
    """
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def graph(words):
        rows = tokenizer(words)
        return rows.flat_values, rows.row_lengths()

    def in_python(words: list[str]) -> Pieces:
        rows = list(tokenizer(tf.constant(words))) if words else []
        if UNKNOWN_IN_TEXT in words:  # not the pieces "<", "unk" and ">"
            rows[words.index(UNKNOWN_IN_TEXT)] = [tokenizer.token_to_id("[UNK]")]
        sizes = np.fromiter(map(len, rows), np.int32, len(rows))
        return Pieces(np.fromiter((id for row in rows for id in row), np.int32, sizes.sum()), sizes)

    def pieces_of(words: list[str]) -> Pieces:
        if len(words) < MANY_WORDS:
            return in_python(words)
        plain = np.array([is_plain(word) for word in words], bool)
        ids, sizes = graph(tf.constant([word for word in words if is_plain(word)], tf.string))
        others = in_python([word for word in words if not is_plain(word)])
        all_sizes = np.zeros(len(words), np.int32)
        all_sizes[plain], all_sizes[~plain] = sizes.numpy(), others.sizes
        of_plain = np.repeat(plain, all_sizes)
        all_ids = np.zeros(len(of_plain), np.int32)
        all_ids[of_plain], all_ids[~of_plain] = ids.numpy(), others.ids
        return Pieces(all_ids, all_sizes)

    return pieces_of


def is_plain(word: str) -> bool:
    """Whether both ways are known to give the same pieces of a word."""
    return PLAIN_WORD.fullmatch(word) is not None and word != UNKNOWN_IN_TEXT
