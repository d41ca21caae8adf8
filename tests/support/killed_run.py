"""Runs a recipe that kills itself at a chosen moment: the subject of the resume tests.

    python tests/support/killed_run.py '{"run": "bert", "kill": {"at": "halfway", "save": 2}}' OUTPUT_FOLDER

`kill.at` is one of "step" (behind step `kill.step`), "before", "halfway", "rename", "after" (of the
save number `kill.save`, counted in this process), "full" (the disk is, at that save), "nan" (the
loss, at step `kill.step`), "downloading" or "tokenising" (which then would take a minute),
"evaluating" (behind the second batch of evaluation number `kill.evaluation`), or missing: not
killed. `kill.signal` is KILL by default. Other keys are options of the recipe.
"""

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

try:
    import strategy_run  # beside this file, when it is run
except ModuleNotFoundError:
    from tests.support import strategy_run

# 9 steps an epoch; the run ends in the middle of the third.
SMALL = dict(
    precision="float32",
    max_examples=72,
    epochs=3,
    checkpoint_every=4,
    log_every=2,
    dropout=0.1,
    quiet=True,
)
TOGETHER = strategy_run.TOGETHER | dict(validate_every=3, test_every=4)
RUNS = {
    "bert": ("bert_mlm", strategy_run.TINY_TEXT | SMALL),
    "bert_together": (
        "bert_mlm",
        strategy_run.TINY_TEXT | SMALL | TOGETHER,
    ),
    "bert_half": (
        "bert_mlm",
        strategy_run.TINY_TEXT | SMALL | dict(precision="mixed_float16"),
    ),
    "mnist": ("mnist", strategy_run.TINY_IMAGES | SMALL),
    "mnist_together": (
        "mnist",
        strategy_run.TINY_IMAGES | SMALL | TOGETHER,
    ),
    "dna": ("dna_melting", strategy_run.TINY_OLIGOS | SMALL),
    # For another number of replicas: float64, no dropout.
    "bert_exact": (
        "bert_mlm",
        strategy_run.TINY_TEXT | SMALL | dict(precision="float64", dropout=0.0),
    ),
}


def arm(kill: dict) -> None:
    """Makes this process kill itself at the moment that was chosen."""
    from callbacks import checkpoint
    from callbacks.stop_at_step import StopAtStep

    number = getattr(signal, "SIG" + kill.get("signal", "KILL"))

    def shoot():
        os.kill(os.getpid(), number)

    saves = 0
    at = kill.get("at")
    if "worker" in kill:
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        restarted = (Path(sys.argv[2]) / "checkpoints").exists()
        if task["index"] != kill["worker"] or restarted:
            return
    if at == "nan":
        from callbacks.stop_on_bad_loss import StopOnBadLoss

        stock_bad = StopOnBadLoss.on_step_end

        def bad(self, step, logs):
            if step == kill["step"]:  # what a diverged step leaves in the weights
                for variable in self.model.trainable_variables:
                    variable.assign(variable * float("nan"))
                logs = logs | {"loss": float("nan")}
            stock_bad(self, step, logs)

        StopOnBadLoss.on_step_end = bad
    elif at in ("downloading", "tokenising"):
        from data import text, word_pieces

        def slow(*args, **kwargs):
            shoot()
            time.sleep(60)

        if at == "downloading":
            text.load_text = slow
        else:
            word_pieces.tokenize = slow
    elif at == "evaluating":
        stock_batch = checkpoint.Checkpoint.on_test_batch_end

        seen = 0

        def on_test_batch_end(self, batch, logs=None):
            nonlocal seen
            seen += batch == 1
            if batch == 1 and seen == kill["evaluation"]:
                shoot()
            stock_batch(self, batch, logs)

        checkpoint.Checkpoint.on_test_batch_end = on_test_batch_end
    elif at == "step":
        stock_step = StopAtStep.on_step_end

        def on_step_end(self, step, logs):
            if step == kill["step"]:
                shoot()
            stock_step(self, step, logs)

        StopAtStep.on_step_end = on_step_end
    elif at:
        stock_save, stock_sha, stock_rename = (
            checkpoint.Checkpoint.save,
            checkpoint._sha256,
            os.rename,
        )
        due = False

        def full(path):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def save(self, *args, **kwargs):
            nonlocal saves, due
            saves += 1
            due = saves == kill["save"]
            if due and at == "before":
                shoot()
            if due and at == "full":
                self.model.save_weights = full
            stock_save(self, *args, **kwargs)
            if due and at == "after":
                shoot()
            due = False

        def sha256(path):  # the files are written, nothing is synced or named yet
            if due and at == "halfway":
                with open(path, "r+b") as file:
                    file.truncate(path.stat().st_size // 2)
                shoot()
            return stock_sha(path)

        def rename(*args):
            if due and at == "rename":
                shoot()
            stock_rename(*args)

        checkpoint.Checkpoint.save = save
        checkpoint._sha256 = sha256
        os.rename = rename


def main(chosen: dict, output: Path) -> None:
    import importlib
    from unittest import mock

    from recipes import run as runs

    module, options = RUNS[chosen.pop("run")]
    kill = chosen.pop("kill", {})
    recipe = importlib.import_module(f"recipes.{module}")
    options = options | strategy_run.data_options(module, output.parent)
    options |= dict(run_dir=output, cache_dir=output.parent / "cache") | chosen
    arm(kill)
    with mock.patch.object(runs, "parse", lambda *args, **kwargs: recipe.Options(**options)):
        runs.command_line(recipe.Options, recipe.main)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
