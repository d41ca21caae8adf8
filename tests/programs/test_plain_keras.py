"""Plain Keras programs give the same numbers wherever they run, dropout included, and resume."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support import processes, strategy_run

ALL = list(strategy_run.PROGRAMS)
SCRIPT = "tests/support/strategy_run.py"
MIRRORED = {"strategy": "mirrored", "replicas": 2}
STRATEGIES = {
    "mirrored x 2": (1, MIRRORED),
    "mirrored x 3": (1, MIRRORED | {"replicas": 3}),
    "central storage x 2": (1, {"strategy": "central_storage", "replicas": 2}),
    "2 workers": (2, {"strategy": "multi_worker"}),
    "accumulated": (1, {"strategy": "none", "accumulate_steps": 2, "global_batch_size": 6}),
}
# What `make test` trains, under the first strategy; all of the rest in `make check-long`.
QUICK = ("convnet",)
CASES = [
    pytest.param(
        strategy,
        program,
        marks=() if strategy == "mirrored x 2" and program in QUICK else pytest.mark.long,
    )
    for strategy in STRATEGIES
    for program in ALL
]
DROPS_OUT = ("convnet", "time_series", "kerasnlp_task")
NORMALISES = ("convnet", "time_series", "masked_normalised")


def train(name, folder, workers=1, status=0, **options):
    """Trains programs under a strategy, all of them by default; returns their folder."""
    output = folder / name.replace(" ", "-")
    words = (json.dumps({"runs": ALL} | options), str(output))
    if workers == 1:
        processes.run_script(SCRIPT, *words, status=status)
    else:
        processes.launch(workers, "strategy_run", *words, logs=output)
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def trained(folder, request):
    """Trains under each strategy that is asked for, two at a time."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params for item in items if hasattr(item, "callspec")]
    names = {params.get("strategy") for params in asked}
    # A test that resumes after a kill compares with all of them.
    every = any("program" not in params for params in asked)
    chosen = dict(runs=[p for p in ALL if every or p in {params["program"] for params in asked}])
    with ThreadPoolExecutor(2) as pool:
        runs = {"none": pool.submit(train, "none", folder, strategy="none", **chosen)}
        for name, (workers, options) in STRATEGIES.items():
            if name in names:
                runs[name] = pool.submit(train, name, folder, workers, **options, **chosen)
        yield lambda name: runs[name].result()


@pytest.mark.parametrize(("strategy", "program"), CASES)
def test_it_is_equal_under_every_strategy(strategy, program, trained):
    if strategy == "accumulated" and program in (*DROPS_OUT, *NORMALISES):
        pytest.skip("each of the accumulated batches is normalised and drawn for by itself")
    one, other = trained("none") / program, trained(strategy) / program
    processes.assert_equal_tensors(one, other)
    ours, theirs = processes.results(one), processes.results(other)
    assert theirs["steps"] == ours["steps"] == 5
    for group in ("history", "test"):
        assert ours[group].keys() == theirs[group].keys()
        for metric, value in ours[group].items():
            theirs_too = np.array(theirs[group][metric])
            processes.assert_equal(np.array(value), theirs_too, f"{program}: {metric}")


@pytest.mark.long
def test_two_losses_are_equal_when_xla_compiles_them(folder):
    named = dict(jit="on", runs=["two_outputs"])
    one = train("compiled", folder, strategy="none", **named)
    two = train("compiled x 2", folder, **MIRRORED, **named)
    processes.assert_equal_tensors(one / "two_outputs", two / "two_outputs")


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["none", "mirrored x 2"])
def test_it_resumes_bit_for_bit_after_a_kill(strategy, trained, folder):
    """Killed after step 3, in mid-epoch; the checkpoint is that of step 2."""
    _, options = STRATEGIES.get(strategy, (1, {"strategy": "none"}))
    whole, name = trained(strategy), f"{strategy} killed"
    for program in ALL:
        train(name, folder, **options, runs=[program], kill_after=3, status=-9)
        output = train(name, folder, **options, runs=[program])
        results = processes.results(output / program)
        assert results["resumed_from_step"] == 2
        assert results["weights_sha256"] == processes.results(whole / program)["weights_sha256"], (
            program
        )
