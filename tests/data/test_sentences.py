import gzip
import itertools
import json
import sys

import keras_nlp
import numpy as np
import pytest
import tensorflow as tf

from data import arrays, installed_docs, sentences, word_pieces
from data.errors import DataError
from data.sentences import SEPARATOR, in_training, load_sentences, repeated_notes
from tests.support import tiny_presets
from tests.support.parquet_file import write_parquet

TINY = ["a fine film\t1", "a dull film\t0"]
NAMED = {"valid": "validation", "test": "test"}


def write(path, *lines, end="\n"):
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def write_folder(folder, header="sentence\tlabel", **changes):
    """A folder in GLUE's layout; `changes` gives the rows of train, dev or test."""
    folder.mkdir(exist_ok=True)
    for name in ("train", "dev", "test"):
        write(folder / f"{name}.tsv", header, *changes.get(name, TINY))
    return folder


def write_rows(path, pairs):
    """A CSV, or JSON or Parquet by its name."""
    if path.suffix == ".parquet":
        write_parquet(path, [{"text": text, "label": label} for text, label in pairs])
        return
    objects = [json.dumps({"text": text, "label": label}) for text, label in pairs]
    content = "\n".join(objects) if ".jsonl" in path.name else f"[{', '.join(objects)}]"
    if path.name.endswith(".csv"):
        content = "text,label\n" + "".join(f"{text},{label}\n" for text, label in pairs)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())


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
    pairs = rows(1000, ("a", "a", "a", "b"))
    path = csv_file(tmp_path / "data.csv", pairs)
    first = load_sentences(str(path), cache_dir=None)
    sizes = {split: len(labels) for split, (_, labels) in first.splits.items()}
    assert sum(sizes.values()) == 1000 and 70 < sizes["test"] < 130 and 70 < sizes["valid"] < 130
    assert 0.6 < np.mean(first.splits["test"][1] == 0) < 0.9
    assert pairs_of(first) == pairs_of(load_sentences(str(path), cache_dir=None))
    # A split keeps the order of the file.
    assert pairs_of(first)["train"] == [p for p in pairs if p in set(pairs_of(first)["train"])]


def test_rows_that_are_added_move_no_others(tmp_path):
    """Sentences of training stay out of the test split when rows are appended."""
    pairs = rows(900, ("a", "b", "b"))
    before = pairs_of(load_sentences(str(csv_file(tmp_path / "a.csv", pairs[:700])), None))
    after = pairs_of(load_sentences(str(csv_file(tmp_path / "b.csv", pairs)), None))
    for split, found in before.items():
        assert set(found) == set(after[split]) & set(pairs[:700])


@pytest.mark.parametrize("count", [3, 4, 5, 8, 20])
def test_a_small_class_is_in_every_split(tmp_path, count):
    for n in range(20):
        pairs = [(f"{text} of {n}", label) for text, label in rows(2 * count)]
        loaded = load_sentences(str(csv_file(tmp_path / "a.csv", pairs)), None)
        for _, labels in loaded.splits.values():
            assert set(labels) == {0, 1}


