"""`recipes.text_classification` on texts that have any number of labels, and more metrics."""

import json
import re
import shutil

import keras_nlp
import numpy as np
import pytest
import scipy.special
import tensorflow as tf

from data import sentences, several_labels, tables, tfidf
from data.errors import DataError
from exports import huggingface
from models import presets
from recipes import evaluate, export, predict, text_classification
from tests.recipes.test_text_classification import TINY
from tests.support import processes
from training.errors import OptionsError
from training.loaded_run import load_run
from training.options import all_problems

# Words are whole pieces.
TINY = TINY | dict(base_learning_rate=0.003, vocabulary_size=120, sequence_length=24)
NAMES = ["funny", "long", "sad"]
METRICS = {"binary_accuracy", "micro_f1", "macro_f1", "exact_match"}


def write(folder):
    """Writes a folder of three files: each label is named by a word, mostly."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    words = "the film was seen by many who said it is very late and the end comes".split()
    for name, count in (("train", 96), ("dev", 21), ("test", 37)):
        lines = []
        for number in range(count):
            labels = [
                each
                for each, share in zip(NAMES, (0.5, 0.3, 0.2), strict=True)
                if rng.random() < share
            ]
            told = [each for each in labels if rng.random() < 0.9]
            text = " ".join([*rng.choice(words, 4), *told, str(number)])
            lines.append(json.dumps({"text": text, "labels": labels}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "films")


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "run", folder)


def train(run_dir, dataset, **options):
    options = TINY | dict(dataset=str(dataset)) | options
    options = text_classification.Options(**options, run_dir=run_dir)
    return run_dir, text_classification.main(options)


def table(folder, name):
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    labels = np.array([[each in row["labels"] for each in NAMES] for row in rows], np.int8)
    return [row["text"] for row in rows], labels


def answers_of(run, texts):
    """The labels of each text, as `table` has them."""
    answers = text_classification.predict(run, texts)
    names = [{answer["class"] for answer in found} for found in answers]
    return np.array([[each in found for each in NAMES] for found in names], np.int8)


def test_the_metrics_are_those_of_the_saved_models_answers(finished, folder):
    run_dir, results = finished
    run = load_run(run_dir)
    texts, truth = table(folder, "test")
    found = answers_of(run, texts)
    assert results["test"] == pytest.approx(several_labels.measure(truth, found))
    assert set(results["test"]) == METRICS
    recalls = [results["test_by_class"][name]["recall"] for name in NAMES]
    assert recalls == pytest.approx((truth & found).sum(axis=0) / truth.sum(axis=0))
    texts, truth = table(folder, "dev")
    for name, value in several_labels.measure(truth, answers_of(run, texts)).items():
        assert results["history"][f"val_{name}"][-1] == pytest.approx(value)


def test_it_learns_and_is_compared_with_simpler_models(finished):
    run_dir, results = finished
    assert results["test"]["micro_f1"] > 0.6
    assert set(results["baseline"]) == {
        f"{kind}_{name}" for kind in ("most_frequent", "tfidf") for name in METRICS
    }
    log = (run_dir / "worker-0.log").read_text()
    assert re.search(r"3 labels, (1|0\.\d+) for a sentence: 'funny', 'long', 'sad'", log)
    metadata = json.loads((run_dir / "model" / "recipe.json").read_text())
    expected = {"classes": NAMES, "several": True, "pairs": False}
    assert {name: metadata[name] for name in expected} == expected


def test_tensorboard_shows_labels(finished, folder):
    shown = [text for tag, _, text in processes.events(finished[0]) if tag == "sentences"]
    rows = shown[-1].decode().splitlines()[2:]
    texts, truth = table(folder, "dev")
    first = int(np.argmax(truth.sum(axis=1)[:10]))
    names = ", ".join(np.array(NAMES)[truth[first] > 0])
    assert rows[first].startswith(f"| {texts[first]} | {names} | ")
    assert any("**" in row for row in rows)


def test_predict_prints_the_labels_and_all_probabilities_in_a_table(finished, tmp_path, capsys):
    run_dir, _ = finished
    texts = ("the film was long and sad", "the film was seen")
    answers = predict.main(predict.Options(run_dir=run_dir, inputs=texts))
    assert [[answer["class"] for answer in found] for found in answers][1] == []
    assert all(answer["probability"] >= 0.5 for answer in answers[0])
    assert "long" in {answer["class"] for answer in answers[0]}
    assert capsys.readouterr().out.splitlines()[-2:] == [texts[1], "  no label"]
    (tmp_path / "new.csv").write_text("\n".join(["text", *texts]))
    options = dict(file=tmp_path / "new.csv", text_column="text", csv=tmp_path / "found.csv")
    predict.main(predict.Options(run_dir=run_dir, **options))
    header, rows = tables.read_rows(tmp_path / "found.csv")
    assert header == ["text", "labels", *(f"probability_{name}" for name in NAMES)]
    for row, found in zip(rows, answers, strict=True):
        likely = [name for name, value in zip(NAMES, row[-3:], strict=True) if float(value) >= 0.5]
        assert likely == sorted(answer["class"] for answer in found)
        assert row[1] == "|".join(likely)
    options["csv"] = tmp_path / "all.csv"
    predict.main(predict.Options(run_dir=run_dir, **options), threshold=0.0)
    _, rows = tables.read_rows(tmp_path / "all.csv")
    assert [row[1] for row in rows] == ["|".join(NAMES)] * 2
    run = load_run(run_dir)
    smallest = min(answer["probability"] for answer in answers[0]) - 1e-4
    for threshold, count in ((smallest, len(answers[0])), (1.0, 0)):
        (above,) = text_classification.predict(run, texts[:1], threshold=threshold)
        assert len(above) == count
    with pytest.raises(OptionsError, match=r"--threshold 1.5: must be in \[0, 1\]"):
        text_classification.predict(run, texts, threshold=1.5)
    with pytest.raises(OptionsError, match="--threshold 0.3: leave it out, --top 2 has 2 labels"):
        text_classification.predict(run, texts, threshold=0.3, top=2)
    run.metadata["several"] = False
    with pytest.raises(OptionsError, match="--threshold 0.3: the run did not learn several lab"):
        text_classification.predict(run, texts, threshold=0.3)
    options["csv"] = tmp_path / "best.csv"
    predict.main(predict.Options(run_dir=run_dir, **options), top=1)
    header, _ = tables.read_rows(tmp_path / "best.csv")
    assert sorted(header) == ["class", "probability", "text"]  # the likeliest, as asked for
    found = predict.main(predict.Options(run_dir=run_dir, inputs=texts, json=True))
    assert [len(answer) for answer in found] == [3, 3]
    (best,) = text_classification.predict(load_run(run_dir), texts[:1], top=1)
    assert best == found[0][:1]


def test_evaluate_and_the_examples_with_most_wrong_labels_first(finished, folder, tmp_path):
    run_dir, results = finished
    examples = tmp_path / "worst.csv"
    found = evaluate.main(evaluate.Options(run_dir=run_dir, examples=examples))
    assert found["test"] == pytest.approx(results["test"])
    assert found["baseline"] == pytest.approx(results["baseline"])
    header, rows = tables.read_rows(examples)
    assert header == ["input", "label", "predicted", "wrong"] and len(rows) == 37
    texts, truth = table(folder, "test")
    wrong = (answers_of(load_run(run_dir), texts) != truth).sum(axis=1)
    assert [int(row[-1]) for row in rows] == sorted(wrong.tolist(), reverse=True)
    names = {
        text: "|".join(np.array(NAMES)[row > 0]) for text, row in zip(texts, truth, strict=True)
    }
    assert {row[0]: row[1] for row in rows} == names


@pytest.mark.long
def test_a_test_file_of_other_forms_and_fewer_labels(finished, folder, tmp_path):
    """The run says what labels are, and has their order."""
    texts, truth = table(folder, "test")
    rows = [
        f"{text},{'|'.join(np.array(NAMES)[row > 0][::-1])}"
        for text, row in zip(texts, truth, strict=True)
    ]
    (tmp_path / "new.csv").write_text("\n".join(["text,labels", *rows]))
    found = evaluate.main(evaluate.Options(run_dir=finished[0], test_file=tmp_path / "new.csv"))
    assert found["test"] == pytest.approx(finished[1]["test"])
    (tmp_path / "new.csv").write_text("text,labels\na film,dull\n")
    with pytest.raises(DataError, match="new.csv: the label 'dull' is not in training"):
        evaluate.main(evaluate.Options(run_dir=finished[0], test_file=tmp_path / "new.csv"))


def test_the_card_and_what_it_calls(finished):
    run_dir, results = finished
    card = (run_dir / "model" / "README.md").read_text()
    assert "logits of shape (batch, 3), whose sigmoid are the labels' probabilities, out." in card
    assert "| micro_f1 | 0." in card
    model = keras_nlp.models.TextClassifier.from_preset(str(run_dir / "model"))
    text = "the film was long and sad"
    (row,) = scipy.special.expit(model.predict([text], verbose=0))
    (answers,) = text_classification.predict(load_run(run_dir), [text], top=0)
    expected = {answer["class"]: answer["probability"] for answer in answers}
    assert dict(zip(NAMES, row, strict=True)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_exports(finished):
    run_dir, _ = finished
    path = export.main(export.Options(run_dir=run_dir, to="saved_model"))
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    served = serve(texts=tf.constant(["the film was long and sad"]))
    answers = text_classification.predict(load_run(run_dir), ["the film was long and sad"], top=0)
    names = [name.decode() for name in served["classes"].numpy()[0]]
    assert names == [answer["class"] for answer in answers[0]]
    expected = [answer["probability"] for answer in answers[0]]
    np.testing.assert_allclose(served["probabilities"][0], expected, rtol=1e-4)
    config = huggingface.config(load_run(run_dir).load_model("float32"), NAMES, True)
    assert config["problem_type"] == "multi_label_classification"


@pytest.mark.long
def test_a_new_model_begins_as_naive_bayes(folder, tmp_path):
    """A step at a rate of almost zero."""
    run_dir, _ = train(tmp_path / "run", folder, max_steps=1, base_learning_rate=1e-12)
    texts, truth = table(folder, "train")
    found = several_labels.measure(truth, answers_of(load_run(run_dir), texts))
    assert found["micro_f1"] > 0.7
    # On average as often as the training texts have it.
    answers = text_classification.predict(load_run(run_dir), texts, top=0)
    for name, share in zip(NAMES, truth.mean(axis=0), strict=True):
        shares = [a["probability"] for found in answers for a in found if a["class"] == name]
        assert np.mean(shares) == pytest.approx(share, abs=0.15)


def further(run_dir, dataset, **options):
    sizes = {k: v for k, v in TINY.items() if k not in presets.FROM_SCRATCH}
    options = sizes | dict(base_learning_rate=1e-12, max_steps=1) | options
    options = text_classification.Options(**options, dataset=str(dataset), run_dir=run_dir)
    return text_classification.main(options)


@pytest.mark.long
def test_a_head_is_kept_for_several_labels_alone(finished, folder, tmp_path):
    run_dir, _ = finished
    model = str(run_dir / "model")
    results = further(tmp_path / "a", folder, preset=model)
    assert (
        f"the head of {model} is trained further; its classes are those of the data"
        in results["notes"]
    )
    assert results["test"] == pytest.approx(finished[1]["test"])
    rows = [f"a {NAMES[n % 3]} film {n},{NAMES[n % 3]}" for n in range(60)]
    (tmp_path / "classes.csv").write_text("\n".join(["text,label", *rows]))
    notes = further(tmp_path / "b", tmp_path / "classes.csv", preset=model)["notes"]
    assert f"a new head: that of {model} is for several labels for a text" in notes
    model = str(tmp_path / "b" / "model")
    notes = further(tmp_path / "c", folder, preset=model)["notes"]
    assert f"a new head: that of {model} is for one class for each text" in notes


@pytest.mark.long
def test_balanced_labels_are_predicted_though_they_are_rare(tmp_path):
    """Of a text that says nothing; a label that no text has is noted, and stays unlikely."""
    words = "the film was seen by many who said it is very late and the end comes".split()
    rng = np.random.default_rng(0)
    draws = ((" ".join(rng.choice(words, 6)), rng.random(2)) for _ in range(144))
    rows = [f"{text},{int(one < 0.1)},{int(other < 0.5)},0" for text, (one, other) in draws]
    (tmp_path / "films.csv").write_text("\n".join(["text,rare,half,none", *rows]))
    options = dict(label_column=("rare", "half", "none"), token_dropout=0.0)
    odds = {}
    for name in ("none", "balanced"):
        options["class_weights"] = name
        run_dir, results = train(tmp_path / name, tmp_path / "films.csv", **options)
        (found,) = text_classification.predict(load_run(run_dir), ["the film"], top=0)
        shares = {answer["class"]: answer["probability"] for answer in found}
        odds[name] = {label: share / (1 - share) for label, share in shares.items()}
    assert odds["balanced"]["rare"] / odds["none"]["rare"] > 5
    assert odds["balanced"]["none"] < 0.2
    note = "--class-weights balanced: the weights of 'none' are 1: all training sentences have the "
    assert any(each.startswith(note) for each in results["notes"])
    found = evaluate.main(evaluate.Options(run_dir=run_dir))
    assert found["test"] == pytest.approx(results["test"])


def test_a_head_for_the_same_labels_in_another_order_is_kept(finished, folder, tmp_path):
    run_dir = shutil.copytree(finished[0], tmp_path / "run")
    model = run_dir / "model"
    metadata = json.loads((model / "recipe.json").read_text())
    metadata["classes"] = ["sad", "funny", "long"]
    (model / "recipe.json").write_text(json.dumps(metadata))
    data = sentences.load_sentences(str(folder), tmp_path)
    found = text_classification.in_order_of_head(data, str(model))
    assert found.classes == ("sad", "funny", "long") and data.classes == tuple(NAMES)
    _, truth = table(folder, "test")
    np.testing.assert_array_equal(found.splits["test"][1], truth[:, [2, 0, 1]])
    assert presets.kept_head(str(model), found.classes, found.several)[0]
    said = text_classification.unused_head_note(run_dir, str(model), data)
    assert said is not None and said.endswith("keeps its head")
    metadata["classes"] = ["sad", "funny", "late"]
    (model / "recipe.json").write_text(json.dumps(metadata))
    assert text_classification.in_order_of_head(data, str(model)) is data


@pytest.mark.long
def test_training_continues_from_labels_in_another_order(finished, folder, tmp_path):
    reordered = tmp_path / "films"
    reordered.mkdir()
    for path in folder.iterdir():
        rows = map(json.loads, path.read_text().splitlines())
        flags = [{"text": r["text"]} | {n: int(n in r["labels"]) for n in NAMES} for r in rows]
        (reordered / path.name).write_text("\n".join(map(json.dumps, flags)))
    options = dict(preset=str(finished[0] / "model"), label_column=("sad", "funny", "long"))
    results = further(tmp_path / "a", reordered, **options)
    assert results["test"] == pytest.approx(finished[1]["test"])


@pytest.mark.long
def test_the_head_of_a_frozen_encoder_begins_as_regressions(finished, folder, tmp_path):
    options = dict(init_from=finished[0], freeze_backbone=True, label_smoothing=0.1)
    results = further(tmp_path / "a", folder, **options)
    frequent = results["baseline"]["most_frequent_binary_accuracy"]
    assert results["test"]["binary_accuracy"] > frequent


@pytest.mark.parametrize("labels", ["scores", "several"])
def test_what_labels_do_not_have_is_refused_before_they_are_read(labels):
    options = dict(labels=labels, class_weights="balanced", metrics=("f1", "auc"))
    expected = [f"--metrics f1 auc: not with --labels {labels}"]
    if labels == "scores":
        expected.insert(0, "--class-weights balanced: not with --labels scores")
    assert all_problems(text_classification.Options(**options)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(metrics=("f2",)), "--metrics ['f2']: must be one or several of f1, matthews, auc, "),
        (dict(label_column=("a", "b"), labels="classes"), "--label-column a b: several need --lab"),
        (dict(label_column=("a", "b", "a")), "--label-column: names a more than once"),
    ],
)
def test_options_that_do_not_work(options, message):
    (found,) = all_problems(text_classification.Options(**options))
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(metrics=("matthews",)), "matthews: .*films has several labels for a sentence$"),
        (dict(labels="classes"), "the labels are lists: --labels several reads them"),
    ],
)
def test_what_the_data_do_not_have_ends_in_a_line(folder, tmp_path, options, message):
    with pytest.raises((OptionsError, DataError), match=message) as caught:
        train(tmp_path / "run", folder, **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.fixture
def of_one_class(tmp_path):
    """A folder whose validation and test splits have one class."""
    for name, count, classes in (("train", 40, 2), ("dev", 9, 1), ("test", 9, 1)):
        rows = [f"a {name} film {n}\t{n % classes}" for n in range(count)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["text\tlabel", *rows]))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(metrics=("auc",), keep_best="val_auc"),
            "--keep-best val_auc: all sentences of the validation split are of the class '0'",
        ),
        (dict(keep_best="val_auc"), "--keep-best val_auc: needs --metrics auc"),
        (dict(keep_best="val_f1", metrics=("auc",)), "--keep-best val_f1: needs --metrics f1"),
    ],
)
def test_the_best_by_what_is_not_measured_is_refused(of_one_class, tmp_path, options, message):
    with pytest.raises(OptionsError) as caught:
        train(tmp_path / "run", of_one_class, **options)
    assert str(caught.value) == message and not (tmp_path / "run").exists()


def test_an_area_under_the_curve_of_one_class_is_noted(of_one_class):
    data = sentences.load_sentences(str(of_one_class), of_one_class / "cache")
    options = text_classification.Options(metrics=("auc",), keep_best="val_accuracy")
    assert text_classification.undefined_area(options, data) == [
        f"the {name} auc is 0: all sentences of the {name} split are of the class '0'"
        for name in ("validation", "test")
    ]
    others = text_classification.Options(metrics=("f1",))
    assert text_classification.undefined_area(others, data) == []
    found = tfidf.baselines(data.splits, ["auc", "matthews"])
    assert "tfidf_auc" not in found and "tfidf_matthews" in found


@pytest.mark.long
def test_metrics_that_are_asked_for(tmp_path, capsys):
    rng = np.random.default_rng(0)
    rows = [f"a {'good' if rng.random() < 0.8 else 'bad'} film {n},{n % 2}" for n in range(60)]
    rows += [f"a {'good' if rng.random() < 0.3 else 'bad'} film {n},{n % 2}" for n in range(60, 99)]
    (tmp_path / "films.csv").write_text("\n".join(["text,label", *rows]))
    names = ["f1", "matthews", "auc", "precision", "recall"]
    options = dict(metrics=tuple(names), keep_best="val_auc")
    run_dir, results = train(tmp_path / "run", tmp_path / "films.csv", **options)
    assert list(results["test"]) == ["accuracy", "macro_f1", *names]
    assert {f"tfidf_{name}" for name in names} < set(results["baseline"])
    assert {f"val_{name}" for name in names} < set(results["history"])
    by_class = results["test_by_class"]["1"]
    for name in ("f1", "precision", "recall"):
        assert results["test"][name] == pytest.approx(by_class[name])
    assert (run_dir / "best").is_dir()
    assert "| auc | 0." in (run_dir / "model" / "README.md").read_text()
    found = evaluate.main(evaluate.Options(run_dir=run_dir))
    assert found["test"] == pytest.approx(results["test"])
    (tmp_path / "three.csv").write_text(
        "\n".join(["text,label", *(f"a film {n},{n % 3}" for n in range(60))])
    )
    with pytest.raises(OptionsError, match="--metrics f1 auc: .* has 3 classes, expected two$"):
        train(tmp_path / "no", tmp_path / "three.csv", metrics=("matthews", "f1", "auc"))
    options = dict(metrics=("matthews",), max_steps=1)
    _, results = train(tmp_path / "three", tmp_path / "three.csv", **options)
    assert list(results["test"]) == ["accuracy", "macro_f1", "matthews"]
