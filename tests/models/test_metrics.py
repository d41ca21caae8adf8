import numpy as np
import pytest
from sklearn.metrics import f1_score

from models.metrics import MacroF1


@pytest.fixture
def counted():
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=50)
    logits = rng.normal(size=(50, 4)).astype("float32")
    return labels, logits, logits.argmax(axis=1)


def test_as_scikit_learn(counted):
    labels, logits, predicted = counted
    metric = MacroF1(5)  # the last class is neither there nor predicted
    logits = np.concatenate([logits, np.full((50, 1), -9.0, "float32")], axis=1)
    for part in (slice(0, 20), slice(20, 50)):
        metric.update_state(labels[part], logits[part])
    expected = f1_score(labels, predicted, labels=range(5), average="macro", zero_division=0)
    assert float(metric.result()) == pytest.approx(expected)


def test_examples_of_weight_zero_do_not_count(counted):
    labels, logits, predicted = counted
    metric = MacroF1(4)
    metric.update_state(labels, logits, np.array([1.0] * 30 + [0.0] * 20))
    expected = f1_score(labels[:30], predicted[:30], average="macro")
    assert float(metric.result()) == pytest.approx(expected)
    assert expected != pytest.approx(f1_score(labels, predicted, average="macro"))
