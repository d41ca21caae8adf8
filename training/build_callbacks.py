"""Builds a run's callbacks, in the order that makes a resumed run identical."""

from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import tensorflow as tf

from callbacks import checkpoint as checkpoints
from callbacks.checkpoint import Checkpoint, CheckpointInfo, Restore
from callbacks.fingerprint import Fingerprint
from callbacks.metrics_file import MetricsFile
from callbacks.profile import Profile
from callbacks.records import EvaluateEvery, Records
from callbacks.steps import StepCallback
from callbacks.stopping import StopAtStep, StopOnBadLoss
from callbacks.tensorboard import TensorBoard
from callbacks.terminal_log import TerminalLog
from callbacks.throughput import Throughput
from training import checks
from training.options import SharedOptions, profiled_steps, shown
from training.plan import Plan


class RunCallbacks:
    """Holds the callbacks of one run.

    Args:
        run_dir: the run's folder.
        options: the recipe's.
        is_chief: whether this process writes what is shared.
        progress_bar: whether the terminal shows a progress bar.
        workers: the processes that train together.
        asked_to_stop: tells, equally on all workers, whether the run shall stop.
    """

    def __init__(
        self,
        run_dir: Path,
        options: SharedOptions,
        is_chief: bool,
        progress_bar: bool,
        workers: int,
        asked_to_stop: Callable[[], bool],
    ):
        self.run_dir = run_dir
        self.options = options
        self.is_chief = is_chief
        self.asked_to_stop = asked_to_stop
        self.tensorboard = TensorBoard(run_dir if is_chief else None)
        self.metrics_file = MetricsFile(run_dir / "metrics.jsonl" if is_chief else None)
        self.throughput = Throughput()
        self.terminal = TerminalLog(self.throughput, is_chief and progress_bar)
        self.records = Records(
            [self.tensorboard, self.metrics_file, self.terminal],
            self.throughput,
            options.log_every,
            workers=workers,
        )
        first, last = profiled_steps(options.profile) or (0, 0)
        self.profile = Profile(run_dir if is_chief and last else None, first, last)
        self.fingerprint = Fingerprint()
        self.checkpoint: Checkpoint  # made by in_order()

    def in_order(
        self,
        plan: Plan,
        info: CheckpointInfo | None,
        validation: tf.data.Dataset,
        test: tf.data.Dataset,
        extra: Sequence[keras.callbacks.Callback],
    ) -> list[keras.callbacks.Callback]:
        """Returns what `fit()` gets.

        Args:
            plan: what the run does.
            info: the checkpoint that it resumes from, or None.
            validation: for `--validate-every`.
            test: for `--test-every`.
            extra: the recipe's own.

        Raises:
            RunError: as `checks.stateful` and `checks.require_callbacks` say.
        """
        options = self.options
        self.checkpoint = Checkpoint(
            self.run_dir / "checkpoints",
            every=options.checkpoint_every,
            keep=options.keep_checkpoints,
            is_chief=self.is_chief,
            asked_to_stop=self.asked_to_stop,
            best=options.keep_best,
            best_mode=options.keep_best_mode,
            patience=options.early_stopping,
            restored=info,
        )
        validator, tester = (
            EvaluateEvery(self.records, data, split, every, [self.checkpoint])
            for data, split, every in (
                (validation, "validation", options.validate_every),
                (test, "test", options.test_every),
            )
        )
        self.tensorboard.options = shown(options) | plan.fixed()
        stateful = {
            "records": self.records,
            "metrics_file": self.metrics_file,
            "tensorboard": self.tensorboard,
            "validator": validator,
            "tester": tester,
            "fingerprint": self.fingerprint,
        } | checks.stateful(extra)
        checks.require_callbacks(info, stateful)
        self.checkpoint.stateful_callbacks = stateful
        self.terminal.step = plan.steps_done
        in_order = [
            Restore(info, stateful),
            StopAtStep(),
            StopOnBadLoss(lambda: checkpoints.newest_name(self.checkpoint.folder)),
            self.throughput,  # before whatever evaluates, writes or saves
            self.profile,
            self.fingerprint,
            *extra,
            self.records,
            self.tensorboard,
            self.metrics_file,
            self.terminal,
            validator,
            tester,
            self.checkpoint,  # saves what the others have logged
        ]
        for callback in in_order:
            if isinstance(callback, StepCallback):
                callback.count_steps(plan.steps_per_epoch, plan.total_steps)
        return in_order

    def close(self) -> None:
        """Releases the terminal and the profiler, also after an error."""
        self.terminal.close()
        self.profile.close()
