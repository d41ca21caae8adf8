"""What the tests of Keras's gaps share: how they are marked, and a model small enough for a pencil.

A test here shows one thing that `fit()` gets wrong under tf.distribute, and the repair of it. It
runs twice, each time in processes of its own: with stock Keras it must fail, with the repair it
must pass. Where stock Keras passes, the strict xfail fails and names the repair that can go.
"""

import contextlib
import functools
import re

import pytest

from tests.support import forked


class KerasFails(AssertionError):
    """What Keras was asked for went wrong: it raised, or gave a wrong number."""


@contextlib.contextmanager
def asking_keras():
    """What fails within it is Keras's failure; what fails outside of it is the test's own."""
    try:
        yield
    except Exception as error:  # whatever Keras raises is what we want to know
        text = re.sub("\x1b\\[[0-9;]*m", "", str(error))  # Keras writes in bold
        raise KerasFails(f"{type(error).__name__}: {text[:1500]}") from None


def repair(name: str, thread: str, workers: int = 1):
    """Marks a test of a repair: `repaired` says whether it is in place.

    Args:
        name: of the function or class, which stands in `distribution/`.
        thread: what is wrong in Keras, and the upstream thread where there is one.
        workers: processes that run the test together.
    """
    reason = f"{thread}. If stock Keras passes this, {name} is no longer needed: remove it"

    def decorate(test):
        @functools.wraps(test)
        def in_processes_of_its_own(repaired):
            forked.run(test, repaired, workers=workers)

        stock = pytest.mark.xfail(strict=True, raises=KerasFails, reason=reason)
        states = [pytest.param(False, id="stock", marks=stock), pytest.param(True, id="repaired")]
        return pytest.mark.upstream(
            pytest.mark.parametrize("repaired", states)(in_processes_of_its_own)
        )

    return decorate


def only_if(repaired: bool, patch):
    """A patch, or nothing in its place."""
    return patch if repaired else contextlib.nullcontext()


def two_replicas():
    """MirroredStrategy over the two logical CPUs of this process."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def central_storage():
    """CentralStorageStrategy over the two logical CPUs of this process."""
    import tensorflow as tf

    return tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=["CPU:0", "CPU:1"], parameter_device="CPU:0"
    )


def numbers():
    """Inputs (16, 3) and targets (16, 1): two batches of 8, different on each replica."""
    import numpy as np

    x = (np.arange(48).reshape(16, 3) * 7 % 11 - 4.0).astype("float32")
    y = (np.arange(16)[:, None] % 5 + 1.0).astype("float32")
    return x, y


def batches(x, y):
    """The dataset of global batches of 8, of which each replica takes its part."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(options)


def linear_model(optimizer, loss="mse", **compile_options):
    """The model y = x w with w = 0 in the beginning. Call it under the strategy's scope."""
    import keras

    layers = [
        keras.layers.Input((3,)),
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ]
    model = keras.Sequential(layers)
    model.compile(optimizer=optimizer, loss=loss, **compile_options)
    return model


def weights_of(model):
    """The weights w, shape (3,)."""
    import keras

    return keras.ops.convert_to_numpy(model.trainable_variables[0])[:, 0]


def gradient(x, y, w):
    """The true gradient of the mean of (x w - y)^2 over a global batch; shape (3,)."""
    return 2 * ((x @ w[:, None] - y) * x).mean(0)


def assert_close(found, true, what):
    """Equal up to float32's rounding."""
    import numpy as np

    np.testing.assert_allclose(found, true, rtol=1e-4, atol=1e-6, err_msg=what)
