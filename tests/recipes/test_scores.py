"""`recipes.text_classification` on labels that are scores."""

import json
import math
import re

import keras
import keras_nlp
import numpy as np
import pytest
import tensorflow as tf

from data import scores, tables
from data.errors import DataError
from exports import huggingface
from models import label_kinds, presets
from recipes import evaluate, export, predict, text_classification
from tests.recipes.test_text_classification import TINY
from tests.support import processes
from training.errors import OptionsError
from training.loaded_run import load_run

# Words are whole pieces.
TINY = TINY | dict(base_learning_rate=0.003, vocabulary_size=120, sequence_length=24)
SCALED = dict(mean=1000.0, deviation=20.0)  # about what the scores of `write` are
NAMES = {"mae", "rmse", "pearson", "spearman"}


def write(folder, factor=20.0, offset=1000.0, label="price"):
    """Writes a folder of three tables: the words good and poor move a sentence's score."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    words = "the film was seen by many who said it is very long and the end comes late".split()
    for name, count in (("train", 96), ("dev", 21), ("test", 37)):
        lines = [f"sentence\t{label}"]
        for number in range(count):
            row = [*rng.choice(words, 4), *rng.choice(["good", "poor", "fair"], 2)]
            score = row.count("good") - row.count("poor") + rng.normal() / 4
            lines.append(f"{' '.join(row)} {number}\t{offset + factor * score:.12g}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "prices")


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "run", folder)


def train(run_dir, dataset, **options):
    options = TINY | dict(dataset=str(dataset), label_column="price") | options
    options = text_classification.Options(**options, run_dir=run_dir)
    return run_dir, text_classification.main(options)


def table(folder, name):
    rows = [line.split("\t") for line in (folder / f"{name}.tsv").read_text().splitlines()[1:]]
    return [text for text, _ in rows], np.array([float(score) for _, score in rows])


def answers_of(run, texts):
    return np.array([found[0]["score"] for found in text_classification.predict(run, texts)])


def test_the_metrics_are_those_of_the_saved_models_answers(finished, folder):
    """In the unit of the labels, with every example once."""
    run_dir, results = finished
    run = load_run(run_dir)
    texts, truth = table(folder, "test")
    assert results["test"] == pytest.approx(scores.measure(truth, answers_of(run, texts)), rel=1e-4)
    assert set(results["test"]) == NAMES and "test_by_class" not in results
    texts, truth = table(folder, "dev")
    found = scores.measure(truth, answers_of(run, texts))
    for name in ("mae", "rmse", "pearson"):
        assert results["history"][f"val_{name}"][-1] == pytest.approx(found[name], rel=1e-4)
    assert results["valid_spearman"] == pytest.approx(found["spearman"])
    # The loss is that of standard scores.
    deviation = table(folder, "train")[1].std()
    loss = results["history"]["val_loss"][-1]
    assert loss == pytest.approx((found["rmse"] / deviation) ** 2, rel=1e-4)


def test_it_learns_and_is_compared_with_simpler_models(finished):
    run_dir, results = finished
    assert results["test"]["pearson"] > 0.6
    assert {"mean_mae", "mean_rmse"} | {f"ridge_{name}" for name in NAMES} == set(
        results["baseline"]
    )
    said = (run_dir / "worker-0.log").read_text()
    assert "beats the mean of training in mae, the mean of training in rmse" in said
    assert re.search(r"labels are scores, \d+ different numbers; with --labels classes", said)
    assert re.search(r"scores from 9\d\d\.\d+ to 10\d\d\.\d+, mean \d+(\.\d)? ± 2\d\.\d+", said)
    card = (run_dir / "model" / "README.md").read_text()
    assert "| pearson | 0." in card and "| ridge_pearson | | 0." in card


def test_tensorboard_shows_scores(finished):
    shown = [text for tag, _, text in processes.events(finished[0]) if tag == "sentences"]
    assert re.fullmatch(
        r"\| .* \| (9|10)\d\d(\.\d)? \| (9|10)\d\d(\.\d)? \|", shown[-1].decode().splitlines()[2]
    )


@pytest.mark.long
def test_the_model_is_a_preset_that_answers_in_the_unit_without_this_package(finished, folder):
    run_dir, results = finished
    texts, _ = table(folder, "dev")
    model = keras_nlp.models.TextClassifier.from_preset(str(run_dir / "model"))
    found = np.ravel(model.predict(texts, verbose=0))
    np.testing.assert_allclose(found, answers_of(load_run(run_dir), texts), rtol=1e-5)
    metadata = json.loads((run_dir / "model" / "recipe.json").read_text())
    expected = {"scores": True, "pairs": False, "weights_sha256": results["weights_sha256"]}
    assert metadata == expected


@pytest.mark.long
def test_any_unit_is_learned_alike(tmp_path):
    """The same weights for scores 1,024 times larger; a power of two changes no rounding."""
    options = dict(precision="float64", max_steps=6, clip_norm=0.5, weight_decay=0.1)
    small = write(tmp_path / "small", factor=20.0, offset=0.0)
    large = write(tmp_path / "large", factor=20.0 * 1024, offset=0.0)
    runs = [train(tmp_path / f"run-{data.name}", data, **options)[0] for data in (small, large)]
    tensors = [processes.tensors(run) for run in runs]
    for name, value in tensors[0].items():
        if not name.startswith("optimizer/"):
            np.testing.assert_allclose(value, tensors[1][name], atol=1e-6, err_msg=name)
    texts, _ = table(small, "test")
    a, b = (answers_of(load_run(run), texts) for run in runs)
    np.testing.assert_allclose(a * 1024, b, rtol=1e-4, atol=1.0)  # queried in float32
    assert np.std(b) > 4000


@pytest.mark.long
def test_half_precision_answers_in_full(tmp_path):
    """A bfloat16 has steps of 64 at 10,000."""
    folder = write(tmp_path / "prices", offset=10_000.0)
    run_dir, results = train(tmp_path / "run", folder, precision="mixed_bfloat16", max_steps=4)
    texts, truth = table(folder, "test")
    found = answers_of(load_run(run_dir), texts)
    assert results["test"]["mae"] == pytest.approx(scores.measure(truth, found)["mae"], abs=1)
    assert np.std(found) > 1


@pytest.mark.long
def test_a_new_model_begins_at_the_mean_evidence(folder, tmp_path):
    """A step at a rate of almost zero; what it answers is compared with counts of words."""
    run_dir, _ = train(tmp_path / "run", folder, max_steps=1, base_learning_rate=1e-12)
    texts, truth = table(folder, "train")
    found = answers_of(load_run(run_dir), texts)
    words = np.array([text.split().count("good") - text.split().count("poor") for text in texts])
    assert np.corrcoef(found, words)[0, 1] > 0.8
    assert abs(found.mean() - truth.mean()) < 0.1 * truth.std()
    assert 0.2 < found.std() / truth.std() < 1


@pytest.mark.long
def test_evaluate(finished, folder, tmp_path, capsys):
    run_dir, results = finished
    found = evaluate.main(evaluate.Options(run_dir=run_dir))
    assert found["test"] == pytest.approx(results["test"], rel=1e-5)
    assert found["baseline"] == pytest.approx(results["baseline"])
    assert re.search(r"^spearman +0\.\d{4}$", capsys.readouterr().out, re.M)
    # Few numbers, or integers: the run has learned scores.
    texts, _ = table(folder, "dev")
    (tmp_path / "few.csv").write_text(
        "sentence,price\n" + "\n".join(f"{t},1000" for t in texts[:5])
    )
    new = tmp_path / "new.csv"
    new.write_text("sentence,price\n" + "\n".join(f"{t},{990 + n}" for n, t in enumerate(texts)))
    truth = 990 + np.arange(len(texts))
    expected = scores.measure(truth, answers_of(load_run(run_dir), texts))
    found = evaluate.main(evaluate.Options(run_dir=run_dir, test_file=new))
    assert found["test"] == pytest.approx(expected, rel=1e-4)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("train", "dev", "test"):
        (other / f"{name}.csv").write_text(new.read_text())
    found = evaluate.main(evaluate.Options(run_dir=run_dir, dataset=str(other)))
    assert found["test"] == pytest.approx(expected, rel=1e-4)
    new.write_text("sentence,price\na film,12\nanother,cheap\n")
    with pytest.raises(
        DataError, match=f"^{new}, line 3: the label is 'cheap', expected a number$"
    ):
        evaluate.main(evaluate.Options(run_dir=run_dir, test_file=new))


def test_predict_prints_the_score(finished, capsys):
    run_dir, _ = finished
    (answers,) = predict.main(predict.Options(run_dir=run_dir, inputs=("a good film",)))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["a good film", f"  {answers[0]['score']:.4g}"] and answers[0].keys() == {
        "score"
    }
    assert [predict.format_value("score", n) for n in (3.71828, 123456.7)] == ["3.718", "123457"]


@pytest.mark.long
def test_the_saved_model_takes_texts_and_gives_scores(finished):
    run_dir, _ = finished
    path = export.main(export.Options(run_dir=run_dir, to="saved_model"))
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    texts = ["a good film", "many said it is poor and poor"]
    served = serve(texts=tf.constant(texts))
    assert served.keys() == {"scores"} and served["scores"].dtype == "float32"
    np.testing.assert_allclose(served["scores"], answers_of(load_run(run_dir), texts), rtol=1e-5)


def test_the_last_layer_for_hugging_face_answers_in_the_unit(finished):
    """From the pooled vector of Keras's model; `make test-export` compares the whole of it."""
    model = load_run(finished[0]).load_model("float32")
    config = huggingface.config(model, ())
    assert config["problem_type"] == "regression" and config["id2label"] == {"0": "score"}
    tensors = huggingface.named_tensors(model)
    inputs = {k: np.array(v) for k, v in model.preprocessor(["a good film", "poor"]).items()}
    pooled = np.array(model.backbone(inputs)["pooled_output"])
    found = pooled @ tensors["classifier.weight"].T + tensors["classifier.bias"]
    np.testing.assert_allclose(found, model(inputs, training=False), rtol=1e-5)


