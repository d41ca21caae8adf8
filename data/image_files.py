"""Image files as what a model of 28x28 images takes."""

import dataclasses
from pathlib import Path

import numpy as np

from data import paths
from data.errors import DataError

SIDE = 28  # pixels
LIGHT = 0.5  # a border whose mean is above this is a light background


@dataclasses.dataclass(frozen=True)
class ImageFile:
    """One image, light on dark as MNIST and Fashion-MNIST have it.

    Attributes:
        pixels: float32 of shape (28, 28, 1) in [0, 1].
        done: what was done to it, in words; empty where nothing was.
    """

    pixels: np.ndarray
    done: tuple[str, ...]


def read_image(path: Path) -> ImageFile:
    """Reads an image file of any size and kind that Pillow knows.

    Colours become grey; what is transparent becomes white; an image with a light background is
    inverted; one of another size is scaled to fit, with its background around it.

    Raises:
        DataError: There is no such file, or it is no image.
    """
    from PIL import Image, ImageOps

    path = paths.readable_file(path, "image")
    try:
        with Image.open(path) as file:
            grey = _grey(ImageOps.exif_transpose(file))
    # Pillow raises what its many decoders raise, for what is no image and for too large ones.
    except Exception as error:
        raise DataError(f"{path}: no image that can be read ({str(error)[:100]})") from error
    done = []
    border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    background = float(np.median(border))
    if border.mean() > LIGHT:
        grey, background = 1 - grey, 1 - background
        done.append("inverted, its background is light")
    height, width = grey.shape
    if (height, width) != (SIDE, SIDE):
        done.append(f"scaled from {width}x{height}")
        grey = _fitted(grey, background)
    return ImageFile(np.clip(grey, 0, 1).astype(np.float32)[..., np.newaxis], tuple(done))


def _grey(image) -> np.ndarray:
    """Brightness in [0, 1], float64 of shape (height, width)."""
    from PIL import Image

    if image.mode[0] in "IF":  # 16 bits, or floating point numbers
        values = np.asarray(image, np.float64)
        largest = max(values.max(), 0.0)
        return values / next((full for full in (1, 255, 65535) if largest <= full), largest)
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return np.asarray(Image.alpha_composite(white, image).convert("L"), np.float64) / 255


def _fitted(grey: np.ndarray, background: float) -> np.ndarray:
    from PIL import Image

    height, width = grey.shape
    scale = SIDE / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    small = Image.fromarray(grey.astype(np.float32)).resize(size, Image.Resampling.BOX)
    fitted = np.full((SIDE, SIDE), background)
    top, left = (SIDE - size[1]) // 2, (SIDE - size[0]) // 2
    fitted[top : top + size[1], left : left + size[0]] = np.asarray(small)
    return fitted
