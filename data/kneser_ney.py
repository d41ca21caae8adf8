"""Computes interpolated modified Kneser-Ney n-grams of token ids: a language model's baseline.

Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling" (1998), section
3: absolute discounts for n-grams with counts of one, two, and more, estimated for each order; lower
orders count the different tokens that precede an n-gram instead of its occurrences.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

UNSEEN = -1  # the number of an n-gram that does not occur
# Number of training tokens that are counted, for which it takes some 5 GB of memory.
MOST_TOKENS = 40_000_000
# For counts of one, two, and more, if a text is too small to estimate them.
DEFAULT_DISCOUNTS = (0.5, 1.0, 1.5)


@dataclasses.dataclass(frozen=True)
class Order:
    """The n-grams of one length.

    An n-gram's number is its position in `keys`. Its context is the n-gram without the last token,
    identified by its number in the order below.

    Attributes:
        keys: Number of the context x vocabulary size + last token, sorted; int64 of shape
            (n-grams,).
        discounted: Counts less their discounts, float64 of shape (n-grams,).
        total: Sum of the counts after each context, float64 of shape (contexts,).
        freed: Sum of the discounts after each context, float64 of shape (contexts,).
    """

    keys: np.ndarray
    discounted: np.ndarray
    total: np.ndarray
    freed: np.ndarray

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the numbers of n-grams by their keys; `UNSEEN` for missing ones."""
        if not len(self.keys):
            return np.full(len(keys), UNSEEN)
        numbers = np.searchsorted(self.keys, keys)
        numbers[numbers == len(self.keys)] = 0
        return np.where(self.keys[numbers] == keys, numbers, UNSEEN)


