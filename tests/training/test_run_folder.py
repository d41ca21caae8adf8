"""Tests which contents of a run's folder are accepted and which refused, without training."""

import errno
import json
import os
import shutil
import types

import numpy as np
import pytest

from callbacks import checkpoint
from callbacks.checkpoint import CheckpointInfo
from callbacks.errors import CannotSave
from data import files
from tests.support import tiny_recipe
from training import run_folder
from training.errors import RunError
from training.run_folder import RunFolder

FACTS = {
    "dataset": "numbers",
    "data_sha256": "abc",
    "global_batch_size": 8,
    "learning_rate": 0.01,
    "steps_per_epoch": 9,
    "total_steps": 18,
    "epochs": 2,
}


def options(**changes):
    return tiny_recipe.Options(**changes)


@pytest.fixture
def opened(tmp_path):
    """Opens a run's folder; all are closed in the end."""
    folders = []

    def call(path=tmp_path / "run", recipe="tiny_recipe", is_chief=True, **changes):
        folders.append(RunFolder(path, recipe, options(**changes), is_chief))
        try:
            folders[-1].open()
        except RunError:
            folders[-1].close()
            raise
        return folders[-1]

    yield call
    for folder in folders:
        folder.close()


@pytest.fixture
def there(opened, tmp_path):
    """A run that has begun: `options.json`, and nothing else."""
    folder = opened()
    folder.keep_facts(FACTS)
    folder.close()
    return tmp_path / "run"


@pytest.fixture
def trained(there):
    """A run that has trained, and whose checkpoint is damaged."""
    (there / "checkpoints" / "damaged-step-00000009").mkdir(parents=True)
    return there


def at_step(folder, step, **state):
    """Makes a folder resume from a checkpoint of a step, which does not lie there."""
    folder.facts = dict(FACTS)
    folder.checkpoint = CheckpointInfo(
        folder.path / "checkpoints" / "x", step, 1, 0, {"finished": False} | state
    )
    return folder


def save_checkpoint(there, step, **state):
    """Writes a checkpoint without weights."""
    (there / "checkpoints").mkdir(exist_ok=True)
    state = {
        "step": step,
        "epochs_done": step // 9,
        "steps_into_epoch": step % 9,
        "finished": False,
        "callbacks": {"records": {"history": {}}},
    } | state
    target = there / "checkpoints" / f"step-{step:08d}"
    checkpoint.write(target, state, lambda path: path.touch(), target.parent)


def save_results(there, steps):
    """Writes the results and the model of a finished run."""
    results = {"recipe": "tiny_recipe", "test": {}, "weights_sha256": "x", "steps": steps}
    (there / "results.json").write_text(json.dumps(results))
    (there / "model").mkdir()
    (there / "model" / "x").touch()
    files.write_checksums(there / "model")


class TestForeignFolders:
    @pytest.mark.parametrize("name", ["results.json", ".hidden"])
    def test_are_refused_and_left_alone(self, opened, tmp_path, name):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / name).write_text("mine")
        with pytest.raises(RunError, match=f"not a run directory .contains {name}.; pass a new"):
            opened()
        assert os.listdir(tmp_path / "run") == [name]

    def test_one_in_which_only_a_launcher_has_written_will_do(self, opened, tmp_path):
        (tmp_path / "run").mkdir()
        for name in (
            ".lock",
            "worker-0.log",
            "chief-0.log",
            "ps-1.log",
            f".options.json.123{files.PARTIAL}",
            "lost+found",  # of a new disk
        ):
            (tmp_path / "run" / name).touch()
        assert opened().checkpoint is None


