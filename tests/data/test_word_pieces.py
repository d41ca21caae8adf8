import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import cache, word_pieces
from data.errors import DataError
from data.text import Text
from tests.data.closed_paths import close

ROOT = Path(__file__).resolve().parents[2]

LINES = [
    "The loss of a step is the mean over all replicas, not over one.",
    "Née Müller, she said: (don't) 3.14 <unk> e-mails & the state-of-the-art!",
    "<unk> <unk> of the <unk> , a < unk > b",
    "",
    "東京 is written 東京; naïve façades; 5″ of rain … and ×2",
    "Tokens, tokeniser; TOKENS\tand   spaces a<unk>b",
] + [f"number {number} of the batches and the losses" for number in range(30)]

LEARN = """
import sys
from data import cache, word_pieces
lines = open(sys.argv[1], encoding="utf-8").read().splitlines()
print(word_pieces.vocabulary_sha256(word_pieces.learn_vocabulary(lines, 150)))
"""


def make_tokenizer(pieces, **more):
    import keras_nlp

    settings = dict(lowercase=True, strip_accents=True, special_tokens_in_strings=False)
    return keras_nlp.models.BertTokenizer(vocabulary=pieces, **(settings | more))


@pytest.fixture(scope="module")
def pieces():
    return word_pieces.learn_vocabulary(LINES, 150)


@pytest.fixture(scope="module")
def tokenizer(pieces):
    return make_tokenizer(pieces)


class TestLearnVocabulary:
    def test_the_same_in_any_process(self, pieces, tmp_path):
        path = tmp_path / "text.txt"
        path.write_text("\n".join(LINES), encoding="utf-8")
        found = [
            subprocess.run(
                [sys.executable, "-c", LEARN, str(path)],
                cwd=ROOT,
                env=os.environ | {"PYTHONHASHSEED": str(seed)},
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
            ).stdout.strip()
            for seed in (1, 2, 3)
        ]
        assert found == [word_pieces.vocabulary_sha256(pieces)] * 3

    def test_the_same_in_any_order_of_the_lines(self, pieces):
        assert word_pieces.learn_vocabulary(LINES[::-1], 150) == pieces

    def test_special_tokens_come_first_and_no_piece_stands_twice(self, pieces):
        assert tuple(pieces[:5]) == word_pieces.SPECIAL_TOKENS
        assert len(set(pieces)) == len(pieces) <= 150

    def test_lower_case_without_accents(self, pieces):
        assert all(piece == piece.lower() for piece in pieces[5:])
        assert not set("éüïç") & set("".join(pieces))

    def test_frequent_words_are_pieces_and_unk_is_none(self, pieces):
        assert {"the", "of", "number"} <= set(pieces)
        assert "unk" not in word_pieces.learn_vocabulary(["<unk> the of"] * 50, 60)

    def test_a_size_without_room_names_one_that_has(self):
        with pytest.raises(DataError, match="--vocabulary-size 20 .* take at least") as caught:
            word_pieces.learn_vocabulary(LINES, 20)
        least = int(str(caught.value).rsplit(" ", 1)[1])
        assert len(word_pieces.learn_vocabulary(LINES, least)) == least
        with pytest.raises(DataError):
            word_pieces.learn_vocabulary(LINES, least - 1)


class TestVocabularyOnce:
    def text(self, lines):
        return Text("x", {"train": lines, "valid": ["a"], "test": ["b"]}, False)

    def test_is_learned_once(self, pieces, tmp_path, monkeypatch):
        text = self.text(LINES)
        assert word_pieces.vocabulary_once(text, 150, tmp_path) == pieces
        monkeypatch.setattr(word_pieces, "learn_vocabulary", None)  # would raise if called
        assert word_pieces.vocabulary_once(text, 150, tmp_path) == pieces

    def test_another_text_or_size_is_another_vocabulary(self, pieces, tmp_path):
        first = word_pieces.vocabulary_once(self.text(LINES), 150, tmp_path)
        other_size = word_pieces.vocabulary_once(self.text(LINES), 120, tmp_path)
        other_text = word_pieces.vocabulary_once(self.text(LINES[10:] * 2), 150, tmp_path)
        assert first != other_size and first != other_text
        assert len(list((tmp_path / "vocabularies").iterdir())) == 3

    def test_is_learned_from_the_training_split_alone(self, tmp_path):
        words = {"train": "training", "valid": "validation", "test": "examination"}
        text = Text("x", {split: [word] * 50 for split, word in words.items()}, False)
        found = word_pieces.vocabulary_once(text, 80, tmp_path)
        assert "training" in found
        assert not {"validation", "examination"} & set(found)
        assert not set("vdxmo") & set("".join(found[5:])), "no letter of the other splits either"

    def test_a_damaged_one_is_learned_again(self, pieces, tmp_path, monkeypatch, caplog):
        text = self.text(LINES)
        word_pieces.vocabulary_once(text, 150, tmp_path)
        (path,) = (tmp_path / "vocabularies").glob("*/vocabulary.txt")
        path.write_text(path.read_text().replace("number", "numbed"))
        monkeypatch.setattr(cache, "_verified", {})  # as in another process
        assert word_pieces.vocabulary_once(text, 150, tmp_path) == pieces
        assert "vocabulary.txt does not match its checksum" in caplog.text


