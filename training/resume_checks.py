"""Rejects another model, loss, optimizer or data than those of the checkpoint of a run."""

import keras
import tensorflow as tf

from callbacks.checkpoint import CheckpointInfo
from data import batches
from distribution.metric_states import MetricStates
from training import compile_record, data_checks, model_checks
from training.errors import RunError
from training.plan import Plan

# Smallest batch whose examples identify it; smaller batches may be equal by chance.
MIN_FINGERPRINT_BATCH = 4


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
        difference = _first_difference(model_checks.optimizer_variables(model), old, new)
    raise RunError(
        f"{info.folder}: cannot resume: the optimizer has changed since ({difference}); restore "
        "the one that compile() got, or use another --run-dir"
    )


def _require_same_record(info: CheckpointInfo, now: dict) -> None:
    """Rejects another loss, or other values of the optimizer, than when the run began."""
    before = info.state["fingerprint"].get("compiled")
    if before is None:  # of an earlier version
        return
    changed = compile_record.differences(before, now)
    if changed:
        raise RunError(
            f"{info.folder}: cannot resume, these arguments of compile() changed; restore them in "
            "the recipe to resume the run, or pass another --run-dir to begin a new one\n"
            + "\n".join(changed)
        )


def require_same_class_weight(
    info: CheckpointInfo | None, fingerprint: dict, class_weight: dict | None
) -> None:
    """Rejects other weights of classes than those that the run began with.

    Args:
        info: the checkpoint, or None.
        fingerprint: the return value of `require_same`; gets the weights.
        class_weight: the argument of `fit()`.

    Raises:
        RunError: names the classes and their weights.
    """
    now = compile_record.class_weights_of(class_weight)
    # A checkpoint of an earlier version has none.
    changed = compile_record.class_weight_differences(fingerprint.get("class_weight", now), now)
    if info is not None and changed:
        raise RunError(
            f"{info.folder}: cannot resume, class_weight of fit() changed; restore it in the "
            "recipe to resume the run, or pass another --run-dir to begin a new one\n"
            + "\n".join(changed)
        )
    fingerprint["class_weight"] = now


def metrics_note(info: CheckpointInfo | None, fingerprint: dict) -> str | None:
    """Returns a note if `compile()` got other metrics than before the checkpoint, or None.

    Args:
        info: the checkpoint, or None.
        fingerprint: the return value of `require_same`.
    """
    before = info.state["fingerprint"].get("compiled") if info is not None else None
    return compile_record.metrics_note(before, fingerprint["compiled"]) if before else None


def shapes_of(model: keras.Model) -> dict:
    """Returns the shapes of a model's weights and its optimizer, and the order of examples: JSON.

    Args:
        model: built.
    """
    return {
        "weights": [list(weight.shape) for weight in model.weights],
        "optimizer": {
            "name": ", ".join(type(each).__name__ for each in model_checks.optimizers_of(model)),
            "variables": [
                list(variable.shape) for variable in model_checks.optimizer_variables(model)
            ],
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
    """Rejects another model, loss or optimizer than the checkpoint's, and data from its start.

    Also other metrics, within an epoch: their sums are restored.

    Args:
        info: the checkpoint, or None.
        model: the model to train, built.
        train_data: the training data.
        first_batches: the return value of `data_checks.first_batches_sha256(train_data)`.
        plan: small batches may be equal by chance, and those of each epoch may begin equally.

    Returns:
        The fingerprint that the run's checkpoints keep: JSON values.

    Raises:
        RunError: the model, the loss, the optimizer, the metrics or the data do not match.
    """
    found = shapes_of(model)
    weights, optimizer = found["weights"], found["optimizer"]
    compiled = compile_record.record_of(model, plan.total_steps)
    if info is None:
        return found | {"first_batches": first_batches, "compiled": compiled}
    before = info.state["fingerprint"]
    draws = data_checks.is_function_of_step(train_data) and info.step < plan.total_steps
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
    _require_same_record(info, compiled)
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
    is_at_an_end = info.step % plan.steps_per_epoch == 0
    may_begin_equally = is_at_an_end and not data_checks.is_function_of_step(train_data)
    if tells_apart and not may_begin_equally and first_batches[: len(start)] == start:
        raise RunError(
            f"cannot resume at step {info.step}: train_data begins with the first batch of the "
            "whole run; pass **plan.batches to the pipeline, whose first_batch is the next one"
        )
    return before | {"compiled": compiled}