class TestDamagedFiles:
    @pytest.mark.parametrize("content", [b"null", b"\xff", b'{"recipe": "x"}'])
    def test_options_json(self, trained, opened, content):
        there = trained
        (there / "options.json").write_bytes(content)
        with pytest.raises(RunError, match="options.json: ") as caught:
            opened()
        assert len(str(caught.value).splitlines()) == 1
        assert (there / "options.json").read_bytes() == content

    @pytest.mark.parametrize(
        "change, said",
        [
            ({"learning_rate": None}, "it lacks learning_rate"),
            ({"global_batch_size": 0}, "global_batch_size must be a whole number from 1, found 0"),
        ],
    )
    def test_a_plan_that_cannot_be_resumed(self, trained, opened, change, said):
        path = trained / "options.json"
        content = json.loads(path.read_text())
        content["resolved"] |= change
        path.write_text(json.dumps(content))
        with pytest.raises(RunError, match=f"options.json: damaged, {said}$"):
            opened()

    def test_results_json(self, there, opened):
        """An empty object is no finished run."""
        (there / "model").mkdir()
        (there / "results.json").write_text("{}")
        with pytest.raises(RunError, match="results.json: damaged, it lacks recipe, test"):
            opened()


class TestOtherRuns:
    def test_never_touches_one(self, there, opened):
        with pytest.raises(RunError, match="already contains a run"):
            opened(resume="never")

    def test_a_restart_of_the_launch_that_began_it_resumes_it(self, there, opened, monkeypatch):
        monkeypatch.setenv("KERAS_RECIPES_RESTARTED", "1")
        assert opened(resume="never").path == there

    def test_other_options_are_named(self, trained, opened):
        with pytest.raises(RunError) as caught:
            opened(seed=5, dropout=0.5, keep_best="val_loss", log_every=7)
        assert str(caught.value).splitlines()[1:] == [
            "--seed: was 0, is now 5",
            "--dropout: was 0.2, is now 0.5",
        ]

    def test_a_run_of_another_version_is_finished_with_that(self, trained, opened):
        path = trained / "options.json"
        content = json.loads(path.read_text())
        del content["options"]["lr_scaling"]
        content["options"]["dropout"] = 0.4
        path.write_text(json.dumps(content))
        with pytest.raises(RunError, match="cannot resume: the version that began") as caught:
            opened()
        said, *lines = str(caught.value).splitlines()
        assert "finish it with that version" in said and "same command" not in said
        assert lines == [
            "--lr-scaling: did not exist, is now linear",
            "--dropout: was 0.4, is now 0.2",
        ]

    def test_other_data_for_a_finished_model_are_another_run(self, trained, opened, monkeypatch):
        monkeypatch.setattr(tiny_recipe.Options, "preset", "scratch", raising=False)
        for is_finished in (False, True):
            if is_finished:
                (trained / "results.json").write_text("{}")
            with pytest.raises(RunError, match="another folder starts a new run") as caught:
                opened(dataset="other")
            hint = f"on other data, pass --preset {trained}/model and another --run-dir"
            assert (hint in str(caught.value)) == is_finished

    @pytest.mark.parametrize("value", [3, None, False])
    def test_options_that_the_recipe_does_not_have_are_refused(self, trained, opened, value):
        """As of another version, or of a recipe that was changed: it would train without them."""
        path = trained / "options.json"
        content = json.loads(path.read_text())
        content["options"]["own_option"] = value
        path.write_text(json.dumps(content))
        for changes in ({}, {"resume": "extend", "epochs": 5}):
            with pytest.raises(
                RunError, match="version that began this run has other opt"
            ) as caught:
                opened(**changes)
            line = f"--own-option: was {value}, does not exist here"
            assert str(caught.value).splitlines()[1:] == [line]
        with pytest.raises(RunError) as caught:
            opened(dropout=0.5)
        assert str(caught.value).splitlines()[1:] == ["--dropout: was 0.2, is now 0.5", line]
        assert json.loads(path.read_text()) == content

    def test_the_length_may_change_with_extend(self, trained, opened):
        with pytest.raises(RunError, match="--resume extend trains it for more --epochs"):
            opened(epochs=5)
        with pytest.raises(RunError, match="options changed") as caught:
            opened(epochs=5, dropout=0.5, resume="extend")
        assert str(caught.value).splitlines()[1:] == ["--dropout: was 0.2, is now 0.5"]
        opened(epochs=5, resume="extend")

    def test_an_attempt_without_a_checkpoint_leaves_the_folder_free(self, there, opened):
        """As one that failed in its first step; another recipe may use it, too."""
        (there / "options.json").write_text('{"recipe": "mnist", "options": {"max_steps": 20}}')
        (there / "metrics.jsonl").write_text("{}\n")
        (there / "checkpoints" / ".step-00000009.77").mkdir(parents=True)
        folder = opened(seed=5, epochs=3)
        assert (folder.checkpoint, folder.results, folder.facts) == (None, None, {})
        folder.keep_facts(FACTS)
        assert json.loads((there / "options.json").read_text())["options"]["seed"] == 5
        assert not (there / "metrics.jsonl").exists()
        folder.close()
        (there / "checkpoints" / ".step-00000009.replaced").mkdir()
        with pytest.raises(RunError, match="cannot resume, these options changed"):
            opened(seed=6)

    def test_values_of_numpy_are_stored_as_numbers_and_lists(self, opened):
        folder = opened()
        folder.keep_facts(FACTS | {"seen": np.int64(3), "classes": np.array(["a", "b"])})
        stored = json.loads((folder.path / "options.json").read_text())["resolved"]
        assert (stored["seen"], stored["classes"]) == (3, ["a", "b"])
        folder.write_json("results.json", {"errors": np.array([0.5, np.nan])})
        stored = json.loads((folder.path / "results.json").read_text())
        assert stored == {"errors": [0.5, "NaN"]}

    def test_a_second_process_is_refused_and_harms_nothing(self, opened, tmp_path):
        first = opened()
        second = RunFolder(first.path, "tiny_recipe", options(), is_chief=True)
        with pytest.raises(RunError, match="another run is using this folder"):
            second.open()
        second.discard()
        assert first.path.is_dir()

    def test_a_file_system_without_locks_is_named(self, opened, tmp_path, monkeypatch):
        def flock(file, operation):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(run_folder.fcntl, "flock", flock)
        with pytest.raises(RunError, match="cannot be locked .No locks available.; pass a folder"):
            opened()

    def test_one_whose_checkpoints_are_damaged_begins_again(self, trained, opened, caplog):
        """It says so, and keeps the metrics; another start that saves nothing keeps them, too."""
        for content in ("all of it\n", "of a second start\n"):
            (trained / "metrics.jsonl").write_text(content)
            opened().close()
            assert not (trained / "metrics.jsonl").exists()
            assert (trained / "old-metrics.jsonl").read_text() == "all of it\n"
        assert "no checkpoint is left, training begins again at step 0" in caplog.text

    def test_what_a_run_without_a_checkpoint_logged_goes(self, there, opened):
        (there / "metrics.jsonl").write_text("{}\n")
        (there / "events.out.tfevents.1.host").touch()
        opened(is_chief=False)
        assert (there / "metrics.jsonl").exists()
        opened()
        assert not (there / "metrics.jsonl").exists() and not list(there.glob("events*"))


