"""Tests a finished run's files: model, checksums, versions."""

import json
import types

import keras
import keras_nlp
import numpy as np
import pytest
import tensorflow as tf

from data import files, word_pieces
from data.errors import DataError
from distribution.keras_compat import hub_models
from models import presets
from tests.support import causal_presets, syncs, tiny_presets
from training import artifacts, numerics
from training.errors import RunError
from training.options import SharedOptions


def small_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])


def test_every_weight_is_in_the_checksum():
    seen = {artifacts.weights_sha256(small_model())}
    for number in range(len(small_model().trainable_variables)):
        model = small_model()
        variable = model.trainable_variables[number]
        value = np.array(keras.ops.convert_to_numpy(variable))
        value[-1] += 1e-7
        variable.assign(value)
        seen.add(artifacts.weights_sha256(model))
    assert len(seen) == 5
    assert artifacts.weights_sha256(small_model()) in seen


def test_every_example_is_in_the_checksum():
    def splits():
        return {"train": (np.arange(6.0).reshape(3, 2), np.arange(3)), "test": (["a", "b"], [])}

    seen = {artifacts.data_sha256(splits())}
    changed = splits()
    changed["train"][0][2, 1] = 7
    seen.add(artifacts.data_sha256(changed))
    changed = splits()
    changed["train"][1][2] = 1
    seen.add(artifacts.data_sha256(changed))
    changed = splits()
    changed["test"][0][1] = "c"
    seen.add(artifacts.data_sha256(changed))
    assert len(seen) == 4 and artifacts.data_sha256(splits()) in seen


def test_texts_in_an_array_of_objects_are_in_the_checksum():
    """As a column of a pandas DataFrame: its bytes are addresses."""

    def column(last="a text of"):
        return np.array(["one", f"{last} {len(last)}"], dtype=object)

    assert artifacts.data_sha256({"a": column()}) == artifacts.data_sha256({"a": column()})
    assert artifacts.data_sha256({"a": column()}) != artifacts.data_sha256({"a": column("b")})
    for odd in (np.array(["one", None], dtype=object), [object()]):
        with pytest.raises(DataError, match="data_sha256: .* is neither a number nor a text"):
            artifacts.data_sha256({"a": odd})


def test_inputs_in_a_dict_are_in_the_checksum():
    """Their values, dtypes, shapes and names; as `dna_melting` has them."""

    def splits(**changes):
        inputs = {"columns": np.arange(6).reshape(3, 2), "conditions": np.ones(3)} | changes
        return {"train": (inputs, np.arange(3))}

    variants = [
        splits(),
        splits(columns=np.arange(1, 7).reshape(3, 2)),
        splits(columns=np.arange(6).reshape(2, 3)),
        splits(conditions=np.ones(3).view(np.int64)),
        splits(conditions=np.zeros(3)),
        splits(salts=np.ones(3)),
        {"train": ([np.arange(6).reshape(3, 2), np.ones(3)], np.arange(3))},
        {"train": (["ab", "c"], np.arange(3))},
        {"train": (["a", "bc"], np.arange(3))},
    ]
    assert len({artifacts.data_sha256(each) for each in variants}) == len(variants)
    assert artifacts.data_sha256(splits()) == artifacts.data_sha256(splits())


def test_a_model_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    order = syncs.recorded(monkeypatch)
    artifacts.save_model(small_model(), tmp_path / "model", metadata={}, card="A card.")
    renamed = order.index(("rename", "model"))
    before, after = {name for _, name in order[:renamed]}, order[renamed + 1 :]
    assert before >= {"model.keras", "README.md", "SHA256SUMS"}
    assert after == [("sync", tmp_path.name)]


