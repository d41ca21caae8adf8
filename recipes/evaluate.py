"""Evaluate a trained model of any recipe: on its own test data, another dataset, or minimal pairs.

    python -m recipes.evaluate RUN_DIR
    python -m recipes.evaluate RUN_DIR --dataset my_text.txt
    python -m recipes.evaluate RUN_DIR --dataset wikitext-2-raw --json
    python -m recipes.evaluate RUN_DIR --test-file new.csv
    python -m recipes.evaluate RUN_DIR --examples errors.csv
    python -m recipes.evaluate RUN_DIR --on blimp:FOLDER

RUN_DIR is the folder of a finished run. Calls the recipe's `main` with the run's options and
weights, and no steps. The run's own dataset, the default, reproduces the numbers of its
`results.json`; for another dataset the test split is evaluated, and the baseline comes from its
training split. All of `--test-file` is the test split, whose columns are named as those of the
dataset; of images it is an IDX file, beside which the one with their labels is read.

`--on blimp:FOLDER` scores the minimal pairs of all `*.jsonl` files of the folder, which have the
fields `sentence_good` and `sentence_bad` of BLiMP (arXiv 1912.00582). The accuracy is the share of
pairs whose good sentence is more likely by the recipe's `log_likelihoods()`. A tie counts as wrong,
so chance is at most 50%. The n-grams of the run's training text are the baseline; `--png FILE`
plots both by phenomenon.

Runs on one device and writes nothing into the run's folder.
"""

import dataclasses
import itertools
import json
from pathlib import Path

from data import files, live_line, minimal_pairs, tables
from data.errors import DataError
from training.answer_table import problems_of_csv
from training.command_line import command_line
from training.errors import OptionsError, RunError
from training.loaded_run import LoadedRun, evaluate, load_run
from training.options import RunOptions, check, file_problem, flag, option

# Options of the recipe that another dataset may need to differ.
COLUMNS = (
    "text_column",
    "second_text_column",
    "label_column",
    "prompt_column",
    "response_column",
)
# Of them those that another one leaves unused.
REPLACES = {
    "text_column": ("prompt_column", "response_column"),
    "prompt_column": ("text_column",),
    "response_column": ("text_column",),
}
MODEL, N_GRAMS = "model", "n-grams"  # the columns of minimal pairs
MOST_PARTS = 50  # classes or datasets whose metrics are printed; --json has more
MOST_CLASSES = 12  # of a confusion matrix that is printed; results.json has larger ones


@dataclasses.dataclass(kw_only=True)
class Options(RunOptions):
    """Options of `recipes.evaluate`."""

    dataset: str | None = option(
        None, "Evaluate on the test split of this dataset of the recipe (default: the run's own)."
    )
    text_column: str | None = option(
        None, "Column of the sentences, or of the first of two, in --dataset (default: the run's)."
    )
    second_text_column: str | None = option(
        None, "Column of the second sentences in --dataset (default: the run's)."
    )
    label_column: str | None = option(
        None, "Column of the labels in --dataset (default: the run's)."
    )
    prompt_column: str | None = option(
        None, "Column of the prompts in --dataset (default: the run's)."
    )
    response_column: str | None = option(
        None, "Column of the responses in --dataset (default: the run's)."
    )
    test_file: Path | None = option(
        None,
        "Evaluate on all of this file, instead of a test split; baselines learn from the training "
        "split of the dataset.",
    )
    on: str | None = option(None, "Evaluate on minimal pairs, blimp:FOLDER, instead of a dataset.")
    png: Path | None = option(
        None, "Plot minimal pairs by phenomenon into this file (.png, .pdf or .svg)."
    )
    examples: Path | None = option(
        None,
        "Write the test examples and the model's answers into this new file (.csv), the worst "
        "ones first: of text_classification, dna_melting and seq2seq.",
    )
    batch_size: int = option(32, "Examples per batch.", within="[1, 1024]")
    cache_dir: Path | None = option(
        None,
        "Folder for downloads and tokens (default: $RECIPES_CACHE_DIR, else "
        "~/.cache/keras-recipes).",
    )
    json: bool = option(False, "Print the numbers as one JSON object.")

    def problems(self) -> list[str]:
        """Returns one line per invalid value or combination of `--on`, `--dataset` and `--png`."""
        problems = []
        if self.on is not None and not self.on.startswith("blimp:"):
            problems.append(f"--on {self.on[:80]}: must be blimp:FOLDER")
        if self.on is not None and self.dataset is not None:
            problems.append("--on and --dataset: pass only one of them")
        if self.on is not None and self.test_file is not None:
            problems.append("--on and --test-file: pass only one of them")
        problem = file_problem(self.test_file)
        if problem is not None:
            problems.append(f"--test-file {problem}")
        if self.png is not None and self.on is None:
            problems.append("--png: needs --on")
        if self.png is not None and self.png.suffix not in (".png", ".pdf", ".svg"):
            problems.append(f"--png {self.png}: must end in .png, .pdf or .svg")
        if self.png is not None and not self.png.parent.is_dir():
            problems.append(f"--png {self.png}: its folder does not exist")
        problems += problems_of_csv(self.examples, "--examples")
        if self.examples is not None and self.on is not None:
            problems.append("--on and --examples: pass only one of them")
        if self.dataset is None:
            named = [name for name in COLUMNS if getattr(self, name) is not None]
            hint = "; name the columns of --test-file as those of the run's data"
            hint = hint if self.test_file is not None else ""
            problems += [f"{flag(name)}: needs --dataset{hint}" for name in named]
        return problems


