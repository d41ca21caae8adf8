"""The recipe of docs/write_a_recipe.md, taken out of the page and used as its reader would."""

import difflib
import json
import re
import shlex

import pytest
from sklearn.datasets import load_breast_cancer

from tests import soak
from tests.support import processes

PAGE = (processes.ROOT / "docs" / "write_a_recipe.md").read_text()
BEFORE, AFTER, COMPLETE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# Adds a folder to the package, as a file saved in recipes/ would be.
RUN = """
import runpy, sys
import recipes
recipes.__path__.append(sys.argv.pop(1))
kill = sys.argv.pop(1)
if kill != "-":
    import os, signal
    from callbacks.checkpoint import Checkpoint
    stock = Checkpoint.on_step_end
    def on_step_end(self, step, logs):
        stock(self, step, logs)
        if step == int(kill):
            os.kill(os.getpid(), signal.SIGKILL)
    Checkpoint.on_step_end = on_step_end
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a module with words, in whose `recipes` the page's recipe is; returns its output."""
    package = tmp_path_factory.mktemp("package")
    (package / "tumours.py").write_text(COMPLETE)
    (package / "short.py").write_text(AFTER)
    script = package / "script.py"
    script.write_text(RUN)

    def run(module, *words, kill="-", status=0):
        words = (str(package), kill, module, *map(str, words))
        return processes.run_script(str(script), *words, status=status)

    return run


@pytest.fixture(scope="module")
def said(run, tmp_path_factory):
    """The output of each of the page's commands, run in its order, by module; and their folder."""
    folder = tmp_path_factory.mktemp("runs")
    commands = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()
    found = {}
    for command in commands:
        words = shlex.split(command.replace("runs/tumours", str(folder)))
        is_ours = words[:2] == ["python", "-m"] and words[2].startswith("recipes.")
        if is_ours and words[2] != "recipes.export" and "--help" not in words:
            found.setdefault(words[2], []).append(run(*words[2:]))
    return found, folder


def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_the_page_counts_the_lines_that_differ_from_plain_keras():
    before, after = (
        [line.strip() for line in text.splitlines() if line.strip()] for text in (BEFORE, AFTER)
    )
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert f"\n{len(new)} lines differ from plain Keras" in PAGE
    assert f"{len(new) - 6} that are the run's" in PAGE


def test_the_soak_kills_the_complete_one(tmp_path):
    soak.write_page_recipe(tmp_path)
    assert (tmp_path / "tumours.py").read_text() == COMPLETE


def test_the_program_of_the_page_trains(run, tmp_path):
    """Its options are `SharedOptions` as they are, which are of another module."""
    folder = tmp_path / "short"
    run("recipes.short", "--max-steps", 5, "--run-dir", folder)
    trained = results(folder)
    assert trained["steps"] == 5 and trained["module"] == "recipes.short"
    assert "tumours: Tell benign tumours from malignant ones" in (
        folder / "model" / "README.md"
    ).read_text(encoding="utf-8")
    accuracy = f"{trained['test']['accuracy']:.4f}"
    assert accuracy in run("recipes.evaluate", folder, "--trust-module", "recipes.short")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A CSV of two tumours in scikit-learn's columns, the last one first."""
    data = load_breast_cancer()
    path = tmp_path_factory.mktemp("table") / "new.csv"
    names, rows = data.feature_names[::-1], data.data[:2, ::-1]
    lines = [",".join(map(str, line)) for line in (names, *rows.tolist())]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_its_table_has_the_inputs_in_the_order_of_the_model(table):
    names: dict = {"__name__": "tumours"}
    exec(COMPLETE, names)
    found = [[float(number) for number in text.split(",")] for text in names["read_table"](table)]
    assert found == load_breast_cancer().data[:2].tolist()


@pytest.mark.long
def test_it_answers_a_table(said, run, table):
    rows = [",".join(map(str, row)) for row in load_breast_cancer().data[:2].tolist()]
    by_file = run("recipes.predict", said[1] / "one", "--file", table)
    assert by_file == run("recipes.predict", said[1] / "one", *rows)


@pytest.mark.long
def test_it_learns_and_shows_up(said):
    folder = said[1] / "one"
    found = results(folder)
    assert found["test"]["accuracy"] > found["baseline"]["most_frequent_accuracy"]
    assert found["recipe"] == "tumours" and found["module"] == "recipes.tumours"
    tags = {tag for tag, _, _ in processes.events(folder)}
    assert {"loss/train", "accuracy/test", "optimizer/learning_rate"} <= tags


@pytest.mark.long
def test_the_two_runs_of_the_page_are_equal(said):
    one, two = said[1] / "one", said[1] / "two"
    assert (results(one)["replicas"], results(two)["replicas"]) == (1, 2)
    processes.assert_equal_tensors(one, two)


@pytest.mark.long
def test_it_is_compared(said):
    (table,) = said[0]["recipes.compare"]
    assert "one" in table and "two" in table and "accuracy" in table


@pytest.mark.long
def test_it_is_evaluated(said):
    (table,) = said[0]["recipes.evaluate"]
    accuracy = results(said[1] / "one")["test"]["accuracy"]
    assert re.search(rf"^accuracy +{accuracy:.4f}$", table, re.MULTILINE)


@pytest.mark.long
def test_it_is_queried(said):
    (answer,) = said[0]["recipes.predict"]
    assert re.search(r"^ +\d+\.\d%  (malignant|benign)$", answer, re.MULTILINE)


@pytest.mark.long
def test_it_is_exported(said, run):
    run("recipes.export", said[1] / "one", "--to", "saved_model")
    assert (said[1] / "one" / "exports" / "saved_model" / "saved_model.pb").is_file()


@pytest.mark.long
def test_killed_and_resumed_it_is_identical(said, run, tmp_path):
    options = ("--precision", "float64", "--checkpoint-every", "7", "--run-dir", tmp_path / "run")
    run("recipes.tumours", *options, kill="33", status=-9)
    assert "resumes at step 28" in run("recipes.tumours", *options)
    ours, theirs = results(said[1] / "one"), results(tmp_path / "run")
    for name in ("weights_sha256", "history", "test", "steps"):
        assert ours[name] == theirs[name]
