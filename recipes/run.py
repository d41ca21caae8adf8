"""One run: its folder, its lock, its log, the signals that stop it, and what it leaves behind."""

import contextlib
import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from callbacks import checkpoint
from callbacks.run_log import RunLog
from callbacks.stop_on_bad_loss import BadLoss
from data.errors import DataError
from distribution import keras_compat, parameter_server, strategies
from distribution.accumulate import accumulate
from distribution.agree import Agreement
from distribution.errors import DistributionError
from distribution.scaling import Plan
from recipes.options import OptionsError, SharedOptions, flag, parse, to_json

log = logging.getLogger("recipes")

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command continues

# Options that change neither data, model, schedule nor order of the steps.
NEUTRAL = {
    *("strategy", "replicas", "validate_every", "test_every", "checkpoint_every"),
    *("keep_checkpoints", "keep_best", "early_stopping", "resume", "steps_per_execution", "jit"),
    *("deterministic", "run_dir", "options", "cache_dir", "log_every", "quiet"),
}
LENGTH = {"epochs", "max_steps"}


class StopRequested(BaseException):
    """SIGTERM or SIGINT outside of training; nothing needs to be saved."""


class RunError(Exception):
    """The run's folder cannot be used as it is; one line for a person, exit status 2."""


class Signals:
    """SIGTERM and SIGINT: the first one asks, the second one ends the process at once."""

    def __init__(self):
        self.asked = False
        self.training = False
        self.installed = False
        self._first = 0.0

    def install(self) -> None:
        """Takes over both signals (main thread only)."""
        self.installed = True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number, frame):
        if self.asked:
            # Supervisors tend to signal a process and its group: that is one request.
            if time.monotonic() - self._first > 0.5:
                os._exit(128 + number)
            return
        self.asked, self._first = True, time.monotonic()
        name = signal.Signals(number).name
        print(f"\n{name}: saving and stopping; a second one stops at once", file=sys.stderr)
        if not self.training:
            raise StopRequested


signals = Signals()


