"""A table of finished runs: what differs, what came out, and what is no run."""

import copy
import json
import statistics
import sys
from pathlib import Path

import pytest

from recipes import compare
from training.errors import OptionsError

SHOWN = {"dataset": "digits", "epochs": 2, "dropout": 0.1, "global_batch_size": 32, "seed": 0}
RESULTS = {
    "recipe": "mnist",
    "dataset": "digits",
    "strategy": "none",
    "replicas": 1,
    "learning_rate": 0.003,
    "steps": 1200,
    "weights_of_step": 1200,
    "test": {"accuracy": 0.9, "loss": 0.5},
    "baseline": {"most_frequent_accuracy": 0.1},
    "tokens_per_second": None,
    "examples_per_second": 1234.4,
    "seconds": 90.0,
    "resumed_from_step": None,
}
RECORDS = [
    {"event": "step", "step": 50, "loss": 2.0, "learning_rate": 0.1},
    {"event": "evaluation", "step": 60, "split": "validation", "accuracy": 0.5},
    {"event": "evaluation", "step": 60, "split": "test", "accuracy": 0.4},
    {"event": "step", "step": 100, "loss": "nan", "learning_rate": 0.1},
    {"event": "epoch", "step": 100, "loss": 1.5, "val_accuracy": 0.75},
]


@pytest.fixture
def run(tmp_path):
    """Writes a run's folder; values of its options and results may differ."""

    def run(name, options=(), results=(), resolved=()):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        shown = SHOWN | dict(options)
        content = {"recipe": "mnist", "shown": shown, "resolved": dict(resolved)}
        (folder / "options.json").write_text(json.dumps(content))
        content = copy.deepcopy(RESULTS) | {"seed": shown["seed"]} | dict(results)
        (folder / "results.json").write_text(json.dumps(content))
        lines = [json.dumps(record) for record in RECORDS]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    return run


def rows(*folders, **options):
    return compare.main(compare.Options(run_dirs=folders, **options))


