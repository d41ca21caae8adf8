"""Shows in TensorBoard, after each epoch, what a model predicts for a few examples, as text."""

from collections.abc import Sequence

import keras
import numpy as np
import scipy.special
import tensorflow as tf

from callbacks.steps import StepCallback
from callbacks.tensorboard import TensorBoard, escape

BATCH = 250  # examples of one call of the model
MASKED = 4  # sentences that are shown, the first of the split
FILLS = 3  # of a mask, the likeliest ones
CLASSIFIED = 10  # sentences that are shown, the first of the split
LONGEST = 300  # characters of one of them
NOT_SHOWN = ("[CLS]", "[SEP]", "[PAD]")


class Predictions(StepCallback):
    """Predicts the same examples after each epoch; a base.

    Subclasses implement `show(outputs)`, which writes summaries at the step of the run. It is
    called on the chief; the other workers predict nothing.

    Args:
        tensorboard: where the summaries go.
        inputs: what the model takes, an array or a dict of arrays, the examples first.
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
            outputs: what the model predicts for all examples, float, the examples first.
        """
        raise NotImplementedError

    def outputs(self) -> np.ndarray:
        """Returns what the model predicts for all examples with the weights of this moment."""
        # `predict()` hands each worker its part of the examples and then expects all of them. A
        # plain call of the model reads this worker's own copy of the weights, under any strategy,
        # and nothing is traced.
        model = call = self.predictor or self.model
        if model.compute_dtype != model.variable_dtype:
            # KerasHub's head adds its float32 bias to half precision, which only a graph takes.
            call = tf.function(model)
        found = []
        for start in range(0, len(keras.tree.flatten(self.inputs)[0]), BATCH):
            part = slice(start, start + BATCH)
            batch = keras.tree.map_structure(
                lambda array, part=part: keras.ops.convert_to_tensor(array[part]), self.inputs
            )
            found.append(keras.ops.convert_to_numpy(call(batch, training=False)))
        return np.concatenate(found)


class MaskedSamples(Predictions):
    """Writes sentences, their masked words and the likeliest fills, each epoch.

    Args:
        tensorboard: where the texts go.
        data: batches of a split as `data.masked_lm.mask_batch` makes them; the first four sentences
            are taken.
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
        """Writes a text for each sentence, so that its epochs stand below each other."""
        every = scipy.special.softmax(np.asarray(outputs, np.float64), axis=-1)
        for number, shares in enumerate(every):
            tf.summary.text(f"filled_masks/sentence_{number + 1}", self._format(number, shares))

    def _format(self, number: int, shares: np.ndarray) -> str:
        """Returns the sentence with its masked words in bold, and a row for each of them."""
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
    """Writes sentences, their classes and the likeliest prediction, each epoch.

    Args:
        tensorboard: where the text goes.
        inputs: what the model takes of a split, a dict of arrays; the first ten are taken.
        sentences: the same sentences as text.
        labels: their classes, integers of shape (n,).
        classes: the names of the classes.
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
        """Writes a table; the predicted class is bold where it is right."""
        shares = scipy.special.softmax(np.asarray(outputs, np.float64), axis=-1)
        rows = ["| sentence | class | predicted |", "| --- | --- | --- |"]
        for sentence, label, share in zip(self.sentences, self.labels, shares, strict=True):
            best = int(np.argmax(share))
            predicted = bold_if(best == label, self.classes[best])
            if len(sentence) > LONGEST:
                sentence = sentence[:LONGEST] + " ..."
            rows.append(
                f"| {escape(sentence)} | {escape(self.classes[label])} "
                f"| {predicted} {share[best]:.1%} |"
            )
        tf.summary.text("sentences", "\n".join(rows))


def bold_if(condition: bool, text: str) -> str:
    """Returns a text as Markdown."""
    return f"**{escape(text)}**" if condition else escape(text)
