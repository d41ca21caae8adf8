import random

import numpy as np
import pytest
import tensorflow as tf

from data import word_pieces
from data.masked_lm import (
    NOT_CHOSEN,
    Masking,
    SpecialTokens,
    keep_whole_words,
)
from tests.data import test_masked_lm
from tests.support import tiny_presets

# 0 to 4 are special, 5 to 119 begin a word, 120 to 199 continue one.
SPECIAL = SpecialTokens(pad=0, unknown=1, cls=2, sep=3, mask=4)
MASKING = Masking(SPECIAL, 200, 0.15, 5, seed=7, continuations=tuple(range(120, 200)))


def words_of(row):
    """The places of each word of a sequence, in plain Python."""
    words, after_a_piece = [], False
    for place, token in enumerate(row):
        if token in SPECIAL.all():
            after_a_piece = False
        elif token >= 120 and after_a_piece:
            words[-1].append(place)
        else:
            words.append([place])
            after_a_piece = True
    return words


def by_googles_rule(words, wanted):
    """Which of these words are taken, in this order."""
    taken, count = [], 0
    for word in words:
        if count >= wanted:
            break
        if count + len(word) > wanted:
            continue
        taken.append(word)
        count += len(word)
    return taken


def sequences_of_words(count, length=32, seed=0):
    """[CLS], words of 1 to 7 pieces, [UNK], [SEP], and padding behind some."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        row = [SPECIAL.cls]
        if number % 3 == 0:
            row += [150, 151]  # what the sequence before has left of a word
        while len(row) < length:
            row.append(generator.choice([1, 3, *[generator.randrange(5, 120)] * 8]))
            if row[-1] > 4:
                row += [generator.randrange(120, 200) for _ in range(generator.randrange(7))]
        row = row[:length]
        if number % 4 == 1:
            row[generator.randrange(4, length) :] = []
        rows.append(row + [SPECIAL.pad] * (length - len(row)))
    return np.array(rows, np.int32)


def chosen_places(x, weights):
    return [
        set(row[is_chosen].tolist())
        for row, is_chosen in zip(x["mask_positions"], weights > 0, strict=True)
    ]


def wanted_of(sequences, masking=MASKING):
    text = (sequences != SPECIAL.pad).sum(1)
    return np.clip(np.rint(masking.probability * text), 1, masking.max_predictions).astype(int)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Albert"])
def test_pieces_that_continue_a_word(family):
    """`##` of WordPiece; all but those with a space before them of byte-level BPE."""
    tokenizer = tiny_presets.tokenizer(family)
    settings = dict(probability=0.15, sequence_length=128, seed=3)
    masking = Masking.of(tokenizer, whole_words=True, **settings)
    (ids, _), *_ = word_pieces.tokenize(["steps the the, xyz"], tokenizer)
    pieces = word_pieces.pieces_of(tokenizer)
    found = [pieces[number] for number in ids if number in masking.continuations]
    expected = {"Bert": ["##s"], "Roberta": [*"steps"], "Albert": []}[family]
    assert found[: len(expected)] == expected
    assert Masking.of(tokenizer, **settings).continuations is None


class TestKeepWholeWords:
    def test_equal_scores_leave_words_whole(self):
        kept = keep_whole_words(
            tf.constant([[0.5, 0.1, 0.5, 0.1, 0.5, 0.1]]),
            tf.constant([[50, 121, 51, 122, 52, 123]]),
            tf.constant([[4]]),
            MASKING,
        )
        np.testing.assert_allclose(kept, [[0.5] * 4 + [NOT_CHOSEN] * 2])

    @pytest.mark.parametrize("wanted", [1, 3, 5, 12, 32])
    def test_equals_plain_python(self, wanted):
        sequences = sequences_of_words(300, seed=wanted)
        generator = np.random.default_rng(wanted)
        scores = generator.random(sequences.shape).astype(np.float32)
        scores[np.isin(sequences, SPECIAL.all())] = NOT_CHOSEN
        found = keep_whole_words(
            tf.constant(scores),
            tf.constant(sequences),
            tf.fill((len(sequences), 1), wanted),
            MASKING,
        ).numpy()
        expected = np.full_like(scores, NOT_CHOSEN)
        for row, score, kept in zip(sequences, scores, expected, strict=True):
            words = sorted(words_of(row), key=lambda word: score[word[0]])
            for word in by_googles_rule(words, wanted):
                kept[word] = score[word[0]]
        np.testing.assert_array_equal(found, expected)
        assert (expected < NOT_CHOSEN).any()


class TestMaskBatch:
    @pytest.mark.parametrize(
        ("epoch", "split"), [(0, "train"), (3, "train"), (-1, "valid"), (-1, "test")]
    )
    def test_every_chosen_word_is_whole_and_none_goes_over(self, epoch, split):
        sequences = sequences_of_words(400)
        x, labels, weights = test_masked_lm.mask(sequences, MASKING, epoch=epoch, split=split)
        places = chosen_places(x, weights)
        for row, found, most in zip(sequences, places, wanted_of(sequences), strict=True):
            words = [word for word in words_of(row) if found & set(word)]
            assert found == {place for word in words for place in word}
            assert len(found) <= most
            left_out = [word for word in words_of(row) if not found & set(word)]
            assert all(len(found) + len(word) > most for word in left_out), "there was room"
        np.testing.assert_array_equal(weights.sum(1), [len(found) for found in places])
