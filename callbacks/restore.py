"""Resumes from a checkpoint: at the very next batch, as if nothing had happened."""

import keras

from callbacks.checkpoint import dropout_seeds
from callbacks.checkpoint_files import WEIGHTS, CheckpointInfo
from callbacks.steps import StepCallback
from distribution import keras_compat
from distribution.global_batch import MetricStates


class Restore(StepCallback):
    """Puts a checkpoint back when `fit()` begins. Stands first among the callbacks.

    `fit()` gets `initial_epoch=info.epochs_done`, data that begin at the next batch, and a model
    that `keras_compat.build` has built.

    Args:
        info: the checkpoint, or None: then nothing is done.
        stateful_callbacks: the callbacks that `Checkpoint` was given under this name.
    """

    def __init__(
        self, info: CheckpointInfo | None, stateful_callbacks: dict[str, keras.callbacks.Callback]
    ):
        super().__init__()
        self.info = info
        self.stateful_callbacks = stateful_callbacks

    def on_train_begin(self, logs=None):
        """Loads weights, optimizer, dropout seeds and the callbacks' states."""
        if self.info is None:
            return
        self.model.load_weights(self.info.folder / WEIGHTS)
        seeds = self.info.state["dropout_seeds"]
        for variable, value in zip(dropout_seeds(self.model), seeds, strict=True):
            variable.assign(value)
        states = self.info.state["callbacks"]
        for name, callback in self.stateful_callbacks.items():
            callback.step = self.info.step
            # The epoch of that step: after the run's last one no epoch begins.
            callback.epoch = max(self.info.step - 1, 0) // self.steps_per_epoch
            if name in states:  # a callback that is new has none
                callback.set_state(states[name])

    def on_epoch_begin(self, epoch, logs=None):
        """Puts back the metrics of the epoch that was under way, and where it stood.

        An evaluation that was cut off comes before the epoch continues.
        """
        info = self._under_way(epoch)
        if info is not None:
            MetricStates.of(self.model).write(info.state["metrics"])
            for callback in self.stateful_callbacks.values():
                callback.epoch = epoch
            for callback in self.stateful_callbacks.values():
                if isinstance(callback, StepCallback):
                    callback.catch_up()
            # After the run's last step no batch follows, also where it lies within an epoch.
            is_last = info.step >= self.total_steps
            keras_compat.start_in_mid_epoch(
                self.steps_per_epoch if is_last else info.steps_into_epoch
            )

    def on_epoch_end(self, epoch, logs=None):
        """Gives the epoch its metrics where it was stopped after its last step."""
        info = self._under_way(epoch)
        if info is not None and info.state["epoch_logs"] and logs is not None:
            for name, value in info.state["epoch_logs"].items():
                logs.setdefault(name, value)

    def _under_way(self, epoch: int) -> CheckpointInfo | None:
        """The checkpoint if it was taken within this epoch."""
        info = self.info
        if info is None or epoch != info.epochs_done or info.steps_into_epoch == 0:
            return None
        return info
