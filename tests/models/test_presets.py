import io
import json
import shutil
import socket
import types

import keras
import keras_nlp
import numpy as np
import pytest

from callbacks import checkpoint_files
from data.errors import DataError
from models import presets
from recipes import bert_mlm
from tests.conftest import TINY_RUN
from tests.support.damaged import flip_a_bit


def options(**changes):
    return types.SimpleNamespace(**(dict(preset="auto", vocabulary=None, init_from=None) | changes))


def test_where_a_model_starts_from_in_words():
    assert presets.origin(options(), None) == "from scratch"
    assert presets.origin(options(), "tiny") == "preset tiny"
    assert presets.origin(options(init_from="runs/first"), None) == "starts from runs/first"
    # A classifier takes the encoder of that run as a preset.
    assert presets.origin(options(init_from="r"), "r/model") == "starts from r"


class TestChoose:
    @pytest.fixture
    def reachable(self, monkeypatch):
        """The tiny preset can be had."""
        monkeypatch.setattr(presets, "_unreachable", lambda name: None)

    @pytest.fixture
    def never_looked_for(self, monkeypatch):
        def unreachable(name):
            raise AssertionError("looked for a preset that is not wanted")

        monkeypatch.setattr(presets, "_unreachable", unreachable)

    def test_english_wikitext_gets_the_tiny_preset(self, reachable):
        assert presets.choose(options(), True, None) == (presets.TINY, None)

    def test_what_cannot_be_had_is_said(self, monkeypatch):
        def create_connection(*arguments, **more):
            raise OSError(-2, "Name or service not known")

        monkeypatch.setattr(socket, "create_connection", create_connection)
        monkeypatch.setenv("KAGGLEHUB_CACHE", "/nowhere")
        assert presets.choose(options(), True, None) == (
            None,
            "preset bert_tiny_en_uncased: no network; the same architecture from scratch is used "
            "instead",
        )

    def test_a_long_reason_is_cut_and_has_no_address(self, monkeypatch):
        def from_preset(name):
            raise ValueError(f"404 at https://kaggle.com/{'x' * 300} {'of ' * 100}\nmore")

        monkeypatch.setattr(socket, "create_connection", lambda *_, **__: io.BytesIO())
        monkeypatch.setattr(keras_nlp.models.BertTokenizer, "from_preset", from_preset)
        monkeypatch.setenv("KAGGLEHUB_CACHE", "/nowhere")
        _, why = presets.choose(options(), True, None)
        assert f"preset {presets.TINY}: 404 at ... of of" in why and len(why) < 180

    @pytest.mark.parametrize(
        ("changes", "english_wikitext"),
        [
            ({}, False),
            ({"vocabulary": "vocab.txt"}, True),
            ({"init_from": "a run"}, True),
            ({"preset": "scratch"}, True),
        ],
    )
    def test_from_scratch(self, changes, english_wikitext, never_looked_for):
        assert presets.choose(options(**changes), english_wikitext, None) == (None, None)

    def test_one_that_is_named_is_taken(self, never_looked_for):
        assert presets.choose(options(preset="hf://a/b"), False, None) == ("hf://a/b", None)

    def test_a_run_that_resumes_keeps_what_it_took(self, never_looked_for):
        assert presets.choose(options(), True, "scratch") == (None, None)
        assert presets.choose(options(preset="other"), False, "first") == ("first", None)


@pytest.fixture(scope="module")
def make_model(tiny_run):
    """A new model of the tiny run's sizes, with other weights than any run's."""
    size = tiny_run.model.backbone.vocabulary_size

    def make():
        keras.utils.set_random_seed(99)
        return bert_mlm.build_model(bert_mlm.Options(**TINY_RUN), size)

    return make


@pytest.fixture
def folder(tiny_run, tmp_path):
    """A copy of the tiny run with a best checkpoint, to be damaged."""
    target = tmp_path / "run"
    shutil.copytree(tiny_run.folder, target)
    checkpoint_files.copy_as(target / "checkpoints" / "step-00000020", target / "best")
    return target


def values(model):
    return [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]