class Run:
    """A run's folder and what is known of it.

    Attributes:
        folder: where everything of the run lies.
        is_chief: whether this process writes what is shared.
        saved: the checkpoint that this run goes on from, or None.
        results: what a finished run left, or None.
        agreement: how the workers agree.
    """

    def __init__(self, recipe: str, options: SharedOptions, strategy: tf.distribute.Strategy):
        self.recipe = recipe
        self.options = options
        self.strategy = strategy
        self.workers = strategies.workers(strategy)
        self.is_chief = strategies.is_chief(strategy)
        self.agreement = Agreement(strategy, self.workers, self.is_chief)
        self.folder = options.run_dir or self._new_folder()
        self.saved: checkpoint.Saved | None = None
        self.results: dict | None = None
        self.resolved: dict = {}
        self._saver: checkpoint.Checkpoint | None = None
        self._lock = None
        self._made: list[Path] = []
        self._begun = time.perf_counter()
        self._log_file: logging.Handler | None = None

    def _new_folder(self) -> Path:
        # The chief's clock names the folder, on every worker.
        now = datetime.datetime.fromtimestamp(self.agreement.chiefs(int(time.time())))
        folder = Path("runs") / self.recipe / now.strftime("%Y%m%d-%H%M%S")
        number = 1
        while self.workers == 1 and folder.exists():  # another run began in the same second
            number += 1
            folder = folder.with_name(f"{now:%Y%m%d-%H%M%S}-{number}")
        return folder

    def open(self) -> None:
        """Takes the folder: creates it, locks it, and finds the run that is there.

        Raises:
            RunError: not writable, used by another process, or holding a run of other options.
        """
        try:
            # What this process makes, the outermost first.
            absent = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            self._made = absent[::-1]
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.is_chief:
                self._lock = open(self.folder / ".lock", "a")  # noqa: SIM115 (held until close())
        except OSError as fault:
            raise RunError(f"--run-dir {self.folder}: {fault.strerror or fault}") from fault
        if self._lock is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as fault:
                self._made = []  # the other run's, after all
                raise RunError(
                    f"--run-dir {self.folder}: another run is using this folder"
                ) from fault
        self.options.run_dir = self.folder  # the command that goes on names it
        self._log_to_file()
        self._find_run()
        seen = self.saved.step + 1 if self.saved else 0
        if not self.agreement.everyone_has(seen):
            raise RunError(
                f"--run-dir {self.folder}: the workers see different checkpoints there; it must "
                "lie on a disk that all of them share"
            )

    def _log_to_file(self) -> None:
        if os.environ.get("KERAS_RECIPES_LAUNCHED"):
            return  # the launcher keeps a log file for each process
        rank = strategies.worker_index(self.strategy)
        self._log_file = logging.FileHandler(self.folder / f"worker-{rank}.log")
        self._log_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(self._log_file)

    def _find_run(self) -> None:
        path = self.folder / "options.json"
        if not path.exists():
            return
        if self.options.resume == "never":
            raise RunError(
                f"--run-dir {self.folder}: holds a run, and --resume never does not touch one"
            )
        try:
            there = json.loads(path.read_text())
            recipe, saved = there["recipe"], there["options"]
        except (OSError, ValueError, KeyError) as fault:
            raise RunError(f"{path}: cannot be read ({fault!r})") from fault
        if recipe != self.recipe:
            raise RunError(f"--run-dir {self.folder}: holds a run of {recipe}, not {self.recipe}")
        self._refuse_differences(saved)
        self.saved = checkpoint.newest(self.folder / "checkpoints")
        self.resolved = there["resolved"] if self.saved else {}
        if self.saved is None and self.is_chief:
            # Stopped before its first checkpoint: what it logged will be logged again.
            (self.folder / "metrics.jsonl").unlink(missing_ok=True)
            shutil.rmtree(self.folder / "logs", ignore_errors=True)
        results = self.folder / "results.json"
        if results.exists() and self.options.resume != "extend":
            self.results = json.loads(results.read_text())

    def _refuse_differences(self, saved: dict) -> None:
        now = to_json(self.options)
        different = [
            name
            for name in now
            if name not in NEUTRAL and json.loads(json.dumps(now[name])) != saved.get(name)
        ]
        if self.options.resume == "extend":
            for name in LENGTH.intersection(different):
                different.remove(name)
        if different:
            lines = [f"{flag(n)}: {saved.get(n)} there, {now[n]} now" for n in different]
            hint = (
                " (--resume extend goes on with more --epochs)"
                if LENGTH.issuperset(different)
                else ""
            )
            raise RunError(
                f"--run-dir {self.folder}: holds a run of other options; the same command goes on, "
                f"another folder begins anew{hint}\n" + "\n".join(lines)
            )

    def resolve(self, **found) -> None:
        """Writes down what the options came to: data, vocabulary, global batch, learning rate.

        Raises:
            RunError: the run that is there came to something else.
        """
        found = json.loads(json.dumps(found))
        if self.saved is not None:
            may_differ = {"replicas", "strategy"}
            if self.options.resume == "extend":
                may_differ |= {"total_steps", "epochs"}
            different = [
                f"{name}: {self.resolved.get(name)} there, {value} now"
                for name, value in found.items()
                if name not in may_differ and self.resolved.get(name) != value
            ]
            if different:
                raise RunError(
                    f"--run-dir {self.folder}: the run there has another trajectory\n"
                    + "\n".join(different)
                )
            if self.options.resume == "extend" and self.saved.state["finished"]:
                self.saved = checkpoint.reopened(self.saved, found["steps_per_epoch"])
            if self.resolved.get("total_steps") != found.get("total_steps"):
                log.warning(
                    "the schedule is laid anew: over %s steps instead of %s",
                    *(found.get("total_steps"), self.resolved.get("total_steps")),
                )
        self.resolved = found
        if self.is_chief:
            content = {
                "recipe": self.recipe,
                "options": to_json(self.options),
                "resolved": found,
                "command": command(self.recipe, self.options),
            }
            write_json(self.folder / "options.json", content)

    @property
    def steps_done(self) -> int:
        """Updates of the weights that the checkpoint holds."""
        return self.saved.step if self.saved else 0

    @property
    def epochs_done(self) -> int:
        """Where `fit()` begins: `initial_epoch`."""
        if self.saved is None:
            return 0
        if self.saved.state["finished"] and self.options.resume != "extend":
            return self.resolved["epochs"]
        return self.saved.epochs_done

    def say_plan(self, plan: Plan, *lines: str) -> None:
        """Prints the plan, once."""
        if not self.is_chief:
            return
        accumulated = f" x {plan.accumulate_steps} accumulated" if plan.accumulate_steps > 1 else ""
        name = type(self.strategy).__name__ if plan.replicas > 1 else "one device"
        shown = (
            f"run            {self.folder}",
            *lines,
            f"replicas       {plan.replicas} in {self.workers} worker(s): {name}; all-reduce: "
            f"{strategies.all_reduce_in_use(self.strategy)}",
            f"global batch   {plan.global_batch_size}{accumulated} "
            f"({plan.batch_size_per_replica} per replica)",
            f"learning rate  {plan.learning_rate:g} at the peak",
            f"steps          {plan.total_steps:,} in {plan.epochs} epoch(s) of "
            f"{plan.steps_per_epoch:,}",
        )
        for line in shown:
            log.info("%s", line)
        if self.saved:
            log.info("goes on at step %d from %s", self.saved.step, self.saved.folder)

    def steps_per_execution(self, plan: Plan) -> int:
        """Steps of one call of the training function: with parameter servers, of a window.

        Raises:
            OptionsError: executions would run over the end of an epoch.
        """
        steps = self.options.steps_per_execution
        if strategies.name_of(self.strategy) == "parameter_server":
            return steps if steps > 1 else parameter_server.WINDOW
        lengths = {plan.steps_per_epoch, plan.total_steps % plan.steps_per_epoch} - {0}
        if any(length % steps for length in lengths):
            common = math.gcd(*lengths)
            fits = [n for n in range(1, common + 1) if common % n == 0]
            raise OptionsError(
                f"--steps-per-execution {steps}: an epoch has {plan.steps_per_epoch} steps and the "
                f"run {plan.total_steps}; {', '.join(map(str, fits[:12]))} would fit"
            )
        return steps

    def build(self, model: keras.Model, plan: Plan, train_data: tf.data.Dataset) -> None:
        """Builds a compiled model; accumulation and servers get a training function of ours."""
        keras_compat.build(model, train_data)
        if plan.accumulate_steps > 1:
            with self.strategy.scope():
                accumulate(model, plan.accumulate_steps)
        parameter_server.drive(
            model,
            self.strategy,
            window=self.steps_per_execution(plan),
            steps_per_epoch=plan.steps_per_epoch,
            total_steps=plan.total_steps,
            steps_done=self.steps_done,
        )

    def checkpoints(self, plan: Plan, run_log: RunLog) -> checkpoint.Checkpoint:
        """The callback that saves this run's checkpoints as the options say."""
        self._saver = checkpoint.Checkpoint(
            self.folder / "checkpoints",
            steps_per_epoch=plan.steps_per_epoch,
            total_steps=plan.total_steps,
            every=self.options.checkpoint_every,
            keep=self.options.keep_checkpoints,
            is_chief=self.is_chief,
            asked_to_stop=self.asked_to_stop,
            with_state={"run_log": run_log},
            best=self.options.keep_best,
            patience=self.options.early_stopping,
            restored=self.saved,
        )
        return self._saver

    @contextlib.contextmanager
    def stoppable(self, saver: checkpoint.Checkpoint):
        """Within it SIGTERM and SIGINT end `fit()` and `evaluate()` behind the batch, saved."""
        signals.training = True
        try:
            yield
        except checkpoint.Stopped:
            saver.reach(saver.with_state["run_log"].step)
            if saver.saved_step != saver.step or saver.epochs_done <= saver.epoch:
                saver.save()
            raise
        finally:
            signals.training = False

    def asked_to_stop(self) -> bool:
        """Whether any worker was asked to stop; every worker must call it at the same point."""
        return self.agreement.anyone(signals.asked)

    def require_space(self, model: keras.Model, keep: int) -> None:
        """Refuses to begin where the checkpoints cannot fit on the disk.

        Raises:
            RunError: with what is needed and what is there.
        """
        if not self.is_chief:
            return
        weights = sum(int(np.prod(v.shape)) * _itemsize(v.dtype) for v in model.variables)
        needed = weights * 3 * (keep + 1) + weights  # Adam keeps two numbers a weight
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise RunError(
                f"--run-dir {self.folder}: {keep} checkpoints and the model need about "
                f"{needed / 1e6:,.0f} MB, the disk has {free / 1e6:,.0f} MB"
            )

    def finish(self, results: dict) -> dict:
        """Writes results.json and says where everything lies; returns the results.

        The seconds are those of this process, from the beginning of the run to now.
        """
        results = {
            "recipe": self.recipe,
            **results,
            "steps": self._saver.step,  # fewer than planned where --early-stopping ended the run
            "epochs": self._saver.epochs_done,
            "strategy": strategies.name_of(self.strategy),
            "replicas": strategies.replicas(self.strategy),
            "workers": self.workers,
            "precision": self.options.precision,
            "seed": self.options.seed,
            "seconds": time.perf_counter() - self._begun,
            "resumed_from_step": self.saved.step if self.saved else None,
            "versions": versions(),
        }
        if self.is_chief:
            write_json(self.folder / "results.json", results)
            # Results are shown even with --quiet.
            print(f"model    {self.folder / 'model'}")
            print(f"logs     tensorboard --logdir {self.folder / 'logs'}")
            print(f"results  {self.folder / 'results.json'}", flush=True)
        return results

    def discard(self) -> None:
        """Removes the folder again if this process made it and nothing was trained in it."""
        if not self.is_chief or self.folder not in self._made:
            return
        if (self.folder / "checkpoints").exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in reversed(self._made[:-1]):
            with contextlib.suppress(OSError):  # something else lies there by now
                path.rmdir()

    def close(self) -> None:
        """Leaves together with the other workers, and lets go of the folder."""
        if self._log_file is not None:
            log.removeHandler(self._log_file)
            self._log_file.close()
        if self._lock is not None:
            self._lock.close()


