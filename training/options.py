"""Declares the options that all recipes share: fields of a dataclass, with their metadata."""

import argparse
import dataclasses
import functools
import numbers
import os
import re
import shlex
import shutil
import sys
import typing
from pathlib import Path
from typing import Any, ClassVar, Literal

from data.files import expand
from distribution.cluster import Strategy
from training import run_files
from training.errors import OptionsError
from training.run_files import read_json

COUNT = "[1, 1e9]"
POSITIVE = "(0, inf)"
NOT_IN_FILE = ("run_dir", "resume", "options")  # what --options does not take from a file
# May differ between the workers of a run, like paths: what is loaded is compared by its checksum.
PER_WORKER = ("dataset", "preset", "quiet")
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
# Default metadata of an option.
METADATA = {
    "help": "",
    "group": "options",
    "within": None,
    "resume": "fixed",
    "shown": True,
    "overridden_by": (),
    "positional": False,
    "alias": None,
}


HIDDEN = argparse.SUPPRESS  # the help of an option that `--help` does not list


def option(default: Any = dataclasses.MISSING, help: str | None = None, **about) -> Any:  # noqa: A002
    """Declares an option: a field of a dataclass, with its metadata.

    Missing metadata is inherited with the field, or defaults to `METADATA`; so a recipe changes
    only the default of a shared option with `epochs: int = 15`.

    Args:
        default: default value; without one the option is required.
        help: one line with its meaning and unit.
        **about: values for the names in `METADATA`.
            group: title under which `--help` lists it.
            within: interval of a number, for instance "[0, 1)".
            resume: whether a resumed run may have another value: "fixed" never, "free" always,
                "extend" with `--resume extend`.
            shown: whether it describes the training, for TensorBoard and comparisons.
            overridden_by: options or resolved values that override it.
            positional: whether the command line takes its value without its name.
            alias: another name on the command line; using it prints the option that it stands
                for.
    """
    if help is not None:
        about["help"] = help
    if not about.keys() <= METADATA.keys():
        raise TypeError(f"option() takes {', '.join(METADATA)}, not {', '.join(about)}")
    return dataclasses.field(default=default, metadata=about)


def metadata(kind: type, name: str) -> dict:
    """Returns the metadata of a field of a dataclass, inherited metadata included."""
    merged: dict = dict(METADATA)
    for cls in reversed(kind.__mro__):
        field = vars(cls).get("__dataclass_fields__", {}).get(name)
        merged |= field.metadata if field is not None else {}
    return merged


_data = functools.partial(option, group="data")
_training = functools.partial(option, group="training")
_devices = functools.partial(option, group="devices", resume="free")
_saving = functools.partial(option, group="saving and logging", resume="free", shown=False)


