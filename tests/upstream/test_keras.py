"""Bugs of stock Keras under tf.distribute, and their repairs: `make check-upstream`.

Each test runs twice, in processes of its own: with stock Keras it must fail, with the repair it
must pass. Where stock Keras passes, the strict xfail fails and names the repair to remove.
"""

import contextlib
import functools
import gc
import re
import subprocess
import sys
import tempfile
import types
import unittest.mock
import weakref

import keras
import keras_nlp
import numpy as np
import pytest
import tensorflow as tf
import tokenizers

from data.batches import evaluation_batches
from distribution import attention, step
from distribution.keras_compat import (
    attention_layers,
    compiled_losses,
    custom_gradients,
    fitting,
    generation,
    hub_models,
    optimizers,
    patches,
    randomness,
    replica_states,
)
from tests.support import cudnn, forked
from tests.support.forked import KerasFails


@contextlib.contextmanager
def asking_keras():
    """Raises `KerasFails` for any error within it; an error outside fails the test."""
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


@contextlib.contextmanager
def exact():
    """Applies the repairs that the installed step needs: unscaled losses, reduced gradients."""
    with compiled_losses.leave_losses_unscaled(), optimizers.leave_gradients_reduced():
        yield


def fit_exactly(model, data, **options):
    """`fit()` with the step that a run installs."""
    fitting.build(model, data)
    step.install(model, **options)
    steps = {"steps_per_epoch": 1} if options else {}
    model.fit(data, verbose=0, shuffle=False, **steps)


def two_replicas():
    """MirroredStrategy over the two logical CPUs of this process."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def central_storage():
    """CentralStorageStrategy over the two logical CPUs of this process."""
    return tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=["CPU:0", "CPU:1"], parameter_device="CPU:0"
    )


def numbers():
    """Inputs (16, 3) and targets (16, 1): two batches of 8, different on each replica."""
    x = (np.arange(48).reshape(16, 3) * 7 % 11 - 4.0).astype("float32")
    y = (np.arange(16)[:, None] % 5 + 1.0).astype("float32")
    return x, y


def batches(x, y):
    """The dataset of global batches of 8, of which each replica takes its part."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(options)


def linear_model(optimizer, loss="mse", **compile_options):
    """The model y = x w with w = 0 in the beginning. Call it under the strategy's scope."""
    layers = [
        keras.layers.Input((3,)),
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ]
    model = keras.Sequential(layers)
    model.compile(optimizer=optimizer, loss=loss, **compile_options)
    return model


def weights_of(model):
    """The weights w, shape (3,)."""
    return keras.ops.convert_to_numpy(model.trainable_variables[0])[:, 0]


def gradient(x, y, w):
    """The true gradient of the mean of (x w - y)^2 over a global batch; shape (3,)."""
    return 2 * ((x @ w[:, None] - y) * x).mean(0)


def assert_close(found, true, what):
    """Equal up to float32's rounding."""
    np.testing.assert_allclose(found, true, rtol=1e-4, atol=1e-6, err_msg=what)


def fit_on_workers(strategy, build=True, install=True):
    """Two steps of `fit()` on several workers, against the same steps by hand."""
    x, y = numbers()
    with strategy.scope():
        model = linear_model(keras.optimizers.SGD(0.01))
    data = batches(x, y)
    if build:
        fitting.build(model, data)
    if install:
        step.install(model)
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"]))
    )
    with asking_keras():
        logs = model.fit(data, verbose=0, shuffle=False, callbacks=[note]).history
        w, losses = np.zeros(3), []
        for part in (slice(0, 8), slice(8, 16)):
            losses.append(((x[part] @ w[:, None] - y[part]) ** 2).mean())
            w = w - 0.01 * gradient(x[part], y[part], w)
        assert_close(weights_of(model), w, "weights")
        assert_close(logs["loss"][0], np.mean(losses), "loss")
        assert_close(seen, [losses[0], np.mean(losses)], "loss after each step")


@repair(
    "use_what_is_built", "keras-team/keras#20585: the first batch of several workers", workers=2
)
def test_fit_on_two_workers(repaired):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with only_if(repaired, fitting.use_what_is_built()), exact():
        # What is installed before is built already; nothing else asks for that batch.
        fit_on_workers(strategy, build=repaired, install=repaired)