def test_a_repeated_sentence_is_in_one_split(tmp_path):
    # In other case and spaces, and with labels that disagree, too.
    ways = ("the {} film", "The {}  FILM", " THE {} film ")
    pairs = [
        (ways[n // 20].format(f"s{n % 20}"), "no" if n < 20 else "yes") for n in range(60)
    ] + rows(20)
    loaded = load_sentences(str(csv_file(tmp_path / "data.csv", pairs)), cache_dir=None)
    found = {
        split: {" ".join(sentence.lower().split()) for sentence in sentences}
        for split, (sentences, _) in loaded.splits.items()
    }
    assert not found["train"] & found["valid"]
    assert not found["train"] & found["test"]
    assert not found["valid"] & found["test"]
    assert sum(len(labels) for _, labels in loaded.splits.values()) == len(pairs)
    assert repeated_notes(loaded.splits) == []


def test_sentences_of_training_and_test_are_counted():
    labels = np.zeros(3, np.int32)
    train = (["A fine film", "a dull film", "new"], labels)
    test = (["a  fine FILM ", "a dull film", "another"], labels)
    splits = {"train": train, "valid": (["new"], labels[:1]), "test": test}
    assert in_training(splits) == {"valid": 1, "test": 2}
    end = "sentences are training sentences too (case and spaces ignored)"
    assert repeated_notes(splits) == [f"1 of 1 validation {end}", f"2 of 3 test {end}"]
    splits["test"] = splits["valid"] = (["other"], labels[:1])
    assert in_training(splits) == {"valid": 0, "test": 0} and repeated_notes(splits) == []


@pytest.mark.parametrize(
    "changes, expected",
    [
        (
            {"header": "words\tlabel"},
            ["train.tsv, line 1", "no column sentence or text", "--text-column, --second"],
        ),
        (
            {"dev": ["a\t2", *TINY]},
            ["the label '2' is in the valid split, not in training: add training exam"],
        ),
        ({"train": TINY[:1]}, ["the only label is '1'"]),
        ({"train": [*TINY, " \t1"]}, ["train.tsv, line 4", "the sentence is empty"]),
        ({"train": [*TINY, "a\t"]}, ["train.tsv, line 4", "the label is empty"]),
        ({"test": []}, ["test.tsv: no row after the header"]),
    ],
)
def test_what_a_folder_may_not_hold(tmp_path, changes, expected):
    message = error(write_folder(tmp_path, **changes))
    assert all(part in message for part in expected), message


def test_rows_without_a_label_are_counted(tmp_path):
    lines = ["text,label", "a,1", "b,", "c,0", ",1", "d,"]
    message = error(write(tmp_path / "a.csv", *lines))
    assert (
        message
        == f"{tmp_path / 'a.csv'}, line 3: the label is empty: remove the row; likewise 2 more"
    )


@pytest.mark.parametrize("word", ["nan", "None", "NULL"])
def test_a_missing_number_is_no_class(tmp_path, word):
    """Beside names it is one: what a text says about whoever `none` is."""
    lines = [f"sentence {n},{n % 2}" for n in range(60)]
    path = write(tmp_path / "a.csv", "text,label", *lines, f"gap,{word}")
    expected = f"a.csv, line 62: the label is {word!r}, the others are numbers"
    assert error(path).endswith(expected)
    named = csv_file(tmp_path / "b.csv", rows(60, ("some", word)))
    assert set(load_sentences(str(named), cache_dir=None).classes) == {"some", word}


def test_few_fractions_and_all_integers_are_classes(tmp_path):
    stars = csv_file(tmp_path / "b.csv", rows(400, ("0.5", "1.0", "1.50")))
    loaded = load_sentences(str(stars), cache_dir=None)
    assert loaded.classes == ("0.5", "1", "1.5")
    assert loaded.note.endswith(
        "labels are numbers: each different one is a class, without an order; --labels scores "
        "predicts them as numbers"
    )
    many = csv_file(tmp_path / "c.csv", rows(400, tuple(map(str, range(40)))))
    assert len(load_sentences(str(many), cache_dir=None).classes) == 40


def test_sentences_with_several_labels_are_noted(tmp_path):
    """Those of a rare label beside another one are not in training alone."""
    pairs = [(f"both {n % 40}", str(n // 40)) for n in range(80)] + [("own", "1")]
    loaded = load_sentences(str(csv_file(tmp_path / "a.csv", pairs)), cache_dir=None)
    assert loaded.note.endswith(
        "; sentences repeated with other labels: 40 (case and spaces ignored)"
    )
    assert "in training alone" not in loaded.note
    assert all("1" in {label for _, label in found} for found in pairs_of(loaded).values())


def test_test_files_of_hugging_face_have_no_labels(tmp_path):
    """Each row has -1."""
    train = [f"day {n}\t{n % 2}" for n in range(20)]
    folder = write_folder(tmp_path, train=train, test=["a fine day\t-1", "a dull day\t-1"])
    loaded = load_sentences(str(folder), cache_dir=None)
    assert "test.tsv has no labels" in loaded.note
    folder = write_folder(tmp_path, test=["a fine day\t-1", "a dull day\t0"])
    assert "the label '-1' is in the test split, not in training" in error(folder)
    signs = [f"day {n}\t{2 * (n % 2) - 1}" for n in range(20)]
    folder = write_folder(tmp_path, train=signs, dev=signs, test=["a dull day\t-1"])
    assert load_sentences(str(folder), cache_dir=None).splits["test"][0] == ["a dull day"]


@pytest.mark.parametrize("empty", ["", None])
def test_test_files_with_empty_labels_have_none(empty, tmp_path):
    for name in ("train", "valid", "test"):
        pairs = [(f"{name} {n}", empty if name == "test" else str(n % 2)) for n in range(20)]
        write_rows(tmp_path / f"{name}.{'csv' if empty == '' else 'jsonl'}", pairs)
    loaded = load_sentences(str(tmp_path), cache_dir=None)
    assert "has no labels: valid." in loaded.note and len(loaded.splits["test"][0]) == 20
    lines = [json.dumps({"text": f"test {n}", "label": n or None}) for n in range(2)]
    write(tmp_path / "test.jsonl", *lines)
    (tmp_path / "test.csv").unlink(missing_ok=True)
    assert "test.jsonl, line 1: the label is empty: remove the row" in error(tmp_path)


@pytest.mark.parametrize(
    ("labels", "mark"),
    [
        (("-1", "0", "1"), "-1"),
        (("0", "1", "-100"), "-100"),
        (("yes", "-", "no"), "-"),
        (("-1", "1"), None),
        (("-1", "-2", "1", "2"), None),
        (("-1", "yes", "no"), None),
    ],
)
def test_a_label_that_often_marks_a_missing_one_is_noted(labels, mark, tmp_path):
    path = csv_file(tmp_path / "a.csv", rows(400, labels))
    note = load_sentences(str(path), cache_dir=None).note
    assert ("datasets often mark rows without a label so: remove them" in note) == bool(mark)
    assert mark is None or f"the label '{mark}' is a class;" in note


@pytest.mark.parametrize(
    ("texts", "is_noted"),
    [
        (['"said ""yes"" to {}"', "plain {}"], True),
        (['"said ""yes"" to {}"', '"yes" he said {}'], False),
        (['"in quotes {}"', "plain {}"], False),
    ],
)
def test_the_quotes_of_a_csv_in_a_tsv_are_noted(texts, is_noted, tmp_path):
    """As pandas writes them with sep="\\t"; the files of GLUE have single ones."""
    pairs = [(texts[n % 2].format(n), "no yes".split()[n // 2 % 2]) for n in range(60)]
    lines = ["sentence\tlabel", *map("\t".join, pairs)]
    loaded = load_sentences(str(write(tmp_path / "a.tsv", *lines)), cache_dir=None)
    noted = "a.tsv: 30 sentences are quoted as in a CSV, and a TSV has no quoting: write a CSV or"
    assert (noted in loaded.note) == is_noted
    assert sorted(text for texts, _ in loaded.splits.values() for text in texts) == sorted(
        text for text, _ in pairs
    )


@pytest.mark.parametrize("names", [("Train.csv", "Dev.csv"), ("train_data.csv", "my-val.CSV")])
def test_files_of_splits_have_the_names_of_other_recipes(names, tmp_path):
    for name, pairs in zip(names, (rows(40), rows(80)[60:]), strict=True):
        csv_file(tmp_path / name, pairs)
    (tmp_path / "test_predictions.csv").write_text("text,predicted\na,1\n")
    (tmp_path / "train_args.json").write_text('{"rate": 0.1}')
    loaded = load_sentences(str(tmp_path), cache_dir=None)
    assert sorted(pairs_of(loaded)["valid"]) == sorted(rows(80)[60:])
    assert "files that are not read: test_predictions.csv" in loaded.note


def test_a_longer_name_without_the_columns_is_told_its_options(tmp_path):
    (tmp_path / "train_data.csv").write_text("review,mood\na,good\n")
    assert "train_data.csv, line 1: no column sentence or text" in error(tmp_path)


def test_a_quote_after_a_space(tmp_path):
    lines = ["text, label", *(f'"a, {n}", "{n % 2}"' for n in range(60))]
    loaded = load_sentences(str(write(tmp_path / "a.csv", *lines)), cache_dir=None)
    assert loaded.classes == ("0", "1") and "60 rows" in loaded.note


def test_missing_files(tmp_path):
    (write_folder(tmp_path) / "train.tsv").unlink()
    assert "found dev.tsv, test.tsv; expected train.tsv, dev.tsv and test.tsv" in error(tmp_path)
    assert "no such file or folder" in error(tmp_path / "nothing")
    write_folder(tmp_path / "data")
    assert error(tmp_path).endswith(f"; pass {tmp_path / 'data'}, which has training files")


@pytest.mark.parametrize("name", ["{}.csv", "{}.jsonl", "{}.json.gz"])
@pytest.mark.parametrize("missing", [("valid",), ("test",), ("test", "valid")])
def test_a_folder_may_lack_splits_which_are_cut_from_training(tmp_path, name, missing):
    known = {"train": rows(40), "valid": rows(20)[:4], "test": rows(60)[50:]}
    for split in set(known) - set(missing):
        write_rows(tmp_path / name.format(split), known[split])
    loaded = load_sentences(str(tmp_path), cache_dir=None)
    found = pairs_of(loaded)
    assert all(f"the {kind} split" in loaded.note for kind in map(NAMED.get, missing))
    for split in missing:
        assert len(found[split]) >= 2 and not set(found[split]) & set(found["train"])
    assert sum(len(found[split]) for split in ("train", *missing)) == 40
    for split in {"valid", "test"} - set(missing):
        assert sorted(found[split]) == sorted(known[split])


def test_json_holds_what_a_csv_holds(tmp_path):
    pairs = [(f"sentence {n} of {n % 3}", f"{n % 3}") for n in range(60)]
    as_csv = load_sentences(str(csv_file(tmp_path / "data.csv", pairs)), cache_dir=None)
    lines = [json.dumps({"id": [n], "text": t, "label": int(y)}) for n, (t, y) in enumerate(pairs)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    as_json = load_sentences(str(tmp_path / "data.jsonl"), cache_dir=None)
    assert pairs_of(as_json) == pairs_of(as_csv) and as_json.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"review": "a", "label": 1}', "no column sentence or text, expected one; found 'review,"),
        ('{"text": "a", "label": null}', "the label is empty: remove the row"),
        ('{"text": ["a"], "label": 1}', "text is ['a'], expected a text or a number"),
        ('{"text": "\\ud800", "label": 1}', "text is not UTF-8 text"),
        ("[1]", "expected an object, found [1]"),
        ("text,label", "not JSON, one object per line"),
    ],
)
def test_a_wrong_line_of_json_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "b", "label": 0}\n' + line)
    assert f"a.jsonl, line 2: {message}" in error(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("header", "pairs"),
    [
        ("sentence,sentence2,label", True),
        ("text,sentence2,label", True),
        ("text,text_pair,label", True),
        ("sentence,text_pair,label", False),
        ("text,comment,label", False),
    ],
)
def test_a_second_sentence_is_read_where_its_name_says_so(tmp_path, header, pairs):
    path = write(tmp_path / "a.csv", header, *(f"one {n},two {n},{n % 2}" for n in range(30)))
    loaded = load_sentences(str(path), cache_dir=None)
    assert loaded.pairs == pairs
    expected = {f"one {n}\ttwo {n}" if pairs else f"one {n}" for n in range(30)}
    assert {text for texts, _ in loaded.splits.values() for text in texts} == expected


def test_a_named_text_column_is_the_only_one(tmp_path):
    lines = [f"one {n},two {n},{n % 2}" for n in range(30)]
    path = write(tmp_path / "a.csv", "text,text_pair,label", *lines)
    assert not load_sentences(str(path), cache_dir=None, text_column="text_pair").pairs


def test_several_files_of_a_split_are_refused(tmp_path):
    folder = write_folder(tmp_path / "a")
    csv_file(folder / "train.csv", rows(600))
    assert "several train files, train.csv, train.tsv; expected one" in error(folder)
    (folder / "train.csv").unlink()
    write(folder / "val.tsv", "sentence\tlabel", *TINY)
    assert "several valid files, dev.tsv, val.tsv; expected one" in error(folder)
    (folder / "dev.tsv").unlink()
    assert len(load_sentences(str(folder), cache_dir=None).splits["valid"][0]) == 2


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_the_shards_of_a_split_are_one_file(tmp_path, ending):
    parts = [rows(4), rows(3, ("yes", "no")), rows(2)]
    for number, part in enumerate(parts):
        write_rows(tmp_path / f"train-{number:05}-of-00003.{ending}", part)
    write_rows(tmp_path / f"validation-00000-of-00001.{ending}", rows(5))
    # Without labels in both of its shards, as Hugging Face's copies of GLUE.
    for number in range(2):
        unlabelled = [(f"test {n}", "-1") for n in range(3)]
        write_rows(tmp_path / f"test-{number:05}-of-00002.{ending}", unlabelled)
    loaded = load_sentences(str(tmp_path), cache_dir=None)
    expected = [pair for part in parts for pair in part]
    found = [pair for split in ("train", "valid") for pair in pairs_of(loaded)[split]]
    assert sorted(found) == sorted(expected)
    assert pairs_of(loaded)["test"] == rows(5)
    note = "test-00000-of-00002.csv has no labels: validation-00000-of-00001.csv is the test split"
    assert note.replace("csv", ending) in loaded.note

    write_rows(tmp_path / f"test-00001-of-00002.{ending}", rows(5))
    write_rows(tmp_path / f"test-00000-of-00002.{ending}", rows(7))
    assert len(load_sentences(str(tmp_path), cache_dir=None).splits["test"][0]) == 12
    (tmp_path / f"train-00000-of-00003.{ending}").unlink()
    assert error(tmp_path) == f"{tmp_path}: lacks the shard train-00000-of-00003.{ending}"
    write_rows(tmp_path / f"train-00000-of-00002.{ending}", rows(3))
    assert "several train files" in error(tmp_path)


def test_a_test_split_with_labels_in_its_second_shard(tmp_path):
    """It has labels; what -1 means where training has none is then an error, not a guess."""
    for name in ("train", "dev"):
        write_rows(tmp_path / f"{name}.csv", rows(6))
    write_rows(tmp_path / "test-00000-of-00002.csv", [("one", "-1")])
    write_rows(tmp_path / "test-00001-of-00002.csv", rows(6))
    assert "-1" in error(tmp_path)


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    folder = write_folder(tmp_path / "a")
    for name in ("eval.csv", "test_2024.csv"):
        csv_file(folder / name, rows(9))
    (folder / "labels.json").write_text('{\n"0": "bad"\n}')
    (folder / "README.txt").write_text("about")
    note = load_sentences(str(folder), cache_dir=None).note
    assert note == "files that are not read: eval.csv, test_2024.csv"


def test_rows_that_are_left_out_are_counted(tmp_path):
    lines = [f"why {n}?,{f'how {n}?' * (n % 3 > 0)},{n % 2}" for n in range(800)]
    path = write(tmp_path / "a.csv", "question1,question2,is_duplicate", *lines, "cut short,1")
    loaded = load_sentences(str(path), cache_dir=None)
    assert sum(len(labels) for _, labels in loaded.splits.values()) == 533
    assert loaded.note == (
        "a.csv: 268 of 801 rows left out: a sentence or the label is empty, or the row is cut "
        "short; 533 rows without splits: 421 train, 55 test, 57 valid"
    )


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (("0", "0.0", "1"), ("0", "1")),
        (("0.0", "1.0"), ("0", "1")),
        (("0.0", "0.5", "1e-05"), ("0", "0.5", "1e-05")),
        (("0.0", "0", "x"), ("0", "0.0", "x")),
        (("1.0", "1", "01"), ("01", "1")),
    ],
)
def test_a_number_and_its_integer_are_one_class(tmp_path, labels, classes):
    path = csv_file(tmp_path / "a.csv", rows(60, labels))
    assert load_sentences(str(path), cache_dir=None).classes == classes


def test_labels_are_written_as_training_has_them(tmp_path):
    names = rows(60, ("1.0", "2.0", "beta"))
    train = csv_file(tmp_path / "a.csv", names)
    test = csv_file(tmp_path / "b.csv", [row for row in names if row[1] != "beta"])
    loaded = load_sentences(str(train), cache_dir=None, test_file=test)
    assert loaded.classes == ("1.0", "2.0", "beta")
    numbers = csv_file(tmp_path / "c.csv", rows(60, ("1", "2")))
    assert load_sentences(str(numbers), cache_dir=None, test_file=test).classes == ("1", "2")


def test_labels_that_are_one_number_are_noted(tmp_path):
    path = csv_file(tmp_path / "a.csv", rows(80, ("3.1", "3.10", "2", "1.0")))
    loaded = load_sentences(str(path), cache_dir=None)
    assert loaded.classes == ("1", "2", "3.1")
    assert "labels that are the same number are one class: '3.1', '3.10'; " in loaded.note


def test_classes_that_differ_by_case_are_noted(tmp_path):
    path = csv_file(tmp_path / "a.csv", rows(80, ("Neg", "neg", "pos", "other")))
    loaded = load_sentences(str(path), cache_dir=None)
    assert loaded.classes == ("Neg", "neg", "other", "pos")
    assert loaded.note.endswith("; classes that differ only by case: 'Neg', 'neg'")


def test_too_few_sentences_of_a_class(tmp_path):
    path = write(tmp_path / "data.csv", "text,label", "a,1", "b,0", "c,1", "d,0")
    assert f"{path}: too few different sentences: no label has 3 or more" in error(path)


def test_a_rare_class_is_in_training_alone(tmp_path):
    pairs = [*rows(40), ("one", "rare"), ("two", "rare")]
    loaded = load_sentences(str(csv_file(tmp_path / "data.csv", pairs)), cache_dir=None)
    found = pairs_of(loaded)
    assert set(pairs[-2:]) <= set(found["train"]) and "rare" in loaded.classes
    assert sum(map(len, found.values())) == 42
    said = "in training alone, since there are fewer than 3 different sentences: 'rare'"
    assert said in loaded.note and "the test split has no example of 'rare'" in loaded.note


def test_a_class_that_is_not_tested_is_noted(tmp_path):
    loaded = load_sentences(str(write_folder(tmp_path, dev=TINY[:1])), cache_dir=None)
    assert loaded.note == "the valid split has no example of '0'"
    assert loaded.classes == ("0", "1")


def test_thousands_of_classes_are_not_listed(tmp_path):
    pairs = [(f"sentence {n}", f"class {n // 3}") for n in range(3000)]
    loaded = load_sentences(str(csv_file(tmp_path / "data.csv", pairs)), cache_dir=None)
    assert len(loaded.classes) == 1000
    assert len(loaded.describe()) < 300 and "1,000 classes" in loaded.describe()


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


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fine", "##st", "film", "."]


@pytest.fixture(scope="module")
def tokenizer():
    return keras_nlp.models.BertTokenizer(vocabulary=PIECES, lowercase=True)


@pytest.fixture(scope="module")
def inputs(tokenizer):
    preprocessor = keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, 6)
    return sentences.encode(["Finest film.", "?", "film film film film film"], preprocessor)


def test_encode(inputs):
    assert {name: value.dtype for name, value in inputs.items()} == {
        "token_ids": np.int32,
        "segment_ids": np.int32,
        "padding_mask": np.int32,
    }
    assert inputs["token_ids"].tolist() == [
        [2, 5, 6, 7, 8, 3],
        [2, 1, 3, 0, 0, 0],
        [2, 7, 7, 7, 7, 3],
    ]
    assert inputs["padding_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0], [1] * 6]
    assert not inputs["segment_ids"].any()


def test_any_white_space_separates_words(tokenizer):
    """Each of Python's, as when text is cut into training sequences; none is part of a word."""
    preprocessor = keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, 8)
    spaces = [c for c in map(chr, range(sys.maxunicode)) if c.isspace() and c != SEPARATOR]
    assert len(spaces) > 25
    texts = [f"film{space}finest ." for space in spaces]
    ids = sentences.encode([f"{text}\tfilm" for text in texts], preprocessor)["token_ids"]
    assert {tuple(row) for row in ids.tolist()} == {(2, 7, 5, 6, 8, 3, 7, 3)}
    # A tokenizer of bytes has a no-break space among them.
    kept = word_pieces.with_plain_spaces(texts, object()).numpy().tolist()
    assert kept == [text.encode() for text in texts]


def test_lengths_are_counted_up_to_the_last_token(inputs):
    found = sentences.lengths(inputs)
    assert found.dtype == np.int32
    assert found.tolist() == [max(np.flatnonzero(row)) + 1 for row in inputs["padding_mask"]]
    masks = {"padding_mask": np.array([[1, 0, 1, 0], [1, 1, 1, 1], [0, 1, 0, 0]])}
    assert sentences.lengths(masks).tolist() == [3, 4, 2]
    assert sentences.lengths({"token_ids": masks["padding_mask"]}) is None, "FNet reads padding"


def test_evidence_by_hand(inputs, tokenizer):
    labels = np.array([1, 0, 0], np.int32)
    found = sentences.naive_bayes_evidence(inputs, labels, tokenizer, 2)
    # Sentences that hold a piece, and one: fine 1 and 2, film 2 and 2; special tokens count one.
    counts = np.array([[1, 1]] * 5 + [[1, 2], [1, 2], [2, 2], [1, 2]], float)
    share = np.log(counts / counts.sum(axis=0))
    expected = share - share.mean(axis=1, keepdims=True)
    expected[:5] = 0
    np.testing.assert_allclose(found, expected)


def batches(inputs, share, first_batch=0, seed=3):
    tokenizer = keras_nlp.models.BertTokenizer(vocabulary=PIECES, lowercase=True)
    labels = np.arange(3, dtype=np.int32)
    hide = sentences.hide_word_pieces(share, tokenizer, seed)
    data = arrays.training_data(
        inputs, labels, seed=seed, batch_size=3, first_batch=first_batch, change=hide
    )
    return data.as_numpy_iterator()


def test_words_alone_are_hidden(inputs):
    hidden = words = 0
    for _, (x, y) in zip(range(200), batches(inputs, 0.4), strict=False):
        whole = inputs["token_ids"][y]
        changed = x["token_ids"] != whole
        assert (x["token_ids"][changed] == 4).all()
        assert not changed[np.isin(whole, (0, 2, 3))].any()
        hidden, words = hidden + changed.sum(), words + (~np.isin(whole, (0, 2, 3))).sum()
        assert (x["padding_mask"] == inputs["padding_mask"][y]).all()
    assert 0.35 < hidden / words < 0.45


def test_hidden_words_change_from_epoch_to_epoch_and_not_from_run_to_run(inputs):
    first, second, third = (next(batches(inputs, 0.5, start))[0] for start in (0, 1, 0))
    ids = [np.sort(x["token_ids"], axis=0).tolist() for x in (first, second, third)]
    assert ids[0] == ids[2] != ids[1]


def test_many_sentences_are_encoded_in_blocks(monkeypatch):
    tokenizer = keras_nlp.models.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"])
    preprocessor = keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, 8)
    texts = ["a " * (1 + n % 5) + "\t" + "a b" for n in range(17)]
    whole = sentences.encode(texts, preprocessor)
    monkeypatch.setattr(sentences, "SENTENCES_AT_ONCE", 5)
    parts = sentences.encode(texts, preprocessor)
    assert list(parts) == list(whole)
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array)
        assert parts[name].dtype == np.int32 and array.shape == (17, 8)


