"""Computes baselines from the counts of classes or tokens in the training and test splits."""

import numpy as np

SMOOTHING = 0.1  # added to each count of training, so that no class has probability zero


def most_frequent_accuracy(train_counts: np.ndarray, test_counts: np.ndarray) -> float:
    """Returns the accuracy of always predicting the class that is most frequent in training.

    Args:
        train_counts: How often each class occurs in the training split, of shape (classes,).
        test_counts: Likewise in the test split.

    Returns:
        A share of the test examples, from 0 to 1.
    """
    return float(test_counts[train_counts.argmax()] / test_counts.sum())


def standard_error(share: float, count: int) -> float:
    """Returns the standard error of a share of independent examples, for instance an accuracy.

    That of the adjusted share p = (right + 2) / (count + 4), sqrt(p (1 - p) / (count + 4)), which
    does not vanish at 0% and 100% (Agresti and Coull, "Approximate is better than 'exact' for
    interval estimation of binomial proportions", The American Statistician 52, 1998).

    Args:
        share: from 0 to 1.
        count: number of the examples.
    """
    adjusted = (share * count + 2) / (count + 4)
    return (adjusted * (1 - adjusted) / (count + 4)) ** 0.5


def unigram_cross_entropy(train_counts: np.ndarray, test_counts: np.ndarray) -> float:
    """Returns the cross-entropy of an add-0.1 unigram model of the training split.

    Args:
        train_counts: How often each token occurs in the training split, of shape (tokens,). Tokens
            that are never predicted are left out.
        test_counts: Likewise in the test split.

    Returns:
        Nats per token of the test split.
    """
    smoothed = train_counts + SMOOTHING
    log_share = np.log(smoothed) - np.log(smoothed.sum())
    return float(-(test_counts * log_share).sum() / test_counts.sum())
