"""The kinds of labels of sentences, each with its loss, metrics, baselines and results."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import scipy.special

from data import label_fields, scores, sentences, several_labels, tfidf
from models.losses import smoothed_cross_entropy, weighted_binary_cross_entropy
from models.metrics import ExactMatch, MacroF1, MicroF1, Pearson, of_classes

OF_TWO = ("f1", "auc", "precision", "recall")  # metrics that need two classes
OF_CLASSES = ("matthews", *OF_TWO)


class Classes:
    """One class for each sentence.

    Args:
        data: the sentences and their labels.
        metrics: names of metrics besides accuracy and macro F1.
        weights: "balanced", with which rare classes count as much as frequent ones in training; or
            "none".
    """

    def __init__(
        self, data: sentences.Sentences, metrics: Sequence[str] = (), weights: str = "none"
    ):
        self.data, self.balanced = data, weights == "balanced"
        self.names = list(dict.fromkeys([*data.metrics, *metrics]))

    def baselines(self) -> dict[str, float]:
        """Returns what simpler models reach on the test split."""
        return tfidf.baselines(self.data.splits, self.names)

    def evidence(self, inputs: dict[str, np.ndarray], tokenizer) -> np.ndarray:
        """Returns what word pieces say about the labels of the training split."""
        labels = self.data.splits["train"][1]
        return sentences.naive_bayes_evidence(inputs, labels, tokenizer, len(self.data.classes))

    def class_weight(self) -> dict[int, float] | None:
        """Returns the weights of the classes for `fit()`, if they are balanced."""
        if not self.balanced:
            return None
        labels = self.data.splits["train"][1]
        return sentences.balanced_class_weights(labels, len(self.data.classes))

    def label_weights(self) -> np.ndarray | None:
        """Returns the weights that the loss has of several labels, if they are balanced."""
        return None

    def loss(self, label_smoothing: float) -> keras.losses.Loss | Callable:
        """Returns the loss, with smoothed labels if that is not 0.

        Args:
            label_smoothing: probability of a label to spread evenly.
        """
        if label_smoothing:
            return smoothed_cross_entropy(label_smoothing)
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def scale(self) -> keras.layers.Rescaling | None:
        """Returns the last step of a new model; None if its outputs are logits."""
        return None

    def loss_weights(self) -> list[float] | None:
        """Returns the weight of the loss, for `compile()`."""
        return None

    def metrics(self) -> list[keras.metrics.Metric]:
        """Returns the metrics of training, validation and test."""
        count = len(self.data.classes)
        return [
            keras.metrics.SparseCategoricalAccuracy("accuracy"),
            MacroF1(count),
            *(of_classes(name, count) for name in self.names),
        ]

    def results(
        self, test: dict[str, float], metrics: Sequence, outputs_of: Callable[[str], np.ndarray]
    ) -> dict:
        """Returns arguments of `run.finish()`.

        Args:
            test: what `evaluate()` returned.
            metrics: those of the model, as it has counted the test split.
            outputs_of: returns the model's outputs for all examples of a split.
        """
        macro_f1 = _macro_f1(metrics)
        by_class = macro_f1.by_class(self.data.classes)
        confusion = macro_f1.confusion(self.data.classes)
        return {
            "test": {metric.name: test[metric.name] for metric in metrics},
            "test_by_class": by_class,
            **({} if confusion is None else {"test_confusion": confusion}),
            "test_examples": sum(numbers["examples"] for numbers in by_class.values()),
            "metadata": {"classes": self.data.classes},
        }

    def worst_first(self, outputs: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        """Returns columns of `recipes.evaluate --examples` by name, and the order of the rows.

        They are `label`, `predicted` and the `probability` of the latter: errors by falling
        probability, then the rest by rising.

        Args:
            outputs: of the model for the test split, float64.
        """
        labels = self.data.splits["test"][1]
        names, predicted = np.array(self.data.classes, object), outputs.argmax(axis=1)
        probabilities = scipy.special.softmax(outputs, axis=1).max(axis=1)
        is_error = predicted != labels
        columns = {"label": names[labels], "predicted": names[predicted]}
        order = np.lexsort((np.where(is_error, -probabilities, probabilities), ~is_error))
        return columns | {"probability": probabilities}, order


class Scores(Classes):
    """A number for each sentence, to be predicted by regression."""

    def baselines(self) -> dict[str, float]:
        """Returns what simpler models reach on the test split."""
        return scores.baselines(self.data.splits)

    def evidence(self, inputs: dict[str, np.ndarray], tokenizer) -> np.ndarray:
        """Returns what word pieces say about the scores of the training split."""
        return scores.evidence(inputs, self.data.splits["train"][1], tokenizer)

    def class_weight(self) -> None:
        """Returns None: scores have no classes."""
        return None

    def loss(self, label_smoothing: float) -> keras.losses.Loss:
        """Returns the loss."""
        return keras.losses.MeanSquaredError()

    def scale(self) -> keras.layers.Rescaling:
        """Returns the last step of a new model: from standard scores to the labels' unit.

        The weights learn scores of mean 0 and deviation 1, with the same learning rate in any unit.
        The head's `activation` is a layer of Keras, so a saved model answers in the unit without
        this package.
        """
        # Keras reads them as float32, whatever the dtype of the layer.
        mean, deviation = (float(np.float32(value)) for value in self.data.mean_and_deviation())
        # In full precision, also under a mixed policy: half precision has steps of 0.06 at 100.
        return keras.layers.Rescaling(deviation, mean, dtype=keras.config.floatx())

    def loss_weights(self) -> list[float]:
        """Returns the weight of the loss, for `compile()`; with it any unit has the same loss."""
        return [float(np.float32(self.data.mean_and_deviation()[1])) ** -2]

    def metrics(self) -> list[keras.metrics.Metric]:
        """Returns the metrics of training, validation and test."""
        return [
            keras.metrics.MeanAbsoluteError("mae"),
            keras.metrics.RootMeanSquaredError("rmse"),
            Pearson(),
        ]

    def results(self, test, metrics, outputs_of) -> dict:
        """Returns arguments of `run.finish()`, with the rank correlations of validation and test.

        No sums over batches give a rank correlation: it is computed from all outputs of the model.
        """
        spearman = {
            split: scores.measure(self.data.splits[split][1], outputs_of(split))["spearman"]
            for split in ("valid", "test")
        }
        return {
            "test": {metric.name: test[metric.name] for metric in metrics}
            | {"spearman": spearman["test"]},
            "valid_spearman": spearman["valid"],
            "metadata": {"scores": True},
        }

    def worst_first(self, outputs: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        """Returns the columns `label` and `predicted`, and the order: by falling error."""
        labels = self.data.splits["test"][1]
        columns = {"label": labels[:, 0], "predicted": outputs[:, 0]}
        return columns, np.argsort(-np.abs(outputs - labels)[:, 0], kind="stable")


class Several(Classes):
    """Any number of labels for each sentence, each of which is predicted on its own."""

    def baselines(self) -> dict[str, float]:
        """Returns what simpler models reach on the test split."""
        return several_labels.baselines(self.data.splits)

    def evidence(self, inputs: dict[str, np.ndarray], tokenizer) -> np.ndarray:
        """Returns what word pieces say about the labels of the training split."""
        return several_labels.evidence(inputs, self.data.splits["train"][1], tokenizer)

    def class_weight(self) -> None:
        """Returns None: the loss has the weights."""
        return None

    def label_weights(self) -> np.ndarray | None:
        """Returns weights with which both values of each label count the same, or None."""
        if not self.balanced:
            return None
        return several_labels.balanced_weights(self.data.splits["train"][1])

    def loss(self, label_smoothing: float) -> keras.losses.Loss | Callable:
        """Returns the loss: the mean over the labels."""
        weights = self.label_weights()
        if weights is not None:
            return weighted_binary_cross_entropy(weights, label_smoothing)
        return keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=label_smoothing)

    def metrics(self) -> list[keras.metrics.Metric]:
        """Returns the metrics of training, validation and test."""
        count = len(self.data.classes)
        return [
            keras.metrics.BinaryAccuracy(threshold=0.0),  # of logits
            MicroF1(count),
            MacroF1(count, several=True),
            ExactMatch(),
        ]

    def results(self, test, metrics, outputs_of) -> dict:
        """Returns arguments of `run.finish()`."""
        return {
            "test": {metric.name: test[metric.name] for metric in metrics},
            "test_by_class": _macro_f1(metrics).by_class(self.data.classes),
            "metadata": {"classes": self.data.classes, "several": True},
        }

    def worst_first(self, outputs: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        """Returns the columns `label`, `predicted` and `wrong`, and the order.

        `wrong` is the number of labels that are missing or too many. Rows come by falling number,
        those of the same one by the mean difference of the probabilities from the labels.
        """
        labels, probabilities = self.data.splits["test"][1], scipy.special.expit(outputs)
        wrong = np.sum((outputs > 0) != labels, axis=1)
        columns: dict[str, Any] = {
            name: [label_fields.as_field(_named(row, self.data.classes)) for row in rows]
            for name, rows in (("label", labels > 0), ("predicted", outputs > 0))
        }
        differences = np.abs(probabilities - labels).mean(axis=1)
        return columns | {"wrong": wrong}, np.lexsort((-differences, -wrong))


KINDS = {"classes": Classes, "scores": Scores, "several": Several}


def _macro_f1(metrics: Sequence) -> MacroF1:
    (macro_f1,) = (metric for metric in metrics if isinstance(metric, MacroF1))
    return macro_f1


def _named(row: np.ndarray, classes: Sequence[str]) -> list[str]:
    return [classes[int(index)] for index in np.flatnonzero(row)]
