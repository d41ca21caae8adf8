import hashlib
import random

import numpy as np
import pytest

from data import oligos
from data.errors import DataError
from data.oligos import linear_baseline, load_oligos, nearest_neighbour_baseline

# From Biopython 1.88: nn_table=DNA_NN3, dnac1=25, dnac2=25, Na=50, saltcorr=5.
BIOPYTHON = {
    "AACGAACG": 12.8721,
    "TTCGATTGCC": 24.6173,
    "GGCAATCGAA": 24.6173,  # the other strand
    "ACGTTGCAAGGCTA": 42.2416,
    "GGGGCCCCGGGGCCCCAAGG": 68.31,
    "ATATTTAACCATTAATTTACAATTTTAAACATTT": 49.0762,
    "ACCGGTTACGATGCATTTGCAGGACCATTGACCGTAAGCTTGGAACCTTGCAGTCCATGA": 73.7038,
}


@pytest.fixture
def small(monkeypatch):
    """Test and validation splits that are labelled at once."""
    monkeypatch.setattr(oligos, "TEST_COUNT", 40)
    monkeypatch.setattr(oligos, "VALID_COUNT", 20)


def other_strand(sequence):
    """The reverse complement, written without the code that is tested."""
    partner = {"A": "T", "C": "G", "G": "C", "T": "A"}
    return "".join(partner[base] for base in reversed(sequence))


def letters(row):
    return "".join(" ACGT"[token] for token in row if token)


def assert_promise(loaded):
    assert list(loaded.splits) == ["train", "valid", "test"]
    for ids, tm in loaded.splits.values():
        assert ids.dtype == np.int32 and ids.shape == (len(tm), 60)
        assert tm.dtype == np.float32 and tm.ndim == 1 and np.isfinite(tm).all()
        lengths = (ids > 0).sum(axis=1)
        assert lengths.min() >= 8 and ids.max() <= 4
        # Padding stands at the end only.
        np.testing.assert_array_equal(ids > 0, np.arange(60) < lengths[:, np.newaxis])


def rows_csv(count, seed=0):
    """Lines of different random oligos."""
    rng = random.Random(seed)
    found = {"".join(rng.choices("ACGT", k=rng.randint(8, 60))) for _ in range(count)}
    return [f"{sequence},{20 + len(sequence)}" for sequence in sorted(found)]


