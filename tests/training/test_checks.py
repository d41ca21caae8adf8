"""Makes right or refuses whatever would make the numbers of a run silently wrong."""

import dataclasses
import functools
import json
import re
import types
import typing
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from callbacks import checkpoint
from data import arrays, batches, files
from distribution.errors import DistributionError
from recipes import bert_mlm, text_classification
from tests.support import forked, processes, tiny_recipe
from training import artifacts, checks
from training.errors import OptionsError, RunError
from training.options import FineTuningOptions, SharedOptions
from training.plan import make_plan


def refused(folder, error=RunError, arguments=None, parts=None, **options):
    """The message of a recipe that must not train; nothing of it may be left."""

    def changed(options, learning_rate):
        return tiny_recipe.compile_arguments(options, learning_rate) | (arguments or (lambda: {}))()

    with pytest.raises(error) as caught:
        chosen = tiny_recipe.Options(run_dir=folder / "run", **options)
        tiny_recipe.main(chosen, arguments=changed, **(parts or {}))
    assert not (folder / "run").exists()
    return str(caught.value)


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

    def test_a_model_without_call(self, tmp_path):
        class Parts(keras.Model):
            pass

        said = refused(tmp_path, parts={"build": lambda options: Parts()})
        assert said.startswith("Parts has no call()") and len(said.splitlines()) == 1


class TestMetrics:
    def test_one_of_several_values(self, tmp_path):
        def one_hot(x, y, **batches):
            return arrays.training_data(x, keras.utils.to_categorical(y, 2), **batches)

        def arguments():
            scores = keras.metrics.F1Score()
            return {"loss": "mse", "metrics": [scores]}

        said = refused(tmp_path, arguments=arguments, parts={"pipeline": one_hot})
        assert said.startswith("the metric f1_score has several values, of shape (2,): ")
        assert "F1Score(average='macro')" in said and len(said.splitlines()) == 1


@keras.saving.register_keras_serializable("tests")
class Drawing(keras.constraints.Constraint):
    """Adds noise."""

    def __init__(self):
        self.seed = keras.random.SeedGenerator(5)

    def __call__(self, weight):
        return weight + 0.001 * keras.random.normal(keras.ops.shape(weight), seed=self.seed)


@keras.saving.register_keras_serializable("tests")
class Penalty(keras.regularizers.Regularizer):
    """Penalises weights by random factors."""

    def __init__(self, seed=None):
        self.seed = keras.random.SeedGenerator(5) if seed is None else seed

    def __call__(self, weight):
        drawn = keras.random.uniform(keras.ops.shape(weight), seed=self.seed)
        return 0.01 * keras.ops.sum(drawn * keras.ops.square(weight))

    def get_config(self):
        return {}


class Scaling(keras.losses.Loss):
    """Divides the errors by a scale that is a mean over all steps, unless it is fixed."""

    def __init__(self, scale=None, is_fixed=False):
        super().__init__()
        self.scale = keras.Variable(1.0, trainable=False, name="scale") if scale is None else scale
        self.is_fixed = is_fixed

    def call(self, y_true, y_pred):
        errors = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        if not self.is_fixed:
            self.scale.assign(0.9 * self.scale + 0.1 * keras.ops.mean(errors))
        return errors / self.scale


@keras.saving.register_keras_serializable("tests")
class Keeping(keras.layers.Layer):
    """Keeps state for a loss and a regularizer."""

    def __init__(self, **named):
        super().__init__(**named)
        self.seed = keras.random.SeedGenerator(3)
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, inputs):
        return inputs


