"""Tests the evaluation of a finished run by the `main` of the tiny recipe."""

import dataclasses
import inspect

import keras
import pytest

from tests.support import tiny_recipe
from training import evaluated_run
from training.errors import OptionsError, RunError
from training.evaluated_run import EvaluatedRun
from training.loaded_run import evaluate, load_run, same_outputs
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


class TestIgnoredDataset:
    def test_is_refused(self, finished):
        trained = loaded(finished)
        assert evaluate(trained, dataset=None, batch_size=8)["dataset"] == "numbers"
        with pytest.raises(OptionsError, match="--dataset nope.csv: this recipe ignores it"):
            evaluate(trained, dataset="nope.csv", batch_size=8)


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
