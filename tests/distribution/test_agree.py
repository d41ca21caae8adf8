"""What all workers must know alike."""

from distribution import strategies
from distribution.agree import Agreement
from tests.support import forked


def agreed():
    """What a worker hears, each value of its own."""
    strategy = strategies.make_strategy("multi_worker")
    own = strategies.worker_index(strategy)
    agreement = Agreement(strategy, strategies.workers(strategy), strategies.is_chief(strategy))
    return {
        "chief": agreement.is_chief,
        "total": agreement.total(own + 1),
        "one wishes": agreement.any_worker(own == 1),
        "none wishes": agreement.any_worker(False),
        "the chief's": agreement.broadcast_from_chief(100 + 10 * own),
        "alike": agreement.everyone_has(5),
        "0 and 2": agreement.everyone_has(2 * own),
        "2 and 3": agreement.everyone_has(2 + own),
    }


def test_what_two_workers_agree_on():
    chief, other = forked.run(agreed, workers=2, cpus=1)
    assert chief.pop("chief") and not other.pop("chief")
    assert chief == other
    expected = {"total": 3, "one wishes": True, "none wishes": False, "the chief's": 100}
    assert chief == expected | {"alike": True, "0 and 2": False, "2 and 3": False}
