"""Tests `evaluate` and `predict` on trained runs of each recipe."""

import importlib
import io
import json
import logging
import re
import shutil
import sys
import types
from pathlib import Path

import keras
import keras_nlp
import numpy as np
import pytest
from PIL import Image

from data import files, live_line, melting, minimal_pairs, tables
from data.errors import DataError, read_each
from data.images import load_images
from data.text import load_text
from data.word_pieces import special_ids
from models import bert, init_from, presets
from recipes import bert_mlm, evaluate, export, predict, text_classification
from tests.support import strategy_run
from tests.support.damaged import flip_a_bit
from training.command_line import parse
from training.errors import RunError
from training.loaded_run import LoadedRun, load_run, same_outputs

SHARED = dict(strategy="none", epochs=1, global_batch_size=16, quiet=True)
SIZES = dict(num_layers=1, num_heads=2, hidden_dim=8)
OPTIONS = {
    "mnist": SHARED | dict(max_examples=48, accumulate_steps=2),
    "dna_melting": SHARED | SIZES | dict(precision="float64", base_learning_rate=0.02),
    "text_classification": SHARED | SIZES | dict(vocabulary_size=60, sequence_length=12),
}
RECIPES = ("bert_mlm", *OPTIONS)
# Of them `mnist` in `make test`, the others in `make check-long`.
QUICK = ["mnist", *(pytest.param(r, marks=pytest.mark.long) for r in RECIPES if r != "mnist")]


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


def write(path, content):
    path.write_bytes(content)
    return path


def change(path, part=None, **values):
    content = json.loads(path.read_text())
    (content[part] if part else content).update(values)
    path.write_text(json.dumps(content))


def evaluated(folder, **options):
    return evaluate.main(evaluate.Options(run_dir=folder, **options))


def predicted(folder, *inputs):
    return predict.main(predict.Options(run_dir=folder, inputs=inputs))


