"""Compare finished runs: in which options they differ, and what came out.

    python -m recipes.compare runs/bert_mlm/*
    python -m recipes.compare RUN_DIR RUN_DIR ... --png curves.png

Prints a table for each recipe: the options that differ, the metrics of the test split, what was to
be beaten, the speed and the time. Runs that differ in their seed alone become one row: mean ±
standard deviation, and how many they are. A folder that holds no finished run is named in a line.
`--png` draws training's loss and the validation metrics, one colour a row; it needs matplotlib
(`pip install -e ".[plots]"`).
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

from training import comparison, curves
from training.command_line import command_line
from training.errors import RunError
from training.options import ProgramOptions, check, option


@dataclasses.dataclass(kw_only=True)
class Options(ProgramOptions):
    """Options of `recipes.compare`."""

    run_dirs: tuple[Path, ...] = option((), "Folders of finished runs.", positional=True)
    png: Path | None = option(None, "Draw the curves into this file (.png, .pdf or .svg).")
    json: bool = option(False, "Print one JSON list, an object per row.")

    def problems(self) -> list[str]:
        """What is wrong with the values."""
        found = []
        if not self.run_dirs:
            found.append("no run: give the folders of one or more, for instance runs/bert_mlm/*")
        if self.png is not None and self.png.suffix not in curves.SUFFIXES:
            found.append(f"--png {self.png}: must end in {', '.join(curves.SUFFIXES)}")
        return found


def main(options: Options) -> list[dict[str, str]]:
    """Prints the tables, draws the curves, and returns the rows: text by column."""
    check(options)
    runs, problems = [], []
    for folder in dict.fromkeys(options.run_dirs):  # a folder that is named twice is one run
        try:
            runs.append(comparison.read_run(folder))
        except RunError as error:
            problems.append(str(error))
    if not runs:
        raise RunError("\n".join(["no finished run", *problems]))
    # A table for each recipe: the metrics of two say nothing to each other.
    runs_of: dict[str, list[comparison.FinishedRun]] = {}
    for run in runs:
        runs_of.setdefault(run.results["recipe"], []).append(run)
    tables = {recipe: comparison.compare(found) for recipe, found in runs_of.items()}
    cells = [{"recipe": recipe} | row.cells for recipe in tables for row in tables[recipe]]
    if options.json:
        print(json.dumps(cells, ensure_ascii=False))
    else:
        width = max(60, shutil.get_terminal_size((100, 24)).columns)
        texts = [f"{recipe}\n{comparison.table(rows, width)}" for recipe, rows in tables.items()]
        print("\n\n".join(texts))
        if any(row["time"].endswith("*") for row in cells):
            print("* resumed: the time is that of the last part")
    problems += comparison.other_data(runs)
    if options.png is not None:
        problems += curves.draw(tables, options.png.expanduser())
    for line in problems:
        print(line, file=sys.stderr)
    return cells


if __name__ == "__main__":
    command_line(Options, main)
