"""`recipes.export` and what it refuses; the formats that need TensorFlow alone."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from data import files
from exports import compare, saved_model
from exports import litert as litert_module
from exports import onnx as onnx_module
from recipes import export, predict
from training.errors import RunError

NAMES = ("bert", "text", "mnist", "dna")

ELSEWHERE = """
import sys
import tensorflow as tf
import tensorflow_text
folder, name, value = sys.argv[1:]
serve = tf.saved_model.load(folder).signatures["serving_default"]
for key, found in sorted(serve(**{name: tf.constant(value.split("|"))}).items()):
    print(key, found.shape, found.numpy().ravel()[:5].tolist())
assert not {"keras_nlp", "keras_hub", "recipes", "exports", "models", "data"} & set(sys.modules)
"""


def python_of(card):
    """The Python of a card's last section."""
    return re.findall(r"```python\n(.*?)```", card, re.S)[-1]


def run_elsewhere(code, folder, *arguments):
    """Runs code in a folder where this package cannot be imported."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KERAS_BACKEND")}
    script = folder.parent / "elsewhere.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-P", str(script), *arguments],
        cwd=folder,
        env=environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_says_what_the_keras_model_says(runs, name, tmp_path, command_line):
    folder = tmp_path / "new" / name
    command = (runs[name], "--to", "saved_model", "--folder", folder)
    status, out, err = command_line(export, *command)
    assert (status, err) == (0, "") and f"saved_model  {folder}" in out
    assert files.damage(folder, ["README.md", "saved_model.pb"]) is None
    card = (folder / "README.md").read_text()
    assert "## Compared with the Keras model" in card and card.count("## How to load it") == 1
    assert os.listdir(tmp_path / "new") == [name]  # nothing of the way there is left
    status, out, err = command_line(export, *command)
    assert status == 2 and err == f"export: --folder {folder}: is there already; name a new one\n"


@pytest.mark.long
def test_a_saved_model_runs_without_keras(runs, load, tmp_path):
    """Texts with several masks, with none, and `<unk>`; the fills are those of predict."""
    saved_model.write(load("bert"), tmp_path / "bert")
    texts = ["the [MASK] of a step", "the loss <unk> <unk> [MASK] [MASK]", "no mask"]
    out = run_elsewhere(ELSEWHERE, tmp_path / "bert", ".", "texts", "|".join(texts))
    assert "fills (3, 2, 5)" in out and "scores (3, 2, 5)" in out
    ours = predict.main(predict.Options(run_dir=runs["bert"], inputs=(texts[0],)))
    pieces = [fill["piece"] for fill in ours[0]]
    assert str([piece.encode() for piece in pieces]) in out


@pytest.mark.long
def test_a_saved_model_refuses_what_it_cannot_read(load, tmp_path):
    import tensorflow as tf

    for name, argument, bad in (
        ("bert", "texts", {"the " * 40: "more than 16 tokens"}),
        ("dna", "sequences", {"ACGU": "none of ACGT", "A" * 61: "more than 60 bases"}),
    ):
        saved_model.write(load(name), tmp_path / name)
        serve = tf.saved_model.load(str(tmp_path / name)).signatures["serving_default"]
        for value, said in bad.items():
            with pytest.raises(tf.errors.InvalidArgumentError, match=said):
                serve(**{argument: tf.constant([value])})


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_litert_says_what_the_keras_model_says(load, name, tmp_path):
    trained = load(name)
    (difference,) = litert_module.write(trained, tmp_path / "out").values()
    assert difference < 1e-4 * max(1, np.abs(trained.outputs).max())
    # Another batch, one example alone: neither size is fixed.
    one = {key: value[:1] for key, value in trained.inputs.items()}
    interpreter = litert_module.interpreter(tmp_path / "out" / "model.tflite")
    found = litert_module.run(interpreter, one)
    assert found.shape == trained.outputs[:1].shape
    assert np.abs(found - trained.outputs[:1]).max() < 1e-4 * max(1, np.abs(found).max())


@pytest.mark.parametrize(
    "to", ["saved_model", "litert", pytest.param("onnx", marks=pytest.mark.export)]
)
def test_what_differs_is_refused_and_nothing_is_left(runs, to, tmp_path, command_line, monkeypatch):
    """Here it is the Keras model that is changed, after its answers were noted."""
    stock = export.trained.load

    def load(*arguments):
        found = stock(*arguments)
        last = found.model.layers[-1]
        last.set_weights(
            [
                weight + 0.01 * np.arange(weight.size).reshape(weight.shape)
                for weight in last.get_weights()
            ]
        )
        return found

    monkeypatch.setattr(export.trained, "load", load)
    folder = tmp_path / "a" / "b"
    status, _, err = command_line(export, runs["mnist"], "--to", to, "--folder", folder)
    assert status == 2 and "differs from the Keras model by" in err
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_is_none_is_a_difference():
    with pytest.raises(RunError, match="differs from the Keras model by inf"):
        compare.require_same_logits("x", np.zeros(3), np.array([0, np.nan, 0]))
    with pytest.raises(RunError, match="by inf"):
        compare.require_same_logits("x", np.zeros(3), np.zeros(2))
    with pytest.raises(RunError, match="by 0.00011"):
        compare.require_same_logits("x", np.zeros(3), np.full(3, 1.1e-4))
    assert compare.require_same_logits("x", np.full(1, 50.0), np.full(1, 50.004)) < 5e-3


def test_exact_gelu_is_written_with_erf():
    import keras

    x = np.linspace(-6, 6, 1001, dtype="float32")
    exact, tanh = (np.array(keras.activations.gelu(x, approximate=b)) for b in (False, True))
    assert np.abs(np.array(onnx_module.gelu_by_erf(x)) - exact).max() < 1e-6
    assert np.abs(tanh - exact).max() > 1e-4


def test_what_is_missing_or_wrong_is_one_line(runs, tmp_path, command_line, monkeypatch):
    monkeypatch.setattr(export, "is_installed", lambda name: name != "tf2onnx")
    status, _, err = command_line(export, runs["mnist"], "--to", "onnx")
    assert status == 2
    assert err == "export: --to onnx: needs tf2onnx; pip install -e '.[export]' has them\n"
    status, _, err = command_line(export, tmp_path, "--to", "litert")
    assert status == 2 and err.startswith(f"export: {tmp_path}: not a run directory")
    status, _, err = command_line(export, runs["dna"], "--to", "huggingface")
    assert status == 2 and "is a run of dna_melting, which is no BERT" in err
    damaged = shutil.copytree(runs["mnist"], tmp_path / "damaged")
    (damaged / "model" / "README.md").write_text("mine")
    status, _, err = command_line(export, damaged, "--to", "litert")
    assert status == 2 and "README.md does not match its checksum" in err
    assert not (runs["mnist"] / "exports").exists()


@pytest.mark.long
def test_where_the_data_are_gone_sentences_of_our_own_are_taken(runs, tmp_path):
    import json

    from exports import trained

    for name in ("bert", "text", "mnist", "dna"):
        run, results, metadata = (
            json.loads((runs[name] / file).read_text())
            for file in ("options.json", "results.json", "model/recipe.json")
        )
        run["resolved"]["dataset"] = str(tmp_path / "gone")
        found = trained.load(runs[name], run, results | metadata)
        assert len(found.outputs) > 1
        assert any(word in found.sources_of for word in ("own", "digits", "nearest-neighbour"))
