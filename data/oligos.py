"""DNA oligos and their melting temperatures: drawn and computed, or read from a CSV file."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from data import files
from data.errors import DataError
from data.tables import read_table

NEAREST_NEIGHBOUR = "nearest-neighbour"

SHORTEST = 8  # bases
LONGEST = 60  # bases
BASES = "ACGT"  # token ids 1 to 4; 0 is padding

# Conditions of the drawn oligos' temperatures: both strands at the same concentration, in a buffer
# of sodium alone, by the salt correction of SantaLucia (1998), which is Biopython's method 5.
STRAND_NANOMOLAR = 25.0  # each of the two strands
SODIUM_MILLIMOLAR = 50.0
SALT_CORRECTION = 5

LEAST_GC = 0.2  # the GC share that an oligo is drawn with is uniform between these two
MOST_GC = 0.8

TEST_COUNT = 2_000
VALID_COUNT = 1_000

# A CSV's temperatures in degrees C: absolute zero, and a limit far above any melting of DNA.
LOWEST_TM = -273.15
HIGHEST_TM = 1_000.0


@dataclasses.dataclass(frozen=True)
class Oligos:
    """DNA oligos with their melting temperatures in three splits.

    Attributes:
        name: "nearest-neighbour" or the path that was given.
        splits: "train", "valid" and "test", each a pair of token ids, int32 of shape (n, 60) with
            1 to 4 for A, C, G, T and 0 for padding at the end, and melting temperatures in
            degrees C, float32 of shape (n,).
    """

    name: str
    splits: dict[str, tuple[np.ndarray, np.ndarray]]


def load_oligos(dataset: str, seed: int, count: int = 40_000) -> Oligos:
    """Loads or draws oligos of 8 to 60 bases.

    No duplex is in two splits: an oligo and its reverse complement count as the same one.

    Args:
        dataset: "nearest-neighbour", or the path of a CSV file whose header names `sequence` and
            `tm` (degrees C); other columns are ignored. A hash of the sequence sends about 80
            percent of a CSV to the training split and 10 to each of the others: rows may be added
            or moved without an oligo changing its split.
        seed: What the oligos are drawn from; a CSV needs none.
        count: Number of training oligos to draw; a CSV gives what it has. The test and validation
            oligos do not depend on it, and fewer training oligos are the first ones of more.

    Returns:
        The oligos. The same call gives the same arrays in the same order.

    Raises:
        DataError: The file is missing or not what it should be; the line is named.
    """
    if dataset == NEAREST_NEIGHBOUR:
        return Oligos(dataset, _draw_splits(seed, count))
    return Oligos(dataset, _read_splits(dataset))


def linear_baseline(splits: dict[str, tuple[np.ndarray, np.ndarray]]) -> float:
    """Returns the error of a linear fit on GC share and length.

    Args:
        splits: As in `Oligos.splits`.

    Returns:
        Root mean squared error in degrees C on the test split of the least-squares fit of the
        temperature on GC share, length and a constant over the training split.
    """

    def features(ids: np.ndarray) -> np.ndarray:
        lengths = (ids > 0).sum(axis=1)
        gc = ((ids == 2) | (ids == 3)).sum(axis=1) / lengths
        return np.stack([np.ones(len(ids)), gc, lengths], axis=1)

    return _least_squares_rmse(splits, features)


def nearest_neighbour_baseline(splits: dict[str, tuple[np.ndarray, np.ndarray]]) -> float:
    """Returns the error of a linear fit that knows the physics.

    A duplex is held together by its pairs of neighbouring bases, so nearly all of the melting
    temperature is in their counts. The 65 features of an oligo are

    - the counts of the 16 pairs of neighbours (AA, AC, ... TT), divided by the length in bases,
    - the same 16 numbers times 1 / length, and the same 16 times log(length),
    - the first base and the last base, each as 4 indicators, and these divided by the length,
    - a constant.

    Args and Returns as `linear_baseline`.
    """

    def features(ids: np.ndarray) -> np.ndarray:
        lengths = (ids > 0).sum(axis=1, keepdims=True)
        left, right = ids[:, :-1], ids[:, 1:]
        # 0 to 15 for AA to TT; 16 where the right one is padding.
        pairs = np.where(right > 0, 4 * (left - 1) + right - 1, 16)
        counts = np.stack([(pairs == pair).sum(axis=1) for pair in range(16)], axis=1) / lengths
        ends = [ids[:, :1], np.take_along_axis(ids, lengths - 1, axis=1)]
        return np.concatenate(
            [counts, counts / lengths, counts * np.log(lengths)]
            + [(end == np.arange(1, 5)) / scale for end in ends for scale in (1, lengths)]
            + [np.ones_like(lengths)],
            axis=1,
        )

    return _least_squares_rmse(splits, features)


def _least_squares_rmse(
    splits: dict[str, tuple[np.ndarray, np.ndarray]], features: Callable[[np.ndarray], np.ndarray]
) -> float:
    """Fits over the training split; returns the error on the test split in degrees C."""
    train_ids, train_tm = splits["train"]
    test_ids, test_tm = splits["test"]
    weights, *_ = np.linalg.lstsq(features(train_ids), train_tm.astype(np.float64), rcond=None)
    return float(np.sqrt(np.mean((features(test_ids) @ weights - test_tm) ** 2)))


def _draw_splits(seed: int, count: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Draws test, validation and training oligos, in this order, and labels them."""
    if count < 1:
        raise DataError(f"{count} training oligos asked for, expected at least 1")
    splits: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    drawn = _draw(seed)
    for split, size in (("test", TEST_COUNT), ("valid", VALID_COUNT), ("train", count)):
        sequences = [next(drawn) for _ in range(size)]
        splits[split] = _arrays(sequences, [_melting_temperature(s) for s in sequences])
    return {split: splits[split] for split in ("train", "valid", "test")}


