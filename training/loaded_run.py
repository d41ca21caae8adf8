"""Loads a finished run, and evaluates it by its recipe's `main`, with no steps."""

import dataclasses
import importlib
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from callbacks import checkpoint
from data import files
from data.errors import DataError
from training import artifacts, run_files
from training.errors import OptionsError, RunError
from training.options import (
    EvaluationRequest,
    HeldOutOptions,
    SharedOptions,
    all_problems,
    flag,
    from_json,
)


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """Represents a finished run.

    Attributes:
        folder: the run's folder.
        module: the recipe that trained it.
        options: the run's `Options` of that module, without the run's folder.
        resolved: resolved values: dataset, preset, checksums of the data, global batch ...
        results: the content of `results.json`.
        metadata: the values of `run.finish(metadata=...)` that the model's inputs and outputs need,
            for instance the names of the classes. Stored in `model/`, covered by its checksums.
        weights: weights file of a checkpoint that replaces the model's weights, or None.
    """

    folder: Path
    module: types.ModuleType
    options: Any
    resolved: dict
    results: dict
    metadata: run_files.Metadata
    weights: Path | None = None
    _models: dict = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def model_dir(self) -> Path:
        """Returns the folder of the model."""
        return self.folder / "model"

    @property
    def preset(self) -> str | None:
        """Returns the model's folder if it is a KerasNLP preset, otherwise None."""
        return str(self.model_dir) if (self.model_dir / "task.json").is_file() else None

    def load_model(self, dtype: str | None = None) -> keras.Model:
        """Loads the trained model, uncompiled; once for each policy.

        Args:
            dtype: a dtype policy, for instance "float32"; None for the training's, or, for a
                preset, Keras's present one, which in an evaluated run is the training's.

        Raises:
            RunError: it cannot be loaded.
        """
        present = keras.config.dtype_policy().name if self.preset else self.options.precision
        policy = dtype or present
        if policy not in self._models:
            model = artifacts.load_model(self.model_dir, dtype, self.module, self.options.precision)
            if self.weights is not None:
                artifacts.load_weights(model, self.weights)
            self._models[policy] = model
        return self._models[policy]


def load_run(
    folder: str | Path, *, best: bool = False, trust_module: str | None = None
) -> LoadedRun:
    """Loads a finished run of any recipe; the model itself is loaded by `load_model()`.

    Args:
        folder: the run's folder.
        best: use the weights of its `best/`.
        trust_module: the module of its recipe, if that is not a recipe of this package.

    Raises:
        RunError: the run is not finished or damaged, or its recipe must not or cannot be imported.
    """
    folder = Path(folder)
    _require_finished(folder)
    problem = files.damage(folder / "model", [files.METADATA])
    if problem:
        raise RunError(f"{folder / 'model'}: damaged ({problem})")
    saved = run_files.read_options(folder, "options", "resolved")
    names = ("recipe", "module", "test", "steps", "weights_of_step")
    results = run_files.read_results(folder, *names)
    metadata = run_files.read_metadata(folder / "model" / files.METADATA)
    if metadata.get("weights_sha256") not in (None, results.get("weights_sha256")):
        raise RunError(
            f"{folder}: model/ has other weights than those that results.json describes: the run "
            "was stopped while it was extended; the same command finishes it"
        )
    weights = None
    results["steps"] = results["weights_of_step"]
    if best:
        info = _read_best(folder)
        results["steps"], weights = info.step, info.folder / files.WEIGHTS
    module = import_recipe(results["module"], folder, trust_module)
    options = _read_options(module, folder / "options.json")
    if best:
        _require_whole_checkpoints(folder, options, bool(info.state.get("averages")))
    return LoadedRun(folder, module, options, saved["resolved"], results, metadata, weights)


