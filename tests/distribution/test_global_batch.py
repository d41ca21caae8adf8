"""The mean over the global batch, the order of a step, accumulation, and metrics by replica."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from distribution import keras_compat, strategies
from distribution.errors import DistributionError
from distribution.global_batch import (
    GlobalMean,
    MetricStates,
    compute_per_replica,
    gradient_norm,
    is_reduced,
    reduce_before_clipping,
)
from tests.support import forked

# --- The mean ---


generator = np.random.default_rng(0)
LOGITS = generator.normal(size=(4, 3, 7)).astype("float32")
LABELS = generator.integers(0, 7, (4, 3))
WEIGHTS = generator.integers(0, 2, (4, 3)).astype("float32") * 0.5
TARGETS = generator.normal(size=(6,)).astype("float32")
OUTPUTS = generator.normal(size=(6, 1)).astype("float32")


def cross_entropies():
    shifted = LOGITS.astype("float64") - LOGITS.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probabilities, LABELS[..., None], -1)[..., 0]


def sparse():
    return GlobalMean(keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class TestOneReplica:
    def test_is_the_weighted_mean(self):
        values = cross_entropies()
        expected = (WEIGHTS * values).sum() / WEIGHTS.sum()
        assert float(sparse()(LABELS, LOGITS, WEIGHTS)) == pytest.approx(expected, rel=1e-6)

    def test_a_weight_of_an_example_counts_for_each_of_its_values(self):
        weights = np.array([1.0, 0.0, 2.0, 0.5], "float32")
        values = cross_entropies()
        expected = (weights[:, None] * values).sum() / (3 * weights.sum())
        assert float(sparse()(LABELS, LOGITS, weights)) == pytest.approx(expected, rel=1e-6)
        assert float(sparse()(LABELS, LOGITS, weights[:, None])) == pytest.approx(expected, 1e-6)

    def test_all_weights_zero_give_zero_and_no_gradient(self):
        logits = tf.Variable(LOGITS)
        with tf.GradientTape() as tape:
            loss = sparse()(LABELS, logits, np.zeros_like(WEIGHTS))
        assert float(loss) == 0.0
        assert not tape.gradient(loss, logits).numpy().any()

    def test_the_shape_trap_of_regression(self):
        # (batch,) against (batch, 1) must not become (batch, batch).
        loss = GlobalMean(keras.losses.MeanSquaredError())
        expected = np.square(TARGETS - OUTPUTS[:, 0])
        for y_true, y_pred in ((TARGETS, OUTPUTS), (TARGETS[:, None], OUTPUTS)):
            assert float(loss(y_true, y_pred)) == pytest.approx(expected.mean(), rel=1e-5)
            weights = np.array([1, 1, 0, 2, 0, 1], "float32")
            found = float(loss(y_true, y_pred, weights))
            assert found == pytest.approx((weights * expected).sum() / weights.sum(), rel=1e-5)


# --- The order of a step ---


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_row_that_a_batch_looks_up_twice_has_the_sum_of_its_gradients(clip_norm):
    """Else Adam's v adds up their squares, and the step is sqrt(2) times too long."""
    steps = []
    for sparse in (True, False):
        weight = keras.Variable(np.zeros((3, 2)), dtype="float64")
        optimizer = reduce_before_clipping(keras.optimizers.Adam(0.1, global_clipnorm=clip_norm))
        for first in (1.0, 2.0):
            gradient = tf.IndexedSlices(
                tf.constant([[first, 1.0], [3.0, -1.5], [1.0, 1.0]], "float64"),
                tf.constant([0, 0, 2]),
                tf.constant([3, 2]),
            )
            if not sparse:
                gradient = tf.convert_to_tensor(gradient)
            optimizer.apply([gradient], [weight])
        steps.append(keras.ops.convert_to_numpy(weight))
    np.testing.assert_allclose(steps[0], steps[1], rtol=1e-12)


