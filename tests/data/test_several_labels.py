"""Any number of labels for a sentence: how they are read, and what is measured from them."""

import json
import re
import tracemalloc

import keras_nlp
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from sklearn.metrics import accuracy_score, f1_score, hamming_loss
from sklearn.utils.class_weight import compute_class_weight

from data import label_fields, sentences, several_labels
from data.errors import DataError
from data.word_pieces import SPECIAL_TOKENS

NAMES = [["sad"], ["funny", "sad"], [], ["funny", "long, slow"]]


def load(path, **options):
    return sentences.load_sentences(str(path), None, **options)


def labels_of(found):
    """The names of each sentence's labels."""
    return {
        text: [found.classes[index] for index in np.flatnonzero(row)]
        for texts, labels in found.splits.values()
        for text, row in zip(texts, labels, strict=True)
    }


EXPECTED = {f"film {n}": sorted(NAMES[n % 4]) for n in range(60)}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_lists_are_recognised(ending, tmp_path):
    path = tmp_path / f"films.{ending}"
    rows = [{"text": f"film {n}", "labels": NAMES[n % 4]} for n in range(60)]
    if ending == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    found = load(path)
    assert found.kind == "several" and found.classes == ("funny", "long, slow", "sad")
    assert labels_of(found) == EXPECTED
    assert found.note.startswith("each sentence has any number of labels; ")
    assert "training sentences have no label" in found.note
    with pytest.raises(DataError, match=f"^{path}: the labels are lists: --labels several reads"):
        load(path, labels="classes")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_lists_behind_nulls_are_recognised(ending, tmp_path):
    path = tmp_path / f"films.{ending}"
    rows = [{"text": f"film {n}", "labels": NAMES[n % 4] if n > 20 else None} for n in range(60)]
    if ending == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    expected = {row["text"]: sorted(row["labels"] or []) for row in rows}
    assert labels_of(load(path, label_column="labels")) == expected


def test_fields_of_a_table_are_lists_or_names_between_separators(tmp_path):
    forms = ("{}", "{}", "{}", '"[""funny"", ""long, slow""]"')
    rows = [f"film {n},{forms[n % 4].format('|'.join(NAMES[n % 4]))}" for n in range(60)]
    path = tmp_path / "films.csv"
    path.write_text("\n".join(["text,mood", *rows]))
    found = load(path, label_column="mood", labels="several")
    assert labels_of(found) == EXPECTED
    # Otherwise a combination is a class, as before.
    path.write_text("\n".join(["text,mood", *(f"film {n},{'ab'[n % 2]}|c" for n in range(60))]))
    found = load(path, label_column="mood")
    assert found.classes == ("a|c", "b|c") and "--labels several" not in found.note


@pytest.mark.parametrize("lists", [["a", "b", "a|b"], ["['a']", "['a', 'b']", "['b']"]])
def test_fields_like_lists_are_noted(lists, tmp_path):
    path = tmp_path / "films.csv"
    rows = [f'film {n},"{lists[n % 3]}"' for n in range(60)]
    path.write_text("\n".join(["text,label", *rows]))
    hint = "--labels several reads lists, and names separated by , or [|], empty for none"
    assert re.search(f"each combination of labels is a class: {hint}", load(path).note)
    assert "--labels several" not in (load(path, labels="classes").note or "")
    assert load(path, labels="several").classes == ("a", "b")
    path.write_text("\n".join(["text,label", *rows, "film,"]))
    with pytest.raises(DataError, match=f"line 62: the label is empty: remove the row; {hint}$"):
        load(path)


@pytest.mark.parametrize(
    "labels", [("Bonn, Germany", "Paris"), ("[SPAM]", "[HAM]"), ("yes", "no"), ("1,5", "2")]
)
def test_names_with_commas_or_brackets_are_classes(labels):
    assert not label_fields.are_like_lists(labels)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_lists_of_zeros_and_ones_are_refused(ending, tmp_path):
    path = tmp_path / f"films.{ending}"
    lists = [[1, 0, 0], [0, 0, 0], [0, 1, 1]]
    rows = [{"text": f"film {n}", "labels": lists[n % 3]} for n in range(60)]
    table = [f'{row["text"]},"{row["labels"]}"' for row in rows]
    lines = ["text,labels", *table] if ending == "csv" else map(json.dumps, rows)
    path.write_text("\n".join(lines))
    way_out = r"or a column of 0 and 1 for each label \(--label-column A B\)$"
    with pytest.raises(
        DataError, match=f"^{path}: each list of labels is 3 times 0 or 1: .*{way_out}"
    ):
        load(path, labels="several")
    with pytest.raises(DataError, match=f"are not texts or integers; write the names .*{way_out}"):
        label_fields.names_of("here", "[1.0, 0.0]")


