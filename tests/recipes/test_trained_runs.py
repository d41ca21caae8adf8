"""What one does with a trained run of mnist, dna_melting and text_classification."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from data.images import load_images
from recipes import classify, dna_melting, evaluate, export, mnist, predict, text_classification
from tests.support.strategy_run import write_images, write_oligos, write_sentences
from training.errors import RunError

SHARED = dict(strategy="none", epochs=1, global_batch_size=16, quiet=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in ("mnist", "text_classification"):
        (folder / name).mkdir()
    write_images(folder / "mnist")
    write_sentences(folder / "text_classification")
    write_oligos(folder / "dna_melting.csv", 150)
    return folder


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """A run of each recipe: folder and results, by recipe."""
    made = tmp_path_factory.mktemp("runs")
    sizes = dict(num_layers=1, num_heads=2, hidden_dim=8)
    options = {
        "mnist": mnist.Options(**SHARED, dataset=str(data / "mnist"), max_examples=48),
        "dna_melting": dna_melting.Options(
            **SHARED, **sizes, dataset=str(data / "dna_melting.csv"), precision="float64"
        ),
        "text_classification": text_classification.Options(
            **SHARED,
            **sizes,
            dataset=str(data / "text_classification"),
            vocabulary_size=60,
            sequence_length=12,
        ),
    }
    recipes = {"mnist": mnist, "dna_melting": dna_melting}
    recipes["text_classification"] = text_classification
    found = {}
    for name, chosen in options.items():
        chosen.run_dir = made / name
        found[name] = (made / name, recipes[name].main(chosen))
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


RECIPES = ("mnist", "dna_melting", "text_classification")


class TestEvaluate:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_the_runs_own_data_give_its_test_metrics(self, recipe, runs, capsys):
        folder, results = runs[recipe]
        found = evaluated(folder, batch_size=16)
        for name, value in results["test"].items():
            assert found[name] == pytest.approx(value, rel=1e-6), name
        assert found["split"] == "test" and found["note"] is None
        printed = capsys.readouterr().out
        assert f"run            {folder}, {results['steps']} steps\n" in printed
        assert "\nto be beaten   " in printed

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_the_valid_split_gives_the_last_validation(self, recipe, runs):
        folder, results = runs[recipe]
        found = evaluated(folder, split="valid", batch_size=16)
        for name in set(results["test"]) & {"accuracy", "macro_f1", "huber", "rmse"}:
            expected = results["history"][f"val_{name}"][-1]
            assert found[name] == pytest.approx(expected, rel=1e-6), name

    def test_of_another_dataset_every_example_is_taken(self, runs, data, tmp_path):
        other = tmp_path / "oligos.csv"
        lines = (data / "dna_melting.csv").read_text().splitlines()
        other.write_text("\n".join(lines[:1] + lines[:0:-1]) + "\n")
        found = evaluated(runs["dna_melting"][0], dataset=str(other))
        assert found["split"] == "all" and found["oligos"] == len(lines) - 1
        tm = np.array([float(line.split(",")[-1]) for line in lines[1:]])
        assert found["baseline"] == {"mean_rmse": pytest.approx(tm.std(), rel=1e-6)}
        # Also more than the run was trained on.
        shutil.copytree(data / "mnist", tmp_path / "images")
        assert runs["mnist"][1]["steps"] == 48 // 16
        assert evaluated(runs["mnist"][0], dataset=str(tmp_path / "images"))["images"] == 101 + 37
        assert evaluated(runs["mnist"][0], split="train")["images"] == 48

    def test_classes_are_matched_by_name(self, runs, data, tmp_path):
        """In a file of two of the classes they have other numbers."""
        folder, results = runs["text_classification"]
        other = tmp_path / "other"
        other.mkdir()
        kept = results["classes"][-2:]
        for path in (data / "text_classification").glob("*.tsv"):
            lines = path.read_text().splitlines()
            lines = lines[:1] + [x for x in lines[1:] if set(x.split("\t")) & set(kept)]
            (other / path.name).write_text("\n".join(lines) + "\n")
        matrix = np.array(results["confusion_matrix"])[-2:]
        found = evaluated(folder, dataset=str(other), split="test")
        expected = matrix[:, -2:].trace() / matrix.sum()
        assert found["sentences"] == matrix.sum()
        assert found["accuracy"] == pytest.approx(expected, abs=1e-6)

    def test_a_class_that_the_run_does_not_know(self, runs, data, tmp_path, command_line):
        other = tmp_path / "other.csv"
        rows = [f"the word number {i},{'new' if i % 2 else 'newer'}" for i in range(40)]
        other.write_text("\n".join(["sentence,label", *rows]) + "\n")
        folder = runs["text_classification"][0]
        status, _, errors = command_line(evaluate, folder, "--dataset", other)
        assert status == 2 and errors.count("\n") == 1 and "class 'new', the run knows" in errors

    def test_data_that_have_changed_since_are_named(self, copied, data, capsys):
        folder = copied("mnist")
        change(folder / "options.json", "resolved", data_sha256="0" * 64)
        found = evaluated(folder)
        assert found["note"].endswith("not the data any more that the run was trained on")
        assert found["note"] in capsys.readouterr().out

    def test_a_recipe_that_is_none_of_these(self, copied, command_line):
        folder = copied("mnist")
        change(folder / "options.json", recipe="tumours")
        for program, more in ((evaluate, ()), (predict, ("x.png",)), (classify, ("a text",))):
            status, _, errors = command_line(program, folder, *more)
            assert status == 2 and errors.count("\n") == 1
            assert "a run of tumours; one of " in errors

    @pytest.mark.parametrize(
        ("recipe", "part", "values", "said"),
        [
            ("mnist", "options", {"precision": "float7"}, "--precision 'float7': must be one of"),
            ("mnist", "options", {"seed": -1}, "--seed -1: must be 0 or more"),
            ("mnist", "options", {"max_examples": 0}, "--max-examples 0: must be at least 1"),
            ("mnist", "resolved", {"dataset": "/no/such/folder"}, "/no/such/folder"),
            ("dna_melting", "options", {"oligos": -5}, "--oligos -5"),
            ("dna_melting", "options", {"oligos": "x"}, "--oligos x"),
            ("text_classification", "options", {"seed": 2**70}, "--seed"),
        ],
    )
    def test_a_value_that_cannot_be_is_one_line(
        self, copied, command_line, recipe, part, values, said
    ):
        folder = copied(recipe)
        change(folder / "options.json", part, **values)
        status, _, errors = command_line(evaluate, folder)
        assert status == 2 and errors.count("\n") == 1 and said in errors

    def test_classes_that_are_not_the_models(self, copied, command_line):
        folder = copied("text_classification")
        change(folder / "results.json", classes=["one"])
        for program, more in ((evaluate, ()), (classify, ("a text",))):
            status, _, errors = command_line(program, folder, *more)
            assert status == 2 and errors.count("\n") == 1
            assert "damaged, it has 1 classes and the model" in errors

    @pytest.mark.parametrize(
        ("program", "more"),
        [(evaluate, ()), (classify, ("a text",)), (export, ("--to", "saved_model"))],
    )
    def test_a_classifier_whose_head_is_gone(self, copied, command_line, program, more):
        """And with it the checksums: KerasHub would take a new head, and say nothing."""
        folder = copied("text_classification")
        for name in ("task.weights.h5", "SHA256SUMS"):
            (folder / "model" / name).unlink()
        status, printed, errors = command_line(program, folder, *more)
        assert (status, printed) == (2, "") and errors.count("\n") == 1
        assert "task.weights.h5 is gone" in errors


class TestPredictImages:
    def test_an_image_of_the_test_split(self, runs, data, tmp_path, capsys):
        folder, results = runs["mnist"]
        pixels, labels = load_images(str(data / "mnist"), None).splits["test"]
        paths = []
        for number, image in enumerate(pixels):
            path = tmp_path / f"{number}.png"
            Image.fromarray(np.uint8(np.rint(image[..., 0] * 255))).save(path)
            paths.append(str(path))
        found = predict.main(predict.Options(run_dir=folder, inputs=tuple(paths), top=10))
        hits = [int(f["classes"][0]["class"]) == y for f, y in zip(found, labels, strict=True)]
        assert np.mean(hits) == pytest.approx(results["test"]["accuracy"], abs=1e-6)
        assert sum(c["probability"] for c in found[0]["classes"]) == pytest.approx(1)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(paths[0]) and re.fullmatch(r" +[\d.]+%  \d", lines[1])

    def test_what_is_no_image(self, runs, tmp_path, command_line):
        (tmp_path / "x.png").write_text("no image")
        for name, said in (("x.png", "no image that can be read"), ("none.png", "none.png")):
            status, _, errors = command_line(predict, runs["mnist"][0], tmp_path / name)
            assert status == 2 and errors.count("\n") == 1 and said in errors

    def test_a_damaged_model(self, copied, tmp_path, command_line):
        Image.new("L", (28, 28)).save(tmp_path / "x.png")
        folder = copied("mnist")
        path = folder / "model" / "model.keras"
        path.write_bytes(path.read_bytes()[:5000])
        status, _, errors = command_line(predict, folder, tmp_path / "x.png")
        assert status == 2 and "damaged (model.keras" in errors
        (folder / "model" / "SHA256SUMS").unlink()
        for program, more in ((predict, (tmp_path / "x.png",)), (evaluate, ())):
            status, _, errors = command_line(program, folder, *more)
            assert status == 2 and errors.count("\n") == 1 and "cannot be loaded" in errors


class TestPredictOligos:
    def test_as_the_evaluation_of_a_file_has_them(self, runs, data, capsys, tmp_path):
        folder = runs["dna_melting"][0]
        rows = [x.split(",") for x in (data / "dna_melting.csv").read_text().splitlines()]
        place = rows[0].index("sequence")
        sequences = [row[place] for row in rows[1:]]
        tm = np.array([float(row[rows[0].index("tm")]) for row in rows[1:]])
        found = predict.main(predict.Options(run_dir=folder, inputs=(*sequences,)))
        errors = np.array([item["celsius"] for item in found]) - tm
        other = shutil.copy(data / "dna_melting.csv", tmp_path / "other.csv")
        expected = evaluated(folder, dataset=str(other))["rmse"]
        assert np.sqrt(np.mean(errors**2)) == pytest.approx(expected, rel=1e-6)
        line = capsys.readouterr().out.splitlines()[0]
        assert line == f"{found[0]['celsius']:6.1f} °C  {sequences[0].upper()}"

    def test_lower_case_and_letters_that_are_no_bases(self, runs, command_line):
        folder = runs["dna_melting"][0]
        status, printed, _ = command_line(predict, folder, "acgtacgtac")
        assert status == 0 and printed.endswith(" °C  ACGTACGTAC\n")
        status, _, errors = command_line(predict, folder, "ACGTACGTACN")
        assert status == 2 and "'ACGTACGTACN': letter 'N'" in errors
        status, _, errors = command_line(predict, folder, "ACGT")
        assert status == 2 and "4 bases, expected 8 to 60" in errors


def test_other_programs_are_named(runs, tiny_run):
    with pytest.raises(RunError, match="a run of text_classification; ask it with recipes.class"):
        predict.main(predict.Options(run_dir=runs["text_classification"][0], inputs=("x",)))
    with pytest.raises(RunError, match="a run of bert_mlm; ask it with recipes.fill_mask"):
        predict.main(predict.Options(run_dir=tiny_run.folder, inputs=("x",)))


def test_nothing_to_predict(command_line, tmp_path):
    status, _, errors = command_line(predict, tmp_path)
    assert status == 2 and "no input: give one or more" in errors
