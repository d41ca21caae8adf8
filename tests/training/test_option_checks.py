"""Rejects options that do not fit the recipe, the devices or the steps."""

import json

import keras
import pytest

from tests.support import tiny_recipe
from tests.support.refusals import refused
from training import option_checks
from training.errors import OptionsError
from training.options import FineTuningOptions, SharedOptions
from training.plan import make_plan


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
            option_checks.refuse_pairs(SharedOptions(strategy=strategy, replicas=replicas, **more))

    def test_averages_of_weights_that_all_replicas_share(self, monkeypatch):
        """Also beside parameter servers that the launcher has started: the strategy is auto."""
        cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
        task = {"type": "chief", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
        with pytest.raises(OptionsError, match="^--ema: with parameter_server replicas share"):
            option_checks.refuse_pairs(FineTuningOptions(ema=0.9))
        monkeypatch.delenv("TF_CONFIG")
        with pytest.raises(OptionsError, match="^--ema: with central_storage replicas share"):
            option_checks.refuse_pairs(
                FineTuningOptions(ema=0.9, strategy="central_storage", replicas=2)
            )
        option_checks.refuse_pairs(FineTuningOptions(ema=0.9, strategy="mirrored", replicas=2))


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
            option_checks.refuse_executions_across_epochs(steps, plan)
        else:
            with pytest.raises(OptionsError, match=f"it must divide {divisor}$"):
                option_checks.refuse_executions_across_epochs(steps, plan)
            with pytest.raises(
                OptionsError, match=r"^model.compile\(steps_per_exec.*override it with"
            ):
                option_checks.refuse_executions_across_epochs(steps, plan, is_compiled=True)
