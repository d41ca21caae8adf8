"""Compare finished runs: the options in which they differ, and their results.

    python -m recipes.compare runs/bert_mlm
    python -m recipes.compare RUN_DIR RUN_DIR ... --png curves.png

A folder that is not a run stands for all runs in it. Prints one table per recipe and dataset, one
column per run: the options that differ, the validation metrics (by which to choose among the runs)
of the weights that were tested, the test metrics, the baselines, speed and time ("-" for the
seconds of a run that was resumed). Runs that differ only in their seed share a column: mean ±
standard deviation (n seeds); several runs of one seed count as their mean. Copies of one run, whose
weights are equal, count once ("a = b"). `--png` plots the training loss and the validation metrics.
"""

import collections
import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from training import run_files
from training.command_line import command_line
from training.errors import OptionsError, RunError
from training.options import ProgramOptions, check, option

# Resolved values that the options alone do not give: --max-steps ends --epochs early.
PLANNED = ("global_batch_size", "total_steps", "epochs", "preset")
RECORD = {"event": run_files.TEXT, "step": run_files.COUNT}


@dataclasses.dataclass(kw_only=True)
class Options(ProgramOptions):
    """Options of `recipes.compare`."""

    run_dirs: tuple[Path, ...] = option(
        help="Folders of finished runs, or folders that contain finished runs.", positional=True
    )
    png: Path | None = option(None, "Plot the curves into this file (.png, .pdf or .svg).")

    def problems(self) -> list[str]:
        """Returns a line if `--png` has another ending."""
        if self.png is None or self.png.suffix in (".png", ".pdf", ".svg"):
            return []
        return [f"--png {self.png}: must end in .png, .pdf or .svg"]


def main(options: Options) -> list[dict[str, str]]:
    """Prints the tables, plots the curves, and returns the rows: text by column."""
    check(options)
    runs, problems = [], []
    for folder in dict.fromkeys(run for path in options.run_dirs for run in runs_in(path)):
        try:
            runs.append(read_run(folder))
        except RunError as error:
            problems.append(str(error))
    if not runs:
        raise RunError("\n".join(["no finished run", *problems]))
    name_data_once(runs)
    rows = []
    for title in dict.fromkeys(run["table"] for run in runs):
        table = cells_of([run for run in runs if run["table"] == title])
        rows += [{"table": title} | row for row in table]
        print(f"{title}\n{format_table(table)}\n")
    if options.png is not None:
        problems += plot(runs, options.png)
        print(f"chart  {options.png}")
    for line in problems:
        print(line, file=sys.stderr)
    return rows


def runs_in(folder: Path) -> Iterator[Path]:
    """Yields a run's folder, or those of all runs in a folder that is not a run, in order."""
    runs = []
    for path, names, files in os.walk(folder):
        if "options.json" in files:
            runs.append(Path(path))
            names.clear()  # a run contains no other
        names.sort()
    yield from runs or [folder]


def read_run(folder: Path) -> dict:
    """Returns a finished run's results, with `folder`, `table`, `settings` and `checksums`.

    The settings are all values that change the training, except the seed. The checksums are those
    of the data, which may depend on the seed.

    Raises:
        RunError: the folder contains no finished run, or a damaged one.
    """
    if not (folder / "options.json").exists():
        raise RunError(
            f"{folder}: no run there" if folder.is_dir() else f"{folder}: no such folder"
        )
    if not (folder / "results.json").exists():
        raise RunError(f"{folder}: its run is not finished")
    options = run_files.read_options(folder, "shown")
    results = run_files.read_results(folder, "recipe", "weights_of_step", "test", "baseline")
    if results.get("resumed_from_step") is not None:
        results["seconds"] = None  # of the last start alone, and the steps are those of all
    if "extends" in options and options["extends"] == results.get("steps"):
        raise RunError(f"{folder}: its run is being extended and is not finished")
    resolved = options.get("resolved", {})
    settings = options["shown"] | {name: resolved[name] for name in PLANNED if name in resolved}
    settings |= {name: results.get(name) for name in ("strategy", "replicas", "learning_rate")}
    settings.pop("seed", None)
    data = f" on {results['dataset']}" if results.get("dataset") else ""
    return results | {
        "valid": validation_of(folder, results["weights_of_step"]),
        "folder": folder,
        "table": results["recipe"] + data,
        "settings": settings,
        "checksums": {name: resolved[name] for name in resolved if name.endswith("_sha256")},
    }