def clipped_steps(clip_norm):
    """The steps of SGD(1.0) over three batches of 4 weighted examples, on two replicas.

    Returns:
        the steps, and the norm of the gradient that each of them reports.
    """
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy = strategies.make_strategy("mirrored", 2)
    data = tf.data.Dataset.from_tensor_slices(weighted_examples()).batch(4)
    seen, norms = [], []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(np.concatenate([w.reshape(-1) for w in self.model.get_weights()]))
            norms.append(gradient_norm(self.model.optimizer))

    with keras_compat.patch_keras_for(strategy):
        with strategy.scope():
            layers = [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")]
            model = keras.Sequential(layers)
            optimizer = keras.optimizers.SGD(1.0, global_clipnorm=clip_norm)
            model.compile(
                optimizer=reduce_before_clipping(optimizer),
                loss=GlobalMean(keras.losses.MeanSquaredError()),
            )
        keras_compat.build(model, data)
        model.fit(data, shuffle=False, verbose=0, callbacks=[Look()])
    return np.diff([np.zeros(4), *seen], axis=0), norms


def weighted_examples():
    numbers = np.random.default_rng(1)
    x, y = numbers.normal(size=(12, 3)), numbers.normal(size=(12, 1))
    y[4:8] *= 0.01  # so that the second of three steps is not clipped
    return x, y, numbers.integers(1, 9, 12).astype("float64")


@pytest.mark.parametrize("clip_norm", [0.3, 1e9])
def test_a_step_on_two_replicas_is_numpys_clip_of_the_global_gradient(clip_norm):
    x, y, weights = weighted_examples()
    x = np.concatenate([x, np.ones((12, 1))], axis=1)
    w, expected, clipped, norms = np.zeros(4), [], [], []
    for part in (slice(0, 4), slice(4, 8), slice(8, 12)):
        errors = x[part] @ w - y[part, 0]
        gradient = 2 * (weights[part] * errors) @ x[part] / weights[part].sum()
        norm = np.linalg.norm(gradient)
        norms.append(norm)
        clipped.append(norm > clip_norm)
        expected.append(-gradient * min(1.0, clip_norm / norm))
        w = w + expected[-1]
    assert any(clipped) == (clip_norm < 1)
    steps, told = forked.run(clipped_steps, clip_norm)
    np.testing.assert_allclose(steps, expected, rtol=1e-12)
    np.testing.assert_allclose(told, norms, rtol=1e-12)  # before clipping


def test_the_norm_is_that_of_the_gradient_without_its_scale():
    keras.config.set_dtype_policy("mixed_float16")
    weights = [keras.Variable(np.zeros(n), dtype="float32") for n in (1, 2)]
    optimizer = reduce_before_clipping(keras.optimizers.SGD(0.1, global_clipnorm=1.0))
    assert gradient_norm(optimizer) is None
    optimizer.build(weights)
    scale = float(optimizer.dynamic_scale)
    optimizer.apply([tf.constant([3.0 * scale]), tf.constant([0.0, 4.0 * scale])])
    assert gradient_norm(optimizer) == 5.0


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_what_a_recipe_wrote_keeps_its_names_and_variables(precision, tmp_path):
    """A weights file of the stock optimizer loads, and the other way round."""

    def model(reduced):
        keras.utils.clear_session()
        keras.config.set_dtype_policy(precision)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.AdamW(0.1, global_clipnorm=1.0, name="mine")
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        model.compile(reduce_before_clipping(optimizer) if reduced else optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    stock, ours = model(False), model(True)
    assert is_reduced(ours.optimizer) and not is_reduced(stock.optimizer)
    assert type(ours.optimizer).__name__ == type(stock.optimizer).__name__
    paths = [[v.path for v in m.optimizer.variables] for m in (stock, ours)]
    assert paths[0] == paths[1] and len(paths[0]) > 4
    for number, (one, other) in enumerate([(stock, ours), (ours, stock)]):
        for variable in one.optimizer.variables:
            variable.assign(keras.ops.full(variable.shape, number + 5))
        one.save_weights(tmp_path / "model.weights.h5")
        other.load_weights(tmp_path / "model.weights.h5")
        for a, b in zip(one.optimizer.variables, other.optimizer.variables, strict=True):
            assert keras.ops.all(keras.ops.equal(a, b)), a.path
    ours.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert type(loaded) is type(stock.optimizer)
    assert loaded.name == ours.optimizer.name


def test_only_the_outermost_optimizer_counts():
    """`compile()` wraps under float16, and then looks for an overflow before the reduction."""
    inside = reduce_before_clipping(keras.optimizers.SGD())
    assert not is_reduced(keras.optimizers.LossScaleOptimizer(inside))
    assert not is_reduced(keras.optimizers.SGD())
    keras.config.set_dtype_policy("mixed_float16")
    scaled = reduce_before_clipping(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    assert is_reduced(scaled)
    assert not isinstance(scaled.inner_optimizer, keras.optimizers.LossScaleOptimizer)


# --- Accumulation ---


def three_batches():
    """Three batches of 4 examples, whose weights sum up to 20, 0.7 and 0."""
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(12, 3)), numbers.normal(size=(12, 1))
    weights = np.array([8.0, 1, 4, 7, 0.1, 0, 0.6, 0, 0, 0, 0, 0])
    return x, y, weights


def one_update(strategy, batch, steps, weighted, jit_compile=False):
    """Weights and logs after one update, of K batches."""
    x, y, weights = three_batches()
    examples = (x, y, weights) if weighted else (x, y)
    data = tf.data.Dataset.from_tensor_slices(examples).batch(batch)
    with keras_compat.patch_keras_for(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), linear_layer()])
            model.compile(
                optimizer=reduce_before_clipping(keras.optimizers.SGD(0.1, global_clipnorm=0.5)),
                loss=GlobalMean(keras.losses.MeanSquaredError()),
                weighted_metrics=[keras.metrics.MeanSquaredError("error")],
            )
            keras_compat.build(model, data)
            if steps > 1 or jit_compile:
                compute_per_replica(model, batches_per_step=steps, jit_compile=jit_compile)
        history = model.fit(data, steps_per_epoch=1, shuffle=False, verbose=0).history
        evaluated = model.evaluate(data, verbose=0, return_dict=True)
    return {
        "weights": np.concatenate([w.reshape(-1) for w in model.get_weights()]),
        "loss": history["loss"][0],
        "error": history["error"][0],
        "evaluated": evaluated["error"],
        "evaluated_loss": evaluated["loss"],
        "iterations": int(keras.ops.convert_to_numpy(model.optimizer.iterations)),
    }