@repair("step.install", "keras-team/keras#20585: the logs of several workers", workers=2)
def test_logs_of_two_workers(repaired):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with fitting.use_what_is_built(), only_if(repaired, exact()):
        fit_on_workers(strategy, install=repaired)


@repair(
    "several_cpus_per_worker",
    "MultiWorkerMirroredStrategy takes one CPU of a worker, and all its GPUs (no thread known)",
    workers=2,
)
def test_two_cpus_of_two_workers(repaired):
    with only_if(repaired, patches.several_cpus_per_worker(2)):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    # The patch is gone from here on: only the construction needs it.
    with asking_keras():
        found = strategy.num_replicas_in_sync
        assert found == 4, f"{found} replicas of 2 workers with 2 logical CPUs each"
    with patches.patch_keras_for(strategy):
        fit_on_workers(strategy)


@repair(
    "distribute_data",
    "each worker computes the whole global batch, and keeps a part (no thread known)",
    workers=2,
)
def test_a_worker_computes_its_own_part(repaired):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    (x, y), computed = numbers(), []

    def rows(indices):
        computed.append(len(indices))
        return x[indices], y[indices]

    def make_batch(indices, epoch):
        found = tf.numpy_function(rows, [indices], [tf.float32, tf.float32])
        return *(
            tf.ensure_shape(part, [indices.shape[0], width])
            for part, width in zip(found, (3, 1), strict=True)
        ), tf.ones(tf.shape(indices))

    with fitting.use_what_is_built(), exact():
        with strategy.scope():
            model = linear_model(keras.optimizers.SGD(0.01))
        data = evaluation_batches(16, 8, make_batch)
        fitting.build(model, data)
        step.install(model)
        with only_if(repaired, fitting.distribute_data()), asking_keras():
            model.evaluate(data, verbose=0)
            assert set(computed) == {4}, f"of batches of 8 two workers computed {computed}"


@repair(
    "copy_batches_ahead", "without a strategy fit() copies batches in the step (no thread known)"
)
def test_a_batch_is_on_the_device_before_its_step(repaired):
    data, devices = batches(*numbers()).repeat(), []

    def take_batch(iterator):  # in place of a step
        devices.extend(part.device[-5:] for part in next(iterator))
        return {"loss": 0.0}

    with asking_keras(), only_if(repaired, fitting.copy_batches_ahead()):
        model = linear_model(keras.optimizers.SGD(0.01))
        model.train_function = take_batch
        if repaired:
            data.copied_ahead = "CPU:1"
        with tf.device("CPU:1"):
            model.fit(data, steps_per_epoch=1, verbose=0)
        assert devices == ["CPU:1"] * 2, f"the batch was on {devices}"


@repair("attend_by_cudnn", "TensorFlow's attention has no fused kernel (no thread known)")
def test_attention_of_one_kernel(repaired):
    inputs = tf.cast(tf.random.stateless_normal([2, 4, 2, 8], [0, 0]), tf.bfloat16)
    if repaired:  # a stand-in computes what a GPU would
        attention.gen_xla_ops = types.SimpleNamespace(xla_custom_call_v2=cudnn.custom_call)
    with asking_keras(), only_if(repaired, attention_layers.attend_by_cudnn()):
        found = keras.ops.dot_product_attention(
            inputs, inputs, inputs, flash_attention=None if repaired else True
        )
    scores = tf.einsum("btnh,bsnh->bnts", *2 * [tf.cast(inputs, tf.float32)]) / 8**0.5
    expected = tf.einsum("bnts,bsnh->btnh", tf.nn.softmax(scores), tf.cast(inputs, tf.float32))
    assert np.abs(tf.cast(found, tf.float32) - expected).max() < 0.02


