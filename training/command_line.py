"""Runs a recipe as a command: parses options, answers `--help` at once, maps errors to statuses."""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from callbacks.errors import BadLoss, CannotSave, Stopped
from data.errors import DataError, is_out_of_memory
from distribution import cluster
from distribution.errors import DistributionError
from machine.output import discard_output
from machine.quiet_start import exit_on_interrupt, release_interrupt
from machine.requirements import version_line
from training import options
from training.errors import SAVED_AND_STOPPED, OptionsError, RunError, WorkerLost
from training.options import RECIPES, flag, from_json, metadata
from training.signals import StopRequested, all_interrupt

NOT_BEGUN = "stopped before training began: the same command starts again"
INTERRUPTED = "stopped: the same command starts again"


def make_parser(kind: type, prog: str, description: str) -> argparse.ArgumentParser:
    """Builds the argument parser of a dataclass of options, with the groups of its metadata.

    Args:
        kind: the dataclass.
        prog: the command that `--help` shows.
        description: first paragraph of `--help`.
    """
    hints = typing.get_type_hints(kind)
    parser = argparse.ArgumentParser(
        prog=prog,
        description=inspect.cleandoc(description),
        formatter_class=lambda prog: _Formatter(prog, max_help_position=34),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version_line())
    parser.usage = prog
    groups: dict[str, Any] = {"options": parser}
    for field in dataclasses.fields(kind):
        about = metadata(kind, field.name)
        required = field.default is dataclasses.MISSING
        # The dataclass fills in missing options; --help shows the defaults that are informative.
        shown = not required and field.default not in (None, ()) and field.default is not False
        arguments = value_arguments(hints[field.name]) | {
            "help": about["help"].replace("%", "%%"),
            "default": field.default if shown else argparse.SUPPRESS,
        }
        if options.allows_none(kind, field.name) and "action" not in arguments:
            arguments["type"] = _or_none(arguments.get("type", str))
        if about["positional"]:
            arguments["metavar"] = field.name.upper()
            parser.usage += " " + arguments["metavar"]
            if required and "nargs" in arguments:
                arguments["nargs"] = "+"
            parser.add_argument(field.name, **arguments)
            continue
        if about["group"] not in groups:
            groups[about["group"]] = parser.add_argument_group(about["group"])
        names = [flag(field.name), *_alias(kind, field.name)]
        groups[about["group"]].add_argument(*names, dest=field.name, required=required, **arguments)
    parser.usage += " [options]"
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and the description with its line breaks."""

    def _get_help_string(self, action):
        return action.help if action.default == () else super()._get_help_string(action)


def _or_none(kind: Callable) -> Callable:
    """Returns a type for argparse that reads the word `none` as None."""

    def read(text: str):
        return None if text == "none" else kind(text)

    read.__name__ = kind.__name__  # for argparse's messages
    return read


def _alias(kind: type, name: str) -> list[str]:
    """Returns the other name of an option, unless an option of the recipe has that name."""
    alias = metadata(kind, name)["alias"]
    taken = {field.name for field in dataclasses.fields(kind)}
    return [flag(alias)] if alias is not None and alias not in taken else []


def value_arguments(hint) -> dict:
    """Returns the arguments of `add_argument()` for a type; the options convert texts to paths."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"choices": arguments}
    if origin is tuple:
        choices = value_arguments(arguments[0]).get("choices")
        return {"nargs": "*"} | ({} if choices is None else {"choices": choices})
    kind = arguments[0] if arguments else hint  # X | None is parsed as an X
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind in (int, float):
        return {"type": kind, "metavar": {int: "N", float: "X"}[kind]}
    return {"metavar": "PATH" if kind is Path else "TEXT"}