def two_updates(weighted):
    """The same examples in three batches and in one, without and with XLA; on two replicas."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy = strategies.make_strategy("mirrored", 2)
    return [
        one_update(strategy, batch, steps, weighted, jit_compile)
        for batch, steps in ((4, 3), (12, 1))
        for jit_compile in (False, True)
    ]


def linear_layer():
    """A sum of the inputs, whose weights are drawn to zero."""
    regularizer = keras.regularizers.L2(0.0625)
    return keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer=regularizer)


def update_by_hand(weighted):
    """The same update in numpy: the clipped gradient of the weighted mean."""
    x, y, weights = three_batches()
    weights = weights if weighted else np.ones(12)
    x = np.concatenate([x, np.ones((12, 1))], axis=1)
    w = np.array([1.0, 1, 1, 0])
    errors = x @ w - y[:, 0]
    gradient = 2 * (weights * errors) @ x / weights.sum()
    gradient += 0.125 * w  # the regularizer's; the bias begins at zero
    gradient *= 0.5 / max(0.5, np.linalg.norm(gradient))
    error = (weights * errors**2).sum() / weights.sum()
    return w - 0.1 * gradient, error + 0.0625 * 3, error


@pytest.mark.parametrize("weighted", [True, False], ids=["unequal weights", "no weights"])
def test_k_batches_make_the_update_of_one_batch_of_all_examples(weighted):
    weights, loss, error = update_by_hand(weighted)
    updates = forked.run(two_updates, weighted)
    for found in updates:
        assert found["iterations"] == 1
        np.testing.assert_allclose(found["weights"], weights, rtol=1e-12)
        np.testing.assert_allclose([found["loss"], found["error"]], [loss, error], rtol=1e-12)
        assert found["evaluated"] == pytest.approx(updates[0]["evaluated"], rel=1e-12)
    for plain, compiled in (updates[:2], updates[2:]):  # the mean over batches of one size
        assert compiled["evaluated_loss"] == pytest.approx(plain["evaluated_loss"], rel=1e-12)


def compiled_runs():
    """Two epochs of AdamW on two replicas, three steps an execution; XLA; two batches a step."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy = strategies.make_strategy("mirrored", 2)
    x, y, weights = three_batches()
    found = []
    for jit_compile, batches in ((False, 1), (True, 1), (True, 2)):
        data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(4 // batches)
        keras.utils.set_random_seed(0)
        with keras_compat.patch_keras_for(strategy):
            with strategy.scope():
                layers = [keras.Input((3,)), keras.layers.Dense(8, "tanh")]
                layers += [keras.layers.Dense(1)]
                model = keras.Sequential(layers)
                adamw = keras.optimizers.AdamW(0.01, global_clipnorm=0.1)
                mean = GlobalMean(keras.losses.Huber())
                model.compile(reduce_before_clipping(adamw), mean, jit_compile=False)
                keras_compat.build(model, data)
                steps = {"batches_per_step": batches, "steps_per_execution": 3}
                compute_per_replica(model, jit_compile=jit_compile, **steps)
            history = model.fit(data.repeat(), epochs=2, steps_per_epoch=6, verbose=0).history
        moments = [v for v in model.optimizer.variables if v.shape]
        tensors = [*map(keras.ops.convert_to_numpy, model.weights + moments)]
        found.append((history["loss"], tensors))
    return found


def test_what_xla_compiles_on_each_replica_is_equal_to_what_it_does_not():
    (loss, tensors), *others = forked.run(compiled_runs)
    for compiled_loss, compiled in others:
        np.testing.assert_allclose(compiled_loss, loss, rtol=1e-12)
        for a, b in zip(tensors, compiled, strict=True):
            assert np.abs(np.array(a) - b).max() <= 1e-9 * max(1.0, np.abs(a).max())


@pytest.mark.parametrize(
    ("loss", "layer", "words"),
    [
        (["mse", "mse"], keras.layers.Dense, "one loss"),
        (None, lambda _: keras.layers.BatchNormalization(synchronized=True), "compile batch_norm"),
        (None, lambda _: keras.layers.MaxPooling1D(data_format="channels_first"), "compile max_p"),
    ],
)
def test_what_cannot_be_computed_on_each_replica_is_refused(loss, layer, words, monkeypatch):
    monkeypatch.setattr(keras_compat, "is_op_determinism_enabled", lambda: True)
    model = keras.Sequential([keras.Input((4, 4)), layer(1)])
    model.compile("sgd", GlobalMean(keras.losses.Huber()))
    model.loss = loss or model.loss
    with pytest.raises(DistributionError, match=words):
        compute_per_replica(model, jit_compile=True)


# --- Metrics, replica by replica ---


def states_of_two_replicas():
    """Rows that were put in, and what was read back; then the sum of the rows of three replicas."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", weighted_metrics=[keras.metrics.MeanSquaredError("error")])
        data = tf.data.Dataset.from_tensors((tf.ones((2, 1)), tf.ones((2, 1))))
        keras_compat.build(model, data)
    states = MetricStates.of(model)
    rows = [[0.1 * (n + 1) + place for place in range(len(states.read()[0]))] for n in range(2)]
    rows = np.asarray(rows, "float32").astype("float64").tolist()
    states.write(rows)
    own = states.read()
    states.write([*rows, rows[0]])
    return rows, own, np.sum(states.read(), axis=0).tolist()


def test_two_replicas_get_their_own_numbers_back():
    rows, own, total = forked.run(states_of_two_replicas)
    assert own == rows
    # Of another number of replicas the sum is kept.
    np.testing.assert_allclose(total, 2 * np.array(rows[0]) + rows[1], rtol=1e-6)
