"""The card in `model/`, and that the model loads without this package."""

import json
import os
import re
import subprocess
import sys

import pytest

from data import files

NAMES = ("bert", "text", "mnist", "dna")

ALL_IN_TURN = """
import contextlib, io, os, sys
for folder in sys.argv[1:]:
    os.chdir(folder)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(open(os.path.join(os.path.dirname(folder), "snippet.py")).read(), {})
    print(next(line for line in said.getvalue().splitlines() if "Total params" in line))
ours = {"recipes", "models", "training", "callbacks", "distribution", "data", "exports"}
assert not ours & set(sys.modules), ours & set(sys.modules)
"""


def python_of(card):
    """The Python of a card's last section."""
    return re.findall(r"```python\n(.*?)```", card, re.S)[-1]


@pytest.mark.parametrize("name", NAMES)
def test_the_card_says_what_is_known(runs, name):
    folder = runs[name] / "model"
    card, results = (
        (folder / "README.md").read_text(),
        json.loads((runs[name] / "results.json").read_text()),
    )
    assert files.damage(folder, ["README.md"]) is None
    for metric, value in (results["test"] | results["baseline"]).items():
        assert f"| {metric} |" in card and f"{value:.4f}" in card
    for section in ("Data", "Model", "Test", "Options", "Limits", "How to load it"):
        assert card.count(f"## {section}\n") == 1
    assert "Look up its licence" in card and "- `max_steps`: 3" in card
    assert "parameters" in card and str(results["versions"]["keras"]) in card
    assert str(runs[name].parent) not in card  # it is handed on: no paths of this machine


@pytest.mark.long
def test_the_cards_python_loads_each_model_without_this_package(runs, tmp_path):
    """One process for all four, elsewhere: importing Keras takes longest."""
    folders = []
    for name in NAMES:
        folder = tmp_path / name / "model"
        folder.parent.mkdir()
        os.symlink(runs[name] / "model", folder)
        card = (folder / "README.md").read_text()
        (folder.parent / "snippet.py").write_text(python_of(card))
        folders.append(str(folder))
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KERAS_BACKEND")}
    script = tmp_path / "all.py"
    script.write_text(ALL_IN_TURN)
    done = subprocess.run(
        [sys.executable, "-P", str(script), *folders],
        cwd="/",
        env=environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("params") == len(NAMES)
