"""The baseline of logistic regression on TF-IDF."""

import numpy as np
import pytest
import sklearn.feature_selection
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from data import several_labels, tfidf


def test_baselines():
    # Which word decides needs the pair: "not good" and "good" are told apart by 2-grams.
    train = ["very good film", "not good film", "very bad film", "not bad film"] * 10
    labels = np.array([1, 0, 0, 1] * 10, np.int32)
    test = (["a not bad film", "a not good film", "a very good film"], np.array([1, 0, 1]))
    found = tfidf.baselines({"train": (train + ["x y"], np.append(labels, 0)), "test": test})
    assert found == {
        "most_frequent_accuracy": pytest.approx(1 / 3),
        "tfidf_accuracy": 1.0,
        "tfidf_macro_f1": 1.0,
    }
    swapped = {"train": (train, labels), "test": (test[0], 1 - test[1])}
    assert tfidf.baselines(swapped)["tfidf_accuracy"] == 0.0, "it has seen the test split"


def test_the_tfidf_baseline_has_converged():
    """Where a solver that stops early stops depends on the number of threads, and so did scores."""
    draw = np.random.default_rng(0)

    def drawn(count: int) -> tuple[list[str], np.ndarray]:
        labels = draw.integers(0, 3, count)
        words = np.minimum(299, draw.exponential(40, (count, 8)) + 3 * labels[:, None]).astype(int)
        return [" ".join(f"w{word}" for word in row) for row in words], labels

    (train, labels), (test, test_labels) = drawn(1000), drawn(3000)
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    best = LogisticRegression(C=10, solver="newton-cg", tol=1e-10)
    best.fit(vectorizer.fit_transform(train), labels)
    found = tfidf.baselines({"train": (train, labels), "test": (test, test_labels)})
    expected = best.score(vectorizer.transform(test), test_labels)
    assert found["tfidf_accuracy"] == pytest.approx(expected, abs=1e-12)


def test_the_ngrams_of_the_tfidf_baseline_are_the_same_on_every_machine(monkeypatch):
    """Of equally frequent ones the last are kept; an unstable sort has no rule."""
    monkeypatch.setattr(tfidf, "MOST_NGRAMS", 1)
    train = (["first", "second", "third"] * 2, np.array([0, 1, 2] * 2, np.int32))
    for word, label, found in (("third", 2, 1.0), ("first", 0, 1.0), ("second", 1, 0.0)):
        scores = tfidf.baselines({"train": train, "test": ([word], np.array([label]))})
        assert scores["tfidf_accuracy"] == found, word


def test_the_tfidf_baseline_learns_from_a_bounded_number_of_sentences(monkeypatch):
    """Of eight sentences every third: the first, fourth and seventh, which are told apart."""
    monkeypatch.setattr(tfidf, "MOST_SENTENCES", 3)
    train = ["good", "bad", "bad", "bad", "good", "good", "good", "bad"]
    labels = np.array([1, 1, 1, 0, 0, 0, 1, 1], np.int32)
    found = tfidf.baselines({"train": (train, labels), "test": (["good", "bad"], np.array([1, 0]))})
    assert found["tfidf_accuracy"] == 1.0
    assert found["most_frequent_accuracy"] == 0.5  # of all eight


def test_sentences_without_a_word_have_one_baseline():
    """The most frequent class is that of training."""
    splits = {"train": (["a"] * 3, np.array([0, 0, 1])), "test": (["a"] * 3, np.array([1, 1, 0]))}
    assert tfidf.baselines(splits) == {"most_frequent_accuracy": pytest.approx(1 / 3)}


def test_with_many_classes_the_tfidf_baseline_keeps_fewer_ngrams_or_is_left_out(monkeypatch):
    texts = [f"word{n % 10} often word{n}" for n in range(100)]
    labels = np.arange(100, dtype=np.int32) % 10
    splits = {"train": (texts, labels), "test": (texts, labels)}
    kept = []
    stock = sklearn.feature_selection.SelectKBest
    monkeypatch.setattr(
        "sklearn.feature_selection.SelectKBest",
        lambda score, k: kept.append(k) or stock(score, k=k),
    )
    assert tfidf.baselines(splits)["tfidf_accuracy"] == 1.0
    monkeypatch.setattr(tfidf, "MOST_WEIGHTS", 200)
    monkeypatch.setattr(tfidf, "FEWEST_NGRAMS", 20)
    assert tfidf.baselines(splits)["tfidf_accuracy"] == 1.0
    assert kept[0] > 100 and kept[1] == 20 and not tfidf.too_many_classes(10)
    monkeypatch.setattr(tfidf, "FEWEST_NGRAMS", 21)
    assert list(tfidf.baselines(splits)) == ["most_frequent_accuracy"]
    assert tfidf.too_many_classes(10)


def test_with_many_classes_the_tfidf_baseline_learns_from_fewer_sentences(monkeypatch):
    """Five thousand classes of half a million sentences were 20 GB of probabilities."""
    texts = [f"word{n % 10} often" for n in range(100)]
    labels = np.arange(100, dtype=np.int32) % 10
    splits = {"train": (texts, labels), "test": (texts, labels)}
    monkeypatch.setattr(tfidf, "MOST_OUTPUTS", 330)
    fitted, stock = [], LogisticRegression.fit
    monkeypatch.setattr(
        LogisticRegression, "fit", lambda *a: fitted.append(a[1].shape[0]) or stock(*a)
    )
    tfidf.baselines(splits)
    assert fitted == [25]  # each fourth one, since 33 are the most
    assert tfidf.most_sentences(2) == 165 and tfidf.most_sentences(1) == 330
    columns = np.eye(10, dtype=np.int8)[labels]
    several_labels.baselines({name: (texts, columns) for name in splits})
    assert set(fitted) == {25} and len(fitted) > 1