def _require_finished(folder: Path) -> None:
    """Raises RunError, with the steps that are done, if a folder contains no finished run."""
    if (folder / "results.json").exists():
        return
    if not folder.is_dir():
        raise RunError(f"{folder}: not a run directory (there is no such folder)")
    if not (folder / "options.json").exists():
        raise RunError(f"{folder}: not a run directory ({_contents(folder)})")
    planned = run_files.read_options(folder).get("resolved", {}).get("total_steps")
    last = checkpoint.newest_path(folder / "checkpoints")
    done = int(Path(last).name.removeprefix("step-")) if last else 0
    of = f" of {planned:,}" if planned is not None else ""
    raise RunError(f"{folder}: the run is not finished, {done:,}{of} steps are saved")


def _contents(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"contains {', '.join(names[:3])}{more}" if names else "empty"


def _read_best(folder: Path) -> checkpoint.CheckpointInfo:
    best = folder / "best"
    if not best.is_dir():
        raise RunError(f"--best: {folder} contains no best/; train with --keep-best METRIC")
    problem = files.damage(best, (files.WEIGHTS, files.STATE))
    if problem:
        raise RunError(f"{best}: damaged ({problem})")
    state = run_files.read_json(best / files.STATE, "step", kinds={"step": run_files.COUNT})
    return checkpoint.CheckpointInfo(best, state["step"], 0, 0, state)


def _require_whole_checkpoints(folder: Path, options: SharedOptions, has_averages: bool) -> None:
    """Refuses a run whose checkpoints hold less than, or other weights than, a whole model."""
    causes = [flag(name) for name in files.NOT_WHOLE_WITH if getattr(options, name, None)]
    if has_averages:  # of a recipe without the option --ema, too
        causes.append("the optimizer's use_ema")
    if not causes:
        return
    remedy = "train with --early-stopping, which puts the best weights into model/"
    if options.early_stopping is not None:
        remedy = "leave out --best: --early-stopping put the best weights into model/"
    raise RunError(
        f"--best: {folder} was trained with {causes[0]}, so its best/ serves to resume only; "
        f"{remedy}"
    )


def _read_options(module: types.ModuleType, path: Path) -> SharedOptions:
    try:
        options = from_json(module.Options, path)
    except OptionsError as error:
        reason = str(error).removeprefix(f"--options {path}: ")
        raise RunError(f"{path}: {reason} ({module.__name__} does not have them)") from error
    problems = all_problems(options, pairs=False)  # which depend on defaults, and those change
    if problems:
        line = " ".join("; ".join(problems).split())
        raise RunError(f"{path}: damaged, {line[:300]}")
    return options


# The recipe of a run: the module that `results.json` names is code, perhaps a stranger's.


def import_recipe(name: str, folder: Path, trusted: str | None) -> types.ModuleType:
    """Imports the recipe of a run: one of this package, or the one of `--trust-module`.

    Nothing is ever imported from within a run's folder.

    Args:
        name: the module that `results.json` names.
        folder: the run's folder.
        trusted: a module outside of this package that may be imported.

    Raises:
        RunError: it must not be imported, cannot be imported, or is not a recipe.
    """
    shown = name if len(name) <= 100 and name.isprintable() else ascii(name)[:100]
    package, _, own = name.partition(".")
    if name != trusted and not (package == "recipes" and own.isidentifier()):
        raise RunError(
            f"{folder}: its recipe, {shown}, is not one of this package; if you trust its code, "
            f"pass --trust-module {shown}"
        )
    for place in _places(name):
        if _is_in_a_run(place, folder):
            raise RunError(
                f"{folder}: its recipe, {shown}, is within a run's folder ({place}), from which "
                "nothing is imported; move it out of there"
            )
    try:
        module = importlib.import_module(name)
    except (ImportError, ValueError) as error:
        raise RunError(
            f"{folder}: its recipe, {shown}, cannot be imported ({error}); Python looks for it in "
            "this folder and in PYTHONPATH"
        ) from error
    options = getattr(module, "Options", None)
    is_recipe = isinstance(options, type) and issubclass(options, SharedOptions)
    if not is_recipe or not hasattr(module, "main"):
        raise RunError(f"{folder}: its recipe, {shown}, has no Options and main() of a recipe")
    return module


def _places(name: str) -> list[Path]:
    """Returns the files and folders that importing a module would execute, without importing it."""
    places: list[Path] = []
    path: Sequence[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        full = ".".join(parts[:count])
        if full in sys.modules and hasattr(sys.modules[full], "__path__"):
            path = list(sys.modules[full].__path__)
            continue
        # By the last part of the name: the full name would need the packages above it.
        spec = importlib.machinery.PathFinder.find_spec(parts[count - 1], path)
        if spec is None:
            break
        path = list(spec.submodule_search_locations or [])
        places += map(Path, [spec.origin] if spec.origin else path)
    return places


def _is_in_a_run(place: Path, folder: Path) -> bool:
    parents = place.resolve().parents
    return folder.resolve() in parents or any(
        (parent / "options.json").exists() and (parent / "results.json").exists()
        for parent in parents
    )


def top_k(probabilities: np.ndarray, names: Sequence[str], k: int = 3) -> list[dict]:
    """Returns the `k` most likely names with their probabilities, in descending order.

    Args:
        probabilities: float of shape (names,).
        names: in the order of the probabilities.
        k: number of names; 0 for all.

    Raises:
        OptionsError: the number is negative.
        RunError: there are more or fewer names than probabilities.
    """
    if k < 0:
        raise OptionsError(f"--top {k}: must be at least 0")
    if len(names) != len(probabilities):
        raise RunError(f"{len(names)} names for the {len(probabilities)} outputs of the model")
    best = np.argsort(-probabilities, kind="stable")[: k or None]
    return [{"probability": float(probabilities[i]), "class": names[i]} for i in best]


def evaluate(
    trained: LoadedRun,
    *,
    dataset: str | None,
    batch_size: int,
    cache_dir=None,
    test_file: Path | None = None,
    examples: bool = False,
    **data_options,
) -> dict:
    """Evaluates a run's model on the test split of its dataset, or of another one.

    Args:
        trained: the run.
        dataset: a value of the recipe's `--dataset`; None for the run's own.
        batch_size: examples per batch.
        cache_dir: folder of downloads and tokens; None for the default.
        test_file: a file, all of which is the test split instead.
        examples: whether to return the test examples with the model's answers.
        **data_options: values of the recipe's options that describe the data, instead of the run's.

    Returns:
        `run_dir`, `recipe`, `steps`, `dataset`, `test`, `baseline`, `notes`, and what the recipe
        adds to its results; `test_file`, if all of one was the test split; `examples`, a header and
        rows, if they are wanted and the recipe has them.

    Raises:
        DataError: the data cannot be read.
        RunError: `main` does not return its results.
    """
    own = trained.resolved.get("dataset") or trained.options.dataset
    is_own = dataset is None or files.is_same(dataset, own)
    if not is_own and isinstance(trained.options, HeldOutOptions):
        data_options = {"validation_file": None, "test_file": None} | data_options
    options = dataclasses.replace(
        trained.options,
        dataset=dataset or own,
        strategy="none",
        replicas=None,
        batch_size_per_replica=None,
        global_batch_size=batch_size,
        accumulate_steps=1,
        cache_dir=cache_dir,
        quiet=True,
        **data_options,
    )
    options.evaluation = EvaluationRequest(trained, test_file, examples)
    try:
        results = trained.module.main(options)
    except DataError as error:
        path = files.expand(options.dataset)
        is_gone = path.name != options.dataset or path.suffix != ""  # a path, no dataset's name
        is_gone = is_gone and not path.exists() and options.dataset in str(error)
        if dataset is not None or not is_gone:
            raise
        raise DataError(
            f"{error}; the run was trained on these data: pass --dataset if they have moved"
        ) from error
    if not isinstance(results, dict):
        raise RunError(
            f"{trained.module.__name__}.main() returned {results!r:.100}, expected the results: "
            "return run.finish(...)"
        )
    return results


def same_outputs(ours, theirs) -> bool:
    """Returns whether all outputs of two models are equal, to 1e-3."""
    pairs = zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True)
    numbers = [map(keras.ops.convert_to_numpy, pair) for pair in pairs]
    return all(np.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in numbers)
