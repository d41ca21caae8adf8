"""Shows the run's records to a person: a progress bar on a terminal, lines of a log elsewhere."""

import logging
import math
import sys

import tqdm

from callbacks.steps import StepCallback
from callbacks.throughput import Throughput, is_speed

log = logging.getLogger("recipes")

# Lines that the progress bar already shows; a handler may leave them out while there is one.
SHOWN_BY_BAR = {"shown_by_bar": True}
WIDEST = 110  # columns
# The level of a run's results, which --quiet shows too.
RESULT = logging.INFO + 5


class TerminalLog(StepCallback):
    """Logs each record in a line, and keeps a progress bar where somebody watches.

    Args:
        throughput: tells how long the steps that are left will take.
        progress_bar: whether to draw a bar on standard output.
    """

    def __init__(self, throughput: Throughput, progress_bar: bool = False):
        super().__init__()
        self.throughput = throughput
        self.progress_bar = progress_bar
        self._bar: tqdm.tqdm | None = None
        self._trained = False  # an evaluation after the training is a result
        self._explained_columns = False

    def on_train_begin(self, logs=None):
        """Draws the bar; a resumed run's begins where the run does."""
        if self.progress_bar:
            self._bar = tqdm.tqdm(
                total=self.total_steps,
                initial=self.step,
                file=sys.stdout,
                dynamic_ncols=True,
                leave=False,
                bar_format="{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def on_step_end(self, step, logs):
        """Moves the bar."""
        if self._bar is not None:
            self._bar.set_description(f"epoch {self.epoch + 1}", refresh=False)
            speed = self._speed(step, self.throughput.total())
            parts = [f"loss {float(logs['loss']):.4f}", *speed]
            self._bar.set_postfix_str(" ".join(parts), refresh=False)
            self._bar.update(step - self._bar.n)

    def on_record(self, record: dict) -> None:
        """Logs one line."""
        step = record["step"]
        if record["event"] == "step":
            parts = [
                f"step {step}/{self.total_steps}",
                f"loss {record['loss']:.4f}",
                f"learning rate {record['learning_rate']:.3g}",
                *self._speed(step, record),
            ]
            log.info("%s", "  ".join(parts), extra=SHOWN_BY_BAR)
        elif record["event"] == "epoch":
            if not self._explained_columns:
                log.info("after each epoch: training | validation")
                self._explained_columns = True
            for line in format_epoch(record):
                log.info("%s", line)
        else:
            level = RESULT if self._trained else logging.INFO
            metrics = "  ".join(f"{k} {format_number(v)}" for k, v in metrics_of(record).items())
            log.log(level, "step %d  %s  %s", step, record["split"], metrics)

    def _speed(self, step: int, numbers: dict) -> list[str]:
        parts = []
        for unit in ("examples", "tokens"):
            if f"{unit}_per_second" in numbers:
                parts = [f"{numbers[f'{unit}_per_second']:,.0f} {unit}/s"]
        seconds = self.throughput.seconds_for(self.total_steps - step)
        return parts if seconds is None else [*parts, f"{format_seconds(seconds)} left"]

    def on_train_end(self, logs=None):
        """Removes the bar."""
        self._trained = True
        self.close()

    def close(self) -> None:
        """Removes the bar, also after an error."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def format_epoch(record: dict) -> list[str]:
    """Returns an epoch's metrics, training | validation, in lines that fit, and the rate."""
    train, valid = metrics_of(record), metrics_of(record, "val_")
    if "loss" in train | valid:  # of both, or of none
        for part, name in ((train, "loss"), (valid, "val_loss")):
            part.update({"loss": record[name]} if name in record else {})
    items = []
    for name in sorted(train | valid, key="loss".__ne__):
        numbers = [format_number(part.get(name)) for part in (train, valid) if part]
        items.append(f"{name} {' | '.join(numbers)}")
    if "learning_rate" in record:
        items.append(f"lr {record['learning_rate']:.3g}")
    begin = f"epoch {record['epoch']}"
    lines = [begin]
    for item in items:
        if len(lines[-1]) + 2 + len(item) > WIDEST:
            lines.append(" " * len(begin))
        lines[-1] += f"  {item}"
    return lines


def metrics_of(record: dict, prefix: str = "") -> dict[str, float]:
    """Returns the metrics of a record by name, those with a prefix; a loss comes first.

    It is left out beside a cross-entropy that it equals but for the way in which Keras takes the
    mean over batches; that of an evaluation, in which a short last batch counts like a full one,
    beside any.
    """
    numbers = {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if isinstance(value, float)
        and name.startswith("val_") == bool(prefix)
        and name != "learning_rate"
        and not is_speed(name)
    }
    evaluated = prefix or record["event"] == "evaluation"
    loss = numbers.pop("loss", None)
    known = numbers.get("cross_entropy")
    if loss is None:
        return numbers
    if known is not None and (evaluated or math.isclose(loss, known, rel_tol=0.02)):
        return numbers
    return {"loss": loss} | numbers


def format_number(value: float | None) -> str:
    """Returns four decimals, fewer where the number is large; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.{2 if abs(value) < 1000 else 0}f}"


def format_seconds(seconds: float) -> str:
    """Returns seconds below two minutes, minutes above."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
