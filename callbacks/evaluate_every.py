"""Evaluates on a split in mid-epoch, without disturbing the epoch's own metrics."""

import keras

from callbacks.records import Records
from callbacks.steps import StepCallback
from distribution.global_batch import MetricStates


class EvaluateEvery(StepCallback):
    """Calls `evaluate()` every so many steps and records the metrics under the split's name.

    The values are those of a separate `evaluate()` on the same weights. The metrics of the running
    epoch are put back afterwards. An evaluation that a stop cut off is made up for when the run
    resumes.

    Args:
        records: where the numbers go.
        data: batches of the split.
        split: "validation" or "test": TensorBoard's run.
        every: steps between two evaluations; None for never.
        callbacks: what `evaluate()` gets, for instance one that may stop it.
    """

    def __init__(self, records: Records, data, split: str, every: int | None, callbacks=()):
        super().__init__()
        self.records = records
        self.data = data
        self.split = split
        self.every = every
        self.callbacks = callbacks
        self._evaluated = 0

    def get_state(self) -> dict:
        """The step of the last evaluation."""
        return {"evaluated": self._evaluated}

    def set_state(self, state: dict) -> None:
        """Takes it back."""
        self._evaluated = state.get("evaluated", 0)

    def catch_up(self):
        """Makes up for an evaluation that was cut off."""
        if self.every and self._evaluated < self.step // self.every * self.every:
            self._evaluate(self.step)

    def on_step_end(self, step, logs):
        """Evaluates where it is due."""
        if self.is_due(self.every):
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        numbers = evaluate_aside(self.model, self.data, list(self.callbacks))
        self._evaluated = step
        self.records.record_evaluation(self.split, step, numbers)


def evaluate_aside(model: keras.Model, data, callbacks: list) -> dict[str, float]:
    """`model.evaluate(data)` that leaves the model's metrics as they were."""
    states = MetricStates.of(model)
    kept = states.read()
    try:
        logs = model.evaluate(data, verbose=0, return_dict=True, callbacks=callbacks)
    finally:
        states.write(kept)
    return {name: float(value) for name, value in logs.items()}