class TestRows:
    def test_what_differs_and_what_came_out(self, run):
        better = {"learning_rate": 0.01, "test": {"accuracy": 0.95, "loss": 0.25}, "seconds": 600}
        a, b = rows(run("a"), run("b", {"dropout": 0.3}, better))
        assert list(a) == [
            *("table", "run", "dropout", "learning_rate", "seed", "accuracy", "loss"),
            *("baseline: most_frequent_accuracy", "examples/s", "tokens/s", "seconds", "steps"),
        ]
        assert list(b.values()) == [
            *("mnist on digits", "b", "0.3", "0.01", "0", "0.9500", "0.2500"),
            *("0.1000", "1,234", "-", "600", "1,200"),
        ]

    def test_rates_that_were_drawn_have_six_digits(self, run):
        drawn = {"learning_rate": 0.00012076665792328135}
        a, b = rows(run("a"), run("b", {"dropout": 0.3}, drawn))
        assert (a["learning_rate"], b["learning_rate"]) == ("0.003", "0.000120767")

    def test_the_validation_of_the_weights_that_were_tested_stands_above_the_test(self, run):
        at_60 = run("a", results={"weights_of_step": 60})
        (row,) = rows(at_60)
        assert row["val_accuracy"] == "0.5000"
        assert list(row).index("val_accuracy") < list(row).index("accuracy")
        (row,) = rows(run("b", results={"weights_of_step": 100}))
        assert row["val_accuracy"] == "0.7500"
        (at_60 / "metrics.jsonl").write_text("{damaged")
        assert "val_accuracy" not in rows(at_60)[0]

    def test_a_recipe_that_names_no_data_is_called_by_its_name(self, run):
        (row,) = rows(run("a", results={"dataset": None}))
        assert row["table"] == "mnist"

    def test_seeds_become_a_mean_and_a_deviation(self, run):
        values = [0.90, 0.92, 0.97]
        folders = [
            run(f"s{seed}", {"seed": seed}, {"test": {"accuracy": value}, "steps": 100 + seed})
            for seed, value in enumerate(values)
        ]
        row, other = rows(*folders, run("other", {"epochs": 3}))
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        assert row["accuracy"] == f"{mean:.4f} ± {deviation:.4f} (n=3)"
        assert row["run"] == "s0, s1, s2" and row["steps"] == "101 ± 1 (n=3)"
        assert (row["epochs"], other["epochs"], row["seed"]) == ("2", "3", "0, 1, 2")
        assert row["baseline: most_frequent_accuracy"] == "0.1000"

    def test_equal_results_of_several_seeds_have_a_deviation_of_zero(self, run):
        folders = [run(f"s{seed}", {"seed": seed}) for seed in range(3)]
        (row,) = rows(*folders)
        assert row["accuracy"].endswith(" ± 0.0000 (n=3)")
        assert "±" not in row["steps"] + row["baseline: most_frequent_accuracy"]

    def test_folders_of_one_name_are_shown_with_what_tells_them_apart(self, run):
        values = [0.5, 0.9, 0.7]
        folders = [
            run(f"seed{seed}/run", {"seed": seed}, {"test": {"accuracy": value}})
            for seed, value in enumerate(values)
        ]
        (row,) = rows(*folders)
        assert row["run"] == "seed0/run, seed1/run, seed2/run"
        assert row["accuracy"] == "0.7000 ± 0.2000 (n=3)"
        one, other = rows(folders[0], run("alone", {"epochs": 3}))
        assert (one["run"], other["run"]) == ("run", "alone")

    def test_names_of_many_folders_are_not_compared_with_one_another(self, monkeypatch):
        """A thousand runs took a million comparisons, and again for each of their parents."""

        class Parts(tuple):
            cuts = 0

            def __getitem__(self, where):
                Parts.cuts += 1
                return super().__getitem__(where)

        class Counted(type(Path())):
            @property
            def parts(self):
                return Parts(super().parts)

        monkeypatch.setattr(compare, "Path", Counted)
        folders = [Path(f"/runs/search/{n // 2}/{'ab'[n % 2]}") for n in range(200)]
        names = compare.names_of(folders)
        assert names[folders[3]] == "1/b" and len(set(names.values())) == 200
        assert Parts.cuts < 20 * len(folders)

    def test_whatever_changes_the_training_is_no_seed(self, run):
        """As `--max-steps` does, which the options that are shown leave to the plan."""
        short = run("short", resolved={"total_steps": 5})
        long = run("long", {"seed": 1}, {"test": {"accuracy": 0.1}}, {"total_steps": 25})
        a, b = rows(short, long)
        assert (a["total_steps"], b["total_steps"]) == ("5", "25")
        assert (a["accuracy"], b["accuracy"]) == ("0.9000", "0.1000")
        for name, values in (("preset", ("x", "y")), ("global_batch_size", (8, 16))):
            pair = [
                run(f"{name}{v}", {"seed": values.index(v)}, resolved={name: v}) for v in values
            ]
            assert [row[name] for row in rows(*pair)] == [str(v) for v in values]

    def test_other_data_are_another_setting_unless_the_seed_draws_them(self, run):
        def made(name, seed, data):
            resolved = {"data_sha256": data}
            return run(name, {"seed": seed}, {"test": {"accuracy": seed / 10}}, resolved)

        row, other = rows(made("a", 1, "0123456789"), made("b", 1, "abcdefghij"))
        assert (row["data_sha256"], other["data_sha256"]) == ("01234567", "abcdefgh")
        (row,) = rows(made("c", 1, "0123456789"), made("d", 2, "abcdefghij"))
        assert row["run"] == "c, d" and "(n=2)" in row["accuracy"]

    def test_equal_weights_count_once(self, run):
        def made(name, seed, accuracy, **weights):
            return run(name, {"seed": seed}, {"test": {"accuracy": accuracy}} | weights)

        folders = [
            made("a", 0, 0.5, weights_sha256="x"),
            made("copy", 0, 0.5, weights_sha256="x"),
            made("b", 1, 0.7, weights_sha256="y"),
            made("again", 0, 0.5, weights_sha256="x"),
            made("older", 2, 0.6),  # its version wrote no checksum
        ]
        (row,) = rows(*folders)
        mean, deviation = statistics.mean([0.5, 0.7, 0.6]), statistics.stdev([0.5, 0.7, 0.6])
        assert row["run"] == "a = copy = again, b, older" and row["seed"] == "0, 1, 2"
        assert row["accuracy"] == f"{mean:.4f} ± {deviation:.4f} (n=3)"
        (row,) = rows(*folders[:2])
        assert row["accuracy"] == "0.5000"

    def test_a_copy_without_its_curves_hides_no_validation(self, run):
        first = run("a", results={"weights_sha256": "x", "weights_of_step": 60})
        (first / "metrics.jsonl").unlink()
        other = run("b", results={"weights_sha256": "x", "weights_of_step": 60})
        (row,) = rows(first, other)
        assert row["run"] == "a = b" and row["val_accuracy"] == "0.5000"

    def test_one_dataset_has_one_table_however_its_path_is_spelled(self, run, capsys):
        def made(name, dataset, seed, recipe="mnist", data="x", words="y"):
            resolved = {"data_sha256": data, "vocabulary_sha256": words}
            results = {"dataset": dataset, "recipe": recipe}
            return run(name, {"dataset": dataset, "seed": seed}, results, resolved)

        found = rows(
            made("a", "data/x.csv", 0),
            made("b", "./data/x.csv", 1),
            made("c", "/home/data/x.csv", 2, words="z"),
            made("d", "data/y.csv", 0, data="w"),
            made("e", "data/x.csv", 0, recipe="other"),
            run("f", {"dataset": "data/x.csv"}, {"dataset": "no sums"}),
        )
        assert [(row["table"], row["run"]) for row in found] == [
            ("mnist on data/x.csv", "a, b, c"),
            ("mnist on data/y.csv", "d"),
            ("other on data/x.csv", "e"),
            ("mnist on no sums", "f"),
        ]
        assert "dataset" not in found[0]

    def test_repetitions_of_a_seed_count_as_their_mean(self, run):
        """Of other last bits, for instance: they are not independent results."""

        def made(name, seed, accuracy):
            results = {"test": {"accuracy": accuracy}, "weights_sha256": name}
            return run(name, {"seed": seed}, results)

        folders = [made("a", 0, 0.5), made("again", 0, 0.7), made("b", 1, 0.8)]
        (row,) = rows(*folders)
        deviation = statistics.stdev([0.6, 0.8])
        assert row["run"] == "a, again, b" and row["seed"] == "0, 1"
        assert row["accuracy"] == f"0.7000 ± {deviation:.4f} (n=2)"
        (row,) = rows(*folders[:2])
        assert row["accuracy"] == "0.6000"

    @pytest.mark.parametrize("resumed, seconds", [(None, "90"), (700, "-")])
    def test_a_resumed_run_has_no_seconds(self, run, resumed, seconds):
        """Those that it has are of its last start, and the steps of all."""
        (row,) = rows(run("a", results={"resumed_from_step": resumed}))
        assert (row["seconds"], row["steps"]) == (seconds, "1,200")

    def test_a_parent_folder_means_all_runs_in_it(self, run, tmp_path):
        run("b"), run("a")
        nested = run("deeper")
        nested.rename(tmp_path / "runs" / "b" / "checkpoints")  # not within a run
        (tmp_path / "more").mkdir()
        (tmp_path / "runs").rename(tmp_path / "more" / "runs")
        folder = tmp_path / "more"
        # A run that is named twice counts once.
        for folders in ((folder,), (folder / "runs",), (folder, folder / "runs" / "a")):
            (row,) = rows(*folders)
            assert row["run"] == "a, b"

    def test_each_recipe_and_each_dataset_has_a_table(self, run, capsys):
        other = {"recipe": "bert_mlm", "test": {"cross_entropy": 4.0}, "tokens_per_second": 9e3}
        found = rows(run("a"), run("b", results=other), run("c", results={"dataset": "mnist"}))
        assert "cross_entropy" not in found[0] and "accuracy" not in found[1]
        assert found[1]["tokens/s"] == "9,000"
        printed = capsys.readouterr().out
        titles = ("mnist on digits\n", "\n\nbert_mlm on digits\n", "\n\nmnist on mnist\n")
        assert [printed.index(title) for title in titles] == sorted(map(printed.index, titles))

    def test_a_real_run(self, tiny_run, command_line):
        status, printed, errors = command_line(compare, tiny_run.folder)
        assert status == 0 and not errors
        assert f"{tiny_run.results['test']['cross_entropy']:.4f}" in printed
        # What meant nothing is not shown.
        settings = compare.read_run(tiny_run.folder)["settings"]
        assert not {"max_steps", "base_learning_rate", "run_dir", "quiet"} & set(settings)
        assert settings["epochs"] == tiny_run.results["epochs"]


