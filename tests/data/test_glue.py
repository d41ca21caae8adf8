"""GLUE's files as its archive has them: headers, no header, no test labels, broken rows."""

import json

import pytest

from data import sentences
from data.errors import DataError

# By task: the lines of a labelled file, those of the test file, and the expected pair or sentence
# and label of the first row.
ROWS = {
    "CoLA": (
        "gj04\t{label}\t{star}\tSentence {n} reads.",
        "index\tsentence",
        None,
        "Sentence 0 reads.",
    ),
    "MRPC": (
        '{label}\t1\t2\tHe said "{n}\tShe said {n}',
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        'He said "0\tShe said 0',
    ),
    "QQP": (
        "1\t2\t3\tWhy {n}?\tHow {n}?\t{label}",
        "id\tquestion1\tquestion2",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "Why 0?\tHow 0?",
    ),
    "QNLI": (
        "7\tWhy {n}?\tBecause {n}.\t{label}",
        "index\tquestion\tsentence",
        "index\tquestion\tsentence\tlabel",
        "Why 0?\tBecause 0.",
    ),
    "RTE": (
        "7\tIt rains {n}.\tIt is wet {n}.\t{label}",
        "index\tsentence1\tsentence2",
        "index\tsentence1\tsentence2\tlabel",
        "It rains 0.\tIt is wet 0.",
    ),
    "SST-2": ("film {n}\t{label}", "index\tsentence", "sentence\tlabel", "film 0"),
}


def write(folder, task, counts=(("train", 30), ("dev", 6))):
    row, of_test, header, _ = ROWS[task]
    folder.mkdir(exist_ok=True)
    start = 0
    for name, count in counts:
        lines = [header] if header else []
        for number in range(count):
            label = number % 2
            lines.append(row.format(n=start + number, label=label, star="*" if label else ""))
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
        start += count
    cells = "\t".join(["0"] * len(of_test.split("\t")))
    (folder / "test.tsv").write_text(f"{of_test}\n{cells}\n")
    return str(folder)


@pytest.mark.parametrize("task", ROWS)
def test_each_task_without_test_labels(task, tmp_path):
    """The dev split is tested; a tenth of the training sentences validates."""
    found = sentences.load_sentences(write(tmp_path / task, task), tmp_path)
    sizes = {split: len(labels) for split, (_, labels) in found.splits.items()}
    assert sizes["test"] == 6 and sizes["train"] + sizes["valid"] == 30 and sizes["valid"] < 10
    texts, labels = found.splits["test"]
    first = ROWS[task][3]
    assert texts[0] == first.replace("0", "30") and labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert found.classes == ("0", "1") and found.pairs == ("\t" in first)
    expected = {"CoLA": ("matthews",), "MRPC": ("f1",), "QQP": ("f1",)}
    assert found.metrics == expected.get(task, ())
    assert "test.tsv has no labels: dev.tsv is the test split" in found.note
    seen = [text for texts, _ in found.splits.values() for text in texts]
    assert len(set(seen)) == 36


def test_mnli_reads_gold_labels_and_the_matched_files(tmp_path):
    header = "index\tsentence1\tsentence2\tlabel1\tgold_label"
    names = ("neutral", "entailment", "contradiction")
    for name, count in (("train", 30), ("dev_matched", 6), ("dev_mismatched", 3)):
        rows = [
            f"{number}\tA {name} {number}\tB\tneutral\t{names[number % 3]}"
            for number in range(count)
        ]
        (tmp_path / f"{name}.tsv").write_text("\n".join([header, *rows]) + "\n")
    (tmp_path / "test_matched.tsv").write_text("index\tsentence1\tsentence2\n0\ta\tb\n")
    found = sentences.load_sentences(str(tmp_path), tmp_path)
    assert found.classes == ("contradiction", "entailment", "neutral") and found.metrics == ()
    assert found.splits["test"][0][0] == "A dev_matched 0\tB"
    assert found.splits["test"][1].tolist() == [2, 1, 0] * 2


def test_mnli_of_hugging_face_has_other_names(tmp_path):
    sizes = {"train": 30, "validation_matched": 6, "validation_mismatched": 3, "test_matched": 4}
    for name, count in sizes.items():
        rows = [
            {"premise": f"{name} {n}", "hypothesis": "B", "label": -1 if "test" in name else n % 3}
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = sentences.load_sentences(str(tmp_path), tmp_path)
    assert found.pairs and found.classes == ("0", "1", "2")
    assert found.splits["test"][0][0] == "validation_matched 0\tB"
    assert "test_matched.jsonl has no labels: validation_matched.jsonl is the test" in found.note


def test_qqp_of_hugging_face_has_other_names(tmp_path):
    rows = [{"question1": f"Why {n}?", "question2": "How?", "label": n % 2} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = sentences.load_sentences(str(tmp_path / "a.jsonl"), tmp_path)
    assert found.pairs and found.metrics == ("f1",)


def test_rows_of_qqp_that_are_cut_short_are_left_out(tmp_path):
    folder = write(tmp_path / "QQP", "QQP")
    with open(tmp_path / "QQP" / "train.tsv", "a") as file:
        file.write("1\t2\tWhy?\n1\t2\t3\t\tHow?\t0\n")
    found = sentences.load_sentences(folder, tmp_path)
    assert len(found.splits["train"][0]) + len(found.splits["valid"][0]) == 30
    assert "train.tsv: 2 of 32 rows left out" in found.note


def test_a_score_beside_a_label_is_not_the_label(tmp_path):
    """For instance the confidence of a label."""
    path = tmp_path / "pairs.csv"
    rows = [f"a{n},b{n},{'same other'.split()[n % 2]},0.{n + 10}" for n in range(40)]
    path.write_text("\n".join(["sentence1,sentence2,label,score", *rows]) + "\n")
    found = sentences.load_sentences(str(path), tmp_path)
    assert found.classes == ("other", "same") and found.pairs
    named = sentences.load_sentences(str(path), tmp_path, label_column="score")
    assert named.scores


def test_columns_can_be_named(tmp_path):
    path = tmp_path / "reviews.csv"
    rows = [f'"x{n}, y",{"bad good".split()[n % 2]},why {n}' for n in range(20)]
    path.write_text("\n".join(["review,mood,reason", *rows]) + "\n")
    with pytest.raises(DataError, match="no column sentence or text and no column label"):
        sentences.load_sentences(str(path), tmp_path)
    one = sentences.load_sentences(str(path), tmp_path, text_column="review", label_column="mood")
    assert one.classes == ("bad", "good") and not one.pairs
    named = dict(text_column="review", second_text_column="reason", label_column="mood")
    two = sentences.load_sentences(str(path), tmp_path, **named)
    # Pairs are recognised whatever the labels' column is called.
    for header in ("sentence1,mood,sentence2", "question,mood,sentence"):
        path.write_text("\n".join([header, *rows]) + "\n")
        found = sentences.load_sentences(str(path), tmp_path, label_column="mood")
        assert found.pairs and found.classes == ("bad", "good")
    path.write_text("\n".join(["review,mood,reason", *rows]) + "\n")
    assert {text.split("\t")[1] for texts, _ in two.splits.values() for text in texts} == {
        f"why {n}" for n in range(20)
    }
