"""Half precision: an overflow on one replica makes all of them skip the step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from distribution import strategies
from distribution.keras_compat import fitting, patches
from distribution.step import install
from tests.support import forked


class Overflow(keras.layers.Layer):
    """The identity; where the flag is set its gradient is infinite."""

    def call(self, inputs, flag):
        @tf.custom_gradient
        def identity(x):
            flagged = tf.cast(flag, x.dtype)
            return tf.identity(x), lambda dy: dy + flagged * np.inf * tf.ones_like(dy)

        return tf.cond(
            tf.reduce_any(flag > 0), lambda: identity(inputs), lambda: tf.identity(inputs)
        )


def train(workers, jit_compile):
    """Six steps; loss scales and weights after each of them.

    In the third, the last example of the global batch (the last replica's) gets an infinite
    gradient.
    """
    keras.config.set_dtype_policy("mixed_float16")
    if workers == 1:
        strategy = strategies.make_strategy("mirrored", 2)
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    inputs = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
    flags = np.zeros((48, 1), "float32")
    flags[23] = 1.0  # step 3 of 8 examples
    targets = inputs.sum(1, keepdims=True)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = tf.data.Dataset.from_tensor_slices(({"x": inputs, "flag": flags}, targets))
    data = data.batch(8).with_options(options)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            values = [
                np.asarray(keras.ops.convert_to_numpy(part))
                for v in model.trainable_variables
                for part in strategy.experimental_local_results(v.value)
            ]
            optimizer = model.optimizer
            seen.append(
                {
                    "scale": float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)),
                    "iterations": int(keras.ops.convert_to_numpy(optimizer.iterations)),
                    "loss": float(logs["loss"]),
                    "weights": [value.tolist() for value in values],
                }
            )

    with patches.patch_keras_for(strategy):
        with strategy.scope():
            x, flag = keras.Input((4,), name="x"), keras.Input((1,), name="flag")
            hidden = Overflow()(keras.layers.Dense(8, activation="tanh")(x), flag)
            output = keras.layers.Dense(1, dtype="float32")(hidden)
            model = keras.Model({"x": x, "flag": flag}, output)
            model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), "mse")
        fitting.build(model, data)
        install(model, jit_compile=jit_compile)
        model.fit(data, shuffle=False, verbose=0, callbacks=[Look()])
    return seen


@pytest.mark.parametrize(
    "jit_compile",
    [pytest.param(False, id=""), pytest.param(True, id="XLA", marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(1, id="mirrored x 2"),
        pytest.param(2, id="2 workers", marks=pytest.mark.long),
    ],
)
def test_an_overflow_on_the_last_replica_only(workers, jit_compile):
    seen = forked.run(train, workers, jit_compile, workers=workers)
    seen = [seen] if workers == 1 else seen
    for worker in seen:
        scales = [step["scale"] for step in worker]
        assert scales == [2.0**15] * 2 + [2.0**14] * 4
        assert [step["iterations"] for step in worker] == [1, 2, 2, 3, 4, 5]
        assert worker[1]["weights"] == worker[2]["weights"], "the step was not skipped"
        assert worker[2]["weights"] != worker[3]["weights"], "training did not resume"
        for step in worker:
            assert all(np.isfinite(np.array(value)).all() for value in step["weights"])
            assert np.isfinite(step["loss"])
    if workers == 1:  # the two replicas' copies stand beside each other
        for step in seen[0]:
            assert step["weights"][0::2] == step["weights"][1::2]
    else:
        assert [s["weights"] for s in seen[0]] == [s["weights"] for s in seen[1]]
