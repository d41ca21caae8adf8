"""Saves checkpoints from which a run resumes at the very next batch, and keeps the best one."""

import logging
from collections.abc import Callable
from pathlib import Path

import keras

from callbacks import checkpoint_files
from callbacks.checkpoint_files import CheckpointInfo
from callbacks.errors import Stopped
from callbacks.metric_direction import direction
from callbacks.steps import StepCallback
from distribution.global_batch import MetricStates

log = logging.getLogger("recipes")


def dropout_seeds(model: keras.Model) -> list[keras.Variable]:
    """The states of the model's seed generators, which Keras's weights file does not hold."""
    return [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]


class Checkpoint(StepCallback):
    """Saves every so many steps and at each epoch's end, and when the run is asked to stop.

    Stands last among the callbacks, so that it saves what the others have logged.

    Args:
        folder: the run's `checkpoints` folder.
        every: steps between two checkpoints.
        keep: how many are kept; older ones are removed.
        is_chief: only the chief writes; all workers read the metrics together.
        asked_to_stop: tells, on all workers alike, whether the run shall stop.
        stateful_callbacks: callbacks whose `get_state()` belongs into a checkpoint, by name.
        best: metric of the validation split by which the best checkpoint is kept too, or None.
        best_mode: "min" or "max", or "auto" where the metric tells which is better.
        patience: epochs without a better one after which the run ends, or None.
        restored: the checkpoint that this run resumes from, or None.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int,
        keep: int = 5,
        is_chief: bool = True,
        asked_to_stop: Callable[[], bool] = lambda: False,
        stateful_callbacks: dict[str, StepCallback] | None = None,
        best: str | None = None,
        best_mode: str = "auto",
        patience: int | None = None,
        restored: CheckpointInfo | None = None,
    ):
        super().__init__()
        self.folder = Path(folder)
        self.every = every
        self.keep = keep
        self.is_chief = is_chief
        self.asked_to_stop = asked_to_stop
        self.stateful_callbacks = stateful_callbacks or {}
        self.best, self.best_mode = best, best_mode
        self.patience = patience
        self.best_value: float | None = None
        self.best_epoch = 0
        self.epochs_done = self.step = 0
        self._epoch_logs: dict[str, float] | None = None
        self._epoch_metrics: list | None = None
        if restored is not None:
            self._take_up(restored)
        self.saved_step = self.step

    def _take_up(self, restored: CheckpointInfo) -> None:
        state = restored.state
        self.epochs_done, self.step = restored.epochs_done, restored.step
        self._epoch_logs = state["epoch_logs"]
        if self.best is None:
            return
        self.best_value, self.best_epoch = state["best"], state["best_epoch"]
        if self.best_value is not None and state["best_metric"] != self.best:
            log.warning(
                "--keep-best: was %s, is now %s; what was best so far does not count any more",
                *(state["best_metric"], self.best),
            )
            self.best_value, self.best_epoch = None, self.epochs_done

    def on_train_begin(self, logs=None):
        """Makes up for a best checkpoint whose copy was cut off."""
        if self.best_value is not None:
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
        into_epoch = self.step - self.epoch * self.steps_per_epoch
        if into_epoch == self.steps_per_epoch or self.model.stop_training:
            results = self.model.get_metrics_result()
            self._epoch_logs = {name: float(value) for name, value in results.items()}
            self._epoch_metrics = MetricStates.of(self.model).read()  # before the validation's

    def save_stopped(self, step: int) -> None:
        """Saves a run that was stopped after this step, unless that step is saved already.

        Args:
            step: the last step that was trained; a callback before this one may have been stopped
                while it evaluated, and this one then has not heard of the step.
        """
        if step > self.step:
            self.step = step
            self._note_the_end_of_an_epoch()
        if self.saved_step != self.step or self.epochs_done <= self.epoch:
            self.save()

    def on_test_batch_end(self, batch, logs=None):
        """Gives up an evaluation; a run that resumes does it again."""
        if self.asked_to_stop():
            raise Stopped

    def on_epoch_end(self, epoch, logs=None):
        """Saves the end of the epoch, and the best one."""
        self.epochs_done, self._epoch_logs = epoch + 1, None
        better = False
        if self.best is not None and self.best in (logs or {}):
            value = float(logs[self.best])
            is_max = direction(self.best, self.model, self.best_mode) == "max"
            better = self.best_value is None or (
                value > self.best_value if is_max else value < self.best_value
            )
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
        step = min(self.best_epoch * self.steps_per_epoch, self.total_steps)
        source, target = self.folder / checkpoint_files.name_of(step), self.folder.parent / "best"
        if not self.is_chief or not source.exists():
            return
        if not checkpoint_files.is_copy_of(target, step):
            checkpoint_files.copy_as(source, target)

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
        into_epoch = self.step - self.epochs_done * self.steps_per_epoch
        state = {
            "step": self.step,
            "epochs_done": self.epochs_done,
            "steps_into_epoch": 0 if self.epochs_done > self.epoch else into_epoch,
            "finished": finished,
            "metrics": metrics,
            "epoch_logs": self._epoch_logs,
            "dropout_seeds": seeds,
            "best": self.best_value,
            "best_epoch": self.best_epoch,
            "best_metric": self.best,
            "callbacks": {name: c.get_state() for name, c in self.stateful_callbacks.items()},
        }
        checkpoint_files.write(self.folder, state, self.model.save_weights)
        checkpoint_files.prune(self.folder, self.keep)