@pytest.mark.export
def test_hugging_face_answers_in_the_unit(finished, tmp_path):
    run_dir, _ = finished
    path = export.main(export.Options(run_dir=run_dir, to="huggingface", folder=tmp_path / "out"))
    from transformers import AutoModelForSequenceClassification, pipeline

    model = AutoModelForSequenceClassification.from_pretrained(path)
    assert model.config.num_labels == 1
    texts = ["a good film", "many said it is poor and poor"]
    found = pipeline("text-classification", str(path), function_to_apply="none")(texts)
    expected = answers_of(load_run(run_dir), texts)
    np.testing.assert_allclose([answer["score"] for answer in found], expected, rtol=1e-4)


def further(run_dir, dataset, **options):
    sizes = {k: v for k, v in TINY.items() if k not in presets.FROM_SCRATCH}
    options = sizes | dict(base_learning_rate=1e-12, max_steps=1) | options
    options = text_classification.Options(**options, dataset=str(dataset), run_dir=run_dir)
    return text_classification.main(options)["notes"]


@pytest.mark.long
def test_a_head_for_scores_is_trained_further_on_scores_alone(finished, folder, tmp_path):
    run_dir, _ = finished
    model = str(run_dir / "model")
    notes = further(tmp_path / "a", folder, preset=model, label_column="price")
    assert f"the head of {model}, for scores, is trained further" in notes
    texts, _ = table(folder, "test")
    before, after = (answers_of(load_run(run), texts) for run in (run_dir, tmp_path / "a"))
    np.testing.assert_allclose(after, before, rtol=1e-5)
    classes = tmp_path / "classes.tsv"
    classes.write_text("sentence\tlabel\n" + "\n".join(f"a film {n}\t{n % 2}" for n in range(60)))
    notes = further(tmp_path / "b", classes, preset=model)
    assert f"a new head: that of {model} is for scores" in notes
    (answers,) = text_classification.predict(load_run(tmp_path / "b"), ["a film"])
    assert sum(answer["probability"] for answer in answers) == pytest.approx(1)
    # And the reverse; `--init-from` has a new head in any case.
    model = str(tmp_path / "b" / "model")
    notes = further(tmp_path / "c", folder, preset=model, label_column="price")
    assert f"a new head: that of {model} is for the classes 0, 1" in notes
    found = answers_of(load_run(tmp_path / "c"), texts)
    assert abs(found.mean() - SCALED["mean"]) < 3 * SCALED["deviation"]
    notes = further(tmp_path / "d", folder, init_from=run_dir, label_column="price")
    assert any(note.endswith(f"; --preset {run_dir / 'model'} keeps its head") for note in notes)


