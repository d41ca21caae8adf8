"""Hugging Face's own classes on what was written; needs the packages of `make test-export`."""

import json

import numpy as np
import pytest

from exports import huggingface, word_piece_json
from models.bert import encode

REAL = (
    "Née in Zürich, the naïve café-owner didn't pay $1,234.50 (or 80 %) for it!",
    "Returns `x[i, ...]` as an N-D tensor: see tf.data.Dataset.map(); e.g. [MASK].",
    "東京 is 東 and 京; naïveté\tand\nlines\u200b of \u00ad soft hyphens — dashes…",
    "A" * 101 + " " + "ab" * 40,
)


@pytest.mark.long
def test_names_and_shapes_are_those_of_transformers(load):
    tensors = huggingface.named_tensors(load("bert").model)
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
    others = {name for name in tensors if layer not in name}
    assert {"cls.predictions.bias", "bert.pooler.dense.weight"} <= others
    classifier = huggingface.named_tensors(load("text").model)
    assert classifier["classifier.weight"].shape == (3, 16)
    assert "bert.pooler.dense.weight" in classifier and "cls.predictions.bias" not in classifier


@pytest.mark.long
def test_the_configuration_means_the_encoder(load):
    config = huggingface.config(load("text"))
    assert config["hidden_act"] == "gelu_pytorch_tanh" and config["layer_norm_eps"] == 1e-12
    assert config["id2label"] == {"0": "0", "1": "1", "2": "2"}
    assert huggingface.config(load("bert"))["architectures"] == ["BertForMaskedLM"]


@pytest.mark.long
def test_tokenizer_json_cuts_as_keras_does(load):
    import tokenizers

    tokenizer = load("bert").tokenizer
    there = tokenizers.Tokenizer.from_str(word_piece_json.tokenizer_json(tokenizer))
    for line in REAL:
        assert there.encode(line).ids == encode(tokenizer, line).tolist(), line


@pytest.fixture(scope="module")
def written(load, tmp_path_factory):
    """Both kinds of BERT, and the differences that the exporter measured."""
    pytest.importorskip("safetensors")
    made = {}
    for name in ("bert", "text"):
        trained, folder = load(name), tmp_path_factory.mktemp("huggingface") / name
        made[name] = trained, folder, huggingface.write(trained, folder)
    return made


@pytest.mark.export
def test_bert_for_masked_lm(written):
    """1e-4 is asked for; with the head as the configuration says the logits differ by more."""
    import torch
    from transformers import AutoModelForMaskedLM

    trained, folder, differences = written["bert"]
    model, report = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert all("pooler" in name for name in report["unexpected_keys"])
    stock = np.abs(logits(model, trained) - trained.outputs).max()
    said = differences["logits, head as in config.json"]
    assert stock == pytest.approx(said, abs=2e-6) and stock > 1e-6
    exec(huggingface.SET_THE_HEAD, {"model": model, "torch": torch})
    assert np.abs(logits(model, trained) - trained.outputs).max() < 1e-5


@pytest.mark.export
def test_bert_for_sequence_classification(written):
    from transformers import AutoModelForSequenceClassification

    trained, folder, _ = written["text"]
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert np.abs(logits(model, trained) - trained.outputs).max() < 1e-5
    assert [model.config.id2label[i] for i in range(3)] == trained.classes


def logits(model, trained):
    import torch

    names = {
        "input_ids": "token_ids",
        "attention_mask": "padding_mask",
        "token_type_ids": "segment_ids",
    }
    inputs = {there: torch.tensor(trained.inputs[ours]).long() for there, ours in names.items()}
    with torch.no_grad():
        found = model.eval()(**inputs).logits.numpy()
    if "mask_positions" in trained.inputs:
        places = trained.inputs["mask_positions"][:, :, np.newaxis]
        found = np.take_along_axis(found, places, axis=1)
    return found


@pytest.mark.export
@pytest.mark.parametrize("name", ["bert", "text"])
def test_its_tokenizer_gives_our_ids(written, name):
    from transformers import AutoTokenizer

    trained, folder, _ = written[name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.mask_token == "[MASK]" and tokenizer.model_max_length == trained.longest
    # A classifier's texts have no [MASK]: Keras's tokenizer reads it as any other word there.
    other = ("<unk>",) if name == "bert" else ("<unk>", "[MASK]")
    for line in [*trained.sources, *REAL]:
        if not any(word in line for word in other):
            assert tokenizer(line)["input_ids"] == encode(trained.tokenizer, line).tolist(), line


@pytest.mark.export
def test_the_snippets_run(written, monkeypatch, capsys):
    for name, said in (("bert", "token_str"), ("text", "label")):
        trained, folder, _ = written[name]
        monkeypatch.chdir(folder)
        exec(huggingface.how_to_load(trained), {})
        assert said in capsys.readouterr().out


@pytest.mark.export
def test_weights_that_differ_are_refused(load, tmp_path, monkeypatch):
    from training.errors import RunError

    stock = huggingface.named_tensors

    def transposed(model):
        found = stock(model)
        name = "bert.encoder.layer.0.attention.self.query.weight"
        return found | {name: np.ascontiguousarray(found[name].T)}

    monkeypatch.setattr(huggingface, "named_tensors", transposed)
    with pytest.raises(RunError, match="huggingface: differs from the Keras model by"):
        huggingface.write(load("text"), tmp_path / "out")


@pytest.mark.export
def test_keras_hub_reads_the_folder(written):
    import keras_nlp

    trained, folder, _ = written["text"]
    tokenizer = keras_nlp.models.BertTokenizer.from_preset(str(folder))
    assert tokenizer.get_vocabulary() == trained.tokenizer.get_vocabulary()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "bert"