class TestKept:
    """A resumed run would train differently: a checkpoint has the variables of the model."""

    @staticmethod
    def built_with(**arguments):
        def build(options):
            hidden = keras.layers.Dense(8)
            for name, value in arguments.items():
                setattr(hidden, f"kernel_{name}", value)
            return keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(2)])

        return {"build": build}

    @pytest.mark.parametrize("kind", ["loss", "function", "regularizer", "constraint"])
    def test_state_that_is_in_no_layer(self, kind, tmp_path):
        loss, parts = Scaling(), {}
        if kind in ("regularizer", "constraint"):
            made = Penalty() if kind == "regularizer" else Drawing()
            loss, parts = Scaling(is_fixed=True), self.built_with(**{kind: made})
        changed = loss if kind != "function" else lambda *them: loss.call(*them)
        said = refused(tmp_path, DistributionError, lambda: {"loss": changed}, parts)
        name = "scale" if kind in ("loss", "function") else "seed_generator_state"
        assert re.match(f"the training changes the variable .*{name}, which belongs neither", said)
        assert "self.add_weight(trainable=False)" in said and len(said.splitlines()) == 1

    def test_state_of_a_step_of_the_model(self, tmp_path):
        scaling = Scaling()

        class Own(keras.Sequential):
            def train_step(self, data):
                scaling.call(data[1], self(data[0]))
                return super().train_step(data)

        parts = {"build": lambda options: Own(tiny_recipe.build_model(options).layers)}
        said = refused(tmp_path, DistributionError, parts=parts)
        assert said.startswith("the training changes the variable scale")

    def test_no_scale_of_the_loss_of_a_models_own_step(self, tmp_path):
        @keras.saving.register_keras_serializable()
        class Own(keras.Sequential):
            def train_step(self, data):
                return super().train_step(data)

        options = dict(run_dir=tmp_path / "run", max_steps=1, precision="mixed_float16")
        parts = {"build": lambda options: Own(tiny_recipe.build_model(options).layers)}
        assert tiny_recipe.main(tiny_recipe.Options(**options), **parts)["steps"] == 1

    def test_no_metrics_that_the_model_does_not_name(self, tmp_path):
        """As `keras.Model.compute_loss` shows it, for the loss; and those of an inner model."""

        @keras.saving.register_keras_serializable()
        class Inner(keras.Model):
            def __init__(self, **named):
                super().__init__(**named)
                self.mean = keras.metrics.Mean("mean_of_inner")

            def call(self, x):
                self.mean.update_state(x)
                return x

        @keras.saving.register_keras_serializable()
        class Outer(keras.Sequential):
            def __init__(self, *arguments, **named):
                super().__init__(*arguments, **named)
                self.tracker = keras.metrics.Mean("loss")

            metrics = property(lambda self: [self.tracker])

            def compute_loss(self, *arguments, **named):
                loss = super().compute_loss(*arguments, **named)
                self.tracker.update_state(loss)
                return loss

        def arguments(options, rate):
            return tiny_recipe.compile_arguments(options, rate) | {"metrics": None}

        def build(options):
            return Outer([Inner(), *tiny_recipe.build_model(options).layers])

        options = tiny_recipe.Options(run_dir=tmp_path / "run", max_steps=1)
        found = []
        tiny_recipe.main(
            options,
            build=build,
            arguments=arguments,
            fit=lambda model, data, fit_options: found.append(model.fit(data, **fit_options)),
        )
        assert found

    @pytest.mark.long
    @pytest.mark.parametrize(
        "options",
        [
            {"accumulate_steps": 2, "steps_per_execution": 2, "max_steps": 2},
            {"jit": "on"},
            {"precision": "mixed_float16"},
            {"strategy": "mirrored", "replicas": 2},
            {"strategy": "mirrored", "replicas": 2, "jit": "on", "accumulate_steps": 2},
            {"strategy": "central_storage", "replicas": 2},
        ],
    )
    def test_a_variable_that_does_not_change(self, options, tmp_path):
        assert forked.run(trains_with_a_fixed_scale, str(tmp_path), options) > 0

    @pytest.mark.long
    def test_on_two_replicas(self, tmp_path):
        said = forked.run(refused_with_a_drawing_regularizer, str(tmp_path))
        assert re.match("the training changes the variable .*seed_generator_state", said)

    @pytest.mark.long
    def test_a_weight_that_replicas_share_and_assign_to(self, tmp_path):
        said = forked.run(refused_with_a_counting_layer, str(tmp_path))
        assert said.startswith("a layer or the model assigns to a weight in the step")
        assert said.endswith("use --strategy mirrored")

    @pytest.mark.long
    def test_state_in_a_layer_resumes_identically(self, tmp_path):
        def train(folder, extra=()):
            keeping = []

            def build(options):
                keeping.append(Keeping())
                hidden = keras.layers.Dense(8)
                hidden.kernel_regularizer = Penalty(keeping[0].seed)
                layers = [keeping[0], hidden, keras.layers.Dense(2)]
                return keras.Sequential([keras.Input((6,)), *layers])

            def arguments(options, rate):
                made = tiny_recipe.compile_arguments(options, rate)
                return made | {"loss": Scaling(keeping[0].scale)}

            options = tiny_recipe.Options(run_dir=folder)
            return tiny_recipe.main(options, arguments=arguments, build=build, extra=extra)

        unbroken = train(tmp_path / "unbroken")
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run", extra=[StopAfter(4)])
        resumed = train(tmp_path / "run")
        assert resumed["resumed_from_step"] == 4
        assert resumed["weights_sha256"] == unbroken["weights_sha256"]


def trains_with_a_fixed_scale(folder, options):
    def arguments(options, rate):
        made = tiny_recipe.compile_arguments(options, rate)
        return made | {"loss": Scaling(is_fixed=True)}

    chosen = tiny_recipe.Options(run_dir=Path(folder) / "run", **{"max_steps": 1} | options)
    return tiny_recipe.main(chosen, arguments=arguments)["steps"]


@keras.saving.register_keras_serializable()
class Counting(keras.layers.Layer):
    """Counts its calls in a weight."""

    def build(self, input_shape):
        self.count = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x):
        self.count.assign_add(1.0)
        return x


def refused_with_a_counting_layer(folder):
    def build(options):
        layers = tiny_recipe.build_model(options).layers
        return keras.Sequential([keras.Input((6,)), Counting(), *layers])

    two = dict(strategy="central_storage", replicas=2)
    return refused(Path(folder), DistributionError, parts={"build": build}, **two)


