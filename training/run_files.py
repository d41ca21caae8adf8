"""Reads and validates the JSON files of a run's folder for the programs that use a run.

A folder may be damaged, or a stranger's: each problem becomes one line that names the file, its
value and the expected one.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from training.errors import RunError

MAX_BYTES = 256 * 2**20
MAX_INTEGER = 2**63
NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # JSON has no such numbers: they are stored as text


class Kind(NamedTuple):
    """Defines a kind of value: its name in messages, and a test."""

    name: str
    fits: Callable[[Any], bool]


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_measured(value) -> bool:
    return value in NOT_FINITE if isinstance(value, str) else _is_number(value)


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value) -> bool:
    return isinstance(value, str) and value != ""


def optional(kind: Kind) -> Kind:
    """Returns the kind of a value that may be null."""
    return Kind(f"{kind.name} or null", lambda value: value is None or kind.fits(value))


TEXT = Kind("a text", _is_text)
COUNT = Kind("a whole number from 0", _is_count)
FROM_ONE = Kind("a whole number from 1", lambda value: _is_count(value) and value > 0)
NUMBER = Kind("a number", _is_number)
MEASURED = optional(Kind("a number", _is_measured))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
NUMBERS = Kind(
    "an object of numbers",
    lambda value: isinstance(value, dict) and all(map(_is_measured, value.values())),
)
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(map(_is_text, value)))

# The values that are read from each file; a file may hold more.
OPTIONS = {
    "recipe": TEXT,
    "options": OBJECT,
    "resolved": OBJECT,
    "shown": OBJECT,
    "extends": COUNT,  # steps of the finished run that is or was extended
}
RESOLVED = {
    "dataset": optional(TEXT),
    "preset": optional(TEXT),
    "global_batch_size": FROM_ONE,
    "learning_rate": NUMBER,
    "steps_per_epoch": FROM_ONE,
    "total_steps": COUNT,
    "epochs": COUNT,
}
# Those of them that each run has: `Plan.fixed()`.
FIXED = ("global_batch_size", "learning_rate", "steps_per_epoch", "total_steps", "epochs")
RESULTS = {
    "recipe": TEXT,
    "module": TEXT,
    "dataset": optional(TEXT),
    "strategy": TEXT,
    "replicas": COUNT,
    "workers": COUNT,
    "learning_rate": NUMBER,
    "seed": COUNT,
    "steps": COUNT,
    "weights_of_step": COUNT,
    "test": NUMBERS,
    "baseline": NUMBERS,
    "examples_per_second": MEASURED,
    "tokens_per_second": MEASURED,
    "seconds": MEASURED,
    "weights_sha256": TEXT,
}
METADATA = {"classes": TEXTS, "vocabulary": TEXTS}


def read_options(folder: Path, *required: str, resolved: Sequence[str] = ()) -> dict:
    """Returns a run's `options.json`: the options, and what they resolved to.

    Args:
        folder: the run's folder.
        *required: names of `OPTIONS` that the file must hold.
        resolved: names of `RESOLVED` that its `resolved` must hold.

    Raises:
        RunError: it cannot be read, or is damaged.
    """
    path = folder / "options.json"
    content = read_json(path, *required, kinds=OPTIONS)
    _require_names(str(path), content.get("resolved", {}), resolved)
    _require_kinds(str(path), content.get("resolved", {}), RESOLVED)
    return content


def read_results(folder: Path, *required: str) -> dict:
    """Returns a run's `results.json`.

    Args:
        folder: the run's folder.
        *required: names of `RESULTS` that the file must hold.

    Raises:
        RunError: it cannot be read, or is damaged.
    """
    return read_json(folder / "results.json", *required, kinds=RESULTS)


class Metadata(dict):
    """Holds the metadata that a recipe stored with its model; a missing name raises `RunError`.

    Args:
        path: the file.
        values: its content.
    """

    def __init__(self, path: Path, values: dict):
        super().__init__(values)
        self.path = path

    def __missing__(self, name):
        raise RunError(f"{self.path}: damaged, it lacks {name}")


def read_metadata(path: Path) -> Metadata:
    """Returns the metadata that a recipe stored with its model: `recipe.json`.

    Raises:
        RunError: it cannot be read, or is damaged.
    """
    return Metadata(path, read_json(path, kinds=METADATA))


def read_json(path: Path, *required: str, kinds: dict[str, Kind] | None = None) -> dict:
    """Returns the content of a file that must be a JSON object.

    Args:
        path: the file.
        *required: names that it must hold.
        kinds: the kind of a value by name, for names that the file holds.

    Raises:
        RunError: it cannot be read, is not a JSON object, or a value is missing or of another kind.
    """
    return _parsed(str(path), _read_text(path), required, kinds or {})


def read_json_lines(
    path: Path, *required: str, kinds: dict[str, Kind] | None = None
) -> Iterator[dict]:
    """Yields the lines of a file, each a JSON object; arguments and errors as in `read_json`."""
    # Not splitlines(), which also splits at separators within a text.
    for number, line in enumerate(_read_text(path).rstrip("\n").split("\n"), start=1):
        yield _parsed(f"{path}, line {number}", line, required, kinds or {})


def _read_text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise RunError(f"{path}: not a regular file")
        if path.stat().st_size > MAX_BYTES:
            raise RunError(f"{path}: damaged, {path.stat().st_size:,} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: damaged, not a JSON object ({error})") from error


def _parsed(where: str, text: str, required: Sequence[str], kinds: dict[str, Kind]) -> dict:
    try:
        content = json.loads(text, parse_int=_integer)
        json.dumps(content, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except RecursionError as error:
        raise RunError(f"{where}: damaged, nested too deeply") from error
    except ValueError as error:
        raise RunError(f"{where}: damaged, not a JSON object ({error})") from error
    if not isinstance(content, dict):
        raise RunError(f"{where}: damaged, not a JSON object ({_short(content)})")
    _require_names(where, content, required)
    _require_kinds(where, content, kinds)
    return content


def _integer(digits: str) -> int:
    value = int(digits[:30])
    if abs(value) > MAX_INTEGER:
        raise ValueError(f"{digits[:20]}...: a number of {len(digits)} digits")
    return value


def _require_names(where: str, content: dict, required: Sequence[str]) -> None:
    missing = [name for name in required if content.get(name) is None]
    if missing:
        raise RunError(f"{where}: damaged, it lacks {', '.join(missing)}")


def _require_kinds(where: str, content: dict, kinds: dict[str, Kind]) -> None:
    for name, kind in kinds.items():
        if name in content and not kind.fits(content[name]):
            raise RunError(
                f"{where}: damaged, {name} must be {kind.name}, found {_short(content[name])}"
            )


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
