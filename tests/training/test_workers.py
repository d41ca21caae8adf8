"""Tests that workers which differ are refused; each test starts two."""

import json
import os

import keras
import numpy as np
import pytest

from callbacks import checkpoint
from callbacks.steps import StepCallback
from data import batches, files
from distribution.errors import DistributionError
from tests.support import forked, processes, tiny_recipe
from training import artifacts, run, run_folder
from training.errors import OptionsError, RunError, WorkerLost

pytestmark = pytest.mark.long  # two processes import TensorFlow and connect


def index() -> int:
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


class Near(keras.metrics.Mean):
    """The mean probability of the label; a class of the user's, which each worker tries."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        found = keras.ops.take_along_axis(keras.ops.softmax(y_pred), y_true[:, None], axis=-1)
        super().update_state(found, sample_weight)


def with_own_metric(options, rate):
    return tiny_recipe.compile_arguments(options, rate) | {"weighted_metrics": [Near("near")]}


def outcome(run_dir, data=None, extra=(), **options):
    """The results of a run of this worker, or its error's line."""
    options = tiny_recipe.Options(run_dir=run_dir, strategy="multi_worker", **options)
    try:
        return tiny_recipe.main(options, data=data, extra=extra, arguments=with_own_metric)
    except (DistributionError, OptionsError, RunError, WorkerLost) as error:
        return str(error)


def refusals(folder):
    """The lines of this worker, by what differs between the two."""
    own, said = index(), {}
    said["--run-dir"] = outcome(folder / "one" if own else None)
    run_folder.TOKEN_SECONDS = 2
    said["folder"] = outcome(folder / f"folder-{own}")
    tiny_recipe.data_sha256 = lambda data: "a recipe without a checksum"
    other = tiny_recipe.splits()
    for split, (x, y) in other.items():
        if split != "train":
            data = tiny_recipe.splits() | {split: (x + own / 8, y)}
            said[split] = outcome(folder / split, data)
    order = batches.SHUFFLE_ROUNDS
    batches.SHUFFLE_ROUNDS += 2 * own
    said["order"] = outcome(folder / "order")
    batches.SHUFFLE_ROUNDS = order
    stock = artifacts.main_versions
    artifacts.main_versions = lambda: stock() | {"keras": f"3.{own}"}
    said["version"] = outcome(folder / "version")
    artifacts.main_versions = stock
    return said


def test_workers_that_differ_are_refused(tmp_path):
    found = forked.run(refusals, tmp_path, workers=2, cpus=1)
    for own, said in enumerate(found):
        assert said.pop("--run-dir").startswith("--run-dir: passed to some workers only")
        assert "not all workers see the chief's files there" in said.pop("folder")
        for name, split in (("valid", "validation"), ("test", "test"), ("order", "training")):
            assert f"the workers have different {split} data" in said.pop(name)
        assert f"keras 3.{own}, " in said["version"]
        assert said.pop("version").startswith("the workers have different versions;")
        assert not said
    assert not list(tmp_path.glob("folder-*")) and not list(tmp_path.glob("**/.shared"))


def rounded_otherwise(folder):
    """The steps of a run where one worker rounds its data otherwise, and its copy has no git."""
    data = {
        name: (np.nextafter(x, x + index(), dtype="float32"), y)
        for name, (x, y) in tiny_recipe.splits().items()
    }
    git = run.git_state()
    run.git_state = lambda: None if index() else git
    tiny_recipe.data_sha256 = lambda data: "the same"
    return outcome(folder / "run", data)["steps"]


def test_a_processor_that_rounds_differently_is_not_refused(tmp_path):
    assert forked.run(rounded_otherwise, tmp_path, workers=2, cpus=1) == [18, 18]


class Budget(StepCallback):
    """Ends the training on the second worker alone, after a step or at an epoch's end."""

    def __init__(self, step):
        super().__init__()
        self.last = step

    def on_step_end(self, step, logs):
        if index() and step == self.last:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        if index() and self.last is None:
            self.model.stop_training = True


def ended_by_one_worker(folder):
    """The steps of runs that a callback of one worker ends."""
    return [outcome(folder / f"run-{step}", extra=[Budget(step)])["steps"] for step in (5, None)]


def test_a_callback_of_one_worker_ends_the_run_of_all(tmp_path):
    found = forked.run(ended_by_one_worker, tmp_path, workers=2, cpus=1)
    assert found == [[5, tiny_recipe.STEPS_PER_EPOCH]] * 2


def best_that_one_worker_cannot_read(folder):
    """The step of the tested weights, and their checksum; the best epoch is the first."""
    stock = files.damage

    def damage(path, names):
        return "a bad disk" if index() and "step" not in str(path) else stock(path, names)

    checkpoint.files.damage = damage
    found = outcome(
        folder / "run",
        keep_best="val_loss",
        keep_best_mode="max",
        early_stopping=2,
        epochs=2,
        keep_checkpoints=1,
    )
    return found["weights_of_step"], found["weights_sha256"]


def test_no_worker_tests_the_best_weights_if_another_one_cannot(tmp_path):
    one, two = forked.run(best_that_one_worker_cannot_read, tmp_path, workers=2, cpus=1)
    assert one == two and one[0] == 2 * tiny_recipe.STEPS_PER_EPOCH


def other_devices(folder):
    return outcome(folder / "run", replicas=1 + index())


def test_workers_with_other_numbers_of_devices_are_refused(tmp_path):
    for own, said in enumerate(forked.run(other_devices, tmp_path, workers=2, cpus=1)):
        assert said.startswith(f"the workers have different devices (this one: {own + 1}); pass")


def test_a_worker_that_another_one_has_left_says_so_in_one_line(tmp_path):
    """A full disk ends the chief."""
    processes_of = [
        processes.start(
            str(processes.SUPPORT / "killed_run.py"),
            json.dumps({"run": "tiny", "strategy": "multi_worker", "kill": kill}),
            str(tmp_path / "run"),
            TF_CONFIG=environ["TF_CONFIG"],
        )
        for environ, kill in zip(
            forked.environments(2), ({"at": "full", "save": 2}, {}), strict=True
        )
    ]
    said = [process.communicate(timeout=600)[0] for process in processes_of]
    assert [process.returncode for process in processes_of] == [1, 1], said
    assert "cannot be written: No space left on device" in said[0]
    assert said[1].splitlines()[-1].startswith("tiny_recipe: another worker ended first; its log")
    assert "Traceback" not in said[1]
