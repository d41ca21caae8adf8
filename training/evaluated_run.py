"""Lets a recipe's `main` evaluate a finished run: with its weights, no steps, and no folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import tensorflow as tf

from callbacks.progress import EvaluationProgress
from callbacks.records import with_perplexity
from callbacks.tensorboard import TensorBoard
from data.errors import listed
from data.files import default_cache_dir, is_same
from distribution import step
from distribution.keras_compat import fitting
from training import metric_checks, model_checks, numerics, option_checks
from training.errors import OptionsError, RunError
from training.loaded_run import LoadedRun, same_outputs
from training.options import EvaluationRequest, HeldOutOptions, SharedOptions
from training.plan import Plan, make_plan
from training.report import error_of_accuracy


class EvaluatedRun:
    """Takes the place of `training.run.Run` where a finished run is evaluated.

    Its methods have the arguments of that class, and ignore those that concern the training.

    Attributes:
        recipe: the recipe's name.
        options: the run's options, changed for the evaluation.
        strategy: for `with run.strategy.scope():`.
        trained: the finished run.
        tensorboard: writes nothing.
        cache_dir: the folder of downloads, vocabularies and tokens.
        finished: false, since `main` has something to do.
        results: empty, likewise.
        metadata: the values of `run.finish(metadata=...)` in the training.
        is_chief: true, as there is one process.
        resumes: true, since the weights are the run's.
    """

    finished, resumes, is_chief = False, True, True

    def __init__(
        self,
        recipe: str,
        options: SharedOptions,
        strategy: tf.distribute.Strategy,
        request: EvaluationRequest,
    ):
        self.recipe = recipe
        self.options = options
        self.strategy = strategy
        self.trained: LoadedRun = request.run
        self.tensorboard = TensorBoard(None)
        self.cache_dir = options.cache_dir or default_cache_dir()
        self.results: dict = {}
        self.metadata = self.trained.metadata
        self.evaluation_callbacks: list[keras.callbacks.Callback] = [EvaluationProgress()]
        self._request = request
        self._notes: list[str] = []
        self._facts: dict = {}  # the facts of plan()
        self._perplexity_of: str | None = None
        self._dataset_was_read = self._test_file_was_read = False

    @property
    def dataset(self) -> str:
        """Returns the dataset to evaluate on."""
        self._dataset_was_read = True
        return self.options.dataset

    @property
    def has_own_dataset(self) -> bool:
        """Returns whether the model was trained on the dataset."""
        return is_same(self.dataset, self.fact("dataset"))

    @property
    def held_out(self) -> dict[str, Path]:
        """Returns the files that the run was given for validation and test, of its own dataset."""
        return self.options.held_out if isinstance(self.options, HeldOutOptions) else {}

    @property
    def test_file(self) -> Path | None:
        """Returns the file of `recipes.evaluate --test-file`, or None.

        All of it is the test split, instead of that of the dataset.
        """
        self._test_file_was_read = True
        return self._request.test_file

    def fact(self, name: str):
        """Returns a resolved value of the run; its preset is its own model."""
        if name == "preset" and self.trained.preset:
            return self.trained.preset
        return self.trained.resolved.get(name)

    def note(self, *lines: str | None) -> None:
        """Keeps lines for the results."""
        self._notes += filter(None, lines)

    def plan(
        self,
        *,
        examples: int,
        base_learning_rate: float,
        batch_size_per_replica: int = 32,
        warmup_steps: int | None = None,
        tokens_per_example: float | None = None,
        about: dict[str, str] | None = None,
        **facts,
    ) -> Plan:
        """Plans the batches; notes if the run's data have changed.

        Raises:
            OptionsError: the recipe ignores `--max-examples`.
        """
        # A recipe may have called keras.utils.clear_session() before, which resets it.
        numerics.set_precision(self.options.precision)
        option_checks.refuse_ignored_limit(self.options, examples)
        self._facts, resolved = facts, self.trained.resolved
        sums = [n for n in facts if n.endswith("_sha256") and facts[n] != resolved.get(n)]
        is_own = facts.get("dataset") == resolved.get("dataset") and self._request.test_file is None
        if sums and is_own:
            self.note(f"{self.options.dataset}: not the data that the run was trained on")
        batch = self.options.global_batch_size or 1
        self.options.global_batch_size = min(batch, examples)
        return make_plan(
            self.options,
            replicas=1,
            examples=examples,
            batch_size_per_replica=1,
            base_learning_rate=base_learning_rate,
            warmup_steps=warmup_steps,
        )

    def prepare(
        self,
        model: keras.Model,
        train_data: tf.data.Dataset,
        *,
        validation: tf.data.Dataset,
        test: tf.data.Dataset,
        extra: Sequence[keras.callbacks.Callback] = (),
        perplexity_of: str | None = None,
        operations_per_example: int | None = None,
        saves: keras.Model | None = None,
    ) -> dict:
        """Sets the model to the weights of the run; `fit()` then runs no epoch.

        Raises:
            OptionsError: the recipe ignores `--dataset` or `--test-file`.
            RunError: the recipe has no test data, or builds another model than the run's.
        """
        option_checks.refuse_ignored_dataset(self.options, self._facts, self._dataset_was_read)
        if self._request.test_file is not None and not self._test_file_was_read:
            raise OptionsError(
                "--test-file: this recipe ignores it; a recipe loads run.test_file as its test "
                "split"
            )
        if test is None:
            raise RunError(
                f"{self.trained.folder}: its recipe has no test data to evaluate on "
                "(run.prepare(test=None))"
            )
        self._perplexity_of = perplexity_of
        batches = fitting.batches_of(test)
        fitting.build(model, batches)
        step.install(model)
        self._take_weights(model, saves or model, batches)
        return {
            "validation_data": validation,
            "callbacks": [],
            "initial_epoch": 0,
            "epochs": 0,
            "steps_per_epoch": 1,
            "verbose": 0,
            "shuffle": False,
        }

    def _take_weights(self, model: keras.Model, built: keras.Model, test: tf.data.Dataset) -> None:
        """Sets the recipe's model, of which `built` is the saved part, to the run's weights.

        Raises:
            RunError: the recipe builds another model than the run's.
        """
        stored = self.trained.load_model()
        ours, theirs = built.weights, stored.weights
        if not same_shapes(ours, theirs):  # a layer in float8 has another order once it is loaded
            ours, theirs = map(by_name_in_layers, (ours, theirs))
        same = same_shapes(ours, theirs)
        if same:
            for weight, trained in zip(ours, theirs, strict=True):
                weight.assign(trained)
            # One example: of a whole batch, all logits of a language model may exceed the memory.
            x, _, _ = keras.utils.unpack_x_y_sample_weight(next(iter(test)))
            inputs = keras.tree.map_structure(lambda rows: rows[:1], x)
            if built is not model:
                inputs = model_checks.suitable_inputs(built, inputs)
            # In graphs: KerasHub's head of masked words fails outside of them in half precision.
            same = same_outputs(tf.function(built)(inputs), tf.function(stored)(inputs))
        if not same:
            raise RunError(
                f"{self.trained.folder}: from {self.dataset} the recipe builds another model than "
                "the trained one; store the values that build_model() derives from the data with "
                "run.finish(metadata=...), and read them from run.metadata"
            )
        saved = {id(weight) for weight in built.weights}
        missing = [weight.path for weight in model.weights if id(weight) not in saved]
        if missing:
            self.note(
                f"metrics that depend on {listed(missing)} are not the run's: these weights of the "
                "trained model are not in the saved one (run.prepare(saves=...))"
            )

    @property
    def evaluate_options(self) -> dict:
        """Returns the arguments of `model.evaluate()`: they show progress."""
        return {"verbose": 0, "callbacks": self.evaluation_callbacks}

    def finish(
        self,
        model: keras.Model,
        *,
        test: dict[str, float],
        baseline: dict[str, float] | None,
        metadata: dict | None = None,
        preprocessor=None,
        example_input: str | None = None,
        examples_table: Callable[[], list[list]] | None = None,
        test_examples: int | None = None,
        **more,
    ) -> dict:
        """Returns the results of the evaluation, and the examples if they are wanted and exist.

        Raises:
            RunError: a metric is not a number, or one of `more` has the name of another result, or
                is not JSON.
        """
        test = metric_checks.as_numbers("test", test)
        baseline = metric_checks.as_numbers("baseline", baseline)
        results = {
            "run_dir": str(self.trained.folder),
            "recipe": self.trained.results["recipe"],
            "steps": self.trained.results["steps"],
            "dataset": self._facts.get("dataset"),
            "test": with_perplexity(test, self._perplexity_of),
            "baseline": baseline,
            "notes": self._notes,
            **error_of_accuracy(test, test_examples),
        }
        test_file = self._request.test_file or self.held_out.get("test")
        if test_file is not None:
            results["test_file"] = str(test_file)
        option_checks.require_own_values(
            self.finish, more, results.keys() | option_checks.OPTIONAL_RESULTS
        )
        validation_file = self.held_out.get("valid")
        is_gone = validation_file is not None and not validation_file.is_file()
        if self._request.test_file is not None and is_gone:  # the test file was read for it
            left_out = [name for name in more if name.startswith("valid_")]
            more = {name: more[name] for name in more if name not in left_out}
            if left_out:
                self.note(f"{validation_file} is gone: no {listed(left_out)}")
        if self._request.examples and examples_table is not None:
            results["examples"] = examples_table()
        return results | more


def same_shapes(ours: Sequence[keras.Variable], theirs: Sequence[keras.Variable]) -> bool:
    """Returns whether variables have the same shapes, in order."""
    return [variable.shape for variable in ours] == [variable.shape for variable in theirs]


def by_name_in_layers(weights: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns weights with those of each layer in the order of their names."""
    places: dict[str, int] = {}
    for weight in weights:
        places.setdefault(_layer_of(weight), len(places))
    return sorted(weights, key=lambda weight: (places[_layer_of(weight)], weight.name))


def _layer_of(weight: keras.Variable) -> str:
    return weight.path.rpartition("/")[0]
