"""Finished runs beside each other: in which options they differ, and what came out."""

import dataclasses
import json
import os
import statistics
from pathlib import Path

from training.errors import RunError
from training.run_folder import read_run_file

# Options that say where a run lies or what it prints.
SAYS_NOTHING = {"run_dir", "options", "cache_dir", "resume", "log_every", "quiet"}
# What an option came to, which is shown in the option's place: `auto` has been decided there.
CAME_TO = {
    "dataset": "dataset",
    "preset": "preset",
    "strategy": "strategy",
    "replicas": "replicas",
    "global_batch_size": "global_batch_size",
    "base_learning_rate": "learning_rate",
}
# They have come to the global batch and the learning rate.
ALREADY_IN_THOSE = {"batch_size_per_replica", "lr_scaling"}


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """What a finished run left.

    Attributes:
        folder: the run's.
        settings: options and what they came to, by name; without what says nothing, and `seed`.
        seed: the run's.
        results: the content of `results.json`.
        data: checksum of its data, or None.
    """

    folder: Path
    settings: dict
    seed: int
    results: dict
    data: str | None


@dataclasses.dataclass(frozen=True)
class Row:
    """One run, or several that differ in their seed alone.

    Attributes:
        runs: the runs.
        cells: text by column.
    """

    runs: list[FinishedRun]
    cells: dict[str, str]

    @property
    def name(self) -> str:
        """The cell that names it."""
        return self.cells["run"]


def read_run(folder: Path) -> FinishedRun:
    """Reads a finished run.

    Raises:
        RunError: it holds no run, one that is not finished, or a damaged one; one line.
    """
    try:
        is_run = (folder / "options.json").is_file()
        is_finished = (folder / "results.json").is_file()
    except OSError as error:
        raise RunError(f"{str(folder)[:80]}: {error.strerror}") from error
    if not is_run:
        raise RunError(f"{folder}: holds no run")
    run = read_run_file(folder / "options.json", recipe=str, options=dict, resolved=dict)
    if not is_finished:
        raise RunError(f"{folder}: the run of {run['recipe']} there is not finished")
    results = read_run_file(
        folder / "results.json",
        **{"recipe": str, "seed": int, "steps": int, "seconds": float | int},
        **{"test": dict, "baseline": dict},
    )
    options = run["options"]
    settings = {
        CAME_TO.get(name, name): results.get(CAME_TO[name]) if name in CAME_TO else value
        for name, value in options.items()
        if name not in SAYS_NOTHING | ALREADY_IN_THOSE | {"seed"}
    }
    if "workers" in results:
        settings["workers"] = results["workers"]
    data = next((run["resolved"].get(k) for k in ("data_sha256", "text_sha256")), None)
    return FinishedRun(folder, settings, results["seed"], results, data)


def other_data(runs: list[FinishedRun]) -> list[str]:
    """A line for each run whose dataset has the name of an earlier run's, but not its content."""
    first: dict[tuple, FinishedRun] = {}
    lines = []
    for run in runs:
        dataset = str(run.results.get("dataset"))
        # A dataset may be drawn from the seed, or split by it.
        earlier = first.setdefault((run.results["recipe"], dataset, run.seed), run)
        if run.data != earlier.data:
            lines.append(f"{run.folder}: its {dataset} is not the data of {earlier.folder}")
    return lines


