"""Tests the verdict and the model card."""

import types
from pathlib import Path

import keras
import numpy as np
import pytest

from recipes import mnist
from training.options import SharedOptions, shown
from training.report import model_card, verdict

BASELINE = {"unigram_cross_entropy": 6.0, "most_frequent_accuracy": 0.08}


def test_all_baselines_are_beaten():
    lines = verdict({"cross_entropy": 4.0, "accuracy": 0.3}, BASELINE, {})
    assert lines == [
        "beats the unigram model in cross_entropy, the most frequent class in accuracy"
    ]


@pytest.mark.parametrize(
    "test, said",
    [
        (
            (5.9, 0.3),
            "beats the unigram model in cross_entropy, the most frequent class in accuracy",
        ),
        ((5.95, 0.3), "beats the unigram model in cross_entropy, but by less than 1%"),
        ((6.0, 0.3), "does not beat the unigram model in cross_entropy"),
        ((7.0, 0.3), "does not beat the unigram model in cross_entropy"),
        ((4.0, 0.085), "beats the most frequent class in accuracy, but by less than 0.01"),
        ((4.0, 0.08), "does not beat the most frequent class in accuracy"),
    ],
)
def test_the_margin_is_said(test, said):
    """6.1786 is better than 6.2124."""
    lines = verdict(dict(zip(("cross_entropy", "accuracy"), test, strict=True)), BASELINE, {})
    assert said in lines
    assert any(line.startswith("try ") for line in lines) == (len(lines) > 1)


def test_the_formula_is_compared_on_its_own_molecules():
    test = {"mae": 1.0, "rmse": 2.0, "perfect_duplex_mae": 3.0}
    baseline = {"mean_mae": 9.0, "formula_perfect_duplex_mae": 1.5, "formula_share": 0.1}
    first, second, *_ = verdict(test, baseline, {})
    assert first == "beats the mean of training in mae"
    assert second == "does not beat the formula in perfect_duplex_mae"


def test_baselines_of_a_recipe_of_ones_own():
    baseline = {"tfidf_accuracy": 0.8}
    lines = verdict({"accuracy": 0.9, "macro_f1": 0.9}, baseline, {})
    assert lines == ["beats TF-IDF with logistic regression in accuracy"]
    baseline = {"the_old_model_rmse": 2.0, "rmse": 1.5, "age": 3.0}
    assert verdict({"rmse": 1.0}, baseline, {}) == [
        "beats the old model in rmse, the baseline in rmse"
    ]
    # Nothing is said of a metric whose direction is not known.
    assert verdict({"wingspan": 1.0}, {"mean_wingspan": 2.0}, {}) == []


@pytest.mark.parametrize(
    "losses, advice",
    [
        ([3.0, 2.0, 2.5], "more --dropout: val_loss was best after epoch 2 of 3"),
        ([3.0, 2.0, 2.01], "or a larger model"),
        ([], "try more data, more --epochs"),
    ],
)
def test_advice(losses, advice):
    lines = verdict({"accuracy": 0.1}, {"accuracy": 0.1}, {"val_loss": losses})
    assert advice in lines[-1]


def test_the_best_of_some_epochs_has_its_number():
    """As with `fit(validation_freq=3)`."""
    history, epochs = {"val_loss": [3.0, 2.0, 2.5]}, {"val_loss": [3, 6, 9]}
    lines = verdict({"accuracy": 0.1}, {"accuracy": 0.1}, history, epochs=epochs)
    assert "val_loss was best after epoch 6 of 9" in lines[-1]


def test_a_metric_that_still_improves_is_no_overfitting():
    """As with weights of the classes, which the validation's loss does not have."""
    losses = [1.0, 1.5]
    for values, advice in (([0.4, 0.5], "try more data, more --epochs"), ([0.5, 0.4], "--dropout")):
        history = {"val_loss": losses, "val_macro_f1": values}
        assert advice in verdict({"accuracy": 0.1}, {"accuracy": 0.1}, history)[-1]


def test_a_baseline_of_several_labels_is_no_class():
    test, baseline = {"micro_f1": 0.8}, {"most_frequent_micro_f1": 0.4}
    assert verdict(test, baseline, {}) == ["beats the labels' most frequent values in micro_f1"]


def test_a_gain_of_less_than_two_standard_errors_is_narrow():
    test, baseline = {"accuracy": 0.70}, {"most_frequent_accuracy": 0.65}
    assert verdict(test, baseline, {}, test_examples=10_000) == [
        "beats the most frequent class in accuracy"
    ]
    line, _ = verdict(test, baseline, {}, test_examples=236)
    assert line.endswith("but by less than two standard errors of the accuracy (0.059)")


