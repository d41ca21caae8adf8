"""Compare finished runs: the options in which they differ, and what came out.

    python -m recipes.compare runs/bert_mlm/*
    python -m recipes.compare RUN_DIR RUN_DIR ... --png curves.png

Prints a table for each recipe and dataset: the options that differ, the metrics of the test split,
the baselines, speed and time. Runs that differ only in their seed share a row: mean ± standard
deviation. `--png` plots the training loss and the validation metrics, one colour per row; it needs
matplotlib (`pip install -e ".[plots]"`).
"""

import dataclasses
import json
import os
import shutil
import statistics
import sys
from pathlib import Path

from training.command_line import command_line
from training.errors import OptionsError, RunError
from training.options import ProgramOptions, check, option
from training.run_folder import read_run_file


@dataclasses.dataclass(kw_only=True)
class Options(ProgramOptions):
    """Options of `recipes.compare`."""

    run_dirs: tuple[Path, ...] = option(help="Folders of finished runs.", positional=True)
    png: Path | None = option(None, "Plot the curves into this file (.png, .pdf or .svg).")

    def problems(self) -> list[str]:
        """Returns a problem where the kind of picture is not known."""
        if self.png is not None and self.png.suffix not in (".png", ".pdf", ".svg"):
            return [f"--png {self.png}: must end in .png, .pdf or .svg"]
        return []


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A folder, the options that describe its training (without the seed), and what came out."""

    folder: Path
    settings: dict
    results: dict


def main(options: Options) -> list[dict[str, str]]:
    """Prints the tables, plots the curves, and returns the rows: text by column."""
    check(options)
    tables: dict[str, dict[str, list[FinishedRun]]] = {}
    problems = []
    for folder in dict.fromkeys(options.run_dirs):
        try:
            run = read_run(folder)
        except RunError as error:
            problems.append(str(error))
            continue
        # Runs that differ only in their seed share a row.
        title = f"{run.results['recipe']} on {run.results['dataset']}"
        rows_of = tables.setdefault(title, {})
        rows_of.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
    if not tables:
        raise RunError("\n".join(["no finished run", *problems]))
    rows = []
    for title, rows_of in tables.items():
        table = cells_of(list(rows_of.values()))
        rows += [{"table": title} | row for row in table]
        print(f"{title}\n{format_table(table)}\n")
    if options.png is not None:
        groups = {title: list(rows_of.values()) for title, rows_of in tables.items()}
        plot(groups, options.png.expanduser())
    for line in problems:
        print(line, file=sys.stderr)
    return rows


def read_run(folder: Path) -> FinishedRun:
    """Reads a finished run.

    Raises:
        RunError: the folder contains no finished run, or a damaged one.
    """
    run = read_run_file(folder / "options.json", "shown")
    if not (folder / "results.json").exists():
        raise RunError(f"{folder}: the run is not finished")
    results = read_run_file(folder / "results.json", "recipe", "test", "baseline")
    resolved = ("strategy", "replicas", "workers", "learning_rate")
    settings = run["shown"] | {name: results.get(name) for name in resolved}
    settings.pop("seed", None)
    return FinishedRun(folder, settings, results)


def cells_of(groups: list[list[FinishedRun]]) -> list[dict[str, str]]:
    """Returns a row for each group: text by column, the same columns in each."""
    runs = [run for group in groups for run in group]
    names = dict.fromkeys(name for run in runs for name in run.settings)
    differ = [n for n in names if len({json.dumps(run.settings.get(n)) for run in runs}) > 1]
    common = os.path.commonpath([run.folder.absolute().parent for run in runs])
    rows = []
    for group in groups:
        results = [run.results for run in group]
        cells = {"run": ", ".join(os.path.relpath(run.folder.absolute(), common) for run in group)}
        cells |= {name: str(group[0].settings.get(name, "-")) for name in differ}
        cells["seed"] = ", ".join(str(each.get("seed")) for each in results)
        for part, prefix in (("test", ""), ("baseline", "baseline: ")):
            for name in dict.fromkeys(name for run in runs for name in run.results[part]):
                cells[prefix + name] = average([each[part].get(name) for each in results])
        for unit in ("tokens", "examples"):
            rates = [each.get(f"{unit}_per_second") for each in results]
            cells[f"{unit}/s"] = average(rates, "{:,.0f}")
        cells["time"] = average([each.get("seconds") for each in results], "{:,.0f} s")
        if any(each.get("resumed_from_step") is not None for each in results):
            cells["time"] += " since resuming"
        cells["steps"] = average([each.get("steps") for each in results], "{:,.0f}")
        rows.append(cells)
    empty = [name for name in rows[0] if all(row[name] == "-" for row in rows)]
    return [{name: row[name] for name in row if name not in empty} for row in rows]


def average(values: list, form: str = "{:.4f}") -> str:
    """Returns a number as text, or the mean of several ± their standard deviation (n - 1)."""
    if not all(isinstance(value, int | float) for value in values):  # JSON's "nan" is text
        return next((str(value) for value in values if value is not None), "-")
    if len(set(values)) == 1:
        return form.format(values[0])
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    return f"{form.format(mean)} ± {form.format(deviation)} (n={len(values)})"


def format_table(rows: list[dict[str, str]]) -> str:
    """Returns a line for each row, or for each column where the terminal is too narrow."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    for table in (lines, [list(column) for column in zip(*lines, strict=True)]):
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        text = [
            "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
        if max(map(len, text)) <= shutil.get_terminal_size((100, 24)).columns:
            break
    return "\n".join(text)


def read_curves(folder: Path) -> dict[str, dict[int, float]]:
    """Returns values by step of the training loss and the validation metrics, by name."""
    curves: dict[str, dict[int, float]] = {}
    try:
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            for name, value in record.items():
                if record["event"] == "evaluation":
                    name = f"val_{name}" if record["split"] == "validation" else ""
                plotted = name.startswith("val_") or (record["event"], name) == ("step", "loss")
                if plotted and isinstance(value, float):  # JSON's "nan" is text
                    curves.setdefault(name, {})[record["step"]] = value
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{folder / 'metrics.jsonl'}: cannot be read ({error})") from error
    return curves


def plot(tables: dict[str, list[list[FinishedRun]]], path: Path) -> None:
    """Plots a chart for each table and metric.

    Raises:
        OptionsError: matplotlib is not installed, or the file cannot be written.
        RunError: a run's `metrics.jsonl` cannot be read.
    """
    try:
        from matplotlib.figure import Figure  # an extra, and slow to import
    except ImportError as error:
        raise OptionsError("--png: needs matplotlib; run pip install -e '.[plots]'") from error
    charts: dict[str, list] = {}
    for title, groups in tables.items():
        for number, group in enumerate(groups):
            for run in group:
                for name, curve in read_curves(run.folder).items():
                    label = run.folder.name if run is group[0] else None
                    charts.setdefault(f"{title}: {name}", []).append((number, label, curve))
    figure = Figure(figsize=(7, 3.6 * len(charts)), layout="constrained")
    axes = figure.subplots(len(charts), squeeze=False)[:, 0]
    for axis, (title, curves) in zip(axes, charts.items(), strict=True):
        for number, label, curve in curves:
            steps = sorted(curve)
            values = [curve[step] for step in steps]
            axis.plot(steps, values, f"C{number % 10}", label=label, marker=".", linewidth=1)
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OptionsError(f"--png {path}: {error.strerror}") from error


if __name__ == "__main__":
    command_line(Options, main)
