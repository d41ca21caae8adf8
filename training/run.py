"""Opens, plans and finishes a run: the companion of a recipe's `main`, not a trainer.

A recipe opens a run with `start_run()`, and builds, compiles, fits and evaluates its model itself.
`run.plan()` returns what `compile()`, `fit()` and `evaluate()` need of the run.
"""

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import keras
import tensorflow as tf

from callbacks import checkpoint as checkpoints
from callbacks.checkpoint import Checkpoint, Restore
from callbacks.errors import CannotSave, Stopped, saving
from callbacks.records import EvaluateEvery, Records, with_perplexity
from callbacks.steps import StepCallback
from callbacks.stopping import StopAtStep, StopOnBadLoss
from callbacks.tensorboard import TensorBoard
from callbacks.terminal_log import RESULT, TerminalLog
from callbacks.throughput import Throughput
from data.errors import DataError
from data.files import default_cache_dir
from distribution import keras_compat, parameter_server, strategies
from distribution.errors import DistributionError
from distribution.global_batch import compute_per_replica
from machine import mfu, xla_cache
from training import artifacts, checks, loaded_run
from training.errors import OptionsError, RunError
from training.log import LogFile, run_logging
from training.options import (
    SharedOptions,
    check,
    command,
    module_name,
    predict_command,
    shown,
)
from training.plan import Plan, make_plan
from training.report import model_card, verdict
from training.run_folder import RunFolder, git_state
from training.signals import StopRequested, signals

log = logging.getLogger("recipes")


@contextlib.contextmanager
def start_run(recipe: str, options: SharedOptions) -> Iterator["Run"]:
    """Opens a run: options, devices, seed, folder, lock, signals; and closes it again.

    Everything that is changed for the whole process (dtype policy, signal handlers, log handlers,
    repairs of Keras) is in force until the run is closed, and then put back.

    Args:
        recipe: the recipe's name.
        options: the recipe's options.

    Yields:
        The run. If it is `finished`, there is nothing to do.

    Raises:
        OptionsError: the options are wrong, or do not go with the devices or the cluster.
        DistributionError: likewise.
        RunError: the run's folder cannot be used.
        Stopped: a signal stopped the run; it is saved.
    """
    checks.refuse_other_options(recipe, options)
    check(options)
    trained = loaded_run.requested()
    if trained is not None:
        with checks.precision(options.precision):
            yield loaded_run.EvaluatedRun(trained, options)  # type: ignore[misc]
        return
    checks.refuse_pairs(options)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_logging(options.quiet))
        signals.install()
        stack.callback(signals.restore)
        stack.enter_context(checks.precision(options.precision))
        if options.deterministic:
            tf.config.experimental.enable_op_determinism()
        strategy = strategies.make_strategy(options.strategy, options.replicas)
        signals.install()  # MultiWorkerMirroredStrategy puts a handler of its own for SIGTERM
        stack.enter_context(keras_compat.patch_keras_for(strategy))
        keras.utils.set_random_seed(options.seed)
        run = Run(recipe, options, strategy)
        stack.callback(run.folder.close)
        stack.callback(xla_cache.keep)
        try:
            run.open()
            yield run
            run.agreement.barrier()
        except (OptionsError, DataError, DistributionError, RunError, CannotSave, StopRequested):
            run.folder.discard()
            raise
        except Stopped as stopped:
            run.checkpoint.save_stopped()
            again = command(recipe, run.options)
            raise Stopped(f"stopped and saved. Resume with:\n  {again}") from stopped


