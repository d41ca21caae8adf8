"""Shows a model's predictions for a few examples in TensorBoard after each epoch, as text."""

from collections.abc import Sequence

import keras
import numpy as np
import scipy.special
import tensorflow as tf

from callbacks.averages import averaged
from callbacks.steps import StepCallback
from callbacks.tensorboard import TensorBoard, escape

BATCH = 250  # examples per call of the model, of texts fewer:
TOKENS = 16_000
MASKED = 4  # the first sentences of the split are shown
FILLS = 3  # most likely word pieces per mask
CLASSIFIED = 10  # the first sentences of the split are shown
LONGEST = 300  # characters per sentence
NOT_SHOWN = ("[CLS]", "[SEP]", "[PAD]")


class Predictions(StepCallback):
    """Base class: predicts fixed examples after each epoch.

    Subclasses implement `show(outputs)`, which writes summaries at the step of the run. It is
    called only on the chief; the other workers predict nothing.

    Args:
        tensorboard: writes the summaries.
        inputs: the model's inputs, an array or a dict of arrays, of shape (n, ...).
        predictor: the model that predicts; the one that `fit()` trains by default.
    """

    def __init__(self, tensorboard: TensorBoard, inputs, predictor: keras.Model | None = None):
        super().__init__()
        self.tensorboard = tensorboard
        self.inputs = inputs
        self.predictor = predictor

    def on_epoch_end(self, epoch, logs=None):
        """Predicts and shows."""
        if self.tensorboard.folder is not None:
            outputs = self.outputs()
            with self.tensorboard.writing(self.step):
                self.show(outputs)

    def show(self, outputs: np.ndarray) -> None:
        """Writes summaries with `tf.summary`.

        Args:
            outputs: the model's predictions for all examples, float of shape (n, ...).
        """
        raise NotImplementedError

    def outputs(self) -> np.ndarray:
        """Returns the model's predictions for all examples, with the weights that are evaluated.

        These are the current ones, or their averages (`callbacks.averages`).
        """
        with averaged(self.model):
            return outputs_of(self.predictor or self.model, self.inputs)


