"""Reads what has no public name: of models, their layers, metrics and optimizers."""

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.tensorflow import trainer as tf_trainer
from tensorflow.python.framework.config import is_op_determinism_enabled

from distribution.keras_compat import compiled_losses


def own_steps(model: keras.Model) -> list[str]:
    """Returns which of `train_step` and `test_step` a model overrides."""
    stock = tf_trainer.TensorFlowTrainer
    names = ("train_step", "test_step")
    return [name for name in names if getattr(type(model), name) is not getattr(stock, name)]


def mask_of(output) -> tf.Tensor | None:
    """Returns the mask that a layer put on its output, or None.

    Lacks: `keras.Layer.compute_mask()` needs the inputs' masks.
    """
    return backend.get_keras_mask(output)


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of all metrics of a model and of its layers.

    Lacks: `model.metrics_variables` leaves out those of inner models, and those that an overridden
    `metrics` does not return, such as Keras's own mean of the loss.
    """
    found = list(model._get_own_metrics())
    for layer in layers_of(model):
        found += layer._metrics
    return [variable for metric in found for variable in metric.variables]


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """Returns the metric `loss`.

    Lacks: `model.metrics` has it by its name alone, which a metric of the model may have too.
    """
    return model._loss_tracker


def needs_labels(model: keras.Model) -> bool:
    """Tells whether Keras compares the outputs with labels, for a loss or a metric of `compile()`.

    Lacks: no public name for the metrics of `compile()`.

    Args:
        model: compiled.
    """
    kind = type(model)
    if own_steps(model):
        return False
    by_loss = kind.compute_loss is keras.Model.compute_loss and model.loss is not None
    by_metrics = kind.compute_metrics is keras.Model.compute_metrics
    return by_loss or (by_metrics and model._compile_metrics is not None)


def compiled_steps_per_execution(model: keras.Model) -> int:
    """Returns what `compile(steps_per_execution=...)` got.

    Lacks: `model.steps_per_execution` is what a run has set.
    """
    return model._compile_config.config["steps_per_execution"]


def is_deterministic() -> bool:
    """Tells whether `tf.config.experimental.enable_op_determinism()` was called.

    Lacks: no public API reports this.
    """
    return is_op_determinism_enabled()


def learning_rate_of(optimizer: keras.optimizers.Optimizer):
    """Returns the optimizer's schedule, or its rate if it has none.

    Lacks: `optimizer.learning_rate` returns the rate of the next step; there is no public name for
    the schedule itself.
    """
    return optimizer._learning_rate


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns all layers of a model, also those within other layers.

    Lacks: `model.layers` has only the outermost ones.
    """
    return list(model._flatten_layers())


def states_of_layers(model: keras.Model) -> list[keras.Variable]:
    """Returns the states of a model's stateful layers, which neither weights nor files hold.

    Lacks: Keras keeps them in `layer.states` alone.
    """
    layers = [e for e in layers_of(model) if isinstance(e, keras.layers.RNN) and e.stateful]
    return [state for layer in layers for state in keras.tree.flatten(layer.states)]


def not_for_xla(model: keras.Model) -> list[str]:
    """Returns the names of a model's layers that XLA cannot compile in this process.

    What Keras marks so, such as `RandomRotation` and `StringLookup`. With several replicas what
    sums over them: batch normalization, and layers whose mask, or losses whose `ignore_class`,
    decides which values count. Max pooling where operations are deterministic. Lacks: no public API
    reports any of it.
    """
    several = model.distribute_strategy.num_replicas_in_sync > 1
    names = []
    for layer in layers_of(model):
        normalises = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        pools = is_op_determinism_enabled() and "MaxPooling" in type(layer).__name__
        if not layer.supports_jit or (several and normalises) or pools:
            names.append(layer.name)
    if several and getattr(model, "outputs", None):  # not of a subclass of keras.Model
        masked = [output for output in model.outputs if mask_of(output) is not None]
        names += [output._keras_history.operation.name for output in masked]
    if several:
        names += [
            f"the ignore_class of {entry.name}"
            for entry in compiled_losses.losses_with_ignored(model)
        ]
    return names


def metric_direction(model: keras.Model, name: str) -> str | None:
    """Returns the direction in which a compiled metric improves; None if Keras does not mark it.

    Lacks: the mark by which Keras's own `EarlyStopping` decides has no public name.
    """
    metrics = [m for group in model.metrics for m in getattr(group, "metrics", [group])]
    for metric in sorted(metrics, key=lambda metric: len(metric.name), reverse=True):
        if f"_{name}".endswith(f"_{metric.name}"):  # the name of an output may stand before it
            marks = {"up": "max", "down": "min"}
            return marks.get(getattr(metric, "_direction", ""))
    return None
