"""Models in the format of `transformers` as presets; written by our own exports, or by it."""

import contextlib
import json
import re
import shutil

import keras
import keras_nlp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors
from tokenizers import pre_tokenizers

from data.errors import DataError
from exports import huggingface
from models import decoders, presets, transformers_format
from recipes import bert_mlm, evaluate, text_classification
from tests.support import causal_presets, tiny_presets
from tests.support.strategy_run import write_sentences
from training.loaded_run import load_run

MASKED_LM = keras_nlp.models.MaskedLM
CLASSIFIER = keras_nlp.models.TextClassifier
CLASSES = ["bad", "good"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "nee", "née", "Nee", "Née"]
BERT_RULES = dict(clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True)
DIGITS = {"type": "Digits", "individual_digits": True}


def write_bert(folder, task, classes=CLASSES):
    """Writes a tiny random BERT; returns its Keras model."""
    tiny_presets.save("Bert", task, folder / "keras", dropout=0.2)
    kind = getattr(keras_nlp.models, task)
    model = kind.from_preset(str(folder / "keras"), compile=False)
    huggingface.write(model, folder / "there", classes)
    return model


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked_lm")
    return write_bert(folder, "MaskedLM"), str(folder / "there")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    return write_bert(folder, "TextClassifier"), str(folder / "there")


@pytest.fixture
def folder(tmp_path):
    """A classifier to be changed."""
    write_bert(tmp_path, "TextClassifier")
    return tmp_path / "there"


def change(path, **values):
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | values), encoding="utf-8")