def validation_of(folder: Path, step: int) -> dict[str, float]:
    """Returns the validation metrics, as `val_...`, of the weights of a step.

    Empty where there are none, or where `metrics.jsonl` is damaged, which `--png` reports.
    """
    try:
        curves = read_curves(folder)
    except RunError:
        return {}
    return {
        name: curve[step]
        for name, curve in curves.items()
        if name.startswith("val_") and step in curve
    }


def name_data_once(runs: list[dict]) -> None:
    """Gives runs of a recipe whose data have the same checksums the table of the first of them.

    A path may be spelled in several ways.
    """
    first: dict[str, dict] = {}
    for run in runs:
        sums = {k: v for k, v in run["checksums"].items() if k != "vocabulary_sha256"}
        if not sums:
            continue
        known = first.setdefault(json.dumps([run["recipe"], sums], sort_keys=True), run)
        run["table"] = known["table"]
        if "dataset" in run["settings"] and "dataset" in known["settings"]:
            run["settings"]["dataset"] = known["settings"]["dataset"]


def tell_data_apart(runs: list[dict]) -> None:
    """Adds the data's checksums to the settings of runs of one seed that were trained differently.

    Runs of several seeds may have drawn their data by the seed: then a difference in the data is
    not a difference in the settings.
    """
    by_seed: dict[str, list[dict]] = {}
    for run in runs:
        key = json.dumps([run["settings"], run.get("seed")], sort_keys=True)
        by_seed.setdefault(key, []).append(run)
    for same in by_seed.values():
        for name in dict.fromkeys(name for run in same for name in run["checksums"]):
            if len({str(run["checksums"].get(name)) for run in same}) > 1:
                for run in same:
                    run["settings"][name] = str(run["checksums"].get(name))[:8]


def names_of(folders: Sequence[Path]) -> dict[Path, str]:
    """Returns the name of each folder, with as many of its parents as tell it from the others."""
    parts = {folder: Path(os.path.abspath(folder)).parts for folder in folders}
    ends = collections.Counter(
        own[-count:] for own in set(parts.values()) for count in range(1, len(own) + 1)
    )
    names = {}
    for folder, own in parts.items():
        count = 1
        while ends[own[-count:]] > 1:  # the whole path is that of no other folder
            count += 1
        names[folder] = str(Path(*own[-count:]))
    return names


def without_copies(runs: list[dict], names: dict[Path, str]) -> list[tuple[str, dict]]:
    """Returns the runs with distinct weights and their names; copies share one: "a = b".

    A copy may lack `metrics.jsonl`: the run is one that has validation metrics, if there is one.
    """
    by_weights: dict[object, list[dict]] = {}
    for number, run in enumerate(runs):
        by_weights.setdefault(run.get("weights_sha256", number), []).append(run)
    return [
        (
            " = ".join(names[run["folder"]] for run in same),
            next((run for run in same if run["valid"]), same[0]),
        )
        for same in by_weights.values()
    ]


def cells_of(runs: list[dict]) -> list[dict[str, str]]:
    """Returns one row per group of runs that differ only in their seed: text by column."""
    tell_data_apart(runs)
    groups: dict[str, list[dict]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run["settings"], sort_keys=True), []).append(run)
    settings = dict.fromkeys(name for run in runs for name in run["settings"])
    differ = [n for n in settings if len({json.dumps(run["settings"].get(n)) for run in runs}) > 1]
    names = names_of([run["folder"] for run in runs])
    rows = []
    for same in groups.values():
        named = without_copies(same, names)
        cells, group = {"run": ", ".join(name for name, _ in named)}, [run for _, run in named]
        cells |= {name: setting_text(group[0]["settings"].get(name, "-")) for name in differ}
        by_seed: dict[object, list[dict]] = {}
        for run in group:
            by_seed.setdefault(run.get("seed", run["folder"]), []).append(run)
        cells["seed"] = ", ".join(str(repeats[0].get("seed")) for repeats in by_seed.values())
        for part, prefix in (("valid", ""), ("test", ""), ("baseline", "baseline: ")):
            for name in dict.fromkeys(name for run in runs for name in run[part]):
                cells[prefix + name] = average(
                    [[run[part].get(name) for run in repeats] for repeats in by_seed.values()],
                    is_constant=part == "baseline",
                )
        for name in ("examples_per_second", "tokens_per_second", "seconds", "steps"):
            column = name.replace("_per_second", "/s")
            cells[column] = average(
                [[run.get(name) for run in repeats] for repeats in by_seed.values()],
                "{:,.0f}",
                is_constant=name == "steps",
            )
        rows.append(cells)
    return rows


