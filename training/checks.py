"""Rejects, before training, whatever would fail later or make the numbers silently wrong."""

import contextlib
import difflib
import hashlib
import inspect
import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from callbacks.checkpoint import CheckpointInfo
from callbacks.errors import BadLoss
from callbacks.late_numbers import CallbackList
from callbacks.metric_direction import direction
from callbacks.steps import StepCallback
from data import batches, files
from data.errors import first_line, listed
from distribution import kinds, step, strategies
from distribution.errors import DistributionError
from distribution.keras_compat import compiled_metrics, fitting, inspection, randomness
from distribution.metric_states import MetricStates
from training.errors import OptionsError, RunError
from training.options import SharedOptions, flag
from training.plan import Plan
from training.signals import signals

# Smallest batch whose examples identify it; smaller batches may be equal by chance.
MIN_FINGERPRINT_BATCH = 4
# Batches that identify where the training data begin.
FINGERPRINT_BATCHES = 3
# Examples by which metrics are tried, and the packages whose metrics are trusted: Keras's and ours.
MOST_TRIED = 32
PACKAGES_WHOSE_METRICS_ADD_UP = ("keras", "keras_hub", "keras_nlp", "models")
# Of a tensor's values those that identify it; millionths by which two processors may round it.
TRAIT_VALUES, ROUNDING = 2**16, 100

# No checkpoint keeps their state, or a resumed epoch applies them twice (the scheduler's rate as a
# function of the last one), so a resumed run would train differently.
STATEFUL_KERAS_CALLBACKS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)

