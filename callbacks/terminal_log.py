"""Logs the run's records as readable lines."""

import logging
from collections.abc import Iterable

from callbacks.steps import StepCallback
from callbacks.throughput import Throughput, is_speed

log = logging.getLogger("recipes")

# The level of a run's results, which --quiet shows too.
RESULT = logging.INFO + 5

COLUMNS = 80  # of an epoch's line
SPACE = "  "  # between two numbers


class TerminalLog(StepCallback):
    """Logs each record in one line, an epoch in one or more.

    Args:
        throughput: estimates the remaining time.
    """

    def __init__(self, throughput: Throughput):
        super().__init__()
        self.throughput = throughput
        self._trained = False  # an evaluation after the training is a result

    def on_train_begin(self, logs=None):
        """Logs the format of an epoch's line."""
        if self.step < self.total_steps:
            log.info("after each epoch: training | validation")

    def on_record(self, record: dict) -> None:
        """Logs a record."""
        step = record["step"]
        if record["event"] == "step":
            parts = [
                f"step {step}/{self.total_steps}",
                f"loss {format_loss(record['loss'])}",
                f"learning rate {record['learning_rate']:.3g}",
            ]
            parts += speed_of(record)
            seconds = self.throughput.seconds_for(self.total_steps - step)
            if seconds is not None:
                parts.append(f"{format_seconds(seconds)} left")
            log.info("%s", "  ".join(parts))
        elif record["event"] == "epoch":
            for line in format_epoch(record):
                log.info("%s", line)
        else:
            level = RESULT if self._trained else logging.INFO
            metrics = metrics_of(record)
            names = loss_first(metrics)
            line = "  ".join(f"{name} {format_number(metrics[name])}" for name in names)
            log.log(level, "step %d  %s  %s", step, record["split"], line)

    def on_train_end(self, logs=None):
        """Marks all further records as results."""
        self._trained = True


def speed_of(numbers: dict) -> list[str]:
    """Returns tokens per second, or examples per second without tokens; empty if not measured."""
    for unit in ("tokens", "examples"):
        if f"{unit}_per_second" in numbers:
            return [f"{numbers[f'{unit}_per_second']:,.0f} {unit}/s"]
    return []


def loss_first(names: Iterable[str]) -> list[str]:
    """Returns names of metrics in their order, with the loss before all others."""
    return sorted(names, key=lambda name: name != "loss")


def format_epoch(record: dict) -> list[str]:
    """Returns an epoch's metrics, training | validation, and its rate, as lines of 80 columns."""
    train, valid = metrics_of(record), metrics_of(record, "val_")
    epoch = f"epoch {record['epoch']}"
    parts = []
    for name in loss_first(train | valid):
        numbers = [format_number(part.get(name)) for part in (train, valid) if part]
        parts.append(f"{name} {' | '.join(numbers)}")
    if "learning_rate" in record:
        parts.append(f"lr {record['learning_rate']:.3g}")
    lines = [epoch]
    for part in parts:
        if len(lines[-1]) + len(SPACE + part) > COLUMNS:
            lines.append(" " * len(epoch))
        lines[-1] += SPACE + part
    return lines


def metrics_of(record: dict, prefix: str = "") -> dict[str, float]:
    """Returns the metrics of a record that have a prefix, by name without it.

    The loss is left out if there is a cross-entropy: both are equal up to weight penalties and the
    way in which Keras averages over batches.
    """
    not_metrics = ["learning_rate"]
    if "cross_entropy" in record:
        not_metrics.append(f"{prefix}loss")
    return {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if isinstance(value, float)
        and name.startswith("val_") == bool(prefix)
        and name not in not_metrics
        and not is_speed(name)
    }


def format_loss(value: float) -> str:
    """Formats a loss with four decimals, or as 1.234e+09 if it is very large."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}"


def format_number(value: float | None) -> str:
    """Formats a number with four decimals, two if it is large, or as 1.234e+09; None as a dash."""
    if value is None:
        return "-"
    if abs(value) >= 1e6:
        return f"{value:.3e}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.2f}"


def format_seconds(seconds: float) -> str:
    """Formats a duration: seconds below two minutes, minutes above."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
