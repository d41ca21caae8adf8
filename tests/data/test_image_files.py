import tracemalloc

import numpy as np
import pytest
from PIL import Image

from data.errors import DataError
from data.images import read_image


@pytest.fixture
def digit():
    """A one, light on dark; uint8 of shape (28, 28)."""
    pixels = np.zeros((28, 28), np.uint8)
    pixels[4:24, 13:16] = 200
    return pixels


def read(folder, image, name="image.png"):
    image.save(folder / name)
    pixels, done = read_image(folder / name)
    assert pixels.dtype == np.float32 and pixels.shape == (28, 28, 1)
    assert 0 <= pixels.min() and pixels.max() <= 1
    return pixels[..., 0], done


def test_one_of_the_right_size_is_taken_as_it_is(digit, tmp_path):
    pixels, done = read(tmp_path, Image.fromarray(digit))
    np.testing.assert_allclose(pixels, digit / 255, atol=1e-6)
    assert done == []


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "1", "LA"])
def test_kinds_of_images(mode, digit, tmp_path):
    digit[digit > 0] = 255
    pixels, done = read(tmp_path, Image.fromarray(digit).convert(mode))
    np.testing.assert_allclose(pixels, digit / 255, atol=0.01)
    assert done == []


def test_ink_on_paper_is_inverted(digit, tmp_path):
    pixels, done = read(tmp_path, Image.fromarray(255 - digit))
    np.testing.assert_allclose(pixels, digit / 255, atol=1e-6)
    assert done == ["inverted, its background is light"]


def test_what_is_transparent_is_paper(digit, tmp_path):
    colours = np.zeros((28, 28, 4), np.uint8)
    colours[..., 3] = digit  # black ink, nothing around it
    pixels, done = read(tmp_path, Image.fromarray(colours))
    np.testing.assert_allclose(pixels, digit / 255, atol=0.01)
    assert len(done) == 1


def test_a_large_one_is_scaled_and_keeps_its_shape(digit, tmp_path):
    large = np.kron(digit, np.ones((4, 4), np.uint8))
    pixels, done = read(tmp_path, Image.fromarray(large))
    np.testing.assert_allclose(pixels, digit / 255, atol=1e-5)
    assert done == ["scaled from 112x112"]
    wide = 255 - np.pad(large, ((0, 0), (56, 56)))  # twice as wide as it is high
    pixels, done = read(tmp_path, Image.fromarray(wide))
    assert len(done) == 2
    assert pixels[:7].max() < 0.01 and pixels[-7:].max() < 0.01  # its background, not black on it
    assert pixels[9:19, 13:15].min() > 0.3


def test_what_cannot_be_read(tmp_path, digit):
    (tmp_path / "text.png").write_text("x" * 1000)
    Image.fromarray(digit).save(tmp_path / "cut.png")
    content = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    Image.fromarray(digit.astype(np.uint16) * 257).save(tmp_path / "sixteen_bits.png")
    for name in ("text.png", "cut.png", "sixteen_bits.png", "none.png", ""):
        with pytest.raises(DataError) as error:
            read_image(tmp_path / name)
        assert "\n" not in str(error.value) and name in str(error.value)


def test_one_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path):
    """Thirteen thousand pixels a side took 4.4 GB."""
    Image.new("1", (13_000, 13_000)).save(tmp_path / "huge.png")
    tracemalloc.start()
    with pytest.raises(DataError, match="13000x13000 pixels, expected at most 20,000,000 in all"):
        read_image(tmp_path / "huge.png")
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