class TestNothingToExtend:
    """Training from scratch under this option would pass unnoticed."""

    LINE = "--resume extend: no run to extend in .*run; pass its folder as --run-dir, or leave out"

    @pytest.mark.parametrize("is_chief", [True, False])
    def test_a_folder_that_does_not_exist_is_not_made(self, opened, tmp_path, is_chief):
        with pytest.raises(RunError, match=self.LINE):
            opened(resume="extend", is_chief=is_chief)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("name", ["worker-0.log", "kept.txt"])
    def test_one_without_a_run(self, opened, tmp_path, name):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / name).touch()
        with pytest.raises(RunError, match=self.LINE):
            opened(resume="extend")
        assert os.listdir(tmp_path / "run") == [name]

    def test_one_that_failed_before_it_trained(self, there, opened):
        before = sorted(os.listdir(there))
        with pytest.raises(RunError, match=self.LINE):
            opened(resume="extend")
        assert sorted(os.listdir(there)) == before


class TestExtending:
    LONGER = FACTS | {"total_steps": 27, "epochs": 3}

    @pytest.fixture
    def finished(self, there):
        save_results(there, 18)
        save_checkpoint(there, 18, finished=True, stop_training=True)
        return there

    def test_a_finished_run_is_reopened(self, finished, opened):
        folder = opened(resume="extend", epochs=3)
        assert folder.results is None
        folder.keep_facts(self.LONGER)
        state = folder.checkpoint.state
        assert not state["finished"] and not state["stop_training"]

    @pytest.mark.parametrize("resume", ["auto", "extend"])
    def test_a_stopped_extension_resumes(self, finished, opened, resume):
        """The results that are there are those of the shorter run."""
        folder = opened(resume="extend", epochs=3)
        folder.keep_facts(self.LONGER)
        folder.close()
        again = opened(resume=resume, epochs=3)  # before its first checkpoint
        assert again.results is None
        again.keep_facts(self.LONGER)
        assert again.checkpoint.step == 18 and not again.checkpoint.state["finished"]
        again.close()
        save_checkpoint(finished, 20)
        again = opened(resume=resume, epochs=3)
        again.keep_facts(self.LONGER)
        assert again.results is None and again.checkpoint.step == 20

    @pytest.mark.parametrize("resume", ["auto", "extend"])
    @pytest.mark.parametrize("step", [27, 22])  # at its last step, and ended early
    def test_one_that_was_killed_while_it_finished_finishes(self, finished, opened, step, resume):
        folder = opened(resume="extend", epochs=3)
        folder.keep_facts(self.LONGER)
        folder.close()
        save_checkpoint(finished, step, finished=True)
        again = opened(resume=resume, epochs=3)
        again.keep_facts(self.LONGER)
        assert again.results is None
        assert again.checkpoint.step == step and again.checkpoint.state["finished"]

    @pytest.mark.parametrize("resume", ["auto", "extend"])
    @pytest.mark.parametrize("step", [27, 22])  # at its last step, and ended early
    def test_a_finished_extension_is_finished(self, finished, opened, step, resume):
        """Only --resume extend with more epochs trains, also after --early-stopping."""
        folder = opened(resume="extend", epochs=3)
        folder.keep_facts(self.LONGER)
        folder.close()
        save_checkpoint(finished, step, finished=True)
        files.remove(finished / "model")
        save_results(finished, step)
        again = opened(resume=resume, epochs=3)
        assert again.results["steps"] == step
        again.close()
        longer = opened(resume="extend", epochs=4)
        assert longer.results is None
        longer.keep_facts(self.LONGER | {"total_steps": 36, "epochs": 4})
        assert longer.checkpoint.step == step and not longer.checkpoint.state["finished"]
        longer.close()
        again = opened(resume=resume, epochs=4)  # that one was stopped at once
        assert again.results is None

    @pytest.mark.parametrize("resume", ["auto", "extend"])
    def test_without_a_checkpoint_nothing_is_lost(self, finished, opened, resume):
        if resume == "auto":
            (finished / "model" / "x").write_text("damaged")
        (finished / "metrics.jsonl").write_text("{}\n")
        (finished / "checkpoints" / "step-00000018" / "state.json").write_text("damaged")
        reason = "cannot extend the run" if resume == "extend" else "its model/ is damaged"
        with pytest.raises(RunError, match=f"{reason}.*no undamaged checkpoint is left"):
            opened(resume=resume)
        assert (finished / "metrics.jsonl").exists() and (finished / "results.json").exists()

    def test_a_run_that_trained_nothing_is_not_extended(self, finished, opened):
        results = finished / "results.json"
        results.write_text(json.dumps(json.loads(results.read_text()) | {"steps": 0}))
        shutil.rmtree(finished / "checkpoints")
        with pytest.raises(RunError, match="it trained nothing .--epochs 0.; train in another"):
            opened(resume="extend")


