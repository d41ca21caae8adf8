"""What one does with a trained run of any recipe: `evaluate` and `predict`."""

import importlib
import json
import re
import shutil
import sys

import keras
import keras_nlp
import numpy as np
import pytest
from PIL import Image

from data import melting
from data.images import load_images
from data.word_pieces import special_ids
from models import bert
from recipes import bert_mlm, evaluate, predict
from tests.support import strategy_run
from tests.support.damaged import flip_a_bit
from training.errors import RunError
from training.loaded_run import LoadedRun, load_run

SHARED = dict(strategy="none", epochs=1, global_batch_size=16, quiet=True)
SIZES = dict(num_layers=1, num_heads=2, hidden_dim=8)
OPTIONS = {
    "mnist": SHARED | dict(max_examples=48, accumulate_steps=2),
    "dna_melting": SHARED | SIZES | dict(precision="float64", base_learning_rate=0.02),
    "text_classification": SHARED | SIZES | dict(vocabulary_size=60, sequence_length=12),
}
RECIPES = ("bert_mlm", *OPTIONS)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    strategy_run.write_data(folder)
    return folder


@pytest.fixture(scope="module")
def runs(data, tiny_run, tmp_path_factory):
    """A run of each recipe: folder and results, by recipe."""
    made = tmp_path_factory.mktemp("runs")
    found = {"bert_mlm": (tiny_run.folder, tiny_run.results)}
    for name, options in OPTIONS.items():
        recipe = importlib.import_module(f"recipes.{name}")
        options = options | strategy_run.data_options(name, data)
        found[name] = (made / name, recipe.main(recipe.Options(**options, run_dir=made / name)))
    return found


@pytest.fixture
def copied(runs, tmp_path):
    def copied(recipe):
        ignored = shutil.ignore_patterns("checkpoints", "logs")
        return shutil.copytree(runs[recipe][0], tmp_path / recipe, ignore=ignored)

    return copied


def change(path, part=None, **values):
    content = json.loads(path.read_text())
    (content[part] if part else content).update(values)
    path.write_text(json.dumps(content))


def evaluated(folder, **options):
    return evaluate.main(evaluate.Options(run_dir=folder, **options))


def predicted(folder, *inputs):
    return predict.main(predict.Options(run_dir=folder, inputs=inputs))


