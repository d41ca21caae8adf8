"""Runs all measurements in turn and prints one table, for `make bench`.

    python benchmarks/everything.py [--dataset FILE] [--vocabulary FILE] [--trainer-python PYTHON]
                                    [--folder benchmarks/last]

Every measurement is a program of this folder that compares variants side by side and writes JSON;
this one runs them in turn, prints one table, and writes it to FOLDER as `bench.json` and
`bench.png`. The machine should do nothing else meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def measurements(chosen) -> dict[str, list[str]]:
    """Returns the command line of each measurement by name."""
    text = ["--dataset", chosen.dataset]
    if chosen.vocabulary:
        text += ["--vocabulary", str(chosen.vocabulary)]
    trainer = ["--trainer-python", chosen.trainer_python] if chosen.trainer_python else []
    against = [] if trainer else ["--against", "tutorial"]
    return {
        "pipelines": [*text, *trainer, *against],
        "quality": text,
        "workers": text,
        "costs": text,
        "fine_tuning": trainer,
        "generation": trainer,
        "steps": ["--pairs", "5"],
        "recomputing": [],
    }


def plot(rows: list[dict], path: Path) -> None:
    """Draws the ratios with their spread."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "÷" in row["measure"]][::-1]
    figure, axes = pyplot.subplots(figsize=(10, 0.4 * len(rows) + 1))
    for place, row in enumerate(rows):
        axes.plot([row["smallest"], row["largest"]], [place, place], color="tab:blue", linewidth=3)
        axes.plot(row["median"], place, "o", color="tab:orange")
        axes.annotate(
            f"{row['median']:.2f}",
            (row["largest"], place),
            (6, -3),
            "data",
            textcoords="offset points",
        )
    axes.set_yticks(range(len(rows)), [f"{row['part']}: {row['measure']}" for row in rows])
    axes.set_xscale("log")
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_xlabel("ratio: median, from the smallest to the largest")
    figure.savefig(path, bbox_inches="tight", dpi=110)


def main() -> int:
    """Measures all; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="auto", help="as for recipes.bert_mlm")
    parser.add_argument("--vocabulary", type=Path, help="as for recipes.bert_mlm")
    parser.add_argument("--trainer-python", help="a Python with PyTorch and transformers")
    parser.add_argument("--folder", type=Path, default=HERE / "last", help="for bench.json, .png")
    parser.add_argument("--only", nargs="*", help="parts of the names of what is measured")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    rows, failed, begun = [], [], time.time()
    for name, words in measurements(chosen).items():
        if chosen.only and not any(word in name for word in chosen.only):
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        output = chosen.folder / f"{name}.json"
        script = str(HERE / f"{name}.py")
        done = subprocess.run(
            [sys.executable, script, *words, "--json", str(output)],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        if done.returncode:
            failed.append(name)
        else:
            rows += [row | {"part": name} for row in json.loads(output.read_text())["rows"]]
    print(f"\n{'':72} {'median':>8} {'from':>8} {'to':>8}")
    for row in rows:
        more = ", more than" * row.get("lower_bound", False)
        print(
            f"{row['part'] + ': ' + row['measure'] + more:72} {row['median']:8.2f} "
            f"{row['smallest']:8.2f} {row['largest']:8.2f}"
        )
    print(f"\n{(time.time() - begun) / 60:.0f} minutes; {chosen.folder / 'bench.json'}")
    (chosen.folder / "bench.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot(rows, chosen.folder / "bench.png")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
