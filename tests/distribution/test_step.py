"""The step of `fit()` and `evaluate()`: what counts how much, in which order, on any replicas."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from data import arrays
from data.batches import evaluation_batches
from distribution import kinds, step
from distribution.errors import DistributionError
from distribution.keras_compat import fitting, inspection, patches
from distribution.step import gradient_norm, install
from tests.support import forked, replicas


def assert_same(found: list[dict]) -> None:
    """All runs of `replicas.fit` have the same numbers, up to float64's rounding."""
    for other in found[1:]:
        assert other["iterations"] == found[0]["iterations"]
        for name in ("steps", "losses", "norms"):
            np.testing.assert_allclose(other[name], found[0][name], rtol=1e-9, atol=1e-12)
        for name in {"logs", "evaluated"} & found[0].keys() & other.keys():
            assert other[name] == pytest.approx(found[0][name], rel=1e-9)


# --- One device, without weights: Keras's own step ---


def usual_model():
    """Dropout, normalisation, a penalty, and an optimizer with moments."""
    layers = [
        keras.Input((5,)),
        keras.layers.Dense(4, "tanh", kernel_regularizer=keras.regularizers.L2(0.01)),
        keras.layers.BatchNormalization(momentum=0.5),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.1, global_clipnorm=0.5)
    model.compile(optimizer, loss="mse", metrics=["mae"], weighted_metrics=["mae"])
    return model


@pytest.mark.parametrize(
    "weighted",
    [pytest.param(False, id="no weights"), pytest.param(True, id="ones", marks=pytest.mark.long)],
)
def test_on_one_device_it_is_keras_s_own_fit(weighted):
    numbers = np.random.default_rng(0)
    examples = numbers.normal(size=(24, 5)), numbers.normal(size=(24, 1))
    data = replicas.dataset((*examples, np.ones(24)) if weighted else examples, 8)
    found = replicas.fit(1, usual_model, data, epochs=2, evaluated=data)
    keras.utils.set_random_seed(0)
    stock = usual_model()
    history = stock.fit(data, epochs=2, shuffle=False, verbose=0).history
    np.testing.assert_allclose(found["weights"], replicas.weights_of(stock), rtol=1e-12)
    assert found["logs"] == pytest.approx({n: v[-1] for n, v in history.items()}, rel=1e-12)
    evaluated = stock.evaluate(data, verbose=0, return_dict=True)
    assert found["evaluated"] == pytest.approx(evaluated, rel=1e-12)


class OwnStep(keras.Sequential):
    """A model that trains in a way of its own."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.layers[0].bias.assign([[7.0]][0])
        return logs


def own_step():
    model = OwnStep([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class OwnTest(OwnStep):
    """A model that is evaluated in a way of its own, which ignores weights."""

    def test_step(self, data):
        x, y = data[:2]
        error = keras.ops.mean(keras.ops.square(self(x) - y))
        return {"loss": error, "examples": keras.ops.cast(keras.ops.shape(x)[0], "float64")}


def padded_evaluations_of_own_steps(kind, **compiled):
    """Evaluates ten examples at once, and in a batch with two that pad it; returns both."""
    x, y, weights = padded_rows()

    def build():
        model = kind([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"], **compiled)
        return model

    train = replicas.dataset((x[:10], y[:10]), 10)
    return [
        replicas.fit(1, build, train, evaluated=replicas.dataset(examples, len(examples[0])))
        for examples in ((x[:10], y[:10]), (x, y, weights))
    ]


class OwnStepOfKeras(keras.Model):
    """Has a `test_step` that does what Keras's does."""

    def test_step(self, data):
        return super().test_step(data)


class UnweightedMeans(keras.Model):
    """Is evaluated as in the guides of Keras: the mean of the loss gets no weights."""

    def test_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        loss = self.compute_loss(x, y, y_pred, training=False)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        self.compute_metrics(x, y, y_pred)
        return self.get_metrics_result()


def evaluated_of_two_outputs(kind):
    """Evaluates ten examples at once, and in a last batch with two that pad it; returns both."""
    x, y, weights = padded_rows()

    def build():
        inputs = keras.Input((3,))
        outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"}
        model = kind(inputs, outputs)
        model.compile("sgd", {"a": "mse", "b": "mae"}, metrics={"a": ["mae", mean_of_batch]})
        return model

    labels = {"a": y, "b": 2 * y}
    first, labels_of_first = x[:10], {name: rows[:10] for name, rows in labels.items()}
    train = replicas.dataset((first, labels_of_first), 10)
    padded = replicas.dataset((x, labels, weights), 4)
    return [replicas.fit(1, build, train, evaluated=data)["evaluated"] for data in (train, padded)]


def ignoring_runs(kind):
    """Trains with labels to ignore, and a mean by weights."""
    numbers = np.random.default_rng(2)
    x, y, weights = (
        numbers.normal(size=(8, 3)),
        numbers.integers(0, 3, 8),
        numbers.uniform(size=8),
    )

    def build():
        losses = {
            "a": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
            "b": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        }
        inputs = keras.Input((3,))
        outputs = {"a": keras.layers.Dense(3)(inputs), "b": keras.layers.Dense(1)(inputs)}
        model = kind(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), losses)
        return model

    labels = {"a": y, "b": y[:, None]}
    data = replicas.dataset((x, labels, {"a": weights, "b": weights}), 4)
    found = replicas.fit(1, build, data)
    keras.utils.set_random_seed(0)
    stock = build()
    stock.fit(data, shuffle=False, verbose=0)
    return found["weights"], replicas.weights_of(stock)


