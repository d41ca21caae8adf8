"""TensorBoard's texts and pictures of a model's predictions."""

import html

import keras
import numpy as np
import pytest
import tensorflow as tf

from callbacks import predictions
from callbacks.pictures import ImageSummaries, RegressionSummaries
from callbacks.predictions import ClassifiedSentences, MaskedSamples
from callbacks.tensorboard import TensorBoard

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "##b", "c", "d|"]


def shown(callback):
    """Texts and pictures by tag: (step, value)."""
    callback.tensorboard.flush()
    found = {}
    for path in callback.tensorboard.folder.iterdir():
        for raw in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(raw)
            for value in event.summary.value:
                found[value.tag] = (event.step, tf.make_ndarray(value.tensor))
    return found


def masked_data():
    """Two sentences; one has a prediction of weight zero."""
    x = {
        "token_ids": np.array([[2, 4, 6, 4, 1, 3, 0], [2, 5, 7, 4, 6, 3, 0]]),
        "mask_positions": np.array([[3, 1], [3, 0]]),
    }
    labels = np.array([[8, 5], [6, 0]])
    weights = np.array([[1.0, 1.0], [1.0, 0.0]])
    return tf.data.Dataset.from_tensor_slices((x, labels, weights)).batch(3)


class SaysA(keras.Model):
    """At each masked position it is sure of "a", and takes "c" for the next best."""

    def call(self, inputs, training=False):
        assert not training
        logits = np.zeros(len(VOCABULARY), "float32")
        logits[5], logits[7] = 8.0, 4.0
        return tf.zeros((len(inputs["token_ids"]), 2, 1)) + logits


class SaysPadding(SaysA):
    """The same, with rows of no word piece, of which it is sure."""

    def call(self, inputs, training=False):
        logits = super().call(inputs, training)
        return tf.concat([logits, tf.fill((*logits.shape[:2], 3), 99.0)], axis=-1)


@pytest.mark.parametrize("kind", [SaysA, SaysPadding])
def test_masked_words_and_their_fills(tmp_path, kind):
    callback = MaskedSamples(TensorBoard(tmp_path), masked_data(), VOCABULARY)
    callback.set_model(kind())
    callback.step = 7
    callback.on_epoch_end(0)
    found = shown(callback)
    assert found.keys() == {"filled_masks/sentence_1", "filled_masks/sentence_2"}
    step, text = found["filled_masks/sentence_1"]
    text = text.item().decode()
    assert step == 7
    # In the order of the sentence, though position 3 was drawn first.
    assert text.startswith("**a**b **d&#124;** &#91;UNK&#93;\n")
    first, second = text.splitlines()[-2:]
    assert first.startswith(
        "| a | &#91;MASK&#93; | **&#8220;a&#8221;** 98.0%, &#8220;c&#8221; 1.8%, "
    )
    assert second.startswith("| d&#124; | ") and "**" not in second
    other = found["filled_masks/sentence_2"][1].item().decode()
    assert other.startswith("a c**b**b\n") and other.count("&#8220;") == 3


def test_classified_sentences(tmp_path):
    """The logits are the sentence's own numbers."""
    logits = np.array([[0.0, 2.0], [1.0, 0.0]] + [[0.0, 9.0]] * 20, "float32")
    texts = ["one | two", "x" * 1000, *["more"] * 20]
    labels = np.array([1, 1] + [0] * 20)
    board = TensorBoard(tmp_path)
    callback = ClassifiedSentences(board, {"x": logits}, texts, labels, ["no", "*yes*"])
    inputs = {"x": keras.Input((2,), name="x")}
    callback.set_model(keras.Model(inputs, keras.layers.Identity()(inputs["x"])))
    callback.step = 3
    callback.on_epoch_end(0)
    ((tag, (step, text)),) = shown(callback).items()
    assert (tag, step) == ("sentences", 3)
    rows = html.unescape(text.item().decode()).splitlines()[2:]
    assert rows[0] == "| one | two | *yes* | ***yes*** 88.1% |"
    assert rows[1] == f"| {'x' * 300} ... | *yes* | no 73.1% |" and len(rows) == 10


