"""Shows a run in TensorBoard, as one entry: its records, options and what callbacks draw."""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from callbacks.errors import saving
from callbacks.steps import StepCallback
from callbacks.throughput import is_speed

FILES = "events.out.tfevents*"


class TensorBoard(StepCallback):
    """Writes each record's numbers as scalars, named by metric and split: `loss/train`.

    Keras's own class counts steps within one process. Here the step is that of the run, and a
    resumed run cuts off what was written after its checkpoint: no gap, no double.

    Args:
        folder: where the files go: the run's folder, whose name TensorBoard then shows. None where
            this process writes nothing.
    """

    def __init__(self, folder: Path | None):
        super().__init__()
        self.folder = folder
        self._writer: tf.summary.SummaryWriter | None = None

    @contextlib.contextmanager
    def writing(self, step: int):
        """Makes `tf.summary` write to the run's files at a step.

        Example:
            with tensorboard.writing(step):
                tf.summary.image("images", images)

        Raises:
            CannotSave: the disk is full, or the folder is gone or not writable.
        """
        if self.folder is None:
            yield
            return
        with self._saving():
            if self._writer is None:
                self._writer = tf.summary.create_file_writer(str(self.folder))
            with self._writer.as_default(step=step):
                yield

    def _saving(self):
        # TensorFlow says of a full disk that a resource is exhausted, as of memory.
        return saving(f"TensorBoard's files in {self.folder}", "", tf.errors.OpError)

    def on_record(self, record: dict) -> None:
        """Writes a record's numbers."""
        with self.writing(record["step"]):
            for name, value in record.items():
                tag = _tag(record, name)
                if tag is not None:
                    tf.summary.scalar(tag, value)

    def show_options(self, options: dict) -> None:
        """Shows the options on the page Text, as a table, at step 0.

        Args:
            options: by name; those that are None are left out.
        """
        rows = [
            f"| {escape(name)} | {escape(value)} |"
            for name, value in options.items()
            if value is not None
        ]
        with self.writing(0):
            tf.summary.text("options", "\n".join(["| option | value |", "| --- | --- |", *rows]))

    def show_charts(self, metrics: Sequence[str]) -> None:
        """Shows each metric's training, validation and test in one chart: page Custom Scalars.

        Args:
            metrics: names, without `val_`.
        """
        from tensorboard.plugins.custom_scalar import layout_pb2, summary

        charts = [
            layout_pb2.Chart(
                title=name,
                multiline=layout_pb2.MultilineChartContent(
                    tag=[f"^{re.escape(name)}/(train|validation|test)$"]
                ),
            )
            for name in metrics
        ]
        category = layout_pb2.Category(title="train, validation, test", chart=charts)
        layout = summary.pb(layout_pb2.Layout(category=[category]))
        with self.writing(0):
            tf.summary.experimental.write_raw_pb(layout.SerializeToString())

    def show_hparams(self, step: int, hparams: dict) -> None:
        """Shows options by which finished runs can be sorted, beside their last scalars.

        TensorBoard takes the first that it finds, so they are written once, after the last
        checkpoint: a run that is extended cuts them off and writes new ones.

        Args:
            step: the last step of the run.
            hparams: by name; those that are None are left out.
        """
        from tensorboard.plugins.hparams import api

        # TensorBoard shows the number 3 as 3.0000, and sorts the text "3" as a number.
        shown = {
            k: v if isinstance(v, float) else str(v) for k, v in hparams.items() if v is not None
        }
        with self.writing(step):
            api.hparams(shown, trial_id=str(self.folder))

    def get_state(self) -> dict:
        """Returns how long each file is; all of it is on disk then."""
        self.flush()
        return {"files": {path.name: path.stat().st_size for path in self._files()}}

    def set_state(self, state: dict) -> None:
        """Cuts off what was written after the checkpoint."""
        with self._saving():
            for path in self._files():
                size = state["files"].get(path.name, 0)
                if path.stat().st_size > size:
                    os.truncate(path, size)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(FILES)) if self.folder is not None else []

    def flush(self) -> None:
        """Puts everything on disk; a checkpoint does so before it is written."""
        if self._writer is not None:
            with self._saving():
                self._writer.flush()


def _tag(record: dict, name: str) -> str | None:
    """Returns the tag of a number; TensorBoard groups charts by what is before the slash."""
    in_charts_of_steps = is_speed(name) or name in ("loss", "learning_rate")
    no_chart = name in ("event", "step", "epoch", "split")
    if no_chart or (record["event"] == "epoch" and in_charts_of_steps):
        return None
    if is_speed(name):
        return f"speed/{name}"
    if name in ("learning_rate", "gradient_norm"):
        return f"optimizer/{name}"
    if name.startswith("val_"):
        return f"{name.removeprefix('val_')}/validation"
    return f"{name}/{record.get('split', 'train')}"


def escape(text: object) -> str:
    """Returns a text in which TensorBoard takes nothing for Markdown or HTML."""
    words = " ".join(str(text).split())
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in words)
