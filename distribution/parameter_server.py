"""Asynchronous training: workers compute gradients, parameter servers hold the weights.

`fit()` runs on the coordinator (the chief). Each step's global batch goes to one worker, which
applies its gradient without waiting for the others. `fit()` schedules a window of steps and joins
it; callbacks, validation and saving run at a join, when no step is running. If a worker dies, its
steps go to another one, so that each batch is trained on; the step that it was computing may have
been applied already, wholly or in part (`ClusterCoordinator.schedule` says "at least once").
"""

import logging
import math
import os
import time

import keras
import tensorflow as tf

from distribution import kinds
from distribution.cluster import INTER_OP_THREADS
from distribution.keras_compat import optimizers
from distribution.step import Step
from machine.cores import cores

log = logging.getLogger("recipes")

WINDOW = 20  # steps between two joins
# A function that waits for another process blocks such a thread: with only one, as TensorFlow has
# on a single core, it waits forever (TensorFlow's guide to ParameterServerStrategy takes 4).
MIN_THREADS = 4


def make_strategy() -> tf.distribute.Strategy:
    """Builds the coordinator's strategy; a worker or parameter server serves until it is killed."""
    chosen = os.environ.get(INTER_OP_THREADS, "")
    count = int(chosen) if chosen.isdecimal() else cores()
    # Read when TensorFlow starts its threads.
    os.environ[INTER_OP_THREADS] = str(max(MIN_THREADS, count))
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    kind, index = resolver.task_type, resolver.task_id
    if kind in ("worker", "ps"):
        cluster = resolver.cluster_spec()
        server = tf.distribute.Server(cluster, job_name=kind, task_index=index, protocol="grpc")
        log.info("%s %d serves at %s", kind, index, server.target)
        while True:  # join() would not let Python see a signal
            time.sleep(1.0)
    return tf.distribute.ParameterServerStrategy(resolver)


def use_coordinator(
    model: keras.Model,
    step: Step,
    *,
    window: int,
    steps_per_epoch: int,
    total_steps: int,
    steps_done: int,
) -> None:
    """Makes `fit()` and `evaluate()` of a compiled model schedule their steps on the workers.

    Keras's own `fit()` does not run under ParameterServerStrategy (keras-team/keras#18624). What is
    patched for it is in force within `keras_compat.patches.patch_keras_for`.

    Args:
        model: compiled under the strategy's scope, and built.
        step: the model's step from `distribution.step.install()`; nothing is done under another
            strategy than ParameterServerStrategy.
        window: steps that are scheduled before a join, in windows from an epoch's first step.
        steps_per_epoch: steps of an epoch, where a window ends too.
        total_steps: steps of the run, where a window ends too.
        steps_done: steps that an earlier part of the run has done.
    """
    strategy = step.strategy
    if kinds.name_of(strategy) != "parameter_server":
        return
    bound_adam(model.optimizer)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    model.steps_per_execution = window
    done = steps_done

    @tf.function
    def train_step(data):
        strategy.run(tf.autograph.experimental.do_not_convert(step.update), args=(data,))

    @tf.function
    def test_step(data):
        strategy.run(tf.autograph.experimental.do_not_convert(step.evaluate), args=(data,))

    def train_window(iterator):
        nonlocal done
        into_epoch = done % steps_per_epoch
        # Keras counts windows from the epoch's first step; a resumed run may begin within one.
        steps = min(window - into_epoch % window, steps_per_epoch - into_epoch, total_steps - done)
        for _ in range(steps):
            coordinator.schedule(train_step, args=(next(iterator),))
        coordinator.join()
        done += steps
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

    # `fit()` and `evaluate()` use these attributes instead of `make_train_function()` and
    # `make_test_function()` if they are set.
    model.train_function = train_window
    model.test_function = test_window


def largest_adam_step(beta_1: float, beta_2: float) -> float:
    """Computes the largest step of Adam, in units of the learning rate.

    With m = (1 - b1) sum b1^(t-i) g_i and v = (1 - b2) sum b2^(t-i) g_i^2 the Cauchy-Schwarz
    inequality gives |m| / sqrt(v) <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)); the corrections of
    both for their start multiply it by at most max(1, sqrt(1 - b2) / (1 - b1)). (A sharper form of
    section 2.1 of Kingma and Ba, "Adam", arXiv 1412.6980.) Infinite unless b1^2 < b2.
    """
    if not beta_1**2 < beta_2 < 1:
        return math.inf
    ratio = (1 - beta_1) / math.sqrt((1 - beta_2) * (1 - beta_1**2 / beta_2))
    return ratio * max(1.0, math.sqrt(1 - beta_2) / (1 - beta_1))


def bound_adam(optimizer: keras.optimizers.Optimizer) -> None:
    """Bounds Adam's step, as several workers update its two means without waiting.

    One worker may read a mean m that another one has just updated, and a v that it has not updated
    yet. Where v is nearly zero, as for a rare word piece, the step m / sqrt(v) is then far too
    long, and one such step can spoil a run. With a single worker the bound is never reached.

    Args:
        optimizer: changed in place if it is an Adam or AdamW.
    """
    if not isinstance(optimizer, keras.optimizers.Adam):
        return
    # A margin for the rounding of the two means.
    factor = 1.01 * largest_adam_step(optimizer.beta_1, optimizer.beta_2)
    if math.isinf(factor):
        return
    limits: list[tf.Tensor] = []
    base = type(optimizer)

    class Bounded(base):  # type: ignore[misc,valid-type]
        def update_step(self, gradient, variable, learning_rate):
            limits.append(factor * tf.cast(learning_rate, variable.dtype))
            super().update_step(gradient, variable, learning_rate)
            limits.pop()

        def assign_sub(self, variable, value):
            if limits:
                value = tf.clip_by_value(value, -limits[-1], limits[-1])
            super().assign_sub(variable, value)

    optimizers.change_class(optimizer, Bounded)
