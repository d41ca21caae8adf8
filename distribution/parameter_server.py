"""Asynchronous training: workers compute gradients, parameter servers hold the weights.

`fit()` runs on the coordinator (the chief). Each step's global batch goes to one worker, which
applies its gradient without waiting for the others. `fit()` schedules a window of steps and joins
it; callbacks, validation and saving act there, when nothing is under way. A worker that dies is
survived: its steps go to another one, so that each batch is trained on once.
"""

import logging
import time

import keras
import tensorflow as tf

from distribution.optimizers import bound_adam

log = logging.getLogger("recipes")

WINDOW = 20  # steps between two joins


def make_strategy(config: dict) -> tf.distribute.Strategy | None:
    """The coordinator's strategy; a worker or parameter server serves until it is stopped.

    Args:
        config: what TF_CONFIG says: a cluster with `chief`, `worker` and `ps` tasks.
    """
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    kind = config["task"]["type"]
    if kind in ("worker", "ps"):
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=kind, task_index=resolver.task_id, protocol="grpc"
        )
        log.info("%s %d serves at %s", kind, resolver.task_id, server.target)
        while True:  # join() would not let Python see a signal
            time.sleep(1.0)
    return tf.distribute.ParameterServerStrategy(resolver)


def use_coordinator(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    *,
    window: int,
    steps_per_epoch: int,
    total_steps: int,
    steps_done: int,
) -> float | None:
    """Makes `fit()` and `evaluate()` of a compiled model schedule their steps on the workers.

    Keras's own `fit()` does not run under ParameterServerStrategy (keras-team/keras#18624). What is
    patched for it is in force within `keras_compat.patch_keras_for`.

    Args:
        model: compiled under the strategy's scope with `steps_per_execution=window`, and built.
        strategy: a ParameterServerStrategy; any other one is left alone.
        window: steps that are scheduled before a join.
        steps_per_epoch: steps of an epoch, where a window ends too.
        total_steps: steps of the run, where a window ends too.
        steps_done: steps that an earlier part of the run has done.

    Returns:
        The longest step that Adam may do, in learning rates; None if there is no bound.
    """
    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return None
    bound = bound_adam(model.optimizer)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    step = steps_done

    @tf.function
    def train_step(data):
        strategy.run(model.train_step, args=(data,))

    @tf.function
    def test_step(data):
        strategy.run(model.test_step, args=(data,))

    def train_window(iterator):
        nonlocal step
        steps = min(window, steps_per_epoch - step % steps_per_epoch, total_steps - step)
        for _ in range(steps):
            coordinator.schedule(train_step, args=(next(iterator),))
        coordinator.join()
        step += steps
        return model.get_metrics_result()

    def test_window(iterator):
        scheduled = 0
        for _, data in zip(range(window), iterator, strict=False):
            coordinator.schedule(test_step, args=(data,))
            scheduled += 1
        if not scheduled:
            raise StopIteration
        coordinator.join()
        return model.get_metrics_result()

    # Where `fit()` and `evaluate()` keep the functions of `make_train_function()` and
    # `make_test_function()`; they take what is there.
    model.train_function = train_window
    model.test_function = test_window
    return bound