ODD_TEXTS = (
    "",
    "the loss of a step is the mean over all replicas and batches",
    "Film  FILM fílm fi\u0301lm \u0301film don´t ﬁlm Straße İs",
    "电影film 電影。한국어 \u1112\u1161\u11ab",
    "[MASK] x[SEP]y [CLS][UNK] <unk> the<unk> </s> <pad>",
    "good\u00a0film\u2028bad\u200bfilm soft\u00adhyphen \x1f\x85. \ufffd\ue000",
    "x" * 99 + " " + "y" * 101 + " é" + "z" * 200,
    "...!?'s -- \U0001f600 step steps STEPs",
)


@pytest.mark.parametrize("family", tiny_presets.FAMILIES)
def test_sentences_are_encoded_as_the_preprocessor_does(family):
    """Truncated pairs, accents, special tokens in a text, unknown and very long words."""
    kind = getattr(keras_nlp.models, f"{family}TextClassifierPreprocessor")
    tokenizer = tiny_presets.tokenizer(family)
    pairs = [SEPARATOR.join(pair) for pair in itertools.product(ODD_TEXTS, repeat=2)]
    for length, truncate in ((6, "round_robin"), (23, "round_robin"), (11, "waterfall")):
        preprocessor = kind(tokenizer, length, truncate=truncate)
        for texts in (list(ODD_TEXTS), pairs):
            parts = [
                word_pieces.with_plain_spaces(tf.constant(part), tokenizer)
                for part in zip(*(text.split(SEPARATOR) for text in texts), strict=True)
            ]
            expected = preprocessor(tuple(parts) if len(parts) > 1 else parts[0], None)
            found = sentences.encode(texts, preprocessor)
            assert found.keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_array_equal(found[name], np.asarray(array, np.int32), name)
                assert found[name].dtype == np.int32


