"""Runs beside each other: what differs, what came out, and what is no run."""

import copy
import json
import math
import shutil
import statistics
import sys

import pytest

from recipes import compare
from training import curves
from training.errors import OptionsError, RunError

OPTIONS = {"dataset": "auto", "strategy": "auto", "replicas": None, "epochs": 2, "dropout": 0.1}
OPTIONS |= {"base_learning_rate": None, "lr_scaling": "linear", "global_batch_size": None}
OPTIONS |= {"seed": 0, "run_dir": "x", "log_every": 50, "quiet": False, "cache_dir": None}
RESULTS = {
    "recipe": "mnist",
    "dataset": "digits",
    "strategy": "none",
    "replicas": 1,
    "workers": 1,
    "global_batch_size": 32,
    "learning_rate": 0.003,
    "seed": 0,
    "steps": 1200,
    "test": {"accuracy": 0.9, "loss": 0.5},
    "baseline": {"most_frequent_accuracy": 0.1},
    "tokens_per_second": None,
    "examples_per_second": 1234.4,
    "seconds": 90.0,
    "resumed_from_step": None,
}
RECORDS = [
    {"event": "step", "step": 50, "epoch": 1, "loss": 2.0, "learning_rate": 0.1},
    {"event": "evaluation", "step": 60, "epoch": 1, "split": "validation", "accuracy": 0.5},
    {"event": "evaluation", "step": 60, "epoch": 1, "split": "test", "accuracy": 0.4},
    {"event": "step", "step": 100, "epoch": 1, "loss": "nan", "learning_rate": 0.1},
    {"event": "epoch", "step": 100, "epoch": 1, "loss": 1.5, "val_accuracy": 0.75},
]


@pytest.fixture
def run(tmp_path):
    """Writes a run's folder; values of its options and results may differ."""

    def run(name, options=(), results=(), data="aaaa", records=RECORDS):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        seed = dict(options).get("seed", 0)
        content = {"options": OPTIONS | {"run_dir": str(folder)} | dict(options)}
        content |= {"recipe": "mnist", "resolved": {"data_sha256": data}}
        (folder / "options.json").write_text(json.dumps(content))
        content = copy.deepcopy(RESULTS) | {"seed": seed} | dict(results)
        (folder / "results.json").write_text(json.dumps(content))
        lines = [json.dumps(record) for record in records]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    return run


def rows(*folders, **options):
    return compare.main(compare.Options(run_dirs=folders, **options))


class TestRows:
    def test_what_differs_and_what_came_out(self, run):
        a, b = rows(
            run("a"),
            run(
                "b",
                {"dropout": 0.3, "lr_scaling": "sqrt", "quiet": True},
                {"learning_rate": 0.01, "test": {"accuracy": 0.95, "loss": 0.25}, "seconds": 600},
            ),
        )
        assert list(a) == [
            *("recipe", "run", "dropout", "learning_rate", "accuracy", "loss"),
            *("to beat: most_frequent_accuracy", "speed", "time", "steps"),
        ]
        assert list(b.values()) == [
            *("mnist", "b", "0.3", "0.01", "0.9500", "0.2500"),
            *("0.1000", "1,234 examples/s", "10.0 min", "1,200"),
        ]

    def test_auto_is_what_it_came_to(self, run):
        """One run names what the other one fell back to: they are the same."""
        found = rows(run("a"), run("b", {"dataset": "digits", "seed": 1}))
        assert len(found) == 1

    def test_seeds_become_a_mean_and_a_deviation(self, run):
        values = [0.90, 0.92, 0.97]
        folders = [
            run(f"s{seed}", {"seed": seed}, {"test": {"accuracy": value}, "steps": 100 + seed})
            for seed, value in enumerate(values)
        ]
        (row,) = rows(*folders)
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        assert row["accuracy"] == f"{mean:.4f} ± {deviation:.4f} (n=3)"
        assert row["run"] == "s0, s1, s2" and row["steps"] == "101 ± 1 (n=3)"
        assert row["to beat: most_frequent_accuracy"] == "0.1000"
        assert "seed" not in row

    def test_another_option_or_the_same_seed_again_stays_apart(self, run):
        folders = [run("a"), run("b", {"seed": 1, "epochs": 3}), run("c"), run("d", {"seed": 2})]
        found = rows(*folders)
        assert [row["run"] for row in found] == ["a, d", "b", "c"]
        assert [row["epochs"] for row in found] == ["2", "3", "2"]
        assert [row["seed"] for row in found] == ["0, 2", "1", "0"]

    def test_each_recipe_has_a_table(self, run, capsys):
        other = {"recipe": "bert_mlm", "test": {"cross_entropy": 4.0}, "tokens_per_second": 9e3}
        found = rows(run("a"), run("b", results=other))
        assert "cross_entropy" not in found[0] and "accuracy" not in found[1]
        assert found[1]["speed"] == "9,000 tokens/s"
        printed = capsys.readouterr().out
        assert printed.index("mnist\n") < printed.index("\n\nbert_mlm\n")

    def test_a_resumed_runs_time_is_marked(self, run, capsys):
        (row,) = rows(run("a", results={"resumed_from_step": 7}))
        assert row["time"] == "90 s *"
        assert "* resumed: the time is that of the last part" in capsys.readouterr().out

    @pytest.mark.parametrize("value", ["nan", math.nan, math.inf, [1], {"a": 1}, True, 10**400])
    def test_a_number_that_is_none_makes_no_mean(self, run, value):
        (row,) = rows(
            run("a", results={"test": {"accuracy": value}, "dataset": value}),
            run("b", {"seed": 1}, {"test": {"accuracy": 0.5}, "dataset": value}),
        )
        assert "±" not in row["accuracy"] or value is True