def test_metadata_of_numpy_are_stored_as_numbers_and_lists(tmp_path):
    classes = np.array(["a", "b"], dtype=object)  # as pandas has them
    metadata = {"mean": np.float32(0.5), "scales": np.eye(2), "count": np.int64(3), "of": classes}
    artifacts.save_model(small_model(), tmp_path / "model", metadata=metadata)
    stored = json.loads((tmp_path / "model" / files.METADATA).read_text())
    assert stored == {"mean": 0.5, "scales": [[1, 0], [0, 1]], "count": 3, "of": ["a", "b"]}
    assert isinstance(stored["count"], int)
    with pytest.raises(TypeError):
        artifacts.save_model(small_model(), tmp_path / "other", metadata={"of": {"a", "b"}})


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_a_preset_is_loaded_whatever_the_precision_of_its_training(precision, tmp_path):
    """KerasHub cannot load one that names a mixed policy."""
    models = keras_nlp.models
    preset = tiny_presets.save("Bert", "MaskedLM", tmp_path / "preset")
    recipe, folder = types.ModuleType("recipe"), tmp_path / "model"
    with numerics.precision(precision):
        trained = models.MaskedLM.from_preset(preset, compile=False, dtype=precision)
        preprocessor, trained.preprocessor = trained.preprocessor, None
        artifacts.save_model(trained, folder, metadata={}, preprocessor=preprocessor)
        again = artifacts.load_model(folder, None, recipe)
        assert again.dtype_policy.name == again.backbone.dtype_policy.name == precision
    plain = models.BertMaskedLM.from_preset(str(folder), compile=False)
    assert plain.backbone.dtype_policy.name == "float32"
    for model in (again, plain, artifacts.load_model(folder, "float32", recipe)):
        for ours, theirs in zip(model.get_weights(), trained.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_adapters_are_merged_in_the_precision_of_the_weights(precision, tmp_path):
    """In half precision most of what they add would be rounded away."""
    models, draw = keras_nlp.models, np.random.default_rng(0)
    preset = tiny_presets.save("DistilBert", "TextClassifier", tmp_path / "preset")
    with numerics.precision(precision):
        trained = models.TextClassifier.from_preset(preset, dtype=precision)
        hub_models.enable_lora(trained.backbone, 2, alpha=6.0)
        for weight in trained.backbone.trainable_variables:
            if "lora_kernel" in weight.path:
                weight.assign(0.1 * draw.normal(size=weight.shape))
        preprocessor, trained.preprocessor = trained.preprocessor, None
        folder = tmp_path / "model"
        artifacts.save_model(trained, folder, metadata={}, preprocessor=preprocessor)
    ids = np.arange(5, 15, dtype=np.int32)[None]
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    merged = models.TextClassifier.from_preset(str(folder), dtype="float32").backbone
    adapted = models.Backbone.from_preset(preset, dtype="float32")
    adapted.load_lora_weights(str(folder / "adapter.lora.h5"))
    np.testing.assert_allclose(np.asarray(merged(inputs)), np.asarray(adapted(inputs)), atol=2e-6)


def test_the_command_line_explains_a_memory_that_is_too_small(tmp_path, monkeypatch):
    """Not a model that cannot be loaded, or not be saved."""
    model, recipe = small_model(), types.ModuleType("recipe")
    artifacts.save_model(model, tmp_path / "model", metadata={})

    def fail(*arguments, **more):
        np.empty((2**30, 2**20))

    monkeypatch.setattr(keras.saving, "load_model", fail)
    monkeypatch.setattr(model, "load_weights", fail)
    for load in (
        lambda: artifacts.load_model(tmp_path / "model", None, recipe),
        lambda: artifacts.load_weights(model, tmp_path / "model.weights.h5"),
        lambda: artifacts.require_saveable(model, tmp_path, type(recipe)),
    ):
        with pytest.raises(MemoryError):
            load()
    assert not (tmp_path / ".trial").exists()


class Decoder(keras.layers.Layer):
    """A layer that creates others, as on keras.io; they take Keras's present policy."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.embedding, self.dense = keras.layers.Embedding(9, 4), keras.layers.Dense(4)

    def call(self, inputs):
        return keras.ops.sum(self.embedding(inputs) + self.dense(self.embedding(inputs)), axis=1)


@pytest.mark.parametrize("trained_in", ["float64", "mixed_bfloat16"])
def test_layers_of_a_layer_are_loaded_in_the_precision_of_the_training(trained_in, tmp_path):
    recipe = types.ModuleType("recipe")
    recipe.Decoder = Decoder
    tokens = np.array([[1, 2, 3], [4, 5, 6]])
    with numerics.precision(trained_in):
        inputs = keras.Input((3,), dtype="int32")
        trained = keras.Model(inputs, Decoder()(inputs))
        artifacts.save_model(trained, tmp_path / "model", metadata={})
        expected = keras.ops.convert_to_numpy(keras.ops.cast(trained(tokens), "float64"))
    for dtype, tolerance in ((None, 1e-2), ("float32", 1e-2)):
        model = artifacts.load_model(tmp_path / "model", dtype, recipe, trained_in)
        found = model(tokens)
        assert keras.backend.standardize_dtype(found.dtype) == (
            dtype or trained_in.removeprefix("mixed_")
        )
        found = keras.ops.convert_to_numpy(keras.ops.cast(found, "float64"))
        np.testing.assert_allclose(found, expected, atol=tolerance)


def double_tanh(x):
    return 2 * keras.ops.tanh(x)


def thirds(shape, dtype=None):
    return keras.ops.ones(shape, dtype) / 3


def zeros(count):
    """Has the name of Keras's initializer, and serves something else."""
    return [0] * count


class Shift(keras.layers.Layer):
    def build(self, shape):
        self.shift = self.add_weight(shape=shape[-1:], initializer="zeros")

    def call(self, inputs):
        return inputs + self.shift


def halved(x):
    return x / 2


def test_functions_of_the_recipe_are_loaded(tmp_path):
    recipe = types.ModuleType("recipe")
    for own in (double_tanh, thirds, zeros, halved, Shift):
        setattr(recipe, own.__name__, own)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation=double_tanh, kernel_initializer=thirds),
            keras.layers.Lambda(halved),
            Shift(),
        ]
    )
    artifacts.save_model(model, tmp_path / "model", metadata={})
    inputs = np.arange(6.0).reshape(2, 3)
    for dtype in (None, "float64"):
        loaded = artifacts.load_model(tmp_path / "model", dtype, recipe)
        np.testing.assert_allclose(loaded(inputs), model(inputs), rtol=1e-5)


