"""Declares the options that every recipe takes: fields of a dataclass, with their metadata."""

import dataclasses
import functools
import json
import os
import shlex
import sys
import typing
from pathlib import Path
from typing import Any, ClassVar, Literal

from distribution.cluster import Strategy
from training.errors import OptionsError, RunError

COUNT = "[1, 1e9]"
POSITIVE = "(0, inf)"
# What is known of an option that says nothing of it.
METADATA = {
    "help": "",
    "group": "options",
    "within": None,
    "resume": "fixed",
    "shown": True,
    "unless": (),
    "positional": False,
}


def option(default: Any = dataclasses.MISSING, help: str | None = None, **about) -> Any:  # noqa: A002
    """Declares an option: a field of a dataclass, with its metadata.

    What is not given is inherited with the field, or is that of `METADATA`; so a recipe gives a
    shared option another default with `epochs: int = 15`.

    Args:
        default: its value where none is given; without one the option is required.
        help: one line with its meaning and unit.
        **about: what `METADATA` names.
            group: title under which `--help` lists it.
            within: interval of a number, for instance "[0, 1)".
            resume: whether a run that resumes may have another value: "fixed" never, "free"
                always, "extend" with `--resume extend`.
            shown: whether it describes the training, for TensorBoard and comparisons.
            unless: options, or what a plan resolved, that make it meaningless where they are given.
            positional: whether the command line takes its value without its name.
    """
    if help is not None:
        about["help"] = help
    if not about.keys() <= METADATA.keys():
        raise TypeError(f"option() takes {', '.join(METADATA)}, not {', '.join(about)}")
    return dataclasses.field(default=default, metadata=about)


def metadata(kind: type, name: str) -> dict:
    """Returns what is known of a field of a dataclass, its inherited metadata included."""
    known: dict = dict(METADATA)
    for cls in reversed(kind.__mro__):
        field = vars(cls).get("__dataclass_fields__", {}).get(name)
        known |= field.metadata if field is not None else {}
    return known


_data = functools.partial(option, group="data")
_training = functools.partial(option, group="training")
_devices = functools.partial(option, group="devices", resume="free")
_saving = functools.partial(option, group="saving and logging", resume="free", shown=False)