class TestStepOfItsOwn:
    @pytest.mark.parametrize(
        ("kind", "compiled"),
        [
            (OwnStep, {}),
            (OwnTest, {}),
            pytest.param(OwnTest, {"run_eagerly": True}, marks=pytest.mark.long),
        ],
    )
    def test_its_evaluation_leaves_the_padding_out(self, kind, compiled):
        plain, padded = padded_evaluations_of_own_steps(kind, **compiled)
        assert padded["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-9)
        assert len(plain["evaluated"]) == 2

    @pytest.mark.parametrize("kind", [keras.Model, OwnStepOfKeras, UnweightedMeans])
    def test_a_smaller_last_batch_counts_by_its_examples(self, kind):
        """Each loss of two outputs, their sum, and a metric with one number for a batch."""
        whole, padded = evaluated_of_two_outputs(kind)
        assert padded == pytest.approx(whole, rel=1e-9)
        assert {"loss", "a_loss", "b_loss", "a_mean_of_batch"} <= whole.keys()
        assert whole["a_mean_of_batch"] == pytest.approx(whole["a_loss"], rel=1e-9)

    def test_its_training_has_the_losses_of_keras(self):
        class Own(keras.Model):
            def train_step(self, data):
                return super().train_step(data)

        found, stock = ignoring_runs(Own)
        np.testing.assert_allclose(found, stock, rtol=1e-12)

    def test_is_used_on_one_device(self):
        data = replicas.dataset((np.ones((4, 3)), np.ones((4, 1))), 4)
        found = replicas.fit(1, own_step, data, evaluated=data)
        assert found["weights"][-1] == 7.0 and found["norms"] == [None]

    @pytest.mark.parametrize(
        ("count", "name", "options"),
        [
            (2, "mirrored", {}),
            (1, "parameter_server", {}),
            (1, "none", {"batches_per_update": 2}),
        ],
    )
    def test_is_refused_where_it_would_be_wrong(self, count, name, options, monkeypatch):
        model = own_step()
        strategy = types.SimpleNamespace(num_replicas_in_sync=count)
        monkeypatch.setattr(OwnStep, "distribute_strategy", strategy)
        monkeypatch.setattr(kinds, "name_of", lambda strategy: name)
        with pytest.raises(DistributionError) as caught:
            install(model, **options)
        said = str(caught.value)
        assert "OwnStep overrides train_step, which computes the mean of one" in said
        assert "--accumulate-steps" in said and "override compute_loss()" in said


# --- What weighs how much ---


def several_values(_=None):
    """A weight of an example beside three values, a penalty, and a loss of a layer."""

    class Centred(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(0.5 * keras.ops.mean(keras.ops.square(inputs)))
            return inputs

    def build():
        penalty = keras.regularizers.L2(0.0625)
        dense = keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer=penalty)
        model = keras.Sequential([keras.Input((3, 2)), Centred(), dense])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    examples = weighted_rows(seed=1)
    data = replicas.dataset(examples, 6)
    return [replicas.fit(count, build, data) for count in (1, 2)]


def weighted_rows(seed):
    numbers = np.random.default_rng(seed)
    x, y = numbers.normal(size=(12, 3, 2)), numbers.normal(size=(12, 3, 1))
    return x, y, numbers.integers(0, 5, 12).astype("float64")


@pytest.mark.long
def test_a_weight_of_an_example_counts_for_each_of_its_values_and_a_penalty_once():
    x, y, weights = weighted_rows(seed=1)
    x = np.concatenate([x, np.ones((12, 3, 1))], axis=-1)
    w, expected = np.array([1.0, 1.0, 0.0]), []
    for part in (slice(0, 6), slice(6, 12)):
        each = np.repeat(weights[part] / weights[part].sum() / 3, 3)
        rows, errors = x[part].reshape(-1, 3), (x[part] @ w - y[part, ..., 0]).reshape(-1)
        kernel = w * [1, 1, 0]
        loss = (each * errors**2).sum() + 0.0625 * (kernel**2).sum()
        expected.append(loss + 0.5 * (x[part, ..., :2] ** 2).mean())
        w = w - 0.1 * (2 * (each * errors) @ rows + 0.125 * kernel)
    found = forked.run(several_values)
    assert_same(found)
    np.testing.assert_allclose(found[0]["weights"], w, rtol=1e-12)
    # A log is the mean over the steps so far.
    np.testing.assert_allclose(found[0]["losses"], [expected[0], np.mean(expected)], rtol=1e-12)


def padded_sequences(per_value):
    """Rows of different lengths, one of them empty; the second half of a batch weighs less."""
    numbers = np.random.default_rng(2)
    lengths = np.array([5, 5, 4, 1, 2, 1, 5, 4, 5, 0, 1, 2])
    x = numbers.integers(1, 9, (12, 5)) * (np.arange(5) < lengths[:, None])
    y = numbers.normal(size=(12, 5, 1))
    weights = numbers.integers(1, 4, (12, 5) if per_value else 12).astype("float64")
    weights[10:] = 0  # as the last batch is padded
    return x, y, weights


def masking_model():
    layers = [
        keras.Input((5,), dtype="int32"),
        keras.layers.Embedding(9, 3, mask_zero=True),
        keras.layers.LSTM(4, return_sequences=True),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    return model


def masked_runs(per_value):
    """One replica, two, and what a weighted mean over the values that count would be."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    examples = x, y, weights = padded_sequences(per_value)
    found = [
        replicas.fit(count, masking_model, replicas.dataset(examples, 6), evaluated=evaluated)
        for count, evaluated in (
            (1, replicas.dataset(examples, 12)),
            (2, replicas.dataset(examples, 6)),
        )
    ]
    keras.utils.set_random_seed(0)
    model = masking_model()
    counted = (x != 0) * (weights if per_value else weights[:, None])
    errors = keras.ops.convert_to_numpy(model(x))[..., 0] - y[..., 0]
    first = (counted[:6] * errors[:6] ** 2).sum() / counted[:6].sum()
    ends = np.cumsum([v.numpy().size for v in model.trainable_variables])[:-1]
    parts = np.split(np.array(found[0]["weights"]), ends)
    for variable, part in zip(model.trainable_variables, parts, strict=True):
        variable.assign(part.reshape(variable.shape))
    errors = keras.ops.convert_to_numpy(model(x))[..., 0] - y[..., 0]
    there = (x != 0) * (np.arange(12) < 10)[:, None]  # metrics= leave padding and masks out
    evaluated = {
        "loss": (counted * errors**2).sum() / counted.sum(),
        "mae": (there * np.abs(errors)).sum() / there.sum(),
    }
    return found, float(first), {name: float(value) for name, value in evaluated.items()}


@pytest.mark.parametrize("per_value", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_mask_is_a_weight_of_zero(per_value):
    found, first, evaluated = forked.run(masked_runs, per_value)
    assert_same(found)
    assert found[0]["losses"][0] == pytest.approx(first, rel=1e-12)
    assert found[0]["evaluated"] == pytest.approx(evaluated, rel=1e-12)


def test_replicas_that_add_up_masks_are_refused_under_xla():
    model = masking_model()
    stepper = step.Step(model, batches_per_update=2, updates_per_execution=1, jit_compile=True)
    stepper.replicas = 2
    data = tf.constant(padded_sequences(True)[0]), tf.zeros((12, 5, 1))
    with pytest.raises(DistributionError, match="--jit: a mask .* pass --jit off"):
        stepper.forward_and_backward(data, [])


class MaskedByItself(keras.Model):
    """A subclass, whose masks nothing tells before it is called."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(9, 3, mask_zero=True)
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(self.embedding(inputs))


def traced_refusals(_=None):
    """Returns the messages of errors that are raised while a step is traced."""

    def build():
        model = MaskedByItself()
        model.compile("sgd", "mse")
        return model

    data = replicas.dataset((padded_sequences(True)[0], np.zeros((12, 5, 1))), 4)
    said = []
    for more in ({}, {"updates_per_execution": 3}, {"batches_per_update": 3}):
        try:
            replicas.fit(2, build, data, jit_compile=True, **more)
        except DistributionError as error:
            said.append(str(error))
    return said


@pytest.mark.long
def test_an_error_while_a_step_is_traced_is_one_sentence():
    said = forked.run(traced_refusals)
    assert len(said) == 3
    for line in said:
        assert line.startswith("--jit: a mask of the model") and line.endswith("pass --jit off")
        assert len(line.splitlines()) == 1


def two_outputs():
    inputs = keras.Input((2,))
    layers = [
        keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name)
        for name in ("sum", "mean")
    ]
    model = keras.Model(inputs, {layer.name: layer(inputs) for layer in layers})
    losses = {
        "sum": keras.losses.MeanSquaredError(reduction="sum"),
        "mean": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    }
    model.compile(keras.optimizers.SGD(0.01), losses, loss_weights={"sum": 0.5, "mean": 1.0})
    return model


def two_targets():
    numbers = np.random.default_rng(3)
    x, first, second = (numbers.normal(size=(12, width)) for width in (2, 1, 1))
    weights = {"sum": np.ones(12), "mean": numbers.integers(0, 5, 12).astype("float64")}
    return x, {"sum": first, "mean": second}, weights


def other_reductions(_=None):
    """One replica, two, and what is said of a loss without a reduction."""
    data = replicas.dataset(two_targets(), 6)
    found = [replicas.fit(count, two_outputs, data) for count in (1, 2)]

    def without():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=None))
        return model

    plain = replicas.dataset((np.ones((4, 2)), np.ones((4, 1))), 4)
    try:
        replicas.fit(2, without, plain)
    except DistributionError as error:
        return found, str(error)


def test_sums_and_weighted_means_are_those_of_the_global_batch():
    x, y, weights = two_targets()
    w, total = {"sum": np.ones(2), "mean": np.ones(2)}, []
    for part in (slice(0, 6), slice(6, 12)):
        loss = 0.0
        for name in w:
            errors = x[part] @ w[name] - y[name][part, 0]
            share = np.full(6, 0.5)
            if name == "mean":
                share = weights[name][part] / weights[name][part].sum()
            loss += (share * errors**2).sum()
            w[name] = w[name] - 0.01 * 2 * (share * errors) @ x[part]
        total.append(loss)
    found, said = forked.run(other_reductions)
    assert_same(found)
    np.testing.assert_allclose(sorted(found[0]["weights"]), sorted([*w["sum"], *w["mean"]]))
    assert found[0]["logs"]["loss"] == pytest.approx(np.mean(total), rel=1e-12)
    assert "has reduction=None, which has no mean over several replicas" in said
    assert 'write reduction="sum"' in said


def uneven_batches(_=None):
    """Nine examples in batches of four: of the last batch one replica gets nothing."""
    numbers = np.random.default_rng(4)
    examples = numbers.normal(size=(9, 3)), numbers.normal(size=(9, 1))
    data = replicas.dataset(examples, 4, drop_remainder=False)

    def build():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
        return model

    return [replicas.fit(count, build, data, evaluated=data) for count in (1, 2)]


@pytest.mark.long
def test_replicas_with_different_numbers_of_examples():
    found = forked.run(uneven_batches)
    assert_same(found)
    assert np.isfinite(found[0]["weights"]).all()


def test_all_weights_zero_give_zero_and_change_nothing():
    data = replicas.dataset((np.ones((4, 3)), np.ones((4, 1)), np.zeros(4)), 4)

    def build():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, bias_initializer="ones")]
        )
        model.compile(keras.optimizers.SGD(1.0), "mse")
        return model

    found = replicas.fit(1, build, data)
    assert found["losses"] == [0.0] and found["norms"] == [0.0] and found["weights"][-1] == 1.0


def test_the_shape_trap_of_regression():
    """(batch,) against (batch, 1) must not become (batch, batch)."""
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(6, 2)), numbers.normal(size=6)
    weights = np.array([1.0, 1, 0, 2, 0, 1])

    def build():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        model.layers[0].set_weights([np.ones((2, 1))])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    squares = (x.sum(axis=1) - y) ** 2
    for targets in (y, y[:, None]):
        found = replicas.fit(1, build, replicas.dataset((x, targets), 6))
        assert found["losses"] == [pytest.approx(squares.mean(), rel=1e-12)]
        found = replicas.fit(1, build, replicas.dataset((x, targets, weights), 6))
        assert found["losses"] == [pytest.approx((weights * squares).sum() / 5, rel=1e-12)]


def two_dtypes(count, installed):
    """A layer of float32 in a model of float64, whose gradient is clipped."""
    numbers = np.random.default_rng(0)
    data = replicas.dataset((numbers.normal(size=(24, 3)), numbers.normal(size=(24, 1))), 6)

    def build():
        single = keras.layers.Dense(4, dtype="float32")
        model = keras.Sequential([keras.Input((3,)), single, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, clipnorm=0.5), "mse")
        return model

    return replicas.fit(count, build, data, **installed)


@pytest.mark.long
@pytest.mark.parametrize("installed", [{}, {"batches_per_update": 2}])
def test_weights_of_two_dtypes(installed):
    one, two = two_dtypes(1, installed), forked.run(two_dtypes, 2, installed)
    assert np.isfinite(one["norms"]).all() and min(one["norms"]) > 0.5
    for name in ("losses", "norms", "weights"):
        np.testing.assert_allclose(two[name], one[name], rtol=1e-5)


def test_a_global_norm_of_two_dtypes_is_refused():
    layers = [keras.layers.Dense(4), keras.layers.Dense(1, dtype="float64")]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(keras.optimizers.Adam(global_clipnorm=1.0), "mse")
    with pytest.raises(DistributionError) as error:
        install(model)
    assert str(error.value) == (
        "Adam(global_clipnorm=...): Keras cannot add up the gradients of weights of float32 and "
        "float64; use clipnorm, which clips each of them by itself, or one dtype"
    )


# --- Evaluation ---


def regression():
    layers = [
        keras.Input((3,)),
        keras.layers.Dropout(0.9),
        keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer="l2"),
    ]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model