def refused_with_a_drawing_regularizer(folder):
    parts = TestKept.built_with(regularizer=Penalty())
    two = dict(strategy="mirrored", replicas=2)
    return refused(Path(folder), DistributionError, parts=parts, **two)


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

    def test_one_that_has_changed_since(self, stopped_at_four):
        folder, options = stopped_at_four
        with pytest.raises(RunError, match="cannot resume: the model has changed") as caught:
            tiny_recipe.main(options, build=lambda options: wider_model())
        assert len(str(caught.value).splitlines()) == 1
        assert "kernel was (6, 8), is now (6, 9)" in str(caught.value)

    @pytest.mark.parametrize(
        "optimizer, said",
        [
            (lambda: keras.optimizers.SGD(0.01), r"it was Adam, is now SGD"),
            (lambda: keras.optimizers.Adam(0.01, amsgrad=True), r"it had \d+ variables, now has"),
        ],
    )
    def test_another_optimizer(self, stopped_at_four, optimizer, said):
        """Keras only warns, and begins again with its moments."""

        def arguments(options, rate):
            return tiny_recipe.compile_arguments(options, rate) | {"optimizer": optimizer()}

        with pytest.raises(RunError, match=f"the optimizer has changed since .{said}") as caught:
            tiny_recipe.main(stopped_at_four[1], arguments=arguments)
        assert len(str(caught.value).splitlines()) == 1

    def test_other_metrics_within_an_epoch(self, stopped_at_four):
        def arguments(options, rate):
            return tiny_recipe.compile_arguments(options, rate) | {"metrics": []}

        with pytest.raises(RunError, match="cannot resume within an epoch: the metrics") as caught:
            tiny_recipe.main(stopped_at_four[1], arguments=arguments)
        assert len(str(caught.value).splitlines()) == 1


def wider_model():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(9), keras.layers.Dense(2)])