def test_a_card_names_no_path_and_all_numbers():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    results = {
        "recipe": "mnist",
        "steps": 1200,
        "weights_of_step": 1200,
        "global_batch_size": 32,
        "dataset": "/home/me/images",
        "preset": None,
        "notes": [
            "digits are used instead",
            "runs/one's encoder alone; the head of /home/me/bert is new: see https://a.b/c/d",
        ],
        "test": {"accuracy": 0.9},
        "baseline": {"most_frequent_accuracy": 0.1},
        "versions": {"keras": keras.__version__},
    }
    options = mnist.Options(
        dropout=0.2,
        dataset="/home/me/images",
        test_file=Path("/home/me/other/mine-images-idx3-ubyte"),
        run_dir=Path("runs/one"),
        seed=3,
    )
    more = {"metadata": {}, "described": shown(options) | {"learning_rate": 0.25}}
    card = model_card(model, results, options, **more)
    for part in (
        "# mnist: Classify small images",
        "`mnist`: 1,200 steps of 32 examples.",
        "`images`; test: `mine-images-idx3-ubyte`. Look up its licence",
        "digits are used instead",
        "\none's encoder alone; the head of bert is new: see https://a.b/c/d\n",
        "- `learning_rate`: 0.25\n",
        "`Sequential`, 9 parameters.",
        "| accuracy | 0.9000 | |\n| most_frequent_accuracy | | 0.1000 |",
        "- `seed`: 3\n",
        "- `dropout`: 0.2\n",
        'model = keras.saving.load_model("model.keras")',
    ):
        assert part in card
    assert "/home/me" not in card
    task = types.SimpleNamespace(backbone=1, count_params=lambda: 4)
    # A task that was saved without a preprocessor is a Keras model like any other.
    assert "load_model" in model_card(task, results, options, **more)
    results["weights_of_step"] = 800
    card = model_card(task, results, options, **more, preprocessor=types.SimpleNamespace())
    assert "1,200 steps of 32 examples; its weights are those of step 800.\n" in card
    assert 'keras_nlp.models.SimpleNamespace.from_preset(".")' in card


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        ("scratch", " parameters.\n"),
        ("bert_tiny_en_uncased", " parameters. Fine-tuned from `bert_tiny_en_uncased`, whose"),
        ("hf://google/bert_tiny", " parameters. Fine-tuned from `hf://google/bert_tiny`, whose"),
        ("/home/me/bert", " parameters. Fine-tuned from `bert`, whose licence applies too.\n"),
        ("runs/first/model", " parameters. Fine-tuned from `first`, whose licence"),
    ],
)
def test_a_card_names_the_preset(preset, said):
    names = ("recipe", "dataset")
    results = dict.fromkeys(names, "mnist") | {"preset": preset, "steps": 1, "notes": []}
    results["weights_of_step"] = 1
    results |= {"global_batch_size": 1, "test": {}, "baseline": {}, "versions": {}}
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    options = mnist.Options()
    assert said in model_card(model, results, options, described=shown(options), metadata={})


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (2, "of the classes 0 `c0`, 1 `c1`.\n"),
        (30, "18 `c18`, 19 `c19`, ...; all 30 are in `recipe.json`.\n"),
    ],
)
def test_a_card_names_the_classes_in_the_order_of_the_outputs(count, said):
    results = dict.fromkeys(("recipe", "dataset"), "mnist") | {"preset": None, "steps": 1}
    results |= {"weights_of_step": 1, "global_batch_size": 1, "notes": []}
    results |= {"test": {}, "baseline": {}, "versions": {}}
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(count)])
    metadata = {"classes": [f"c{number}" for number in range(count)]}
    card = model_card(model, results, mnist.Options(), {}, metadata)
    assert said in card and "\nImages of shape (batch, 28, 28, 1), float32 in [0, 1]" in card
    named = {"classes": np.array(metadata["classes"])}
    assert said in model_card(model, results, mnist.Options(), {}, named)
    card = model_card(model, results, SharedOptions(), {}, {"classes": count})
    assert "## Inputs and outputs\n\nThose that `model.summary()` shows.\n" in card


def test_a_model_that_was_not_trained_gets_no_advice():
    lines = verdict({"cross_entropy": 7.0, "accuracy": 0.3}, BASELINE, {}, steps=0)
    assert lines[-1] == "does not beat the unigram model in cross_entropy"


@pytest.mark.parametrize(("steps", "advice"), [(2, "2 steps are few: try"), (500, "try more data")])
def test_a_run_of_few_steps_is_told_so(steps, advice):
    lines = verdict({"accuracy": 0.1}, {"accuracy": 0.5}, {"val_loss": [2.0, 1.0]}, steps)
    assert lines[-1].startswith(advice)
