"""Metrics that Keras lacks."""

from collections.abc import Sequence

import keras
import numpy as np

# Smaller variances, relative to the mean of the squares, are rounding.
EQUAL = 1e-12
CONFUSED = 50  # classes, at most, of which each pair is counted


class ClassCounts(keras.metrics.Metric):
    """Counts labels, predictions and correct predictions by class; a base class.

    Keras's `F1Score` reads, adds and assigns: replicas that share one copy of a variable overwrite
    each other; and it has no threshold for logits.

    Args:
        num_classes: number of classes.
        name: of the metric.
        several: whether an example may have several of the classes, or none.
    """

    def __init__(self, num_classes: int, name: str, dtype=None, *, several: bool = False):
        super().__init__(name=name, dtype=dtype)
        self.num_classes = num_classes
        self.several = several
        self.hits = self.add_weight((num_classes,), "zeros", name="hits")
        self.labelled = self.add_weight((num_classes,), "zeros", name="labelled")
        self.predicted = self.add_weight((num_classes,), "zeros", name="predicted")
        self.pairs = None

    def get_config(self):
        """Returns the arguments of the constructor."""
        config = {"num_classes": self.num_classes, "name": self.name}
        return config | ({"several": True} if self.several else {})

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Counts a batch.

        Args:
            y_true: labels, integers of shape (batch,); several of shape (batch, classes), 0 or 1.
            y_pred: logits or probabilities of shape (batch, classes); of several labels logits.
            sample_weight: weights of shape (batch,), or None for ones.
        """
        ops = keras.ops
        if self.several:
            labelled, predicted = ops.cast(y_true, self.dtype), ops.cast(y_pred > 0, self.dtype)
        else:
            labelled = ops.one_hot(ops.reshape(y_true, (-1,)), self.num_classes, dtype=self.dtype)
            predicted = ops.one_hot(ops.argmax(y_pred, axis=-1), self.num_classes, dtype=self.dtype)
        guesses = predicted
        if sample_weight is not None:
            weights = ops.reshape(ops.cast(sample_weight, self.dtype), (-1, 1))
            labelled, predicted = labelled * weights, predicted * weights
        if self.pairs is not None:
            self.pairs.assign_add(ops.matmul(ops.transpose(labelled), guesses))
        self.hits.assign_add(ops.sum(ops.minimum(labelled, predicted), axis=0))
        self.labelled.assign_add(ops.sum(labelled, axis=0))
        self.predicted.assign_add(ops.sum(predicted, axis=0))

    def by_class(self, classes: Sequence[str]) -> dict[str, dict[str, float]]:
        """Returns what was counted since the last reset, by class; for instance after `evaluate()`.

        Args:
            classes: names of the classes.

        Returns:
            By class: `precision`, the share of correct ones among its predictions; `recall`, the
            share of its examples that were recognised; `f1`; each 0 where that is 0/0; and
            `examples`, their number.
        """
        read = keras.ops.convert_to_numpy
        rows = zip(classes, read(self.hits), read(self.predicted), read(self.labelled), strict=True)

        def share(part: np.floating, whole: np.floating) -> float:
            return float(part / whole) if whole else 0.0

        return {
            name: {
                "precision": share(hits, predicted),
                "recall": share(hits, labelled),
                "f1": share(2 * hits, predicted + labelled),
                "examples": int(labelled),
            }
            for name, hits, predicted, labelled in rows
        }


@keras.saving.register_keras_serializable("keras_recipes")
class MacroF1(ClassCounts):
    """Computes the mean of the classes' F1 scores.

    As in scikit-learn, a class that neither occurs nor is predicted does not count; of several
    labels it counts as 0.
    """

    def __init__(
        self, num_classes: int, name: str = "macro_f1", dtype=None, *, several: bool = False
    ):
        super().__init__(num_classes, name, dtype, several=several)
        if not several and num_classes <= CONFUSED:
            self.pairs = self.add_weight((num_classes, num_classes), "zeros", name="pairs")

    def confusion(self, classes: Sequence[str]) -> dict[str, dict[str, int]] | None:
        """Returns the confusion matrix of what was counted since the last reset.

        Args:
            classes: names of the classes.

        Returns:
            By class of the label, and by predicted class, the number of examples; None of several
            labels and of more than 50 classes.
        """
        if self.pairs is None:
            return None
        rows = zip(classes, keras.ops.convert_to_numpy(self.pairs), strict=True)
        return {name: dict(zip(classes, map(int, row), strict=True)) for name, row in rows}

    def result(self):
        """Returns the score, a scalar from 0 to 1."""
        ops = keras.ops
        total = self.labelled + self.predicted
        scores = ops.divide_no_nan(2 * self.hits, total)
        if self.several:
            return ops.mean(scores)
        return ops.divide_no_nan(ops.sum(scores), ops.sum(ops.cast(total > 0, self.dtype)))


@keras.saving.register_keras_serializable("keras_recipes")
class MicroF1(ClassCounts):
    """Computes the F1 score of all of several labels together."""

    def __init__(
        self, num_classes: int, name: str = "micro_f1", dtype=None, *, several: bool = True
    ):
        super().__init__(num_classes, name, dtype, several=several)

    def result(self):
        """Returns the score, a scalar from 0 to 1."""
        ops = keras.ops
        hits, total = ops.sum(self.hits), ops.sum(self.labelled) + ops.sum(self.predicted)
        return ops.divide_no_nan(2 * hits, total)


@keras.saving.register_keras_serializable("keras_recipes")
class ExactMatch(keras.metrics.Mean):
    """Computes the share of examples all of whose several labels are right, from logits."""

    def __init__(self, name: str = "exact_match", dtype=None):
        super().__init__(name=name, dtype=dtype)

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds a batch.

        Args:
            y_true: labels, 0 or 1, of shape (batch, labels).
            y_pred: logits of shape (batch, labels).
            sample_weight: weights of shape (batch,), or None for ones.
        """
        ops = keras.ops
        right = ops.all(ops.equal(ops.cast(y_true, "bool"), y_pred > 0), axis=-1)
        return super().update_state(right, sample_weight)