def rewrite(folder, keep):
    """Writes the weights again, without some."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if keep(name)}
    safetensors.numpy.save_file(kept, folder / "model.safetensors", {"format": "pt"})


def inputs_of(model, length=8):
    ids = np.random.default_rng(0).integers(5, 25, (3, length)).astype(np.int32)
    inputs = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": np.ones_like(ids)}
    inputs["mask_positions"] = ids[:, :2] % length
    return {name: inputs[name] for name in model.input}


def equal(first, second):
    found, expected = (np.array(model(inputs_of(model))) for model in (first, second))
    return np.abs(found - expected).max() < 1e-5 * max(1, np.abs(expected).max())


class TestExportsReadAgain:
    def test_a_masked_language_model(self, masked_lm):
        model, preset = masked_lm
        again = presets.load_task(MASKED_LM, preset)
        assert equal(again, model) and again.backbone.dropout == 0.2
        assert presets.new_masked_lm_head(preset) is None
        assert presets.load_task(MASKED_LM, preset, backbone_dropout=0.3).backbone.dropout == 0.3

    def test_a_classifier(self, classifier):
        model, preset = classifier
        assert equal(presets.load_task(CLASSIFIER, preset), model)
        assert presets.kept_head(preset, CLASSES) == (
            True,
            f"the head of {preset} is trained further; its classes are those of the data",
        )
        other = "a new head: that of .* is for the classes bad, good"
        for classes in (["good", "bad"], ["a", "b", "c"], []):
            kept, line = presets.kept_head(preset, classes)
            assert not kept and re.fullmatch(other, line)
        assert not equal(presets.load_task(CLASSIFIER, preset, num_classes=2), model)
        assert presets.new_masked_lm_head(preset) == (
            f"a new head for masked words: {preset} has none"
        )

    def test_a_head_for_scores_learns_with_the_scale_of_the_labels(self, tmp_path):
        """The export's has none; a head in the labels' unit would hardly learn."""
        model = write_bert(tmp_path, "TextClassifier")
        scores = keras_nlp.models.BertTextClassifier(
            model.backbone, 1, model.preprocessor, activation=keras.layers.Rescaling(40.0, 70.0)
        )
        preset = tmp_path / "scores"
        huggingface.write(scores, preset, ())
        options = text_classification.Options(sequence_length=16)
        scale = keras.layers.Rescaling(20.0, 60.0)
        again = text_classification.build_model(
            options, 1, str(preset), keep_head=True, scale=scale
        )
        assert again.activation is scale and equal(again, scores)
        found, stored = again.get_layer("logits").kernel, scores.get_layer("logits").kernel
        np.testing.assert_allclose(found, 2 * stored, rtol=1e-5)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_weights_in_half_precision(self, dtype, classifier, folder):
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        halves = {
            name: tensor.astype(ml_dtypes.finfo(dtype).dtype) for name, tensor in tensors.items()
        }
        safetensors.numpy.save_file(halves, folder / "model.safetensors", {"format": "pt"})
        model = presets.load_task(CLASSIFIER, str(folder))
        for found, expected in zip(model.weights, classifier[0].weights, strict=True):
            assert found.dtype == "float32"
            np.testing.assert_allclose(found, expected, rtol=0.01, atol=1e-6)

    def test_classes_without_names(self, folder):
        change(folder / "config.json", id2label={"0": "LABEL_0", "1": "LABEL_1"})
        assert presets.kept_head(str(folder), ["a", "b"])[0]
        assert not presets.kept_head(str(folder), ["a", "b", "c"])[0]
        assert not presets.kept_head(str(folder), [])[0]

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (
                dict(architectures=["BertForTokenClassification"]),
                "is of BertForTokenClassification",
            ),
            (dict(id2label={}, num_labels=3), "is for 2 classes, and its config.json names 3"),
        ],
    )
    def test_a_classifier_of_something_else_gets_a_new_head(self, values, message, folder):
        change(folder / "config.json", **values)
        assert presets.kept_head(str(folder), CLASSES) == (
            False,
            f"a new head: that of {folder} {message}",
        )
        assert presets.load_task(CLASSIFIER, str(folder), num_classes=2).num_classes == 2

    def test_the_tokens(self, masked_lm):
        model, preset = masked_lm
        texts = ["The loss of a STEPS, not báð.", "a film"]
        for kind in ("MaskedLMPreprocessor", "TextClassifierPreprocessor"):
            preprocessor = presets.load(getattr(keras_nlp.models, kind), preset, sequence_length=8)
            again = preprocessor.tokenizer
            assert preprocessor.sequence_length == 8
            assert again.get_vocabulary() == model.preprocessor.tokenizer.get_vocabulary()
            assert again(texts) == model.preprocessor.tokenizer(texts)

    @pytest.mark.long
    @pytest.mark.parametrize("family", ["GPT2", "Llama3", "Gemma"])
    def test_a_causal_language_model(self, family, tmp_path):
        sizes = dict(intermediate_dim=64) if family == "GPT2" else {}  # four times the width
        task = causal_presets.make_task(family, **sizes)
        preset = str(tmp_path / "there")
        huggingface.write_causal_lm(task, tmp_path / "there")
        again = decoders.load_task(preset, None, 16)
        assert equal(again, task)
        tokenizer = decoders.load_preprocessor(preset, 16).tokenizer
        for text in causal_presets.TEXT:
            assert list(tokenizer(text)) == list(task.preprocessor.tokenizer(text))


LLAMA_ROPE = dict(rope_theta=5e5, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA_ROPE |= dict(rope_type="llama3", original_max_position_embeddings=8192)


@pytest.mark.parametrize(
    ("kind", "setting", "value", "message"),
    [
        ("llama", "hidden_act", "gelu", "hidden_act is gelu, and KerasHub's llama has silu"),
        ("llama", "attention_bias", True, "attention_bias is True, and KerasHub's llama has False"),
        ("llama", "rope_scaling", {"type": "linear", "factor": 2.0}, "rope_type is linear, and"),
        ("llama", "rope_parameters", LLAMA_ROPE, None),
        ("qwen2", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_type is yarn, and"),
        ("qwen2", "use_sliding_window", True, "use_sliding_window is True, and KerasHub's qwen2"),
        ("qwen2", "use_sliding_window", False, None),
        ("qwen2", "rope_scaling", "damaged", None),
        ("gpt2", "activation_function", "relu", "activation_function is relu, and KerasHub's gpt2"),
        ("gpt2", "activation_function", "gelu_new", None),
        ("gpt2", "tie_word_embeddings", False, "tie_word_embeddings is False, and KerasHub's gpt2"),
        ("gpt2", "layer_norm_epsilon", 1e-6, "layer_norm_epsilon is 1e-06, and KerasHub's gpt2"),
        ("gpt2", "layer_norm_epsilon", 1e-5, None),
        ("gpt2", "scale_attn_weights", False, "scale_attn_weights is False, and KerasHub's"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx is Tr"),
        ("gpt2", "reorder_and_upcast_attn", True, "reorder_and_upcast_attn is True, and"),
        ("gemma", "rms_norm_eps", 1e-5, "rms_norm_eps is 1e-05, and KerasHub's gemma has 1e-06"),
        ("gemma", "rope_theta", 500.0, "rope_theta is 500.0, and KerasHub's gemma has 10000"),
        ("gemma", "rope_theta", 10000.0, None),
        ("gemma2", "rope_parameters", {"rope_theta": 500.0}, "rope_theta is 500.0, and KerasHub's"),
        ("bart", "activation_function", "relu", "activation_function is relu, and KerasHub's bart"),
        ("bart", "scale_embedding", True, "scale_embedding is True, and KerasHub's bart has False"),
        ("bart", "normalize_before", True, "normalize_before is True, and KerasHub's bart has Fal"),
        ("bart", "tie_word_embeddings", False, "tie_word_embeddings is False, and KerasHub's bart"),
        ("bart", "decoder_layers", 3, "encoder_layers is None and decoder_layers 3, and KerasHub"),
        ("bart", "tie_word_embeddings", True, None),
        ("bert", "is_decoder", True, "is_decoder is True, and KerasHub's bert has False"),
        ("bert", "add_cross_attention", True, "add_cross_attention is True, and KerasHub's bert"),
        ("smollm3", "tie_word_embeddings", False, "tie_word_embeddings is False, and KerasHub's"),
    ],
)
def test_a_causal_model_that_kerashub_would_compute_otherwise(
    kind, setting, value, message, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, setting: value}))
    refused = pytest.raises(DataError, match=f"^preset .*: {message}")
    with refused if message else contextlib.nullcontext():
        transformers_format.require_same_operations(str(tmp_path))


@pytest.mark.parametrize(("scalar", "is_refused"), [(8, False), (4, False), (16, True)])
def test_the_scale_of_a_gemma_2(scalar, is_refused, tmp_path):
    content = dict(model_type="gemma2", query_pre_attn_scalar=scalar, head_dim=8)
    content |= dict(hidden_size=16, num_attention_heads=4)
    (tmp_path / "config.json").write_text(json.dumps(content))
    message = "query_pre_attn_scalar is 16, and KerasHub's gemma2 has 8 or 4"
    with pytest.raises(DataError, match=message) if is_refused else contextlib.nullcontext():
        transformers_format.require_same_operations(str(tmp_path))


@pytest.mark.parametrize(("bias", "is_refused"), [(0.0, False), (0.5, True)])
def test_the_bias_of_a_bart(bias, is_refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bart"}))
    tensors = {"final_logits_bias": np.full((1, 3), bias, "float32")}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    refused = pytest.raises(DataError, match="final_logits_bias is not zero, and KerasHub's bart")
    with refused if is_refused else contextlib.nullcontext():
        transformers_format.require_same_operations(str(tmp_path))


def test_the_layers_of_a_bart(tmp_path):
    """Which `transformers` 5 writes under another name than KerasHub reads."""
    content = {"model_type": "bart", "vocab_size": 9, "max_position_embeddings": 8, "d_model": 8}
    for part in ("encoder", "decoder"):
        content |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(content | {"dropout": 0.1}))
    tensors = {"shared.bias": np.ones(8, "float32")}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="its weights have no shared.weight, which KerasHub needs"):
        presets.load_backbone(str(tmp_path))


def test_a_llama_with_pieces_of_sentencepiece(tmp_path):
    """As Llama 2's; KerasHub would make bytes of its texts."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    metaspace = {"type": "Metaspace", "replacement": "\u2581"}
    for part, refused in ((metaspace, True), ({"type": "ByteLevel"}, False)):
        stored = {"model": {"type": "BPE"}, "pre_tokenizer": part, "decoder": part}
        (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
        message = pytest.raises(DataError, match="its tokenizer is SentencePiece's, as Llama 2's")
        with message if refused else contextlib.nullcontext():
            transformers_format.require_same_operations(str(tmp_path))


def test_settings_of_a_llama(tmp_path):
    """As `transformers` 5 writes them; KerasHub reads neither."""
    task = causal_presets.make_task("Llama3")
    huggingface.write_causal_lm(task, tmp_path / "there")
    path = tmp_path / "there" / "config.json"
    content = json.loads(path.read_text())
    content.pop("rope_scaling", None)
    path.write_text(json.dumps(content | {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA_ROPE}))
    found = decoders.load_task(str(tmp_path / "there"), None, 16).backbone.get_config()
    assert found["layer_norm_epsilon"] == 1e-5 and found["rope_max_wavelength"] == 5e5
    assert found["rope_frequency_adjustment_factor"] == 32
    assert found["rope_pretraining_sequence_length"] == 8192


def test_a_handle_of_hugging_face(classifier, tmp_path, monkeypatch):
    """In the folder where its client keeps downloads, without a network."""
    model, preset = classifier
    downloads = tmp_path / "hub" / "models--owner--name"
    shutil.copytree(preset, downloads / "snapshots" / "1")
    (downloads / "refs").mkdir()
    (downloads / "refs" / "main").write_text("1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    handle = "hf://owner/name"
    assert presets.kept_head(handle, CLASSES)[0]
    assert equal(presets.load_task(CLASSIFIER, handle), model)
    kind = keras_nlp.models.TextClassifierPreprocessor
    tokenizer = presets.load(kind, handle, sequence_length=8).tokenizer
    assert list(tokenizer("a film")) == list(model.preprocessor.tokenizer("a film"))
    (downloads / "snapshots" / "1" / "model.safetensors").unlink()
    with pytest.raises(
        DataError, match="hf://owner/name: has no model.safetensors; download it again"
    ):
        presets.load_task(CLASSIFIER, handle, num_classes=2)


@pytest.fixture
def hub(monkeypatch):
    """Returns what the client raises for each file, and the calls; nothing is remembered."""
    failures, calls = {}, []

    def download(handle, name):
        calls.append(name)
        if name not in failures:
            raise hub_errors.EntryNotFoundError(f"no {name}")
        failure = failures[name]
        if isinstance(failure, Exception):
            raise failure
        return failure

    transformers_format._download.cache_clear()
    monkeypatch.setattr(transformers_format.huggingface_hub, "hf_hub_download", download)
    yield failures, calls
    transformers_format._download.cache_clear()


class TestFilesOfAHandle:
    HANDLE = "hf://owner/model"
    NO_ANSWER = "owner/model: config.json cannot be downloaded .ReadTimeout: the read timed out.$"

    class ReadTimeout(Exception):
        """Stands for the HTTP client's."""

    def test_a_failed_download_does_not_count_as_no_file(self, hub):
        failures, _ = hub
        failures["config.json"] = self.ReadTimeout("the read timed out\nsecond line")
        for ask in (
            transformers_format.config_of,
            transformers_format.require_same_operations,
            lambda preset: transformers_format.has_head(preset, "TextClassifier"),
        ):
            with pytest.raises(DataError, match=self.NO_ANSWER):
                ask(self.HANDLE)
        failures.clear()  # the next try is a new one
        assert transformers_format.config_of(self.HANDLE) == {}

    def test_without_a_network_only_known_answers_count(self, hub, monkeypatch, tmp_path):
        failures, _ = hub
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        failure = hub_errors.LocalEntryNotFoundError("not in the cache")
        failure.__cause__ = ConnectionError("no route")
        failures["config.json"] = failures["vocab.txt"] = failure
        message = "config.json cannot be downloaded .ConnectionError: no route.; .* HF_HUB_OFFLINE"
        with pytest.raises(DataError, match=message):
            transformers_format.file_of(self.HANDLE, "config.json")
        # An earlier answer, as the client remembers it.
        folder = tmp_path / "models--owner--model"
        for name in (".no_exist/1/config.json", "snapshots/1/README.md"):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).touch()
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("1")
        assert transformers_format.file_of(self.HANDLE, "config.json") is None
        with pytest.raises(DataError, match="vocab.txt cannot be downloaded"):
            transformers_format.file_of(self.HANDLE, "vocab.txt")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert transformers_format.file_of(self.HANDLE, "vocab.txt") is None

    def test_a_handle_is_asked_once_for_a_file(self, hub, folder):
        failures, calls = hub
        failures["config.json"] = str(folder / "config.json")
        for _ in range(2):
            assert transformers_format.dropout_of(self.HANDLE) == 0.2
            transformers_format.require_same_operations(self.HANDLE)
            assert not transformers_format.has_head(self.HANDLE, "TextClassifier")
        assert sorted(calls) == [
            "config.json",
            "model.safetensors",
            "model.safetensors.index.json",
        ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_type", ["bert"]), ("id2label", ["a", "b"]), ("num_labels", "2")]
    + [("hidden_dropout_prob", "0.1"), ("architectures", 1)],
)
def test_a_setting_of_another_type_is_named(name, value, folder):
    change(folder / "config.json", **{name: value})
    for look in (
        lambda: presets.kept_head(str(folder), CLASSES),
        lambda: presets.load_task(CLASSIFIER, str(folder), num_classes=2),
    ):
        with pytest.raises(DataError, match=f"config.json is damaged .{name} is "):
            look()


@pytest.mark.parametrize("files", [[], {"tensor": 1}])
def test_a_damaged_index_of_shards(files, folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(DataError, match="model.safetensors.index.json is damaged; download"):
        presets.load_task(CLASSIFIER, str(folder))


class TestWordPieces:
    @pytest.mark.parametrize(
        ("settings", "normalizer", "expected"),
        [
            (dict(do_lower_case=True), {}, ["nee", "nee"]),
            (dict(do_lower_case=True, strip_accents=None), {}, ["nee", "nee"]),
            (dict(do_lower_case=True, strip_accents=False), {}, ["née", "nee"]),
            (dict(do_lower_case=False), {}, ["Née", "Nee"]),
            (dict(do_lower_case=False, strip_accents=True), {}, ["Nee", "Nee"]),
            ({}, {}, ["nee", "nee"]),
            ({}, dict(lowercase=False), ["Née", "Nee"]),
            ({}, dict(lowercase=True, strip_accents=False), ["née", "nee"]),
        ],
    )
    @pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json"])
    def test_case_and_accents(self, settings, normalizer, expected, name, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "distilbert"}')
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        vocabulary = {piece: number for number, piece in enumerate(PIECES)}
        model = {"type": "WordPiece", "vocab": vocabulary}
        content = json.dumps({"model": model, "normalizer": normalizer, "added_tokens": []})
        (tmp_path / "tokenizer.json").write_text(content)
        if name == "vocab.txt":
            (tmp_path / name).write_text("\n".join(PIECES), encoding="utf-8")
        tokenizer = presets.load(keras_nlp.models.Tokenizer, str(tmp_path))
        assert isinstance(tokenizer, keras_nlp.models.DistilBertTokenizer)
        assert [PIECES[number] for number in tokenizer("Née Nee")] == expected

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model": {"type": "BPE"}}, "has no tokenizer: neither vocab.txt nor a"),
            (
                {"model": {"type": "WordPiece", "vocab": {"[PAD]": 0, "[UNK]": 2}}},
                "has no tokenizer: neither vocab.txt nor a",
            ),
            ({"added_tokens": [{"content": "x", "id": 99}]}, "has no tokenizer: neither vocab.txt"),
        ],
    )
    def test_other_vocabularies_are_refused(self, changes, message, folder):
        change(folder / "tokenizer.json", **changes)
        (folder / "SHA256SUMS").unlink(missing_ok=True)
        with pytest.raises(DataError, match=message):
            presets.load(keras_nlp.models.Tokenizer, str(folder))

    def test_another_tokenizer_is_refused(self, folder):
        change(folder / "tokenizer_config.json", tokenizer_class="BertJapaneseTokenizer")
        with pytest.raises(DataError, match="its tokenizer is a BertJapaneseTokenizer, which Ker"):
            presets.load(keras_nlp.models.Tokenizer, str(folder))

    def words_of_bert(self, folder, **parts):
        (folder / "config.json").write_text('{"model_type": "bert"}')
        vocabulary = {piece: number for number, piece in enumerate(PIECES)}
        model = {"type": "WordPiece", "vocab": vocabulary}
        content = {"model": model, "normalizer": {"type": "BertNormalizer"} | BERT_RULES} | parts
        (folder / "tokenizer.json").write_text(json.dumps(content))
        return presets.load(keras_nlp.models.Tokenizer, str(folder))

    def test_words_of_bert(self, tmp_path):
        tokenizer = self.words_of_bert(tmp_path, pre_tokenizer={"type": "BertPreTokenizer"})
        assert [PIECES[number] for number in tokenizer("Née nee")] == ["nee", "nee"]

    @pytest.mark.parametrize(
        ("parts", "named"),
        [
            ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, "pre_tokenizer WhitespaceSplit"),
            ({"pre_tokenizer": None}, "pre_tokenizer none"),
            (
                {"pre_tokenizer": {"type": "BertPreTokenizer"}, "normalizer": {"type": "NFC"}},
                "normalizer NFC and pre_tokenizer BertPreTokenizer",
            ),
        ],
    )
    def test_other_words_are_refused(self, parts, named, tmp_path):
        message = re.escape(named) + r"\) splits texts into other words than KerasHub's BertToken"
        with pytest.raises(DataError, match=message):
            self.words_of_bert(tmp_path, **parts)

    def test_damaged_rules(self, tmp_path):
        with pytest.raises(DataError, match="tokenizer.json is damaged"):
            self.words_of_bert(tmp_path, pre_tokenizer={"type": "Unheard-of"})

    @pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json"])
    def test_added_tokens(self, name, tmp_path):
        """A word is found as any other; one with punctuation is split."""
        added = [{"content": "melting", "id": 9}, {"content": "<ent>", "id": 10}]
        if name == "vocab.txt":
            (tmp_path / name).write_text("\n".join(PIECES) + "\n", encoding="utf-8")
        tokenizer = self.words_of_bert(tmp_path, added_tokens=added)
        assert list(map(int, tokenizer("nee melting"))) == [5, 9]
        assert tokenizer.vocabulary_size() == 11
        note = presets.added_tokens_note(str(tmp_path), tokenizer)
        assert note.endswith("KerasHub's BertTokenizer does not have them: <ent>")
        assert presets.added_tokens_note(None, tokenizer) is None


