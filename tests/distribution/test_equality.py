"""The same numbers wherever it runs: every recipe, every synchronous strategy, float64.

A process per strategy and replica count, several recipes in it; each is compared with one device,
and one device with the custom training loop of the tutorials.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support import processes, strategy_run

ALL = list(strategy_run.RUNS)
PLAIN = [name for name in ALL if not name.endswith("_together")]
MIRRORED = {"strategy": "mirrored", "replicas": 2}
CENTRAL = {"strategy": "central_storage", "replicas": 2}
WORKERS = {"strategy": "multi_worker"}
# All of the rest in `make check-long`. Four replicas trace each function four times: minutes each.
QUICK = {
    "mirrored x 2": (1, MIRRORED, ["bert_together"]),
    "2 workers x 1": (2, WORKERS, ["mnist_together"]),
}
LONG = {
    f"{name}, the others": (workers, options, [run for run in ALL if run not in runs])
    for name, (workers, options, runs) in QUICK.items()
} | {
    "central storage x 2": (1, CENTRAL, ALL),
    "mirrored x 4": (1, MIRRORED | {"replicas": 4}, ALL),
    "2 workers x 2": (2, WORKERS | {"replicas": 2}, ALL),
}
SYNCHRONOUS = QUICK | LONG
# What the custom loop trains in `make test`; the other runs in `make check-long`.
QUICK_LOOPS = ["bert_together", "mnist_together"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("equality")
    strategy_run.write_data(folder)
    return folder


@pytest.fixture(scope="module")
def trained(folder, request):
    """The runs of each strategy that is asked for; two strategies train at the same time."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = [item.callspec.params["name"] for item in items if "name" in item.fixturenames]
    long = any(item.get_closest_marker("long") for item in items)
    compared = ALL if long else sum((runs for *_, runs in QUICK.values()), QUICK_LOOPS)
    runs = {}

    with ThreadPoolExecutor(2) as pool:

        def get(name):
            if name not in runs:
                runs[name] = pool.submit(train_under, name, folder, compared)
            return runs[name]

        for name in ("none", *SYNCHRONOUS):
            if name == "none" or name in asked:
                get(name)
        yield lambda name: get(name).result()


def train_under(name, folder, compared):
    """Returns the folder of the runs under a strategy; one device trains all that are compared."""
    one = (1, {"strategy": "none"}, [run for run in ALL if run in compared])
    workers, options, runs = SYNCHRONOUS.get(name, one)
    output = folder / name.replace(" ", "-")
    words = (json.dumps(options | {"runs": runs}), str(output))
    if workers == 1:
        processes.run_script("tests/support/strategy_run.py", *words)
    else:
        processes.launch(workers, "strategy_run", *words, logs=output)
    return output


@pytest.fixture(scope="module")
def one_device(trained):
    return trained("none")


def parameters(names, long):
    return [pytest.param(n, marks=[pytest.mark.long] if n in long else []) for n in names]


