"""What is logged and shown of a run changes nothing of what is trained."""

import importlib

import pytest

from callbacks.predictions import Predictions
from callbacks.tensorboard import TensorBoard
from distribution.global_batch import _ReduceFirst
from tests.support.processes import events
from tests.support.strategy_run import RUNS, data_options, write_data

SHOWN = {
    "bert": "filled_masks/sentence_1",
    "mnist": "confusion_matrix",
    "dna": "predicted_against_true",
    "text": "sentences",
}


@pytest.fixture
def unseen(monkeypatch):
    """Turns off, for the runs after it, all that only a person looks at."""

    def off():
        for kind, name in (
            (Predictions, "on_epoch_end"),
            (TensorBoard, "on_record"),
            (_ReduceFirst, "_keep_norm"),
        ):
            monkeypatch.setattr(kind, name, lambda *_, **__: None)

    return off


def tags(folder) -> set[str]:
    return {tag for tag, _, _ in events(folder)}


def test_weights_are_identical_without_norms_samples_and_charts(
    unseen, tiny_run, run_bert, tmp_path
):
    """The tiny run has dropout: a random number that is drawn for a sample would be seen."""
    assert tiny_run.options.dropout > 0
    assert {SHOWN["bert"], "optimizer/gradient_norm"} <= tags(tiny_run.folder)
    unseen()
    run = run_bert(tmp_path / "run")
    assert not {SHOWN["bert"], "optimizer/gradient_norm"} & tags(run.folder)
    assert run.results["weights_sha256"] == tiny_run.results["weights_sha256"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["mnist", "dna", "text"])
def test_weights_are_identical_in_the_other_recipes(name, unseen, tmp_path):
    module, options = RUNS[name]
    write_data(tmp_path)
    recipe = importlib.import_module(f"recipes.{module}")
    found = []
    for folder in ("seen", "unseen"):
        if folder == "unseen":
            unseen()
        extra = dict(run_dir=tmp_path / folder, cache_dir=tmp_path / "cache", dropout=0.1)
        given = options | extra | data_options(module, tmp_path)
        found.append(recipe.main(recipe.Options(**given))["weights_sha256"])
        assert (SHOWN[name] in tags(tmp_path / folder)) == (folder == "seen")
    assert found[0] == found[1]
