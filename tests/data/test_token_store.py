import numpy as np
import pytest
import tensorflow as tf

from data import batches, cache, token_store
from tests.support import forked

SEQUENCES = np.arange(5 * 8).reshape(5, 8)


def stored(folder, vocabulary_size=100, sequences=SEQUENCES):
    blocks = {"train": lambda: iter([sequences[:2], sequences[2:]]), "empty": lambda: iter(())}
    return token_store.store_once(folder / "store", blocks, 8, vocabulary_size)


@pytest.mark.parametrize(
    ("vocabulary_size", "dtype"), [(100, "uint16"), (2**16, "uint16"), (2**16 + 1, "int32")]
)
def test_rows_are_what_was_given_in_as_few_bytes_as_will_do(tmp_path, vocabulary_size, dtype):
    sequences = SEQUENCES + vocabulary_size - SEQUENCES.max() - 1
    found = stored(tmp_path, vocabulary_size, sequences)
    np.testing.assert_array_equal(found["train"], sequences)
    assert found["train"].dtype == dtype and found["empty"].shape == (0, 8)
    assert isinstance(found["train"], np.memmap) and not found["train"].flags.writeable


def test_is_made_once(tmp_path):
    stored(tmp_path)
    again = token_store.store_once(tmp_path / "store", {"train": None, "empty": None}, 8, 100)
    np.testing.assert_array_equal(again["train"], SEQUENCES)


def test_damaged_is_made_again(tmp_path, monkeypatch, caplog):
    stored(tmp_path)
    path = tmp_path / "store" / "train.bin"
    content = bytearray(path.read_bytes())
    content[3] ^= 16
    path.write_bytes(content)
    monkeypatch.setattr(cache, "_verified", {})  # as in another process
    np.testing.assert_array_equal(stored(tmp_path)["train"], SEQUENCES)
    assert "train.bin does not match its checksum" in caplog.text


@pytest.mark.parametrize("rows", [slice(0, 5), slice(0, 3), slice(1, 4), slice(0, 5, 2)])
@pytest.mark.parametrize("vocabulary_size", [100, 10**6])
def test_the_tensor_has_the_same_rows(tmp_path, rows, vocabulary_size):
    part = stored(tmp_path, vocabulary_size)["train"][rows]
    tensor = token_store.as_tensor(part)
    np.testing.assert_array_equal(tensor, SEQUENCES[rows])
    gathered = tf.data.Dataset.range(len(part)).map(lambda i: tf.gather(tensor, i))
    np.testing.assert_array_equal(list(gathered.as_numpy_iterator()), SEQUENCES[rows])


def test_the_tensor_is_the_file():
    """What another process writes there is seen: nothing was copied."""
    assert forked.run(read_while_written) == [0, 7]


def read_while_written():
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        rows = token_store.store_once(
            Path(folder) / "store", {"train": lambda: [np.zeros((60_000, 128), int)]}, 128, 100
        )
        tensor = token_store.as_tensor(rows["train"])
        before = int(tf.reduce_max(tensor))
        np.memmap(rows["train"].filename, np.uint16, "r+")[:] = 7
        return [before, int(tf.reduce_max(tensor))]


def test_a_pipeline_reads_the_file_without_a_copy():
    assert forked.run(memory_of_reading) < 20_000_000


def memory_of_reading():
    """Bytes of anonymous memory that reading 77 MB takes."""
    import tempfile
    from pathlib import Path

    def make_batch(indices, epoch):
        rows = tf.gather(tensor, indices)
        return rows, rows, tf.ones_like(indices, tf.float32)

    def anonymous():
        (line,) = (x for x in open("/proc/self/status") if x.startswith("RssAnon"))
        return 1024 * int(line.split()[1])

    with tempfile.TemporaryDirectory() as folder:
        rows = token_store.store_once(
            Path(folder) / "store", {"train": lambda: [np.ones((300_000, 128), np.int8)]}, 128, 100
        )["train"]
        for _ in batches.evaluation_batches(8, 8, lambda i, e: (i, i, tf.ones_like(i))):
            pass  # what TensorFlow needs to begin
        before = anonymous()
        tensor = token_store.as_tensor(rows)
        total = sum(
            int(x[0, 0]) for x, _, _ in batches.evaluation_batches(len(rows), 64, make_batch)
        )
        assert total == -(-len(rows) // 64)
        return anonymous() - before


def test_blocks_are_all_of_it():
    blocks = list(token_store.in_blocks(SEQUENCES, rows=2))
    assert [len(block) for block in blocks] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate(blocks), SEQUENCES)
