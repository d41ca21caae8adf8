import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, f1_score

from models.metrics import MacroF1


@pytest.fixture
def counted():
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=50)
    logits = rng.normal(size=(50, 4)).astype("float32")
    return labels, logits, logits.argmax(axis=1)


def test_as_scikit_learn(counted):
    labels, logits, predicted = counted
    metric = MacroF1(4)
    for part in (slice(0, 20), slice(20, 50)):
        metric.update_state(labels[part], logits[part])
    assert float(metric.result()) == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert (metric.confusion_matrix() == confusion_matrix(labels, predicted)).all()


def test_examples_of_weight_zero_do_not_count(counted):
    labels, logits, predicted = counted
    weights = np.array([1.0] * 30 + [0.0] * 20)
    metric = MacroF1(4)
    metric.update_state(labels, logits, weights)
    assert (metric.confusion_matrix() == confusion_matrix(labels[:30], predicted[:30])).all()


def test_it_begins_anew():
    metric = MacroF1(2)
    metric.update_state([1], [[0.0, 1.0]])
    metric.reset_state()
    assert metric.confusion_matrix().sum() == 0