# A vocabulary of all bytes, as GPT-2 writes them.
BYTES = [*("<s>", "<pad>", "</s>", "<unk>"), *sorted(pre_tokenizers.ByteLevel.alphabet())]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u0120", "he"), ("1", "2")]
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


class TestBytePairs:
    """As `transformers` 5 saves RoBERTa, BART and GPT-2: `tokenizer.json` alone."""

    def write(self, folder, model_type="roberta", added=(), **changes):
        pieces = [*BYTES, *map("".join, MERGES), "<mask>", "<|endoftext|>"]
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        model = {"type": "BPE", "vocab": vocabulary, "merges": MERGES} | changes.pop("model", {})
        numbers = {token: len(pieces) + number for number, token in enumerate(added)}
        tokens = [{"content": token, "id": number} for token, number in numbers.items()]
        content = {"model": model, "added_tokens": tokens, "normalizer": None}
        content |= {"pre_tokenizer": BYTE_LEVEL} | changes
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        (folder / "tokenizer.json").write_text(json.dumps(content))
        return vocabulary | numbers

    def read(self, folder):
        return presets.load(keras_nlp.models.Tokenizer, str(folder))

    @pytest.mark.parametrize("merges", [MERGES, list(map(" ".join, MERGES))])
    @pytest.mark.parametrize(
        ("model_type", "kind"), [("roberta", "Roberta"), ("bart", "Bart"), ("gpt2", "GPT2")]
    )
    def test_tokenizer_json_alone(self, model_type, kind, merges, tmp_path):
        ids = self.write(tmp_path, model_type, model={"merges": merges})
        tokenizer = self.read(tmp_path)
        assert type(tokenizer).__name__ == f"{kind}Tokenizer"
        expected = [ids[piece] for piece in ("hell", "\u0120he", "12", "\u0120", "\u0120", "3")]
        assert list(map(int, tokenizer("hell he12  3"))) == expected
        assert presets.added_tokens_note(str(tmp_path), tokenizer) is None

    def test_space_before_the_first_word(self, tmp_path):
        ids = self.write(tmp_path, pre_tokenizer=BYTE_LEVEL | {"add_prefix_space": True})
        assert list(map(int, self.read(tmp_path)("he"))) == [ids["\u0120he"]]

    @pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json"])
    def test_added_tokens_are_kept_whole(self, file, tmp_path):
        ids = self.write(tmp_path, added=["<ent>", "newword"])
        if file == "vocab.json":
            vocabulary = {piece: ids[piece] for piece in ids if piece not in ("<ent>", "newword")}
            (tmp_path / file).write_text(json.dumps(vocabulary))
            lines = ["#version: 0.2", *map(" ".join, MERGES)]
            (tmp_path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
            (tmp_path / "tokenizer.json").unlink()
            added = {token: ids[token] for token in ("<ent>", "newword")}
            (tmp_path / "added_tokens.json").write_text(json.dumps(added))
        tokenizer = self.read(tmp_path)
        expected = [ids[piece] for piece in ("he", "<ent>", "he", "newword", "<mask>")]
        assert list(map(int, tokenizer("he<ent>henewword<mask>"))) == expected
        assert presets.added_tokens_note(str(tmp_path), tokenizer) is None
        saved = type(tokenizer).from_config(tokenizer.get_config())
        tokenizer.save_assets(str(tmp_path))
        saved.load_assets(str(tmp_path))
        assert list(map(int, saved("he<ent>henewword<mask>"))) == expected

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                dict(model={"type": "Unigram"}),
                "its tokenizer.json is of type Unigram, and KerasHub",
            ),
            (dict(model={"end_of_word_suffix": "</w>"}), "end_of_word_suffix is '</w>' in its tok"),
            (dict(model={"vocab": None}), "tokenizer.json is damaged (vocab or merges)"),
            (dict(added_tokens=[{}]), "tokenizer.json is damaged (added_tokens)"),
            (
                dict(normalizer={"type": "Lowercase"}),
                "its tokenizer.json (normalizer Lowercase and",
            ),
            (
                dict(pre_tokenizer={"type": "Sequence", "pretokenizers": [DIGITS, BYTE_LEVEL]}),
                "its tokenizer.json (normalizer none and pre_tokenizer Digits, ByteLevel) splits",
            ),
        ],
    )
    def test_other_tokenizers_are_refused(self, changes, message, tmp_path):
        self.write(tmp_path, **changes)
        with pytest.raises(DataError, match=re.escape(f"preset {tmp_path}: {message}")):
            self.read(tmp_path)

    def test_no_tokenizer(self, tmp_path):
        self.write(tmp_path)
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(DataError, match="has no tokenizer: neither vocab.json and merges.txt"):
            self.read(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "file"),
    [
        ("albert", "spiece.model"),
        ("xlm-roberta", "sentencepiece.bpe.model"),
        ("gemma2", "tokenizer.model"),
    ],
)
def test_pieces_of_sentencepiece_need_their_file(model_type, file, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for has in ("has no tokenizer", "has only the tokenizer's tokenizer.json"):
        with pytest.raises(DataError, match=f"{has}, and KerasHub needs {file}; copy it from"):
            presets.load(keras_nlp.models.Tokenizer, str(tmp_path))
        (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')


def test_a_llama_with_other_words_is_refused(tmp_path):
    """As SmolLM 2's, of type llama, which splits words as GPT-2 does."""
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    TestBytePairs().write(tmp_path, "llama", model={"merges": list(map(" ".join, MERGES))})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="pre_tokenizer ByteLevel.* than KerasHub's Llama3Tokeniz"):
        presets.load(keras_nlp.models.Tokenizer, str(tmp_path))


@pytest.mark.export
@pytest.mark.parametrize("family", ["Roberta", "Bart", "GPT2", "Qwen2", "Bert"])
def test_tokens_are_those_of_transformers(family, tmp_path):
    """With `tokenizer.json` alone, and with added tokens."""
    import transformers

    kind = getattr(transformers, f"{family}Tokenizer")
    pieces = [*BYTES, *map("".join, MERGES), "<mask>", "<|endoftext|>"]
    if family == "Bert":
        pieces = [*PIECES, "don", "'", "t", "1", "##2"]
        there = kind(vocab={piece: number for number, piece in enumerate(pieces)})
    else:
        there = kind({piece: number for number, piece in enumerate(pieces)}, MERGES)
        there.add_tokens(["newword", "<ent>"])
    there.save_pretrained(tmp_path)
    assert not (tmp_path / "vocab.json").exists() and not (tmp_path / "vocab.txt").exists()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family.lower()}))
    tokenizer = presets.load(keras_nlp.models.Tokenizer, str(tmp_path))
    text = "Née hell  he 12 don't\n\n he<ent> newword, hell   1234"
    if family == "Bert":
        text = "Née nee 12 don't 1234"
    assert list(map(int, tokenizer(text))) == there(text, add_special_tokens=False).input_ids


