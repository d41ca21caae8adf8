"""Small images of ten classes: MNIST, Fashion-MNIST, digits, or a folder of IDX files."""

import dataclasses
import os
import struct
from pathlib import Path

import numpy as np

from data import paths
from data.download import fetch
from data.errors import DataError

DIGITS = tuple("0123456789")
CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

# Where keras.datasets downloads from.
ORIGIN = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"
# SHA-256. That of MNIST is Keras's own; Keras checks none of Fashion-MNIST, whose authors publish
# the md5 sums of these same files.
MNIST_HASHES = {
    "mnist.npz": "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",
}
FASHION_MNIST_HASHES = {
    "train-images-idx3-ubyte.gz": (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
    ),
    "train-labels-idx1-ubyte.gz": (
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
    ),
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}

LOOK_SECONDS = 10.0  # how long the source may take to begin to answer
STALL_SECONDS = 30.0  # how long a download may stand still
MOST_VALID = 5_000  # validation images taken from a training split, at most


@dataclasses.dataclass(frozen=True)
class Images:
    """Images of ten classes in three splits.

    Attributes:
        name: "mnist", "fashion_mnist", "digits" or the path that was given.
        splits: "train", "valid" and "test", each a pair of pixels, float32 of shape (n, 28, 28, 1)
            in [0, 1], and labels, int32 of shape (n,) in 0..9.
        classes: The names of the ten classes, in the order of the labels.
        note: One line saying what is used instead of the default and why, or None.
    """

    name: str
    splits: dict[str, tuple[np.ndarray, np.ndarray]]
    classes: tuple[str, ...]
    note: str | None = None


def load_images(dataset: str, cache_dir: Path) -> Images:
    """Loads a set of 28x28 images.

    MNIST, Fashion-MNIST and a folder come as training and test images: the last tenth of the
    training images, at most 5,000, becomes the validation split.

    Args:
        dataset: "mnist" or "fashion_mnist" (downloaded once), "digits" (part of scikit-learn),
            "auto" (mnist where it is cached or can be downloaded, else digits with a note), or a
            folder that holds the four standard IDX files, plain or as .gz.
        cache_dir: Where this package keeps its downloads. Nothing is written there: MNIST and
            Fashion-MNIST are Keras's, and live in Keras's own cache (`~/.keras`, or what the
            environment variable `KERAS_HOME` names), shared with everything else that uses them.

    Returns:
        The images. The same call gives the same arrays in the same order.

    Raises:
        DataError: A file is missing, damaged or not what it should be, or a source does not answer.
    """
    del cache_dir
    if dataset == "auto":
        try:
            images = _mnist()
        except DataError as error:
            note = f"mnist: {error.short}; scikit-learn's digits are used instead"
            images = dataclasses.replace(_digits(), note=note)
    elif dataset == "mnist":
        images = _mnist()
    elif dataset == "fashion_mnist":
        images = _fashion_mnist()
    elif dataset == "digits":
        images = _digits()
    else:
        images = _folder(dataset)
    _check(images)
    return images


def _mnist() -> Images:
    import keras

    _fetch(MNIST_HASHES, "datasets")
    train, test = keras.datasets.mnist.load_data()
    return Images("mnist", _three_splits(train, test), DIGITS)


def _fashion_mnist() -> Images:
    import keras

    _fetch(FASHION_MNIST_HASHES, "datasets/fashion-mnist")
    train, test = keras.datasets.fashion_mnist.load_data()
    return Images("fashion_mnist", _three_splits(train, test), CLOTHES)