class TestEvaluate:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_its_own_data_give_the_test_metrics_again(self, recipe, runs, capsys):
        folder, results = runs[recipe]
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        found = evaluated(folder, batch_size=7)  # not the run's batch, and a last one with padding
        assert found["test"].keys() == results["test"].keys()
        for name, value in results["test"].items():
            assert found["test"][name] == pytest.approx(value, rel=1e-5), name
        assert found["baseline"] == results["baseline"] and found["notes"] == []
        assert f"{folder}, {results['steps']} steps\n" in capsys.readouterr().out
        assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_the_weights_are_those_of_the_run(self, recipe, runs, copied):
        """Other weights give other numbers."""
        folder = copied(recipe)
        (name,) = (
            n for n in ("model.weights.h5", "model.keras") if (folder / "model" / n).exists()
        )
        sums = folder / "model" / "SHA256SUMS"
        sums.write_text("\n".join(x for x in sums.read_text().splitlines() if name not in x) + "\n")
        run = load_run(folder)
        model = run.load_model()
        rng = np.random.default_rng(0)
        model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
        if name == "model.keras":
            model.save(folder / "model" / name)
        else:
            model.backbone.save_weights(folder / "model" / name)
        assert evaluated(folder)["test"] != pytest.approx(runs[recipe][1]["test"], rel=1e-3)

    def test_of_another_dataset_the_test_split(self, runs, tmp_path, command_line):
        other = tmp_path / "molecules.csv"
        strategy_run.write_molecules(other, 90)
        head, *rows = [line.rpartition(",") for line in other.read_text().splitlines()]
        warm = [f"{row},{float(tm) + 30}" for row, _, tm in rows]
        other.write_text("\n".join(["".join(head), *warm]) + "\n")
        folder, results = runs["dna_melting"]
        status, printed, _ = command_line(evaluate, folder, "--dataset", other, "--json")
        found = json.loads(printed)  # one JSON object and nothing else
        assert status == 0 and found["dataset"] == str(other)
        # The model keeps the scale of its own training data: 30 degrees above are 30 degrees off.
        assert found["test"]["rmse"] > 20 > results["test"]["rmse"]

    def test_another_text_is_cut_into_the_runs_own_word_pieces(self, runs, data, tmp_path):
        text = (data / "text.txt").read_text()
        (tmp_path / "other.txt").write_text(
            re.sub("loss|replicas|batches|tokens|step", "mean", text)
        )
        found = evaluated(runs["bert_mlm"][0], dataset=str(tmp_path / "other.txt"))
        own = runs["bert_mlm"][1]["test"]["cross_entropy"]
        assert found["test"]["cross_entropy"] != pytest.approx(own, rel=1e-3)
        assert found["test"]["perplexity"] == np.exp(found["test"]["cross_entropy"])

    def test_classes_are_matched_by_name(self, runs, data, tmp_path, command_line):
        """In a file of two of the classes they have other numbers."""
        folder, _ = runs["text_classification"]
        other = tmp_path / "other"
        other.mkdir()
        texts, labels = [], []
        for path in (data / "sentences").glob("*.tsv"):
            lines = [line.split("\t") for line in path.read_text().splitlines()]
            lines = lines[:1] + [line for line in lines[1:] if line[1] != "0"]
            (other / path.name).write_text("".join("\t".join(line) + "\n" for line in lines))
            if path.name == "test.tsv":
                texts, labels = zip(*lines[1:], strict=True)
        answers = predicted(folder, *texts)
        hits = [found[0]["class"] == label for found, label in zip(answers, labels, strict=True)]
        found = evaluated(folder, dataset=str(other))
        assert 0 < np.mean(hits) and found["test"]["accuracy"] == pytest.approx(np.mean(hits))
        for path in other.glob("*.tsv"):
            path.write_text(path.read_text().replace("\t2\n", "\tnew\n"))
        status, _, errors = command_line(evaluate, folder, "--dataset", other)
        assert status == 2 and errors.count("\n") == 1 and "class 'new', the run knows" in errors

    def test_data_that_have_changed_since_are_named(self, copied, capsys):
        folder = copied("mnist")
        change(folder / "options.json", "resolved", data_sha256="0" * 64)
        assert "not the data that the run was trained on" in evaluated(folder)["notes"][0]
        assert "not the data that the run was trained on" in capsys.readouterr().out

    def test_a_recipe_that_builds_another_model_is_refused(self, copied, monkeypatch):
        """As one that took its scale from the data, and not from the run."""
        from recipes import dna_melting

        stock = dna_melting.build_model
        monkeypatch.setattr(
            dna_melting, "build_model", lambda options, mean: stock(options, mean + 1)
        )
        with pytest.raises(RunError, match="the recipe builds another model"):
            evaluated(copied("dna_melting"))


