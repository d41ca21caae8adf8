"""Keeps the run's records in metrics.jsonl, one per line."""

import json
import math
import os
from pathlib import Path

from callbacks.errors import saving
from callbacks.steps import StepCallback


class MetricsFile(StepCallback):
    """Appends each record to a file of JSON lines, of which a resumed run keeps the valid part.

    Args:
        path: the file, or None where this process writes nothing (it is not the chief).
    """

    def __init__(self, path: str | Path | None):
        super().__init__()
        self.path = Path(path) if path is not None else None

    def on_record(self, record: dict) -> None:
        """Writes one line, in one write: a reader never sees half of it while the process lives.

        Raises:
            CannotSave: the disk is full, or the folder is gone or not writable.
        """
        if self.path is None:
            return
        finite = {
            name: value if not isinstance(value, float) or math.isfinite(value) else str(value)
            for name, value in record.items()
        }
        with saving(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")

    def get_state(self) -> dict:
        """Returns how long the file is, in bytes."""
        return {"bytes": self.path.stat().st_size if self.path and self.path.exists() else 0}

    def set_state(self, state: dict) -> None:
        """Cuts off what was written after the checkpoint."""
        if self.get_state()["bytes"] > state["bytes"]:
            with saving(self.path):
                os.truncate(self.path, state["bytes"])