class TestFacts:
    def test_data_that_changed_are_refused(self, opened):
        folder = at_step(opened(), 9)
        before = sorted(os.listdir(folder.path))
        with pytest.raises(RunError) as caught:
            folder.keep_facts(FACTS | {"data_sha256": "other", "steps_per_epoch": 8})
        assert "cannot resume, these values changed" in str(caught.value)
        assert str(caught.value).splitlines()[1:] == [
            "data_sha256: was abc, is now other",
            "steps_per_epoch: was 9, is now 8",
        ]
        assert sorted(os.listdir(folder.path)) == before

    @pytest.mark.parametrize(
        "given, total, limit",
        [
            ({"max_steps": 10}, 10, "--max-steps 10 ends it at step 10"),
            ({"epochs": 3, "max_steps": 18}, 18, "--max-steps 18 ends it at step 18"),
            ({}, 18, "--epochs 2 ends it at step 18"),
        ],
    )
    def test_a_run_without_a_step_left_is_not_extended(self, there, opened, given, total, limit):
        save_results(there, 18)
        save_checkpoint(there, 18, finished=True)
        folder = opened(resume="extend", **given)
        with pytest.raises(RunError, match=f"has done 18 steps, and {limit}: pass a larger"):
            folder.keep_facts(FACTS | {"total_steps": total})

    def test_without_a_checkpoint_anything_goes(self, opened, tmp_path):
        folder = opened()
        folder.keep_facts(FACTS)
        folder.keep_facts(FACTS | {"data_sha256": "other"})
        written = json.loads((tmp_path / "run" / "options.json").read_text())
        assert written["resolved"]["data_sha256"] == "other"
        assert written["recipe"] == "tiny_recipe"
        assert written["shown"]["dropout"] == 0.2 and "run_dir" not in written["shown"]

    def test_the_commit_and_whether_files_differ(self, opened, tmp_path, monkeypatch):
        for dirty in (True, False):
            ended = types.SimpleNamespace(stdout="abc-dirty\n" if dirty else "abc\n")
            monkeypatch.setattr(run_folder.subprocess, "run", lambda *_, ended=ended, **__: ended)
            opened(path=tmp_path / str(dirty)).keep_facts(FACTS)
            written = json.loads((tmp_path / str(dirty) / "options.json").read_text())
            assert written["git"] == {"commit": "abc", "dirty": dirty}

        def fail(words, **_):
            raise FileNotFoundError("git")

        monkeypatch.setattr(run_folder.subprocess, "run", fail)
        assert run_folder.git_state() is None


