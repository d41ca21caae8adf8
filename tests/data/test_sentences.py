import numpy as np
import pytest

from data import installed_docs
from data.errors import DataError
from data.sentences import baselines, load_sentences

TINY = ["a fine film\t1", "a dull film\t0"]


def write(path, *lines, end="\n"):
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def write_folder(folder, header="sentence\tlabel", **changes):
    """A folder in GLUE's layout; `changes` gives the rows of train, dev or test."""
    folder.mkdir(exist_ok=True)
    for name in ("train", "dev", "test"):
        write(folder / f"{name}.tsv", header, *changes.get(name, TINY))
    return folder


def error(path):
    """The message of loading this path, which has to be a single line."""
    with pytest.raises(DataError) as caught:
        load_sentences(str(path), cache_dir=None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rows(count, classes=("no", "yes")):
    return [(f"sentence {n}", classes[n % len(classes)]) for n in range(count)]


def csv_file(path, pairs, header="text,label"):
    return write(path, header, *(f"{sentence},{label}" for sentence, label in pairs))


def pairs_of(loaded):
    return {
        split: [(s, loaded.classes[n]) for s, n in zip(sentences, labels, strict=True)]
        for split, (sentences, labels) in loaded.splits.items()
    }


def test_folder(tmp_path):
    quoted = '  "quoted\u2028 , text " \t 1 '
    folder = write_folder(tmp_path / "glue", train=["dull\t0", quoted, "dull\t0"])
    loaded = load_sentences(str(folder), cache_dir=None)
    assert loaded.name == str(folder) and loaded.classes == ("0", "1") and loaded.note is None
    assert list(loaded.splits) == ["train", "valid", "test"]
    # Nothing is a quote in a TSV, nothing but a newline ends a line, and repeats are kept.
    assert loaded.splits["train"][0] == ["dull", '"quoted\u2028 , text "', "dull"]
    for _, labels in loaded.splits.values():
        assert labels.dtype == np.int32
    assert loaded.splits["train"][1].tolist() == [0, 1, 0]
    assert loaded.splits["valid"][0] == ["a fine film", "a dull film"]


def test_columns_may_stand_anywhere_and_be_more(tmp_path):
    lines = ["7\tgood\tfine", "8\tbad\tdull"]
    folder = write_folder(tmp_path, "id\tlabel\ttext", train=lines, dev=lines, test=lines)
    loaded = load_sentences(str(folder), cache_dir=None)
    assert pairs_of(loaded)["train"] == [("fine", "good"), ("dull", "bad")]


@pytest.mark.parametrize(
    "labels, classes",
    [
        (("10", "9", "0"), ("0", "9", "10")),
        (("1", "-1"), ("-1", "1")),
        (("10", "9", "x"), ("10", "9", "x")),
        (("01", "1"), ("01", "1")),
        (("b", "a"), ("a", "b")),
    ],
)
def test_order_of_the_classes(tmp_path, labels, classes):
    path = csv_file(tmp_path / "data.csv", rows(30, labels))
    loaded = load_sentences(str(path), cache_dir=None)
    assert loaded.classes == classes
    found = sum(pairs_of(loaded).values(), [])
    assert sorted(found) == sorted(rows(30, labels))


def test_split_of_one_file(tmp_path):
    pairs = rows(100, ("a", "a", "a", "b"))
    path = csv_file(tmp_path / "data.csv", pairs)
    first = load_sentences(str(path), cache_dir=None, seed=1)
    assert {split: len(labels) for split, (_, labels) in first.splits.items()} == {
        "train": 80,
        "valid": 10,
        "test": 10,
    }
    assert np.bincount(first.splits["test"][1]).tolist() == [8, 2]  # per class
    assert pairs_of(first) == pairs_of(load_sentences(str(path), cache_dir=None, seed=1))
    assert pairs_of(first) != pairs_of(load_sentences(str(path), cache_dir=None, seed=2))
    # A split keeps the order of the file.
    assert pairs_of(first)["train"] == [p for p in pairs if p in set(pairs_of(first)["train"])]


def test_a_tsv_file_and_windows_line_ends(tmp_path):
    plain = write(tmp_path / "a", "sentence\tlabel", *map("\t".join, rows(20)))
    windows = write(tmp_path / "b", "\ufeffsentence\tlabel", *map("\t".join, rows(20)), end="\r\n")
    one, two = (load_sentences(str(path), cache_dir=None) for path in (plain, windows))
    assert pairs_of(one) == pairs_of(two)


def test_a_repeated_sentence_is_in_one_split(tmp_path):
    # With labels that disagree, too.
    pairs = [(f"s{n % 20}", "no" if n < 20 else "yes") for n in range(60)] + rows(20)
    loaded = load_sentences(str(csv_file(tmp_path / "data.csv", pairs)), cache_dir=None)
    splits = {split: set(sentences) for split, (sentences, _) in loaded.splits.items()}
    assert not splits["train"] & splits["valid"]
    assert not splits["train"] & splits["test"]
    assert not splits["valid"] & splits["test"]
    assert sorted(sum(pairs_of(loaded).values(), [])) == sorted(pairs)


def test_a_csv_has_quotes(tmp_path):
    lines = [f'"one, ""two""\nand {n}",{n % 2}' for n in range(20)]
    loaded = load_sentences(str(write(tmp_path / "a.csv", "text,label", *lines)), cache_dir=None)
    found = [sentence for sentences, _ in loaded.splits.values() for sentence in sentences]
    assert 'one, "two"\nand 7' in found and len(found) == 20


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"header": "sentence\tclass"}, ["train.tsv, line 1", "no column label", "class"]),
        ({"header": "words\tlabel"}, ["train.tsv, line 1", "no column sentence or text"]),
        ({"dev": ["a\t2", *TINY]}, ["dev.tsv, line 2", "label '2'", "'0', '1'"]),
        ({"dev": TINY[:1]}, ["dev.tsv", "no example of the label '0'"]),
        ({"train": TINY[:1]}, ["train.tsv", "only label is '1'"]),
        ({"train": [*TINY, " \t1"]}, ["train.tsv, line 4", "the sentence is empty"]),
        ({"train": [*TINY, "a\t"]}, ["train.tsv, line 4", "the label is empty"]),
        ({"train": ["a\tb\t1", *TINY]}, ["train.tsv, line 2", "3 fields", "expected 2"]),
        ({"train": [TINY[0], "", TINY[1]]}, ["train.tsv, line 3", "1 fields"]),
        ({"test": []}, ["test.tsv", "no line after the header"]),
    ],
)
def test_what_a_folder_may_not_hold(tmp_path, changes, expected):
    message = error(write_folder(tmp_path, **changes))
    assert all(part in message for part in expected), message


