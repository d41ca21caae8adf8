"""Rejects models that a run cannot build, train exactly or save."""

import re
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from data import arrays
from distribution.errors import DistributionError
from tests.support import forked, processes, tiny_recipe
from tests.support.refusals import refused
from training import artifacts, model_checks
from training.errors import RunError
from training.options import SharedOptions


class TestCompile:
    def test_a_model_that_is_not_compiled(self, tmp_path, monkeypatch):
        monkeypatch.setattr(keras.Sequential, "compile", lambda self, **_: None)
        said = refused(tmp_path)
        assert said == "run.prepare() takes a compiled model: call model.compile() before"

    def test_batches_that_are_no_dataset(self, tmp_path):
        said = refused(tmp_path, parts={"pipeline": lambda x, y, **_: (x, y)})
        assert said.startswith("train_data is a tuple: expected batches as a tf.data.Dataset")
        assert "data.arrays.training_data(..., **plan.batches)" in said

    def test_both_at_once(self, tmp_path, monkeypatch):
        monkeypatch.setattr(keras.Sequential, "compile", lambda self, **_: None)
        said = refused(tmp_path, parts={"pipeline": lambda x, y, **_: x}).splitlines()
        assert [line.split(" ")[0] for line in said] == ["run.prepare()", "train_data"]

    def test_one_that_computes_eagerly(self, tmp_path):
        said = refused(tmp_path, arguments=lambda: {"run_eagerly": True})
        assert said.startswith("Sequential is compiled with run_eagerly=True")

    def test_an_output_without_weights(self, tmp_path):
        def pipeline(x, y, **batches):
            return arrays.training_data(x, y, **batches).map(
                lambda x, y, *_: (x, (y, y), (y, None))
            )

        assert refused(tmp_path, parts={"pipeline": pipeline}).startswith("train_data has None in")

    @pytest.mark.parametrize("part", ["loss", "metrics"])
    def test_labels_that_are_missing(self, part, tmp_path):
        def pipeline(x, y, **batches):
            return arrays.training_data(x, **batches)

        arguments = {"loss": None, "metrics": None} | {part: "mse" if part == "loss" else ["mse"]}
        said = refused(
            tmp_path, arguments=lambda: arguments, parts={"pipeline": pipeline}
        ).splitlines()
        assert len(said) == 1 and said[0].startswith("train_data has no labels, which the loss or")

    def test_labels_that_no_loss_needs(self, tmp_path):
        """None beside weights, in a run from the first check to the results."""

        def pipeline(x, y, **batches):
            return arrays.training_data(x, None, np.ones(len(x)), **batches)

        found = tiny_recipe.main(
            tiny_recipe.Options(run_dir=tmp_path / "run", max_steps=2),
            arguments=lambda options, rate: {"optimizer": keras.optimizers.Adam(rate)},
            build=lambda options: Compressed(),
            pipeline=pipeline,
        )
        assert found["steps"] == 2 and found["test"]["loss"] > 0

    def test_negative_weights(self, tmp_path):
        def pipeline(x, y, **batches):
            weights = np.where(np.arange(len(y)) % 2, 1.0, -0.5)
            return arrays.training_data(x, y, weights, **batches)

        said = refused(tmp_path, parts={"pipeline": pipeline})
        assert said.startswith("train_data has a negative sample weight")

    @pytest.mark.long
    def test_names_train_as_the_objects_that_they_stand_for(self, tmp_path):
        def build(options):
            return keras.Sequential([tiny_recipe.build_model(options), keras.layers.Softmax()])

        def with_loss(loss):
            def arguments(options, rate):
                changes = {"loss": loss, "optimizer": "adam"}
                changes |= {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
                return tiny_recipe.compile_arguments(options, rate) | changes

            return arguments

        found = []
        for loss in (
            "sparse_categorical_crossentropy",
            keras.losses.SparseCategoricalCrossentropy(),
        ):
            options = tiny_recipe.Options(run_dir=tmp_path / str(len(found)), epochs=1)
            found.append(tiny_recipe.main(options, arguments=with_loss(loss), build=build))
        assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
        # 30 examples in batches of 8: those that pad the last one count in neither.
        test = found[0]["test"]
        assert test["accuracy"] == pytest.approx(test["weighted_accuracy"])
        assert (30 * test["accuracy"]) == pytest.approx(round(30 * test["accuracy"]), abs=1e-4)


def two_outputs(options):
    inputs = keras.Input((6,))
    outputs = {name: keras.layers.Dense(2, name=name)(inputs) for name in ("first", "second")}
    return keras.Model(inputs, outputs)


def test_weights_that_lack_an_output(tmp_path):
    """Keras raises a KeyError."""

    def pipeline(x, y, **options):
        labels = {"first": y, "second": y}
        return arrays.training_data(x, labels, {"first": np.ones(len(y))}, **options)

    said = refused(tmp_path, parts={"build": two_outputs, "pipeline": pipeline})
    assert "has no weights for second: an output without weights of its own needs ones" in said


def outside_metric():
    return {"metrics": [METRICS_MADE_EARLY[0]]}


METRICS_MADE_EARLY: list[keras.metrics.Metric] = []


def compiled_outside(folder):
    """Returns the messages for parts that were created outside of the scope of two replicas."""
    METRICS_MADE_EARLY.append(keras.metrics.SparseCategoricalAccuracy("accuracy"))
    early = keras.optimizers.Adam(0.01)
    model = tiny_recipe.build_model(tiny_recipe.Options())
    two = dict(strategy="mirrored", replicas=2)
    return [
        refused(Path(folder), arguments=outside_metric, **two),
        refused(Path(folder), arguments=lambda: {"optimizer": early}, **two),
        refused(Path(folder), parts={"build": lambda options: model}, **two),
    ]


@keras.saving.register_keras_serializable("tests")
class OwnStep(keras.Sequential):
    """A model whose step needs NumPy."""

    def train_step(self, data):
        return super().train_step(data) | {"batch": float(data[0].numpy().sum())}


@keras.saving.register_keras_serializable("tests")
class WithoutLoss(keras.Sequential):
    """A model whose loss is in its step alone."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
            loss = keras.ops.mean(loss)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def without_loss():
    return {"loss": None, "metrics": None}


class TestOwnStep:
    @pytest.mark.long
    def test_one_that_cannot_be_traced(self, tmp_path):
        def build(options):
            return OwnStep(tiny_recipe.build_model(options).layers)

        said = refused(tmp_path, arguments=lambda: {"run_eagerly": True}, parts={"build": build})
        assert said.startswith("OwnStep.train_step() works with run_eagerly=True alone (")
        assert len(said.splitlines()) == 1
        with pytest.raises(AttributeError, match="numpy"):  # Keras's own error, as in fit()
            tiny_recipe.main(tiny_recipe.Options(run_dir=tmp_path / "other"), build=build)

    def test_one_that_returns_no_loss(self, tmp_path):
        class OtherNames(keras.Sequential):
            def train_step(self, data):
                loss = super().train_step(data)["loss"]
                return {"d_loss": loss, "g_loss": 2 * loss}

        parts = {"build": lambda options: OtherNames(tiny_recipe.build_model(options).layers)}
        said = refused(tmp_path, parts=parts)
        assert said.startswith("OtherNames.train_step() returns d_loss, g_loss: add 'loss'")
        assert len(said.splitlines()) == 1

    @pytest.mark.parametrize("split", ["validation", "test"])
    def test_one_without_a_loss_in_an_evaluation(self, split, tmp_path):
        def build(options):
            return WithoutLoss(tiny_recipe.build_model(options).layers)

        parts = {"build": build, "left_out": {"validation", "test"} - {split}}
        if split == "validation":
            said = refused(tmp_path, arguments=without_loss, parts=parts)
            assert said.startswith("WithoutLoss has a train_step and no loss in compile()")
            assert "write a test_step, or pass validation=None" in said
            assert len(said.splitlines()) == 1
        else:  # of which a recipe may have numbers of its own
            options = tiny_recipe.Options(run_dir=tmp_path / "run", max_steps=2)
            seen = []
            with pytest.raises(ValueError, match="No loss to compute"):
                tiny_recipe.main(
                    options,
                    arguments=lambda *them: tiny_recipe.compile_arguments(*them) | without_loss(),
                    inside=lambda run, model: seen.extend(run._notes),
                    **parts,
                )
            assert [line for line in seen if "write a test_step" in line]

    def test_a_model_without_call(self, tmp_path):
        class Parts(keras.Model):
            pass

        said = refused(tmp_path, parts={"build": lambda options: Parts()})
        assert said.startswith("Parts has no call()") and len(said.splitlines()) == 1


class TestScope:
    def test_what_is_made_outside_of_the_scope_is_named(self, tmp_path):
        """Replicas would share one copy of its numbers, or it would end in TensorFlow's error."""
        metric, optimizer, model = forked.run(compiled_outside, str(tmp_path))
        assert "the metric accuracy was created outside of the strategy's scope" in metric
        assert "the optimizer Adam was created outside of the strategy's scope" in optimizer
        assert "the model sequential was created outside of the strategy's scope" in model
        for said in (metric, optimizer, model):
            assert "with run.strategy.scope():" in said and len(said.splitlines()) == 1

    def test_on_one_device_it_makes_no_difference(self, tmp_path):
        early = [keras.metrics.SparseCategoricalAccuracy("accuracy")]
        options = tiny_recipe.Options(run_dir=tmp_path / "run", epochs=1)
        arguments = tiny_recipe.compile_arguments
        tiny_recipe.main(options, arguments=lambda *them: arguments(*them) | {"metrics": early})


class TestRagged:
    def test_batches_of_unequal_rows(self, tmp_path):
        def pipeline(x, y, **_):
            rows = tf.RaggedTensor.from_row_lengths(tf.range(6.0), [1, 2, 3])
            return tf.data.Dataset.from_tensors((rows, y[:3])).repeat()

        said = refused(tmp_path, parts={"pipeline": pipeline})
        assert said.startswith("train_data has ragged tensors: pad them")
        assert "mask_zero=True" in said


class TestLayers:
    @pytest.mark.long
    def test_batch_normalisation_is_that_of_the_whole_batch(self, tmp_path):
        forked.run(on_one_replica_and_two, str(tmp_path), seconds=300)
        processes.assert_equal_tensors(tmp_path / "none", tmp_path / "mirrored")


def on_one_replica_and_two(folder):
    """Trains a model with a stock normalisation, under either strategy; XLA as it may."""

    def build(options):
        normalisation = keras.layers.BatchNormalization(momentum=0.5)
        layers = [keras.layers.Dense(8, activation="tanh"), normalisation, keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((6,)), *layers])

    for strategy, replicas in (("none", None), ("mirrored", 2)):
        more = dict(epochs=1, precision="float64", lr_scaling="none", replicas=replicas)
        run_dir = f"{folder}/{strategy}"
        options = tiny_recipe.Options(run_dir=run_dir, strategy=strategy, **more)
        tiny_recipe.main(options, build=build)


