"""`recipes.export`, what Keras writes, and SavedModels that take texts."""

import dataclasses
import os
import subprocess
import sys
import types

import keras
import keras_nlp
import numpy as np
import pytest
import safetensors
import tensorflow as tf

from data import melting
from exports import comparison, huggingface, keras_formats, texts
from exports.comparison import Differs
from models import bert
from recipes import bert_mlm, export
from tests.exports.conftest import CLASSES, TEXTS, inputs_of
from training.loaded_run import load_run

ELSEWHERE = """
import sys
import tensorflow as tf
import tensorflow_text
serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
found = serve(texts=tf.constant(sys.argv[2:]))
print({key: value.numpy().tolist() for key, value in found.items()})
assert not {"keras_nlp", "keras_hub", "recipes", "exports", "models", "data"} & set(sys.modules)
"""
FORMATS = [
    "saved_model",
    "litert",
    pytest.param("onnx", marks=pytest.mark.export),
]


def convolution():
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 8, 1))
    features = keras.layers.Flatten()(keras.layers.Conv2D(4, 3, activation="gelu")(x))
    features = keras.layers.BatchNormalization()(keras.layers.Dropout(0.5)(features))
    return keras.Model(x, {"a": keras.layers.Dense(2)(features), "b": features})


@keras.saving.register_keras_serializable("test_export")
class Subclass(keras.Model):
    """Declares no inputs; takes an array, or a dict with ids."""

    def __init__(self, of_ids=False, **kwargs):
        super().__init__(**kwargs)
        self.of_ids = of_ids
        self.embedding = keras.layers.Embedding(3, 4) if of_ids else None
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(self.embedding(x["ids"])[:, 0] * x["scale"] if self.of_ids else x)

    def get_config(self):
        return super().get_config() | {"of_ids": self.of_ids}


def differ(found, expected):
    expected = [np.array(value) for value in keras.tree.flatten(expected)]
    return max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_another_batch_gets_the_keras_models_answers(name, tmp_path):
    """A model without a recipe, with two outputs; the size of the batch is not fixed."""
    model = convolution()
    keras_formats.write(model, tmp_path / name, name)
    for count in (1, 5):
        x = np.random.default_rng(count).random((count, 8, 8, 1)).astype("float32")
        expected = model(x, training=False)
        assert differ(keras_formats.run(tmp_path / name, name, x), expected) < 1e-5
    assert keras_formats.compare(model, tmp_path / name, name) < 1e-5
    model.weights[0].assign(model.weights[0] + 0.1)
    with pytest.raises(Differs, match="its outputs differ by [0-9.]+ from the Keras model's"):
        keras_formats.compare(model, tmp_path / name, name)


def test_texts_and_numbers_as_inputs_are_compared_too(tmp_path):
    """The SavedModel contains the vocabulary of a `StringLookup`."""
    word, number = keras.Input((1,), dtype="string"), keras.Input((1,))
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
    hidden = keras.layers.Flatten()(keras.layers.Embedding(4, 2)(lookup(word)))
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()([hidden, number]))
    model = keras.Model({"word": word, "number": number}, outputs)
    keras_formats.write(model, tmp_path / "saved", "saved_model")
    assert keras_formats.compare(model, tmp_path / "saved", "saved_model") < 1e-6
    model.layers[-1].bias.assign([1.0])
    with pytest.raises(Differs):
        keras_formats.compare(model, tmp_path / "saved", "saved_model")


def test_a_recipe_says_whether_its_saved_model_takes_texts(tiny_run, tmp_path, monkeypatch):
    """Also one that is a copy of ours under another name."""

    class AsItIs(bert_mlm.Options):
        EXPORT_TAKES_TEXTS = False

    written = []
    for module in (texts, keras_formats):

        def write(model, folder, *_, name=module.__name__):
            folder.mkdir()
            written.append(name)
            return ""

        monkeypatch.setattr(module, "write", write)
    stock = load_run(tiny_run.folder)
    for options in (bert_mlm.Options(), AsItIs()):
        run = dataclasses.replace(stock, module=types.ModuleType("mine"), options=options)
        monkeypatch.setattr(export, "load_run", lambda *_, run=run, **__: run)
        folder = tmp_path / type(options).__name__
        export.main(
            export.Options(run_dir=tiny_run.folder, to="saved_model", folder=folder, check=False)
        )
    assert written == [texts.__name__, keras_formats.__name__]


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS[1:])
def test_a_masked_language_model_of_token_ids(name, masked_lm, tmp_path):
    model = masked_lm().model
    inputs = inputs_of(model)
    expected = model(inputs, training=False)
    keras_formats.write(model, tmp_path / name, name)
    assert differ(keras_formats.run(tmp_path / name, name, inputs), expected) < 1e-4
    # The mask counts in these inputs.
    ones = inputs | {"padding_mask": np.ones_like(inputs["padding_mask"])}
    assert differ([np.array(model(ones, training=False))], expected) > 1e-2


