"""What `--help` prints: the docstring of a recipe's file, then its options in groups."""

import ast
import dataclasses
import inspect
import shutil
import textwrap
import typing
from pathlib import Path
from typing import Literal

import tyro

from training.options import SharedOptions, flag

WIDEST = 100  # columns
COLUMN = 34  # where the explanations begin

# An option that stands in no group is the recipe's own: such ones come first.
GROUPS = {
    "data": (
        *("dataset", "max_examples", "vocabulary", "vocabulary_size", "sequence_length"),
        *("text_mode", "mlm_probability", "whole_word_masking", "token_dropout", "oligos"),
        "cache_dir",
    ),
    "model": (
        *("preset", "init_from", "num_layers", "num_heads", "hidden_dim", "hidden_act"),
        *("head", "dropout", "l2"),
    ),
    "training": (
        *("epochs", "max_steps", "batch_size_per_replica", "global_batch_size"),
        *("accumulate_steps", "base_learning_rate", "lr_scaling", "warmup_steps", "weight_decay"),
        *("beta_1", "beta_2", "clip_norm", "validate_every", "test_every", "early_stopping"),
        "seed",
    ),
    "where it runs": (
        *("strategy", "replicas", "precision", "jit", "steps_per_execution", "deterministic"),
    ),
    "saving and showing": (
        *("run_dir", "resume", "options", "checkpoint_every", "keep_checkpoints", "keep_best"),
        "keep_best_mode",
        *("log_every", "quiet", "tracker", "profile"),
    ),
}


def help_text(kind: type, default, prog: str) -> str:
    """The whole help of a program.

    Args:
        kind: its dataclass of options; the docstring of the file where it stands comes first.
        default: an instance, whose values are shown.
        prog: the command.
    """
    width = max(60, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))
    hints = typing.get_type_hints(kind, include_extras=True)
    explained = explanations(kind)
    rows: dict[str, list[str]] = {}
    usage = [prog]
    for field in sorted_fields(kind):
        value = getattr(default, field.name, None)
        usage_of, value_of = _names(field.name, hints[field.name], value)
        is_positional = not usage_of.startswith("--")
        if is_positional:
            usage.append(usage_of)
        group = "what it is given" if is_positional else group_of(kind, field.name)
        text = with_default(explained.get(field.name, ""), value)
        if value is tyro.MISSING and not is_positional:
            text += " Must be given."
        rows.setdefault(group, []).extend(_row(f"{usage_of} {value_of}", text, width))
    rows["more"] = _row("--help, --version", "These lines; the versions.", width)
    description = inspect.cleandoc(inspect.getmodule(kind).__doc__ or "")
    parts = [" ".join(["usage:", *usage, "[options]"]), description]
    first = ["what it is given", "this recipe"]
    order = [*first, *GROUPS, "options", "more"]
    parts += [
        "\n".join([f"{group}:", *rows[group]])
        for group in sorted(rows, key=lambda group: order.index(group))
    ]
    return "\n\n".join(parts)


def group_of(kind: type, name: str) -> str:
    """The group in which an option stands."""
    if not issubclass(kind, SharedOptions):
        return "options"
    return next((group for group, names in GROUPS.items() if name in names), "this recipe")


def sorted_fields(kind: type) -> list[dataclasses.Field]:
    """The fields: those of the recipe's own class before those that every recipe takes."""
    own = vars(kind).get("__annotations__", {})
    return sorted(dataclasses.fields(kind), key=lambda field: field.name not in own)


def explanations(kind: type) -> dict[str, str]:
    """The string after each field of a dataclass and of those that it inherits from."""
    found = {}
    for cls in reversed(kind.__mro__):
        if dataclasses.is_dataclass(cls):
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
            body = [s for node in tree.body if isinstance(node, ast.ClassDef) for s in node.body]
            for statement, after in zip(body, body[1:], strict=False):
                if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                    name = ast.unparse(statement.target)
                    found[name] = " ".join(ast.literal_eval(after.value).split())
    return found


def _names(name: str, hint, value) -> tuple[str, str]:
    """How an option is written, and what stands for its value; a flag that is set is taken back."""
    if typing.get_origin(hint) is typing.Annotated:  # tyro's Positional
        inner = typing.get_args(hint)[0]
        many = typing.get_origin(inner) is tuple
        return (f"{name.upper()} ..." if many else name.upper()), ""
    kinds = [k for k in typing.get_args(hint) if k is not type(None)] or [hint]
    if typing.get_origin(hint) is Literal:
        kinds = [hint]
    kind = kinds[0]
    if kind is bool:
        return flag(f"no_{name}" if value else name), ""
    if typing.get_origin(kind) is Literal:
        return flag(name), "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    return flag(name), {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def with_default(text: str, value) -> str:
    """An explanation with the default at its end, unless it is nothing or stands there already."""
    if (
        isinstance(value, bool)
        or value == ""
        or "(default" in text
        or not isinstance(value, str | int | float)
    ):
        return text
    return f"{text.removesuffix('.')} (default: {value:{'g' if isinstance(value, float) else ''}})."


def _row(left: str, text: str, width: int) -> list[str]:
    left = "  " + left.rstrip()
    lines = textwrap.wrap(text, width - COLUMN, break_on_hyphens=False) or [""]
    if len(left) >= COLUMN - 1:
        names = textwrap.wrap(left, width, initial_indent="", subsequent_indent="      ")
        return names + [" " * COLUMN + line for line in lines]
    return [f"{left:{COLUMN}}{lines[0]}", *(" " * COLUMN + line for line in lines[1:])]