def parse(kind: type, prog: str, description: str = "", arguments: list[str] | None = None):
    """Parses a command line into options; checks only their types.

    Args:
        kind: a dataclass, for instance a recipe's `Options`.
        prog: the command that `--help` shows.
        description: first paragraph of `--help`.
        arguments: the command line; the process's own by default.

    Raises:
        OptionsError, RunError: the file of `--options` does not hold options of this kind.
        SystemExit: `--help`, `--version`, or a command line that does not parse (status 2).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(kind, prog, description)
    all_known = not issubclass(kind, TakesMore) or kind.add_arguments(parser, arguments)
    # Inputs that may be left out may also come after an option.
    takes_more = issubclass(kind, TakesMore)
    parse_known = parser.parse_known_intermixed_args if takes_more else parser.parse_known_args
    known, unknown = parse_known(arguments)
    if getattr(known, "options", None):
        parser.set_defaults(**vars(from_json(kind, Path(os.path.expanduser(known.options)))))
        known, unknown = parse_known(arguments)
    if unknown and all_known:
        hint = _did_you_mean(parser, unknown)
        if takes_more:
            # Words behind an unknown option are its values, or inputs: the option alone is wrong.
            unknown = [word for word in unknown if re.match("--[A-Za-z]", word)] or unknown
            if not hint and unknown[0].startswith("--"):
                hint = f"; {prog} RUN_DIR --help lists the options of a run"
            if not hint and unknown[0].startswith("-"):
                hint = '; "--" comes before inputs that begin with "-"'
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    values = vars(known)
    names = {field.name for field in dataclasses.fields(kind)}
    options = kind(**{name: value for name, value in values.items() if name in names})
    if isinstance(options, TakesMore):
        more = {name: value for name, value in values.items() if name not in names}
        # Class variables: fields would be options.
        vars(options).update(more=more, unknown=[] if all_known else unknown)
    return options


class TakesMore:
    """Adds further arguments to a command line, which depend on the other options.

    Attributes:
        more: their values by name, where a command line was parsed.
        unknown: words of a command line that may be their names and values, or inputs, where they
            cannot be determined.
    """

    more: dict = {}
    unknown: Sequence[str] = ()

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, arguments: list[str]) -> bool:
        """Adds the further arguments to the parser.

        Args:
            parser: has the other options.
            arguments: the command line.

        Returns:
            False where they cannot be determined: `main` then reports the problem of the others.
        """
        raise NotImplementedError


# Names in Hugging Face's scripts (`TrainingArguments`) and elsewhere, and the options here.
NAMES_ELSEWHERE = {
    "--lr": "--base-learning-rate",
    "--per-device-train-batch-size": "--batch-size-per-replica",
    "--gradient-accumulation-steps": "--accumulate-steps",
    "--num-train-epochs": "--epochs",
    "--num-epochs": "--epochs",
    "--max-grad-norm": "--clip-norm",
    "--bf16": "--precision",
    "--fp16": "--precision",
    "--eval-steps": "--validate-every",
    "--eval-strategy": "--validate-every",
    "--evaluation-strategy": "--validate-every",
    "--save-steps": "--checkpoint-every",
    "--save-strategy": "--checkpoint-every",
    "--save-total-limit": "--keep-checkpoints",
    "--load-best-model-at-end": "--early-stopping",
    "--metric-for-best-model": "--keep-best",
    "--resume-from-checkpoint": "--run-dir",
    "--do-sample": "--temperature",
    "--max-new-tokens": "--max-length",
    "--num-return-sequences": "--num-samples",
    "--stop-sequences": "--stop",
    "--stop-strings": "--stop",
    "--stop-token": "--stop",
    "--output": "--csv",
    "--output-dir": "--run-dir",
    "--output-file": "--csv",
    "--run-name": "--run-dir",
    "--model-name-or-path": "--preset",
    "--dataset-name": "--dataset",
    "--task-name": "--dataset",
    "--data-dir": "--dataset",
    "--train-file": "--dataset",
    "--max-length": "--sequence-length",
    "--max-train-samples": "--max-examples",
    "--max-eval-samples": "--max-validation-examples",
    "--eval-iters": "--max-validation-examples",
    "--max-seq-length": "--sequence-length",
    "--block-size": "--sequence-length",
    "--label-smoothing-factor": "--label-smoothing",
    "--line-by-line": "--text-mode lines",
    "--tokenizer": "--vocabulary",
    "--tokenizer-name": "--vocabulary",
    "--source-prefix": "--prefix",
    "--text-column": "--prompt-column",  # in run_summarization.py
    "--summary-column": "--response-column",
    "--max-source-length": "--sequence-length",
    "--max-target-length": "--response-length",
    "--val-max-target-length": "--response-length",
    "--generation-max-length": "--response-length",
    "--pad-to-max-length": "--group-by-length off",
    "--ema-decay": "--ema",
    "--logging-steps": "--log-every",
    "--torch-compile": "--jit",
    "--optim": "--optimizer",
    "--adam-beta2": "--beta-2",
    "--warmup-ratio": "--warmup-steps",
    "--lr-scheduler-type": "--lr-schedule",
    "--lr-scheduler": "--lr-schedule",
    "--min-lr-rate": "--min-lr-ratio",
    "--target-modules": "--lora-layers",
    "--lora-target-modules": "--lora-layers",
    "--init-from": "--preset",  # causal_lm has only this one: a run's model is a preset
    # Nothing here does the same, or not in every recipe; options spelled alike do something else.
    **dict.fromkeys(
        (
            "--adam-beta1",
            "--adam-epsilon",
            "--assistant-only-loss",
            "--beta",
            "--data-seed",
            "--dataloader-num-workers",
            "--deepspeed",
            "--do-eval",
            "--do-predict",
            "--do-train",
            "--eval-accumulation-steps",
            "--eval-batch-size",
            "--label-smoothing",
            "--local-rank",
            "--logging-strategy",
            "--lora-alpha",
            "--lora-dropout",
            "--max-predict-samples",
            "--model-revision",
            "--num-beams",
            "--num-workers",
            "--overwrite-output-dir",
            "--packing",
            "--per-device-eval-batch-size",
            "--push-to-hub",
            "--remove-unused-columns",
            "--report-to",
            "--source-lang",
            "--stop",
            "--streaming",
            "--target-lang",
            "--trust-remote-code",
            "--validation-split",
            "--validation-split-percentage",
        ),
        "",
    ),
}


def _did_you_mean(parser: argparse.ArgumentParser, unknown: list[str]) -> str:
    """Returns what unknown words may stand for, as the end of a message."""
    names = re.findall(r"(?<!\S)--([a-z][\w-]*\w)(?![\w-])", parser.format_help())
    words = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    near: list[str] = []
    for word in words:
        name = word.removeprefix("--").replace("_", "-")
        here = None if name in names else NAMES_ELSEWHERE.get(f"--{name}")
        close = difflib.get_close_matches(name, names, n=1)
        near += [f"--{each}" for each in close] if here is None else [here]
    near = [text for text in near if text.partition(" ")[0].removeprefix("--") in names]
    files = [word for word in unknown if not word.startswith("-") and os.path.exists(word)]
    if len(files) == len(unknown):  # the shell replaced a glob by the names of files
        return "; quote a glob, so that the shell leaves it as it is: --dataset 'FOLDER/*.txt'"
    return f"; did you mean {', '.join(dict.fromkeys(near))}?" if near else ""


def _check(parsed, arguments: list[str]) -> None:
    """Raises OptionsError with all problems; names the file of values that were not typed."""
    try:
        options.check(parsed)
    except OptionsError as error:
        kind, lines = type(parsed), [str(error)]
        concerned = set(re.findall(r"--[a-z][\w-]*", lines[0]))
        typed = {word.partition("=")[0] for word in arguments}
        for field in dataclasses.fields(kind) if getattr(parsed, "options", None) else ():
            name, value = flag(field.name), getattr(parsed, field.name)
            if name not in concerned or value == field.default:
                continue
            names = {name, flag(f"no_{field.name}"), *_alias(kind, field.name)}
            if not typed.intersection(names):
                remedy = f"; {name} none unsets it" if options.allows_none(kind, field.name) else ""
                lines.append(f"{name} is from --options {parsed.options}{remedy}")
        raise OptionsError("\n".join(lines)) from error


def alias_notes(kind: type, arguments: list[str]) -> list[str]:
    """Returns one line per alias on a command line: the option that it stands for."""
    words = {word.partition("=")[0] for word in arguments}
    notes = []
    for field in dataclasses.fields(kind):
        for alias in words.intersection(_alias(kind, field.name)):
            about = metadata(kind, field.name)["help"].partition("(")[0].strip(" .")
            notes.append(f"{alias} is {flag(field.name)}: {about[0].lower()}{about[1:]}")
    return sorted(notes)


def programs() -> dict[str, str]:
    """Returns the recipes and programs of this package, with the first phrase of each docstring."""
    summaries = {}
    for path in sorted(RECIPES.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.ClassDef) and node.name == "Options" for node in tree.body):
            summaries[path.stem] = re.split(r"[:.\n]", ast.get_docstring(tree) or "")[0]
    return summaries


def answer_early() -> None:
    """Parses the command line of `python -m recipes.X` before X imports TensorFlow.

    That import takes seconds; `--help` or a mistyped option ends the process without it. Python
    imports the package `recipes` before the module X; meanwhile `sys.argv[0]` is "-m", and
    `sys.orig_argv` names X. The recipe cannot be imported yet, but its options are one class,
    `Options`, whose fields need only `training.options`: that class is extracted from the source
    and executed alone. Where it needs more names, nothing happens, and the recipe parses its
    command line itself, seconds later; nothing else changes if one of these assumptions fails. The
    alternatives are worse: options in a second file per recipe, or imports within functions.

    From now on until `command_line()` begins, Ctrl-C, SIGTERM and SIGHUP end the process with one
    line.
    """
    module = sys.orig_argv[-len(sys.argv)] if sys.argv[:1] == ["-m"] else ""
    package, _, recipe = module.partition(".")
    path = RECIPES / f"{recipe}.py"
    if package != "recipes" or not path.is_file():
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    description = ast.get_docstring(tree) or ""
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "Options"]
    names = vars(options) | {"__name__": module}
    try:
        exec(compile(tree, str(path), "exec"), names)
    except NameError:
        exit_on_interrupt(INTERRUPTED, SAVED_AND_STOPPED)
        return
    kind = names.get("Options", options.ProgramOptions)
    trains = issubclass(kind, options.SharedOptions)
    exit_on_interrupt(NOT_BEGUN if trains else INTERRUPTED, SAVED_AND_STOPPED)
    if "Options" in names:
        run_as_command(
            recipe,
            lambda: parse(names["Options"], f"python -m {module}", description),
            exits=False,
        )


def command_line(options_type: type, main: Callable) -> None:
    """Runs a recipe's `main` with the options of the command line, and exits.

    Exit status: 0 on success, 2 for an error that the user can correct, 75 for a run that was
    stopped and can resume, 1 for anything else.

    Args:
        options_type: the recipe's `Options`; `SharedOptions` as they are count as those of the
            module of `main`.
        main: takes them.
    """
    release_interrupt()  # a run handles signals itself
    if options_type.__module__ == options.__name__:
        options_type = type("Options", (options_type,), {"__module__": main.__module__})
    module = sys.modules[options_type.__module__]
    recipe = Path(str(module.__file__)).stem
    prog = " ".join(["python", *options.started_by(options_type)])

    def work():
        parsed = parse(options_type, prog, module.__doc__ or "")
        for note in alias_notes(options_type, sys.argv[1:]):
            print(note, file=sys.stderr)
        _check(parsed, sys.argv[1:])
        main(parsed)

    trains = issubclass(options_type, options.SharedOptions)
    with contextlib.nullcontext() if trains else all_interrupt():
        run_as_command(recipe, work)


def run_as_command(recipe: str, work: Callable, exits: bool = True) -> None:
    """Calls a function, prints an error in one line, and exits with a recipe's status.

    Args:
        recipe: the name before each message.
        work: the function.
        exits: False returns to the caller if nothing went wrong.
    """
    status = 0
    try:
        work()
        if not exits:
            return
    except SystemExit as leaving:
        if isinstance(leaving.code, int | None):
            status = leaving.code or 0
        else:  # a text, as Python has it
            _print_error(recipe, leaving.code)
            status = 1
    except (OptionsError, DataError, DistributionError, RunError) as error:
        _print_error(recipe, error)
        status = 2
    except Stopped as stopped:
        _print_line(stopped)
        status = SAVED_AND_STOPPED
    except StopRequested:
        _print_line(NOT_BEGUN)
        status = SAVED_AND_STOPPED
    except KeyboardInterrupt:  # in a program, or outside of a run
        _print_line(INTERRUPTED)
        status = SAVED_AND_STOPPED
    except (BadLoss, CannotSave, WorkerLost) as error:
        _print_error(recipe, error)
        status = 1
    except BrokenPipeError:  # `... | head -1`
        status = 1
    except OSError as error:
        if error.errno is None:
            raise
        # A file that cannot be used, or standard output on a full disk.
        where = f"{error.filename}: " if error.filename else ""
        _print_error(recipe, f"{where}{error.strerror}")
        status = 2 if where else 1
    except MemoryError as error:  # of the machine, not of a device
        about = str(error).split("\n")[0] or "the machine has no more"
        _print_error(
            recipe,
            f"out of memory: {about}\nthe data or the model are too large; --max-examples takes "
            "fewer examples",
        )
        status = 1
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _print_error(
            recipe,
            f"out of memory: {str(error)[:200].splitlines()[0]}\npass a smaller "
            "--batch-size-per-replica (or --global-batch-size), with --accumulate-steps for the "
            "same update, or --gradient-checkpointing",
        )
        status = 1
    _leave(status)


def _print_error(recipe: str, error) -> None:
    lines = str(error).splitlines() or [type(error).__name__]
    text = "\n".join([f"{recipe}: {lines[0]}", *(f"  {line}" for line in lines[1:])])
    _print_line(text.encode("utf-8", "backslashreplace").decode())


def _print_line(line) -> None:
    with contextlib.suppress(OSError):  # it has no reader
        print(line, file=sys.stderr)


def _leave(status: int) -> None:
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()
        status = status or 1
    with contextlib.suppress(DistributionError):  # a broken TF_CONFIG was reported above
        if "ps" in cluster.cluster_spec():
            # The coordinator's thread for a worker that died would wait for it, and so the exit.
            sys.stderr.flush()
            os._exit(status)
    sys.exit(status)
