"""Shows in TensorBoard what a language model writes."""

import logging
from collections.abc import Callable, Sequence

import tensorflow as tf

from callbacks.averages import averaged
from callbacks.steps import StepCallback
from callbacks.tensorboard import TensorBoard
from data.errors import first_line

log = logging.getLogger("recipes")


class GeneratedTexts(StepCallback):
    """Writes texts that the model generates to TensorBoard, each epoch.

    Where the weights have moving averages, those generate. Training continues where that fails, and
    a line of the log says so: the epoch's checkpoint is saved afterwards.

    Args:
        tensorboard: writes the run's events; without a folder nothing is generated.
        tag: name of the texts, which are numbered from 1: "answers/prompt" for
            "answers/prompt_1", ...
        generate: returns the texts, as Markdown.
    """

    def __init__(self, tensorboard: TensorBoard, tag: str, generate: Callable[[], Sequence[str]]):
        super().__init__()
        self.tensorboard, self.tag = tensorboard, tag
        self.generate: Callable[[], Sequence[str]] | None = generate

    def on_epoch_end(self, epoch, logs=None):
        """Generates and writes them."""
        if self.tensorboard.folder is None or self.generate is None:
            return
        try:
            with averaged(self.model):
                texts = self.generate()
        except Exception as error:  # KerasHub's generate() of a family may raise whatever
            kind, self.generate = type(error).__name__, None
            log.warning("no %s in TensorBoard: %s: %s", self.tag, kind, first_line(error))
            return
        with self.tensorboard.writing(self.step):
            for number, text in enumerate(texts, start=1):
                tf.summary.text(f"{self.tag}_{number}", text)