class TestDiscard:
    def test_what_was_made_goes_again(self, opened, tmp_path):
        opened().discard()
        assert os.listdir(tmp_path) == []

    def test_parents_too_but_none_with_another_run(self, opened, tmp_path):
        opened(path=tmp_path / "runs" / "mnist" / "now").discard()
        assert os.listdir(tmp_path) == []
        folder = opened(path=tmp_path / "runs" / "mnist" / "now")
        (tmp_path / "runs" / "bert_mlm").mkdir()
        folder.discard()
        assert os.listdir(tmp_path / "runs") == ["bert_mlm"]

    @pytest.mark.parametrize("trained", [False, True])
    def test_options_are_those_of_the_run_that_was_not_extended(self, there, opened, trained):
        """Unless the longer run has saved a checkpoint."""
        save_results(there, 18)
        save_checkpoint(there, 18, finished=True)
        before = (there / "options.json").read_text()
        folder = opened(resume="extend", epochs=3)
        folder.keep_facts(TestExtending.LONGER)
        assert "extends" in (there / "options.json").read_text()
        if trained:
            save_checkpoint(there, 20)
        folder.discard()
        assert ((there / "options.json").read_text() == before) != trained
        folder.close()
        assert trained or opened().results["steps"] == 18

    def test_but_nothing_that_was_there_or_was_trained(self, opened, tmp_path):
        folder = opened()
        (folder.path / "checkpoints").mkdir()
        folder.discard()
        assert folder.path.exists()
        (tmp_path / "mine").mkdir()
        opened(path=tmp_path / "mine").discard()
        assert (tmp_path / "mine").exists()


class TestWriting:
    def test_json_has_no_nan(self, opened, tmp_path):
        content = {"a": [float("nan"), {"b": float("inf")}], "c": True, "d": np.float32(0.5)}
        opened().write_json("x.json", content)
        text = (tmp_path / "run" / "x.json").read_text()

        def refuse(name):
            raise AssertionError(name)

        found = json.loads(text, parse_constant=refuse)
        assert found == {"a": ["NaN", {"b": "Infinity"}], "c": True, "d": 0.5}

    def test_what_cannot_be_written_is_named(self, there, opened, monkeypatch):
        folder = opened()

        def full(descriptor):
            raise OSError(28, "No space left on device")

        before = (there / "options.json").read_text()
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CannotSave, match="options.json cannot be written: No space left"):
            folder.keep_facts(FACTS)
        assert (there / "options.json").read_text() == before
        assert not list(there.glob(".options.json*"))
