"""Precision and XLA: what a run sets, rejects and decides."""

import dataclasses
import typing

import keras
import pytest
import tensorflow as tf

from recipes import bert_mlm, text_classification
from tests.support import tiny_recipe
from tests.support.refusals import refused
from training import numerics
from training.options import SharedOptions


def test_the_precision_is_put_back():
    with numerics.precision("float64"):
        assert keras.config.floatx() == "float64"
        assert keras.config.dtype_policy().name == "float64"
    with pytest.raises(KeyError), numerics.precision("mixed_bfloat16"):
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
        assert numerics.jit_compile(self.Measured(), one, 300) is True
        assert numerics.jit_compile(self.Measured(), one, 299) == "auto"
        mirrored = tf.distribute.MirroredStrategy(["CPU:0"])
        assert numerics.jit_compile(self.Measured(), mirrored, 300) is True
        assert numerics.jit_compile(SharedOptions(), one, 10**6) == "auto"

    def test_not_what_xla_cannot_or_must_not_compile(self):
        one = tf.distribute.get_strategy()
        for options in (dict(precision="float64"), dict(deterministic=True)):
            assert numerics.jit_compile(self.Measured(**options), one, 1000) == "auto"
        assert numerics.jit_compile(bert_mlm.Options(deterministic=True), one, 10**6) == "auto"
        shared = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"], "CPU:0")
        assert numerics.jit_compile(self.Measured(), shared, 1000) == "auto"

    def test_long_runs_on_gpus(self, monkeypatch):
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: [kind] * 2)
        one, mirrored = tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0"])
        monkeypatch.setattr(numerics.strategies, "replicas", lambda s: 1 if s is one else 2)
        long = numerics.GPU_JIT_MIN_STEPS
        assert numerics.jit_compile(SharedOptions(), mirrored, long) is True
        assert numerics.jit_compile(SharedOptions(), mirrored, long - 1) == "auto"
        assert numerics.jit_compile(SharedOptions(accumulate_steps=2), one, long) is True
        assert numerics.jit_compile(SharedOptions(), one, long) == "auto"  # Keras compiles it
        assert numerics.jit_compile(SharedOptions(), one, long - 1) is False
        assert numerics.jit_compile(SharedOptions(deterministic=True), mirrored, long) == "auto"
        assert numerics.jit_compile(SharedOptions(deterministic=True), one, long) == "auto"
        identical = bert_mlm.Options(deterministic=True)
        assert numerics.jit_compile(identical, one, long) is True
        several = dataclasses.replace(identical, accumulate_steps=2)
        assert numerics.jit_compile(several, one, long) == "auto"
        assert numerics.jit_compile(identical, one, long - 1) == "auto"
        assert numerics.jit_compile(identical, mirrored, long) == "auto"
        # Six lengths: 8, 12, 16, 24, 32 and 40.
        sentences = text_classification.Options(preset="some", sequence_length=40)
        assert numerics.jit_compile(sentences, one, 6 * long) == "auto"
        assert numerics.jit_compile(sentences, one, 6 * long - 1) is False
        for changes in (dict(group_by_length="off"), dict(preset="scratch")):
            alike = dataclasses.replace(sentences, **changes)
            assert numerics.jit_compile(alike, one, long) == "auto"
