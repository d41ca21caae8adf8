"""Rejects options that do not fit the run, and values of a recipe that it cannot store."""

import difflib
import inspect
import json
import math
from collections.abc import Callable, Collection

import keras

from data import files
from data.errors import first_line
from distribution import kinds, strategies
from training.errors import OptionsError, RunError
from training.options import HeldOutOptions, SharedOptions, flag
from training.plan import Plan

# Results that only some runs have, or that evaluations add.
OPTIONAL_RESULTS = {"run_dir", "examples", "test_file", "test_standard_error"}


def refuse_other_options(recipe: str, options) -> None:
    """Rejects the options of another recipe, which a notebook may pass to `main`.

    Raises:
        OptionsError: names the recipe.
    """
    module = type(options).__module__
    of_another = module.startswith("recipes.") and module != f"recipes.{recipe}"
    if of_another or not isinstance(options, SharedOptions):
        raise OptionsError(f"main() takes recipes.{recipe}.Options(...), found {options!r}")


def refuse_pairs(options: SharedOptions) -> None:
    """Rejects options that are incompatible with the devices, before anything is loaded.

    Raises:
        OptionsError: one line per problem.
    """
    name = strategies.resolve(options.strategy, options.replicas)
    problems = strategies.problems(name, options.replicas)
    if options.jit == "on" and name in kinds.SHARED_WEIGHTS:
        problems.append(f"--jit on: XLA cannot compile the shared weights of {name}; use auto")
    if name == "parameter_server" and options.accumulate_steps > 1:
        problems.append(
            "--accumulate-steps does not work with parameter servers, whose workers do not wait "
            "for each other"
        )
    if name in kinds.SHARED_WEIGHTS and options.precision == "mixed_float16":
        problems.append(
            f"--precision mixed_float16 is incompatible with {name}, where replicas would share "
            "one loss scale; mixed_bfloat16 needs none"
        )
    averages = getattr(options, "ema", None) is not None  # not in each recipe
    if name in kinds.SHARED_WEIGHTS and averages:
        problems.append(
            f"--ema: with {name} replicas share one copy of the weights and would average it "
            "several times; use mirrored or multi_worker"
        )
    if problems:
        raise OptionsError("\n".join(problems))


def refuse_ignored_limit(options: SharedOptions, examples: int) -> None:
    """Rejects `--max-examples` if the training split holds more examples: the recipe ignores it."""
    if options.max_examples is not None and examples > options.max_examples:
        raise OptionsError(
            f"--max-examples {options.max_examples}: this recipe ignores it (its training split "
            f"has {examples:,} examples); a recipe applies it with "
            "data.arrays.draw_examples(splits, options.max_examples, options.seed)"
        )


def refuse_ignored_dataset(options: SharedOptions, facts: dict, was_read: bool) -> None:
    """Rejects a `--dataset` of the user that the recipe did not read to load its data.

    Args:
        options: the options of the run.
        facts: those of `run.plan()`.
        was_read: whether the recipe has read `run.dataset`.
    """
    dataset, default = options.dataset, type(options).dataset
    named = facts.get("dataset")  # a recipe may read its options instead of the run
    if was_read or dataset in ("auto", default, named):
        return
    raise OptionsError(
        f"--dataset {dataset}: this recipe ignores it; a recipe loads run.dataset, or passes "
        "dataset=options.dataset to run.plan()"
    )


def refuse_ignored_files(options: SharedOptions, were_read: bool) -> None:
    """Rejects `--validation-file` and `--test-file` if the recipe did not read `run.held_out`."""
    if isinstance(options, HeldOutOptions) and options.held_out and not were_read:
        name = "--validation-file" if options.validation_file is not None else "--test-file"
        raise OptionsError(f"{name}: this recipe ignores it; a recipe loads run.held_out")