@dataclasses.dataclass(kw_only=True)
class ProgramOptions:
    """Options of any program; takes texts where paths are meant, and lists, as a notebook gives."""

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            setattr(self, field.name, _converted(value, hints[field.name]))

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together; for subclasses."""
        return []


@dataclasses.dataclass(kw_only=True)
class SharedOptions(ProgramOptions):
    """Holds what every recipe takes; a recipe adds its own options and sets its own defaults.

    Attributes:
        JIT_MIN_STEPS: steps from which a run on CPUs is faster with `--jit on`, compiling
            counted, as the recipe's author has measured; None where it is not.
    """

    JIT_MIN_STEPS: ClassVar[int | None] = None

    dataset: str = _data("auto", "A name or a path.")
    max_examples: int | None = _data(
        None, "Use only N examples of the training split.", within=COUNT
    )
    cache_dir: Path | None = _data(
        None,
        "Folder for downloads and tokens (default: $RECIPES_CACHE_DIR, else "
        "~/.cache/keras-recipes).",
        resume="free",
        shown=False,
    )

    epochs: int = _training(1, "Passes over the training split.", within=COUNT, resume="extend")
    max_steps: int | None = _training(
        None,
        "End the run, and its schedule, after N updates of the weights.",
        within=COUNT,
        resume="extend",
        unless=("total_steps",),
    )
    batch_size_per_replica: int | None = _training(
        None,
        "Examples per batch on one replica (default: the recipe's own, usually 32, unless "
        "--global-batch-size is given).",
        within=COUNT,
        unless=("global_batch_size",),
    )
    global_batch_size: int | None = _training(
        None, "Examples per batch over all replicas, which must divide it.", within=COUNT
    )
    accumulate_steps: int = _training(
        1, "Batches to accumulate gradients over before each update.", within=COUNT
    )
    base_learning_rate: float | None = _training(
        None, "Peak learning rate for one replica.", within=POSITIVE, unless=("learning_rate",)
    )
    lr_scaling: Literal["linear", "sqrt", "none"] = _training(
        "linear", "How the learning rate grows with replicas.", unless=("learning_rate",)
    )
    clip_norm: float | None = _training(
        None, "Clip the gradient to this global norm.", within=POSITIVE
    )
    validate_every: int | None = _training(
        None,
        "Evaluate on the validation split every N steps, in addition to each epoch's end.",
        within=COUNT,
        resume="free",
    )
    test_every: int | None = _training(
        None, "Evaluate on the test split every N steps.", within=COUNT, resume="free"
    )
    early_stopping: int | None = _training(
        None,
        "Stop after N epochs in which --keep-best did not improve.",
        within=COUNT,
        resume="free",
    )
    seed: int = _training(
        0, "Seed of data order, masks, initial weights and dropout.", within="[0, 2147483647]"
    )

    strategy: Strategy = _devices(
        "auto", "Distribution strategy; auto decides by TF_CONFIG, SLURM and devices."
    )
    replicas: int | None = _devices(
        None,
        "Logical devices per worker: splits one GPU by memory, otherwise the CPU.",
        within="[1, 256]",
    )
    precision: Literal["float32", "mixed_float16", "mixed_bfloat16", "float64"] = _devices(
        "float32", "Dtype policy; float64 also sets Keras's float type.", resume="fixed"
    )
    jit: Literal["auto", "on", "off"] = _devices(
        "auto", "Compile the training step with XLA; auto decides by device and run length."
    )
    steps_per_execution: int = _devices(
        1,
        "Steps to run in one call of the training function; callbacks act between calls.",
        within=COUNT,
    )
    deterministic: bool = _devices(
        False, "Use only TensorFlow ops that repeat bit for bit (slower on GPUs)."
    )

    run_dir: Path | None = _saving(
        None,
        "Folder of the run (default: runs/<recipe>/<date-time>); an unfinished run there resumes.",
    )
    resume: Literal["auto", "never", "extend"] = _saving(
        "auto", "What to do with a run in --run-dir; extend trains it for more --epochs."
    )
    options: Path | None = _saving(
        None, "The options.json of another run, whose values become the defaults."
    )
    checkpoint_every: int = _saving(
        500, "Steps between checkpoints; each epoch ends with one.", within=COUNT
    )
    keep_checkpoints: int = _saving(5, "Number of checkpoints to keep.", within=COUNT)
    keep_best: str | None = _saving(
        None,
        "Also keep the checkpoint with the best value of this validation metric, for instance "
        "val_loss.",
        shown=True,
    )
    keep_best_mode: Literal["auto", "min", "max"] = _saving(
        "auto",
        "Whether a smaller or a larger value of --keep-best is better; auto knows Keras's metrics.",
    )
    log_every: int = _saving(50, "Steps between two lines of the log.", within=COUNT)
    quiet: bool = _saving(False, "Print only warnings and results.")

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        found = []
        if self.batch_size_per_replica is not None and self.global_batch_size is not None:
            found.append(
                f"--batch-size-per-replica {self.batch_size_per_replica} and --global-batch-size "
                f"{self.global_batch_size}: pass only one of them"
            )
        if self.early_stopping is not None and self.keep_best is None:
            found.append("--early-stopping needs --keep-best, for instance val_loss")
        keras = sys.modules.get("keras")
        if keras is not None and keras.config.backend() != "tensorflow":
            found.append(
                f"Keras runs on {keras.config.backend()} in this process, TensorFlow is needed: "
                "import recipes before keras, or start it with python -m"
            )
        return found


@dataclasses.dataclass(kw_only=True)
class TransformerOptions(SharedOptions):
    """Adds the sizes, the warm-up and the weight decay of a Transformer."""

    num_layers: int = option(
        2, "Transformer layers of a new model.", within="[1, 1000]", unless=("preset", "init_from")
    )
    num_heads: int = option(
        2, "Attention heads of a new model.", within="[1, 1000]", unless=("preset", "init_from")
    )
    hidden_dim: int = option(
        128,
        "Width of a new model; feed-forward layers are four times as wide.",
        within="[1, 1e5]",
        unless=("preset", "init_from"),
    )
    warmup_steps: int = option(
        200, "Steps of linear warm-up, at most a tenth of the run.", within="[0, 1e9]"
    )
    weight_decay: float = option(
        0.01, "AdamW's weight decay; not on biases and layer norms.", within="[0, inf)"
    )

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        found = super().problems()
        if self.num_heads > 0 and self.hidden_dim % self.num_heads:
            found.append(
                f"--hidden-dim {self.hidden_dim}: must be a multiple of --num-heads "
                f"{self.num_heads}"
            )
        return found


@dataclasses.dataclass(kw_only=True)
class TextOptions(TransformerOptions):
    """Adds the vocabulary of a Transformer that reads word pieces."""

    vocabulary: Path | None = option(
        None, "A WordPiece vocabulary, one piece per line (default: learned from training text)."
    )
    vocabulary_size: int = option(
        8192,
        "Word pieces to learn.",
        within="[1, 1e6]",
        unless=("vocabulary", "preset", "init_from"),
    )


@dataclasses.dataclass(kw_only=True)
class FineTuningOptions(TransformerOptions):
    """Adds what fine-tuning a model that exists needs: see `models.fine_tuning`."""

    layer_decay: float = option(
        1.0,
        "Multiply the learning rate by this for each layer below the head; 0.9 is usual.",
        within="(0, 1]",
        group="fine-tuning",
    )
    freeze_backbone: bool = option(
        False, "Train only the head, not the encoder or decoder.", group="fine-tuning"
    )
    lora_rank: int | None = option(
        None,
        "Train low-rank adapters of the attention layers (LoRA) and the head only; 8 is usual.",
        within="[1, 10000]",
        group="fine-tuning",
    )
    ema: float | None = option(
        None,
        "Evaluate and save an exponential moving average of the weights with this momentum; 0.999 "
        "is usual.",
        within="(0, 1)",
        group="fine-tuning",
    )

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        found = super().problems()
        if self.freeze_backbone and self.lora_rank is not None:
            found.append("--freeze-backbone and --lora-rank: pass only one of them")
        shared = self.strategy in ("central_storage", "parameter_server")
        if shared and self.ema is not None:
            found.append(
                f"--ema: with --strategy {self.strategy} replicas share one copy of the weights "
                "and would average it several times; use mirrored or multi_worker"
            )
        return found


def all_problems(options: ProgramOptions) -> list[str]:
    """Returns what is wrong with the options, a line each; wrong types alone, if there are any."""
    kind = type(options)
    hints = typing.get_type_hints(kind)
    types, ranges = [], []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        given = f"{flag(field.name)} {value}"
        if not _fits(value, hints[field.name]):
            hint = hints[field.name]
            name = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            types.append(f"{given}: must be {name}")
        elif str(value) != str(value).encode(errors="ignore").decode():  # a byte was left out
            types.append(f"{given}: is not UTF-8")
        else:
            problem = _range_problem(value, metadata(kind, field.name)["within"])
            ranges += [f"{given}: {problem}"] if problem else []
    return types or ranges + options.problems()


def check(options: ProgramOptions) -> None:
    """Raises OptionsError with all problems at once."""
    found = all_problems(options)
    if found:
        raise OptionsError("\n".join(found))


def flag(name: str) -> str:
    """Returns how the command line writes a field's name."""
    return "--" + name.replace("_", "-")


