"""Evaluates every N steps: `--validate-every` and `--test-every`."""

import contextlib
from collections.abc import Callable, Sequence

import keras

from callbacks.checkpoint import read_states, write_states
from callbacks.errors import Stopped
from callbacks.records import Records
from callbacks.steps import StepCallback
from distribution.metric_states import MetricStates


class EvaluateEvery(StepCallback):
    """Evaluates on a split every N steps, without disturbing the epoch's own metrics.

    If the run is asked to stop meanwhile, the evaluation ends; the resumed run repeats it.

    Args:
        records: records the metrics, under the split's name.
        data: batches of the split, or a tuple of arrays as that of `validation_data`.
        split: "validation" or "test".
        every: steps between two evaluations; None for no evaluation.
        callbacks: callbacks of `evaluate()`; one of them raises `Stopped` to stop the run.

    Attributes:
        then: called with the step and the metrics by name, on all workers; None for nothing.
    """

    def __init__(
        self,
        records: Records,
        data,
        split: str,
        every: int | None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ):
        super().__init__()
        self.records = records
        self.data = data
        self.split = split
        self.every = every
        self.callbacks = callbacks
        self.then: Callable[[int, dict[str, float]], None] | None = None
        self._owed = False

    def get_state(self) -> dict:
        """Returns whether the evaluation of this step was interrupted."""
        return {"owed": self._owed}

    def set_state(self, state: dict) -> None:
        """Restores the state."""
        self._owed = state["owed"]

    def on_train_begin(self, logs=None):
        """Repeats an interrupted evaluation, with the weights of its step."""
        if self._owed:
            self._evaluate()

    def on_step_end(self, step, logs):
        """Evaluates if it is due; `Checkpoint`, which comes later, stops the run."""
        if self.is_due(self.every):
            with contextlib.suppress(Stopped):
                self._evaluate()

    def _evaluate(self) -> None:
        states = MetricStates.of(self.model)
        of_the_epoch, of_the_model = states.read(), read_states(self.model)
        self._owed = True
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self.data)
        try:
            numbers = self.model.evaluate(
                x,
                y,
                sample_weight=sample_weight,
                verbose=0,
                return_dict=True,
                callbacks=list(self.callbacks),
            )
        except Stopped:
            write_states(self.model, of_the_model)  # it is repeated
            raise
        finally:
            states.write(of_the_epoch)
        self._owed = False
        numbers = {name: float(value) for name, value in numbers.items()}
        self.records.record_evaluation(self.split, self.step, numbers)
        if self.then is not None:
            self.then(self.step, numbers)
