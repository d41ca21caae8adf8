"""Shows the run's records to a person: a progress bar on a terminal, lines of a log elsewhere."""

import logging
import math
import sys

import tqdm

from callbacks.steps import StepCallback
from callbacks.throughput import Throughput, is_speed

log = logging.getLogger("recipes")

# Lines that the progress bar already tells; a handler may leave them out while there is one.
SHOWN_BY_BAR = {"shown_by_bar": True}
WIDEST = 100  # columns
# The level of a run's results, which --quiet shows too.
RESULT = logging.INFO + 5


class TerminalLog(StepCallback):
    """Logs each record in a line, and keeps a progress bar where somebody looks at it.

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
        self._told_columns = False

    def on_train_begin(self, logs=None):
        """Draws the bar; a resumed run's begins where the run does."""
        if self.progress_bar:
            self._bar = tqdm.tqdm(
                total=self.total_steps,
                initial=self.step,
                file=sys.stdout,
                unit=" steps",
                dynamic_ncols=True,
                leave=False,
                bar_format="{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def on_step_end(self, step, logs):
        """Moves the bar."""
        if self._bar is not None:
            self._bar.set_description(f"epoch {self.epoch + 1}", refresh=False)
            left = self.throughput.seconds_for(self.total_steps - step)
            told = {"loss": f"{float(logs['loss']):.4f}"} | _speed(self.throughput.total())
            if left is not None:
                told["left"] = time_left(left)
            self._bar.set_postfix_str(
                " ".join(f"{name} {value}" for name, value in told.items()), refresh=False
            )
            self._bar.update(step - self._bar.n)

    def on_record(self, record: dict) -> None:
        """Logs one line."""
        step = record["step"]
        if record["event"] == "step":
            speed = _speed(record)
            left = self.throughput.seconds_for(self.total_steps - step)
            log.info(
                "step %d/%d  loss %.4f  learning rate %.3g%s%s",
                *(step, self.total_steps, record["loss"], record["learning_rate"]),
                "".join(f"  {value} {name}" for name, value in speed.items()),
                f"  {time_left(left)} left" if left is not None else "",
                extra=SHOWN_BY_BAR,
            )
        elif record["event"] == "epoch":
            if not self._told_columns:
                log.info("after each epoch: training | validation")
                self._told_columns = True
            for line in epoch_in_words(record):
                log.info("%s", line)
        else:
            level = RESULT if self._trained else logging.INFO
            log.log(level, "step %d  %s  %s", step, record["split"], numbers_in_words(record))

    def on_train_end(self, logs=None):
        """Removes the bar."""
        self._trained = True
        self.close()

    def close(self) -> None:
        """Removes the bar, also after an error."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def epoch_in_words(record: dict) -> list[str]:
    """An epoch's metrics, of training and of validation beside each other, in lines that fit."""
    train, valid = metrics_of(record), metrics_of(record, "val_")
    begin = f"epoch {record['epoch']}"
    lines = [begin]
    for name in {**train, **valid}:
        numbers = [number_in_words(part.get(name)) for part in (train, valid)]
        item = f"  {name} {' | '.join(numbers) if valid else numbers[0]}"
        if len(lines[-1]) + len(item) > WIDEST:
            lines.append(" " * len(begin))
        lines[-1] += item
    return lines


def numbers_in_words(record: dict) -> str:
    """The metrics of an evaluation, each name before its number."""
    return "  ".join(f"{k} {number_in_words(v)}" for k, v in metrics_of(record).items())


def metrics_of(record: dict, prefix: str = "") -> dict[str, float]:
    """The metrics of a record by name, those with a prefix; a loss stands first.

    It is left out beside a cross-entropy that it equals but for the way in which Keras takes the
    mean over batches.
    """
    numbers = {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if isinstance(value, float)
        and name.startswith("val_") == bool(prefix)
        and not is_speed(name)
    }
    loss = numbers.pop("loss", None)
    if loss is None or math.isclose(loss, numbers.get("cross_entropy", math.inf), rel_tol=0.02):
        return numbers
    return {"loss": loss} | numbers


def number_in_words(value: float | None) -> str:
    """Four decimals, fewer where the number is large; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.{2 if abs(value) < 1000 else 0}f}"


def time_left(seconds: float) -> str:
    """Seconds below two minutes, minutes above."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _speed(numbers: dict) -> dict[str, str]:
    for name in ("tokens", "examples"):
        if f"{name}_per_second" in numbers:
            return {f"{name}/s": f"{numbers[f'{name}_per_second']:,.0f}"}
    return {}
