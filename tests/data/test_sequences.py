import hashlib
import json
import resource
import tempfile
import weakref
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from data import arrays, batches, sequences, word_pieces
from data.errors import DataError
from data.text import Text
from data.word_pieces import SpecialTokens
from tests.support import forked

SPECIAL = SpecialTokens(pad=0, unknown=1, cls=2, sep=3, mask=4)
ROWS = np.arange(5 * 8).reshape(5, 8)


def in_blocks(lines, at_once=1000):
    """Lines of token ids as `word_pieces.tokenize` yields them."""
    for start in range(0, len(lines), at_once):
        some = lines[start : start + at_once]
        ids = np.array([token for line in some for token in line], np.int32)
        yield ids, np.array([len(line) for line in some])


def random_lines(count, longest, seed=0):
    generator = np.random.default_rng(seed)
    return [
        list(generator.integers(5, 200, generator.integers(0, longest + 1))) for _ in range(count)
    ]


def cut(text_mode, lines, length, at_once=1000):
    blocks = list(sequences.CUT[text_mode](in_blocks(lines, at_once), length, SPECIAL))
    assert all(block.dtype == np.int32 for block in blocks)
    return np.concatenate([np.zeros((0, length), np.int32), *blocks])


@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("length", [4, 7, 16])
class TestEqualsPlainPython:
    LINES = random_lines(40, 12)

    def test_packed(self, length, at_once):
        stream = [token for line in self.LINES if line for token in [*line, SPECIAL.sep]]
        body = length - 1
        expected = [
            [SPECIAL.cls, *stream[start : start + body]]
            for start in range(0, len(stream) - body + 1, body)
        ]
        np.testing.assert_array_equal(cut("packed", self.LINES, length, at_once), expected)

    def test_lines(self, length, at_once):
        expected = []
        for line in filter(None, self.LINES):
            row = [SPECIAL.cls, *line[: length - 2], SPECIAL.sep]
            expected.append(row + [SPECIAL.pad] * (length - len(row)))
        np.testing.assert_array_equal(cut("lines", self.LINES, length, at_once), expected)


@pytest.mark.parametrize("lines", [[], [[], []]])
def test_no_text_gives_none(lines):
    assert len(cut("packed", lines, 8)) == len(cut("lines", lines, 8)) == 0
    assert len(cut("packed", [*lines, [5, 6]], 8)) == 0


