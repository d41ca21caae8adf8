"""The options that every recipe takes; a dataclass becomes a command line."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import shlex
import types
import typing
from pathlib import Path
from typing import ClassVar, Literal

from data.paths import read_text
from distribution.cluster import Strategy
from training.errors import OptionsError

LARGEST = 10**9  # of every whole number that no other limit holds
LONGEST_PATH = 255  # letters of one name in a path


@dataclasses.dataclass(kw_only=True)
class ProgramOptions:
    """Options of any program: texts where paths are meant, and lists, as a notebook gives them."""

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for name in (field.name for field in dataclasses.fields(self)):
            value, kind = getattr(self, name), hints[name]
            if typing.get_origin(kind) is not tuple:
                value = _as_path(value, kind)
            elif isinstance(value, str | Path | list | tuple):
                several = [value] if isinstance(value, str | Path) else value
                value = tuple(_as_path(each, typing.get_args(kind)[0]) for each in several)
            setattr(self, name, value)


@dataclasses.dataclass(kw_only=True)
class SharedOptions(ProgramOptions):
    """What every recipe takes; a recipe adds its own and sets its own defaults.

    Attributes:
        XLA_PAYS_AFTER: steps from which a run on one CPU is faster with `--jit on`, compiling
            counted, as the recipe's author has measured; None where it is not or nobody has.
    """

    XLA_PAYS_AFTER: ClassVar[int | None] = None

    dataset: str = "auto"
    """A name or a path; see the recipe's own help."""
    strategy: Strategy = "auto"
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
    keep_best_mode: Literal["auto", "min", "max"] = "auto"
    """Whether a smaller or a larger --keep-best metric is better; auto knows the usual ones."""
    early_stopping: int | None = None
    """Ends the run after so many epochs without a better --keep-best metric."""
    resume: Literal["auto", "never", "extend"] = "auto"
    """What to do with an unfinished run in --run-dir; extend trains on for more --epochs."""
    clip_norm: float | None = None
    """Largest norm of the gradient of the global batch."""
    accumulate_steps: int = 1
    """Global batches that one update of the weights takes in."""
    steps_per_execution: int = 1
    """Steps run in one call of the training function; callbacks act between calls."""
    jit: Literal["auto", "on", "off"] = "auto"
    """XLA: auto compiles where that was measured to pay, and leaves it to Keras elsewhere."""
    seed: int = 0
    """Decides data order, masks, initial weights and dropout."""
    deterministic: bool = False
    """Uses only TensorFlow ops that repeat bit for bit (slower on GPUs)."""
    run_dir: Path | None = None
    """The run's folder (default: runs/<recipe>/<date-time>); an unfinished run there resumes."""
    options: Path | None = None
    """An options.json of an earlier run, whose values become the defaults."""
    cache_dir: Path | None = None
    """Downloads and tokens (default: $RECIPES_CACHE_DIR, else ~/.cache/keras-recipes)."""
    log_every: int = 50
    """Steps between two lines of the log."""
    profile: str | None = None
    """START:STOP: writes a TensorBoard profile of these steps (counted from 1, both included)."""
    quiet: bool = False
    """Prints warnings and the results only."""
    tracker: Literal["none", "wandb", "mlflow"] = "none"
    """Sends the metrics to Weights & Biases or to MLflow, too."""

    def problems(self) -> list[str]:
        """Everything that is wrong with the values, a line each; recipes add their own.

        Each value is of its field's type: `all_problems` looks at that first.
        """
        found = []
        for name in (
            *("batch_size_per_replica", "global_batch_size", "epochs", "max_steps"),
            *("max_examples", "validate_every", "test_every", "checkpoint_every"),
            *("keep_checkpoints", "early_stopping", "accumulate_steps", "steps_per_execution"),
            "log_every",
        ):
            found += positive(name, getattr(self, name))
        found += positive("replicas", self.replicas, most=256)
        for name in ("base_learning_rate", "clip_norm"):
            found += positive(name, getattr(self, name), most=math.inf)
        if self.batch_size_per_replica is not None and self.global_batch_size is not None:
            found.append(
                f"--batch-size-per-replica {self.batch_size_per_replica} and --global-batch-size "
                f"{self.global_batch_size}: give one of them"
            )
        found += problems_of_profile(self.profile)
        found += positive("seed", self.seed, zero=True, most=2**31 - 1)
        if self.early_stopping is not None and self.keep_best is None:
            found.append("--early-stopping needs --keep-best, for instance val_loss")
        if self.accumulate_steps > 1 and self.steps_per_execution > 1:
            found.append(
                "--accumulate-steps already runs several batches in one execution: leave out "
                "--steps-per-execution"
            )
        if self.tracker != "none" and not is_installed(self.tracker):
            found.append(
                f"--tracker {self.tracker}: the package {self.tracker} is missing; "
                f"pip install -e '.[{self.tracker}]' has it"
            )
        if self.jit == "on" and self.precision == "float64":
            found.append("--jit on does not go with --precision float64, which is for checks")
        return (
            found
            + usable_folder("run_dir", self.run_dir)
            + usable_folder("cache_dir", self.cache_dir)
        )


