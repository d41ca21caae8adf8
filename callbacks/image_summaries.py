"""Shows in TensorBoard what an image classifier says of test images, and what it confuses."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from callbacks.steps import StepCallback
from callbacks.tensorboard import TensorBoard

SHOWN = 10  # images, the first of the split


class ImageSummaries(StepCallback):
    """Writes a few images with true and predicted class, and the confusion matrix, each epoch.

    Every worker predicts, on its own copy of the weights; the chief writes.

    Args:
        tensorboard: where the summaries go, at the step of the run.
        images: all images of the split, float of shape (n, height, width, channels) in [0, 1].
        labels: their classes, integers of shape (n,).
        classes: the names of the classes.
        batch_size: images of one call of the model.
        split: TensorBoard's run.
    """

    def __init__(
        self,
        tensorboard: TensorBoard,
        images: np.ndarray,
        labels: np.ndarray,
        classes: Sequence[str],
        batch_size: int = 250,
        split: str = "test",
    ):
        super().__init__()
        self.tensorboard = tensorboard
        self.images = images
        self.labels = labels
        self.classes = list(classes)
        self.batch_size = batch_size
        self.split = split
        self.confusion_matrix: np.ndarray | None = None
        self._logits: tf.types.experimental.PolymorphicFunction | None = None

    def on_epoch_end(self, epoch, logs=None):
        """Predicts and writes."""
        predicted = self.predict()
        with self.tensorboard.writing(self.split, self.step):
            self._write(predicted)

    def on_train_end(self, logs=None):
        """Predicts where a run resumed after its last epoch, which wrote what is to be seen."""
        if self.confusion_matrix is None:
            self.predict()

    def predict(self) -> np.ndarray:
        """Predicts all images with the weights of this moment, and counts `confusion_matrix`.

        That is int64 of shape (classes, classes): how many images of the class in the row were
        taken for that in the column.

        Returns:
            The predicted classes, integers of shape (n,).
        """
        predicted = self._predicted_classes()
        count = len(self.classes)
        pairs = count * self.labels.astype(np.int64) + predicted
        self.confusion_matrix = np.bincount(pairs, minlength=count**2).reshape(count, count)
        return predicted

    def _predicted_classes(self) -> np.ndarray:
        # `predict()` hands each worker its part of the images and then asks for all of them. A
        # plain call of the model reads this worker's own copy of the weights, under any strategy.
        if self._logits is None:
            self._logits = tf.function(
                lambda batch: self.model(batch, training=False), reduce_retracing=True
            )
        found = [
            np.argmax(self._logits(tf.constant(self.images[start : start + self.batch_size])), -1)
            for start in range(0, len(self.images), self.batch_size)
        ]
        return np.concatenate(found)

    def _write(self, predicted: np.ndarray) -> None:
        rows = [
            f"| {number} | {self.classes[self.labels[number]]} | {self.classes[guess]} |"
            for number, guess in enumerate(predicted[:SHOWN])
        ]
        table = "\n".join(["| image | true class | predicted |", "|---|---|---|", *rows])
        # TensorBoard shows a description only as it was when a tag was first written, so what
        # changes from epoch to epoch stands in a text of its own.
        tf.summary.image(
            "images",
            self.images[:SHOWN],
            max_outputs=SHOWN,
            description="The first images of the split, in the order of the text `image_classes`.",
        )
        tf.summary.text("image_classes", table)
        tf.summary.image(
            "confusion_matrix",
            confusion_image(self.confusion_matrix)[np.newaxis],
            description="Rows: true classes; columns: predicted ones; from the top left: "
            f"{', '.join(self.classes)}. The darker a field, the larger its share of the row.",
        )
        tf.summary.text("confusion_counts", _markdown(self.confusion_matrix, self.classes))


def confusion_image(matrix: np.ndarray, side: int = 24) -> np.ndarray:
    """A confusion matrix as a picture: dark where many images of a row's class went.

    Args:
        matrix: counts of shape (classes, classes).
        side: pixels of a field.

    Returns:
        uint8 of shape (height, width, 3): white to dark blue on the diagonal, to dark red beside.
    """
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    # The root, because a good model's mistakes are a few percent: they would be invisible.
    depth = np.sqrt(share)[..., np.newaxis]
    right = np.eye(len(matrix), dtype=bool)[..., np.newaxis]
    full = np.where(right, (16, 58, 128), (160, 24, 24))
    fields = np.rint(255 + depth * (full - 255.0)).astype(np.uint8)
    picture = fields.repeat(side, axis=0).repeat(side, axis=1)
    picture[::side], picture[:, ::side] = 208, 208
    return picture


def _markdown(matrix: np.ndarray, classes: Sequence[str]) -> str:
    head = ["| true class |", *(f" {name} |" for name in classes)]
    rows = [
        f"| **{name}** | " + " | ".join(map(str, row)) + " |"
        for name, row in zip(classes, matrix.tolist(), strict=True)
    ]
    return "\n".join(["".join(head), "|---" * (len(classes) + 1) + "|", *rows])