def evaluations(batch_sizes, count):
    """The metrics of 20 examples, in batches whose last one is padded."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(20, 3)), numbers.normal(size=(20, 1))
    strategy = replicas.strategy_of(count)
    found = []
    with patches.patch_keras_for(strategy):
        with strategy.scope():
            model = regression()
        fitting.build(model, arrays.evaluation_data(x, y, batch_size=batch_sizes[0]))
        install(model, updates_per_execution=2)
        for batch_size in batch_sizes:
            data = arrays.evaluation_data(x, y, batch_size=batch_size)
            found.append(model.evaluate(data, verbose=0, return_dict=True))
    return [{name: float(value) for name, value in logs.items()} for logs in found]


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2, 3])
def test_neither_the_batch_size_nor_padding_nor_dropout_shows_in_an_evaluation(count):
    """Nor whether the replicas can share a batch equally."""
    if count == 1:
        found = evaluations([16, 8, 20], 1)
    else:
        found = forked.run(evaluations, [16, 20, 7, 1], count, cpus=count)
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(20, 3)), numbers.normal(size=(20, 1))
    errors = x.sum(axis=1) - y[:, 0]
    expected = {
        "loss": (errors**2).mean() + 0.01 * 3,
        "mae": np.abs(errors).mean(),
        "mean_squared_error": (errors**2).mean(),
    }
    for logs in found:
        logs["mean_squared_error"] = logs.pop("mse", logs.get("mean_squared_error"))
        assert logs == pytest.approx(expected, rel=1e-9)


def evaluated_outputs(batch_sizes, count):
    """The logs of an evaluation of two outputs, whose examples weigh differently."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    x, y, weights = weighted_pairs()
    strategy = replicas.strategy_of(count)
    found = []
    with patches.patch_keras_for(strategy):
        with strategy.scope():
            inputs = keras.Input((2,))
            sums = keras.layers.Lambda(lambda x: keras.ops.sum(x, axis=1, keepdims=True))(inputs)
            twice = keras.layers.Rescaling(2.0)(sums)
            model = keras.Model(inputs, {"twice": twice, "once": sums})
            losses = {"once": "mse", "twice": "mae"}
            model.compile("sgd", losses, loss_weights={"once": 1.0, "twice": 3.0})
        data = arrays.evaluation_data(x, y, weights, batch_size=batch_sizes[0])
        fitting.build(model, data)
        install(model)
        for batch_size in batch_sizes:
            data = arrays.evaluation_data(x, y, weights, batch_size=batch_size)
            found.append(model.evaluate(data, verbose=0, return_dict=True))
    return [{name: float(value) for name, value in logs.items()} for logs in found]


def weighted_pairs():
    numbers = np.random.default_rng(7)
    x, y = numbers.normal(size=(11, 2)), numbers.normal(size=(2, 11, 1))
    weights = numbers.uniform(size=(2, 11))
    return x, {"once": y[0], "twice": y[1]}, {"once": weights[0], "twice": weights[1]}


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_the_loss_of_each_output_and_their_sum_are_weighted_means(count):
    """A last batch with padding counts by its weights, not as a full one."""
    sizes = [4, 8, 11] if count == 1 else [4, 8]
    found = evaluated_outputs(sizes, 1) if count == 1 else forked.run(evaluated_outputs, sizes, 2)
    x, y, weights = weighted_pairs()
    total = x.sum(axis=1)
    once = np.average((total - y["once"][:, 0]) ** 2, weights=weights["once"])
    twice = np.average(np.abs(2 * total - y["twice"][:, 0]), weights=weights["twice"])
    expected = {"once_loss": once, "twice_loss": twice, "loss": once + 3 * twice}
    for logs in found:
        assert logs == pytest.approx(expected, rel=1e-9)


def test_an_evaluation_counts_each_call_of_a_loss():
    """As adversarial training does, whose `compute_loss()` calls Keras's twice."""

    class Twice(keras.Model):
        def compute_loss(self, *arguments, **named):
            return super().compute_loss(*arguments, **named) + super().compute_loss(
                *arguments, **named
            )

    x, y, weights = weighted_pairs()
    inputs = keras.Input((2,))
    ones = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)
    model = Twice(inputs, {"twice": ones, "once": ones})
    model.compile("sgd", {"once": "mse", "twice": "mae"})
    data = arrays.evaluation_data(x, y, weights, batch_size=11)
    fitting.build(model, data)
    install(model)
    logs = model.evaluate(data, verbose=0, return_dict=True)
    assert logs["loss"] == pytest.approx(2 * (logs["once_loss"] + logs["twice_loss"]), rel=1e-6)


def test_a_value_that_is_no_metric_is_refused():
    class Measures(keras.Sequential):
        def compute_metrics(self, *arguments):
            return super().compute_metrics(*arguments) | {"bias": 1.0}

    model = Measures([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = replicas.dataset((np.ones((4, 2)), np.ones((4, 1))), 4)
    fitting.build(model, data)
    install(model)
    for compute in (model.fit, model.evaluate):
        with pytest.raises(DistributionError, match="Measures.compute_metrics.. returns bias, whi"):
            compute(data, verbose=0)


def normalised_weights(kind):
    """The weights after a step with batch renormalization; of what is said without a step."""
    devices = [f"CPU:{index}" for index in range(2)]
    if kind == "central_storage":
        strategy = tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0")
    else:
        strategy = tf.distribute.MirroredStrategy(devices)
    data = replicas.dataset((np.arange(8.0).reshape(4, 2), np.ones((4, 1))), 4)
    keras.utils.set_random_seed(0)
    said = ""
    with patches.patch_keras_for(strategy):
        with strategy.scope():
            layers = [keras.layers.BatchNormalization(renorm=True), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((2,)), *layers])
            model.compile("sgd", "mse")
            spectral = keras.layers.SpectralNormalization(keras.layers.Dense(3), name="spectral")
            other = keras.Sequential([keras.Input((2,)), spectral])
            other.compile("sgd", "mse")
        fitting.build(model, data)
        install(model)
        model.fit(data, verbose=0)
        try:
            install(other)
        except DistributionError as error:
            said = str(error)
    return [weights.tolist() for weights in model.get_weights()], said


@pytest.mark.long
def test_normalizations_under_central_storage():
    """They assign to variables of which there is one copy; to kernels they may not."""
    found = [forked.run(normalised_weights, kind) for kind in ("central_storage", "mirrored")]
    for shared, mirrored in zip(found[0][0], found[1][0], strict=True):
        np.testing.assert_allclose(shared, mirrored, rtol=1e-6)
    assert found[0][1].startswith("the layer spectral does not work with central_storage")
    assert found[1][1] == ""


def far_from_zero_runs(_=None):
    """Values in float32 whose mean is 4,000 times their deviation, on one replica and two."""
    numbers = np.random.default_rng(0)
    x, y = 20_000 + 5 * numbers.normal(size=(48, 3)), numbers.normal(size=(48, 1))

    def build():
        options = dict(momentum=0.5, center=False, scale=False, dtype="float32")
        layers = [keras.layers.BatchNormalization(**options), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    data = replicas.dataset((x, y), 12)
    return [replicas.fit(count, build, data, evaluated=data) for count in (1, 2)]


def test_batch_normalization_of_large_values_does_not_cancel():
    one, two = forked.run(far_from_zero_runs)
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-3)
    assert two["evaluated"]["loss"] == pytest.approx(one["evaluated"]["loss"], rel=1e-3)


class OwnAccuracy(keras.metrics.SparseCategoricalAccuracy):
    """A user's own class, which may ignore weights."""


def own_accuracies(count):
    """The accuracy of a class of one's own behind a mask, whose last batch is padded."""
    strategy = replicas.strategy_of(count)
    words = np.random.default_rng(0).integers(0, 4, (10, 6))
    with patches.patch_keras_for(strategy):
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((6,), dtype="int32"), keras.layers.Embedding(4, 3, mask_zero=True)]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, metrics=[OwnAccuracy("own"), "accuracy"])
        data = arrays.evaluation_data(words, words % 3, batch_size=4)
        fitting.build(model, data)
        install(model)
        logs = model.evaluate(data, verbose=0, return_dict=True)
    return float(logs["own"]), float(logs["accuracy"])


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_a_metric_of_one_s_own_sees_the_mask(count):
    own, stock = own_accuracies(1) if count == 1 else forked.run(own_accuracies, 2)
    assert own == pytest.approx(stock, rel=1e-6)


def test_weights_of_true_and_false_are_ones_and_zeros():
    x, y = np.arange(12.0).reshape(4, 3), np.ones((4, 1))
    found = []
    for weights in (np.array([True, False, True, True]), np.array([1.0, 0.0, 1.0, 1.0])):
        model = regression()
        data = arrays.evaluation_data(x, y, weights, batch_size=3)
        fitting.build(model, data)
        install(model)
        plain = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(4)
        found += [model.evaluate(each, verbose=0, return_dict=True) for each in (data, plain)]
    assert all(logs == pytest.approx(found[0], rel=1e-6) for logs in found)


class OwnError(keras.metrics.MeanAbsoluteError):
    """A user's own class, which may ignore weights."""


class Autoencoder(keras.Model):
    """Takes no labels."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(3)

    def call(self, x):
        return self.out(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        errors = keras.ops.mean(keras.ops.square(x - y_pred), axis=-1)
        return keras.ops.mean(errors if sample_weight is None else errors * sample_weight)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, x, y_pred, sample_weight)


def without_labels(count):
    """Trains on x alone, without and with weights, and evaluates with a padded last batch."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy = replicas.strategy_of(count)
    x = np.random.default_rng(0).normal(size=(10, 3))
    found = []
    for weights in (None, np.linspace(0.5, 1.5, 10)):
        with patches.patch_keras_for(strategy):
            keras.utils.set_random_seed(0)
            with strategy.scope():
                model = Autoencoder()
                model.compile(keras.optimizers.SGD(0.1), metrics=[OwnError("error")])
            train = arrays.training_data(x, None, weights, seed=0, batch_size=4)
            test = arrays.evaluation_data(x, None, weights, batch_size=4)
            fitting.build(model, train)
            install(model)
            model.fit(train, steps_per_epoch=2, epochs=2, verbose=0)
            logs = model.evaluate(test, verbose=0, return_dict=True)
        errors = keras.ops.convert_to_numpy(model(x)) - x
        found += [
            (logs["loss"], np.average((errors**2).mean(axis=1), weights=weights)),
            (logs["error"], np.abs(errors).mean()),
        ]
    return [tuple(map(float, pair)) for pair in found]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_model_without_labels(count):
    found = without_labels(1) if count == 1 else forked.run(without_labels, 2)
    for logged, expected in found:
        assert logged == pytest.approx(expected, rel=1e-9)
    if count > 1:
        np.testing.assert_allclose(found, without_labels(1), rtol=1e-9)


