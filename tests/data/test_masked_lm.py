import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from data import masked_lm
from data.errors import DataError
from data.masked_lm import Masking, SpecialTokens
from tests.data.test_sequences import cut, random_lines

SPECIAL = SpecialTokens(pad=0, unknown=1, cls=2, sep=3, mask=4)
MASKING = Masking(SPECIAL, vocabulary_size=200, probability=0.15, max_predictions=19, seed=7)


def full_sequences(count, length=128, seed=0):
    sequences = np.random.default_rng(seed).integers(5, 200, (count, length), np.int32)
    sequences[:, 0] = SPECIAL.cls
    return sequences


def mask(sequences, masking=MASKING, epoch=0, split="train", indices=None):
    indices = np.arange(len(sequences)) if indices is None else np.asarray(indices)
    arguments = (tf.constant(sequences), tf.constant(indices, tf.int64), tf.constant(epoch))
    x, labels, weights = masked_lm.mask_batch(*arguments, masking, split)
    return {name: value.numpy() for name, value in x.items()}, labels.numpy(), weights.numpy()


class TestMaskBatch:
    def test_eighty_ten_ten(self):
        sequences = full_sequences(2000)
        x, labels, weights = mask(sequences)
        assert (weights == 1).all()
        rows = np.arange(2000)[:, None]
        now = x["token_ids"][rows, x["mask_positions"]]
        masked = (now == SPECIAL.mask).mean()
        kept = (now == labels).mean()
        # 38,000 predictions: the deviation of a share of 0.8 is 0.0021, that of 0.1 is 0.0015.
        assert masked == pytest.approx(0.8, abs=0.006)
        assert kept == pytest.approx(0.1 + 0.1 / 195, abs=0.005)
        replaced = now[(now != SPECIAL.mask) & (now != labels)]
        assert len(replaced) / now.size == pytest.approx(0.1 - 0.1 / 195, abs=0.005)
        # Random pieces come from the whole vocabulary without the special tokens, all alike: 19.5
        # each, deviation 4.4.
        counts = np.bincount(replaced, minlength=200)
        assert not counts[:5].any()
        assert np.abs(counts[5:] - 19.5).max() < 5 * 4.4

    def test_the_masks_of_a_seed_never_change(self):
        """Written down once: runs of another version of this code can be compared with these."""
        sequences = np.arange(5, 29, dtype=np.int32).reshape(2, 12)
        x, labels, _ = mask(sequences, dataclasses.replace(MASKING, max_predictions=2), epoch=1)
        assert x["mask_positions"].tolist() == [[5, 3], [1, 11]]
        assert labels.tolist() == [[10, 8], [18, 28]]
        assert x["token_ids"][x["token_ids"] != sequences].tolist() == [
            40,
            SPECIAL.mask,
            SPECIAL.mask,
        ]

    def test_labels_are_the_tokens_before_and_nothing_else_changes(self):
        sequences = full_sequences(50)
        x, labels, _ = mask(sequences)
        rows = np.arange(50)[:, None]
        np.testing.assert_array_equal(sequences[rows, x["mask_positions"]], labels)
        untouched = np.ones(sequences.shape, bool)
        untouched[rows, x["mask_positions"]] = False
        np.testing.assert_array_equal(x["token_ids"][untouched], sequences[untouched])
        assert all(len(set(row)) == 19 for row in x["mask_positions"])

    def test_special_tokens_are_neither_masked_nor_targets(self):
        sequences = full_sequences(200, 32)
        sequences[:, 3::4] = SPECIAL.unknown
        sequences[:, 6::4] = SPECIAL.sep
        sequences[:, 28:] = SPECIAL.pad
        x, labels, weights = mask(sequences, dataclasses.replace(MASKING, max_predictions=5))
        assert not set(labels[weights > 0]) & set(SPECIAL.all())
        for token in (SPECIAL.unknown, SPECIAL.sep, SPECIAL.pad, SPECIAL.cls):
            np.testing.assert_array_equal(x["token_ids"] == token, sequences == token)
        np.testing.assert_array_equal(x["padding_mask"], sequences != SPECIAL.pad)

    def test_a_prediction_without_a_place_weighs_nothing(self):
        sequences = np.full((3, 16), SPECIAL.unknown, np.int32)
        sequences[:, 0] = SPECIAL.cls
        sequences[1, 5] = 50
        sequences[2, 2:14] = 60
        masking = dataclasses.replace(MASKING, probability=0.25, max_predictions=4)
        x, labels, weights = mask(sequences, masking)
        np.testing.assert_array_equal(weights.sum(1), [0, 1, 4])
        assert x["mask_positions"][1, 0] == 5 and labels[1, 0] == 50
        assert (x["mask_positions"][weights == 0] == 0).all() and (labels[weights == 0] == 0).all()
        np.testing.assert_array_equal(x["token_ids"][0], sequences[0])

    def test_short_lines_get_their_share_at_least_one(self):
        lines = [[9] * count for count in (1, 8, 18, 60)]
        sequences = cut("lines", lines, 64)
        masking = dataclasses.replace(MASKING, max_predictions=10)
        weights = mask(sequences, masking)[2]
        # 15 % of the tokens, [CLS] and [SEP] counted: 3, 10, 20 and 62 (2 of 1.5, to even).
        np.testing.assert_array_equal(weights.sum(1), [1, 2, 3, 9])

    def test_masks_depend_on_seed_epoch_and_example_alone(self):
        sequences = full_sequences(12, 32)
        masking = dataclasses.replace(MASKING, max_predictions=5)
        whole = mask(sequences, masking, epoch=3)
        for chosen in ([0, 1, 2], [11, 4], [7]):
            part = mask(sequences[chosen], masking, epoch=3, indices=chosen)
            for name, value in part[0].items():
                np.testing.assert_array_equal(value, whole[0][name][chosen])
            np.testing.assert_array_equal(part[1], whole[1][chosen])
        same = functools.partial(mask, sequences)
        for other in (
            same(masking, epoch=4),
            same(dataclasses.replace(masking, seed=8), epoch=3),
            same(masking, epoch=3, split="valid"),
            same(masking, epoch=3, indices=np.arange(1, 13)),
        ):
            assert (other[0]["mask_positions"] != whole[0]["mask_positions"]).any()


