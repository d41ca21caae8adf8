"""The card in `model/`, and that the model loads without this package."""

import os
import re
import subprocess
import sys

import pytest

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