@repair("build", "Keras builds metrics and optimizer while it traces (no thread known)")
def test_what_a_checkpoint_goes_into_exists_when_fit_begins(repaired):
    data, counts = batches(*numbers()), []
    metrics = [keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error, name="error")]
    model = linear_model(keras.optimizers.Adam(0.01), metrics=metrics)

    class Count(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            if repaired:
                fitting.build(model, data)
            self.on_train_end()

        def on_train_end(self, logs=None):
            counts.append(len(model.metrics_variables) + len(model.optimizer.variables))

    with asking_keras():
        model.fit(data, verbose=0, callbacks=[Count()])
        assert counts[0] == counts[1] > 2, f"variables when fit begins and ends: {counts}"


@repair("remember_jit_compile", "compile() keeps True or False for 'auto' (no thread known)")
def test_a_choice_of_xla_is_told_from_none(repaired):
    def chosen(**options):
        model = linear_model("sgd", **options)
        if repaired:
            return fitting.compiled_jit(model)
        return model.get_compile_config()["jit_compile"]

    with asking_keras(), only_if(repaired, fitting.remember_jit_compile()):
        assert chosen(jit_compile=True) is True and chosen(jit_compile=False) is False
        assert not isinstance(chosen(), bool), "of no choice"


@repair("count_from_mid_epoch", "fit() begins at an epoch's first batch only (no thread known)")
def test_resuming_after_6_of_8_batches(repaired):
    seen = []

    class KillAfterSix(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise KeyboardInterrupt

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    class StartAtSix(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            fitting.start_in_mid_epoch(6)

    ones = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    data = tf.data.Dataset.from_tensor_slices(ones).batch(1).repeat()

    def fit(data, *callbacks):
        model = linear_model(keras.optimizers.SGD(0.01))
        model.fit(data, steps_per_epoch=8, shuffle=False, verbose=0, callbacks=list(callbacks))

    with tempfile.TemporaryDirectory(prefix="upstream-") as folder:
        try:
            fit(data, keras.callbacks.BackupAndRestore(folder, save_freq=1), KillAfterSix())
        except KeyboardInterrupt:
            pass
        with asking_keras():
            if repaired:  # it counts on endless data that begin where the run stands
                with fitting.count_from_mid_epoch():
                    fit(data.skip(6), StartAtSix(), Note())
            else:
                fit(data, keras.callbacks.BackupAndRestore(folder, save_freq=1), Note())
            assert seen == [6, 7], f"batches after 6 of 8: {seen}"


@repair("distribute_data", "keras-team/keras#18624: a dataset beside a parameter server")
def test_batches_beside_a_parameter_server(repaired):
    servers = {
        task: tf.distribute.Server({task: ["localhost:0"]}, job_name=task)
        for task in ("ps", "worker")
    }
    cluster = {task: [server.target.removeprefix("grpc://")] for task, server in servers.items()}
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), rpc_layer="grpc"
        )
    )
    taken = []

    def take_batch(iterator):  # in place of a step that a worker would do
        taken.append(next(iterator))
        return {"loss": 0.0}

    with strategy.scope():
        model = linear_model(keras.optimizers.SGD(0.01))
    data = batches(*numbers())
    fitting.build(model, data)
    model.train_function = take_batch
    with (
        asking_keras(),
        fitting.use_what_is_built(),
        only_if(repaired, fitting.distribute_data()),
    ):
        model.fit(data, steps_per_epoch=2, verbose=0)
        assert len(taken) == 2, f"{len(taken)} batches"
    del servers


@repair("step.install", "keras-team/keras#20582: gradient accumulation under a strategy")
def test_two_batches_and_one_update_on_two_replicas(repaired):
    x, y = numbers()
    options = {} if repaired else {"gradient_accumulation_steps": 2}
    with two_replicas().scope(), asking_keras():
        model = linear_model(keras.optimizers.SGD(0.01, **options))
    with asking_keras(), only_if(repaired, exact()):
        if repaired:
            fit_exactly(model, batches(x, y), batches_per_update=2)
        else:
            model.fit(batches(x, y), verbose=0, shuffle=False)
        assert_close(weights_of(model), -0.01 * gradient(x, y, np.zeros(3)), "weights")