@live_line.log_on_stderr()
def main(options: Options) -> dict:
    """Evaluates a run's model, prints the metrics and returns the object that `--json` prints."""
    check(options)
    run = load_run(options.run_dir, best=options.best, trust_module=options.trust_module)
    if options.on is not None:
        folder = Path(options.on.removeprefix("blimp:"))
        results = evaluate_pairs(run, folder, options.cache_dir)
    else:
        results = evaluate(
            run,
            dataset=options.dataset,
            batch_size=options.batch_size,
            cache_dir=options.cache_dir,
            test_file=options.test_file,
            examples=options.examples is not None,
            **columns_of(options, run),
        )
    examples = results.pop("examples", None)
    _print(results, options)
    if options.examples is not None:  # afterwards: a file that cannot be written costs no result
        if examples is None:
            raise OptionsError(
                f"--examples: {run.module.__name__} has none; text_classification, dna_melting and "
                "seq2seq have them, and a recipe that calls run.finish(examples_table=...)"
            )
        tables.write_csv(options.examples, examples)
        if not options.json:
            print(f"\nwrote {options.examples}, {len(examples) - 1:,} rows")
    if options.png is not None:  # likewise
        plot_pairs(results["scores"], options.png)
        if not options.json:
            print(f"\nwrote {options.png}")
    return results


def _print(results: dict, options: Options) -> None:
    if options.json:
        print(json.dumps(results, default=files.json_value))
        return
    for note in results["notes"]:
        print(note)
    print(f"{'run':24} {results['run_dir']}, {results['steps']:,} steps")
    part = "minimal pairs" if options.on is not None else "test split"
    if "test_file" in results:
        part = f"test file {results['test_file']}"
    print(f"{'data':24} {results['dataset'] or 'the recipe has no --dataset'}, {part}")
    if options.on is not None:
        columns = [name for name in (MODEL, N_GRAMS) if name in results["scores"][-1]]
        print("accuracy in % ± standard error; a tie is wrong, chance is 50%\n")
        print(minimal_pairs.format_table(results["scores"], columns))
        return
    for title, numbers in (("", results["test"]), ("baseline: ", results["baseline"])):
        for name, value in numbers.items():
            has_error = not title and name == "accuracy" and "test_standard_error" in results
            error = f" ± {results['test_standard_error']:.4f}" if has_error else ""
            print(f"{title + name:24} {value:.4f}{error}")
    for name in ("test_by_class", "test_by_dataset"):
        parts = results.get(name) or {}
        shown = dict(itertools.islice(parts.items(), MOST_PARTS))
        if parts:
            print(f"\n{format_parts(name.removeprefix('test_').replace('_', ' '), shown)}")
        if len(parts) > len(shown):
            print(f"... {len(parts) - len(shown):,} more: --json has all")
    confusion = results.get("test_confusion", {})
    if 0 < len(confusion) <= MOST_CLASSES:
        print(f"\n{format_parts('label, and predicted as', confusion)}")


