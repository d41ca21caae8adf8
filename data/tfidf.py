"""Measures logistic regression on TF-IDF beside a text model, and computes its features."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from data.baselines import most_frequent_accuracy
from data.live_line import Waiting, live_line

# Number of n-grams that the baseline keeps, the most frequent ones; SST-2 has 81,000.
MOST_NGRAMS = 100_000
# Number of training sentences that it learns from: all their n-grams are counted first, in some
# 2 KB of memory for each sentence of twenty words.
MOST_SENTENCES = 500_000
# Number of weights that it fits, one for each n-gram and class: with more than fifty classes it
# keeps fewer n-grams, and if these were fewer than five thousand there is no such baseline.
MOST_WEIGHTS = 5_000_000
FEWEST_NGRAMS = 5_000
# Number of sentences times classes, for each of which a step of the fit computes a number: with
# more than twenty classes it learns from fewer sentences.
MOST_OUTPUTS = 10_000_000


def baselines(
    splits: dict[str, tuple[list[str], np.ndarray]], metrics: Sequence[str] = ()
) -> dict[str, float]:
    """Measures two baselines: the most frequent class, and TF-IDF.

    Args:
        splits: As in `sentences.Sentences.splits`, with classes.
        metrics: Names of metrics that TF-IDF is measured by too, see `_measured`.

    Returns:
        On the test split: `most_frequent_accuracy`, of always predicting the training split's
        most frequent class; `tfidf_accuracy` and `tfidf_macro_f1` (the mean of the classes' F1
        scores), of logistic regression on TF-IDF of unigrams and bigrams of `most_sentences()`
        of training at most, evenly spaced; omitted if the training sentences have one class,
        too many (see `too_many_classes`), or no word of two or more letters. All from 0 to 1.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, f1_score

    sentences, labels = splits["train"]
    test_sentences, test_labels = splits["test"]
    counts = np.bincount(labels)
    test_counts = np.bincount(test_labels, minlength=len(counts))
    scores = {"most_frequent_accuracy": most_frequent_accuracy(counts, test_counts)}
    if too_many_classes(len(counts)):
        return scores
    every = math.ceil(len(sentences) / most_sentences(len(counts)))
    try:
        features, transform = ngram_features(sentences[::every], MOST_WEIGHTS // len(counts))
        with Waiting("computing the TF-IDF baseline"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The number of unique classes")  # there is a note
            # L-BFGS, the default, stops early, and where depends on the number of threads.
            model = LogisticRegression(C=10, solver="newton-cg", tol=1e-8)
            model.fit(features, labels[::every])
    except ValueError:  # no word of two or more letters, or one class
        return scores
    features = transform(test_sentences)
    predictions = model.predict(features)
    scores |= {
        "tfidf_accuracy": float(accuracy_score(test_labels, predictions)),
        "tfidf_macro_f1": float(f1_score(test_labels, predictions, average="macro")),
    }
    last = model.predict_proba(features)[:, -1] if metrics else predictions
    more = {name: _measured(name, test_labels, predictions, last) for name in metrics}
    return scores | {f"tfidf_{name}": value for name, value in more.items() if value is not None}


def _measured(
    name: str, labels: np.ndarray, predictions: np.ndarray, last: np.ndarray
) -> float | None:
    """Returns a metric of `models.metrics.of_classes`, by scikit-learn.

    Args:
        name: Of the metric.
        labels: Of shape (n,).
        predictions: Likewise.
        last: Probabilities of the last class, of shape (n,).

    Returns:
        None for the area under the curve of labels that are all the same.
    """
    from sklearn import metrics

    if name == "matthews":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A single label was found")  # then it is 0
            return float(metrics.matthews_corrcoef(labels, predictions))
    if name == "auc":
        several = len(np.unique(labels)) > 1
        return float(metrics.roc_auc_score(labels, last)) if several else None
    measures = {
        "f1": metrics.f1_score,
        "precision": metrics.precision_score,
        "recall": metrics.recall_score,
    }
    return float(measures[name](labels, predictions, zero_division=0.0))


def ngram_features(sentences: Sequence[str], most: int = MOST_NGRAMS) -> tuple[Any, Callable]:
    """Computes TF-IDF of unigrams and bigrams.

    Args:
        sentences: n training sentences, or pairs joined by `sentences.SEPARATOR`.
        most: Number of n-grams to keep, the most frequent ones; `MOST_NGRAMS` at most.

    Returns:
        Features, a sparse matrix of shape (n, n-grams) with rows of length one, and a function that
        computes those of other sentences.

    Raises:
        ValueError: No sentence has a word of two or more letters.
    """
    from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer
    from sklearn.feature_selection import SelectKBest
    from sklearn.pipeline import make_pipeline

    counter = CountVectorizer(ngram_range=(1, 2))
    found = counter.fit_transform(live_line(sentences, "counting n-grams"))
    # Not `max_features`, which keeps others of the equally frequent n-grams on another processor.
    frequent = SelectKBest(
        lambda counts, _: np.asarray(counts.sum(axis=0)).ravel(),
        k=min(MOST_NGRAMS, most, found.shape[1]),
    )
    weigh = make_pipeline(frequent, TfidfTransformer(sublinear_tf=True))
    features = weigh.fit_transform(found, np.zeros(len(sentences)))
    return features, lambda texts: weigh.transform(counter.transform(texts))


def most_sentences(classes: int) -> int:
    """Returns how many training sentences the baseline learns from, at most."""
    return min(MOST_SENTENCES, MOST_OUTPUTS // classes)


def too_many_classes(classes: int) -> bool:
    """Returns whether there is no TF-IDF baseline because of the number of classes."""
    return MOST_WEIGHTS // classes < FEWEST_NGRAMS
