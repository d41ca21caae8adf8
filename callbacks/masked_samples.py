"""Shows in TensorBoard how a masked language model fills the masks of a few sentences."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from callbacks import markdown
from callbacks.predictions import Predictions, probabilities
from callbacks.tensorboard import TensorBoard

PIECES = 48  # of a sentence that are shown
FILLS = 3  # of a mask, the likeliest ones


class MaskedSamples(Predictions):
    """Writes sentences, their masked words and the likeliest fills as text, each epoch.

    Args:
        tensorboard: where the texts go, at the step of the run.
        data: batches of a split as `data.masked_lm.mask_batch` makes them; the first sentences are
            taken.
        vocabulary: the word pieces, in the order of their ids.
        count: how many sentences.
        split: TensorBoard's run.
        asked: the `BertMaskedLM` that answers; the model that `fit()` trains by default.
    """

    def __init__(
        self,
        tensorboard: TensorBoard,
        data: tf.data.Dataset,
        vocabulary: Sequence[str],
        count: int = 4,
        split: str = "validation",
        asked: keras.Model | None = None,
    ):
        first = next(iter(data.unbatch().batch(count).take(1)))
        inputs, labels, weights = keras.tree.map_structure(np.asarray, first)
        super().__init__(tensorboard, inputs, count, split, asked)
        self.labels = labels
        self.is_masked = weights > 0
        self.vocabulary = list(vocabulary)

    def show(self, outputs):
        """Writes a text for each sentence, so that its epochs stand below each other."""
        shares = probabilities(outputs)
        for number, is_masked in enumerate(self.is_masked):
            if is_masked.any():  # else it pads the last batch
                text = self._in_words(number, shares[number])
                tf.summary.text(f"filled_masks/sentence_{number + 1}", text)

    def _in_words(self, number: int, shares: np.ndarray) -> str:
        pieces = [self.vocabulary[i] for i in self.inputs["token_ids"][number]]
        positions = self.inputs["mask_positions"][number]
        shown = [
            place
            for place in np.argsort(positions, kind="stable")
            if self.is_masked[number, place] and positions[place] < PIECES
        ]
        marks = {int(positions[place]): mark + 1 for mark, place in enumerate(shown)}
        rows, right = [], 0
        for mark, place in enumerate(shown):
            label = self.labels[number, place]
            best = np.argsort(-shares[place], kind="stable")[:FILLS]
            right += int(best[0] == label)
            rows.append(
                [
                    str(mark + 1),
                    markdown.plain(self.vocabulary[label]),
                    markdown.plain(pieces[positions[place]]),
                    ", ".join(self._fill(i, shares[place, i], i == label) for i in best),
                ]
            )
        head = ["mask", "word", "the model sees", "fills"]
        sentence = sentence_of(pieces[:PIECES], marks)
        return f"{sentence}\n\n{markdown.table(head, rows)}\n\n{right} of {len(shown)} right"

    def _fill(self, index: int, share: float, right: bool) -> str:
        word = markdown.plain(self.vocabulary[index])
        return f"{f'**{word}**' if right else word} {share:.1%}"


def sentence_of(pieces: Sequence[str], marks: dict[int, int]) -> str:
    """Word pieces as Markdown, each masked one as its number in bold brackets.

    Args:
        pieces: the word pieces; special tokens but [UNK] are left out.
        marks: the number of each masked position.
    """
    words: list[str] = []
    for position, piece in enumerate(pieces):
        mark = marks.get(position)
        if mark is None and piece in ("[CLS]", "[SEP]", "[PAD]"):
            continue
        text = f"**&#91;{mark}&#93;**" if mark else markdown.plain(piece.removeprefix("##"))
        if piece.startswith("##") and words and not mark:
            words[-1] += text
        else:
            words.append(text)
    return " ".join(words)