def test_weights_in_a_tuple_are_those_of_the_outputs():
    x, *named = weighted_pairs()
    y, weights = (tuple(part.values()) for part in named)
    inputs = keras.Input((2,))
    outputs = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)] * 2
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.1), ["mse", "mse"], loss_weights=[1.0, 3.0])
    data = arrays.training_data(x, y, weights, seed=0, batch_size=11)
    fitting.build(model, data)
    install(model)
    model.fit(data.take(1), verbose=0)
    (kernel,) = model.get_weights()
    errors = [(x.sum(axis=1) - part[:, 0]) for part in y]
    gradient = sum(
        factor * np.average(2 * error[:, None] * x, axis=0, weights=weight)
        for factor, error, weight in zip((1.0, 3.0), errors, weights, strict=True)
    )
    np.testing.assert_allclose(kernel[:, 0], 1 - 0.1 * gradient, rtol=1e-5)


# --- Several outputs ---


def partly_lost():
    """Two outputs, one of them without a loss, with metrics of each."""
    inputs = keras.Input((2,))
    outputs = [keras.layers.Dense(1, kernel_initializer="ones", name=name) for name in "ab"]
    model = keras.Model(inputs, [layer(inputs) for layer in outputs])
    optimizer = keras.optimizers.SGD(0.01)
    model.compile(
        optimizer, ["mse", None], metrics=[["mae"], ["mae"]], weighted_metrics=["mse"] * 2
    )
    return model


def masked_and_not():
    """An output of each word, masked, and one of each text, which is not."""
    inputs = keras.Input((4,), dtype="int32")
    words = keras.layers.Embedding(5, 2, mask_zero=True)(inputs)
    text = keras.layers.GlobalAveragePooling1D()(words)
    outputs = [keras.layers.Dense(1, name="words")(words), keras.layers.Dense(1, name="text")(text)]
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01), ["mse", "mse"])
    return model


def words_and_texts():
    numbers = np.random.default_rng(8)
    words = numbers.integers(1, 5, (9, 4)) * (np.arange(4) < numbers.integers(1, 5, (9, 1)))
    return words, (numbers.normal(size=(9, 4, 1)), numbers.normal(size=(9, 1)))


def several_outputs(_=None):
    """On one replica at once, and on two in batches of four of nine examples.

    The second replica gets none of the last batch.
    """
    numbers = np.random.default_rng(9)
    x, y = numbers.normal(size=(9, 2)), tuple(numbers.normal(size=(2, 9, 1)))
    weights = tuple(numbers.uniform(size=(2, 9)))
    found = []
    for build, examples in (
        (partly_lost, (x, y, weights)),
        (masked_and_not, words_and_texts()),
    ):
        data = replicas.dataset(examples, 8)
        found.append(
            [
                replicas.fit(count, build, data, evaluated=replicas.dataset(examples, size, False))
                for count, size in ((1, 9), (2, 4))
            ]
        )
    return found


@pytest.mark.long
def test_neither_batches_nor_replicas_show_in_the_losses_of_several_outputs():
    lost, masked = forked.run(several_outputs)
    for runs in (lost, masked):
        assert_same(runs)
        assert all(np.isfinite(value) for value in runs[1]["evaluated"].values())
    evaluated = lost[0]["evaluated"]
    assert evaluated["loss"] == pytest.approx(evaluated["a_mse"], rel=1e-12)


def test_metrics_of_several_outputs_are_named_as_in_keras():
    model = partly_lost()
    model.train_on_batch(np.ones((2, 2)), [np.ones((2, 1))] * 2)
    names = list(model.get_metrics_result())
    assert {"a_mae", "b_mae", "a_mse", "b_mse"} < set(names)
    install(model)
    assert list(model.get_metrics_result()) == names


def test_masked_outputs_of_which_one_has_labels_and_weights():
    inputs = keras.Input((4,), dtype="int32")
    words = keras.layers.Embedding(5, 2, mask_zero=True)(inputs)
    outputs = {name: keras.layers.Dense(1, name=name)(words) for name in "ab"}
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.01), {"a": "mse"}, jit_compile=False)
    x, (y, _) = words_and_texts()
    data = tf.data.Dataset.from_tensors((x, {"a": y}, {"a": np.ones((9, 4))}))
    fitting.build(model, data)
    weights = model.get_weights()
    expected = model.fit(data, shuffle=False, verbose=0).history["loss"]
    model.set_weights(weights)
    install(model)
    assert model.fit(data, shuffle=False, verbose=0).history["loss"] == pytest.approx(expected)


def sums_with_weights(_=None):
    """One replica, two, and Keras's own."""
    numbers = np.random.default_rng(10)
    examples = (*numbers.normal(size=(2, 8, 1)), numbers.uniform(size=8))

    def build():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction="sum"))
        return model

    data = replicas.dataset(examples, 4)
    found = [replicas.fit(count, build, data) for count in (1, 2)]
    keras.utils.set_random_seed(0)
    stock = build()
    stock.fit(data, shuffle=False, verbose=0)
    return found, replicas.weights_of(stock)


def test_a_sum_has_the_weights_as_they_are():
    found, expected = forked.run(sums_with_weights)
    assert_same(found)
    np.testing.assert_allclose(found[0]["weights"], expected, rtol=1e-12)


class ShareRight(keras.metrics.Mean):
    """A metric of two numbers."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(abs(y_true - y_pred) < 0.5, sample_weight)

    def result(self):
        return {"right": super().result(), "wrong": 1 - super().result()}


def pairs_of_numbers(_=None):
    numbers = np.random.default_rng(11)
    data = replicas.dataset(tuple(numbers.normal(size=(2, 8, 1))), 4)

    def build():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", weighted_metrics=[ShareRight()])
        return model

    return [replicas.fit(count, build, data, evaluated=data) for count in (1, 2)]


@pytest.mark.long
def test_a_metric_may_have_several_numbers_by_name():
    found = forked.run(pairs_of_numbers)
    assert_same(found)
    assert {"loss", "right", "wrong"} == found[0]["evaluated"].keys()


# --- Metrics of padded evaluations ---


@pytest.mark.parametrize(
    ("shape", "metric"),
    [
        ((2, 4, 1), keras.metrics.Precision()),
        ((5, 1), keras.metrics.AUC()),
        ((5, 1), keras.metrics.RecallAtPrecision(0.3)),
        ((2, 5, 1), keras.metrics.MeanIoU(2)),
        ((3,), keras.metrics.BinaryIoU()),
        ((2, 4, 3), keras.metrics.OneHotMeanIoU(3)),
        ((3,), keras.metrics.Precision()),
    ],
    ids=lambda value: value.name if isinstance(value, keras.metrics.Metric) else None,
)
def test_padding_counts_in_no_metric_of_single_values(shape, metric):
    numbers = np.random.default_rng(12)
    x = numbers.uniform(size=(10, *shape))
    y = numbers.integers(0, 2, (10, *shape)).astype("float32")
    if isinstance(metric, keras.metrics.OneHotMeanIoU):
        y = np.eye(3)[numbers.integers(0, 3, (10, *shape[:-1]))].astype("float32")
    model = keras.Sequential([keras.Input(shape), keras.layers.Activation("linear")])
    model.compile("sgd", "mse", metrics=[metric], jit_compile=False)
    expected = model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)[metric.name]
    data = arrays.evaluation_data(x, y, batch_size=4)
    with patches.patch_keras_for(tf.distribute.get_strategy()):
        fitting.build(model, data)
        install(model)
        found = model.evaluate(data, verbose=0, return_dict=True)[metric.name]
    assert found == pytest.approx(expected, rel=1e-6)


# --- Dropout ---


class ScaledByDropped(keras.layers.Layer):
    """Drops out of a weight, which has no axis of the batch."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=3)

    def build(self, shape):
        self.scale = self.add_weight(shape=(1, *shape[1:]), initializer="ones")

    def call(self, inputs, training=False):
        return inputs * (1.0 + self.dropout(self.scale, training=training))


def dropped(count):
    """One replica and several, and a mask of each replica."""
    numbers = np.random.default_rng(5)
    # Three rows of 3 x 5 numbers a replica: the second one begins within a block of the generator.
    examples = numbers.normal(size=(6 * count, 3, 5)), numbers.normal(size=(6 * count, 3, 1))

    def build():
        layers = [
            keras.Input((3, 5)),
            keras.layers.Dropout(0.3),
            keras.layers.Dropout(0.3, noise_shape=(None, 1, 5)),
            keras.layers.Dropout(0.3, noise_shape=(1, 3, 5)),
            ScaledByDropped(),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(0.1), "mse")
        return model

    data = replicas.dataset(examples, 3 * count)
    found = [replicas.fit(n, build, data, epochs=2) for n in (1, count)]
    strategy = replicas.strategy_of(count)
    with patches.patch_keras_for(strategy), strategy.scope():
        seed = keras.random.SeedGenerator(1)
        masks = strategy.run(lambda: keras.random.dropout(tf.ones((3, 15)), 0.5, seed=seed))
    masks = [part.numpy().tolist() for part in strategy.experimental_local_results(masks)]
    return found, masks


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_dropout_is_the_same_on_several_replicas_and_their_masks_differ(count):
    found, masks = forked.run(dropped, count, cpus=count)
    assert_same(found)
    assert len(masks) == count
    assert all(masks[0] != mask for mask in masks[1:])