def test_proteins_are_encoded_and_pairs_of_them_refused():
    """KerasHub's preprocessor of ESM has no segments, and no pairs."""
    pieces = ["<cls>", "<pad>", "<eos>", "<unk>", "L", "A", "G", "<mask>"]
    tokenizer = keras_nlp.models.ESMTokenizer(vocabulary=pieces)
    preprocessor = keras_nlp.models.ESMProteinClassifierPreprocessor(tokenizer, sequence_length=6)
    found = sentences.encode(["L A G", "A"], preprocessor)
    assert {name: array.tolist() for name, array in found.items()} == {
        "token_ids": [[0, 4, 5, 6, 2, 1], [0, 5, 2, 1, 1, 1]]
    }
    with pytest.raises(DataError, match="ESMProteinClassifier takes no pairs of sentences"):
        sentences.encode([f"L{SEPARATOR}A"], preprocessor)


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_tokenizer_that_reads_special_tokens_in_a_text(lowercase):
    tokenizer = keras_nlp.models.BertTokenizer(
        PIECES, lowercase=lowercase, special_tokens_in_strings=True
    )
    preprocessor = keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, 12)
    texts = ["fine[MASK]film [SEP] [PAD][PAD] Finest", "[mask] film"]
    expected = preprocessor(tf.constant(texts), None)
    found = sentences.encode(texts, preprocessor)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], np.asarray(array, np.int32), name)
    assert tokenizer.mask_token_id in found["token_ids"][0]