@pytest.mark.parametrize(
    "lists",
    [[["0", "1"], ["1", "0"]], [["1", "1"], ["0"]], [["1", "1"], ["0", "2"]], [["1"], ["0"]], []],
)
def test_lists_of_integers_are_names(lists):
    assert label_fields.length_of_flags(lists) is None


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("b, a|b", ["b", "a", "b"]),
        ("['a, b', 'c']", ["a, b", "c"]),
        ('["a, b", 3]', ["a, b", "3"]),
        ("[]", []),
        ("", []),
        ("a", ["a"]),
    ],
)
def test_a_field(field, names):
    assert label_fields.names_of("here", field) == names
    assert label_fields.names_of("here", label_fields.as_field(names)) == names


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            "['a'",
            "are not a list of JSON or Python; names may also be separated by , or |, without",
        ),
        ("['a' 'b']", "are not a list of JSON or Python"),  # of NumPy
        ("[{[]: 1}]", "are not a list of JSON or Python"),
        ("[1.5]", "are not texts or integers$"),
        ("[true]", "are not texts or integers"),
        ("a||b", "is empty, or not UTF-8"),
        ('["\\ud800"]', "is empty, or not UTF-8"),
    ],
)
def test_a_field_that_is_no_list_is_refused(field, message):
    with pytest.raises(DataError, match=f"^here: .*{message.replace('|', '[|]')}"):
        label_fields.names_of("here", field)


def test_columns_of_zeros_and_ones(tmp_path):
    rows = [f"film {n},{n % 2},{float(n % 3 == 0)},0" for n in range(60)]
    path = tmp_path / "films.csv"
    path.write_text("\n".join(["text,toxic,rude,mild", *rows]))
    found = load(path, label_column=("toxic", "rude", "mild"))
    assert found.classes == ("toxic", "rude", "mild") and found.kind == "several"
    expected = {f"film {n}": ["toxic"] * (n % 2) + ["rude"] * (n % 3 == 0) for n in range(60)}
    assert labels_of(found) == expected
    assert "the train split has no example of 'mild', which cannot be learned" in found.note
    path.write_text("text,toxic,rude\na film,0,2\n")
    with pytest.raises(DataError, match=f"^{path}, line 2: rude is '2', expected 0 or 1$"):
        load(path, label_column=("toxic", "rude"))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([["0", "1"], ["1", "0"]], "the labels '0', '1', expected others too; of lists of 0 and "),
        ([["a", "b"]], "the labels 'a', 'b', expected others too$"),
        ([[]], "no label, expected others too$"),
    ],
)
def test_the_same_labels_everywhere_are_refused(labels, message, tmp_path):
    """Lists of two flags, read as names, are the same two names."""
    rows = [{"text": f"film {n}", "labels": labels[n % len(labels)]} for n in range(60)]
    for name, part in (("train", rows), ("test", [{"text": "a film", "labels": ["b", "c"]}])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    if labels == [[]]:
        rows = [f"film {n},0,0" for n in range(60)]
        (tmp_path / "flags.csv").write_text("\n".join(["text,b,c", *rows]))
        with pytest.raises(DataError, match=f"flags.csv: all training sentences have {message}"):
            load(tmp_path / "flags.csv", label_column=("b", "c"))
        return
    path = tmp_path / "train.jsonl"
    with pytest.raises(DataError, match=f"^{path}: all training sentences have {message}"):
        load(path)


def test_a_label_of_all_training_sentences_is_noted(tmp_path):
    rows = [f"film {n},{'a|b' if n % 2 else 'b'}" for n in range(60)]
    path = tmp_path / "films.csv"
    path.write_text("\n".join(["text,label", *rows]))
    note = "all training sentences have 'b', which cannot be learned"
    assert note in load(path, labels="several").note


def test_another_run_has_its_own_order(tmp_path):
    for name, lists in (("train", ["a|b", "b|c"]), ("valid", ["a"]), ("test", ["c", "a"])):
        rows = [f"{name} film {n}\t{field}" for n, field in enumerate(lists)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["text\tlabel", *rows]))
    found = load(tmp_path, labels="several")
    assert found.classes == ("a", "b", "c") and "valid split has no example of 'b'" in found.note
    again = found.with_classes(["c", "x", "b", "a"], several=True)
    assert labels_of(again) == {
        text: sorted(names, key="cxba".index) for text, names in labels_of(found).items()
    }
    with pytest.raises(DataError, match="class 'c', the run knows 'a', 'b': rename the classes"):
        found.with_classes(["a", "b"], several=True)
    with pytest.raises(DataError, match="has several labels for a sentence, the run learned cla"):
        found.with_classes(["a", "b", "c"])


@pytest.mark.parametrize("split", ["valid", "test", "other"])
def test_a_label_that_training_lacks_is_refused(split, tmp_path):
    for name in ("train", "valid", "test", "other"):
        rows = [f"{name} film {n},{field}" for n, field in enumerate(["a|b", "b", ""])]
        rows += [f"{name} film,c|d"] * (name == split)
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
    path = tmp_path / f"{split}.csv"
    other = path if split == "other" else None
    with pytest.raises(DataError, match=f"^{path}: the label 'c', 'd' is not in training: add"):
        load(tmp_path, labels="several", test_file=other)