@pytest.fixture
def stopped_at_four(tmp_path):
    """A run that was stopped after four steps: its folder and its options."""
    options = tiny_recipe.Options(run_dir=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        tiny_recipe.main(options, extra=[StopAfter(4)])
    return tmp_path / "run", options


class StopAfter(keras.callbacks.Callback):
    """Interrupts a new run in the step after a step that is saved."""

    def __init__(self, step):
        super().__init__()
        self.left = step + 1

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class TestData:
    """Pipelines of one's own whose batches are no function of (seed, step)."""

    @staticmethod
    def shuffled(seed, again):
        def pipeline(x, y, *, batch_size, **_):
            data = tf.data.Dataset.from_tensor_slices((x, y, tf.ones(len(y))))
            data = data.shuffle(len(y), seed=seed, reshuffle_each_iteration=again)
            return data.repeat().batch(batch_size, drop_remainder=True)

        return pipeline

    def test_another_order_each_time(self, tmp_path):
        said = refused(tmp_path, parts={"pipeline": self.shuffled(None, True)})
        assert "another batch each time" in said and "data.batches.training_batches()" in said

    @pytest.mark.parametrize("place", ["change", "map", "layer", "if"])
    def test_random_numbers_that_start_again_where_a_run_resumes(self, tmp_path, place):
        layer = keras.layers.GaussianNoise(0.1)

        def noisy(x):
            if place == "layer":
                return layer(x, training=True)
            if place == "if":
                return tf.cond(x[0, 0] > 0, lambda: x + tf.random.normal(tf.shape(x)), lambda: x)
            return tf.image.random_brightness(x, 0.1)

        def pipeline(x, y, **batches):
            if place == "change":
                return arrays.training_data(x, y, change=lambda x, *_: noisy(x), **batches)
            return arrays.training_data(x, y, **batches).map(lambda x, y, *w: (noisy(x), y, *w))

        said = refused(tmp_path, parts={"pipeline": pipeline})
        assert said.startswith("train_data draws random numbers or changes variables")
        assert "data.batches.uniform(), by epoch and example" in said

    def test_random_numbers_that_are_read_again_where_a_run_resumes(self):
        """`skip()` reads what it leaves out, so the numbers behind it are the same."""
        data = tf.data.Dataset.range(20).map(lambda v: (v, tf.random.uniform((), seed=5)))
        assert checks.first_batches_sha256(data.batch(4).repeat().skip(3))
        with pytest.raises(RunError, match="draws random numbers"):
            checks.first_batches_sha256(data.batch(4).repeat())

    @pytest.mark.parametrize("kind", ["arrays", "PyDataset"])
    def test_validation_data_of_another_kind(self, kind):
        class Batches(keras.utils.PyDataset):
            def __len__(self):
                return 1

        data = (np.zeros((4, 6)), np.zeros(4)) if kind == "arrays" else Batches()
        checks.require_splits(SharedOptions(), validation=data, test=None)

    @pytest.mark.parametrize("fingerprint", [{"order": batches.ORDER - 1}, {"weights": []}])
    def test_a_run_that_began_in_another_order_of_the_examples(self, stopped_at_four, fingerprint):
        """The first versions kept neither the order nor the optimizer."""
        folder, options = stopped_at_four
        (path,) = folder.glob("checkpoints/*/state.json")
        state = json.loads(path.read_text())
        is_first = "order" not in fingerprint
        state["fingerprint"] = fingerprint if is_first else state["fingerprint"] | fingerprint
        path.write_text(json.dumps(state))
        files.write_checksums(path.parent)
        with pytest.raises(RunError, match="draws the examples in another order; finish it with"):
            tiny_recipe.main(options)
        if not is_first:  # a pipeline of one's own has its own order

            def pipeline(x, y, *, seed, **batches):
                return self.in_order(**batches)(x, y)

            assert tiny_recipe.main(options, pipeline=pipeline)["resumed_from_step"] == 4

    def test_a_cache_that_a_killed_run_left_locked(self, tmp_path):
        lock = tmp_path / "cache_0.lockfile"
        lock.write_text("")

        def pipeline(x, y, *, seed, **batches):
            return self.in_order(**batches)(x, y).cache(str(tmp_path / "cache"))

        said = refused(tmp_path, parts={"pipeline": pipeline})
        assert said.startswith(f"train_data has a cache that is locked, {lock}: a run that was")

    @pytest.mark.parametrize("split", ["validation", "test"])
    def test_a_split_without_an_end(self, split):
        data = {"validation": None, "test": None, split: tf.data.Dataset.range(3).repeat()}
        with pytest.raises(RunError, match=rf"^run.prepare\({split}=...\): the data have no end"):
            checks.require_splits(SharedOptions(), **data)

    @pytest.mark.parametrize("split", ["validation", "test"])
    def test_a_split_that_is_read_once(self, split):
        """Each evaluation would read other batches."""
        batches = ((np.zeros((4, 6)), np.zeros(4)) for _ in range(3))
        data = {"validation": None, "test": None, split: batches}
        with pytest.raises(RunError, match=rf"^run.prepare\({split}=...\) got a generator, which"):
            checks.require_splits(SharedOptions(), **data)

    def test_one_that_ignores_where_the_run_resumes(self, tmp_path):
        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        pipeline = self.shuffled(3, False)
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, extra=[StopAfter(4)], pipeline=pipeline)
        with pytest.raises(RunError, match=r"begins with the first batch .* pass \*\*plan.batches"):
            tiny_recipe.main(options, pipeline=pipeline)

    @staticmethod
    def in_order(*, batch_size, first_batch, **_):
        return lambda x, y: (
            tf.data.Dataset.from_tensor_slices((x, y))
            .batch(batch_size, drop_remainder=True)
            .repeat()
            .skip(first_batch)
        )

    @pytest.mark.long
    @pytest.mark.parametrize("step", [4, pytest.param(9, marks=pytest.mark.long)])
    def test_a_fixed_order_resumes_at_an_epochs_end(self, tmp_path, step):
        """The second epoch begins with the same batches as the first one."""

        def pipeline(x, y, *, seed, **batches):
            return self.in_order(**batches)(x, y)

        options = tiny_recipe.Options(run_dir=tmp_path / "run", checkpoint_every=step)
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, extra=[StopAfter(step)], pipeline=pipeline)
        resumed = tiny_recipe.main(options, pipeline=pipeline)
        assert resumed["resumed_from_step"] == step

    @pytest.mark.long
    def test_equal_batches_resume(self, tmp_path):
        def pipeline(x, y, *, seed, **batches):
            return self.in_order(**batches)(np.zeros_like(x), np.zeros_like(y))

        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, extra=[StopAfter(4)], pipeline=pipeline)
        assert tiny_recipe.main(options, pipeline=pipeline)["resumed_from_step"] == 4

    @pytest.mark.long
    def test_a_batch_that_occurs_again_is_not_the_start(self, tmp_path):
        """The fifth batch has the rows of the first one."""

        def pipeline(x, y, *, seed, **batches):
            x, y = x.copy(), y.copy()
            x[32:40], y[32:40] = x[:8], y[:8]
            return self.in_order(**batches)(x, y)

        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, extra=[StopAfter(4)], pipeline=pipeline)
        assert tiny_recipe.main(options, pipeline=pipeline)["resumed_from_step"] == 4

    def test_data_without_a_batch(self, tmp_path):
        def pipeline(x, y, **_):
            return tf.data.Dataset.from_tensor_slices((x[:0], y[:0])).batch(8)

        said = refused(tmp_path, parts={"pipeline": pipeline})
        assert said == "train_data has no batch for the next step: repeat() it"

    def test_data_that_end_before_the_run(self, tmp_path, as_command, monkeypatch):
        """Twelve batches where the plan has 18 steps; nothing of the second epoch is kept."""

        def pipeline(x, y, *, batch_size, first_batch, **_):
            data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size).repeat()
            return data.take(12).skip(first_batch)

        def main(options):
            return tiny_recipe.main(options, pipeline=pipeline)

        status, _, said = as_command("--run-dir", tmp_path / "run", main=main)
        (line,) = [line for line in said.splitlines() if "train_data" in line]
        assert status == 2 and line.endswith("train_data ended after 12 of 18 steps: repeat() it")
        assert not (tmp_path / "run" / "results.json").exists()
        assert checkpoint.newest(tmp_path / "run" / "checkpoints").step == 12

    def test_ours_without_the_first_batch(self, stopped_at_four):
        def forgetful(x, y, *, seed, batch_size, batches_per_epoch, first_batch):
            return arrays.training_data(x, y, seed=seed, batch_size=batch_size)

        with pytest.raises(RunError, match="begins with the first batch of the whole run"):
            tiny_recipe.main(stopped_at_four[1], pipeline=forgetful)


class TestCallbacks:
    @pytest.mark.parametrize(
        "callback",
        [
            keras.callbacks.EarlyStopping(),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
            keras.callbacks.SwapEMAWeights(),
        ],
        ids=lambda callback: type(callback).__name__,
    )
    def test_state_that_no_checkpoint_keeps(self, tmp_path, callback):
        said = refused(tmp_path, parts={"extra": [callback]})
        assert f"keras.callbacks.{type(callback).__name__} has state" in said
        assert "--early-stopping" in said and "get_state() and set_state()" in said

    def test_two_of_one_name(self, tmp_path):
        said = refused(tmp_path, parts={"extra": [tiny_recipe.Counter(), tiny_recipe.Counter()]})
        assert "two callbacks of class Counter" in said

    def test_a_callback_without_state_is_welcome(self):
        assert checks.stateful({}, [keras.callbacks.TerminateOnNaN()], None) == {}

    @pytest.mark.long
    def test_one_that_is_missing_on_resume(self, tmp_path):
        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, extra=[tiny_recipe.Counter(), StopAfter(4)])
        with pytest.raises(RunError, match=r"holds the state of Counter.*extra=\[\.\.\.\]"):
            tiny_recipe.main(options)
        counter = tiny_recipe.Counter()
        assert tiny_recipe.main(options, extra=[counter])["resumed_from_step"] == 4
        assert counter.count == 18  # with the four steps of the first process