def test_each_distinct_word_is_tokenised_once(tokenizer, monkeypatch):
    stock, seen = word_pieces.with_plain_spaces, []

    def plain(texts, tokenizer):
        seen.extend(np.asarray(texts).ravel().tolist())
        return stock(texts, tokenizer)

    preprocessor = keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, 8)
    monkeypatch.setattr(word_pieces, "with_plain_spaces", plain)
    monkeypatch.setattr(sentences, "SENTENCES_AT_ONCE", 3)
    sentences.encode(["finest film", "film film"] * 5, preprocessor)
    words = [word for word in seen if word not in ("", b"")]
    assert sorted(words) == ["film", "finest"]


def test_a_preprocessor_of_your_own_is_called(tokenizer):
    class Own(keras_nlp.models.BertTextClassifierPreprocessor):
        def call(self, x, y=None, sample_weight=None):
            return {"token_ids": super().call(x)["token_ids"] + 1}

    found = sentences.encode(["finest film"], Own(tokenizer, 6))
    plain = sentences.encode(
        ["finest film"], keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, 6)
    )
    np.testing.assert_array_equal(found["token_ids"], plain["token_ids"] + 1)


def test_encoded_sentences_come_from_the_cache(tmp_path, tokenizer):
    kind = keras_nlp.models.BertTextClassifierPreprocessor
    texts = ["Finest film.", "?", "film film film"]
    numbers = np.arange(3, dtype=np.int32)
    splits = {split: (texts[:n], numbers[:n]) for n, split in enumerate(sentences.SPLITS, 1)}
    made = sentences.encode_once(splits, kind(tokenizer, 6), tmp_path)
    expected = {
        name: sentences.encode(found, kind(tokenizer, 6)) for name, (found, _) in splits.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "_encoded_blocks", lambda *_: 1 / 0)
        cached = sentences.encode_once(splits, kind(tokenizer, 6), tmp_path)
    for split, inputs in expected.items():
        assert cached[split].keys() == made[split].keys() == inputs.keys()
        for name, array in inputs.items():
            np.testing.assert_array_equal(cached[split][name], array)
            np.testing.assert_array_equal(made[split][name], array)
            assert cached[split][name].dtype == np.int32

    def entries():
        return len(list((tmp_path / "sequences").glob("[!.]*")))

    assert entries() == 3
    # Another test split is encoded alone; pairs, other lengths and rules are other tokens.
    sentences.encode_once(splits | {"test": (texts[1:], numbers[1:])}, kind(tokenizer, 6), tmp_path)
    assert entries() == 4
    pairs = {split: (["Finest film.\t?"], numbers[:1]) for split in splits}
    sentences.encode_once(pairs, kind(tokenizer, 6), tmp_path)
    assert entries() == 5
    sentences.encode_once(splits, kind(tokenizer, 5), tmp_path)
    assert entries() == 8
    other_rules = keras_nlp.models.BertTokenizer(vocabulary=PIECES, lowercase=False)
    sentences.encode_once(splits, kind(other_rules, 6), tmp_path)
    assert entries() == 11


