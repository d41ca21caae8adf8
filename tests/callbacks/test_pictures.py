import numpy as np
import pytest

from callbacks import pictures


def colours(picture):
    return {tuple(pixel) for pixel in picture.reshape(-1, 3).tolist()}


def test_a_confusion_matrix_is_dark_where_the_images_went():
    picture = pictures.confusion_matrix(np.array([[4, 0], [1, 3]]), ["a", "b"], side=44)
    assert picture.dtype == np.uint8 and picture.ndim == 3
    # The upper left field has all of its row; below it lies the only mistake, a quarter of its row.
    dark = np.argwhere((picture == pictures.RIGHT).all(axis=2))
    top, left = dark.min(axis=0)
    assert picture[top + 3, left + 3].tolist() == list(pictures.RIGHT)
    assert picture[top + 3, left + 47].tolist() == [255, 255, 255]
    red, _, blue = picture[top + 47, left + 3].astype(int)
    assert red > blue


def test_counts_names_and_legend_change_the_picture():
    counts = np.diag([5, 5])
    first = pictures.confusion_matrix(counts, ["cat", "dog"])
    assert first.shape == pictures.confusion_matrix(counts, ["dog", "cat"]).shape
    assert (first != pictures.confusion_matrix(counts, ["cot", "dog"])).any()
    # The same shares, so the same colours: only the written counts differ.
    assert (first != pictures.confusion_matrix(2 * counts, ["cat", "dog"])).any()
    # The legend has shades that no field has.
    shades = {pictures._shade(share, right) for share in (0.5, 0.25) for right in (True, False)}
    assert shades <= colours(first)


def test_long_names_and_many_classes_fit():
    names = ["a class with a name that is far too long to be shown"] * 30
    assert pictures.confusion_matrix(np.eye(30, dtype=int), names).shape[1] > 30 * 44


def test_captions_say_by_colour_what_is_right():
    images = np.zeros((2, 4, 3, 1))
    right = pictures.captioned_images(images, [("3", "says 3", True)] * 2)
    wrong = pictures.captioned_images(images, [("3", "says 8", False)] * 2)
    assert pictures.RIGHT in colours(right) and pictures.RIGHT not in colours(wrong)
    assert pictures.WRONG in colours(wrong) and pictures.WRONG not in colours(right)


def where_the_points_are(picture):
    """Rows and columns of the darkest blue."""
    values = picture.astype(int)
    return np.argwhere(values[..., 2] - values[..., 0] > 30)


def test_points_lie_where_their_values_are():
    low = pictures.scatter(
        np.array([0.0, 10.0]),
        np.array([0.0, 0.0]),
        titles=("x", "y"),
        heading="h",
        line="diagonal",
    )
    rows, columns = where_the_points_are(low).T
    assert rows.max() - rows.min() < 6 and columns.max() - columns.min() > 390
    rising = pictures.scatter(
        np.array([0.0, 10.0]),
        np.array([0.0, 10.0]),
        titles=("x", "y"),
        heading="h",
        line="diagonal",
    )
    points = where_the_points_are(rising)
    assert points[points[:, 1].argmin(), 0] - points[points[:, 1].argmax(), 0] > 390  # upwards


@pytest.mark.parametrize("y", [[0.0, 0.0], [1e-9, -1e-9], [np.nan, 1.0], [np.inf, np.nan]])
@pytest.mark.parametrize("line", ["diagonal", "zero"])
def test_values_that_lie_together_or_are_no_numbers(y, line):
    x = np.array([5.0, 5.0])
    assert pictures.scatter(x, np.array(y), titles=("x", "y"), heading="h", line=line).any()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, ["0", "2", "4", "6", "8", "10"]),
        (-0.3, 0.3, ["-0.3", "-0.2", "-0.1", "0.0", "0.1", "0.2", "0.3"]),
        (12.0, 88.0, ["0", "20", "40", "60", "80", "100"]),
    ],
)
def test_axes_have_round_numbers(low, high, expected):
    assert pictures._numbers(pictures._ticks(low, high)) == expected
