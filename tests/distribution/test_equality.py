"""The same numbers wherever it runs: every recipe, every synchronous strategy, float64.

A process per strategy and replica count, all recipes in it; each is compared with one device, and
one device with the custom training loop of the tutorials.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support import processes, strategy_run

PLAIN = [name for name in strategy_run.RUNS if not name.endswith("_together")]
# Each recipe once plain and once with everything together; the second text mode under mirrored.
EACH = [name for name in strategy_run.RUNS if name != "bert_lines"]
SYNCHRONOUS = {
    "mirrored x 2": (1, {"strategy": "mirrored", "replicas": 2}),
    "mirrored x 4": (1, {"strategy": "mirrored", "replicas": 4}),
    "central storage x 2": (1, {"strategy": "central_storage", "replicas": 2, "runs": EACH}),
    "2 workers x 1": (2, {"strategy": "multi_worker", "runs": EACH}),
    "2 workers x 2": (2, {"strategy": "multi_worker", "replicas": 2, "runs": EACH}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("equality")
    strategy_run.write_data(folder)
    return folder


@pytest.fixture(scope="module")
def trained(folder, request):
    """The runs of each strategy that is asked for; two strategies train at the same time."""
    asked = {"none"} | {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    runs = {}

    with ThreadPoolExecutor(2) as pool:

        def get(name):
            if name not in runs:
                runs[name] = pool.submit(train_under, name, folder)
            return runs[name]

        for name in ("none", *SYNCHRONOUS):
            if name in asked:
                get(name)
        yield lambda name: get(name).result()


def train_under(name, folder):
    """Returns the folder of the runs under a strategy."""
    workers, options = (1, {"strategy": "none"}) if name == "none" else SYNCHRONOUS[name]
    output = folder / name.replace(" ", "-")
    words = (json.dumps(options), str(output))
    if workers == 1:
        processes.run_script("tests/support/strategy_run.py", *words, timeout=900)
    else:
        processes.launch(workers, "strategy_run", *words, logs=output, timeout=900)
    return output


@pytest.fixture(scope="module")
def one_device(trained):
    return trained("none")


# Four replicas trace each function four times: minutes each.
LONG = ("mirrored x 4", "2 workers x 2")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in SYNCHRONOUS],
)
def test_fit_is_equal_under_every_strategy(name, trained, one_device):
    workers, options = SYNCHRONOUS[name]
    output = trained(name)
    for run in options.get("runs", strategy_run.RUNS):
        processes.assert_equal_tensors(one_device / run, output / run)
        ours, theirs = processes.results(one_device / run), processes.results(output / run)
        assert theirs["replicas"] == workers * options.get("replicas", 1)
        assert ours["steps"] == theirs["steps"] == 20
        for group in ("history", "test"):
            assert ours[group].keys() == theirs[group].keys()
            for metric, value in ours[group].items():
                processes.assert_equal(
                    np.array(value), np.array(theirs[group][metric]), f"{run}: {metric}"
                )
        ours, theirs = processes.records(one_device / run), processes.records(output / run)
        assert [record["event"] for record in ours] == [record["event"] for record in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-9, abs=1e-9)


@pytest.mark.long
def test_a_parameter_server_with_one_worker_is_equal_to_one_device(folder, one_device):
    """With one worker nothing is asynchronous: what differs with two is their not waiting."""
    output = folder / "parameter-server"
    options = json.dumps({"strategy": "parameter_server", "runs": PLAIN})
    words = ("strategy_run", options, str(output))
    processes.launch(1, *words, logs=output, options=("--ps", "1"), timeout=900)
    for run in PLAIN:
        processes.assert_equal_tensors(one_device / run, output / run)


def test_fit_is_equal_to_the_custom_loop(folder, one_device):
    processes.run_script(
        "tests/support/oracle.py", ",".join(PLAIN), str(folder / "oracle"), "2", timeout=600
    )
    for run in PLAIN:
        fitted = processes.tensors(one_device / run)
        fitted = [value for name, value in fitted.items() if "optimizer" not in name]
        with np.load(folder / "oracle" / f"{run}.npz") as oracle:
            names = [name for name in oracle.files if name != "losses"]
            for name in names:
                # Keras's file has other names: the tensor of this shape that is nearest.
                same = [value for value in fitted if value.shape == oracle[name].shape]
                nearest = min(same, key=lambda value: np.abs(value - oracle[name]).max())
                processes.assert_equal(oracle[name], nearest, f"{run}: {name}")
            losses = [
                r["loss"] for r in processes.records(one_device / run) if r["event"] == "step"
            ]
            assert len(losses) == 20
            np.testing.assert_allclose(losses, oracle["losses"], rtol=1e-9)


def test_saved_under_a_strategy_loaded_without_and_the_other_way_round(folder, trained, one_device):
    mirrored = trained("mirrored x 2")
    predicted = []
    for runs, replicas in ((one_device, 1), (mirrored, 1), (one_device, 2)):
        output = folder / f"predicted-{len(predicted)}.npz"
        processes.run_script("tests/support/predict_run.py", str(runs), str(replicas), str(output))
        predicted.append(dict(np.load(output)))
    for other in predicted[1:]:
        for run, value in predicted[0].items():
            processes.assert_equal(value, other[run], run)
