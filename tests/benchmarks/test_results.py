import datetime
import importlib
import json
import shlex

import pytest

from benchmarks import results
from training.command_line import parse
from training.options import to_json


@pytest.fixture
def readme(tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    monkeypatch.setattr(results, "README", path)
    monkeypatch.setattr(results, "KEPT", tmp_path / "results.json")
    monkeypatch.setattr(results, "COMMANDS", tmp_path / "commands.md")
    results.COMMANDS.write_text(path.read_text())
    return path


def write_run(folder, seed, accuracy, dataset="/somewhere/digits", **options):
    folder.mkdir()
    found = {
        **dict(recipe="mnist", dataset=dataset, preset=None, seed=seed, strategy="none"),
        **dict(replicas=1, steps=600, seconds=15.2, device="AMD EPYC, 1 core"),
        **dict(resumed_from_step=None, module="recipes.mnist"),
        **dict(test={"accuracy": accuracy}, baseline={"most_frequent_accuracy": 0.1}),
    }
    (folder / "results.json").write_text(json.dumps(found))
    options = {
        "init_from": None,
        "dataset": dataset,
        "seed": seed,
        "run_dir": str(folder),
    } | options
    (folder / "options.json").write_text(json.dumps({"options": options}))
    return folder


def test_runs_that_differ_in_the_seed_become_a_row(readme, tmp_path, capsys):
    folders = [write_run(tmp_path / str(seed), seed, 0.98 + seed / 100) for seed in (0, 1)]
    results.main(folders)
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    (row,) = [line for line in text.splitlines() if "`mnist`" in line]
    assert "digits, 2 seeds" in row and "/somewhere" not in text
    assert "accuracy 98.5% (98.0% to 99.0%)" in row and "most frequent 10.0% |" in row
    assert "600, 15 s |" in row
    written = results.COMMANDS.read_text()
    assert "python -m recipes.mnist --dataset digits --seed 0    # and 1\n" in written
    assert str(tmp_path) not in written


def test_runs_of_other_settings_are_other_rows(readme, tmp_path, capsys):
    folders = [
        write_run(tmp_path / "0", 0, 0.98, dataset="digits", epochs=3),
        write_run(tmp_path / "1", 1, 0.95, dataset="digits", epochs=6, global_batch_size=16),
        write_run(tmp_path / "2", 0, 0.97, dataset="digits", epochs=6, global_batch_size=16),
    ]
    results.main(folders)
    rows = [line for line in readme.read_text().splitlines() if "`mnist`" in line]
    assert len(rows) == 2
    assert "accuracy 98.0% |" in rows[0] and "accuracy 96.0% (95.0% to 97.0%)" in rows[1]
    kept = json.loads(results.KEPT.read_text()).values()
    commands = {entry["command"] for entry in kept}
    assert commands == {
        "python -m recipes.mnist --dataset digits --epochs 3",
        "python -m recipes.mnist --dataset digits --epochs 6 --global-batch-size 16",
    }


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (dict(init_from=None, num_layers=1, hidden_dim=64), "digits, 1 layer of 64 |"),
        (dict(init_from=None, num_layers=6, hidden_dim=512), "digits, 6 layers of 512 |"),
        (dict(init_from="/runs/novels", num_layers=6, hidden_dim=512), "digits, from novels |"),
    ],
)
def test_models_of_other_sizes_are_other_rows(options, shown, readme, tmp_path, capsys):
    folder = write_run(tmp_path / "run", 0, 0.98)
    found = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(found | {"preset": "scratch"}))
    (folder / "options.json").write_text(json.dumps({"options": options}))
    results.main([folder])
    assert shown in readme.read_text()


def test_the_machine_is_that_of_the_run(readme, tmp_path, capsys):
    results.main([write_run(tmp_path / "run", 0, 0.98)])
    (row,) = [line for line in readme.read_text().splitlines() if "`mnist`" in line]
    today = datetime.date.today().isoformat()
    assert row.endswith(f"| 600, 15 s | AMD EPYC, 1 core | {today} |")


def test_a_resumed_run_has_no_time(readme, tmp_path):
    folder = write_run(tmp_path / "run", 0, 0.98)
    found = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(found | {"resumed_from_step": 300}))
    with pytest.raises(SystemExit, match="was resumed"):
        results.main([folder])


def test_errors_have_the_unit_of_their_recipe(readme, tmp_path, capsys):
    for number, (recipe, baseline) in enumerate(
        {"dna_melting": {"mean_mae": 9.0}, "text_classification": {"ridge_mae": 2.0}}.items()
    ):
        folder = write_run(tmp_path / recipe, number, 0.0)
        found = json.loads((folder / "results.json").read_text())
        found |= {"recipe": recipe, "test": {"mae": 1.5}, "baseline": baseline}
        (folder / "results.json").write_text(json.dumps(found))
        results.main([folder])
    melting, scores = readme.read_text().splitlines()[4:6]
    assert "MAE 1.50 °C | mean 9.00 °C |" in melting
    assert "MAE 1.50 | TF-IDF 2.00 |" in scores


def test_a_folder_is_named_without_its_place_and_with_the_limit_of_examples(
    readme, tmp_path, capsys
):
    for number, (preset, limit) in enumerate(
        (("/a/MiniLM", 1000), ("/b/MiniLM", None), ("hf://a/b", None))
    ):
        folder = write_run(tmp_path / str(number), 0, 0.9)
        found = json.loads((folder / "results.json").read_text())
        (folder / "results.json").write_text(json.dumps(found | {"preset": preset}))
        options = {"options": {"init_from": None, "max_examples": limit}}
        (folder / "options.json").write_text(json.dumps(options))
        results.main([folder])
    rows = [line.split(" | ")[1] for line in readme.read_text().splitlines() if "`mnist`" in line]
    assert rows == ["digits, MiniLM", "digits, hf://a/b", "digits, 1,000 examples, MiniLM"]


def test_kept_commands_are_those_of_their_runs():
    """So a repeated run replaces its row."""
    for key, entry in json.loads(results.KEPT.read_text()).items():
        _, _, module, *arguments = shlex.split(entry["command"])
        options = parse(importlib.import_module(module).Options, module, arguments=arguments)
        assert entry["command"] == results.command_of(module, to_json(options))
        assert key == results.key_of(entry)
