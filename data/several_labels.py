"""Measures predictions of several labels, and computes what to compare and to begin with."""

import math

import numpy as np
import scipy.sparse

from data import tfidf, word_pieces
from data.live_line import Waiting


def measure(truth: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Measures predictions.

    Args:
        truth: 1 for each label of an example, otherwise 0, of shape (n, labels).
        predicted: likewise.

    Returns:
        `binary_accuracy`, the share of right values; `micro_f1`, the F1 score of all values
        together; `macro_f1`, the mean of the labels' F1 scores, 0 for one that neither occurs nor
        is predicted; `exact_match`, the share of examples all of whose values are right.
    """
    hits = np.sum((truth > 0) & (predicted > 0), axis=0)
    total = np.sum(truth > 0, axis=0) + np.sum(predicted > 0, axis=0)
    right = (truth > 0) == (predicted > 0)
    return {
        "binary_accuracy": float(right.mean()),
        "micro_f1": float(2 * hits.sum() / max(total.sum(), 1)),
        "macro_f1": float(np.mean(2 * hits / np.maximum(total, 1))),
        "exact_match": float(right.all(axis=1).mean()),
    }


def baselines(splits: dict[str, tuple[list[str], np.ndarray]]) -> dict[str, float]:
    """Measures two baselines: the most frequent value of each label, and TF-IDF.

    Args:
        splits: As in `sentences.Sentences.splits`, with several labels.

    Returns:
        On the test split, `measure()` of always predicting the labels that more than half of the
        training examples have, as `most_frequent_...`; and, as `tfidf_...`, of a logistic
        regression for each label on the features of `tfidf.baselines()`. The latter are omitted
        where that function omits them.
    """
    from sklearn.linear_model import LogisticRegression

    texts, labels = splits["train"]
    test_texts, truth = splits["test"]
    frequent = labels.mean(axis=0) > 0.5
    predicted = np.tile(frequent, (len(truth), 1))
    found = {f"most_frequent_{name}": n for name, n in measure(truth, predicted).items()}
    if tfidf.too_many_classes(labels.shape[1]):
        return found
    every = math.ceil(len(texts) / tfidf.most_sentences(labels.shape[1]))
    texts, labels = texts[::every], labels[::every]
    try:
        features, transform = tfidf.ngram_features(texts, tfidf.MOST_WEIGHTS // labels.shape[1])
    except ValueError:  # no word of two or more letters
        return found
    others = transform(test_texts)
    with Waiting("computing the TF-IDF baseline"):
        for column in np.flatnonzero(np.ptp(labels, axis=0)):
            # L-BFGS, the default, stops early, and where depends on the number of threads.
            model = LogisticRegression(C=10, solver="newton-cg", tol=1e-8)
            predicted[:, column] = model.fit(features, labels[:, column]).predict(others)
    return found | {f"tfidf_{name}": n for name, n in measure(truth, predicted).items()}


def balanced_weights(labels: np.ndarray) -> np.ndarray:
    """Returns weights with which both values of each label count the same in the loss.

    Args:
        labels: Of the training split, 0 or 1, of shape (n, labels).

    Returns:
        float64 of shape (2, labels), of the values 0 and 1: n / (2 x the number of examples with
        the value), as scikit-learn's "balanced" for each label; the mean over the examples is 1. A
        label with one value has the weights 1.
    """
    positives = labels.sum(axis=0, dtype=np.int64)
    counts = np.stack([len(labels) - positives, positives])
    return np.where(counts.all(axis=0), len(labels) / (2 * np.maximum(counts, 1)), 1.0)


def evidence(inputs: dict[str, np.ndarray], labels: np.ndarray, tokenizer) -> np.ndarray:
    """Computes each word piece's evidence for each label by naive Bayes, add-one smoothed.

    As `sentences.naive_bayes_evidence`, for the two classes of the sentences that have a label and
    of those that do not.

    Args:
        inputs: The training sentences, encoded by `sentences.encode`.
        labels: Theirs, of shape (sentences, labels).
        tokenizer: A `keras_nlp.models.BertTokenizer`; its special tokens are no evidence.

    Returns:
        For each label half of the piece's log odds, float64 of shape (vocabulary size, labels).
    """
    present = word_pieces.presence(inputs["token_ids"], tokenizer)
    # Sparse: a million sentences with five hundred labels would take 4 GB as numbers.
    counted = (present.T @ scipy.sparse.csr_array(labels, dtype=np.float64)).toarray(order="C")
    counts = [1 + counted, 1 + (present.sum(axis=0)[:, np.newaxis] - counted)]
    with_label, without = (np.log(part) - np.log(part.sum(axis=0)) for part in counts)
    odds = (with_label - without) / 2
    odds[word_pieces.special_ids(tokenizer)] = 0
    return odds
