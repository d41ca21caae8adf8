import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from data import batches
from data.errors import DataError


def numbers(indices, epoch):
    """A batch that shows which examples it holds, and in which epoch."""
    return indices, tf.fill(tf.shape(indices), epoch)


def take(dataset, count):
    return [[part.numpy() for part in batch] for batch in dataset.take(count)]


def training(count, size, seed=0, **more):
    return batches.training_batches(count, size, seed, numbers, **more)


def permutation(count, seed, epoch):
    positions = tf.range(count, dtype=tf.int64)
    return batches.permuted(positions, seed, tf.constant(epoch, tf.int64), count).numpy()


SEEDS = st.integers(0, 2**31 - 1)


class TestPermuted:
    @given(SEEDS, st.integers(0, 10_000), st.integers(1, 1000))
    def test_each_example_once(self, seed, epoch, count):
        found = permutation(count, seed, epoch)
        assert sorted(found) == list(range(count))
        assert count < 100 or (found != permutation(count, seed, epoch + 1)).any()
        assert count < 100 or (found != permutation(count, seed + 1, epoch)).any()

    def test_the_order_of_a_seed_never_changes(self):
        """Written down once: runs of another version of this code can be compared with these."""
        assert permutation(12, 7, 0).tolist() == [7, 3, 8, 6, 5, 10, 2, 0, 11, 4, 1, 9]
        assert permutation(12, 7, 1).tolist() == [4, 0, 10, 6, 5, 2, 3, 7, 9, 11, 8, 1]

    @pytest.mark.parametrize("count", [2**16 - 1, 2**16, 2**16 + 1, 2**16 + 2, 2**18 + 1])
    def test_each_example_once_around_powers_of_four(self, count):
        """TensorFlow's operation has one example twice where the last is such a power."""
        assert len(np.unique(permutation(count, 0, 3))) == count

    @pytest.mark.long
    def test_no_epoch_and_no_seed_has_the_order_of_another(self):
        """TensorFlow's operation alone: those of epoch 256 + n and of seed 29 are n's and 2's."""
        assert len({permutation(50, 0, epoch).tobytes() for epoch in range(700)}) == 700
        assert len({permutation(50, seed, 0).tobytes() for seed in range(500)}) == 500

    @pytest.mark.parametrize(("count", "size"), [(1000, 40), (65_536, 128)])
    def test_batches_of_sorted_data_are_random_samples(self, count, size):
        """The variance of how many of the first half a batch has is the hypergeometric one."""
        batches_of = [
            permutation(count, 1, epoch).reshape(-1, size) for epoch in range(4000 // size)
        ]
        found = np.var([(batch < count // 2).sum(axis=1) for batch in batches_of])
        assert found == pytest.approx(size / 4 * (count - size) / (count - 1), rel=0.15)


class TestTraining:
    @pytest.mark.parametrize("count, size, per_epoch", [(11, 4, None), (12, 4, 2), (9, 1, None)])
    def test_a_batch_is_the_contract(self, count, size, per_epoch):
        """Batch b of epoch e holds the positions [b * size, (b + 1) * size) of its permutation."""
        in_epoch = per_epoch or count // size
        found = take(training(count, size, 7, batches_per_epoch=per_epoch), 3 * in_epoch)
        for number, (indices, epochs) in enumerate(found):
            epoch, batch = divmod(number, in_epoch)
            expected = permutation(count, 7, epoch)[batch * size : (batch + 1) * size]
            np.testing.assert_array_equal(indices, expected)
            np.testing.assert_array_equal(epochs, [epoch] * size)

    @pytest.mark.long
    @settings(max_examples=15)
    @given(SEEDS, st.data())
    def test_seed_step_and_global_batch_decide_alone(self, seed, data):
        """Whatever the number of workers, and wherever a run resumes."""
        workers, own = data.draw(st.integers(1, 4), "workers"), data.draw(st.integers(1, 5), "own")
        size = workers * own
        per_epoch = data.draw(st.integers(1, 6), "batches of an epoch")
        count = data.draw(st.integers(per_epoch * size, (per_epoch + 1) * size + 3), "examples")
        first = data.draw(st.integers(0, 4 * per_epoch), "first batch")
        dataset = training(count, size, seed, batches_per_epoch=per_epoch, first_batch=first)
        index = data.draw(st.integers(0, workers - 1), "worker")
        for number, (indices, epochs) in enumerate(take(dataset.part_of_worker(index, workers), 3)):
            epoch, batch = divmod(first + number, per_epoch)
            start = batch * size + index * own
            expected = permutation(count, seed, epoch)[start : start + own]
            np.testing.assert_array_equal(indices, expected)
            np.testing.assert_array_equal(epochs, [epoch] * own)

    @pytest.mark.parametrize("count, more", [(3, {}), (12, {"batches_per_epoch": 4}), (0, {})])
    def test_too_few_examples_for_an_epoch(self, count, more):
        with pytest.raises(DataError, match=f"{count} examples give no epoch"):
            training(count, 4, **more)

    @pytest.mark.parametrize("first", [1, 2, 5, 40])
    def test_any_batch_can_come_first(self, first):
        whole = take(training(11, 4), first + 3)
        later = take(training(11, 4, first_batch=first), 3)
        np.testing.assert_array_equal(whole[first:], later)

    def test_workers_split_it_by_data(self):
        policy = training(12, 4).options().experimental_distribute.auto_shard_policy
        assert policy == tf.data.experimental.AutoShardPolicy.DATA

    def test_autotuning_is_off(self):
        """Deleting 20 that were some seconds old took minutes, with TensorFlow's autotuning."""
        whole = training(12, 4)
        scored = batches.evaluation_batches(
            12, 4, lambda indices, epoch: (indices, indices, tf.ones(tf.shape(indices)))
        )
        for dataset in (whole, whole.part_of_worker(1, 2), scored):
            assert dataset.options().autotune.enabled is False


class TestLengths:
    """Batches of examples of similar length."""

    def make(self, lengths, size, seed=7, **more):
        def make_batch(indices, epoch, longest):
            return indices, tf.fill(tf.shape(indices), epoch), longest

        lengths = np.asarray(lengths)
        return batches.training_batches(
            len(lengths), size, seed, make_batch, lengths=lengths, **more
        )

    @pytest.mark.long
    @settings(max_examples=15)
    @given(SEEDS, st.data())
    def test_a_group_has_the_examples_of_the_contract_sorted(self, seed, data):
        """Whatever the number of workers, and wherever a run resumes."""
        workers, own = data.draw(st.integers(1, 3), "workers"), data.draw(st.integers(1, 4), "own")
        size = workers * own
        per_epoch = data.draw(st.integers(1, 13), "batches of an epoch")
        count = data.draw(st.integers(per_epoch * size, (per_epoch + 1) * size), "examples")
        lengths = np.random.default_rng(seed).integers(1, 9, count)
        dataset = self.make(lengths, size, seed, batches_per_epoch=per_epoch)
        found = take(dataset, 2 * per_epoch)
        together = max(1, per_epoch // batches.SORTED_PART)
        for epoch in range(2):
            order = permutation(count, seed, epoch)
            for first in range(0, per_epoch, together):
                group = found[epoch * per_epoch :][first : min(first + together, per_epoch)]
                expected = order[first * size : (first + len(group)) * size]
                expected = expected[np.argsort(lengths[expected], kind="stable")]
                expected = {tuple(part) for part in expected.reshape(-1, size)}
                assert {tuple(indices) for indices, _, _ in group} == expected
                assert all((epochs == epoch).all() for _, epochs, _ in group)
        for indices, _, longest in found:
            assert longest == lengths[indices].max()
        first = data.draw(st.integers(0, 2 * per_epoch - 1), "first batch")
        again = self.make(lengths, size, seed, batches_per_epoch=per_epoch, first_batch=first)
        index = data.draw(st.integers(0, workers - 1), "worker")
        parts = take(again.part_of_worker(index, workers), 2 * per_epoch - first)
        for (whole, _, longest), (part, _, of_part) in zip(found[first:], parts, strict=True):
            np.testing.assert_array_equal(part, whole[index * own : (index + 1) * own])
            assert of_part == longest, "of the global batch, not of this worker's part"

    def test_the_order_of_a_seed_never_changes(self):
        """Written down once: runs of another version of this code can be compared with these."""
        lengths = [5, 3, 5, 1, 2, 4, 3, 2, 1, 5, 2, 3, 1, 4, 2, 6]
        found = [indices.tolist() for indices, _, _ in take(self.make(lengths, 2), 8)]
        assert found == [[3, 12], [7, 6], [2, 0], [10, 5], [4, 11], [1, 9], [8, 14], [13, 15]]

    def test_batches_of_a_group_are_not_in_the_order_of_their_lengths(self):
        lengths = np.random.default_rng(0).permutation(400)
        found = take(self.make(lengths, 2), 400)
        longest = np.array([int(longest) for _, _, longest in found]).reshape(8, 50)
        apart = [lengths[indices].max() - lengths[indices].min() for indices, _, _ in found]
        assert np.mean(apart) < 10, "133 if they were drawn at random"
        ranks = {tuple(group.argsort().argsort()) for group in longest}
        assert len(ranks) == 8, "each group has an order of its own"
        assert tuple(range(50)) not in ranks

    def test_accumulated_batches_are_parts_of_one(self):
        lengths = np.random.default_rng(1).integers(1, 9, 50)
        whole = take(self.make(lengths, 6), 16)
        parts = take(self.make(lengths, 2, batches_per_epoch=24, batches_per_update=3), 48)
        for number, (indices, _, longest) in enumerate(parts):
            update, part = divmod(number, 3)
            expected = whole[update][0][2 * part : 2 * part + 2]
            np.testing.assert_array_equal(indices, expected)
            assert longest == lengths[indices].max()

    @pytest.mark.parametrize("size", [1, 4, 11, 16])
    def test_an_evaluation_begins_with_the_shortest(self, size):
        lengths = np.array([3, 1, 2, 9, 1, 1, 4, 5, 2, 7, 3])

        def make_batch(indices, epoch, longest):
            assert indices.shape[0] in (size, size // 2)
            return indices, tf.fill(tf.shape(indices), longest)

        data = batches.evaluation_batches(11, size, make_batch, lengths=lengths)
        found = list(data.as_numpy_iterator())
        real = np.concatenate([x[w == 1] for x, _, w in found])
        assert real.tolist() == np.argsort(lengths, kind="stable").tolist()
        assert all((longest == lengths[x].max()).all() for x, longest, _ in found)
        if size % 2 == 0:
            workers = [data.part_of_worker(index, 2).as_numpy_iterator() for index in range(2)]
            for whole, *parts in zip(found, *workers, strict=True):
                for column in range(3):
                    together = np.concatenate([part[column] for part in parts])
                    np.testing.assert_array_equal(together, whole[column])

    def test_parts_are_sorted_by_the_first_one(self):
        """And those of equal first parts by the second one; the longest of each is passed on."""
        lengths = np.random.default_rng(2).integers(1, 4, (80, 2))
        found = take(self.make(lengths, 2), 40)
        for first in range(0, 40, 10):
            group = sorted(found[first : first + 10], key=lambda batch: lengths[batch[0]].tolist())
            order = [tuple(lengths[index]) for indices, _, _ in group for index in indices]
            assert order == sorted(order)
        for indices, _, longest in found:
            np.testing.assert_array_equal(longest, lengths[indices].max(axis=0))

    def test_an_epoch_ends_with_an_update(self):
        with pytest.raises(DataError, match="an epoch of 5 batches; .* a multiple of .*, 2"):
            self.make(np.ones(10), 2, batches_per_update=2)

    def test_of_other_examples(self):
        with pytest.raises(DataError, match="lengths of shape .3,.; expected one for each of 4"):
            batches.training_batches(4, 2, 0, numbers, lengths=np.ones(3, int))
        with pytest.raises(DataError, match="lengths of shape .3,.; expected one for each of 4"):
            batches.evaluation_batches(4, 2, numbers, lengths=np.ones(3, int))


class TestEvaluation:
    @pytest.mark.parametrize("size", [1, 3, 4, 11, 16])
    def test_each_example_counts_once(self, size):
        def make_batch(indices, epoch):
            return indices, tf.fill(tf.shape(indices), epoch), tf.ones([size, 2])

        found = list(batches.evaluation_batches(11, size, make_batch).as_numpy_iterator())
        assert all(x.shape == (size,) for x, _, _ in found)
        x = np.concatenate([x for x, _, _ in found])
        weights = np.concatenate([w for _, _, w in found])
        np.testing.assert_array_equal(x[weights[:, 0] == 1], np.arange(11))
        assert weights.sum() == 22 and x.max() == 10
        assert all((epoch == batches.EVALUATION_EPOCH).all() for _, epoch, _ in found)

    def test_without_weights_examples_count_one_each_and_padding_nothing(self):
        data = batches.evaluation_batches(6, 4, lambda indices, epoch: (indices, indices))
        for parts in ([data], [data.part_of_worker(0, 2), data.part_of_worker(1, 2)]):
            found = [batch for part in parts for batch in part.as_numpy_iterator()]
            assert sorted(int(x) for xs, _, w in found for x in xs[w == 1]) == list(range(6))
            assert sum(w.sum() for _, _, w in found) == 6

    def test_without_labels_too(self):
        data = batches.evaluation_batches(6, 4, lambda indices, epoch: indices)
        (x, y, weights), (more, none, last) = data
        assert [*x, *more] == [0, 1, 2, 3, 4, 5, 5, 5] and y is none is None
        assert [*weights, *last] == [1, 1, 1, 1, 1, 1, 0, 0]

    def test_weights_of_examples_and_their_dtype_stay(self):
        def make_batch(indices, epoch):
            return indices, indices, tf.ones([4], tf.float64) * 0.5

        found = list(batches.evaluation_batches(6, 4, make_batch).as_numpy_iterator())
        weights = np.concatenate([w for _, _, w in found])
        np.testing.assert_array_equal(weights, [0.5] * 6 + [0, 0])
        assert weights.dtype == np.float64


MASK = (1 << 64) - 1


def splitmix64(state):
    """The generator as its authors publish it (prng.di.unimi.it/splitmix64.c), on Python's ints."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


class TestUniform:
    def test_equals_a_plain_implementation(self):
        epochs, examples = np.array([[-1], [0], [7]]), np.array([0, 1, 2**40, 2**62])
        found = batches.uniform(12345, tf.constant(epochs), tf.constant(examples)).numpy()
        assert found.dtype == np.float32 and found.shape == (3, 4)
        for row, epoch in enumerate(epochs[:, 0]):
            for column, example in enumerate(examples):
                state = splitmix64(12345 ^ (int(epoch) & MASK))
                state = splitmix64(state ^ int(example))
                assert found[row, column] == np.float32((state >> 40) * 2.0**-24)


@pytest.mark.parametrize("kind", ["training", "evaluation"])
@pytest.mark.parametrize("workers", [2, 4])
def test_a_worker_makes_its_own_part_of_each_global_batch(kind, workers):
    made = []

    def make_batch(indices, epoch):
        made.append(indices.shape[0])
        return indices, indices, tf.ones(tf.shape(indices))

    if kind == "training":
        whole = batches.training_batches(26, 8, 3, make_batch, first_batch=2)
    else:
        whole = batches.evaluation_batches(26, 8, make_batch)
    parts = [take(whole.part_of_worker(index, workers), 4) for index in range(workers)]
    for number, batch in enumerate(take(whole, 4)):
        for column in range(3):
            together = np.concatenate([part[number][column] for part in parts])
            np.testing.assert_array_equal(together, batch[column])
    assert made == [8] + [8 // workers] * workers


@pytest.mark.parametrize(("size", "workers", "replicas"), [(8, 3, 1), (8, 1, 3), (1, 2, 2)])
def test_replicas_that_cannot_share_a_batch_evaluate_each_example_once(size, workers, replicas):
    """With the length of the global batch, in parts that the replicas of a worker share."""
    lengths = np.arange(21)[::-1] % 7

    def make_batch(indices, epoch, longest):
        return indices, tf.fill(tf.shape(indices), longest)

    whole = batches.evaluation_batches(21, size, make_batch, lengths=lengths)
    parts = [take(whole.part_of_worker(n, workers, replicas), 21) for n in range(workers)]
    for number, (x, longest, weights) in enumerate(take(whole, 21)):
        found = [np.concatenate(column) for column in zip(*(p[number] for p in parts), strict=True)]
        assert all(len(part[number][0]) % replicas == 0 for part in parts)
        np.testing.assert_array_equal(found[0][found[2] == 1], x[weights == 1])
        assert set(found[1]) == set(longest)


def test_replicas_that_cannot_share_a_batch_do_not_train_on_it():
    with pytest.raises(DataError) as error:
        training(26, 8).part_of_worker(0, 3, 2)
    assert str(error.value) == (
        "training data with batch_size 8 cannot be shared by 6 replicas: it must be a multiple of "
        "6, for instance 6 or 12"
    )
