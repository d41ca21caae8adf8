import math

import pytest

from distribution.errors import DistributionError
from distribution.scaling import global_batch_size, make_plan, scaled_learning_rate

ARGUMENTS = dict(
    replicas=1,
    examples=1000,
    batch_size_per_replica=32,
    global_batch=None,
    accumulate_steps=1,
    base_learning_rate=0.001,
    lr_scaling="linear",
    epochs=3,
    max_steps=None,
)


def plan(**changes):
    return make_plan(**(ARGUMENTS | changes))


class TestGlobalBatch:
    def test_per_replica_times_replicas(self):
        assert [global_batch_size(n, 32, None) for n in (1, 2, 8)] == [32, 64, 256]

    def test_global_is_global(self):
        assert [global_batch_size(n, None, 32) for n in (1, 2, 8)] == [32, 32, 32]

    @pytest.mark.parametrize(
        "replicas, batch, fits", [(3, 32, "30 or 33"), (8, 4, "8"), (4, 6, "4 or 8")]
    )
    def test_what_cannot_be_shared_names_what_can(self, replicas, batch, fits):
        with pytest.raises(DistributionError) as caught:
            global_batch_size(replicas, None, batch)
        assert str(caught.value) == (
            f"--global-batch-size {batch} cannot be shared by {replicas} replicas: it must be a "
            f"multiple of {replicas}, for instance {fits}"
        )

    @pytest.mark.parametrize("sizes", [(None, None), (32, 64)])
    def test_one_of_both(self, sizes):
        with pytest.raises(DistributionError, match="give one of"):
            global_batch_size(2, *sizes)


def test_learning_rate():
    assert scaled_learning_rate(0.1, 4, "linear") == pytest.approx(0.4)
    assert scaled_learning_rate(0.1, 4, "sqrt") == pytest.approx(0.2)
    assert scaled_learning_rate(0.1, 2, "sqrt") == pytest.approx(0.1 * math.sqrt(2))
    assert scaled_learning_rate(0.1, 4, "none") == 0.1
    assert {scaled_learning_rate(0.1, 1, name) for name in ("linear", "sqrt", "none")} == {0.1}


class TestPlan:
    def test_one_replica(self):
        found = plan()
        assert (found.global_batch_size, found.learning_rate) == (32, 0.001)
        assert (found.steps_per_epoch, found.total_steps, found.epochs) == (31, 93, 3)

    def test_replicas_grow_the_batch_and_the_rate(self):
        found = plan(replicas=4)
        assert (found.batch_size_per_replica, found.global_batch_size) == (32, 128)
        assert found.learning_rate == pytest.approx(0.004)
        assert found.steps_per_epoch == 7

    def test_or_share_a_global_batch(self):
        found = plan(replicas=4, batch_size_per_replica=None, global_batch=32, lr_scaling="none")
        assert (found.batch_size_per_replica, found.global_batch_size) == (8, 32)
        assert (found.learning_rate, found.steps_per_epoch) == (0.001, 31)

    @pytest.mark.parametrize("max_steps, total, epochs", [(1, 1, 1), (31, 31, 1), (32, 32, 2)])
    def test_max_steps_may_end_it_in_mid_epoch(self, max_steps, total, epochs):
        found = plan(max_steps=max_steps)
        assert (found.total_steps, found.epochs, found.steps_per_epoch) == (total, epochs, 31)

    def test_max_steps_does_not_lengthen_it(self):
        assert plan(max_steps=10_000).total_steps == 93

    def test_accumulation_makes_steps_larger(self):
        found = plan(accumulate_steps=4)
        assert (found.global_batch_size, found.steps_per_epoch, found.total_steps) == (32, 7, 21)

    def test_too_few_examples(self):
        with pytest.raises(DistributionError) as caught:
            plan(examples=100, accumulate_steps=4)
        assert str(caught.value) == (
            "one step takes 128 examples (global batch 32 x 4 accumulated batches) and the "
            "training split has 100: take a smaller batch or more data"
        )
        assert plan(examples=32).steps_per_epoch == 1

    def test_going_on_with_other_replicas_keeps_the_trajectory(self):
        first = plan(replicas=2)
        resumed = plan(replicas=4, resumed=first.trajectory())
        assert resumed.batch_size_per_replica == 16
        assert resumed.trajectory() == first.trajectory() | {"replicas": 4}
        with pytest.raises(DistributionError, match="cannot be shared by 3 replicas"):
            plan(replicas=3, resumed=first.trajectory())

    def test_the_summary_is_what_results_hold(self):
        assert plan(replicas=2).summary() == {
            "global_batch_size": 64,
            "learning_rate": 0.002,
            "steps": 45,
            "epochs": 3,
        }
