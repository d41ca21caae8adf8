import keras
import numpy as np
import pytest
import tensorflow as tf

from distribution import keras_compat
from distribution.global_loss import GlobalMean
from distribution.optimizers import (
    bound_adam,
    gradient_norm,
    is_reduced,
    largest_adam_step,
    reduce_before_clipping,
)
from tests.support import forked

BETAS = [(0.9, 0.98), (0.9, 0.999), (0.5, 0.9)]


def train(gradients, betas, bounded, between=lambda optimizer: None):
    """The weights after each step."""
    weight = keras.Variable(np.zeros(gradients.shape[1]), dtype="float64")
    optimizer = keras.optimizers.AdamW(0.1, beta_1=betas[0], beta_2=betas[1], epsilon=1e-12)
    optimizer.build([weight])
    if bounded:
        assert bound_adam(optimizer) == 1.01 * largest_adam_step(*betas)
    seen = [np.zeros(gradients.shape[1])]
    for gradient in gradients:
        between(optimizer)
        optimizer.apply([keras.ops.convert_to_tensor(gradient, "float64")])
        seen.append(keras.ops.convert_to_numpy(weight))
    return np.array(seen)


@pytest.mark.parametrize("betas", BETAS)
def test_a_single_writer_never_reaches_the_bound(betas):
    """Gradients that come rarely, grow, and keep their sign make Adam's longest steps."""
    rng = np.random.default_rng(0)
    keras.config.set_floatx("float64")
    time = np.arange(60)[:, None]
    gradients = np.concatenate(
        [
            rng.normal(size=(60, 20)) * 10.0 ** rng.uniform(-6, 3, (60, 20)),
            (rng.random((60, 20)) < 0.05) * 1.0,
            # b1 / b2 to the power of the age: the equality of the bound.
            (betas[1] / betas[0]) ** (time * np.linspace(0, 2, 20)),
        ],
        axis=1,
    )
    stock = train(gradients, betas, bounded=False)
    np.testing.assert_array_equal(stock, train(gradients, betas, bounded=True))
    longest = np.abs(np.diff(stock, axis=0)).max() / 0.1
    limit = largest_adam_step(*betas)
    assert limit / 10 < longest <= limit * 1.01


def test_a_mean_without_its_square_moves_no_weight_far():
    """What another worker's half-written update looks like: m is there, v is not."""

    def half_written(optimizer):
        index = [v.path.split("/")[-1] for v in optimizer.variables]
        momentum = next(i for i, name in enumerate(index) if "momentum" in name)
        optimizer.variables[momentum].assign(np.ones(3))

    gradients = np.full((1, 3), 1e-6)
    stock = train(gradients, (0.9, 0.98), False, half_written)
    bounded = train(gradients, (0.9, 0.98), True, half_written)
    assert np.abs(stock).max() > 1000
    assert np.abs(bounded).max() <= 1.02 * 0.1 * largest_adam_step(0.9, 0.98)


def test_what_has_no_bound():
    assert largest_adam_step(0.99, 0.9) == np.inf
    assert bound_adam(keras.optimizers.Adam(beta_1=0.99, beta_2=0.9)) is None
    assert bound_adam(keras.optimizers.Adam(amsgrad=True)) is None
    assert bound_adam(keras.optimizers.SGD()) is None
    assert bound_adam(reduce_before_clipping(keras.optimizers.AdamW())) is not None


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
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
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


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_the_norm_is_that_of_the_gradient_without_its_scale(precision):
    keras.config.set_dtype_policy(precision)
    weights = [keras.Variable(np.zeros(n), dtype="float32") for n in (1, 2)]
    optimizer = reduce_before_clipping(keras.optimizers.SGD(0.1, global_clipnorm=1.0))
    assert gradient_norm(optimizer) is None
    optimizer.build(weights)
    scale = float(getattr(optimizer, "dynamic_scale", 1.0))
    assert (scale > 1) == (precision == "mixed_float16")
    optimizer.apply([tf.constant([3.0 * scale]), tf.constant([0.0, 4.0 * scale])])
    assert gradient_norm(optimizer) == 5.0
    assert gradient_norm(keras.optimizers.SGD()) is None


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
    assert reduce_before_clipping(ours.optimizer) is ours.optimizer
    configs = [m.optimizer.get_config() for m in (stock, ours)]
    if precision == "mixed_float16":
        configs = [config["inner_optimizer"]["config"] for config in configs]
    assert configs[0] == configs[1]
    assert isinstance(ours.optimizer, type(stock.optimizer))
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
