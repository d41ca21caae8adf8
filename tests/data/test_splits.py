import pytest

from data import splits
from data.errors import DataError


def test_the_split_is_the_same_on_every_machine():
    assert splits.hash_of("keras/src/models/model.py") == 18098391734310996729
    counts = {"train": [], "valid": [], "test": []}
    for number in range(2000):
        counts[splits.split_of(f"module {number}")].append(number)
    assert counts["valid"][:5] == [4, 11, 24, 65, 71] and counts["test"][:3] == [18, 43, 73]
    counts = {split: len(found) for split, found in counts.items()}
    assert counts["train"] > 1700 and min(counts.values()) > 60


def test_texts_are_split_by_rank_where_a_split_would_be_empty():
    held_out, texts = ("valid", "test"), [f"text {number}" for number in range(400)]
    every = splits.of_each(texts, splits.split_of, held_out, 0.05)
    assert every == {text: splits.split_of(text) for text in texts}
    for count in (3, 20, 40):
        found = list(splits.of_each(texts[:count], splits.split_of, held_out, 0.05).values())
        assert min(found.count(split) for split in splits.SPLITS) >= 1
        assert max(found.count(split) for split in held_out) <= 5
    assert len(splits.of_each(texts[:2], splits.split_of, held_out, 0.05)) == 2


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv", "train-small.tsv"), (0, 1, None)),
        (("a.txt", "wiki.train.tokens", "wiki.valid.tokens.gz", "training.txt"), (1, 2, None)),
        (("Train.csv", "VALIDATION.CSV", "Test.csv"), (0, 1, 2)),
        (("trainset.csv", "development.csv", "testing.csv"), (0, 1, 2)),
        (("train_data.csv", "val_data.csv", "contest.csv", "values.csv"), (0, 1, None)),
        (("train.csv", ".test.csv", "attest.csv"), (0, None, None)),
    ],
)
def test_files_are_found_by_their_names(names, expected, tmp_path):
    paths = [tmp_path / name for name in names]
    found = splits.files_by_split(paths, "data")
    assert found == {
        split: [paths[index]]
        for split, index in zip(splits.SPLITS, expected, strict=True)
        if index is not None
    }


def test_a_file_of_a_longer_name_must_hold_examples(tmp_path):
    paths = [tmp_path / name for name in ("train_a.csv", "train_b.csv", "test.csv")]
    with pytest.raises(DataError, match="several train files, train_a.csv, train_b.csv; expected"):
        splits.files_by_split(paths, "data")
    found = splits.files_by_split(paths, "data", lambda path: path.name == "train_b.csv")
    assert found == {"train": [paths[1]], "test": [paths[2]]}


def test_folders_of_hugging_face_are_hinted_at(tmp_path):
    assert splits.layout_hint(tmp_path) == splits.layout_hint(tmp_path / "nothing") == ""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").touch()
    assert splits.layout_hint(tmp_path) == ""
    (tmp_path / "data" / "train-00000-of-00001.parquet").touch()
    assert splits.layout_hint(tmp_path) == f"; pass {tmp_path / 'data'}, which has training files"
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "data-00000-of-00001.arrow").touch()
    expected = "this is what save_to_disk() writes: write each split to a file instead"
    for folder in (tmp_path, tmp_path / "train"):
        assert expected in splits.layout_hint(folder)