class TestTable:
    def test_fits_the_terminal(self, run, capsys, monkeypatch):
        folders = [run(f"run-{n}", {"dropout": n / 10, "epochs": n}) for n in range(1, 7)]
        monkeypatch.setenv("COLUMNS", "140")
        rows(*folders)
        wide = capsys.readouterr().out.splitlines()
        assert wide[1].split()[:3] == ["run", "epochs", "dropout"] and len(wide) == 8
        monkeypatch.setenv("COLUMNS", "70")
        rows(*folders)
        narrow = capsys.readouterr().out
        assert max(map(len, narrow.splitlines())) <= 70
        for n in range(1, 7):
            assert narrow.count(f"run-{n}") == 1
        assert narrow.count("\nepochs") == 3  # two runs fit beside each other

    def test_json(self, run, command_line):
        status, printed, _ = command_line(compare, run("a"), "--json")
        assert status == 0 and json.loads(printed)[0]["accuracy"] == "0.9000"

    def test_a_real_run(self, tiny_run, command_line):
        status, printed, errors = command_line(compare, tiny_run.folder)
        assert status == 0 and not errors
        assert f"{tiny_run.results['test']['cross_entropy']:.4f}" in printed


class TestProblems:
    def test_each_is_named_in_a_line_and_the_others_are_compared(self, run, command_line, tmp_path):
        good = run("good")
        unfinished, cut, list_, lacking = (run(n) for n in ("unfinished", "cut", "list", "lacking"))
        (unfinished / "results.json").unlink()
        (cut / "results.json").write_text('{"recipe": "mni')
        (list_ / "options.json").write_text("[]")
        (lacking / "results.json").write_text('{"recipe": "mnist", "test": {}}')
        folders = [tmp_path / "nothing", unfinished, cut, list_, lacking, good]
        status, printed, errors = command_line(compare, *folders)
        assert status == 0 and "0.9000" in printed
        lines = errors.splitlines()
        assert [line.split(":")[0] for line in lines] == [
            *(str(tmp_path / "nothing"), str(unfinished), str(cut / "results.json")),
            *(str(list_ / "options.json"), str(lacking / "results.json")),
        ]
        assert "is not finished" in lines[1] and "lacks seed, steps, seconds, baseline" in lines[4]

    def test_none_at_all(self, command_line, tmp_path):
        status, _, errors = command_line(compare, tmp_path)
        assert status == 2
        assert errors == f"compare: no finished run\n  {tmp_path}: holds no run\n"
        status, _, errors = command_line(compare)
        assert status == 2 and errors.startswith("compare: no run: give the folders")

    def test_data_that_only_share_their_name(self, run, command_line):
        folders = [
            run("a"),
            run("b", {"dropout": 0.5}, data="bbbb"),
            run("c", {"seed": 1}, data="c"),
        ]
        status, _, errors = command_line(compare, *folders)
        assert status == 0
        assert errors == f"{folders[1]}: its digits is not the data of {folders[0]}\n"


class TestCurves:
    def test_which_there_are(self, run):
        assert curves.read_curves(run("a")) == {
            "loss": ([50], [2.0]),
            "validation accuracy": ([60, 100], [0.5, 0.75]),
        }

    def test_a_damaged_file_is_named(self, run):
        folder = run("a")
        (folder / "metrics.jsonl").write_text('{"event": "step"')
        with pytest.raises(RunError, match="a/metrics.jsonl: cannot be read"):
            curves.read_curves(folder)

    def test_a_picture(self, run, tmp_path, command_line):
        Image = pytest.importorskip("PIL.Image")
        pytest.importorskip("matplotlib")
        folders = [run("a"), run("b", {"dropout": 0.5}), run("c")]
        shutil.rmtree(folders[2])
        lacking = run("d", {"dropout": 0.7})
        (lacking / "metrics.jsonl").unlink()
        path = tmp_path / "curves.png"
        status, _, errors = command_line(compare, *folders, lacking, "--png", path)
        assert status == 0
        assert f"{lacking}/metrics.jsonl: cannot be read (No such file" in errors
        with Image.open(path) as picture:
            assert picture.size[0] > 2 * picture.size[1]  # two charts beside each other
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20
        status, _, errors = command_line(compare, folders[0], "--png", tmp_path / "no" / "x.png")
        assert status == 2 and errors.endswith("x.png: No such file or directory\n")

    def test_without_matplotlib(self, run, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(OptionsError, match="matplotlib, which is not installed"):
            rows(run("a"), png=tmp_path / "x.png")

    def test_another_kind_of_file(self, command_line, tmp_path):
        status, _, errors = command_line(compare, tmp_path, "--png", "x.jpg")
        assert status == 2 and "--png x.jpg: must end in .png, .pdf, .svg" in errors