FULL_DISK = """
import contextlib, resource, sys
import keras
from distribution.keras_compat import patches

model = keras.Sequential([keras.Input((30,))] + [keras.layers.Dense(30) for _ in range(30)])
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
with patches.write_weights_at_once() if sys.argv[2] == "True" else contextlib.nullcontext():
    try:
        model.save_weights(sys.argv[1])
    except OSError:
        print("an error")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    model.save_weights(sys.argv[1])
weights = model.get_weights()
model.set_weights([weight + 1 for weight in weights])
model.load_weights(sys.argv[1])
assert all((a == b).all() for a, b in zip(model.get_weights(), weights))
"""


@repair("leave_losses_unscaled", "1 / replicas goes through float32")
def test_a_layer_s_loss_under_three_replicas(repaired):
    three = types.SimpleNamespace(num_replicas_in_sync=3)
    with only_if(repaired, compiled_losses.leave_losses_unscaled()):
        with unittest.mock.patch.object(tf.distribute, "get_strategy", lambda: three):
            scale = compiled_losses.loss_module.scale_loss_for_distribution
            share = float(scale(tf.constant(1.0, tf.float64)))
    with asking_keras():
        assert (share if not repaired else share / 3) == 1 / 3


@repair("weigh_each_value", "weights of examples beside (batch, time) losses (no thread known)")
def test_a_weight_of_an_example_beside_three_values(repaired):
    weights, values = np.arange(4.0), np.arange(12.0).reshape(4, 3)
    with only_if(repaired, compiled_losses.weigh_each_value()), asking_keras():
        loss = keras.losses.MeanAbsoluteError()
        found = loss(np.zeros((4, 3, 1)), values[..., None], sample_weight=weights)
        assert_close(float(found), (weights[:, None] * values).mean(), "the weighted mean")


@repair("drop_out_by_place", "all replicas draw the same dropout mask (no thread known)")
def test_the_dropout_masks_of_two_replicas(repaired):
    strategy = two_replicas()
    with only_if(repaired, randomness.drop_out_by_place()), strategy.scope():
        seed = keras.random.SeedGenerator(1)
        masks = strategy.run(lambda: keras.random.dropout(tf.ones((4, 16)), 0.5, seed=seed))
        first, second = strategy.experimental_local_results(masks)
    with asking_keras():
        assert (first.numpy() != second.numpy()).any(), "the replicas' masks are the same"


@repair("draw_by_place", "all replicas draw the same random numbers (no thread known)")
def test_the_random_numbers_of_two_replicas(repaired):
    strategy = two_replicas()
    with only_if(repaired, randomness.draw_by_place()), strategy.scope():
        seed = keras.random.SeedGenerator(1)

        def draw():
            x = tf.ones((4, 2))
            with randomness.part_of_batch(x):
                return keras.random.normal(keras.ops.shape(x), seed=seed)

        first, second = strategy.experimental_local_results(strategy.run(draw))
    with asking_keras():
        assert (first.numpy() != second.numpy()).any(), "the replicas' numbers are the same"


@repair("normalise_unmasked_together", "with a mask, `synchronized` is ignored (no thread known)")
def test_batch_normalization_of_two_replicas_behind_a_mask(repaired):
    strategy = two_replicas()
    with only_if(repaired, replica_states.normalise_unmasked_together()), strategy.scope():
        layer = keras.layers.BatchNormalization(synchronized=True, momentum=0.0, epsilon=0.0)
        layer.build((None, 2, 1))

        def normalise():
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            values = tf.reshape(tf.constant([1.0, 9.0, 5.0, 9.0]), (2, 2, 1))
            layer(values[index : index + 1], training=True, mask=tf.constant([[True, False]]))

        strategy.run(normalise)
    with asking_keras():
        mean, variance = (np.ravel(layer.moving_mean), np.ravel(layer.moving_variance))
        assert_close(float(mean[0]), 3.0, "the mean of 1 and 5")
        assert_close(float(variance[0]), 4.0, "the variance of 1 and 5")