def require_own_values(
    method: Callable, values: dict, taken: Collection[str] = (), remedy: str = ""
) -> None:
    """Rejects further values of `run.plan()` or `run.finish()` that cannot be stored.

    Args:
        method: `run.plan` or `run.finish`.
        values: the values by name.
        taken: names of values that the run stores itself.
        remedy: ends the message.

    Raises:
        RunError: a name is taken, or a value is not JSON.
    """
    names = [name for name in values if name in taken]
    if names:
        them = "this value" if len(names) == 1 else "these values"
        raise RunError(
            f"run.{method.__name__}({', '.join(f'{name}=...' for name in names)}): the run, or its "
            f"evaluation, stores {them} itself; use another name{remedy}"
        )
    for name, value in values.items():
        try:
            json.dumps(value, default=files.json_value)
        except (TypeError, ValueError, RecursionError) as error:
            argument = _similar_argument(method, name)
            hint = f"; the argument is {argument}=..." if argument else ""
            raise RunError(
                f"run.{method.__name__}({name}=...): not JSON ({first_line(error)}){hint}{remedy}"
            ) from error


def similar_names(method: Callable, values: dict) -> list[str]:
    """Returns a note for each further value whose name is nearly that of an argument.

    Args:
        method: `run.plan` or `run.finish`.
        values: the further values by name.
    """
    similar = {name: _similar_argument(method, name) for name in values}
    return [
        f"run.{method.__name__}({name}=...): stored as a value of the recipe; did you mean "
        f"{argument}=...?"
        for name, argument in similar.items()
        if argument
    ]


def _similar_argument(method: Callable, name: str) -> str | None:
    named = inspect.signature(method).parameters.values()
    arguments = {each.name for each in named if each.kind != each.VAR_KEYWORD} - {name}
    similar = difflib.get_close_matches(name, arguments, n=1, cutoff=0.85)
    return similar[0] if similar else None


def refuse_executions_across_epochs(steps: int, plan: Plan, is_compiled: bool = False) -> None:
    """Rejects `--steps-per-execution` that would run past the end of an epoch or the run.

    Args:
        steps: steps per execution.
        plan: the plan; a resumed run may start within an epoch.
        is_compiled: whether they are those of `compile()`, not of the option.

    Raises:
        OptionsError: names the number that it must divide.
    """
    numbers = (min(plan.steps_per_epoch, plan.total_steps), plan.total_steps, plan.steps_done)
    common = math.gcd(*numbers)
    if common % steps:
        name, remedy = f"--steps-per-execution {steps}", ""
        if is_compiled:
            name = f"model.compile(steps_per_execution={steps})"
            remedy = f"; change it there, or override it with --steps-per-execution {common}"
        raise OptionsError(
            f"{name}: an epoch has {plan.steps_per_epoch} steps and the "
            f"run {plan.total_steps}, {plan.steps_done} of them done; it must divide {common}"
            f"{remedy}"
        )


def partial_best(options: SharedOptions, has_averages: bool) -> str | None:
    """Returns a note if `best/` will not hold the whole, or the averaged, model.

    Args:
        options: of the run.
        has_averages: whether the optimizer averages the weights, by `--ema` or by itself.
    """
    if options.keep_best is None or options.early_stopping is not None:
        return None
    flags = [flag(name) for name in files.NOT_WHOLE_WITH if getattr(options, name, None)]
    if has_averages and getattr(options, "ema", None) is None:
        flags.append("the optimizer's use_ema")
    if not flags:
        return None
    return (
        f"--keep-best with {', '.join(flags)}: best/ serves to resume only, not for "
        "recipes.evaluate --best; --early-stopping puts the best weights into model/"
    )


def require_one_rate(model: keras.Model) -> None:
    """Rejects `--reduce-on-plateau` for several optimizers, which have several learning rates.

    Raises:
        OptionsError: names the remedy.
    """
    if isinstance(model.optimizer, keras.optimizers.MultiOptimizer):
        raise OptionsError(
            "--reduce-on-plateau: a MultiOptimizer has several learning rates; use one optimizer, "
            "or give each of them a schedule of keras.optimizers.schedules"
        )
