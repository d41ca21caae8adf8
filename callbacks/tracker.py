"""What every experiment tracker has: a run that is found again, and no step of it twice."""

import contextlib
import json
import logging
import math
from pathlib import Path

from callbacks.errors import CannotSave
from callbacks.steps import StepCallback
from data import files

log = logging.getLogger("recipes")


class Tracker(StepCallback):
    """Sends the run's records to an experiment tracker, all of a step in one row.

    `<name>.json` in the run's folder remembers the run's number there and the last step that was
    sent. A resumed run sends what comes after it: since a run resumes bit for bit, the rows before
    it are the ones that are there already. A row's names are the split, a slash, and the metric.

    This class sends nothing. A subclass has a `name`, `open_run()`, `send()` and `close_run()`.

    Args:
        run_dir: the run's folder, or None where this process sends nothing (it is not the chief).
        options: the recipe's options as JSON values.
    """

    name = ""  # of the package, and of the file

    def __init__(self, run_dir: Path | None = None, options: dict | None = None):
        super().__init__()
        self.run_dir = run_dir or Path()
        self._sends = run_dir is not None
        self.options = options or {}
        self.run_id: str | None = None
        self.last_sent = 0
        self._row: dict[str, float] = {}
        self._row_step = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is sent."""
        return bool(self.name) and self._sends

    @property
    def path(self) -> Path:
        """The file that remembers the run."""
        return self.run_dir / f"{self.name}.json"

    def open_run(self, run_id: str | None) -> str:
        """Begins a run, or takes up the one with that number; returns its number."""
        raise NotImplementedError

    def send(self, step: int, row: dict[str, float]) -> None:
        """Sends the numbers of one step."""
        raise NotImplementedError

    def close_run(self, finished: bool) -> None:
        """Ends the connection."""
        raise NotImplementedError

    def on_train_begin(self, logs=None):
        """Finds the run that was begun, or begins one.

        Raises:
            CannotSave: the tracker does not answer, or refuses.
        """
        if not self.is_on:
            return
        there = {}
        if self.path.exists():
            there = json.loads(self.path.read_text(encoding="utf-8"))
        self.last_sent = there.get("last_step", 0)
        try:
            self.run_id = self.open_run(there.get("run_id"))
        except Exception as error:  # of whatever class
            raise CannotSave(f"--tracker {self.name}: {_first_line(error)}") from error
        self._remember()

    def on_record(self, record: dict) -> None:
        """Adds a record's numbers to the row of its step, and sends the row before it."""
        if not self.is_on:
            return
        step = record["step"]
        if step != self._row_step:
            self.flush()
            self._row_step = step
        for name, value in record.items():
            if name not in ("event", "step", "epoch", "split") and math.isfinite(value):
                self._row[_named_by_split(record, name)] = value

    def flush(self) -> None:
        """Sends the row of the step that is over."""
        row, self._row = self._row, {}
        if not row or self._row_step <= self.last_sent or self.run_id is None:
            return
        # Remembered first: a kill between the two loses a row, and doubles none.
        self.last_sent = self._row_step
        self._remember()
        with self._warned(f"the row of step {self._row_step} is lost"):
            self.send(self._row_step, row)

    def finish(self) -> None:
        """Sends the last row, and ends the connection of a run that is finished."""
        self.flush()
        self._end(finished=True)

    def close(self) -> None:
        """Ends the connection of a run that is not; the row under way is not sent.

        A checkpoint has it, and the resumed run sends it.
        """
        self._end(finished=False)

    def _end(self, finished: bool) -> None:
        if self.run_id is not None:
            with self._warned("the run there stays open"):
                self.close_run(finished)
        self.run_id = None

    @contextlib.contextmanager
    def _warned(self, what: str):
        # A training is worth more than its chart: it continues when the tracker is away.
        try:
            yield
        except Exception as error:
            log.warning("--tracker %s: %s; %s", self.name, _first_line(error), what)

    def get_state(self) -> dict:
        """The row under way, whose step may have more to come."""
        return {"row": self._row, "step": self._row_step}

    def set_state(self, state: dict) -> None:
        """Takes it back."""
        self._row, self._row_step = dict(state.get("row", {})), state.get("step", 0)

    def _remember(self) -> None:
        content = json.dumps({"run_id": self.run_id, "last_step": self.last_sent})
        try:
            with files.atomic(self.path) as temporary:
                temporary.write_text(content + "\n", encoding="utf-8")
        except OSError as error:
            raise CannotSave(f"{self.path} cannot be written: {error.strerror}") from error


def _named_by_split(record: dict, name: str) -> str:
    if record["event"] == "evaluation":
        return f"{record['split']}/{name}"
    if name.startswith("val_"):
        return f"validation/{name[4:]}"
    # The mean over an epoch, beside that of the last steps.
    return f"train/epoch_{name}" if record["event"] == "epoch" else f"train/{name}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
