import os
import subprocess
import sys
import types
from pathlib import Path

import keras_nlp
import numpy as np
import pytest

from data import text as text_module
from data import word_pieces
from data.errors import DataError
from data.text import Text
from models import bert
from tests.support import chat_presets

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
from data import word_pieces
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
    @pytest.mark.long
    def test_the_same_in_any_process(self, pieces, tmp_path):
        path = tmp_path / "text.txt"
        path.write_text("\n".join(LINES), encoding="utf-8")
        found = subprocess.run(
            [sys.executable, "-c", LEARN, str(path)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": "1"},
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout.strip()
        assert found == word_pieces.vocabulary_sha256(pieces)

    def test_lower_case_without_accents_special_tokens_first(self, pieces):
        assert tuple(pieces[:5]) == word_pieces.SPECIAL_TOKENS
        assert len(set(pieces)) == len(pieces) <= 150
        assert all(piece == piece.lower() for piece in pieces[5:])
        assert not set("éüïç") & set("".join(pieces))

    def test_frequent_words_are_pieces_and_unk_is_none(self, pieces):
        assert {"the", "of", "number"} <= set(pieces)
        assert "unk" not in word_pieces.learn_vocabulary(["<unk> the of"] * 50, 60)

    def test_pieces_are_those_that_the_tokenizer_looks_up(self):
        """KerasHub folds case after it has stripped accents, which composes Korean again."""
        pieces = word_pieces.learn_vocabulary(["한국어 문장 Straße ½"] * 50, 60)
        found = bert.tokenizer_of(pieces)("한국어 문장 straße ½")
        assert pieces.index("[UNK]") not in np.asarray(found)
        assert "ß" not in "".join(pieces)

    def test_no_piece_has_a_space(self):
        pieces = word_pieces.learn_vocabulary(["don´t stop ´me now"] * 50, 60)
        assert not any(character.isspace() for character in "".join(pieces))

    def test_a_size_without_room_names_one_that_has(self):
        with pytest.raises(DataError, match="--vocabulary-size 20 .* use at least") as caught:
            word_pieces.learn_vocabulary(LINES, 20)
        least = int(str(caught.value).rsplit(" ", 1)[1])
        assert len(word_pieces.learn_vocabulary(LINES, least)) == least
        with pytest.raises(DataError):
            word_pieces.learn_vocabulary(LINES, least - 1)


class TestManyWords:
    """Memory is bounded: by the number of words, and of characters before words are counted."""

    TEXT = ["the film of the " + f"w{n}x " + "电影电影" * 3 for n in range(60)] + ["ab"] * 3

    @staticmethod
    def count(lines, **limits):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in limits.items():
                patch.setattr(word_pieces, name, value)
            return word_pieces._count_words(lines)

    def test_below_the_limits_every_word_counts(self):
        """However often the chunks are taken apart."""
        whole, is_cut = self.count(self.TEXT)
        assert not is_cut and whole["the"] == 120 and whole["影"] == 360 and whole["w7x"] == 1
        for limits in (dict(CHARACTERS_AT_ONCE=10), dict(MOST_WORDS=len(whole))):
            assert self.count(self.TEXT, **limits) == (whole, False)
        pieces = word_pieces.learn_vocabulary(self.TEXT, 120)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(word_pieces, "CHARACTERS_AT_ONCE", 10)
            assert word_pieces.learn_vocabulary(self.TEXT, 120) == pieces

    @pytest.mark.parametrize("at_once", [10, 10**9])
    def test_the_rarest_are_left_out(self, at_once):
        found, is_cut = self.count(self.TEXT, MOST_WORDS=20, CHARACTERS_AT_ONCE=at_once)
        assert is_cut and len(found) == 20
        frequent = {word: n for word, n in found.items() if n > 1}
        assert frequent == {"the": 120, "film": 60, "of": 60, "电": 360, "影": 360, "ab": 3}
        assert found == self.count(self.TEXT, MOST_WORDS=20, CHARACTERS_AT_ONCE=at_once)[0]

    def test_of_equally_frequent_ones_some_are_kept_evenly_spaced(self):
        once = {f"w{n:03}": 1 for n in range(100)}
        found = word_pieces._most_frequent(once | {"the": 2}, 11)
        assert sorted(found) == ["the", *(f"w{n:03}" for n in range(0, 100, 10))]

    def test_while_the_text_is_read(self, monkeypatch):
        largest, stock = [], word_pieces._most_frequent

        def most_frequent(words, most):
            largest.append(len(words))
            return stock(words, most)

        monkeypatch.setattr(word_pieces, "_most_frequent", most_frequent)
        self.count((f"a{n} b{n}" for n in range(5000)), MOST_WORDS=100)
        assert len(largest) > 20 and max(largest) <= 302

    def test_a_note_says_so(self, monkeypatch):
        notes = []
        word_pieces.learn_vocabulary(self.TEXT, 100, notes)
        assert notes == []
        monkeypatch.setattr(word_pieces, "MOST_WORDS", 20)
        pieces = word_pieces.learn_vocabulary(self.TEXT, 100, notes)
        assert "the" in pieces
        (note,) = notes
        assert note.startswith("the vocabulary is learned from the 20 most frequent words")


class TestVocabularyOnce:
    def text(self, lines):
        return Text("x", {"train": lines, "valid": ["a"], "test": ["b"]}, False)

    def test_is_learned_once_for_each_text_and_size(self, pieces, tmp_path, monkeypatch):
        first = word_pieces.vocabulary_once(self.text(LINES), 150, tmp_path)
        assert first == pieces
        other_size = word_pieces.vocabulary_once(self.text(LINES), 120, tmp_path)
        other_text = word_pieces.vocabulary_once(self.text(LINES[10:] * 2), 150, tmp_path)
        assert first != other_size and first != other_text
        monkeypatch.setattr(word_pieces, "learn_vocabulary", None)  # would raise if called
        assert word_pieces.vocabulary_once(self.text(LINES), 150, tmp_path) == pieces

    def test_of_a_large_text_is_learned_from_a_part(self, tmp_path, monkeypatch):
        """The notes are those of the vocabulary, also when it comes from the cache."""
        assert word_pieces.vocabulary_notes(self.text(LINES), 150, tmp_path) == []
        monkeypatch.setattr(text_module, "LEARNED_FROM", 100)
        large = self.text(["odd words", "even numbers"] * 10)
        monkeypatch.setattr(word_pieces, "MOST_WORDS", 1)
        pieces = word_pieces.vocabulary_once(large, 60, tmp_path)
        assert not {"v", "##v"} & set(pieces), "of one line in 3, the most frequent word"
        for _ in range(2):
            first, second = word_pieces.vocabulary_notes(large, 60, tmp_path)
            assert first.startswith("the vocabulary is learned from one line in 3")
            assert second.startswith("the vocabulary is learned from the 1 most frequent words")
            assert word_pieces.vocabulary_once(large, 60, tmp_path) == pieces

    def test_is_learned_from_the_training_split_alone(self, tmp_path):
        words = {"train": "training", "valid": "validation", "test": "examination"}
        text = Text("x", {split: [word] * 50 for split, word in words.items()}, False)
        found = word_pieces.vocabulary_once(text, 80, tmp_path)
        assert "training" in found
        assert not {"validation", "examination"} & set(found)
        assert not set("vdxmo") & set("".join(found[5:])), "no letter of the other splits either"


class TestReadVocabulary:
    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"[PAD]\n[UNK]\n[CLS]\na\n", r"lacks \[SEP\], \[MASK\]; a BERT vocabulary has"),
            (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\na", "the piece 'a' is repeated"),
            (b"[PAD]\n\xff\n", "not UTF-8 at byte 6"),
        ],
    )
    def test_what_is_no_vocabulary(self, tmp_path, content, expected):
        (tmp_path / "vocab.txt").write_bytes(content)
        with pytest.raises(DataError, match=expected):
            word_pieces.read_vocabulary(tmp_path / "vocab.txt")

    def test_only_line_feeds_end_a_piece(self, tmp_path, pieces):
        """U+2028 and U+0085 are characters that a piece may hold, where splitlines() cuts."""
        odd = [*pieces, "\u2028", "a\u2028b", "\u0085", "\x0b"]
        for end in ("\n", "\r\n"):
            content = "".join(f"{piece}{end}" for piece in odd)
            (tmp_path / "vocab.txt").write_bytes(content.encode())
            assert word_pieces.read_vocabulary(tmp_path / "vocab.txt") == odd

    def test_the_checksum_is_the_files(self, tmp_path, pieces):
        import hashlib

        path = tmp_path / "vocab.txt"
        path.write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
        assert word_pieces.read_vocabulary(path) == pieces
        expected = hashlib.sha256(path.read_bytes()).hexdigest()
        assert word_pieces.vocabulary_sha256(pieces) == expected


