"""Metrics that Keras has no class for."""

import keras


@keras.saving.register_keras_serializable("keras_recipes")
class MacroF1(keras.metrics.Metric):
    """Computes the mean of the classes' F1 scores from integer labels.

    A class that is neither there nor predicted has an F1 score of zero, as in scikit-learn. Keras's
    `F1Score` assigns what it has read and added up: where replicas share one copy of a variable,
    they overwrite each other.

    Args:
        num_classes: number of classes.
        name: of the metric.
        dtype: of its sums; None for Keras's float type.
    """

    def __init__(self, num_classes: int, name: str = "macro_f1", dtype=None):
        super().__init__(name=name, dtype=dtype)
        self.num_classes = num_classes
        self.hits = self.add_weight((num_classes,), "zeros", name="hits")
        self.labelled = self.add_weight((num_classes,), "zeros", name="labelled")
        self.predicted = self.add_weight((num_classes,), "zeros", name="predicted")

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Counts a batch.

        Args:
            y_true: labels, integers of shape (batch,).
            y_pred: logits or probabilities of shape (batch, classes).
            sample_weight: weights of shape (batch,), or None for ones.
        """
        ops = keras.ops
        labelled = ops.one_hot(ops.reshape(y_true, (-1,)), self.num_classes, dtype=self.dtype)
        predicted = ops.one_hot(ops.argmax(y_pred, axis=-1), self.num_classes, dtype=self.dtype)
        if sample_weight is not None:
            weights = ops.reshape(ops.cast(sample_weight, self.dtype), (-1, 1))
            labelled, predicted = labelled * weights, predicted * weights
        self.hits.assign_add(ops.sum(ops.minimum(labelled, predicted), axis=0))
        self.labelled.assign_add(ops.sum(labelled, axis=0))
        self.predicted.assign_add(ops.sum(predicted, axis=0))

    def result(self):
        """Returns the score, a scalar from 0 to 1."""
        total = self.labelled + self.predicted
        return keras.ops.mean(keras.ops.divide_no_nan(2 * self.hits, total))

    def get_config(self):
        """Returns the arguments of the constructor, as JSON values."""
        return {"num_classes": self.num_classes, **super().get_config()}
