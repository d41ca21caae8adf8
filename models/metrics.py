"""Metrics that Keras has no class for."""

import keras


class MacroF1(keras.metrics.F1Score):
    """Computes the mean of the classes' F1 scores from integer labels.

    A class that is neither there nor predicted has an F1 score of zero, as in scikit-learn.

    Args:
        num_classes: number of classes.
    """

    def __init__(self, num_classes: int):
        super().__init__(average="macro", name="macro_f1")
        self.num_classes = num_classes

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Counts a batch.

        Args:
            y_true: labels, integers of shape (batch,).
            y_pred: logits or probabilities of shape (batch, classes).
            sample_weight: weights of shape (batch,), or None for ones.
        """
        one_hot = keras.ops.one_hot(keras.ops.reshape(y_true, (-1,)), self.num_classes)
        super().update_state(one_hot, y_pred, sample_weight)
