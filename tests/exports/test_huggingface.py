"""The folder for `transformers`; what needs its packages runs in `make test-export`."""

import json

import numpy as np
import pytest

from data.errors import DataError
from distribution.keras_compat import hub_models
from exports import huggingface
from exports.comparison import Differs
from models.bert import encode
from tests.exports.conftest import CLASSES, TEXTS, inputs_of
from tests.support import causal_presets

REAL = (
    "Née in Zürich, the naïve café-owner didn't pay $1,234.50 (or 80 %) for it!",
    "Returns `x[i, ...]` as an N-D tensor: see tf.data.Dataset.map(); e.g. [MASK].",
    "東京 is 東 and 京; naïveté\tand\nlines\u200b of \u00ad soft hyphens — dashes²",
    "A" * 101 + " " + "ab" * 40,
)


def test_names_shapes_and_values_are_those_of_transformers(masked_lm, classifier):
    model = masked_lm().model
    tensors = huggingface.named_tensors(model)
    layer = "bert.encoder.layer.0"
    assert {
        name.split(f"{layer}.")[1]: t.shape for name, t in tensors.items() if layer in name
    } == {
        **{f"attention.self.{part}.weight": (16, 16) for part in ("query", "key", "value")},
        **{f"attention.self.{part}.bias": (16,) for part in ("query", "key", "value")},
        **{f"attention.output.dense.{w}": s for w, s in (("weight", (16, 16)), ("bias", (16,)))},
        **{f"attention.output.LayerNorm.{w}": (16,) for w in ("weight", "bias")},
        **{"intermediate.dense.weight": (64, 16), "intermediate.dense.bias": (64,)},
        **{"output.dense.weight": (16, 64), "output.dense.bias": (16,)},
        **{f"output.LayerNorm.{w}": (16,) for w in ("weight", "bias")},
    }
    # The attention of a state, computed by matrices as there and by Keras.
    keras_layer = model.backbone.transformer_layers[0]
    attention = keras_layer._self_attention_layer
    x = np.random.default_rng(0).normal(size=(1, 5, 16)).astype("float32")
    q, k, v = (
        x @ tensors[f"{layer}.attention.self.{part}.weight"].T
        + tensors[f"{layer}.attention.self.{part}.bias"]
        for part in ("query", "key", "value")
    )
    heads = []
    for columns in (slice(0, 8), slice(8, 16)):
        scores = q[..., columns] @ k[..., columns].transpose(0, 2, 1) / np.sqrt(8)
        shares = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        heads.append(shares @ v[..., columns])
    found = np.concatenate(heads, -1) @ tensors[f"{layer}.attention.output.dense.weight"].T
    found += tensors[f"{layer}.attention.output.dense.bias"]
    np.testing.assert_allclose(found, attention(query=x, value=x), atol=1e-4)
    others = {name for name in tensors if layer not in name}
    assert {"cls.predictions.bias", "bert.pooler.dense.weight"} <= others
    tensors = huggingface.named_tensors(classifier().model)
    assert tensors["classifier.weight"].shape == (3, 16) and "cls.predictions.bias" not in tensors


def test_the_configuration_means_the_encoder(masked_lm, classifier):
    config = huggingface.config(classifier().model, CLASSES)
    assert config["hidden_act"] == "gelu_pytorch_tanh" and config["layer_norm_eps"] == 1e-12
    assert config["id2label"] == dict(zip("012", CLASSES, strict=True))
    assert config["architectures"] == ["BertForSequenceClassification"]
    # A recipe of one's own need not name its classes.
    config = huggingface.config(classifier().model, ())
    assert config["label2id"] == {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}
    assert "problem_type" not in config
    config = huggingface.config(masked_lm().model, ())
    assert config["architectures"] == ["BertForMaskedLM"] and "id2label" not in config


def test_tokenizer_json_gives_keras_ids(masked_lm):
    import keras_nlp
    import tokenizers

    tokenizer = keras_nlp.models.BertTokenizer.from_preset(
        masked_lm().preset, special_tokens_in_strings=True
    )
    there = tokenizers.Tokenizer.from_str(huggingface.tokenizer_json(tokenizer))
    spaces = [f"the{space}loss" for space in " \xa0\u1680\u2028\u3000"]
    for line in (*REAL, *spaces):
        assert there.encode(line).ids == encode(tokenizer, line, 512).tolist(), line


def logits(model, inputs):
    import torch

    names = dict(input_ids="token_ids", attention_mask="padding_mask", token_type_ids="segment_ids")
    with torch.no_grad():
        found = model.eval()(**{k: torch.tensor(inputs[v]).long() for k, v in names.items()})
    found = found.logits.numpy()
    if "mask_positions" in inputs:
        found = np.take_along_axis(found, inputs["mask_positions"][:, :, np.newaxis], axis=1)
    return found


@pytest.mark.export
def test_bert_for_masked_lm(masked_lm, tmp_path):
    import torch
    from transformers import AutoModelForMaskedLM

    given = masked_lm()
    huggingface.write(given.model, tmp_path / "out", ())
    model, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert all("pooler" in name for name in report["unexpected_keys"])
    inputs = inputs_of(given.model)
    expected = np.array(given.model(inputs, training=False))
    lines = (tmp_path / "out" / "README.md").read_text()
    assert huggingface.SET_THE_HEAD in lines
    exec(huggingface.SET_THE_HEAD, {"model": model, "torch": torch})
    largest = np.abs(expected).max()
    assert np.abs(logits(model, inputs) - expected).max() < 1e-4 * max(1, largest)
    assert huggingface.compare(given.model, tmp_path / "out") < 1e-3


