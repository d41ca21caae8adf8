import keras
import numpy as np
import pytest
import tensorflow as tf

from data import arrays, batches
from data.errors import DataError

RNG = np.random.default_rng(0)
PIXELS = RNG.random((11, 2, 3)).astype(np.float32)
LABELS = np.arange(11, dtype=np.int32)
COLUMN = RNG.random((11, 1)).astype(np.float32)
INPUTS = {
    "token_ids": RNG.integers(0, 99, (11, 4), np.int32),
    "segment_ids": np.zeros((11, 4), np.int64),
    "padding_mask": RNG.random((11, 4)) < 0.5,
}


def flat(dataset):
    return [
        [part.numpy() for part in tf.nest.flatten(batch, expand_composites=True)]
        for batch in dataset
    ]


class TestTraining:
    @pytest.mark.parametrize("first", [0, 5])
    def test_a_batch_holds_the_rows_of_the_contract(self, first):
        data = arrays.training_data(PIXELS, LABELS, seed=7, batch_size=4, first_batch=first)
        for number, (x, y) in enumerate(data.take(6), first):
            epoch, batch = divmod(number, 2)
            positions = tf.range(4 * batch, 4 * batch + 4, dtype=tf.int64)
            rows = batches.permuted(positions, 7, tf.constant(epoch, tf.int64), 11).numpy()
            np.testing.assert_array_equal(y, LABELS[rows])
            np.testing.assert_array_equal(x, PIXELS[rows])

    def test_several_inputs_stay_together(self):
        data = arrays.training_data(INPUTS, LABELS, seed=1, batch_size=5)
        for x, y in data.take(4):
            assert set(x) == set(INPUTS)
            for name, value in x.items():
                np.testing.assert_array_equal(value, INPUTS[name][y.numpy()])
                assert value.dtype == tf.int32, "booleans, too"

    def test_a_list_stands_for_a_tuple(self):
        """A list would become one tensor, of all arrays, or fail where their shapes differ."""
        wide = np.concatenate([PIXELS, PIXELS], axis=1)
        for data in (
            arrays.training_data([PIXELS, wide], [LABELS, COLUMN], seed=1, batch_size=5),
            arrays.evaluation_data([PIXELS, wide], [LABELS, COLUMN], batch_size=5),
            arrays.training_data(
                PIXELS, [LABELS, COLUMN], [np.ones(11), np.ones((11, 1))], seed=1, batch_size=5
            ),
        ):
            for x, (labels, column), *_ in data.take(2):
                rows = labels.numpy()
                np.testing.assert_array_equal(column, COLUMN[rows])
                if isinstance(x, tuple):
                    np.testing.assert_array_equal(x[0], PIXELS[rows])
                    np.testing.assert_array_equal(x[1], wide[rows])


class TestWeights:
    """Of the examples, of their time steps, of outputs: they stay with their examples."""

    WEIGHTS = {"one": np.linspace(0.5, 1.5, 11), "other": np.linspace(1, 3, 33).reshape(11, 3)}

    def test_in_training(self):
        targets = {"one": LABELS, "other": LABELS}
        data = arrays.training_data(PIXELS, targets, self.WEIGHTS, seed=1, batch_size=4)
        for _, y, weights in data.take(4):
            for name, value in weights.items():
                expected = self.WEIGHTS[name][y[name].numpy()]
                np.testing.assert_allclose(value, expected, rtol=1e-6)

    def test_in_an_evaluation_what_pads_the_last_batch_weighs_nothing(self):
        data = arrays.evaluation_data(PIXELS, LABELS, self.WEIGHTS, batch_size=4)
        *_, (_, _, last) = data
        for name, value in last.items():
            np.testing.assert_allclose(value[:3], self.WEIGHTS[name][8:], rtol=1e-6)
            np.testing.assert_array_equal(value[3:], np.zeros_like(value[3:]))


