"""Checkpoints that are whole or not there, and from which a run goes on at the very next batch.

A checkpoint is a folder `step-00000500` with `model.weights.h5` (weights and optimizer, as Keras
writes them), `state.json` (step, dropout seeds, running metrics, history) and `SHA256SUMS`. It is
written under another name, synced, and renamed.
"""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import keras

from callbacks.steps import StepCallback
from distribution.metric_states import MetricStates

log = logging.getLogger("recipes")

WEIGHTS, STATE, SUMS = "model.weights.h5", "state.json", "SHA256SUMS"


class Stopped(Exception):
    """The run was asked to stop, and ends behind the batch in which it learned of it."""


class CannotSave(Exception):
    """A checkpoint could not be written; the ones before it are as they were."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint on disk whose checksums were right.

    Attributes:
        folder: where it lies.
        step: updates of the weights that are done.
        epochs_done: epochs that are done, validation included.
        in_epoch: updates of the weights of the epoch that is not done.
        state: everything of `state.json`.
    """

    folder: Path
    step: int
    epochs_done: int
    in_epoch: int
    state: dict


def newest(folder: str | Path) -> Saved | None:
    """The newest checkpoint that is whole; damaged ones are named and passed over.

    Args:
        folder: a run's `checkpoints` folder, which need not exist.
    """
    for candidate in sorted(_all(Path(folder)), reverse=True):
        fault = damage(candidate)
        if fault is None:
            return read(candidate)
        log.warning("checkpoint %s is damaged (%s): the one before it is used", candidate, fault)
    return None


def read(folder: Path) -> Saved:
    """What a checkpoint says of itself, without its weights."""
    state = json.loads((folder / STATE).read_text())
    return Saved(folder, state["step"], state["epochs_done"], state["in_epoch"], state)


def reopened(saved: Saved, steps_per_epoch: int) -> Saved:
    """The last checkpoint of a finished run, for one that goes on to more steps.

    The run may have ended within an epoch, which then goes on, and is logged when it is whole.
    """
    epochs_done, in_epoch = divmod(saved.step, steps_per_epoch)
    if in_epoch:
        log = saved.state["callbacks"]["run_log"]
        log["history"] = {name: v[:epochs_done] for name, v in log["history"].items()}
    return dataclasses.replace(saved, epochs_done=epochs_done, in_epoch=in_epoch)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        lines = (folder / SUMS).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as fault:
        return f"{SUMS}: {fault}"
    sums = dict(reversed(line.split("  ", 1)) for line in lines if "  " in line)
    if set(sums) != {WEIGHTS, STATE}:
        return f"{SUMS} does not name its two files"
    for name, wanted in sums.items():
        try:
            if _sha256(folder / name) != wanted:
                return f"{name} does not match its checksum"
        except OSError as fault:
            return f"{name}: {fault}"
    return None


def _all(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if path.is_dir()]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def dropout_seeds(model: keras.Model) -> list[keras.Variable]:
    """The states of the model's seed generators, which Keras's weights file does not hold."""
    return [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]