def tokens_of(lines, tokenizer):
    """The ids of each line."""
    found = []
    for ids, lengths in word_pieces.tokenize(iter(lines), tokenizer):
        assert ids.dtype == np.int32 and len(ids) == lengths.sum()
        found += [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])]
    return found


class TestTokenize:
    @pytest.mark.parametrize("known_words", [1_000_000, 20])
    @pytest.mark.parametrize("lines_at_once", [1000, 7])
    @pytest.mark.parametrize(
        "settings",
        [
            dict(),
            dict(lowercase=False, strip_accents=False),
            dict(split_on_cjk=False),
        ],
    )
    def test_equals_keras_on_whole_lines(
        self, pieces, settings, lines_at_once, known_words, monkeypatch
    ):
        monkeypatch.setattr(word_pieces, "LINES_AT_ONCE", lines_at_once)
        monkeypatch.setattr(word_pieces, "KNOWN_WORDS", known_words)
        tokenizer = make_tokenizer(pieces, **settings)
        lines = [line.replace("<unk>", "rare") for line in LINES]
        assert tokens_of(lines, tokenizer) == [list(tokenizer(line)) for line in lines]

    def test_unk_is_one_unknown_piece(self, tokenizer):
        the, of, unknown = map(tokenizer.token_to_id, ("the", "of", "[UNK]"))
        found = tokens_of(["the <unk> of", "<unk>", "<unk> <unk> the"], tokenizer)
        assert found == [[the, unknown, of], [unknown], [unknown, unknown, the]]

    def test_special_tokens_in_the_text_are_plain_text(self, tokenizer):
        (found,) = tokens_of(["[MASK] [SEP] [CLS] [PAD]"], tokenizer)
        kinds = {tokenizer.token_to_id(name) for name in ("[MASK]", "[SEP]", "[CLS]", "[PAD]")}
        assert found and not kinds & set(found)

    def test_it_takes_no_more_lines_than_it_yields(self, tokenizer, monkeypatch):
        monkeypatch.setattr(word_pieces, "LINES_AT_ONCE", 4)
        taken = []
        lines = (taken.append(line) or line for line in ["the"] * 100)
        next(word_pieces.tokenize(lines, tokenizer))
        assert len(taken) == 4