# What Keras's `fit(class_weight=...)` raises, and what to do about it.
CLASS_WEIGHT_ERRORS = {
    "`class_weight` and `sample_weight` at the same time": (
        "the training data have weights already; multiply them by the weights of the classes, and "
        "leave out class_weight"
    ),
    "`class_weight` is only supported for Models with a single output": (
        "the model has several outputs; put weights for each of them into the training data, and "
        "leave out class_weight"
    ),
}
# Results that only some runs have, or that evaluations add.
OPTIONAL_RESULTS = {"run_dir", "examples", "test_standard_error"}
# Steps from which compiling pays on a GPU: on an H200 it took 9 s (BERT-tiny) and 29 s (BERT-base),
# and saved 0.012 s and 0.089 s of a step (docs/performance.md).
GPU_JIT_MIN_STEPS = 750


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """Sets dtype policy and float type, and restores them at the end."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    set_precision(name)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def set_precision(name: str) -> None:
    """Sets dtype policy and float type."""
    keras.config.set_floatx("float64" if name == "float64" else "float32")
    keras.config.set_dtype_policy(name)


def require_precision(model: keras.Model, name: str) -> None:
    """Rejects a model whose layers were created under another dtype policy than the run's.

    Args:
        model: built.
        name: `--precision`.

    Raises:
        RunError: Keras's session was cleared, the policy is not the run's any more, or no layer
            computes in its dtype.
    """
    if randomness.random_seed() is None:
        raise RunError(
            "keras.utils.clear_session() was called after run.plan(), and has reset the seed and "
            "the dtype policy of the run: call it before"
        )
    now = keras.config.dtype_policy().name
    if now != name:
        raise RunError(
            f"--precision {name}: Keras's dtype policy was changed to {now}: choose it by "
            "--precision alone"
        )
    dtype = keras.DTypePolicy(name).compute_dtype
    parts = [e for e in inspection.layers_of(model) if not isinstance(e, keras.Model)]
    found = {each.compute_dtype for each in parts if each.weights}
    if found and dtype not in found:
        raise RunError(
            f"--precision {name}: no layer of the model {model.name} computes in {dtype} (but in "
            f"{listed(sorted(found))}): create the layers after run.plan() and without a dtype, or "
            "pass their own precision as --precision"
        )


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


def jit_compile(options: SharedOptions, strategy: tf.distribute.Strategy, steps: int) -> bool | str:
    """Decides whether XLA compiles the step: `--jit auto`.

    On CPUs it compiles from `JIT_MIN_STEPS` steps, measured per recipe: two replicas on two cores
    trained at 36,000 instead of 29,000 tokens/s (BERT-tiny) and started 6 seconds later. On GPUs it
    compiles from `GPU_JIT_MIN_STEPS` steps for each shape of a batch: on an H100, BERT-base trained
    at 414,000 instead of 99,000 tokens/s (bfloat16), and on an H100 split in two, 6 layers of 768
    at 485,000 instead of 173,000. With `--deterministic` it compiles only on one GPU, and only
    recipes whose compiled steps were found to be identical (`GPU_JIT_IS_DETERMINISTIC`): XLA
    refuses some operations then, such as the gradient of max pooling. How much faster such a run is
    was not measured.

    Args:
        options: `--jit`, and the options that XLA does not support or would change.
        strategy: XLA cannot compile where all replicas share one copy of the weights.
        steps: steps of the run.

    Returns:
        True or False, or "auto" to leave it to Keras, which compiles on one GPU if XLA can.
    """
    if options.jit != "auto":
        return options.jit == "on"
    name, replicas = kinds.name_of(strategy), strategies.replicas(strategy)
    if options.precision == "float64" or name in kinds.SHARED_WEIGHTS:
        return "auto"
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    min_steps = GPU_JIT_MIN_STEPS * options.batch_shapes if on_gpu else options.JIT_MIN_STEPS
    is_long = min_steps is not None and steps >= min_steps
    is_plain = on_gpu and replicas == 1 and options.accumulate_steps == 1
    if options.deterministic:  # Keras compiles nothing then
        return (is_long and is_plain and options.GPU_JIT_IS_DETERMINISTIC) or "auto"
    if is_plain:
        return "auto" if is_long else False
    return is_long or "auto"


def refuse_executions_across_epochs(steps: int, plan: Plan) -> None:
    """Rejects `--steps-per-execution` that would run past the end of an epoch or the run.

    Args:
        steps: steps per execution.
        plan: the plan; a resumed run may start within an epoch.

    Raises:
        OptionsError: names the number that it must divide.
    """
    numbers = (min(plan.steps_per_epoch, plan.total_steps), plan.total_steps, plan.steps_done)
    common = math.gcd(*numbers)
    if common % steps:
        raise OptionsError(
            f"--steps-per-execution {steps}: an epoch has {plan.steps_per_epoch} steps and the "
            f"run {plan.total_steps}, {plan.steps_done} of them done; it must divide {common}"
        )


def require_metric(model: keras.Model, keep_best: str | None, mode: str = "auto") -> None:
    """Rejects a `--keep-best` that the model does not measure, or whose direction is unknown.

    Raises:
        OptionsError: names the model's metrics, or the option that sets the direction.
    """
    if keep_best is None:
        return
    # Not `model.metrics`, in which one container stands for all metrics of `compile()`.
    measured = [f"val_{name}" for name in step.flat_results(model.get_metrics_result())]
    if keep_best not in measured:
        raise OptionsError(f"--keep-best {keep_best}: must be one of {', '.join(measured)}")
    if direction(keep_best, model, mode) is None:
        raise OptionsError(
            f"--keep-best {keep_best}: unknown whether a smaller or a larger value is better: add "
            "--keep-best-mode min or --keep-best-mode max"
        )


def require_splits(options: SharedOptions, validation, test) -> None:
    """Rejects options that evaluate on a split that the recipe does not have.

    Args:
        options: the options.
        validation: the validation data of `run.prepare()`, or None.
        test: its test data, or None.

    Raises:
        OptionsError: names the options, one line for each split.
        RunError: the data of a split have no end, or can be read only once.
    """
    for split, data in {"validation": validation, "test": test}.items():
        if isinstance(data, Iterator):
            raise RunError(
                f"run.prepare({split}=...) got a {type(data).__name__}, which can be read only "
                "once, and each evaluation reads the split again: pass "
                "data.arrays.evaluation_data(), or another tf.data.Dataset"
            )
        # Keras takes arrays and a `PyDataset`, too.
        is_endless = (
            isinstance(data, tf.data.Dataset) and data.cardinality() == tf.data.INFINITE_CARDINALITY
        )
        if is_endless:
            raise RunError(
                f"run.prepare({split}=...): the data have no end, and an evaluation would have "
                "none; leave out repeat(), or pass data.arrays.evaluation_data()"
            )
    users = {
        "validation": (
            "keep_best",
            "max_validation_examples",
            "reduce_on_plateau",
            "validate_every",
        ),
        "test": ("test_every",),
    }
    problems = []
    for split, data in {"validation": validation, "test": test}.items():
        flags = [flag(name) for name in users[split] if getattr(options, name) is not None]
        if data is None and flags:
            problems.append(
                f"{', '.join(flags)}: this recipe has no {split} data "
                f"(run.prepare({split}=None)); leave it out"
            )
    if problems:
        raise OptionsError("\n".join(problems))


def require_fewer(options: SharedOptions, validation) -> None:
    """Rejects validation data with more examples than `--max-validation-examples`.

    Args:
        options: the options.
        validation: batches of the validation split; of None `require_splits` has said so.

    Raises:
        OptionsError: the recipe ignores the option.
    """
    most = options.max_validation_examples
    if most is None:
        return
    examples = 0  # of the batches before: the last one may be padded
    if isinstance(validation, tf.data.Dataset):
        for batch in validation:
            if examples >= most:
                break
            examples += len(keras.tree.flatten(batch)[0])
        else:
            return
    raise OptionsError(
        f"--max-validation-examples {most}: this recipe ignores it (its validation split has more "
        "examples); a recipe applies it with data.arrays.draw_examples(splits, "
        "options.max_examples, options.seed, options.max_validation_examples)"
    )


def partial_best(options: SharedOptions) -> str | None:
    """Returns a note if `best/` will not hold the whole, or the averaged, model."""
    if options.keep_best is None or options.early_stopping is not None:
        return None
    flags = [flag(name) for name in files.NOT_WHOLE_WITH if getattr(options, name, None)]
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


def random_layers_note(model: keras.Model) -> str | None:
    """Returns a line that names layers whose draws may depend on the number of replicas, or None.

    Dropout is not among them, see `randomness.drop_out_by_place`. How a layer of the user's uses
    its generators cannot be seen.
    """
    names = [
        layer.name
        for layer in inspection.layers_of(model)
        if not isinstance(layer, randomness.DROPOUT) and randomness.seeds_of(layer)
    ]
    if not names:
        return None
    return (
        f"{listed(names)}: except by keras.random.dropout(), each replica draws the same random "
        "numbers for its own examples, so the results may depend on the number of replicas"
    )


def require_sums(model: keras.Model, train_data: tf.data.Dataset) -> list[str]:
    """Rejects metrics of the user's classes that do not add up over replicas.

    Args:
        model: built, on several replicas.
        train_data: its first examples are evaluated.

    Returns:
        A note for each metric that cannot be tried.

    Raises:
        DistributionError: names the metric, and the way out.
    """
    strategy = model.distribute_strategy
    metrics = [
        (place, metric)
        for place, metric in compiled_metrics.own_metrics(model)
        if type(metric).__module__.partition(".")[0] not in PACKAGES_WHOSE_METRICS_ADD_UP
    ]
    if not metrics or kinds.name_of(strategy) in kinds.SHARED_WEIGHTS:
        return []
    notes = []
    try:
        labels, outputs = _some_outputs(model, train_data)
    except Exception as error:  # any that the model raises for fewer examples than usual
        return [_not_tried(metric, error) for _, metric in metrics]
    for place, metric in metrics:
        try:
            is_sum = compiled_metrics.adds_up(metric, strategy, labels[place], outputs[place])
        except Exception as error:  # likewise
            notes.append(_not_tried(metric, error))
            continue
        if not is_sum:
            raise DistributionError(
                f"metric {metric.name}: {type(metric).__name__} does not add up over the replicas, "
                "whose states are summed (two halves of a batch give another result than the "
                "whole; a maximum does, or a last value): keep sums and counts in its variables "
                "and divide in result(), or train on one device (--strategy none)"
            )
    return notes


def _not_tried(metric: keras.metrics.Metric, error: Exception) -> str:
    return (
        f"metric {metric.name}: could not try whether it adds up over replicas "
        f"({first_line(error)}); it must keep sums in its variables"
    )


def _some_outputs(model: keras.Model, train_data: tf.data.Dataset) -> tuple[list, list]:
    """Returns labels and outputs of some examples, by output; an even number of them."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(next(iter(train_data.take(1))))
    count = min(MOST_TRIED, len(keras.tree.flatten(x)[0])) // 2 * 2
    x, y = keras.tree.map_structure(lambda rows: rows[:count], (x, y))
    strategy, plain = model.distribute_strategy, tf.autograph.experimental.do_not_convert

    def predict():
        return strategy.run(plain(lambda: fitting.call(model, x, training=False)))

    outputs = tf.nest.map_structure(
        lambda value: strategy.experimental_local_results(value)[0], tf.function(plain(predict))()
    )
    in_order = compiled_metrics.in_order_of_outputs
    return in_order(model, y), in_order(model, outputs)