def setting_text(value: object) -> str:
    """Returns an option's value as text; a number that was drawn has six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def average(by_seed: list[list], form: str = "{:.4f}", is_constant: bool = False) -> str:
    """Returns a number as text, or the mean over seeds ± their standard deviation (n - 1).

    Args:
        by_seed: for each seed the numbers of its runs, which count as their mean: on another
            device, for instance, they differ in the last bits and are no independent results.
        form: of the numbers.
        is_constant: whether a number that is the same for all seeds is shown alone, as that of a
            baseline.
    """
    numbers = [value for repeats in by_seed for value in repeats]
    if not all(isinstance(value, int | float) for value in numbers):  # JSON's NaN is text
        return "-"
    values = [statistics.mean(repeats) for repeats in by_seed]
    if len(values) == 1 or is_constant and len(set(values)) == 1:
        return form.format(values[0])
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    return f"{form.format(mean)} ± {form.format(deviation)} (n={len(values)})"


def format_table(rows: list[dict[str, str]]) -> str:
    """Returns the transposed table: one line per column of the rows, one cell per run."""
    lines = [[name, *(row[name] for row in rows)] for name in rows[0]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [[f"{c:{width}}" for c, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def read_curves(folder: Path) -> dict[str, dict[int, float]]:
    """Returns the training loss and the validation metrics by name: values by step.

    `val_loss` is left out where a metric has the same values: without penalties it is that metric.

    Raises:
        RunError: `metrics.jsonl` cannot be read, or is damaged.
    """
    path = folder / "metrics.jsonl"
    curves: dict[str, dict[int, float]] = {}
    for record in run_files.read_json_lines(path, "event", "step", kinds=RECORD):
        for name, value in record.items():
            if record.get("split") == "validation":
                name = f"val_{name}"
            plotted = name.startswith("val_") or (record["event"], name) == ("step", "loss")
            if plotted and isinstance(value, float):  # JSON's NaN is text
                curves.setdefault(name, {})[record["step"]] = value
    losses = curves.get("val_loss", {})
    others = [curve for name, curve in curves.items() if name.startswith("val_")]
    if any(_equal(losses, curve) for curve in others if curve is not losses):
        del curves["val_loss"]
    return curves


def _equal(curve: dict[int, float], other: dict[int, float]) -> bool:
    """Returns whether two curves look the same in a chart: at their common steps, at least one."""
    steps = curve.keys() & other.keys()
    return bool(steps) and all(math.isclose(curve[s], other[s], rel_tol=1e-3) for s in steps)


def plot(runs: list[dict], path: Path) -> list[str]:
    """Plots one chart per table and metric.

    Returns:
        One line per run whose curves cannot be read.

    Raises:
        OptionsError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # an extra, and slow to import
    except ImportError as error:
        raise OptionsError("--png: needs matplotlib; run pip install matplotlib") from error
    charts: dict[str, dict[str, dict[int, float]]] = {}
    problems = []
    for run in runs:
        try:
            for name, curve in read_curves(run["folder"]).items():
                charts.setdefault(f"{run['table']}: {name}", {})[str(run["folder"])] = curve
        except RunError as error:
            problems.append(str(error))
    if not charts:
        raise RunError("\n".join(["--png: no curves", *problems]))
    figure = Figure(figsize=(7, 3.6 * len(charts)), layout="constrained")
    axes = figure.subplots(len(charts), squeeze=False)[:, 0]
    for axis, (title, curves) in zip(axes, charts.items(), strict=True):
        for name, curve in curves.items():
            axis.plot(list(curve), list(curve.values()), label=name, marker=".")
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return problems


if __name__ == "__main__":
    command_line(Options, main)