class Checkpoint(StepCallback):
    """Saves every so many steps and at each epoch's end, and when the run is asked to stop.

    Stands last among the callbacks, so that it saves what the others have logged.

    Args:
        folder: the run's `checkpoints` folder.
        steps_per_epoch: updates of the weights in an epoch.
        total_steps: updates of the weights in the run.
        every: steps between two checkpoints.
        keep: how many are kept; older ones are removed.
        is_chief: only the chief writes; all workers read the metrics together.
        asked_to_stop: tells, on all workers alike, whether the run shall stop.
        with_state: callbacks whose `get_state()` belongs into a checkpoint, by name.
        best: metric of the validation split by which the best checkpoint is kept too, or None.
        patience: epochs without a better one after which the run ends, or None.
        restored: the checkpoint that this run goes on from, or None.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        steps_per_epoch: int,
        total_steps: int,
        every: int,
        keep: int = 5,
        is_chief: bool = True,
        asked_to_stop: Callable[[], bool] = lambda: False,
        with_state: dict[str, StepCallback] | None = None,
        best: str | None = None,
        patience: int | None = None,
        restored: Saved | None = None,
    ):
        super().__init__(steps_per_epoch, total_steps)
        self.folder = Path(folder)
        self.every = every
        self.keep = keep
        self.is_chief = is_chief
        self.asked_to_stop = asked_to_stop
        self.with_state = with_state or {}
        self.best = best
        self.patience = patience
        self.best_value = restored.state["best"] if restored else None
        self.best_epoch = restored.state["best_epoch"] if restored else 0
        self.epochs_done = restored.epochs_done if restored else 0
        self.step = restored.step if restored else 0
        self.saved_step = self.step
        self._epoch_logs: dict[str, float] | None = (
            restored.state["epoch_logs"] if restored else None
        )
        self._epoch_metrics: list | None = None

    def on_train_begin(self, logs=None):
        """Makes up for a best checkpoint whose copy was cut off."""
        if self.step and self.best_epoch == self.epochs_done:
            self._copy_best()

    def on_epoch_begin(self, epoch, logs=None):
        """A new epoch has no metrics yet."""
        super().on_epoch_begin(epoch)
        if self.step <= epoch * self.steps_per_epoch:
            self._epoch_logs = None
        self._epoch_metrics = None

    def on_step_end(self, step, logs):
        """Saves where it is due; the last step of an epoch waits for the validation."""
        self._note_the_end_of_an_epoch()
        if self.asked_to_stop():
            raise Stopped
        if self.is_due(self.every) and self._epoch_logs is None:
            self.save()

    def _note_the_end_of_an_epoch(self) -> None:
        in_epoch = self.step - self.epoch * self.steps_per_epoch
        if in_epoch == self.steps_per_epoch or self.model.stop_training:
            results = self.model.get_metrics_result()
            self._epoch_logs = {name: float(value) for name, value in results.items()}
            self._epoch_metrics = MetricStates.of(self.model).read()  # before the validation's

    def reach(self, step: int) -> None:
        """Takes in a step of which a callback before this one was stopped while evaluating."""
        if step > self.step:
            self.step = step
            self._note_the_end_of_an_epoch()

    def on_test_batch_end(self, batch, logs=None):
        """Gives up an evaluation; a run that goes on does it again."""
        if self.asked_to_stop():
            raise Stopped

    def on_epoch_end(self, epoch, logs=None):
        """Saves the end of the epoch, and the best one."""
        self.epochs_done, self._epoch_logs = epoch + 1, None
        better = False
        if self.best is not None and self.best in (logs or {}):
            value = float(logs[self.best])
            better = self.best_value is None or _better(self.best, value, self.best_value)
            if better:
                self.best_value, self.best_epoch = value, epoch + 1
            elif self.patience and epoch + 1 - self.best_epoch >= self.patience:
                log.info(
                    "epoch %d: no better %s than %.4f of epoch %d: the run ends early",
                    *(epoch + 1, self.best, self.best_value, self.best_epoch),
                )
                self.model.stop_training = True
        self.save(finished=self.model.stop_training or self.step >= self.total_steps)
        if better:
            self._copy_best()

    def _copy_best(self) -> None:
        source, target = self.folder / _name(self.step), self.folder.parent / "best"
        if not self.is_chief or (target.exists() and read(target).step == self.step):
            return
        try:
            _copy_aside(source, target)
        except OSError as fault:
            raise CannotSave(
                f"the best checkpoint cannot be copied to {target}: {fault}; it is still {source}"
            ) from fault

    def newest_name(self) -> str | None:
        """The path of the newest checkpoint, or None."""
        found = sorted(_all(self.folder))
        return str(found[-1]) if found else None

    def save(self, finished: bool = False) -> None:
        """Writes a checkpoint of this very moment.

        Args:
            finished: no step will follow.

        Raises:
            CannotSave: the disk is full or the folder not writable.
        """
        # Metrics are read by all workers together.
        metrics = self._epoch_metrics or MetricStates.of(self.model).read()
        seeds = [keras.ops.convert_to_numpy(v).tolist() for v in dropout_seeds(self.model)]
        self.saved_step = self.step
        if not self.is_chief:
            return
        state = {
            "step": self.step,
            "epochs_done": self.epochs_done,
            "in_epoch": 0
            if self.epochs_done > self.epoch
            else self.step - self.epochs_done * self.steps_per_epoch,
            "finished": finished,
            "metrics": metrics,
            "epoch_logs": self._epoch_logs,
            "dropout_seeds": seeds,
            "best": self.best_value,
            "best_epoch": self.best_epoch,
            "callbacks": {name: c.get_state() for name, c in self.with_state.items()},
        }
        target = self.folder / _name(self.step)
        temporary = self.folder / f".{target.name}.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(".step-*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir()
            self.model.save_weights(temporary / WEIGHTS)
            (temporary / STATE).write_text(json.dumps(state))
            sums = "".join(f"{_sha256(temporary / n)}  {n}\n" for n in (WEIGHTS, STATE))
            (temporary / SUMS).write_text(sums)
            for name in (WEIGHTS, STATE, SUMS):
                _sync(temporary / name)
            _sync(temporary)
            replaced = None
            if target.exists():  # the end of an epoch whose last step was saved without validation
                replaced = self.folder / f".{target.name}.{os.getpid()}.old"
                os.rename(target, replaced)
            os.rename(temporary, target)
            _sync(self.folder)
            if replaced is not None:
                shutil.rmtree(replaced, ignore_errors=True)
        except OSError as fault:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CannotSave(
                f"the checkpoint of step {self.step} cannot be written to {self.folder}: {fault}; "
                f"the last good one is {self.newest_name() or 'not there'}"
            ) from fault
        for old in sorted(_all(self.folder))[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _better(metric: str, value: float, best: float) -> bool:
    return value > best if "accuracy" in metric else value < best


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy_aside(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(temporary, target)
    shutil.rmtree(old, ignore_errors=True)