class Subclassed(keras.Model):
    """A model of one's own; Keras cannot save what its constructor takes."""

    def __init__(self, sizes):
        super().__init__()
        self.hidden = keras.layers.Dense(sizes.width)
        self.out = keras.layers.Dense(2)

    def call(self, inputs):
        return self.out(self.hidden(inputs))


@keras.saving.register_keras_serializable("tests")
class Compressed(keras.Model):
    """An autoencoder whose loss needs no labels."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.code, self.out = keras.layers.Dense(2), keras.layers.Dense(6)

    def call(self, inputs):
        return self.out(self.code(inputs))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        errors = keras.ops.mean(keras.ops.square(x - y_pred), axis=-1)
        return keras.ops.mean(errors if sample_weight is None else errors * sample_weight)


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.layers.Layer):
    """Leaves its argument out of `get_config()`."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, inputs):
        return self.factor * inputs

    def get_config(self):
        return super().get_config()


@keras.saving.register_keras_serializable("tests")
class Around(keras.Model):
    """Takes a model, stored as docs/write_a_recipe.md says."""

    def __init__(self, encoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder

    def call(self, inputs):
        return self.encoder(inputs)

    def get_config(self):
        encoder = keras.saving.serialize_keras_object(self.encoder)
        return {**super().get_config(), "encoder": encoder}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config.pop("encoder")), **config)


