"""Makes the README's table of results from the `results.json` of runs: no figure is typed.

    make results ARGS="runs/bert_mlm/20260101-120000 runs/mnist/20260101-121500"

The figures of each run are kept in docs/results.json, with its command, day and commit; a newer run
of the same command and seed replaces the older one, and runs that differ in the seed alone become
one row. The commands of all rows are written into docs/reproduction.md. Without arguments both are
written again from that file.
"""

import datetime
import importlib
import json
import shlex
import statistics
import sys
from pathlib import Path

from training.options import flag, to_json

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "results.json"
README = ROOT / "README.md"
COMMANDS = ROOT / "docs" / "reproduction.md"
BEGIN, END = "<!-- results: written by `make results` -->", "<!-- end of results -->"

# Options that say where and how a run is stored and shown, and the seed, which a row's runs do not
# share.
NOT_OF_THE_ROW = {
    *("run_dir", "cache_dir", "options", "resume", "seed", "quiet", "log_every", "profile"),
    *("checkpoint_every", "keep_checkpoints"),
}
# What runs of one row have in common.
ROW = ("recipe", "dataset", "from", "strategy", "command")

# Display name and number format of each metric.
SHOWN = {
    "cross_entropy": ("cross-entropy", "{:.3f}"),
    "perplexity": ("perplexity", "{:.1f}"),
    "accuracy": ("accuracy", "{:.1%}"),
    "macro_f1": ("macro F1", "{:.1%}"),
    "exact_match": ("equal answers", "{:.1%}"),
    "bleu": ("BLEU", "{:.3f}"),
    "rougeL": ("ROUGE-L", "{:.3f}"),
    "loss": ("loss", "{:.4f}"),
    "mae": ("MAE", "{:.2f} °C"),
    "rmse": ("RMSE", "{:.2f} °C"),
    "r2": ("R²", "{:.3f}"),
    "pearson": ("Pearson", "{:.3f}"),
    "spearman": ("Spearman", "{:.3f}"),
    "unigram_cross_entropy": ("unigram model", "{:.3f}"),
    "kneser_ney_cross_entropy": ("Kneser-Ney n-grams", "{:.3f}"),
    "most_frequent_accuracy": ("most frequent", "{:.1%}"),
    "copied_bleu": ("the prompt's BLEU", "{:.3f}"),
    "copied_rougeL": ("the prompt's ROUGE-L", "{:.3f}"),
    "tfidf_accuracy": ("TF-IDF", "{:.1%}"),
    "tfidf_macro_f1": ("TF-IDF macro F1", "{:.1%}"),
    "nearest_neighbour_mae": ("fit on nearest neighbours", "{:.2f} °C"),
    "mean_mae": ("mean", "{:.2f} °C"),
    "perfect_duplex_mae": ("MAE of perfect duplexes", "{:.2f} °C"),
    "formula_perfect_duplex_mae": ("SantaLucia's rules on perfect duplexes", "{:.2f} °C"),
    "ridge_mae": ("TF-IDF", "{:.2f}"),
    "ridge_pearson": ("TF-IDF Pearson", "{:.3f}"),
}


def entry_of(folder: Path) -> tuple[str, dict]:
    """Returns the figures of a finished run and their key.

    Raises:
        SystemExit: the run was resumed, so its time is that of its last part.
    """
    results = json.loads((folder / "results.json").read_text())
    if results["resumed_from_step"] is not None:
        raise SystemExit(f"{folder}: was resumed; its steps and its time do not belong together")
    options = json.loads((folder / "options.json").read_text())["options"]
    dataset = Path(results["dataset"]).name
    if options.get("max_examples") is not None:
        dataset += f", {options['max_examples']:,} examples"
    preset = results["preset"] or ""
    if "://" not in preset:  # of a folder: not where it is on this machine
        preset = Path(preset).name
    started = f"from {Path(options['init_from']).name}" if options.get("init_from") else preset
    if preset == "scratch" and not options.get("init_from") and options.get("num_layers"):
        layers = options["num_layers"]
        started = f"{layers} layer{'s' if layers > 1 else ''} of {options['hidden_dim']}"
    day = datetime.date.fromtimestamp((folder / "results.json").stat().st_mtime)
    entry = {
        "command": command_of(results["module"], options),
        "commit": (results.get("git") or {}).get("commit"),
        "day": day.isoformat(),
        "recipe": results["recipe"],
        "dataset": dataset,
        "from": started,
        "seed": results["seed"],
        "strategy": f"{results['strategy']} x {results['replicas']}",
        "test": results["test"],
        "baseline": results["baseline"],
        "steps": results["steps"],
        "seconds": round(results["seconds"]),
        "machine": results["device"],
    }
    return key_of(entry), entry