class TestFit:
    def test_arrays_instead_of_the_batches(self, tmp_path):
        def fit(model, data, fit_options):
            model.fit(*tiny_recipe.splits()["train"], **fit_options)

        said = refused(tmp_path, parts={"fit": fit})
        assert said.startswith("model.fit() got a ndarray") and "model.fit(train_data, **" in said

    def test_without_the_callbacks_of_the_run(self, tmp_path):
        def fit(model, data, fit_options):
            model.fit(data, steps_per_epoch=1)

        said = refused(tmp_path, parts={"fit": fit})
        assert said.startswith("model.fit() lacks callbacks of the run")

    def test_a_callback_that_is_added_later(self, tmp_path):
        def fit(model, data, fit_options):
            fit_options["callbacks"].append(keras.callbacks.EarlyStopping())
            model.fit(data, **fit_options)

        assert "EarlyStopping has state" in refused(tmp_path, parts={"fit": fit})

    def test_a_model_that_is_compiled_again(self, tmp_path):
        """Keras's own step would count the padding of last batches."""

        def fit(model, data, fit_options):
            model.compile(**tiny_recipe.compile_arguments(tiny_recipe.Options(), 0.1))

        said = refused(tmp_path, parts={"fit": fit})
        assert said.startswith("model.compile() was called after run.prepare()")
        assert "compile before run.prepare()" in said and len(said.splitlines()) == 1

    def test_a_second_run_of_one_model(self, tmp_path):
        """Compiled again between the two, as where layers are unfrozen; by a `CallbackList`."""
        models = []

        def build(options):
            if not models:
                models.append(tiny_recipe.build_model(options))
            return models[0]

        def fit(model, data, fit_options):
            fit_options["callbacks"] = keras.callbacks.CallbackList(fit_options["callbacks"])
            model.fit(data, **fit_options)

        for name in ("first", "second"):
            options = tiny_recipe.Options(run_dir=tmp_path / name, max_steps=1)
            assert tiny_recipe.main(options, build=build, fit=fit)["steps"] == 1

    def test_a_callback_of_steps_that_is_added_later(self, tmp_path):
        def fit(model, data, fit_options):
            fit_options["callbacks"].append(tiny_recipe.Counter())
            model.fit(data, **fit_options)

        said = refused(tmp_path, parts={"fit": fit})
        assert said == "Counter is a StepCallback: pass it as run.prepare(extra=[...])"

    @pytest.mark.parametrize("comes_first", [False, True])
    def test_a_callback_that_is_added_later_ends_the_run_before_its_last_save(
        self, tmp_path, comes_first
    ):
        """After a kill in the test the run would train on."""

        class Stop(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.stop_training = True

        def fit(model, data, fit_options):
            callbacks = fit_options["callbacks"]
            fit_options["callbacks"] = [Stop(), *callbacks] if comes_first else [*callbacks, Stop()]
            model.fit(data, **fit_options)
            raise KeyboardInterrupt

        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, fit=fit)
        newest = checkpoint.newest(tmp_path / "run" / "checkpoints")
        assert newest.step == 9 and newest.state["finished"]
        assert tiny_recipe.main(options)["steps"] == 9

    def test_no_training_at_all(self, tmp_path):
        said = refused(tmp_path, parts={"fit": lambda *_: None})
        assert said.startswith("run.finish() was called without a training")

    @pytest.mark.long
    def test_a_second_one(self, tmp_path):
        def fit(model, data, fit_options):
            model.fit(data, **fit_options)
            model.fit(data, **fit_options)

        with pytest.raises(RunError, match="called a second time: a run is one training"):
            tiny_recipe.main(tiny_recipe.Options(run_dir=tmp_path / "run"), fit=fit)

    @pytest.mark.long
    def test_after_the_run_all_is_as_in_keras(self, tmp_path):
        models = []
        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        tiny_recipe.main(options, inside=lambda run, model: models.append(model))
        history = models[0].fit(*tiny_recipe.splits()["train"], verbose=0)
        assert len(history.history["loss"]) == 1


def several_optimizers():
    several = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    return {"optimizer": keras.optimizers.MultiOptimizer(several)}