def write(tmp_path, *lines):
    path = tmp_path / "oligos.csv"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def error_message(path):
    """The message of loading a file, which has to be a single line."""
    with pytest.raises(DataError) as caught:
        load_oligos(str(path), seed=0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_drawn(small):
    loaded = load_oligos("nearest-neighbour", seed=1, count=500)
    assert_promise(loaded)
    assert loaded.name == "nearest-neighbour"
    assert [len(tm) for _, tm in loaded.splits.values()] == [500, 20, 40]
    lengths = (loaded.splits["train"][0] > 0).sum(axis=1)
    assert lengths.min() == 8 and lengths.max() == 60


@pytest.mark.parametrize(("sequence", "celsius"), BIOPYTHON.items())
def test_melting_temperature_is_that_of_biopython(sequence, celsius):
    assert oligos._melting_temperature(sequence) == pytest.approx(celsius, abs=1e-4)


def test_first_drawn():
    """The draw is the same for ever, and each temperature stands beside its own oligo."""
    splits = load_oligos("nearest-neighbour", seed=1, count=2).splits
    found = {
        split: [(letters(ids[row]), round(float(tm[row]), 3)) for row in (0, 1)]
        for split, (ids, tm) in splits.items()
    }
    assert found == {
        "train": [("TTCTTGAGGCGTATCATC", 45.772), ("CCACGCGTTTAAGGTGCCACGGTAAAATT", 62.280)],
        "valid": [
            ("GCAGCCACAAGGGCGTCGAGGAACAT", 65.103),
            ("GTGCCTATACGAAATATCGGTCGGGACACAGGACCATCTACGGC", 69.385),
        ],
        "test": [
            ("GCTCGTGGGCGTCCGGGCGGTGCTTGCATAGAG", 72.589),
            ("CCACGTATCTATCGTCAATGGGGACGCATGTCATA", 63.919),
        ],
    }


def test_reverse_complement():
    assert oligos._reverse_complement("AACG") == "CGTT"
    assert oligos._reverse_complement("TTCGATTGCC") == "GGCAATCGAA"
    assert oligos._reverse_complement("GAATTC") == "GAATTC"


def test_duplex():
    assert oligos._duplex("AACG") == oligos._duplex("CGTT") == "AACG"
    # Read backwards, or with each base exchanged in place, it is another duplex.
    assert len({oligos._duplex(s) for s in ("AACG", "GCAA", "TTGC", "AACC")}) == 3


def test_token_ids():
    ids, tm = oligos._arrays(["ACGTTGCA", "TTTTGGGGC"], [1.5, 2.0])
    assert ids[0].tolist() == [1, 2, 3, 4, 4, 3, 2, 1] + 52 * [0]
    assert ids[1].tolist() == [4, 4, 4, 4, 3, 3, 3, 3, 2] + 51 * [0]
    assert tm.tolist() == [1.5, 2.0]


def test_no_duplex_twice(small, monkeypatch):
    # Short oligos only, so that duplicates would be many.
    monkeypatch.setattr(oligos, "LONGEST", 8)
    loaded = load_oligos("nearest-neighbour", seed=1, count=3000)
    sequences = [letters(row) for ids, _ in loaded.splits.values() for row in ids]
    both_strands = set(sequences) | set(map(other_strand, sequences))
    assert len(sequences) == 3060
    # Twice as many: no oligo is drawn twice, none is another's other strand or its own.
    assert len(both_strands) == 6120


def test_drawn_from_the_seed_alone(small):
    few = load_oligos("nearest-neighbour", seed=1, count=100)
    many = load_oligos("nearest-neighbour", seed=1, count=2000)
    other = load_oligos("nearest-neighbour", seed=2, count=100)
    np.testing.assert_array_equal(few.splits["test"][0], many.splits["test"][0])
    np.testing.assert_array_equal(few.splits["valid"][1], many.splits["valid"][1])
    np.testing.assert_array_equal(few.splits["train"][0], many.splits["train"][0][:100])
    assert (few.splits["test"][0] != other.splits["test"][0]).any()


def test_held_out_by_deerror_message():
    assert oligos.TEST_COUNT == 2000 and oligos.VALID_COUNT == 1000


def test_count_of_nothing():
    with pytest.raises(DataError, match="0 training oligos asked for, expected at least 1"):
        load_oligos("nearest-neighbour", seed=0, count=0)


def test_linear_baseline_is_least_squares():
    def split(count, seed, noise):
        rng = np.random.default_rng(seed)
        ids = np.zeros((count, 60), np.int32)
        for row in ids:
            length = rng.integers(8, 61)
            row[:length] = rng.integers(1, 5, length)
        lengths = (ids > 0).sum(axis=1)
        gc = np.isin(ids, (2, 3)).sum(axis=1) / lengths
        tm = 20 + 40 * gc + 0.5 * lengths + noise * np.resize([1, -1], count)
        return ids, tm.astype(np.float32)

    # What is linear is found; what is not stays as the error.
    splits = {"train": split(200, 0, 0), "test": split(100, 1, 0)}
    assert linear_baseline(splits) == pytest.approx(0, abs=1e-4)
    splits["test"] = split(100, 1, 3)
    assert linear_baseline(splits) == pytest.approx(3, abs=1e-4)


def test_nearest_neighbour_baseline_is_least_squares():
    per_pair = {a + b: 3 * i - j * j for i, a in enumerate("ACGT") for j, b in enumerate("ACGT")}
    at_end = {"A": 1.0, "C": -2.0, "G": 4.0, "T": 0.5}

    def split(count, seed, noise):
        rng = random.Random(seed)
        sequences = ["".join(rng.choices("ACGT", k=rng.randint(8, 60))) for _ in range(count)]
        tm = []
        for sequence in sequences:
            length = len(sequence)
            pairs = sum(per_pair[sequence[i : i + 2]] for i in range(length - 1)) / length
            factor = 2 + 5 / length + np.log(length)
            ends = at_end[sequence[0]] - (3 + 8 / length) * at_end[sequence[-1]]
            tm.append(30 + factor * pairs + ends)
        return oligos._arrays(sequences, tm + noise * np.resize([1, -1], count))

    # What is linear in the features is found; what is not stays as the error.
    splits = {"train": split(400, 0, 0), "test": split(100, 1, 0)}
    assert nearest_neighbour_baseline(splits) == pytest.approx(0, abs=1e-3)
    splits["test"] = split(100, 1, 3)
    assert nearest_neighbour_baseline(splits) == pytest.approx(3, abs=1e-3)


def test_baselines_of_the_drawn(small):
    splits = load_oligos("nearest-neighbour", seed=0, count=1000).splits
    mean_error = np.sqrt(np.mean((splits["test"][1] - splits["train"][1].mean()) ** 2))
    assert 3 < linear_baseline(splits) < 0.7 * mean_error
    assert 0.1 < nearest_neighbour_baseline(splits) < 0.5


def test_csv(tmp_path):
    path = write(tmp_path, "sequence,tm", *rows_csv(500))
    loaded = load_oligos(str(path), seed=0)
    assert_promise(loaded)
    assert loaded.name == str(path)
    sizes = [len(tm) for _, tm in loaded.splits.values()]
    assert sum(sizes) == 500 and 370 < sizes[0] < 430 and min(sizes) > 25
    ids, tm = loaded.splits["test"]
    np.testing.assert_array_equal(tm, 20 + (ids > 0).sum(axis=1))


def test_csv_splits_do_not_depend_on_the_order_or_the_seed(tmp_path):
    lines = rows_csv(100)
    one = load_oligos(str(write(tmp_path, "sequence,tm", *lines)), seed=0)
    two = load_oligos(str(write(tmp_path, "sequence,tm", *reversed(lines))), seed=5)
    for split, (ids, _) in one.splits.items():
        np.testing.assert_array_equal(ids, two.splits[split][0][::-1])


def test_csv_split_of_a_sequence(tmp_path):
    """An oligo's split is a fixed function of its duplex: no release moves one."""
    lines = rows_csv(100)
    path = write(tmp_path, "sequence,tm", *lines)
    expected = {"train": set(), "valid": set(), "test": set()}
    for line in lines:
        sequence = line.split(",")[0]
        strand = min(sequence, other_strand(sequence))
        tenth = int(hashlib.sha256(strand.encode()).hexdigest()[:16], 16) % 10
        expected["valid" if tenth == 8 else "test" if tenth == 9 else "train"].add(sequence)
    splits = load_oligos(str(path), seed=0).splits
    assert {split: set(map(letters, ids)) for split, (ids, _) in splits.items()} == expected


def test_csv_duplicates_stay_together(tmp_path):
    lines = rows_csv(100)
    others = [other_strand(line.split(",")[0]) + ",1" for line in lines]
    loaded = load_oligos(str(write(tmp_path, "sequence,tm", *lines, *lines, *others)), seed=0)
    splits = [
        {min(sequence, other_strand(sequence)) for sequence in map(letters, ids)}
        for ids, _ in loaded.splits.values()
    ]
    assert sum(map(len, splits)) == len(set.union(*splits)) == 100


def test_csv_lower_case_and_spaces(tmp_path):
    plain = load_oligos(str(write(tmp_path, "sequence,tm", *rows_csv(100))), seed=0)
    lines = [" {} , {} ".format(*line.lower().split(",")) for line in rows_csv(100)]
    loaded = load_oligos(str(write(tmp_path, "sequence, tm", *lines)), seed=0)
    for split, arrays in plain.splits.items():
        for a, b in zip(arrays, loaded.splits[split], strict=True):
            np.testing.assert_array_equal(a, b)


def test_missing_file(tmp_path):
    for path in (tmp_path / "nowhere.csv", tmp_path):
        message = error_message(path)
        assert "no such file; expected nearest-neighbour or a CSV file" in message


def test_too_few_rows(tmp_path):
    assert "too few rows: 0 leave nothing for train and valid and test" in error_message(
        write(tmp_path, "sequence,tm")
    )
    assert "too few rows: 2 leave nothing for" in error_message(
        write(tmp_path, "sequence,tm", *rows_csv(2))
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("ACGTNACGT,50", "line 4: letter 'N' in the sequence, expected A, C, G, T"),
        ("acgu acgu,50", "line 4: letter 'U'"),
        ("ACGTACG,50", "line 4: 7 bases, expected 8 to 60"),
        ("A" * 61 + ",50", "line 4: 61 bases, expected 8 to 60"),
        (",50", "line 4: 0 bases"),
        ("ACGTACGT,warm", "line 4: tm is 'warm', expected a temperature in degrees C"),
        ("ACGTACGT,", "line 4: tm is ''"),
        ("ACGTACGT,nan", "line 4: tm is 'nan'"),
        ("ACGTACGT,inf", "line 4: tm is 'inf'"),
        ("ACGTACGT,-273.2", "line 4: tm is '-273.2'"),
    ],
)
def test_bad_row(tmp_path, row, words):
    lines = rows_csv(30)
    assert words in error_message(write(tmp_path, "sequence,tm", *lines[:2], row, *lines[2:]))
