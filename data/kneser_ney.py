"""Interpolated Kneser-Ney n-grams over rows of token ids: what a language model has to beat.

Kneser and Ney (1995), interpolated as in Chen and Goodman (1998), with one discount for each order.
"""

import numpy as np

MOST_TOKENS = 3_000_000  # of the training rows; NumPy sorts them all


def log_probabilities(
    train: np.ndarray, test: np.ndarray, vocabulary_size: int, order: int = 4
) -> np.ndarray:
    """Predicts each token but a row's first from the `order` - 1 before it in the row.

    Args:
        train: ids of shape (rows, length); the first `MOST_TOKENS` tokens are counted.
        test: ids of shape (rows, length), as long as the training rows.
        vocabulary_size: number of tokens; the probabilities of all of them sum to 1.
        order: tokens of the longest n-gram.

    Returns:
        Logarithms of probabilities, float64 of shape (test rows, length - 1).
    """
    train = train[: max(1, MOST_TOKENS // train.shape[1])]
    tokens = np.concatenate([train, test]).astype(np.int64)
    known = np.s_[: len(train), 1:]
    asked = np.s_[len(train) :, 1:]
    # grams[k] numbers the k tokens that end at a place, contexts[k] the k - 1 before that token.
    grams, contexts = [np.zeros_like(tokens)], [np.zeros_like(tokens)]
    for k in range(1, order + 1):
        contexts.append(np.zeros_like(tokens))
        contexts[k][:, 1:] = grams[k - 1][:, :-1]
        _, numbers = np.unique(contexts[k] * vocabulary_size + tokens, return_inverse=True)
        grams.append(numbers.reshape(tokens.shape) + 1)  # 0: what is before a row

    probabilities = np.full(tokens[asked].shape, 1 / vocabulary_size)
    for k in range(1, order + 1):
        gram, context = grams[k][known].ravel(), contexts[k][known].ravel()
        # The longest n-grams are counted; of the others the different tokens that precede them.
        counted = gram
        if k < order:
            _, first = np.unique(grams[k + 1][known], return_index=True)
            counted = gram[first]
        count = np.bincount(counted, minlength=grams[k].max() + 1)
        discount = _discount(count)
        kinds, first = np.unique(gram, return_index=True)
        size = contexts[k].max() + 1
        total = np.bincount(context[first], count[kinds], minlength=size)
        different = np.bincount(context[first], minlength=size)

        here, before = grams[k][asked], contexts[k][asked]
        kept = np.maximum(count[here] - discount, 0)
        freed = discount * different[before]
        seen = total[before] > 0
        mixed = (kept + freed * probabilities) / np.maximum(total[before], 1)
        probabilities = np.where(seen, mixed, probabilities)
    return np.log(probabilities)


def _discount(count: np.ndarray) -> float:
    once, twice = np.sum(count == 1), np.sum(count == 2)
    return float(once / (once + 2 * twice)) if once else 0.5