def _digits() -> Images:
    """Scikit-learn's 1,797 handwritten digits, in 1,297, 200 and 300, as many of a class in each.

    Each of the 8x8 pixels (0 to 16) becomes a square of 3x3, and the 24x24 image gets a border of
    two: nothing is invented, and the strokes end before the edge as they do in MNIST. All splits
    hold digits by the same 13 writers, so this is easier than reading a stranger's hand.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = (digits.images / 16).astype(np.float32).repeat(3, axis=1).repeat(3, axis=2)
    pixels = np.pad(pixels, ((0, 0), (2, 2), (2, 2)))[..., np.newaxis]
    labels = digits.target.astype(np.int32)

    # One split for every run, whatever its seed: results are compared on the same test images.
    rest, test = train_test_split(
        np.arange(len(labels)), test_size=300, random_state=0, stratify=labels
    )
    train, valid = train_test_split(rest, test_size=200, random_state=0, stratify=labels[rest])
    indices = {"train": train, "valid": valid, "test": test}
    splits = {split: (pixels[chosen], labels[chosen]) for split, chosen in indices.items()}
    return Images("digits", splits, DIGITS)


def _folder(dataset: str) -> Images:
    folder = paths.expand(dataset, "dataset")
    if paths.kind_of(folder, "dataset") != "folder":
        raise DataError(
            f"dataset {dataset!r}: no such folder; expected auto, mnist, fashion_mnist, digits or "
            "a folder with the four IDX files of MNIST"
        )
    names = [name.removesuffix(".gz") for name in FASHION_MNIST_HASHES]
    path_of: dict[str, Path] = {}
    for name in names:
        candidates = (folder / name, folder / f"{name}.gz")
        found = [path for path in candidates if paths.kind_of(path, "dataset") == "file"]
        if found:
            path_of[name] = found[0]
    missing = [name for name in names if name not in path_of]
    if missing:
        raise DataError(f"{folder}: no {', '.join(missing)}; expected each, plain or as .gz")

    halves = []
    for half in ("train", "t10k"):
        images_path, labels_path = (
            path_of[f"{half}-images-idx3-ubyte"],
            path_of[f"{half}-labels-idx1-ubyte"],
        )
        pixels = _read_idx(images_path, (28, 28))
        labels = _read_idx(labels_path, ())
        if len(pixels) != len(labels):
            raise DataError(
                f"{labels_path}: {len(labels)} labels, expected {len(pixels)}, one for each image "
                f"in {images_path.name}"
            )
        if labels.max() > 9:
            at = int(np.argmax(labels > 9))
            raise DataError(f"{labels_path}: label {labels[at]} at position {at}, expected 0 to 9")
        halves.append((pixels, labels))
    if len(halves[0][1]) < 2:
        raise DataError(
            f"{folder}: 1 training image, expected at least 2: one for training, one for validation"
        )
    return Images(dataset, _three_splits(*halves), DIGITS)


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Reads an IDX file of unsigned bytes.

    The format: two zero bytes, a type (8 for unsigned bytes), the number of dimensions, each
    dimension's size as a big-endian 32-bit integer, then the values.

    Args:
        path: The file; one that ends in .gz is decompressed.
        shape: What one item should measure: (28, 28) for images, () for labels.

    Returns:
        uint8 of shape (count, *shape), at least one item.

    Raises:
        DataError: The file is not that.
    """
    dimensions = 1 + len(shape)
    expected = bytes([0, 0, 8, dimensions])
    length = 4 + 4 * dimensions
    with paths.open_bytes(path) as file:
        header = file.read(length)
        if header[:4] != expected:
            found = header[:4].hex(" ") or "nothing"
            raise DataError(
                f"{path}: begins with {found}, expected {expected.hex(' ')} (IDX, unsigned bytes, "
                f"{dimensions} dimensions)"
            )
        if len(header) < length:
            raise DataError(
                f"{path}: cut short: {len(header)} bytes, expected a header of {length}"
            )
        count, *sizes = struct.unpack(f">{dimensions}I", header[4:])
        if tuple(sizes) != shape:
            raise DataError(
                f"{path}: images of {'x'.join(map(str, sizes))} pixels, expected "
                f"{'x'.join(map(str, shape))}"
            )
        expected_bytes = count * int(np.prod(shape, dtype=np.int64))
        size = os.fstat(file.fileno()).st_size
        if path.suffix == ".gz" and expected_bytes > paths.unpacked_limit(size):
            raise paths.too_large(str(path), size, length + expected_bytes)
        # No more than is expected, and a byte that shows whether there is more. (A plain file is
        # never longer than it is: a header may promise terabytes.)
        wanted = expected_bytes + 1
        content = file.read(wanted if path.suffix == ".gz" else min(wanted, size))
    if len(content) != expected_bytes:
        found = f"{length + len(content):,}"
        problem = "cut short" if len(content) < expected_bytes else "too long"
        more = "" if len(content) < expected_bytes else " or more"
        raise DataError(
            f"{path}: {problem}: {found} bytes{more}, expected {length + expected_bytes:,} for "
            f"{count:,} items"
        )
    if count == 0:
        raise DataError(f"{path}: holds 0 items, expected at least 1")
    return np.frombuffer(content, np.uint8).reshape(count, *shape)


def _three_splits(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Scales bytes to [0, 1] and takes the end of the training images for validation."""

    def scaled(pixels: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return pixels[..., np.newaxis].astype(np.float32) / 255, labels.astype(np.int32)

    pixels, labels = scaled(*train)
    kept = len(labels) - min(max(len(labels) // 10, 1), MOST_VALID)
    return {
        "train": (pixels[:kept], labels[:kept]),
        "valid": (pixels[kept:], labels[kept:]),
        "test": scaled(*test),
    }


def _check(images: Images) -> None:
    """Holds every source to the promise that `Images` makes."""
    for split, (pixels, labels) in images.splits.items():
        where = f"{images.name}, {split} split"
        if pixels.dtype != np.float32 or pixels.shape[1:] != (28, 28, 1) or not len(pixels):
            raise DataError(
                f"{where}: pixels are {pixels.dtype} of shape {pixels.shape}, expected float32 of "
                "shape (n, 28, 28, 1)"
            )
        # Written so that NaN fails, too.
        if not (pixels.min() >= 0 and pixels.max() <= 1):
            raise DataError(
                f"{where}: pixels from {pixels.min()} to {pixels.max()}, expected values in [0, 1]"
            )
        if labels.dtype != np.int32 or labels.shape != (len(pixels),):
            raise DataError(
                f"{where}: labels are {labels.dtype} of shape {labels.shape}, expected int32 of "
                f"shape ({len(pixels)},)"
            )
        if labels.min() < 0 or labels.max() > 9:
            raise DataError(
                f"{where}: labels from {labels.min()} to {labels.max()}, expected 0 to 9"
            )


def _keras_cache() -> Path:
    """Keras's own cache folder, by Keras's own rule; Keras has no public name for it."""
    import keras  # noqa: F401  creates the folder where there is none

    home = os.environ.get("KERAS_HOME", os.path.join(os.path.expanduser("~"), ".keras"))
    home = os.path.expanduser(home)
    return Path(home if os.access(home, os.W_OK) else "/tmp/.keras")


def _fetch(hashes: dict[str, str], subfolder: str) -> None:
    """Sees to it that files with the right hashes lie where keras.datasets looks for them.

    Keras's own download has no timeout, writes to the final name (another worker may read half a
    file), and checks no hash of Fashion-MNIST.

    Args:
        hashes: SHA-256 of each file, by name.
        subfolder: Where below Keras's cache folder they go.

    Raises:
        DataError: The source does not answer, or what came has another hash.
    """
    for name, expected in hashes.items():
        path = _keras_cache() / subfolder / name
        fetch([ORIGIN + name], expected, path, STALL_SECONDS, name, LOOK_SECONDS)