def test_one_label_for_each_sentence_is_noted(tmp_path):
    path = tmp_path / "films.csv"
    path.write_text("\n".join(["text,label", *(f"film {n},{n % 2}" for n in range(60))]))
    note = "each sentence has one label: --labels classes chooses one"
    assert note in load(path, labels="several").note
    path.write_text(f"{path.read_text()}\nfilm,")
    assert note not in load(path, labels="several").note
    path = tmp_path / "films.jsonl"  # its lists are not read as classes
    rows = [{"text": f"film {n}", "labels": [n % 2]} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert note not in load(path).note


def test_one_label_is_refused(tmp_path):
    rows = [f"film {n},a" for n in range(40)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *rows]))
    with pytest.raises(DataError, match="the only label is 'a', expected two labels or more"):
        load(tmp_path, labels="several")


@pytest.fixture
def truth():
    rng = np.random.default_rng(0)
    labels = (rng.random((40, 5)) < [0.5, 0.2, 0.7, 0.1, 0.0]).astype(np.int8)
    return labels, labels ^ (rng.random((40, 5)) < [0.3, 0.1, 0.1, 0.2, 0.0])


def test_measures_as_scikit_learn(truth):
    found = several_labels.measure(*truth)
    labels, predicted = truth
    assert not (labels | predicted)[:, 4].any()  # counts as 0
    assert found == pytest.approx(
        {
            "binary_accuracy": 1 - hamming_loss(labels, predicted),
            "micro_f1": f1_score(labels, predicted, average="micro"),
            "macro_f1": f1_score(labels, predicted, average="macro", zero_division=0.0),
            "exact_match": accuracy_score(labels, predicted),
        }
    )
    nothing = several_labels.measure(np.zeros((3, 2)), np.zeros((3, 2)))
    assert nothing == {"binary_accuracy": 1, "micro_f1": 0, "macro_f1": 0, "exact_match": 1}


def test_balanced_weights_are_scikit_learns():
    labels = np.array([[1, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]], np.int8)
    found = several_labels.balanced_weights(np.tile(labels, (100, 1)))  # more than int8 counts
    expected = compute_class_weight("balanced", classes=np.array([0, 1]), y=labels[:, 0])
    np.testing.assert_allclose(found[:, 0], expected)
    np.testing.assert_array_equal(found[:, 1:], 1.0)  # one value each


def test_baselines():
    """Each word tells a label; a label that all sentences have is always predicted."""
    pairs = [("good" if n % 2 else "poor", "long" if n % 3 else "short") for n in range(60)]
    texts = [f"{one} {other} film" for one, other in pairs]
    labels = np.array([[n % 2, n % 3 > 0, 1, 0] for n in range(60)], np.int8)
    splits = {"train": (texts, labels), "test": (texts[:12], labels[:12])}
    found = several_labels.baselines(splits)
    assert found["most_frequent_binary_accuracy"] == pytest.approx((0.5 + 2 / 3 + 1 + 1) / 4)
    assert found["tfidf_exact_match"] == found["tfidf_micro_f1"] == 1.0
    assert found["tfidf_macro_f1"] == 3 / 4  # no text has the last label
    wordless = {name: (["a b"] * len(y), y) for name, (_, y) in splits.items()}
    assert not any(name.startswith("tfidf") for name in several_labels.baselines(wordless))


def test_evidence_is_half_of_the_log_odds():
    rng = np.random.default_rng(0)
    tokenizer = keras_nlp.models.BertTokenizer([*SPECIAL_TOKENS, *"abcdefgh"])
    ids = rng.integers(0, 13, (40, 6)).astype(np.int32)
    labels = rng.integers(0, 2, (40, 3)).astype(np.int8)
    found = several_labels.evidence({"token_ids": ids}, labels, tokenizer)
    has = np.array([[piece in row for piece in range(13)] for row in ids], float)
    has[:, :5] = 0
    with_label, without = 1 + has.T @ labels, 1 + has.T @ (1 - labels)
    odds = np.log(with_label / with_label.sum(axis=0)) - np.log(without / without.sum(axis=0))
    odds[:5] = 0
    np.testing.assert_allclose(found, odds / 2, atol=1e-12)


def test_evidence_needs_no_table_of_sentences_and_labels():
    """As numbers such a table takes eight times the memory of the labels, and twice."""
    rng = np.random.default_rng(0)
    tokenizer = keras_nlp.models.BertTokenizer([*SPECIAL_TOKENS, *"abcdefgh"])
    ids = rng.integers(5, 13, (5000, 6)).astype(np.int32)
    labels = np.zeros((5000, 400), np.int8)
    labels[np.arange(5000), np.arange(5000) % 400] = 1
    tracemalloc.start()
    several_labels.evidence({"token_ids": ids}, labels, tokenizer)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * labels.nbytes
