"""Whether what was written says what the Keras model says."""

import numpy as np

from training.errors import RunError

LOGITS = 1e-4  # largest difference of logits, for each unit of the largest one
PROBABILITIES = 1e-5


def largest_difference(expected: np.ndarray, found: np.ndarray) -> float:
    """The largest absolute difference; infinite where the shapes differ or one is not a number."""
    expected, found = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    if expected.shape != found.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(expected - found).max(initial=0.0))


def require_same_logits(what: str, expected: np.ndarray, found: np.ndarray) -> float:
    """Refuses logits (or other numbers) that differ by more than 1e-4 of the largest one.

    Args:
        what: the format, for the message.
        expected: what the Keras model gives.
        found: what the export gives.

    Returns:
        The largest difference.

    Raises:
        RunError: they differ.
    """
    limit = LOGITS * max(1.0, float(np.abs(expected).max(initial=0.0)))
    return require(what, largest_difference(expected, found), limit)


def require(what: str, difference: float, limit: float) -> float:
    """Refuses a difference above a limit; returns it.

    Raises:
        RunError: names what differs, by how much, and the limit.
    """
    if not difference <= limit:
        raise RunError(
            f"{what}: differs from the Keras model by {difference:.3g}, at most {limit:.3g} is "
            "expected; nothing is written"
        )
    return difference
