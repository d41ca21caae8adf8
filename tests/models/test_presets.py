import dataclasses
import io
import json
import re
import shutil
import socket
import types
import urllib.request
from pathlib import Path

import keras
import keras_nlp
import numpy as np
import pytest
import tensorflow as tf

from data.errors import DataError
from models import decoders, init_from, presets
from recipes import bert_mlm, causal_lm, seq2seq, text_classification
from tests.conftest import TINY_RUN
from tests.support import causal_presets, tiny_presets
from tests.support.damaged import flip_a_bit
from training.options import all_problems

MASKED_LM = keras_nlp.models.MaskedLM
CLASSIFIER = keras_nlp.models.TextClassifier


class TestChoosePreset:
    @pytest.fixture(autouse=True)
    def reachable(self, monkeypatch):
        monkeypatch.setattr(presets, "_unreachable", lambda name: None)

    @pytest.mark.parametrize(
        ("changes", "english_wikitext", "known", "chosen"),
        [
            ({}, True, None, presets.TINY),
            ({}, False, None, None),
            ({}, True, "scratch", None),
            ({"preset": "scratch"}, True, None, None),
            ({"preset": "hf://a/b"}, False, None, "hf://a/b"),
            ({"init_from": "a run"}, True, "a run/model", "a run/model"),
            ({"vocabulary": "vocab.txt"}, True, None, None),
            ({"num_layers": 4}, True, None, None),
            ({"hidden_dim": 256}, True, None, None),
        ],
    )
    def test_sizes_mean_from_scratch(self, changes, english_wikitext, known, chosen):
        options = bert_mlm.Options(**changes)
        assert presets.choose_preset(options, known, english_wikitext) == (chosen, None)

    def test_without_a_network_a_line_says_so(self, monkeypatch):
        def create_connection(*arguments, **more):
            raise OSError(-2, "Name or service not known")

        monkeypatch.undo()
        monkeypatch.setattr(socket, "create_connection", create_connection)
        monkeypatch.setenv("KAGGLEHUB_CACHE", "/nowhere")
        assert presets.choose_preset(bert_mlm.Options(), None, True) == (
            None,
            "preset bert_tiny_en_uncased: no network; the same architecture from scratch is used "
            "instead",
        )


@pytest.mark.parametrize("recipe", [causal_lm, seq2seq, text_classification])
def test_auto_is_a_preset_of_masked_words_alone(recipe):
    problem = "--preset auto: pass scratch, the name of a preset, or its folder"
    assert problem in recipe.Options(preset="auto").problems()
    assert all_problems(bert_mlm.Options(preset="auto")) == []


@pytest.mark.parametrize(
    ("options", "source"),
    [
        (bert_mlm.Options(preset="bert_base_en"), "the preset bert_base_en"),
        (bert_mlm.Options(init_from="runs/first"), "--init-from"),
        (text_classification.Options(init_from="runs/first"), "--init-from"),
    ],
)
def test_sizes_beside_an_existing_model_are_refused(options, source):
    assert all_problems(options) == []
    for name, value in (("num_layers", 4), ("vocabulary_size", 99), ("vocabulary", "v.txt")):
        found = all_problems(dataclasses.replace(options, **{name: value}))
        assert found == [f"--{name.replace('_', '-')}: leave it out, {source} has its own"]


@pytest.fixture(scope="module")
def make_model(tiny_run):
    """Makes a model of the tiny run's sizes with other weights."""

    def make(**changes):
        keras.utils.set_random_seed(99)
        size = tiny_run.model.backbone.vocabulary_size
        return bert_mlm.build_model(bert_mlm.Options(**(TINY_RUN | changes)), size)

    return make


@pytest.fixture
def folder(tiny_run, tmp_path):
    """A copy of the tiny run, to be damaged."""
    return shutil.copytree(tiny_run.folder, tmp_path / "run")


def values(model):
    return [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]


