"""Loads a finished run: its recipe's module, its options, its results and its model."""

import dataclasses
import importlib
import types
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np

from data import files
from training import artifacts
from training.errors import RunError
from training.options import SharedOptions, from_json, read_json


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
    options: SharedOptions
    resolved: dict
    results: dict
    metadata: dict

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return self.results["recipe"]

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
    if not (folder / "options.json").is_file():
        raise RunError(f"{folder}: not a run directory; pass the folder of a finished run")
    if not (folder / "results.json").is_file() or not (folder / "model").is_dir():
        raise RunError(f"{folder}: the run is not finished, it has no model yet")
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