@pytest.mark.export
def test_a_duplex_is_turned_in_onnx(tmp_path):
    """Its remainder of a negative number is negative: padding must have none."""
    columns = keras.Input((None,), dtype="int32", name="columns")
    inputs = {"columns": columns, "conditions": keras.Input((2,), name="conditions")}
    turned = melting.from_other_end(inputs)["columns"]
    model = keras.Model(inputs, turned + keras.ops.cast(inputs["conditions"][:, :1], "int32"))
    keras_formats.write(model, tmp_path / "out", "onnx")
    given = {"columns": np.array([[14, 18, 56, 0, 0]], np.int32)}
    given["conditions"] = np.array([[0.0, 0.5]], np.float32)
    (found,) = keras_formats.run(tmp_path / "out", "onnx", given)
    np.testing.assert_array_equal(found, model(given))
    assert found[0, 3:].tolist() == [0, 0]


@pytest.mark.long
def test_fills_of_texts_of_different_lengths(masked_lm, tmp_path):
    """Each text alone, without padding, gives what it gives in a batch."""
    given = masked_lm()
    texts.write(given.model, tmp_path / "out", given.preset, ())
    serve = tf.saved_model.load(str(tmp_path / "out")).signatures["serving_default"]
    found = {name: value.numpy() for name, value in serve(texts=tf.constant(TEXTS)).items()}
    assert found["fills"].shape == found["scores"].shape == (4, 2, 5)
    tokenizer = bert.keras_nlp.models.BertTokenizer.from_preset(
        given.preset, special_tokens_in_strings=True
    )
    pieces = tokenizer.get_vocabulary()
    for row, text in enumerate(TEXTS):
        expected = bert.fill_masks(given.model, tokenizer, bert.encode(tokenizer, text, 512))
        for mask, probabilities in enumerate(expected):
            best = np.argsort(-probabilities)[:5]
            np.testing.assert_allclose(found["scores"][row, mask], probabilities[best], rtol=1e-5)
            named = [pieces.index(fill.decode()) for fill in found["fills"][row, mask]]
            np.testing.assert_allclose(probabilities[named], probabilities[best], rtol=1e-5)
        assert (found["fills"][row, len(expected) :] == b"").all()
    assert len(set(map(tuple, found["scores"][[0, 1, 1, 3], [0, 0, 1, 0]]))) == 4
    with pytest.raises(tf.errors.InvalidArgumentError, match="more than 16 tokens"):
        serve(texts=tf.constant(["the " * 15]))
    serve(texts=tf.constant(["the " * 14]))
    assert serve(texts=tf.constant([], tf.string))["fills"].shape[0] == 0
    one, other = (serve(texts=tf.constant([f"the{space}[MASK] of"])) for space in " \xa0")
    np.testing.assert_array_equal(one["scores"], other["scores"])
    assert texts.compare(given.model, tmp_path / "out", given.preset) < 1e-5


@pytest.mark.long
def test_classes_of_texts_of_different_lengths(classifier, masked_lm, tmp_path):
    model = classifier().model
    texts.write(model, tmp_path / "out", "", CLASSES)
    serve = tf.saved_model.load(str(tmp_path / "out")).signatures["serving_default"]
    found = {name: value.numpy() for name, value in serve(texts=tf.constant(TEXTS)).items()}
    tokenizer = model.preprocessor.tokenizer
    for row, text in enumerate(TEXTS):
        # To a classifier, [MASK] is a text like any other; what is cut is before [SEP].
        pieces = np.asarray(tokenizer(text))[:14]
        ids = np.array([[tokenizer.cls_token_id, *pieces, tokenizer.sep_token_id]], np.int32)
        ones = np.ones_like(ids)
        inputs = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": ones}
        expected = np.array(keras.ops.softmax(model(inputs, training=False)))[0]
        order = np.argsort(-expected)
        assert found["classes"][row].tolist() == [CLASSES[i].encode() for i in order]
        np.testing.assert_allclose(found["probabilities"][row], expected[order], rtol=1e-3)
    assert np.ptp(found["probabilities"][:, 0]) > 0.01
    one, other = (serve(texts=tf.constant([f"the{space}loss"])) for space in " \xa0")
    np.testing.assert_array_equal(one["probabilities"], other["probabilities"])
    model.weights[-1].assign(model.weights[-1] + [1.0, 0.0, 0.0])
    with pytest.raises(Differs, match="its outputs differ by"):
        texts.compare(model, tmp_path / "out", masked_lm().preset)