def test_a_head_of_one_output_that_is_not_said_to_be_for_scores_is_new(tmp_path):
    """A preset of another hand: it may be the logit of a class."""
    (tmp_path / "task.json").write_text(
        json.dumps({"class_name": "BertTextClassifier", "config": {"num_classes": 1}})
    )
    (tmp_path / presets.HEAD_WEIGHTS).touch()
    kept, note = presets.kept_head(str(tmp_path), ())
    assert not kept and note == f"a new head: that of {tmp_path} is for 1 classes"


@pytest.mark.long
def test_classes_and_scores_are_not_mixed_up(finished, folder, tmp_path):
    lines = [f"a {'good' if n % 2 else 'poor'} film {n}\t{n % 2}" for n in range(60)]
    data = tmp_path / "classes.tsv"
    data.write_text("\n".join(["sentence\tlabel", *lines]))
    train(tmp_path / "run", data, label_column=None, max_steps=1)
    with pytest.raises(DataError, match="prices: has scores, the run learned classes$"):
        options = dict(dataset=str(folder), label_column="price")
        evaluate.main(evaluate.Options(run_dir=tmp_path / "run", **options))
    data.write_text(data.read_text().replace("\t1", "\tyes"))
    with pytest.raises(DataError, match="the label is 'yes', expected a number; likewise"):
        evaluate.main(
            evaluate.Options(run_dir=finished[0], dataset=str(data), label_column="label")
        )