def format_parts(title: str, parts: dict[str, dict[str, float]]) -> str:
    """Formats the metrics of parts of a test split as a table with a row for each part."""
    # A part may lack a metric, such as the R² of one molecule.
    names = list(dict.fromkeys(name for numbers in parts.values() for name in numbers))
    width = max(24, *map(len, parts))
    widths = {name: max(12, len(name)) for name in names}
    lines = [" ".join([f"{title:{width}}", *(f"{name:>{widths[name]}}" for name in names)])]
    for part, numbers in parts.items():
        cells = [f"{part:{width}}"]
        for name in names:
            n = numbers.get(name, "-")
            value = n if n == "-" else f"{n:,}" if isinstance(n, int) else f"{n:.4f}"
            cells.append(f"{value:>{widths[name]}}")
        lines.append(" ".join(cells))
    return "\n".join(lines)


def columns_of(options: Options, run: LoadedRun) -> dict[str, str | None]:
    """Returns the named columns of another dataset, as options of the run's recipe.

    The column of a text replaces those of prompts and responses, and the reverse.

    Raises:
        OptionsError: the recipe reads no such columns.
    """
    named = {name: getattr(options, name) for name in COLUMNS}
    named = {name: column for name, column in named.items() if column is not None}
    for name in named:
        if not hasattr(run.options, name):
            raise OptionsError(f"{flag(name)}: {run.module.__name__} has no such option")
    replaced = {other for name in named for other in REPLACES.get(name, ())}
    return {other: None for other in replaced if hasattr(run.options, other)} | named


def evaluate_pairs(run: LoadedRun, folder: Path, cache_dir: Path | None = None) -> dict:
    """Scores minimal pairs with a model and with n-grams of its training text.

    Args:
        run: a finished run whose recipe has `log_likelihoods()`.
        folder: contains the pairs, see `data.minimal_pairs`.
        cache_dir: folder of downloads and tokens; None for the default.

    Returns:
        The dict of `training.loaded_run.evaluate()`, and `scores`: see `minimal_pairs.score`.

    Raises:
        RunError: the recipe has no `log_likelihoods()`.
        DataError: a file does not contain minimal pairs.
    """
    if not hasattr(run.module, "log_likelihoods"):
        raise RunError(f"{run.folder}: its recipe, {run.module.__name__}, has no log_likelihoods()")
    if not files.expand(folder).is_dir():
        raise DataError(f"--on blimp:{folder}: no such folder")
    sets, notes = minimal_pairs.read_pairs(folder), []
    sentences = minimal_pairs.sentences(sets)
    likelihoods = {MODEL: run.module.log_likelihoods(run, sentences)}
    if hasattr(run.module, "n_gram_log_likelihoods"):
        try:
            cache_dir = cache_dir or files.default_cache_dir()
            likelihoods[N_GRAMS] = run.module.n_gram_log_likelihoods(run, sentences, cache_dir)
        except DataError as error:
            notes.append(f"no n-grams to compare with: {error}")
    scores = minimal_pairs.score(sets, likelihoods)

    def accuracies(column: str) -> dict[str, float]:
        return {
            "accuracy" if row["part"] == "all" else row["name"]: row[column]["accuracy"]
            for row in scores
            if row["part"] != "phenomenon" and column in row
        }

    return {
        "run_dir": str(run.folder),
        "recipe": run.results["recipe"],
        "steps": run.results["steps"],
        "dataset": str(folder),
        "test": accuracies(MODEL),
        "baseline": accuracies(N_GRAMS),
        "scores": scores,
        "notes": notes,
    }


def plot_pairs(scores: list[dict], path: Path) -> None:
    """Plots accuracies and their standard errors by phenomenon.

    Args:
        scores: as `minimal_pairs.score` returns them.
        path: .png, .pdf or .svg.

    Raises:
        OptionsError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # slow to import

    rows = [row for row in scores if row["part"] == "phenomenon"] or scores[:-1]
    rows = [*rows, scores[-1]][::-1]  # the first one at the top
    figure = Figure(figsize=(7, 1.2 + 0.35 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for column, marker in ((N_GRAMS, "s"), (MODEL, "o")):
        if column in rows[0]:
            shares = [100 * row[column]["accuracy"] for row in rows]
            errors = [100 * row[column]["standard_error"] for row in rows]
            axis.errorbar(shares, range(len(rows)), xerr=errors, fmt=marker, label=column)
    axis.axvline(50, color="grey", linewidth=0.8, linestyle="--")
    axis.set_yticks(range(len(rows)), [row["name"].replace("_", " ") for row in rows])
    axis.set(xlabel="accuracy (%)", xlim=(0, 100))
    figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OptionsError(f"--png {path}: cannot be written ({error.strerror})") from error


if __name__ == "__main__":
    command_line(Options, main)
