"""Rejects callbacks and calls of `fit()` with which a resumed run would train differently."""

import math
import numbers
import re
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from callbacks.checkpoint import CheckpointInfo
from callbacks.late_numbers import CallbackList
from callbacks.steps import StepCallback
from data.errors import listed
from distribution import strategies
from training import data_checks
from training.errors import RunError
from training.signals import signals

# No checkpoint keeps their state, or a resumed epoch applies them twice (the scheduler's rate as a
# function of the last one), so a resumed run would train differently; what to do instead.
STATEFUL_KERAS_CALLBACKS = {
    keras.callbacks.BackupAndRestore: "leave it out, since the same command resumes the run",
    keras.callbacks.EarlyStopping: "pass --early-stopping, which restores the best weights",
    keras.callbacks.LearningRateScheduler: (
        "give the optimizer a schedule of keras.optimizers.schedules"
    ),
    keras.callbacks.ModelCheckpoint: "pass --checkpoint-every and --keep-best",
    keras.callbacks.OrbaxCheckpoint: "pass --checkpoint-every and --keep-best",
    keras.callbacks.ReduceLROnPlateau: "pass --reduce-on-plateau",
    keras.callbacks.SwapEMAWeights: "pass use_ema=True to the optimizer",
}

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

# Arguments of Keras's `fit()` that it ignores or rejects beside a dataset, or that a resumed run
# cannot repeat, and what to use instead.
REFUSED_ARGUMENTS = {
    "y": "the batches of train_data have the labels: pass them to data.arrays.training_data()",
    "sample_weight": (
        "the batches of train_data have the weights: pass them to data.arrays.training_data()"
    ),
    "batch_size": (
        "train_data has batches: choose their size by --batch-size-per-replica or "
        "--global-batch-size"
    ),
    "validation_split": "pass the validation split to run.prepare(validation=...)",
    # Keras continues with the next batches after each epoch: those of a resumed run are others.
    "validation_steps": (
        "it validates other batches after each epoch, and --validate-every all of them: pass fewer "
        "examples to run.prepare(validation=...), as recipes do for --max-validation-examples"
    ),
}
LEFT_OUT = object()
DEFAULTS = {"epochs": 1, "initial_epoch": 0, "validation_data": None}  # of Keras's `fit()`
# What decides the arguments of `fit()` that `run.prepare()` returns, and no call may change.
DECIDED_BY = {
    "epochs": "--epochs and --max-steps decide",
    "initial_epoch": "the checkpoint decides",
    "steps_per_epoch": "the examples and the batch of run.plan() decide",
    "validation_data": "run.prepare(validation=...) decides",
}


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


def lost_states_note(
    extra: Sequence[keras.callbacks.Callback], info: CheckpointInfo | None
) -> str | None:
    """Returns a line that names callbacks whose state a resumed run has lost, or None.

    Args:
        extra: the recipe's callbacks.
        info: the checkpoint that the run resumes from, or None.
    """
    if info is None:
        return None
    names = [type(each).__name__ for each in extra if _may_count(each)]
    if not names:
        return None
    return (
        f"{listed(names)}: no checkpoint keeps the state of such a callback, which begins again "
        "here; of a callbacks.steps.StepCallback it keeps what get_state() returns"
    )


def _may_count(callback: keras.callbacks.Callback) -> bool:
    """Tells whether a callback of the user's has values that may change as it is called."""
    is_known = isinstance(callback, StepCallback) or hasattr(callback, "on_record")
    if is_known or type(callback).__module__.startswith("keras."):
        return False
    of_keras = vars(keras.callbacks.Callback())
    values = [value for name, value in vars(callback).items() if name not in of_keras]
    kinds = (int, float, list, dict, set, np.ndarray)
    return any(isinstance(each, kinds) and not isinstance(each, bool) for each in values)


def class_weight_problem(error: ValueError) -> str | None:
    """Returns a line about `fit(class_weight=...)` if that is why Keras raised this, else None."""
    for part, remedy in CLASS_WEIGHT_ERRORS.items():
        if part in str(error):
            return f"model.fit(class_weight=...): {remedy}"
    return None


def class_weight_values_problem(class_weight) -> str | None:
    """Returns a line about weights of classes that Keras cannot use or would train badly on."""
    example = "expected weights by class, for instance {0: 1.0, 1: 3.0}"
    if not isinstance(class_weight, dict) or not class_weight:
        return f"model.fit(class_weight={class_weight!r}): {example}"
    for name, weight in class_weight.items():
        if not isinstance(name, numbers.Integral) or name < 0:
            return f"model.fit(class_weight=...): {name!r} is not the number of a class: {example}"
        if not isinstance(weight, numbers.Real) or not 0 <= float(weight) < math.inf:
            return (
                f"model.fit(class_weight=...): the class {name} has the weight {weight!r}: "
                "expected numbers of at least 0"
            )
    return None


def _beyond_class_weight(class_weight: dict | None, error: str) -> str | None:
    """Returns a line if an error of TensorFlow's says that a label is beyond the weighted classes.

    Keras gives classes between those of `class_weight` the weight 1, but none beyond the last one.
    """
    if class_weight is None or "MapDataset" not in error:
        return None
    last = max(class_weight)
    beyond = re.search(rf"= (-?\d+) is not in \[0, {last + 1}\)", error)
    if beyond is None:
        return None
    if int(beyond[1]) < 0:
        return (
            f"model.fit(class_weight=...): the labels contain {beyond[1]}: number the classes "
            "from 0"
        )
    return (
        f"model.fit(class_weight=...): the labels have classes beyond {last}, the last one with a "
        "weight: give each class a weight"
    )


