"""Loads a finished run, and evaluates it by its recipe's own `main`, with no steps."""

import contextvars
import dataclasses
import importlib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from callbacks.progress import EvaluationProgress
from callbacks.records import with_perplexity
from callbacks.tensorboard import TensorBoard
from data import files
from training import artifacts
from training.errors import RunError
from training.options import from_json, read_json
from training.plan import Plan, make_plan


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


# Evaluation: nothing is written.

_trained: contextvars.ContextVar[LoadedRun | None] = contextvars.ContextVar("trained", default=None)


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
    token = _trained.set(trained)
    try:
        return trained.module.main(options)
    finally:
        _trained.reset(token)


def requested() -> LoadedRun | None:
    """Returns the run that `evaluate()` evaluates; None where a recipe trains."""
    return _trained.get()


class EvaluatedRun:
    """Takes the place of a `Run` in a recipe's `main` while a trained run is evaluated."""

    finished = False
    resumes = True  # the weights come from the run

    def __init__(self, trained: LoadedRun, options):
        self.trained = trained
        self.options = options
        self.dataset = options.dataset
        self.cache_dir = options.cache_dir or files.default_cache_dir()
        self.metadata = trained.metadata
        self.strategy = tf.distribute.get_strategy()
        self.tensorboard = TensorBoard(None)
        self.perplexity_of: str | None = None
        self._facts: dict = {}
        self._notes: list[str] = []

    def fact(self, name: str):
        """Returns what the run came to; its model is its own preset."""
        if name == "preset" and self.trained.preset:
            return self.trained.preset
        return self.trained.resolved.get(name)

    def note(self, *lines: str | None) -> None:
        """Keeps lines that the result holds."""
        self._notes += filter(None, lines)

    def plan(self, *, examples: int, base_learning_rate: float, **facts) -> "EvaluationPlan":
        """Plans batches; says where the run's own data have changed since it was trained."""
        self._facts, resolved = facts, self.trained.resolved
        sums = [n for n in facts if n.endswith("_sha256") and facts[n] != resolved.get(n)]
        if facts.get("dataset") == resolved.get("dataset") and sums:
            self.note(f"{self.dataset}: not the data that the run was trained on")
        self.options.global_batch_size = min(self.options.global_batch_size, examples)
        made = make_plan(
            self.options,
            replicas=1,
            examples=examples,
            batch_size_per_replica=1,
            base_learning_rate=base_learning_rate,
        )
        return EvaluationPlan(**vars(made), run=self)

    def finish(self, model, *, test: dict, baseline: dict, **_) -> dict:
        """Returns the metrics of the test split."""
        return {
            "run_dir": str(self.trained.folder),
            "recipe": self.trained.results["recipe"],
            "steps": self.trained.results["steps"],
            "dataset": self._facts.get("dataset"),
            "test": with_perplexity(test, self.perplexity_of),
            "baseline": baseline,
            "notes": self._notes,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationPlan(Plan):
    """A plan without steps."""

    run: EvaluatedRun = dataclasses.field(repr=False, compare=False)
    compile_options: ClassVar[dict] = {}  # Keras's defaults
    evaluate_options: ClassVar[dict] = {"verbose": 0, "callbacks": [EvaluationProgress()]}

    def fit_options(self, model, train_data, *, test, perplexity_of=None, saves=None, **_) -> dict:
        """Gives the model the run's weights; `fit()` then has no epoch.

        Raises:
            RunError: the recipe builds another model than the run's.
        """
        self.run.perplexity_of = perplexity_of
        trained, built = self.run.trained.load_model(), saves or model
        weights = trained.get_weights()
        same = [w.shape for w in built.weights] == [w.shape for w in weights]
        if same:
            built.set_weights(weights)
            inputs = next(iter(test))[0]
            same = _equal(built(inputs), trained(inputs))
        if not same:
            raise RunError(
                f"{self.run.trained.folder}: from {self.run.dataset} the recipe builds another "
                "model than the one that was trained; keep what build_model() takes from the data "
                "in run.finish(metadata=...), and read it from run.metadata"
            )
        return {"epochs": 0, "steps_per_epoch": 1, "verbose": 0}


def _equal(ours, theirs) -> bool:
    pairs = zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True)
    numbers = [map(keras.ops.convert_to_numpy, pair) for pair in pairs]
    return all(np.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in numbers)
