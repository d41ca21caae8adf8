"""Tests `compile(steps_per_execution=...)`: it holds unless `--steps-per-execution` is given."""

import keras
import pytest

from callbacks import checkpoint
from tests.support import processes, tiny_recipe
from tests.support.refusals import refused
from training.errors import OptionsError, RunError

TOGETHER = {"steps_per_execution": 3}


def train(folder, extra=(), compiled=TOGETHER, build=tiny_recipe.build_model, **options):
    def arguments(options, rate):
        return tiny_recipe.compile_arguments(options, rate) | compiled

    options = tiny_recipe.Options(run_dir=folder, log_every=1, **options)
    return tiny_recipe.main(options, arguments=arguments, extra=list(extra), build=build)


def executions(folder):
    """The steps after which callbacks acted."""
    return [record["step"] for record in processes.records(folder, "step")]


@keras.saving.register_keras_serializable("tests")
class OwnStep(keras.Sequential):
    """Trains by a step that it overrides, which Keras then executes several times."""

    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize("chosen, each", [(None, 3), (1, 1), (9, 9)])
def test_the_option_takes_precedence(tmp_path, chosen, each):
    train(tmp_path / "run", steps_per_execution=chosen, epochs=1)
    assert executions(tmp_path / "run") == list(range(each, 10, each))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["run's step", "own step"])
def test_it_trains_and_resumes_as_single_steps(tmp_path, kind):
    def build(options):
        model = tiny_recipe.build_model(options)
        return model if kind == "run's step" else OwnStep(model.layers)

    whole = train(tmp_path / "single", compiled={}, build=build)
    together = train(tmp_path / "together", build=build)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", extra=[tiny_recipe.StopAfter(2)], checkpoint_every=3, build=build)
    assert checkpoint.newest(tmp_path / "run" / "checkpoints").step == 6
    resumed = train(tmp_path / "run", build=build)
    assert resumed["resumed_from_step"] == 6
    for name in ("weights_sha256", "history", "test"):
        assert whole[name] == together[name] == resumed[name]


@pytest.mark.parametrize(
    "compiled, options, error, part",
    [
        (4, {}, OptionsError, "model.compile(steps_per_execution=4): an epoch has 9 steps and the"),
        (
            3,
            {"max_steps": 11},
            OptionsError,
            "or override it with --steps-per-execution 1",
        ),
        ("auto", {}, RunError, "steps_per_execution='auto': expected a number of steps"),
        (0, {}, RunError, "steps_per_execution=0: expected a number of steps, at least 1"),
    ],
)
def test_what_cannot_be_executed_together(tmp_path, compiled, options, error, part):
    arguments = dict(arguments=lambda: {"steps_per_execution": compiled})
    assert part in refused(tmp_path, error, **arguments, **options)