def problems_of_types(options) -> list[str]:
    """A line for each value that is not of its field's type, or a path that cannot be."""
    hints = typing.get_type_hints(type(options))
    found = []
    for name in (field.name for field in dataclasses.fields(options)):
        value = getattr(options, name)
        if not _fits(value, hints[name]):  # a notebook's, or a file's
            found.append(f"{flag(name)} {_short_value(value)}: must be {_in_words(hints[name])}")
            continue
        for part in value if isinstance(value, tuple) else (value,):
            problem = path_problem(part) if isinstance(part, Path) else None
            if isinstance(part, str) and not _is_utf8(part):
                problem = "is not UTF-8"
            if problem:
                found.append(f"{flag(name)} {_short(part)}: {problem}")
    return found


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a folder of that name is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def usable_folder(name: str, path: Path | None) -> list[str]:
    """A problem where a path that is there is no folder, or one that is closed."""
    if path is None or not os.path.exists(path.expanduser()):
        return []
    if not path.expanduser().is_dir():
        return [f"{flag(name)} {_short(path)}: is a file, a folder is expected"]
    if not os.access(path.expanduser(), os.R_OK | os.W_OK | os.X_OK):
        return [f"{flag(name)} {_short(path)}: cannot be read and written"]
    return []


def path_problem(path: Path) -> str | None:
    """Why no file system has such a path, or None."""
    text = str(path)
    if "\0" in text:
        return "holds a NUL character"
    if not _is_utf8(text):
        return "is not UTF-8"
    if any(len(part.encode()) > LONGEST_PATH for part in path.parts) or len(text) > 4000:
        return f"is too long, a name has at most {LONGEST_PATH} letters"
    try:
        path.expanduser()
    except RuntimeError:
        return "names a user who is not there"
    return None