# --- Other random numbers ---


class Sampling(keras.layers.Layer):
    """Draws a code of each example, as a variational autoencoder does."""

    def __init__(self, for_xla):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(4)
        self.for_xla = for_xla

    def call(self, inputs):
        mean, size = keras.ops.split(inputs, 2, axis=-1)
        shape, seed = keras.ops.shape(mean), self.seeds
        self.add_loss(keras.ops.mean(mean**2))
        drawn = keras.random.normal(shape, seed=seed) + keras.random.uniform(shape, seed=seed)
        drawn += keras.random.truncated_normal(tf.shape(mean), stddev=0.5, seed=seed)
        if not self.for_xla:  # which has no such operation
            drawn += keras.random.gamma(shape, 0.7, seed=seed)
        drawn *= keras.ops.cast(keras.random.randint(shape[:1], 0, 3, seed=seed), mean.dtype)[
            :, None
        ]
        of_all = keras.random.normal((1, shape[1]), seed=seed) + keras.random.normal((), seed=seed)
        return mean + keras.ops.exp(0.1 * size) * drawn + of_all


class Denoising(keras.Model):
    """Draws noise for each example in `compute_loss()`, as a diffusion model does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seeds = keras.random.SeedGenerator(5)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        noise = keras.random.normal(keras.ops.shape(y), seed=self.seeds)
        values = keras.ops.mean(keras.ops.square(y_pred - y - 0.1 * noise), axis=-1)
        return keras.ops.mean(values if sample_weight is None else values * sample_weight)


def drawn(count, jit_compile):
    """One replica and several, and several with batches whose size TensorFlow does not know."""
    numbers = np.random.default_rng(5)
    examples = numbers.normal(size=(6 * count, 5)), numbers.normal(size=(6 * count, 3))

    def build():
        inputs = keras.Input((5,))
        hidden = keras.layers.GaussianNoise(0.2)(inputs)
        hidden = keras.layers.GaussianDropout(0.2)(hidden)
        hidden = Sampling(jit_compile)(
            keras.layers.Dense(6)(keras.layers.AlphaDropout(0.2)(hidden))
        )
        model = Denoising(inputs, keras.layers.Dense(3)(hidden))
        model.compile(keras.optimizers.Adam(0.1))
        return model

    data = replicas.dataset(examples, 3 * count)
    found = [
        replicas.fit(n, build, data, epochs=2, evaluated=data, jit_compile=jit_compile)
        for n in (1, count)
    ]
    unknown = data.map(lambda *parts: tuple(tf.ensure_shape(p, (None, p.shape[1])) for p in parts))
    if not jit_compile:
        found.append(replicas.fit(count, build, unknown, epochs=2, evaluated=unknown))
    return found


ON_SEVERAL_REPLICAS = pytest.mark.parametrize(
    ("count", "jit_compile"),
    [
        (2, False),
        pytest.param(3, False, marks=pytest.mark.long),
        pytest.param(2, True, marks=pytest.mark.long),
    ],
)


@ON_SEVERAL_REPLICAS
def test_random_numbers_of_examples_are_those_of_one_device(count, jit_compile):
    assert_same(forked.run(drawn, count, jit_compile, cpus=count, seconds=600))


# --- A compute_loss() of the model that ignores the weights of the padding ---


class Ignoring(keras.Model):
    """Counts each example of a batch, and adds its means to metrics in several ways."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seeds = keras.random.SeedGenerator(5)
        self.means = [keras.metrics.Mean(name) for name in ("values", "weighted", "number", "own")]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        values = keras.ops.mean(keras.ops.abs(y - y_pred), axis=-1)
        values += keras.random.uniform(keras.ops.shape(values), seed=self.seeds)
        self.means[0].update_state(values)
        self.means[1].update_state(values, sample_weight)
        self.means[2].update_state(keras.ops.mean(values))
        return keras.ops.mean(values) + super().compute_loss(x, y, y_pred, sample_weight)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.means[3].update_state(keras.ops.mean(keras.ops.square(y_pred)))
        return super().compute_metrics(x, y, y_pred, sample_weight)


def evaluated_without_padding(count, jit_compile):
    """One replica and several, and whether their seeds are the same at the end."""
    keras.config.set_floatx("float64")
    numbers = np.random.default_rng(6)
    x, y = numbers.normal(size=(6 * count, 5)), numbers.normal(size=(6 * count, 1))

    def build():
        inputs = keras.Input((5,))
        model = Ignoring(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.3)(inputs)))
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
        built.append(model)
        return model

    built: list = []
    data = replicas.dataset((x, y), 3 * count)
    # In their last batches the last replica has one example, and the last ones have none.
    evaluated = [
        arrays.evaluation_data(x[:size], y[:size], batch_size=3 * count)
        for size in (6 * count - 2, 3 * count + 2)
    ]
    options = dict(evaluated=evaluated[0].concatenate(evaluated[1]), jit_compile=jit_compile)
    found = [replicas.fit(n, build, data, **options) for n in (1, count)]
    states = replicas.strategy_of(count).experimental_local_results(built[-1].seeds.state.value)
    return found, [state.numpy().tolist() for state in states]


@ON_SEVERAL_REPLICAS
def test_padding_counts_in_no_compute_loss_on_several_replicas(count, jit_compile):
    arguments = (evaluated_without_padding, count, jit_compile)
    found, states = forked.run(*arguments, cpus=count, seconds=600)
    assert_same(found)
    values = {found[1]["evaluated"][name] for name in ("values", "weighted", "number")}
    assert max(values) == pytest.approx(min(values), rel=1e-12)
    assert all(state == states[0] for state in states)


class Noise(keras.layers.Layer):
    def call(self, inputs):
        return inputs + 0.1 * tf.random.normal(tf.shape(inputs))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_what_draws_from_a_stream_of_tensorflow_is_refused(jit_compile):
    model = keras.Sequential([keras.Input((2,)), Noise(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((4, 2)), np.ones((4, 1))))
    fitting.build(model, data)
    install(model, jit_compile=jit_compile)
    with pytest.raises(DistributionError, match="by RandomStandardNormal of TensorFlow, whose"):
        model.fit(data, verbose=0)


# --- The order of a step ---


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_row_that_a_batch_looks_up_twice_has_the_sum_of_its_gradients(clip_norm):
    """Else Adam's v adds up their squares, and the step is sqrt(2) times too long."""
    ids = np.array([[0, 0, 2], [2, 0, 1]])

    def build(as_matrix):
        inputs = keras.Input((3, 4) if as_matrix else (3,))
        if as_matrix:
            rows = keras.layers.Dense(2, use_bias=False, kernel_initializer="ones")(inputs)
        else:
            rows = keras.layers.Embedding(4, 2, embeddings_initializer="ones")(inputs)
        model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(rows))
        model.compile(keras.optimizers.Adam(0.1, global_clipnorm=clip_norm), "mse")
        return model

    y, found = np.array([[1.0, -2.0], [0.5, 3.0]]), []
    for as_matrix in (False, True):
        x = np.eye(4)[ids] if as_matrix else ids
        data = replicas.dataset(
            (np.tile(x, (2, 1, 1) if as_matrix else (2, 1)), np.tile(y, (2, 1))), 2
        )
        found.append(replicas.fit(1, lambda as_matrix=as_matrix: build(as_matrix), data))
    assert_same(found)


def weighted_examples():
    numbers = np.random.default_rng(1)
    x, y = numbers.normal(size=(12, 3)), numbers.normal(size=(12, 1))
    y[4:8] *= 0.01  # so that the second of three steps is not clipped
    return x, y, numbers.integers(1, 9, 12).astype("float64")


def clipped_steps(clip_norm):
    """Three batches of 4 weighted examples with SGD(1.0), on two replicas."""

    def build():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(1.0, global_clipnorm=clip_norm), "mse")
        return model

    return replicas.fit(2, build, replicas.dataset(weighted_examples(), 4))


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
        w = w - gradient * min(1.0, clip_norm / norm)
        expected.append(w)
    assert any(clipped) == (clip_norm < 1)
    found = forked.run(clipped_steps, clip_norm)
    np.testing.assert_allclose(found["steps"], expected, rtol=1e-12)
    np.testing.assert_allclose(found["norms"], norms, rtol=1e-12)  # before clipping


class TestHalfPrecision:
    def steps(self, policy):
        """Weights, norms and the loss scale of two steps with gradients that float16 loses."""
        keras.utils.clear_session()  # the policy too
        keras.config.set_dtype_policy(policy)
        x = np.array([[1e-3, 2e-3], [4e-3, -1e-3]], "float32")
        data = replicas.dataset((x, np.array([[1e-3], [-1e-3]], "float32")), 2)
        strategy = replicas.strategy_of(1)
        norms = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: norms.append(gradient_norm(model))
        )
        with patches.patch_keras_for(strategy):
            dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input((2,)), dense])
            model.compile(keras.optimizers.SGD(100.0), "mse")
            fitting.build(model, data)
            install(model)
            assert not np.isfinite(gradient_norm(model))  # before the first step
            model.fit(data.repeat(2), verbose=0, shuffle=False, callbacks=[note])
        return replicas.weights_of(model), norms, model.optimizer

    def test_steps_and_norms_are_those_of_single_precision(self):
        (weights, norms, _), (half, half_norms, optimizer) = (
            self.steps(policy) for policy in ("float32", "mixed_float16")
        )
        assert float(optimizer.dynamic_scale) == 2.0**15
        np.testing.assert_allclose(half, weights, rtol=5e-3)
        np.testing.assert_allclose(half_norms, norms, rtol=5e-3)  # without the scale


