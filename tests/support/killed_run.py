"""Runs a recipe that kills itself at a chosen moment: the subject of the resume tests.

    python tests/support/killed_run.py '{"run": "bert", "kill": {"at": "halfway", "save": 2}}' OUT

`kill.at` is one of "step" (after step `kill.step`, before anything is logged or saved of it),
"before", "halfway", "rename", "replace" (between the two renames that replace a checkpoint) or
"after" (of the save number `kill.save`, counted in this process), "full" (from that save on no
file grows beyond `LARGEST` bytes), "nan" (the loss, at step `kill.step`), "downloading" or
"tokenising" (which then would take a minute),
"evaluating" (after the second batch of evaluation number `kill.evaluation`), "deaf" (at the test,
twice, a second between them, as if saving took for ever), "full output" and "closed output"
(standard output, from the beginning), or missing: not killed. `kill.signal` is KILL by default.
Other keys are options of the recipe.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

try:
    import strategy_run  # beside this file, when it is run
except ModuleNotFoundError:
    from tests.support import strategy_run

LARGEST = 100_000  # more than any file of these runs but their weights
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
    "tiny": ("tiny_recipe", dict(epochs=3, max_steps=20, quiet=True)),
    "tiny_together": (
        "tiny_recipe",
        dict(epochs=3, max_steps=20) | TOGETHER,
    ),
    "tiny_half": ("tiny_recipe", dict(epochs=3, max_steps=20, precision="mixed_float16")),
    "tiny_exact": (
        "tiny_recipe",
        dict(epochs=3, max_steps=20, precision="float64", dropout=0.0, lr_scaling="none"),
    ),
    "bert": ("bert_mlm", strategy_run.TINY_TEXT | SMALL),
    "bert_together": (
        "bert_mlm",
        strategy_run.TINY_TEXT | SMALL | TOGETHER | dict(whole_word_masking=True),
    ),
    "bert_half": (
        "bert_mlm",
        strategy_run.TINY_TEXT | SMALL | dict(precision="mixed_float16"),
    ),
    "bert_xla": ("bert_mlm", strategy_run.TINY_TEXT | SMALL | dict(jit="on")),
    "mnist": ("mnist", strategy_run.TINY_IMAGES | SMALL),
    "mnist_together": (
        "mnist",
        strategy_run.TINY_IMAGES | SMALL | TOGETHER,
    ),
    "dna": ("dna_melting", strategy_run.TINY_OLIGOS | SMALL),
    "text": ("text_classification", strategy_run.TINY_SENTENCES | SMALL),
    # For another number of replicas: float64, no dropout.
    "bert_exact": (
        "bert_mlm",
        strategy_run.TINY_TEXT | SMALL | dict(precision="float64", dropout=0.0),
    ),
}


def arm(kill: dict) -> None:
    """Makes this process kill itself at the moment that was chosen."""
    number = getattr(signal, "SIG" + kill.get("signal", "KILL"))

    def shoot():
        os.kill(os.getpid(), number)

    at = kill.get("at")
    if "worker" in kill:
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        restarted = (Path(sys.argv[2]) / "checkpoints").exists()
        if task["index"] != kill["worker"] or restarted:
            return
    if at == "full output":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    elif at == "closed output":  # as of `... | head -1` after its line
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    elif at == "nan":
        _spoil_the_weights(kill["step"])
    elif at in ("downloading", "tokenising"):
        from data import word_pieces
        from recipes import bert_mlm

        def slow(*args, **kwargs):
            shoot()
            time.sleep(60)

        if at == "downloading":
            bert_mlm.load_text = slow
        else:
            word_pieces.tokenize = slow
    elif at == "evaluating":
        _at_an_evaluation(kill["evaluation"], shoot)
    elif at == "deaf":

        def twice():
            shoot()
            time.sleep(1)
            shoot()
            time.sleep(60)

        _at_an_evaluation(1, twice)
    elif at == "step":
        _at_a_step(kill["step"], shoot)
    elif at:
        _at_a_save(at, kill["save"], shoot)


def _spoil_the_weights(at_step: int) -> None:
    from callbacks.stop_on_bad_loss import StopOnBadLoss

    stock = StopOnBadLoss.on_step_end

    def bad(self, step, logs):
        if step == at_step:  # what a diverged step leaves in the weights
            for variable in self.model.trainable_variables:
                variable.assign(variable * float("nan"))
            logs = logs | {"loss": float("nan")}
        stock(self, step, logs)

    StopOnBadLoss.on_step_end = bad


def _at_an_evaluation(number: int, shoot) -> None:
    from callbacks.checkpoint import Checkpoint

    stock, seen = Checkpoint.on_test_batch_end, 0

    def on_test_batch_end(self, batch, logs=None):
        nonlocal seen
        seen += batch == 1
        if batch == 1 and seen == number:
            shoot()
        stock(self, batch, logs)

    Checkpoint.on_test_batch_end = on_test_batch_end


def _at_a_step(at_step: int, shoot) -> None:
    from callbacks.stop_at_step import StopAtStep
    from callbacks.tensorboard import TensorBoard

    stock_step, stock_record = StopAtStep.on_step_end, TensorBoard.on_record

    def on_step_end(self, step, logs):
        if step == at_step:
            shoot()
        stock_step(self, step, logs)

    def on_record(self, record):
        stock_record(self, record)
        self.flush()  # or the kill would leave nothing on disk that has to be cut off

    StopAtStep.on_step_end, TensorBoard.on_record = on_step_end, on_record


def _at_a_save(at: str, number: int, shoot) -> None:
    from callbacks.checkpoint import Checkpoint
    from data import checksums

    stock_save, stock_sha, stock_rename = Checkpoint.save, checksums.sha256_of, os.rename
    saves, due = 0, False

    def save(self, *args, **kwargs):
        nonlocal saves, due
        saves += 1
        due = saves == number
        if due and at == "before":
            shoot()
        if due and at == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, resource.RLIM_INFINITY))
        stock_save(self, *args, **kwargs)
        if due and at == "after":
            shoot()
        due = False

    def sha256_of(path):  # the files are written, nothing is synced or named yet
        if due and at == "halfway":
            with open(path, "r+b") as file:
                file.truncate(path.stat().st_size // 2)
            shoot()
        return stock_sha(path)

    def rename(source, target):
        if due and at == "rename":
            shoot()
        stock_rename(source, target)
        if due and at == "replace" and str(target).endswith(".old"):
            shoot()

    Checkpoint.save, checksums.sha256_of, os.rename = save, sha256_of, rename


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