@pytest.mark.long
def test_an_encoder_without_a_pooler_gets_a_new_one(masked_lm, tmp_path, capsys):
    """As `transformers` saves a BERT for masked words; the rest is as it was."""
    stock, original = masked_lm
    folder = shutil.copytree(original, tmp_path / "there")
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    line = f"a new pooler, which reads [CLS]: {folder} has none"
    assert presets.new_pooler(str(folder)) is None
    rewrite(folder, lambda name: "pooler" not in name)
    assert presets.new_pooler(str(folder)) == line
    assert equal(presets.load_task(MASKED_LM, str(folder)), stock)
    pooler = presets.load_task(CLASSIFIER, str(folder), num_classes=2).backbone.pooled_dense
    kernel, bias = map(np.array, pooler.weights)
    assert 0.01 < kernel.std() < 0.03 and not bias.any()
    # Another one is converted whole afterwards.
    loaded = presets.load_task(CLASSIFIER, original, num_classes=2)
    kernels = [model.backbone.pooled_dense.kernel for model in (loaded, stock)]
    assert np.array_equal(*map(np.array, kernels))
    write_sentences(tmp_path / "sentences")
    options = dict(dataset=str(tmp_path / "sentences"), preset=str(folder), max_steps=2, epochs=1)
    options |= dict(sequence_length=8, run_dir=tmp_path / "run", cache_dir=tmp_path / "cache")
    text_classification.main(text_classification.Options(**options))
    assert line in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("of_means", [pytest.param(True, marks=pytest.mark.long), False])