@repair("normalise_unmasked_together", "E[x^2] - E[x]^2 in float32 (no thread known)")
def test_batch_normalization_of_two_replicas_far_from_zero(repaired):
    strategy = two_replicas()
    with only_if(repaired, replica_states.normalise_unmasked_together()), strategy.scope():
        layer = keras.layers.BatchNormalization(synchronized=True, momentum=0.0, epsilon=0.0)
        layer.build((None, 1))
        values = 20_000 + tf.constant([[-3.0], [-1.0], [1.0], [3.0]])

        def normalise():
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            layer(values[2 * index : 2 * index + 2], training=True)

        strategy.run(normalise)
    with asking_keras():
        variance = float(np.ravel(layer.moving_variance)[0])
        assert_close(variance, 5.0, "the mean of 9, 1, 1 and 9")


@repair("padding_left_out", "metrics= counts the examples that pad the last batch")
def test_metrics_of_a_padded_batch(repaired):
    x, y = (part[:8] for part in numbers())
    weights = (np.arange(8) < 5).astype("float32")
    metrics = [keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error, name="error")]
    model = linear_model(keras.optimizers.SGD(0.0), metrics=metrics)
    data = tf.data.Dataset.from_tensors((x, y, weights))
    if repaired:
        fitting.build(model, data)
        step.install(model)
    with asking_keras():
        found = model.evaluate(data, verbose=0, return_dict=True)
        assert_close(found["error"], (y[:5] ** 2).mean(), "without padding")


@repair("write_weights_at_once", "h5py after a write that failed")
def test_weights_on_a_full_disk(repaired):
    with tempfile.TemporaryDirectory() as folder:
        words = [f"{folder}/model.weights.h5", str(repaired)]
        ended = subprocess.run(
            [sys.executable, "-c", FULL_DISK, *words], capture_output=True, text=True
        )
    with asking_keras():
        assert ended.returncode == 0, ended.returncode
        assert ended.stdout == "an error\n"
        assert "Exception ignored" not in ended.stderr and "Traceback" not in ended.stderr


@repair("free_custom_gradients", "tf.custom_gradient keeps its graphs (no thread known)")
def test_a_graph_with_a_custom_gradient_dies(repaired):
    with only_if(repaired, custom_gradients.free_custom_gradients()):
        function = tf.function(tf.nn.silu).get_concrete_function(tf.TensorSpec([2], "float32"))
    graph = weakref.ref(function.graph)
    del function
    gc.collect()
    with asking_keras():
        assert graph() is None, "the graph is in memory"


@repair(
    "leave_gradients_reduced",
    "each replica clips its own gradient (keras-team/keras#19308 asks for a way to sum first)",
)
def test_a_clipped_step(repaired):
    x, y = (part[:8] for part in numbers())
    y[4:] *= -1  # so that the replicas' gradients point in different directions
    with two_replicas().scope():
        model = linear_model(keras.optimizers.SGD(1.0, global_clipnorm=0.1))
    with asking_keras(), only_if(repaired, exact()):
        if repaired:
            fit_exactly(model, batches(x, y))
        else:
            model.fit(batches(x, y), verbose=0)
        true = gradient(x, y, np.zeros(3))
        assert_close(weights_of(model), -0.1 * true / np.linalg.norm(true), "a step clipped to 0.1")


@repair(
    "leave_gradients_reduced",
    "LossScaleOptimizer looks for an overflow on replica 0 only (no thread known)",
)
def test_an_overflow_on_replica_1_only(repaired):
    keras.config.set_dtype_policy("mixed_float16")
    x, y = (part[:8] / 100 for part in numbers())  # far from an overflow, also when scaled by 2^15
    with two_replicas().scope():
        model = linear_model(keras.optimizers.SGD(0.01))
    fit = fit_exactly if repaired else functools.partial(keras.Model.fit, verbose=0)
    with only_if(repaired, exact()):
        fit(model, batches(x, y))
    before = weights_of(model)
    if not np.isfinite(before).all() or not before.any():
        raise RuntimeError(f"a step without an overflow should change the weights: {before}")
    x[4:] = 60000.0
    with asking_keras(), only_if(repaired, exact()):
        fit(model, batches(x, y))
        assert_close(weights_of(model), before, "weights after a step to skip")