def test_a_fixed_loss_scale_is_not_in_the_norm():
    norms = []
    for scale in (None, 1024.0):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(loss_scale_factor=scale), "mse")
        data = replicas.dataset((np.ones((4, 2)), np.ones((4, 1))), 4)
        fitting.build(model, data)
        install(model)
        model.fit(data, verbose=0)
        norms.append(gradient_norm(model))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_a_model_without_a_step_has_no_norm():
    assert gradient_norm(regression()) is None


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_the_optimizer_of_a_recipe_stays_keras_s_own(precision, tmp_path):
    """A weights file of it loads without this package, and the other way round."""
    data = replicas.dataset((np.ones((4, 3), "float32"), np.ones((4, 1), "float32")), 4)

    def model(installed):
        keras.utils.clear_session()
        keras.config.set_dtype_policy(precision)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.AdamW(0.1, global_clipnorm=1.0, name="mine")
        model.compile(optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
        if installed:
            with patches.patch_keras_for(replicas.strategy_of(1)):
                install(model)
                model.fit(data, verbose=0)
        return model

    stock, ours = model(False), model(True)
    assert type(ours.optimizer) is type(stock.optimizer)
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
    assert type(loaded) is type(stock.optimizer) and loaded.name == ours.optimizer.name


# --- Accumulation, executions of several steps, XLA ---


def three_batches():
    """Three batches of 4 examples, whose weights sum up to 20, 0.7 and 0."""
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(12, 3)), numbers.normal(size=(12, 1))
    weights = np.array([8.0, 1, 4, 7, 0.1, 0, 0.6, 0, 0, 0, 0, 0])
    return x, y, weights


def linear_model():
    """A sum of the inputs, whose weights are drawn to zero."""
    penalty = keras.regularizers.L2(0.0625)
    dense = keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer=penalty)
    model = keras.Sequential([keras.Input((3,)), dense])
    metrics = [keras.metrics.MeanSquaredError("error")]
    optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
    model.compile(optimizer, "mse", weighted_metrics=metrics)
    return model


def two_updates(weighted):
    """Of three batches each, and of one with the same examples; without and with XLA."""
    replicas.strategy_of(2)  # before any operation, which begins with the GPU as it is
    examples = three_batches() if weighted else three_batches()[:2]
    return [
        replicas.fit(
            2,
            linear_model,
            replicas.dataset(examples, batch),
            epochs=2,
            evaluated=replicas.dataset(examples, batch) if count > 1 else None,
            batches_per_update=count,
            jit_compile=jit_compile,
        )
        for batch, count in ((4, 3), (12, 1))
        for jit_compile in (False, True)
    ]


def updates_by_hand(weighted):
    """Two updates in NumPy, each with the clipped gradient of the weighted mean.

    Returns:
        The weights, and what the second one's loss and error were.
    """
    x, y, weights = three_batches()
    weights = weights if weighted else np.ones(12)
    x = np.concatenate([x, np.ones((12, 1))], axis=1)
    w = np.array([1.0, 1, 1, 0])
    for _ in range(2):
        errors = x @ w - y[:, 0]
        kernel = w * [1, 1, 1, 0]
        error = (weights * errors**2).sum() / weights.sum()
        loss = error + 0.0625 * (kernel**2).sum()
        gradient = 2 * (weights * errors) @ x / weights.sum() + 0.125 * kernel
        gradient *= 0.5 / max(0.5, np.linalg.norm(gradient))
        w = w - 0.1 * gradient
    return w, loss, error


@pytest.mark.long
@pytest.mark.parametrize(
    "weighted",
    [
        pytest.param(True, id="unequal weights"),
        pytest.param(False, id="no weights", marks=pytest.mark.long),
    ],
)
def test_k_batches_make_the_update_of_one_batch_of_all_examples(weighted):
    weights, loss, error = updates_by_hand(weighted)
    found = forked.run(two_updates, weighted)
    assert_same(found)
    for update in found:
        assert update["iterations"] == 2
        np.testing.assert_allclose(update["weights"], weights, rtol=1e-12)
        assert update["logs"] == pytest.approx({"loss": loss, "error": error}, rel=1e-12)


def sum_updates(_=None):
    whole = replicas.dataset(two_targets(), 12)
    return [
        replicas.fit(count, two_outputs, replicas.dataset(two_targets(), batch), **more)
        for count, batch, more in (
            (1, 12, {"evaluated": whole}),
            (1, 4, {"batches_per_update": 3, "evaluated": whole}),
            (2, 12, {"evaluated": whole}),
            (2, 4, {"batches_per_update": 3, "evaluated": whole}),
            (2, 4, {"batches_per_update": 3, "jit_compile": True}),
        )
    ]


@pytest.mark.long
def test_a_sum_over_k_batches_is_that_of_one_batch_of_all_examples():
    """Beside a mean; an evaluation sums one batch, however many an update accumulates."""
    x, y, weights = two_targets()
    w, loss = {}, 0.0
    for name in ("sum", "mean"):
        errors = x @ np.ones(2) - y[name][:, 0]
        share = np.full(12, 0.5) if name == "sum" else weights[name] / weights[name].sum()
        loss += (share * errors**2).sum()
        w[name] = np.ones(2) - 0.01 * 2 * (share * errors) @ x
    found = forked.run(sum_updates)
    assert_same(found)
    np.testing.assert_allclose(sorted(found[0]["weights"]), sorted([*w["sum"], *w["mean"]]))
    assert found[0]["logs"]["loss"] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("batches", [1, 2])
def test_a_loss_without_a_reduction_is_refused_with_accumulation(batches):
    def build():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=None))
        return model

    model = build()
    fitting.build(model, replicas.dataset((np.ones((4, 2)), np.ones((4, 1))), 4))
    if batches == 1:
        install(model)
        return
    with pytest.raises(DistributionError, match="reduction=None.*or accumulated batches"):
        install(model, batches_per_update=batches)


@pytest.mark.parametrize(
    ("loss", "refused"),
    [
        ("dice", True),
        (keras.losses.Dice(), True),
        (keras.losses.Tversky(axis=(0, 1)), True),
        (keras.losses.Circle(), True),
        (keras.losses.Dice(axis=1), False),
        (keras.losses.Tversky(axis=(1,)), False),
    ],
)
def test_a_loss_over_the_examples_of_a_batch_is_refused_with_accumulation(loss, refused):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="sigmoid")])
    model.compile("sgd", loss)
    labels = np.zeros(4, int) if isinstance(loss, keras.losses.Circle) else np.ones((4, 2))
    fitting.build(model, replicas.dataset((np.ones((4, 2)), labels), 4))
    if not refused:
        install(model, batches_per_update=2)
        return
    with pytest.raises(DistributionError, match="from all examples of a batch together"):
        install(model, batches_per_update=2)


class IdleWeight(keras.layers.Layer):
    """Has a weight that its output does not depend on."""

    def build(self, shape):
        self.idle = self.add_weight(shape=(2,), initializer="ones")

    def call(self, inputs):
        return inputs


def idle_model():
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((3,)), IdleWeight(), dense])
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5), "mse")
    return model


def idle_updates(_=None):
    return [
        replicas.fit(2, idle_model, replicas.dataset(three_batches(), batch), **more)
        for batch, more in (
            (12, {}),
            (4, {"batches_per_update": 3}),
            (4, {"batches_per_update": 3, "jit_compile": True}),
        )
    ]


@pytest.mark.long
def test_k_batches_leave_a_weight_alone_that_the_loss_does_not_use():
    """As one batch does: without a gradient Keras does not decay it."""
    found = forked.run(idle_updates)
    assert_same(found)
    for update in found:
        assert 1.0 in update["weights"][:2] and update["weights"][0] == update["weights"][1]


def test_weights_of_several_outputs_add_up_over_the_batches_of_an_update():
    """Outputs weigh batches differently; the last batch has none for one of them."""
    numbers = np.random.default_rng(9)
    x, y = numbers.normal(size=(12, 2)), numbers.normal(size=(2, 12, 1))
    weights = numbers.uniform(size=(2, 12))
    weights[1, 8:] = 0
    examples = (x, {"once": y[0], "twice": y[1]}, {"once": weights[0], "twice": weights[1]})

    def build():
        inputs = keras.Input((2,))
        hidden = keras.layers.Dense(3, "tanh", kernel_regularizer="l2")(inputs)
        outputs = {name: keras.layers.Dense(1, name=name)(hidden) for name in ("once", "twice")}
        model = keras.Model(inputs, outputs)
        model.compile("sgd", {"once": "mse", "twice": "mae"}, loss_weights={"once": 1, "twice": 3})
        return model

    found = [
        replicas.fit(1, build, replicas.dataset(examples, size), batches_per_update=count)
        for size, count in ((12, 1), (4, 3))
    ]
    np.testing.assert_allclose(found[1]["weights"], found[0]["weights"], rtol=1e-12)
    assert found[1]["losses"] == pytest.approx(found[0]["losses"], rel=1e-12)


def test_outputs_that_count_different_values_are_refused_with_accumulation():
    """By a mask of one of them: what each batch weighs is not known before the last one."""
    words = keras.Input((5,), dtype="int32")
    states = keras.layers.Embedding(9, 4, mask_zero=True)(words)
    outputs = [
        keras.layers.Dense(1, name="of_tokens")(states),
        keras.layers.Dense(1, name="of_rows")(keras.layers.GlobalAveragePooling1D()(states)),
    ]

    def build():
        model = keras.Model(words, outputs)
        model.compile("sgd", ["mse", "mse"])
        return model

    ids = np.random.default_rng(0).integers(0, 9, (8, 5))
    examples = (ids, (np.ones((8, 5, 1)), np.ones((8, 1))))
    with pytest.raises(DistributionError, match="^--accumulate-steps: masks, or ignore_class"):
        replicas.fit(1, build, replicas.dataset(examples, 4), batches_per_update=2)
    assert replicas.fit(1, build, replicas.dataset(examples, 4))["iterations"] == 2


