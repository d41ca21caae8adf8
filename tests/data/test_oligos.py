import random

import numpy as np
import pytest

from data import oligos
from data.errors import DataError
from data.oligos import linear_baseline, load_oligos


@pytest.fixture
def small(monkeypatch):
    """Test and validation splits that are labelled at once."""
    monkeypatch.setattr(oligos, "TEST_COUNT", 40)
    monkeypatch.setattr(oligos, "VALID_COUNT", 20)


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


def fault(path):
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


def test_labels_are_those_of_biopython(small):
    from Bio.SeqUtils import MeltingTemp

    ids, tm = load_oligos("nearest-neighbour", seed=1, count=5).splits["train"]
    expected = [
        MeltingTemp.Tm_NN(
            letters(row), nn_table=MeltingTemp.DNA_NN3, dnac1=25, dnac2=25, Na=50, saltcorr=5
        )
        for row in ids
    ]
    np.testing.assert_allclose(tm, expected, rtol=1e-6)


def test_no_duplex_twice(small):
    # Short oligos only, so that duplicates would be many.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oligos, "LONGEST", 8)
        loaded = load_oligos("nearest-neighbour", seed=1, count=3000)
    sequences = [letters(row) for ids, _ in loaded.splits.values() for row in ids]
    assert len({oligos._duplex(sequence) for sequence in sequences}) == len(sequences) == 3060
    assert all(sequence != oligos._reverse_complement(sequence) for sequence in sequences)


def test_drawn_from_the_seed_alone(small):
    few = load_oligos("nearest-neighbour", seed=1, count=100)
    many = load_oligos("nearest-neighbour", seed=1, count=2000)
    other = load_oligos("nearest-neighbour", seed=2, count=100)
    np.testing.assert_array_equal(few.splits["test"][0], many.splits["test"][0])
    np.testing.assert_array_equal(few.splits["valid"][1], many.splits["valid"][1])
    np.testing.assert_array_equal(few.splits["train"][0], many.splits["train"][0][:100])
    assert (few.splits["test"][0] != other.splits["test"][0]).any()


def test_held_out_by_default():
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


def test_linear_baseline_of_the_drawn(small):
    splits = load_oligos("nearest-neighbour", seed=0, count=1000).splits
    mean_error = np.sqrt(np.mean((splits["test"][1] - splits["train"][1].mean()) ** 2))
    assert 3 < linear_baseline(splits) < 0.7 * mean_error


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


def test_csv_duplicates_stay_together(tmp_path):
    lines = rows_csv(100)
    other_strand = [oligos._reverse_complement(line.split(",")[0]) + ",1" for line in lines]
    loaded = load_oligos(str(write(tmp_path, "sequence,tm", *lines, *lines, *other_strand)), seed=0)
    splits = [{oligos._duplex(letters(row)) for row in ids} for ids, _ in loaded.splits.values()]
    assert sum(map(len, splits)) == len(set.union(*splits)) == 100


def test_csv_other_columns_lower_case_spaces_and_empty_lines(tmp_path):
    plain = load_oligos(str(write(tmp_path, "sequence,tm", *rows_csv(100))), seed=0)
    lines = []
    for line in rows_csv(100):
        sequence, tm = line.split(",")
        lines += [f'"a, b", {tm} , {sequence.lower()} ', ""]
    # With the byte order mark that spreadsheets write.
    loaded = load_oligos(str(write(tmp_path, "\ufeffname, tm,sequence", *lines)), seed=0)
    for split, arrays in plain.splits.items():
        for a, b in zip(arrays, loaded.splits[split], strict=True):
            np.testing.assert_array_equal(a, b)


def test_missing_file(tmp_path):
    message = fault(tmp_path / "nowhere.csv")
    assert "no such file" in message and "nearest-neighbour" in message
    assert "no such file" in fault(tmp_path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("sequence,temperature", "no column tm; found sequence, temperature"),
        ("sequence;tm", "no column sequence and tm; found sequence;tm"),
        ("name,tm", "no column sequence; found name, tm"),
    ],
)
def test_missing_column(tmp_path, header, words):
    assert words in fault(write(tmp_path, header, *rows_csv(30)))


def test_empty_file(tmp_path):
    assert "empty, expected a header" in fault(write(tmp_path))
    assert "empty, expected a header" in fault(write(tmp_path, "", ""))


def test_too_few_rows(tmp_path):
    assert "too few rows: 0 leave nothing for train and valid and test" in fault(
        write(tmp_path, "sequence,tm")
    )
    assert "too few rows: 2 leave nothing for" in fault(
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
        ("ACGTACGT,1e300", "line 4: tm is '1e300'"),
        ("ACGTACGT", "line 4: 1 fields, expected 2"),
        ("ACGTACGT,50,6", "line 4: 3 fields, expected 2"),
    ],
)
def test_bad_row(tmp_path, row, words):
    lines = rows_csv(30)
    assert words in fault(write(tmp_path, "sequence,tm", *lines[:2], row, *lines[2:]))


def test_not_text(tmp_path):
    path = tmp_path / "oligos.csv"
    path.write_bytes(b"sequence,tm\n\xff\xfe\x00\n")
    assert "not UTF-8" in fault(path)


def test_not_csv(tmp_path):
    assert "not a CSV file" in fault(write(tmp_path, "sequence,tm", "A" * 200_000 + ",50"))