def test_an_encoder_of_sentence_transformers_pools_means(of_means, masked_lm, tmp_path, capsys):
    """If it was trained on them: [CLS] begins as the mean, in one more layer, which is saved."""
    stock, original = masked_lm
    folder = shutil.copytree(original, tmp_path / "there")
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_mean_tokens": of_means, "pooling_mode_cls_token": not of_means}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    write_sentences(tmp_path / "sentences")
    options = dict(dataset=str(tmp_path / "sentences"), preset=str(folder), max_steps=1, epochs=1)
    options |= dict(sequence_length=8, run_dir=tmp_path / "run", cache_dir=tmp_path / "cache")
    options |= dict(freeze_backbone=True, dropout=0.0)
    results = text_classification.main(text_classification.Options(**options))
    assert ("[CLS] begins as the mean of the tokens" in capsys.readouterr().out) == of_means
    model = load_run(tmp_path / "run").load_model()
    assert model.backbone.num_layers == stock.backbone.num_layers + of_means
    found = evaluate.main(evaluate.Options(run_dir=tmp_path / "run"))
    assert found["test"] == pytest.approx(results["test"])


class TestWhatCannotBeConverted:
    """One line with what to do."""

    def message(self, folder, kind=CLASSIFIER):
        with pytest.raises(DataError) as caught:
            presets.load_task(kind, str(folder), num_classes=2)
        line = str(caught.value)
        assert "\n" not in line and line.startswith(f"preset {folder}: ")
        return line.removeprefix(f"preset {folder}: ")

    def test_weights_of_pytorch(self, folder):
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        assert self.message(folder) == (
            "has no model.safetensors, only pytorch_model.bin; transformers."
            "BertForSequenceClassification.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) "
            "writes it"
        )
        (folder / "pytorch_model.bin").unlink()
        assert self.message(folder) == "model.safetensors is missing; download the model again"

    def test_a_shard_is_missing(self, folder):
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        shards = dict.fromkeys(tensors, "a.safetensors") | {"classifier.bias": "b.safetensors"}
        index = json.dumps({"metadata": {}, "weight_map": shards})
        (folder / "model.safetensors.index.json").write_text(index)
        for shard in ("a.safetensors", "b.safetensors"):
            assert self.message(folder) == f"{shard} is missing; download the model again"
            part = {name: tensors[name] for name in tensors if shards[name] == shard}
            safetensors.numpy.save_file(part, folder / shard, {"format": "pt"})
        assert presets.kept_head(str(folder), CLASSES)[0]
        assert presets.load_task(CLASSIFIER, str(folder)).num_classes == 2

    def test_damaged_weights(self, folder):
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
        assert self.message(folder).startswith("model.safetensors is damaged (")

    def test_an_encoder_without_a_weight(self, folder):
        rewrite(folder, lambda name: "embeddings.LayerNorm" not in name)
        assert self.message(folder).startswith("its weights have no embeddings.LayerNorm.")

    def test_an_encoder_of_another_family_alone(self, tmp_path):
        sizes = dict(vocab_size=9, n_layers=1, n_heads=2, dim=8, hidden_dim=16, dropout=0.1)
        content = sizes | dict(
            max_position_embeddings=8, model_type="distilbert", architectures=["DistilBertModel"]
        )
        (tmp_path / "config.json").write_text(json.dumps(content))
        tensors = {"embeddings.word_embeddings.weight": np.ones((9, 8), "float32")}
        safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
        assert self.message(tmp_path) == (
            "its weights have no distilbert.embeddings.word_embeddings.weight, which KerasHub "
            "needs; transformers.AutoModelForMaskedLM.from_pretrained(FOLDER).save_pretrained("
            "NEW_FOLDER) writes it"
        )

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(model_type="mpnet"), "KerasHub does not convert models of type mpnet; pass one"),
            (dict(hidden_act="relu"), "hidden_act is relu, and KerasHub's encoders have gelu"),
            (dict(position_embedding_type="relative_key"), "position_embedding_type is relative_"),
        ],
    )
    def test_other_models(self, changes, message, folder):
        change(folder / "config.json", **changes)
        assert self.message(folder).startswith(message)

    def test_a_setting_is_missing(self, folder):
        content = json.loads((folder / "config.json").read_text())
        del content["vocab_size"]
        (folder / "config.json").write_text(json.dumps(content))
        assert self.message(folder) == (
            "its config.json or tokenizer_config.json has no 'vocab_size', which KerasHub needs"
        )

    def test_too_large_for_memory(self, classifier, monkeypatch):
        model, preset = classifier
        monkeypatch.setattr(presets, "_memory", lambda: 1000)
        assert self.message(preset).startswith(f"{model.count_params():,} parameters x 4 bytes")


