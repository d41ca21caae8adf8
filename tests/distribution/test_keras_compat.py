"""Patches of Keras: in force within `patch_keras_for`, gone afterwards."""

import contextlib
import re
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from data import arrays, batches, sequences
from distribution import step, strategies
from distribution.keras_compat import (
    compiled_losses,
    fitting,
    optimizers,
    patches,
    randomness,
    replica_states,
)
from tests.support import forked, replicas

PATCHED = [
    (fitting.tf_trainer.TFEpochIterator, "__init__"),
    (fitting.tf_trainer.TensorFlowTrainer, "_maybe_symbolic_build"),
    (compiled_losses.loss_module, "scale_loss_for_distribution"),
    (compiled_losses.loss_module, "unscale_loss_for_distribution"),
    (compiled_losses.loss_module, "reduce_weighted_values"),
    (optimizers.TFOptimizer, "_all_reduce_sum_gradients"),
    (randomness.tf_random, "dropout"),
    *((randomness.tf_random, name) for name in randomness.DRAWS),
    (patches.saving_lib.H5IOStore, "__init__"),
    (replica_states.Variable, "assign_add"),
    (replica_states.Variable, "__init__"),
    (fitting.epoch_iterator.EpochIterator, "__init__"),
    (fitting.epoch_iterator.EpochIterator, "_enumerate_iterator"),
    (optimizers.TFOptimizer, "_apply_weight_decay"),
    (optimizers.TFOptimizer, "_distributed_tf_update_step"),
    (
        patches.collective_all_reduce_strategy.CollectiveAllReduceExtended,
        "_initialize_local_devices",
    ),
]
FOR_ALL = {
    *("_maybe_symbolic_build", "H5IOStore.__init__"),
    *("EpochIterator.__init__", "_enumerate_iterator"),
    *("scale_loss_for_distribution", "unscale_loss_for_distribution", "reduce_weighted_values"),
    *("_all_reduce_sum_gradients", "dropout", *randomness.DRAWS),
}
OWN_COPIES = FOR_ALL | {"_apply_weight_decay", "_distributed_tf_update_step"}
ONE_COPY = FOR_ALL | {"Variable.__init__", "assign_add"}


def in_force():
    """The attribute of each patched name, and whether the class itself defines it."""
    return [(getattr(owner, name), name in vars(owner)) for owner, name in PATCHED]


def changed(before):
    """The names under which something else stands than before."""
    names = [f"{owner.__name__}.{name}" if name == "__init__" else name for owner, name in PATCHED]
    return {name for name, a, b in zip(names, before, in_force(), strict=True) if a != b}


def stand_in(kind):
    """An object of a class of strategies, without devices behind it."""
    return object.__new__(kind)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (tf.distribute.get_strategy(), OWN_COPIES | {"TFEpochIterator.__init__"}),
        (stand_in(tf.distribute.MirroredStrategy), OWN_COPIES | {"TFEpochIterator.__init__"}),
        (
            stand_in(tf.distribute.MultiWorkerMirroredStrategy),
            OWN_COPIES | {"TFEpochIterator.__init__"},
        ),
        (stand_in(tf.distribute.experimental.CentralStorageStrategy), ONE_COPY),
        (
            stand_in(tf.distribute.ParameterServerStrategy),
            ONE_COPY | {"TFEpochIterator.__init__"},
        ),
    ],
    ids=["none", "mirrored", "multi_worker", "central_storage", "parameter_server"],
)
def test_a_patch_is_in_force_within_and_gone_afterwards(strategy, expected):
    before = in_force()
    for _ in range(2):  # a second run in the same process
        with patches.patch_keras_for(strategy):
            assert changed(before) == expected
            with patches.patch_keras_for(tf.distribute.get_strategy()):
                assert changed(before) == expected | OWN_COPIES | {"TFEpochIterator.__init__"}
            assert changed(before) == expected
        assert in_force() == before
    with pytest.raises(ZeroDivisionError), patches.patch_keras_for(strategy):
        raise ZeroDivisionError
    assert in_force() == before


def test_several_cpus_is_gone_afterwards():
    before = in_force()
    with patches.several_cpus_per_worker(2):
        assert changed(before) == {"_initialize_local_devices"}
    assert in_force() == before