class TestModel:
    def test_one_that_cannot_be_saved(self, tmp_path):
        """Before the first step, not after the last one."""
        steps = []
        said = refused(
            tmp_path,
            parts={
                "build": lambda options: Subclassed(types.SimpleNamespace(width=4)),
                "inside": lambda run, model: steps.append(1),
            },
        )
        assert said.startswith("Subclassed, the model, cannot be saved and loaded again")
        assert "get_config()" in said and len(said.splitlines()) == 1 and not steps

    @pytest.mark.parametrize("several", [False, True])
    def test_a_layer_with_a_variable_that_no_checkpoint_keeps(self, several, tmp_path):
        class Counting(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                count = tf.Variable(0.0)
                self.counts = [count] if several else count

            def call(self, inputs):
                return inputs

        def build(options):
            model = tiny_recipe.build_model(options)
            model.add(Counting())
            return model

        said = refused(tmp_path, parts={"build": build})
        assert re.match(r"Counting.counts of the layer counting\w* is a tf.Variable, which", said)

    @pytest.mark.parametrize(
        ("build", "reason"),
        [
            (lambda: Subclassed(types.SimpleNamespace(width=4)), "in order to be serializable"),
            (
                lambda: keras.Sequential([keras.Input((6,)), Scaled(2)]),
                "missing 1 required positional argument: 'factor'",
            ),
        ],
    )
    def test_the_reason_is_a_whole_sentence(self, build, reason, tmp_path):
        """Keras's first line ends in the middle of one, or says less than the error it quotes."""
        model = build()
        model.compile("sgd", "mse")
        model(np.ones((1, 6)))
        with pytest.raises(RunError) as caught:
            artifacts.require_saveable(model, tmp_path, SharedOptions)
        assert f"{reason}; a class of your own needs get_config()" in str(caught.value)

    def test_one_in_another(self, tmp_path):
        page = (processes.ROOT / "docs" / "write_a_recipe.md").read_text(encoding="utf-8")
        assert '`{**super().get_config(), "encoder": keras.saving.serialize_keras_object(' in page
        assert 'cls(keras.saving.deserialize_keras_object(config.pop("encoder")), **config)' in page
        model = Around(keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)]))
        model.compile("sgd", "mse")
        model(np.ones((1, 6)))
        artifacts.require_saveable(model, tmp_path, SharedOptions)