def test_scored_sentences(tmp_path):
    numbers = np.array([[0.25], [123456.0]] + [[1.0]] * 20, "float32")
    texts = ["one | two", "x" * 1000, *["more"] * 20]
    callback = ClassifiedSentences(TensorBoard(tmp_path), {"x": numbers}, texts, numbers * 2, ())
    inputs = {"x": keras.Input((1,), name="x")}
    callback.set_model(keras.Model(inputs, keras.layers.Identity()(inputs["x"])))
    callback.on_epoch_end(0)
    ((tag, (_, text)),) = shown(callback).items()
    rows = html.unescape(text.item().decode()).splitlines()
    assert tag == "sentences" and rows[0] == "| sentence | score | predicted |"
    assert rows[2:4] == [
        "| one | two | 0.5 | 0.25 |",
        f"| {'x' * 300} ... | 2.469e+05 | 1.235e+05 |",
    ]
    assert len(rows) == 12


def test_predicted_against_true(tmp_path):
    truth = np.array([[10.0], [20.0], [30.0]])
    callback = RegressionSummaries(TensorBoard(tmp_path), truth, truth, "°C")
    callback.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(1.1)]))
    callback.step = 3
    callback.on_epoch_end(0)
    ((tag, (step, (width, height, png))),) = shown(callback).items()
    assert (tag, step, png[:4]) == ("predicted_against_true", 3, b"\x89PNG")
    assert int(width) == int(height) == 500


@pytest.fixture
def images(tmp_path, monkeypatch):
    """The model says class 1 where the first pixel is bright, class 0 elsewhere."""
    layers = [keras.Input((2, 2, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    kernel = np.zeros((4, 3), "float32")
    kernel[0, 1] = 1.0
    model.set_weights([kernel, np.array([0.5, 0, 0], "float32")])
    pixels = np.zeros((7, 2, 2, 1), "float32")
    pixels[[1, 2, 6], 0, 0, 0] = 1.0
    labels = np.array([0, 1, 1, 2, 0, 0, 0])
    monkeypatch.setattr(predictions, "BATCH", 3)
    callback = ImageSummaries(TensorBoard(tmp_path), pixels, labels, ["a", "b", "c|d"])
    callback.set_model(model)
    return callback


COUNTS = [[3, 1, 0], [0, 2, 0], [1, 0, 0]]  # true classes in the rows, predicted in the columns


def test_images_and_matrix_are_shown_at_the_step_of_the_run(images, monkeypatch):
    from matplotlib.axes import Axes
    from sklearn.metrics import ConfusionMatrixDisplay

    titles = []
    stock = Axes.set_title
    monkeypatch.setattr(
        Axes, "set_title", lambda self, text, **k: titles.append((text, k)) or stock(self, text)
    )
    drawn, displays = [], []
    draw = ConfusionMatrixDisplay.plot

    def plot(self, **more):
        drawn.append(self.confusion_matrix.tolist())
        displays.append(draw(self, **more))
        return displays[-1]

    monkeypatch.setattr(ConfusionMatrixDisplay, "plot", plot)
    images.step = 12
    images.on_epoch_end(0)
    counts = [text.get_text() for text in displays[0].text_.flat]
    assert drawn == [COUNTS]
    assert titles.pop()[0] == "step 12: 71.4% right"
    assert counts == ["3", "1", "", "", "2", "", "1", "", ""]  # those that are zero are left out
    assert titles[3][0] == "true c|d\npredicted a" and titles[6][0] == "true a\npredicted b"
    assert titles[3][1]["color"] != titles[1][1]["color"]
    found = shown(images)
    assert found.keys() == {"images", "confusion_matrix"}
    assert {step for step, _ in found.values()} == {12}


def test_of_many_classes_no_matrix_is_drawn(tmp_path):
    callback = ImageSummaries(TensorBoard(tmp_path), np.zeros((1, 2, 2, 3)), [0], range(51))
    layers = [keras.Input((2, 2, 3)), keras.layers.Flatten(), keras.layers.Dense(51)]
    callback.set_model(keras.Sequential(layers))
    callback.on_epoch_end(0)
    assert shown(callback).keys() == {"images"}


def test_long_texts_are_predicted_in_smaller_parts():
    seen = []

    class First(keras.Model):
        def call(self, inputs, training=False):
            seen.append(len(inputs["token_ids"]))
            return inputs["token_ids"][:, :1]

    for length, expected in ((64, [250, 50]), (512, [31] * 9 + [21]), (20_000, [1] * 300)):
        seen.clear()
        tokens = np.arange(300)[:, None] + np.zeros((1, length), np.int32)
        found = predictions.outputs_of(First(), {"token_ids": tokens})
        assert seen == expected and found[:, 0].tolist() == list(range(300))
