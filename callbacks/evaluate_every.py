"""Evaluates on a split in mid-epoch, without disturbing the epoch's own metrics."""

import logging

import keras

from callbacks.run_log import RunLog, with_perplexity
from callbacks.steps import StepCallback
from distribution.metric_states import MetricStates

log = logging.getLogger("recipes")


class EvaluateEvery(StepCallback):
    """Calls `evaluate()` every so many steps and logs the metrics under the split's name.

    The values are those of a separate `evaluate()` on the same weights. The metrics of the running
    epoch are put back afterwards. An evaluation that a stop cut off is made up for when the run
    goes on.

    Args:
        run_log: where the numbers go.
        data: batches of the split.
        split: "validation" or "test": TensorBoard's run.
        every: steps between two evaluations; None for never.
        callbacks: what `evaluate()` gets, for instance one that may stop it.
    """

    def __init__(self, run_log: RunLog, data, split: str, every: int | None, callbacks=()):
        super().__init__(run_log.steps_per_epoch, run_log.total_steps)
        self.run_log = run_log
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
        numbers = with_perplexity(numbers, self.run_log.perplexity_of)
        self.run_log.record("evaluation", step, {"split": self.split, **numbers}, self.split)
        values = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        log.info("step %d  %s  %s", step, self.split, values)


def evaluate_aside(model: keras.Model, data, callbacks: list) -> dict[str, float]:
    """`model.evaluate(data)` that leaves the model's metrics as they were."""
    states = MetricStates.of(model)
    kept = states.read()
    try:
        logs = model.evaluate(data, verbose=0, return_dict=True, callbacks=callbacks)
    finally:
        states.write(kept)
    return {name: float(value) for name, value in logs.items()}