@pytest.mark.parametrize("learned", [False, True], ids=["named words", "adapted"])
def test_a_policy_is_replaced_and_no_other_text(learned, tmp_path):
    """The words that a layer has learned are in the archive alone, not in its configuration."""
    words = ["float32", "int32", "mixed_float16"]
    lookup = keras.layers.StringLookup(vocabulary=None if learned else words)
    if learned:
        lookup.adapt([[word] for index, word in enumerate(words) for _ in range(3 - index)])
    scale = keras.layers.Normalization()
    scale.adapt(np.array([[1.0], [3.0]]))
    texts, number = keras.Input((2,), dtype="string"), keras.Input((1,))
    hidden = keras.layers.Embedding(4, 2)(lookup(texts))
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(hidden)) + scale(number)
    model = keras.Model([texts, number], outputs)
    artifacts.save_model(model, tmp_path / "model", metadata={})
    copy = artifacts.load_model(tmp_path / "model", "float64", types.ModuleType("recipe"))
    kinds = {type(layer).__name__: layer for layer in copy.layers}
    assert kinds["StringLookup"].get_vocabulary()[1:] == words
    assert kinds["StringLookup"].compute_dtype == lookup.compute_dtype
    for name in ("Embedding", "Dense", "Normalization"):
        assert kinds[name].compute_dtype == "float64"
    inputs = [
        tf.constant([["float32", "other"], ["int32", "x"]]),
        tf.constant([[1.0], [2.0]]),
    ]
    found, expected = copy(inputs), model(inputs)
    assert found.dtype == tf.float64
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_what_a_killed_start_tried_to_save_is_removed(tmp_path):
    (tmp_path / ".trial").mkdir()
    (tmp_path / ".trial" / "model.keras").write_text("half of it")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    artifacts.require_saveable(model, tmp_path, SharedOptions)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (
            lambda: keras.layers.Dense(1, activation=double_tanh),  # not of the options' module
            "Could not locate function 'double_tanh'; .* or a function of your own, stands at",
        ),
        (
            lambda: keras.layers.Lambda(lambda x: 2 * x),
            "is a Python lambda; instead of the lambda use functions of keras.ops .*with a name",
        ),
    ],
    ids=["unknown function", "lambda"],
)
def test_functions_that_no_run_could_load(layer, said, tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dense(1)])
    model.add(layer())
    with pytest.raises(RunError, match=f"cannot be saved and loaded again: .*{said}"):
        artifacts.require_saveable(model, tmp_path, SharedOptions)


