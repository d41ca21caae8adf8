"""Rejects another model, loss, optimizer or metrics than the checkpoint's."""

import dataclasses
import json

import keras
import pytest

from callbacks import checkpoint
from data import files
from tests.support import tiny_recipe
from training.errors import RunError


class TestResume:
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
        """Keras only warns, and begins again with its moments; in a run of an earlier version."""

        def arguments(options, rate):
            return tiny_recipe.compile_arguments(options, rate) | {"optimizer": optimizer()}

        remove_the_record(stopped_at_four[0])
        with pytest.raises(RunError, match=f"the optimizer has changed since .{said}") as caught:
            tiny_recipe.main(stopped_at_four[1], arguments=arguments)
        assert len(str(caught.value).splitlines()) == 1

    def test_another_loss_and_other_values_of_the_optimizer(self, stopped_at_four):
        folder, options = stopped_at_four
        with pytest.raises(RunError, match="cannot resume, these arguments of compile") as caught:
            tiny_recipe.main(options, arguments=changed)
        assert str(caught.value).splitlines() == [
            f"{folder}/checkpoints/step-00000004: cannot resume, these arguments of compile() "
            "changed; restore them in the recipe to resume the run, or pass another --run-dir to "
            "begin a new one",
            "loss: ignore_class was None, is now 0",
            "optimizer: beta_1 was 0.9, is now 0.8",
        ]

    def test_a_run_of_a_version_without_a_record(self, stopped_at_four):
        remove_the_record(stopped_at_four[0])
        tiny_recipe.main(stopped_at_four[1], arguments=changed, fit=weighted(3.0))
        state = checkpoint.newest(stopped_at_four[0] / "checkpoints").state["fingerprint"]
        assert state["compiled"]["losses"]["loss"]["values"]["ignore_class"] == 0
        assert state["class_weight"] == {"1": 3.0}

    def test_other_weights_of_classes(self, tmp_path):
        options = tiny_recipe.Options(run_dir=tmp_path / "run")
        stop = [tiny_recipe.StopAfter(4)]
        with pytest.raises(KeyboardInterrupt):
            tiny_recipe.main(options, fit=weighted(3.0), extra=stop)
        with pytest.raises(RunError, match="cannot resume, class_weight of fit") as caught:
            tiny_recipe.main(options)
        assert str(caught.value).splitlines()[1:] == ["class 1: weight was 3, is now 1"]
        assert tiny_recipe.main(options, fit=weighted(3.0))["resumed_from_step"] == 4

    def test_an_extended_run_gets_another_schedule(self, copied):
        longer = tiny_recipe.Options(run_dir=copied, max_steps=20, epochs=3, resume="extend")
        assert tiny_recipe.main(longer, arguments=of_length(20))["steps"] == 20
        again = dataclasses.replace(longer, max_steps=22)
        with pytest.raises(RunError, match="optimizer: learning_rate was PolynomialDecay, is now "):
            tiny_recipe.main(again, arguments=with_constant_rate)

    def test_other_metrics_are_noted(self, copied):
        longer = tiny_recipe.Options(run_dir=copied, epochs=3, resume="extend")
        results = tiny_recipe.main(longer, arguments=with_top_k)
        (note,) = [each for each in results["notes"] if "metrics" in each]
        assert note.startswith("the metrics of compile() were accuracy, cross_entropy, loss, and")

    def test_other_metrics_within_an_epoch(self, stopped_at_four):
        def arguments(options, rate):
            return tiny_recipe.compile_arguments(options, rate) | {"metrics": []}

        with pytest.raises(RunError, match="cannot resume within an epoch: the metrics") as caught:
            tiny_recipe.main(stopped_at_four[1], arguments=arguments)
        assert len(str(caught.value).splitlines()) == 1


def remove_the_record(folder):
    """Leaves in the checkpoint what earlier versions kept."""
    (path,) = folder.glob("checkpoints/*/state.json")
    state = json.loads(path.read_text())
    del state["fingerprint"]["compiled"], state["fingerprint"]["class_weight"]
    path.write_text(json.dumps(state))
    files.write_checksums(path.parent)


def changed(options, rate):
    return tiny_recipe.compile_arguments(options, rate) | {
        "optimizer": keras.optimizers.Adam(
            keras.optimizers.schedules.PolynomialDecay(rate, 100, 0.0), beta_1=0.8
        ),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
    }


def of_length(steps):
    def arguments(options, rate):
        decay = keras.optimizers.schedules.PolynomialDecay(rate, steps, 0.0)
        return tiny_recipe.compile_arguments(options, rate) | {
            "optimizer": keras.optimizers.Adam(decay)
        }

    return arguments


def with_constant_rate(options, rate):
    return tiny_recipe.compile_arguments(options, rate) | {"optimizer": keras.optimizers.Adam(rate)}


def with_top_k(options, rate):
    top_k = keras.metrics.SparseTopKCategoricalAccuracy(1, name="top_k")
    arguments = tiny_recipe.compile_arguments(options, rate)
    return arguments | {"metrics": [*arguments["metrics"], top_k]}


def weighted(weight):
    """Returns a `fit` that counts an example of class 1 so often."""

    def fit(model, data, fit_options):
        model.fit(data, class_weight={0: 1.0, 1: weight}, **fit_options)

    return fit


def wider_model():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(9), keras.layers.Dense(2)])