class TestProblems:
    def test_each_is_named_in_a_line_and_the_others_are_compared(self, run, command_line, tmp_path):
        good = run("good")
        unfinished, cut, lacking = (run(n) for n in ("unfinished", "cut", "lacking"))
        (unfinished / "results.json").unlink()
        longer = run("longer")  # its options are those of the longer run, its results are not
        options = json.loads((longer / "options.json").read_text())
        (longer / "options.json").write_text(json.dumps(options | {"extends": RESULTS["steps"]}))
        (cut / "results.json").write_text('{"recipe": "mni')
        (lacking / "results.json").write_text('{"recipe": "mnist", "test": {}}')
        folders = [tmp_path / "nothing", unfinished, longer, cut, lacking, good]
        status, printed, errors = command_line(compare, *folders)
        assert status == 0 and "0.9000" in printed
        lines = errors.splitlines()
        assert lines == [
            f"{tmp_path / 'nothing'}: no such folder",
            f"{unfinished}: its run is not finished",
            f"{longer}: its run is being extended and is not finished",
            lines[3],
            f"{lacking / 'results.json'}: damaged, it lacks weights_of_step, baseline",
        ]
        assert lines[3].startswith(f"{cut / 'results.json'}: damaged, not a JSON object (")
        status, _, errors = command_line(compare, unfinished)
        assert status == 2 and errors.startswith("compare: no finished run\n  ")

    @pytest.mark.parametrize(
        "name, content",
        [
            ("options.json", {"shown": [1]}),
            ("options.json", {"shown": {}, "resolved": 5}),
            ("results.json", RESULTS | {"baseline": {"accuracy": 10**400}}),
            ("results.json", RESULTS | {"test": {"accuracy": "good"}}),
            ("results.json", RESULTS | {"test": 0.5}),
            ("results.json", RESULTS | {"seconds": {}}),
            ("results.json", RESULTS | {"steps": "x"}),
            ("results.json", RESULTS | {"recipe": ["x"]}),
            ("results.json", RESULTS | {"dataset": "\ud800"}),
            ("results.json", RESULTS | {"weights_sha256": []}),
            ("results.json", "[" * 100000),
            ("results.json", "zero"),
            ("results.json", "folder"),
        ],
        ids=lambda value: str(value)[-40:],
    )
    def test_any_damage_is_a_line(self, run, command_line, name, content):
        path = run("bad") / name
        if content in ("zero", "folder"):
            path.unlink()
            path.symlink_to("/dev/zero") if content == "zero" else path.mkdir()
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        status, printed, errors = command_line(compare, path.parent)
        lines = errors.splitlines()
        assert (status, printed, len(lines)) == (2, "", 2) and lines[1].startswith(f"  {path}: ")

    def test_a_number_that_json_lacks_is_no_damage(self, run):
        (row,) = rows(run("a", results={"test": {"accuracy": "NaN"}, "seconds": "Infinity"}))
        assert (row["accuracy"], row["seconds"]) == ("-", "-")

    @pytest.mark.long
    def test_damaged_curves_are_a_line(self, run, command_line, tmp_path):
        pytest.importorskip("matplotlib")
        good = run("good")
        for number, text in enumerate(("[1]", "{", '{"event": "step"}', "[" * 100000, "\udcff")):
            path = run(f"bad{number}") / "metrics.jsonl"
            path.write_bytes(
                b'{"event": "x", "step": 1}\n' + text.encode("utf-8", "surrogateescape")
            )
            png = tmp_path / f"{number}.png"
            status, printed, errors = command_line(compare, good, path.parent, "--png", png)
            assert status == 0 and errors.startswith(str(path)) and errors.count("\n") == 1
            assert png.exists() and printed.endswith(f"\nchart  {png}\n")
        status, _, errors = command_line(compare, path.parent, "--png", png)
        assert status == 2 and errors.startswith("compare: --png: no curves\n  ")