def write_classes(folder, **texts):
    """Writes a file for each text into the folder of its class."""
    for name, found in texts.items():
        (folder / name).mkdir(parents=True)
        for number, text in enumerate(found):
            (folder / name / f"{number}_1.txt").write_text(text, encoding="utf-8")


class TestClassFolders:
    """A file for each text, as of aclImdb."""

    POS, NEG = ([f"{word} film\nno {n}\n" for n in range(20)] for word in ("good", "poor"))

    def test_below_train_and_test(self, tmp_path):
        write_classes(tmp_path / "train", pos=self.POS, neg=self.NEG, unsup=["what"])
        write_classes(tmp_path / "test", pos=["fine"], neg=["dull"])
        found = load_sentences(str(tmp_path), tmp_path)
        assert found.classes == ("neg", "pos")
        assert found.splits["test"][0] == ["dull", "fine"]
        assert found.splits["test"][1].tolist() == [0, 1]
        texts = [text for split in ("train", "valid") for text in found.splits[split][0]]
        assert sorted(texts) == sorted(text.strip() for text in (*self.POS, *self.NEG))
        assert f"{tmp_path / 'train' / 'unsup'} has no labels: left out" in found.note
        assert "a tenth of the training sentences is the validation split" in found.note

    def test_names_of_splits_in_capitals(self, tmp_path):
        write_classes(tmp_path / "Train", pos=self.POS, neg=self.NEG)
        write_classes(tmp_path / "TEST", pos=["fine"], neg=["dull"])
        assert load_sentences(str(tmp_path), tmp_path).splits["test"][0] == ["dull", "fine"]

    def test_without_splits(self, tmp_path):
        write_classes(tmp_path, pos=self.POS, neg=self.NEG)
        found = load_sentences(str(tmp_path), tmp_path)
        assert sum(len(texts) for texts, _ in found.splits.values()) == 40
        assert all(len(texts) for texts, _ in found.splits.values())

    @pytest.mark.parametrize(
        ("content", "said"),
        [(b" ", "the text is empty: remove the file"), (b"a\xff", "not UTF-8 at byte 1; convert")],
    )
    def test_a_text_that_cannot_be_used(self, content, said, tmp_path):
        write_classes(tmp_path, pos=self.POS, neg=self.NEG)
        (tmp_path / "pos" / "3_1.txt").write_bytes(content)
        with pytest.raises(DataError, match=f"pos/3_1.txt: {said}"):
            load_sentences(str(tmp_path), tmp_path)

    def test_scores_are_refused(self, tmp_path):
        write_classes(tmp_path, a=self.POS, b=self.NEG)
        with pytest.raises(DataError, match="has folders of texts, whose names are classes"):
            load_sentences(str(tmp_path), tmp_path, labels="scores")


