"""Evaluate a trained model of any recipe: on its own test data, another dataset, or minimal pairs.

    python -m recipes.evaluate RUN_DIR
    python -m recipes.evaluate RUN_DIR --dataset my_text.txt
    python -m recipes.evaluate RUN_DIR --dataset wikitext-2-raw --json
    python -m recipes.evaluate RUN_DIR --on blimp:FOLDER

RUN_DIR is the folder of a finished run. Calls the recipe's own `main` with the run's options, the
run's weights, and no steps. So the run's own dataset, the default, gives the numbers of its
`results.json` again; of another dataset the test split is evaluated, and the baseline is that of
its training split. `--on blimp:FOLDER` scores minimal pairs, `*.jsonl` files with `sentence_good`
and `sentence_bad` as BLiMP's (arXiv 1912.00582): the accuracy is the share of pairs of which the
recipe's `log_likelihoods()` finds the good one likelier. A tie is wrong, so chance is 50 %.
Runs on one device and writes nothing into the run's folder.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from data import files
from data.errors import DataError
from training.command_line import command_line
from training.errors import RunError
from training.loaded_run import LoadedRun, evaluate, load_run
from training.options import RunOptions, check, option


@dataclasses.dataclass(kw_only=True)
class Options(RunOptions):
    """Options of `recipes.evaluate`."""

    dataset: str | None = option(
        None, "A dataset as the recipe takes it; its test split (default: the run's own)."
    )
    on: str | None = option(None, "blimp:FOLDER: minimal pairs instead of a dataset.")
    batch_size: int = option(32, "Examples per batch.", within="[1, 1024]")
    cache_dir: Path | None = option(
        None,
        "Folder for downloads and tokens (default: $RECIPES_CACHE_DIR, else "
        "~/.cache/keras-recipes).",
    )
    json: bool = option(False, "Print the numbers as one JSON object.")

    def problems(self) -> list[str]:
        """Returns a line for what `--on` cannot be, or be combined with."""
        found = []
        if self.on is not None and not self.on.startswith("blimp:"):
            found.append(f"--on {self.on[:80]}: must be blimp:FOLDER")
        if self.on is not None and self.dataset is not None:
            found.append("--on and --dataset: pass only one of them")
        return found


def main(options: Options) -> dict:
    """Evaluates a run's model, prints the metrics and returns what `--json` prints."""
    check(options)
    run = load_run(options.run_dir, best=options.best, trust_module=options.trust_module)
    if options.on is not None:
        found = evaluate_pairs(run, Path(options.on.removeprefix("blimp:")))
    else:
        found = evaluate(
            run, dataset=options.dataset, batch_size=options.batch_size, cache_dir=options.cache_dir
        )
    if options.json:
        print(json.dumps(found))
        return found
    for note in found["notes"]:
        print(note)
    print(f"{'run':24} {found['run_dir']}, {found['steps']:,} steps")
    part = "minimal pairs" if options.on is not None else "test split"
    print(f"{'data':24} {found['dataset']}, {part}")
    for title, numbers in (("", found["test"]), ("baseline: ", found["baseline"])):
        for name, value in numbers.items():
            print(f"{title + name:24} {value:.4f}")
    return found


def evaluate_pairs(run: LoadedRun, folder: Path) -> dict:
    """Measures in how many minimal pairs the good sentence is likelier, overall and by file.

    Raises:
        RunError: the recipe has no `log_likelihoods()`.
        DataError: a file is not what it should be.
    """
    if not hasattr(run.module, "log_likelihoods"):
        raise RunError(f"{run.folder}: its recipe, {run.module.__name__}, has no log_likelihoods()")
    pairs = read_pairs(folder)
    sentences = [sentence for found in pairs.values() for pair in found for sentence in pair]
    good, bad = np.reshape(run.module.log_likelihoods(run, sentences), (-1, 2)).T
    ends = np.cumsum([len(found) for found in pairs.values()])
    parts = np.split(good > bad, ends[:-1])
    accuracies = {name: float(part.mean()) for name, part in zip(pairs, parts, strict=True)}
    return {
        "run_dir": str(run.folder),
        "recipe": run.results["recipe"],
        "steps": run.results["steps"],
        "dataset": str(folder),
        "test": accuracies | {"accuracy": float((good > bad).mean())},
        "baseline": {},
        "notes": [],
    }


def read_pairs(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Returns the (good, bad) sentences of each `*.jsonl` file of a folder, by the file's name.

    Raises:
        DataError: there are none, or a line is not what it should be.
    """
    pairs: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(files.expand(folder).glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                row = json.loads(line)
                pair = row["sentence_good"], row["sentence_bad"]
                if not all(isinstance(text, str) and text.strip() for text in pair):
                    raise ValueError
                "".join(pair).encode()  # half of a surrogate pair is no text
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number}: expected JSON with sentence_good and sentence_bad, "
                    "texts that are not empty"
                ) from error
            pairs.setdefault(path.stem, []).append(pair)
    if not pairs:
        raise DataError(f"--on {folder}: no pairs in *.jsonl files there")
    return pairs


if __name__ == "__main__":
    command_line(Options, main)
