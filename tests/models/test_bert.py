import dataclasses
import shutil
import socket
import types

import keras
import keras_nlp
import numpy as np
import pytest

from data.errors import DataError
from data.word_pieces import special_ids
from models import bert
from recipes import bert_mlm, text_classification
from tests.conftest import TINY_RUN
from tests.support.damaged import flip_a_bit
from training.options import all_problems


class TestChoosePreset:
    @pytest.fixture(autouse=True)
    def reachable(self, monkeypatch):
        monkeypatch.setattr(bert, "_unreachable", lambda name: None)

    @pytest.mark.parametrize(
        ("changes", "english_wikitext", "known", "chosen"),
        [
            ({}, True, None, bert.TINY),
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
        assert bert.choose_preset(options, known, english_wikitext) == (chosen, None)

    def test_without_a_network_a_line_says_so(self, monkeypatch):
        def create_connection(*arguments, **more):
            raise OSError(-2, "Name or service not known")

        monkeypatch.undo()
        monkeypatch.setattr(socket, "create_connection", create_connection)
        monkeypatch.setenv("KAGGLEHUB_CACHE", "/nowhere")
        assert bert.choose_preset(bert_mlm.Options(), None, True) == (
            None,
            "preset bert_tiny_en_uncased: no network; the same architecture from scratch is used "
            "instead",
        )


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
        assert found == [f"--{name.replace('_', '-')}: {source} has its own"]


def test_operations_of_an_example():
    """2 layers of width 128, 128 tokens, 19 predictions of 1,000 pieces; counted by hand."""
    token = 2 * (4 * 128**2 + 8 * 128**2 + 2 * 128 * 128)
    prediction = 128**2 + 128 * 1000
    backbone = types.SimpleNamespace(
        num_layers=2, hidden_dim=128, intermediate_dim=512, vocabulary_size=1000
    )
    assert bert.training_operations(backbone, 128, 19) == 6 * (128 * token + 19 * prediction)


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


class TestLoadMaskedLM:
    def test_backbone_and_head_are_the_runs(self, tiny_run):
        model = bert.load_masked_lm(str(tiny_run.folder / "model"), None, 16)
        assert model.preprocessor is None and model.backbone.dropout == TINY_RUN["dropout"]
        for found, expected in zip(model.weights, tiny_run.model.weights, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert bert.load_masked_lm(str(tiny_run.folder / "model"), 0.3, 16).backbone.dropout == 0.3

    def test_a_backbone_alone_gets_a_new_head(self, tmp_path, tiny_run):
        tiny_run.model.backbone.save_to_preset(str(tmp_path / "backbone"))
        model = bert.load_masked_lm(str(tmp_path / "backbone"), None, 16)
        np.testing.assert_array_equal(values(model.backbone)[0], values(tiny_run.model)[0])
        assert not same(model.masked_lm_head, tiny_run.model.masked_lm_head)

    @pytest.mark.parametrize("name", ["model.weights.h5", "task.weights.h5", "config.json"])
    def test_damage_is_refused(self, name, folder):
        flip_a_bit(folder / "model" / name)
        with pytest.raises(DataError) as caught:
            bert.load_masked_lm(str(folder / "model"), None, 16)
        assert str(caught.value).startswith(f"preset {folder / 'model'}: damaged ({name}")

    def test_a_classifier_is_no_masked_lm(self, tmp_path, tiny_run):
        classifier = keras_nlp.models.BertTextClassifier(tiny_run.model.backbone, 3)
        classifier.save_to_preset(str(tmp_path / "classifier"))
        with pytest.raises(DataError, match="classifier: no masked LM"):
            bert.load_masked_lm(str(tmp_path / "classifier"), None, 16)

    def test_sequences_longer_than_its_positions_are_refused(self, tiny_run):
        with pytest.raises(DataError, match="--sequence-length 513: the preset .* at most 512"):
            bert.load_backbone(str(tiny_run.folder / "model"), None, 513)


def test_fills_are_read_at_each_mask(tiny_run):
    """Two masks and no special token among the fills; each row is the logits' of its position."""
    kind = keras_nlp.models.BertTokenizer
    folder = str(tiny_run.folder / "model")
    tokenizer = bert.load(kind, folder, special_tokens_in_strings=True)
    ids = bert.encode(tokenizer, "the [MASK] of <unk> a [MASK]", 512)
    assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert (ids == tokenizer.token_to_id("[UNK]")).sum() == 1
    found = bert.fill_masks(tiny_run.model, tokenizer, ids)
    (places,) = np.nonzero(ids == tokenizer.mask_token_id)
    ones = np.ones((1, len(ids)), np.int32)
    every = {"token_ids": ids[None], "segment_ids": 0 * ones, "padding_mask": ones}
    every["mask_positions"] = np.arange(len(ids), dtype=np.int32)[None]
    logits = np.array(tiny_run.model(every, training=False), np.float64)[0][places]
    logits[:, special_ids(tokenizer)] = -np.inf
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert np.abs(found[0] - found[1]).max() > 1e-4