@pytest.mark.parametrize(
    ("form", "said"), [("{}", "--labels scores predicts"), ("a{}", "free text")]
)
def test_many_classes_with_few_sentences_are_noted(form, said, tmp_path):
    rows = [f"film {n},{form.format(n % 100)}" for n in range(400)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *rows]))
    note = load_sentences(str(tmp_path / "a.csv"), tmp_path).note
    assert "100 classes, fewer than 10 training sentences for each on average" in note
    assert said in note


def test_a_test_file_has_the_columns_of_the_run(tmp_path):
    rows = [f"film {n},{n % 2}" for n in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *rows]))
    (tmp_path / "new.csv").write_text("review,label\nfine,1\n")
    with pytest.raises(DataError, match="a test file has the columns of the training data: rename"):
        load_sentences(str(tmp_path / "a.csv"), tmp_path, test_file=tmp_path / "new.csv")


def load_classes(folder, **options):
    return load_sentences(str(folder), folder, **options)


class TestOtherFilesOfClassFolders:
    """Those that a notebook, a Mac or a person leaves there."""

    POS, NEG = ([f"{word} film no {n}" for n in range(20)] for word in ("good", "poor"))

    @pytest.fixture
    def folder(self, tmp_path):
        write_classes(tmp_path, pos=self.POS, neg=self.NEG)
        return tmp_path

    def test_a_tab_in_a_text_is_a_space(self, folder):
        (folder / "neg" / "0_0.txt").write_text("a\tpoor\tfilm")
        found = load_classes(folder)
        assert not any("\t" in text for texts, _ in found.splits.values() for text in texts)
        assert "a poor film" in found.as_text().splits["train"] and not found.pairs

    def test_hidden_ones_are_not_read(self, folder):
        expected = load_classes(folder)
        write_classes(folder, **{".ipynb_checkpoints": ["a copy"]})
        (folder / "pos" / "._0_1.txt").write_bytes(b"\0\5\x16\7")
        (folder / "pos" / ".ipynb_checkpoints").mkdir()
        (folder / "pos" / ".ipynb_checkpoints" / "0.txt").write_text("a copy")
        found = load_classes(folder)
        assert pairs_of(found) == pairs_of(expected) and found.note == expected.note

    def test_names_in_capitals_are_read_and_others_are_counted(self, folder):
        (folder / "pos" / "90.TXT").write_text("a film in capitals")
        (folder / "pos" / "91.text").write_text("what")
        (folder / "neg" / "more").mkdir()
        (folder / "neg" / "more" / "1.txt").write_text("what")
        found = load_classes(folder)
        assert ("a film in capitals", "pos") in sum(pairs_of(found).values(), [])
        assert "2 files that are not read: neg/more/1.txt, pos/91.text; 41 rows" in found.note

    def test_columns_are_not_read(self, folder):
        found = load_classes(folder, text_column="review", label_column="stars")
        said = f"the columns review, stars are not read: {folder} has folders of texts"
        assert said in found.note