class TestEvaluate:
    @pytest.mark.long
    @pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
    def test_masked_words_in_half_precision(self, precision, run_bert, tmp_path):
        trained = run_bert(tmp_path / "run", max_steps=2, precision=precision)
        found = evaluated(trained.folder)
        assert found["test"] == pytest.approx(trained.results["test"], rel=1e-3)

    @pytest.mark.long
    def test_a_model_without_metadata_is_not_begun_again(self, runs, monkeypatch):
        """Notes of a preset's new head belong to the training."""
        monkeypatch.setattr(presets, "new_masked_lm_head", lambda preset: "a new head")
        assert "a new head" not in evaluated(runs["bert_mlm"][0])["notes"]

    def test_a_part_may_lack_a_metric(self):
        more = {"molecules": 3, "mae": 1.0, "r2": 0.5}
        parts = {"one": {"molecules": 1, "mae": 2.0}, "more": more}
        header, one, more = map(str.split, evaluate.format_parts("dataset", parts).splitlines())
        assert header == ["dataset", "molecules", "mae", "r2"]
        assert (one[-1], more[-1]) == ("-", "0.5000")

    def test_the_test_examples_with_the_errors_first(self, runs, data, tmp_path, command_line):
        folder, results = runs["text_classification"]
        words = ("--examples", tmp_path / "a.csv")
        status, out, _ = command_line(evaluate, folder, *words)
        header, rows = tables.read_rows(tmp_path / "a.csv")
        assert status == 0 and out.endswith(f"wrote {tmp_path / 'a.csv'}, {len(rows)} rows\n")
        assert header == ["input", "label", "predicted", "probability"]
        is_right = [label == predicted for _, label, predicted, _ in rows]
        assert np.mean(is_right) == pytest.approx(results["test"]["accuracy"]) and is_right[-1]
        wrong = is_right.count(False)
        assert 0 < wrong and not any(is_right[:wrong])
        shares = [float(share) for *_, share in rows]
        assert shares[:wrong] == sorted(shares[:wrong], reverse=True)
        assert shares[wrong:] == sorted(shares[wrong:])
        # They are the sentences of the file, and the model's answers to them.
        expected = tables.read_table(data / "sentences/test.tsv", ("sentence",), ("label",))
        assert sorted(row[:2] for row in rows) == sorted(values for _, values in expected)
        for row, answers in zip(rows, predicted(folder, *[row[0] for row in rows]), strict=True):
            assert answers[0]["class"] == row[2]
            assert answers[0]["probability"] == pytest.approx(float(row[3]), rel=1e-4)
        # As JSON the metrics are what they are without the file.
        status, out, _ = command_line(evaluate, folder, "--json", "--examples", tmp_path / "b.csv")
        assert status == 0 and "examples" not in json.loads(out)
        assert (tmp_path / "b.csv").read_bytes() == (tmp_path / "a.csv").read_bytes()
        for recipe, more, said in (
            ("text_classification", words, "a.csv already exists; remove it, or name a new one"),
            ("text_classification", ("--examples", "a.txt"), "--examples a.txt: must end in .csv"),
            ("mnist", ("--examples", tmp_path / "c.csv"), "--examples: recipes.mnist has none"),
            (
                "bert_mlm",
                ("--examples", tmp_path / "c.csv", "--on", "blimp:a"),
                "--on and --examples: pass only one of them",
            ),
        ):
            status, out, errors = command_line(evaluate, runs[recipe][0], *more)
            assert status == 2 and errors.count("\n") == 1 and said in errors
            assert ("accuracy  " in out) == (recipe == "mnist")  # the metrics are printed
        assert not (tmp_path / "c.csv").exists()

    @pytest.mark.parametrize("recipe", QUICK)
    def test_its_own_data_give_the_test_metrics_again(self, recipe, runs, capsys, recwarn):
        folder, results = runs[recipe]
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        found = evaluated(folder, batch_size=7)  # not the run's batch, and a last one with padding
        assert found["test"].keys() == results["test"].keys()
        for name, value in results["test"].items():
            assert found["test"][name] == pytest.approx(value, rel=1e-5), name
        assert found["baseline"] == results["baseline"]
        said = capsys.readouterr().out
        for name in ("test_by_class", "test_by_dataset"):
            assert found.get(name, {}).keys() == results.get(name, {}).keys()
            for part, numbers in results.get(name, {}).items():
                assert found[name][part] == pytest.approx(numbers, rel=1e-5)
                row, *_ = re.findall(rf"^{part} +(.*)$", said, re.MULTILINE)
                cells = [float(cell.replace(",", "")) for cell in row.split()]
                assert cells == pytest.approx([*numbers.values()], abs=1e-4)
        confusion = results.get("test_confusion")
        assert found.get("test_confusion") == confusion
        if confusion is not None:
            table = evaluate.format_parts("label, and predicted as", confusion)
            assert (table in said) == (len(confusion) <= 12)
        assert set(found["notes"]) <= set(results["notes"]), "nothing about other data"
        assert f"{folder}, {results['steps']} steps\n" in said
        assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        assert not [w for w in recwarn if "shuffle" in str(w.message)]

    @pytest.mark.parametrize("recipe", QUICK)
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

    @pytest.mark.long
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

    @pytest.mark.long
    def test_of_another_dataset_no_training_sentences_are_counted(self, runs, data, tmp_path):
        """The model has not seen that dataset's training split."""
        folder, results = runs["text_classification"]
        other = shutil.copytree(data / "sentences", tmp_path / "sentences")
        shutil.copy(other / "train.tsv", other / "test.tsv")
        found = evaluated(folder, dataset=str(other))
        assert "test_sentences_in_training" not in found
        assert not [note for note in found["notes"] if "training sentences too" in note]
        own = evaluated(folder)
        assert own["test_sentences_in_training"] == results["test_sentences_in_training"]

    @pytest.mark.long
    def test_all_of_a_file_is_the_test_split(self, runs, data, tmp_path):
        """Baselines learn from the run's own training split, so nothing else changes."""
        folder, results = runs["text_classification"]
        found = evaluated(folder, test_file=data / "sentences" / "test.tsv")
        assert found["test"] == pytest.approx(results["test"], rel=1e-5)
        assert found["baseline"] == results["baseline"]
        few = (data / "sentences" / "test.tsv").read_text().splitlines()[:3]
        (tmp_path / "few.tsv").write_text("\n".join(few))
        found = evaluated(folder, test_file=tmp_path / "few.tsv")
        assert found["test"]["accuracy"] in (0.0, 0.5, 1.0)
        assert not [note for note in found["notes"] if "not the data" in note]

        folder, results = runs["bert_mlm"]
        lines = load_text(load_run(folder).options.dataset, tmp_path).splits["test"]
        (tmp_path / "test.txt").write_text("\n".join(lines))
        found = evaluated(folder, test_file=tmp_path / "test.txt")
        assert found["test"] == pytest.approx(results["test"], rel=1e-5)

        folder, results = runs["mnist"]
        own = Path(load_run(folder).options.dataset) / "t10k-images-idx3-ubyte"
        found = evaluated(folder, test_file=own)
        assert found["test"] == pytest.approx(results["test"], rel=1e-5)
        assert not [note for note in found["notes"] if "not the data" in note]

        folder, results = runs["dna_melting"]
        table = load_run(folder).options.dataset
        found = evaluated(folder, test_file=Path(table))
        count = len(Path(table).read_text().split()) - 1
        assert sum(row["molecules"] for row in found["test_by_dataset"].values()) == count
        assert sum(row["molecules"] for row in results["test_by_dataset"].values()) < count

    def test_a_test_file_that_cannot_be_used(self, runs, tmp_path, command_line):
        table = write(tmp_path / "new.csv", b"sentence,label\na,strange\n")
        for recipe, file, said in (
            (
                "mnist",
                table,
                f"--test-file {table}: expected an IDX file whose name ends in images",
            ),
            ("text_classification", table, f"{table}: the label 'strange' is in the test split"),
            ("text_classification", tmp_path / "none", "no such file"),
        ):
            words = (runs[recipe][0], "--test-file", file)
            status, _, err = command_line(evaluate, *words)
            assert status == 2 and said in err and err.count("\n") == 1
        status, _, err = command_line(evaluate, *words[:2], table, "--label-column", "stars")
        assert status == 2 and "--label-column: needs --dataset; name the columns of --test" in err

    def test_data_that_have_moved(self, copied, data, tmp_path, command_line):
        """A test file needs them, for the baselines."""
        folder = copied("text_classification")
        change(folder / "options.json", "options", dataset="gone.csv")
        change(folder / "options.json", "resolved", dataset="gone.csv")
        words = (folder, "--test-file", data / "sentences" / "test.tsv")
        said = "'gone.csv'.*; the run was trained on these data: pass --dataset if they have moved"
        status, _, err = command_line(evaluate, *words)
        assert status == 2 and re.search(said, err) and err.count("\n") == 1
        status, _, err = command_line(evaluate, *words, "--dataset", "none.csv")
        assert status == 2 and "none.csv" in err and "moved" not in err
        status, _, err = command_line(evaluate, *words, "--dataset", data / "sentences")
        assert status == 0, err

    def test_columns_of_a_text_replace_those_of_prompts(self):
        options = types.SimpleNamespace(text_column="a", prompt_column="b", response_column="c")
        run = types.SimpleNamespace(options=options)
        for named, expected in (
            ({"prompt_column": "x"}, {"prompt_column": "x", "text_column": None}),
            (
                {"text_column": "x"},
                {"text_column": "x", "prompt_column": None, "response_column": None},
            ),
            (
                {"text_column": "x", "response_column": "y"},  # refused by the recipe
                {"text_column": "x", "response_column": "y", "prompt_column": None},
            ),
            ({}, {}),
        ):
            options = evaluate.Options(run_dir="run", **named)
            assert evaluate.columns_of(options, run) == expected

    @pytest.mark.long
    def test_another_text_is_cut_into_the_runs_own_word_pieces(self, runs, data, tmp_path):
        text = (data / "text.txt").read_text()
        (tmp_path / "other.txt").write_text(
            re.sub("loss|replicas|batches|tokens|step", "mean", text)
        )
        found = evaluated(runs["bert_mlm"][0], dataset=str(tmp_path / "other.txt"))
        own = runs["bert_mlm"][1]["test"]["cross_entropy"]
        assert found["test"]["cross_entropy"] != pytest.approx(own, rel=1e-3)
        assert found["test"]["perplexity"] == np.exp(found["test"]["cross_entropy"])

    @pytest.mark.long
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

    @pytest.mark.long
    def test_columns_of_other_names(self, runs, data, tmp_path, command_line):
        folder, _ = runs["text_classification"]
        renamed = tmp_path / "renamed"
        renamed.mkdir()
        for path in (data / "sentences").glob("*.tsv"):
            lines = path.read_text().splitlines()
            (renamed / path.name).write_text("\n".join(["review\tstars", *lines[1:]]) + "\n")
        status, _, said = command_line(evaluate, folder, "--dataset", renamed)
        assert status == 2 and "--text-column" in said
        words = ("--text-column", "review", "--label-column", "stars")
        status, out, said = command_line(evaluate, folder, "--dataset", renamed, *words)
        assert status == 0, said
        expected = evaluated(folder)["test"]["accuracy"]
        assert f"accuracy                 {expected:.4f} ± " in out
        status, _, said = command_line(evaluate, folder, *words)
        assert status == 2 and "--text-column: needs --dataset" in said
        status, _, said = command_line(evaluate, runs["mnist"][0], *words)
        assert status == 2 and "--text-column: needs --dataset" in said
        status, _, said = command_line(evaluate, runs["mnist"][0], "--dataset", "digits", *words)
        assert status == 2 and "--text-column: recipes.mnist has no such option" in said

    def test_pairs_are_not_single_sentences(self, runs, tmp_path, command_line):
        folder, _ = runs["text_classification"]
        lines = ["sentence1,sentence2,label"]
        lines += [f"one {i},another {i},{label}" for label in "012" for i in range(12)]
        (tmp_path / "pairs.csv").write_text("\n".join(lines) + "\n")
        status, _, said = command_line(evaluate, folder, "--dataset", tmp_path / "pairs.csv")
        assert status == 2
        assert "pairs.csv: has pairs of sentences, the run learned single sentences" in said

    def test_one_example_suffices_to_compare_models(self, runs, monkeypatch):
        """All logits of a batch of a language model may exceed the memory."""
        from training import evaluated_run

        sizes = []

        def same(ours, theirs):
            sizes.append(len(keras.tree.flatten(ours)[0]))
            return same_outputs(ours, theirs)

        monkeypatch.setattr(evaluated_run, "same_outputs", same)
        evaluated(runs["text_classification"][0])
        assert sizes == [1]

    def test_data_that_have_changed_since_are_named(self, copied, capsys):
        folder = copied("mnist")
        change(folder / "options.json", "resolved", data_sha256="0" * 64)
        assert "not the data that the run was trained on" in evaluated(folder)["notes"][0]
        assert "not the data that the run was trained on" in capsys.readouterr().out

    @pytest.mark.long
    def test_a_recipe_that_builds_another_model_is_refused(self, copied, monkeypatch):
        """As one that took its scale from the data, and not from the run."""
        from recipes import dna_melting

        stock = dna_melting.build_model
        monkeypatch.setattr(
            dna_melting, "build_model", lambda options, mean: stock(options, mean + 1)
        )
        with pytest.raises(RunError, match="the recipe builds another model"):
            evaluated(copied("dna_melting"))


def test_steps_are_those_of_the_weights(copied):
    """After --early-stopping a model has the best weights, not the last ones."""
    folder = copied("mnist")
    change(folder / "results.json", steps=8, weights_of_step=4)
    assert load_run(folder).results["steps"] == 4


