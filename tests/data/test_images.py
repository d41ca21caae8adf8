import functools
import gzip
import hashlib
import http.server
import io
import re
import struct
import threading

import numpy as np
import pytest
import requests

from data import images
from data.errors import DataError
from data.images import load_images

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"


def idx(array, kind=8):
    return (
        bytes([0, 0, kind, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + bytes(array)
    )


def some_images(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 28, 28), np.uint8), (np.arange(count) % 10).astype(np.uint8)


@pytest.fixture
def folder(tmp_path):
    """A folder of 40 training and 10 test images."""
    for half, count in (("train", 40), ("t10k", 10)):
        pixels, labels = some_images(count)
        (tmp_path / f"{half}-images-idx3-ubyte").write_bytes(idx(pixels))
        (tmp_path / f"{half}-labels-idx1-ubyte").write_bytes(idx(labels))
    return tmp_path


@pytest.fixture
def keras_cache(tmp_path, monkeypatch):
    """An empty cache of Keras, and a source that does not answer."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    serve(monkeypatch, None)
    return tmp_path


class Response(io.BytesIO):
    """Stands in for the response of `requests.get`."""

    headers = {}
    ok = True

    def iter_content(self, size):
        yield self.read()


def serve(monkeypatch, content):
    """Lets the source answer with this content, or not at all; returns the addresses asked for."""
    asked = []

    def get(url, **kwargs):
        asked.append(url)
        if content is None:
            raise requests.ConnectionError("no network in tests")
        return Response(content)

    monkeypatch.setattr(requests, "get", get)
    return asked


def message_of(folder):
    """The message of loading a folder, which has to be a single line."""
    with pytest.raises(DataError) as caught:
        load_images(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_promise(loaded):
    assert list(loaded.splits) == ["train", "valid", "test"]
    for pixels, labels in loaded.splits.values():
        assert pixels.dtype == np.float32 and pixels.shape == (len(labels), 28, 28, 1)
        assert labels.dtype == np.int32 and labels.ndim == 1
        assert pixels.min() >= 0 and pixels.max() <= 1
        assert labels.min() >= 0 and labels.max() <= 9


def test_folder(folder):
    loaded = load_images(str(folder))
    assert_promise(loaded)
    assert loaded.name == str(folder) and loaded.note is None
    pixels, labels = some_images(40)
    # The last tenth of the training images is the validation split.
    np.testing.assert_array_equal(loaded.splits["train"][1], labels[:36])
    np.testing.assert_array_equal(loaded.splits["valid"][1], labels[36:])
    np.testing.assert_array_equal(loaded.splits["valid"][0][..., 0] * 255, pixels[36:])
    assert loaded.splits["test"][0].max() == 1 and len(loaded.splits["test"][1]) == 10


@pytest.mark.parametrize("ending", ["", ".gz"], ids=["plain", "gz"])
def test_all_of_a_test_file_is_the_test_split(folder, tmp_path, ending):
    pixels, labels = some_images(7, seed=1)
    pack = gzip.compress if ending else bytes
    file = tmp_path / f"new-{images.IMAGES}{ending}"
    file.write_bytes(pack(idx(pixels)))
    loaded = functools.partial(load_images, str(folder), test_file=file)
    with pytest.raises(DataError, match="new-labels-idx1-ubyte: cannot be read .No such file"):
        loaded()
    (tmp_path / f"new-labels-idx1-ubyte{ending}").write_bytes(pack(idx(labels)))
    assert_promise(loaded())
    own, found = load_images(str(folder)).splits, loaded().splits
    np.testing.assert_array_equal(found["test"][0][..., 0] * 255, pixels)
    np.testing.assert_array_equal(found["test"][1], labels)
    for split in ("train", "valid"):
        np.testing.assert_array_equal(found[split][0], own[split][0])
    # The file in its other form is another file.
    other = file.with_name(f"new-{images.IMAGES}{'' if ending else '.gz'}")
    other.write_bytes((bytes if ending else gzip.compress)(idx(255 - pixels)))
    np.testing.assert_array_equal(loaded().splits["test"][0][..., 0] * 255, pixels)


def test_a_test_file_of_another_name(folder):
    with pytest.raises(DataError, match="^--test-file .*t10k-labels.*: expected an IDX file whose"):
        load_images(str(folder), test_file=folder / TEST_LABELS)


def test_no_such_folder(tmp_path):
    message = message_of(tmp_path / "nowhere")
    assert "no such folder" in message and "mnist, fashion_mnist, digits" in message


def test_what_is_not_a_folder_of_idx_files_is_told_the_way(tmp_path):
    (tmp_path / "mnist.npz").touch()
    message = message_of(tmp_path / "mnist.npz")
    assert "mnist.npz': is a file; expected auto" in message
    assert "mnist reads Keras's mnist.npz" in message
    (tmp_path / "cat").mkdir()
    way = "such as a folder for each class, see docs/your_own.md, Your own images"
    assert way in message and way in message_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (TRAIN_IMAGES, idx(some_images(40)[0])[:-100], "31,276 bytes .* of 28x28 pixels"),
        (TRAIN_IMAGES, b"", "0 bytes that begin with ''; an IDX file of images"),
        (
            TRAIN_IMAGES,
            idx(some_images(40)[0], kind=0x0D),
            "begin with '00 00 0d 03 .* '00 00 08 03",
        ),
        (TRAIN_IMAGES, idx(np.zeros((40, 32, 30), np.uint8)), "of 32x30 pixels, .* takes 28x28"),
        (TRAIN_LABELS, idx(some_images(39)[1]), "train-[*] files: 40 images, 39 labels"),
        (TRAIN_LABELS, idx(some_images(40)[1] + np.uint8(3)), "40 labels from 0 to 12; .* 0 to 9"),
        (TEST_LABELS, None, "t10k-labels-idx1-ubyte missing, plain or .gz"),
    ],
    ids=["cut", "empty", "type", "size", "unequal", "label", "missing"],
)
def test_a_file_that_is_not_what_it_should_be(folder, name, content, expected):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    message = message_of(folder)
    assert re.search(expected, message) and (name in message or "train-* files" in message)


def test_digits():
    loaded = load_images("digits")
    assert_promise(loaded)
    assert loaded.name == "digits" and loaded.note is None
    assert [len(labels) for _, labels in loaded.splits.values()] == [1297, 200, 300]
    assert np.bincount(loaded.splits["test"][1]).min() >= 29  # stratified
    total = sum(pixels.sum(dtype=np.float64) for pixels, _ in loaded.splits.values())
    from sklearn.datasets import load_digits

    assert total == pytest.approx(load_digits().images.sum() / 16 * 9)
    # Each image has the label that it has there.
    source = load_digits()
    labels = {
        image.tobytes(): label for image, label in zip(source.images, source.target, strict=True)
    }
    for split, (pixels, found) in loaded.splits.items():
        small = np.rint(pixels[:, 2:-2:3, 2:-2:3, 0] * 16.0).astype(np.float64)
        assert [labels[image.tobytes()] for image in small] == found.tolist(), split
    # The border stays empty.
    assert not loaded.splits["train"][0][:, :2].any()


def test_auto_falls_back_aloud(keras_cache):
    loaded = load_images("auto")
    assert loaded.name == "digits"
    assert loaded.note.startswith("mnist: ") and "no network in tests" in loaded.note
    assert loaded.note.endswith("; scikit-learn's digits are used instead")
    assert "\n" not in loaded.note


def test_by_name_is_used_or_refused(keras_cache):
    for name in ("mnist", "fashion_mnist"):
        with pytest.raises(DataError, match=f"^{name}.*no network in tests"):
            load_images(name)


def mnist_file():
    (x_train, y_train), (x_test, y_test) = some_images(20), some_images(10)
    file = io.BytesIO()
    np.savez(file, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return file.getvalue()


def test_a_download_lands_where_keras_looks(keras_cache, monkeypatch):
    content = mnist_file()
    digest = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(images, "SHA256", digest)
    asked = serve(monkeypatch, content)
    for _ in range(2):  # the second one is from the cache
        loaded = load_images("auto")
        assert_promise(loaded)
        assert loaded.name == "mnist" and loaded.note is None
        np.testing.assert_array_equal(loaded.splits["test"][1], some_images(10)[1])
    assert asked == [f"{images.ORIGIN}mnist.npz"]
    assert (keras_cache / "datasets" / "mnist.npz").read_bytes() == content


@pytest.fixture
def loopback(tmp_path, monkeypatch):
    """A server of the folder `served`, from which the datasets are downloaded."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        monkeypatch.setattr(images, "ORIGIN", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
        yield folder
        server.shutdown()
        thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def test_fashion_mnist_is_downloaded_by_its_checksums_and_has_names(
    loopback, monkeypatch, tmp_path
):
    sums = {}
    for half, count in (("train", 40), ("t10k", 10)):
        pixels, labels = some_images(count)
        for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            content = gzip.compress(idx(array))
            (loopback / f"{half}-{name}-ubyte.gz").write_bytes(content)
            sums[f"{half}-{name}-ubyte.gz"] = hashlib.md5(content).hexdigest()
    assert images.FASHION.keys() == sums.keys()
    with pytest.raises(DataError) as caught:
        load_images("fashion_mnist")
    first = "fashion_mnist, train-images-idx3-ubyte.gz"
    assert re.search(
        f"{first}: .* sent something else: md5 .*, expected 8d4fb7e6c68d", str(caught.value)
    )

    monkeypatch.setattr(images, "FASHION", sums)
    loaded = load_images("fashion_mnist")
    assert_promise(loaded)
    assert loaded.name == "fashion_mnist" and loaded.note is None
    assert (loaded.classes[0], loaded.classes[1], loaded.classes[9], len(loaded.classes)) == (
        *("T-shirt/top", "Trouser", "Ankle boot"),
        10,
    )
    np.testing.assert_array_equal(loaded.splits["test"][0][..., 0] * 255, some_images(10)[0])
    np.testing.assert_array_equal(loaded.splits["test"][1], some_images(10)[1])
    for path in loopback.iterdir():
        path.unlink()
    np.testing.assert_array_equal(load_images("fashion_mnist").splits["train"][1][:3], [0, 1, 2])
    assert (tmp_path / "keras" / "datasets" / "fashion-mnist").is_dir()


def test_classes_of_the_test_split_that_no_training_image_has():
    splits = {"train": (None, np.array([0, 1, 9])), "test": (None, np.array([9, 2, 1, 2, 7]))}
    found = images.unlearnable_note(splits, images.DIGITS)
    assert found == "no training images are of '2', '7', and 3 of 5 test images are"
    splits["test"] = (None, np.array([9, 1]))
    assert images.unlearnable_note(splits, images.DIGITS) is None
