"""Saves checkpoints and resumes from them, bit for bit, at the next batch.

A checkpoint is a folder, `step-00000500`. It contains

- `model.weights.h5`, as Keras writes it: the weights; the optimizer with its moments, its step
  counter and, in half precision, the loss scale and the scale's own step counter;
- `state.json`:
  - `step`, `epochs_done`, `steps_into_epoch`, `finished`: the progress of the run;
  - `stop_training`: whether a callback has ended the run before its last step;
  - `dropout_seeds`, `global_seed`, `layer_states`: the states of the model's seed generators, of
    Keras's global one, and of stateful layers, which Keras's file lacks;
  - `metrics`: the sums of the epoch's metrics per replica, before the validation; of a whole epoch
    those after it, since a metric may keep something from one epoch to the next;
  - `best`, `best_epoch`, `best_metric` ...: values of `--keep-best`, and `best_since`, the first
    epoch that they compare, as the option may be added to a run that resumes;
  - `fingerprint`: shapes of the weights, optimizer and first batches, and what `compile()` and
    `fit(class_weight=...)` got, compared when the run resumes;
  - `callbacks`: the `get_state()` of each callback, such as the history and the lengths of
    `metrics.jsonl` and TensorBoard's files;
  - `averages`: whether the optimizer averages the weights, which are then those before the average;
- `adapters.weights.h5`, of a model with Keras's low-rank adapters: the variables of their layers
  as they are, which Keras's file has merged;
- `SHA256SUMS`: checksums of all of them, which reveal a damaged checkpoint.

It is written under another name, synced, and renamed. The data need no state: a batch is a function
of seed and step.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import keras

from callbacks import averages
from callbacks.errors import Stopped, saving
from callbacks.metric_direction import direction
from callbacks.records import epochs_of
from callbacks.steps import StepCallback
from callbacks.terminal_log import RESULT
from data import files
from data.files import STATE, WEIGHTS
from distribution.keras_compat import adapters, fitting, inspection, randomness
from distribution.metric_states import MetricStates
from distribution.step import flat_results

log = logging.getLogger("recipes")

NAME = re.compile(r"step-\d{8,}")  # of a checkpoint; a user's copy or archive has another one


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """Describes a checkpoint on disk.

    Attributes:
        folder: its folder.
        step: updates of the weights so far.
        epochs_done: completed epochs, validation included.
        steps_into_epoch: updates of the weights in the current epoch.
        state: the content of `state.json`.
    """

    folder: Path
    step: int
    epochs_done: int
    steps_into_epoch: int
    state: dict


def read(folder: Path) -> CheckpointInfo:
    """Reads a checkpoint without its weights, and without verifying it."""
    state = json.loads((folder / STATE).read_text())
    return CheckpointInfo(
        folder, state["step"], state["epochs_done"], state["steps_into_epoch"], state
    )


def newest(folder: Path, set_aside: bool = True) -> CheckpointInfo | None:
    """Returns the newest undamaged checkpoint; logs and sets aside damaged ones.

    Args:
        folder: a run's `checkpoints` folder, which need not exist.
        set_aside: rename damaged checkpoints to `damaged-...`, so that they are never read again.
            Only one process of a run may do so.
    """
    if set_aside:
        # A kill between the two renames that replace a checkpoint leaves the old one aside.
        for old in folder.glob(f".step-*{files.REPLACED}"):
            with contextlib.suppress(OSError):  # the new one exists
                old.rename(folder / old.stem[1:])
    candidates = _all(folder)
    while candidates:
        candidate = candidates.pop()
        error = files.damage(candidate, (WEIGHTS, STATE))
        if error is None:
            return read(candidate)
        instead = "the one before is used" if candidates else "no other one is left"
        log.warning("checkpoint %s is damaged (%s): %s", candidate, error, instead)
        if set_aside:
            aside = folder / f"damaged-{candidate.name}"
            shutil.rmtree(aside, ignore_errors=True)
            with contextlib.suppress(OSError):
                candidate.rename(aside)
    return None


def newest_path(folder: Path) -> str | None:
    """Returns the path of the newest checkpoint, or None."""
    paths = _all(folder)
    return str(paths[-1]) if paths else None


def _all(folder: Path) -> list[Path]:
    """Returns the checkpoints of a folder, which need not exist, oldest first."""
    paths = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))


def reopened(info: CheckpointInfo, steps_per_epoch: int) -> CheckpointInfo:
    """Returns the last checkpoint of a finished run as one from which training continues.

    The run may have ended within an epoch, which then continues and is logged when it is complete,
    also if a callback had ended it there.
    """
    epochs_done, into = divmod(info.step, steps_per_epoch)
    info.state.update(finished=False, stop_training=False)
    if into:
        records = info.state["callbacks"]["records"]
        epochs = {
            name: [epoch for epoch in each if epoch <= epochs_done]
            for name, each in epochs_of(records).items()
        }
        history = {name: v[: len(epochs[name])] for name, v in records["history"].items()}
        records.update(history=history, epochs=epochs)
    return dataclasses.replace(info, epochs_done=epochs_done, steps_into_epoch=into)


def write(
    target: Path, state: dict, save_weights: Callable[[Path], None], checkpoints: Path
) -> None:
    """Writes a checkpoint atomically: on an error, the old one is unchanged.

    Args:
        target: the checkpoint's folder, whose parent exists.
        state: JSON values, `step` among them.
        save_weights: writes the weights to a path.
        checkpoints: the folder whose newest checkpoint an error names.

    Raises:
        CannotSave: the disk is full, or the folder is gone or not writable.
    """
    last = newest_path(checkpoints) or "not there"
    with saving(f"the checkpoint {target}", f"; the last good one is {last}"):
        for left in target.parent.glob(".step-*"):  # left by a process that was killed
            files.remove(left)
        with files.atomic(target) as temporary:
            temporary.mkdir()
            save_weights(temporary / WEIGHTS)
            (temporary / STATE).write_text(json.dumps(state, default=files.json_value))
            files.write_checksums(temporary)


def dropout_seeds(model: keras.Model) -> list[keras.Variable]:
    """Returns the states of the model's seed generators."""
    return [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]


