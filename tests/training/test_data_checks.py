"""Rejects data that a run cannot resume or evaluate exactly."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from callbacks import checkpoint
from data import arrays, batches, files
from tests.support import tiny_recipe
from tests.support.refusals import refused
from training import data_checks
from training.errors import OptionsError, RunError
from training.options import SharedOptions


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
        assert data_checks.first_batches_sha256(data.batch(4).repeat().skip(3))
        with pytest.raises(RunError, match="draws random numbers"):
            data_checks.first_batches_sha256(data.batch(4).repeat())

    @pytest.mark.parametrize("kind", ["arrays", "PyDataset"])
    def test_validation_data_of_another_kind(self, kind):
        class Batches(keras.utils.PyDataset):
            def __len__(self):
                return 1

        data = (np.zeros((4, 6)), np.zeros(4)) if kind == "arrays" else Batches()
        data_checks.require_splits(SharedOptions(), validation=data, test=None)

    @pytest.mark.parametrize(
        "form, part",
        [
            ("no labels", "(validation=...) has no labels, which train_data has: pass (x, y), or"),
            ("array", "(validation=...) has no labels"),
            ("no batches", "inputs of shape (6,), train_data of (4, 6): batch() it, or pass"),
            ("dict", "run.prepare(validation=...) is a dict of x, y: pass a tuple (x, y)"),
        ],
    )
    def test_validation_data_of_another_form(self, form, part):
        """Keras finds it after the first epoch."""
        x, y = np.zeros((8, 6), "float32"), np.zeros(8)
        train = arrays.training_data(x, y, seed=0, batch_size=4)
        rows = tf.data.Dataset.from_tensor_slices
        wrong = {
            "no labels": arrays.evaluation_data(x, batch_size=4),
            "array": x,
            "no batches": rows((x, y)),
            "dict": rows({"x": x, "y": y}).batch(4),
        }
        with pytest.raises(RunError) as caught:
            data_checks.require_forms(train, {"validation": wrong[form], "test": None})
        assert part in str(caught.value) and "\n" not in str(caught.value)

    def test_data_of_a_form_that_suits(self):
        x, y = np.zeros((8, 6), "float32"), np.zeros(8)
        train = arrays.training_data(x, y, seed=0, batch_size=4)
        rows, unknown = tf.data.Dataset.from_tensor_slices, tf.TensorSpec(None)
        for data in (
            (x, y),
            [tf.constant(x), y, y],
            rows((x, y)).batch(3),
            tf.data.Dataset.from_generator(lambda: None, output_signature=(unknown, unknown)),
            keras.utils.PyDataset(),
        ):
            data_checks.require_forms(train, {"validation": data})
        # Keras finds inputs by their names, and adds an axis to those of shape (batch,).
        named = rows(({"input": x}, y)).batch(4)
        data_checks.require_forms(train, {"validation": named})
        single = arrays.training_data(x[:, :1], y, seed=0, batch_size=4)
        data_checks.require_forms(single, {"validation": (x[:, 0], y)})
        without = arrays.training_data(x, seed=0, batch_size=4)
        test = arrays.evaluation_data(x, batch_size=4)
        data_checks.require_forms(without, {"test": test}, needs_labels=False)

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
            data_checks.require_splits(SharedOptions(), **data)

    @pytest.mark.parametrize("split", ["validation", "test"])
    def test_a_split_that_is_read_once(self, split):
        """Each evaluation would read other batches."""
        batches = ((np.zeros((4, 6)), np.zeros(4)) for _ in range(3))
        data = {"validation": None, "test": None, split: batches}
        with pytest.raises(RunError, match=rf"^run.prepare\({split}=...\) got a generator, which"):
            data_checks.require_splits(SharedOptions(), **data)

    def test_one_that_ignores_where_the_run_resumes(self, tmp_path):
        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        pipeline = self.shuffled(3, False)
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, extra=[tiny_recipe.StopAfter(4)], pipeline=pipeline)
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
            tiny_recipe.main(options, extra=[tiny_recipe.StopAfter(step)], pipeline=pipeline)
        resumed = tiny_recipe.main(options, pipeline=pipeline)
        assert resumed["resumed_from_step"] == step

    @pytest.mark.long
    def test_equal_batches_resume(self, tmp_path):
        def pipeline(x, y, *, seed, **batches):
            return self.in_order(**batches)(np.zeros_like(x), np.zeros_like(y))

        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, extra=[tiny_recipe.StopAfter(4)], pipeline=pipeline)
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
            tiny_recipe.main(options, extra=[tiny_recipe.StopAfter(4)], pipeline=pipeline)
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


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((np.ones((2, 1)), np.ones(2, bool)), True),
        (({"x": np.ones(2), "name": np.array(["a", "b"])}, np.ones(2)), False),
        ((tf.ragged.constant([[1], [2, 3]]), np.ones(2)), False),
    ],
)
def test_what_fits_on_a_gpu(parts, expected):
    assert data_checks.fits_on_a_gpu(tf.data.Dataset.from_tensor_slices(parts)) == expected


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
            tiny_recipe.main(options, data=data, extra=[tiny_recipe.StopAfter(4)])
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
            data_checks.require_fewer(options, (np.zeros((20, 6)), np.zeros(20)))
        data_checks.require_fewer(tiny_recipe.Options(), (np.zeros((20, 6)), np.zeros(20)))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda data: data.unbatch(), "(6,)"),
        (lambda data: data.rebatch(4), "(4, 6)"),
    ],
    ids=["examples", "batches of another size"],
)
def test_batches_that_are_not_the_plan_s(tmp_path, change, found):
    def pipeline(*examples, **options):
        data = change(arrays.training_data(*examples, **options))
        return data.take(20)

    said = refused(tmp_path, parts={"pipeline": pipeline})
    assert f"begins with a tensor of shape {found}, and the plan has batches of 8 examples" in said
    assert "batch() them by plan.batches['batch_size']" in said