@pytest.mark.parametrize(
    "changes, expected",
    [
        (dict(class_weights="balanced", labels="scores"), "balanced: not with --labels scores"),
        (dict(class_weights="balanced"), "--class-weights balanced: .*prices has scores$"),
        (dict(keep_best="val_spearman"), "val_spearman: the rank correlation .* use val_pearson"),
        (dict(label_smoothing=0.1, labels="scores"), "smoothing 0.1: not with --labels scores"),
        (dict(label_smoothing=0.1), "--label-smoothing 0.1: .*prices has scores$"),
        (dict(label_column="sentence", labels="scores"), "line 2: the label is .*, expected a num"),
    ],
)
def test_what_is_wrong_ends_in_a_line(folder, tmp_path, changes, expected):
    with pytest.raises((OptionsError, DataError), match=expected) as caught:
        train(tmp_path / "run", folder, **changes)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_scores_that_float32_cannot_hold_are_refused(tmp_path):
    """Their errors would be 0."""
    rows = [f"film {n},{10**9 + n % 7}" for n in range(60)]
    (tmp_path / "films.csv").write_text("\n".join(["text,label", *rows]))
    options = dict(labels="scores", label_column=None)
    with pytest.raises(DataError, match="films.csv: the scores differ by .* float32 rounds by up"):
        train(tmp_path / "run", tmp_path / "films.csv", **options)


@pytest.mark.long
def test_pairs_and_a_metric_to_keep_the_best_of(tmp_path):
    """STS-B's columns: both sentences are read, and the best weights are in the unit too."""
    header = "index\tsentence1\tsentence2\tscore"
    for name, count in (("train", 48), ("dev", 9)):
        rows = [f"{n}\tA film {n}\t{('bad', 'fine')[n % 2]} {n}\t{n % 5}" for n in range(count)]
        (tmp_path / f"{name}.tsv").write_text("\n".join([header, *rows]) + "\n")
    (tmp_path / "test.tsv").write_text("index\tsentence1\tsentence2\n0\ta\tb\n")
    options = dict(label_column=None, keep_best="val_pearson", precision="float64")
    run_dir, results = train(tmp_path / "run", tmp_path, **options)
    assert set(results["test"]) == NAMES
    history = results["history"]["val_pearson"]
    best = load_run(run_dir, best=True)
    assert best.results["steps"] == 5 * (1 + int(np.argmax(history)))
    (found,) = text_classification.predict(best, ["a film ||| fine"])
    assert -2 < found[0]["score"] < 6 and not math.isnan(found[0]["score"])
    path = export.main(export.Options(run_dir=run_dir, to="saved_model", folder=tmp_path / "out"))
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    served = serve(texts=tf.constant(["a film"]), second_texts=tf.constant(["fine"]))
    (last,) = text_classification.predict(load_run(run_dir), ["a film ||| fine"])
    assert served["scores"].numpy()[0] == pytest.approx(last[0]["score"], rel=1e-5)


def test_the_scale_is_of_the_training_split():
    splits = {name: (["a"], np.array([[float(n)]])) for n, name in enumerate(("valid", "test"))}
    splits["train"] = ["a", "b"], np.array([[2.0], [6.0]])
    data = text_classification.sentences.Sentences("x", splits, ())
    scale = label_kinds.Scores(data).scale()
    assert (scale.scale, scale.offset) == (2.0, 4.0) and isinstance(scale, keras.layers.Rescaling)


def test_the_examples_with_the_largest_errors_first(finished, folder, tmp_path, command_line):
    run_dir, results = finished
    status, _, _ = command_line(evaluate, run_dir, "--examples", tmp_path / "a.csv")
    header, rows = tables.read_rows(tmp_path / "a.csv")
    assert status == 0 and header == ["input", "label", "predicted"]
    expected = tables.read_table(folder / "test.tsv", ("sentence",), ("price",))
    assert sorted(row[0] for row in rows) == sorted(text for _, (text, _) in expected)
    errors = [abs(float(label) - float(predicted)) for _, label, predicted in rows]
    assert errors == sorted(errors, reverse=True)
    assert np.mean(errors) == pytest.approx(results["test"]["mae"], rel=1e-3)
