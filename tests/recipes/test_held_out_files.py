"""Each recipe with `--validation-file` and `--test-file`: counted, kept, resumed and evaluated."""

import importlib
import shutil

import pytest

from recipes import evaluate
from tests.support import strategy_run
from training.loaded_run import load_run

SIZES = dict(num_layers=1, num_heads=2, hidden_dim=8)
PIECES = SIZES | dict(vocabulary_size=300, sequence_length=16)
OPTIONS = {  # and the files, in the folder of `write_data`
    "bert_mlm": (PIECES, "text.txt"),
    "causal_lm": (PIECES, "text.txt"),
    "dna_melting": (SIZES, "molecules.csv"),
    "mnist": ({}, "images/t10k-images-idx3-ubyte"),
    "seq2seq": (PIECES, "pairs.jsonl"),
    "text_classification": (PIECES, "sentences/test.tsv"),
}
# Of them `dna_melting` in `make test`, the others in `make check-long`.
QUICK = [pytest.param(r, marks=pytest.mark.long) if r != "dna_melting" else r for r in OPTIONS]


@pytest.mark.parametrize("name", QUICK)
def test_a_run_with_both_files(name, tmp_path):
    data, held_out = tmp_path / "data", tmp_path / "held_out"
    data.mkdir()
    strategy_run.write_data(data)
    shutil.copytree(data, held_out)
    sizes, file = OPTIONS[name]
    recipe = importlib.import_module(f"recipes.{name}")
    options = recipe.Options(
        **strategy_run.data_options(name, data),
        **sizes,
        validation_file=held_out / file,
        test_file=held_out / file,
        max_steps=2,
        global_batch_size=8,
        strategy="none",
        jit="off",
        quiet=True,
        cache_dir=tmp_path / "cache",
        run_dir=tmp_path / "run",
    )
    results = recipe.main(options)
    # The same file as validation and as test split, by the same weights, but with other masks in
    # bert_mlm, and the mean of two orders of strands in the test of dna_melting.
    validated = {name: values[-1] for name, values in results["history"].items()}
    for metric, value in results["test"].items():
        if f"val_{metric}" in validated and name not in ("bert_mlm", "dna_melting"):
            assert value == pytest.approx(validated[f"val_{metric}"], rel=1e-4), metric
    asked = dict(run_dir=options.run_dir, cache_dir=options.cache_dir)
    found = evaluate.main(evaluate.Options(**asked))
    assert found["test"] == pytest.approx(results["test"], rel=1e-4)
    assert found["baseline"] == pytest.approx(results["baseline"], rel=1e-9)
    assert not [note for note in found["notes"] if "not the data" in note]
    run = load_run(options.run_dir)
    if hasattr(recipe, "n_gram_log_likelihoods"):
        assert recipe.n_gram_log_likelihoods(run, ["a text"], tmp_path / "cache")
    # An evaluation of another file does without those of the run.
    shutil.rmtree(held_out)
    same = evaluate.main(evaluate.Options(**asked, test_file=data / file))
    assert same["test"] == pytest.approx(results["test"], rel=1e-4)
    assert same["baseline"] == pytest.approx(results["baseline"], rel=1e-9)
    # What it reads is the test split alone.
    assert not [name for name in same if name.startswith("valid_")]
    gone = f"{held_out / file} is gone: no valid_by_dataset"
    assert (gone in same["notes"]) == (name == "dna_melting")