def require_single_numbers(model: keras.Model) -> None:
    """Rejects metrics with several values: a record holds one number of each metric.

    Args:
        model: built, with its metrics.

    Raises:
        RunError: names the metric.
    """
    for name, value in step.flat_results(model.get_metrics_result()).items():
        shape = tuple(keras.ops.shape(value))
        if shape != ():
            raise RunError(
                f"the metric {name} has several values, of shape {shape}: a run records one "
                "number of each metric; average them (for instance "
                "keras.metrics.F1Score(average='macro') of one-hot labels)"
            )


def require_finite(test: dict[str, float], steps: int, learning_rate: float) -> None:
    """Rejects a model whose test metrics are not finite.

    Raises:
        BadLoss: names the metric.
    """
    for name, value in test.items():
        if not math.isfinite(value):
            remedy = "use a lower --base-learning-rate and another --run-dir"
            if math.isfinite(test.get("loss", math.nan)):
                remedy = "the test's loss is finite: correct the metric, which is not a number"
            raise BadLoss(
                f"the test's {name} is {value} after {steps} steps (learning rate "
                f"{learning_rate:.3g} at the peak): no model is written; {remedy}"
            )


def stateful(
    ours: dict[str, StepCallback],
    extra: Sequence[keras.callbacks.Callback],
    info: CheckpointInfo | None,
) -> dict[str, StepCallback]:
    """Returns the callbacks whose state a checkpoint keeps, by name.

    Args:
        ours: the callbacks of every run.
        extra: the recipe's callbacks, named by their class.
        info: the checkpoint that the run resumes from, or None.

    Raises:
        RunError: a callback of Keras has state that no checkpoint keeps, two have the same name, or
            one whose state the checkpoint holds is missing.
    """
    callbacks = dict(ours)
    for callback in extra:
        name = type(callback).__name__
        _refuse_stateful(callback)
        if not isinstance(callback, StepCallback):
            continue
        if name in callbacks:
            raise RunError(f"two callbacks of class {name}: make one a subclass with another name")
        callbacks[name] = callback
    if info is None:
        return callbacks
    missing = sorted(info.state["callbacks"].keys() - callbacks.keys())
    if missing:
        raise RunError(
            f"{info.folder} holds the state of {', '.join(missing)}: hand the same callbacks "
            "to run.prepare(extra=[...]) as the run began with"
        )
    return callbacks