@pytest.mark.long
def test_classes_of_pairs(classifier, masked_lm, tmp_path):
    """The segments are those of training; both texts count."""
    model = classifier().model
    said = texts.write(model, tmp_path / "out", "", CLASSES, pairs=True)
    assert said == "takes texts and second_texts of at most 16 tokens"
    serve = tf.saved_model.load(str(tmp_path / "out")).signatures["serving_default"]
    first, second = ["the loss", "tokens"], ["of a step", "the mean over all"]
    found = serve(texts=tf.constant(first), second_texts=tf.constant(second))
    inputs = model.preprocessor((tf.constant(first), tf.constant(second)), None)
    assert np.asarray(inputs["segment_ids"]).max() == 1
    expected = np.sort(np.array(keras.ops.softmax(model(inputs, training=False))))[:, ::-1]
    np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-3)
    assert texts.compare(model, tmp_path / "out", masked_lm().preset) < 1e-3


@pytest.mark.long
def test_the_program_and_a_process_without_this_package(tiny_run, tmp_path, command_line):
    folder = tmp_path / "new" / "bert"
    command = (tiny_run.folder, "--to", "saved_model", "--folder", folder)
    status, out, err = command_line(export, *command)
    assert (status, err) == (0, "") and f"saved_model  {folder}" in out
    assert "compared     with the Keras model, largest difference " in out
    assert os.listdir(tmp_path / "new") == ["bert"] and (folder / "SHA256SUMS").exists()
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KERAS_BACKEND")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", ELSEWHERE, ".", *TEXTS],
        cwd=folder,
        env=environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'fills'" in done.stdout
    status, out, err = command_line(export, *command)
    assert status == 2 and err == (
        f"export: --folder: {folder} already exists; remove it, or name a new one\n"
    )


def test_random_inputs_fit_the_model(masked_lm):
    model = masked_lm().model
    inputs = comparison.random_inputs(model)
    assert inputs["token_ids"].shape == (2, 8) and inputs["token_ids"].max() > 1
    assert inputs["padding_mask"][:, 0].tolist() == [1, 1]
    assert comparison.random_inputs(convolution()).shape == (2, 8, 8, 1)
    for found in ([np.ones((2, 3))], [np.ones((2, 2))] * 2, [np.full((2, 2), np.nan)]):
        with pytest.raises(Differs):
            comparison.require_equal(found, np.ones((2, 2)))


@pytest.mark.parametrize("of_ids", [False, True])
def test_a_subclass_that_is_loaded_is_exported(of_ids, tmp_path):
    """A model that `call()` of its class defines was never called when it is loaded."""
    x = np.random.default_rng(0).random((4, 3)).astype("float32")
    if of_ids:
        x = {"ids": np.array([[0, 1] * 4] * 4, "float32"), "scale": x[:, :1]}
    model = Subclass(of_ids)
    model(x)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    keras_formats.write(loaded, tmp_path / "out", "saved_model")
    assert keras_formats.compare(loaded, tmp_path / "out", "saved_model") < 1e-6
    assert differ(keras_formats.run(tmp_path / "out", "saved_model", x), model(x)) < 1e-6


def test_inputs_of_a_subclass_that_was_not_built_are_unknown():
    assert comparison.symbolic_inputs(Subclass()) is None


@pytest.mark.long
def test_an_export_that_differs_is_not_kept(runs, tmp_path, command_line, monkeypatch):
    stock = keras_formats.write

    def write(model, folder, name):
        twice = keras.models.clone_model(model)
        twice.set_weights([2 * weight for weight in model.get_weights()])
        return stock(twice, folder, name)

    monkeypatch.setattr(keras_formats, "write", write)
    command = (runs["mnist"], "--to", "saved_model", "--folder", tmp_path / "out")
    status, out, err = command_line(export, *command)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.endswith("nothing is kept\n")
    assert err.startswith("export: --to saved_model: its outputs differ by ")
    assert not list(tmp_path.iterdir())
    status, out, _ = command_line(export, *command, "--no-check")
    assert status == 0 and out.endswith("compared     no (--no-check)\n")