class Run:
    """Accompanies a recipe's `main`; `start_run()` makes it.

    Attributes:
        strategy: for `with run.strategy.scope():`.
        tensorboard: where a callback of the recipe's own writes images or texts.
        cache_dir: the folder of downloads, vocabularies and tokens.
        results: what a finished run left; empty before.
        metadata: what the recipe stored beside the model, where a trained run is evaluated; empty
            where one is trained.
        is_chief: whether this process writes what is shared.
    """

    def __init__(
        self,
        recipe: str,
        options: SharedOptions,
        strategy: tf.distribute.Strategy,
    ):
        self.recipe = recipe
        self.strategy = strategy
        self.strategy_name = strategies.name_of(strategy)
        self.workers = strategies.workers(strategy)
        self.is_chief = strategies.is_chief(strategy)
        self.agreement = strategies.Agreement(strategy)
        # A copy: the options of a notebook's cell shall open a new folder each time.
        run_dir = options.run_dir or self._new_folder()
        self.options = dataclasses.replace(options, run_dir=run_dir)
        self.folder = RunFolder(run_dir, recipe, self.options, self.is_chief)
        self.cache_dir = options.cache_dir or default_cache_dir()
        self.metadata: dict = {}
        self._begun = time.perf_counter()
        self._notes: list[str] = []
        self._plan: TrainingPlan  # made by plan()
        # What fit() gets; the others are made by TrainingPlan.fit_options().
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
        self.checkpoint: Checkpoint

    def _new_folder(self) -> Path:
        # The chief's clock names the folder, on every worker.
        now = time.localtime(self.agreement.broadcast_from_chief(int(time.time())))
        folder = Path("runs") / self.recipe / time.strftime("%Y%m%d-%H%M%S", now)
        if self.workers == 1 and folder.exists():  # another run began in the same second
            time.sleep(1)
            return self._new_folder()
        return folder

    def open(self) -> None:
        """Locks the folder, and finds the run in it."""
        self.folder.open()
        if not os.environ.get("KERAS_RECIPES_LAUNCHED"):  # the launcher keeps a log a process
            worker = strategies.worker_index(self.strategy)
            log.addHandler(LogFile(self.folder.path / f"worker-{worker}.log"))
        checkpoint = self.folder.checkpoint
        if not self.agreement.everyone_has(checkpoint.step + 1 if checkpoint else 0):
            raise RunError(
                f"--run-dir {self.folder.path}: the workers see different checkpoints there; it "
                "must be on a disk that all of them share"
            )
        if self.finished:
            log.info("the run in %s is finished: nothing to do", self.folder.path)

    @property
    def results(self) -> dict:
        """Returns the results of a finished run; empty in one that is not finished."""
        return self.folder.results or {}

    @property
    def finished(self) -> bool:
        """Tells whether there is nothing to do: `main` then returns `run.results`."""
        return self.folder.results is not None

    @property
    def dataset(self) -> str:
        """Returns `--dataset`; a run that resumes keeps the one that `auto` stood for."""
        return self.folder.facts.get("dataset", self.options.dataset)

    @property
    def resumes(self) -> bool:
        """Tells whether the weights come from a checkpoint of this run."""
        return self.folder.checkpoint is not None

    def fact(self, name: str):
        """Returns what this run was planned with, for instance its preset; None in a new run."""
        return self.folder.facts.get(name)

    def note(self, *lines: str | None) -> None:
        """Logs what is used instead of the first choice, and why; kept in `results.json` too."""
        for line in filter(None, lines):
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
    ) -> "TrainingPlan":
        """Plans batches, learning rate and steps; prints the plan, and writes `options.json`.

        Args:
            examples: examples of the training split.
            base_learning_rate: peak rate for one replica, where the options name none.
            batch_size_per_replica: examples a replica, where the options name no batch.
            tokens_per_example: tokens that carry text in an average example, or None.
            about: lines for the plan that is printed, by title.
            **facts: what must be the same when the run resumes, as JSON values: `dataset`, a
                checksum of the data, `vocabulary_sha256`, `preset` ...

        Raises:
            OptionsError: the replicas cannot share the batch, or the data have no full step.
            RunError: the run in the folder was planned differently.
        """
        info = self.folder.checkpoint
        made = make_plan(
            self.options,
            replicas=strategies.replicas(self.strategy),
            planned_replicas=strategies.planned_replicas(self.strategy),
            examples=examples,
            batch_size_per_replica=batch_size_per_replica,
            base_learning_rate=base_learning_rate,
            steps_done=info.step if info is not None else 0,
            resumed=self.folder.facts,
        )
        steps = self.options.steps_per_execution
        if self.strategy_name != "parameter_server":
            checks.refuse_executions_across_epochs(steps, made)
        elif steps == 1:
            steps = parameter_server.WINDOW
        plan = TrainingPlan(
            **vars(made),
            run=self,
            steps_per_execution=steps,
            jit=checks.jit_compile(self.options, self.strategy, made.total_steps),
        )
        self._plan = plan
        self.folder.keep_facts(
            facts | plan.fixed(), replicas_per_worker=plan.replicas // self.workers
        )
        self.throughput.examples_per_step = plan.global_batch_size * plan.accumulate_steps
        self.throughput.tokens_per_example = tokens_per_example
        if self.is_chief:
            self._print_plan(plan, about or {})
        return plan

    def _print_plan(self, plan: Plan, about: dict[str, str]) -> None:
        name = type(self.strategy).__name__ if plan.replicas > 1 else "one device"
        replicas = f"{plan.replicas} in {self.workers} worker(s): {name}"
        lines = {"run": str(self.folder.path), **about, "replicas": replicas} | plan.lines()
        for title, line in lines.items():
            log.info("%-14s %s", title, line)
        info = self.folder.checkpoint
        if info is not None:
            log.info("resumes at step %d from %s", info.step, info.folder)

    def finish(
        self,
        model: keras.Model,
        *,
        test: dict[str, float],
        baseline: dict[str, float],
        metadata: dict | None = None,
        preprocessor=None,
        **more,
    ) -> dict:
        """Saves the model and `results.json`, logs where they are; returns the results.

        Args:
            model: the trained model.
            test: metrics of the test split.
            baseline: what a simpler model reaches there.
            metadata: what is needed to read the model's inputs and outputs, as JSON values, for
                instance the names of the classes; stored in `model/`, under its checksums.
            preprocessor: of a KerasNLP task, which then becomes a preset; or None.
            **more: further values of `results.json`.

        Raises:
            BadLoss: a test metric is not a number; nothing is written.
            CannotSave: the folder is gone or the disk is full.
        """
        steps = self.checkpoint.step
        info = self.folder.checkpoint
        checks.require_finite(test, steps, self._plan.learning_rate)
        test = with_perplexity(test, self.records.perplexity_of)
        self.records.record_evaluation("test", steps, test)
        if self.is_chief:
            simpler = "  ".join(f"{name} {value:.4f}" for name, value in baseline.items())
            if baseline:
                log.log(RESULT, "%-14s %s", "baseline", simpler)
            for line in verdict(test, baseline, self.records.history):
                log.log(RESULT, "%-14s %s", "verdict", line)
        # The seconds are those of this process, from the beginning of the run to now.
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
            "seed": self.options.seed,
            "steps": steps,  # fewer than planned after --early-stopping
            "epochs": self.checkpoint.epochs_done,
            "history": self.records.history,
            "test": test,
            "baseline": baseline,
            **more,
            "notes": self._notes,
            **({"tokens_per_second": None, "mfu": None} | self.throughput.total()),
            "seconds": time.perf_counter() - self._begun,
            "time_to_first_step": self.throughput.time_to_first_step,
            "resumed_from_step": info.step if info is not None else None,
            "weights_sha256": artifacts.weights_sha256(model),
            "versions": artifacts.versions(),
            "git": git_state(),
        }
        names = ("recipe", "dataset", "preset", "strategy", "replicas", "workers")
        came_to = self._plan.fixed() | {name: results[name] for name in names}
        self.tensorboard.show_hparams(steps, shown(self.options) | came_to)
        self.tensorboard.flush()
        if self.is_chief:
            path = self.folder.path
            last = checkpoints.newest_name(self.checkpoint.folder)
            with saving(path / "model", f"; the last checkpoint is {last}"):
                artifacts.save_model(
                    model,
                    path / "model",
                    metadata=metadata or {},
                    preprocessor=preprocessor,
                    card=model_card(model, results, self.options, preprocessor is not None),
                )
            self.folder.write_json("results.json", results)
            log.log(RESULT, "model    %s", path / "model")
            log.log(RESULT, "logs     tensorboard --logdir %s", path)
            log.log(RESULT, "results  %s", path / "results.json")
            query = predict_command(self.options)
            if query is not None:
                log.log(RESULT, "predict  %s", query)
        signals.training = False
        return results


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan(Plan):
    """Carries a run's plan, and what `compile()`, `fit()` and `evaluate()` take for it.

    Attributes:
        run: the run that is planned.
        steps_per_execution: steps of one call of the training function.
        jit: whether XLA compiles the step; "auto" leaves it to Keras.
    """

    run: Run = dataclasses.field(repr=False, compare=False)
    steps_per_execution: int
    jit: bool | str

    @property
    def compile_options(self) -> dict:
        """For `model.compile()`: XLA, and the steps of one execution."""
        jit = False if self._in_parts and self.jit is True else self.jit
        return {"jit_compile": jit, "steps_per_execution": self.steps_per_execution}

    @property
    def _in_parts(self) -> bool:
        """Returns whether `compute_per_replica` replaces Keras's training function."""
        if self.run.strategy_name == "parameter_server":
            return False
        deterministic = self.run.options.deterministic  # Keras compiles nothing then
        jit = self.jit is True and (self.replicas > 1 or deterministic)
        several = self.replicas > 1 and self.steps_per_execution > 1
        return jit or several or self.accumulate_steps > 1

    def fit_options(
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
        """Builds the model, refuses what would go wrong, and returns what `model.fit()` takes.

        With `--accumulate-steps`, on several replicas where XLA compiles or an execution has
        several steps, with XLA beside `--deterministic`, and with parameter servers the model gets
        a training function.

        Args:
            model: compiled, under the strategy.
            train_data: global batches, from the run's next one on.
            validation: batches of the validation split.
            test: batches of the test split, for `--test-every`.
            extra: callbacks of the recipe's own. What a `StepCallback` returns from `get_state()`
                is kept in each checkpoint and handed back when the run resumes.
            perplexity_of: name of a cross-entropy whose exponential is shown beside it, or None.
            operations_per_example: floating-point operations that training on one example needs,
                for `mfu`.
            saves: the model that `run.finish()` will save, where that is not `model`.

        Raises:
            RunError: the model would train with wrong numbers on several replicas, the data would
                differ when the run resumes, the model cannot be saved or has changed since the
                checkpoint, or a callback holds state that no checkpoint keeps.
            OptionsError: the model has no metric `--keep-best`.
        """
        run = self.run
        info = run.folder.checkpoint
        checks.refuse_unwrapped(model, self.replicas)
        first_batch = checks.first_batch_sha256(train_data)
        keras_compat.build(model, train_data)
        fingerprint = checks.require_same(info, model, first_batch, self.global_batch_size)
        checks.require_metric(model, run.options.keep_best, run.options.keep_best_mode)
        if self._in_parts:
            with run.strategy.scope():
                compute_per_replica(
                    model,
                    batches_per_step=self.accumulate_steps,
                    steps_per_execution=self.steps_per_execution,
                    jit_compile=self.jit is True
                    and (run.options.jit == "on" or not keras_compat.not_for_xla(model)),
                )
        parameter_server.use_coordinator(
            model,
            run.strategy,
            window=self.steps_per_execution,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.total_steps,
            steps_done=self.steps_done,
        )
        if run.strategy_name != "parameter_server":  # others do the work there
            run.throughput.operations_per_example = operations_per_example
            run.throughput.devices = mfu.count_devices(self.replicas, run.workers)
        if run.is_chief:
            log.info("%-14s %s parameters", "size", f"{model.count_params():,}")
            artifacts.require_saveable(saves or model, run.folder.path, type(run.options))
        run.records.perplexity_of = perplexity_of
        if self.jit is True or model.jit_compile:
            known = xla_cache.take(run.cache_dir, run.recipe, shown(run.options) | self.fixed())
            log.info("%-14s %s", "XLA", "from the cache" if known else "compiles the first step")
        callbacks = self._callbacks(validation, test, extra, fingerprint)
        epochs_done = 0
        if info is not None:
            epochs_done = info.epochs_done
            if info.state["finished"] and run.options.resume != "extend":
                epochs_done = self.epochs
        signals.training = True  # from here on a signal is noted, and the run saved
        return {
            "validation_data": validation,
            "callbacks": callbacks,
            "initial_epoch": epochs_done,
            "epochs": self.epochs,
            "steps_per_epoch": self.steps_per_epoch,
            "verbose": 0,  # the callbacks print
            "shuffle": False,  # the data are shuffled already
        }

    def _callbacks(self, validation, test, extra, fingerprint) -> list[keras.callbacks.Callback]:
        """Returns what `fit()` gets, in the order that makes a resumed run identical."""
        run = self.run
        options = run.options
        info = run.folder.checkpoint
        ours = {"records": run.records, "tensorboard": run.tensorboard}
        stateful = checks.stateful(ours, extra, info)
        run.checkpoint = Checkpoint(
            run.folder.path / "checkpoints",
            every=options.checkpoint_every,
            keep=options.keep_checkpoints,
            is_chief=run.is_chief,
            asked_to_stop=lambda: run.agreement.any_worker(signals.asked),
            stateful_callbacks=stateful,
            best=options.keep_best,
            best_mode=options.keep_best_mode,
            patience=options.early_stopping,
            fingerprint=fingerprint,
            restored=info,
        )
        callbacks = [
            Restore(info, stateful),
            StopAtStep(),
            StopOnBadLoss(run.checkpoint.folder),
            run.throughput,  # before whatever evaluates, writes or saves
            *extra,
            run.records,
            run.tensorboard,
            run.terminal,
            EvaluateEvery(run.records, validation, "validation", options.validate_every),
            EvaluateEvery(run.records, test, "test", options.test_every),
            run.checkpoint,  # saves what the others have logged
        ]
        for callback in callbacks:
            if isinstance(callback, StepCallback):
                callback.count_steps(self.steps_per_epoch, self.total_steps, self.steps_done)
        return callbacks

    @property
    def evaluate_options(self) -> dict:
        """Returns for `model.evaluate()` what ends it when the run is asked to stop."""
        return {"verbose": 0, "callbacks": [self.run.checkpoint]}
