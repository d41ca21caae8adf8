"""Tests `data.rouge` by hand-counted words."""

import pytest

from data import rouge


def test_words_groups_and_order_are_counted():
    found = rouge.rouge([("the cat sat on the mat", "The mat: the cat sat.")])
    # Five of six and of five words; "the cat", "cat sat" and "the mat" of five and of four pairs;
    # in order "the cat sat", since "mat" comes first here.
    assert found == {
        "rouge1": pytest.approx(2 * 5 / (6 + 5)),
        "rouge2": pytest.approx(2 * 3 / (5 + 4)),
        "rougeL": pytest.approx(2 * 3 / (6 + 5)),
    }


def test_a_word_counts_as_often_as_both_have_it():
    assert rouge.rouge([("a a b", "a a a")])["rouge1"] == pytest.approx(2 * 2 / 6)


def test_the_mean_is_that_of_all_texts():
    found = rouge.rouge([("one two", "one two"), ("one two", "three")])
    assert found == {"rouge1": 0.5, "rouge2": 0.5, "rougeL": 0.5}


def test_texts_without_words_share_nothing():
    assert rouge.rouge([("", "one"), ("one", " ..."), ("", "")]) == {
        "rouge1": 0,
        "rouge2": 0,
        "rougeL": 0,
    }


def test_letters_of_all_alphabets_are_words():
    assert rouge.rouge([("мама мыла раму", "мама мыла")])["rouge1"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("some", "others", "length"),
    [("abcde", "ace", 3), ("abc", "cba", 1), ("abcbdab", "bdcaba", 4), ("", "a", 0)],
)
def test_the_longest_common_subsequence(some, others, length):
    assert rouge.longest_common_subsequence(some, others) == length


def test_of_no_texts():
    with pytest.raises(ValueError, match="no texts"):
        rouge.rouge([])
