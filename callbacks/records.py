"""The run's records of steps, epochs and evaluations, for whoever shows or keeps them."""

import math
from collections.abc import Sequence

from callbacks.learning_rate import used_learning_rate
from callbacks.steps import StepCallback, StepLoss
from callbacks.throughput import Throughput
from distribution.optimizers import gradient_norm


class Records(StepCallback):
    """Makes a record of every so many steps, of each epoch and of each evaluation.

    A record is a dict with `event` ("step", "epoch" or "evaluation"), `step` (of the run), `epoch`
    (counted from 1) and numbers. Each listener's `on_record(record)` is called with each of them.

    Args:
        listeners: what keeps or shows the records: `MetricsFile`, `TensorBoard`, `TerminalLog`.
        throughput: measures the speed; stands before this among the callbacks.
        log_every: steps between two records.
        perplexity_of: name of a cross-entropy whose exponential is recorded beside it, or None.

    Attributes:
        history: one list per metric, a number an epoch.
    """

    def __init__(
        self,
        listeners: Sequence,
        throughput: Throughput,
        log_every: int = 50,
        perplexity_of: str | None = None,
    ):
        super().__init__()
        self.listeners = list(listeners)
        self.throughput = throughput
        self.log_every = log_every
        self.perplexity_of = perplexity_of
        self.history: dict[str, list[float]] = {}
        self._loss = StepLoss()

    def get_state(self) -> dict:
        """The history and the open window of the step loss."""
        return {"history": self.history, "loss": [self._loss.steps, self._loss.mean]}

    def set_state(self, state: dict) -> None:
        """Takes them back."""
        self.history = {name: list(values) for name, values in state["history"].items()}
        self._loss.steps, self._loss.mean = state["loss"]

    def on_step_end(self, step, logs):
        """Records a step where it is due."""
        if not (self.is_due(self.log_every) or step == self.total_steps):
            return
        into_epoch = step - self.epoch * self.steps_per_epoch
        numbers = {
            "loss": self._loss.since_last(into_epoch, float(logs["loss"])),
            "learning_rate": used_learning_rate(self.model.optimizer),
        }
        norm = gradient_norm(self.model.optimizer)
        if norm is not None:
            numbers["gradient_norm"] = norm
        self._record("step", step, numbers | self.throughput.since_last())

    def on_epoch_end(self, epoch, logs=None):
        """Records the metrics of the epoch, and keeps them in `history`."""
        numbers = self.with_perplexity({k: float(v) for k, v in (logs or {}).items()})
        for name, value in numbers.items():
            self.history.setdefault(name, []).append(value)
        self._record("epoch", self.step, numbers | self.throughput.total())

    def record_evaluation(self, split: str, step: int, numbers: dict[str, float]) -> None:
        """Records an evaluation.

        Args:
            split: "validation" or "test".
            step: the step of the run whose weights were evaluated.
            numbers: metrics by name.
        """
        self._record("evaluation", step, {"split": split} | self.with_perplexity(numbers))

    def _record(self, event: str, step: int, numbers: dict) -> None:
        record = {"event": event, "step": step, "epoch": self.epoch + 1, **numbers}
        for listener in self.listeners:
            listener.on_record(record)

    def with_perplexity(self, logs: dict[str, float]) -> dict[str, float]:
        """Adds `perplexity` and `val_perplexity`, the exponentials of the cross-entropies."""
        found = dict(logs)
        for prefix in ("", "val_"):
            if self.perplexity_of and f"{prefix}{self.perplexity_of}" in logs:
                found[f"{prefix}perplexity"] = perplexity(logs[f"{prefix}{self.perplexity_of}"])
        return found


def perplexity(cross_entropy: float) -> float:
    """exp(cross-entropy); infinite where that is too large for a float."""
    try:
        return math.exp(cross_entropy)
    except OverflowError:
        return math.inf