def class_weight_problem(error: ValueError) -> str | None:
    """Returns a line about `fit(class_weight=...)` if that is why Keras raised this, else None."""
    for part, remedy in CLASS_WEIGHT_ERRORS.items():
        if part in str(error):
            return f"model.fit(class_weight=...): {remedy}"
    return None


def _refuse_stateful(callback: keras.callbacks.Callback) -> None:
    if isinstance(callback, STATEFUL_KERAS_CALLBACKS):
        raise RunError(
            f"keras.callbacks.{type(callback).__name__} has state that no checkpoint keeps, so a "
            "resumed run would train differently: use --keep-best, --early-stopping, "
            "--reduce-on-plateau, a schedule of keras.optimizers.schedules or the averages of "
            "the optimizer (use_ema), or write a callbacks.steps.StepCallback with "
            "get_state() and set_state()"
        )


def watch_fit(
    model: keras.Model, of_run: Sequence[keras.callbacks.Callback], first: keras.callbacks.Callback
) -> None:
    """Makes `model.fit()` reject what a resumed run would train on differently, until it is over.

    Callbacks that are added to those of the run are called before `first`, so that the run records
    and saves what they decide. `model.compile()` is rejected: it would replace the run's step. The
    training also reads the numbers of a step only where a callback looks them up
    (`callbacks/late_numbers.py`), and copies batches to a GPU before their steps
    (`fitting.copy_batches_ahead`).

    Args:
        model: compiled and built; changed in place.
        of_run: the callbacks of the run.
        first: the first of them that comes after those of the recipe.

    Raises:
        RunError: by `fit()`: it gets arrays, not the run's callbacks, or a callback with state that
            no checkpoint keeps; or it is called again. By `compile()`.
    """
    # A model that an earlier run has trained has that run's.
    fit_stock = getattr(model.fit, "stock", model.fit)
    compile_stock = getattr(model.compile, "stock", model.compile)
    was_called = False
    all_arguments = "model.fit(train_data, **fit_options), with all that run.prepare() returned"

    def compile_again(*args, **kwargs):
        if signals.training:
            raise RunError(
                "model.compile() was called after run.prepare(), and would replace the step that "
                "makes the numbers exact: compile before run.prepare(), and use two runs for two "
                "phases of training"
            )
        compile_stock(*args, **kwargs)

    def fit(*args, **kwargs):
        nonlocal was_called
        if not signals.training:  # the run is over
            return fit_stock(*args, **kwargs)
        if was_called:
            raise RunError(
                "model.fit() was called a second time: a run is one training; make two runs, or "
                "use --epochs"
            )
        was_called = True
        data = args[0] if args else kwargs.get("x")
        if not isinstance(data, tf.data.Dataset):
            raise RunError(
                f"model.fit() got a {type(data).__name__}, which begins again when the run "
                f"resumes: call {all_arguments}"
            )
        callbacks = kwargs.get("callbacks") or []
        callbacks = getattr(callbacks, "callbacks", callbacks)  # of a CallbackList
        if not all(any(each is own for each in callbacks) for own in of_run):
            raise RunError(
                f"model.fit() lacks callbacks of the run, which save and log: call {all_arguments}"
            )
        added = [each for each in callbacks if not any(each is own for own in of_run)]
        for callback in added:
            _refuse_stateful(callback)
            if isinstance(callback, StepCallback):
                raise RunError(
                    f"{type(callback).__name__} is a StepCallback: pass it as "
                    "run.prepare(extra=[...])"
                )
        position = next(index for index, own in enumerate(of_run) if own is first)
        callbacks = [*of_run[:position], *added, *of_run[position:]]
        kwargs["callbacks"] = CallbackList(
            callbacks,
            add_history=True,
            add_progbar=kwargs.get("verbose", 1) != 0,
            model=model,
            verbose=kwargs.get("verbose", 1),
            epochs=kwargs.get("epochs", 1),
            steps=kwargs.get("steps_per_epoch"),
        )
        if fits_on_a_gpu(data):
            data.copied_ahead = strategies.gpu_without_strategy(model.distribute_strategy)
        try:
            return fit_stock(*args, **kwargs)
        finally:
            data.copied_ahead = None

    fit.stock, compile_again.stock = fit_stock, compile_stock  # type: ignore[attr-defined]
    model.fit, model.compile = fit, compile_again


