"""One line per log: to the terminal, to metrics.jsonl and to TensorBoard."""

import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from callbacks.learning_rate import used_learning_rate
from callbacks.steps import StepCallback, StepLoss

log = logging.getLogger("recipes")


class RunLog(StepCallback):
    """Logs steps, epochs and evaluations, and measures the throughput.

    A record is a dict with `event` ("step", "epoch" or "evaluation"), `step`, `epoch` and numbers.
    In TensorBoard the step is the step of the run, for all of them.

    Args:
        folder: the run's folder, or None where this process writes nothing (it is not the chief).
        steps_per_epoch: updates of the weights in an epoch.
        total_steps: updates of the weights in the run.
        examples_per_step: examples of one update.
        tokens_per_example: tokens that carry text in an average example, or None.
        log_every: steps between two lines.
        perplexity_of: name of a cross-entropy whose exponential is logged beside it, or None.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        steps_per_epoch: int,
        total_steps: int,
        examples_per_step: int,
        tokens_per_example: float | None = None,
        log_every: int = 50,
        perplexity_of: str | None = None,
    ):
        super().__init__(steps_per_epoch, total_steps)
        self.folder = Path(folder) if folder is not None else None
        self.examples_per_step = examples_per_step
        self.tokens_per_example = tokens_per_example
        self.log_every = log_every
        self.perplexity_of = perplexity_of
        self.history: dict[str, list[float]] = {}
        self.time_to_first_step: float | None = None
        self.trained_seconds = 0.0
        self.trained_steps = 0
        self._loss = StepLoss()
        self._window = (0, 0.0)
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        self._created = self._begun = time.perf_counter()
        self.listeners: list[Callable[[dict], None]] = []

    def get_state(self) -> dict:
        """The history, the open window of the step loss, and how long each file is."""
        self.flush()
        return {
            "history": self.history,
            "loss": [self._loss.steps, self._loss.mean],
            "files": {
                str(path.relative_to(self.folder)): path.stat().st_size for path in self._files()
            },
        }

    def set_state(self, state: dict) -> None:
        """Goes on behind the records of the checkpoint: what was written after it is cut off."""
        self.history = {name: list(values) for name, values in state["history"].items()}
        self._loss.steps, self._loss.mean = state["loss"]
        for path in self._files():
            size = state["files"].get(str(path.relative_to(self.folder)))
            if size is None:
                path.unlink()
            elif path.stat().st_size > size:
                os.truncate(path, size)

    def _files(self) -> list[Path]:
        if self.folder is None:
            return []
        return [
            path
            for path in (self.folder / "metrics.jsonl", *sorted((self.folder / "logs").glob("*/*")))
            if path.is_file()
        ]

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock: between two steps others save and evaluate."""
        self._begun = time.perf_counter()

    def on_step_end(self, step, logs):
        """Stops the clock and logs where a line is due."""
        loss = float(logs["loss"])  # waits for the device
        seconds = time.perf_counter() - self._begun
        steps = step - self._previous if self._previous else 1
        if self.time_to_first_step is None:
            self.time_to_first_step = time.perf_counter() - self._created
        else:
            self.trained_seconds += seconds
            self.trained_steps += steps
            self._window = (self._window[0] + steps, self._window[1] + seconds)
        if not (self.is_due(self.log_every) or step == self.total_steps):
            return
        in_epoch = step - self.epoch * self.steps_per_epoch
        record = {
            "loss": self._loss.since_last(in_epoch, loss),
            "learning_rate": used_learning_rate(self.model.optimizer),
        }
        speed = self.throughput(*self._window)
        self._window = (0, 0.0)
        self.record("step", step, record | speed, "train")
        rate = ""
        if speed:
            name = "tokens_per_second" if "tokens_per_second" in speed else "examples_per_second"
            left = (self.total_steps - step) * self.examples_per_step / speed["examples_per_second"]
            rate = f"  {speed[name]:,.0f} {name.split('_')[0]}/s  {left / 60:.1f} min left"
        log.info(
            "step %d/%d  loss %.4f  learning rate %.3g%s",
            *(step, self.total_steps, record["loss"], record["learning_rate"], rate),
        )

    def on_epoch_end(self, epoch, logs=None):
        """Logs the metrics of the epoch, and keeps them in `history`."""
        logs = with_perplexity({k: float(v) for k, v in (logs or {}).items()}, self.perplexity_of)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
        for split, prefix in (("train", ""), ("validation", "val_")):
            numbers = {
                f"epoch_{name.removeprefix(prefix)}": value
                for name, value in logs.items()
                if name.startswith("val_") == bool(prefix)
            }
            self._scalars(split, self.step, numbers)
        self._scalars("train", self.step, {f"epoch_{k}": v for k, v in self.throughput().items()})
        self._write({"event": "epoch", "step": self.step, "epoch": epoch + 1, **logs})
        log.info(
            "epoch %d  %s",
            epoch + 1,
            "  ".join(f"{name} {value:.4f}" for name, value in logs.items()),
        )

    def throughput(self, steps: int | None = None, seconds: float | None = None) -> dict:
        """Examples and tokens a second; without the first step, evaluation and saving."""
        if steps is None:
            steps, seconds = self.trained_steps, self.trained_seconds
        if not steps or not seconds:
            return {}
        examples = steps * self.examples_per_step / seconds
        found = {"examples_per_second": examples}
        if self.tokens_per_example is not None:
            found["tokens_per_second"] = examples * self.tokens_per_example
        return found

    def speed(self) -> dict:
        """What `results.json` holds of the time."""
        return self.throughput() | {"time_to_first_step": self.time_to_first_step}

    def record(self, event: str, step: int, numbers: dict, split: str) -> None:
        """Writes one record to metrics.jsonl and to TensorBoard's run `split`."""
        self._scalars(split, step, {k: v for k, v in numbers.items() if not isinstance(v, str)})
        self._write({"event": event, "step": step, "epoch": self.epoch + 1, **numbers})

    def _write(self, record: dict) -> None:
        for listener in self.listeners:
            listener(record)
        if self.folder is None:
            return
        finite = {
            name: value if not isinstance(value, float) or math.isfinite(value) else str(value)
            for name, value in record.items()
        }
        # One write a line: a reader never sees half of one while the process lives.
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")

    def writer(self, split: str) -> tf.summary.SummaryWriter | None:
        """TensorBoard's writer for a split; None where this process writes nothing."""
        if self.folder is None:
            return None
        if split not in self._writers:
            self._writers[split] = tf.summary.create_file_writer(str(self.folder / "logs" / split))
        return self._writers[split]

    def _scalars(self, split: str, step: int, numbers: dict) -> None:
        writer = self.writer(split)
        if writer is None:
            return
        with writer.as_default(step=step):
            for name, value in numbers.items():
                tf.summary.scalar(name, value)

    def flush(self) -> None:
        """Puts everything on disk; a checkpoint does so before it is written."""
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs=None):
        """Flushes."""
        self.flush()


def with_perplexity(logs: dict, cross_entropy: str | None) -> dict:
    """Adds `perplexity` and `val_perplexity`, the exponentials of the cross-entropies."""
    if cross_entropy is None:
        return logs
    found = dict(logs)
    for prefix in ("", "val_"):
        if f"{prefix}{cross_entropy}" in logs:
            found[f"{prefix}perplexity"] = perplexity(logs[f"{prefix}{cross_entropy}"])
    return found


def perplexity(cross_entropy: float) -> float:
    """exp(cross-entropy); infinite where that is too large for a float."""
    try:
        return math.exp(cross_entropy)
    except OverflowError:
        return math.inf
