"""Loads images of ten classes (MNIST, Fashion-MNIST, digits, IDX files) and single image files."""

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data import files
from data.download import fetch
from data.errors import DataError, listed
from data.splits import NO_FILES, SPLITS, TITLES, held_out_files, instead_note

DIGITS = tuple("0123456789")

GARMENTS = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

# The URL and SHA-256 of keras.datasets.
ORIGIN = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"
SHA256 = "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1"
# The MD5 sums published by Fashion-MNIST's authors; Keras checks none.
FASHION = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}

MOST_VALID = 5_000  # most images that validation takes from a training split

# The ends of the names of MNIST's files.
IMAGES = "images-idx3-ubyte"
LABELS = "labels-idx1-ubyte"
SIDE = 28  # pixels
LIGHT = 127  # a border whose mean is above this is a light background
OTHERS = "for other images, such as a folder for each class, see docs/your_own.md, Your own images"
MOST_PIXELS = 20_000_000  # pixels of an image file; decoding them takes 400 MB


@dataclasses.dataclass(frozen=True)
class Images:
    """Images of ten classes in three splits.

    Attributes:
        name: "mnist", "fashion_mnist", "digits" or a path.
        splits: "train", "valid" and "test", each a pair of pixels, float32 of shape (n, 28, 28, 1)
            in [0, 1], and labels, int32 of shape (n,) in 0..9.
        note: One line that names a fallback for the default and the reason, or None.
        classes: The ten names, in the order of the labels.
    """

    name: str
    splits: dict[str, tuple[np.ndarray, np.ndarray]]
    note: str | None = None
    classes: tuple[str, ...] = DIGITS


def load_images(
    dataset: str, *, held_out: Mapping[str, Path] = NO_FILES, test_file: Path | None = None
) -> Images:
    """Loads a set of 28x28 images.

    All but the digits have training and test images only: the last tenth of the training images,
    at most 5,000, becomes the validation split. Downloads are stored in Keras's folder
    (`~/.keras`, or the environment variable `KERAS_HOME`).

    Args:
        dataset: "mnist" or "fashion_mnist" (downloaded once), "digits" (part of scikit-learn),
            "auto" (mnist where it is cached or can be downloaded, else digits with a note), or a
            folder with four IDX files named like MNIST's, plain or .gz; its classes are called
            0 to 9.
        held_out: IDX files of images by split ("valid", "test"), which replace those of the
            dataset, with their labels beside them: `new-images-idx3-ubyte` with
            `new-labels-idx1-ubyte`, plain or .gz. Without images for validation in them, validation
            is cut from training.
        test_file: such a file, which is the test split instead.

    Returns:
        The images. The same call gives the same arrays in the same order.

    Raises:
        DataError: A file is missing, damaged or of another format, or a source does not answer.
    """
    images = _load(dataset)
    splits = dict(images.splits)
    for split, path in held_out_files(held_out, test_file).items():
        name = path.name.removesuffix(".gz")
        if not name.endswith(IMAGES):
            raise DataError(
                f"--{TITLES[split]}-file {path}: expected an IDX file whose name ends in {IMAGES}, "
                f"plain or .gz, with one beside it whose name ends in {LABELS}"
            )
        splits[split] = _scaled(*_read_pair(path.parent, name.removesuffix(IMAGES), path))
    if "valid" not in splits:
        splits |= _cut_validation(*splits["train"])
    notes = [images.note, instead_note(images.name, held_out, test_file)]
    return dataclasses.replace(
        images,
        splits={split: splits[split] for split in SPLITS},
        note="; ".join(filter(None, notes)) or None,
    )


def _load(dataset: str) -> Images:
    """Loads the splits that a dataset has; only the digits have a validation split."""
    if dataset == "auto":
        try:
            return _mnist()
        except DataError as error:
            note = f"{error}; scikit-learn's digits are used instead"
            return dataclasses.replace(_digits(), note=note)
    named = {"mnist": _mnist, "fashion_mnist": _fashion_mnist, "digits": _digits}
    return named[dataset]() if dataset in named else _folder(dataset)


