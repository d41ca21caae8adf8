"""Measures predicted scores of sentences, and computes what to compare and to begin with."""

import math
from collections.abc import Sequence

import numpy as np
import scipy.sparse
import scipy.stats

from data import sentences, tfidf, word_pieces
from data.live_line import Waiting
from data.splits import TITLES

# Penalties of the ridge regression; the validation split chooses.
ALPHAS = (0.1, 0.3, 1.0, 3.0, 10.0)
OTHERS = ("valid", "test")  # splits
# What scores must not reach, and their smallest deviation, so that float32 can add up squares; and
# the share of the deviation by which float32 may round a score.
LARGEST, SMALLEST, ROUNDED = 1e15, 1e-15, 0.01
# Each word piece's mean score counts this many further sentences of the mean score: a piece that
# is rare says little.
PRIOR = 10.0


def measure(truth: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Measures predictions.

    Args:
        truth: true scores, of shape (n,) or (n, 1).
        predicted: likewise.

    Returns:
        `mae` and `rmse` in the unit of the scores, `pearson` and `spearman`, which is Pearson's
        correlation of the ranks, from -1 to 1; the correlations are 0 where all true or all
        predicted scores are equal.
    """
    truth, predicted = (np.ravel(values).astype(np.float64) for values in (truth, predicted))
    missed = predicted - truth
    return {
        "mae": float(np.mean(np.abs(missed))),
        "rmse": float(np.sqrt(np.mean(missed**2))),
        "pearson": _correlation(truth, predicted),
        "spearman": _correlation(*map(scipy.stats.rankdata, (truth, predicted))),
    }


def out_of_range(splits: dict[str, tuple[list[str], np.ndarray]], precision: str) -> str | None:
    """Returns why float32 cannot hold scores, their differences or their squares; None if it can.

    Args:
        splits: As in `sentences.Sentences.splits`, with scores.
        precision: "float64", or another in which labels and metrics are float32.
    """
    every = np.concatenate([scores[:, 0] for _, scores in splits.values()])
    training = splits["train"][1]
    for split, (_, scores) in splits.items():
        largest = float(np.abs(scores).max())
        if largest >= LARGEST:
            return (
                f"the largest score of the {TITLES.get(split, 'training')} split is {largest:.3g}, "
                f"expected less than {LARGEST:g}: change the unit"
            )
    deviation = float(training.std())
    if deviation < SMALLEST and np.ptp(training):  # of very small ones it is 0
        return (
            f"the scores differ by {deviation:.3g} (standard deviation), expected {SMALLEST:g} or "
            "more: change the unit"
        )
    rounding = float(np.abs(every - every.astype(np.float32)).max())
    if precision != "float64" and 0 < deviation < rounding / ROUNDED:
        return (
            f"the scores differ by {deviation:.3g} (standard deviation), which float32 rounds by "
            f"up to {rounding:.2g}: subtract a constant such as {training.mean():.0f}, or pass "
            "--precision float64"
        )
    return None


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(scipy.stats.pearsonr(a, b).statistic)


def baselines(splits: dict[str, tuple[list[str], np.ndarray]]) -> dict[str, float]:
    """Measures two baselines: the mean score, and ridge regression on TF-IDF.

    Args:
        splits: As in `sentences.Sentences.splits`, with scores.

    Returns:
        On the test split: `mean_mae` and `mean_rmse`, of always predicting the training split's
        mean; `ridge_mae`, `ridge_rmse`, `ridge_pearson` and `ridge_spearman`, of ridge regression
        on the features of `tfidf.baselines()`, and for pairs on the cosine of the two
        sentences' features too. Of `ALPHAS` it takes the one with the smallest squared error on
        the validation split, or 1 if that is the test split. Omitted if no training sentence has a
        word of two or more letters.
    """
    from sklearn.linear_model import Ridge

    texts, scores = splits["train"]
    test_scores = splits["test"][1]
    mean = measure(test_scores, np.full_like(test_scores, scores.mean()))
    results = {f"mean_{name}": mean[name] for name in ("mae", "rmse")}
    every = math.ceil(len(texts) / tfidf.MOST_SENTENCES)
    try:
        features, transform = tfidf.ngram_features(texts[::every])
    except ValueError:  # no word of two or more letters
        return results

    def with_cosine(texts: Sequence[str], features):
        first, *second = zip(*(text.split(sentences.SEPARATOR) for text in texts), strict=True)
        if not second:
            return features
        cosine = transform(first).multiply(transform(second[0])).sum(axis=1)
        return scipy.sparse.hstack([features, cosine], "csr")

    known = with_cosine(texts[::every], features)
    others = {name: with_cosine(splits[name][0], transform(splits[name][0])) for name in OTHERS}
    found = []
    with Waiting("computing the TF-IDF baseline"):
        # One file for both splits must not choose a penalty for its own test.
        for alpha in (1.0,) if splits["valid"][0] == splits["test"][0] else ALPHAS:
            # The default tolerance stops early.
            model = Ridge(alpha, solver="sparse_cg", tol=1e-8).fit(known, scores[::every, 0])
            errors = {n: measure(splits[n][1], model.predict(others[n])) for n in OTHERS}
            found.append((errors["valid"]["rmse"], errors["test"]))
    _, best = min(found, key=lambda pair: pair[0])
    return results | {f"ridge_{name}": value for name, value in best.items()}


def evidence(inputs: dict[str, np.ndarray], scores: np.ndarray, tokenizer) -> np.ndarray:
    """Computes each word piece's evidence for a high score, with which a new model begins.

    It is the mean score of the sentences with the piece, in standard deviations from the mean of
    all and shrunk towards it, times the slope with which the mean over a sentence's pieces predicts
    its score best. For the slope a sentence is left out of the means of its own pieces: where
    pieces say nothing, the slope and all evidence are near zero.

    Args:
        inputs: The training sentences, encoded by `sentences.encode`.
        scores: Their scores, float64 of shape (sentences, 1).
        tokenizer: A `keras_nlp.models.BertTokenizer`; its special tokens are no evidence.

    Returns:
        float64 of shape (vocabulary size, 1).
    """
    z = (scores[:, 0] - scores.mean()) / (scores.std() or 1.0)
    present = word_pieces.presence(inputs["token_ids"], tokenizer)
    sums, counts = present.T @ z, present.sum(axis=0)
    # (sum - z) / (count - 1 + PRIOR), of the pieces of each sentence.
    without = 1 / (counts - 1 + PRIOR)
    counted = np.maximum(np.diff(present.indptr), 1)  # pieces of each sentence
    means = (present @ (sums * without) - z * (present @ without)) / counted
    slope = max(0.0, float(means @ z) / max(float(means @ means), 1e-12))
    return (slope * sums / (counts + PRIOR))[:, np.newaxis]
