"""Records steps, epochs and evaluations, in metrics.jsonl and for the callbacks that show them."""

import copy
import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path

import keras

from callbacks.errors import saving
from callbacks.late_numbers import unread
from callbacks.step_loss import StepLoss
from callbacks.steps import StepCallback
from callbacks.throughput import Throughput
from data import files
from distribution.keras_compat import inspection
from distribution.step import gradient_norm, inner_optimizers

log = logging.getLogger("recipes")


class Records(StepCallback):
    """Makes a record of every N steps, of each epoch and of each evaluation.

    A record is a dict with `event` ("step", "epoch" or "evaluation"), `step` (of the run), `epoch`
    (counted from 1) and numbers. It is written as one line of metrics.jsonl, of which a resumed run
    keeps the valid part, and passed to each listener's `on_record(record)`.

    Args:
        path: the file; None in processes that are not the chief.
        listeners: show the records: `TensorBoard`, `TerminalLog`.
        throughput: measures the speed; comes before this among the callbacks.
        log_every: steps between two records.
        workers: current number of processes that train together.

    Attributes:
        perplexity_of: name of a cross-entropy whose exponential is also recorded, or None.
        history: one list per metric, one number per epoch that has it.
        epochs: the epochs of the numbers of `history`, counted from 1: `fit(validation_freq=2)`
            evaluates in every second one.
        workers_by_step: `{"from_step": 41, "workers": 1}` for each change of their number.
    """

    def __init__(
        self,
        path: Path | None,
        listeners: Sequence,
        throughput: Throughput,
        log_every: int = 50,
        workers: int = 1,
    ):
        super().__init__()
        self.path = path
        self.listeners = list(listeners)
        self.throughput = throughput
        self.log_every = log_every
        self.perplexity_of: str | None = None
        self.workers = workers
        self.history: dict[str, list[float]] = {}
        self.epochs: dict[str, list[int]] = {}
        self.workers_by_step: list[dict[str, int]] = []
        self._loss = StepLoss()  # of the steps until the last record or the last end of an epoch
        self._newest: tuple | None = None  # arguments of `StepLoss.add` for the last step

    @property
    def loss_now(self) -> float:
        """Returns the mean loss since the last record; right after a record, the record's loss."""
        loss = copy.copy(self._loss)
        if self._newest is not None:
            loss.add(*self._newest)
        return loss.so_far()

    def get_state(self) -> dict:
        """Returns the history, the losses since the last record, and the length of the file.

        The file is on disk by then, like the checkpoint that remembers its length.
        """
        if self.path and self.path.exists():
            with saving(self.path):
                files.sync(self.path)
        return {
            "bytes": self._length(),
            "history": self.history,
            "epochs": self.epochs,
            "loss": vars(self._loss),
            "workers_by_step": self.workers_by_step,
        }

    def set_state(self, state: dict) -> None:
        """Restores the state, and truncates the file to its length at the checkpoint.

        A file that is shorter has lost records, and maybe half of one: it is cut to whole lines.
        """
        self.history, self.epochs = state["history"], epochs_of(state)
        vars(self._loss).update(state["loss"])
        self.workers_by_step = state["workers_by_step"]
        length = state["bytes"]
        if not self.path or self._length() == length:
            return
        with saving(self.path):
            if self._length() < length:
                log.warning("%s: shorter than at the checkpoint, records are lost", self.path)
                if not self.path.exists():
                    return
                length = self.path.read_bytes().rfind(b"\n") + 1
            os.truncate(self.path, length)

    def _length(self) -> int:
        return self.path.stat().st_size if self.path and self.path.exists() else 0

    def on_step_end(self, step, logs):
        """Records a step if it is due."""
        if not self.workers_by_step or self.workers_by_step[-1]["workers"] != self.workers:
            part = {"from_step": self._previous + 1, "workers": self.workers}
            self.workers_by_step.append(part)
        loss = unread(logs, "loss")
        self._newest = (self.epoch, step - self.epoch * self.steps_per_epoch, loss)
        is_due = self.is_due(self.log_every) or step == self.total_steps
        # The running mean contains the steps before, unless one of them reset it.
        if is_due or step >= self.last_step_of_epoch() or loss_scale(self.model.optimizer):
            self._loss.add(*self._newest)
        if not is_due:
            return
        numbers = {
            "loss": self._loss.since_last(),
            "learning_rate": used_learning_rate(self.model.optimizer),
        }
        norm = gradient_norm(self.model)
        if norm is not None:
            numbers["gradient_norm"] = norm
        self._record("step", step, numbers | self.throughput.since_last())

    def on_epoch_end(self, epoch, logs=None):
        """Records the metrics of the epoch, and keeps them in `history`."""
        numbers = with_perplexity({k: float(v) for k, v in logs.items()}, self.perplexity_of)
        for name, value in numbers.items():
            self.history.setdefault(name, []).append(value)
            self.epochs.setdefault(name, []).append(epoch + 1)
        numbers["learning_rate"] = used_learning_rate(self.model.optimizer)
        self._record("epoch", self.step, numbers | self.throughput.total())

    def record_evaluation(self, split: str, step: int, numbers: dict[str, float]) -> None:
        """Records an evaluation.

        Args:
            split: "validation" or "test".
            step: the step of the run whose weights were evaluated.
            numbers: metrics by name.
        """
        shown = with_perplexity(numbers, self.perplexity_of)
        self._record("evaluation", step, {"split": split} | shown)

    def _record(self, event: str, step: int, numbers: dict) -> None:
        epoch = self.epoch + 1
        if step < self.step:  # of weights that were the best
            epoch = -(-step // self.steps_per_epoch)
        record = {"event": event, "step": step, "epoch": epoch, **numbers}
        if self.path is not None:
            self._write(self.path, record)
        for listener in self.listeners:
            listener.on_record(record)

    def _write(self, path: Path, record: dict) -> None:
        # JSON has no NaN and no infinity: they become text.
        finite = json.loads(json.dumps(record), parse_constant=str)
        # In one write: a reader never sees half a line while the process runs.
        with saving(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")


def epochs_of(state: dict) -> dict[str, list[int]]:
    """Returns the epochs of the numbers of a history, per metric.

    Args:
        state: the `get_state()` of `Records`. One of an older version lacks the epochs: each has a
            number of each metric.
    """
    every = {name: list(range(1, len(v) + 1)) for name, v in state.get("history", {}).items()}
    return state.get("epochs", every)


def loss_scale(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the scale of a `LossScaleOptimizer`; 0 of any other optimizer."""
    scale = getattr(optimizer, "dynamic_scale", None)
    return 0.0 if scale is None else float(keras.ops.convert_to_numpy(scale))


def used_learning_rate(optimizer: keras.optimizers.Optimizer, updates_ago: int = 0) -> float:
    """Returns the learning rate of the optimizer's last update; of the first of several ones.

    Args:
        optimizer: the model's.
        updates_ago: with a schedule, that of so many updates before the last one.
    """
    inner = inner_optimizers(optimizer)[0]
    schedule = inspection.learning_rate_of(inner)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        done = keras.ops.convert_to_numpy(inner.iterations)
        return float(keras.ops.convert_to_numpy(schedule(max(int(done) - 1 - updates_ago, 0))))
    return float(keras.ops.convert_to_numpy(inner.learning_rate))


def with_perplexity(logs: dict[str, float], cross_entropy: str | None) -> dict[str, float]:
    """Adds `perplexity` and `val_perplexity`, exponentials of a cross-entropy (None: neither)."""
    metrics = dict(logs)
    for prefix in ("", "val_"):
        name = f"{prefix}{cross_entropy}"
        if name in logs:
            try:
                metrics[f"{prefix}perplexity"] = math.exp(logs[name])
            except OverflowError:
                metrics[f"{prefix}perplexity"] = math.inf
    return metrics
