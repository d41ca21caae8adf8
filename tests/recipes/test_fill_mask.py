import json
import shutil

import keras
import keras_nlp
import numpy as np
import pytest

from recipes import fill_mask
from training.errors import OptionsError, RunError


def fill(folder, *texts, top=5):
    return fill_mask.main(fill_mask.Options(run_dir=folder, texts=texts, top=top))


class TestFills:
    def test_five_for_each_mask_the_likeliest_first(self, tiny_run, capsys):
        texts = ("the loss of a [MASK] is", "over all [MASK] and [MASK].")
        filled = fill(tiny_run.folder, *texts)
        assert [entry["text"] for entry in filled] == list(texts)
        assert [len(entry["masks"]) for entry in filled] == [1, 2]
        printed = capsys.readouterr().out
        for entry in filled:
            for fills in entry["masks"]:
                assert len(fills) == 5
                probabilities = [f["probability"] for f in fills]
                assert probabilities == sorted(probabilities, reverse=True)
                assert 0 < sum(probabilities) < 1
                assert all(f"{f['probability']:6.1%}  {f['text']}\n" in printed for f in fills)
        # The other [MASK]s stay.
        first, second = filled[1]["masks"]
        assert all(f["text"].endswith("and [MASK].") for f in first)
        assert all(f["text"].startswith("over all [MASK] and ") for f in second)

    def test_all_pieces_together_have_probability_one(self, tiny_run):
        fills = fill(tiny_run.folder, "the [MASK] of", top=1000)[0]["masks"][0]
        assert sum(f["probability"] for f in fills) == pytest.approx(1)
        pieces = {f["piece"] for f in fills}
        assert not pieces & {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}

    def test_the_probabilities_are_the_models(self, tiny_run):
        tokenizer = keras_nlp.models.BertTokenizer.from_preset(str(tiny_run.folder / "model"))
        words = tokenizer("the loss of")
        ids = [tokenizer.cls_token_id, *words, tokenizer.mask_token_id, tokenizer.sep_token_id]
        ids = np.array([ids], "int32")
        inputs = {
            "token_ids": ids,
            "segment_ids": np.zeros_like(ids),
            "padding_mask": np.ones_like(ids),
            "mask_positions": np.array([[ids.shape[1] - 2]], "int32"),
        }
        logits = keras.ops.convert_to_numpy(tiny_run.model(inputs, training=False))[0, 0]
        fills = fill(tiny_run.folder, "The loss of [MASK]", top=2)[0]["masks"][0]
        a, b = (logits[tokenizer.token_to_id(f["piece"])] for f in fills)
        ratio = fills[0]["probability"] / fills[1]["probability"]
        assert ratio == pytest.approx(np.exp(a - b), rel=1e-4)

    def test_a_presets_folder_will_do(self, tiny_run):
        text = "the [MASK] of"
        assert fill(tiny_run.folder / "model", text) == fill(tiny_run.folder, text)

    def test_a_piece_that_goes_on_with_a_word_is_joined_to_it(self):
        class Tokenizer:
            def id_to_token(self, number):
                return ["##ing", "thing"][number]

        probabilities = np.array([0.75, 0.25])
        fills = fill_mask.best_fills("train [MASK] now", 0, probabilities, Tokenizer(), 5)
        assert [f["text"] for f in fills] == ["training now", "train thing now"]

    def test_unk_in_the_text_is_one_piece(self, tiny_run):
        tokenizer = keras_nlp.models.BertTokenizer.from_preset(
            str(tiny_run.folder / "model"), special_tokens_in_strings=True
        )
        ids = fill_mask.encode(tokenizer, "<unk> [MASK] <unk>")
        names = [tokenizer.id_to_token(int(number)) for number in ids]
        assert names == ["[CLS]", "[UNK]", "[MASK]", "[UNK]", "[SEP]"]


class TestFaults:
    def test_no_such_run(self, command_line, tmp_path):
        status, _, errors = command_line(fill_mask, tmp_path / "none", "a [MASK]")
        assert status == 2
        assert errors == (
            f"fill_mask: {tmp_path / 'none'}: no such folder; a finished run or a preset is "
            "expected\n"
        )

    def test_a_run_that_is_not_finished(self, tiny_run, command_line, tmp_path):
        shutil.copy(tiny_run.folder / "options.json", tmp_path)
        status, _, errors = command_line(fill_mask, tmp_path, "a [MASK]")
        assert status == 2
        assert errors.count("\n") == 1 and "not finished" in errors

    def test_a_run_of_another_recipe(self, tmp_path):
        there = json.dumps({"recipe": "mnist", "options": {}, "resolved": {}})
        (tmp_path / "options.json").write_text(there)
        with pytest.raises(RunError, match="a run of mnist; one of bert_mlm is expected"):
            fill(tmp_path, "a [MASK]")

    def test_a_folder_that_holds_neither(self, tmp_path):
        with pytest.raises(RunError, match="lacks task.json and task.weights.h5"):
            fill(tmp_path, "a [MASK]")

    def test_texts_without_mask_and_no_fills_are_reported_together(self, tiny_run, command_line):
        status, _, errors = command_line(fill_mask, tiny_run.folder, "a", "[mask]", "--top", "0")
        assert status == 2
        assert errors.splitlines() == [
            "fill_mask: --top 0: must be at least 1",
            "  no [MASK] in 'a'",
            "  no [MASK] in '[mask]'",
        ]

    def test_no_text(self, tiny_run, command_line):
        status, _, errors = command_line(fill_mask, tiny_run.folder)
        assert status == 2 and "no text" in errors

    def test_a_text_too_long_for_the_model(self, tiny_run):
        fill(tiny_run.folder, "[MASK]" + " the" * 13)
        with pytest.raises(OptionsError, match="17 tokens.* the model takes 16: "):
            fill(tiny_run.folder, "[MASK]" + " the" * 14)
