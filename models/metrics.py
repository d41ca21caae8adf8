"""Metrics that Keras has no class for."""

import keras
import numpy as np


class MacroF1(keras.metrics.Metric):
    """The mean of the classes' F1 scores, and the confusion matrix that it comes from.

    `keras.metrics.F1Score` wants one-hot labels and keeps no matrix. A class that is neither there
    nor predicted has an F1 score of zero, as in scikit-learn.

    Args:
        num_classes: number of classes.
        name: name of the metric.
    """

    def __init__(self, num_classes: int, name: str = "macro_f1"):
        super().__init__(name=name)
        self.num_classes = num_classes
        self.matrix = self.add_variable(
            (num_classes, num_classes), initializer="zeros", name="matrix"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Counts a batch.

        Args:
            y_true: labels, integers of shape (batch,).
            y_pred: logits or probabilities of shape (batch, classes).
            sample_weight: weights of shape (batch,), or None for ones.
        """
        rows = keras.ops.one_hot(keras.ops.reshape(y_true, (-1,)), self.num_classes)
        columns = keras.ops.one_hot(keras.ops.argmax(y_pred, axis=-1), self.num_classes)
        rows, columns = (keras.ops.cast(x, self.matrix.dtype) for x in (rows, columns))
        if sample_weight is not None:
            weights = keras.ops.cast(keras.ops.reshape(sample_weight, (-1, 1)), rows.dtype)
            rows = rows * weights
        self.matrix.assign_add(keras.ops.matmul(keras.ops.transpose(rows), columns))

    def result(self):
        """The mean F1 score, a scalar in [0, 1]."""
        hits = keras.ops.diagonal(self.matrix)
        both = keras.ops.sum(self.matrix, axis=0) + keras.ops.sum(self.matrix, axis=1)
        return keras.ops.mean(keras.ops.divide_no_nan(2.0 * hits, both))

    def confusion_matrix(self) -> np.ndarray:
        """How many examples of the class in the row were taken for that in the column; int64."""
        return np.rint(keras.ops.convert_to_numpy(self.matrix)).astype(np.int64)

    def get_config(self):
        """The arguments."""
        return {"num_classes": self.num_classes, "name": self.name}
