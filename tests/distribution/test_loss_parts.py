"""The loss of a batch, and the mean of its parts' losses, of replicas and accumulated batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from distribution import loss_parts, step
from distribution.keras_compat import fitting, patches
from tests.support import forked, replicas


def in_batch_negatives(y_true, y_pred):
    """The loss of each example among those of its batch, as of CLIP."""
    logits = ops.matmul(y_pred, ops.transpose(y_pred))
    numbers = ops.arange(ops.shape(y_pred)[0])
    return keras.losses.sparse_categorical_crossentropy(numbers, logits, from_logits=True)


def of_all_replicas(y_true, y_pred):
    """The same, with the examples of all replicas."""
    replica = tf.distribute.get_replica_context()  # None while the model is built
    others = y_pred if replica is None else replica.all_gather(y_pred, axis=0)
    return ops.mean(ops.matmul(y_pred, ops.transpose(others)), axis=-1)


def separate(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


class Centred(keras.layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


class OwnLoss(keras.Model):
    """Returns the mean over the batch, or what else a program may return."""

    returns = "mean"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = keras.metrics.Mean("seen")
        self.seeds = keras.random.SeedGenerator(1)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        values = separate(y, y_pred)
        self.seen.update_state(values)
        if self.returns == "random":
            values += keras.random.uniform(ops.shape(values), seed=self.seeds)
        if sample_weight is not None:
            values *= sample_weight
        if self.returns == "own weights":
            return ops.sum(values) / ops.sum(sample_weight)
        return ops.sum(values) if self.returns == "sum" else ops.mean(values)


def compared(count, kind, batches_per_update=1):
    """Returns the result of `losses`, and true if it left the states as they were."""
    numbers = np.random.default_rng(2)
    x, y = numbers.normal(size=(16, 4)), numbers.normal(size=(16, 3))
    examples = (x, y, np.arange(1.0, 17.0)) if kind == "own weights" else (x, y)
    losses = {"in-batch": in_batch_negatives, "gathered": of_all_replicas}
    losses["sum of Keras"] = keras.losses.MeanSquaredError(reduction="sum")
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    strategy = replicas.strategy_of(count)
    with patches.patch_keras_for(strategy):
        with strategy.scope():
            inputs = keras.Input((4,))
            hidden = Centred()(inputs) if kind == "centred" else inputs
            own = kind in ("mean", "sum", "own weights", "random")
            hidden = keras.layers.Dropout(0.5)(hidden)
            model = (OwnLoss if own else keras.Model)(inputs, keras.layers.Dense(3)(hidden))
            model.returns = kind
            model.compile("sgd", None if own else losses.get(kind, separate))
        data = replicas.dataset(examples, 16)
        fitting.build(model, data)
        installed = step.install(model, batches_per_update=batches_per_update)
        states = [v for v in model.variables + model.metrics_variables if not v.trainable]
        before = [ops.convert_to_numpy(v).tolist() for v in states]
        found = loss_parts.losses(installed, next(iter(data)))
        after = [ops.convert_to_numpy(v).tolist() for v in states]
    return found, before == after


KINDS = {
    "separate": True,
    "mean": True,
    "sum of Keras": True,
    "in-batch": False,
    "centred": False,
    "sum": False,
    "own weights": False,
    "random": None,
}


def all_compared(count, batches_per_update):
    kinds = [*KINDS, "gathered"] if count > 1 else KINDS
    return {kind: compared(count, kind, batches_per_update) for kind in kinds}


@pytest.mark.parametrize(
    ("count", "batches_per_update"), [(2, 1), (1, 3), pytest.param(2, 2, marks=pytest.mark.long)]
)
def test_parts_have_the_mean_loss_of_the_whole_where_examples_are_separate(
    count, batches_per_update
):
    found = forked.run(all_compared, count, batches_per_update)
    for kind, expected in KINDS.items():
        losses, is_kept = found[kind]
        assert is_kept, kind
        assert (losses is None) == (expected is None), kind
        if expected is not None:
            whole, parts = losses
            assert (abs(whole - parts) < 1e-12 * max(1, abs(whole))) == expected, (kind, losses)
    if count > 1:
        assert found["gathered"] == (None, True)


def test_fewer_examples_than_parts_are_not_compared():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", separate)
    data = replicas.dataset((np.ones((1, 2)), np.ones((1, 1))), 1)
    fitting.build(model, data)
    installed = step.install(model, batches_per_update=2)
    assert loss_parts.losses(installed, next(iter(data))) is None
