"""The recipe of docs/write_a_recipe.md, taken out of the page and run as its reader would."""

import json
import re

import pytest

from tests.support import processes

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
runpy.run_module("recipes.tumours", run_name="__main__", alter_sys=True)
"""
EXACT = "--precision float64 --lr-scaling none --global-batch-size 16 --epochs 2 --jit off".split()


@pytest.fixture(scope="module")
def tumours(tmp_path_factory):
    """Runs the page's recipe with these options in a folder; returns the folder."""
    page = (processes.ROOT / "docs" / "write_a_recipe.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    assert len(code.splitlines()) <= 75
    package = tmp_path_factory.mktemp("package")
    (package / "tumours.py").write_text(code)
    script = package / "script.py"
    script.write_text(RUN)

    def run(folder, *options, kill="-", status=0):
        words = (str(package), kill, *options, "--run-dir", str(folder))
        said = processes.run_script(str(script), *words, status=status)
        return folder, said

    return run


@pytest.fixture(scope="module")
def plain(tumours, tmp_path_factory):
    return tumours(tmp_path_factory.mktemp("plain") / "run", *EXACT)


def test_it_learns_and_shows_up(plain):
    folder, said = plain
    results = json.loads((folder / "results.json").read_text())
    assert results["test"]["accuracy"] > results["baseline"]["most_frequent_accuracy"]
    assert results["recipe"] == "tumours" and results["steps"] == 50
    tags = {tag for _, tag, _, _ in processes.events(folder)}
    assert {"1_loss/loss", "2_quality/accuracy", "3_optimizer/learning_rate"} <= tags
    assert "model" in said


def test_two_replicas_are_equal(plain, tumours, tmp_path):
    folder, _ = tumours(tmp_path / "two", *EXACT, "--strategy", "mirrored", "--replicas", "2")
    processes.assert_equal_tensors(plain[0], folder)


def test_killed_and_resumed_it_is_identical(plain, tumours, tmp_path):
    options = [*EXACT, "--checkpoint-every", "7"]
    folder, _ = tumours(tmp_path / "killed", *options, kill="33", status=-9)
    _, said = tumours(folder, *options)
    assert "resumes at step 28" in said
    ours, theirs = (json.loads((f / "results.json").read_text()) for f in (plain[0], folder))
    for name in ("weights_sha256", "history", "test", "steps"):
        assert ours[name] == theirs[name]