@pytest.mark.parametrize("name", parameters(SYNCHRONOUS, LONG))
def test_fit_is_equal_under_every_strategy(name, trained, one_device):
    workers, options, runs = SYNCHRONOUS[name]
    output = trained(name)
    for run in runs:
        processes.assert_equal_tensors(one_device / run, output / run)
        ours, theirs = processes.results(one_device / run), processes.results(output / run)
        assert theirs["replicas"] == workers * options.get("replicas", 1)
        assert ours["steps"] == theirs["steps"] == 20
        assert ours.get("test_by_class") == theirs.get("test_by_class")
        for group in ("history", "test"):
            assert ours[group].keys() == theirs[group].keys()
            for metric, value in ours[group].items():
                processes.assert_equal(
                    np.array(value), np.array(theirs[group][metric]), f"{run}: {metric}"
                )
        ours, theirs = processes.records(one_device / run), processes.records(output / run)
        assert [record["event"] for record in ours] == [record["event"] for record in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert ("loss" in a) == ("loss" in b)
            if "loss" in a:
                assert a["loss"] == pytest.approx(b["loss"], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("run", parameters(ALL, [run for run in ALL if run not in QUICK_LOOPS]))
def test_fit_is_equal_to_the_custom_loop(run, custom_loop, one_device):
    """An accumulated step is one batch in the custom loop; its clipping is TensorFlow's."""
    fitted, expected = (
        {name: value for name, value in found.items() if not name.startswith("optimizer/")}
        for found in (
            processes.tensors(one_device / run),
            processes.tensors_of(custom_loop / f"{run}.weights.h5"),
        )
    )
    assert fitted.keys() == expected.keys()
    for name, value in expected.items():
        processes.assert_equal(value, fitted[name], f"{run}: {name}")
    seen = np.load(custom_loop / f"{run}.npz")
    losses = [r["loss"] for r in processes.records(one_device / run) if r["event"] == "step"]
    np.testing.assert_allclose(losses, seen["losses"], rtol=1e-9)
    if run.endswith("_together"):
        assert (seen["norms"] > strategy_run.TOGETHER["clip_norm"]).any(), "nothing was clipped"


@pytest.fixture(scope="module")
def custom_loop(folder, one_device, request):
    """The folder of what the custom loop has trained on two replicas."""
    asked = [
        item.callspec.params["run"]
        for item in request.session.items
        if item.path == request.path and "custom_loop" in item.fixturenames
    ]
    output = folder / "custom-loop"
    processes.run_script("tests/support/oracle.py", ",".join(asked), str(output), "2")
    return output


@pytest.mark.long
@pytest.mark.parametrize("workers", [(2, 1), pytest.param((1, 2), marks=pytest.mark.long)])
def test_resumed_on_another_number_of_workers(workers, folder, one_device):
    """Stopped after step 7 of 20, in mid-epoch."""
    output = folder / f"workers-{workers[0]}-{workers[1]}"
    for count, more, status in zip(workers, ({"stop_after": 7}, {}), (75, 0), strict=True):
        options = ({"strategy": "none"} if count == 1 else WORKERS) | more
        words = (json.dumps(options | {"runs": ["mnist"]}), str(output))
        if count == 1:
            processes.run_script("tests/support/strategy_run.py", *words, status=status)
        else:
            logs = output.with_name(f"{output.name}-logs")
            processes.launch(count, "strategy_run", *words, logs=logs, status=status)
    results = processes.results(output / "mnist")
    assert results["resumed_from_step"] == 7 and results["workers"] == workers[1]
    processes.assert_equal_tensors(one_device / "mnist", output / "mnist")


@pytest.mark.long
def test_a_parameter_server_with_one_worker_is_equal_to_one_device(folder, one_device):
    """With one worker nothing is asynchronous: what differs with two is their not waiting."""
    output = folder / "parameter-server"
    options = json.dumps({"strategy": "parameter_server", "runs": PLAIN})
    words = ("strategy_run", options, str(output))
    processes.launch(1, *words, logs=output, options=("--ps", "1"))
    for run in PLAIN:
        processes.assert_equal_tensors(one_device / run, output / run)


@pytest.mark.long
def test_a_parameter_server_run_resumes_from_its_checkpoint(folder, one_device):
    """Stopped between two windows of steps; one worker, so that it must be equal to one device."""
    output = folder / "parameter-server-twice"
    for more, status in (({"stop_after": 10}, 75), ({}, 0)):
        options = {"strategy": "parameter_server", "runs": ["mnist"], "steps_per_execution": 5}
        words = ("strategy_run", json.dumps(options | more), str(output))
        processes.launch(1, *words, logs=output, options=("--ps", "1"), status=status)
    assert processes.results(output / "mnist")["resumed_from_step"] == 10
    processes.assert_equal_tensors(one_device / "mnist", output / "mnist")
