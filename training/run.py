"""Opens, plans and finishes a run: the companion of a recipe's `main`, not a trainer.

A recipe opens a run with `start_run()`, and builds, compiles, fits and evaluates its model in plain
Keras. `run.plan()` returns batches, learning rate and steps; `run.prepare()` makes the compiled
model exact and returns the arguments of `fit()`.

The same `main` evaluates a finished run: `start_run()` then gives it an `EvaluatedRun`, with the
weights of that run (`run.trained`), no steps, and no folder.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import shlex
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from callbacks import averages
from callbacks import checkpoint as checkpoints
from callbacks.checkpoint import Checkpoint, Restore
from callbacks.errors import CannotSave, Stopped, saving
from callbacks.evaluate_every import EvaluateEvery
from callbacks.plateau import FACTOR, ReduceOnPlateau
from callbacks.profile import Profile
from callbacks.progress import Progress
from callbacks.records import Records, used_learning_rate, with_perplexity
from callbacks.steps import StepCallback
from callbacks.stopping import StopAtStep, StopEvaluation, StopOnBadLoss
from callbacks.tensorboard import TensorBoard
from callbacks.terminal_log import RESULT, TerminalLog
from callbacks.throughput import Throughput
from data.errors import DataError
from data.files import default_cache_dir
from distribution import kinds, parameter_server, step, strategies
from distribution.cluster import LAUNCHED, slurm_job
from distribution.errors import DistributionError
from distribution.keras_compat import fitting, inspection, patches
from machine import device, mfu, xla_cache
from training import (
    artifacts,
    data_checks,
    fit_checks,
    metric_checks,
    model_checks,
    numerics,
    option_checks,
    resume_checks,
)
from training.errors import OptionsError, RunError, WorkerLost
from training.evaluated_run import EvaluatedRun
from training.folder_check import DATE_TIME, make_new_folder
from training.log import log_to_file, run_logging
from training.options import (
    HeldOutOptions,
    SharedOptions,
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
from training.report import error_of_accuracy, model_card, verdict
from training.run_folder import RunFolder, git_state
from training.signals import StopRequested, signals

log = logging.getLogger("recipes")

RATES = ("examples_per_second", "tokens_per_second", "mfu")  # None where not measured
# What TensorFlow raises in a collective operation whose other workers are gone, and its message.
PEER_GONE = (tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.UnavailableError)
COLLECTIVE = "Collective ops is aborted"


@contextlib.contextmanager
def start_run(recipe: str, options: SharedOptions) -> "Iterator[Run | EvaluatedRun]":
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
        WorkerLost: another worker has ended.
    """
    option_checks.refuse_other_options(recipe, options)
    check(options)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patches.name_metrics_as_in_first_run())
        if options.evaluation is not None:
            strategy = tf.distribute.get_strategy()
            stack.enter_context(numerics.precision(options.precision))
            stack.enter_context(patches.patch_keras_for(strategy))
            yield EvaluatedRun(recipe, options, strategy, options.evaluation)
            return
        option_checks.refuse_pairs(options)
        stack.enter_context(run_logging(options.quiet))
        signals.install()
        stack.callback(signals.restore)
        stack.enter_context(numerics.precision(options.precision))
        if options.deterministic:
            tf.config.experimental.enable_op_determinism()
        strategy = strategies.make_strategy(options.strategy, options.replicas)
        signals.install()  # MultiWorkerMirroredStrategy installs its own handler of SIGTERM
        stack.enter_context(patches.patch_keras_for(strategy))
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
            problem = fit_checks.class_weight_problem(error)
            if problem is None:
                raise
            run.folder.discard()
            raise RunError(problem) from error
        except OSError as error:
            if error.filename is not None:  # a file that cannot be used, by the name it was given
                run.folder.discard()
            raise
        except Stopped as stopped:
            run.checkpoint.save_stopped()
            run.agreement.barrier()  # the launcher kills what is left soon after the first exit
            if os.environ.get(LAUNCHED):  # the launcher prints the command that resumes all workers
                raise Stopped("stopped and saved") from stopped
            again = command(recipe, run.options)
            raise Stopped(f"stopped and saved. Resume with:\n  {again}") from stopped
        except PEER_GONE as error:
            resumes = "the same command resumes from the last checkpoint"
            if signals.asked:
                # A worker that gets the signal while another one already trains cannot save.
                run.folder.discard()
                raise Stopped(f"stopped: another worker ended first; {resumes}") from error
            is_gone = isinstance(error, tf.errors.CancelledError) or COLLECTIVE in str(error)
            if run.agreement.workers == 1 or not is_gone:  # a remote file may be unavailable, too
                raise
            # They hold a pool of TensorFlow's, which complains if it is still there at the exit.
            traceback.clear_frames(error.__traceback__)
            raise WorkerLost(f"another worker ended first; its log says why; {resumes}") from error