@repair(
    "step.install",
    "the gradients of a row that is looked up twice are not added up (no thread known)",
)
def test_a_row_that_a_batch_looks_up_twice(repaired):
    table = keras.layers.Embedding(2, 1, embeddings_initializer="zeros")
    model = keras.Sequential([keras.Input((2,)), table, keras.layers.GlobalAveragePooling1D()])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    data = tf.data.Dataset.from_tensors((np.zeros((1, 2)), np.ones((1, 1), "float32")))
    with asking_keras():
        if repaired:
            fit_exactly(model, data)
        else:
            model.fit(data, verbose=0)
        assert_close(model.get_weights()[0][:, 0], [0.1, 0.0], "Adam's first step")


@repair("add_in_place", "Variable.assign_add reads and assigns (no thread known)")
def test_a_metric_over_two_batches(repaired):
    x, y = numbers()
    with only_if(repaired, replica_states.add_in_place()):
        with central_storage().scope():
            error = keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error, name="error")
            model = linear_model(keras.optimizers.SGD(0.0), metrics=[error])
        with asking_keras():
            found = model.evaluate(batches(x, y), verbose=0, return_dict=True)
            assert_close(found["error"], (y**2).mean(), "mean")


@repair("add_in_place", "AUC assigns the variable and a sum (no thread known)")
def test_a_metric_that_assigns_sums(repaired):
    """Of two batches: the first one's examples are in order, the second one's are not."""
    x = np.tile([[0.1], [0.2], [0.8], [0.9]], (4, 1))
    y = np.array([0, 0, 1, 1] * 2 + [0, 0, 1, 1, 1, 0, 0, 1.0])[:, None]
    with only_if(repaired, replica_states.add_in_place()):
        with central_storage().scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
            model.compile("sgd", "mse", metrics=[keras.metrics.AUC(name="auc")])
        with asking_keras():
            found = model.evaluate(batches(x, y), verbose=0, return_dict=True)
            alone = keras.metrics.AUC()
            alone.update_state(y, x)
            assert_close(found["auc"], float(alone.result()), "AUC")


@repair("share_states", "the seed variable has no aggregation (no thread known)")
def test_a_step_with_dropout(repaired):
    with only_if(repaired, replica_states.share_states()):
        with central_storage().scope():
            layers = [keras.layers.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile(optimizer="sgd", loss="mse")
        with asking_keras():
            model.fit(batches(*numbers()), verbose=0)


@repair(
    "integers_of_32_bits",
    "ops.arange() of Python integers is int64 with floatx float64, and KerasHub's sliding windows "
    "add it to int32 (no thread known)",
)
def test_a_sliding_window_in_float64(repaired):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    sizes = dict(vocabulary_size=9, num_layers=1, hidden_dim=4, intermediate_dim=4)
    heads = dict(num_query_heads=2, num_key_value_heads=2, sliding_window=4)
    backbone = keras_nlp.models.MistralBackbone(**sizes, **heads)
    task = keras_nlp.models.MistralCausalLM(backbone, preprocessor=None)
    prompt = {"token_ids": np.array([[1, 2, 3, 0, 0, 0]]), "padding_mask": [[1, 1, 1, 0, 0, 0]]}
    prompt = {name: np.array(value, "int32") for name, value in prompt.items()}
    with asking_keras(), only_if(repaired, generation.integers_of_32_bits()):
        drawn = task.generate(prompt, stop_token_ids=None)
        assert_close(drawn["token_ids"][0, :3], [1, 2, 3], "the prompt")


@repair(
    "slide_windows_while_generating",
    "KerasHub's Qwen asks for the truth of a tensor where its windows slide (no thread known)",
)
def test_a_sliding_window_of_qwen(repaired):
    sizes = dict(vocabulary_size=9, num_layers=1, hidden_dim=4, intermediate_dim=4)
    heads = dict(num_query_heads=2, num_key_value_heads=2)
    windows = dict(use_sliding_window_attention=True, sliding_window_size=4)
    backbone = keras_nlp.models.QwenBackbone(**sizes, **heads, **windows)
    task = keras_nlp.models.QwenCausalLM(backbone, preprocessor=None)
    prompt = {"token_ids": np.array([[1, 2, 3, 0, 0, 0]]), "padding_mask": [[1, 1, 1, 0, 0, 0]]}
    prompt = {name: np.array(value, "int32") for name, value in prompt.items()}
    with asking_keras(), only_if(repaired, generation.slide_windows_while_generating()):
        drawn = task.generate(prompt, stop_token_ids=None)
        assert_close(drawn["token_ids"][0, :3], [1, 2, 3], "the prompt")


TINY = dict(vocabulary_size=20, num_layers=1, hidden_dim=8, intermediate_dim=8)


def assert_generates_the_likeliest(task):
    """Greedy generation takes the likeliest tokens of a forward pass of the whole row."""
    keras.utils.set_random_seed(0)
    for weight in task.weights:  # a new model has the same output for all inputs
        if len(weight.shape) > 1:
            weight.assign(keras.random.normal(weight.shape))
    ids = np.array([[1, 2, 3, *[0] * 7]], "int32")
    prompt = {"token_ids": ids, "padding_mask": (ids > 0).astype("int32")}
    task.compile(sampler="greedy", jit_compile=False)
    found = np.array(task.generate(prompt, stop_token_ids=None)["token_ids"])
    logits = task({"token_ids": found, "padding_mask": np.ones_like(found)})
    assert_close(found[0, 3:], np.argmax(logits, axis=-1)[0, 2:-1], "the text")


@repair(
    "read_prompts_once",
    "KerasHub's Qwen 3.5 reads the end of a prompt twice, and its linear layers carry a state (no "
    "thread known)",
)
def test_a_state_along_a_prompt(repaired):
    heads = dict(num_query_heads=2, num_key_value_heads=1, head_dim=4)
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=2)
    columns = dict(linear_key_head_dim=4, linear_value_head_dim=4)
    backbone = keras_nlp.models.Qwen3_5Backbone(
        layer_types=["linear_attention"], **TINY, **heads, **linear, **columns
    )
    task = keras_nlp.models.Qwen3_5CausalLM(backbone)
    with asking_keras(), only_if(repaired, generation.read_prompts_once()):
        assert_generates_the_likeliest(task)


