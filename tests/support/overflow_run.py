"""Trains in half precision with an overflow in the gradient of the last replica only.

    python tests/support/overflow_run.py '{"strategy": "mirrored", "replicas": 2}' OUTPUT_FILE

Six steps; in the third, the last example of the global batch (the last replica's) gets an infinite
gradient. Writes loss scales and weights after each step.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import recipes  # noqa: E402, F401 (picks the backend)


def main(chosen: dict, output: Path) -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    from distribution import keras_compat, strategies
    from distribution.global_loss import GlobalMean
    from distribution.optimizers import reduce_before_clipping

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

    keras.config.set_dtype_policy("mixed_float16")
    strategy = strategies.make_strategy(chosen["strategy"], chosen.get("replicas"))
    keras.utils.set_random_seed(0)
    with strategy.scope():
        x = keras.Input((4,), name="x")
        flag = keras.Input((1,), name="flag")
        hidden = keras.layers.Dense(8, activation="tanh")(x)
        hidden = Overflow()(hidden, flag)
        output_ = keras.layers.Dense(1, dtype="float32")(hidden)
        model = keras.Model({"x": x, "flag": flag}, output_)
        model.compile(
            optimizer=reduce_before_clipping(keras.optimizers.Adam(0.01, global_clipnorm=1.0)),
            loss=GlobalMean(keras.losses.MeanSquaredError()),
        )
    inputs = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
    flags = np.zeros((48, 1), "float32")
    flags[23] = 1.0  # step 3 of 8 examples
    targets = inputs.sum(1, keepdims=True)
    data = tf.data.Dataset.from_tensor_slices(({"x": inputs, "flag": flags}, targets)).batch(8)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            values = [
                np.asarray(keras.ops.convert_to_numpy(part)).tolist()
                for v in model.trainable_variables
                for part in strategy.experimental_local_results(v.value)
            ]
            optimizer = model.optimizer
            seen.append(
                {
                    "scale": float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)),
                    "iterations": int(keras.ops.convert_to_numpy(optimizer.iterations)),
                    "loss": float(logs["loss"]),
                    "weights": values,
                }
            )

    data = data.with_options(options)
    with keras_compat.patch_keras_for(strategy):
        keras_compat.build(model, data)
        model.fit(data, shuffle=False, verbose=0, callbacks=[Look()])
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if "TF_CONFIG" in os.environ else 0
    output.with_name(f"{output.name}-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