def _validates(epoch: int, validation_freq: int | list) -> bool:
    """Tells whether `fit()` evaluates after an epoch, counted from 1."""
    if isinstance(validation_freq, int):
        return epoch % validation_freq == 0
    return epoch in validation_freq


def argument_problem(given: dict, planned: dict, best_of: Sequence[str]) -> str | None:
    """Returns a line about an argument of `fit()` that is wrong, ignored or not the run's, or None.

    Args:
        given: the arguments by name.
        planned: those that `run.prepare()` returned.
        best_of: options that compare values of the validation after epochs.
    """
    for name, remedy in REFUSED_ARGUMENTS.items():
        value = given.get(name)
        is_default = value is None or (name == "validation_split" and value == 0)
        if not is_default and name not in planned:
            return f"model.fit({name}=...): {remedy}, and leave out {name}"
    for name, decides in DECIDED_BY.items():
        if name not in given and planned[name] is not DEFAULTS.get(name, LEFT_OUT):
            return (
                f"model.fit() lacks {name}: call model.fit(train_data, **fit_options), with all "
                "that run.prepare() returned"
            )
        now, then = given.get(name, planned[name]), planned[name]
        if now is not then and not (isinstance(now, int) and now == then):
            shown = f": {now!r} instead of {then!r}" if isinstance(then, int) else ""
            return (
                f"model.fit({name}=...) is not what run.prepare() returned{shown}; {decides}: "
                "leave it out"
            )
    freq = given.get("validation_freq", 1)
    if not isinstance(freq, list) and not (isinstance(freq, int) and freq >= 1):
        return (
            f"model.fit(validation_freq={freq!r}): expected a number of epochs, at least 1, or a "
            "list of epochs"
        )
    epochs = range(1, planned["epochs"] + 1)
    if best_of and not any(_validates(epoch, freq) for epoch in epochs):
        return (
            f"{', '.join(best_of)}: model.fit(validation_freq={freq!r}) validates after none of "
            f"the {planned['epochs']} epochs"
        )
    if given.get("class_weight") is not None:
        return class_weight_values_problem(given["class_weight"])
    return None


def _refuse_stateful(callback: keras.callbacks.Callback) -> None:
    for kind, remedy in STATEFUL_KERAS_CALLBACKS.items():
        if isinstance(callback, kind):
            raise RunError(
                f"keras.callbacks.{kind.__name__} has state that no checkpoint keeps, so a resumed "
                f"run would train differently: {remedy}, or write a "
                "callbacks.steps.StepCallback with get_state() and set_state()"
            )
    if isinstance(callback, keras.callbacks.CSVLogger) and not callback.append:
        raise RunError(
            "keras.callbacks.CSVLogger begins its file again when the run resumes: pass "
            "append=True, or read metrics.jsonl in the run's folder"
        )
    if isinstance(callback, keras.callbacks.TensorBoard) and callback.update_freq != "epoch":
        raise RunError(
            f"keras.callbacks.TensorBoard(update_freq={callback.update_freq!r}) counts batches "
            "from 1 again when the run resumes: leave update_freq out; the run itself shows the "
            "numbers of steps in TensorBoard (--log-every)"
        )


def watch_fit(
    model: keras.Model,
    planned: dict,
    first: keras.callbacks.Callback,
    best_of: Sequence[str] = (),
    check_class_weight: Callable[[dict | None], None] = lambda class_weight: None,
) -> None:
    """Makes `model.fit()` reject what a resumed run would train on differently, until it is over.

    Callbacks that are added to those of the run are called before `first`, so that the run records
    and saves what they decide. `model.compile()` is rejected: it would replace the run's step. The
    training also reads the numbers of a step only where a callback looks them up
    (`callbacks/late_numbers.py`), and copies batches to a GPU before their steps
    (`keras_compat.fitting.copy_batches_ahead`).

    Args:
        model: compiled and built; changed in place.
        planned: the arguments of `fit()` that `run.prepare()` returns, the run's callbacks among
            them.
        first: the first of the callbacks that comes after those of the recipe.
        best_of: options that compare values of the validation after epochs.
        check_class_weight: called with the `class_weight` of `fit()`; may raise `RunError`.

    Raises:
        RunError: by `fit()`: it gets arrays, other arguments than those of the run, wrong weights
            of classes, not the run's callbacks, or a callback with state that no checkpoint keeps;
            or it is called again. By `compile()`.
    """
    # Copied: programs add arguments and callbacks to them.
    planned, of_run = dict(planned), tuple(planned["callbacks"])
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
        # Those of a CallbackList; one alone, or lists within lists, as Keras takes them.
        callbacks = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
        if not all(any(each is own for each in callbacks) for own in of_run):
            raise RunError(
                f"model.fit() lacks callbacks of the run, which save and log: call {all_arguments}"
            )
        given = dict(zip(("x", "y"), args, strict=False)) | kwargs
        problem = argument_problem(given, planned, best_of)
        if problem is not None:
            raise RunError(problem)
        check_class_weight(given.get("class_weight"))
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
        if data_checks.fits_on_a_gpu(data):
            data.copied_ahead = strategies.gpu_without_strategy(model.distribute_strategy)
        try:
            return fit_stock(*args, **kwargs)
        except tf.errors.InvalidArgumentError as error:
            problem = _beyond_class_weight(kwargs.get("class_weight"), str(error))
            if problem is None:
                raise
            raise RunError(problem) from error
        finally:
            data.copied_ahead = None

    fit.stock, compile_again.stock = fit_stock, compile_stock  # type: ignore[attr-defined]
    model.fit, model.compile = fit, compile_again
