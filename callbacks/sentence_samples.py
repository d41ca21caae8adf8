"""Shows in TensorBoard into which classes a few sentences are sorted."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from callbacks import markdown
from callbacks.predictions import Predictions, probabilities
from callbacks.tensorboard import TensorBoard

LONGEST = 200  # letters of a sentence that are shown


class SentenceSamples(Predictions):
    """Writes sentences, their true and their predicted class as text, each epoch.

    Args:
        tensorboard: where the text goes, at the step of the run.
        inputs: what the model takes, a dict of arrays, the sentences first.
        sentences: the sentences themselves.
        labels: their classes, integers of shape (n,).
        classes: the names of the classes.
        count: how many are shown, the first ones.
        split: TensorBoard's run.
    """

    def __init__(
        self,
        tensorboard: TensorBoard,
        inputs: dict[str, np.ndarray],
        sentences: Sequence[str],
        labels: np.ndarray,
        classes: Sequence[str],
        count: int = 20,
        split: str = "validation",
    ):
        first = {name: array[:count] for name, array in inputs.items()}
        super().__init__(tensorboard, first, count, split)
        self.labels = np.asarray(labels)[:count]
        self.sentences = list(sentences[:count])
        self.classes = list(classes)

    def show(self, outputs):
        """Writes one table; what is wrong is bold."""
        shares, rows = probabilities(outputs), []
        for sentence, label, row in zip(self.sentences, self.labels, shares, strict=True):
            guess = int(np.argmax(row))
            name = markdown.plain(self.classes[guess])
            short = sentence if len(sentence) <= LONGEST else sentence[:LONGEST] + "..."
            rows.append(
                [
                    markdown.plain(short),
                    markdown.plain(self.classes[label]),
                    f"{name if guess == label else f'**{name}**'} {row[guess]:.1%}",
                ]
            )
        tf.summary.text("sentences", markdown.table(["sentence", "true", "predicted"], rows))