@contextlib.contextmanager
def open_run(recipe: str, options: SharedOptions, strategy: tf.distribute.Strategy):
    """The run's folder, locked; the workers leave it together when it went well."""
    run = Run(recipe, options, strategy)
    try:
        run.open()
        yield run
        run.agreement.barrier()
    except (OptionsError, DataError, DistributionError, RunError, StopRequested):
        run.discard()
        raise
    finally:
        run.close()


def prepare(options: SharedOptions) -> tf.distribute.Strategy:
    """Precision, seed and devices, and with them the strategy. Comes before any other op.

    Raises:
        OptionsError: the options do not go with the devices or the cluster.
        DistributionError: likewise.
    """
    name = strategies.resolve(options.strategy, options.replicas)
    several = (options.replicas or 1) > 1 or name not in ("none", "mirrored", "central_storage")
    found = strategies.faults(name, options.replicas)
    if options.jit == "on" and several:
        found.append(f"--jit on: XLA cannot compile the all-reduce of {name}; leave it at auto")
    if name == "parameter_server" and options.accumulate_steps > 1:
        found.append(
            "--accumulate-steps does not go with parameter servers, whose workers do not "
            "wait for each other"
        )
    if name in ("central_storage", "parameter_server") and options.precision == "mixed_float16":
        found.append(
            f"--precision mixed_float16 does not go with {name}, where replicas would share one "
            "loss scale; mixed_bfloat16 needs none"
        )
    if options.global_batch_size is not None and options.replicas:
        workers = strategies.workers_in(strategies.cluster_spec())
        if options.global_batch_size % (options.replicas * workers):
            found.append(
                f"--global-batch-size {options.global_batch_size} cannot be shared by "
                f"{options.replicas * workers} replicas"
            )
    if found:
        raise OptionsError("\n".join(found))
    keras.config.set_floatx("float64" if options.precision == "float64" else "float32")
    keras.config.set_dtype_policy(options.precision)
    if options.deterministic:
        tf.config.experimental.enable_op_determinism()
    strategy = strategies.make_strategy(name, options.replicas)
    if signals.installed:
        signals.install()  # MultiWorkerMirroredStrategy puts a handler of its own for SIGTERM
    keras.utils.set_random_seed(options.seed)
    return strategy