def tokens(tokenizer, text):
    """Returns the tokens of a text, as texts."""
    return [tokenizer.id_to_token(int(number)) for number in tokenizer(text)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "of_1990", "of_spaces"),
    [
        ("GPT2", ["19", "90"], ["x", "Ġ", "Ġa"]),
        ("Llama3", ["199", "0"], ["x", "Ġ", "Ġa"]),
        ("Qwen", ["1", "9", "9", "0"], ["x", "Ġ", "Ġa"]),
        ("Bloom", ["19", "90"], ["x", "ĠĠ", "a"]),  # has rules of its own: as KerasHub
    ],
)
def test_texts_of_a_preset_are_split_as_its_family_does_and_of_new_byte_pairs_not(
    family, of_1990, of_spaces, tmp_path
):
    """KerasHub splits no text into words; a preset was pretrained with them."""
    learned = causal_presets.make_tokenizer(family)
    merges = ["Ġ Ġ", "1 9", "9 0", "19 9", "Ġ a"]
    pieces = dict(learned.vocabulary)
    for merge in merges:
        pieces.setdefault(merge.replace(" ", ""), len(pieces))
    stock = type(learned)(vocabulary=pieces, merges=merges)
    assert tokens(stock, "1990") == ["19", "90"] and tokens(stock, "x  a") == ["x", "ĠĠ", "a"]
    task = causal_presets.make_task(family)
    preprocessor = type(task.preprocessor)(stock, sequence_length=32)

    def saved(name, tokenizer):
        preprocessor.tokenizer = tokenizer
        artifacts.save_model(task, tmp_path / name, metadata={}, preprocessor=preprocessor)
        loaded = artifacts.load_model(tmp_path / name, None, types.ModuleType("recipe"))
        return loaded.preprocessor.tokenizer

    # Of a run that learned its own, KerasHub's rule stays, also where it is a preset.
    own = saved("own", stock)
    assert tokens(own, "x  a") == ["x", "ĠĠ", "a"]
    kind = keras_nlp.models.CausalLMPreprocessor
    assert tokens(presets.load(kind, str(tmp_path / "own")).tokenizer, "x  a") == tokens(
        own, "x  a"
    )
    # A preset from elsewhere has none of our metadata.
    (tmp_path / "own" / files.METADATA).unlink()
    (tmp_path / "own" / files.SUMS).unlink()
    found = presets.load(kind, str(tmp_path / "own")).tokenizer
    assert (tokens(found, "1990"), tokens(found, "x  a")) == (of_1990, of_spaces)
    if family == "Llama3":  # a word that is a token is not made of parts
        assert tokens(found, "199") == ["199"] and found._tokenizer.model.ignore_merges
    if family == "Qwen":  # one character, however it is written
        assert list(found("e\u0301")) == list(found("\u00e9"))
    changes = family != "Bloom"
    assert (word_pieces.rules_of(found) != word_pieces.rules_of(stock)) == changes
    # Of a run from it the rule is kept.
    for loaded in (saved("run", found), presets.load(kind, str(tmp_path / "run")).tokenizer):
        assert (tokens(loaded, "1990"), tokens(loaded, "x  a")) == (of_1990, of_spaces)
