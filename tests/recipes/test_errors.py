from pathlib import Path

import keras_nlp
import pytest

from data import word_pieces
from recipes import bert_mlm, mnist
from training.errors import OptionsError

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--preset scratch --strategy none --vocabulary-size 120 --num-layers 1 --hidden-dim 16 "
    "--sequence-length 16 --global-batch-size 8 --max-steps 1 --quiet"
).split()


@pytest.fixture
def refused(command_line, tmp_path):
    """The message of a start that must fail, beside which nothing may be left."""

    def call(*arguments, small=SMALL):
        folder = tmp_path / "made"
        status, _, errors = command_line(bert_mlm, *small, *arguments, "--run-dir", folder)
        assert status == 2, errors
        assert errors.startswith("bert_mlm: ") and "Traceback" not in errors
        assert not (tmp_path / "made").exists()
        return errors

    return call


class TestFiles:
    def test_a_file_that_is_no_text(self, refused, tmp_path):
        path = tmp_path / "text.txt"
        path.write_bytes(b"good\nb\xe9d\n")
        errors = refused("--dataset", path)
        assert errors.count("\n") == 1 and f"{path}, line 2: not UTF-8 text" in errors

    @pytest.mark.parametrize(
        "option, value, expected",
        [
            ("--sequence-length", "512", "gives no sequence of 512 tokens"),
            ("--vocabulary", "vocab.txt", "--vocabulary vocab.txt: lacks [MASK]"),
            ("--vocabulary", "none.txt", "none.txt: cannot be read (No such file"),
            ("--vocabulary-size", "10", "--vocabulary-size 10 has no room"),
            ("--init-from", "none", "--init-from none: "),
            ("--global-batch-size", "100000", "one step takes 100000 examples"),
        ],
    )
    def test_what_does_not_fit(
        self, refused, tiny_text, tmp_path, monkeypatch, option, value, expected
    ):
        monkeypatch.chdir(tmp_path)
        Path("vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
        assert expected in refused("--dataset", tiny_text, option, value)

    def test_a_preset_that_is_not_there(self, refused, tiny_text, tmp_path):
        errors = refused("--dataset", tiny_text, "--preset", tmp_path / "none", small=())
        assert f"preset {tmp_path / 'none'}: cannot be loaded" in errors

    def test_weights_of_another_model(self, refused, tiny_text, tiny_run):
        errors = refused(
            "--dataset", tiny_text, "--init-from", tiny_run.folder, "--hidden-dim", "32"
        )
        assert f"--init-from {tiny_run.folder}" in errors


class TestLimits:
    def test_a_sequence_longer_than_a_preset_takes(self, refused, tiny_text, tmp_path):
        preset = tmp_path / "preset"
        pieces = word_pieces.learn_vocabulary(tiny_text.read_text().splitlines(), 120)
        keras_nlp.models.BertBackbone(
            vocabulary_size=len(pieces),
            num_layers=1,
            num_heads=1,
            hidden_dim=8,
            intermediate_dim=8,
            max_sequence_length=15,
        ).save_to_preset(str(preset))
        keras_nlp.models.BertTokenizer(vocabulary=pieces).save_to_preset(str(preset))
        line = ("--dataset", tiny_text, "--preset", preset, "--sequence-length", "16")
        errors = refused(*line, small=())
        assert f"--sequence-length 16: the preset {preset} takes at most 15 tokens" in errors


@pytest.mark.parametrize("options", [mnist.Options(), bert_mlm.Options, {"epochs": 1}])
def test_what_is_no_options_of_the_recipe(options):
    with pytest.raises(OptionsError, match=r"takes recipes.bert_mlm.Options\(...\), found "):
        bert_mlm.main(options)