def _mnist() -> Images:
    """Downloads MNIST to the folder of `keras.datasets`, whose own download has no timeout."""
    path = _keras_datasets() / "mnist.npz"
    fetch([f"{ORIGIN}mnist.npz"], SHA256, path, "mnist")
    with np.load(path) as arrays:
        train, test = ((arrays[f"x_{half}"], arrays[f"y_{half}"]) for half in ("train", "test"))
    return Images("mnist", {"train": _scaled(*train), "test": _scaled(*test)})


def _fashion_mnist() -> Images:
    """Downloads Fashion-MNIST (Xiao et al., arXiv 1708.07747) to the folder of `keras.datasets`."""
    folder = _keras_datasets() / "fashion-mnist"
    for name, md5 in FASHION.items():
        fetch([f"{ORIGIN}{name}"], md5, folder / name, f"fashion_mnist, {name}")
    images = _folder(str(folder))
    return dataclasses.replace(images, name="fashion_mnist", classes=GARMENTS)


def _keras_datasets() -> Path:
    return files.expand(os.environ.get("KERAS_HOME") or "~/.keras") / "datasets"


def _digits() -> Images:
    """Splits scikit-learn's 1,797 handwritten digits into 1,297, 200 and 300, stratified by class.

    Each of the 8x8 pixels (0 to 16) becomes a square of 3x3, and the 24x24 image gets a border of
    two: no pixel is interpolated, and the strokes end before the edge as in MNIST. All splits
    contain digits by the same 13 writers, so this is easier than an unknown writer's digits.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = (digits.images / 16).astype(np.float32).repeat(3, axis=1).repeat(3, axis=2)
    pixels = np.pad(pixels, ((0, 0), (2, 2), (2, 2)))[..., np.newaxis]
    labels = digits.target.astype(np.int32)

    # The same split for every seed: results are compared on the same test images.
    rest, test = train_test_split(
        np.arange(len(labels)), test_size=300, random_state=0, stratify=labels
    )
    train, valid = train_test_split(rest, test_size=200, random_state=0, stratify=labels[rest])
    indices = {"train": train, "valid": valid, "test": test}
    splits = {split: (pixels[chosen], labels[chosen]) for split, chosen in indices.items()}
    return Images("digits", splits)


def _folder(dataset: str) -> Images:
    folder = files.expand(dataset)
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "no such folder"
        hint = "; mnist reads Keras's mnist.npz" if folder.suffix == ".npz" else ""
        raise DataError(
            f"dataset {dataset!r}: {problem}; expected auto, mnist, fashion_mnist, digits or a "
            f"folder with four IDX files named as MNIST's{hint}; {OTHERS}"
        )
    names = [f"{half}-{kind}" for half in ("train", "t10k") for kind in (IMAGES, LABELS)]
    missing = [name for name in names if not list(folder.glob(f"{name}*"))]
    if missing:
        raise DataError(f"{folder}: {', '.join(missing)} missing, plain or .gz; {OTHERS}")
    train, test = _read_pair(folder, "train-", least=2), _read_pair(folder, "t10k-")
    return Images(dataset, {"train": _scaled(*train), "test": _scaled(*test)})


def _read_pair(
    folder: Path, begin: str, images: Path | None = None, least: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Reads images and their labels from two IDX files, whose names have the same beginning.

    Args:
        folder: Contains both.
        begin: The beginning of their names.
        images: The one of the images, or None for either form.
        least: Number of images to expect; of training ones the last may be cut off.
    """
    pixels = _read_idx(images or _plain_or_gz(folder / (begin + IMAGES)), (SIDE, SIDE))
    labels = _read_idx(_plain_or_gz(folder / (begin + LABELS)), ())
    if len(pixels) != len(labels) or len(labels) < least or labels.max() > 9:
        raise DataError(
            f"{folder}, {begin}* files: {len(pixels)} images, {len(labels)} labels from 0 to "
            f"{labels.max(initial=0)}; expected {least} or more, each with a label from 0 to 9"
        )
    return pixels, labels