class TestOnce:
    LINES = [f"the number {number} of the losses " + "and on " * 20 for number in range(9)]
    TEXT = Text("x", {"train": LINES, "valid": LINES[:1], "test": LINES[:2]}, False)

    def once(
        self,
        folder,
        length=8,
        text_mode="packed",
        text=TEXT,
        words="the of and on number",
        least=0,
        **more,
    ):
        import keras_nlp

        pieces = [*word_pieces.SPECIAL_TOKENS, *words.split()]
        settings = dict(lowercase=True, strip_accents=True) | more
        tokenizer = keras_nlp.models.BertTokenizer(vocabulary=pieces, **settings)
        return sequences.sequences_once(
            text, tokenizer, folder, text_mode=text_mode, length=length, min_line_bytes=least
        )

    def test_what_is_stored_is_what_is_cut(self, tmp_path):
        found = self.once(tmp_path)
        first = [2, 5, 9, 1, 6, 5, 1, 7]  # [CLS] the number [UNK] of the [UNK] and
        assert found["train"][0].tolist() == first and found["train"].dtype == np.uint16
        counts = [len(found[split]) for split in ("train", "valid", "test")]
        assert counts == [9 * 47 // 7, 47 // 7, 2 * 47 // 7]

    def test_each_line_is_a_sequence(self, tmp_path):
        splits = {**self.TEXT.splits, "valid": ["short", "", *self.LINES[:1]]}
        found = self.once(tmp_path, text_mode="lines", text=Text("x", splits, False))
        assert [len(found[split]) for split in ("train", "valid", "test")] == [9, 2, 2]

    @pytest.mark.parametrize(
        ("line", "kept"),
        [("a" * 10, 0), ("the a" * 20, 0), ("the a" * 20 + "b", 1), ("ä" * 51, 1), ("ä" * 50, 0)],
        ids=["10 bytes", "100 bytes", "101 bytes", "51 characters", "50 characters"],
    )
    def test_lines_of_fewer_bytes_are_skipped(self, line, kept, tmp_path):
        splits = {**self.TEXT.splits, "valid": [self.LINES[0], line]}
        text = Text("x", splits, False)
        found = self.once(tmp_path, text_mode="lines", text=text, least=101)
        assert len(found["valid"]) == 1 + kept

    def test_a_split_without_a_sequence_is_named(self, tmp_path):
        with pytest.raises(DataError, match="x: the valid split gives no sequence of 60 tokens"):
            self.once(tmp_path, length=60)

    def test_it_is_done_once_for_all_that_decides_it(self, tmp_path, monkeypatch):
        expected = np.array(self.once(tmp_path)["train"])
        stock = word_pieces.tokenize
        monkeypatch.setattr(word_pieces, "tokenize", None)  # would raise if called
        np.testing.assert_array_equal(self.once(tmp_path)["train"], expected)
        for other in (
            dict(length=9),
            dict(text_mode="lines"),
            dict(least=1),
            dict(words="of the and on number"),
            dict(lowercase=False),
            dict(strip_accents=False),
            dict(text=Text("x", {**self.TEXT.splits, "valid": ["shorter"]}, False)),
        ):
            with pytest.raises(TypeError):
                self.once(tmp_path, **other)
        monkeypatch.setattr(word_pieces, "tokenize", stock)


def stored(folder, vocabulary_size=100, rows=ROWS):
    dtype = sequences.dtype_of(vocabulary_size)
    sequences.write(Path(folder) / "rows.bin", iter([rows[:2], rows[2:]]), dtype)
    return sequences.mapped(Path(folder) / "rows.bin", dtype, rows.shape[1])


@pytest.mark.parametrize(
    ("vocabulary_size", "dtype"), [(100, "uint16"), (2**16, "uint16"), (2**16 + 1, "int32")]
)
def test_rows_are_what_was_given_in_as_few_bytes_as_will_do(tmp_path, vocabulary_size, dtype):
    rows = ROWS + vocabulary_size - ROWS.max() - 1
    found = stored(tmp_path, vocabulary_size, rows)
    np.testing.assert_array_equal(found, rows)
    assert found.dtype == dtype and isinstance(found, np.memmap)
    assert stored(tmp_path, rows=np.zeros((0, 8), int)).shape == (0, 8)


@pytest.mark.parametrize("rows", [slice(0, 5), slice(0, 3), slice(1, 4), slice(0, 5, 2)])
@pytest.mark.parametrize("vocabulary_size", [100, 10**6])
def test_the_tensor_has_the_same_rows(tmp_path, rows, vocabulary_size):
    part = stored(tmp_path, vocabulary_size)[rows]
    tensor = arrays.as_tensor(part)
    np.testing.assert_array_equal(tensor, ROWS[rows])
    gathered = tf.data.Dataset.range(len(part)).map(lambda i: tf.gather(tensor, i))
    np.testing.assert_array_equal(list(gathered.as_numpy_iterator()), ROWS[rows])


@pytest.mark.parametrize(
    ("rows", "is_shared"), [(slice(0, 3), True), (slice(1, 4), False), (slice(0, 5, 2), False)]
)
def test_the_tensor_of_a_mapped_file_is_no_copy(tmp_path, rows, is_shared):
    part = stored(tmp_path)[rows]
    tensor = arrays.as_tensor(part)
    part[0, 0] = 77
    assert (tensor.numpy()[0, 0] == 77) == is_shared


@pytest.mark.parametrize("change", ["read-only", "byte order", "booleans"])
def test_what_cannot_be_shared_is_copied(tmp_path, change):
    kind = {"byte order": ">i4", "booleans": bool}.get(change, np.int32)
    np.save(tmp_path / "a.npy", ROWS.astype(kind))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r" if change == "read-only" else "c")
    np.testing.assert_array_equal(arrays.as_tensor(mapped), ROWS.astype(kind))


@pytest.mark.long
def test_a_pipeline_reads_the_file_without_a_copy():
    assert forked.run(memory_of_reading) < 20_000_000


def memory_of_reading():
    """Bytes of anonymous memory that reading 77 MB takes."""

    def make_batch(indices, epoch):
        rows = tf.gather(tensor, indices)
        return rows, rows, tf.ones_like(indices, tf.float32)

    def anonymous():
        (line,) = (x for x in open("/proc/self/status") if x.startswith("RssAnon"))
        return 1024 * int(line.split()[1])

    with tempfile.TemporaryDirectory() as folder:
        rows = stored(folder, rows=np.ones((300_000, 128), np.int8))
        for _ in batches.evaluation_batches(8, 8, lambda i, e: (i, i, tf.ones_like(i))):
            pass  # what TensorFlow needs to begin
        before = anonymous()
        tensor = arrays.as_tensor(rows)
        total = sum(
            int(x[0, 0]) for x, _, _ in batches.evaluation_batches(len(rows), 64, make_batch)
        )
        assert total == -(-len(rows) // 64)
        return anonymous() - before


def test_blocks_of_rows_are_one_array(tmp_path):
    def make():
        for start in (0, 2, 4):
            block = ROWS[start : start + 2]
            yield {"ids": block.astype(np.int32), "last": block[:, -1] % 3 == 0}

    found = sequences.blocks_once(tmp_path, ("rows",), make, len(ROWS))
    np.testing.assert_array_equal(found["ids"], ROWS)
    np.testing.assert_array_equal(found["last"], ROWS[:, -1] % 3 == 0)
    assert found["ids"].dtype == np.int32 and found["last"].dtype == bool
    again = sequences.blocks_once(tmp_path, ("rows",), lambda: 1 / 0, len(ROWS))
    np.testing.assert_array_equal(again["ids"], ROWS)


def test_one_block_is_in_memory(tmp_path):
    before = []

    def make():
        for _ in range(3):
            assert not any(block() is not None for block in before[:-1])
            block = np.ones((2, 8), np.int32)
            before.append(weakref.ref(block))
            yield {"ids": block}
            del block

    assert sequences.blocks_once(tmp_path, ("rows",), make, 6)["ids"].sum() == 48


def test_arrays_of_any_shape_are_kept(tmp_path):
    made = {"rows": ROWS.astype(np.uint8), "count": np.asarray(7), "turned": ROWS.T.astype("f4")}
    for make in (lambda: made, lambda: 1 / 0):
        found = sequences.arrays_once(tmp_path, ("arrays",), make)
        for name, array in made.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype and found[name].shape == array.shape


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_full_disk_is_named(tmp_path, in_blocks):
    """In another process, all of whose files are limited."""
    forked.run(fill_a_disk, str(tmp_path), in_blocks)
    assert [path.name[:6] for path in (tmp_path / "sequences").iterdir()] == [".lock-"]


def fill_a_disk(folder: str, in_blocks: bool) -> None:
    tmp_path = Path(folder)
    rows = {"ids": np.zeros((1000, 100), np.int32)}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        with pytest.raises(DataError, match=r"cannot make .* \(File too large\); another cache"):
            if in_blocks:
                sequences.blocks_once(tmp_path, ("rows",), lambda: [rows], 1000)
            else:
                sequences.arrays_once(tmp_path, ("rows",), lambda: rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize("texts", [[], ["a"], ["a", "é\n", 'quoted "b"'], [("a", "b"), ["c", 1]]])
def test_the_checksum_is_that_of_json(texts):
    expected = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    assert sequences.sha256_of(texts) == expected
    nested = [texts, [], texts]
    expected = hashlib.sha256(json.dumps(nested).encode()).hexdigest()
    assert sequences.sha256_of(nested, depth=2) == sequences.sha256_of(nested) == expected