class TestOptions:
    def test_one_rate_cannot_be_lowered_among_several(self, tmp_path):
        said = refused(tmp_path, OptionsError, arguments=several_optimizers, reduce_on_plateau=1)
        assert said.startswith("--reduce-on-plateau: a MultiOptimizer has several learning rates")
        assert len(said.splitlines()) == 1

    def test_a_best_that_is_not_measured(self, tmp_path):
        said = refused(tmp_path, OptionsError, keep_best="val_acuracy")
        names = "val_loss, val_cross_entropy, val_accuracy"
        assert said == f"--keep-best val_acuracy: must be one of {names}"

    @pytest.mark.parametrize(
        "split, option, value",
        [
            ("validation", "keep_best", "val_loss"),
            ("validation", "reduce_on_plateau", 1),
            ("validation", "validate_every", 4),
            ("test", "test_every", 4),
        ],
    )
    def test_a_split_that_the_recipe_does_not_have(self, tmp_path, split, option, value):
        parts = {"left_out": (split,)}
        said = refused(tmp_path, OptionsError, parts=parts, **{option: value})
        assert said == (
            f"--{option.replace('_', '-')}: this recipe has no {split} data "
            f"(run.prepare({split}=None)); leave it out"
        )

    def test_a_run_without_validation_data(self, tmp_path):
        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        results = tiny_recipe.main(options, left_out=("validation", "test"))
        assert results["steps"] == 18 and "val_loss" not in results["history"]

    @pytest.mark.long
    def test_a_best_whose_direction_is_not_known(self, tmp_path, monkeypatch):
        """A metric of one's own, whose name tells nothing."""

        def arguments(options, rate):
            wings = keras.metrics.MeanMetricWrapper(lambda y, p: y, name="wings")
            made = tiny_recipe.compile_arguments(options, rate)
            return made | {"weighted_metrics": [wings]}

        options = dict(keep_best="val_wings", run_dir=tmp_path / "run")
        with pytest.raises(OptionsError, match="val_wings: .*--keep-best-mode min or"):
            tiny_recipe.main(tiny_recipe.Options(**options), arguments=arguments)
        options |= dict(keep_best_mode="max", early_stopping=1, epochs=3)
        assert tiny_recipe.main(tiny_recipe.Options(**options), arguments=arguments)["epochs"] == 2

    @pytest.mark.parametrize(
        "strategy, replicas, more, said",
        [
            ("central_storage", 2, {"jit": "on"}, "--jit on: XLA cannot compile"),
            ("central_storage", 2, {"precision": "mixed_float16"}, "is incompatible with central"),
            ("none", 2, {}, "--replicas 2 needs mirrored"),
        ],
    )
    def test_pairs_that_cannot_work(self, strategy, replicas, more, said, monkeypatch):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        with pytest.raises(OptionsError, match=f"^.*{said}.*$"):
            checks.refuse_pairs(SharedOptions(strategy=strategy, replicas=replicas, **more))

    def test_averages_of_weights_that_all_replicas_share(self, monkeypatch):
        """Also beside parameter servers that the launcher has started: the strategy is auto."""
        cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
        task = {"type": "chief", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
        with pytest.raises(OptionsError, match="^--ema: with parameter_server replicas share"):
            checks.refuse_pairs(FineTuningOptions(ema=0.9))
        monkeypatch.delenv("TF_CONFIG")
        with pytest.raises(OptionsError, match="^--ema: with central_storage replicas share"):
            checks.refuse_pairs(FineTuningOptions(ema=0.9, strategy="central_storage", replicas=2))
        checks.refuse_pairs(FineTuningOptions(ema=0.9, strategy="mirrored", replicas=2))


class TestExecutions:
    """72 examples of which 8 are a batch: 9 steps an epoch."""

    @pytest.mark.parametrize(
        "steps, steps_done, options, divisor",
        [
            (3, 0, {}, None),
            (9, 9, {}, None),
            (18, 0, {}, 9),
            (3, 0, {"max_steps": 15}, None),  # ends in mid-epoch
            (3, 0, {"max_steps": 14}, 1),
            (7, 0, {"max_steps": 7}, None),
            (3, 3, {}, None),
            (3, 4, {}, 1),  # of a resumed epoch
        ],
    )
    def test_what_divides_epoch_run_and_what_is_left(self, steps, steps_done, options, divisor):
        plan = make_plan(
            SharedOptions(**({"epochs": 2, "global_batch_size": 8} | options)),
            replicas=1,
            examples=72,
            batch_size_per_replica=8,
            base_learning_rate=1.0,
            steps_done=steps_done,
        )
        if divisor is None:
            checks.refuse_executions_across_epochs(steps, plan)
        else:
            with pytest.raises(OptionsError, match=f"it must divide {divisor}$"):
                checks.refuse_executions_across_epochs(steps, plan)


def test_the_precision_is_put_back():
    with checks.precision("float64"):
        assert keras.config.floatx() == "float64"
        assert keras.config.dtype_policy().name == "float64"
    with pytest.raises(KeyError), checks.precision("mixed_bfloat16"):
        assert keras.config.dtype_policy().compute_dtype == "bfloat16"
        raise KeyError
    assert keras.config.floatx() == "float32"
    assert keras.config.dtype_policy().name == "float32"


class TestPrecision:
    """`keras.utils.clear_session()`, which is usual in notebooks, resets the dtype policy."""

    HALF = dict(precision="mixed_bfloat16", max_steps=1)

    def test_a_session_that_is_cleared_before_the_plan(self, tmp_path, monkeypatch):
        stock, models = tiny_recipe.splits, []

        def splits():
            keras.utils.clear_session()
            return stock()

        monkeypatch.setattr(tiny_recipe, "splits", splits)
        tiny_recipe.main(
            tiny_recipe.Options(run_dir=tmp_path / "run", **self.HALF),
            inside=lambda run, model: models.append(model),
        )
        assert models[0].layers[0].compute_dtype == "bfloat16"

    def test_a_session_that_is_cleared_later(self, tmp_path):
        """The first weights would not be those of the seed either."""

        def build(options):
            keras.utils.clear_session()
            return tiny_recipe.build_model(options)

        said = refused(tmp_path, parts={"build": build})
        assert said.startswith("keras.utils.clear_session() was called after run.plan()")
        assert len(said.splitlines()) == 1

    def test_a_policy_that_the_recipe_sets(self, tmp_path):
        def build(options):
            keras.config.set_dtype_policy("mixed_float16")
            return tiny_recipe.build_model(options)

        said = refused(tmp_path, parts={"build": build})
        assert said.startswith("--precision float32: Keras's dtype policy was changed to mixed_fl")
        assert len(said.splitlines()) == 1

    def test_a_model_that_was_built_under_another_policy(self, tmp_path):
        model = tiny_recipe.build_model(tiny_recipe.Options())
        parts = {"build": lambda options: model}
        said = refused(tmp_path, parts=parts, **self.HALF)
        assert said.startswith("--precision mixed_bfloat16: no layer of the model sequential")
        assert len(said.splitlines()) == 1


class TestXla:
    """Which runs `--jit auto` compiles."""

    @dataclasses.dataclass(kw_only=True)
    class Measured(SharedOptions):
        JIT_MIN_STEPS: typing.ClassVar[int] = 300

    def test_long_runs_on_one_cpu(self):
        one = tf.distribute.get_strategy()
        assert checks.jit_compile(self.Measured(), one, 300) is True
        assert checks.jit_compile(self.Measured(), one, 299) == "auto"
        mirrored = tf.distribute.MirroredStrategy(["CPU:0"])
        assert checks.jit_compile(self.Measured(), mirrored, 300) is True
        assert checks.jit_compile(SharedOptions(), one, 10**6) == "auto"

    def test_not_what_xla_cannot_or_must_not_compile(self):
        one = tf.distribute.get_strategy()
        for options in (dict(precision="float64"), dict(deterministic=True)):
            assert checks.jit_compile(self.Measured(**options), one, 1000) == "auto"
        assert checks.jit_compile(bert_mlm.Options(deterministic=True), one, 10**6) == "auto"
        shared = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"], "CPU:0")
        assert checks.jit_compile(self.Measured(), shared, 1000) == "auto"

    def test_long_runs_on_gpus(self, monkeypatch):
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: [kind] * 2)
        one, mirrored = tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0"])
        monkeypatch.setattr(checks.strategies, "replicas", lambda s: 1 if s is one else 2)
        long = checks.GPU_JIT_MIN_STEPS
        assert checks.jit_compile(SharedOptions(), mirrored, long) is True
        assert checks.jit_compile(SharedOptions(), mirrored, long - 1) == "auto"
        assert checks.jit_compile(SharedOptions(accumulate_steps=2), one, long) is True
        assert checks.jit_compile(SharedOptions(), one, long) == "auto"  # Keras compiles it
        assert checks.jit_compile(SharedOptions(), one, long - 1) is False
        assert checks.jit_compile(SharedOptions(deterministic=True), mirrored, long) == "auto"
        assert checks.jit_compile(SharedOptions(deterministic=True), one, long) == "auto"
        identical = bert_mlm.Options(deterministic=True)
        assert checks.jit_compile(identical, one, long) is True
        several = dataclasses.replace(identical, accumulate_steps=2)
        assert checks.jit_compile(several, one, long) == "auto"
        assert checks.jit_compile(identical, one, long - 1) == "auto"
        assert checks.jit_compile(identical, mirrored, long) == "auto"
        # Six lengths: 8, 12, 16, 24, 32 and 40.
        sentences = text_classification.Options(preset="some", sequence_length=40)
        assert checks.jit_compile(sentences, one, 6 * long) == "auto"
        assert checks.jit_compile(sentences, one, 6 * long - 1) is False
        for changes in (dict(group_by_length="off"), dict(preset="scratch")):
            alike = dataclasses.replace(sentences, **changes)
            assert checks.jit_compile(alike, one, long) == "auto"