@repair(
    "rotate_by_length",
    "KerasHub's Phi-3 rotates a new query by other factors than the keys of a long row (no thread "
    "known)",
)
def test_factors_of_a_long_row(repaired):
    backbone = keras_nlp.models.Phi3Backbone(
        num_query_heads=2,
        num_key_value_heads=2,
        rope_scaling_type="su",
        rope_scaling_short_factor=[1.0, 1.0],
        rope_scaling_long_factor=[3.0, 9.0],
        pretraining_sequence_length=8,
        **TINY,
    )
    task = keras_nlp.models.Phi3CausalLM(backbone)
    with asking_keras(), only_if(repaired, generation.rotate_by_length(10)):
        assert_generates_the_likeliest(task)


@repair(
    "rotate_by_place",
    "KerasHub's GPT-NeoX rotates each new query as the first one of a text (keras-hub#2870, open)",
)
def test_places_of_new_tokens(repaired):
    backbone = keras_nlp.models.GPTNeoXBackbone(num_heads=2, rotary_percentage=1.0, **TINY)
    task = keras_nlp.models.GPTNeoXCausalLM(backbone)
    with asking_keras(), only_if(repaired, generation.rotate_by_place()):
        assert_generates_the_likeliest(task)


@repair(
    "split_words",
    "KerasHub's BytePairTokenizer gives its pattern of words to `tokenizers` as a text to look for "
    "(no thread known)",
)
def test_a_text_is_split_into_words(repaired):
    """As KerasHub does within a tf.data pipeline."""
    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = [*characters, "\u0120\u0120", "\u0120a", "<|endoftext|>"]
    tokenizer = keras_nlp.models.GPT2Tokenizer(
        vocabulary={piece: number for number, piece in enumerate(pieces)},
        merges=["\u0120 \u0120", "\u0120 a"],
    )
    if repaired:
        hub_models.split_words(tokenizer)
    text = tf.data.Dataset.from_tensors("x  a")
    (expected,) = text.map(tokenizer).as_numpy_iterator()
    with asking_keras():
        np.testing.assert_array_equal(tokenizer("x  a"), expected)