class TestPairs:
    @pytest.fixture
    def pairs(self, tmp_path):
        """Two files; the sentences of a pair have as many word pieces."""
        folder = tmp_path / "pairs"
        folder.mkdir()
        rows = [("the loss of a step", "loss the a of step"), ("a step", "step a")]
        for name, part in (("one", rows), ("two", rows[:1] * 2)):
            lines = (
                json.dumps({"sentence_good": g, "sentence_bad": b, "UID": name}) for g, b in part
            )
            (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    def test_the_good_sentence_counts_where_it_is_likelier(
        self, runs, pairs, command_line, monkeypatch
    ):
        scores = {"the loss of a step": -1.0, "loss the a of step": -2.0, "a step": -3.0}
        ask = lambda run, texts: [scores.get(text, -2.5) for text in texts]  # noqa: E731
        monkeypatch.setattr(bert_mlm, "log_likelihoods", ask)
        folder, _ = runs["bert_mlm"]
        status, out, _ = command_line(evaluate, folder, "--on", f"blimp:{pairs}", "--json")
        assert status == 0
        assert json.loads(out)["test"] == {"one": 0.5, "two": 1.0, "accuracy": 0.75}

    def test_each_piece_is_masked_alone(self, runs):
        folder, _ = runs["bert_mlm"]
        tokenizer = keras_nlp.models.BertTokenizer.from_preset(
            str(folder / "model"), special_tokens_in_strings=True
        )
        model, words, expected = load_run(folder).load_model(), "the loss of a step".split(), 0.0
        for place, word in enumerate(words):
            text = " ".join([*words[:place], "[MASK]", *words[place + 1 :]])
            ids = bert.encode(tokenizer, text, 512)[None]
            inputs = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": 0 * ids + 1}
            inputs["mask_positions"] = np.array([[place + 1]])
            (piece,) = tokenizer(word).tolist()
            expected += np.log(float(keras.ops.softmax(model(inputs)[0, 0])[piece]))
        (found,) = bert_mlm.log_likelihoods(load_run(folder), [" ".join(words)])
        assert found == pytest.approx(expected, rel=1e-4)

    def test_of_equal_logits_nothing_is_right(self, runs, pairs, monkeypatch):
        folder, _ = runs["bert_mlm"]
        model = load_run(folder).load_model("float32")
        model.set_weights([np.zeros_like(weights) for weights in model.get_weights()])
        monkeypatch.setattr(LoadedRun, "load_model", lambda run, dtype=None: model)
        found = evaluated(folder, on=f"blimp:{pairs}")
        assert found["test"] == {"one": 0.0, "two": 0.0, "accuracy": 0.0}

    def test_what_is_refused(self, runs, pairs, tmp_path, command_line):
        folder, _ = runs["bert_mlm"]
        (pairs / "two.jsonl").write_text('{"sentence_good": "a"}\n')
        for run, on, said in (
            (folder, f"blimp:{pairs}", "two.jsonl, line 1: expected JSON with sentence_good"),
            (folder, f"blimp:{tmp_path}", "no pairs in *.jsonl files"),
            (folder, "glue", "--on glue: must be blimp:FOLDER"),
            (runs["mnist"][0], f"blimp:{pairs}", "recipes.mnist, has no log_likelihoods()"),
        ):
            status, _, errors = command_line(evaluate, run, "--on", on)
            assert status == 2 and errors.count("\n") == 1 and said in errors


class TestPredict:
    def test_classes_of_images(self, runs, data, tmp_path, capsys):
        folder, results = runs["mnist"]
        pixels, labels = load_images(str(data / "images")).splits["test"]
        paths = [str(tmp_path / f"{number}.png") for number in range(len(pixels))]
        for image, path in zip(pixels, paths, strict=True):
            Image.fromarray(np.uint8(np.rint(image[..., 0] * 255))).save(path)
        found = predicted(folder, *paths)
        hits = [int(f[0]["class"]) == label for f, label in zip(found, labels, strict=True)]
        assert np.mean(hits) == pytest.approx(results["test"]["accuracy"], abs=1e-6)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == paths[0] and re.fullmatch(r" +[\d.]+%  \d", lines[1])

    def test_classes_of_texts(self, runs, capsys):
        folder, _ = runs["text_classification"]
        texts = ("the film was good", "the film was poor and late")
        model = keras_nlp.models.BertTextClassifier.from_preset(str(folder / "model"))
        logits = np.asarray(model.predict(list(texts), verbose=0))
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        for found, expected in zip(predicted(folder, *texts), shares, strict=True):
            assert [item["class"] for item in found] == [str(c) for c in np.argsort(-expected)]
            assert [item["probability"] for item in found] == pytest.approx(
                sorted(expected, reverse=True), rel=1e-4
            )

    def test_temperatures_of_molecules(self, runs, command_line):
        folder, _ = runs["dna_melting"]
        model = load_run(folder).load_model()
        duplex = melting.plain_duplex("ACGTACGTAC", 0.2, 1e-6)
        expected = float(model(melting.encode([duplex]))[0, 0])
        given = ("acgtacgtac", "--sodium", "0.2", "--json")
        status, printed, _ = command_line(predict, folder, *given)
        # The model was trained with less padding: the answer does not depend on it.
        assert status == 0 and json.loads(printed)[0][0]["°C"] == pytest.approx(expected, rel=1e-5)
        assert predicted(folder, "ACGTACGTAC")[0][0]["°C"] != pytest.approx(expected, rel=1e-5)
        hairpin = predicted(folder, "GACGAAAGTC:(((....)))")[0][0]["°C"]
        assert hairpin != pytest.approx(predicted(folder, "GACGAAAGTC")[0][0]["°C"], rel=1e-5)
        status, _, errors = command_line(predict, folder, "ACGTACGTACN")
        assert status == 2 and "found N" in errors
        status, _, errors = command_line(predict, folder, "ACGT", "--salt", "1")
        assert status == 2 and "--salt" in errors

    def test_fills_of_each_mask_at_its_own_position(self, runs):
        """Held against the model's logits at each position, with several masks in a text."""
        folder, _ = runs["bert_mlm"]
        text = "over all [MASK] and [MASK] ."
        tokenizer = keras_nlp.models.BertTokenizer.from_preset(
            str(folder / "model"), special_tokens_in_strings=True
        )
        ids = bert.encode(tokenizer, text, 512)[None]
        model = load_run(folder).load_model()
        inputs = {
            "token_ids": ids,
            "segment_ids": np.zeros_like(ids),
            "padding_mask": np.ones_like(ids),
            "mask_positions": np.arange(ids.shape[1], dtype="int32")[None],
        }
        logits = keras.ops.convert_to_numpy(model(inputs))[0][ids[0] == tokenizer.mask_token_id]
        assert len(logits) == 2
        found = predicted(folder, text)[0]
        for mask, row in enumerate(logits):
            fills = found[5 * mask : 5 * mask + 5]
            row[special_ids(tokenizer)] = -np.inf
            expected = np.exp(row) / np.exp(row).sum()
            for fill, place in zip(fills, np.argsort(-row), strict=False):
                assert fill["piece"] == tokenizer.id_to_token(int(place))
                assert fill["probability"] == pytest.approx(expected[place], rel=1e-3)
        assert all(f["text"].endswith("and [MASK] .") for f in found[:5])
        assert all(f["text"].startswith("over all [MASK] and ") for f in found[5:])

    def test_a_piece_that_continues_a_word_stays_a_piece(self, capsys):
        """As "thes", the text would hold a word that the model has not said."""
        (fill,) = bert_mlm.fills("in the [MASK] of", np.array([[0.9]]), ["##s"])
        assert fill["text"] == "in the ##s of"
        assert predict.format_value("piece", ",") == '","'

    def test_texts_that_cannot_be_filled(self, runs, command_line):
        folder, _ = runs["bert_mlm"]
        for text, said in (
            ("no mask", "no [MASK]"),
            ("[MASK]" + " the" * 14, "the model takes 16"),
        ):
            status, _, errors = command_line(predict, folder, text)
            assert status == 2 and errors.count("\n") == 1 and said in errors


class TestRefused:
    @pytest.fixture(params=["evaluate", "predict"])
    def said(self, request, command_line):
        """Runs a program on a folder that it must refuse in one line; returns the line."""

        def call(folder):
            module = importlib.import_module(f"recipes.{request.param}")
            more = ("a [MASK]",) if module is predict else ()
            status, printed, errors = command_line(module, folder, *more)
            assert (status, printed) == (2, "") and errors.count("\n") == 1, errors
            return errors

        return call

    def test_no_run(self, said, tmp_path):
        assert "not a run directory" in said(tmp_path)

    def test_a_run_that_is_not_finished(self, said, copied):
        folder = copied("bert_mlm")
        (folder / "results.json").unlink()
        assert "not finished" in said(folder)

    @pytest.mark.parametrize("name", ["task.weights.h5", "model.weights.h5", "recipe.json"])
    def test_a_damaged_model(self, name, said, copied):
        folder = copied("bert_mlm")
        flip_a_bit(folder / "model" / name)
        assert f"damaged ({name} does not match its checksum)" in said(folder)
        (folder / "model" / name).unlink()
        assert name in said(folder)
        (folder / "model" / "SHA256SUMS").unlink()
        assert "SHA256SUMS is missing" in said(folder)

    def test_classes_in_another_order(self, copied, said):
        """They are no longer read from results.json; in model/ the checksum tells."""
        folder = copied("text_classification")
        path = folder / "model" / "recipe.json"
        change(path, classes=json.loads(path.read_text())["classes"][::-1])
        assert "recipe.json does not match its checksum" in said(folder)

    @pytest.mark.parametrize("content", ["", "[]", "{", '{"recipe": "bert_mlm"}', "null"])
    @pytest.mark.parametrize("name", ["options.json", "results.json"])
    def test_a_file_that_is_cut(self, name, content, said, copied):
        folder = copied("bert_mlm")
        (folder / name).write_text(content)
        assert f"{name}: damaged" in said(folder)

    def test_a_recipe_that_is_gone(self, said, copied):
        folder = copied("bert_mlm")
        change(folder / "results.json", module="recipes.tumours")
        assert "its recipe, recipes.tumours, cannot be imported" in said(folder)

    def test_a_recipe_without_predict(self, copied, monkeypatch):
        monkeypatch.delattr(sys.modules["recipes.mnist"], "predict")
        with pytest.raises(RunError, match="its recipe, recipes.mnist, has no predict()"):
            predicted(copied("mnist"), "x.png")