class Run:
    """Accompanies a recipe's `main`; created by `start_run()`.

    Attributes:
        strategy: for `with run.strategy.scope():`.
        trained: None; of an `EvaluatedRun` the finished run.
        tensorboard: for callbacks of the recipe that write images or texts.
        cache_dir: the folder of downloads, vocabularies and tokens.
        results: the results of a finished run; empty before.
        test_file: None; of an `EvaluatedRun` the file that is its test split.
        has_own_dataset: true; of an `EvaluatedRun` whether the model was trained on the dataset.
        metadata: empty; of an `EvaluatedRun` the values of `run.finish(metadata=...)`.
        is_chief: whether this process writes the shared files.
    """

    trained, test_file, has_own_dataset = None, None, True

    def __init__(self, recipe: str, options: SharedOptions, strategy: tf.distribute.Strategy):
        self.recipe = recipe
        self.strategy = strategy
        self.strategy_name = kinds.name_of(strategy)
        self.workers = strategies.workers(strategy)
        self.is_chief = strategies.is_chief(strategy)
        self.cache_dir = options.cache_dir or default_cache_dir()
        self._begun = time.perf_counter()
        self._notes: list[str] = []
        self._resolved: dict = {}
        self._dataset_was_read = self._held_out_was_read = False
        self._facts: dict = {}  # the facts of plan()
        self._plan: Plan  # made by plan()
        self._recipe_plan: RecipePlan  # the same, as the recipe got it
        self._jit: bool | str = False  # likewise; "auto" leaves it to Keras
        self._was_prepared = False
        self.metadata: dict = {}
        self.agreement = strategies.Agreement(strategy)
        if self.agreement.total(int(options.run_dir is None)) not in (0, self.agreement.workers):
            raise RunError("--run-dir: passed to some workers only; pass it to all of them")
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
        self.evaluation_callbacks: list[keras.callbacks.Callback] = [
            self.progress,
            StopEvaluation(self._asked_to_stop),
        ]
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
        self._require_shared_disk()
        if not os.environ.get(LAUNCHED):  # the launcher writes one log per process
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
            log.log(RESULT, "the run in %s is finished: nothing to do", self.folder.path)
            if self.folder.ignored:
                log.warning(
                    "these options changed, without effect on a finished run; another --run-dir "
                    "trains with them: %s",
                    "; ".join(self.folder.ignored),
                )

    def _require_shared_disk(self) -> None:
        """Refuses workers that do not see what the chief writes into the run's folder.

        Raises:
            RunError: they have different folders.
        """
        if self.agreement.workers == 1:
            return
        number = self.folder.write_token() if self.is_chief else 0
        sees = self.folder.has_token(self.agreement.broadcast_from_chief(number))
        everyone = not self.agreement.any_worker(not sees)
        self.folder.remove_token()
        if not everyone:
            raise RunError(
                f"--run-dir {self.folder.path}: not all workers see the chief's files there; it "
                "must be one folder, on a disk that all of them share"
            )

    def _require_one_command(self) -> None:
        """Refuses workers of another job or recipe, or with other options.

        Raises:
            RunError: the workers differ.
        """
        job, options = slurm_job(), common(self.options)
        if self._everyone_has([job, self.recipe, options]):
            self._require_one_version()
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

    def _require_one_version(self) -> None:
        """Refuses workers of another version of this package, of TensorFlow or of Keras.

        Raises:
            RunError: the workers differ.
        """
        if self.agreement.workers == 1:
            return
        versions, git = artifacts.main_versions(), git_state()
        if not self.agreement.any_worker(git is None):  # else some worker has a copy without git
            versions["commit"] = (git or {})["commit"]
        if not self._everyone_has(versions):
            raise RunError(
                "the workers have different versions; install the same ones everywhere. This one "
                "has " + ", ".join(f"{name} {version}" for name, version in versions.items())
            )

    def _everyone_has(self, value) -> bool:
        """Returns whether all workers have the same value, JSON."""
        text = json.dumps(value, sort_keys=True, default=str)
        return self.agreement.everyone_has(zlib.crc32(text.encode()))

    @property
    def results(self) -> dict:
        """Returns the results of a finished run; empty in one that is not finished."""
        return self.folder.results or {}

    @property
    def finished(self) -> bool:
        """Returns whether the run is finished: `main` then returns `run.results`."""
        return self.folder.results is not None

    @property
    def dataset(self) -> str:
        """Returns `--dataset`; a resumed run keeps the dataset that `auto` resolved to."""
        self._dataset_was_read = True
        return self.folder.facts.get("dataset", self.options.dataset)

    @property
    def held_out(self) -> dict[str, Path]:
        """Returns the files of `--validation-file` ("valid") and `--test-file` ("test")."""
        self._held_out_was_read = True
        return self.options.held_out if isinstance(self.options, HeldOutOptions) else {}

    @property
    def resumes(self) -> bool:
        """Returns whether the weights come from a checkpoint."""
        return self.folder.checkpoint is not None

    def fact(self, name: str):
        """Returns a resolved value of this run, for instance its preset; None in a new run."""
        return self.folder.facts.get(name)

    def note(self, *lines: str | None) -> None:
        """Logs lines, for instance the reason of a fallback; `results.json` keeps them."""
        for line in filter(None, lines):
            log.warning("%s", line)
            self._notes.append(line)

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
        """Plans batches, learning rate and steps; prints the plan, and writes `options.json`.

        Args:
            examples: examples of the training split.
            base_learning_rate: peak rate for one replica, unless the options set one.
            batch_size_per_replica: examples per batch on one replica, unless the options set one.
            warmup_steps: steps of the warm-up, at most a tenth of the run, unless the options have
                a `warmup_steps`; None for a recipe without warm-up.
            tokens_per_example: mean number of tokens per example without padding, or None.
            about: further lines of the printed plan, by title.
            **facts: values that must stay the same when the run resumes, JSON: `dataset`, a
                checksum of the data, `vocabulary_sha256`, `preset` ...

        Raises:
            OptionsError: the replicas cannot share the batch, the data do not fill one step, or
                `--warmup-steps` takes the whole run.
            RunError: the run in the folder was planned differently, the workers differ, or a fact
                has the name of a value of the plan, or is not JSON.
        """
        # A recipe may have called keras.utils.clear_session() before, which resets it.
        numerics.set_precision(self.options.precision)
        option_checks.require_own_values(self.plan, facts)
        self._facts = facts
        option_checks.refuse_ignored_limit(self.options, examples)
        info = self.folder.checkpoint
        plan = make_plan(
            self.options,
            replicas=strategies.replicas(self.strategy),
            planned_replicas=strategies.planned_replicas(self.strategy),
            examples=examples,
            batch_size_per_replica=batch_size_per_replica,
            base_learning_rate=base_learning_rate,
            warmup_steps=warmup_steps,
            steps_done=info.step if info is not None else 0,
            resumed=self.folder.facts,
        )
        if self.options.steps_per_execution and self.strategy_name != "parameter_server":
            option_checks.refuse_executions_across_epochs(self.options.steps_per_execution, plan)
        self._plan = plan
        self._jit = numerics.jit_compile(self.options, self.strategy, plan.total_steps)
        planned = plan.fixed()
        if self.options.reduce_on_plateau is not None:  # it decides the learning rate
            planned["plateau_metric"] = f"{self._plateau_metric()} ({self.options.keep_best_mode})"
        option_checks.require_own_values(self.plan, facts, planned)
        facts = facts | planned
        if not self._everyone_has(facts):
            raise RunError(
                "the workers have different data or presets; each needs the same files and "
                "versions. This one has "
                + ", ".join(f"{name} {value}" for name, value in facts.items())
            )
        warmup = {} if warmup_steps is None else {"warmup_steps": plan.warmup_steps}
        self._resolved = facts | warmup
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
            self.note(device.unused_gpu(), self._missed_profile(plan))
            self.note(*option_checks.similar_names(self.plan, self._facts))
            self.note(self._shortened(plan))
            self._print_plan(plan, about or {})
        # Whatever was drawn while the data were loaded, the model's first weights are the seed's.
        keras.utils.set_random_seed(self.options.seed)
        self._recipe_plan = RecipePlan(**vars(plan))
        return self._recipe_plan

    def _shortened(self, plan: Plan) -> str | None:
        """Returns a note if `--epochs` ends the run before `--max-steps`."""
        most = self.options.max_steps
        if most is None or plan.total_steps >= most:
            return None
        return (
            f"--max-steps {most}: --epochs {self.options.epochs} ends the run at step "
            f"{plan.total_steps}; pass more --epochs for more steps"
        )

    def _missed_profile(self, plan: Plan) -> str | None:
        """Returns a note if `--profile` names no step that this start trains."""
        window = profile_window(self.options.profile)
        if window is None or (plan.steps_done < window[1] and window[0] <= plan.total_steps):
            return None
        about = f"ends at step {plan.total_steps}"
        if window[0] <= plan.total_steps:
            about = f"resumes at step {plan.steps_done}"
        return f"--profile {self.options.profile}: nothing is profiled, the run {about}"

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
                callback of Keras has state that no checkpoint keeps; or the run was prepared
                before.
            DistributionError: the model cannot be made exact under this strategy, or XLA cannot
                compile it.
            OptionsError: the model has no metric `--keep-best`, an option needs a split that is
                None, `compile(steps_per_execution=...)` does not divide an epoch, or the recipe
                ignores `--dataset` or `--base-learning-rate`.
        """
        if self._was_prepared:
            raise RunError(
                "run.prepare() was called a second time: a run is one training, and its second "
                "phase would replace the checkpoints of the first; make two runs, and start the "
                "second from the model of the first: --init-from or --preset, or "
                "keras.saving.load_model() of its model/model.keras"
            )
        self._was_prepared = True
        option_checks.refuse_ignored_dataset(self.options, self._facts, self._dataset_was_read)
        option_checks.refuse_ignored_files(self.options, self._held_out_was_read)
        model_checks.require_compiled(model, train_data)
        info, options = self.folder.checkpoint, self.options
        data_checks.require_splits(options, validation, test)
        data_checks.require_fewer(options, validation)
        if "test_step" not in inspection.own_steps(model):  # which takes what it likes
            splits = {"validation": validation, "test": test}
            data_checks.require_forms(train_data, splits, inspection.needs_labels(model))
        model_checks.require_in_scope(model, self.strategy)
        first_batches = data_checks.first_batches_sha256(train_data)
        data_checks.require_batch_size(train_data, self._plan.global_batch_size)
        steps_per_execution = self._steps_per_execution(model)
        plateau = self._plateau(model)
        fitting.build(model, train_data)
        self._note_own_rate(model)
        has_averages = averages.has_averages(model)
        if has_averages:
            averages.evaluate_averages(model)
        self.note(option_checks.partial_best(options, has_averages))
        plan = self._plan
        numerics.require_precision(model, options.precision)
        model_checks.require_kept_variables(model)
        model_checks.build_own_step(model, train_data)
        model_checks.require_in_scope(model, self.strategy)  # metrics exist from now on
        fingerprint = resume_checks.require_same(info, model, train_data, first_batches, plan)
        self.note(resume_checks.metrics_note(info, fingerprint))
        self._require_same_everywhere(
            model, {"training": train_data, "validation": validation, "test": test}
        )
        metric_checks.require_single_numbers(model)
        if plan.replicas > 1:
            self.note(*metric_checks.require_sums(model, train_data))
        metric_checks.require_metric(model, options.keep_best, options.keep_best_mode)
        jit = self._jit_of(model)
        restored = False
        if jit:  # before the first program is compiled
            restored = xla_cache.restore(self.cache_dir, self.recipe, shown(options) | plan.fixed())
        installed = step.install(
            model,
            batches_per_update=plan.accumulate_steps,
            updates_per_execution=steps_per_execution,
            jit_compile=jit,
            gradient_checkpointing=options.gradient_checkpointing,
        )
        validated = [validation, test if options.test_every else None]
        self.note(model_checks.require_test_step(model, installed, validated, test))
        if plan.replicas > 1:
            self.note(model_checks.random_layers_note(model))
        if plan.accumulate_steps > 1 or self.strategy.num_replicas_in_sync > 1:
            self.note(model_checks.require_separate_examples(model, installed, train_data))
        if self.strategy_name == "parameter_server":
            several = steps_per_execution > 1
            parameter_server.use_coordinator(
                model,
                installed,
                window=steps_per_execution if several else parameter_server.WINDOW,
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
        self.note(fit_checks.lost_states_note(extra, info))
        epochs_done = 0
        if info is not None:
            epochs_done = plan.epochs if info.state["finished"] else info.epochs_done
        fit_options = {
            "validation_data": validation,
            "callbacks": callbacks,
            "initial_epoch": epochs_done,
            "epochs": plan.epochs,
            "steps_per_epoch": plan.steps_per_epoch,
            "verbose": 0,  # the callbacks print
            "shuffle": False,  # the pipeline shuffles
        }
        best_of = ["early_stopping", "reduce_on_plateau"]
        if options.validate_every is None:  # which finds the best one, too
            best_of.insert(0, "keep_best")
        used = [flag(name) for name in best_of if getattr(options, name) is not None]
        same_weights = functools.partial(resume_checks.require_same_class_weight, info, fingerprint)
        fit_checks.watch_fit(model, fit_options, self.records, used, same_weights)
        signals.training = True  # from now on a signal saves and stops the run
        return fit_options

    def _steps_per_execution(self, model: keras.Model) -> int:
        """Returns `--steps-per-execution`, or without it what `compile()` got.

        Raises:
            OptionsError: that of `compile()` would run past the end of an epoch or the run.
        """
        if self.options.steps_per_execution is not None:
            return self.options.steps_per_execution
        compiled = inspection.compiled_steps_per_execution(model)
        if self.strategy_name != "parameter_server":
            option_checks.refuse_executions_across_epochs(compiled, self._plan, is_compiled=True)
        return compiled

    def _jit_of(self, model: keras.Model) -> bool:
        """Returns whether XLA compiles the step: by `--jit`, else by what `compile()` got.

        Raises:
            OptionsError: `compile()` asks for it where all replicas share the weights.
        """
        chosen = fitting.compiled_jit(model) if self.options.jit == "auto" else None
        if chosen and self.strategy_name in kinds.SHARED_WEIGHTS:
            raise OptionsError(
                "model.compile(jit_compile=True): XLA cannot compile the shared weights of "
                f"{self.strategy_name}; leave it out"
            )
        jit = self._jit if chosen is None else chosen
        if jit == "auto":
            jit = model.jit_compile
        refused = inspection.not_for_xla(model)
        if self.options.jit == "on" or not refused:
            return bool(jit)
        if chosen:
            self.note(f"model.compile(jit_compile=True): XLA cannot compile {refused[0]} here")
        return False

    def _require_same_everywhere(self, model: keras.Model, splits: dict) -> None:
        """Refuses workers with another model or other data.

        Args:
            model: built.
            splits: the data by name.

        Raises:
            RunError: the workers differ.
        """
        if self.agreement.workers == 1:
            return
        if not self._everyone_has(resume_checks.shapes_of(model)):
            raise RunError(
                "the workers have different models or optimizers: the shapes of their weights, or "
                "the order of examples, differ; start all of them from the same code and files"
            )
        for name, data in splits.items():
            count = data_checks.FINGERPRINT_BATCHES if name == "training" else 1
            traits = data_checks.traits(data, count)
            if self.agreement.any_worker(traits is None):
                continue  # each worker may have its own
            forms, numbers = traits  # type: ignore[misc]
            if not self._everyone_has(forms) or not self.agreement.everyone_is_near(
                numbers, data_checks.ROUNDING
            ):
                raise RunError(
                    f"the workers have different {name} data: their first batches differ; each "
                    "needs the same files, in the same order"
                )

    def _note_own_rate(self, model: keras.Model) -> None:
        """Reports the learning rate of an optimizer that did not get that of the plan.

        Raises:
            OptionsError: the user chose a `--base-learning-rate`, which the recipe ignores.
        """
        if self._recipe_plan.rate_was_read or inspection.own_steps(model):
            return
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if isinstance(optimizer, keras.optimizers.MultiOptimizer):
            return
        rate = inspection.learning_rate_of(optimizer)
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

    def _plateau(self, model: keras.Model) -> dict[str, StepCallback]:
        """Returns the callback of `--reduce-on-plateau` by its name in checkpoints, or {}."""
        options = self.options
        if options.reduce_on_plateau is None:
            return {}
        option_checks.require_one_rate(model)
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
        stateful = fit_checks.stateful(ours, extra, info)
        checkpoint_folder = self.folder.path / "checkpoints"
        bad_loss = StopOnBadLoss(checkpoint_folder)
        self.checkpoint = Checkpoint(
            checkpoint_folder,
            every=options.checkpoint_every,
            keep=options.keep_checkpoints,
            is_chief=self.is_chief,
            asked_to_stop=lambda: signals.asked,
            on_any_worker=self.agreement.on_any_worker,
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
            options.log_every,
            options.checkpoint_every,
            options.validate_every,
            options.test_every,
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
        baseline: dict[str, float] | None,
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
            baseline: metrics of simpler models on the test split; None for none.
            metadata: values that the model's inputs and outputs need, JSON, for instance the names
                of the classes; numbers and arrays of NumPy become numbers and lists. Stored in
                `model/`, covered by its checksums.
            preprocessor: preprocessor of a KerasNLP task, which is then saved as a preset; or None.
            example_input: an input for the `predict` command that is printed and for the model's
                card, if the one of the recipe's options does not suit these data.
            examples_table: returns the rows of `recipes.evaluate --examples`, a header first; None
                where the recipe has none.
            test_examples: examples that the test's `accuracy` is a share of; its standard error is
                then reported, and the verdict calls smaller gains narrow.
            **more: further values of `results.json`.

        Raises:
            RunError: the model was not trained, a metric is not a number, one of `more` has the
                name of another result, or a value is not JSON; nothing is written.
            BadLoss: a test metric is not a number; nothing is written.
            CannotSave: the folder is gone or the disk is full.
        """
        if self.checkpoint.model is None:
            raise RunError(
                "run.finish() was called without a training: call model.fit(train_data, "
                "**fit_options), with all that run.prepare() returned, before"
            )
        remedy = (
            "; the training is saved: correct the recipe, and resume the run with --run-dir "
            f"{self.folder.path}"
        )
        test = metric_checks.as_numbers("test", test, remedy)
        baseline = metric_checks.as_numbers("baseline", baseline, remedy)
        steps = self.checkpoint.step
        metric_checks.require_finite(test, steps, self._plan.learning_rate)
        test = with_perplexity(test, self.records.perplexity_of)
        self.note(*option_checks.similar_names(self.finish, more))
        own = self._results(model, test, baseline) | error_of_accuracy(test, test_examples)
        metadata = metadata or {}
        option_checks.require_own_values(
            self.finish, more, own.keys() | option_checks.OPTIONAL_RESULTS, remedy
        )
        option_checks.require_own_values(self.finish, {"metadata": metadata}, (), remedy)
        results = own | more
        self.records.record_evaluation("test", results["weights_of_step"], test)
        if self.is_chief:
            self._report(results, test_examples)
        self._show_hparams(results)
        if self.is_chief:
            self._save(model, metadata, preprocessor, results, example_input)
            query = predict_command(self.options, example_input)
            if query is not None:
                log.log(RESULT, "predict  %s", query)
        signals.finished, signals.training = True, False
        return results

    def _results(self, model: keras.Model, test: dict, baseline: dict) -> dict:
        """Returns the values of `results.json` that every run has."""
        steps, info = self.checkpoint.step, self.folder.checkpoint
        # The seconds are those of this process, from the start of the run to now.
        return {
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

    def _report(self, results: dict, test_examples: int | None) -> None:
        """Logs the baselines, the standard error of the test's accuracy, and the verdict."""
        test, baseline = results["test"], results["baseline"]
        if baseline:
            line = "  ".join(f"{name} {value:.4f}" for name, value in baseline.items())
            log.log(RESULT, "%-14s %s", "baseline", line)
        if "test_standard_error" in results:
            shown_error = f"± {results['test_standard_error']:.4f} ({test_examples:,} examples)"
            log.log(RESULT, "%-14s accuracy %s", "standard error", shown_error)
        history, epochs = results["history"], self.records.epochs
        for line in verdict(test, baseline, history, results["steps"], test_examples, epochs):
            log.log(RESULT, "%-14s %s", "verdict", line)

    def _named(self, results: dict) -> dict:
        """Returns the results that describe the training, and the plan's values, by name."""
        names = ("recipe", "dataset", "preset", "strategy", "replicas", "workers")
        return self._plan.fixed() | {name: results[name] for name in names}

    def _show_hparams(self, results: dict) -> None:
        """Shows the run in TensorBoard's table of runs."""
        options = shown(self.options)
        if "warmup_steps" in self._resolved:
            options["warmup_steps"] = self._resolved["warmup_steps"]
        self.tensorboard.show_hparams(results["steps"], options | self._named(results))
        self.tensorboard.flush()

    def _save(
        self,
        model: keras.Model,
        metadata: dict,
        preprocessor,
        results: dict,
        example_input: str | None,
    ) -> None:
        """Writes the model and `results.json`, and logs where they are."""
        known = {n: value for n, value in self._named(results).items() if value is not None}
        described = shown(self.options, self._resolved | known) | self._plan.fixed()
        path = self.folder.path
        last = checkpoints.newest_path(self.checkpoint.folder)
        card = model_card(
            model, results, self.options, described, metadata, preprocessor, example_input
        )
        with saving(path / "model", f"; the last checkpoint is {last}"):
            artifacts.save_model(
                model,
                path / "model",
                metadata=metadata | {"weights_sha256": results["weights_sha256"]},
                preprocessor=preprocessor,
                card=card,
            )
        self.folder.write_json("results.json", results)
        log.log(RESULT, "model    %s", path / "model")
        log.log(RESULT, "logs     tensorboard --logdir %s", shlex.quote(str(path)))
        log.log(RESULT, "results  %s", path / "results.json")
