"""Goes on from a checkpoint: at the very next batch, as if nothing had happened."""

import keras

from callbacks.checkpoint import WEIGHTS, Saved, dropout_seeds
from callbacks.steps import StepCallback
from distribution import keras_compat
from distribution.metric_states import MetricStates


class Restore(keras.callbacks.Callback):
    """Puts a checkpoint back when `fit()` begins. Stands first among the callbacks.

    `fit()` gets `initial_epoch=saved.epochs_done`, data that begin at the next batch, and a model
    that `keras_compat.build` has built.

    Args:
        saved: the checkpoint, or None: then nothing is done.
        with_state: the callbacks that were given to `Checkpoint` as `with_state`, `run_log` among
            them.
    """

    def __init__(self, saved: Saved | None, with_state: dict[str, StepCallback]):
        super().__init__()
        self.saved = saved
        self.with_state = with_state

    def on_train_begin(self, logs=None):
        """Loads weights, optimizer, dropout seeds and the callbacks' states."""
        if self.saved is None:
            return
        self.model.load_weights(self.saved.folder / WEIGHTS)
        seeds = self.saved.state["dropout_seeds"]
        for variable, value in zip(dropout_seeds(self.model), seeds, strict=True):
            variable.assign(value)
        for name, callback in self.with_state.items():
            callback.step = self.saved.step
            callback.set_state(self.saved.state["callbacks"].get(name, {}))

    def on_epoch_begin(self, epoch, logs=None):
        """Puts back the metrics of the epoch that was under way, and where it stood.

        An evaluation that was cut off comes before the epoch goes on.
        """
        if self._is_under_way(epoch):
            MetricStates.of(self.model).write(self.saved.state["metrics"])
            for callback in self.with_state.values():
                callback.epoch = epoch
            for callback in self.with_state.values():
                callback.catch_up()
            # Behind the run's last step no batch follows, also where it lies within an epoch.
            log = self.with_state["run_log"]
            is_last = self.saved.step >= log.total_steps
            keras_compat.start_in_mid_epoch(log.steps_per_epoch if is_last else self.saved.in_epoch)

    def on_epoch_end(self, epoch, logs=None):
        """Gives the epoch its metrics where it was stopped behind its last step."""
        if self._is_under_way(epoch) and self.saved.state["epoch_logs"] and logs is not None:
            for name, value in self.saved.state["epoch_logs"].items():
                logs.setdefault(name, value)

    def _is_under_way(self, epoch: int) -> bool:
        return (
            self.saved is not None and epoch == self.saved.epochs_done and self.saved.in_epoch > 0
        )