def compiled_runs(_=None):
    """Two epochs of AdamW on two replicas, three steps an execution; XLA; two batches a step."""
    replicas.strategy_of(2)  # before any operation, which begins with the GPU as it is

    def build():
        layers = [keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.1)
        model.compile(optimizer, keras.losses.Huber())
        return model

    x, y, weights = (np.tile(part, (2,) + (1,) * (part.ndim - 1)) for part in three_batches())
    found = []
    for jit_compile, batches in ((False, 1), (True, 1), (True, 2)):
        options = {"updates_per_execution": 3, "batches_per_update": batches}
        data = replicas.dataset((x, y, weights), 4 // batches)
        run = replicas.fit(2, build, data, epochs=2, jit_compile=jit_compile, **options)
        found.append(run)
    return found


@pytest.mark.long
def test_what_xla_compiles_on_each_replica_is_equal_to_what_it_does_not():
    found = forked.run(compiled_runs)
    assert found[0]["iterations"] == 12 and len(found[0]["losses"]) == 4
    assert_same(found)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda: keras.layers.MaxPooling1D(data_format="channels_first"), "max_pool"),
    ],
)
def test_what_xla_cannot_compile_is_refused(layer, name, monkeypatch):
    monkeypatch.setattr(inspection, "is_op_determinism_enabled", lambda: True)
    model = keras.Sequential([keras.Input((4, 4)), layer()])
    model.compile("sgd", "mse")
    with pytest.raises(DistributionError, match=f"--jit on: XLA cannot compile {name}"):
        install(model, jit_compile=True)


def test_a_layer_that_keras_marks_is_not_compiled():
    rotation = keras.layers.RandomRotation(0.1, name="rotation")
    model = keras.Sequential([keras.Input((4, 4, 1)), rotation, keras.layers.Flatten()])
    model.compile("sgd", "mse")
    assert inspection.not_for_xla(model) == ["rotation"]
    with pytest.raises(DistributionError, match="--jit on: XLA cannot compile rotation here"):
        install(model, jit_compile=True)


def test_a_stateful_layer_trains_on_one_device_alone(monkeypatch):
    """Its state has a row for each example of the global batch, of which replicas have parts."""
    model = keras.Sequential(
        [keras.Input(batch_shape=(4, 3, 2)), keras.layers.LSTM(2, stateful=True, name="memory")]
    )
    model.compile("sgd", "mse")
    install(model)
    strategy = types.SimpleNamespace(num_replicas_in_sync=2)
    monkeypatch.setattr(keras.Sequential, "distribute_strategy", strategy)
    with pytest.raises(DistributionError, match="the layer memory is stateful.*one device"):
        install(model)


def optimizers_on_two_devices(_=None):
    """Returns what is said of optimizers, by strategy and case; nothing if they can be installed.

    Nothing is trained.
    """
    adam, devices = keras.optimizers.Adam, ["CPU:0", "CPU:1"]
    at_most_one = keras.constraints.MaxNorm(1.0)
    cases = {
        "plain": (adam(), None),
        "accumulates": (adam(gradient_accumulation_steps=2), None),
        "overwrites": (adam(use_ema=True, ema_overwrite_frequency=2), None),
        "averages": (adam(use_ema=True), None),
        "nadam": (keras.optimizers.Nadam(), None),
        "free": (keras.optimizers.ScheduleFreeAdamW(), None),
        "averages batches": (adam(use_ema=True, gradient_accumulation_steps=2), None),
        "constraint": (adam(), at_most_one),
    }
    central = tf.distribute.experimental.CentralStorageStrategy
    strategies = {
        "one": tf.distribute.get_strategy(),
        "mirrored": tf.distribute.MirroredStrategy(devices),
        "central": central(devices, "CPU:0"),
    }
    said = {}
    for name, strategy in strategies.items():
        for case, (optimizer, constraint) in cases.items():
            with strategy.scope():
                dense = keras.layers.Dense(1, kernel_constraint=constraint, name="dense")
                model = keras.Sequential([keras.Input((2,)), dense])
                model.compile(type(optimizer).from_config(optimizer.get_config()), "mse")
            try:
                install(model)
            except DistributionError as error:
                said[f"{name} {case}"] = str(error)
    return said


@pytest.mark.parametrize("loss", [["mse", "mae"], [keras.losses.MeanSquaredError(), "mae"]])
def test_several_losses_of_one_output_are_refused(loss):
    """Keras trains the first one alone."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    data = tf.data.Dataset.from_tensors((tf.ones((4, 2)), tf.ones((4, 1))))
    with patches.patch_keras_for(tf.distribute.get_strategy()):
        fitting.build(model, data)
        with pytest.raises(DistributionError, match="2 losses of one output .*add them up in one"):
            install(model)


def test_optimizers_that_replicas_cannot_have_are_refused():
    said = forked.run(optimizers_on_two_devices)
    mirrored = {"mirrored accumulates", "mirrored overwrites"}
    central = {"accumulates", "overwrites", "averages", "nadam", "constraint"}
    wrong = {"free", "averages batches"}  # on one device, too
    central |= wrong
    mirrored |= {f"{name} {case}" for name in ("one", "mirrored") for case in wrong}
    assert said.keys() == mirrored | {f"central {case}" for case in central}
    assert said["one free"].startswith("ScheduleFreeAdamW of Keras 3.15 is not the published")
    assert said["one averages batches"].startswith(
        "Adam(use_ema=True, gradient_accumulation_steps=...): Keras averages after every batch"
    )
    assert said["mirrored accumulates"] == (
        "Adam(gradient_accumulation_steps=...): does not work on several replicas; use "
        "--accumulate-steps instead"
    )
    assert said["mirrored overwrites"].startswith("Adam(ema_overwrite_frequency=...): ")
    assert said["central averages"].startswith("Adam(use_ema=...): does not work with central_")
    assert said["central nadam"].startswith("Nadam does not work with central_storage")
    assert "dense/kernel does not work with central" in said["central constraint"]
    for line in said.values():
        assert len(line.splitlines()) == 1 and ("use " in line or "leave" in line)


def test_batch_normalisation_over_several_replicas_is_refused_under_xla(monkeypatch):
    """It sums over the replicas in the middle of the forward pass, which XLA cannot compile."""
    model = usual_model()
    strategy = types.SimpleNamespace(num_replicas_in_sync=2)
    monkeypatch.setattr(keras.Sequential, "distribute_strategy", strategy)
    with pytest.raises(DistributionError, match="--jit on: XLA cannot compile batch_norm"):
        install(model, jit_compile=True)


# --- Penalties of layers ---


def penalised_runs(kind):
    """A penalty in front of what replicas add up, or behind it, on one replica and on two."""

    class Sparse(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.abs(inputs)))
            return inputs

    def build():
        if kind == "mask":
            inputs = keras.Input((5,), dtype="int32")
            hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
            hidden = keras.layers.Dense(8, activity_regularizer="l2")(hidden)
        else:
            inputs = keras.Input((5,))
            hidden = keras.layers.BatchNormalization()(inputs)
            hidden = keras.layers.Dense(8, activity_regularizer="l2")(Sparse()(hidden))
            hidden = keras.layers.BatchNormalization()(hidden)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    x, y, weights = padded_sequences(per_value=False)
    if kind != "mask":
        x, y = x.astype("float64"), y[:, 0]
    data = replicas.dataset((x, y, weights), 6)
    return [replicas.fit(count, build, data, evaluated=data) for count in (1, 2)]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mask", "batch normalization"])
def test_each_replica_has_its_own_penalties(kind):
    assert_same(forked.run(penalised_runs, kind))


# --- Losses and metrics of the user's own ---


def unlabelled_runs(_=None):
    """A loss that ignores a class, on one replica, two, and in two batches of an update."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(12, 6, 4))
    y = x.argmax(-1) + 1
    y[np.arange(6) >= numbers.integers(0, 7, (12, 1))] = 0
    weights = np.where(np.arange(12) < 10, numbers.integers(1, 4, 12), 0).astype("float64")

    def build():
        model = keras.Sequential([keras.Input((6, 4)), keras.layers.Dense(5)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        model.compile(keras.optimizers.SGD(0.5), loss)
        return model

    def row(model):
        logits = keras.ops.convert_to_numpy(model(x))
        log_sum = np.log(np.exp(logits).sum(-1))
        nats = log_sum - np.take_along_axis(logits, y[..., None], -1)[..., 0]
        counted = (y > 0) * weights[:, None]
        return float((counted * nats).sum() / counted.sum())

    data = replicas.dataset((x, y, weights), 12)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    found = []
    for count, size, options in ((1, 12, {}), (2, 12, {}), (1, 6, {"batches_per_update": 2})):
        parts = replicas.dataset((x, y, weights), size)
        found.append(replicas.fit(count, build, parts, evaluated=parts, **options))
    keras.utils.set_random_seed(0)
    model = build()
    before = row(model)
    ends = np.cumsum([v.numpy().size for v in model.trainable_variables])[:-1]
    parts = np.split(np.array(found[0]["weights"]), ends)
    for variable, part in zip(model.trainable_variables, parts, strict=True):
        variable.assign(part.reshape(variable.shape))
    assert len(data) == 1
    return found, before, row(model)


@pytest.mark.long
def test_a_label_that_a_loss_ignores_is_a_weight_of_zero():
    found, before, after = forked.run(unlabelled_runs)
    assert_same(found[:2])
    assert found[0]["losses"][0] == pytest.approx(before, rel=1e-12)
    for each in found:
        assert each["evaluated"]["loss"] == pytest.approx(after, rel=1e-12)


def test_replicas_that_add_up_ignored_labels_are_not_compiled():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(ignore_class=0, name="near"))
    fitting.build(model, replicas.dataset((np.ones((4, 4)), np.ones(4)), 4))
    assert inspection.not_for_xla(model) == []
    model._distribute_strategy = types.SimpleNamespace(num_replicas_in_sync=2)
    assert inspection.not_for_xla(model) == ["the ignore_class of near"]


def test_ignored_labels_of_several_outputs_by_name_or_in_order():
    x, y = np.random.default_rng(0).normal(size=(6, 4)), np.arange(6) % 3
    inputs = keras.Input((4,))
    layers = {name: keras.layers.Dense(size, name=name) for name, size in (("a", 3), ("b", 1))}
    losses = {
        "a": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
        "b": "mse",
    }
    found = []
    outputs = {name: layer(inputs) for name, layer in layers.items()}
    for form in (list(outputs.values()), outputs):
        model = keras.Model(inputs, form)
        for labels in ({"a": y, "b": y[:, None]}, (y, y[:, None])):
            model.compile(keras.optimizers.SGD(0.0), losses)
            data = replicas.dataset((x, labels), 6)
            fitting.build(model, data)
            install(model)
            found.append(model.fit(data, verbose=0).history["loss"][0])
    assert len(found) == 4 and found == pytest.approx([found[0]] * 4, rel=1e-6)


def mean_of_batch(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


class Near(keras.metrics.Metric):
    """The share of near answers, which ignores weights."""

    def __init__(self):
        super().__init__(name="near")
        self.hits = self.add_weight(name="hits", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        near = keras.ops.cast(keras.ops.abs(y_true - y_pred) < 1, self.dtype)
        self.hits.assign_add(keras.ops.sum(near))
        self.count.assign_add(keras.ops.cast(keras.ops.size(y_true), self.dtype))

    def result(self):
        return self.hits / self.count


class MeanError(keras.metrics.Metric):
    """The mean error, by the mean of each batch: none of a batch without examples."""

    def __init__(self):
        super().__init__(name="mean_error")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = keras.ops.cast(keras.ops.shape(y_pred)[0], self.dtype)
        self.total.assign_add(keras.ops.mean(keras.ops.abs(y_true - y_pred)) * rows)
        self.count.assign_add(rows)

    def result(self):
        return self.total / self.count


def evaluation_with_an_empty_replica(count):
    x, y, weights = padded_rows()
    build = whole_batch_model(metrics=lambda: [MeanError()])
    train, evaluated = replicas.dataset((x, y), 6), replicas.dataset((x, y, weights), 4)
    return replicas.fit(count, build, train, evaluated=evaluated)["evaluated"]


@pytest.mark.long
def test_a_replica_that_has_padding_alone_does_not_update_an_own_metric():
    one, two = (forked.run(evaluation_with_an_empty_replica, count) for count in (1, 2))
    assert one == pytest.approx(two, rel=1e-9)


def batches_of_unknown_size(count):
    """Trains and evaluates on batches whose first axis `tf.numpy_function` hides."""
    x, y, _ = padded_rows()

    def make_batch(indices, epoch):
        rows = tf.numpy_function(lambda i: (x[i], y[i]), [indices], (tf.float64, tf.float64))
        for each, size in zip(rows, (3, 1), strict=True):
            each.set_shape((None, size))
        return tuple(rows)

    data = evaluation_batches(10, 4, make_batch)
    found = replicas.fit(count, whole_batch_model(), data, evaluated=data)
    return found["weights"], found["evaluated"]


def test_batches_whose_size_tensorflow_does_not_know():
    one, two = (forked.run(batches_of_unknown_size, count) for count in (1, 2))
    np.testing.assert_allclose(one[0], two[0], rtol=1e-12)
    assert one[1] == pytest.approx(two[1], rel=1e-12)


def padded_rows():
    """Ten examples, and two that pad, whose error is large."""
    numbers = np.random.default_rng(3)
    x, y = numbers.normal(size=(12, 3)), numbers.normal(size=(12, 1))
    y[10:] = 50
    return x, y, (np.arange(12) < 10).astype("float64")


def whole_batch_model(loss="mse", metrics=()):
    def build():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=list(metrics()) if metrics else None)
        return model

    return build


def padded_evaluations(count, jit_compile):
    """Trains on the examples alone, and evaluates them with and without padding."""
    keras.config.set_floatx("float64")
    x, y, weights = padded_rows()
    found = []
    for loss, metrics in (
        (mean_of_batch, lambda: [mean_of_batch]),
        (keras.losses.Dice(), lambda: []),
        ("mse", lambda: [Near(), mean_of_batch]),
        ("mse", lambda: [Near()]),
    ):
        if count > 1 and (loss != "mse" or mean_of_batch in metrics()):
            continue  # refused, see below
        build = whole_batch_model(loss, metrics)
        train = replicas.dataset((x[:10], y[:10]), 10)
        for evaluated in (
            replicas.dataset((x, y, weights), 6),
            tf.data.Dataset.from_tensor_slices((x[:10], y[:10])).batch(6),
        ):
            result = replicas.fit(count, build, train, evaluated=evaluated, jit_compile=jit_compile)
            found.append(result["evaluated"])
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "jit_compile"),
    [(1, False), pytest.param(1, True, marks=pytest.mark.long), (2, False)],
)
def test_padding_counts_in_no_loss_or_metric_of_a_whole_batch(count, jit_compile):
    found = forked.run(padded_evaluations, count, jit_compile)
    assert len(found) == (8 if count == 1 else 2)
    for padded, plain in zip(found[::2], found[1::2], strict=True):
        assert padded == pytest.approx(plain, rel=1e-9)