def command_line(options_type: type, main) -> None:
    """Runs a recipe's `main` with the options of the command line, and exits.

    Exit status: 0, or 2 for what a person can repair, 75 for a run that was stopped and can go on,
    1 for anything else.
    """
    signals.install()
    options = None
    recipe = sys.modules[options_type.__module__].__spec__.name.split(".")[-1]
    status = 0
    try:
        options = parse(options_type, prog=f"python -m recipes.{recipe}")
        configure_log(getattr(options, "quiet", False))
        main(options)
    except (OptionsError, DataError, DistributionError, RunError) as fault:
        lines = str(fault).splitlines()
        print(
            "\n".join([f"{recipe}: {lines[0]}", *(f"  {line}" for line in lines[1:])]),
            file=sys.stderr,
        )
        status = 2
    except (StopRequested, checkpoint.Stopped):
        status = STOPPED
    except (BadLoss, checkpoint.CannotSave) as fault:
        print(f"{recipe}: {fault}", file=sys.stderr)
        status = 1
    except tf.errors.ResourceExhaustedError as fault:
        first = str(fault.message).splitlines()[0][:200]
        print(
            f"{recipe}: out of memory: {first}\n  take a smaller --batch-size-per-replica (or "
            "--global-batch-size), with --accumulate-steps for the same update",
            file=sys.stderr,
        )
        status = 1
    sys.stdout.flush()
    if status == STOPPED and isinstance(options, SharedOptions):
        print(f"stopped; this goes on:\n  {command(recipe, options)}", file=sys.stderr)
    with contextlib.suppress(DistributionError):  # a broken TF_CONFIG was reported above
        if strategies.cluster_spec().get("cluster", {}).get("ps"):
            # The coordinator's thread for a worker that died would wait for it, and so the exit.
            sys.stderr.flush()
            os._exit(status)
    sys.exit(status)