class KneserNey:
    """Predicts each token of a sequence from those before it.

    A sequence is cut into documents at the separator, which ends one and begins the next. A
    document's first token is only a context, and no context reaches beyond it. An n-gram at the
    beginning of a document counts at each occurrence, also in the lower orders: no token precedes
    it. Counting takes about 120 bytes of memory per training token. Of a text of more than
    `MOST_TOKENS` tokens evenly spaced sequences are counted.

    Args:
        sequences: The training text: token ids of shape (rows, length), or arrays of any lengths.
        vocabulary_size: Number of tokens; their probabilities sum to 1 after any context.
        order: Tokens of the longest n-gram.
        separator: The token that ends a document; None if each sequence is one document.
    """

    def __init__(
        self,
        sequences: np.ndarray | Sequence[np.ndarray],
        vocabulary_size: int,
        order: int = 5,
        separator: int | None = None,
    ):
        self.vocabulary_size, self.order, self.separator = vocabulary_size, order, separator
        tokens, before, _ = self._flat(sequences[:: every(sequences)])
        keys, grams = np.arange(vocabulary_size), tokens
        contexts = 1  # the empty one
        self.orders: list[Order] = []
        for length in range(1, order + 1):
            predicted = before >= max(1, length - 1)
            if length == order:
                counted = [grams[predicted]]
            else:
                longer = np.flatnonzero(before >= length)
                longer_keys = self._keys(grams[longer - 1], tokens[longer])
                longer_keys, first, numbers = _unique(longer_keys)
                # No token precedes a document's beginning.
                counted = [grams[longer[first]], grams[predicted & (before == length - 1)]]
            count = np.bincount(np.concatenate(counted), minlength=len(keys))
            self.orders.append(_discounted(keys, count, keys // vocabulary_size, contexts))
            if length < order:
                contexts, keys = len(keys), longer_keys
                grams = np.full(len(tokens), UNSEEN, np.int32)
                grams[longer] = numbers

    def log_probabilities(self, rows: np.ndarray) -> np.ndarray:
        """Predicts each token of a row except the first.

        Args:
            rows: Ids of shape (rows, length).

        Returns:
            Logarithms of probabilities in nats, float64 of shape (rows, length - 1).
        """
        return self._predicted(rows).reshape(len(rows), -1)[:, 1:]

    def log_likelihoods(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """Sums the log-probabilities of sequences of any lengths.

        Args:
            sequences: Ids, at least one each; the first of each is only a context.

        Returns:
            Log-likelihoods in nats, float64 of shape (sequences,).
        """
        starts = np.cumsum([0, *map(len, sequences)])[:-1]
        return np.add.reduceat(self._predicted(sequences), starts)

    def _predicted(self, sequences) -> np.ndarray:
        """Returns log-probabilities of all tokens, flat; 0 for the first of each sequence."""
        tokens, before, starts = self._flat(sequences)
        probability = np.full(len(tokens), 1 / self.vocabulary_size)
        grams = np.zeros(len(tokens), np.int64)  # the empty context
        for length, order in enumerate(self.orders, start=1):
            context = np.concatenate([[UNSEEN], grams[:-1]]) if length > 1 else grams
            known = np.flatnonzero((before >= length - 1) & (context != UNSEEN))
            context = context[known]
            grams = np.full(len(tokens), UNSEEN)
            grams[known] = order.find(self._keys(context, tokens[known]))
            seen = order.total[context] > 0
            known, context = known[seen], context[seen]
            kept = np.where(grams[known] == UNSEEN, 0.0, order.discounted[grams[known]])
            mixed = kept + order.freed[context] * probability[known]
            probability[known] = mixed / order.total[context]
        probability[starts] = 1
        return np.log(probability)

    def _flat(self, sequences) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Joins sequences.

        Returns:
            The tokens, int32; the number of tokens of the same document before each, at most
            `order` (0 for the first token of a sequence); and the starts of the sequences.
        """
        if isinstance(sequences, np.ndarray):  # of millions of rows there is no list
            starts = np.arange(len(sequences)) * sequences.shape[1]
            tokens = sequences.reshape(-1).astype(np.int32)
        else:
            starts = np.cumsum([0, *map(len, sequences)])[:-1]
            tokens = np.concatenate(sequences).astype(np.int32)
        begins = np.zeros(len(tokens), bool) if self.separator is None else tokens == self.separator
        begins[starts] = True
        positions = np.arange(len(tokens))
        begin = np.maximum.accumulate(np.where(begins, positions, 0))
        before = np.zeros(len(tokens), np.int8)
        before[1:] = np.minimum(positions[1:] - begin[:-1], self.order)
        before[starts] = 0
        return tokens, before, starts

    def _keys(self, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return context.astype(np.int64) * self.vocabulary_size + tokens


def every(sequences: np.ndarray | Sequence[np.ndarray]) -> int:
    """Returns n if every n-th training sequence is counted, 1 for all."""
    tokens = sequences.size if isinstance(sequences, np.ndarray) else sum(map(len, sequences))
    return max(1, math.ceil(tokens / MOST_TOKENS))


def counted_note(sequences: np.ndarray) -> str | None:
    """Returns a line if not all training sequences are counted."""
    n = every(sequences)
    if n == 1:
        return None
    return f"the n-grams learn from one of {n} training sequences, {MOST_TOKENS:,} tokens at most"


def _unique(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the sorted distinct keys, an index of each, and the number of each key.

    Like `np.unique` with `return_index` and `return_inverse`, with half of its memory.
    """
    order = np.argsort(keys)
    is_new = np.ones(len(keys), bool)
    keys = keys[order]
    is_new[1:] = keys[1:] != keys[:-1]
    numbers = np.empty(len(keys), np.int32)
    numbers[order] = np.cumsum(is_new, dtype=np.int32) - 1
    return keys[is_new], order[is_new], numbers


def _discounted(keys: np.ndarray, count: np.ndarray, context: np.ndarray, contexts: int) -> Order:
    discount = np.array([0.0, *discounts(count)])[np.minimum(count, 3)]
    total = np.bincount(context, count, minlength=contexts)
    freed = np.bincount(context, discount, minlength=contexts)
    return Order(keys, count - discount, total, freed)


def discounts(count: np.ndarray) -> tuple[float, ...]:
    """Estimates the discounts of n-grams with counts of one, two, and three or more.

    Args:
        count: The count of each n-gram of an order, integers.

    Returns:
        Formula 26 of Chen and Goodman; `DEFAULT_DISCOUNTS` if the text is too small for it.
    """
    of = np.bincount(np.minimum(count, 5), minlength=6)  # n-grams by their count
    if not of[1:5].all():
        return DEFAULT_DISCOUNTS
    share = of[1] / (of[1] + 2 * of[2])
    estimates = tuple(float(c - (c + 1) * share * of[c + 1] / of[c]) for c in (1, 2, 3))
    return estimates if min(estimates) > 0 else DEFAULT_DISCOUNTS
