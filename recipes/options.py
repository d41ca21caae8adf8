"""The options that every recipe takes; a dataclass becomes a command line."""

import dataclasses
import json
import math
import sys
import typing
from pathlib import Path
from typing import Literal

import tyro


class OptionsError(Exception):
    """Options that are wrong or do not go together; the message has a line for each fault."""


@dataclasses.dataclass(kw_only=True)
class SharedOptions:
    """What every recipe takes; a recipe adds its own and sets its own defaults."""

    METRICS: typing.ClassVar[tuple[str, ...]] = ("loss",)  # what the recipe's model reports

    strategy: Literal[
        "auto", "none", "mirrored", "central_storage", "multi_worker", "parameter_server"
    ] = "auto"
    """Where the work runs; auto looks at TF_CONFIG, SLURM and the devices."""
    replicas: int | None = None
    """Logical devices per worker: splits one GPU by memory, otherwise the CPU."""
    precision: Literal["float32", "mixed_float16", "mixed_bfloat16", "float64"] = "float32"
    """The dtype policy; float64 also sets Keras's float type."""
    batch_size_per_replica: int | None = None
    """Examples of a batch on one replica (times the replicas makes the global batch)."""
    global_batch_size: int | None = None
    """Examples of a batch over all replicas, which must be able to share it."""
    base_learning_rate: float | None = None
    """Peak learning rate for one replica."""
    lr_scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the learning rate grows with the replicas."""
    epochs: int = 1
    """Passes over the training split."""
    max_steps: int | None = None
    """Ends the run, and its schedule, after so many updates of the weights."""
    max_examples: int | None = None
    """Takes only the first so many examples of the training split."""
    validate_every: int | None = None
    """Evaluates on the validation split every so many steps too, not only after each epoch."""
    test_every: int | None = None
    """Evaluates on the test split every so many steps."""
    checkpoint_every: int = 500
    """Steps between two checkpoints; each epoch ends with one."""
    keep_checkpoints: int = 5
    """How many checkpoints are kept."""
    keep_best: str | None = None
    """Metric of the validation split, for instance val_loss, by which the best is kept too."""
    early_stopping: int | None = None
    """Ends the run after so many epochs without a better --keep-best metric."""
    resume: Literal["auto", "never", "extend"] = "auto"
    """What to do with an unfinished run in --run-dir; extend goes on with more --epochs."""
    clip_norm: float | None = None
    """Largest norm of the gradient of the global batch."""
    accumulate_steps: int = 1
    """Global batches that one update of the weights takes in."""
    steps_per_execution: int = 1
    """Steps run in one call of the training function; callbacks act between calls."""
    jit: Literal["auto", "on", "off"] = "auto"
    """XLA: auto leaves it to Keras."""
    seed: int = 0
    """Decides data order, masks, initial weights and dropout."""
    deterministic: bool = False
    """Uses only TensorFlow ops that repeat bit for bit (slower on GPUs)."""
    run_dir: Path | None = None
    """The run's folder (default: runs/<recipe>/<date-time>); an unfinished run there goes on."""
    options: Path | None = None
    """An options.json of an earlier run, whose values become the defaults."""
    cache_dir: Path | None = None
    """Downloads and tokens (default: $RECIPES_CACHE_DIR, else ~/.cache/keras-recipes)."""
    log_every: int = 50
    """Steps between two lines of the log."""
    quiet: bool = False
    """Prints warnings and the results only."""

    def faults(self) -> list[str]:
        """Everything that is wrong with the values, a line each; recipes add their own."""
        found = []
        for name in (
            *("replicas", "batch_size_per_replica", "global_batch_size", "epochs", "max_steps"),
            *("max_examples", "validate_every", "test_every", "checkpoint_every"),
            *("keep_checkpoints", "early_stopping", "accumulate_steps", "steps_per_execution"),
            "log_every",
        ):
            found += positive(name, getattr(self, name))
        for name in ("base_learning_rate", "clip_norm"):
            found += positive(name, getattr(self, name))
        if self.batch_size_per_replica is not None and self.global_batch_size is not None:
            found.append(
                f"--batch-size-per-replica {self.batch_size_per_replica} and --global-batch-size "
                f"{self.global_batch_size}: give one of them"
            )
        if self.seed < 0:
            found.append(f"--seed {self.seed}: must be 0 or more")
        measured = [f"val_{name}" for name in self.METRICS]
        if self.keep_best is not None and self.keep_best not in measured:
            found.append(f"--keep-best {self.keep_best}: must be one of {', '.join(measured)}")
        if self.early_stopping is not None and self.keep_best is None:
            found.append(f"--early-stopping needs --keep-best, one of {', '.join(measured)}")
        if self.accumulate_steps > 1 and self.steps_per_execution > 1:
            found.append(
                "--accumulate-steps already runs several batches in one execution: leave out "
                "--steps-per-execution"
            )
        if self.jit == "on" and self.precision == "float64":
            found.append("--jit on does not go with --precision float64, which is for checks")
        if self.run_dir is not None and self.run_dir.exists() and not self.run_dir.is_dir():
            found.append(f"--run-dir {self.run_dir}: is a file, a folder is expected")
        return found


