"""Plots what sizes of a language model reach after how many tokens: one line per size.

    python benchmarks/scaling.py RUN_DIR RUN_DIR ... --png docs/scaling.png

The runs are of one recipe and one text, and differ in layers, width and `--max-steps`; each has a
whole schedule of its own. Prints a table, too: test cross-entropy in nats a token.
"""

import argparse
import json
from pathlib import Path

BASELINES = {
    "kneser_ney_cross_entropy": "Kneser-Ney n-grams",
    "unigram_cross_entropy": "unigram model",
}


def read(folder: Path) -> dict:
    """Returns a finished run's text, size, training tokens, cross-entropy and baselines."""
    results = json.loads((folder / "results.json").read_text())
    options = json.loads((folder / "options.json").read_text())["options"]
    return {
        "of": (results["recipe"], results["dataset"]),
        "size": (options["num_layers"], options["hidden_dim"]),
        "tokens": results["steps"]
        * results["global_batch_size"]
        * options["accumulate_steps"]
        * options["sequence_length"],
        "cross_entropy": results["test"]["cross_entropy"],
        "baseline": results["baseline"],
    }


def by_size(runs: list[dict]) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """Returns (tokens, cross-entropy) by (layers, width), in order.

    Raises:
        SystemExit: the runs are of several recipes or texts.
    """
    if len({run["of"] for run in runs}) > 1:
        raise SystemExit("the runs are of several recipes or texts, which cannot be compared")
    sizes = sorted({run["size"] for run in runs})
    return {
        size: sorted((run["tokens"], run["cross_entropy"]) for run in runs if run["size"] == size)
        for size in sizes
    }


def table(curves: dict) -> str:
    """Returns a Markdown table: a row per size, a column per number of tokens."""
    budgets = sorted({tokens for points in curves.values() for tokens, _ in points})
    head = ["layers x width", *(f"{tokens / 1e6:.1f} million tokens" for tokens in budgets)]
    lines = [head, ["---"] * len(head)]
    for (layers, width), points in curves.items():
        reached = dict(points)
        cells = [f"{reached[tokens]:.3f}" if tokens in reached else "" for tokens in budgets]
        lines.append([f"{layers} x {width}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(curves: dict, baseline: dict[str, float], path: Path) -> None:
    """Plots the curves and, as dashed lines, the baselines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for (layers, width), points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{layers} layers of {width}")
    for name, label in BASELINES.items():
        if name in baseline:
            axes.axhline(baseline[name], linestyle="--", color="grey")
            axes.annotate(
                label, (1, baseline[name]), xycoords=("axes fraction", "data"), ha="right"
            )
    axes.set(xscale="log", xlabel="training tokens", ylabel="test cross-entropy, nats a token")
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    """Prints the table and plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--png", type=Path, help="file for the plot")
    chosen = parser.parse_args()
    runs = [read(folder) for folder in chosen.runs]
    curves = by_size(runs)
    print(table(curves))
    if chosen.png is not None:
        plot(curves, runs[0]["baseline"], chosen.png)


if __name__ == "__main__":
    main()