class TestStartInMidEpoch:
    class Note(keras.callbacks.Callback):
        def __init__(self, start):
            super().__init__()
            self.start, self.seen = start, []

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 0 and self.start:
                fitting.start_in_mid_epoch(self.start)

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append(batch)

    def fit(self, note, steps_per_execution=1, batches=None, epochs=2):
        data = tf.data.Dataset.from_tensors((np.ones((1, 1)), np.ones((1, 1)))).repeat(batches)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution, run_eagerly=True)
        model.fit(data, epochs=epochs, steps_per_epoch=4, verbose=0, callbacks=[note])

    def test_counts_from_there_in_the_first_epoch_only(self):
        note = self.Note(3)
        with patches.patch_keras_for(tf.distribute.get_strategy()):
            self.fit(note)
        assert note.seen == [3, 0, 1, 2, 3]

    @pytest.mark.parametrize("steps", [None, 4])
    def test_an_evaluation_before_the_first_batch_does_not_count(self, steps):
        ones = tf.data.Dataset.from_tensors((np.ones((1, 1)), np.ones((1, 1)))).repeat(4)

        class Evaluate(self.Note):
            def on_epoch_begin(self, epoch, logs=None):
                super().on_epoch_begin(epoch)
                self.model.evaluate(ones, steps=steps, verbose=0)

        note = Evaluate(3)
        with patches.patch_keras_for(tf.distribute.get_strategy()):
            self.fit(note)
        assert note.seen == [3, 0, 1, 2, 3]

    @pytest.mark.parametrize("count", [1, 2])
    def test_data_that_end_with_the_run_are_used_to_their_end(self, count):
        """Two batches of the first epoch are done: ten are left of three epochs."""
        note = self.Note(2)
        with patches.patch_keras_for(tf.distribute.get_strategy()):
            self.fit(note, steps_per_execution=count, batches=10, epochs=3)
        assert note.seen == ([2, 3] + [0, 1, 2, 3] * 2 if count == 1 else [3] + [1, 3] * 2)

    @pytest.mark.parametrize(
        "start, seen", [(1, [2, 5, 2, 5]), (2, [2, 5, 2, 5]), (3, [5, 2, 5]), (4, [2, 5])]
    )
    def test_counts_an_execution_that_is_partly_done(self, start, seen):
        """An epoch of four steps in executions of three, as Keras counts them."""
        note = self.Note(start)
        with patches.patch_keras_for(tf.distribute.get_strategy()):
            self.fit(note, steps_per_execution=3)
        assert note.seen == seen

    def test_leaves_nothing_behind(self):
        with patches.patch_keras_for(tf.distribute.get_strategy()):
            fitting.start_in_mid_epoch(3)  # and no epoch follows
        note = self.Note(0)
        with patches.patch_keras_for(tf.distribute.get_strategy()):
            self.fit(note)
        assert note.seen == [0, 1, 2, 3] * 2


