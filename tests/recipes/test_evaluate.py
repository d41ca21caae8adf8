import json
import shutil

import pytest

from recipes import evaluate
from training.errors import RunError


@pytest.fixture
def other_text(tmp_path):
    """The tiny text with its lines in another order."""
    from tests.support.strategy_run import write_text

    path = tmp_path / "other.txt"
    write_text(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.replace("loss", "mean") for line in lines[::-1]) + "\n")
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

    def test_the_valid_split_gives_the_last_validation(self, tiny_run):
        found = run(tiny_run.folder, split="valid", batch_size=8)
        assert found["cross_entropy"] == tiny_run.results["history"]["val_cross_entropy"][-1]
        assert found["accuracy"] == tiny_run.results["history"]["val_accuracy"][-1]

    def test_the_batch_size_changes_rounding_alone(self, tiny_run):
        found = run(tiny_run.folder)
        for name, value in tiny_run.results["test"].items():
            assert found[name] == pytest.approx(value, rel=1e-5)


class TestAnotherText:
    def test_all_takes_every_line(self, tiny_run, other_text, command_line):
        arguments = [tiny_run.folder, "--dataset", other_text, "--split", "all", "--json"]
        status, printed, _ = command_line(evaluate, *arguments)
        assert status == 0
        found = json.loads(printed)  # one JSON object and nothing else
        assert found["dataset"] == str(other_text)
        assert found["baseline_of"] == "the run's training text"
        parts = [
            run(tiny_run.folder, dataset=str(other_text), split=split)["sequences"]
            for split in ("train", "valid", "test")
        ]
        # Each split loses the rest of its last sequence.
        assert sum(parts) <= found["sequences"] <= sum(parts) + 3

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
        (tmp_path / "options.json").write_text(json.dumps({"recipe": "mnist", "options": {}}))
        with pytest.raises(RunError, match="a run of mnist; this evaluates runs of bert_mlm"):
            run(tmp_path)

    def test_no_such_text(self, tiny_run, command_line, tmp_path):
        status, _, errors = command_line(
            evaluate, tiny_run.folder, "--dataset", tmp_path / "none.txt"
        )
        assert status == 2 and errors.count("\n") == 1 and "none.txt" in errors

    def test_a_batch_of_nothing(self, tiny_run, command_line):
        status, _, errors = command_line(evaluate, tiny_run.folder, "--batch-size", "0")
        assert status == 2 and errors == "evaluate: --batch-size 0: must be more than 0\n"