@dataclasses.dataclass(kw_only=True)
class ProgramOptions:
    """Base class of the options of all programs.

    Converts the values of a notebook: a text to a path, a list or one value to a tuple, numbers of
    NumPy to Python's.
    """

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            setattr(self, field.name, _converted(value, hints[field.name]))

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together; for subclasses."""
        return []


@dataclasses.dataclass(kw_only=True)
class RunOptions(ProgramOptions):
    """Adds the options of every program that uses a finished run."""

    run_dir: Path = option(help="Folder of a finished run.", positional=True)
    best: bool = option(
        False, "Use the weights of RUN_DIR/best, which --keep-best saved, instead of the last ones."
    )
    trust_module: str | None = option(
        None,
        "Module of the run's recipe, if that is not a recipe of this package; it is imported, and "
        "its code runs.",
    )


@dataclasses.dataclass(frozen=True)
class EvaluationRequest:
    """Asks a recipe's `main` to evaluate a finished run instead of training.

    Attributes:
        run: the finished run, a `LoadedRun`.
        test_file: a file, all of which is the test split; None for the dataset's.
        examples: whether to return the test examples with the model's answers.
    """

    run: Any
    test_file: Path | None = None
    examples: bool = False


@dataclasses.dataclass(kw_only=True)
class SharedOptions(ProgramOptions):
    """Holds the options of every recipe; a recipe adds its own options and sets its own defaults.

    Attributes:
        EXAMPLE_INPUT: an input of the recipe's `predict()`, for the command that a run prints at
            its end; None where inputs are files.
        EXPORT_TAKES_TEXTS: whether `recipes.export` writes the SavedModel of a BERT as one that
            takes texts, instead of the inputs and outputs of the Keras model.
        INPUTS_AND_OUTPUTS: what the model takes and returns, for its card; None where it is a task
            of KerasNLP, or `model.summary()` says enough.
        JIT_MIN_STEPS: number of steps from which a run on CPUs is faster with `--jit on`, compiling
            included, measured by the recipe's author; None where it is never faster.
        GPU_JIT_IS_DETERMINISTIC: whether XLA compiles the recipe's steps for a GPU with
            `--deterministic`, and two such runs were identical; `--jit auto` does so then.
        evaluation: what `main` evaluates instead of training; set by `loaded_run.evaluate()`, not
            an option.
    """

    EXAMPLE_INPUT: ClassVar[str | None] = None
    EXPORT_TAKES_TEXTS: ClassVar[bool] = False
    INPUTS_AND_OUTPUTS: ClassVar[str | None] = None
    JIT_MIN_STEPS: ClassVar[int | None] = None
    GPU_JIT_IS_DETERMINISTIC: ClassVar[bool] = False
    evaluation: ClassVar[EvaluationRequest | None] = None

    dataset: str = _data("auto", "A name or a path.")
    max_examples: int | None = _data(
        None, "Use only N examples of the training split.", within=COUNT
    )
    max_validation_examples: int | None = _data(
        None,
        "Use only N examples spread over the validation split; the test split stays whole.",
        within=COUNT,
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
        "End the run, and its schedule, after N updates of the weights, if --epochs has not ended "
        "it before.",
        within=COUNT,
        resume="extend",
        overridden_by=("total_steps",),
    )
    batch_size_per_replica: int | None = _training(
        None,
        "Examples per batch on one replica (default: the recipe's, usually 32, unless "
        "--global-batch-size is given).",
        within=COUNT,
        overridden_by=("global_batch_size",),
        alias="batch_size",
    )
    global_batch_size: int | None = _training(
        None, "Examples per batch over all replicas, which must divide it.", within=COUNT
    )
    accumulate_steps: int = _training(
        1, "Batches to accumulate gradients over before each update.", within=COUNT
    )
    base_learning_rate: float | None = _training(
        None,
        "Peak learning rate for one replica.",
        within=POSITIVE,
        overridden_by=("learning_rate",),
        alias="learning_rate",
    )
    lr_scaling: Literal["linear", "sqrt", "none"] = _training(
        "linear",
        "Scale the learning rate with the number of replicas.",
        overridden_by=("learning_rate",),
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
        "Stop after N epochs without an improvement of --keep-best, and restore the best weights.",
        within=COUNT,
        resume="free",
    )
    reduce_on_plateau: int | None = _training(
        None,
        "Lower the learning rate after N epochs without an improvement of --keep-best (default: "
        "val_loss).",
        within=COUNT,
    )
    plateau_factor: float | None = _training(
        None,
        "Factor by which --reduce-on-plateau multiplies the learning rate (default: 0.5).",
        within="(0, 1)",
    )
    seed: int = _training(
        0,
        "Seed of data order, training masks, initial weights and dropout.",
        within="[0, 2147483647]",
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
    steps_per_execution: int | None = _devices(
        None,
        "Steps to run in one call of the training function (default: those of compile() in the "
        "recipe, usually 1); callbacks act between calls.",
        within=COUNT,
        shown=False,
    )
    gradient_checkpointing: bool = _devices(
        False,
        "Compute the layers that the model repeats, such as Transformer blocks, a second time for "
        "the gradient instead of keeping their values: less memory, about a quarter more time.",
    )
    deterministic: bool = _devices(
        False, "Use only TensorFlow ops that repeat bit for bit (slower on GPUs)."
    )

    run_dir: Path | None = _saving(
        None,
        "Folder of the run (default: runs/<recipe>/<date-time>); an unfinished run there resumes.",
    )
    resume: Literal["auto", "never", "extend"] = _saving(
        "auto",
        "auto resumes a run in --run-dir, extend trains it for more --epochs or --max-steps, never "
        "refuses it.",
    )
    options: Path | None = _saving(
        None,
        "The options.json of another run, or its folder, whose values become the defaults; the "
        "word none unsets one, for instance --clip-norm none.",
    )
    checkpoint_every: int = _saving(
        500, "Steps between checkpoints; each epoch ends with one.", within=COUNT
    )
    keep_checkpoints: int = _saving(5, "Number of checkpoints to keep.", within=COUNT)
    keep_best: str | None = _saving(
        None,
        "Also keep the checkpoint with the best value of this validation metric, for instance "
        "val_loss; evaluated after each epoch and every --validate-every steps.",
        shown=True,
    )
    keep_best_mode: Literal["auto", "min", "max"] = _saving(
        "auto",
        "Direction in which --keep-best improves; auto knows Keras's metrics and common names.",
    )
    profile: str | None = _saving(None, "Profile the steps START:STOP of the run, for TensorBoard.")
    log_every: int = _saving(50, "Steps between two lines of the log.", within=COUNT)
    quiet: bool = _saving(False, "Print only warnings and results.")

    @property
    def batch_shapes(self) -> int:
        """Counts the shapes that training batches may have; XLA compiles each of them."""
        return 1

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        problems = []
        if self.batch_size_per_replica is not None and self.global_batch_size is not None:
            problems.append(
                f"--batch-size-per-replica {self.batch_size_per_replica} and --global-batch-size "
                f"{self.global_batch_size}: pass only one of them"
            )
        if self.resume == "extend" and self.run_dir is None:
            problems.append("--resume extend needs --run-dir, the folder of the run")
        if self.early_stopping is not None and self.keep_best is None:
            problems.append("--early-stopping needs --keep-best, for instance val_loss")
        if self.keep_best is not None and not self.keep_best.startswith("val_"):
            name = self.keep_best.removeprefix("eval_")
            problems.append(
                f"--keep-best {self.keep_best}: must begin with val_, as val_{name} does"
            )
        decides = self.keep_best is not None or self.reduce_on_plateau is not None
        if self.keep_best_mode != "auto" and not decides:
            problems.append("--keep-best-mode needs --keep-best or --reduce-on-plateau")
        if self.plateau_factor is not None and self.reduce_on_plateau is None:
            problems.append("--plateau-factor needs --reduce-on-plateau")
        if self.profile is not None and profile_window(self.profile) is None:
            problems.append(
                f"--profile {self.profile}: must be START:STOP, first and last step, for instance "
                "20:25"
            )
        keras = sys.modules.get("keras")
        if keras is not None and keras.config.backend() != "tensorflow":
            problems.append(
                f"Keras runs on {keras.config.backend()} in this process, TensorFlow is needed: "
                "import recipes before keras, or start it with python -m"
            )
        return problems


@dataclasses.dataclass(kw_only=True)
class HeldOutOptions(SharedOptions):
    """Adds the files of the splits that are not trained on; the recipe loads `run.held_out`."""

    validation_file: Path | None = _data(
        None,
        "A file for validation, read like the training file, instead of the validation split of "
        "--dataset; none is cut from training then.",
    )
    test_file: Path | None = _data(
        None, "Such a file for the test, instead of the test split of --dataset."
    )

    @property
    def held_out(self) -> dict[str, Path]:
        """Returns the files by split: "valid" and "test"."""
        named = {"valid": self.validation_file, "test": self.test_file}
        return {split: expand(path) for split, path in named.items() if path is not None}

    def problems(self) -> list[str]:
        """Returns a line for each file that does not exist, after those of other options."""
        problems = super().problems()
        if self.evaluation is not None and self.evaluation.test_file is not None:
            return problems  # a validation file that is gone is not needed
        moved = "; the run read it: if it has moved, pass --test-file or another --dataset"
        hint = "" if self.evaluation is None else moved
        for name in ("validation_file", "test_file"):
            problem = file_problem(getattr(self, name))
            if problem is not None:
                problems.append(f"{flag(name)} {problem}{hint}")
        return problems


@dataclasses.dataclass(kw_only=True)
class TransformerOptions(SharedOptions):
    """Adds the sizes, the warm-up and the optimizer of a Transformer."""

    epochs: int = option(
        1,
        "Passes over the training split; 0 trains nothing: the model is tested and saved as it "
        "begins, for instance a preset.",
        within="[0, 1e9]",
    )
    num_layers: int = option(
        2,
        "Transformer layers of a new model.",
        within="[1, 1000]",
        overridden_by=("preset", "init_from"),
    )
    num_heads: int = option(
        2,
        "Attention heads of a new model.",
        within="[1, 1000]",
        overridden_by=("preset", "init_from"),
    )
    hidden_dim: int = option(
        128,
        "Width of a new model; feed-forward layers are four times as wide.",
        within="[1, 1e5]",
        overridden_by=("preset", "init_from"),
    )
    warmup_steps: int | None = option(
        None,
        "Steps of linear warm-up (default: 200, but at most a tenth of the run).",
        within="[0, 1e9]",
    )
    lr_schedule: Literal["linear", "cosine", "constant", "wsd"] = option(
        "linear",
        "Learning rate after the warm-up: linear and cosine fall until the run ends; constant "
        "stays at the peak; wsd stays there and falls linearly in the last --lr-decay-steps.",
    )
    lr_decay_steps: int | None = option(
        None,
        "Last steps, in which --lr-schedule wsd falls (default: a fifth of the run).",
        within=COUNT,
    )
    min_lr_ratio: float = option(
        0.0, "Learning rate at the end of the run, as a share of the peak.", within="[0, 1]"
    )
    weight_decay: float = option(
        0.01, "Weight decay; not on biases and layer norms.", within="[0, inf)"
    )
    optimizer: Literal["adamw", "muon"] = option(
        "adamw",
        "Optimizer; muon uses Muon for the kernels of attention (head by head) and feed-forward "
        "layers, and AdamW for the rest.",
    )
    beta_2: float = option(
        0.999,
        "AdamW's decay of the variance; 0.95 is usual for large language models.",
        within="[0, 1)",
    )

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        problems = super().problems()
        if self.num_heads > 0 and self.hidden_dim % self.num_heads:
            problems.append(
                f"--hidden-dim {self.hidden_dim}: must be a multiple of --num-heads "
                f"{self.num_heads}"
            )
        if self.evaluation is None and self.warmup_steps and self.max_steps:
            if self.warmup_steps >= self.max_steps:
                problems.append(
                    f"--warmup-steps {self.warmup_steps}: must be less than --max-steps "
                    f"{self.max_steps}"
                )
        if self.epochs == 0:  # no epoch is validated
            named = ["keep_best", "early_stopping", "reduce_on_plateau"]
            named += ["validate_every", "test_every"]
            problems += [
                f"{flag(name)}: leave it out; --epochs 0 trains nothing"
                for name in named
                if getattr(self, name) is not None
            ]
        if self.lr_decay_steps is not None and self.lr_schedule != "wsd":
            problems.append("--lr-decay-steps: needs --lr-schedule wsd")
        if self.min_lr_ratio and self.lr_schedule == "constant":
            problems.append("--min-lr-ratio: --lr-schedule constant ends at the peak; leave it out")
        return problems


@dataclasses.dataclass(kw_only=True)
class TextOptions(TransformerOptions):
    """Adds the vocabulary of a Transformer that reads word pieces."""

    vocabulary: Path | None = option(
        None, "A WordPiece vocabulary, one piece per line (default: learned from training text)."
    )
    vocabulary_size: int = option(
        8192,
        "Word pieces to learn from the whole training split, also with --max-examples.",
        within="[1, 1e6]",
        overridden_by=("vocabulary", "preset", "init_from"),
    )

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        problems = super().problems()
        is_typed = self.vocabulary_size != type(self).vocabulary_size
        if self.evaluation is None and self.vocabulary is not None and is_typed:
            problems.append("--vocabulary-size: leave it out; --vocabulary has its own")
        return problems


@dataclasses.dataclass(kw_only=True)
class FineTuningOptions(TextOptions):
    """Adds the options of fine-tuning: see `models.fine_tuning`."""

    layer_decay: float = option(
        1.0,
        "Multiply the learning rate by this for each layer below the head; 0.9 is usual.",
        within="(0, 1]",
        group="fine-tuning",
    )
    freeze_backbone: bool = option(
        False,
        "Train only the head, not the encoder; a new one begins as a regression on its features.",
        group="fine-tuning",
    )
    lora_rank: int | None = option(
        None,
        "Train low-rank adapters (LoRA, see --lora-layers) and the head only; 8 is usual.",
        within="[1, 10000]",
        group="fine-tuning",
    )
    lora_alpha: float | None = option(
        None,
        "Multiply the adapters by this number / --lora-rank; twice the rank is usual (default: the "
        "rank, a factor of 1).",
        within="(0, 1e6]",
        group="fine-tuning",
    )
    lora_layers: Literal["query_value", "all_linear"] = option(
        "query_value",
        "Layers that get adapters: query_value, the projections of attention to queries and "
        "values; or all_linear, all linear layers but embeddings and head.",
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
        problems = super().problems()
        if self.freeze_backbone and self.lora_rank is not None:
            problems.append("--freeze-backbone and --lora-rank: pass only one of them")
        if self.lora_alpha is not None and self.lora_rank is None:
            problems.append("--lora-alpha: scales adapters; pass --lora-rank, too")
        if self.lora_layers != type(self).lora_layers and self.lora_rank is None:
            problems.append(
                "--lora-layers: chooses the layers that get adapters; pass --lora-rank, too"
            )
        if self.evaluation is None and self.freeze_backbone and self.layer_decay != 1.0:
            problems.append("--freeze-backbone: the head alone is trained; leave out --layer-decay")
        if self.optimizer == "muon" and self.layer_decay != 1.0:
            problems.append("--optimizer muon: has one learning rate; leave out --layer-decay")
        if self.optimizer == "muon" and self.lora_rank is not None:
            problems.append("--optimizer muon: is not for adapters; leave it out with --lora-rank")
        return problems


def all_problems(options: ProgramOptions, pairs: bool = True) -> list[str]:
    """Returns the problems of the options, one line each; if types are wrong, only those.

    Args:
        options: the options of a program.
        pairs: whether to include options that do not work together.
    """
    kind = type(options)
    hints = typing.get_type_hints(kind)
    types, ranges = [], []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        about = metadata(kind, field.name)
        name = field.name.upper() if about["positional"] else flag(field.name)
        assignment = f"{name} {value}"
        if value == "" or (isinstance(value, tuple) and "" in value):
            types.append(f"{name}: must not be empty")
        elif not _fits(value, hints[field.name]):
            shown = list(value) if isinstance(value, tuple) else value
            types.append(f"{name} {shown!r}: must be {_name_of(hints[field.name])}")
        elif str(value) != str(value).encode(errors="ignore").decode():  # a byte was left out
            types.append(f"{assignment}: is not UTF-8")
        else:
            problem = _range_problem(value, about["within"])
            ranges += [f"{assignment}: {problem}"] if problem else []
    return types or ranges + (options.problems() if pairs else [])


def check(options: ProgramOptions) -> None:
    """Raises OptionsError with all problems at once."""
    problems = all_problems(options)
    if problems:
        raise OptionsError("\n".join(problems))


def file_problem(path: Path | None) -> str | None:
    """Returns what is wrong with the path of a file, after its name; None if it is one, or None."""
    # Of os.path: Path's methods raise errors for a name that is too long.
    if path is None or os.path.isfile(expand(path)):
        return None
    return f"{path}: {'not a file' if os.path.exists(expand(path)) else 'no such file'}"


def profile_window(text: str | None) -> tuple[int, int] | None:
    """Returns first and last step of `--profile START:STOP`; None if they are not two steps."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text or "")
    window = (int(match[1]), int(match[2])) if match else (0, 0)
    return window if 1 <= window[0] <= window[1] else None