@pytest.mark.export
def test_bert_for_sequence_classification(classifier, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

    model = classifier().model
    huggingface.write(model, tmp_path / "out", CLASSES)
    there, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = inputs_of(model)
    expected = np.array(model(inputs, training=False))
    assert np.abs(logits(there, inputs) - expected).max() < 1e-4 * max(1, np.abs(expected).max())
    assert huggingface.compare(model, tmp_path / "out") < 1e-3
    assert pipeline("text-classification", model=str(tmp_path / "out"))(TEXTS[0])[0][
        "label"
    ] in set(CLASSES)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.mask_token == "[MASK]" and tokenizer.model_max_length == 16
    keras_tokenizer = model.preprocessor.tokenizer
    for line in (*REAL, "a [SEP] b [CLS] c[PAD]"):  # names of special tokens are words
        pieces = [int(piece) for piece in keras_tokenizer(line)]
        ids = [keras_tokenizer.cls_token_id, *pieces, keras_tokenizer.sep_token_id]
        assert tokenizer(line, truncation=False)["input_ids"] == ids, line


@pytest.mark.export
def test_byte_pairs_of_ones_own_are_split_as_keras_does(tmp_path):
    """KerasHub's tokenizer does not split texts into words, and its exporter's file does."""
    from transformers import AutoTokenizer

    task = causal_presets.make_task("Llama3")
    huggingface.write_causal_lm(task, tmp_path / "out")
    there = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (*causal_presets.TEXT, "it has 2 layers of 64, since 1990", "a  b\n\tc"):
        ids = [int(each) for each in task.preprocessor.tokenizer(text)]
        assert there(text, add_special_tokens=False)["input_ids"] == ids, text


def test_the_template_of_prompts_is_named(tmp_path):
    task = causal_presets.make_task("GPT2")
    template = "Q: {prompt} A: {response}"
    assert template in huggingface.write_causal_lm(task, tmp_path / "prompts", template)
    assert template in (tmp_path / "prompts" / "README.md").read_text()
    assert "prompts" not in huggingface.write_causal_lm(task, tmp_path / "text")


@pytest.mark.parametrize(("family", "longest"), [("GPT2", 24), ("Llama3", 32)])
def test_texts_are_cut_at_the_length_of_the_run(family, longest, tmp_path):
    sizes = dict(max_sequence_length=24) if family == "GPT2" else {}
    huggingface.write_causal_lm(causal_presets.make_task(family, **sizes), tmp_path / "out")
    content = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert content["model_max_length"] == longest  # the positions of GPT-2


@pytest.mark.export
def test_a_tokenizer_that_makes_other_tokens(tmp_path):
    """KerasHub's exporter writes none for Qwen 3.5 that transformers can read."""
    task = causal_presets.make_task("Qwen3_5")
    huggingface.write_causal_lm(task, tmp_path / "out")
    with pytest.raises(Differs, match=r"its tokenizer makes the tokens \[\] of a sentence, the K"):
        huggingface.compare_causal_lm(task, tmp_path / "out")
    task = causal_presets.make_task("GPT2")
    huggingface.write_causal_lm(task, tmp_path / "gpt2")
    assert huggingface.compare_causal_lm(task, tmp_path / "gpt2") < 1e-3


def test_a_causal_model_of_another_family_is_refused(tmp_path):
    with pytest.raises(DataError, match="OPT cannot be exported to transformers; KerasHub .* GPT2"):
        huggingface.write_causal_lm(causal_presets.make_task("OPT"), tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "shape", "message"),
    [
        ("Gemma", dict(num_key_value_heads=2), "it has 2 key and value heads, and KerasHub"),
        (
            "Mistral",
            dict(head_dim=8),
            "its heads have 8 columns, and KerasHub exports those with 4",
        ),
    ],
)
def test_attention_that_kerashub_would_write_in_other_shapes(family, shape, message, tmp_path):
    task = causal_presets.make_task(family, **shape)
    with pytest.raises(DataError, match=f"^this {family} cannot be exported .*: {message}"):
        huggingface.write_causal_lm(task, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.export
@pytest.mark.parametrize("family", ["GPT2", "Llama3", "Qwen", "Mistral", "Gemma"])
def test_a_causal_model_gives_the_same_logits(family, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    heads = dict(head_dim=None) if family == "Mistral" else {}  # those that KerasHub exports
    task = causal_presets.make_task(family, **heads)
    hub_models.split_words(task.preprocessor.tokenizer)  # as of a preset
    lines = huggingface.write_causal_lm(task, tmp_path / "out")
    assert lines in (tmp_path / "out" / "README.md").read_text()
    there, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = np.random.default_rng(0).integers(5, 250, (3, 20)).astype(np.int32)
    expected = np.array(task({"token_ids": ids, "padding_mask": np.ones_like(ids)}))
    with torch.no_grad():
        found = there.eval()(input_ids=torch.tensor(ids).long()).logits.numpy()
    assert np.abs(found - expected).max() < 1e-4 * max(1, np.abs(expected).max())
    if family not in causal_presets.BYTE_PAIRS:  # transformers has its own rules for SentencePiece
        return
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = causal_presets.TEXT[0]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == [int(token) for token in task.preprocessor.tokenizer(text)]
