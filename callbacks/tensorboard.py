"""Shows the run's records in TensorBoard, at the step of the run."""

import contextlib
import logging
import os
from pathlib import Path

import tensorflow as tf

from callbacks.errors import CannotSave
from callbacks.steps import StepCallback
from callbacks.throughput import is_speed

log = logging.getLogger("recipes")

# TensorBoard sorts groups of charts by name; a chart holds one metric of all splits.
GROUPS = (
    ("1_loss", ("loss", "entropy", "perplexity", "huber")),
    ("2_quality", ("accuracy", "f1", "rmse")),
    ("3_optimizer", ("learning_rate", "norm", "scale")),
    ("4_speed", ("per_second", "mfu")),
)


def tag_of(name: str) -> str:
    """The tag of a metric, its group before the slash; "5_more" where none fits."""
    group = next((g for g, parts in GROUPS if any(part in name for part in parts)), "5_more")
    return f"{group}/{name}"


class TensorBoard(StepCallback):
    """Writes each record's numbers as scalars; one TensorBoard run a split.

    Keras's own class counts steps within one process. Here the step is that of the run, and a
    resumed run cuts off what was written after its checkpoint: no gap, no double.

    Args:
        folder: the run's `logs` folder, or None where this process writes nothing.
    """

    def __init__(self, folder: str | Path | None):
        super().__init__()
        self.folder = Path(folder) if folder is not None else None
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        self._evaluated: dict[str, int] = {}  # the last step of which a split was written

    @contextlib.contextmanager
    def writing(self, split: str, step: int):
        """Makes `tf.summary` write to a split's TensorBoard run at a step.

        Example:
            with tensorboard.writing("test", step):
                tf.summary.image("images", images)

        Args:
            split: "train", "validation" or "test".
            step: the step of the run.

        Raises:
            CannotSave: the disk is full, or the folder is gone or not writable.
        """
        if self.folder is None:
            yield
            return
        with self._full_disk_named():
            if split not in self._writers:
                self.folder.mkdir(exist_ok=True)  # not its parents, as TensorFlow would
                path = str(self.folder / split)
                self._writers[split] = tf.summary.create_file_writer(path)
            with self._writers[split].as_default(step=step):
                yield

    @contextlib.contextmanager
    def _full_disk_named(self):
        # TensorFlow's word for a full disk is that a resource is exhausted, as for memory.
        try:
            yield
        except (tf.errors.OpError, OSError) as error:
            message = getattr(error, "message", None) or getattr(error, "strerror", None) or error
            why = str(message).splitlines()[0].rpartition("; ")[2]  # before it node and path
            raise CannotSave(
                f"TensorBoard's files in {self.folder} cannot be written: {why[:200]}"
            ) from error

    def on_record(self, record: dict) -> None:
        """Writes a record's numbers under the split that they belong to."""
        if self.folder is None:
            return
        numbers = {k: v for k, v in record.items() if k not in ("event", "step", "epoch", "split")}
        event, step = record["event"], record["step"]
        if event == "epoch":
            validation = {k[4:]: v for k, v in numbers.items() if k.startswith("val_")}
            # The loss of the steps stands in that chart already, and so does their speed.
            training = {
                name: value
                for name, value in numbers.items()
                if name != "loss" and not name.startswith("val_") and not is_speed(name)
            }
            self._scalars("train", step, training)
            self._evaluation("validation", step, validation)
        elif event == "evaluation":
            self._evaluation(record["split"], step, numbers)
        else:
            self._scalars("train", step, numbers)

    def _evaluation(self, split: str, step: int, numbers: dict[str, float]) -> None:
        # An evaluation in mid-epoch may fall on the epoch's end, or on the run's: one point.
        if self._evaluated.get(split) != step:
            self._scalars(split, step, numbers)
            self._evaluated[split] = step

    def _scalars(self, split: str, step: int, numbers: dict[str, float]) -> None:
        if not numbers:
            return
        with self.writing(split, step):
            for name, value in numbers.items():
                tf.summary.scalar(tag_of(name), value)

    def get_state(self) -> dict:
        """How long each file is; all of it is on disk then."""
        self.flush()
        sizes = {name: path.stat().st_size for name, path in self._files().items()}
        return {"files": sizes, "evaluated": self._evaluated}

    def set_state(self, state: dict) -> None:
        """Cuts off what was written after the checkpoint."""
        remembered, self._evaluated = state.get("files", {}), dict(state.get("evaluated", {}))
        for name, path in self._files().items():
            size = remembered.get(name)
            if size is None:
                path.unlink()
            elif path.stat().st_size > size:
                os.truncate(path, size)
        if self.folder is None:
            return
        for name, size in remembered.items():
            path = self.folder / name
            if not path.exists() or path.stat().st_size < size:
                log.warning("%s: something cut it; what it held of this run is lost", path)

    def _files(self) -> dict[str, Path]:
        if self.folder is None:
            return {}
        found = (path for path in sorted(self.folder.glob("*/*")) if path.is_file())
        return {str(path.relative_to(self.folder)): path for path in found}

    def flush(self) -> None:
        """Puts everything on disk; a checkpoint does so before it is written."""
        if self.folder is None:
            return
        with self._full_disk_named():
            for writer in self._writers.values():
                writer.flush()

    def on_train_end(self, logs=None):
        """Flushes."""
        self.flush()
