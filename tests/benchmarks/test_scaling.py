"""The table and the plot of sizes and budgets."""

import json

import pytest

from benchmarks import scaling


@pytest.fixture
def runs(tmp_path):
    """Runs of two sizes after 250 steps of 4,096 tokens, and of one after 750."""
    folders = []
    for layers, width, steps, nats in ((4, 128, 750, 4.5), (2, 64, 250, 5.5), (4, 128, 250, 5.25)):
        folder = tmp_path / f"{layers}-{steps}"
        folder.mkdir()
        results = {
            "recipe": "causal_lm",
            "dataset": "novels",
            "steps": steps,
            "global_batch_size": 32,
            "test": {"cross_entropy": nats},
            "baseline": {"kneser_ney_cross_entropy": 4.6, "most_frequent_accuracy": 0.05},
        }
        options = {"num_layers": layers, "hidden_dim": width, "sequence_length": 128}
        options["accumulate_steps"] = 1
        (folder / "results.json").write_text(json.dumps(results))
        (folder / "options.json").write_text(json.dumps({"options": options}))
        folders.append(folder)
    return folders


def test_a_row_per_size_and_a_column_per_budget(runs):
    table = scaling.table(scaling.by_size([scaling.read(folder) for folder in runs]))
    assert table.splitlines() == [
        "| layers x width | 1.0 million tokens | 3.1 million tokens |",
        "| --- | --- | --- |",
        "| 2 x 64 | 5.500 |  |",
        "| 4 x 128 | 5.250 | 4.500 |",
    ]


def test_the_plot_has_a_line_per_size_and_the_baselines(runs, tmp_path, monkeypatch):
    drawn = []
    from matplotlib.axes import Axes

    stock = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda self, *a, **k: drawn.append((a, k["label"])) or stock(self, *a, **k)
    )
    monkeypatch.setattr("sys.argv", ["scaling", *map(str, runs), "--png", str(tmp_path / "a.png")])
    scaling.main()
    assert drawn == [
        (((1024000,), (5.5,)), "2 layers of 64"),
        (((1024000, 3072000), (5.25, 4.5)), "4 layers of 128"),
    ]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_two_texts_are_refused(runs):
    read = [scaling.read(folder) for folder in runs]
    read[0]["of"] = ("causal_lm", "wikitext-2")
    with pytest.raises(SystemExit, match="several recipes or texts"):
        scaling.by_size(read)