def fits_on_a_gpu(data: tf.data.Dataset) -> bool:
    """Tells whether a GPU can hold what a dataset has: tensors, and not of strings."""
    specs = tf.nest.flatten(data.element_spec)
    return all(isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string for spec in specs)


def require_compiled(model: keras.Model, train_data) -> None:
    """Rejects a model without `compile()` or `call()`; data that are ragged or not a dataset.

    Raises:
        RunError: one line per problem, with the remedy.
    """
    problems = []
    if not model.compiled:
        problems.append("run.prepare() takes a compiled model: call model.compile() before")
    if type(model).call is keras.Model.call:
        problems.append(
            f"{type(model).__name__} has no call(), which builds and evaluates a model: write one "
            "that takes the inputs of train_data (of a GAN for instance: return "
            "self.discriminator(inputs))"
        )
    if model.compiled and model.run_eagerly and not inspection.own_steps(model):
        problems.append(
            f"{type(model).__name__} is compiled with run_eagerly=True, and a run computes its "
            "steps as graphs: leave it out"
        )
    if not isinstance(train_data, tf.data.Dataset):
        problems.append(
            f"train_data is a {type(train_data).__name__}: expected batches as a tf.data.Dataset; "
            "data.arrays.training_data(..., **plan.batches) makes them from NumPy arrays"
        )
    elif any(
        isinstance(spec, tf.RaggedTensorSpec) for spec in tf.nest.flatten(train_data.element_spec)
    ):
        problems.append(
            "train_data has ragged tensors: pad them with zeros, .to_tensor(shape=(None, length)), "
            "and let the model mask them, Embedding(..., mask_zero=True) or Masking()"
        )
    else:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(train_data.element_spec)
        has_labels = not isinstance(y, tf.NoneTensorSpec | None)
        parts = (x, y, weights) if has_labels else (x, weights)
        if any(isinstance(spec, tf.NoneTensorSpec) for spec in tf.nest.flatten(parts)):
            problems.append(
                "train_data has None in a batch: an output without weights of its own needs ones"
            )
        if model.compiled and not has_labels and inspection.needs_labels(model):
            problems.append(
                "train_data has no labels, which the loss or the metrics of compile() compare with "
                "the outputs: pass them as y (of an autoencoder x itself), or write a "
                "compute_loss() that needs none"
            )
    if problems:
        raise RunError("\n".join(problems))


