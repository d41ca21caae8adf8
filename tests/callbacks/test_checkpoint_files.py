"""A checkpoint is whole on the disk, or it is not there."""

import json
import os

import pytest

from callbacks import checkpoint_files
from callbacks.errors import CannotSave
from data import files
from tests.support import damaged, syncs


def write(folder, step, content=b"weights"):
    state = {"step": step, "epochs_done": 0, "steps_into_epoch": step}
    return checkpoint_files.write(folder, state, lambda path: path.write_bytes(content))


def steps(folder):
    return sorted(int(path.name[5:]) for path in checkpoint_files.all_checkpoints(folder))


def test_everything_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    order = syncs.recorded(monkeypatch)
    write(tmp_path / "checkpoints", 7)
    renamed = order.index(("rename", "step-00000007"))
    before, after = order[:renamed], order[renamed + 1 :]
    assert {name for _, name in before} >= {"model.weights.h5", "state.json", "SHA256SUMS"}
    assert before[-1][1].startswith(".step-00000007.")  # the folder's own entries
    assert after == [("sync", "checkpoints")]


def test_nothing_is_written_in_its_place(tmp_path):
    """While the weights are written, what is there is the old checkpoint."""
    folder = tmp_path
    write(folder, 3, b"old")

    def look(path):
        assert (folder / "step-00000003" / "model.weights.h5").read_bytes() == b"old"
        assert path.parent.name.startswith(".")
        assert checkpoint_files.newest(folder, set_aside=False).step == 3
        path.write_bytes(b"new")

    state = {"step": 3, "epochs_done": 1, "steps_into_epoch": 0}
    checkpoint_files.write(folder, state, look)
    found = checkpoint_files.newest(folder)
    assert found.epochs_done == 1 and os.listdir(folder) == ["step-00000003"]
    assert (found.folder / "model.weights.h5").read_bytes() == b"new"


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path, monkeypatch):
    write(tmp_path, 3, b"old")

    def replace(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", replace)
        write(tmp_path, 3, b"new")
    found = checkpoint_files.newest(tmp_path)
    assert (found.folder / "model.weights.h5").read_bytes() == b"old"


def test_what_a_killed_process_left_is_removed(tmp_path):
    left = tmp_path / ".step-00000001.999"
    left.mkdir()
    (left / "model.weights.h5").touch()
    write(tmp_path, 2)
    assert os.listdir(tmp_path) == ["step-00000002"]


def test_an_old_one_whose_successor_got_no_name_is_put_back(tmp_path):
    write(tmp_path, 2)
    os.rename(tmp_path / "step-00000002", tmp_path / ".step-00000002.999.old")
    assert checkpoint_files.newest(tmp_path, set_aside=False) is None
    assert checkpoint_files.newest(tmp_path).step == 2


def test_a_run_folder_that_is_gone_stays_gone(tmp_path):
    with pytest.raises(CannotSave, match="the checkpoint of step 5 cannot be written"):
        write(tmp_path / "gone" / "checkpoints", 5)
    assert not (tmp_path / "gone").exists()


def test_a_disk_that_is_full(tmp_path):
    write(tmp_path, 1)

    def full(path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    state = {"step": 2, "epochs_done": 0, "steps_into_epoch": 2}
    with pytest.raises(CannotSave, match="No space left on device.*step-00000001"):
        checkpoint_files.write(tmp_path, state, full)
    assert os.listdir(tmp_path) == ["step-00000001"]


class TestDamaged:
    def test_are_set_aside_under_names_of_their_own(self, tmp_path):
        for _ in range(3):
            path = write(tmp_path, 4)
            (path / "state.json").write_text("{")
            assert checkpoint_files.newest(tmp_path) is None
        names = ["damaged-step-00000004", "damaged-step-00000004-2", "damaged-step-00000004-3"]
        assert sorted(os.listdir(tmp_path)) == names
        assert checkpoint_files.newest_name(tmp_path) is None

    def test_a_flipped_bit_in_the_weights(self, tmp_path):
        write(tmp_path, 1)
        damaged.flip_a_bit(write(tmp_path, 2) / "model.weights.h5")
        assert checkpoint_files.newest(tmp_path).step == 1

    @pytest.mark.parametrize("state", ["null", "[]", "{}", '{"step": 1}', "5", "\udcff"])
    def test_a_state_that_is_none_though_its_sum_is_right(self, tmp_path, state):
        write(tmp_path, 1)
        path = write(tmp_path, 2)
        (path / "state.json").write_bytes(state.encode(errors="surrogateescape"))
        from data import files

        files.write_checksums(path)
        assert checkpoint_files.newest(tmp_path).step == 1

    @pytest.mark.parametrize("sums", [b"", b"\xff", b"nonsense", b"abc  model.weights.h5\n"])
    def test_sums_that_do_not_name_the_files(self, tmp_path, sums):
        path = write(tmp_path, 2)
        (path / "SHA256SUMS").write_bytes(sums)
        assert checkpoint_files.damage(path)
        assert checkpoint_files.newest(tmp_path) is None


def test_prune_keeps_the_newest(tmp_path):
    for step in (9, 100, 2, 33):
        write(tmp_path, step)
    (tmp_path / "damaged-step-00000500").mkdir()
    checkpoint_files.prune(tmp_path, 2)
    assert steps(tmp_path) == [33, 100]
    assert (tmp_path / "damaged-step-00000500").exists()


class TestCopies:
    def test_a_copy_is_whole_or_the_old_one_is(self, tmp_path, monkeypatch):
        source, target = write(tmp_path / "checkpoints", 4), tmp_path / "best"
        assert not checkpoint_files.is_copy_of(target, 4)
        checkpoint_files.copy_as(source, target)
        assert checkpoint_files.is_copy_of(target, 4) and not checkpoint_files.is_copy_of(target, 5)
        newer = write(tmp_path / "checkpoints", 5)
        with monkeypatch.context() as patched:

            def full(*arguments):
                raise OSError(28, "No space left on device")

            patched.setattr(checkpoint_files.shutil, "copytree", full)
            with pytest.raises(CannotSave, match="the best checkpoint cannot be copied"):
                checkpoint_files.copy_as(newer, target)
        assert checkpoint_files.is_copy_of(target, 4)
        checkpoint_files.copy_as(newer, target)
        assert checkpoint_files.is_copy_of(target, 5)
        assert sorted(os.listdir(tmp_path)) == ["best", "checkpoints"]

    def test_it_is_synced_before_it_gets_its_name(self, tmp_path, monkeypatch):
        source = write(tmp_path / "checkpoints", 4)
        order = syncs.recorded(monkeypatch)
        checkpoint_files.copy_as(source, tmp_path / "best")
        renamed = order.index(("rename", "best"))
        before, after = {name for _, name in order[:renamed]}, order[renamed + 1 :]
        assert before >= {"model.weights.h5", "state.json", "SHA256SUMS"}
        assert after == [("sync", tmp_path.name)]

    def test_a_damaged_copy_is_none(self, tmp_path):
        target = tmp_path / "best"
        checkpoint_files.copy_as(write(tmp_path / "checkpoints", 4), target)
        for content in ("{}", "null", "[]", '{"step": 4}'):
            (target / "state.json").write_text(content)
            assert not checkpoint_files.is_copy_of(target, 4)
            files.write_checksums(target)
            assert not checkpoint_files.is_copy_of(target, 4)


def test_a_finished_run_is_reopened_within_its_epoch(tmp_path):
    records = {"history": {"loss": [3.0, 2.0, 1.0]}, "loss": [2, 1.0]}
    state = {"step": 20, "epochs_done": 3, "steps_into_epoch": 0, "callbacks": {"records": records}}
    path = tmp_path / "step-00000020"
    path.mkdir()
    (path / "state.json").write_text(json.dumps(state))
    found = checkpoint_files.reopened(checkpoint_files.read(path), 9)
    assert (found.epochs_done, found.steps_into_epoch) == (2, 2)
    assert found.state["callbacks"]["records"]["history"] == {"loss": [3.0, 2.0]}
    whole = checkpoint_files.reopened(checkpoint_files.read(path), 10)
    assert (whole.epochs_done, whole.steps_into_epoch) == (2, 0)