@pytest.mark.parametrize("called", [False, True])
def test_inputs_that_suit_a_sequential_part(called):
    """Within a model that was called in graphs alone it has no `input`."""
    part = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    if called:
        keras.Sequential([part])(np.ones((1, 4)))
    same = np.ones((1, 4), "float32")
    assert model_checks.suitable_inputs(part, same) is same
    other = model_checks.suitable_inputs(part, np.ones((1, 9), "float32"))
    assert part(other).shape == (1, 1)


def in_batch_negatives(y_true, y_pred):
    logits = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
    return keras.ops.logsumexp(logits, axis=-1) - keras.ops.sum(y_pred**2, axis=-1)


def compared_examples(folder):
    """Returns the messages for a loss that compares the examples of a batch."""
    arguments = lambda: {"loss": in_batch_negatives, "metrics": None}  # noqa: E731
    two = dict(strategy="mirrored", replicas=2)
    return [
        refused(Path(folder), DistributionError, arguments, **options)
        for options in (two, dict(accumulate_steps=3))
    ]


def test_a_loss_that_compares_the_examples_of_a_batch(tmp_path):
    replicas, batches = forked.run(compared_examples, str(tmp_path))
    assert "as one batch, and of" in replicas and "of which each replica has one" in replicas
    assert "of which each accumulated batch has one" in batches
    tiny_recipe.main(
        tiny_recipe.Options(run_dir=tmp_path / "one", epochs=1),
        arguments=lambda options, rate: dict(optimizer="sgd", loss=in_batch_negatives),
    )


def test_layers_whose_draws_depend_on_the_replicas_are_named():
    """Not those of Keras that draw for each example, alone or in a cell."""

    class Several(keras.layers.Layer):
        def __init__(self, several, **options):
            super().__init__(**options)
            self.several = several

        def call(self, inputs):
            return inputs

    layers = keras.layers
    inputs = keras.Input((5, 3))
    hidden = layers.LSTM(2, dropout=0.1, recurrent_dropout=0.1, return_sequences=True)(inputs)
    hidden = layers.Bidirectional(layers.GRU(2, dropout=0.1, return_sequences=True))(hidden)
    hidden = layers.Dropout(0.1)(layers.SpatialDropout1D(0.1)(hidden))
    hidden = layers.Attention(dropout=0.1)([hidden, hidden])
    hidden = layers.AdditiveAttention(dropout=0.1)([hidden, hidden])
    hidden = layers.AlphaDropout(0.1)(layers.GaussianNoise(0.1)(hidden))
    hidden = layers.RandomContrast(0.1)(layers.Reshape((5, 3, 1))(layers.Dense(3)(hidden)))
    assert model_checks.random_layers_note(keras.Model(inputs, hidden)) is None
    hidden = layers.RandomElasticTransform(0.1, name="elastic")(hidden)
    hidden = Several([keras.random.SeedGenerator(1)], name="list")(hidden)
    hidden = Several({"a": keras.random.SeedGenerator(1), "b": 2}, name="dict")(hidden)
    assert model_checks.random_layers_note(keras.Model(inputs, hidden)) == (
        "elastic, list, dict: random numbers that keras.random draws with the batch as the first "
        "axis are those of one device; others, and keras.random.shuffle() and categorical(), each "
        "replica draws for its own examples, so the results may depend on the number of replicas"
    )