def test_layers_whose_draws_depend_on_the_replicas_are_named():
    """Not those that drop out, alone or in a cell."""

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
    assert checks.random_layers_note(keras.Model(inputs, hidden)) is None
    hidden = layers.GaussianNoise(0.1, name="noise")(hidden)
    hidden = layers.AlphaDropout(0.1, name="alpha")(layers.Flatten()(hidden))
    hidden = Several([keras.random.SeedGenerator(1)], name="list")(hidden)
    hidden = Several({"a": keras.random.SeedGenerator(1), "b": 2}, name="dict")(hidden)
    assert checks.random_layers_note(keras.Model(inputs, hidden)) == (
        "noise, alpha, list, dict: except by keras.random.dropout(), each replica draws the same "
        "random numbers for its own examples, so the results may depend on the number of replicas"
    )


class TestClassWeights:
    """`fit(class_weight=...)` fails within Keras, after `run.prepare()`."""

    def message(self, folder, **changes):
        def inside(run, model):
            model.fit = functools.partial(model.fit, class_weight={0: 1.0, 1: 3.0})

        options = tiny_recipe.Options(run_dir=folder / "run")
        with pytest.raises(RunError, match="^model.fit.class_weight=....: ") as caught:
            tiny_recipe.main(options, inside=inside, **changes)
        assert not (folder / "run").exists() and "\n" not in str(caught.value)
        return str(caught.value)

    def test_beside_weights_of_the_examples(self, tmp_path):
        def pipeline(x, y, **named):
            return arrays.training_data(x, y, np.ones(len(y)), **named)

        assert "the training data have weights already" in self.message(tmp_path, pipeline=pipeline)

    def test_of_several_outputs(self, tmp_path):
        def build(options):
            inputs = keras.Input((6,))
            return keras.Model(inputs, [keras.layers.Dense(2)(inputs) for _ in range(2)])

        def arguments(options, learning_rate):
            return dict(optimizer="adam", loss=["mse", "mse"])

        def pipeline(x, y, **named):
            return arrays.training_data(x, (x[:, :2], x[:, 2:4]), **named)

        changes = dict(build=build, arguments=arguments, pipeline=pipeline)
        assert "the model has several outputs" in self.message(tmp_path, **changes)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((np.ones((2, 1)), np.ones(2, bool)), True),
        (({"x": np.ones(2), "name": np.array(["a", "b"])}, np.ones(2)), False),
        ((tf.ragged.constant([[1], [2, 3]]), np.ones(2)), False),
    ],
)
def test_what_fits_on_a_gpu(parts, expected):
    assert checks.fits_on_a_gpu(tf.data.Dataset.from_tensor_slices(parts)) == expected


