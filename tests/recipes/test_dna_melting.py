import json
import math
from pathlib import Path

import keras
import numpy as np
import pytest

from data import melting
from recipes import dna_melting
from tests.support.strategy_run import write_molecules

TINY = dict(
    strategy="none",
    num_layers=1,
    num_heads=2,
    hidden_dim=8,
    dropout=0.0,
    max_examples=64,
    epochs=2,
    global_batch_size=16,
    base_learning_rate=0.01,
    warmup_steps=5,
    log_every=1,
    quiet=True,
)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("molecules") / "molecules.csv"
    write_molecules(path, 200)
    return path


@pytest.fixture(scope="module")
def run(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dna") / "run"
    options = TINY | dict(dataset=str(table), run_dir=folder)
    return folder, dna_melting.main(dna_melting.Options(**options))


@pytest.fixture(scope="module")
def molecules(table):
    return melting.load_melting(str(table), Path(), seed=0, count=1)


def errors(model, molecules, width=melting.LONGEST):
    """Mean absolute and root mean squared error, by hand."""
    found = keras.ops.convert_to_numpy(model(melting.encode(molecules, width), training=False))
    miss = found[:, 0].astype(np.float64) - melting.temperatures(molecules)[:, 0]
    return np.abs(miss).mean(), np.sqrt((miss**2).mean())


def test_results(run, molecules):
    folder, results = run
    assert results["steps"] == 8 and results["learning_rate"] == 0.01
    assert set(results["test"]) == {"mae", "rmse", "r2"}
    assert results["baseline"]["nearest_neighbour_mae"] < results["baseline"]["mean_mae"]
    assert json.loads((folder / "results.json").read_text())["test"] == results["test"]
    assert sum(len(part) for part in molecules.values()) == 200
    tm = melting.temperatures(molecules["test"])
    r2 = 1 - results["test"]["rmse"] ** 2 / tm.var(dtype=np.float64)
    assert results["test"]["r2"] == pytest.approx(r2, rel=1e-9)


def test_each_dataset_of_the_test_split_has_its_errors(run, molecules):
    folder, results = run
    model = keras.saving.load_model(folder / "model" / "model.keras", compile=False)
    assert set(results["test_by_dataset"]) == {"duplexes", "hairpins"}
    for name, found in results["test_by_dataset"].items():
        part = [m for m in molecules["test"] if m.dataset == name]
        mae, rmse = errors(model, part)
        assert len(part) % 16 and found["mae"] == pytest.approx(mae, rel=1e-5)
        assert found["rmse"] == pytest.approx(rmse, rel=1e-5)


def test_padding_changes_no_answer(molecules):
    model = dna_melting.build_model(dna_melting.Options(**TINY), 60.0, 15.0)
    several = molecules["test"][:5]
    assert len({len(melting.columns(m)) for m in several}) > 1
    longest = max(len(melting.columns(m)) for m in several)
    assert errors(model, several) == pytest.approx(errors(model, several, longest), rel=1e-5)


@pytest.mark.parametrize("change", ["sodium", "strand_concentration", "sequence"])
def test_every_input_has_an_effect(change):
    model = dna_melting.build_model(dna_melting.Options(**TINY), 60.0, 15.0)
    duplex = melting.plain_duplex("ACGTACGT", 0.05, 1e-6)
    other = {
        "sodium": melting.plain_duplex("ACGTACGT", 0.5, 1e-6),
        "strand_concentration": melting.plain_duplex("ACGTACGT", 0.05, 1e-5),
        "sequence": melting.plain_duplex("ACGTACGA", 0.05, 1e-6),
    }[change]
    one, two = model(melting.encode([duplex, other]), training=False)
    assert not math.isclose(float(one[0]), float(two[0]), rel_tol=1e-6)