class TestLongWords:
    """Time stays linear, whatever the text holds."""

    @pytest.mark.long
    def test_a_word_of_three_million_letters_is_unknown(self, tokenizer):
        the, of, unknown = map(tokenizer.token_to_id, ("the", "of", "[UNK]"))
        lines = ["the", f"the {'abcdefgh' * 375_000} of", "of"]
        assert tokens_of(lines, tokenizer) == [[the], [the, unknown, of], [of]]

    def test_a_hundred_bytes_are_known_and_one_more_is_not(self):
        for word, known in (("ab" * 50, True), ("ab" * 50 + "a", False), ("б" * 51, False)):
            pieces = word_pieces.learn_vocabulary(["the of it"] * 9 + [word] * 9, 150)
            assert bool(set(word) & set("".join(pieces[5:]))) == known
            settings = [*word_pieces.SPECIAL_TOKENS, *"abб", "##a", "##b", "##б"]
            assert (tokens_of([word], make_tokenizer(settings)) == [[1]]) != known


def test_rules_are_the_same_in_each_process_and_differ_with_the_tokens():
    gpt2 = keras_nlp.models.GPT2Tokenizer
    pieces = {piece: n for n, piece in enumerate(["<|endoftext|>", "a", "b", "c", "ab", "bc"])}

    def rules(merges=("a b", "b c"), names=("<|endoftext|>", "c"), **settings):
        tokenizer = gpt2(pieces, list(merges), unsplittable_tokens=list(names), **settings)
        return word_pieces.rules_of(tokenizer)

    # Special tokens have the order of a set, and each new layer another name.
    assert rules() == rules(names=("c", "<|endoftext|>")) == rules(name="another")
    different = [rules(), rules(merges=("b c", "a b")), rules(names=("<|endoftext|>",))]
    different.append(rules(add_prefix_space=True))
    assert len(set(different)) == 4


