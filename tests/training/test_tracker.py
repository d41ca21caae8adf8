"""`--tracker` in a run: what is sent of one that was stopped and resumed is what is sent of one."""

import os
import signal

import pytest

from callbacks.errors import Stopped
from callbacks.stop_at_step import StopAtStep
from callbacks.tracker import Tracker
from tests.support import tiny_recipe
from training import build_callbacks, options
from training.errors import OptionsError


@pytest.fixture
def sent(monkeypatch):
    """What came to a tracker that stands in for wandb's."""
    there = []

    class Fake(Tracker):
        name = "wandb"

        def open_run(self, run_id):
            there.append(("open", run_id, self.options["seed"]))
            return run_id or "number 7"

        def send(self, step, row):
            there.append((step, row))

        def close_run(self, finished):
            there.append(("close", finished))

    monkeypatch.setattr(build_callbacks, "WandbTracker", Fake)
    monkeypatch.setattr(options, "is_installed", lambda package: package == "wandb")
    return there


def train(folder):
    return tiny_recipe.main(
        tiny_recipe.Options(run_dir=folder, tracker="wandb", validate_every=3, test_every=4)
    )


def without_speed(rows):
    return [
        (step, {k: v for k, v in row.items() if "per_second" not in k})
        for step, row in (item for item in rows if isinstance(item[0], int))
    ]


def test_a_stopped_run_resumes_the_same_run_no_step_twice(sent, tmp_path, monkeypatch):
    train(tmp_path / "unbroken")
    unbroken = without_speed(sent)
    steps = [step for step, _ in unbroken]
    assert steps == sorted(set(steps)) and steps[-1] == 2 * tiny_recipe.STEPS_PER_EPOCH
    assert {"test/accuracy", "validation/accuracy"} <= set(unbroken[-1][1])
    assert sent[0] == ("open", None, 0) and sent[-1] == ("close", True)

    sent.clear()
    stock = StopAtStep.on_step_end

    def on_step_end(self, now, logs):
        if now in (6, 9, 10):
            os.kill(os.getpid(), signal.SIGTERM)
        stock(self, now, logs)

    monkeypatch.setattr(StopAtStep, "on_step_end", on_step_end)
    for _ in range(3):
        with pytest.raises(Stopped):
            train(tmp_path / "stopped")
    train(tmp_path / "stopped")
    assert [item[1] for item in sent if item[0] == "open"] == [None] + 3 * ["number 7"]
    assert without_speed(sent) == unbroken


def test_a_missing_package_is_named_before_anything_is_loaded(monkeypatch, tmp_path, as_command):
    monkeypatch.setattr(options, "is_installed", lambda package: False)
    folder = tmp_path / "run"
    status, _, err = as_command("--tracker", "mlflow", "--run-dir", folder)
    assert status == 2 and not folder.exists()
    assert "the package mlflow is missing; pip install -e '.[mlflow]' has it" in err
    with pytest.raises(OptionsError, match="wandb"):
        tiny_recipe.main(tiny_recipe.Options(tracker="wandb", run_dir=folder))


def test_a_folder_of_the_packages_name_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not options.is_installed("no_such_tracker") and options.is_installed("keras")