def _draw(seed: int) -> Iterator[str]:
    """Yields different oligos without end: length and GC share uniform, bases independent."""
    rng = np.random.default_rng(seed)
    seen = set()
    while True:
        # Blocks of one size, so that the oligos do not depend on how many are wanted.
        lengths = rng.integers(SHORTEST, LONGEST, size=1024, endpoint=True)
        gc = rng.uniform(LEAST_GC, MOST_GC, size=(1024, 1))
        strong = rng.random((1024, LONGEST)) < gc
        second = rng.random((1024, LONGEST)) < 0.5
        letters = np.where(strong, np.where(second, "C", "G"), np.where(second, "A", "T"))
        for length, row in zip(lengths, letters, strict=True):
            sequence = "".join(row[:length])
            duplex = _duplex(sequence)
            # A self-complementary oligo has only one strand and its own formula: left out.
            if duplex in seen or sequence == _reverse_complement(sequence):
                continue
            seen.add(duplex)
            yield sequence


def _melting_temperature(sequence: str) -> float:
    """Degrees C, by nearest neighbours with the table of Allawi and SantaLucia (1997)."""
    from Bio.SeqUtils import MeltingTemp

    return MeltingTemp.Tm_NN(
        sequence,
        check=False,  # the letters are known to be right; the check is a third of the time
        nn_table=MeltingTemp.DNA_NN3,
        dnac1=STRAND_NANOMOLAR,
        dnac2=STRAND_NANOMOLAR,
        Na=SODIUM_MILLIMOLAR,
        saltcorr=SALT_CORRECTION,
    )


def _read_splits(dataset: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Reads a CSV and splits it by a hash of each duplex."""
    path = files.expand(dataset, "--dataset")
    if not path.is_file():
        raise DataError(
            f"dataset {dataset!r}: no such file; expected {NEAREST_NEIGHBOUR} or a CSV file with "
            "the columns sequence and tm"
        )
    rows: dict[str, list[tuple[str, float]]] = {"train": [], "valid": [], "test": []}
    for where, (text, tm) in read_table(path, ("sequence",), ("tm",)):
        sequence = checked(text, where)
        try:
            celsius = float(tm)
        except ValueError:
            celsius = math.nan
        if not LOWEST_TM <= celsius <= HIGHEST_TM:
            raise DataError(f"{where}: tm is {tm[:100]!r}, expected a temperature in degrees C")
        # Python's own hash of a string changes from process to process.
        digest = hashlib.sha256(_duplex(sequence).encode()).digest()
        tenth = int.from_bytes(digest[:8], "big") % 10
        rows[{8: "valid", 9: "test"}.get(tenth, "train")].append((sequence, celsius))
    empty = [split for split, pairs in rows.items() if not pairs]
    if empty:
        total = sum(map(len, rows.values()))
        raise DataError(
            f"{dataset}: too few rows: {total} leave nothing for {' and '.join(empty)}, expected "
            "enough for a split into 80, 10 and 10 percent"
        )
    return {
        split: _arrays([s for s, _ in pairs], [tm for _, tm in pairs])
        for split, pairs in rows.items()
    }


def checked(sequence: str, where: str) -> str:
    """Returns an oligo in upper case, without white space at its ends.

    Args:
        sequence: What a person wrote.
        where: What the message begins with.

    Raises:
        DataError: It has another letter than A, C, G, T, or fewer than 8 or more than 60 bases.
    """
    sequence = sequence.strip().upper()
    strange = [letter for letter in sequence if letter not in BASES]
    if strange:
        raise DataError(f"{where}: letter {strange[0]!r} in the sequence, expected A, C, G, T")
    if not SHORTEST <= len(sequence) <= LONGEST:
        raise DataError(f"{where}: {len(sequence)} bases, expected {SHORTEST} to {LONGEST}")
    return sequence


def encode(sequences: Sequence[str]) -> np.ndarray:
    """Returns token ids of oligos, int32 of shape (n, 60): 1 to 4 for A, C, G, T, 0 for padding."""
    ids = np.zeros((len(sequences), LONGEST), np.int32)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = [BASES.index(base) + 1 for base in sequence]
    return ids


def _arrays(sequences: list[str], temperatures: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return encode(sequences), np.asarray(temperatures, np.float32)


def _duplex(sequence: str) -> str:
    """Returns one name for both strands of a duplex: they melt as one."""
    return min(sequence, _reverse_complement(sequence))


def _reverse_complement(sequence: str) -> str:
    return sequence.translate(str.maketrans("ACGT", "TGCA"))[::-1]