class TestPlot:
    def test_a_loss_that_is_a_metric_is_one_chart(self, run):
        folder = run("a")
        for loss, expected in (
            (0.5004, {"val_cross_entropy"}),
            (0.6, {"val_cross_entropy", "val_loss"}),
        ):
            record = {"event": "epoch", "step": 1, "val_loss": loss, "val_cross_entropy": 0.5}
            (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
            assert set(compare.read_curves(folder)) == expected

    def test_which_curves_there_are(self, run):
        folder = run("a")
        assert compare.read_curves(folder) == {
            "loss": {50: 2.0},
            "val_accuracy": {60: 0.5, 100: 0.75},
        }

    def test_a_chart_for_each_dataset_and_metric(self, run, tmp_path, command_line, monkeypatch):
        figure = pytest.importorskip("matplotlib.figure").Figure
        titles = []
        stock = figure.savefig

        def savefig(self, *arguments, **named):
            titles.extend(axis.get_title() for axis in self.axes)
            stock(self, *arguments, **named)

        monkeypatch.setattr(figure, "savefig", savefig)
        folders = [run("a"), run("b", {"dropout": 0.5}), run("c", results={"dataset": "mnist"})]
        path = tmp_path / "curves.png"
        status, _, errors = command_line(compare, *folders, "--png", path)
        assert (status, errors) == (0, "") and path.stat().st_size > 1000
        assert titles == [
            *("mnist on digits: loss", "mnist on digits: val_accuracy"),
            *("mnist on mnist: loss", "mnist on mnist: val_accuracy"),
        ]
        status, _, errors = command_line(compare, folders[0], "--png", tmp_path / "no" / "x.png")
        assert status == 2 and errors.endswith("x.png: No such file or directory\n")
        for name in ("x.txt", "x.gif", "x"):  # refused before any run is read
            status, out, errors = command_line(compare, folders[0], "--png", tmp_path / name)
            assert (status, out) == (2, "") and not (tmp_path / name).exists()
            assert errors == f"compare: --png {tmp_path / name}: must end in .png, .pdf or .svg\n"

    def test_without_matplotlib(self, run, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(OptionsError, match="needs matplotlib"):
            rows(run("a"), png=tmp_path / "x.png")