def require_kept_variables(model: keras.Model) -> None:
    """Rejects variables of TensorFlow in layers, which Keras neither trains nor saves.

    Args:
        model: built.

    Raises:
        RunError: names the layer and its attribute.
    """
    for layer in inspection.layers_of(model):
        for name, value in vars(layer).items():
            if name.startswith("_self_"):  # TensorFlow's own lists of them
                continue
            values = value.values() if isinstance(value, dict) else value
            for leaf in values if isinstance(value, list | tuple | dict) else (value,):
                if isinstance(leaf, tf.Variable):
                    raise RunError(
                        f"{type(layer).__name__}.{name} of the layer {layer.name} is a "
                        "tf.Variable, which Keras does not train and no checkpoint keeps: use "
                        "self.add_weight(), or tf.constant() for what does not change"
                    )


def build_own_step(model: keras.Model, train_data: tf.data.Dataset) -> None:
    """Builds the optimizers of a `train_step` that the model overrides, by tracing it once.

    Keras builds those besides `model.optimizer` in the first step of `fit()`. That is too late to
    restore a checkpoint: Keras skips their state. Tracing computes nothing.

    Args:
        model: compiled and built, under its strategy's scope.
        train_data: the training data.

    Raises:
        RunError: the step returns no loss, or works with `compile(run_eagerly=True)` alone.
    """
    strategy = model.distribute_strategy
    # On several replicas such a model is rejected later.
    if "train_step" not in inspection.own_steps(model) or strategy.num_replicas_in_sync > 1:
        return
    with strategy.scope():
        step_of_batch = tf.function(
            lambda batch: strategy.run(model.train_step, (batch,)), autograph=False
        )
        try:
            traced = step_of_batch.get_concrete_function(train_data.element_spec)
        except Exception as error:  # any that the step raises
            if not model.run_eagerly:
                raise
            raise RunError(
                f"{type(model).__name__}.train_step() works with run_eagerly=True alone "
                f"({first_line(error)}); a run traces it, to build its optimizers"
            ) from error
    names = list(traced.structured_outputs or {})
    if "loss" not in names:
        raise RunError(
            f"{type(model).__name__}.train_step() returns {', '.join(names) or 'nothing'}: add "
            "'loss', the number that the run logs, and that ends it where it is not finite"
        )
    optimizers = [*model.optimizer.variables, *_optimizer_variables(model)]
    step.require_kept(traced.graph, model, optimizers)