def test_a_model_that_is_compiled_again_is_built_again():
    data = tf.data.Dataset.from_tensors((np.ones((2, 1)), np.ones((2, 1))))
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    built = []

    class Note(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            built.append(self.model.optimizer.built)

    with patches.patch_keras_for(strategy), strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        for _ in range(2):
            model.compile("adam", "mse", metrics=["mae"])
            if not built:
                fitting.build(model, data)
            model.fit(data, verbose=0, callbacks=[Note()])
    assert built == [True, True]


def test_a_layer_s_loss_under_three_replicas_is_left_as_it_is(monkeypatch):
    """`distribution.step` takes the mean of the replicas' losses, in the precision of the run."""
    three = types.SimpleNamespace(num_replicas_in_sync=3)
    with compiled_losses.leave_losses_unscaled():
        monkeypatch.setattr(tf.distribute, "get_strategy", lambda: three)
        for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
            value = tf.constant(0.1, tf.float64)
            assert float(getattr(compiled_losses.loss_module, name)(value)) == 0.1


class TestRowsOfADropoutMask:
    """Each replica draws its rows of what one would draw for the global batch."""

    @pytest.mark.long
    @pytest.mark.parametrize("jit_compile", [False, True], ids=["", "XLA"])
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    def test_rows_begin_anywhere_in_a_block_of_the_generator(self, dtype, jit_compile):
        dtype = tf.as_dtype(dtype)

        @tf.function(jit_compile=jit_compile)
        def draw(seed):
            rows = [randomness._uniform_rows((2, 5), seed, dtype, n) for n in range(3)]
            return tf.random.stateless_uniform((6, 5), seed, dtype=dtype), tf.concat(rows, 0)

        whole, rows = draw(tf.constant([3, 7]))
        np.testing.assert_array_equal(rows, whole)

    def test_a_counter_that_runs_over_is_carried(self, monkeypatch):
        key = tf.constant([5], tf.uint64)
        counter = tf.constant([2**64 - 2, 8], tf.uint64)
        stock = lambda seed: (key, counter)  # noqa: E731
        monkeypatch.setattr(tf.raw_ops, "StatelessRandomGetKeyCounter", stock)
        whole = tf.raw_ops.StatelessRandomUniformV2(
            shape=(4, 8), key=key, counter=counter, alg=1, dtype=tf.float32
        )
        for n in range(4):
            row = randomness._uniform_rows((1, 8), tf.constant([1, 2]), tf.float32, n)
            np.testing.assert_array_equal(row, whole[n : n + 1])


def updates(name):
    """Weights after four updates by two replicas: stock Keras's, in one call, in one by XLA."""
    keras.config.set_floatx("float64")
    strategy = strategies.make_strategy("mirrored", 2)
    rate = keras.optimizers.schedules.PolynomialDecay(np.float64(0.1), 5)
    found = []
    for together, jit_compile in ((False, False), (True, False), (True, True)):
        with contextlib.ExitStack() as stack:
            if together:
                stack.enter_context(optimizers.update_together())
            stack.enter_context(strategy.scope())
            kernel = keras.Variable(np.linspace(-1, 1, 6).reshape(2, 3), name="kernel")
            bias = keras.Variable(np.linspace(-1, 1, 3), name="bias")
            changes = {"weight_decay": 0.3} if name != "SGD" else {"momentum": 0.5}
            optimizer = getattr(keras.optimizers, name)(rate, **changes)
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            optimizer.build([kernel, bias])
            optimizer.jit_compile = jit_compile

            @tf.function
            def update(optimizer=optimizer, kernel=kernel, bias=bias):
                gradients = [kernel.value**2 - 0.5, 3 * bias.value]
                optimizer.apply(gradients, [kernel, bias])

            for _ in range(4):
                strategy.run(update)
        found.append([keras.ops.convert_to_numpy(v) for v in (kernel, bias)])
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", ["AdamW", "Muon", "SGD"])
def test_all_weights_in_one_call_become_what_keras_makes_of_them(name):
    stock, *others = forked.run(updates, name)
    for found in others:
        for ours, theirs in zip(found, stock, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def updated_twice(name, rate):
    """A kernel after two updates of Muon in float64."""
    keras.config.set_floatx("float64")
    strategy = strategies.make_strategy(name, 2 if name == "mirrored" else None)
    with patches.patch_keras_for(strategy), strategy.scope():
        kernel = keras.Variable(np.linspace(-1, 1, 6).reshape(2, 3), name="kernel")
        optimizer = keras.optimizers.Muon(rate)
        optimizer.build([kernel])

        @tf.function
        def update():
            optimizer.apply([kernel.value**2 - 0.5], [kernel])

        for _ in range(2):
            strategy.run(update)
        return keras.ops.convert_to_numpy(kernel)


@pytest.mark.long
@pytest.mark.parametrize("name", ["none", "mirrored"])
def test_muon_in_float64_takes_the_rate_of_a_schedule(name):
    constant = forked.run(updated_twice, name, 0.5)
    # Keras's schedules compute in float32 where floatx is float64, too.
    schedule = keras.optimizers.schedules.PolynomialDecay(0.5, 5, 0.5)
    scheduled = forked.run(updated_twice, name, schedule)
    np.testing.assert_allclose(scheduled, constant, rtol=1e-12)


def decayed(name, replicas):
    """Weights after three updates by the Muon of the recipes."""
    keras.config.set_floatx("float64")
    strategy = strategies.make_strategy(name, replicas)
    with patches.patch_keras_for(strategy), strategy.scope():
        kernel = keras.Variable(np.linspace(-1, 1, 6).reshape(2, 3), name="kernel")
        bias = keras.Variable(np.linspace(-1, 1, 3), name="bias")
        optimizer = keras.optimizers.Muon(0.1, weight_decay=0.3, adam_weight_decay=0.3)
        optimizers.orthogonalize_heads(optimizer)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        optimizer.build([kernel, bias])

        @tf.function
        def update():
            gradients = [kernel.value**2 - 0.5, 3 * bias.value]
            optimizer.apply(gradients, [kernel, bias])

        for _ in range(3):
            strategy.run(update)
        return [keras.ops.convert_to_numpy(v) for v in (kernel, bias)]


def test_muon_decays_weights_that_all_replicas_share():
    one = forked.run(decayed, "none", None)
    shared = forked.run(decayed, "central_storage", 2)
    for ours, theirs in zip(shared, one, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def memory_of_a_mapped_file(folder):
    """Trains two replicas on a few rows of a file of 256 MB; returns the memory that it took."""

    def in_memory():
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) // 1024

    path = folder / "rows.bin"
    with open(path, "wb") as file:
        file.truncate(2**28)  # holes, which read as zeros
    table = arrays.as_tensor(sequences.mapped(path, np.dtype(np.int32), 64))

    def make_batch(indices, epoch):
        rows = tf.cast(tf.gather(table, indices), "float32")
        return rows, rows[:, :1]

    data = batches.training_batches(2**20, 8, 0, make_batch)
    strategy = replicas.strategy_of(2)
    with patches.patch_keras_for(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        fitting.build(model, data)
        step.install(model)
        before = in_memory()
        model.fit(data, steps_per_epoch=3, shuffle=False, verbose=0)
    return in_memory() - before


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_replicas_read_a_mapped_file_without_a_copy(tmp_path):
    assert forked.run(memory_of_a_mapped_file, tmp_path) < 128


def lines_of_a_worker(files):
    """Returns the lines of this worker's part of the first two global batches."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    data = tf.data.TextLineDataset(files).batch(4, drop_remainder=True)
    with fitting.distribute_data():
        epoch = fitting.tf_trainer.TFEpochIterator(strategy, x=data)
        iterator = iter(epoch._distributed_dataset)
        parts = [strategy.experimental_local_results(next(iterator)) for _ in range(2)]
    return [[line.decode() for each in part for line in each.numpy()] for part in parts]


def test_workers_share_each_batch_of_a_pipeline_that_reads_files(tmp_path):
    """By default TensorFlow gives each worker other files, and so other batches."""
    for name in "ab":
        (tmp_path / name).write_text("\n".join(f"{name}{n}" for n in range(8)))
    files = [str(tmp_path / name) for name in "ab"]
    found = forked.run(lines_of_a_worker, files, workers=2)
    for number, lines in enumerate((["a0", "a1", "a2", "a3"], ["a4", "a5", "a6", "a7"])):
        assert sorted(found[0][number] + found[1][number]) == lines


def evaluated_by_a_worker(batch_sizes):
    """Returns the sum of 20 examples, as a mean, by each size of the global batch."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    x, found = np.arange(20.0)[:, None], []
    with patches.patch_keras_for(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)])
            model.compile("sgd", "mae", metrics=["mae"])
        data = [arrays.evaluation_data(x, 0 * x, batch_size=size) for size in batch_sizes]
        fitting.build(model, data[0])
        step.install(model)
        for each in data:
            found.append(model.evaluate(each, verbose=0, return_dict=True))
    return [{name: float(value) for name, value in logs.items()} for logs in found]


@pytest.mark.long
def test_workers_that_cannot_share_a_batch_evaluate_each_example_once():
    for found in forked.run(evaluated_by_a_worker, [7, 1], workers=3, cpus=1):
        assert found == [pytest.approx({"loss": 19.0, "mae": 19.0}, rel=1e-12)] * 2


class TestNames:
    def test_each_time_they_begin_where_they_first_did(self):
        def name():
            return keras.metrics.AUC().name

        outside = name()
        found = []
        for _ in range(2):
            with patches.name_metrics_as_in_first_run():
                found.append([name(), name()])
        assert found[0] == found[1]
        # No metric within it has the name of a later one.
        assert name() not in [outside, *found[0]]

    def test_a_layer_of_an_earlier_run_is_used_again(self):
        with patches.name_metrics_as_in_first_run():
            kept = keras.layers.Dense(4)
        with patches.name_metrics_as_in_first_run():
            keras.Sequential([keras.Input((2,)), kept, keras.layers.Dense(3)])

    def test_a_cleared_session(self):
        with patches.name_metrics_as_in_first_run():
            keras.utils.clear_session()
            assert keras.metrics.AUC().name == "auc"