class TestMaxValidationExamples:
    """Of the 20 of the tiny recipe, in batches of 8."""

    @pytest.mark.parametrize("most", [1, 12, 16])
    def test_that_a_recipe_does_not_apply_are_refused(self, most, tmp_path):
        with pytest.raises(OptionsError, match=f"^--max-validation-examples {most}: .* ignores it"):
            tiny_recipe.main(
                tiny_recipe.Options(run_dir=tmp_path / "run", max_validation_examples=most)
            )

    def test_applied_by_the_recipe(self, tmp_path):
        data = arrays.draw_examples(tiny_recipe.splits(), None, 0, 12)
        options = tiny_recipe.Options(
            run_dir=tmp_path / "run", max_validation_examples=12, epochs=1
        )
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, data=data, extra=[StopAfter(4)])
        other = dataclasses.replace(options, max_validation_examples=13)
        with pytest.raises(RunError, match="max_validation_examples|max-validation-examples"):
            tiny_recipe.main(other, data=data)
        assert tiny_recipe.main(options, data=data)["epochs"] == 1

    def test_without_validation_data(self, tmp_path):
        options = tiny_recipe.Options(run_dir=tmp_path / "run", max_validation_examples=12)
        with pytest.raises(OptionsError, match="no validation data"):
            tiny_recipe.main(options, left_out=["validation"])

    def test_of_no_dataset(self):
        options = tiny_recipe.Options(max_validation_examples=12)
        with pytest.raises(OptionsError, match="ignores it"):
            checks.require_fewer(options, (np.zeros((20, 6)), np.zeros(20)))
        checks.require_fewer(tiny_recipe.Options(), (np.zeros((20, 6)), np.zeros(20)))


class Of(keras.metrics.Metric):
    """A metric of one variable and a count of updates, for the errors of a batch."""

    def __init__(self, update, result=lambda value, count: value):
        super().__init__(name="own")
        self.value = self.add_variable((), "zeros", name="value")
        self.count = self.add_variable((), "zeros", name="count")
        self.update, self.compute = update, result

    def update_state(self, y_true, y_pred, sample_weight=None):
        labels = keras.ops.one_hot(y_true, 2, dtype=y_pred.dtype)
        self.value.assign(self.update(self.value, keras.ops.abs(labels - y_pred)))
        self.count.assign(self.count + 1)

    def result(self):
        return self.compute(self.value, self.count)


def largest(value, errors):
    return keras.ops.maximum(value, keras.ops.max(errors))


def last(value, errors):
    return keras.ops.mean(errors)


def total(value, errors):
    return value + keras.ops.sum(errors)


def mean_of_means(value, errors):
    return value + keras.ops.mean(errors)


def of_parts_alone(value, errors):
    if errors.shape[0] == 8 and tf.distribute.get_replica_context() is not None:
        raise ValueError("too many examples")
    return value + keras.ops.sum(errors)


def tried_metrics(folder):
    """Each metric on two replicas: the line of an error, or the notes of a run."""
    said = {}
    for update in (largest, last, total, mean_of_means, of_parts_alone):
        average = update is mean_of_means

        def arguments(options, rate, update=update, average=average):
            divide = {"result": lambda value, count: value / count} if average else {}
            return tiny_recipe.compile_arguments(options, rate) | {
                "weighted_metrics": [Of(update, **divide)]
            }

        options = tiny_recipe.Options(
            run_dir=folder / update.__name__, strategy="mirrored", replicas=2, max_steps=1
        )
        try:
            said[update.__name__] = tiny_recipe.main(
                options, arguments=arguments, left_out=("validation", "test")
            )["notes"]
        except DistributionError as error:
            said[update.__name__] = str(error)
    return said


@pytest.mark.long
def test_metrics_whose_states_do_not_add_up_are_refused(tmp_path):
    said = forked.run(tried_metrics, tmp_path)
    for name in ("largest", "last"):
        assert said[name].startswith("metric own: Of does not add up over the replicas")
    assert said["total"] == said["mean_of_means"] == []
    (note,) = said["of_parts_alone"]
    assert note.startswith("metric own: could not try whether it adds up over replicas (too")