def test_headers_that_differ(tmp_path):
    write(write_folder(tmp_path) / "dev.tsv", "label\tsentence", "1\ta", "0\tb")
    message = error(tmp_path)
    assert "dev.tsv, line 1: the columns are label, sentence, expected sentence, label" in message


def test_glues_own_test_files_are_explained(tmp_path):
    write(write_folder(tmp_path) / "test.tsv", "index\tsentence", "0\ta film")
    assert "GLUE publishes its test sets without labels" in error(tmp_path)


def test_missing_files(tmp_path):
    (write_folder(tmp_path) / "dev.tsv").unlink()
    assert "no dev.tsv" in error(tmp_path)
    assert "no such file or folder" in error(tmp_path / "nothing")


@pytest.mark.parametrize(
    "raw, expected",
    [
        (b"", ["empty"]),
        (b"\n\n", ["empty"]),
        (b"text,label\nfine,1\ncaf\xe9,0\n", ["line 3", "0xe9", "UTF-8"]),
        (b"text,label\nfi\0ne,1\n", ["binary"]),
        (b"text,label,label\nfine,1,0\n", ["line 1", "2 columns label"]),
        (b"text,sentence,label\nfine,a,0\n", ["line 1", "2 columns sentence or text"]),
        (b"text,label\n", ["no line after the header"]),
        (b'text,label\nfine,1\n"a\nb",0\n"never,1\n', ["line 5", "CSV"]),
        (b'text,label\n"a\nb",1\nfine\n', ["line 4", "1 fields"]),
        (b"text,label\na,1\nb,0\nc,1\nd,0\ne,1\n", ["2", "label '0'", "3 or more"]),
        (b"text,label\na,1\nb,1\nc,1\n", ["only label is '1'"]),
    ],
)
def test_what_a_file_may_not_hold(tmp_path, raw, expected):
    path = tmp_path / "data.csv"
    path.write_bytes(raw)
    message = error(path)
    assert str(path) in message and all(part in message for part in expected), message


def test_docstrings_by_package(monkeypatch, tmp_path):
    paragraphs = [
        ("In TensorFlow a tf.data.Dataset, a `tf` one; stuff, output.", "tensorflow"),
        ("As NumPy says, np.array(x) is a keras_hub.Model of KerasHub. Nptype.", "numpy"),
    ]
    splits = {split: paragraphs for split in ("train", "valid", "test")}
    monkeypatch.setattr(installed_docs, "load_labelled_docs", lambda cache_dir: splits)
    loaded = load_sentences("installed-docs", tmp_path)
    assert loaded.name == "installed-docs" and loaded.note is None
    assert loaded.classes == ("numpy", "tensorflow")
    # The names are gone, and nothing else.
    assert pairs_of(loaded)["test"] == [
        ("In a data.Dataset, a `` one; stuff, output.", "tensorflow"),
        ("As says, array(x) is a Model of Nptype.", "numpy"),
    ]
    chosen = load_sentences("auto", tmp_path)
    assert "names removed" in chosen.note and pairs_of(chosen) == pairs_of(loaded)


def test_baselines():
    # Which word decides needs the pair: "not good" and "good" are told apart by 2-grams.
    train = ["very good film", "not good film", "very bad film", "not bad film"] * 10
    labels = np.array([1, 0, 0, 1] * 10, np.int32)
    test = (["a not bad film", "a not good film", "a very good film"], np.array([1, 0, 1]))
    found = baselines({"train": (train + ["x y"], np.append(labels, 0)), "test": test})
    assert found == {
        "most_frequent_accuracy": pytest.approx(1 / 3),
        "tfidf_accuracy": 1.0,
        "tfidf_macro_f1": 1.0,
    }
    swapped = {"train": (train, labels), "test": (test[0], 1 - test[1])}
    assert baselines(swapped)["tfidf_accuracy"] == 0.0, "it has seen the test split"
    with pytest.raises(DataError, match="no word"):
        baselines({"train": (["?", "!"], np.array([0, 1])), "test": test})


def test_macro_f1_is_the_mean_over_classes():
    train = (["red"] * 9 + ["blue"] * 9, np.repeat([0, 1], 9).astype(np.int32))
    test = (["red", "red", "red", "red"], np.array([0, 0, 0, 1], np.int32))
    found = baselines({"train": train, "test": test})
    assert found["tfidf_accuracy"] == pytest.approx(0.75)
    assert found["tfidf_macro_f1"] == pytest.approx((6 / 7 + 0) / 2)


@pytest.mark.parametrize("name", ["", "~nosuchuser/x", "x" * 300, "a/" * 3000, "a\0b"])
def test_what_is_no_path(name):
    assert error(name).startswith("--dataset")
