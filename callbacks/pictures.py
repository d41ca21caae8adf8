"""Shows a model's predictions in TensorBoard after each epoch, as pictures."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from callbacks.predictions import Predictions
from callbacks.tensorboard import TensorBoard

IMAGES = 20  # the first images of the split are shown
POINTS = 2000  # the first examples of the split are drawn
CLASSES = 50  # at most, for a confusion matrix
RIGHT, WRONG = "tab:blue", "tab:red"


class ImageSummaries(Predictions):
    """Shows a few images with true and predicted class, and the confusion matrix, each epoch.

    Args:
        tensorboard: writes the summaries.
        images: all images of the split, float of shape (n, height, width, channels) in [0, 1].
        labels: their classes, integers of shape (n,).
        classes: the names of the classes.
    """

    def __init__(
        self,
        tensorboard: TensorBoard,
        images: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
    ):
        super().__init__(tensorboard, images)
        self.labels = np.asarray(labels)
        self.classes = list(map(str, classes))

    def show(self, outputs):
        """Writes the images with their classes, and the confusion matrix."""
        predicted = np.argmax(outputs, axis=-1)
        tf.summary.image("images", self._draw_images(predicted))
        if len(self.classes) <= CLASSES:
            tf.summary.image("confusion_matrix", self._draw_matrix(predicted))

    def _draw_images(self, predicted: np.ndarray) -> np.ndarray:
        figure = _figure(8, 8)
        shown = zip(self.inputs, self.labels, predicted, range(1, IMAGES + 1), strict=False)
        for image, label, guess, place in shown:
            axes = figure.add_subplot(4, 5, place)
            axes.imshow(image.squeeze(), "gray", vmin=0, vmax=1)
            axes.axis("off")
            title = f"true {self.classes[label]}\npredicted {self.classes[guess]}"
            axes.set_title(title, fontsize=9, color=RIGHT if label == guess else WRONG)
        return _pixels(figure)

    def _draw_matrix(self, predicted: np.ndarray) -> np.ndarray:
        from matplotlib.colors import PowerNorm
        from sklearn.metrics import ConfusionMatrixDisplay

        inches = 3 + 0.4 * len(self.classes)
        figure = _figure(inches, inches)
        axes = figure.add_subplot()
        # Square root: a good model's few mistakes would otherwise be invisible.
        drawn = ConfusionMatrixDisplay.from_predictions(
            self.labels,
            predicted,
            labels=range(len(self.classes)),
            display_labels=self.classes,
            ax=axes,
            cmap="Blues",
            im_kw={"norm": PowerNorm(0.5)},
            values_format="d",
            text_kw={"fontsize": 11 if len(self.classes) <= 20 else 8},
            xticks_rotation="vertical",
            colorbar=False,
        )
        for count in drawn.text_.flat:  # zeros would hide the other counts
            if count.get_text() == "0":
                count.set_text("")
        axes.tick_params(labelsize=11)
        axes.set_title(f"step {self.step}: {np.mean(predicted == self.labels):.1%} right")
        return _pixels(figure)


class RegressionSummaries(Predictions):
    """Draws predicted against true values, each epoch.

    Args:
        tensorboard: writes the pictures.
        inputs: the model's inputs, an array or a dict of arrays, of shape (n, ...); the first
            2,000 examples are shown.
        truth: the true values, float of shape (n, 1).
        unit: unit of the values, for the axes.
        predictor: the model that predicts; the one that `fit()` trains by default.
    """

    def __init__(
        self,
        tensorboard: TensorBoard,
        inputs,
        truth: np.ndarray,
        unit: str,
        predictor: keras.Model | None = None,
    ):
        first = keras.tree.map_structure(lambda x: x[:POINTS], inputs)
        super().__init__(tensorboard, first, predictor)
        self.truth = np.asarray(truth, np.float64).reshape(-1)[:POINTS]
        self.unit = unit

    def show(self, outputs):
        """Writes a picture."""
        predicted = np.asarray(outputs, np.float64).reshape(-1)
        residuals = predicted - self.truth
        figure = _figure(5, 5)
        axes = figure.add_subplot()
        axes.scatter(self.truth, predicted, s=6, alpha=0.4)
        # A perfect model's points are on this line.
        axes.axline((self.truth[0], self.truth[0]), slope=1, color="gray")
        axes.set(xlabel=f"true, {self.unit}", ylabel=f"predicted, {self.unit}")
        axes.set_title(
            f"step {self.step}: RMSE {np.sqrt(np.mean(residuals**2)):.3g} {self.unit}, "
            f"mean residual {residuals.mean():+.3g} {self.unit}"
        )
        tf.summary.image("predicted_against_true", _pixels(figure))


def _figure(width: float, height: float):
    from matplotlib.figure import Figure  # slow to import

    return Figure((width, height), layout="constrained")


def _pixels(figure) -> np.ndarray:
    """Returns the pixels of a figure: uint8 of shape (1, height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[np.newaxis, ..., :3]