def _plain_or_gz(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Reads an IDX file of unsigned bytes.

    The format: two zero bytes, a type (8 for unsigned bytes), the number of dimensions, each
    dimension's size as a big-endian 32-bit integer, then the values.

    Args:
        path: The file, plain or .gz.
        shape: The shape of one item: (28, 28) for images, () for labels.

    Returns:
        uint8 of shape (count, *shape).

    Raises:
        DataError: The file has another format.
    """
    with files.open_bytes(path) as stream:
        content = stream.read()
    header = 8 + 4 * len(shape)
    count = max(0, len(content) - header) // math.prod(shape)
    expected = bytes([0, 0, 8, 1 + len(shape)]) + np.array([count, *shape], ">u4").tobytes()
    if content[:header] != expected or len(content) != header + count * math.prod(shape):
        what = f"images of {SIDE}x{SIDE} pixels" if shape else "labels"
        if len(content) >= header and content[:4] == expected[:4]:
            sides = np.frombuffer(content[8:header], ">u4").tolist()
            if sides != [*shape]:
                raise DataError(
                    f"{path}: images of {'x'.join(map(str, sides))} pixels, and this recipe takes "
                    f"{SIDE}x{SIDE}: scale them, or write a recipe for them (docs/your_own.md, "
                    "Your own images)"
                )
        raise DataError(
            f"{path}: {len(content):,} bytes that begin with {content[:header].hex(' ')!r}; an IDX "
            f"file of {what} as unsigned bytes begins with {expected.hex(' ')!r}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(count, *shape)


def _cut_validation(
    pixels: np.ndarray, labels: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the training split without its end, which is the validation split."""
    kept = len(labels) - min(max(len(labels) // 10, 1), MOST_VALID)
    return {"train": (pixels[:kept], labels[:kept]), "valid": (pixels[kept:], labels[kept:])}


def _scaled(pixels: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales bytes to [0, 1]."""
    return pixels[..., np.newaxis].astype(np.float32) / 255, labels.astype(np.int32)


def unlearnable_note(
    splits: Mapping[str, tuple[np.ndarray, np.ndarray]], classes: Sequence[str]
) -> str | None:
    """Returns a line about classes of test images that no training image has, or None.

    Args:
        splits: As in `Images.splits`; training may have fewer images.
        classes: Names, in the order of the labels.
    """
    learned, asked = splits["train"][1], splits["test"][1]
    missing = np.setdiff1d(asked, learned)
    if not len(missing):
        return None
    names = listed([repr(classes[label]) for label in missing])
    return (
        f"no training images are of {names}, and {np.isin(asked, missing).sum():,} of "
        f"{len(asked):,} test images are"
    )


def read_image(path: str | Path) -> tuple[np.ndarray, list[str]]:
    """Reads an image file of any Pillow format as light on dark, like MNIST.

    Colours become grey and transparent pixels white. An image with a light background is inverted.
    One of another size is scaled to fit and padded with its background.

    Returns:
        float32 of shape (28, 28, 1) in [0, 1], and a list of the changes made to the image.

    Raises:
        DataError: There is no such file, it is not an image, or it has too many pixels.
    """
    from PIL import Image, ImageOps

    path = files.expand(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            file = Image.open(path)
        with file:
            width, height = file.size
            if width * height > MOST_PIXELS:
                raise ValueError(
                    f"{width}x{height} pixels, expected at most {MOST_PIXELS:,} in all"
                )
            if file.mode[0] in "IF":
                raise ValueError("16 bits or floating point numbers, expected 8 bits per channel")
            image = ImageOps.exif_transpose(file).convert("RGBA")
    # On a file that is not an image, Pillow raises whatever its decoders raise.
    except Exception as error:
        raise DataError(f"{path}: not a readable image ({str(error)[:100]})") from error
    paper = Image.new("RGBA", image.size, "white")
    image = Image.alpha_composite(paper, image).convert("L")
    done = []
    if _border(image).mean() > LIGHT:
        image = ImageOps.invert(image)
        done.append("inverted, its background is light")
    if image.size != (SIDE, SIDE):
        done.append(f"scaled from {width}x{height}")
        background = int(np.median(_border(image)))
        image = ImageOps.pad(image, (SIDE, SIDE), Image.Resampling.BOX, background)
    pixels = np.asarray(image, np.float32)[..., np.newaxis] / 255
    return pixels, done


def _border(image) -> np.ndarray:
    """Returns the brightness of the outermost pixels."""
    grey = np.asarray(image)
    return np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
