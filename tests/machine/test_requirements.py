"""The packages that pip installs where TensorFlow is installed already."""

import subprocess
import sys

import pytest

from machine import requirements
from tests.support.launched import ROOT

WANTED = ["keras==3.2.1", "tensorflow==2.21.0", "tensorflow-text==2.21.1", "numpy>=2.0"]


@pytest.mark.parametrize(
    ("there", "gpu", "expected"),
    [
        # A TensorFlow that fits stays, with what belongs to it.
        (
            {"tensorflow": "2.20.0", "tensorflow-text": "2.20.1", "numpy": "2.1.3"},
            True,
            ["keras==3.2.1"],
        ),
        (
            {"tensorflow": "2.20.0"},
            False,
            ["keras==3.2.1", "tensorflow-text==2.20.*", "numpy>=2.0"],
        ),
        (
            {"keras": "3.2.1", "tensorflow": "2.15.0", "tensorflow-text": "2.15.0", "numpy": "2.0"},
            True,
            ["tensorflow[and-cuda]==2.21.0", "tensorflow-text==2.21.1"],
        ),
        ({}, False, WANTED),
    ],
)
def test_missing(there, gpu, expected, monkeypatch):
    monkeypatch.setattr(requirements, "project", lambda: {"dependencies": WANTED})
    assert requirements.missing(there.get, gpu=gpu) == expected


def test_an_installed_package_is_described_by_its_metadata(tmp_path, monkeypatch):
    """Without `-e` there is no pyproject.toml beside it."""
    folder = tmp_path / "keras_recipes-9.9.dist-info"
    folder.mkdir()
    lines = ["Name: keras-recipes", "Version: 9.9", "Requires-Dist: keras==3.2.1"]
    lines += ['Requires-Dist: onnx>=1.20; extra == "export"']
    (folder / "METADATA").write_text("\n".join(lines))
    assert requirements.project()["name"] == requirements.NAME
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(requirements, "__file__", str(tmp_path / "machine" / "requirements.py"))
    expected = {"name": "keras-recipes", "version": "9.9", "dependencies": ["keras==3.2.1"]}
    assert requirements.project() == expected


def test_here_nothing_is_missing():
    words = [sys.executable, "-m", "machine.requirements"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