def test_models_are_the_same_by_all_of_their_outputs():
    one, other = np.ones((2, 3)), np.zeros((2, 3))
    assert same_outputs({"a": one, "b": other}, {"a": one, "b": other})
    assert not same_outputs({"a": one, "b": other}, {"a": one, "b": one})


class TestBest:
    @pytest.fixture
    def with_best(self, tiny_run, copied):
        """The BERT's run with its first checkpoint as the best one."""
        folder = copied("bert_mlm")
        first, *_, last = sorted((tiny_run.folder / "checkpoints").iterdir())
        assert first != last
        shutil.copytree(first, folder / "best")
        return folder

    def expected(self, folder):
        """The run's model with the weights of `best/`, loaded as a reader of the page would."""
        model = keras_nlp.models.BertMaskedLM.from_preset(str(folder / "model"), compile=False)
        model.load_weights(folder / "best" / "model.weights.h5")
        return model

    @pytest.mark.parametrize("option, value", [("ema", 0.9), ("lora_rank", 2)])
    def test_checkpoints_of_fine_tuning_are_not_whole_models(
        self, with_best, option, value, monkeypatch
    ):
        monkeypatch.setattr(bert_mlm.Options, option, value, raising=False)
        flag = f"--{option.replace('_', '-')}"
        with pytest.raises(RunError, match=f"trained with {flag}, so its best/ serves to resume"):
            load_run(with_best, best=True)
        path = with_best / "options.json"
        stored = json.loads(path.read_text())
        stored["options"] |= dict(early_stopping=2, keep_best="val_loss")
        path.write_text(json.dumps(stored))
        with pytest.raises(RunError, match="only; leave out --best: .* the best weights"):
            load_run(with_best, best=True)

    @pytest.mark.long
    def test_its_weights_are_used(self, with_best, runs, tiny_run, capsys):
        run = load_run(with_best, best=True)
        expected = self.expected(with_best).get_weights()
        for ours, theirs in zip(run.load_model().get_weights(), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        text = "the loss of a [MASK]"
        options = predict.Options(run_dir=with_best, inputs=text, best=True)
        (fill, *_), (last, *_) = predict.main(options)[0], predicted(with_best, text)[0]
        assert fill["probability"] != last["probability"]
        capsys.readouterr()
        found = evaluated(with_best, best=True)
        assert found["steps"] == 20 and f"{with_best}, 20 steps" in capsys.readouterr().out
        last = tiny_run.results["test"]["cross_entropy"]
        assert found["test"]["cross_entropy"] != pytest.approx(last, rel=1e-6)
        # The training measured the same model on the validation split, some lines of text; this is
        # the test split, others.
        losses = [r["val_cross_entropy"] for r in tiny_run.records if r["event"] == "epoch"]
        assert found["test"]["cross_entropy"] == pytest.approx(losses[0], rel=0.2)

    def test_it_is_exported(self, with_best, tmp_path, command_line, monkeypatch):
        exported = []

        def write(model, folder, *_):
            exported.extend(model.get_weights())
            folder.mkdir()
            return "a note"

        monkeypatch.setattr(export.texts, "write", write)
        words = ("--to", "saved_model", "--folder", tmp_path / "out", "--no-check", "--best")
        assert command_line(export, with_best, *words)[0] == 0
        for ours, theirs in zip(exported, self.expected(with_best).get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)

    def test_a_run_without_one_or_with_a_damaged_one(self, with_best, copied, command_line):
        folder = copied("mnist")
        for program, more in ((evaluate, ()), (predict, ("x.png",))):
            status, _, errors = command_line(program, folder, *more, "--best")
            assert status == 2 and errors.endswith(
                f"--best: {folder} contains no best/; train with --keep-best METRIC\n"
            )
        flip_a_bit(with_best / "best" / "model.weights.h5")
        status, _, errors = command_line(evaluate, with_best, "--best")
        assert status == 2 and "best: damaged (model.weights.h5 does not match" in errors

    @pytest.mark.long
    @pytest.mark.parametrize("path", ["best", "best/model.weights.h5", "checkpoints/step-00000020"])
    def test_a_new_run_begins_with_them(self, with_best, path):
        if path.startswith("checkpoints"):
            shutil.copytree(with_best / "best", with_best / path, dirs_exist_ok=True)
        preset = init_from.preset_of(with_best / path)
        model = presets.load_task(keras_nlp.models.MaskedLM, preset, sequence_length=16)
        backbone = presets.load_backbone(preset, 0.3)
        expected = self.expected(with_best)
        for ours, theirs in ((model, expected), (backbone, expected.backbone)):
            for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
                np.testing.assert_array_equal(a, b)
        assert presets.load(keras_nlp.models.BertTokenizer, preset).vocabulary_size() > 10
        assert init_from.preset_of(with_best) == str(with_best / "model")

    @pytest.mark.parametrize("option", ["ema", "lora_rank", "freeze_backbone"])
    def test_no_run_begins_with_part_of_a_model(self, with_best, option):
        change(with_best / "options.json", "options", **{option: 1})
        with pytest.raises(DataError, match=f"trained with --{option.replace('_', '-')}, so its"):
            init_from.preset_of(with_best / "best")
        assert init_from.preset_of(with_best) == str(with_best / "model")

    def test_no_run_begins_with_weights_from_before_their_average(self, with_best):
        """Of a recipe of one's own, whose optimizer has `use_ema=True`."""
        path = with_best / "best" / "state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"averages": True}))
        files.write_checksums(path.parent)
        with pytest.raises(DataError, match="trained with averages of its weights, so its"):
            init_from.preset_of(with_best / "best")

    def test_what_init_from_cannot_be(self, with_best, tmp_path):
        with pytest.raises(DataError, match="holds no model; pass a finished run of bert_mlm, its"):
            init_from.preset_of(tmp_path)
        shutil.copytree(with_best / "best", tmp_path / "alone" / "best")
        with pytest.raises(DataError, match="not in the folder of a finished run"):
            init_from.preset_of(tmp_path / "alone" / "best")
        flip_a_bit(with_best / "best" / "model.weights.h5")
        with pytest.raises(DataError, match="damaged .model.weights.h5 does not match"):
            init_from.preset_of(with_best / "best")


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

    def test_n_grams_of_the_same_text_are_beside_it(self, runs, pairs, command_line, tmp_path):
        """As a column of the table and of the plot; they know which words follow each other."""
        folder, _ = runs["bert_mlm"]
        plot = tmp_path / "plot.png"
        status, out, _ = command_line(evaluate, folder, "--on", f"blimp:{pairs}", "--png", plot)
        assert status == 0 and plot.read_bytes().startswith(b"\x89PNG")
        assert f"wrote {plot}" in out and "a tie is wrong" in out
        lines = [line.split() for line in out.splitlines()]
        assert ["pairs", "model", "n-grams"] in lines
        assert [line[0] for line in lines if line[-2:-1] == ["±"]] == ["one", "two", "all"]
        assert lines[-3][-3:] == ["100.0", "±", "15.3"]

    @pytest.mark.parametrize("more", [(), ("--json",)])
    def test_a_plot_that_cannot_be_written_costs_no_result(
        self, runs, pairs, command_line, tmp_path, more
    ):
        folder, _ = runs["bert_mlm"]
        (tmp_path / "plot.png").mkdir()
        plot = ("--png", tmp_path / "plot.png", *more)
        status, out, errors = command_line(evaluate, folder, "--on", f"blimp:{pairs}", *plot)
        assert status == 2 and "plot.png: cannot be written (Is a directory)" in errors
        assert json.loads(out)["scores"] if more else "a tie is wrong" in out

    def test_without_the_text_there_are_no_n_grams(self, runs, pairs, monkeypatch):
        folder, _ = runs["bert_mlm"]
        run = load_run(folder)
        monkeypatch.setitem(run.resolved, "dataset", "gone.txt")
        found = evaluate.evaluate_pairs(run, pairs)
        assert found["baseline"] == {} and found["test"].keys() == {"one", "two", "accuracy"}
        (note,) = found["notes"]
        assert note.startswith("no n-grams to compare with: 'gone.txt' is neither")

    def test_of_equal_logits_nothing_is_right(self, runs, pairs, monkeypatch):
        folder, _ = runs["bert_mlm"]
        model = load_run(folder).load_model("float32")
        model.set_weights([np.zeros_like(weights) for weights in model.get_weights()])
        monkeypatch.setattr(LoadedRun, "load_model", lambda run, dtype=None: model)
        found = evaluated(folder, on=f"blimp:{pairs}")
        assert found["test"] == {"one": 0.0, "two": 0.0, "accuracy": 0.0}

    @pytest.mark.parametrize(
        "bad", ["null", '""', '" "', "1", '["a"]', r'"\ud800"', "[" * 100000, "}"]
    )
    def test_what_is_no_pair_of_sentences(self, pairs, bad):
        (pairs / "one.jsonl").write_text(f'{{"sentence_good": "a", "sentence_bad": {bad}}}\n')
        with pytest.raises(DataError, match="one.jsonl, line 1: expected JSON with sentence_good"):
            minimal_pairs.read_pairs(pairs)

    def test_what_is_refused(self, runs, pairs, tmp_path, command_line):
        folder, _ = runs["bert_mlm"]
        (pairs / "two.jsonl").write_text('{"sentence_good": "a"}\n')
        for run, on, said in (
            (folder, f"blimp:{pairs}", "two.jsonl, line 1: expected JSON with sentence_good"),
            (folder, f"blimp:{tmp_path}", "no pairs in *.jsonl files"),
            (folder, "glue", "--on glue: must be blimp:FOLDER"),
            (folder, f"blimp:{pairs} --png a.bmp", "--png a.bmp: must end in .png, .pdf or .svg"),
            (folder, f"blimp:{pairs} --png no/a.png", "--png no/a.png: its folder does not exist"),
            (runs["mnist"][0], f"blimp:{pairs}", "recipes.mnist, has no log_likelihoods()"),
        ):
            status, _, errors = command_line(evaluate, run, "--on", *on.split(" "))
            assert status == 2 and errors.count("\n") == 1 and said in errors
        status, _, errors = command_line(evaluate, folder, "--png", "a.png")
        assert status == 2 and "--png: needs --on" in errors


class TestPredict:
    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (lambda run, inputs: float(inputs[0]), "raised ValueError: could not convert string"),
            (lambda run, inputs: {}["class"], "raised KeyError: 'class' (test_loaded_runs.py, "),
            (lambda run, inputs: [], "must return one list of dicts per input, 1 in all"),
            (lambda run, inputs: [0.5], "1 in all; found [0.5]"),
            (lambda run, inputs: None, "found None"),
        ],
    )
    def test_one_of_ones_own_that_fails(self, answer, said, runs, command_line, monkeypatch):
        folder, _ = runs["text_classification"]
        monkeypatch.setattr(
            importlib.import_module("recipes.text_classification"), "predict", answer
        )
        status, _, errors = command_line(predict, folder, "the film")
        assert status == 2 and errors.count("\n") == 1 and said in errors
        assert errors.startswith("predict: recipes.text_classification.predict() ")

    def test_a_memory_that_is_too_small(self, runs, command_line, monkeypatch):
        folder, _ = runs["text_classification"]
        monkeypatch.setattr(
            importlib.import_module("recipes.text_classification"),
            "predict",
            lambda run, inputs: np.empty((2**30, 2**20)),
        )
        status, _, errors = command_line(predict, folder, "the film")
        assert status == 1 and errors.startswith("predict: out of memory: Unable to allocate")

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

    @pytest.mark.long
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

    def test_a_pair_is_not_one_sentence(self, runs, command_line):
        folder, _ = runs["text_classification"]
        status, _, said = command_line(predict, folder, "one ||| another")
        assert status == 2 and "separates two sentences, and the run learned single ones" in said

    def test_a_separator_within_a_text_is_a_part_of_it(self, runs, tmp_path, monkeypatch):
        """Also where it is in the only text of a part that is predicted at once."""
        monkeypatch.setattr(predict, "AT_ONCE", 2)
        folder, _ = runs["text_classification"]
        lines = write(tmp_path / "a.txt", b"one\ntwo\none ||| another\n")
        assert len(predict.main(predict.Options(run_dir=folder, file=lines))) == 3
        table = write(tmp_path / "a.csv", b"review\none ||| another\n")
        options = predict.Options(run_dir=folder, file=table, text_column="review")
        assert len(predict.main(options)) == 1

    def test_what_is_answered_is_printed_before_the_rest_is_asked(
        self, runs, command_line, monkeypatch
    ):
        monkeypatch.setattr(predict, "AT_ONCE", 2)
        stock, calls = text_classification.predict, []

        def fails_later(run, texts, **more):
            calls.append(texts)
            if len(calls) > 1:
                raise DataError("no more")
            return stock(run, texts, **more)

        monkeypatch.setattr(text_classification, "predict", fails_later)
        folder, _ = runs["text_classification"]
        status, out, err = command_line(predict, folder, "one", "two", "three")
        assert status == 2 and err == "predict: no more\n"
        assert [line for line in out.split("\n") if line[:1].strip()] == ["one", "two"]

    def test_a_long_prediction_or_evaluation_shows_its_progress_in_a_log(
        self, runs, command_line, monkeypatch
    ):
        """On standard error: standard output is the answer."""
        monkeypatch.setattr(live_line, "LOG_SECONDS", 0.0)
        monkeypatch.setattr(predict, "AT_ONCE", 2)
        folder, _ = runs["text_classification"]
        for program, words, shown in (
            (predict, ("one", "two", "three", "four"), "predicting: 50%, "),
            (evaluate, (), "evaluating: 1 batches, "),
        ):
            status, out, err = command_line(program, folder, *words, "--json")
            assert status == 0 and json.loads(out)
            assert shown in err and "Traceback" not in err
        assert not logging.getLogger("recipes").handlers

    def test_inputs_of_a_file_are_those_of_the_command(
        self, runs, command_line, tmp_path, monkeypatch
    ):
        folder, _ = runs["text_classification"]
        texts = ["the film was good", "late", "the film was poor and late"]
        (tmp_path / "texts.txt").write_text("\n".join([*texts, "  ", ""]))
        monkeypatch.setattr(predict, "AT_ONCE", 2)
        status, expected, _ = command_line(predict, folder, *texts, "--json")
        assert status == 0 and len(json.loads(expected)) == 3
        # Inputs may follow an option.
        assert command_line(predict, folder, "--json", *texts) == (0, expected, "")
        file = ("--file", tmp_path / "texts.txt", "--json")
        assert command_line(predict, folder, *file) == (0, expected, "")
        stdin = types.SimpleNamespace(buffer=io.BytesIO((tmp_path / "texts.txt").read_bytes()))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert command_line(predict, folder, "--file", "-", "--json") == (0, expected, "")
        # An answer per line of the file: empty lines keep their place, other separators split none.
        first, *others = texts
        strange = first.replace(" ", "\u2028", 1)
        (tmp_path / "b.txt").write_bytes("\r\n".join([strange, "", *others]).encode())
        file = ("--file", tmp_path / "b.txt", "--json")
        status, found, _ = command_line(predict, folder, *file)
        found, expected = json.loads(found), json.loads(expected)
        assert status == 0 and found == [found[0], [], *expected[1:]] and found[0]
        # A tab separates the sentences of a pair, and is a space in training.
        tab = predicted(folder, first.replace(" ", "\t", 1))
        assert tab == predicted(folder, first)
        for arguments, said in [
            ((), "INPUTS: pass some, or --file"),
            (("a", *file), "INPUTS and --file: pass only one of them"),
            (("--file", tmp_path / "none"), "none: cannot be read (No such file"),
            (("--file", write(tmp_path / "a", b"\xff")), "a: not UTF-8 at byte 0"),
            (("--file", write(tmp_path / "b", b" \n")), "b: no line with an input"),
        ]:
            status, _, errors = command_line(predict, folder, *arguments)
            assert status == 2 and said in errors

    @pytest.mark.long
    def test_inputs_of_a_table(self, runs, command_line, tmp_path):
        folder, _ = runs["text_classification"]
        texts = ["the film was good", "late", 'poor, and "late"']
        status, expected, _ = command_line(predict, folder, *texts, "--json")
        assert status == 0
        quoted = [text.replace('"', '""') for text in texts]
        rows = [f'{n},"{text}"' for n, text in enumerate(quoted)]
        table = write(tmp_path / "new.csv", "\n".join(["number,review", *rows, "3,", ""]).encode())
        lines = [json.dumps({"review": text}) for text in [*texts, ""]]
        objects = write(tmp_path / "new.jsonl", "\n".join(lines).encode())
        for file in (table, objects):
            named = ("--file", file, "--text-column", "review")
            # The column's name before the run's folder, and after it.
            for line in ((*named, folder), (folder, *named)):
                status, found, _ = command_line(predict, *line, "--json")
                assert status == 0 and json.loads(found) == [*json.loads(expected), []]
        (tmp_path / "plain.csv").write_text("A film, good\n")
        empty = write(tmp_path / "empty.csv", b"review,x\n,1\n")
        for arguments, said in [
            (("--file", table), "--text-column (it has number, review)"),
            (("--file", objects), "--text-column (it has review)"),
            (
                ("--file", table, "--text-column", "text"),
                "no column text, expected one",
            ),
            (("--file", table, "--second-text-column", "a"), "-column: needs --text-column"),
            (("--file", empty, "--text-column", "review"), "no row with an input"),
            (("--file", "-", "--text-column", "a"), "needs --file with the name of a table"),
            (("a", "--text-column", "a"), "needs --file with the name of a table"),
        ]:
            status, _, errors = command_line(predict, folder, *arguments)
            assert status == 2 and said in errors

    def test_answers_beside_the_rows_of_a_table(self, runs, command_line, tmp_path, monkeypatch):
        monkeypatch.setattr(predict, "AT_ONCE", 2)
        folder, _ = runs["text_classification"]
        texts = ["the film was good", 'late, and\n"poor"', "", "one film"]
        table = tmp_path / "new.csv"
        tables.write_csv(
            table, [["", "class", "review"], *([n, "", t] for n, t in enumerate(texts))]
        )
        named = ("--file", table, "--text-column", "review")
        status, out, err = command_line(predict, folder, *named, "--csv", tmp_path / "a.csv")
        assert (status, out, err) == (0, f"wrote {tmp_path / 'a.csv'}, 4 rows\n", "")
        header, rows = tables.read_rows(tmp_path / "a.csv")
        assert header[:5] == ["", "class", "review", "probability", "predicted_class"]
        assert header[5:] == [f"probability_{name}" for name in "012"]
        status, out, _ = command_line(predict, folder, *named, "--json")
        for number, (row, text, answers) in enumerate(
            zip(rows, texts, json.loads(out), strict=True)
        ):
            assert row[:3] == [str(number), "", text]
            shares = {answer["class"]: str(answer["probability"]) for answer in answers}
            best = [str(answers[0]["probability"]), answers[0]["class"]] if answers else ["", ""]
            assert row[3:] == [*best, *(shares.get(name, "") for name in "012")]
        # The most likely class alone, and inputs that are not of a table.
        lines = write(tmp_path / "lines.jsonl", b'[{"role": "user"}]\n')
        for words, inputs in ((("one", "two"), ["one", "two"]), (("--file", lines), None)):
            path = tmp_path / f"{len(words)}{inputs is None}.csv"
            assert command_line(predict, folder, *words, "--top", "1", "--csv", path)[0] == 0
            header, rows = tables.read_rows(path)
            assert header == ["input", "probability", "class"]
            assert [row[0] for row in rows] == (inputs or ['[{"role": "user"}]'])
        for arguments, said in (
            ((*named, "--csv", table), "new.csv already exists; remove it, or name a new one"),
            (("a", "--json", "--csv", "a.csv"), "--json and --csv: pass only one of them"),
            ((*named, "--output", "b.csv"), "arguments: --output; did you mean --csv?"),
        ):
            status, _, errors = command_line(predict, folder, *arguments)
            assert status == 2 and said in errors

    def test_a_table_that_was_begun_is_continued(
        self, runs, command_line, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr(predict, "AT_ONCE", 2)
        folder, _ = runs["text_classification"]
        texts = [*(f"film {n}" for n in range(4)), "", *(f"poor {n}" for n in range(4))]
        table, path = tmp_path / "new.csv", tmp_path / "a.csv"
        tables.write_csv(table, [["id", "review"], *enumerate(texts)])
        command = (folder, "--file", table, "--text-column", "review")
        assert command_line(predict, *command, "--csv", tmp_path / "whole.csv")[0] == 0
        stock, asked = text_classification.predict, []

        def stopped(run, texts, **more):
            asked.extend(texts)
            if "poor 1" in texts:
                raise KeyboardInterrupt
            return stock(run, texts, **more)

        with monkeypatch.context() as patched:
            patched.setattr(text_classification, "predict", stopped)
            status, _, err = command_line(predict, *command, "--csv", path)
            assert (status, err) == (75, "stopped: the same command starts again\n")
        _, rows = tables.read_rows(path)
        assert [row[1] for row in rows] == texts[:5]
        # Answers of another kind are not mixed with them.
        before = path.read_bytes()
        status, _, err = command_line(predict, *command, "--csv", path, "--top", "1")
        assert status == 2 and "a.csv has other answers to row 1 than this run with these" in err
        assert path.read_bytes() == before
        status, out, err = command_line(predict, *command, "--csv", path)
        assert (status, err) == (0, "")
        first, last = out.splitlines()
        assert first == f"{path} has 5 of 9 rows, the others follow"
        assert last == f"wrote {path}, 9 rows"
        header, rows = tables.read_rows(path)
        expected_header, expected = tables.read_rows(tmp_path / "whole.csv")
        assert header == expected_header and [row[:2] for row in rows] == [r[:2] for r in expected]
        for row, other in zip(rows, expected, strict=True):
            assert row[3] == other[3]
            shares = [[float(cell or 0) for cell in (each[2], *each[4:])] for each in (row, other)]
            assert shares[0] == pytest.approx(shares[1], rel=1e-4)
        status, _, err = command_line(predict, *command, "--csv", path)
        assert status == 2 and "a.csv already exists; remove it, or name a new one" in err

    def test_errors_of_rows_that_were_there_still_count(self, monkeypatch, tmp_path):
        def answers(run, inputs):
            return [[{"x": float(text)}] for text in read_each(number, inputs)]

        def number(text):
            if text == "a":
                raise DataError("no number")
            return text

        module = types.SimpleNamespace(predict=answers, __name__="mine")
        run = types.SimpleNamespace(module=module, metadata={})
        monkeypatch.setattr(predict, "_load", lambda *_, **__: run)
        texts = ["a", *map(str, range(20)), "a", "30"]
        lines = write(tmp_path / "lines.txt", "\n".join(texts).encode())
        options = predict.Options(run_dir=tmp_path, file=lines, csv=tmp_path / "a.csv")
        with pytest.raises(DataError, match="input 1: no number; likewise 1 more"):
            predict.main(options)
        whole = (tmp_path / "a.csv").read_bytes()
        (tmp_path / "a.csv").write_bytes(b"".join(whole.splitlines(keepends=True)[:20]))
        with pytest.raises(DataError, match="input 1: no number; likewise 1 more"):
            predict.main(options)
        assert (tmp_path / "a.csv").read_bytes() == whole

    def test_a_text_that_is_not_utf_8(self, runs, command_line, tmp_path):
        folder, _ = runs["text_classification"]
        status, out, err = command_line(predict, folder, "good", "caf\udce9")
        assert (status, out, err) == (2, "", "predict: 'caf\\udce9': is not UTF-8\n")
        path = str(tmp_path / "caf\udce9.png")
        Image.fromarray(np.eye(28, dtype="uint8") * 255).save(path)
        status, out, err = command_line(predict, runs["mnist"][0], path, "--json")
        assert (status, err) == (0, "") and json.loads(out)

    def test_an_input_that_begins_with_a_dash(self, runs, command_line):
        folder, _ = runs["text_classification"]
        status, _, err = command_line(predict, folder, "-bad")
        assert status == 2 and '-bad; "--" comes before inputs that begin with "-"\n' in err
        status, out, err = command_line(predict, folder, "--top", "1", "--", "-bad")
        assert (status, err) == (0, "") and out.startswith("-bad\n")

    def test_no_inputs_and_a_bare_text(self, runs):
        for recipe, (folder, _) in runs.items():
            run = load_run(folder)
            assert run.module.predict(run, []) == [], recipe
            with pytest.raises(DataError, match="expected a list of inputs, found the text 'good'"):
                run.module.predict(run, "good")

    def test_an_input_that_cannot_be_answered_has_its_reason_in_its_row(
        self, monkeypatch, tmp_path
    ):
        def answers(run, inputs):
            return [[{"x": float(text)}] for text in read_each(number, inputs)]

        def number(text):
            if text == "a":
                raise DataError("no number")
            return text

        module = types.SimpleNamespace(predict=answers, __name__="mine")
        run = types.SimpleNamespace(module=module, metadata={})
        monkeypatch.setattr(predict, "_load", lambda *_, **__: run)
        lines = write(tmp_path / "lines.txt", b"1\na\n\n3")
        options = predict.Options(run_dir=tmp_path, file=lines, csv=tmp_path / "a.csv")
        with pytest.raises(DataError, match="input 2: no number"):
            predict.main(options)
        assert tables.read_rows(tmp_path / "a.csv") == (
            ["input", "x", "error"],
            [["1", "1.0", ""], ["a", "", "no number"], ["", "", ""], ["3", "3.0", ""]],
        )

    def test_answers_beside_rows_that_a_recipe_reads(
        self, runs, command_line, tmp_path, monkeypatch
    ):
        folder, _ = runs["dna_melting"]
        rows = [["id", "sequence"], ["a", "ACGTACGT"], ["", ""], ["b", "GGATCC"]]
        tables.write_csv(tmp_path / "new.csv", rows)
        command = ("--file", tmp_path / "new.csv", "--csv", tmp_path / "a.csv")
        assert command_line(predict, folder, *command)[0] == 0
        header, found = tables.read_rows(tmp_path / "a.csv")
        assert header[:3] == ["id", "sequence", "°C"] and [row[:2] for row in found] == rows[1:]
        assert [bool(row[2]) for row in found] == [True, False, True]
        # A row that is not a molecule loses no others.
        wrong = tmp_path / "wrong.csv"
        tables.write_csv(wrong, [*rows, ["c", "GAXC"]])
        status, _, errors = command_line(
            predict, folder, "--file", wrong, "--csv", tmp_path / "b.csv"
        )
        assert status == 2 and "wrong.csv, input 4: " in errors and "line 5: 'GAXC'" in errors
        header, others = tables.read_rows(tmp_path / "b.csv")
        assert [row[: len(row) - 1] for row in others[:3]] == found
        assert "line 5: 'GAXC'" in others[3][header.index("error")]
        # Its table must have an input for each row.
        module = importlib.import_module("recipes.dna_melting")

        def read_table(path, **_):
            return ["ACGTACGT"]

        read_table.__module__ = "recipes.dna_melting"
        monkeypatch.setattr(module, "read_table", read_table)
        (tmp_path / "a.csv").unlink()
        status, _, errors = command_line(predict, folder, *command)
        assert status == 2 and errors.count("\n") == 1
        assert "returned 1 inputs, expected one for each of the 3 rows" in errors

    def test_json_of_numbers_of_numpy_and_of_other_encodings(self, monkeypatch, tmp_path):
        answers = [[{"x": np.float32(1.5), "unit": "°C"}]]
        module = types.SimpleNamespace(predict=lambda *_, **__: answers, __name__="mine")
        run = types.SimpleNamespace(module=module, metadata={})
        monkeypatch.setattr(predict, "_load", lambda *_, **__: run)
        for encoding in ("utf-8", "ascii"):
            printed = io.BytesIO()
            monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding))
            predict.main(predict.Options(run_dir=tmp_path, inputs=("a",), json=True))
            sys.stdout.flush()
            assert json.loads(printed.getvalue()) == [[{"x": 1.5, "unit": "°C"}]]
            assert ("°".encode() in printed.getvalue()) == (encoding == "utf-8")

    def test_arguments_of_a_recipes_predict(self, tmp_path, monkeypatch, capsys):
        def parsed(answers, *words):
            module = types.SimpleNamespace(predict=answers)
            monkeypatch.setattr(
                predict, "_load", lambda *_, **__: types.SimpleNamespace(module=module)
            )
            return parse(predict.Options, "predict", arguments=["~/run", "a text", *words]).more

        (tmp_path / "run").mkdir()
        write(tmp_path / "run" / "results.json", b"{}")
        monkeypatch.setenv("HOME", str(tmp_path))

        def in_a_unit(run, inputs, *, unit: str, top: int = 3):
            raise AssertionError

        def to_a_file(run, inputs, *, file: str = "a"):
            raise AssertionError

        assert parsed(in_a_unit, "--unit", "K") == {"unit": "K", "top": 3}
        first = ["--top", "1", "--unit", "K", "~/run", "a text"]  # before the run's folder
        assert parse(predict.Options, "predict", arguments=first).more == {"unit": "K", "top": 1}
        for words, said in (((), "required: --unit"), (("--unit", "K", "--tpo", "1"), "--tpo")):
            with pytest.raises(SystemExit):
                parsed(in_a_unit, *words)
            assert said in capsys.readouterr().err
        with pytest.raises(RunError, match=r"predict\(\): the argument file needs another name"):
            parsed(to_a_file)

    def test_an_accuracy_has_its_standard_error(self, tmp_path, capsys):
        results = {"notes": [], "run_dir": "r", "steps": 1, "dataset": "d"}
        results |= {"test": {"accuracy": 0.5, "cross_entropy": 1.0}, "baseline": {"accuracy": 0.4}}
        options = evaluate.Options(run_dir=tmp_path)
        for more, shown in (({"test_standard_error": 0.0123}, " ± 0.0123"), ({}, "")):
            evaluate._print(results | more, options)
            first, second, third = capsys.readouterr().out.splitlines()[2:]
            assert first == f"{'accuracy':24} 0.5000{shown}"
            assert second.endswith(" 1.0000") and third.endswith(" 0.4000")

    def test_the_file_of_the_test_split_is_named(self, tmp_path, capsys):
        results = {"notes": [], "run_dir": "r", "steps": 1, "dataset": "d", "test": {}}
        for more, shown in (({"test_file": "t.csv"}, "test file t.csv"), ({}, "test split")):
            evaluate._print(results | {"baseline": {}} | more, evaluate.Options(run_dir=tmp_path))
            assert capsys.readouterr().out.splitlines()[-1].endswith(f" d, {shown}")

    def test_a_row_with_half_a_pair_loses_no_others(self, monkeypatch, tmp_path, capsys):
        table = write(tmp_path / "pairs.csv", b"one,two\na,\nb,c\n,\n,d\n")
        module = types.SimpleNamespace(
            predict=lambda run, inputs: [[{"x": "+".join(pair)}] for pair in inputs],
            __name__="mine",
        )
        run = types.SimpleNamespace(module=module, metadata={"pairs": True}, options=None)
        monkeypatch.setattr(predict, "_load", lambda *_, **__: run)
        columns = dict(file=table, text_column="one", second_text_column="two")
        empty = [f"{table}, line {line}: one sentence of the pair is empty" for line in (2, 5)]
        with pytest.raises(DataError, match="input 1: .*, line 2: one sentence .* 1 more"):
            predict.main(predict.Options(run_dir=tmp_path, csv=tmp_path / "a.csv", **columns))
        assert tables.read_rows(tmp_path / "a.csv") == (
            ["one", "two", "x", "error"],
            [["a", "", "", empty[0]], ["b", "c", "b+c", ""], ["", "", "", ""]]
            + [["", "d", "", empty[1]]],
        )
        capsys.readouterr()
        with pytest.raises(DataError):
            predict.main(predict.Options(run_dir=tmp_path, **columns))
        assert capsys.readouterr().out.startswith(f"input 1\n  {empty[0]}\nb ||| c\n  b+c\n")

    @pytest.mark.long
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

    def test_numbers_have_four_digits_in_any_unit(self):
        for value, shown in ((0.034, "0.034"), (3.14159, "3.142"), (1234567.8, "1234568")):
            assert predict.format_value("risk", value) == f"{shown} risk"
        assert predict.format_value("°C", 62.06) == "62.1 °C"

    def test_texts_that_cannot_be_filled(self, runs, command_line):
        folder, _ = runs["bert_mlm"]
        for text, said in (
            ("no mask", "no [MASK]"),
            ("[MASK]" + " the" * 14, "the model takes 16"),
        ):
            status, _, errors = command_line(predict, folder, text)
            assert status == 2 and errors.count("\n") == 1 and said in errors

    def test_an_input_of_a_file_without_an_answer_loses_no_others(
        self, runs, command_line, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(predict, "AT_ONCE", 3)
        folder, _ = runs["bert_mlm"]
        texts = ["over all [MASK] .", "no mask", "", "[MASK]" + " the" * 14, "the [MASK] and"]
        path = tmp_path / "a.txt"
        path.write_text("\n".join(texts))
        status, out, errors = command_line(predict, folder, "--file", path, "--json")
        first, bad, empty, long, last = json.loads(out)
        assert bad == [{"error": "no [MASK] in 'no mask'"}] and empty == []
        assert long[0].keys() == {"error"} and "17 tokens, the model takes 16" in long[0]["error"]
        said = f"predict: --file {path}, input 2: no [MASK] in 'no mask'; likewise 1 more\n"
        assert (status, errors) == (2, said)
        status, out, _ = command_line(predict, folder, texts[0], texts[-1], "--json")
        assert status == 0 and json.loads(out) == [first, last]
        status, out, _ = command_line(predict, folder, "--file", path)
        assert status == 2 and "no mask\n  no [MASK] in 'no mask'\n\n[MASK] the the" in out


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

    @pytest.mark.parametrize("name", ["options.json", "results.json", "model/recipe.json"])
    def test_a_file_that_is_none_or_endless(self, name, said, copied):
        folder = copied("mnist")
        for target in ("/dev/zero", "/dev/null", "."):
            (folder / name).unlink()
            (folder / name).symlink_to(target)
            assert name.rpartition("/")[2] in said(folder)

    @pytest.mark.parametrize(
        "name, part, values, expected",
        [
            ("results", None, {"module": 0}, "module must be a text, found 0"),
            ("results", None, {"module": ""}, "module must be a text"),
            ("results", None, {"module": "recipes.mnist\ud800"}, "damaged"),
            (
                "results",
                None,
                {"steps": "many"},
                'steps must be a whole number from 0, found "many"',
            ),
            ("results", None, {"steps": 10**400}, "a number of 401 digits"),
            ("results", None, {"test": [1]}, "test must be an object of numbers, found [1]"),
            ("results", None, {"test": {"accuracy": None}}, "test must be an object of numbers"),
            ("options", None, {"options": True}, "options must be an object, found true"),
            ("options", None, {"resolved": [1]}, "resolved must be an object"),
            ("options", "resolved", {"dataset": 7}, "dataset must be a text or null, found 7"),
            ("options", "options", {"seed": 1.5}, "options.json: damaged, --seed 1.5: must be int"),
            ("options", "options", {"epochs": {"a": 1}}, "--epochs {'a': 1}: must be int"),
            ("options", "options", {"dataset": None}, "--dataset None: must be str"),
            ("options", "options", {"epoch": 1}, "unknown options epoch (recipes.mnist does not"),
        ],
    )
    def test_values_of_another_kind(self, name, part, values, expected, said, copied):
        folder = copied("mnist")
        change(folder / f"{name}.json", part, **values)
        assert expected in said(folder)

    @pytest.mark.parametrize(
        "content, expected",
        [
            ({"classes": None}, "classes must be a list of texts, found null"),
            ({"classes": [1, 2]}, "classes must be a list of texts, found [1, 2]"),
            ({"classes": ["a", "b"]}, "2 names for the 10 outputs of the model"),
            ({}, "recipe.json: damaged, it lacks classes"),
        ],
    )
    def test_classes_that_cannot_be(self, content, expected, copied, tmp_path, command_line):
        """Also where the checksums are right, as someone else may have written them."""
        folder = copied("mnist")
        (folder / "model" / "recipe.json").write_text(json.dumps(content))
        files.write_checksums(folder / "model")
        Image.new("L", (28, 28)).save(tmp_path / "x.png")
        status, _, errors = command_line(predict, folder, tmp_path / "x.png")
        assert status == 2 and errors.count("\n") == 1 and expected in errors

    def test_how_far_a_run_is(self, said, copied, tmp_path):
        folder = copied("mnist")
        (folder / "results.json").unlink()
        assert "not finished, 0 of 1 steps are saved" in said(folder)
        for name in ("step-00000001", "step-00000001-backup"):
            (folder / "checkpoints" / name).mkdir(parents=True)
        assert "not finished, 1 of 1 steps are saved" in said(folder)
        assert "no such folder" in said(tmp_path / "nothing")
        (tmp_path / "more").mkdir()
        assert "not a run directory (empty)" in said(tmp_path / "more")
        for name in "abcde":
            (tmp_path / "more" / name).touch()
        assert "not a run directory (contains a, b, c and 2 more)" in said(tmp_path / "more")

    def test_a_recipe_that_is_gone(self, said, copied):
        folder = copied("bert_mlm")
        change(folder / "results.json", module="recipes.tumours")
        assert "its recipe, recipes.tumours, cannot be imported" in said(folder)

    def test_a_program_that_is_no_recipe(self, said, copied):
        folder = copied("bert_mlm")
        change(folder / "results.json", module="recipes.compare")
        assert "recipes.compare, has no Options and main() of a recipe" in said(folder)


EVIL = "import pathlib; pathlib.Path({!r}).touch()\nfrom recipes.mnist import *\n"


class TestTrust:
    """A run's folder names code, and may be a stranger's."""

    @pytest.fixture
    def foreign(self, copied, tmp_path, monkeypatch):
        """A run of mnist that names another module, which leaves a trace when it is imported."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        trace = tmp_path / "trace"

        def foreign(module, path):
            folder = copied("mnist")
            change(folder / "results.json", module=module)
            path = tmp_path / path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(EVIL.format(str(trace)))
            return folder

        yield foreign
        for name in list(sys.modules):
            if name.split(".")[0] in ("helper", "mnist"):
                del sys.modules[name]

    @pytest.mark.parametrize(
        "module, path",
        [
            ("mnist.model.helper", "mnist/model/helper.py"),
            ("helper", "helper.py"),
            ("recipes.sub.helper", "recipes/sub/helper.py"),
            ("recipes", "helper.py"),
            ("os", "helper.py"),
        ],
    )
    @pytest.mark.parametrize("program", ["evaluate", "predict", "export"])
    def test_a_module_that_is_not_named_is_not_imported(
        self, foreign, program, module, path, command_line, tmp_path
    ):
        folder = foreign(module, path)
        more = {"evaluate": (), "predict": ("x.png",), "export": ("--to", "saved_model")}[program]
        program = importlib.import_module(f"recipes.{program}")
        status, printed, errors = command_line(program, folder, *more)
        assert (status, printed, errors.count("\n")) == (2, "", 1)
        assert f"its recipe, {module}, is not one of this package" in errors
        assert f"pass --trust-module {module}" in errors
        assert not (tmp_path / "trace").exists()

    @pytest.mark.parametrize("linked", [False, True])
    def test_nothing_is_imported_from_a_runs_folder(self, foreign, linked, command_line, tmp_path):
        """Also where a person names it, and by a link from elsewhere."""
        folder = foreign("mnist.model.helper", "mnist/model/helper.py")
        words = ["--trust-module", "mnist.model.helper"]
        if linked:
            (tmp_path / "helper.py").symlink_to(folder / "model" / "helper.py")
            change(folder / "results.json", module="helper")
            words = ["--trust-module", "helper"]
        status, _, errors = command_line(evaluate, folder, *words)
        assert status == 2 and "is within a run's folder" in errors and errors.count("\n") == 1
        assert not (tmp_path / "trace").exists()

    def test_nor_from_the_folder_of_another_run(self, foreign, runs, command_line, tmp_path):
        folder = foreign("mnist.helper", "mnist/helper.py")
        other = shutil.copytree(folder, tmp_path / "other")
        (folder / "helper.py").unlink()
        (other / "helper.py").write_text(EVIL.format(str(tmp_path / "trace")))
        change(folder / "results.json", module="other.helper")
        status, _, errors = command_line(evaluate, folder, "--trust-module", "other.helper")
        assert status == 2 and "is within a run's folder" in errors
        assert not (tmp_path / "trace").exists()

    def test_a_recipe_that_a_person_names(self, foreign, runs, command_line, tmp_path):
        folder = foreign("helper", "helper.py")
        status, _, errors = command_line(evaluate, folder, "--trust-module", "other")
        assert status == 2 and "pass --trust-module helper" in errors
        words = ("--trust-module", "helper", "--json")
        status, printed, errors = command_line(evaluate, folder, *words)
        assert (status, errors) == (0, "") and (tmp_path / "trace").exists()
        accuracy = runs["mnist"][1]["test"]["accuracy"]
        assert json.loads(printed)["test"]["accuracy"] == pytest.approx(accuracy, rel=1e-5)


class TestOwnArguments:
    def test_a_recipe_without_predict(self, copied, monkeypatch):
        monkeypatch.delattr(sys.modules["recipes.mnist"], "predict")
        with pytest.raises(RunError, match="its recipe, recipes.mnist, has no predict()"):
            predicted(copied("mnist"), "x.png")

    def test_help_shows_them_where_a_run_is_named(self, runs, command_line):
        status, printed, _ = command_line(predict, runs["dna_melting"][0], "--help")
        assert status == 0
        _, _, own = printed.partition("options of recipes.dna_melting:\n")
        assert (
            "--sodium X" in own
            and "50 mM are 0.05. (default: 0.05)" in own
            and "RUN_DIR" in printed
        )
        assert "--strand-concentration X" in own
        assert "--sodium X" not in command_line(predict, "--help")[1]
        assert "--sodium X" not in command_line(predict, runs["mnist"][0], "--help")[1]

    def test_one_of_several_values_takes_the_inputs_after_it(
        self, command_line, monkeypatch, tmp_path
    ):
        def answers(run, inputs, *, stop: tuple[str, ...] = ()):
            return [[{"x": f"{text} {stop}"}] for text in inputs]

        module = types.SimpleNamespace(predict=answers, __name__=__name__)
        run = types.SimpleNamespace(module=module, metadata={}, options=None)
        monkeypatch.setattr(predict, "_load", lambda *_, **__: run)
        write(tmp_path / "results.json", b"{}")
        status, _, errors = command_line(predict, tmp_path, "--stop", "Q:", "what is it?")
        order = "they come before options that take several values"
        assert status == 2 and f"INPUTS: pass some, or --file; {order}" in errors
        status, printed, _ = command_line(predict, tmp_path, "what is it?", "--stop", "Q:")
        assert status == 0 and printed == "what is it?\n  what is it? ['Q:']\n"
        status, _, errors = command_line(predict, tmp_path, "what is it?", "--stop")
        assert status == 2 and "argument --stop: expected at least one argument" in errors
        status, _, errors = command_line(predict, tmp_path)
        assert status == 2 and order not in errors
        assert "default: ()" not in command_line(predict, tmp_path, "--help")[1]

    def test_a_mistyped_one_names_the_nearest(self, runs, command_line):
        folder, _ = runs["dna_melting"]
        with_type = command_line(predict, folder, "ACGT", "--sodum", "1")
        assert with_type[0] == 2 and with_type[2].endswith("did you mean --sodium?\n")

    @pytest.mark.parametrize(
        "words", [("--zzz", "hello"), ("hello", "--zzz", "3"), ("--zzz=3", "hello"), ("--zzz",)]
    )
    def test_an_unknown_one_is_named_alone(self, command_line, monkeypatch, tmp_path, words):
        """The next word may be an input; a word with a dash is none."""
        module = types.SimpleNamespace(predict=lambda run, inputs: [], __name__=__name__)
        run = types.SimpleNamespace(module=module, metadata={}, options=None)
        monkeypatch.setattr(predict, "_load", lambda *_, **__: run)
        module.predict.__module__ = __name__
        write(tmp_path / "results.json", b"{}")
        status, _, errors = command_line(predict, tmp_path, *words)
        (option,) = [word for word in words if word.startswith("--")]
        assert status == 2 and errors.endswith(
            f"unrecognized arguments: {option}; python -m recipes.predict RUN_DIR --help lists the "
            "options of a run\n"
        )

    def test_typed_line_breaks_and_tabs_end_texts(self, command_line, monkeypatch, tmp_path):
        def answers(run, inputs, *, stop: tuple[str, ...] = ()):
            return [[{"x": repr(list(stop))}] for text in inputs]

        module = types.SimpleNamespace(predict=answers, __name__=__name__)
        run = types.SimpleNamespace(module=module, metadata={}, options=None)
        monkeypatch.setattr(predict, "_load", lambda *_, **__: run)
        write(tmp_path / "results.json", b"{}")
        typed = (r"\n\nQ:", r"a\tb", "\n", r"\d", "###", r"\\n")
        status, printed, errors = command_line(predict, tmp_path, "a", "--stop", *typed)
        read = ["\n\nQ:", "a\tb", "\n", r"\d", "###", r"\n"]
        assert (status, printed) == (0, f"a\n  {read}\n")
        explained = r"\n is read as a line break, \t as a tab; \\n is a backslash and n"
        assert errors.splitlines() == [
            rf"--stop '\n\nQ:': {explained}",
            rf"--stop 'a\tb': {explained}",
        ]
        # In Python a text is what it is.
        options = predict.Options(run_dir=tmp_path, inputs=("a",))
        assert predict.main(options, stop=[r"\n"]) == [[{"x": repr([r"\n"])}]]

    @pytest.mark.parametrize(
        "words", [("--zzz", "hello"), ("--tempreature", "0.8"), ("--stop", "a")]
    )
    def test_without_the_run_its_folder_is_named_and_no_input(self, command_line, tmp_path, words):
        status, _, errors = command_line(predict, tmp_path / "x", *words)
        assert status == 2 and "x: not a run directory (there is no such folder)" in errors

    def test_without_the_run_that_is_what_is_wrong(self, command_line, tmp_path):
        status, _, errors = command_line(predict, tmp_path / "x", "ACGT", "--sodium", "1")
        assert status == 2 and "not a run directory (there is no such folder)" in errors

    def test_from_a_notebook(self, runs):
        folder, _ = runs["dna_melting"]
        options = predict.Options(run_dir=str(folder), inputs="ACGTACGTAC")
        salty, plain = predict.main(options, sodium=0.2), predict.main(options)
        assert len(plain) == 1 and salty != plain
