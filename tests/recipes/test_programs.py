"""Each program as a person meets it: what it says of itself, and how it is started."""

import contextlib
import importlib
import json
import os
import pty
import subprocess
import sys

import pytest

from tests.support.processes import ENVIRONMENT, ROOT
from training.early_answers import programs

RECIPES = sorted(programs())
MODULES = ["recipes", *(f"recipes.{name}" for name in RECIPES)]
MODULES += ["distribution.launch", "distribution.doctor"]
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
    """What a process started with `-X importtime` has imported."""
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


@pytest.mark.parametrize("module", ["recipes", "recipes.mnist", "distribution.launch"])
def test_version_imports_no_tensorflow(module):
    ended = call("-X", "importtime", "-m", module, "--version")
    assert ended.returncode == 0 and not imported(ended) & HEAVY
    assert ended.stdout.startswith("keras-recipes ") and "tensorflow 2." in ended.stdout


def test_a_line_that_does_not_parse_is_answered_before_tensorflow():
    ended = call("-X", "importtime", "-m", "recipes.mnist", "--epochs", "three")
    assert ended.returncode == 2 and "--epochs" in ended.stderr
    assert not imported(ended) & HEAVY


@pytest.mark.parametrize("no_color", ["", "1"])
@pytest.mark.parametrize("words", [("--help",), ("--epochs", "three")], ids=lambda words: words[0])
def test_no_color_is_obeyed_on_a_terminal(words, no_color):
    ours, its = pty.openpty()
    environ = os.environ | ENVIRONMENT | {"NO_COLOR": no_color, "TERM": "xterm"}
    command = [sys.executable, "-m", "recipes.mnist", *words]
    process = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=its, stderr=its)
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # Linux says so when the other end is closed
        while more := os.read(ours, 65536):
            shown += more
    os.close(ours)
    process.wait()
    assert b"--epochs" in shown
    coloured = words[0] == "--epochs" and not no_color
    assert (b"\x1b[" in shown) == coloured


def test_the_list_names_every_program_in_a_line():
    ended = call("-m", "recipes")
    for name in RECIPES:
        lines = [line for line in ended.stdout.splitlines() if line.split()[:1] == [name]]
        assert len(lines) == 1 and len(lines[0].split()) > 3
    assert "distribution.doctor" in ended.stdout


def test_one_command_for_all():
    """`keras-recipes NAME` of pyproject.toml calls the same function."""
    ended = call("-m", "recipes", "dna-melting", "--help")
    assert ended.stdout.startswith("usage: python -m recipes dna_melting [options]")
    ended = call("-m", "recipes", "no_such_recipe")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "no_such_recipe: no such program; there are bert_mlm," in ended.stderr
    script = "import sys; from recipes.__main__ import main; sys.argv[0] = 'bin/keras-recipes'; "
    ended = call("-c", script + "main()", "mnist", "--help")
    assert ended.stdout.startswith("usage: keras-recipes mnist [options]")
    assert 'keras-recipes = "recipes.__main__:main"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["bert"], ["bert_mlm"]),
        (["mnist", "--precision", "mixed"], ["mixed_float16", "mixed_bfloat16"]),
        (["dna_melting", "--warm"], ["--warmup-steps"]),
        (["fill_mask", "--to"], ["--top"]),
    ],
    ids=lambda value: value[-1],
)
def test_completion_works_in_a_real_bash(words, offered, completion):
    line = ["keras-recipes", *words]
    script = f"""
        source {completion}
        function=$(complete -p keras-recipes | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
        COMP_WORDS=({" ".join(line)}); COMP_CWORD={len(words)}; COMP_LINE="{" ".join(line)}"
        COMP_POINT=${{#COMP_LINE}}
        $function
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    ended = subprocess.run(
        ["bash", "-c", script], env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert ended.stdout.split() == offered, ended.stderr


@pytest.fixture(scope="module")
def completion(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "keras-recipes.bash"
    ended = call("-m", "recipes", "--tyro-write-completion", "bash", path)
    assert ended.returncode == 0 and path.stat().st_size > 1000
    return path


def test_completion_of_one_module_says_whose_it_is():
    ended = call("-m", "recipes.mnist", "--tyro-print-completion", "bash")
    assert ended.returncode == 2
    assert "keras-recipes --tyro-print-completion bash" in ended.stderr


@pytest.mark.long  # the only one here that imports TensorFlow in a process of its own
def test_a_recipe_by_its_path(tmp_path):
    """Trains two steps, from another folder."""
    options = "--dataset digits --max-steps 2 --strategy none --quiet --run-dir run"
    ended = call(ROOT / "recipes" / "mnist.py", *options.split(), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["recipe"], results["steps"]) == ("mnist", 2)


def test_a_recipe_by_its_path_where_keras_has_another_backend(monkeypatch, command_line):
    import keras

    from recipes import mnist

    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    monkeypatch.setattr(mnist, "__spec__", None)
    status, _, errors = command_line(mnist, "--max-steps", "1")
    assert status == 2
    assert errors == (
        "mnist: Keras runs on jax here, TensorFlow is needed: start it as python -m recipes.mnist\n"
    )


ASKING = {
    "evaluate": (),
    "fill_mask": ("a [MASK]",),
    "classify": ("a text",),
    "predict": ("x.png",),
    "export": ("--to", "saved_model"),
    "compare": (),
}
NO_PATHS = ("x" * 300, "~nosuchuser/x", "a/" * 3000 + "b", "\udcff")


@pytest.mark.parametrize("path", NO_PATHS, ids=lambda path: ascii(path[:12]))
@pytest.mark.parametrize("name", ASKING)
def test_a_folder_that_cannot_be(name, path, command_line):
    """The folder is looked at first: no run is needed."""
    module = importlib.import_module(f"recipes.{name}")
    status, printed, errors = command_line(module, path, *ASKING[name])
    assert (status, printed) == (2, "") and errors.count("\n") == 1, errors
    assert errors.startswith(f"{name}: --run-dir") and len(errors) < 200


@pytest.mark.parametrize("path", NO_PATHS, ids=lambda path: ascii(path[:12]))
@pytest.mark.parametrize(
    ("name", "option", "end"),
    [("evaluate", "--cache-dir", ""), ("compare", "--png", ".png"), ("export", "--folder", "")],
)
def test_another_path_that_cannot_be(name, option, end, path, command_line, tmp_path):
    module = importlib.import_module(f"recipes.{name}")
    words = (*ASKING[name], option, path + end)
    status, printed, errors = command_line(module, tmp_path, *words)
    assert (status, printed) == (2, "") and errors.count("\n") == 1, errors
    assert errors.startswith(f"{name}: {option} ") and len(errors) < 200


@pytest.mark.parametrize("name", ASKING)
def test_a_folder_that_is_closed(name, command_line, tmp_path, monkeypatch):
    stock = os.stat

    def stat(path, *more, **named):
        if not isinstance(path, int) and os.fspath(path).startswith(f"{tmp_path}/"):
            raise PermissionError(13, "Permission denied", path)  # root may enter any
        return stock(path, *more, **named)

    module = importlib.import_module(f"recipes.{name}")
    monkeypatch.setattr(os, "stat", stat)
    status, printed, errors = command_line(module, tmp_path, *ASKING[name])
    assert (status, printed) == (2, "") and "Permission denied" in errors
    assert len(errors.splitlines()) == (2 if name == "compare" else 1)  # "no finished run", and why
