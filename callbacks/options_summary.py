"""Shows a run's options in TensorBoard: as text, and as HParams by which runs can be sorted."""

import tensorflow as tf

from callbacks import markdown
from callbacks.steps import StepCallback
from callbacks.tensorboard import TensorBoard

SPLIT = "test"  # whose last scalars TensorBoard shows beside the HParams: the final metrics


class OptionsSummary(StepCallback):
    """Writes the options when a run begins, and once more where it resumes with other ones.

    Args:
        tensorboard: where they go.
        options: by name, as JSON values; without what is not the same in a run that resumes.
        resolved: what they came to, likewise.
    """

    def __init__(self, tensorboard: TensorBoard, options: dict, resolved: dict):
        super().__init__()
        self.tensorboard = tensorboard
        self.text = "\n\n".join(
            markdown.table(
                [title, "value"],
                [[markdown.plain(name), markdown.plain(value)] for name, value in values.items()],
            )
            for title, values in (("option", options), ("came to", resolved))
        )
        self._written: str | None = None

    def get_state(self) -> dict:
        """The text that TensorBoard shows."""
        return {"text": self._written}

    def set_state(self, state: dict) -> None:
        """Takes it back."""
        self._written = state["text"]

    def on_train_begin(self, logs=None):
        """Writes the text."""
        if self._written != self.text:
            with self.tensorboard.writing("train", self.step):
                tf.summary.text("options", self.text)
            self._written = self.text


def write_hparams(tensorboard: TensorBoard, step: int, hparams: dict, trial: str) -> None:
    """Writes the HParams of a finished run beside its test metrics.

    TensorBoard takes a run's HParams from the first ones that it finds, so they are written once,
    at the end, after the last checkpoint: a run that trains on cuts them off and writes new ones.

    Args:
        tensorboard: where they go.
        step: the last step of the run.
        hparams: by name; those that are None are left out.
        trial: the name of the run.
    """
    from tensorboard.plugins.hparams import api

    values = {
        name: value if isinstance(value, bool | int | float) else str(value)
        for name, value in hparams.items()
        if value is not None
    }
    with tensorboard.writing(SPLIT, step):
        api.hparams(values, trial_id=trial)
