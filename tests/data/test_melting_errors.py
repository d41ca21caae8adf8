import dataclasses
from pathlib import Path

import numpy as np
import pytest

from data import melting, melting_errors
from tests.support.strategy_run import write_molecules


def test_a_kind_of_few_molecules_has_no_uncertainty():
    few, many = (melting.plain_duplex("ACGT" * n, 0.1, 1e-6) for n in (2, 3))
    mismatched = dataclasses.replace(few, sequence="ACGTACGT+ACGAACGT")
    others = [
        melting.plain_duplex("ACGTTGCA" + 2 * a + b, 0.1, 1e-6) for a in "ACG" for b in "ACGT"
    ]
    others = others[: melting_errors.FEWEST]
    # Under nine conditions it is one sequence.
    made = [mismatched] * (melting_errors.FEWEST - 1) + [few] * 9 + others[1:]
    missed = np.array([50.0] * (melting_errors.FEWEST - 1) + [2.5] * 9 + [*range(1, 10)])[:, None]
    assert melting_errors.plus_minus(made, missed) == {"perfect duplex": 7.0}
    assert melting_errors.plus_minus([mismatched] * 50, np.ones((50, 1))) == {}
    computed = [dataclasses.replace(each, dataset=melting.FORMULA) for each in others]
    assert melting_errors.plus_minus(computed, np.ones((len(others), 1))) == {}


@pytest.mark.parametrize("count", [1, 7])
def test_equal_temperatures_have_no_r2(count):
    """The variance of equal numbers is not always zero: sums are rounded."""
    equal = np.full((count, 1), 47.859, np.float32)
    missed = np.full_like(equal, -3.0)
    assert melting_errors.errors(missed, equal) == {"mae": 3.0, "rmse": 3.0}
    different = np.concatenate([equal, equal + 6])
    found = melting_errors.errors(np.concatenate([missed, missed]), different)
    assert found["r2"] == pytest.approx(0, abs=1e-6)


def test_molecules_of_no_named_dataset_are_no_dataset(tmp_path):
    table = tmp_path / "molecules.csv"
    write_molecules(table, 200)
    named = melting.load_melting(str(table), Path(), seed=0, count=1)["test"]
    unnamed = [dataclasses.replace(molecule, dataset="") for molecule in named]
    several = [*unnamed, *named]
    missed = np.ones((len(several), 1))
    assert set(melting_errors.errors_by_dataset(several, missed)) == {"duplexes", "hairpins"}
    assert melting_errors.errors_by_dataset(unnamed, missed[: len(unnamed)]) == {}
