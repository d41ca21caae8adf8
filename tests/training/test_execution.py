"""Tests several steps per execution, XLA, and bfloat16."""

import json
import zipfile

import numpy as np
import pytest

from tests.support import processes, strategy_run


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains the tiny mnist run on one device, 18 steps in epochs of 9; returns its folder."""
    folder = tmp_path_factory.mktemp("execution")
    strategy_run.write_images(folder / "images")
    made = {}

    def run(**options):
        name = "-".join(["run", *map(str, options.values())])
        if name not in made:
            chosen = {"strategy": "none", "runs": ["mnist"], "max_steps": 18, "max_examples": 72}
            words = (json.dumps(chosen | options), str(folder / name))
            processes.run_script("tests/support/strategy_run.py", *words)
            made[name] = folder / name / "mnist"
        return made[name]

    return run


@pytest.mark.long
def test_several_steps_in_one_execution_train_the_same(train):
    one, three = train(precision="float32"), train(precision="float32", steps_per_execution=3)
    ours, theirs = processes.results(one), processes.results(three)
    for name in ("weights_sha256", "history", "test", "steps"):
        assert ours[name] == theirs[name], name
    # Callbacks act between executions: otherwise the option was ignored.
    assert [record["step"] for record in processes.records(one, "step")] == list(range(1, 19))
    assert [record["step"] for record in processes.records(three, "step")] == list(range(3, 19, 3))


@pytest.mark.long
def test_several_steps_in_one_execution_of_two_replicas(train):
    one = train(precision="float64")
    split = {"strategy": "mirrored", "replicas": 2, "jit": "on"}
    two = train(precision="float64", steps_per_execution=3, **split)
    processes.assert_equal_tensors(one, two)
    ours, theirs = processes.results(one), processes.results(two)
    assert theirs["replicas"] == 2
    for metric, value in ours["test"].items():
        assert theirs["test"][metric] == pytest.approx(value, rel=1e-9), metric
    assert theirs["history"]["val_accuracy"] == ours["history"]["val_accuracy"]


@pytest.mark.long
def test_xla_trains_the_same_but_for_rounding(train):
    plain, compiled = train(precision="float32"), train(precision="float32", jit="on")
    ours, theirs = processes.tensors(plain), processes.tensors(compiled)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert np.abs(value - theirs[name]).max() <= 1e-5 * max(1, np.abs(value).max()), name
    # XLA fuses, and rounds otherwise: otherwise the option was ignored.
    assert any((value != theirs[name]).any() for name, value in ours.items())


@pytest.mark.long
def test_bfloat16_computes_in_it_and_keeps_the_weights_in_float32(train):
    exact, half = train(precision="float32"), train(precision="mixed_bfloat16")
    ours, theirs = processes.tensors(exact), processes.tensors(half)
    assert {name: value.dtype for name, value in ours.items()} == {
        name: value.dtype for name, value in theirs.items()
    }
    with zipfile.ZipFile(half / "model" / "model.keras") as model:
        layers = json.loads(model.read("config.json"))["config"]["layers"]
    policies = [layer["config"]["dtype"] for layer in layers if "conv" in layer["config"]["name"]]
    assert [policy["config"]["name"] for policy in policies] == ["mixed_bfloat16"] * 2
    # It has 8 bits: the losses agree in two digits, and fall together.
    a, b = (
        np.array([record["loss"] for record in processes.records(run, "step")])
        for run in (exact, half)
    )
    assert (a != b).any()
    np.testing.assert_allclose(a, b, rtol=0.02)
    assert b[-3:].mean() < b[:3].mean()