@pytest.mark.parametrize("character", ["\u00ad", "\u200d", "\u2060", "\ufffd", "\x07", "\x9f"])
def test_what_is_invisible_is_left_out_of_words(character):
    """As the vocabulary is learned, and as by BERT's own tokenizer."""
    pieces = [*word_pieces.SPECIAL_TOKENS, "inter", "##national", "international", "talks"]
    tokenizer = keras_nlp.models.BertTokenizer(pieces, lowercase=True)
    ((ids, _),) = word_pieces.tokenize([f"inter{character}national talks {character}"], tokenizer)
    assert ids.tolist() == [7, 8]
    learned = word_pieces.learn_vocabulary([f"inter{character}national"] * 9, 60)
    assert "international" in learned


def test_ids_may_leave_gaps():
    """KerasHub leaves out the reserved tokens of Llama 3."""
    tokenizer = chat_presets.make_tokenizer("Llama3", gap=2)
    pieces = tokenizer.vocabulary_size()
    assert word_pieces.ids_of(tokenizer).tolist() == sorted(tokenizer.vocabulary.values())
    assert word_pieces.number_of_ids(tokenizer) == pieces + 2 * len(chat_presets.LLAMA)
    for family in ("Llama3", "Gemma"):
        tokenizer = chat_presets.make_tokenizer(family)
        pieces = tokenizer.vocabulary_size()
        assert word_pieces.ids_of(tokenizer).tolist() == list(range(pieces))


def test_byte_pairs_are_shown_as_their_text():
    tokenizer = types.SimpleNamespace(
        merges=["x y"], vocabulary={"\u0120caf": 0, "\u00c3\u00a9": 1, "\u00e2": 2, "<s>": 3}
    )
    assert word_pieces.texts_of_pieces(tokenizer) == [" caf", "\u00e9", "\ufffd", "<s>"]


@pytest.mark.parametrize("at_once", [1, 7, 100])
def test_pieces_of_a_text_are_marked_once(monkeypatch, at_once):
    monkeypatch.setattr(word_pieces, "TEXTS_AT_ONCE", at_once)
    tokenizer = make_tokenizer([*word_pieces.SPECIAL_TOKENS, *"abcdefgh"])
    ids = np.random.default_rng(0).integers(0, 13, (40, 6)).astype(np.int32)
    ids[5] = 0  # no piece
    found = word_pieces.presence(ids, tokenizer)
    assert found.shape == (40, 13) and found.dtype == np.float64
    for row, pieces in zip(ids, np.split(found.indices, found.indptr[1:-1]), strict=True):
        assert pieces.tolist() == sorted(set(row.tolist()) - set(range(5)))
    assert set(found.data) == {1.0}
