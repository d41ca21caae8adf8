"""Runs a recipe that kills itself at a chosen moment: the subject of the resume tests.

    python tests/support/killed_run.py '{"run": "bert", "kill": {"at": "halfway", "save": 2}}' OUT

`kill.at` is one of "step" (after step `kill.step`, before anything is logged or saved of it),
"before", "halfway", "rename", "replace" (between the two renames that replace a checkpoint) or
"after" (of the save number `kill.save`, counted in this process), "full" (of that save: the disk is
full), "downloading" or "tokenising" (slowed down to a minute), "evaluating" (after the second batch
of evaluation number `kill.evaluation`), or missing: not killed. `kill.signal` is KILL by default.
`kill.slow` lets the chief write for so many seconds, and each worker note the checkpoints that it
leaves behind in checkpoints-N.txt beside the run. Other keys are options of the recipe.
"""

import atexit
import errno
import glob
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
TINY = dict(epochs=3, max_steps=20, quiet=True)
BERT = strategy_run.TINY_TEXT | SMALL
IMAGES = strategy_run.TINY_IMAGES | SMALL
TOGETHER = strategy_run.TOGETHER | dict(validate_every=3, test_every=4)
# For another number of replicas.
EXACT = dict(precision="float64", dropout=0.0, lr_scaling="none")
RUNS = {
    "tiny": ("tiny_recipe", TINY),
    "tiny_together": ("tiny_recipe", TINY | TOGETHER),
    "tiny_half": ("tiny_recipe", TINY | dict(precision="mixed_float16")),
    "tiny_xla": ("tiny_recipe", TINY | dict(jit="on")),
    "tiny_exact": ("tiny_recipe", TINY | EXACT),
    "bert": ("bert_mlm", BERT),
    "bert_together": ("bert_mlm", BERT | TOGETHER),
    "bert_half": ("bert_mlm", BERT | dict(precision="mixed_float16")),
    "bert_xla": ("bert_mlm", BERT | dict(jit="on")),
    "bert_exact": ("bert_mlm", BERT | EXACT),
    "mnist": ("mnist", IMAGES),
    "mnist_together": ("mnist", IMAGES | TOGETHER),
    "dna": ("dna_melting", strategy_run.TINY_OLIGOS | SMALL | dict(dropout=0.1)),
    "text": ("text_classification", strategy_run.TINY_SENTENCES | SMALL),
    "scores": (
        "text_classification",
        strategy_run.TINY_SENTENCES | SMALL | dict(labels="scores", validate_every=3),
    ),
    "several": (
        "text_classification",
        strategy_run.TINY_SENTENCES | SMALL | dict(labels="several", validate_every=3),
    ),
}


def wrap(owner, name: str, make) -> None:
    """Replaces a function of a class or module by `make(stock function)`, in this process."""
    setattr(owner, name, make(getattr(owner, name)))


def arm(kill: dict) -> None:
    """Makes this process kill itself at the chosen moment."""
    number = getattr(signal, "SIG" + kill.get("signal", "KILL"))
    at = kill.get("at")

    def shoot():
        os.kill(os.getpid(), number)

    if "slow" in kill:
        _slow_down(kill["slow"])
    if "worker" in kill:
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        restarted = (Path(sys.argv[2]) / "checkpoints").exists()
        if task["index"] != kill["worker"] or restarted:
            return
    if at in ("downloading", "tokenising"):
        _before_training(at, shoot)
    elif at == "evaluating":
        _at_an_evaluation(kill["evaluation"], shoot)
    elif at == "step":
        _at_a_step(kill["step"], shoot)
    elif at:
        _at_a_save(at, kill["save"], shoot)


def _slow_down(seconds: float) -> None:
    from data import files

    run_dir, index = Path(sys.argv[2]), json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    wrap(files, "sha256_of", lambda stock: lambda path: (time.sleep(seconds), stock(path))[1])

    def note():
        names = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
        run_dir.with_name(f"checkpoints-{index}.txt").write_text(" ".join(names))

    atexit.register(note)


def _before_training(at: str, shoot) -> None:
    from data import word_pieces
    from recipes import bert_mlm

    owner, name = (bert_mlm, "load_text") if at == "downloading" else (word_pieces, "tokenize")
    wrap(owner, name, lambda stock: lambda *args, **kwargs: (shoot(), time.sleep(60)))


def _at_an_evaluation(number: int, shoot) -> None:
    from callbacks.stopping import StopEvaluation

    seen = []

    def make(stock):
        def on_test_batch_end(self, batch, logs=None):
            if batch == 1:
                seen.append(batch)
                if len(seen) == number:
                    shoot()
            stock(self, batch, logs)

        return on_test_batch_end

    wrap(StopEvaluation, "on_test_batch_end", make)


def _at_a_step(at_step: int, shoot) -> None:
    from callbacks.stopping import StopAtStep
    from callbacks.tensorboard import TensorBoard

    def at_the_step(stock):
        def on_step_end(self, step, logs):
            if step == at_step:
                shoot()
            stock(self, step, logs)

        return on_step_end

    def flushed(stock):
        def on_record(self, record):
            stock(self, record)
            self.flush()  # otherwise the kill would leave nothing on disk to truncate

        return on_record

    wrap(StopAtStep, "on_step_end", at_the_step)
    wrap(TensorBoard, "on_record", flushed)


def _at_a_save(at: str, number: int, shoot) -> None:
    from callbacks.checkpoint import Checkpoint
    from data import files

    stock_save, stock_sha, stock_replace = Checkpoint.save, files.sha256_of, os.replace
    saves, due = 0, False

    def save(self, *args, **kwargs):
        nonlocal saves, due
        saves += 1
        due = saves == number
        if due and at == "before":
            shoot()
        if due and at == "full":
            self.model.save_weights = full
        stock_save(self, *args, **kwargs)
        if due and at == "after":
            shoot()
        due = False

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sha256_of(path):  # the files are written, nothing is synced or named yet
        if due and at == "halfway":
            with open(path, "r+b") as file:
                file.truncate(path.stat().st_size // 2)
            shoot()
        return stock_sha(path)

    def replace(source, target):
        # An existing target has another name at this moment.
        if due and (
            at == "rename" or at == "replace" and glob.glob(f"{target.parent}/.*.replaced")
        ):
            shoot()
        stock_replace(source, target)

    Checkpoint.save, files.sha256_of, os.replace = save, sha256_of, replace


def main(chosen: dict, output: Path) -> None:
    import importlib
    from unittest import mock

    from training import command_line

    module, options = RUNS[chosen.pop("run")]
    kill = chosen.pop("kill", {})
    package = "tests.support" if module == "tiny_recipe" else "recipes"
    recipe = importlib.import_module(f"{package}.{module}")
    if package == "recipes":
        options = options | strategy_run.data_options(module, output.parent)
    options = options | dict(run_dir=output, cache_dir=output.parent / "cache") | chosen
    arm(kill)
    with mock.patch.object(
        command_line, "parse", lambda *args, **kwargs: recipe.Options(**options)
    ):
        command_line.command_line(recipe.Options, recipe.main)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