class TestLengths:
    """Batches are cut after their longest example."""

    LENGTHS = np.array([3, 7, 40, 20, 8, 9, 50, 2, 30, 13, 17])
    PADDED = {
        "token_ids": np.where(np.arange(50) < LENGTHS[:, None], 1 + np.arange(50), 0),
        "vectors": np.where(np.arange(50) < LENGTHS[:, None], 1.0, 0.0)[..., None],
    }

    @pytest.mark.parametrize("kind", ["training", "evaluation"])
    def test_no_token_is_lost_and_most_padding_is(self, kind):
        if kind == "training":
            data = arrays.training_data(
                self.PADDED, LABELS, seed=3, batch_size=2, lengths=self.LENGTHS
            ).take(5)
        else:
            data = arrays.evaluation_data(self.PADDED, LABELS, batch_size=2, lengths=self.LENGTHS)
        for x, y, *_ in data:
            rows = y.numpy()
            longest = self.LENGTHS[rows].max()
            width = x["token_ids"].shape[1]
            smallest = next(n for n in (8, 12, 16, 24, 32, 48, 50) if n >= longest)
            assert width == smallest
            for name, value in x.items():
                np.testing.assert_array_equal(value, self.PADDED[name][rows, :width])

    def test_a_change_sees_whole_rows(self):
        def change(x, indices, epoch):
            assert x["token_ids"].shape == (11, 50)
            return x

        options = dict(seed=3, batch_size=11, lengths=self.LENGTHS, change=change)
        assert next(iter(arrays.training_data(self.PADDED, LABELS, **options)))

    def test_arrays_too_short_for_them(self):
        for x in (COLUMN, LABELS, {**self.PADDED, "other": COLUMN}):
            for make in (
                lambda x: arrays.training_data(
                    x, LABELS, seed=0, batch_size=2, lengths=self.LENGTHS
                ),
                lambda x: arrays.evaluation_data(x, LABELS, batch_size=2, lengths=self.LENGTHS),
            ):
                with pytest.raises(
                    DataError, match="lengths of up to 50; expected .examples, time"
                ):
                    make(x)


class TestEvaluation:
    @pytest.mark.parametrize("size", [1, 4, 11, 16])
    def test_each_row_counts_once_in_order(self, size):
        found = flat(arrays.evaluation_data(PIXELS, COLUMN, batch_size=size))
        x, y, weights = (np.concatenate([batch[part] for batch in found]) for part in range(3))
        assert all(len(batch[0]) == size for batch in found)
        np.testing.assert_array_equal(weights, np.arange(len(weights)) < 11)
        np.testing.assert_array_equal(x[:11], PIXELS)
        np.testing.assert_array_equal(y[:11], COLUMN)
        assert y.shape[1:] == (1,) and weights.ndim == 1


@pytest.mark.parametrize("floatx", ["float32", "float64"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.uint8, np.int64, bool])
def test_dtypes(floatx, dtype):
    keras.config.set_floatx(floatx)
    x, y, weights = PIXELS.astype(dtype), LABELS.astype(dtype), np.ones(11, np.int64)
    expected = floatx if np.dtype(dtype).kind == "f" else "int32"
    for data, names in (
        (arrays.training_data(x, y, seed=0, batch_size=4), [expected, expected]),
        (arrays.training_data(x, y, weights, seed=0, batch_size=4), [expected, expected, floatx]),
        (arrays.evaluation_data(x, y, batch_size=4), [expected, expected, floatx]),
    ):
        assert [part.dtype.name for part in data.element_spec] == names


def test_float64_numbers_lose_nothing():
    keras.config.set_floatx("float64")
    x = RNG.random((3, 2))
    ((found, _, _),) = flat(arrays.evaluation_data(x, LABELS[:3], batch_size=3))
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize(
    "x, y, words",
    [
        (PIXELS[:10], LABELS, r"different lengths: .10, 11."),
        (INPUTS | {"token_ids": LABELS[:4]}, LABELS, r"different lengths: .*11, 4, 11"),
        ([PIXELS, PIXELS[:9]], LABELS, r"^arrays of different lengths: .11, 9, 11.; expected one"),
        (PIXELS, np.full(11, 2**31), "integers that int32 does not hold"),
        (tf.ragged.constant([[1], [2, 3]]), LABELS[:2], "a RaggedTensor; expected .*mask_zero"),
        ([[1], [2, 3]], LABELS[:2], "an int; expected NumPy arrays, one row per example"),
        (PIXELS, [0] * 11, "an int; expected NumPy arrays"),
    ],
)
def test_what_does_not_fit(x, y, words):
    with pytest.raises(DataError, match=words):
        arrays.training_data(x, y, seed=0, batch_size=4)
    with pytest.raises(DataError, match=words):
        arrays.evaluation_data(x, y, batch_size=4)


@pytest.mark.parametrize(
    "x, y, words",
    [
        (PIXELS, np.array(["a"] * 11), "^`y` has texts: number them first"),
        (INPUTS | {"city": np.array(["Rome"] * 11)}, LABELS, "^`city` has texts"),
        ({"city": np.array(["Rome"] * 11, object)}, LABELS, "^`city` has texts"),
        ([PIXELS, np.array([b"a"] * 11)], LABELS, "^`x.1.` has texts"),
        (PIXELS, np.array(["2026-11-28"] * 11, "M8[D]"), "^`y` has dtype datetime64.D.; expected"),
    ],
)
def test_what_is_no_number_is_named(x, y, words):
    with pytest.raises(DataError, match=words):
        arrays.training_data(x, y, seed=0, batch_size=4)
    with pytest.raises(DataError, match=words):
        arrays.evaluation_data(x, y, batch_size=4)


