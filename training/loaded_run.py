"""Loads a finished run, and evaluates it by its recipe's own `main`, with no steps."""

import dataclasses
import importlib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from data import files
from training import artifacts
from training.errors import RunError
from training.options import from_json, read_json


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A finished run.

    Attributes:
        folder: the run's.
        module: the recipe that trained it.
        options: the run's, an `Options` of that module, without the run's folder.
        resolved: what the options came to: dataset, preset, checksums of the data, global batch ...
        results: what `results.json` holds.
        metadata: what the recipe needs to read the model's inputs and outputs, for instance the
            names of the classes: `run.finish(metadata=...)`. It is stored in `model/`, under its
            checksums.
    """

    folder: Path
    module: types.ModuleType
    options: Any
    resolved: dict
    results: dict
    metadata: dict

    @property
    def model_dir(self) -> Path:
        """Where the model is stored."""
        return self.folder / "model"

    @property
    def preset(self) -> str | None:
        """The model's folder where it is a KerasNLP preset, or None."""
        return str(self.model_dir) if (self.model_dir / "task.json").is_file() else None

    def load_model(self, dtype: str | None = None) -> keras.Model:
        """Loads the trained model, never compiled.

        Args:
            dtype: a dtype policy, for instance "float32"; None for that of the training.

        Raises:
            RunError: it cannot be loaded.
        """
        return artifacts.load_model(self.model_dir, dtype, self.module)


def load_run(folder: Path) -> LoadedRun:
    """Loads a finished run of any recipe; the model itself is loaded by `load_model()`.

    Raises:
        RunError: no finished run, a damaged one, or one whose recipe cannot be imported.
    """
    if not (folder / "results.json").is_file():
        raise RunError(f"{folder}: not a run directory, or its run is not finished")
    problem = files.damage(folder / "model", [artifacts.METADATA])
    if problem:
        raise RunError(f"{folder / 'model'}: damaged ({problem})")
    saved = read_json(folder / "options.json", "options", "resolved")
    results = read_json(folder / "results.json", "recipe", "module", "test", "steps")
    metadata = read_json(folder / "model" / artifacts.METADATA)
    name = results["module"]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise RunError(f"{folder}: its recipe, {name}, cannot be imported ({error})") from error
    options = from_json(module.Options, folder / "options.json")
    return LoadedRun(folder, module, options, saved["resolved"], results, metadata)


def likeliest(probabilities: np.ndarray, names: Sequence[str], most: int = 3) -> list[dict]:
    """Returns the likeliest names with their probabilities, the likeliest first.

    Args:
        probabilities: of shape (names,).
        names: in the order of the probabilities.
        most: how many.
    """
    best = np.argsort(-probabilities, kind="stable")[:most]
    return [{"probability": float(probabilities[i]), "class": names[i]} for i in best]


def evaluate(trained: LoadedRun, *, dataset: str | None, batch_size: int, cache_dir=None) -> dict:
    """Evaluates a run's model on the test split of its own dataset, or of another one.

    Args:
        trained: the run.
        dataset: as for the recipe; None for the run's own.
        batch_size: examples of a batch.
        cache_dir: downloads and tokens; None for the usual folder.

    Returns:
        `run_dir`, `recipe`, `steps`, `dataset`, `test`, `baseline` and `notes`.
    """
    options = dataclasses.replace(
        trained.options,
        dataset=dataset or trained.resolved.get("dataset") or trained.options.dataset,
        strategy="none",
        replicas=None,
        batch_size_per_replica=None,
        global_batch_size=batch_size,
        accumulate_steps=1,
        cache_dir=cache_dir,
        quiet=True,
    )
    options.trained = trained
    return trained.module.main(options)


def same_outputs(ours, theirs) -> bool:
    """Tells whether all outputs of two models are equal, to 1e-3."""
    pairs = zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True)
    numbers = [map(keras.ops.convert_to_numpy, pair) for pair in pairs]
    return all(np.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in numbers)