def outputs_of(model: keras.Model, inputs) -> np.ndarray:
    """Returns a model's outputs for all examples, computed for some of them at a time.

    Args:
        model: the model.
        inputs: an array or a dict of arrays, of shape (n, ...), n at least 1.
    """
    # `predict()` splits the examples over the workers and then expects all of them. Calling the
    # model reads this worker's copy of the weights, under any strategy, and traces nothing.
    call = model
    if model.compute_dtype != model.variable_dtype:
        # KerasHub's head adds its float32 bias to half precision, which only works in a graph.
        call = tf.function(model)
    rows = BATCH
    if isinstance(inputs, dict) and "token_ids" in inputs:
        rows = min(BATCH, max(1, TOKENS // inputs["token_ids"].shape[1]))
    parts = []
    for start in range(0, len(keras.tree.flatten(inputs)[0]), rows):
        part = slice(start, start + rows)
        batch = keras.tree.map_structure(
            lambda array, part=part: keras.ops.convert_to_tensor(array[part]), inputs
        )
        parts.append(keras.ops.convert_to_numpy(call(batch, training=False)))
    return np.concatenate(parts)


class MaskedSamples(Predictions):
    """Writes sentences, their masked words and the most likely fills, each epoch.

    Args:
        tensorboard: writes the texts.
        data: batches of a split as returned by `data.masked_lm.mask_batch`; the first four
            sentences are shown.
        vocabulary: the word pieces, in the order of their ids.
        predictor: the `BertMaskedLM` that predicts; the model that `fit()` trains by default.
    """

    def __init__(
        self,
        tensorboard: TensorBoard,
        data: tf.data.Dataset,
        vocabulary: Sequence[str],
        predictor: keras.Model | None = None,
    ):
        first = next(iter(data.unbatch().batch(MASKED).take(1)))
        inputs, self.labels, self.weights = keras.tree.map_structure(np.asarray, first)
        super().__init__(tensorboard, inputs, predictor)
        self.vocabulary = vocabulary

    def show(self, outputs):
        """Writes one text per sentence, so that TensorBoard lists its epochs together."""
        logits = np.asarray(outputs, np.float64)[..., : len(self.vocabulary)]
        every = scipy.special.softmax(logits, axis=-1)
        for number, shares in enumerate(every):
            tf.summary.text(f"filled_masks/sentence_{number + 1}", self._format(number, shares))

    def _format(self, number: int, shares: np.ndarray) -> str:
        """Returns the sentence with its masked words in bold, and one table row per masked word."""
        pieces = [self.vocabulary[i] for i in self.inputs["token_ids"][number]]
        positions, masked = self.inputs["mask_positions"][number], set()
        rows = ["| word | the model sees | fills |", "| --- | --- | --- |"]
        for place in np.argsort(positions, kind="stable"):
            if self.weights[number, place] == 0:
                continue
            position, label = positions[place], self.labels[number, place]
            fills = []
            for i in np.argsort(-shares[place], kind="stable")[:FILLS]:
                fill = bold_if(i == label, f"“{self.vocabulary[i]}”")
                fills.append(f"{fill} {shares[place, i]:.1%}")
            word, seen = self.vocabulary[label], pieces[position]
            rows.append(f"| {escape(word)} | {escape(seen)} | {', '.join(fills)} |")
            pieces[position] = word
            masked.add(position)
        text = ""
        for position, piece in enumerate(pieces):
            if piece not in NOT_SHOWN:
                space = "" if piece.startswith("##") else " "
                text += space + bold_if(position in masked, piece.removeprefix("##"))
        return "\n".join([text.strip(), "", *rows])


class ClassifiedSentences(Predictions):
    """Writes sentences, their classes and the most likely class, or their scores, each epoch.

    Args:
        tensorboard: writes the text.
        inputs: the model's inputs for a split, a dict of arrays; the first ten examples are shown.
        sentences: the same sentences as text.
        labels: their classes, integers of shape (n,), or their scores, float of shape (n, 1), or
            several labels, 0 or 1, of shape (n, labels).
        classes: the names of the classes or labels; none for scores.
    """

    def __init__(
        self,
        tensorboard: TensorBoard,
        inputs,
        sentences: Sequence[str],
        labels: np.ndarray,
        classes: Sequence[str],
    ):
        super().__init__(tensorboard, keras.tree.map_structure(lambda x: x[:CLASSIFIED], inputs))
        self.sentences = list(sentences[:CLASSIFIED])
        self.labels = np.asarray(labels)[:CLASSIFIED]
        self.classes = list(map(str, classes))

    def show(self, outputs):
        """Writes a table; correct predictions of classes are bold."""
        make_rows = self._scores
        if self.classes:
            make_rows = self._classes if self.labels.ndim == 1 else self._several
        rows = make_rows(outputs)
        tf.summary.text("sentences", "\n".join(rows))

    def _scores(self, outputs) -> list[str]:
        numbers = zip(self.sentences, self.labels.ravel(), np.ravel(outputs), strict=True)
        rows = ["| sentence | score | predicted |", "| --- | --- | --- |"]
        return rows + [f"| {shortened(text)} | {a:.4g} | {b:.4g} |" for text, a, b in numbers]

    def _several(self, outputs) -> list[str]:
        rows = ["| sentence | labels | predicted |", "| --- | --- | --- |"]
        for sentence, labels, logits in zip(self.sentences, self.labels, outputs, strict=True):
            right = [escape(self.classes[index]) for index in np.flatnonzero(labels)]
            predicted = [
                bold_if(bool(labels[index]), self.classes[index])
                for index in np.flatnonzero(logits > 0)
            ]
            rows.append(f"| {shortened(sentence)} | {', '.join(right)} | {', '.join(predicted)} |")
        return rows

    def _classes(self, outputs) -> list[str]:
        shares = scipy.special.softmax(np.asarray(outputs, np.float64), axis=-1)
        rows = ["| sentence | class | predicted |", "| --- | --- | --- |"]
        for sentence, label, share in zip(self.sentences, self.labels, shares, strict=True):
            best = int(np.argmax(share))
            predicted = bold_if(best == label, self.classes[best])
            rows.append(
                f"| {shortened(sentence)} | {escape(self.classes[label])} "
                f"| {predicted} {share[best]:.1%} |"
            )
        return rows


def shortened(sentence: str) -> str:
    """Escapes a sentence for Markdown; cuts a long one."""
    return escape(sentence[:LONGEST] + " ..." if len(sentence) > LONGEST else sentence)


def bold_if(condition: bool, text: str) -> str:
    """Escapes a text for Markdown; makes it bold on a condition."""
    return f"**{escape(text)}**" if condition else escape(text)