@keras.saving.register_keras_serializable("keras_recipes")
class LastClassF1(ClassCounts):
    """Computes the F1 score of the last class, as GLUE does for MRPC and QQP ("1": the same)."""

    def __init__(self, num_classes: int, name: str = "f1", dtype=None):
        super().__init__(num_classes, name, dtype)

    def result(self):
        """Returns the score, a scalar from 0 to 1."""
        total = self.labelled[-1] + self.predicted[-1]
        return keras.ops.divide_no_nan(2 * self.hits[-1], total)


@keras.saving.register_keras_serializable("keras_recipes")
class Matthews(ClassCounts):
    """Computes the Matthews correlation, as GLUE does for CoLA; for any number of classes.

    With t and p the numbers of labels and predictions of each class, c the number of correct
    predictions and s that of all: (c s - t.p) / sqrt((s^2 - p.p) (s^2 - t.t)) (Gorodkin, 2004). As
    in scikit-learn it is zero where all labels, or all predictions, are of one class.
    """

    def __init__(self, num_classes: int, name: str = "matthews", dtype=None):
        super().__init__(num_classes, name, dtype)

    def result(self):
        """Returns the correlation, a scalar from -1 to 1."""
        ops = keras.ops
        counts = (self.hits.value, self.labelled.value, self.predicted.value)
        hits, labelled, predicted = (ops.cast(each, "float64") for each in counts)
        covariance = ops.sum(hits) * ops.sum(labelled) - ops.sum(labelled * predicted)

        def spread(counts):
            # Not s^2 - n.n, in which rounding leaves something of a single class, also below zero.
            return ops.sum(counts * (ops.sum(counts) - counts))

        deviation = ops.sqrt(spread(labelled) * spread(predicted))
        return ops.cast(ops.divide_no_nan(covariance, deviation), self.dtype)


