"""Errors of predicted melting temperatures: their size, spread and limits, by kind and dataset."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from data import melting

# Share of molecules whose error is at most `plus_minus`, as within one standard deviation; and the
# fewest validation sequences of a kind to estimate it from.
WITHIN = 0.68
FEWEST = 10
# Conditions as those of training molecules, within these factors: what salt does is learned, what
# the concentration does is known.
LIKE_SODIUM = 1.5
LIKE_STRANDS = 10


def plus_minus(molecules: Sequence[melting.Molecule], missed: np.ndarray) -> dict[str, float]:
    """Returns how far predictions are off in 68% of all molecules, by their kind.

    It is a quantile of the errors on molecules that the model was not trained on, which holds for
    any distribution of errors (split conformal prediction: Lei et al., arXiv 1604.04173, section
    2.2): the k-th smallest of n, with k = ceil(0.68 (n + 1)). The n are sequences: molecules of one
    sequence, under several conditions, count as much as one together. Where the same molecules
    chose the weights, as with `--early-stopping`, it tends to be too small.

    Args:
        molecules: those of the validation split. The formula's do not count: its temperatures are
            computed, and their errors say nothing about measured ones.
        missed: predicted minus measured temperature of each, of shape (n, 1).

    Returns:
        Degrees C by `Molecule.kind`; without the kinds with fewer than `FEWEST` sequences.
    """
    quantiles = {}
    is_measured = np.array([molecule.dataset != melting.FORMULA for molecule in molecules])
    kinds = np.array([molecule.kind for molecule in molecules])
    groups = np.array([molecule.group for molecule in molecules])
    for kind in np.unique(kinds[is_measured]).tolist():
        errors = np.abs(missed[(kinds == kind) & is_measured, 0])
        _, sequence, molecules_of = np.unique(
            groups[(kinds == kind) & is_measured], return_inverse=True, return_counts=True
        )
        if len(molecules_of) >= FEWEST:
            order = np.argsort(errors)
            share = np.cumsum(1 / molecules_of[sequence][order])
            needed = math.ceil(WITHIN * (len(molecules_of) + 1))
            quantiles[kind] = float(errors[order][np.searchsorted(share, needed - 1e-9)])
    return quantiles


def share_within(
    spread: dict[str, float], molecules: Sequence[melting.Molecule], missed: np.ndarray
) -> dict[str, float]:
    """Returns the share of molecules whose error is at most the `plus_minus()` of their kind.

    Near 0.68 where the molecules are like those of the validation split.
    """
    kinds = np.array([molecule.kind for molecule in molecules])
    return {
        kind: float(np.mean(np.abs(missed[kinds == kind, 0]) <= most))
        for kind, most in spread.items()
        if kind in kinds
    }


def ranges(molecules: Sequence[melting.Molecule], columns: np.ndarray) -> dict[str, Any]:
    """Returns what a model learned from, for `outside()`.

    Args:
        molecules: n of them.
        columns: their ids, of `melting.encode()`, of shape (n, width).

    Returns:
        "column_ids", a sorted list; and "kinds", by `Molecule.kind` the smallest and the largest
        "columns" (their number), "sodium" and "strand_concentration" (mol/l).
    """
    kinds: dict[str, dict[str, list]] = {}
    for molecule, length in zip(molecules, np.count_nonzero(columns, axis=1), strict=True):
        values = values_of(molecule, int(length))
        seen = kinds.setdefault(
            molecule.kind, {name: [value] * 2 for name, value in values.items()}
        )
        for name, value in values.items():
            seen[name] = [min(seen[name][0], value), max(seen[name][1], value)]
    ids = set(np.unique(columns).tolist()) - {0}
    # Read from the other end, two bases change places.
    ids |= {melting.column_id(right, left, kind) for left, right, kind in map(melting.column, ids)}
    return {"column_ids": sorted(ids), "kinds": kinds}


def values_of(molecule: melting.Molecule, length: int) -> dict[str, float]:
    """Returns the values of a molecule of so many columns whose range `ranges()` has."""
    values = {"columns": length, "sodium": molecule.sodium}
    if molecule.is_duplex:
        values["strand_concentration"] = molecule.strand_concentration
    return values


def outside(molecule: melting.Molecule, trained_on: dict[str, Any]) -> str | None:
    """Returns in what a molecule differs from all that a model learned from, or None.

    Args:
        molecule: is described.
        trained_on: of `ranges()`.
    """
    if molecule.kind not in trained_on["kinds"]:
        return f"no {molecule.kind} was in training"
    seen, columns = set(trained_on["column_ids"]), melting.columns(molecule)
    for column in columns:
        if melting.column_id(*column) not in seen:
            what = ("pair", "mismatch or bulge", "loop", "end")[column[2]]
            return f"a {what} of {column[0]} and {column[1]} was not in training"
    factors = {"columns": 1, "sodium": LIKE_SODIUM, "strand_concentration": LIKE_STRANDS}
    units = {
        "columns": "positions",
        "sodium": "mol/l sodium",
        "strand_concentration": "mol/l strands",
    }
    for name, value in values_of(molecule, len(columns)).items():
        lowest, highest = trained_on["kinds"][molecule.kind][name]
        # Half a percent for what was rounded on its way through a text.
        if not lowest / factors[name] / 1.005 <= value <= highest * factors[name] * 1.005:
            either = f"{lowest:g}" if lowest == highest else f"{lowest:g} to {highest:g}"
            return f"{value:g} {units[name]}, outside the training range ({either})"
    return None


def errors(missed: np.ndarray, tm: np.ndarray) -> dict[str, float]:
    """Returns mae and rmse in degrees C, and r2, the share of the variance that is explained.

    Without r2 where it is undefined: equal temperatures have no variance.

    Args:
        missed: predicted minus measured temperatures, of shape (n, 1).
        tm: measured temperatures, of shape (n, 1).
    """
    missed = missed.astype(np.float64)
    found = {"mae": float(np.mean(np.abs(missed))), "rmse": float(np.sqrt(np.mean(missed**2)))}
    if np.ptp(tm) == 0:
        return found
    return found | {"r2": 1 - found["rmse"] ** 2 / float(np.var(tm, dtype=np.float64))}


def worst_first(molecules: Sequence[melting.Molecule], missed: np.ndarray) -> list[list]:
    """Returns the rows of `recipes.evaluate --examples`, a header first; the largest error first.

    Args:
        molecules: those of the test split.
        missed: predicted minus measured temperature of each, of shape (n, 1).
    """
    names = ["sequence", "structure", "sodium", "strand_concentration", "dataset", "id", "tm"]
    rows = [
        [
            *(getattr(molecules[index], name) for name in names),
            molecules[index].tm + missed[index, 0],
        ]
        for index in np.argsort(-np.abs(missed[:, 0]), kind="stable")
    ]
    return [[*names, "predicted"], *rows]


def error_beside_formula(
    molecules: Sequence[melting.Molecule], missed: np.ndarray
) -> dict[str, float]:
    """Returns the error on the molecules of which the formula's is a baseline, or {} without any.

    Args:
        molecules: those of the test split.
        missed: predicted minus measured temperature of each, of shape (n, 1).
    """
    has_formula = np.isfinite(melting.formula_errors(molecules))
    if not has_formula.any():
        return {}
    return {"perfect_duplex_mae": float(np.mean(np.abs(missed[has_formula], dtype=np.float64)))}


def errors_by_dataset(
    molecules: Sequence[melting.Molecule], missed: np.ndarray
) -> dict[str, dict[str, float]]:
    """Returns the number of molecules and the `errors()` of each dataset of a split, by its name.

    Args:
        molecules: those of the split; those whose dataset has no name are left out.
        missed: predicted minus measured temperature of each, of shape (n, 1).
    """
    names = np.array([molecule.dataset for molecule in molecules])
    tm = melting.temperatures(molecules)
    return {
        name: {"molecules": int((names == name).sum())}
        | errors(missed[names == name], tm[names == name])
        for name in sorted(set(names.tolist()) - {""})
    }