def compare(runs: list[FinishedRun]) -> list[Row]:
    """A row for each run; runs that differ in the seed alone share one.

    Args:
        runs: one or more of one recipe, in the order in which they are shown.

    Returns:
        Rows that all have the same columns: `run`, what differs between them, the metrics of the
        test split, what was to be beaten, `speed`, `time` and `steps`.
    """
    groups: list[list[FinishedRun]] = []
    for run in runs:
        for group in groups:
            if group[0].settings == run.settings and run.seed not in {r.seed for r in group}:
                group.append(run)
                break
        else:
            groups.append([run])
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    differ = [n for n in names if len({json.dumps(run.settings.get(n)) for run in runs}) > 1]
    if len({run.seed for group in groups if len(group) == 1 for run in group}) > 1:
        differ.append("seed")
    metrics, baselines = (
        list(dict.fromkeys(name for run in runs for name in run.results[part]))
        for part in ("test", "baseline")
    )
    titles = short_names([run.folder for run in runs])
    rows = []
    for group in groups:
        cells = {"run": ", ".join(titles[run.folder] for run in group)}
        for name in differ:
            if name == "seed":
                cells[name] = ", ".join(str(run.seed) for run in group)
            else:
                cells[name] = setting_in_words(group[0].settings.get(name))
        for name in metrics:
            cells[name] = together([run.results["test"].get(name) for run in group])
        for name in baselines:
            found = [run.results["baseline"].get(name) for run in group]
            cells[f"to beat: {name}"] = together(found)
        cells["speed"] = speed(group)
        cells["time"] = together([run.results["seconds"] for run in group], seconds_in_words)
        if any(run.results.get("resumed_from_step") is not None for run in group):
            cells["time"] += " *"
        cells["steps"] = together([run.results["steps"] for run in group], "{:,.0f}".format)
        rows.append(Row(group, cells))
    return rows


def short_names(folders: list[Path]) -> dict[Path, str]:
    """The folders without what all of them begin with."""
    if len(set(folders)) < 2:
        return {folder: str(folder) for folder in folders}
    common = os.path.commonpath([os.path.abspath(folder) for folder in folders])
    return {
        folder: os.path.relpath(os.path.abspath(folder), common).replace("./", "")
        for folder in folders
    }


def setting_in_words(value) -> str:
    """A setting as it is shown."""
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def together(values: list, form=None) -> str:
    """One number, or the mean of several and their standard deviation (n - 1), with how many.

    Args:
        values: numbers; None where a run has none. JSON's "nan" stays text.
        form: turns a number into text (default: four decimals).
    """
    form = form or "{:.4f}".format
    numbers = [v for v in values if _is_number(v)]
    if not numbers or len(numbers) < len(values):
        return next((str(v) for v in values if v is not None), "-")
    if len(numbers) == 1 or len(set(numbers)) == 1:
        return form(numbers[0])
    mean, deviation = statistics.mean(numbers), statistics.stdev(numbers)
    return f"{form(mean)} ± {form(deviation)} (n={len(numbers)})"


def speed(group: list[FinishedRun]) -> str:
    """Tokens a second where the recipe counts tokens, examples a second elsewhere."""
    for unit in ("tokens", "examples"):
        found = [run.results.get(f"{unit}_per_second") for run in group]
        if all(map(_is_number, found)):
            return together(found, "{:,.0f}".format) + f" {unit}/s"
    return "-"


def _is_number(value) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300  # not NaN, and no infinity


def seconds_in_words(seconds: float) -> str:
    """Seconds below two minutes, minutes below two hours, hours above."""
    for limit, unit, of_seconds in ((120, "s", 1), (7200, "min", 60)):
        if seconds < limit:
            return f"{seconds / of_seconds:.{0 if of_seconds == 1 else 1}f} {unit}"
    return f"{seconds / 3600:.1f} h"


def table(rows: list[Row], width: int) -> str:
    """The rows as text.

    Args:
        rows: what `compare` returned.
        width: columns; where a line a run is too long, a run becomes a column, and as many runs
            stand side by side as there is room for.
    """
    lines = [list(rows[0].cells), *(list(row.cells.values()) for row in rows)]
    text = _aligned(lines)
    if max(map(len, text)) <= width:
        return "\n".join(text)
    blocks = []
    left = rows
    while left:
        count = len(left)
        while True:
            block = _aligned(
                [[name, *(row.cells[name] for row in left[:count])] for name in left[0].cells]
            )
            if max(map(len, block)) <= width or count == 1:
                break
            count -= 1
        blocks.append("\n".join(block))
        left = left[count:]
    return "\n\n".join(blocks)


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