class TestData:
    MASKING = dataclasses.replace(MASKING, max_predictions=3)

    def flat(self, dataset, count=None):
        dataset = dataset if count is None else dataset.take(count)
        rows = list(dataset.as_numpy_iterator())
        names = ("token_ids", "mask_positions", "padding_mask")
        parts = [np.concatenate([x[name] for x, _, _ in rows]) for name in names]
        return [*parts, *(np.concatenate([row[i] for row in rows]) for i in (1, 2))]

    def test_each_epoch_of_training_has_other_masks_and_resumes_anywhere(self):
        sequences = np.repeat(full_sequences(1, 20), 4, axis=0)
        found = self.flat(masked_lm.training_data(sequences, self.MASKING, batch_size=4), 3)
        positions = found[1].reshape(3, -1)
        # The same examples in another order, too: as a set, the masks are others.
        rows = [sorted(epoch.reshape(4, -1).tolist()) for epoch in positions]
        assert rows[0] != rows[1] != rows[2]
        later = masked_lm.training_data(sequences, self.MASKING, batch_size=4, first_batch=1)
        np.testing.assert_array_equal(self.flat(later, 2)[1], found[1][4:])

    def test_the_share_falls_from_step_to_step(self):
        sequences = full_sequences(12, 100)
        falling = dataclasses.replace(
            MASKING, probability=0.1, initial_probability=0.3, max_predictions=30
        )
        steps = {"steps": 5}
        whole = self.flat(masked_lm.training_data(sequences, falling, batch_size=4, **steps), 7)
        filled = whole[-1].reshape(7, 4, 30).sum(2)
        wanted = np.array([30, 25, 20, 15, 10, 10, 10])[:, None]
        np.testing.assert_array_equal(filled, np.broadcast_to(wanted, (7, 4)))
        resumed = masked_lm.training_data(sequences, falling, batch_size=4, first_batch=2, **steps)
        halves = masked_lm.training_data(
            sequences, falling, batch_size=2, batches_per_step=2, **steps
        )
        for a, b, c in zip(whole, self.flat(resumed, 5), self.flat(halves, 14), strict=True):
            np.testing.assert_array_equal(a[8:], b)
            np.testing.assert_array_equal(a, c)
        assert falling.mean_predictions == pytest.approx(20)
        assert falling.describe() == "30% of the tokens in the first step, 10% in the last"
        data = masked_lm.evaluation_data(sequences, falling, batch_size=4, split="test")
        assert (self.flat(data)[-1].reshape(12, 30).sum(1) == 10).all()

    @pytest.mark.parametrize("split", ["train", "valid", "test"])
    def test_the_seed_of_a_run_draws_the_masks_of_training_alone(self, split):
        sequences = full_sequences(10, 20)
        masks = [
            mask(sequences, dataclasses.replace(self.MASKING, seed=seed), split=split)[0]
            for seed in (0, 1)
        ]
        same = np.array_equal(*(x["mask_positions"] for x in masks))
        assert same == (split != "train")

    @pytest.mark.parametrize("split", ["valid", "test"])
    def test_evaluation_never_changes(self, split):
        sequences = full_sequences(10, 20)
        data = masked_lm.evaluation_data(sequences, self.MASKING, batch_size=4, split=split)
        first, again = self.flat(data), self.flat(data)
        other_size = self.flat(
            masked_lm.evaluation_data(sequences, self.MASKING, batch_size=5, split=split)
        )
        for a, b, c in zip(first, again, other_size, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a[:10], c)
        assert first[-1][:10].all() and not first[-1][10:].any()


