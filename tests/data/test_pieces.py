import random
import sys

import numpy as np
import pytest

from data import pieces, word_pieces
from tests.data.test_word_pieces import make_tokenizer

PLAIN = [letter for letter in map(chr, range(sys.maxunicode)) if pieces.is_plain(letter)]


def drawn(count, letters, longest, seed):
    generator = random.Random(seed)
    lengths = (generator.randint(1, longest) for _ in range(count))
    return ["".join(generator.choices(letters, k=length)) for length in lengths]


@pytest.mark.parametrize("split_on_cjk", [True, False])
@pytest.mark.parametrize("folded", [True, False])
def test_both_ways_give_the_same(folded, split_on_cjk, monkeypatch):
    monkeypatch.setattr(pieces, "MANY_WORDS", 1_000_000)
    letters = {part for letter in PLAIN for part in (letter, *letter.casefold())}
    # Not all of them, so that there are unknown ones.
    known = [letter for number, letter in enumerate(sorted(letters)) if number % 10]
    vocabulary = [*known, *(f"##{letter}" for letter in known)]
    for length in (2, 3, 4):
        vocabulary += drawn(100, "abcdeéйж.'", length, length)
        vocabulary += [f"##{part}" for part in drawn(100, "abcdeéйж.'", length, -length)]
    vocabulary = [*word_pieces.SPECIAL_TOKENS, *dict.fromkeys(vocabulary)]
    settings = {"lowercase": folded, "strip_accents": folded, "split_on_cjk": split_on_cjk}
    tokenizer = make_tokenizer(vocabulary, **settings)
    words = [
        *PLAIN,
        *(f"{before}{letter}{after}" for letter in PLAIN for before in "aй" for after in ("", ".")),
        *drawn(2000, PLAIN, 8, 1),
        *drawn(2000, [letter for letter in PLAIN if letter.isascii()], 12, 2),
        *drawn(300, "abcABCéйЖ.", 130, 3),  # from 101 bytes on a word is unknown
        *(letter * count for letter in "xéй" for count in (49, 50, 51, 99, 100, 101)),
        "<unk>",
        *drawn(500, "ab\u0301\u0345\u0323東ßﬁ\u00ad\u200bΣς", 5, 4),
    ]
    expected = pieces.pieces_by(tokenizer)(words)
    monkeypatch.setattr(pieces, "MANY_WORDS", 0)
    found = pieces.pieces_by(tokenizer)(words)
    np.testing.assert_array_equal(found.sizes, expected.sizes)
    np.testing.assert_array_equal(found.ids, expected.ids)
    assert (found.ids.dtype, found.sizes.dtype) == (expected.ids.dtype, expected.sizes.dtype)
    assert len(PLAIN) > 900 and len(set(found.ids.tolist())) > 300


@pytest.mark.parametrize("many", [0, 10])
def test_no_words_and_no_plain_ones(many, monkeypatch):
    monkeypatch.setattr(pieces, "MANY_WORDS", many)
    tokenizer = make_tokenizer([*word_pieces.SPECIAL_TOKENS, "a"])
    of = pieces.pieces_by(tokenizer)
    for words, expected in (([], []), (["東"], [1]), (["<unk>"], [1]), (["a"], [5])):
        assert of(words).ids.tolist() == expected


def test_the_graph_is_traced_once_for_a_tokenizer_and_again_for_another():
    one, other = (make_tokenizer([*word_pieces.SPECIAL_TOKENS, piece]) for piece in "ab")
    of_one = pieces.pieces_by(one)
    assert pieces.pieces_by(one) is of_one
    assert of_one(["a", "b"]).ids.tolist() == [5, 1]
    assert pieces.pieces_by(other)(["a", "b"]).ids.tolist() == [1, 5]
