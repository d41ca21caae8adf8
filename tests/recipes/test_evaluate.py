import itertools
import json
import re
import shutil

import keras_nlp
import numpy as np
import pytest

from data import text, word_pieces
from recipes import evaluate
from training.errors import RunError


@pytest.fixture
def other_text(tmp_path):
    """The tiny text with its lines in another order, and one word instead of several."""
    from tests.support.strategy_run import write_text

    path = tmp_path / "other.txt"
    write_text(path)
    lines = path.read_text().splitlines()
    lines = [re.sub("loss|replicas|batches|tokens|step", "mean", line) for line in lines[::-1]]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(folder, **changes):
    return evaluate.main(evaluate.Options(run_dir=folder, **changes))


class TestItsOwnText:
    def test_the_test_metrics_are_those_of_the_run(self, tiny_run, capsys):
        found = run(tiny_run.folder, batch_size=8)
        for name, value in tiny_run.results["test"].items():
            assert found[name] == value, name
        assert found["baseline"] == tiny_run.results["baseline"]
        assert found["baseline_of"] == "the run's training text"
        printed = capsys.readouterr().out
        assert f"cross-entropy  {found['cross_entropy']:.4f}\n" in printed
        assert f"{found['sequences']} sequences of 16 tokens" in printed

    def test_the_sequences_are_those_that_the_run_has_cut(self, tiny_run, monkeypatch):
        """So a text beyond memory is evaluated as it was trained, and not tokenised again."""
        monkeypatch.setattr(word_pieces, "tokenize_once", lambda *_, **__: pytest.fail("again"))
        found = run(tiny_run.folder, batch_size=8)
        assert found["cross_entropy"] == tiny_run.results["test"]["cross_entropy"]

    def test_the_valid_split_gives_the_last_validation(self, tiny_run):
        found = run(tiny_run.folder, split="valid", batch_size=8)
        assert found["cross_entropy"] == tiny_run.results["history"]["val_cross_entropy"][-1]
        assert found["accuracy"] == tiny_run.results["history"]["val_accuracy"][-1]

    def test_the_batch_size_changes_rounding_alone(self, tiny_run):
        found = run(tiny_run.folder)
        for name, value in tiny_run.results["test"].items():
            assert found[name] == pytest.approx(value, rel=1e-5)


def unigram_cross_entropy(run, counted_text, counted_split, scored_text, scored_split):
    """That of an add-0.1 unigram model, counted and scored by hand."""
    tokenizer = keras_nlp.models.BertTokenizer.from_preset(str(run.folder / "model"))
    special = [tokenizer.token_to_id(t) for t in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")]

    def tokens(path, split, most=None):
        splits = text.load_text(str(path), run.folder).splits
        lines = splits[split] if split != "all" else itertools.chain(*splits.values())
        stream = []
        for line in lines:
            for number, part in enumerate(line.split("<unk>")):
                stream += [special[1]] * bool(number) + list(np.asarray(tokenizer(part)))
            stream.append(tokenizer.sep_token_id)
        stream = np.array(stream)
        return stream if most is None else stream[: 15 * most]

    train = tokens(counted_text, counted_split, run.options.max_examples)
    scored = tokens(scored_text, scored_split)
    counts = np.bincount(train, minlength=tokenizer.vocabulary_size()) + 0.1
    counts[special] = 0
    kept = scored[~np.isin(scored, special)]
    return -np.log(counts[kept] / counts.sum()).mean()


class TestAnotherText:
    def test_every_line_is_taken_unless_a_split_is_named(self, tiny_run, other_text, command_line):
        arguments = [tiny_run.folder, "--dataset", other_text, "--json"]
        status, printed, _ = command_line(evaluate, *arguments)
        assert status == 0
        found = json.loads(printed)  # one JSON object and nothing else
        assert found["dataset"] == str(other_text) and found["split"] == "all"
        assert found["baseline_of"] == "the run's training text"
        parts = [
            run(tiny_run.folder, dataset=str(other_text), split=split)["sequences"]
            for split in ("train", "valid", "test")
        ]
        # Each split loses the rest of its last sequence.
        assert sum(parts) <= found["sequences"] <= sum(parts) + 3

    def test_the_runs_own_dataset_by_name_is_no_other_text(self, tiny_run):
        found = run(tiny_run.folder, dataset=tiny_run.results["dataset"])
        assert found["split"] == "test"

    def test_the_unigram_model_has_counted_the_runs_training_text(self, tiny_run, other_text):
        own = tiny_run.options.dataset
        found = run(tiny_run.folder, dataset=str(other_text))["baseline"]["unigram_cross_entropy"]
        assert found == pytest.approx(
            unigram_cross_entropy(tiny_run, own, "train", other_text, "all"), rel=0.01
        )
        # Its own training text would have given another number.
        other = unigram_cross_entropy(tiny_run, other_text, "train", other_text, "all")
        assert found > other * 1.1

    def test_without_the_training_text_the_baseline_is_the_texts_own(
        self, tiny_run, other_text, tmp_path
    ):
        folder = tmp_path / "run"
        shutil.copytree(tiny_run.folder, folder)
        there = json.loads((folder / "options.json").read_text())
        there["resolved"]["dataset"] = str(tmp_path / "gone.txt")
        (folder / "options.json").write_text(json.dumps(there))
        found = run(folder, dataset=str(other_text))
        assert found["baseline_of"] == "this text's train split"
        expected = unigram_cross_entropy(tiny_run, other_text, "train", other_text, "all")
        assert found["baseline"]["unigram_cross_entropy"] == pytest.approx(expected, rel=0.01)


class TestFaults:
    def test_no_such_run(self, command_line, tmp_path):
        status, _, errors = command_line(evaluate, tmp_path)
        assert status == 2
        assert errors.count("\n") == 1 and "holds no run" in errors

    def test_a_run_that_is_not_finished(self, tiny_run, tmp_path):
        shutil.copy(tiny_run.folder / "options.json", tmp_path)
        with pytest.raises(RunError, match="not finished"):
            run(tmp_path)

    def test_a_run_of_another_recipe(self, tmp_path):
        there = json.dumps({"recipe": "another", "options": {}, "resolved": {}})
        (tmp_path / "options.json").write_text(there)
        with pytest.raises(RunError, match="a run of another; one of bert_mlm or .* is expected"):
            run(tmp_path)

    def test_no_such_text(self, tiny_run, command_line, tmp_path):
        status, _, errors = command_line(
            evaluate, tiny_run.folder, "--dataset", tmp_path / "none.txt"
        )
        assert status == 2 and errors.count("\n") == 1 and "none.txt" in errors

    def test_a_batch_of_nothing(self, tiny_run, command_line):
        status, _, errors = command_line(evaluate, tiny_run.folder, "--batch-size", "0")
        assert status == 2 and errors == "evaluate: --batch-size 0: must be at least 1\n"

    def test_a_batch_that_no_memory_holds(self, tiny_run, command_line):
        status, _, errors = command_line(evaluate, tiny_run.folder, "--batch-size", "99999999")
        assert status == 2
        assert errors == "evaluate: --batch-size 99999999: must be at most 1,024\n"
