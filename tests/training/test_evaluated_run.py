"""Tests the evaluation of a finished run by the `main` of the tiny recipe."""

import dataclasses
import inspect
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from data import arrays
from distribution.keras_compat import patches
from tests.support import tiny_recipe
from training import evaluated_run
from training.errors import OptionsError, RunError
from training.evaluated_run import EvaluatedRun
from training.loaded_run import evaluate, load_run, same_outputs
from training.options import EvaluationRequest, HeldOutOptions
from training.run import Run


def loaded(folder):
    return load_run(folder, trust_module=tiny_recipe.__name__)


@pytest.mark.parametrize("name", ["fact", "note", "plan", "prepare", "finish"])
def test_a_recipe_finds_the_arguments_of_the_training(name):
    arguments = inspect.signature(getattr(EvaluatedRun, name)).parameters
    assert arguments == inspect.signature(getattr(Run, name)).parameters


class TestResults:
    @pytest.mark.parametrize("more", [dict(run_dir="mine"), dict(examples=3), dict(mine=print)])
    def test_further_values_that_cannot_be_among_them(self, finished, monkeypatch, more):
        stock = EvaluatedRun.finish
        monkeypatch.setattr(
            EvaluatedRun, "finish", lambda self, model, **named: stock(self, model, **named, **more)
        )
        with pytest.raises(RunError, match=rf"{list(more)[0]}=...\): "):
            evaluate(loaded(finished), dataset=None, batch_size=8)

    def test_metrics_are_numbers(self, finished, monkeypatch):
        stock = EvaluatedRun.finish

        def finish(self, model, test, baseline):
            test = {name: np.float32(value) for name, value in test.items()}
            return stock(self, model, test=test, baseline=None)

        monkeypatch.setattr(EvaluatedRun, "finish", finish)
        found = evaluate(loaded(finished), dataset=None, batch_size=8)
        assert {type(value) for value in found["test"].values()} == {float}
        assert found["baseline"] == {}