def key_of(entry: dict) -> str:
    """Returns the name of an entry: that of its row, and its seed."""
    return " / ".join(str(entry[name]) for name in (*ROW, "seed"))


def command_of(module: str, options: dict) -> str:
    """Returns the command of a run, without its seed and the folders of the machine.

    Args:
        module: name of the recipe's module.
        options: all of its options, as `options.json` holds them.
    """
    default = to_json(importlib.import_module(module).Options())
    words = ["python", "-m", module]
    for name, value in options.items():
        if value == default.get(name) or name in NOT_OF_THE_ROW:
            continue
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
            continue
        values = [str(each) for each in (value if isinstance(value, list) else [value])]
        if name == "init_from":
            values = [f"runs/bert_mlm/{Path(each).name}" for each in values]
        values = [Path(each).name if each.startswith("/") else each for each in values]
        words += [flag(name), *values]
    return shlex.join(words)


def shown(runs: list[dict], which: str) -> str:
    """Returns the metrics of runs that differ only in the seed: mean and range."""
    words = []
    for name, (title, form) in SHOWN.items():
        if name not in runs[0][which]:
            continue
        if runs[0]["recipe"] != "dna_melting":  # scores of sentences have any unit
            form = form.removesuffix(" °C")
        values = [run[which][name] for run in runs]
        text = form.format(statistics.mean(values))
        least, most = form.format(min(values)), form.format(max(values))
        if least != most:
            text += f" ({least} to {most})"
        words.append(f"{title} {text}")
    return ", ".join(words)


def table(kept: dict[str, dict]) -> str:
    """Returns the rows as Markdown."""
    groups: dict[tuple, list[dict]] = {}
    for entry in kept.values():
        groups.setdefault(tuple(entry[name] for name in ROW), []).append(entry)
    titles = ("recipe", "data", "test", "baseline", "steps, time", "machine", "day")
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for (recipe, dataset, start, strategy, _), runs in sorted(groups.items()):
        seconds = statistics.mean(run["seconds"] for run in runs)
        time = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
        seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
        where = "" if strategy == "none x 1" else f", {strategy}"
        data = f"{dataset}{f', {start}' if start else ''}{where}{seeds}"
        lines.append(
            f"| `{recipe}` | {data} | {shown(runs, 'test')} | {shown(runs, 'baseline')} "
            f"| {runs[0]['steps']:,}, {time} | {'; '.join(sorted({r['machine'] for r in runs}))} "
            f"| {'; '.join(sorted({r['day'] for r in runs}))} |"
        )
    return "\n".join(lines)


def commands(kept: dict[str, dict]) -> str:
    """Returns the commands of all rows, each once, as a block of Markdown."""
    seeds: dict[str, set[int]] = {}
    for _, entry in sorted(kept.items()):
        seeds.setdefault(entry["command"], set()).add(entry["seed"])
    lines = []
    for command, numbers in seeds.items():
        first, *others = sorted(numbers)
        seed = f" --seed {first}" if first or others else ""
        also = f"    # and {', '.join(map(str, others))}" if others else ""
        lines.append(f"{command}{seed}{also}")
    return "\n".join(["```sh", *lines, "```"])


def main(folders: list[Path]) -> None:
    """Adds the runs' figures and writes the table."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept |= dict(entry_of(folder) for folder in folders)
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    for path, written in ((README, table(kept)), (COMMANDS, commands(kept))):
        before, rest = path.read_text(encoding="utf-8").split(BEGIN)
        after = rest.split(END)[1]
        path.write_text(f"{before}{BEGIN}\n{written}\n{END}{after}", encoding="utf-8")
    print(table(kept))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