class TestLoadWeights:
    @pytest.mark.parametrize(
        "source",
        [
            "",
            "checkpoints/step-00000040",
            "checkpoints/step-00000040/model.weights.h5",
        ],
    )
    def test_a_run_a_checkpoint_and_a_file_give_the_last_weights(
        self, source, folder, make_model, tiny_run
    ):
        model = make_model()
        presets.load_weights(model, folder / source)
        for found, expected in zip(values(model), values(tiny_run.model), strict=True):
            np.testing.assert_array_equal(found, expected)

    def test_the_best_gives_its_own(self, folder, make_model, tiny_run):
        model, same = make_model(), make_model()
        presets.load_weights(model, folder / "best")
        presets.load_weights(same, folder / "checkpoints" / "step-00000020")
        for found, expected in zip(values(model), values(same), strict=True):
            np.testing.assert_array_equal(found, expected)
        pairs = zip(values(model), values(tiny_run.model), strict=True)
        assert any((a != b).any() for a, b in pairs)

    @pytest.mark.parametrize(
        ("source", "damaged"),
        [
            ("", "model/task.weights.h5"),
            ("", "model/model.weights.h5"),
            ("checkpoints/step-00000040", "checkpoints/step-00000040/model.weights.h5"),
            ("checkpoints/step-00000040", "checkpoints/step-00000040/state.json"),
            (
                "checkpoints/step-00000040/model.weights.h5",
                "checkpoints/step-00000040/model.weights.h5",
            ),
            ("best", "best/model.weights.h5"),
        ],
    )
    def test_a_flipped_bit_is_refused(self, source, damaged, folder, make_model):
        flip_a_bit(folder / damaged)
        model = make_model()
        before = values(model)
        with pytest.raises(DataError) as caught:
            presets.load_weights(model, folder / source)
        text = str(caught.value)
        assert text.startswith(f"--init-from {folder / source}: ") and "\n" not in text
        assert f"is damaged ({(folder / damaged).name} does not match its checksum)" in text
        for found, expected in zip(values(model), before, strict=True):
            np.testing.assert_array_equal(found, expected)

    def test_nothing_is_there(self, tmp_path, make_model):
        with pytest.raises(DataError, match="neither a run's folder with model/ nor a weights"):
            presets.load_weights(make_model(), tmp_path)

    def test_weights_of_another_model(self, folder, tiny_run):
        size = tiny_run.model.backbone.vocabulary_size
        other = bert_mlm.build_model(bert_mlm.Options(**(TINY_RUN | {"hidden_dim": 8})), size)
        for source in (folder, folder / "best"):
            with pytest.raises(DataError, match="^--init-from .*") as caught:
                presets.load_weights(other, source)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("gone", ["class_name", "config"])
def test_a_tokenizer_whose_json_lacks_something(gone, folder):
    path = folder / "model" / "tokenizer.json"
    content = json.loads(path.read_text())
    del content[gone]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="model: ") as caught:
        presets.load(keras_nlp.models.BertTokenizer, str(folder / "model"))
    assert len(str(caught.value).splitlines()) == 1


class TestLoadModel:
    def test_backbone_and_head_are_the_runs(self, tiny_run):
        model = presets.load_model(str(tiny_run.folder / "model"), dropout=None)
        assert model.preprocessor is None
        assert model.backbone.dropout == TINY_RUN["dropout"]
        for found, expected in zip(model.weights, tiny_run.model.weights, strict=True):
            np.testing.assert_array_equal(
                keras.ops.convert_to_numpy(found), keras.ops.convert_to_numpy(expected)
            )

    def test_dropout_can_be_changed(self, tiny_run):
        model = presets.load_model(str(tiny_run.folder / "model"), dropout=0.3)
        assert model.backbone.dropout == 0.3

    @pytest.mark.parametrize("with_checksums", [True, False])
    def test_a_trained_model_whose_head_is_gone_is_refused(self, with_checksums, folder):
        (folder / "model" / "task.weights.h5").unlink()
        if not with_checksums:
            (folder / "model" / "SHA256SUMS").unlink()
        with pytest.raises(DataError, match="task.weights.h5") as caught:
            presets.load_model(str(folder / "model"), dropout=None)
        assert str(caught.value).startswith(f"preset {folder / 'model'}: ")
        assert "\n" not in str(caught.value)

    def test_a_backbone_alone_gets_a_new_head(self, folder, tmp_path, tiny_run):
        tiny_run.model.backbone.save_to_preset(str(tmp_path / "backbone"))
        model = presets.load_model(str(tmp_path / "backbone"), dropout=None)
        assert isinstance(model, keras_nlp.models.BertMaskedLM)

    @pytest.mark.parametrize("name", ["model.weights.h5", "task.weights.h5", "config.json"])
    def test_a_flipped_bit_is_refused(self, name, folder):
        flip_a_bit(folder / "model" / name)
        with pytest.raises(DataError) as caught:
            presets.load_model(str(folder / "model"), dropout=None)
        expected = f"preset {folder / 'model'}: damaged ({name} does not match its checksum)"
        assert str(caught.value) == expected

    @pytest.mark.parametrize("name", ["model.weights.h5", "task.weights.h5", "config.json"])
    def test_a_truncated_file_without_checksums_is_refused(self, name, folder):
        (folder / "model" / "SHA256SUMS").unlink()
        path = folder / "model" / name
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(DataError) as caught:
            presets.load_model(str(folder / "model"), dropout=None)
        assert "\n" not in str(caught.value)


def test_sequences_longer_than_the_presets_positions_are_refused(tiny_run):
    presets.refuse_longer(tiny_run.model.backbone, 512, "a preset")
    with pytest.raises(DataError, match="--sequence-length 513: the preset a preset takes at most"):
        presets.refuse_longer(tiny_run.model.backbone, 513, "a preset")