@keras.saving.register_keras_serializable("keras_recipes")
class Pearson(keras.metrics.Metric):
    """Computes Pearson's correlation of all predictions with their labels, as GLUE does for STS-B.

    Keras's `PearsonCorrelation` is the mean of the correlations within each example's outputs.

    With the weighted sums n of 1, x of the labels, y of the predictions, and xx, yy, xy of their
    products: (n xy - x y) / sqrt((n xx - x^2) (n yy - y^2)) (Pearson, 1895); zero where all labels
    or all predictions are equal. Sums of float32 would lose what sets scores apart whose mean is
    large, so they are of float64 in any precision.
    """

    def __init__(self, name: str = "pearson", dtype=None):
        super().__init__(name=name, dtype="float64")
        # Keras's variables have the dtype of `floatx`, whatever the metric's.
        self.sums = self.add_weight((6,), "zeros", dtype=self.dtype, name="sums")

    def get_config(self):
        """Returns the arguments of the constructor."""
        return {"name": self.name}

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds a batch.

        Args:
            y_true: labels, of shape (batch, 1).
            y_pred: predictions, of shape (batch, 1).
            sample_weight: weights of shape (batch,), or None for ones.
        """
        ops = keras.ops
        x, y = (ops.reshape(ops.cast(values, self.dtype), (-1,)) for values in (y_true, y_pred))
        weights = ops.ones_like(x)
        if sample_weight is not None:
            weights = ops.reshape(ops.cast(sample_weight, self.dtype), (-1,))
        products = ops.stack([ops.ones_like(x), x, y, x * x, y * y, x * y])
        self.sums.assign_add(ops.sum(products * weights, axis=1))

    def result(self):
        """Returns the correlation, a scalar from -1 to 1."""
        ops = keras.ops
        n, x, y, xx, yy, xy = ops.unstack(ops.convert_to_tensor(self.sums.value))

        def spread(total, squares):
            # Of equal numbers rounding may leave something.
            found = n * squares - total**2
            return ops.where(found > EQUAL * n * squares, found, 0.0)

        covariance = n * xy - x * y
        return ops.divide_no_nan(covariance, ops.sqrt(spread(x, xx) * spread(y, yy)))


class OfTwoClasses:
    """Passes the last of two classes to a metric of Keras, which has one output; a mixin."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds a batch.

        Args:
            y_true: labels, 0 or 1, of shape (batch,).
            y_pred: logits of shape (batch, 2).
            sample_weight: weights of shape (batch,), or None for ones.
        """
        output = self.from_difference(y_pred[:, 1] - y_pred[:, 0])
        y_true = keras.ops.reshape(y_true, (-1,))
        return super().update_state(y_true, output, sample_weight)  # type: ignore[misc]

    def from_difference(self, difference):
        """Returns outputs from 0 to 1, of logits of the last class less those of the other."""
        return keras.ops.sigmoid(difference)  # the softmax of two logits


@keras.saving.register_keras_serializable("keras_recipes")
class LastClassAUC(OfTwoClasses, keras.metrics.AUC):
    """Computes the area under the ROC curve, of the last of two classes.

    Keras compares outputs with thresholds at equal distances, and counts those between two of them
    as equal. The area depends on the order of the outputs alone, so this function of the logits is
    one that, unlike the sigmoid, sets them apart near 0 and 1 too.
    """

    def __init__(self, name: str = "auc", dtype=None):
        super().__init__(num_thresholds=4000, name=name, dtype=dtype)

    def get_config(self):
        """Returns the arguments of the constructor."""
        return {"name": self.name}

    def from_difference(self, difference):
        """Returns outputs from 0 to 1, one half for equal logits, 0.25 and 0.75 for +-8."""
        return 0.5 + keras.ops.softsign(keras.ops.cast(difference, self.dtype) / 8) / 2


@keras.saving.register_keras_serializable("keras_recipes")
class LastClassPrecision(OfTwoClasses, keras.metrics.Precision):
    """Computes the precision of the last of two classes."""


@keras.saving.register_keras_serializable("keras_recipes")
class LastClassRecall(OfTwoClasses, keras.metrics.Recall):
    """Computes the recall of the last of two classes."""


def of_classes(name: str, num_classes: int) -> keras.metrics.Metric:
    """Returns a metric of `--metrics` or of GLUE by its name.

    Args:
        name: f1, matthews, auc, precision or recall; all but matthews are of the last class.
        num_classes: number of classes; 2 for auc, precision and recall.
    """
    counted = {"f1": LastClassF1, "matthews": Matthews}
    if name in counted:
        return counted[name](num_classes)
    kinds = {"auc": LastClassAUC, "precision": LastClassPrecision, "recall": LastClassRecall}
    return kinds[name](name=name)
