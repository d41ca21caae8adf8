"""Compare finished runs: the options in which they differ, and what came out.

    python -m recipes.compare runs/bert_mlm/*
    python -m recipes.compare RUN_DIR RUN_DIR ... --png curves.png

Prints a table for each recipe and dataset, with a column for each run: the options that differ, the
metrics of the test split, the baselines, speed and time. Runs that differ only in their seed share
a column: mean ± standard deviation. `--png` plots the training loss and the validation metrics.
"""

import dataclasses
import json
import statistics
import sys
from pathlib import Path

from training.command_line import command_line
from training.errors import OptionsError, RunError
from training.options import ProgramOptions, check, option, read_json


@dataclasses.dataclass(kw_only=True)
class Options(ProgramOptions):
    """Options of `recipes.compare`."""

    run_dirs: tuple[Path, ...] = option(help="Folders of finished runs.", positional=True)
    png: Path | None = option(None, "Plot the curves into this file (.png, .pdf or .svg).")


def main(options: Options) -> list[dict[str, str]]:
    """Prints the tables, plots the curves, and returns the rows: text by column."""
    check(options)
    runs, problems = [], []
    for folder in options.run_dirs:
        try:
            runs.append(read_run(folder))
        except RunError as error:
            problems.append(str(error))
    if not runs:
        raise RunError("\n".join(["no finished run", *problems]))
    rows = []
    for title in dict.fromkeys(run["table"] for run in runs):
        table = cells_of([run for run in runs if run["table"] == title])
        rows += [{"table": title} | row for row in table]
        print(f"{title}\n{format_table(table)}\n")
    if options.png is not None:
        plot(runs, options.png)
    for line in problems:
        print(line, file=sys.stderr)
    return rows


def read_run(folder: Path) -> dict:
    """Returns a finished run's results, with `folder`, `table` and `settings`: but for the seed.

    Raises:
        RunError: the folder contains no finished run, or a damaged one.
    """
    settings = read_json(folder / "options.json", "shown")["shown"]
    run = read_json(folder / "results.json", "recipe", "test", "baseline")
    settings |= {name: run.get(name) for name in ("strategy", "replicas", "learning_rate")}
    settings.pop("seed", None)
    table = f"{run['recipe']} on {run['dataset']}"
    return run | {"folder": folder, "table": table, "settings": settings}


def cells_of(runs: list[dict]) -> list[dict[str, str]]:
    """Returns a row for runs that differ in nothing but their seed: text by column."""
    groups: dict[str, list[dict]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run["settings"], sort_keys=True), []).append(run)
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    differ = [n for n in names if len({json.dumps(run["settings"].get(n)) for run in runs}) > 1]
    rows = []
    for group in groups.values():
        cells = {"run": ", ".join(run["folder"].name for run in group)}
        cells |= {name: str(group[0]["settings"].get(name, "-")) for name in differ}
        cells["seed"] = ", ".join(str(run.get("seed")) for run in group)
        for part, prefix in (("test", ""), ("baseline", "baseline: ")):
            for name in dict.fromkeys(name for run in runs for name in run[part]):
                cells[prefix + name] = average([run[part].get(name) for run in group])
        for name in ("examples_per_second", "tokens_per_second", "seconds", "steps"):
            column = name.replace("_per_second", "/s")
            cells[column] = average([run.get(name) for run in group], "{:,.0f}")
        rows.append(cells)
    return rows


def average(values: list, form: str = "{:.4f}") -> str:
    """Returns a number as text, or the mean of several ± their standard deviation (n - 1)."""
    if not all(isinstance(value, int | float) for value in values):  # JSON's NaN is text
        return "-"
    if len(set(values)) == 1:
        return form.format(values[0])
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    return f"{form.format(mean)} ± {form.format(deviation)} (n={len(values)})"


def format_table(rows: list[dict[str, str]]) -> str:
    """Returns a line for each column of the rows, which is as wide as there are runs."""
    lines = [[name, *(row[name] for row in rows)] for name in rows[0]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [[f"{c:{width}}" for c, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def read_curves(folder: Path) -> dict[str, dict[int, float]]:
    """Returns values by step of the training loss and the validation metrics, by name."""
    curves: dict[str, dict[int, float]] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if record.get("split") == "validation":
                name = f"val_{name}"
            plotted = name.startswith("val_") or (record["event"], name) == ("step", "loss")
            if plotted and isinstance(value, float):  # JSON's NaN is text
                curves.setdefault(name, {})[record["step"]] = value
    return curves


def plot(runs: list[dict], path: Path) -> None:
    """Plots a chart for each table and metric.

    Raises:
        OptionsError: matplotlib is not installed, or does not know the kind of file.
    """
    try:
        from matplotlib.figure import Figure  # an extra, and slow to import
    except ImportError as error:
        raise OptionsError("--png: needs matplotlib; run pip install -e '.[plots]'") from error
    charts: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        for name, curve in read_curves(run["folder"]).items():
            charts.setdefault(f"{run['table']}: {name}", {})[str(run["folder"])] = curve
    figure = Figure(figsize=(7, 3.6 * len(charts)), layout="constrained")
    axes = figure.subplots(len(charts), squeeze=False)[:, 0]
    for axis, (title, curves) in zip(axes, charts.items(), strict=True):
        for name, curve in curves.items():
            axis.plot(list(curve), list(curve.values()), label=name, marker=".")
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:  # matplotlib's, naming the formats that it knows
        raise OptionsError(f"--png {path}: {error}") from error


if __name__ == "__main__":
    command_line(Options, main)
