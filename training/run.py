"""Opens, plans and finishes a run: the companion of a recipe's `main`, not a trainer.

A recipe opens a run with `start_run()`, and builds, compiles, fits and evaluates its model in plain
Keras. `run.plan()` returns batches, learning rate and steps; `run.prepare()` makes the compiled
model exact and returns the arguments of `fit()`.

The same `main` evaluates a finished run: `start_run()` then gives it the weights of that run
(`run.trained`), no steps, and no folder.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import shlex
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from callbacks import checkpoint as checkpoints
from callbacks.checkpoint import Checkpoint, Restore
from callbacks.errors import CannotSave, Stopped, saving
from callbacks.evaluate_every import EvaluateEvery
from callbacks.plateau import FACTOR, ReduceOnPlateau
from callbacks.profile import Profile
from callbacks.progress import EvaluationProgress, Progress
from callbacks.records import Records, used_learning_rate, with_perplexity
from callbacks.steps import StepCallback
from callbacks.stopping import StopAtStep, StopEvaluation, StopOnBadLoss
from callbacks.tensorboard import TensorBoard
from callbacks.terminal_log import RESULT, TerminalLog
from callbacks.throughput import Throughput
from data.baselines import standard_error
from data.errors import DataError, listed
from data.files import default_cache_dir, is_same
from distribution import keras_compat, parameter_server, step, strategies
from distribution.cluster import slurm_job
from distribution.errors import DistributionError
from machine import device, mfu, xla_cache
from training import artifacts, checks
from training.errors import OptionsError, RunError
from training.folder_check import DATE_TIME, make_new_folder
from training.loaded_run import LoadedRun, same_outputs
from training.log import log_to_file, run_logging
from training.options import (
    SharedOptions,
    TransformerOptions,
    check,
    command,
    common,
    flag,
    module_name,
    predict_command,
    profile_window,
    shown,
)
from training.plan import Plan, RecipePlan, make_plan, require_shared_equally
from training.report import model_card, verdict
from training.run_folder import RunFolder, git_state
from training.signals import StopRequested, signals

log = logging.getLogger("recipes")

RATES = ("examples_per_second", "tokens_per_second", "mfu")  # None where not measured
# What TensorFlow raises in a collective operation whose other workers are gone.
PEER_GONE = (tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.UnavailableError)


@contextlib.contextmanager
def start_run(recipe: str, options: SharedOptions) -> Iterator["Run"]:
    """Opens a run: options, devices, seed, folder, lock, signals; and closes it.

    Settings of the whole process (dtype policy, signal handlers, log handlers, repairs of Keras)
    change while the run is open and are restored when it is closed. Keras's automatic names are
    those of the first run of the process. Only `--deterministic` stays on
    until the process ends: TensorFlow cannot switch it off.

    Args:
        recipe: the recipe's name.
        options: the recipe's options.

    Yields:
        The run. If it is `finished`, `main` returns `run.results`.

    Raises:
        OptionsError: the options are wrong, or incompatible with the devices or the cluster.
        DistributionError: the strategy is not possible on these devices.
        RunError: the run's folder cannot be used, or `fit(class_weight=...)` does not suit these
            data and outputs.
        Stopped: a signal stopped the run, which is saved.
    """
    checks.refuse_other_options(recipe, options)
    check(options)
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras_compat.name_metrics_as_in_first_run())
        if options.trained is not None:  # recipes.evaluate
            strategy = tf.distribute.get_strategy()
            stack.enter_context(checks.precision(options.precision))
            stack.enter_context(keras_compat.patch_keras_for(strategy))
            yield Run(recipe, options, strategy, options.trained)
            return
        checks.refuse_pairs(options)
        stack.enter_context(run_logging(options.quiet))
        signals.install()
        stack.callback(signals.restore)
        stack.enter_context(checks.precision(options.precision))
        if options.deterministic:
            tf.config.experimental.enable_op_determinism()
        strategy = strategies.make_strategy(options.strategy, options.replicas)
        signals.install()  # MultiWorkerMirroredStrategy installs its own handler of SIGTERM
        stack.enter_context(keras_compat.patch_keras_for(strategy))
        keras.utils.set_random_seed(options.seed)
        run = Run(recipe, options, strategy)
        stack.callback(run.folder.close)
        stack.callback(run.progress.close)
        stack.callback(run.profile.close)
        stack.callback(xla_cache.store)
        try:
            run.open()
            yield run
            run.agreement.barrier()
        except (OptionsError, DataError, DistributionError, RunError, CannotSave, StopRequested):
            run.folder.discard()
            raise
        except ValueError as error:
            problem = checks.class_weight_problem(error)
            if problem is None:
                raise
            run.folder.discard()
            raise RunError(problem) from error
        except Stopped as stopped:
            run.checkpoint.save_stopped()
            run.agreement.barrier()  # the launcher kills what is left soon after the first exit
            again = command(recipe, run.options)
            raise Stopped(f"stopped and saved. Resume with:\n  {again}") from stopped
        except PEER_GONE as error:
            if not signals.asked:
                raise
            # A worker that gets the signal while another one already trains cannot save.
            run.folder.discard()
            raise Stopped(
                "stopped: another worker ended first; the same command resumes from the last "
                "checkpoint"
            ) from error


class Run:
    """Accompanies a recipe's `main`; created by `start_run()`.

    Attributes:
        strategy: for `with run.strategy.scope():`.
        trained: the finished run to evaluate; None in training.
        tensorboard: for callbacks of the recipe that write images or texts.
        cache_dir: the folder of downloads, vocabularies and tokens.
        results: the results of a finished run; empty before.
        metadata: the values of `run.finish(metadata=...)` when a trained run is evaluated; empty in
            training.
        is_chief: whether this process writes the shared files.
    """

    def __init__(
        self,
        recipe: str,
        options: SharedOptions,
        strategy: tf.distribute.Strategy,
        trained: LoadedRun | None = None,
    ):
        self.recipe = recipe
        self.strategy = strategy
        self.trained = trained
        self.strategy_name = strategies.name_of(strategy)
        self.workers = strategies.workers(strategy)
        self.is_chief = strategies.is_chief(strategy)
        self.cache_dir = options.cache_dir or default_cache_dir()
        self._begun = time.perf_counter()
        self._notes: list[str] = []
        self._resolved: dict = {}
        self._dataset_was_read = self._test_file_was_read = False
        self._facts: dict = {}  # the facts of plan()
        self._plan: Plan  # made by plan()
        self._recipe_plan: RecipePlan  # the same, as the recipe got it
        self._jit: bool | str = False  # likewise; "auto" leaves it to Keras
        self._was_prepared = False
        self._perplexity_of: str | None = None
        self.metadata: dict
        self.evaluation_callbacks: list[keras.callbacks.Callback]
        if trained is not None:
            self.options = options
            self.metadata = trained.metadata
            self.tensorboard = TensorBoard(None)
            self.evaluation_callbacks = [EvaluationProgress()]
            return
        self.metadata = {}
        self.agreement = strategies.Agreement(strategy)
        # Copied, so that re-running a notebook cell creates a new folder.
        if options.run_dir is None:
            run_dir, made = self._new_folder()
        else:
            run_dir, made = options.run_dir, []
        self.options = dataclasses.replace(options, run_dir=run_dir)
        self.folder = RunFolder(run_dir, recipe, self.options, self.is_chief, made)
        # Callbacks of fit(); prepare() creates the others.
        self.throughput = Throughput()
        self.tensorboard = TensorBoard(run_dir if self.is_chief else None)
        self.terminal = TerminalLog(self.throughput)
        self.records = Records(
            run_dir / "metrics.jsonl" if self.is_chief else None,
            [self.tensorboard, self.terminal],
            self.throughput,
            options.log_every,
            workers=self.workers,
        )
        self.progress = Progress(self.throughput, self.records)
        self.profile = Profile(
            run_dir, profile_window(options.profile) if self.is_chief else None, self.throughput
        )
        self.evaluation_callbacks = [self.progress, StopEvaluation(self._asked_to_stop)]
        self.checkpoint: Checkpoint

    def _new_folder(self) -> tuple[Path, list[Path]]:
        """Names a new folder, and creates it if there is one worker.

        Returns:
            The folder, and those of it and its parents that were created, innermost first.
        """
        if self.workers == 1:
            with contextlib.suppress(OSError):  # open() says why
                return make_new_folder(self.recipe)
        # The chief's clock names the folder, on every worker.
        # Its digits, not its seconds: workers may have other time zones.
        now = time.strftime(DATE_TIME).replace("-", "")
        now = str(self.agreement.broadcast_from_chief(int(now)))
        return Path("runs") / self.recipe / f"{now[:8]}-{now[8:]}", []

    def open(self) -> None:
        """Locks the folder, and finds an earlier part of the run in it."""
        self._require_one_command()
        self.folder.open()
        if not os.environ.get("KERAS_RECIPES_LAUNCHED"):  # the launcher writes one log per process
            worker = strategies.worker_index(self.strategy)
            log_to_file(self.folder.path / f"worker-{worker}.log")
        checkpoint = self.folder.checkpoint
        if not self.agreement.everyone_has(checkpoint.step + 1 if checkpoint else 0):
            raise RunError(
                f"--run-dir {self.folder.path}: the workers see different checkpoints there; it "
                "must be on a disk that all of them share"
            )
        # Checked before the data are loaded, which may take minutes.
        batch = self.folder.facts.get("global_batch_size") or self.options.global_batch_size
        if batch is not None and not self.finished:
            require_shared_equally(batch, strategies.replicas(self.strategy))
        if self.finished:
            log.info("the run in %s is finished: nothing to do", self.folder.path)

    def _require_one_command(self) -> None:
        """Refuses workers of another job or recipe, or with other options.

        Raises:
            RunError: the workers differ.
        """
        job, options = slurm_job(), common(self.options)
        if self._everyone_has([job, self.recipe, options]):
            return
        if not self._everyone_has([job, self.recipe, list(options)]):
            raise RunError(
                "the workers belong to different jobs or recipes; start all of them with one "
                f"command, and give each run its own ports. This one runs {self.recipe}"
                + (f" in SLURM's job and step {job}" if job else "")
            )
        different = [name for name in options if not self._everyone_has(options[name])]
        raise RunError(
            "the workers have different options; start all of them with the same ones. This one "
            "has " + ", ".join(f"{flag(name)} {options[name]}" for name in different)
        )

    def _everyone_has(self, value) -> bool:
        """Returns whether all workers have the same value, JSON."""
        text = json.dumps(value, sort_keys=True, default=str)
        return self.agreement.everyone_has(zlib.crc32(text.encode()))

    @property
    def results(self) -> dict:
        """Returns the results of a finished run; empty in one that is not finished."""
        return (self.folder.results or {}) if self.trained is None else {}

    @property
    def finished(self) -> bool:
        """Returns whether the run is finished: `main` then returns `run.results`."""
        return self.trained is None and self.folder.results is not None

    @property
    def dataset(self) -> str:
        """Returns `--dataset`; a resumed run keeps the dataset that `auto` resolved to."""
        self._dataset_was_read = True
        if self.trained is not None:
            return self.options.dataset
        return self.folder.facts.get("dataset", self.options.dataset)

    @property
    def has_own_dataset(self) -> bool:
        """Returns whether the model is or was trained on the dataset: not if others are tested."""
        return self.trained is None or is_same(self.dataset, self.fact("dataset"))

    @property
    def test_file(self) -> Path | None:
        """Returns the file of `recipes.evaluate --test-file`; None, also in training, for none.

        All of it is the test split, instead of that of the dataset.
        """
        self._test_file_was_read = True
        return getattr(self.options, "test_file", None)

    @property
    def resumes(self) -> bool:
        """Returns whether the weights come from a checkpoint or a finished run."""
        return self.trained is not None or self.folder.checkpoint is not None

    def fact(self, name: str):
        """Returns a resolved value of this run, for instance its preset; None in a new run.

        The preset of a finished run is its own model.
        """
        if self.trained is None:
            return self.folder.facts.get(name)
        if name == "preset" and self.trained.preset:
            return self.trained.preset
        return self.trained.resolved.get(name)

    def note(self, *lines: str | None) -> None:
        """Logs lines, for instance the reason of a fallback; `results.json` keeps them."""
        for line in filter(None, lines):
            if self.trained is None:
                log.warning("%s", line)
            self._notes.append(line)

    def plan(
        self,
        *,
        examples: int,
        base_learning_rate: float,
        batch_size_per_replica: int = 32,
        tokens_per_example: float | None = None,
        about: dict[str, str] | None = None,
        **facts,
    ) -> Plan:
        """Plans batches, learning rate and steps; prints the plan, and writes `options.json`.

        Args:
            examples: examples of the training split.
            base_learning_rate: peak rate for one replica, unless the options set one.
            batch_size_per_replica: examples per batch on one replica, unless the options set one.
            tokens_per_example: mean number of tokens per example without padding, or None.
            about: further lines of the printed plan, by title.
            **facts: values that must stay the same when the run resumes, JSON: `dataset`, a
                checksum of the data, `vocabulary_sha256`, `preset` ...

        Raises:
            OptionsError: the replicas cannot share the batch, or the data do not fill one step.
            RunError: the run in the folder was planned differently, or the workers differ.
        """
        # A recipe may have called keras.utils.clear_session() before, which resets it.
        checks.set_precision(self.options.precision)
        self._facts = facts
        if self.options.max_examples is not None and examples > self.options.max_examples:
            raise OptionsError(
                f"--max-examples {self.options.max_examples}: this recipe ignores it (its "
                f"training split has {examples:,} examples); a recipe applies it with "
                "data.arrays.draw_examples(splits, options.max_examples, options.seed)"
            )
        if self.trained is not None:
            return self._plan_evaluation(examples, base_learning_rate)
        info = self.folder.checkpoint
        plan = make_plan(
            self.options,
            replicas=strategies.replicas(self.strategy),
            planned_replicas=strategies.planned_replicas(self.strategy),
            examples=examples,
            batch_size_per_replica=batch_size_per_replica,
            base_learning_rate=base_learning_rate,
            steps_done=info.step if info is not None else 0,
            resumed=self.folder.facts,
        )
        if self.strategy_name != "parameter_server":
            checks.refuse_executions_across_epochs(self.options.steps_per_execution, plan)
        self._plan = plan
        self._jit = checks.jit_compile(self.options, self.strategy, plan.total_steps)
        watched = {}
        if self.options.reduce_on_plateau is not None:  # it decides the learning rate
            watched["plateau_metric"] = f"{self._plateau_metric()} ({self.options.keep_best_mode})"
        facts = facts | plan.fixed() | watched
        if not self._everyone_has(facts):
            raise RunError(
                "the workers have different data or presets; each needs the same files and "
                "versions. This one has "
                + ", ".join(f"{name} {value}" for name, value in facts.items())
            )
        self._resolved = facts
        if isinstance(self.options, TransformerOptions):
            self._resolved = facts | {"warmup_steps": plan.warmup_steps(self.options.warmup_steps)}
        # The data are loaded again when the run resumes, without what led to them.
        self._notes = list(dict.fromkeys([*self.folder.notes, *self._notes]))
        self.folder.keep_facts(
            facts,
            replicas_per_worker=plan.replicas // self.workers,
            notes=self._notes,
            described=self._resolved,
        )
        self.throughput.examples_per_step = plan.global_batch_size * plan.accumulate_steps
        self.throughput.tokens_per_example = tokens_per_example
        if self.is_chief:
            partial = checks.partial_best(self.options)
            self.note(device.unused_gpu(), self._missed_profile(plan), partial)
            self.note(*self._shortened(plan))
            self._print_plan(plan, about or {})
        # Whatever was drawn while the data were loaded, the model's first weights are the seed's.
        keras.utils.set_random_seed(self.options.seed)
        self._recipe_plan = RecipePlan(**vars(plan))
        return self._recipe_plan

    def _shortened(self, plan: Plan) -> list[str]:
        """Returns a note for each number of steps that the user asked for and the run has not."""
        notes, most = [], self.options.max_steps
        if most is not None and plan.total_steps < most:
            notes.append(
                f"--max-steps {most}: --epochs {self.options.epochs} ends the run at step "
                f"{plan.total_steps}; pass more --epochs for more steps"
            )
        if isinstance(self.options, TransformerOptions):
            asked, taken = self.options.warmup_steps, self._resolved["warmup_steps"]
            if asked not in (taken, type(self.options).warmup_steps):
                notes.append(f"--warmup-steps {asked}: shortened to {taken}, a tenth of all steps")
        return notes

    def _missed_profile(self, plan: Plan) -> str | None:
        """Returns a note if `--profile` begins after the run's last step."""
        window = profile_window(self.options.profile)
        if window is None or window[0] <= plan.total_steps:
            return None
        return (
            f"--profile {self.options.profile}: nothing is profiled, the run ends at step "
            f"{plan.total_steps}"
        )

    def _plan_evaluation(self, examples: int, base_learning_rate: float) -> Plan:
        """Plans the batches of an evaluation; notes if the run's data have changed."""
        assert self.trained is not None
        facts, resolved = self._facts, self.trained.resolved
        sums = [n for n in facts if n.endswith("_sha256") and facts[n] != resolved.get(n)]
        own_test = getattr(self.options, "test_file", None) is None
        if facts.get("dataset") == resolved.get("dataset") and sums and own_test:
            self.note(f"{self.options.dataset}: not the data that the run was trained on")
        batch = self.options.global_batch_size or 1
        self.options.global_batch_size = min(batch, examples)
        self._plan = make_plan(
            self.options,
            replicas=1,
            examples=examples,
            batch_size_per_replica=1,
            base_learning_rate=base_learning_rate,
        )
        return self._plan

    def _print_plan(self, plan: Plan, about: dict[str, str]) -> None:
        name = type(self.strategy).__name__ if plan.replicas > 1 else "one device"
        replicas = f"{plan.replicas} in {self.workers} worker(s): {name}"
        lines = {"run": str(self.folder.path), **about, "device": device.describe()}
        lines |= {"replicas": replicas} | plan.lines()
        if "warmup_steps" in self._resolved:
            lines["learning rate"] += f", after {self._resolved['warmup_steps']:,} steps of warm-up"
        for title, line in lines.items():
            log.info("%-14s %s", title, line)
        info = self.folder.checkpoint
        if info is not None:
            log.info("resumes at step %d from %s", info.step, info.folder)

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
        """Builds the model, makes its steps exact, and returns the arguments of `model.fit()`.

        Installs the step of `distribution.step`, creates the run's callbacks, restores the XLA
        programs of earlier runs, and tries to save the model. From now on a signal saves and stops
        the run.

        Args:
            model: compiled as on keras.io, under the strategy.
            train_data: global batches, starting at the run's next one.
            validation: batches of the validation split, or None.
            test: batches of the test split, for `--test-every`; or None.
            extra: callbacks of the recipe. The `get_state()` of a `StepCallback` is stored in each
                checkpoint and passed to `set_state()` when the run resumes. Callbacks with
                `on_record(record)` get every record of the run, on the chief.
            perplexity_of: name of a cross-entropy whose exponential is also reported, or None.
            operations_per_example: floating-point operations of training on one example, for
                `mfu`.
            saves: the model that `run.finish()` will save, if that is not `model`.

        Raises:
            RunError: the data are not a dataset, are empty or ragged, or begin differently each
                time; a split can be read only once; the model is not compiled, was created outside
                of the strategy's scope or under another precision, has a metric of several values,
                cannot be saved, or has changed since the checkpoint, as may its optimizer; a
                callback of Keras has state that no checkpoint keeps; the run was prepared before;
                or a finished run has no test data to be evaluated on.
            DistributionError: the model cannot be made exact under this strategy, or XLA cannot
                compile it.
            OptionsError: the model has no metric `--keep-best`, an option needs a split that is
                None, or the recipe ignores `--dataset` or `--base-learning-rate`.
        """
        if self._was_prepared:
            raise RunError(
                "run.prepare() was called a second time: a run is one training, and its second "
                "phase would replace the checkpoints of the first; make two runs, and start the "
                "second from the model of the first: --init-from or --preset, or "
                "keras.saving.load_model() of its model/model.keras"
            )
        self._was_prepared = True
        self._perplexity_of = perplexity_of
        self._refuse_ignored_dataset()
        if self.trained is not None:
            if getattr(self.options, "test_file", None) and not self._test_file_was_read:
                raise OptionsError(
                    "--test-file: this recipe ignores it; a recipe loads run.test_file as its test "
                    "split"
                )
            if test is None:
                raise RunError(
                    f"{self.trained.folder}: its recipe has no test data to evaluate on "
                    "(run.prepare(test=None))"
                )
            return self._take_weights(model, saves or model, test)
        checks.require_compiled(model, train_data)
        info, options = self.folder.checkpoint, self.options
        checks.require_splits(options, validation, test)
        checks.require_fewer(options, validation)
        checks.require_in_scope(model, self.strategy)
        first_batches = checks.first_batches_sha256(train_data)
        plateau = self._plateau(model)
        keras_compat.build(model, train_data)
        self._note_own_rate(model)
        plan = self._plan
        checks.require_precision(model, options.precision)
        checks.require_kept_variables(model)
        checks.build_own_step(model, train_data)
        checks.require_in_scope(model, self.strategy)  # metrics exist from now on
        fingerprint = checks.require_same(info, model, train_data, first_batches, plan)
        checks.require_single_numbers(model)
        checks.require_metric(model, options.keep_best, options.keep_best_mode)
        jit = self._jit if self._jit != "auto" else bool(model.jit_compile)
        if options.jit != "on" and keras_compat.not_for_xla(model):
            jit = False
        restored = False
        if jit:  # before the first program is compiled
            restored = xla_cache.restore(self.cache_dir, self.recipe, shown(options) | plan.fixed())
        installed = step.install(
            model,
            batches_per_update=plan.accumulate_steps,
            updates_per_execution=options.steps_per_execution,
            jit_compile=bool(jit),
        )
        if plan.replicas > 1:
            self.note(checks.random_layers_note(model))
        if self.strategy_name == "parameter_server":
            several = options.steps_per_execution > 1
            parameter_server.use_coordinator(
                model,
                installed,
                window=options.steps_per_execution if several else parameter_server.WINDOW,
                steps_per_epoch=plan.steps_per_epoch,
                total_steps=plan.total_steps,
                steps_done=plan.steps_done,
            )
        else:  # under parameter servers, other processes compute
            self.throughput.operations_per_example = operations_per_example
            self.throughput.devices = mfu.count_devices(plan.replicas, self.workers)
        if self.is_chief:
            trained = sum(math.prod(weight.shape) for weight in model.trainable_weights)
            part = "" if trained == model.count_params() else f", {trained:,} of them trained"
            log.info("%-14s %s parameters%s", "size", f"{model.count_params():,}", part)
            artifacts.require_saveable(saves or model, self.folder.path, type(options))
        self.records.perplexity_of = perplexity_of
        if jit:
            log.info("%-14s %s", "XLA", "from the cache" if restored else "compiles the first step")
        if info is None:
            self.tensorboard.show_options(shown(options, self._resolved) | plan.fixed())
            measured = step.flat_results(model.get_metrics_result())
            names = with_perplexity(dict.fromkeys(measured, 0.0), perplexity_of)
            self.tensorboard.show_charts(list(names))
        callbacks = self._callbacks(validation, test, extra, plateau, fingerprint)
        checks.watch_fit(model, tuple(callbacks), self.records)
        epochs_done = 0
        if info is not None:
            epochs_done = plan.epochs if info.state["finished"] else info.epochs_done
        signals.training = True  # from now on a signal saves and stops the run
        return {
            "validation_data": validation,
            "callbacks": callbacks,
            "initial_epoch": epochs_done,
            "epochs": plan.epochs,
            "steps_per_epoch": plan.steps_per_epoch,
            "verbose": 0,  # the callbacks print
            "shuffle": False,  # the pipeline shuffles
        }

    def _refuse_ignored_dataset(self) -> None:
        """Rejects a `--dataset` of the user that the recipe did not read to load its data."""
        dataset, default = self.options.dataset, type(self.options).dataset
        named = self._facts.get("dataset")  # a recipe may read its options instead of the run
        if self._dataset_was_read or dataset in ("auto", default, named):
            return
        raise OptionsError(
            f"--dataset {dataset}: this recipe ignores it; a recipe loads run.dataset, or passes "
            "dataset=options.dataset to run.plan()"
        )

    def _note_own_rate(self, model: keras.Model) -> None:
        """Reports the learning rate of an optimizer that did not get that of the plan.

        Raises:
            OptionsError: the user chose a `--base-learning-rate`, which the recipe ignores.
        """
        if self._recipe_plan.rate_was_read or keras_compat.own_steps(model):
            return
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if isinstance(optimizer, keras.optimizers.MultiOptimizer):
            return
        rate = keras_compat.learning_rate_of(optimizer)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return  # which is no single number, and may begin with 0
        planned, own = self._plan.learning_rate, used_learning_rate(optimizer)
        if math.isclose(own, planned, rel_tol=1e-6):
            return
        asked = self.options.base_learning_rate
        if asked == type(self.options).base_learning_rate:  # the default
            asked = None
        if asked is not None and not math.isclose(own, asked, rel_tol=1e-6):
            raise OptionsError(
                f"--base-learning-rate {asked:g}: this recipe ignores it (its optimizer begins "
                f"with {own:g}); a recipe passes plan.learning_rate to its optimizer or schedule"
            )
        self.note(
            f"learning rate: {own:g}, with which the recipe's optimizer begins, not the planned "
            f"{planned:g}; --lr-scaling has no effect"
        )
        self._plan = dataclasses.replace(self._plan, learning_rate=np.float64(own))

    def _take_weights(self, model, built, test) -> dict:
        """Sets the recipe's model to the weights of the finished run; `fit()` then runs no epoch.

        Raises:
            RunError: the recipe builds another model than the finished run's.
        """
        assert self.trained is not None
        keras_compat.build(model, test)
        step.install(model)
        stored = self.trained.load_model()
        weights = stored.get_weights()
        same = [w.shape for w in built.weights] == [w.shape for w in weights]
        if same:
            built.set_weights(weights)
            # One example: of a whole batch, all logits of a language model may exceed the memory.
            inputs = keras.tree.map_structure(lambda rows: rows[:1], next(iter(test))[0])
            if built is not model:
                inputs = checks.suitable_inputs(built, inputs)
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
        return {"epochs": 0, "steps_per_epoch": 1, "verbose": 0, "shuffle": False}

    def _plateau(self, model: keras.Model) -> dict[str, StepCallback]:
        """Returns the callback of `--reduce-on-plateau` by its name in checkpoints, or {}."""
        options = self.options
        if options.reduce_on_plateau is None:
            return {}
        checks.require_one_rate(model)
        factor = options.plateau_factor or FACTOR
        metric, mode = self._plateau_metric(), options.keep_best_mode
        arguments = (options.reduce_on_plateau, metric, factor, mode)
        return {"plateau": ReduceOnPlateau(model, *arguments)}

    def _plateau_metric(self) -> str:
        return self.options.keep_best or "val_loss"

    def _callbacks(
        self, validation, test, extra, plateau, fingerprint
    ) -> list[keras.callbacks.Callback]:
        """Returns the callbacks of `fit()`, in the order that makes a resumed run identical."""
        options = self.options
        info = self.folder.checkpoint
        during = self.evaluation_callbacks
        validate = EvaluateEvery(
            self.records, validation, "validation", options.validate_every, during
        )
        test_too = EvaluateEvery(self.records, test, "test", options.test_every, during)
        ours = {"records": self.records, "tensorboard": self.tensorboard}
        ours |= {"validate_every": validate, "test_every": test_too} | plateau
        if self.is_chief:
            self.records.listeners += [each for each in extra if hasattr(each, "on_record")]
        stateful = checks.stateful(ours, extra, info)
        checkpoint_folder = self.folder.path / "checkpoints"
        bad_loss = StopOnBadLoss(checkpoint_folder)
        self.checkpoint = Checkpoint(
            checkpoint_folder,
            every=options.checkpoint_every,
            keep=options.keep_checkpoints,
            is_chief=self.is_chief,
            asked_to_stop=self._asked_to_stop,
            check_loss=bad_loss.check,
            stateful_callbacks=stateful,
            best=options.keep_best,
            best_mode=options.keep_best_mode,
            patience=options.early_stopping,
            fingerprint=fingerprint,
            restored=info,
        )
        validate.then = self.checkpoint.evaluated
        plan = self._plan
        callbacks = [
            Restore(info, stateful),
            StopAtStep(),
            StopEvaluation(self._asked_to_stop),
            bad_loss,
            self.throughput,  # before callbacks that evaluate, write or save
            *extra,
            self.records,
            self.tensorboard,
            self.terminal,
            self.progress,
            validate,
            test_too,
            self.profile,
            *plateau.values(),
            self.checkpoint,  # saves what the others have logged
        ]
        read_every = (
            *(options.log_every, options.checkpoint_every),
            *(options.validate_every, options.test_every),
        )
        for callback in callbacks:
            if isinstance(callback, StepCallback):
                callback.count_steps(
                    plan.steps_per_epoch, plan.total_steps, plan.steps_done, read_every
                )
        return callbacks

    @property
    def evaluate_options(self) -> dict:
        """Returns the arguments of `model.evaluate()`: they show progress and stop on a signal."""
        return {"verbose": 0, "callbacks": self.evaluation_callbacks}

    def _asked_to_stop(self) -> bool:
        return self.agreement.any_worker(signals.asked)

    def finish(
        self,
        model: keras.Model,
        *,
        test: dict[str, float],
        baseline: dict[str, float],
        metadata: dict | None = None,
        preprocessor=None,
        example_input: str | None = None,
        examples_table: Callable[[], list[list]] | None = None,
        test_examples: int | None = None,
        **more,
    ) -> dict:
        """Saves the model and `results.json`, logs where they are; returns the results.

        Args:
            model: the trained model.
            test: metrics of the test split.
            baseline: metrics of simpler models on the test split.
            metadata: values that the model's inputs and outputs need, JSON, for instance the names
                of the classes; numbers and arrays of NumPy become numbers and lists. Stored in
                `model/`, covered by its checksums.
            preprocessor: preprocessor of a KerasNLP task, which is then saved as a preset; or None.
            example_input: an input for the `predict` command that is printed, if the one of the
                recipe's options does not suit these data.
            examples_table: returns the rows of `recipes.evaluate --examples`, a header first; None
                where the recipe has none.
            test_examples: examples that the test's `accuracy` is a share of; its standard error is
                then reported, and the verdict calls smaller gains narrow.
            **more: further values of `results.json`.

        Raises:
            RunError: the model was not trained.
            BadLoss: a test metric is not a number; nothing is written.
            CannotSave: the folder is gone or the disk is full.
        """
        if test_examples is not None and "accuracy" in test:
            more["test_standard_error"] = standard_error(test["accuracy"], test_examples)
        if self.trained is not None:
            if getattr(self.options, "wants_examples", False):
                if examples_table is None:
                    raise OptionsError(
                        f"--examples: {module_name(type(self.options))} has none "
                        "(run.finish(examples_table=...))"
                    )
                more["examples"] = examples_table()
            return {
                "run_dir": str(self.trained.folder),
                "recipe": self.trained.results["recipe"],
                "steps": self.trained.results["steps"],
                "dataset": self._facts.get("dataset"),
                "test": with_perplexity(test, self._perplexity_of),
                "baseline": baseline,
                **more,
                "notes": self._notes,
            }
        if self.checkpoint.model is None:
            raise RunError(
                "run.finish() was called without a training: call model.fit(train_data, "
                "**fit_options), with all that run.prepare() returned, before"
            )
        steps = self.checkpoint.step
        info = self.folder.checkpoint
        checks.require_finite(test, steps, self._plan.learning_rate)
        test = with_perplexity(test, self.records.perplexity_of)
        self.records.record_evaluation("test", self.checkpoint.weights_step or steps, test)
        if self.is_chief:
            line = "  ".join(f"{name} {value:.4f}" for name, value in baseline.items())
            if baseline:
                log.log(RESULT, "%-14s %s", "baseline", line)
            if "test_standard_error" in more:
                shown_error = f"± {more['test_standard_error']:.4f} ({test_examples:,} examples)"
                log.log(RESULT, "%-14s %s", "standard error", f"accuracy {shown_error}")
            for line in verdict(test, baseline, self.records.history, steps, test_examples):
                log.log(RESULT, "%-14s %s", "verdict", line)
        # The seconds are those of this process, from the start of the run to now.
        results = {
            "recipe": self.recipe,
            "module": module_name(type(self.options)),
            **{n: self.fact(n) for n in ("dataset", "preset", "vocabulary_sha256")},
            "strategy": self.strategy_name,
            "replicas": self._plan.replicas,
            "workers": self.workers,
            "workers_by_step": self.records.workers_by_step,
            "global_batch_size": self._plan.global_batch_size,
            "learning_rate": self._plan.learning_rate,
            "precision": self.options.precision,
            "device": device.describe(),
            "seed": self.options.seed,
            "steps": steps,  # fewer than planned after --early-stopping
            "epochs": self.checkpoint.epochs_done,
            # --early-stopping ends on the best weights.
            "weights_of_step": self.checkpoint.weights_step or steps,
            "history": self.records.history,
            "test": test,
            "baseline": baseline,
            **more,
            "notes": self._notes + self.checkpoint.notes,
            **(dict.fromkeys(RATES) | self.throughput.total()),
            "peak_operations_per_second": self.throughput.peak_operations_per_second,
            "seconds": time.perf_counter() - self._begun,
            "time_to_first_step": self.throughput.time_to_first_step,
            "resumed_from_step": info.step if info is not None else None,
            "weights_sha256": artifacts.weights_sha256(model),
            "versions": artifacts.versions(),
            "git": git_state(),
        }
        names = ("recipe", "dataset", "preset", "strategy", "replicas", "workers")
        named = self._plan.fixed() | {name: results[name] for name in names}
        warmup = {
            name: self._resolved[name] for name in ("warmup_steps",) if name in self._resolved
        }
        self.tensorboard.show_hparams(steps, shown(self.options) | warmup | named)
        known = {name: value for name, value in named.items() if value is not None}
        described = shown(self.options, self._resolved | known) | self._plan.fixed()
        self.tensorboard.flush()
        if self.is_chief:
            path = self.folder.path
            last = checkpoints.newest_path(self.checkpoint.folder)
            with saving(path / "model", f"; the last checkpoint is {last}"):
                artifacts.save_model(
                    model,
                    path / "model",
                    metadata=metadata or {},
                    preprocessor=preprocessor,
                    card=model_card(
                        model, results, self.options, preprocessor is not None, described
                    ),
                )
            self.folder.write_json("results.json", results)
            log.log(RESULT, "model    %s", path / "model")
            log.log(RESULT, "logs     tensorboard --logdir %s", shlex.quote(str(path)))
            log.log(RESULT, "results  %s", path / "results.json")
            query = predict_command(self.options, example_input)
            if query is not None:
                log.log(RESULT, "predict  %s", query)
        signals.finished, signals.training = True, False
        return results