def test_tensors_and_tables_are_arrays():
    """As for `fit()` of Keras; a table of pandas has `__array__`, too."""

    class Table:
        def __array__(self, dtype=None, copy=None):
            return PIXELS

    options = dict(seed=7, batch_size=4)
    expected = list(arrays.training_data(PIXELS, LABELS, **options).take(2))
    for x in (Table(), tf.constant(PIXELS)):
        found = list(arrays.training_data(x, tf.constant(LABELS), **options).take(2))
        for one, other in zip(found, expected, strict=True):
            for ours, theirs in zip(one, other, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_without_labels():
    """As Keras takes x alone; where examples have weights, the labels are None."""
    options = dict(seed=7, batch_size=4)
    (with_labels,) = arrays.training_data(PIXELS, LABELS, **options).take(1)
    ((x,),) = arrays.training_data(PIXELS, **options).take(1)
    np.testing.assert_array_equal(x, with_labels[0])
    ((x, y, weights),) = arrays.training_data(PIXELS, None, np.ones(11), **options).take(1)
    np.testing.assert_array_equal(x, with_labels[0])
    assert y is None and weights.shape == (4,)
    *_, (x, y, weights) = arrays.evaluation_data(PIXELS, batch_size=4)
    np.testing.assert_array_equal(x[:3], PIXELS[8:])
    assert y is None and list(weights) == [1, 1, 1, 0]


def test_the_training_split_alone_is_cut():
    """By a limit that is below every split's size; the examples of a sorted file are drawn."""
    splits = {name: (PIXELS, LABELS) for name in ("train", "valid", "test")}
    found = arrays.draw_examples(splits, 3, seed=0)
    assert {name: (len(x), len(y)) for name, (x, y) in found.items()} == {
        "train": (3, 3),
        "valid": (11, 11),
        "test": (11, 11),
    }
    x, y = found["train"]
    assert y.tolist() != LABELS[:3].tolist()
    np.testing.assert_array_equal(x, [PIXELS[LABELS.tolist().index(label)] for label in y])
    more = arrays.draw_examples({"train": ([*"abcdefghijk"], LABELS)}, 7, seed=0)["train"]
    assert set(y) < set(more[1]) and more[0] == sorted(more[0])
    assert len(arrays.draw_examples(splits, None, seed=0)["train"][0]) == 11


def test_validation_examples_are_evenly_spaced():
    """Of a sorted file some of each class; the other splits stay whole."""
    kept = arrays.spaced(11, 4)
    assert [
        lowest <= index <= highest
        for (lowest, highest), index in zip([(0, 1), (2, 4), (5, 7), (8, 10)], kept, strict=True)
    ] == [True] * 4
    splits = {name: (PIXELS, LABELS) for name in ("train", "valid", "test")}
    found = arrays.draw_examples(splits, None, 0, 4)
    assert {name: len(x) for name, (x, _) in found.items()} == {
        "train": 11,
        "valid": 4,
        "test": 11,
    }
    np.testing.assert_array_equal(found["valid"][0], PIXELS[kept])
    np.testing.assert_array_equal(found["valid"][1], LABELS[kept])
    texts = {"train": ([], LABELS[:0]), "valid": ([*"abcdefghijk"], LABELS)}
    assert arrays.draw_examples(texts, None, 0, 4)["valid"][0] == ["abcdefghijk"[i] for i in kept]
    for most in (11, 99, None):
        assert arrays.spaced(11, most).tolist() == list(range(11))
    assert arrays.spaced(0, 5).tolist() == []


def test_validation_examples_of_alternating_rows_have_both_classes():
    kept = arrays.spaced(1000, 500)
    assert kept.tolist() == sorted(set(kept)) == arrays.spaced(1000, 500).tolist()
    assert 200 < sum(kept % 2) < 300


def test_a_change_gets_the_examples_and_the_epoch():
    def change(x, indices, epoch):
        assert x.dtype == tf.float32
        return tf.cast(100 * epoch + indices, tf.float32)

    options = dict(seed=7, batch_size=4, first_batch=2)
    plain = arrays.training_data(PIXELS, LABELS, **options)
    changed = arrays.training_data(PIXELS, LABELS, change=change, **options)
    for (_, labels), (x, y) in zip(flat(plain.take(2)), flat(changed.take(2)), strict=True):
        np.testing.assert_array_equal(y, labels)
        np.testing.assert_array_equal(x, 100 + labels)
