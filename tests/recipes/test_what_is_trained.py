"""Checks that each recipe's options reach the data, the schedule and the model of `fit()`."""

import dataclasses
import importlib
import itertools
import shutil
import types

import keras
import numpy as np
import pytest

from distribution import strategies
from distribution.keras_compat import inspection
from models.chunked_head import ChunkedHead
from tests.conftest import TINY_RUN
from tests.support import strategy_run
from training import run as run_module

SMALL = {
    "bert_mlm": {k: v for k, v in TINY_RUN.items() if k != "global_batch_size"} | {"epochs": 5},
    "causal_lm": dict(
        vocabulary_size=280, num_layers=1, hidden_dim=16, sequence_length=16, epochs=5
    )
    | dict(warmup_steps=2),
    "mnist": dict(epochs=5),
    "dna_melting": dict(num_layers=1, hidden_dim=8, epochs=5, warmup_steps=2),
    "text_classification": dict(
        vocabulary_size=120, hidden_dim=16, sequence_length=16, epochs=5, warmup_steps=2
    ),
}


class ReachedFit(Exception):
    """`fit()` was called; nothing is trained."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    strategy_run.write_data(folder)
    return folder


# The recipe of `make test`; the others in `make check-long`.
QUICK = ("mnist",)


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in SMALL]
)
def at_fit(request, data, tmp_path, monkeypatch):
    """Runs a recipe up to `fit()`; returns model, training batches, and fit's other arguments."""
    recipe = importlib.import_module(f"recipes.{request.param}")
    stock = recipe.build_model
    folders = (tmp_path / f"run-{number}" for number in itertools.count())

    def run(**changes):
        reached = types.SimpleNamespace(recipe=request.param)

        def build_model(*arguments, **named):
            reached.model = stock(*arguments, **named)
            reached.built_from = (*arguments, *named.values())

            def fit(train_data, **arguments):
                reached.train_data, reached.arguments = train_data, arguments
                raise ReachedFit

            reached.model.fit = fit
            return reached.model

        def fit_in_chunks(self, train_data, **arguments):
            reached.model.fit(train_data, **arguments)

        stock_prepare = run_module.Run.prepare

        def prepare(self, model, train_data, **named):
            if not hasattr(reached, "splits"):  # a later call goes through this patch, too
                reached.splits = {"valid": named["validation"], "test": named["test"]}
            return stock_prepare(self, model, train_data, **named)

        monkeypatch.setattr(run_module.Run, "prepare", prepare)
        monkeypatch.setattr(ChunkedHead, "fit", fit_in_chunks)
        monkeypatch.setattr(recipe, "build_model", build_model)
        options = SMALL[request.param] | strategy_run.data_options(request.param, data)
        options |= dict(strategy="none", quiet=True, run_dir=next(folders)) | changes
        with pytest.raises(ReachedFit):
            recipe.main(recipe.Options(**options))
        return reached

    run.recipe = request.param
    return run


def predictions(model, x, training):
    return keras.ops.convert_to_numpy(keras.tree.flatten(model(x, training=training))[0])


def first_batch(dataset):
    x, y, _ = keras.utils.unpack_x_y_sample_weight(next(iter(dataset)))
    return x, y, len(y)


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ("linear", 4),
        pytest.param("sqrt", 2, marks=pytest.mark.long),
        pytest.param("none", 1, marks=pytest.mark.long),
    ],
)
def test_replicas_multiply_the_batch_and_the_rate(scaling, factor, at_fit, monkeypatch):
    monkeypatch.setattr(strategies, "replicas", lambda strategy: 4)
    options = dict(batch_size_per_replica=2, base_learning_rate=1e-3, lr_scaling=scaling)
    warms_up = at_fit.recipe != "mnist"
    found = at_fit(**options, **({"warmup_steps": 3} if warms_up else {}))
    assert first_batch(found.train_data)[2] == 8
    assert first_batch(found.arguments["validation_data"])[2] == 8
    schedule = inspection.learning_rate_of(found.model.optimizer)
    steps = found.arguments["steps_per_epoch"] * found.arguments["epochs"]
    rates = keras.ops.convert_to_numpy(schedule(np.arange(steps + 1)))
    assert max(rates) == pytest.approx(factor * 1e-3)
    peaks = np.flatnonzero(np.isclose(rates, max(rates), rtol=1e-6))
    assert peaks.tolist() == ([2, 3] if warms_up else [0])
    assert rates[-1] == pytest.approx(0, abs=1e-9) and rates[-2] > 0, "zero where the run ends"


def test_gradients_are_clipped(at_fit):
    """Adam's first moment after one step is a tenth of the gradient that it was given."""
    adam = dict(optimizer="adamw") if at_fit.recipe == "causal_lm" else {}
    for clip_norm in (0.5, None):
        model = at_fit(clip_norm=clip_norm, global_batch_size=8, **adam).model
        optimizer, variables = model.optimizer, model.trainable_variables
        kept = 1 - optimizer.beta_1
        gradients = [keras.ops.ones_like(v) for v in variables]
        optimizer.apply(gradients, variables)
        moments = [v for v in optimizer.variables if v.path.endswith("_momentum")]
        assert len(moments) == len(variables)
        norm = np.sqrt(sum(np.sum(keras.ops.convert_to_numpy(v) ** 2) for v in moments))
        size = sum(int(np.prod(v.shape)) for v in variables)
        expected = clip_norm if clip_norm is not None else np.sqrt(size)
        assert norm == pytest.approx(kept * expected, rel=1e-3)