def command(recipe: str, options: SharedOptions) -> str:
    """The command line that runs, or continues, these options."""
    words = ["python", "-m", f"recipes.{recipe}"]
    default = type(options)()
    for name, value in to_json(options).items():
        if value == to_json(default)[name] or name in ("options", "resume"):
            continue
        if isinstance(value, bool):
            words.append(flag(name) if value else flag("no_" + name))
        else:
            words += [flag(name), str(value)]
    return shlex.join(words)


def configure_log(quiet: bool) -> None:
    """Lines of the log go to standard output; with `quiet` only warnings do."""
    log.handlers.clear()
    log.setLevel(logging.INFO)
    log.propagate = False
    handler = logging.StreamHandler(sys.stdout)
    handler.setLevel(logging.WARNING if quiet else logging.INFO)
    log.addHandler(handler)


def weights_sha256(model: keras.Model) -> str:
    """A checksum over names, shapes and bytes of the trained weights, in the model's order."""
    digest = hashlib.sha256()
    for variable in model.trainable_variables:
        value = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def data_sha256(splits: dict[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """A checksum over all examples; a run that goes on must find the same ones."""
    digest = hashlib.sha256()
    for arrays in splits.values():
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def save_keras_file(model: keras.Model, path: Path) -> None:
    """Writes a `.keras` file that `keras.saving.load_model` reads without this package.

    It holds a copy of the model that was never compiled: our loss and schedule would have to be
    imported to be loaded. The file is written aside and renamed.
    """
    copy = type(model).from_config(model.get_config())
    copy.set_weights(model.get_weights())
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    copy.save(temporary)
    os.replace(temporary, path)


def write_json(path: Path, content: dict) -> None:
    """Writes JSON so that a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, default=float)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def versions() -> dict[str, str]:
    """What the results were made with."""
    names = ("keras", "keras-nlp", "tensorflow", "tensorflow-text", "numpy")
    return {"python": sys.version.split()[0], **{n: importlib.metadata.version(n) for n in names}}


def _itemsize(dtype: str) -> int:
    return tf.as_dtype(dtype).size