def require_in_scope(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Rejects parts of a compiled model that were created outside of the strategy's scope.

    Replicas would share one copy of a metric's sums, or TensorFlow would fail at the first step. On
    one device it makes no difference.

    Raises:
        RunError: names the part.
    """
    if strategy.num_replicas_in_sync == 1:
        return

    def in_scope(variables) -> bool:
        created_in_scope = strategy.extended.variable_created_in_scope
        return all(created_in_scope(variable.value) for variable in variables)

    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    outside = []
    if model.distribute_strategy is not strategy or not in_scope(model.variables):
        outside.append(f"the model {model.name}")
    elif not in_scope(optimizer.variables):
        outside.append(f"the optimizer {type(optimizer).__name__}")
    else:
        metrics = [metric for each in model.metrics for metric in getattr(each, "metrics", [each])]
        outside += [f"the metric {m.name}" for m in metrics if not in_scope(m.variables)]
    if outside:
        raise RunError(
            f"{outside[0]} was created outside of the strategy's scope: create the model, its "
            "optimizer and its metrics, and call compile(), inside `with run.strategy.scope():`"
        )


def first_batches_sha256(train_data: tf.data.Dataset) -> list[str]:
    """Returns the checksums of the first batches; rejects data that begin differently each time.

    Raises:
        RunError: the data are empty, have a negative weight, begin with other batches, or draw
            numbers that would be others after a resume.
    """
    operation = randomness.random_operation(train_data)
    if operation:
        raise RunError(
            f"train_data draws random numbers or changes variables as it is read ({operation} in "
            "the function of a map() or the like), which start again where a run resumes: it would "
            "train on other examples; draw them from data.batches.uniform(), by epoch and example"
        )
    # Batches of `data.batches` are a function of the step; any other pipeline is read twice.
    first = _first_batches(train_data)
    if not first:
        raise RunError("train_data has no batch for the next step: repeat() it")
    if not _is_function_of_step(train_data) and first != _first_batches(train_data):
        raise RunError(
            "train_data begins with another batch each time it is iterated: a resumed run would "
            "train on other batches; use data.arrays.training_data(..., **plan.batches), or build "
            "on data.batches.training_batches(), whose batches are functions of (seed, step)"
        )
    return first


def _first_batches(train_data: tf.data.Dataset) -> list[str]:
    checksums = []
    for batch in _taken(train_data):
        digest = hashlib.sha256()
        for tensor in tf.nest.flatten(batch, expand_composites=True):
            if tensor is not None:  # labels of a model without any
                digest.update(tf.io.serialize_tensor(tensor).numpy())
        checksums.append(digest.hexdigest())
        _, _, weights = keras.utils.unpack_x_y_sample_weight(batch)
        leaves = [leaf for leaf in tf.nest.flatten(weights) if leaf is not None]
        if any(bool(tf.reduce_any(tf.cast(leaf, tf.float32) < 0)) for leaf in leaves):
            raise RunError(
                "train_data has a negative sample weight: the loss is a mean, divided by the sum "
                "of the weights; put the sign into the labels or into compute_loss()"
            )
    return checksums


def _taken(train_data: tf.data.Dataset) -> Iterator:
    try:
        yield from train_data.take(FINGERPRINT_BATCHES)
    except tf.errors.AlreadyExistsError as error:  # of a cache(FILE)
        lock = re.search(r"'([^']+\.lockfile)'", str(error))
        raise RunError(
            f"train_data has a cache that is locked, {lock[1] if lock else first_line(error)}: a "
            "run that was killed leaves such a file behind; remove it if no other process uses it, "
            "and leave out cache(FILE)"
        ) from error


def traits(data, count: int) -> tuple[list[str], list[int]] | None:
    """Returns what the first batches of a split have on each worker, whatever its processor.

    Processors round differently, so a checksum of numbers might differ.

    Args:
        data: global batches.
        count: of the batches that are read.

    Returns:
        Dtype and shape of each tensor, and two numbers of each, millionths, that other values or
        another order of them change by more than `ROUNDING`; None where each worker may have its
        own data, or the batches cannot be read now.
    """
    own = tf.data.experimental.AutoShardPolicy.OFF
    if not isinstance(data, tf.data.Dataset) or (
        data.options().experimental_distribute.auto_shard_policy == own
    ):
        return None
    forms, numbers = [], []
    try:
        for batch in data.take(count):
            for tensor in tf.nest.flatten(batch, expand_composites=True):
                if tensor is not None:
                    forms.append(f"{tensor.dtype.name} {tuple(tensor.shape)}")
                    numbers += _traits_of(tensor.numpy())
    except tf.errors.AlreadyExistsError:  # a cache(FILE) that another worker writes
        return None
    return forms, numbers


def _traits_of(values: np.ndarray) -> list[int]:
    """Returns the size of a tensor's values, and a weighted mean that knows their order."""
    flat = values.reshape(-1)
    flat = flat[:: max(1, len(flat) // TRAIT_VALUES)]
    if values.dtype.kind in "OSU":
        return [zlib.crc32(repr(flat.tolist()).encode()), 0]
    flat = np.nan_to_num(flat.astype(np.float64), posinf=0.0, neginf=0.0)
    weights = np.cos(np.arange(len(flat)))
    size = np.abs(flat) @ np.abs(weights) + 1e-30
    return [round(1e6 * math.log(size)), round(1e6 * float(flat @ weights / size))]


def _is_function_of_step(train_data: tf.data.Dataset) -> bool:
    """Returns whether the batches come from `data.batches`, in another order in each epoch."""
    return hasattr(train_data, "part_of_worker")


def _first_difference(variables: list, before: list, now: list) -> str:
    """Returns in which variable two lists of shapes differ first, or their lengths."""
    for variable, old, new in zip(variables, before, now, strict=False):
        if old != new:
            return f"{variable.path} was {tuple(old)}, is now {tuple(new)}"
    return f"it had {len(before)} weights, now has {len(now)}"


def _require_same_optimizer(info: CheckpointInfo, model: keras.Model, now: dict) -> None:
    """Rejects another optimizer than the checkpoint's, whose state Keras would reset."""
    before = info.state["fingerprint"]["optimizer"]
    if before == now:
        return
    old, new = before["variables"], now["variables"]
    if before["name"] != now["name"]:
        difference = f"it was {before['name']}, is now {now['name']}"
    elif len(old) != len(new):
        difference = f"it had {len(old)} variables, now has {len(new)}"
    else:
        difference = _first_difference(_optimizer_variables(model), old, new)
    raise RunError(
        f"{info.folder}: cannot resume: the optimizer has changed since ({difference}); restore "
        "the one that compile() got, or use another --run-dir"
    )


def _optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers of the training: those of `compile()`, then others that are built.

    The others are attributes of the model or of its layers, or in lists and dicts that are.
    """
    found = {id(each): each for each in step.inner_optimizers(model.optimizer)}
    for layer in inspection.layers_of(model):
        for value in vars(layer).values():
            parts = value.values() if isinstance(value, dict) else value
            for part in parts if isinstance(value, dict | list | tuple) else [value]:
                is_other = isinstance(part, keras.optimizers.Optimizer) and part.built
                if is_other and part is not model.optimizer:
                    found[id(part)] = part
    return list(found.values())


def _optimizer_variables(model: keras.Model) -> list:
    return [variable for each in _optimizers(model) for variable in each.variables]


def shapes_of(model: keras.Model) -> dict:
    """Returns the shapes of a model's weights and its optimizer, and the order of examples: JSON.

    Args:
        model: built.
    """
    return {
        "weights": [list(weight.shape) for weight in model.weights],
        "optimizer": {
            "name": ", ".join(type(each).__name__ for each in _optimizers(model)),
            "variables": [list(variable.shape) for variable in _optimizer_variables(model)],
        },
        "order": batches.ORDER,
    }


def require_same(
    info: CheckpointInfo | None,
    model: keras.Model,
    train_data: tf.data.Dataset,
    first_batches: list[str],
    plan: Plan,
) -> dict:
    """Rejects another model, optimizer or metrics than the checkpoint's, and data from its start.

    Args:
        info: the checkpoint, or None.
        model: the model to train, built.
        train_data: the training data.
        first_batches: the return value of `first_batches_sha256(train_data)`.
        plan: small batches may be equal by chance, and those of each epoch may begin equally.

    Returns:
        The fingerprint that the run's checkpoints keep: JSON values.

    Raises:
        RunError: the model, the optimizer, the metrics or the data do not match.
    """
    found = shapes_of(model)
    weights, optimizer = found["weights"], found["optimizer"]
    if info is None:
        return found | {"first_batches": first_batches}
    before = info.state["fingerprint"]
    draws = _is_function_of_step(train_data) and info.step < plan.total_steps
    if "order" not in before or (draws and before["order"] != batches.ORDER):
        raise RunError(
            f"{info.folder}: cannot resume: the version that began this run draws the examples in "
            "another order; finish it with that version (options.json has its commit), or use "
            "another --run-dir"
        )
    if before["weights"] != weights:
        difference = _first_difference(model.weights, before["weights"], weights)
        raise RunError(
            f"{info.folder}: cannot resume: the model has changed since ({difference}); restore "
            "build_model() and its options, or use another --run-dir"
        )
    _require_same_optimizer(info, model, optimizer)
    if info.steps_into_epoch and not MetricStates.of(model).fit(info.state["metrics"]):
        raise RunError(
            f"{info.folder}: cannot resume within an epoch: the metrics have changed since; "
            "restore those that compile() got, or use another --run-dir"
        )
    start = before["first_batches"]
    tells_apart = plan.global_batch_size >= MIN_FINGERPRINT_BATCH and (
        len(start) == 1 or len(set(start)) > 1
    )
    # Data in a fixed order begin equally in each epoch.
    may_begin_equally = info.step % plan.steps_per_epoch == 0 and not _is_function_of_step(
        train_data
    )
    if tells_apart and not may_begin_equally and first_batches[: len(start)] == start:
        raise RunError(
            f"cannot resume at step {info.step}: train_data begins with the first batch of the "
            "whole run; pass **plan.batches to the pipeline, whose first_batch is the next one"
        )
    return before


def suitable_inputs(part: keras.Model, inputs):
    """Returns inputs that a part of a model takes, for a comparison of what it answers.

    Args:
        part: For instance one tower of two, or the generator beside a discriminator.
        inputs: Of the whole model, tensors of shape (1, ...).

    Returns:
        `inputs` if the part takes such ones, or its layers do not say what it takes; otherwise
        ones of its shapes, with unknown sizes of one.
    """
    wanted = keras.tree.flatten(getattr(part, "input", None))
    given = keras.tree.flatten(inputs)
    if not wanted or any(tensor.dtype == "string" for tensor in wanted):
        return inputs
    if len(wanted) == len(given) and all(map(_fits, wanted, given)):
        return inputs
    return keras.tree.map_structure(
        lambda tensor: keras.ops.ones([size or 1 for size in tensor.shape], tensor.dtype),
        part.input,
    )


def _fits(wanted, given) -> bool:
    sizes = zip(wanted.shape, given.shape, strict=False)
    return len(wanted.shape) == len(given.shape) and all(
        size is None or size == found for size, found in sizes
    )
