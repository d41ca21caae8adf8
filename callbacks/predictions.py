"""Shows in TensorBoard, after each epoch, what a model predicts for a few examples, as text."""

import textwrap
from collections.abc import Sequence

import keras
import numpy as np
import scipy.special
import tensorflow as tf

from callbacks.steps import StepCallback
from callbacks.tensorboard import TensorBoard, escape, table

LONGEST = 200  # letters of a sentence that are shown
PIECES = 48  # word pieces of a masked sentence that are shown
FILLS = 3  # of a mask, the likeliest ones


class Predictions(StepCallback):
    """Predicts the same examples after each epoch; a base.

    Subclasses implement `show(outputs)`, which writes summaries at the step of the run. It is
    called on the chief; the other workers predict nothing.

    Args:
        tensorboard: where the summaries go.
        inputs: what the model takes, an array or a dict of arrays, the examples first.
        batch_size: examples of one call of the model.
        predictor: the model that predicts; the one that `fit()` trains by default.
    """

    def __init__(
        self,
        tensorboard: TensorBoard,
        inputs,
        batch_size: int = 250,
        predictor: keras.Model | None = None,
    ):
        super().__init__()
        self.tensorboard = tensorboard
        self.inputs = inputs
        self.batch_size = batch_size
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
        for start in range(0, len(keras.tree.flatten(self.inputs)[0]), self.batch_size):
            part = slice(start, start + self.batch_size)
            batch = keras.tree.map_structure(
                lambda array, part=part: keras.ops.convert_to_tensor(array[part]), self.inputs
            )
            found.append(keras.ops.convert_to_numpy(call(batch, training=False)))
        return np.concatenate(found)


class SentenceSamples(Predictions):
    """Writes sentences with their true and their predicted class, each epoch.

    Args:
        tensorboard: where the text goes.
        inputs: what the model takes, a dict of arrays, the sentences first.
        sentences: the sentences themselves.
        labels: their classes, integers of shape (n,).
        classes: the names of the classes.
        count: how many are shown, the first ones.
    """

    def __init__(
        self,
        tensorboard: TensorBoard,
        inputs: dict[str, np.ndarray],
        sentences: Sequence[str],
        labels: np.ndarray,
        classes: Sequence[str],
        count: int = 20,
    ):
        super().__init__(tensorboard, {name: array[:count] for name, array in inputs.items()})
        self.labels = np.asarray(labels)[:count]
        self.sentences = list(sentences[:count])
        self.classes = list(classes)

    def show(self, outputs):
        """Writes one table, in which wrong predictions are bold."""
        rows = []
        shares = probabilities(outputs)
        for sentence, label, row in zip(self.sentences, self.labels, shares, strict=True):
            guess = int(np.argmax(row))
            name = escape(self.classes[guess])
            name = name if guess == label else f"**{name}**"
            short = textwrap.shorten(sentence, LONGEST, placeholder="...")
            rows.append([escape(short), escape(self.classes[label]), f"{name} {row[guess]:.1%}"])
        tf.summary.text("sentences", table(["sentence", "true", "predicted"], rows))


class MaskedSamples(Predictions):
    """Writes sentences, their masked words and the likeliest fills, each epoch.

    Args:
        tensorboard: where the texts go.
        data: batches of a split as `data.masked_lm.mask_batch` makes them; the first sentences are
            taken.
        vocabulary: the word pieces, in the order of their ids.
        count: how many sentences.
        predictor: the `BertMaskedLM` that predicts; the model that `fit()` trains by default.
    """

    def __init__(
        self,
        tensorboard: TensorBoard,
        data: tf.data.Dataset,
        vocabulary: Sequence[str],
        count: int = 4,
        predictor: keras.Model | None = None,
    ):
        first = next(iter(data.unbatch().batch(count).take(1)))
        inputs, self.labels, weights = keras.tree.map_structure(np.asarray, first)
        super().__init__(tensorboard, inputs, count, predictor)
        self.is_masked = weights > 0
        self.vocabulary = list(vocabulary)

    def show(self, outputs):
        """Writes a text for each sentence, so that its epochs stand below each other."""
        shares = probabilities(outputs)
        for number, is_masked in enumerate(self.is_masked):
            if is_masked.any():  # else it pads the last batch
                text = self._format(number, shares[number])
                tf.summary.text(f"filled_masks/sentence_{number + 1}", text)

    def _format(self, number: int, shares: np.ndarray) -> str:
        pieces = [self.vocabulary[i] for i in self.inputs["token_ids"][number]]
        positions = self.inputs["mask_positions"][number]
        shown = [
            place
            for place in np.argsort(positions, kind="stable")
            if self.is_masked[number, place] and positions[place] < PIECES
        ]
        rows, right = [], 0
        for mark, place in enumerate(shown, 1):
            label = self.labels[number, place]
            best = np.argsort(-shares[place], kind="stable")[:FILLS]
            right += int(best[0] == label)
            fills = [self._fill(i, shares[place, i], i == label) for i in best]
            word, seen = self.vocabulary[label], pieces[positions[place]]
            rows.append([str(mark), escape(word), escape(seen), ", ".join(fills)])
        marks = {int(positions[place]): mark for mark, place in enumerate(shown, 1)}
        head = ["mask", "word", "the model sees", "fills"]
        sentence = format_sentence(pieces[:PIECES], marks)
        return f"{sentence}\n\n{table(head, rows)}\n\n{right} of {len(shown)} right"

    def _fill(self, index: int, share: float, right: bool) -> str:
        word = f"“{escape(self.vocabulary[index])}”"
        return f"{f'**{word}**' if right else word} {share:.1%}"


def format_sentence(pieces: Sequence[str], marks: dict[int, int]) -> str:
    """Returns word pieces as Markdown, each masked one as its number in bold brackets.

    Args:
        pieces: the word pieces; special tokens but [UNK] are left out.
        marks: the number of each masked position.
    """
    words: list[str] = []
    for position, piece in enumerate(pieces):
        mark = marks.get(position)
        if mark is None and piece in ("[CLS]", "[SEP]", "[PAD]"):
            continue
        text = f"**&#91;{mark}&#93;**" if mark else escape(piece.removeprefix("##"))
        if piece.startswith("##") and words and not mark:
            words[-1] += text
        else:
            words.append(text)
    return " ".join(words)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Returns the softmax over the last axis, in float64."""
    return scipy.special.softmax(np.asarray(logits, np.float64), axis=-1)