def test_a_split_without_a_token_to_predict_is_named():
    special = np.resize(SPECIAL.all(), (3, 20))
    one = special.copy()
    one[1, 7] = 9
    masked_lm.require_predictions({"train": one, "valid": one}, MASKING)
    empty = {"train": one, "valid": special, "test": np.zeros((0, 20), np.int32)}
    with pytest.raises(DataError, match="^valid, test: no word piece to predict"):
        masked_lm.require_predictions(empty, MASKING)


def test_tokens_per_sequence():
    sequences = cut("lines", random_lines(60, 40), 32)
    found = masked_lm.tokens_per_sequence(sequences, MASKING)
    assert found == pytest.approx(mask(sequences)[0]["padding_mask"].sum(1).mean())


class TestBaselines:
    MASKING = dataclasses.replace(MASKING, vocabulary_size=8)

    def test_by_hand(self):
        train = np.array([[2, 5, 5, 6], [2, 5, 1, 3]])
        test = np.array([[2, 5, 6, 7, 1, 0]])
        found = masked_lm.baselines(train, test, self.MASKING)
        # Counts of 5, 6 and 7 plus 0.1: 3.1, 1.1, 0.1 of 4.3; each stands once in the test text.
        expected = -np.mean(np.log(np.array([3.1, 1.1, 0.1]) / 4.3))
        assert found["unigram_cross_entropy"] == pytest.approx(expected)
        assert found["most_frequent_accuracy"] == pytest.approx(1 / 3)

        # Special tokens get the share of a piece that does not occur, and no part of the whole.
        found = masked_lm.log_frequency(train, self.MASKING)
        np.testing.assert_allclose(found, np.log(np.array([0.1] * 5 + [3.1, 1.1, 0.1]) / 4.3))
