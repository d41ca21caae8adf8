import math

import numpy as np
import pytest

from training.errors import OptionsError
from training.options import EvaluationRequest, TransformerOptions
from training.plan import make_plan


def plan(
    replicas=1,
    examples=1000,
    planned=None,
    resumed=None,
    steps_done=0,
    default_warmup=None,
    evaluation=None,
    **options,
):
    options = TransformerOptions(**({"epochs": 3} | options))
    options.evaluation = evaluation
    return make_plan(
        options,
        replicas=replicas,
        planned_replicas=planned,
        examples=examples,
        batch_size_per_replica=32,
        base_learning_rate=0.1,
        warmup_steps=default_warmup,
        steps_done=steps_done,
        resumed=resumed,
    )


class TestGlobalBatch:
    def test_per_replica_times_replicas(self):
        assert [plan(n).global_batch_size for n in (1, 2, 8)] == [32, 64, 256]
        assert plan(2, batch_size_per_replica=10).global_batch_size == 20

    def test_global_is_global(self):
        found = [plan(n, global_batch_size=32) for n in (1, 2, 8)]
        assert [each.global_batch_size for each in found] == [32, 32, 32]
        assert [each.batch_size_per_replica for each in found] == [32, 16, 4]

    @pytest.mark.parametrize("replicas, batch", [(3, 32), (8, 4)])
    def test_what_cannot_be_shared(self, replicas, batch):
        with pytest.raises(
            OptionsError, match=f"it must be a multiple of {replicas}, for instance "
        ):
            plan(replicas, global_batch_size=batch)


@pytest.mark.parametrize(
    "scaling, factors", [("linear", (1, 4)), ("sqrt", (1, 2)), ("none", (1, 1))]
)
def test_learning_rate(scaling, factors):
    rates = [plan(n, lr_scaling=scaling).learning_rate for n in (1, 4)]
    assert rates == pytest.approx([0.1 * factor for factor in factors])
    assert rates[0].dtype == np.float64  # not rounded to float32
    assert plan(2, lr_scaling="sqrt", base_learning_rate=0.5).learning_rate == 0.5 * math.sqrt(2)


class TestSomeReplicasAreAway:
    def test_batch_and_rate_are_those_of_all(self):
        found, all_here = plan(replicas=2, planned=4), plan(replicas=4)
        assert found.fixed() == all_here.fixed()
        assert found.batches == all_here.batches
        assert (found.replicas, found.batch_size_per_replica) == (2, 64)

    def test_those_who_are_here_must_be_able_to_share_it(self):
        with pytest.raises(OptionsError, match="128 cannot be shared by 3 replicas"):
            plan(replicas=3, planned=4)


class TestPlan:
    @pytest.mark.parametrize("max_steps, total, epochs", [(None, 93, 3), (31, 31, 1), (32, 32, 2)])
    def test_max_steps_may_end_it_in_mid_epoch(self, max_steps, total, epochs):
        found = plan(max_steps=max_steps)
        assert (found.total_steps, found.epochs, found.steps_per_epoch) == (total, epochs, 31)

    def test_accumulation_makes_steps_larger(self):
        found = plan(accumulate_steps=4)
        assert (found.global_batch_size, found.steps_per_epoch, found.total_steps) == (32, 7, 21)

    def test_the_batches_of_a_step_are_counted_by_the_pipeline(self):
        assert plan().batches == {"batch_size": 32, "batches_per_epoch": 31, "first_batch": 0}
        found = plan(accumulate_steps=4, steps_done=9).batches
        assert found == {"batch_size": 32, "batches_per_epoch": 28, "first_batch": 36}

    def test_the_recipes_warm_up_is_at_most_a_tenth(self):
        found = [plan(default_warmup=steps).warmup_steps for steps in (None, 0, 5, 200)]
        assert found == [0, 0, 5, 9]

    def test_a_warm_up_that_was_asked_for_is_used_or_refused(self):
        for steps in (0, 5, 50, 92):
            assert plan(default_warmup=5, warmup_steps=steps).warmup_steps == steps
        expected = "--warmup-steps 93: must be less than the 93 steps of the run"
        with pytest.raises(OptionsError, match=expected):
            plan(default_warmup=5, warmup_steps=93)
        # Nothing is trained on the data of an evaluation, which may be few.
        few = plan(default_warmup=5, warmup_steps=93, evaluation=EvaluationRequest(None))
        assert few.warmup_steps == 92  # Keras refuses a schedule of no steps

    def test_no_epochs_are_no_steps(self):
        found = plan(epochs=0, default_warmup=5, warmup_steps=5, lr_schedule="wsd")
        assert (found.total_steps, found.epochs, found.warmup_steps) == (0, 0, 0)
        assert found.steps_per_epoch == 31

    def test_a_decay_at_the_end_is_a_fifth_by_default_and_fits_or_is_refused(self):
        assert plan().lr_decay_steps == 19
        warm = dict(default_warmup=5, warmup_steps=80, lr_schedule="wsd")
        assert plan(**warm).lr_decay_steps == 13
        assert plan(**warm, lr_decay_steps=13).lr_decay_steps == 13
        expected = "--lr-decay-steps 14: must be at most the 13 steps after the warm-up"
        with pytest.raises(OptionsError, match=expected):
            plan(**warm, lr_decay_steps=14)
        few = plan(**warm, lr_decay_steps=14, evaluation=EvaluationRequest(None))
        assert few.lr_decay_steps == 13

    def test_too_few_examples(self):
        with pytest.raises(OptionsError, match="one step takes 128 .* has 100: use"):
            plan(examples=100, accumulate_steps=4)
        assert plan(examples=32).steps_per_epoch == 1

    def test_resumed_on_other_replicas_it_trains_the_same(self):
        first = plan(replicas=2)
        resumed = plan(replicas=4, resumed=first.fixed())
        assert resumed.batch_size_per_replica == 16
        assert resumed.fixed() == first.fixed()
        with pytest.raises(OptionsError, match="cannot be shared by 3 replicas"):
            plan(replicas=3, resumed=first.fixed())
