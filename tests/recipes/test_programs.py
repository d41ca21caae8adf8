"""Each program as a person meets it: what it says of itself, and how it is started."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.processes import ENVIRONMENT, ROOT
from training.command_line import programs

RECIPES = sorted(programs())
MODULES = ["recipes", *(f"recipes.{name}" for name in RECIPES)]
MODULES += ["launch", "launch.doctor"]
HEAVY = {"tensorflow", "keras", "keras_nlp", "keras_hub"}


def call(*words, cwd=ROOT, **environ):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | ENVIRONMENT | environ,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def imported(ended) -> set[str]:
    """Returns the packages that a process with `-X importtime` imported."""
    lines = [line for line in ended.stderr.splitlines() if line.startswith("import time:")]
    assert len(lines) > 50
    return {line.split("|")[-1].strip().split(".")[0] for line in lines}


@pytest.mark.parametrize("module", MODULES)
def test_help_imports_no_tensorflow(module):
    ended = call("-X", "importtime", "-m", module, "--help")
    assert ended.returncode == 0
    assert ended.stdout.startswith(f"usage: python -m {module}")
    assert not imported(ended) & HEAVY
    assert "\x1b" not in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 100


def test_version_imports_no_tensorflow():
    ended = call("-X", "importtime", "-m", "recipes.mnist", "--version")
    assert ended.returncode == 0 and not imported(ended) & HEAVY
    assert ended.stdout.startswith("keras-recipes ") and "tensorflow 2." in ended.stdout


def test_a_line_that_does_not_parse_is_answered_before_tensorflow():
    ended = call("-X", "importtime", "-m", "recipes.mnist", "--epochs", "three")
    assert ended.returncode == 2 and "--epochs" in ended.stderr
    assert not imported(ended) & HEAVY


def test_the_list_names_every_program_in_a_line():
    ended = call("-m", "recipes")
    for name in RECIPES:
        lines = [
            line for line in ended.stdout.splitlines() if line.split()[:1] == [f"recipes.{name}"]
        ]
        assert len(lines) == 1 and len(lines[0].split()) > 3
    assert "launch.doctor" in ended.stdout


def test_an_option_that_the_list_does_not_have():
    ended = call("-m", "recipes.__main__", "--zzz")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].endswith("error: unrecognized arguments: --zzz")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("bert_mlm", "--epochs", "3"), "recipes.bert_mlm --epochs 3"),
        (("bert-mlm", "--help"), "recipes.bert_mlm --help"),
        (("recipes/mnist.py", "--dataset", "a b"), "recipes.mnist --dataset 'a b'"),
        (("recipes.causal_llm",), "recipes.causal_lm"),
        (("launch.doctor",), "launch.doctor"),
        (("zzz",), None),
    ],
)
def test_a_name_after_the_package_is_answered_by_the_command(words, command):
    ended = call("-m", "recipes", *words)
    hint = f"a program is started by its module: python -m {command}"
    expected = hint if command else "no such program; python -m recipes lists them"
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.splitlines()[-1] == f"python -m recipes: error: {words[0]}: {expected}"


@pytest.mark.long  # the only one here that imports TensorFlow in a process of its own
def test_a_recipe_by_its_path(tmp_path):
    """Trains two steps, from another folder."""
    options = "--dataset digits --max-steps 2 --strategy none --quiet --run-dir run"
    ended = call(ROOT / "recipes" / "mnist.py", *options.split(), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["recipe"], results["steps"]) == ("mnist", 2)