def positive(name: str, value: float | None, zero: bool = False) -> list[str]:
    """A fault where a number is not finite or not above zero (or, with `zero`, below it)."""
    if value is None:
        return []
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "0 or more" if zero else "more than 0"
        return [f"{flag(name)} {value}: must be {least}"]
    return []


def fraction(name: str, value: float, one: bool = False) -> list[str]:
    """A fault where a number does not lie in [0, 1), or with `one` in (0, 1]."""
    if one and not 0 < value <= 1:
        return [f"{flag(name)} {value}: must lie above 0 and at most at 1"]
    if not one and not 0 <= value < 1:
        return [f"{flag(name)} {value}: must lie in [0, 1)"]
    return []


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


def parse(kind: type, arguments: list[str] | None = None, prog: str | None = None):
    """The options of a command line.

    Args:
        kind: a dataclass, for instance a recipe's `Options`.
        arguments: the command line; the process's own by default.
        prog: the command that `--help` shows.

    Raises:
        OptionsError: values that are wrong, all of them at once.
        SystemExit: `--help`, or a command line that does not parse (status 2).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    default = kind()
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--options":
            value = value or (arguments[index + 1] if index + 1 < len(arguments) else "")
            default = from_json(kind, Path(value))
    description = (sys.modules[kind.__module__].__doc__ or "").strip()
    options = tyro.cli(kind, args=arguments, default=default, description=description, prog=prog)
    check(options)
    return options


def check(options: SharedOptions) -> None:
    """Raises OptionsError with all faults at once."""
    found = options.faults()
    if found:
        raise OptionsError("\n".join(found))


def to_json(options) -> dict:
    """The options as JSON values."""
    return {
        field.name: str(value) if isinstance(value, Path) else value
        for field in dataclasses.fields(options)
        for value in [getattr(options, field.name)]
    }


def from_json(kind: type, path: Path):
    """The options of a file that a run wrote; `--run-dir` and `--resume` are not taken over.

    Raises:
        OptionsError: no such file, no JSON object, or names that the recipe does not have.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as fault:
        raise OptionsError(f"--options {path}: {fault}") from fault
    values = values.get("options", values)
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise OptionsError(f"--options {path}: unknown names {', '.join(unknown)}")
    taken = {
        name: Path(value) if value is not None and Path in _types(hints[name]) else value
        for name, value in values.items()
        if name not in ("run_dir", "resume", "options")
    }
    wrong = [
        f"--options {path}: {name} is {value!r}, expected {hints[name]}"
        for name, value in taken.items()
        if not _fits(value, hints[name])
    ]
    if wrong:
        raise OptionsError("\n".join(wrong))
    return kind(**taken)


def _types(hint) -> tuple:
    return typing.get_args(hint) or (hint,)


def _fits(value, hint) -> bool:
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    for kind in _types(hint):
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return True
        if isinstance(value, kind) and not (isinstance(value, bool) and kind is int):
            return True
    return False