def same(first, second):
    return all((a == b).all() for a, b in zip(values(first), values(second), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("family", ["Falcon", "SmolLM3", "Llama3"])
def test_dropout_reaches_every_family(family, tmp_path):
    """Falcon and SmolLM 3 call it otherwise, and KerasNLP ignores a name that they lack."""
    folder = str(tmp_path / "preset")
    causal_presets.make_task(family).save_to_preset(folder)
    backbone = presets.load_backbone(folder, 0.25)
    for name, rate in causal_presets.dropout_of(family, 0.25).items():
        assert backbone.get_config()[name] == rate


def test_a_backbone_without_dropout_is_refused(tiny_run, monkeypatch):
    class Bare:
        def __init__(self, width):
            pass

    monkeypatch.setattr(presets, "load", lambda *arguments, **changes: Bare(1))
    with pytest.raises(DataError, match="--dropout: Bare of .* has none"):
        presets.load_backbone(str(tiny_run.folder / "model"), 0.1)


class TestLoadMaskedLM:
    def test_backbone_and_head_are_the_runs(self, tiny_run):
        model = presets.load_task(MASKED_LM, str(tiny_run.folder / "model"))
        assert model.preprocessor is None and model.backbone.dropout == TINY_RUN["dropout"]
        for found, expected in zip(model.weights, tiny_run.model.weights, strict=True):
            np.testing.assert_array_equal(found, expected)
        folder = str(tiny_run.folder / "model")
        model = presets.load_task(MASKED_LM, folder, backbone_dropout=0.3)
        assert model.backbone.dropout == 0.3

    def test_a_backbone_alone_gets_a_new_head(self, tmp_path, tiny_run):
        tiny_run.model.backbone.save_to_preset(str(tmp_path / "backbone"))
        model = presets.load_task(MASKED_LM, str(tmp_path / "backbone"))
        np.testing.assert_array_equal(values(model.backbone)[0], values(tiny_run.model)[0])
        assert not same(model.masked_lm_head, tiny_run.model.masked_lm_head)

    @pytest.mark.parametrize("name", ["model.weights.h5", "task.weights.h5", "config.json"])
    def test_damage_is_refused(self, name, folder):
        flip_a_bit(folder / "model" / name)
        with pytest.raises(DataError) as caught:
            presets.load_task(MASKED_LM, str(folder / "model"))
        assert str(caught.value).startswith(f"preset {folder / 'model'}: damaged ({name}")

    def test_a_run_is_not_its_model(self, tiny_run):
        with pytest.raises(DataError, match="a run; its model is in .*model$"):
            presets.load_task(MASKED_LM, str(tiny_run.folder))

    def test_a_classifier_is_no_masked_lm(self, tmp_path, tiny_run):
        classifier = keras_nlp.models.BertTextClassifier(tiny_run.model.backbone, 3)
        classifier.save_to_preset(str(tmp_path / "classifier"))
        with pytest.raises(DataError, match="classifier: a .*, not a masked LM"):
            presets.load_task(MASKED_LM, str(tmp_path / "classifier"))

    def test_sequences_longer_than_its_positions_are_refused(self, tiny_run):
        with pytest.raises(DataError, match="--sequence-length 513: the preset .* at most 512"):
            presets.load_task(MASKED_LM, str(tiny_run.folder / "model"), sequence_length=513)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2") / "preset"
    keras_nlp.models.GPT2Backbone(20, 1, 2, 8, 16, max_sequence_length=8).save_to_preset(
        str(folder)
    )
    return folder


NO_MEMORY = [
    MemoryError("Unable to allocate 8.00 PiB for an array"),
    tf.errors.ResourceExhaustedError(None, None, "OOM when allocating"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=["host", "device"])
def test_the_command_line_explains_a_memory_that_is_too_small(error, gpt2, tmp_path, monkeypatch):
    """Not a preset, or a checkpoint, that cannot be loaded."""

    def fail(*arguments, **more):
        raise error

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    monkeypatch.setattr(keras_nlp.models.Backbone, "from_preset", fail)
    monkeypatch.setattr(model, "load_weights", fail)
    with pytest.raises(type(error)):
        presets.load_backbone(str(gpt2))
    with pytest.raises(type(error)):
        init_from.load_checkpoint(model, tmp_path / "model.weights.h5")


class TestWhatCannotBeLoaded:
    """One line that names what would work, before anything is downloaded or loaded."""

    def message(self, kind, preset, **changes):
        with pytest.raises(DataError) as caught:
            presets.load_task(kind, str(preset), **changes)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_a_name_that_is_almost_one(self):
        assert self.message(CLASSIFIER, "distil_bert_base_en_uncase") == (
            "preset distil_bert_base_en_uncase: neither a folder nor a name of KerasNLP; did you "
            "mean distil_bert_base_en_uncased?"
        )
        assert "handles like hf://owner/model" in self.message(CLASSIFIER, "qqqq")

    @pytest.mark.parametrize(
        ("name", "way"),
        [
            ("a.keras", "task = keras.saving.load_model("),
            ("a.weights.h5", "build the task that they are of, load_weights("),
            ("model.safetensors", "pass the one of its config.json"),
        ],
    )
    def test_a_file(self, name, way, tmp_path):
        (tmp_path / name).touch()
        found = self.message(CLASSIFIER, tmp_path / name)
        assert found.startswith(f"preset {tmp_path / name}: a file, expected a folder; {way}")

    @pytest.mark.parametrize(
        ("preset", "host"),
        [("bert_base_en", "www.kaggle.com"), ("hf://a/b", "huggingface.co")],
    )
    def test_no_network(self, preset, host, monkeypatch, tmp_path):
        def create_connection(*arguments, **more):
            raise OSError(-2, "Name or service not known")

        monkeypatch.setattr(socket, "create_connection", create_connection)
        monkeypatch.setattr(urllib.request, "getproxies", dict)
        monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path))
        monkeypatch.setattr(presets.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        assert self.message(CLASSIFIER, preset) == (
            f"preset {preset}: no network ({host} does not answer); pass the folder of a preset"
        )
        # Downloaded before, it needs none.
        for cached in ("models/keras/bert/keras/bert_base_en/2", "hub/models--a--b/snapshots/1"):
            (tmp_path / cached).mkdir(parents=True)
            (tmp_path / cached / "config.json").touch()
        assert presets.no_network(preset) is None

    @pytest.mark.parametrize(
        ("endpoint", "asked"),
        [
            ("https://huggingface.co", ("huggingface.co", 443)),
            ("https://mirror.example/hf", ("mirror.example", 443)),
            ("http://localhost:8080", ("localhost", 8080)),
        ],
    )
    def test_a_mirror_of_hugging_face_is_asked(self, endpoint, asked, monkeypatch, tmp_path):
        def create_connection(address, timeout):
            assert address == asked
            return io.BytesIO()

        monkeypatch.setattr(socket, "create_connection", create_connection)
        monkeypatch.setattr(urllib.request, "getproxies", dict)
        monkeypatch.setattr(presets.constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(presets.constants, "ENDPOINT", endpoint)
        assert presets.no_network("hf://owner/name") is None

    def test_a_family_without_the_task(self, gpt2):
        for preset in ("gpt2_base_en", gpt2):
            found = self.message(CLASSIFIER, preset, num_classes=2)
            assert (
                "has no TextClassifier in KerasNLP; families that have one: Albert, Bert" in found
            )
            assert "for instance --preset distil_bert_base_en_uncased" in found

    def test_the_recipe_of_an_encoder_decoder_is_named(self, tmp_path):
        models, folder = keras_nlp.models, str(tmp_path / "bart")
        pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "ab"]
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        preprocessor = models.BartSeq2SeqLMPreprocessor(models.BartTokenizer(vocabulary, ["a b"]))
        backbone = models.BartBackbone(len(pieces), 1, 2, 8, 16, max_sequence_length=8)
        models.BartSeq2SeqLM(backbone, preprocessor).save_to_preset(folder)
        with pytest.raises(DataError) as caught:
            decoders.load_preprocessor(folder, 8)
        message = str(caught.value)
        assert message.startswith(f"preset {folder}: Bart has no CausalLM in KerasNLP; families ")
        assert message.endswith("gpt2_base_en; recipes.seq2seq trains its Seq2SeqLM")

    def test_too_large_for_memory(self, gpt2, monkeypatch):
        monkeypatch.setattr(presets, "_memory", lambda: 1000)
        for kind, preset in ((keras_nlp.models.CausalLM, gpt2), (CLASSIFIER, "bert_base_en")):
            found = self.message(kind, preset)
            assert re.search(r"[\d,]+ parameters x 4 bytes = .* this machine has 0.0 GB", found)

    @pytest.mark.long
    @pytest.mark.parametrize("content", ["[]", "null", "3", "{"])
    @pytest.mark.parametrize("name", ["config.json", "task.json"])
    def test_a_file_that_is_not_an_object(self, name, content, tmp_path):
        folder = tmp_path / "preset"
        tiny_presets.save("Bert", "TextClassifier", folder)
        (folder / name).write_text(content)
        assert self.message(CLASSIFIER, folder) == (
            f"preset {folder}: {name} is not a JSON object; save the preset again, or pass another"
        )

    def test_no_tokenizer(self, gpt2, tmp_path):
        keras_nlp.models.BertBackbone(20, 1, 2, 8, 16, max_sequence_length=8).save_to_preset(
            str(tmp_path / "bare")
        )
        with pytest.raises(DataError, match="bare: has no tokenizer; save one there with"):
            presets.load(
                keras_nlp.models.TextClassifierPreprocessor,
                str(tmp_path / "bare"),
                sequence_length=8,
            )

    def test_a_tokenizer_of_another_model(self):
        tokenizer = types.SimpleNamespace(vocabulary_size=lambda: 30)
        model = types.SimpleNamespace(backbone=types.SimpleNamespace(vocabulary_size=20))
        with pytest.raises(DataError, match="its tokenizer has ids up to 29 and its model 20"):
            presets.check_vocabulary(model, tokenizer, "a")
        with pytest.raises(DataError, match="its tokenizer has ids up to 20 and its model 20"):
            presets.check_vocabulary(model, types.SimpleNamespace(vocabulary={"a": 20}), "a")

    @pytest.mark.parametrize(
        ("pieces", "rows", "is_noted"),
        [
            (15_000, 30_522, True),
            (28_400, 30_522, True),
            (900, 1_100, True),
            (30_522, 30_528, False),  # a multiple of 64
            (2, 128, False),
            (50_277, 50_432, False),  # Pythia
            (151_665, 152_064, False),  # Qwen 2.5
            (250_101, 251_000, False),  # mDeBERTa v3
        ],
    )
    def test_a_vocabulary_that_was_cut_short_is_noted(self, pieces, rows, is_noted):
        """But not one whose model has further rows, so that their number is a round one."""
        tokenizer = types.SimpleNamespace(vocabulary_size=lambda: pieces)
        model = types.SimpleNamespace(backbone=types.SimpleNamespace(vocabulary_size=rows))
        note = presets.check_vocabulary(model, tokenizer, "a")
        said = (
            f"preset a: its tokenizer has {pieces:,} pieces and its model {rows:,} embeddings: if"
        )
        assert note.startswith(said) if is_noted else note is None


class TestHalfWrittenFolders:
    @pytest.fixture
    def folder(self, tmp_path):
        return Path(tiny_presets.save("Bert", "TextClassifier", tmp_path / "preset"))

    def test_no_weights(self, folder):
        (folder / "model.weights.h5").unlink()
        with pytest.raises(DataError, match="has no model.weights.h5; save the preset again"):
            presets.load_backbone(str(folder))

    def test_damaged_weights(self, folder):
        content = (folder / "model.weights.h5").read_bytes()
        (folder / "model.weights.h5").write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match="its weights are damaged .*save the preset again"):
            presets.load_backbone(str(folder))

    def test_no_vocabulary(self, folder):
        shutil.rmtree(folder / "assets")
        with pytest.raises(DataError, match="has no assets/tokenizer/vocabulary.txt; save the pre"):
            presets.load(keras_nlp.models.Tokenizer, str(folder))

    def test_a_vocabulary_without_a_special_token(self, folder):
        file = folder / "assets" / "tokenizer" / "vocabulary.txt"
        pieces = file.read_text().splitlines()
        file.write_text("\n".join(piece for piece in pieces if piece != "[SEP]"))
        with pytest.raises(DataError, match=r"Cannot find special token `'\[SEP\]'`") as caught:
            presets.load(keras_nlp.models.Tokenizer, str(folder))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "family, name, content, said",
        [
            ("Bert", "vocabulary.txt", b"", "is empty"),
            ("Bert", "vocabulary.txt", b"the\xff\n", "is not UTF-8 text"),
            ("Roberta", "merges.txt", b"", "is empty"),
            ("Roberta", "vocabulary.json", b'{"the": 1', "is not a JSON object"),
            ("Albert", "vocabulary.spm", b"no model", "is not a SentencePiece model"),
        ],
    )
    def test_damaged_tokenizer(self, family, name, content, said, tmp_path):
        """The errors of KerasHub and SentencePiece name no file."""
        tiny_presets.tokenizer(family).save_to_preset(str(tmp_path))
        file = tmp_path / "assets" / "tokenizer" / name
        file.write_bytes(content)
        with pytest.raises(DataError) as caught:
            presets.load(keras_nlp.models.Tokenizer, str(tmp_path))
        assert str(caught.value) == (
            f"preset {tmp_path}: assets/tokenizer/{name} {said}; save the preset again, or pass "
            "another"
        )

    def test_weights_of_another_model(self, folder, tmp_path):
        other = Path(tiny_presets.save("Bert", "TextClassifier", tmp_path / "b", hidden_dim=4))
        shutil.copy(other / "model.weights.h5", folder)
        with pytest.raises(DataError, match=r"do not fit its config.json \(\d+ layers, \w+ among"):
            presets.load_backbone(str(folder))

    def test_a_damaged_index_of_shards(self, folder):
        (folder / "model.weights.h5").unlink()
        (folder / "model.weights.json").write_text("")
        with pytest.raises(DataError, match="model.weights.json is not a JSON object; save the"):
            presets.load_backbone(str(folder))

    def test_a_task_without_its_configuration_has_no_head(self, folder):
        content = json.loads((folder / "task.json").read_text())
        (folder / "task.json").write_text(json.dumps(content | {"config": []}))
        assert not presets.kept_head(str(folder), ["bad", "good"])[0]