def test_an_untied_head_is_not_loaded(masked_lm, tmp_path):
    write_bert(tmp_path, "MaskedLM")
    change(tmp_path / "there" / "config.json", tie_word_embeddings=False)
    assert presets.new_masked_lm_head(str(tmp_path / "there"))


def test_weights_of_roberta(tmp_path):
    """Old names of a head's weights, and the segment that KerasHub leaves out."""
    config = {"model_type": "roberta", "num_labels": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    backbone = keras_nlp.models.RobertaBackbone(9, 1, 2, 8, 16, max_sequence_length=8)
    model = keras_nlp.models.RobertaMaskedLM(backbone)
    names = ("dense.weight", "dense.bias", "layer_norm.gamma", "layer_norm.beta", "bias")
    shapes = ((8, 8), (8,), (8,), (8,), (9,))
    rng = np.random.default_rng(0)
    tensors = {
        f"lm_head.{name}": rng.normal(size=shape).astype("float32")
        for name, shape in zip(names, shapes, strict=True)
    }
    segments = rng.normal(size=(1, 8)).astype("float32")
    tensors["roberta.embeddings.token_type_embeddings.weight"] = segments
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    assert transformers_format.has_head(str(tmp_path), "MaskedLM")
    assert not transformers_format.has_head(str(tmp_path), "TextClassifier")
    transformers_format.load_head(model, str(tmp_path), "MaskedLM")
    found = {weight.path: np.array(weight) for weight in model.get_layer("mlm_head").weights}
    kernel, gamma = tensors["lm_head.dense.weight"].T, tensors["lm_head.layer_norm.gamma"]
    np.testing.assert_array_equal(found["mlm_head/intermediate_dense/kernel"], kernel)
    np.testing.assert_array_equal(found["mlm_head/intermediate_layer_norm/gamma"], gamma)
    np.testing.assert_array_equal(found["mlm_head/output_bias"], tensors["lm_head.bias"])
    positions = backbone.embeddings.position_embedding.position_embeddings
    before = np.array(positions)
    transformers_format.add_segments(backbone, str(tmp_path))
    np.testing.assert_allclose(positions - before, np.repeat(segments, 8, 0), atol=1e-6)


class TestRecipes:
    @pytest.mark.long
    def test_a_classifier_is_trained_further(self, classifier, tmp_path, capsys):
        _, preset = classifier
        write_sentences(tmp_path)
        options = text_classification.Options(
            preset=preset,
            dataset=str(tmp_path),
            sequence_length=8,
            max_steps=2,
            global_batch_size=8,
            run_dir=tmp_path / "run",
        )
        results = text_classification.main(options)
        assert f"a new head: that of {preset} is for the classes bad, good" in (
            capsys.readouterr().out
        )
        again = evaluate.main(evaluate.Options(run_dir=tmp_path / "run"))
        assert again["test"] == pytest.approx(results["test"])

    @pytest.mark.long
    def test_a_masked_language_model_is_trained_further(self, masked_lm, tmp_path, capsys):
        model, preset = masked_lm
        text = tmp_path / "text.txt"
        text.write_text("".join(f"the loss of a step is {n} .\n" for n in range(300)))
        options = bert_mlm.Options(
            preset=preset,
            dataset=str(text),
            sequence_length=8,
            max_steps=1,
            base_learning_rate=1e-9,
            global_batch_size=8,
            run_dir=tmp_path / "run",
        )
        bert_mlm.main(options)
        assert "a new head" not in capsys.readouterr().out
        assert equal(load_run(tmp_path / "run").load_model("float32"), model)


@pytest.mark.export
@pytest.mark.parametrize("task", ["MaskedLM", "TextClassifier"])
@pytest.mark.parametrize("family", ["Bert", "DistilBert", "Roberta", "XLMRoberta", "Albert"])
def test_heads_are_those_of_transformers(family, task, tmp_path):
    import torch
    import transformers

    sizes = dict(vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(intermediate_size=16, max_position_embeddings=34, embedding_size=8)
    if family == "DistilBert":
        sizes |= dict(dim=8, n_layers=2, n_heads=2, hidden_dim=16)
    if family == "Bert":
        sizes |= dict(hidden_act="gelu_pytorch_tanh")
    config = getattr(transformers, f"{family}Config")(num_labels=3, pad_token_id=1, **sizes)
    torch.manual_seed(0)
    kind = {"MaskedLM": "MaskedLM", "TextClassifier": "SequenceClassification"}[task]
    there = getattr(transformers, f"{family}For{kind}")(config).eval()
    for parameter in there.parameters():
        parameter.data.normal_(std=0.5)
    there.save_pretrained(tmp_path)
    preset = str(tmp_path)
    assert transformers_format.has_head(preset, task)
    model = presets.load_task(getattr(keras_nlp.models, task), preset)
    inputs = inputs_of(model)
    with torch.no_grad():
        found = there(input_ids=torch.tensor(inputs["token_ids"]).long()).logits.numpy()
    if task == "MaskedLM":
        found = np.take_along_axis(found, inputs["mask_positions"][:, :, np.newaxis], axis=1)
    expected = np.array(model(inputs))
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-3 * max(1, np.abs(expected).max())


@pytest.mark.export
def test_a_bart_is_that_of_transformers(tmp_path):
    import torch
    import transformers

    sizes = {"vocab_size": 30, "d_model": 8, "max_position_embeddings": 32}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 16}
    torch.manual_seed(0)
    config = transformers.BartConfig(**sizes)
    there = transformers.BartForConditionalGeneration(config).eval()
    for parameter in there.parameters():
        parameter.data.normal_(std=0.5)
    there.save_pretrained(tmp_path)
    assert "num_hidden_layers" not in json.loads((tmp_path / "config.json").read_text())
    model = presets.load_task(keras_nlp.models.Seq2SeqLM, str(tmp_path))
    random = np.random.default_rng(0)
    prompts, responses = (random.integers(4, 30, (3, n)).astype(np.int32) for n in (8, 6))
    inputs = {"encoder_token_ids": prompts, "encoder_padding_mask": np.ones_like(prompts)}
    inputs |= {"decoder_token_ids": responses, "decoder_padding_mask": np.ones_like(responses)}
    with torch.no_grad():
        ids = torch.tensor(prompts).long()
        expected = there(ids, decoder_input_ids=torch.tensor(responses).long()).logits.numpy()
    found = np.array(model(inputs))
    assert np.abs(found - expected).max() < 1e-4 * max(1, np.abs(expected).max())
