"""Runs a recipe's command line with slow steps; the chief may kill itself while it saves.

python -m ray_recipe MODULE ARGUMENTS...

RECIPES_TEST_STEP_SECONDS: the minimal seconds of a step. RECIPES_TEST_KILL_AT_SAVE: the chief
kills itself at this checkpoint of its first process, before the checkpoint gets its name.
"""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

from callbacks.late_numbers import CallbackList


def slow_down(seconds: float) -> None:
    stock = CallbackList.on_train_batch_end

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(seconds)
        stock(self, batch, logs)

    CallbackList.on_train_batch_end = on_train_batch_end


def kill_at_save(number: int) -> None:
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    if task or any(run_dir.glob("checkpoints/step-*")):
        return
    stock, named = os.replace, set()

    def replace(source, target):
        if Path(target).match("checkpoints/step-*"):
            named.add(Path(target).name)
            if len(named) == number:
                os.kill(os.getpid(), signal.SIGKILL)
        stock(source, target)

    os.replace = replace


if __name__ == "__main__":
    del sys.argv[0]
    slow_down(float(os.environ.get("RECIPES_TEST_STEP_SECONDS", "0")))
    if "RECIPES_TEST_KILL_AT_SAVE" in os.environ and "TF_CONFIG" in os.environ:
        kill_at_save(int(os.environ["RECIPES_TEST_KILL_AT_SAVE"]))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