def _states(model: keras.Model, has_drawn: bool = False) -> dict[str, list[keras.Variable]]:
    """Returns the variables that a step changes and Keras's file lacks, by their names here."""
    found = {"dropout_seeds": dropout_seeds(model)}
    if model.distribute_strategy.num_replicas_in_sync == 1:  # several have no stateful layers
        found["global_seed"] = randomness.global_seed(create=has_drawn)
        found["layer_states"] = inspection.states_of_layers(model)
    return found


def read_states(model: keras.Model) -> dict[str, list]:
    """Returns the states of seed generators and of stateful layers, JSON."""
    return {
        name: [keras.ops.convert_to_numpy(v).tolist() for v in variables]
        for name, variables in _states(model).items()
    }


def write_states(model: keras.Model, states: dict) -> None:
    """Sets the states to those of `read_states()`; what they lack stays."""
    for name, variables in _states(model, bool(states.get("global_seed"))).items():
        # Fewer values: something was drawn, or a checkpoint of several replicas is resumed on one.
        for variable, value in zip(variables, states.get(name, []), strict=name == "dropout_seeds"):
            variable.assign(value)


class Checkpoint(StepCallback):
    """Saves every N steps, at each epoch's end, and when the run is asked to stop.

    Comes last among the callbacks, so that it saves the state of the others.

    Args:
        folder: the run's `checkpoints` folder; the best checkpoint is `../best`.
        every: steps between two checkpoints.
        keep: number of checkpoints to keep; older ones are removed.
        is_chief: only the chief writes; all workers read the metrics together.
        asked_to_stop: returns whether this process was asked to stop the run.
        on_any_worker: returns of each of several flags whether a worker has it, equally on all of
            them.
        check_loss: raises if the weights of this step must not be saved; called before the run
            stops after a step whose loss nothing has read.
        stateful_callbacks: callbacks whose `get_state()` is saved, by name.
        best: validation metric whose best checkpoint is also kept, or None.
        best_mode: "min" or "max", or "auto" to decide by the metric.
        patience: epochs without an improvement after which the run ends, or None. If set, the model
            has the best weights when `fit()` returns.
        fingerprint: values that a resumed run is compared with, JSON.
        restored: the checkpoint that this run resumes from, or None.

    Attributes:
        weights_step: the step of the model's weights after `fit()`, if it is not the last one.
        notes: warnings for `results.json`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int,
        keep: int = 5,
        is_chief: bool = True,
        asked_to_stop: Callable[[], bool] = lambda: False,
        on_any_worker: Callable[..., Sequence[bool]] = lambda *flags: flags,
        check_loss: Callable[[], None] = lambda: None,
        stateful_callbacks: dict[str, StepCallback] | None = None,
        best: str | None = None,
        best_mode: str = "auto",
        patience: int | None = None,
        fingerprint: dict | None = None,
        restored: CheckpointInfo | None = None,
    ):
        super().__init__()
        self.folder = folder
        self.every = every
        self.keep = keep
        self.is_chief = is_chief
        self.asked_to_stop, self.on_any_worker = asked_to_stop, on_any_worker
        self.check_loss = check_loss
        self.stateful_callbacks = stateful_callbacks or {}
        self.best, self.best_mode = best, best_mode
        self.patience = patience
        self.fingerprint = fingerprint
        self.best_value: float | None = None
        self.epochs_done = restored.epochs_done if restored else 0
        self.best_epoch = self.epochs_done
        self.best_since = self.epochs_done + 1
        self.best_step: int | None = None
        self._direction: str | None = None  # in which `best_value` was the best
        if restored and restored.state["best_metric"] == best:
            self.best_value = restored.state["best"]
            self.best_epoch = restored.state["best_epoch"]
            self.best_since = restored.state.get("best_since", 1)
            self.best_step = restored.state["best_step"]
            self._direction = restored.state["best_direction"]
        records = restored.state["callbacks"].get("records", {}) if restored else {}
        self._values_before: list[float] = records.get("history", {}).get(best, [])
        self._epochs_with_value: list[int] = list(epochs_of(records).get(str(best), []))
        self.weights_step: int | None = None
        self.notes: list[str] = []
        # At the last step of an epoch; what draws in the validation, too, advances the seeds.
        self._epoch_metrics: list | None = None
        self._epoch_states: dict | None = None
        self._evaluated: tuple[int, dict[str, float]] | None = None  # step and metrics
        self.saved_step = restored.step if restored else 0

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Takes the metrics of a validation within an epoch (`EvaluateEvery`).

        Args:
            step: the step of the run.
            metrics: by name, without `val_`.
        """
        self._evaluated = step, metrics

    def on_train_begin(self, logs=None):
        """Keeps the weights of the last step if they are the best; its validation was repeated."""
        self._keep_best_of_the_step()

    def _keep_best_of_the_step(self) -> None:
        if self.best is None or self._evaluated is None:
            return
        (step, metrics), self._evaluated = self._evaluated, None
        name, is_last = self.best.removeprefix("val_"), step % self.steps_per_epoch == 0
        # The end of an epoch has a validation of its own.
        if name not in metrics or is_last or step >= self.total_steps or step != self.step:
            return
        if self._is_better(metrics[name], self.epochs_done + 1):
            self.save(is_best=True, is_regular=False)

    def on_epoch_begin(self, epoch, logs=None):
        """Clears the metrics of the last epoch; a run may resume after an epoch's last step."""
        super().on_epoch_begin(epoch)
        self._note_the_end_of_an_epoch()

    def on_step_end(self, step, logs):
        """Saves if it is due; the last step of an epoch is saved after the validation."""
        was_asked = self._agree_to_stop(self.asked_to_stop())
        self._note_the_end_of_an_epoch()
        if was_asked:
            self.check_loss()
            raise Stopped
        self._keep_best_of_the_step()
        if self.is_due(self.every) and self._epoch_metrics is None:
            self.save()

    def _agree_to_stop(self, asked: bool = False) -> bool:
        """Returns whether any worker was asked to stop; ends `fit()` where a callback of one did.

        A callback that reads its own clock may end it on one worker alone.
        """
        asked, ended = self.on_any_worker(asked, bool(self.model.stop_training))
        self.model.stop_training = ended
        return asked

    def _note_the_end_of_an_epoch(self) -> None:
        ends = self.step >= self.last_step_of_epoch() or self.model.stop_training
        # The validation overwrites the metrics.
        self._epoch_metrics = MetricStates.of(self.model).read() if ends else None
        self._epoch_states = read_states(self.model) if ends else None

    def save_stopped(self) -> None:
        """Saves a run that was stopped, unless its last step is saved already.

        A resumed run repeats the validation that was stopped, with the states from before it.
        """
        if self.saved_step != self.step:
            self.save(states=self._epoch_states)

    def on_epoch_end(self, epoch, logs=None):
        """Saves the end of the epoch, and the best one."""
        self._agree_to_stop()
        self.epochs_done = epoch + 1
        better = False
        if self.best in logs:
            self._epochs_with_value.append(self.epochs_done)
            better = self._is_better(float(logs[self.best]), self.epochs_done)
            self._end_early()
        if self.step % self.steps_per_epoch == 0:  # else an extended run resumes the epoch
            self._epoch_metrics = None
        self.save(self.model.stop_training or self.step >= self.total_steps, better)

    def _is_better(self, value: float, epoch: int) -> bool:
        before = self.best_value
        mode = direction(str(self.best), self.model, self.best_mode)
        is_other, self._direction = self._direction not in (None, mode), mode
        if before is None or is_other or (value > before if mode == "max" else value < before):
            if is_other:
                self.best_since = epoch
            self.best_value, self.best_epoch, self.best_step = value, epoch, self.step
            return True
        return False

    def _end_early(self) -> None:
        """Ends the run after `patience` epochs with a value, none of which is an improvement."""
        waited = sum(epoch > self.best_epoch for epoch in self._epochs_with_value)
        if self.patience and waited >= self.patience:
            log.info(
                "epoch %d: no better %s than %.4f of epoch %d: the run ends early",
                self.epochs_done,
                self.best,
                self.best_value,
                self.best_epoch,
            )
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        """Restores the best weights if `patience` is set: they are tested and saved."""
        if self.best_value is None:
            return
        self._note_a_better_epoch(self.best_value)
        if self.patience is None:
            return
        # By its step: a run that ended within an epoch may have been extended to its end.
        if self.best_step != self.step:
            best = self._best_checkpoint()
            if best is None:
                return
            adapters.load_weights(self.model, best / WEIGHTS)
            # With averaged weights (`use_ema`), the average is what is tested and saved.
            self.model.optimizer.finalize_variable_values(self.model.trainable_variables)
            self.weights_step = read(best).step
        within = self.weights_step is not None and (self.best_step or 0) % self.steps_per_epoch
        compared = f"epochs {self.best_since} to {self.epochs_done}"
        log.log(
            RESULT,
            "%-14s of %sepoch %d, the best of %s (%s %.4f)",
            "weights",
            f"step {self.best_step} in " if within else "",
            self.best_epoch,
            compared if self.best_since > 1 else self.epochs_done,
            self.best,
            self.best_value,
        )

    def _note_a_better_epoch(self, best_value: float) -> None:
        """Notes a better epoch from before `--keep-best` was added: its weights are gone."""
        sign = -1 if self._direction == "max" else 1
        pairs = zip(self._values_before, self._epochs_with_value, strict=False)
        before = [(sign * value, epoch) for value, epoch in pairs if epoch < self.best_since]
        value, epoch = min(before, default=(math.inf, 0))
        if value < sign * best_value:
            self.notes.append(
                f"epoch {epoch} had a better {self.best} ({sign * value:.4f}) "
                f"than the best weights, those of epoch {self.best_epoch}: --keep-best was added "
                f"or changed after epoch {self.best_since - 1}"
            )
            log.warning("%s", self.notes[-1])

    def _best_checkpoint(self) -> Path | None:
        """Returns the best checkpoint, or another one of its step; None if both are damaged.

        A worker that cannot read one keeps all others from it, too.
        """
        best = self.folder.parent / "best"
        damage = files.damage(best, (WEIGHTS, STATE))
        if damage is None and self.best_step != read(best).step:
            damage = f"of step {read(best).step}, not {self.best_step}"
        if not any(self.on_any_worker(damage is not None)):
            return best
        damage = damage or "on another worker"
        other = self.folder / f"step-{self.best_step or 0:08d}"
        if not any(self.on_any_worker(files.damage(other, (WEIGHTS, STATE)) is not None)):
            log.warning("%s is damaged (%s): %s is used", best, damage, other)
            return other
        self.notes.append(f"{best} is damaged ({damage}): the last weights are kept")
        log.warning("%s", self.notes[-1])
        return None

    def save(
        self,
        finished: bool = False,
        is_best: bool = False,
        states: dict | None = None,
        is_regular: bool = True,
    ) -> None:
        """Writes a checkpoint of the current step.

        Args:
            finished: whether this is the last step.
            is_best: write it to `best` too.
            states: of `read_states()`, if not the current ones.
            is_regular: write it to the run's checkpoints.

        Raises:
            CannotSave: the disk is full or the folder not writable.
        """
        # A collective read: all workers take part.
        metrics = self._epoch_metrics or MetricStates.of(self.model).read()
        states = states or read_states(self.model)
        if is_regular:
            self.saved_step = self.step
        if not self.is_chief:
            return
        state = {
            "step": self.step,
            "epochs_done": self.epochs_done,
            "steps_into_epoch": max(0, self.step - self.epochs_done * self.steps_per_epoch),
            "finished": finished,
            "stop_training": self.step < self.total_steps and bool(self.model.stop_training),
            "metrics": metrics,
            **states,
            "best": self.best_value,
            "best_epoch": self.best_epoch,
            "best_since": self.best_since,
            "best_step": self.best_step,
            "best_metric": self.best,
            "best_direction": self._direction,
            "fingerprint": self.fingerprint,
            "callbacks": {name: c.get_state() for name, c in self.stateful_callbacks.items()},
            "averages": averages.has_averages(self.model),
        }
        with saving(self.folder):
            # Not its parents: the run's folder may have been removed.
            self.folder.mkdir(exist_ok=True)
        save_weights = functools.partial(adapters.save_weights, self.model)
        # The best one first: a run that is killed between the two writes both again.
        if is_best:
            write(self.folder.parent / "best", state, save_weights, self.folder)
        if not is_regular:
            return
        write(self.folder / f"step-{self.step:08d}", state, save_weights, self.folder)
        for old in _all(self.folder)[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)


