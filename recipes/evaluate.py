"""Evaluate a trained model of any recipe: on its own test data, or on another dataset.

    python -m recipes.evaluate RUN_DIR
    python -m recipes.evaluate RUN_DIR --dataset my_text.txt
    python -m recipes.evaluate RUN_DIR --dataset wikitext-2-raw --json

RUN_DIR is the folder of a finished run. Calls the recipe's own `main` with the run's options, the
run's weights, and no steps. So the run's own dataset, the default, gives the numbers of its
`results.json` again; of another dataset the test split is evaluated, and the baseline is that of
its training split. Runs on one device and writes nothing into the run's folder.
"""

import dataclasses
import json
from pathlib import Path

from training.command_line import command_line
from training.evaluation import evaluate
from training.loaded_run import load_run
from training.options import ProgramOptions, check, option


@dataclasses.dataclass(kw_only=True)
class Options(ProgramOptions):
    """Options of `recipes.evaluate`."""

    run_dir: Path = option(help="Folder of a finished run.", positional=True)
    dataset: str | None = option(
        None, "A dataset as the recipe takes it; its test split (default: the run's own)."
    )
    batch_size: int = option(32, "Examples per batch.", within="[1, 1024]")
    cache_dir: Path | None = option(
        None,
        "Folder for downloads and tokens (default: $RECIPES_CACHE_DIR, else "
        "~/.cache/keras-recipes).",
    )
    json: bool = option(False, "Print the numbers as one JSON object.")


def main(options: Options) -> dict:
    """Evaluates a run's model, prints the metrics and returns what `--json` prints."""
    check(options)
    found = evaluate(
        load_run(options.run_dir),
        dataset=options.dataset,
        batch_size=options.batch_size,
        cache_dir=options.cache_dir,
    )
    if options.json:
        print(json.dumps(found))
        return found
    for note in found["notes"]:
        print(note)
    print(f"{'run':24} {found['run_dir']}, {found['steps']:,} steps")
    print(f"{'data':24} {found['dataset']}, test split")
    for title, numbers in (("", found["test"]), ("baseline: ", found["baseline"])):
        for name, value in numbers.items():
            print(f"{title + name:24} {value:.4f}")
    return found


if __name__ == "__main__":
    command_line(Options, main)