def _is_utf8(text: str) -> bool:
    """False for bytes of a command line that are none: Python keeps them as half characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _short(text) -> str:
    text = str(text).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text)} letters)"


def positive(
    name: str, value: float | None, zero: bool = False, most: float = LARGEST
) -> list[str]:
    """A problem where a number is not finite, not above zero (or 0 with `zero`), or too large."""
    if value is None:
        return []
    least = "0 or more" if zero else "more than 0"
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{flag(name)} {value}: must be {least}"]
    if value < 0 or (value == 0 and not zero):
        return [f"{flag(name)} {_short_value(value)}: must be {least}"]
    if value > most:
        return [f"{flag(name)} {_short_value(value)}: must be at most {most:,}"]
    return []


def _short_value(value) -> str:
    if isinstance(value, int) and value.bit_length() > 100:  # Python does not print every one
        return f"(a number of {value.bit_length()} bits)"
    return _short(repr(value))


def profiled_steps(profile: str | None) -> tuple[int, int] | None:
    """The first and the last step of `--profile START:STOP`; None where it names none."""
    found = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", profile or "")
    return (int(found[1]), int(found[2])) if found else None


def problems_of_profile(profile: str | None) -> list[str]:
    """A problem where `--profile` does not name steps."""
    if profile is None:
        return []
    steps = profiled_steps(profile)
    if steps is None or not 0 < steps[0] <= steps[1]:
        return [
            f"--profile {_short(profile)}: must be START:STOP, two steps counted from 1, the "
            "earlier one first, for instance 100:110"
        ]
    return []


def fraction(name: str, value: float, one: bool = False) -> list[str]:
    """A problem where a number does not lie in [0, 1), or with `one` in (0, 1]."""
    if one and not 0 < value <= 1:
        return [f"{flag(name)} {value}: must lie above 0 and at most at 1"]
    if not one and not 0 <= value < 1:
        return [f"{flag(name)} {value}: must lie in [0, 1)"]
    return []


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


class Checked(typing.Protocol):
    """Options of any program."""

    def problems(self) -> list[str]:
        """What is wrong with values of the right types, a line each."""


def all_problems(options: Checked) -> list[str]:
    """What is wrong with the options, a line each; of wrong types nothing else can be said."""
    return problems_of_types(options) or options.problems()


def check(options: Checked) -> None:
    """Raises OptionsError with all problems at once."""
    found = all_problems(options)
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
        OptionsError: no such file, no JSON object, names that the recipe does not have, or values
            of other types.
    """
    try:
        values = json.loads(read_text(path.expanduser()))
        if isinstance(values, dict):
            values = values.get("options", values)
        if not isinstance(values, dict):
            raise ValueError(f"{json.dumps(values)[:40]} is no JSON object of options")
    except (OSError, ValueError, RuntimeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionsError(f"--options {_short(path)}: {reason}") from error
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise OptionsError(f"--options {path}: unknown names {', '.join(unknown)}")
    taken = {k: v for k, v in values.items() if k not in ("run_dir", "resume", "options")}
    wrong = [
        f"--options {path}: {name} is {_short_value(value)}, must be {_in_words(hints[name])}"
        for name, value in taken.items()
        if not _fits(value, hints[name])
        and not (isinstance(value, str) and Path in _types(hints[name]))
    ]
    if wrong:
        raise OptionsError("\n".join(wrong))
    return kind(**taken)


def command(recipe: str, options: SharedOptions) -> str:
    """The command line that runs, or resumes, these options."""
    words = ["python", "-m", f"recipes.{recipe}"]
    default = to_json(type(options)())
    for name, value in to_json(options).items():
        if value == default[name] or name in ("options", "resume"):
            continue
        if isinstance(value, bool):
            words.append(flag(name) if value else flag("no_" + name))
        else:
            words += [flag(name), str(value)]
    return shlex.join(words)


def _as_path(value, hint):
    """A text as a path where one is meant; the empty one stays, for it is none."""
    return Path(value) if isinstance(value, str) and value and Path in _types(hint) else value


def _types(hint) -> tuple:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.get_args(hint)
    return (hint,)


def _fits(value, hint) -> bool:
    for kind in _types(hint):
        if typing.get_origin(kind) is Literal:
            if value in typing.get_args(kind):
                return True
        elif typing.get_origin(kind) is tuple:
            if isinstance(value, tuple):
                return all(_fits(each, typing.get_args(kind)[0]) for each in value)
        elif isinstance(value, bool):
            if kind is bool:
                return True
        elif kind is float and isinstance(value, int):
            if abs(value) < 10**300:
                return True
        elif isinstance(value, kind):
            return True
    return False


def _in_words(hint) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    names |= {Path: "a path", type(None): "nothing"}
    words = []
    for kind in _types(hint):
        if typing.get_origin(kind) is Literal:
            words.append("one of " + ", ".join(map(str, typing.get_args(kind))))
        elif typing.get_origin(kind) is tuple:
            words.append(f"{_in_words(typing.get_args(kind)[0])}, or several")
        else:
            words.append(names.get(kind, str(kind)))
    return " or ".join(words)