@pytest.mark.long
@pytest.mark.parametrize("length", [4, 5, 6])
def test_short_sequences(length, classifier, masked_lm, tmp_path):
    """The text that an export is compared by fits into them."""
    masked = masked_lm()
    masked.model.preprocessor.sequence_length = length
    texts.write(masked.model, tmp_path / "fills", masked.preset, ())
    assert texts.compare(masked.model, tmp_path / "fills", masked.preset) < 1e-3
    model = classifier().model
    model.preprocessor = keras_nlp.models.BertTextClassifierPreprocessor(
        model.preprocessor.tokenizer, sequence_length=length
    )
    texts.write(model, tmp_path / "classes", "", CLASSES)
    assert texts.compare(model, tmp_path / "classes", masked.preset) < 1e-3


@pytest.mark.long
def test_a_model_that_a_format_cannot_hold(runs, tmp_path, command_line, monkeypatch):
    def run(*arguments):
        raise RuntimeError("FlexHashTableV2 failed to prepare\nand more")

    monkeypatch.setattr(keras_formats, "run", run)
    target = tmp_path / "out"
    status, _, err = command_line(export, runs["mnist"], "--to", "litert", "--folder", target)
    assert status == 2 and err.count("\n") == 1 and not target.exists()
    assert "--to litert: Sequential cannot be written or run in this format (Flex" in err


@pytest.mark.parametrize("error", ["SafetensorError", "ResourceExhaustedError"])
def test_a_full_disk_is_not_a_full_memory(error, tiny_run, tmp_path, command_line, monkeypatch):
    """Neither safetensors nor TensorFlow raises an OSError."""
    message = "{{function_node __wrapped__SaveV2_dtypes}} /a; No space left on device"

    def full(*arguments):
        if error == "SafetensorError":
            raise safetensors.SafetensorError(message)
        raise tf.errors.ResourceExhaustedError(None, None, message)

    to = "huggingface" if error == "SafetensorError" else "saved_model"
    for module in (huggingface, texts):
        monkeypatch.setattr(module, "write", full)
    target = tmp_path / "out"
    status, _, err = command_line(export, tiny_run.folder, "--to", to, "--folder", target)
    assert (status, err) == (
        2,
        f"export: --folder {target}: cannot be written (/a; No space left on device); nothing is "
        "kept\n",
    )
    assert not list(tmp_path.iterdir())


def test_an_export_that_transformers_refuses(tiny_run, tmp_path, command_line, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("You set `ignore_mismatched_sizes` to `False`\nand more")

    monkeypatch.setattr(huggingface, "compare", refuse)
    monkeypatch.setattr(export, "not_installed", lambda names: [])
    target = tmp_path / "out"
    status, _, err = command_line(
        export, tiny_run.folder, "--to", "huggingface", "--folder", target
    )
    assert (status, err) == (
        2,
        "export: --to huggingface: transformers cannot load or run the export (You set "
        "`ignore_mismatched_sizes` to `False`); nothing is kept\n",
    )
    assert not list(tmp_path.iterdir())


def test_what_is_missing_or_wrong_is_one_line(runs, tmp_path, command_line, monkeypatch):
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    status, _, err = command_line(export, runs["mnist"], "--to", "huggingface")
    assert status == 2  # before packages are asked for
    assert err == (
        f"export: --to huggingface: the model of {runs['mnist']} is neither a BERT nor a CausalLM "
        "of KerasNLP\n"
    )
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: name != "tf2onnx")
    status, _, err = command_line(export, runs["mnist"], "--to", "onnx")
    assert status == 2
    assert err == "export: --to onnx: needs tf2onnx; pip install -e '.[export]' has them\n"
    status, _, err = command_line(export, tmp_path, "--to", "litert")
    assert status == 2 and err.startswith(f"export: {tmp_path}: not a run directory")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keras_formats, "write", full)
    target = tmp_path / "a" / "b"
    status, _, err = command_line(export, runs["mnist"], "--to", "litert", "--folder", target)
    assert (status, err) == (2, f"export: --folder {target}: No space left on device\n")
    assert not list((tmp_path / "a").iterdir())