def test_dropout_drops(at_fit):
    for rate in (0.0, 0.4):
        found = at_fit(dropout=rate, global_batch_size=8)
        x, y, _ = first_batch(found.train_data)
        once, again = (predictions(found.model, x, training=True) for _ in range(2))
        plain = predictions(found.model, x, training=False)
        if found.recipe == "dna_melting":
            # A column, as the answers are: (batch,) against it would become (batch, batch).
            assert y.shape == plain.shape == (8, 1)
        if rate:
            assert np.abs(once - again).max() > 1e-4 and np.abs(once - plain).max() > 1e-4
        else:
            np.testing.assert_allclose(once, plain, atol=1e-5)
            np.testing.assert_allclose(once, again, atol=1e-5)


def rows(batch):
    """The numbers of a batch, input after input."""
    return [np.asarray(value) for value in keras.tree.flatten(batch)]


def test_a_resumed_run_begins_at_its_next_batch(at_fit, monkeypatch):
    batches = iter(at_fit(global_batch_size=8).train_data)
    expected = [rows(next(batches)) for _ in range(4)][3]
    stock = run_module.make_plan
    resumed = lambda *a, **k: dataclasses.replace(stock(*a, **k), steps_done=3)  # noqa: E731
    monkeypatch.setattr(run_module, "make_plan", resumed)
    found = rows(next(iter(at_fit(global_batch_size=8).train_data)))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_each_split_is_its_own_and_a_part_of_the_run(at_fit, monkeypatch):
    """`--validate-every` gets the validation split, `--test-every` the test split.

    And a run that resumes must find the same data.
    """
    facts = {}
    stock_plan = run_module.Run.plan

    def plan(self, **named):
        facts.update(named)
        return stock_plan(self, **named)

    monkeypatch.setattr(run_module.Run, "plan", plan)
    found = at_fit(global_batch_size=8)
    splits = {"train": found.train_data, **found.splits}
    first = {
        name: np.concatenate([value.ravel() for value in rows(next(iter(data)))])
        for name, data in splits.items()
    }
    assert not np.array_equal(first["valid"], first["test"])
    assert not np.array_equal(first["train"], first["valid"])
    assert found.arguments["validation_data"] is found.splits["valid"]
    assert "dataset" in facts and facts.keys() & {"data_sha256", "text_sha256"}


def examples(dataset) -> int:
    """Counts examples, without those that pad the last batch."""
    return sum(
        int((np.reshape(keras.tree.flatten(weights)[0], (len(batch), -1)) > 0).any(1).sum())
        for *_, weights in dataset
        for batch in keras.tree.flatten(weights)[:1]
    )


def test_max_validation_examples_cuts_the_validation_split_alone(at_fit):
    """To the same examples for each seed; what is trained stays the same."""
    most = 3  # the batch is padded
    settings = dict(global_batch_size=4)
    whole = at_fit(**settings)
    cut, other_seed = (
        at_fit(max_validation_examples=most, seed=seed, **settings) for seed in (0, 7)
    )
    assert examples(cut.splits["valid"]) == most < examples(whole.splits["valid"])
    assert examples(cut.splits["test"]) == examples(whole.splits["test"]) > most
    for ours, theirs in zip(cut.splits["valid"], other_seed.splits["valid"], strict=True):
        if at_fit.recipe != "dna_melting":  # whose seed draws the molecules
            for one, another in zip(rows(ours), rows(theirs), strict=True):
                np.testing.assert_array_equal(one, another)
    for split in ("train_data", "test"):
        first = [
            rows(next(iter(found.splits.get(split) or found.train_data))) for found in (whole, cut)
        ]
        for one, another in zip(*first, strict=True):
            np.testing.assert_array_equal(one, another)


def test_max_examples_cuts_the_training_split_alone(at_fit):
    """To fewer examples than validation and test have."""
    most = 8
    whole, cut = (at_fit(max_examples=count, global_batch_size=4) for count in (None, most))
    assert cut.arguments["steps_per_epoch"] == most // 4 < whole.arguments["steps_per_epoch"]
    for split, data in cut.splits.items():
        assert examples(data) == examples(whole.splits[split]) > most, split


@pytest.mark.long
@pytest.mark.parametrize("at_fit", ["bert_mlm", "text_classification"], indirect=True)
def test_what_a_new_model_knows_is_of_the_training_split(at_fit, data, tmp_path):
    """Another validation and test split changes neither word pieces nor what is known of them."""
    known = []
    lines = (data / "text.txt").read_text().splitlines()
    for changed in (False, True):
        folder = shutil.copytree(data / "sentences", tmp_path / f"sentences-{changed}")
        text = tmp_path / f"text-{changed}"
        text.mkdir()
        other = ["the film was good and the end comes late"] * 60 if changed else lines[200:]
        for name, content in (("train", lines[:200]), ("valid", other), ("test", other)):
            (text / f"{name}.txt").write_text("\n".join(content) + "\n")
        for path in (folder / "dev.tsv", folder / "test.tsv"):
            path.write_text(
                path.read_text().replace("good", "poor") if changed else path.read_text()
            )
        found = at_fit(
            dataset=str(text if at_fit.recipe == "bert_mlm" else folder), global_batch_size=8
        )
        known.append(next(a for a in found.built_from if isinstance(a, np.ndarray)))
    np.testing.assert_array_equal(*known)


@pytest.mark.long
@pytest.mark.parametrize("at_fit", ["text_classification"], indirect=True)
def test_word_pieces_are_hidden_in_training_alone(at_fit):
    mask = 4  # of a vocabulary that begins with the special tokens
    for share in (0.0, 0.9):
        found = at_fit(token_dropout=share, global_batch_size=8)
        hidden = [
            (first_batch(data)[0]["token_ids"].numpy() == mask).any()
            for data in (found.train_data, found.arguments["validation_data"])
        ]
        assert hidden == [share > 0, False]