def to_json(options) -> dict:
    """Returns the options as JSON values."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(options).items()
    }


def shown(options, resolved: dict | None = None) -> dict:
    """Returns the options that describe the training, as JSON values.

    Args:
        options: a recipe's.
        resolved: what `auto` and the like became, by the option's name; it replaces the option.
    """
    known = to_json(options) | (resolved or {})
    given = {name for name, value in known.items() if value not in (None, "auto", "scratch")}
    about = {name: metadata(type(options), name) for name in to_json(options)}
    return {
        name: known[name]
        for name, found in about.items()
        if found["shown"] and not given.intersection(found["unless"])
    }


def read_json(path: Path, *keys: str) -> dict:
    """Returns a JSON object that a run wrote.

    Args:
        path: the file.
        *keys: what it must contain.

    Raises:
        RunError: it cannot be read, or it lacks one of the keys.
    """
    try:
        content = dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError) as error:
        raise RunError(f"{path}: damaged, not a JSON object ({error})") from error
    missing = [key for key in keys if content.get(key) is None]
    if missing:
        raise RunError(f"{path}: damaged, it lacks {', '.join(missing)}")
    return content


def from_json(kind: type, path: Path):
    """Returns the options of an `options.json`; `--run-dir` and `--resume` are not taken over.

    Raises:
        RunError: not readable, or not a JSON object.
        OptionsError: unknown names.
    """
    values = read_json(path)
    values = values.get("options", values)
    unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise OptionsError(f"--options {path}: unknown options {', '.join(unknown)}")
    return kind(**{k: v for k, v in values.items() if k not in ("run_dir", "resume", "options")})


def in_notebook() -> bool:
    """Returns whether this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def command(recipe: str, options: SharedOptions) -> str:
    """Returns the command line (in a notebook, the Python) that runs or resumes these options."""
    default = to_json(type(options)())
    given = {
        name: value
        for name, value in to_json(options).items()
        if value != default[name] and name not in ("options", "resume")
    }
    if in_notebook():
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"{recipe}.main({recipe}.Options({arguments}))"
    words = ["python", "-m", f"recipes.{recipe}"]
    for name, value in given.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        else:
            words += [flag(name), str(value)]
    return shlex.join(words)


def _converted(value, hint):
    """Returns a text as a path and a list as a tuple, where the hint asks for one."""
    kinds = typing.get_args(hint)
    if isinstance(value, list) and typing.get_origin(hint) is tuple:
        return tuple(_converted(each, kinds[0]) for each in value)
    if isinstance(value, str) and value and Path in (hint, *kinds):
        return Path(os.path.expanduser(value))
    return value


def _fits(value, hint) -> bool:
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return value in parts
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(each, parts[0]) for each in value)
    if parts:
        return any(_fits(value, part) for part in parts)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint) and value != ""


def _range_problem(value, within: str | None) -> str | None:
    if within is None or value is None:
        return None
    low, high = map(float, within[1:-1].split(","))
    above = value > low or (value == low and within[0] == "[")  # NaN is not
    below = value < high or (value == high and within[-1] == "]")
    return None if above and below else f"must be in {within}"