class Batches(keras.utils.PyDataset):
    """Batches of seven examples."""

    def __init__(self, x, y):
        super().__init__(workers=2)
        self.x, self.y = x, y

    def __len__(self):
        return -(-len(self.y) // 7)

    def __getitem__(self, index):
        part = slice(7 * index, 7 * index + 7)
        return self.x[part], self.y[part]


def take_weights(model, trained, test):
    """Prepares a model to be evaluated with the weights of another one, that of a run."""
    run = types.SimpleNamespace(
        folder="runs/one", metadata={}, resolved={}, load_model=lambda: trained
    )
    strategy, request = tf.distribute.get_strategy(), EvaluationRequest(run)
    evaluated = EvaluatedRun("tiny_recipe", tiny_recipe.Options(), strategy, request)
    with patches.patch_keras_for(strategy):
        evaluated.prepare(model, None, validation=None, test=test)
        return model.evaluate(*test if isinstance(test, tuple) else [test], return_dict=True)


class WithoutLabels(keras.Model):
    """Learns to answer zeros."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(y_pred**2)


def test_fit_has_the_arguments_of_a_training(tmp_path):
    """A program may add a callback to `fit_options["callbacks"]`."""
    trained = {}

    def fit(model, data, fit_options):
        trained.update(fit_options)
        model.fit(data, **fit_options)

    tiny_recipe.main(tiny_recipe.Options(run_dir=tmp_path / "run", max_steps=1), fit=fit)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    request = EvaluationRequest(
        types.SimpleNamespace(folder="", metadata={}, resolved={}, load_model=lambda: model)
    )
    strategy = tf.distribute.get_strategy()
    evaluated = EvaluatedRun("tiny_recipe", tiny_recipe.Options(), strategy, request)
    test = arrays.evaluation_data(np.ones((2, 2)), np.ones((2, 1)), batch_size=2)
    with patches.patch_keras_for(strategy):
        found = evaluated.prepare(model, test, validation=test, test=test)
    assert found.keys() == trained.keys() and found["callbacks"] == []


class TestSplits:
    @pytest.mark.parametrize("kind", ["arrays", "PyDataset"])
    def test_of_each_kind_that_keras_evaluates(self, kind):
        """The recipe evaluates them itself; the run compares the models on an example of them."""
        model, trained = (tiny_recipe.build_model(tiny_recipe.Options()) for _ in range(2))
        for each in model, trained:
            each.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = tiny_recipe.splits()["test"]
        found = take_weights(model, trained, (x, y) if kind == "arrays" else Batches(x, y))
        assert found["loss"] == pytest.approx(trained.evaluate(x, y, verbose=0), rel=1e-5)

    def test_of_inputs_alone(self):
        model, trained = WithoutLabels(), WithoutLabels()
        x, _ = tiny_recipe.splits()["test"]
        for each in model, trained:
            each.compile()
            each(x)
        found = take_weights(model, trained, tf.data.Dataset.from_tensor_slices(x).batch(7))
        assert found["loss"] == pytest.approx(float(np.mean(np.square(trained(x)))), rel=1e-5)


class TestWeights:
    def test_of_a_layer_in_float8_are_matched_by_name(self, tmp_path):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(2)])
        for layer in model.layers:
            layer.quantize("float8")
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        names = [weight.name for weight in loaded.weights]
        assert names != [weight.name for weight in model.weights]
        for layer in model.layers:
            layer.kernel.assign(keras.ops.zeros_like(layer.kernel))
        model.compile(loss="mse")
        x = tiny_recipe.splits()["test"][0]
        take_weights(model, loaded, (x, x[:, :2]))
        assert np.any(model(x)) and np.array_equal(model(x), loaded(x))


class TestIgnoredDataset:
    def test_is_refused(self, finished):
        trained = loaded(finished)
        assert evaluate(trained, dataset=None, batch_size=8)["dataset"] == "numbers"
        with pytest.raises(OptionsError, match="--dataset nope.csv: this recipe ignores it"):
            evaluate(trained, dataset="nope.csv", batch_size=8)


def test_a_main_that_returns_nothing_is_an_error(finished, monkeypatch):
    stock = tiny_recipe.main
    monkeypatch.setattr(tiny_recipe, "main", lambda options: stock(options) and None)
    with pytest.raises(RunError, match=r"tiny_recipe.main\(\) returned None, .* return run.finish"):
        evaluate(loaded(finished), dataset=None, batch_size=32)


def a_part(model):
    """Returns the hidden layer of the tiny recipe's model, a model with the same inputs."""
    return keras.Model(model.inputs, model.layers[0].output, name="hidden")


def the_end(model):
    """Returns the last layer of the tiny recipe's model, whose inputs are others."""
    hidden = keras.Input((8,))
    return keras.Model(hidden, model.layers[-1](hidden), name="answers")


class TestEvaluationOfASavedPart:
    @pytest.fixture
    def evaluated(self, tmp_path, monkeypatch):
        def evaluated(saved_part=lambda model: model, left_out=()):
            stock = tiny_recipe.main

            def main(options):
                return stock(options, saved_part=saved_part, left_out=left_out)

            main(tiny_recipe.Options(run_dir=tmp_path / "run", epochs=1))
            monkeypatch.setattr(tiny_recipe, "main", main)
            return evaluate(
                loaded(tmp_path / "run"),
                dataset=None,
                batch_size=32,
            )

        return evaluated

    def test_weights_that_were_not_saved_are_named(self, evaluated):
        (note,) = [note for note in evaluated(a_part)["notes"] if "saves=" in note]
        assert "weights of the trained model are not in the saved one" in note
        assert "dense" in note and "kernel" in note and "bias" in note

    @pytest.mark.long
    def test_a_part_with_other_inputs_is_compared_too(self, evaluated, monkeypatch):
        compared = []

        def same(ours, theirs):
            compared.append(keras.ops.convert_to_numpy(ours))
            return same_outputs(ours, theirs)

        monkeypatch.setattr(evaluated_run, "same_outputs", same)
        evaluated(the_end)
        (answers,) = compared
        assert answers.shape == (1, 2) and answers.any()

    @pytest.mark.long
    def test_the_whole_model_has_no_note(self, evaluated):
        assert evaluated()["notes"] == []

    def test_a_recipe_without_test_data_is_refused(self, evaluated):
        with pytest.raises(RunError, match="its recipe has no test data to evaluate on"):
            evaluated(left_out=["test"])


class TestTestFile:
    def test_a_recipe_that_reads_none_refuses_one(self, finished, tmp_path):
        with pytest.raises(OptionsError, match="^--test-file: this recipe ignores it"):
            file = tmp_path / "new.csv"
            evaluate(loaded(finished), dataset=None, batch_size=32, test_file=file)

    def test_an_option_of_the_recipes_own_is_another(self, tmp_path, monkeypatch):
        @dataclasses.dataclass(kw_only=True)
        class Own(tiny_recipe.Options):
            test_file: str | None = None

        Own.__module__ = tiny_recipe.__name__
        found = []
        for kind in (Run, EvaluatedRun):

            def plan(self, stock=kind.plan, **named):
                found.append(self.test_file)
                return stock(self, **named)

            monkeypatch.setattr(kind, "plan", plan)
        monkeypatch.setattr(tiny_recipe, "Options", Own)
        tiny_recipe.main(Own(run_dir=tmp_path / "run", max_steps=1, test_file="mine.csv"))
        for file in (tmp_path / "new.csv", None):
            evaluate(loaded(tmp_path / "run"), dataset=None, batch_size=32, test_file=file)
        assert found == [None, tmp_path / "new.csv", None]


class TestHeldOutFiles:
    @pytest.fixture
    def recipe(self, monkeypatch):
        """The tiny recipe with the options, which reads them if `reads` is set."""

        @dataclasses.dataclass(kw_only=True)
        class Own(tiny_recipe.Options, HeldOutOptions):
            pass

        Own.__module__ = tiny_recipe.__name__
        tiny_recipe.reads, found = True, []
        for kind in (Run, EvaluatedRun):

            def plan(self, stock=kind.plan, **named):
                if tiny_recipe.reads:
                    found.append(self.held_out)
                return stock(self, **named)

            monkeypatch.setattr(kind, "plan", plan)
        monkeypatch.setattr(tiny_recipe, "Options", Own)
        yield Own, found
        del tiny_recipe.reads

    def test_of_its_own_dataset_a_run_keeps_them(self, recipe, tmp_path):
        kind, found = recipe
        (tmp_path / "mine.csv").touch()
        given = dict(validation_file=tmp_path / "mine.csv", test_file=str(tmp_path / "mine.csv"))
        tiny_recipe.main(kind(run_dir=tmp_path / "run", max_steps=1, **given))
        for dataset in (None, "numbers", "auto"):
            results = evaluate(loaded(tmp_path / "run"), dataset=dataset, batch_size=32)
            assert results.get("test_file") == (
                None if dataset == "auto" else str(given["test_file"])
            )
        both = {"valid": tmp_path / "mine.csv", "test": tmp_path / "mine.csv"}
        assert found == [both, both, both, {}]

    def test_only_an_evaluation_of_another_file_does_without_them(self, recipe, tmp_path):
        kind, _ = recipe
        (tmp_path / "mine.csv").touch()
        run = tmp_path / "run"
        tiny_recipe.main(kind(run_dir=run, max_steps=1, validation_file=tmp_path / "mine.csv"))
        (tmp_path / "mine.csv").unlink()
        with pytest.raises(OptionsError, match="^--validation-file .*: no such file; the run read"):
            evaluate(loaded(run), dataset=None, batch_size=32)
        with pytest.raises(OptionsError, match="^--test-file: this recipe ignores it"):
            evaluate(loaded(run), dataset=None, batch_size=32, test_file=tmp_path / "new.csv")

    @pytest.mark.parametrize("name", ["validation_file", "test_file"])
    def test_a_recipe_that_reads_none_refuses_them(self, recipe, tmp_path, name):
        kind, _ = recipe
        tiny_recipe.reads = False
        (tmp_path / "mine.csv").touch()
        options = kind(run_dir=tmp_path / "run", **{name: tmp_path / "mine.csv"})
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(OptionsError, match=f"^{flag}: this recipe ignores it; .* run.held_out"):
            tiny_recipe.main(options)
        tiny_recipe.main(kind(run_dir=tmp_path / "other", max_steps=1))

    def test_a_file_that_does_not_exist_is_named_with_its_option(self, recipe, tmp_path):
        kind, _ = recipe
        options = kind(run_dir=tmp_path / "run", validation_file="no-such.csv", test_file=tmp_path)
        with pytest.raises(OptionsError) as refused:
            tiny_recipe.main(options)
        assert str(refused.value).splitlines() == [
            "--validation-file no-such.csv: no such file",
            f"--test-file {tmp_path}: not a file",
        ]
        assert not (tmp_path / "run").exists()
