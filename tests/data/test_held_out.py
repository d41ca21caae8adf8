"""Files for validation and test beside the training data: `--validation-file`, `--test-file`."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from data import images, melting, sentences
from data.errors import DataError
from data.images import load_images
from data.prompts import load_prompts
from data.sentences import load_sentences
from data.text import load_text
from tests.data import test_images
from tests.data.test_melting import hairpins, table


def write_text(path, first, count):
    path.write_text("".join(f"line {number} of a text\n" for number in range(first, first + count)))


def write_sentences(path, first, count):
    rows = [f"sentence {n} is good,{'yes' if n % 2 else 'no'}" for n in range(first, first + count)]
    path.write_text("\n".join(["sentence,label", *rows]) + "\n")


def write_prompts(path, first, count):
    rows = [{"prompt": f"prompt {n}", "response": f"{n}"} for n in range(first, first + count)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_molecules(path, first, count):
    table(path, hairpins(first + count)[first:])


READERS = {
    "text": (
        ".txt",
        write_text,
        lambda dataset, **more: {
            split: list(lines)
            for split, lines in load_text(dataset, cache_dir=None, **more).splits.items()
        },
    ),
    "sentences": (
        ".csv",
        write_sentences,
        lambda dataset, **more: {
            split: texts
            for split, (texts, _) in load_sentences(dataset, cache_dir=None, **more).splits.items()
        },
    ),
    "prompts": (
        ".jsonl",
        write_prompts,
        lambda dataset, **more: {
            split: [prompt for prompt, _ in pairs]
            for split, pairs in load_prompts(dataset, **more).splits.items()
        },
    ),
    "molecules": (
        ".csv",
        write_molecules,
        lambda dataset, **more: {
            split: [molecule.sequence for molecule in molecules]
            for split, molecules in melting.load_melting(
                dataset, cache_dir=None, seed=0, count=0, **more
            ).items()
        },
    ),
}
READS = pytest.mark.parametrize("kind", READERS)


@pytest.fixture
def files(kind, tmp_path):
    """Returns the reader, a training file, and files for validation and test."""
    ending, write, load = READERS[kind]
    made = {}
    for name, first, count in (("all", 0, 60), ("mine", 100, 4), ("other", 200, 6)):
        made[name] = tmp_path / f"{name}{ending}"
        write(made[name], first, count)
    return load, made["all"], {"valid": made["mine"], "test": made["other"]}


@READS
def test_beside_a_file_none_is_cut_from_training(files):
    load, every, held_out = files
    found = load(str(every), held_out=held_out)
    assert [len(found[split]) for split in ("train", "valid", "test")] == [60, 4, 6]
    cut = load(str(every))
    assert set(cut["train"]) < set(found["train"])
    assert set(found["train"]) == {row for rows in cut.values() for row in rows}


@READS
@pytest.mark.parametrize(("given", "cut"), [("valid", "test"), ("test", "valid")])
def test_the_split_without_a_file_is_still_cut(files, kind, given, cut):
    load, every, held_out = files
    found = load(str(every), held_out={given: held_out[given]})
    assert len(found[given]) in (4, 6) and 0 < len(found[cut]) < 20
    assert len(found["train"]) + len(found[cut]) == 60
    assert set(found["train"]).isdisjoint(found[cut])
    if kind != "sentences":  # whose hashes depend on the number of splits
        assert found[cut] == load(str(every))[cut]


@READS
def test_they_replace_those_of_a_folder(files, kind, tmp_path):
    load, every, held_out = files
    ending, write, _ = READERS[kind]
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, first in (("train", 0), ("valid", 40), ("test", 60)):
        write(folder / f"{name}{ending}", first, 30)
    found = load(str(folder), held_out=held_out)
    assert [len(found[split]) for split in ("train", "valid", "test")] == [30, 4, 6]
    assert load(str(folder), held_out={"test": held_out["test"]})["valid"] != found["valid"]
    (folder / f"valid{ending}").unlink()
    assert load(str(folder), held_out=held_out) == found


@READS
def test_a_file_without_examples_is_named(files, kind):
    load, every, held_out = files
    beginning = held_out["valid"].read_text().split("\n")[:1] if kind != "text" else []
    held_out["valid"].write_text("".join(beginning[: kind != "prompts"]))
    with pytest.raises(DataError, match="mine"):
        load(str(every), held_out=held_out)


@READS
def test_a_test_file_of_an_evaluation_leaves_training_as_it_is(files):
    load, every, held_out = files
    trained = load(str(every))
    found = load(str(every), test_file=held_out["test"])
    assert found["train"] == trained["train"] and len(found["test"]) == 6
    both = load(str(every), held_out={"valid": held_out["valid"]}, test_file=held_out["test"])
    assert len(both["train"]) + len(trained["test"]) == 60 and len(both["test"]) == 6


@READS
def test_an_evaluation_of_a_test_file_needs_no_other(files, tmp_path):
    load, every, held_out = files
    trained = load(str(every), held_out=held_out)
    scored = {split: tmp_path / "gone" for split in held_out}
    found = load(str(every), held_out=scored, test_file=held_out["test"])
    assert found["train"] == trained["train"] and found["test"] == trained["test"]
    # A validation file that is still there stays one: baselines choose by it.
    scored["valid"] = held_out["valid"]
    found = load(str(every), held_out=scored, test_file=held_out["test"])
    assert found == trained


def test_notes_about_an_evaluated_file_name_the_test_alone(tmp_path):
    """Not the validation split, too, which is read from it where its own file is gone."""
    gone = {"valid": tmp_path / "gone"}

    def files(kind, count):
        ending, write, _ = READERS[kind]
        paths = [tmp_path / f"{name}-{kind}{ending}" for name in ("all", "new")]
        for path, each in zip(paths, (60, count), strict=True):
            write(path, 0, each)
        return str(paths[0]), dict(held_out=gone, test_file=paths[1])

    every, given = files("sentences", 1)
    found = load_sentences(every, None, **given)
    assert "the test split has no example of 'yes'" in found.note and "valid" not in found.note
    (said,) = sentences.repeated_notes(found.splits)
    assert said.startswith("1 of 1 test sentences are training sentences too")
    several = load_sentences(every, None, labels="several", **given)
    assert "the test split has no example of 'yes'" in several.note and "valid" not in several.note
    every, given = files("prompts", 2)
    with open(given["test_file"], "a") as file:
        file.write('{"prompt": "without a response", "response": ""}\n')
    found = load_prompts(every, **given)
    assert "1 prompts without a response are left out" in found.note
    assert [each.split(" prompts")[0] for each in found.repeated_notes()] == ["2 of 2 test"]
    every, given = files("text", 3)
    long = " of more than eight words, as a paragraph has"
    for path in (Path(every), given["test_file"]):
        path.write_text(path.read_text().replace("\n", f"{long}\n"))
    (said,) = load_text(every, cache_dir=None, **given).repeated_notes()
    assert said.startswith("3 of 3 test lines")
    every, given = files("molecules", 4)
    found = melting.load_melting(every, None, seed=0, count=0, **given)
    assert melting.repeated_notes(found) == [
        "4 test molecules have a sequence of the training split"
    ]


def test_columns_of_an_evaluated_file_are_said_once(tmp_path):
    rows = [row | {"remark": "x"} for row in hairpins(3)]
    file = Path(table(tmp_path / "mine.csv", rows))
    gone = {"valid": tmp_path / "gone.csv", "test": tmp_path / "gone.csv"}
    note = melting.unread_note(melting.FORMULA, gone, file)
    assert note == "mine.csv: columns that are not read: 'remark'"


def test_lines_that_follow_one_another(tmp_path):
    write_text(tmp_path / "all.txt", 0, 60)
    write_text(tmp_path / "mine.txt", 100, 4)
    data = str(tmp_path / "all.txt")
    given = {"test": tmp_path / "mine.txt"}
    found = load_text(data, None, contiguous=True, held_out=given).splits
    assert [len(list(lines)) for lines in found.values()] == [57, 3, 4]
    assert list(found["train"])[-1] == "line 56 of a text"


def test_what_is_not_read_is_said(tmp_path):
    for name in ("train", "valid", "test", "mine"):
        write_text(tmp_path / f"{name}.txt", 0, 5)
    data = load_text(str(tmp_path), None, held_out={"valid": tmp_path / "mine.txt"})
    assert data.note == "files that are not read: valid.txt"


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_glob_does_not_train_on_them(tmp_path, contiguous):
    for number, name in enumerate(("one", "two", "three")):
        write_text(tmp_path / f"{name}.txt", 20 * number, 20)
    dataset, held_out = str(tmp_path / "*.txt"), {"test": tmp_path / "two.txt"}
    data = load_text(dataset, None, contiguous=contiguous, held_out=held_out)
    assert data.note == "files of other splits are not training text: two.txt"
    trained = {*data.splits["train"], *data.splits["valid"]}
    assert len(trained) == 40 and trained.isdisjoint(data.splits["test"])
    (tmp_path / "new.txt.gz").write_bytes(gzip.compress(b"new line\n"))
    scored = dict(held_out=held_out, test_file=tmp_path / "new.txt.gz")
    again = load_text(dataset, None, contiguous=contiguous, **scored)
    assert list(again.splits["train"]) == list(data.splits["train"])
    assert list(again.splits["test"]) == ["new line"]
    both = load_text(str(tmp_path / "two.txt"), None, held_out=held_out)  # named twice
    assert both.note is None and {*both.splits["train"]} < {*both.splits["test"]}


def test_several_files_for_a_split_that_another_file_is_for(tmp_path):
    for name in ("train", "my-valid", "other-valid"):
        write_text(tmp_path / f"{name}.txt", 0, 5)
    with pytest.raises(DataError, match="several valid files"):
        load_text(str(tmp_path), None)
    data = load_text(str(tmp_path), None, held_out={"valid": tmp_path / "my-valid.txt"})
    assert data.note.endswith("files that are not read: other-valid.txt")


def test_of_a_known_dataset_it_is_said_too(tmp_path, monkeypatch):
    rows = {
        split: [(f"{split} of {name} {n}", name) for n in range(5) for name in ("keras", "numpy")]
        for split in ("train", "valid", "test")
    }
    monkeypatch.setattr("data.installed_docs.load_labelled_docs", lambda cache_dir: rows)
    write_text(tmp_path / "mine.txt", 0, 4)
    given = {"test": tmp_path / "mine.txt"}
    text = load_text("installed-docs", None, held_out=given)
    assert load_text("installed-docs", None, held_out=given, test_file=given["test"]).note is None
    assert text.note == f"{given['test']} is the test split, instead of that of installed-docs"
    assert len(list(text.splits["test"])) == 4 and len(text.splits["valid"]) == 10

    (tmp_path / "mine.csv").write_text("text,label\nan array,numpy\na model,keras\n")
    given = {"valid": tmp_path / "mine.csv"}
    data = load_sentences("installed-docs", None, held_out=given)
    assert data.splits["valid"][0] == ["an array", "a model"]
    assert f"{given['valid']} is the validation split, instead of that of ins" in data.note
    (tmp_path / "mine.csv").write_text("text,label\nan array,scipy\n")
    with pytest.raises(DataError, match="mine.csv: the label 'scipy' is in the valid split, not i"):
        load_sentences("installed-docs", None, held_out=given)


def test_folders_of_classes(tmp_path):
    for split, count in (("train", 20), ("test", 4)):
        for label in ("no", "yes"):
            folder = tmp_path / "films" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number}.txt").write_text(f"{split} {label} {number}")
    write_sentences(tmp_path / "mine.csv", 0, 6)
    load = READERS["sentences"][2]
    found = load(str(tmp_path / "films"), held_out={"test": tmp_path / "mine.csv"})
    assert len(found["test"]) == 6 and len(found["train"]) + len(found["valid"]) == 40
    found = load(str(tmp_path / "films"), held_out={"valid": tmp_path / "mine.csv"})
    assert [len(found[split]) for split in ("train", "valid", "test")] == [40, 6, 8]


def test_molecules_of_named_splits(tmp_path):
    rows = [row | {"split": "valid" if n < 30 else "train"} for n, row in enumerate(hairpins(60))]
    load = READERS["molecules"][2]
    every = table(tmp_path / "all.csv", rows)
    write_molecules(tmp_path / "mine.csv", 60, 4)
    held_out = {"valid": tmp_path / "mine.csv", "test": tmp_path / "mine.csv"}
    found = load(every, held_out=held_out)
    assert [len(found[split]) for split in ("train", "valid", "test")] == [30, 4, 4]
    del held_out["test"]
    for dataset in (every, melting.FORMULA, melting.NNN):
        said = f"{tmp_path / 'mine.csv'} is the validation split, instead of that of {dataset}"
        assert melting.unread_note(dataset, held_out) == said
    assert melting.unread_note(str(tmp_path / "mine.csv"), held_out) is None
    assert melting.unread_note(every, held_out, tmp_path / "mine.csv") is None


def write_images(folder, name, count, seed):
    pixels, labels = test_images.some_images(count, seed=seed)
    (folder / f"{name}-{images.IMAGES}").write_bytes(test_images.idx(pixels))
    (folder / f"{name}-{images.LABELS}").write_bytes(test_images.idx(labels))
    return folder / f"{name}-{images.IMAGES}"


def test_idx_files_of_images(tmp_path):
    for name, count in (("train", 40), ("t10k", 10)):
        write_images(tmp_path, name, count, 0)
    mine = write_images(tmp_path, "mine", 7, 1)
    own = load_images(str(tmp_path)).splits
    found = load_images(str(tmp_path), held_out={"valid": mine})
    assert [len(found.splits[split][1]) for split in ("train", "valid", "test")] == [40, 7, 10]
    for place in (0, 1):  # in the order of the file
        both = np.concatenate([own["train"][place], own["valid"][place]])
        np.testing.assert_array_equal(found.splits["train"][place], both)
    assert found.note == f"{mine} is the validation split, instead of that of {tmp_path}"
    found = load_images("digits", held_out={"valid": mine, "test": mine})
    assert [len(labels) for _, labels in found.splits.values()] == [1297, 7, 7]
    one = write_images(tmp_path, "one", 1, 1)
    assert len(load_images("digits", held_out={"test": one}).splits["test"][1]) == 1
    (tmp_path / f"one-{images.LABELS}").unlink()
    with pytest.raises(DataError, match="one-labels-idx1-ubyte: cannot be read .No such file"):
        load_images("digits", held_out={"test": one})
    none = write_images(tmp_path, "none", 0, 1)
    with pytest.raises(DataError, match="none-[*] files: 0 images, 0 labels .* expected 1 or more"):
        load_images("digits", held_out={"test": none})
    gone = {"valid": tmp_path / "gone-images-idx3-ubyte"}
    evaluated = load_images(str(tmp_path), held_out=gone, test_file=mine)
    assert [len(labels) for _, labels in evaluated.splits.values()] == [40, 7, 7]
    assert evaluated.note is None
    with pytest.raises(DataError, match="^--validation-file .*: expected an IDX file whose name"):
        load_images("digits", held_out={"valid": tmp_path / "x.csv"})
