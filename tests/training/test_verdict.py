"""What a run is told at its end."""

import pytest

from training.verdict import Training, advice, verdict


def training(**changes):
    usual = dict(steps=1000, learning_rate=1e-3, usual_learning_rate=1e-3, history={})
    return Training(**(usual | changes))


BASELINE = {"unigram_cross_entropy": 6.0, "most_frequent_accuracy": 0.08}


def test_better_than_all():
    lines = verdict({"cross_entropy": 4.0, "accuracy": 0.3}, BASELINE, training())
    assert lines == ["better than the unigram model, the most frequent class"]


@pytest.mark.parametrize("cross_entropy", [5.95, 6.0, 7.0])
def test_no_better_or_hardly(cross_entropy):
    lines = verdict({"cross_entropy": cross_entropy, "accuracy": 0.3}, BASELINE, training())
    assert lines[:2] == ["better than the most frequent class", "not better than the unigram model"]
    assert len(lines) == 3 and lines[2].startswith("try ")


def test_one_baseline_with_two_metrics():
    baseline = {"tfidf_accuracy": 0.8, "tfidf_macro_f1": 0.7}
    lines = verdict({"accuracy": 0.9, "macro_f1": 0.6}, baseline, training())
    assert lines[:2] == [
        "better than TF-IDF with logistic regression in accuracy",
        "not better than TF-IDF with logistic regression in macro_f1",
    ]
    lines = verdict({"accuracy": 0.9, "macro_f1": 0.9}, baseline, training())
    assert lines == ["better than TF-IDF with logistic regression"]


def test_a_recipe_of_ones_own():
    lines = verdict({"rmse": 1.0}, {"the_old_model_rmse": 2.0, "rmse": 1.5, "age": 3.0}, training())
    assert lines == ["better than the old model, what is simpler"]
    assert verdict({"wingspan": 1.0}, {"mean_wingspan": 2.0}, training()) == []
    assert verdict({"accuracy": 1.0}, {}, training()) == []


class TestAdvice:
    def test_too_few_steps(self):
        assert "18 steps" in advice(training(steps=18))[0]
        assert len(advice(training(steps=18, history={"val_loss": [3.0, 2.0]}))) == 1

    def test_rate_too_low(self):
        (found,) = advice(training(learning_rate=1e-5, history={"val_loss": [3.0, 2.0]}))
        assert found.startswith("a higher --base-learning-rate: 1e-05 at the peak is low")
        assert found.endswith("would be 0.001")
        assert "learning-rate" not in "".join(advice(training(learning_rate=5e-4)))

    def test_too_little_data(self):
        (found,) = advice(training(history={"val_loss": [3.0, 2.0, 2.5]}))
        assert found.startswith("more data") and "after epoch 2 of 3" in found

    def test_still_improving(self):
        (found,) = advice(training(history={"val_loss": [3.0, 2.5, 2.0]}))
        assert found == "more --epochs: the validation loss was still falling"

    def test_nothing_in_particular(self):
        assert advice(training(history={"val_loss": [3.0, 2.0, 2.01]})) == [
            "more data, more --epochs, or a larger model"
        ]
        assert advice(training()) == ["more data, more --epochs, or a larger model"]
