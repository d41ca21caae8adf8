"""Tests `data.text_scores` by hand-counted words."""

import numpy as np
import pytest

from data import text_scores


def test_words_groups_and_order_are_counted():
    found = text_scores.rouge([("the cat sat on the mat", "The mat: the cat sat.")])
    # Five of six and of five words; "the cat", "cat sat" and "the mat" of five and of four pairs;
    # in order "the cat sat", since "mat" comes first here.
    assert found == {
        "rouge1": pytest.approx(2 * 5 / (6 + 5)),
        "rouge2": pytest.approx(2 * 3 / (5 + 4)),
        "rougeL": pytest.approx(2 * 3 / (6 + 5)),
    }


def test_a_word_counts_as_often_as_both_have_it():
    assert text_scores.rouge([("a a b", "a a a")])["rouge1"] == pytest.approx(2 * 2 / 6)


def test_the_mean_is_that_of_all_texts():
    found = text_scores.rouge([("one two", "one two"), ("one two", "three")])
    assert found == {"rouge1": 0.5, "rouge2": 0.5, "rougeL": 0.5}


def test_texts_without_words_share_nothing():
    assert text_scores.rouge([("", "one"), ("one", " ..."), ("", "")]) == {
        "rouge1": 0,
        "rouge2": 0,
        "rougeL": 0,
    }


def test_letters_of_all_alphabets_are_words():
    assert text_scores.rouge([("мама мыла раму", "мама мыла")])["rouge1"] == pytest.approx(0.8)
    assert text_scores.words("नमस्ते दुनिया, snake_case") == ["नमस्ते", "दुनिया", "snake", "case"]


@pytest.mark.parametrize(
    ("some", "others", "length"),
    [("abcde", "ace", 3), ("abc", "cba", 1), ("abcbdab", "bdcaba", 4), ("", "a", 0)],
)
def test_the_longest_common_subsequence(some, others, length):
    assert text_scores.longest_common_subsequence(some, others) == length


def test_of_no_texts():
    with pytest.raises(ValueError, match="no texts"):
        text_scores.rouge([])


def test_bleu_is_that_of_the_words():
    assert text_scores.bleu([("the mean of all tokens", "the mean of all tokens")]) == 1
    # Five words against six: 4 of 4 groups of two words and more, and exp(1 - 6 / 5).
    found = text_scores.bleu([("the mean of all the tokens", "the mean of all the")])
    assert found == pytest.approx(np.exp(1 - 6 / 5), rel=1e-6)
    assert text_scores.bleu([("the mean of all", ""), ("of all the tokens", " ")]) == 0


def test_bleu_counts_nothing_in_short_texts():
    assert text_scores.bleu([("nine", "nine"), ("one two", "one two")]) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It costs 3.", "It costs 3 ."),
        ("it has 5,000.5, or 2-3", "it has 5,000.5 , or 2 - 3"),
        ("5\u202f€, oui\u00a0!", "5 € , oui !"),
        ("x &lt; y (z)", "x < y ( z )"),
        ("a-\nb\nc", "ab c"),
        ("don't e.g. this", "don't e . g . this"),
    ],
)
def test_words_are_those_of_the_tokenizer_13a(text, words):
    assert text_scores.words_13a(text) == words.split()
