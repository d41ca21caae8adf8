"""Rejects a training that changes variables which no checkpoint keeps."""

import re
from pathlib import Path

import keras
import pytest

from distribution.errors import DistributionError
from tests.support import forked, tiny_recipe
from tests.support.refusals import refused


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
            train(tmp_path / "run", extra=[tiny_recipe.StopAfter(4)])
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