def test_a_head_without_its_weights_is_not_kept(tmp_path):
    """KerasHub loads such a folder with a random head."""
    folder = tmp_path / "preset"
    tiny_presets.save("Bert", "TextClassifier", folder)
    assert presets.kept_head(str(folder), ["bad", "good"])[0]
    (folder / "task.weights.h5").unlink()
    kept, said = presets.kept_head(str(folder), ["bad", "good"])
    assert not kept and said == f"a new head: that of {folder} has no weights (task.weights.h5)"


@pytest.mark.long
def test_a_kept_head_answers_in_logits(tmp_path):
    """KerasNLP's `activation="softmax"` would be applied once more by loss and `predict()`."""
    folder = tmp_path / "preset"
    tiny_presets.save("Bert", "TextClassifier", folder)
    logits = CLASSIFIER.from_preset(str(folder), preprocessor=None)
    config = logits.get_config()
    config |= {"backbone": logits.backbone, "activation": "softmax"}
    softmax = type(logits)(**config)
    softmax.set_weights(logits.get_weights())
    softmax.save_to_preset(str(folder))
    options = text_classification.Options(preset=str(folder), sequence_length=8)
    model = text_classification.build_model(options, 2, str(folder), keep_head=True)
    model.save_to_preset(str(tmp_path / "saved"))
    again = CLASSIFIER.from_preset(str(tmp_path / "saved"), preprocessor=None)
    inputs = {name: np.ones((1, 8), "int32") for name in logits.input}
    expected = keras.ops.convert_to_numpy(logits(inputs))
    for each in (model, again):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(each(inputs)), expected)
    # A run that trained a softmax is evaluated as it was trained.
    options.evaluation = object()
    model = text_classification.build_model(options, 2, str(folder), keep_head=True)
    assert float(keras.ops.sum(model(inputs))) == pytest.approx(1)


def test_uncased_berts_of_kerasnlp_strip_accents():
    """Kaggle's presets do not say so; a folder of one's own says what it wants."""
    pieces = [*("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), "cafe", "caf", "##\u00e9"]
    for preset, lowercase, stripped in (
        ("bert_tiny_en_uncased", True, True),
        ("bert_base_en", False, False),
        ("folder", True, False),
    ):
        tokenizer = keras_nlp.models.BertTokenizer(vocabulary=pieces, lowercase=lowercase)
        presets._strip_accents(tokenizer, preset)
        assert tokenizer.strip_accents is stripped
        assert (list(tokenizer("caf\u00e9")) == [5]) is stripped