class Restore(StepCallback):
    """Restores a checkpoint when `fit()` begins. Comes first among the callbacks.

    `fit()` needs `initial_epoch=info.epochs_done`, data that start at the next batch, and a model
    that `keras_compat.fitting.build` has built.

    Args:
        info: the checkpoint, or None to do nothing.
        stateful_callbacks: the argument of `Checkpoint` with this name.
    """

    def __init__(self, info: CheckpointInfo | None, stateful_callbacks: dict[str, StepCallback]):
        super().__init__()
        self.info = info
        self.stateful_callbacks = stateful_callbacks
        self._epoch_logs: dict[str, float] = {}

    def on_train_begin(self, logs=None):
        """Loads weights, optimizer, seeds, layers', metrics' and callbacks' states."""
        if self.info is None:
            return
        adapters.load_weights(self.model, self.info.folder / WEIGHTS)
        write_states(self.model, self.info.state)
        metrics = MetricStates.of(self.model)
        if self.info.steps_into_epoch == 0 and metrics.fit(self.info.state["metrics"]):
            metrics.write(self.info.state["metrics"])  # Keras resets them when the epoch begins
        states = self.info.state["callbacks"]
        for name, callback in self.stateful_callbacks.items():
            if name in states:  # a new callback has no state
                callback.set_state(states[name])

    def on_epoch_begin(self, epoch, logs=None):
        """Restores the metrics and the position of an unfinished epoch."""
        super().on_epoch_begin(epoch)
        info = self.info
        self._epoch_logs = {}
        if info is None or epoch != info.epochs_done or info.steps_into_epoch == 0:
            return
        MetricStates.of(self.model).write(info.state["metrics"])
        done = info.steps_into_epoch
        ended = info.state["stop_training"]
        if ended or info.step >= self.last_step_of_epoch():
            # Only the validation is left; Keras then has no metrics to log.
            results = flat_results(self.model.get_metrics_result())
            self._epoch_logs = {name: float(value) for name, value in results.items()}
            done = self.steps_per_epoch  # also where the run ends in mid-epoch
        self.model.stop_training = ended
        fitting.start_in_mid_epoch(done)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the metrics of an epoch that was stopped after its last step."""
        if self._epoch_logs:
            merged = self._epoch_logs | logs
            logs.clear()
            logs.update(sorted(merged.items()))  # in Keras's order
