"""Trains one model on one, two and three replicas of a process, in float64."""

import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from distribution import step, strategies
from distribution.keras_compat import fitting, patches


@functools.cache  # collectives of several strategies in a process are mixed up
def strategy_of(replicas: int) -> tf.distribute.Strategy:
    """Returns a strategy over logical CPUs or GPU parts; TensorFlow's default for one replica."""
    if replicas == 1:
        return tf.distribute.get_strategy()
    if tf.config.list_physical_devices("GPU"):  # tests/gpu
        return strategies.make_strategy("mirrored", replicas)
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


def dataset(examples: tuple, batch: int, drop_remainder: bool = True) -> tf.data.Dataset:
    """Returns global batches in the order of the examples."""
    data = tf.data.Dataset.from_tensor_slices(examples)
    return data.batch(batch, drop_remainder=drop_remainder)


def fit(
    replicas: int,
    build: Callable[[], keras.Model],
    data: tf.data.Dataset,
    *,
    epochs: int = 1,
    evaluated: tf.data.Dataset | None = None,
    **installed,
) -> dict:
    """Trains in float64 with the step of `distribution.step`.

    Args:
        replicas: logical CPUs.
        build: returns a compiled model; called under the strategy's scope.
        data: global batches.
        epochs: number of epochs.
        evaluated: data to evaluate afterwards, or None.
        installed: additional arguments of `step.install()`.

    Returns:
        The weights in one row, the loss and the weights after each execution, the metrics of the
        last epoch, and those of the evaluation, as numbers and lists.
    """
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy = strategy_of(replicas)
    seen = {"losses": [], "norms": [], "steps": []}

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen["losses"].append(float(logs["loss"]))
            seen["norms"].append(step.gradient_norm(self.model))
            seen["steps"].append(weights_of(self.model))

    with patches.patch_keras_for(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = build()
        fitting.build(model, data)
        step.install(model, **installed)
        k = installed.get("batches_per_update", 1)
        steps = {"steps_per_epoch": len(data) // k} if k > 1 else {}
        found = model.fit(
            data.repeat() if k > 1 else data,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[Look()],
            **steps,
        )
        seen["logs"] = {name: float(values[-1]) for name, values in found.history.items()}
        if evaluated is not None:
            found = model.evaluate(evaluated, verbose=0, return_dict=True)
            seen["evaluated"] = {name: float(value) for name, value in found.items()}
    seen["weights"] = weights_of(model)
    seen["iterations"] = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    return seen


def weights_of(model: keras.Model) -> list[float]:
    """Returns all trained weights in one row."""
    parts = [keras.ops.convert_to_numpy(v).reshape(-1) for v in model.trainable_variables]
    return np.concatenate(parts).tolist()