def flag(name: str) -> str:
    """Returns the command line's name of a field: `--sequence-length`."""
    return "--" + name.replace("_", "-")


def to_json(options) -> dict:
    """Returns the options as JSON values."""
    return {name: _as_json(value) for name, value in dataclasses.asdict(options).items()}


def _as_json(value):
    if isinstance(value, tuple):
        return [_as_json(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def shown(options, resolved: dict | None = None) -> dict:
    """Returns the options that describe the training, as JSON values.

    Args:
        options: the options of a recipe.
        resolved: resolved values of options such as `auto`, by name; they replace the options.
    """
    values = to_json(options) | (resolved or {})
    is_set = {name for name, value in values.items() if value not in (None, "auto", "scratch")}
    fields = {name: metadata(type(options), name) for name in to_json(options)}
    return {
        name: values[name]
        for name, about in fields.items()
        if about["shown"] and not is_set.intersection(about["overridden_by"])
    }


def common(options: SharedOptions) -> dict:
    """Returns the options that all workers of a run share, as JSON values.

    These are all but paths and `PER_WORKER`.
    """
    hints = typing.get_type_hints(type(options))
    return {
        name: value
        for name, value in to_json(options).items()
        if name not in PER_WORKER and Path not in (hints[name], *typing.get_args(hints[name]))
    }


def allows_none(kind: type, name: str) -> bool:
    """Returns whether the word `none` unsets an option of a program with `--options`."""
    hints = typing.get_type_hints(kind)
    is_optional = type(None) in typing.get_args(hints[name])
    return is_optional and "options" in hints and name not in NOT_IN_FILE


def from_json(kind: type, path: Path):
    """Reads the options of an `options.json`, or of the run in a folder, except `NOT_IN_FILE`.

    Raises:
        RunError: the file is not readable, or damaged.
        OptionsError: the file contains unknown names or a text instead of a number, or the folder
            no file.
    """
    if path.is_dir():
        if not (path / "options.json").exists():
            raise OptionsError(f"--options {path}: contains no options.json; pass a run's folder")
        path = path / "options.json"
    values = read_json(path, kinds={"options": run_files.OBJECT})
    values = values.get("options", values)
    unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise OptionsError(f"--options {path}: unknown options {', '.join(unknown)}")
    hints = typing.get_type_hints(kind)
    for name, value in values.items():  # argparse reads a text as if it were typed
        if isinstance(value, str) and {int, float} & {hints[name], *typing.get_args(hints[name])}:
            raise OptionsError(
                f"--options {path}: {name} {value!r}: must be {_name_of(hints[name])}"
            )
    return kind(**{k: v for k, v in values.items() if k not in NOT_IN_FILE})


def in_notebook() -> bool:
    """Returns whether this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def command(recipe: str, options: SharedOptions) -> str:
    """Returns the command line (in a notebook, the Python) that runs or resumes these options."""
    default = to_json(type(options)())
    changed = {
        name: value
        for name, value in to_json(options).items()
        if value != default[name] and name not in ("options", "resume")
    }
    if in_notebook():
        arguments = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        module = "" if type(options).__module__ == "__main__" else f"{recipe}."
        return f"{module}main({module}Options({arguments}))"
    words = [interpreter(), *started_by(type(options))]
    for name, value in changed.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        else:
            several = value if isinstance(value, list) else ["none" if value is None else value]
            words += [flag(name), *map(str, several)]
    return shlex.join(words)


def predict_command(options: SharedOptions, example: str | None = None) -> str | None:
    """Returns the command that queries the model of a run; None for a recipe without `predict()`.

    Args:
        options: the run's options, with its folder.
        example: an input, if `EXAMPLE_INPUT` does not suit the run's data.
    """
    kind = type(options)
    if not hasattr(sys.modules[kind.__module__], "predict"):
        return None
    words = [interpreter(), "-m", "recipes.predict", str(options.run_dir)]
    words.append(example or kind.EXAMPLE_INPUT or "--help")
    if not module_name(kind).startswith("recipes."):
        words += ["--trust-module", module_name(kind)]
    return shlex.join(words)


def module_name(kind: type) -> str:
    """Returns the name under which Python imports the module of a recipe's `Options`.

    A recipe that is run as a program is `__main__` to itself. For one that a notebook's cell
    defines, that name is returned.
    """
    module = sys.modules[kind.__module__]
    if module.__spec__ is not None:
        return module.__spec__.name
    path = getattr(module, "__file__", None)
    if path is None:
        return module.__name__
    is_ours = Path(path).resolve().parent == RECIPES
    return f"recipes.{Path(path).stem}" if is_ours else Path(path).stem


def started_by(kind: type) -> list[str]:
    """Returns the arguments of Python that start a recipe: `-m` and its module, or a file."""
    module = sys.modules[kind.__module__]
    path = getattr(module, "__file__", None)
    if module.__spec__ is None and path is not None:
        return [str(path)]
    return ["-m", module_name(kind)]


def interpreter() -> str:
    """Returns the command that starts this Python: `python` if that is this one, else a path."""
    if not sys.executable:
        return "python"
    path = Path(sys.executable)
    on_path = shutil.which("python")
    # By its folder: the Python of a virtual environment is a link to the system's.
    if on_path and Path(on_path).parent == path.parent and os.path.samefile(on_path, path):
        return "python"
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _converted(value, hint):
    """Converts numbers, a text to a path, a list or one value to a tuple, as the hint requires."""
    kinds = typing.get_args(hint)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # NumPy's numbers, too
        if isinstance(value, numbers.Integral) and {int, float} & {hint, *kinds}:
            return int(value)
        return float(value) if float in (hint, *kinds) else value
    if typing.get_origin(hint) is tuple and value is None:
        return ()
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple | str | Path):
        several = value if isinstance(value, list | tuple) else [value]
        return tuple(_converted(each, kinds[0]) for each in several)
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


def _name_of(hint) -> str:
    """Returns the name of a type in messages."""
    if typing.get_origin(hint) is tuple:
        choices = typing.get_args(typing.get_args(hint)[0])
        return "one or several " + (f"of {', '.join(choices)}" if choices else "texts or paths")
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _range_problem(value, within: str | None) -> str | None:
    if within is None or value is None:
        return None
    low, high = map(float, within[1:-1].split(","))
    above = value > low or (value == low and within[0] == "[")  # NaN is not
    below = value < high or (value == high and within[-1] == "]")
    return None if above and below else f"must be in {within}"
