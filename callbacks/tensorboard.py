"""Shows a run in TensorBoard as one entry: records, options, and summaries of callbacks."""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from callbacks.errors import saving
from callbacks.steps import StepCallback
from callbacks.throughput import is_speed
from data import files

FILES = "events.out.tfevents*"


class TensorBoard(StepCallback):
    """Writes each record's numbers as scalars, named by metric and split: `loss/train`.

    Keras's class counts steps within one process. This one uses the step of the run, and a resumed
    run truncates the files to their lengths at its checkpoint: no gap, no duplicate.

    Args:
        folder: the run's folder, whose name TensorBoard shows. None if this process writes nothing.
    """

    def __init__(self, folder: Path | None):
        super().__init__()
        self.folder = folder
        self._writer: tf.summary.SummaryWriter | None = None

    @contextlib.contextmanager
    def writing(self, step: int):
        """Directs `tf.summary` to the run's files at a step.

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
        # On a full disk TensorFlow raises ResourceExhaustedError, as for memory.
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
            options: values by name; None is left out.
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
        """Shows options in HParams, where finished runs are sorted by options and last scalars.

        TensorBoard reads the first entry only, so it is written once, after the last checkpoint:
        an extended run truncates it and writes a new one.

        Args:
            step: the last step of the run.
            hparams: values by name; None is left out.
        """
        from tensorboard.plugins.hparams import api

        # TensorBoard shows the number 3 as 3.0000, and sorts the text "3" as a number.
        shown = {
            k: v if isinstance(v, float) else str(v) for k, v in hparams.items() if v is not None
        }
        with self.writing(step):
            api.hparams(shown, trial_id=str(self.folder))

    def get_state(self) -> dict:
        """Writes the files to disk and returns their lengths."""
        self.flush()
        with self._saving():
            for path in self._files():
                files.sync(path)
        return {"files": {path.name: path.stat().st_size for path in self._files()}}

    def set_state(self, state: dict) -> None:
        """Truncates the files to their lengths at the checkpoint."""
        with self._saving():
            for path in self._files():
                size = state["files"].get(path.name, 0)
                if path.stat().st_size > size:
                    os.truncate(path, size)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(FILES)) if self.folder is not None else []

    def flush(self) -> None:
        """Writes everything to disk; called before each checkpoint."""
        if self._writer is not None:
            with self._saving():
                self._writer.flush()


def _tag(record: dict, name: str) -> str | None:
    """Returns the tag of a number; TensorBoard groups charts by the part before the slash."""
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
    """Escapes a text so that TensorBoard shows it without interpreting Markdown or HTML."""
    words = " ".join(str(text).split())
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in words)