class TestReadVocabulary:
    def test_what_is_missing_is_named(self, tmp_path):
        path = tmp_path / "vocab.txt"
        path.write_text("[PAD]\n[UNK]\n[CLS]\na\n")
        with pytest.raises(DataError, match=r"lacks \[SEP\], \[MASK\]; a BERT vocabulary has"):
            word_pieces.read_vocabulary(path)

    def test_a_piece_that_stands_twice(self, tmp_path):
        path = tmp_path / "vocab.txt"
        path.write_text("\n".join([*word_pieces.SPECIAL_TOKENS, "a", "b", "a"]))
        with pytest.raises(DataError, match="the piece 'a' stands there twice"):
            word_pieces.read_vocabulary(path)

    def test_not_utf8_or_not_there(self, tmp_path):
        with pytest.raises(DataError, match="no such file"):
            word_pieces.read_vocabulary(tmp_path / "vocab.txt")
        (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n\xff\n")
        with pytest.raises(DataError, match="not UTF-8 at byte 6"):
            word_pieces.read_vocabulary(tmp_path / "vocab.txt")

    @pytest.mark.parametrize(
        "name", ["", "~nosuchuser", "x" * 300, "a\0b", "caf\udce9", "/dev/null"]
    )
    def test_what_is_no_file(self, name):
        with pytest.raises(DataError, match="--vocabulary") as caught:
            word_pieces.read_vocabulary(name)
        str(caught.value).encode()

    def test_a_folder_a_closed_file_and_a_binary_one(self, tmp_path, monkeypatch):
        with pytest.raises(DataError, match="a folder; expected a file"):
            word_pieces.read_vocabulary(tmp_path)
        (tmp_path / "vocab.txt").write_bytes(bytes(1000))
        with pytest.raises(DataError, match="lacks"):
            word_pieces.read_vocabulary(tmp_path / "vocab.txt")
        close(tmp_path / "vocab.txt", monkeypatch)
        with pytest.raises(DataError, match="cannot be read .Permission denied"):
            word_pieces.read_vocabulary(tmp_path / "vocab.txt")

    def test_a_million_lines(self, tmp_path):
        pieces = [*word_pieces.SPECIAL_TOKENS, *map(str, range(1_000_000))]
        (tmp_path / "vocab.txt").write_text("\n".join(pieces))
        assert word_pieces.read_vocabulary(tmp_path / "vocab.txt") == pieces

    def test_the_checksum_is_the_files(self, tmp_path, pieces):
        import hashlib

        path = tmp_path / "vocab.txt"
        path.write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
        assert word_pieces.read_vocabulary(path) == pieces
        expected = hashlib.sha256(path.read_bytes()).hexdigest()
        assert word_pieces.vocabulary_sha256(pieces) == expected


class TestTokenize:
    @pytest.mark.parametrize("lowercase", [True, False])
    def test_equals_keras_on_whole_lines(self, pieces, lowercase):
        tokenizer = make_tokenizer(pieces, lowercase=lowercase, strip_accents=lowercase)
        lines = [line.replace("<unk>", "rare") for line in LINES]
        ids, offsets = word_pieces.tokenize(lines, tokenizer)
        assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
        assert (len(offsets), offsets[0], offsets[-1]) == (len(lines) + 1, 0, len(ids))
        for number, line in enumerate(lines):
            expected = np.asarray(tokenizer(line))
            np.testing.assert_array_equal(ids[offsets[number] : offsets[number + 1]], expected)

    def test_unk_is_one_unknown_piece(self, tokenizer):
        unknown = tokenizer.token_to_id("[UNK]")
        ids, offsets = word_pieces.tokenize(["the <unk> of", "<unk>", "<unk> <unk> the"], tokenizer)
        the, of = tokenizer.token_to_id("the"), tokenizer.token_to_id("of")
        np.testing.assert_array_equal(ids, [the, unknown, of, unknown, unknown, unknown, the])
        np.testing.assert_array_equal(offsets, [0, 3, 4, 7])

    def test_special_tokens_in_the_text_are_plain_text(self, tokenizer):
        ids, _ = word_pieces.tokenize(["[MASK] [SEP] [CLS] [PAD]"], tokenizer)
        kinds = {tokenizer.token_to_id(name) for name in ("[MASK]", "[SEP]", "[CLS]", "[PAD]")}
        assert len(ids) and not kinds & set(ids.tolist())

    def test_no_lines_and_empty_lines(self, tokenizer):
        ids, offsets = word_pieces.tokenize([], tokenizer)
        assert len(ids) == 0 and offsets.tolist() == [0]
        ids, offsets = word_pieces.tokenize(["", "  ", "the"], tokenizer)
        assert len(ids) == 1 and offsets.tolist() == [0, 0, 0, 1]


class TestLongWords:
    """Without the cuts, three million letters take hours."""

    LETTERS = "abcdefgh" * 375_000

    def test_a_word_of_three_million_letters_is_unknown(self, tokenizer):
        lines = ["the", f"the {self.LETTERS} of", "of"]
        ids, offsets = word_pieces.tokenize(lines, tokenizer)
        names = [tokenizer.id_to_token(id) for id in ids]
        assert names == ["the", "the", "[UNK]", "of", "of"]
        assert offsets.tolist() == [0, 1, 4, 5]

    def test_it_teaches_nothing(self, pieces):
        assert word_pieces.learn_vocabulary([*LINES, self.LETTERS[:300_000]], 150) == pieces

    def test_a_hundred_bytes_are_known_and_one_more_is_not(self):
        for word, known in (("ab" * 50, True), ("ab" * 50 + "a", False), ("б" * 51, False)):
            pieces = word_pieces.learn_vocabulary(["the of it"] * 9 + [word] * 9, 150)
            assert bool(set(word) & set("".join(pieces[5:]))) == known
            settings = [*word_pieces.SPECIAL_TOKENS, *"abб", "##a", "##b", "##б"]
            ids, _ = word_pieces.tokenize([word], make_tokenizer(settings))
            assert (ids.tolist() == [1]) != known

    @pytest.mark.parametrize("split_on_cjk", [True, False])
    @pytest.mark.parametrize(
        "unit", ["the,of-number(", "the東of京", "of…", "of​the­", "theカ—", "the$"]
    )
    def test_long_chunks_give_what_keras_gives(self, pieces, unit, split_on_cjk, monkeypatch):
        tokenizer = make_tokenizer(pieces, split_on_cjk=split_on_cjk)
        line = f"the {unit * (1500 // len(unit))} of"
        ids, _ = word_pieces.tokenize([line], tokenizer)
        np.testing.assert_array_equal(ids, np.asarray(tokenizer(line)))
        assert len(ids) > 3 or (unit.isalpha() and not split_on_cjk)

    def test_a_long_line_of_short_parts_is_quick(self, tokenizer):
        line = "the,of-" * 60_000
        begun = time.process_time()
        ids, _ = word_pieces.tokenize([line], tokenizer)
        assert len(ids) == 240_000
        assert time.process_time() - begun < 20


class TestTokenizeOnce:
    def test_is_done_once_for_a_fingerprint(self, tokenizer, tmp_path, monkeypatch):
        splits = {"train": LINES, "valid": LINES[:2], "test": LINES[2:4]}
        text = Text("mine", splits, english_wikitext=False)
        first = word_pieces.tokenize_once(text, tokenizer, tmp_path)
        for split, lines in splits.items():
            for found, expected in zip(
                first[split], word_pieces.tokenize(lines, tokenizer), strict=True
            ):
                np.testing.assert_array_equal(found, expected)
        monkeypatch.setattr(word_pieces, "tokenize", None)  # would raise if called
        again = word_pieces.tokenize_once(text, tokenizer, tmp_path)
        np.testing.assert_array_equal(again["train"][0], first["train"][0])
        with pytest.raises(TypeError):
            word_pieces.tokenize_once(text, tokenizer, tmp_path, drop_short=True)
        swapped = [*tokenizer.vocabulary[:-2], *reversed(tokenizer.vocabulary[-2:])]
        with pytest.raises(TypeError):
            word_pieces.tokenize_once(text, make_tokenizer(swapped), tmp_path)
        assert len(list((tmp_path / "tokens").iterdir())) == 1

    @pytest.mark.parametrize("damage", ["flipped", "truncated"])
    def test_damaged_tokens_are_made_again(self, tokenizer, tmp_path, monkeypatch, caplog, damage):
        text = Text("mine", {"train": LINES, "valid": LINES[:2], "test": LINES[2:4]}, False)
        first = word_pieces.tokenize_once(text, tokenizer, tmp_path)
        expected = np.array(first["train"][0])
        (path,) = (tmp_path / "tokens").glob("*/train-ids.npy")
        content = bytearray(path.read_bytes())
        content[-4] ^= 1
        path.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
        monkeypatch.setattr(cache, "_verified", {})  # as in another process
        again = word_pieces.tokenize_once(text, tokenizer, tmp_path)
        np.testing.assert_array_equal(again["train"][0], expected)
        assert "train-ids.npy does not match its checksum" in caplog.text
