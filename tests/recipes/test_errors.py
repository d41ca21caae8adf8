from pathlib import Path

import pytest

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
    @pytest.mark.parametrize(
        "option, value, expected",
        [
            ("--sequence-length", "512", "gives no sequence of 512 tokens"),
            ("--vocabulary", "vocab.txt", "--vocabulary vocab.txt: lacks [MASK]"),
            ("--vocabulary", "none.txt", "none.txt: cannot be read (No such file"),
            ("--vocabulary-size", "10", "--vocabulary-size 10 has no room"),
            ("--global-batch-size", "100000", "one step takes 100000 examples"),
        ],
    )
    def test_what_does_not_fit(
        self, refused, tiny_text, tmp_path, monkeypatch, option, value, expected
    ):
        monkeypatch.chdir(tmp_path)
        Path("vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
        small = SMALL.copy()
        if option == "--vocabulary":  # its own size counts
            place = small.index("--vocabulary-size")
            said = refused("--dataset", tiny_text, option, value)
            assert said == "bert_mlm: --vocabulary-size: leave it out; --vocabulary has its own\n"
            del small[place : place + 2]
        assert expected in refused("--dataset", tiny_text, option, value, small=small)

    @pytest.mark.parametrize(
        "option, expected",
        [("--preset", "neither a folder nor a name"), ("--init-from", "holds no model")],
    )
    def test_a_preset_that_is_not_there(self, refused, tiny_text, tmp_path, option, expected):
        errors = refused("--dataset", tiny_text, option, tmp_path / "none", small=())
        assert f"{option.strip('-')} {tmp_path / 'none'}: {expected}" in errors


@pytest.mark.parametrize("options", [mnist.Options(), bert_mlm.Options, {"epochs": 1}])
def test_what_is_no_options_of_the_recipe(options):
    with pytest.raises(OptionsError, match=r"takes recipes.bert_mlm.Options\(...\), found "):
        bert_mlm.main(options)