def evaluations_of_weightless_batches(_=None):
    """Evaluates ten examples, with and without a batch of padding alone."""
    keras.config.set_floatx("float64")
    x, y, weights = padded_rows()
    plain = replicas.dataset((x[:10], y[:10], weights[:10]), 10)
    padding = replicas.dataset((x, y, 0 * weights), 6)
    found = []
    for loss, metrics in (
        (mean_of_batch, lambda: [mean_of_batch]),
        ("mse", lambda: [Near()]),
    ):
        for evaluated in (plain, plain.concatenate(padding), padding.concatenate(plain)):
            build = whole_batch_model(loss, metrics)
            found.append(replicas.fit(1, build, plain, evaluated=evaluated)["evaluated"])
    return found


@pytest.mark.long
def test_a_batch_of_padding_alone_counts_in_no_loss_or_metric():
    found = forked.run(evaluations_of_weightless_batches)
    for plain, *padded in (found[:3], found[3:]):
        assert padded == [pytest.approx(plain, rel=1e-9)] * 2


def refused_on_two(what):
    x, y, weights = padded_rows()
    loss, metrics, options = {
        "loss": (mean_of_batch, lambda: [], {}),
        "metric": ("mse", lambda: [mean_of_batch], {}),
        "accumulation": (mean_of_batch, lambda: [], {"batches_per_update": 2}),
    }[what]
    data = replicas.dataset((x, y, weights), 6)
    count = 1 if options else 2
    try:
        replicas.fit(count, whole_batch_model(loss, metrics), data, evaluated=data, **options)
    except DistributionError as error:
        return str(error)


def others_in_the_batch(y_true, y_pred):
    """Compares each example with all of the batch."""
    return keras.ops.logsumexp(keras.ops.matmul(y_pred, keras.ops.transpose(y_pred)), axis=1)


class Contrastive(keras.Sequential):
    """Compares examples in its `compute_loss()`."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(others_in_the_batch(y, y_pred))


def compared_examples(what, jit_compile):
    """Evaluates nine examples in batches of four, with and without padding."""
    x, y, weights = padded_rows()
    weights = weights * (np.arange(12) < 9)

    def build():
        kind, loss = {
            "loss": (keras.Sequential, others_in_the_batch),
            "compute_loss": (Contrastive, None),
            "mean of a batch": (keras.Sequential, mean_of_batch),
        }[what]
        size = 4 if what == "mean of a batch" else None  # on which layers may rely
        model = kind([keras.Input((3,), batch_size=size), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01), loss)
        return model

    train = replicas.dataset((x[:8], y[:8]), 8)
    plain = tf.data.Dataset.from_tensor_slices((x[:9], y[:9])).batch(4)
    return [
        replicas.fit(1, build, train, evaluated=evaluated, jit_compile=jit_compile)["evaluated"]
        for evaluated in (plain, replicas.dataset((x, y, weights), 4))
    ]


@pytest.mark.parametrize(
    ("what", "jit_compile"),
    [
        ("loss", False),
        pytest.param("loss", True, marks=pytest.mark.long),
        pytest.param("compute_loss", False, marks=pytest.mark.long),
        ("mean of a batch", False),
    ],
)
def test_padding_is_not_among_the_examples_that_a_loss_compares(what, jit_compile):
    plain, padded = forked.run(compared_examples, what, jit_compile)
    assert padded == pytest.approx(plain, rel=1e-9)


class OfOneSize(keras.Model):
    """Reads the size of its batches, which is known where they are whole."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x) + keras.ops.zeros((x.shape[0], 2))


class OfOneSizeWithStep(OfOneSize):
    """Has a `test_step` of its own."""

    def test_step(self, data):
        return super().test_step(data)


def own_squares(y_true, y_pred):
    """Is a loss of one's own that compares no examples."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def evaluated_in_one_size(has_step):
    """Evaluates twelve examples in batches of four, with a loss of one's own and with Keras's."""
    x, y, weights = padded_rows()
    kind = OfOneSizeWithStep if has_step else OfOneSize

    def build(loss):
        def built():
            model = kind()
            model.compile(keras.optimizers.SGD(0.01), loss)
            model.build((4, 3))
            return model

        return built

    train = replicas.dataset((x[:8], y[:8]), 4)
    evaluated = replicas.dataset((x, y, np.ones_like(weights)), 4)
    return [
        replicas.fit(1, build(loss), train, evaluated=evaluated)["evaluated"]["loss"]
        for loss in (own_squares, keras.losses.MeanSquaredError())
    ]


@pytest.mark.parametrize("has_step", [False, True])
def test_a_model_of_batches_of_one_size_is_evaluated_whole(has_step):
    ours, theirs = forked.run(evaluated_in_one_size, has_step)
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("what", ["loss", "metric", "accumulation"])
def test_one_number_for_a_part_of_a_batch_is_refused(what):
    said = forked.run(refused_on_two, what)
    assert "mean_of_batch returns one number for a batch" in said and "\n" not in said
