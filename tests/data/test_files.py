import errno
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data import files
from data.errors import DataError
from tests.support import syncs
from tests.support.damaged import flip_a_bit

ROOT = Path(__file__).resolve().parents[2]
SHA256 = hashlib.sha256(b"content").hexdigest()

# Builds a folder (argv 1) slowly, and says when it has begun.
SLOW_BUILD = """
import sys, time
from pathlib import Path
from data import files

def build(path):
    path.mkdir()
    (path / "half").write_text("half")
    print("begun", flush=True)
    time.sleep(float(sys.argv[2]))
    (path / "whole").write_text("whole")

files.build_once(Path(sys.argv[1]), build, "a slow thing")
print("done", flush=True)
"""


def start_slow_build(target, seconds):
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, str(target), str(seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def write_file(path):
    path.write_text("content")


def write_folder(path):
    (path / "deep").mkdir(parents=True)
    (path / "one").write_bytes(bytes(range(256)) * 100)
    (path / "deep" / "two").write_text("2")


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def visible(folder):
    return [name for name in os.listdir(folder) if not name.startswith(".lock-")]


class TestPaths:
    def test_the_cache_folder(self, monkeypatch, tmp_path):
        monkeypatch.setenv("RECIPES_CACHE_DIR", str(tmp_path))
        assert files.default_cache_dir() == tmp_path
        monkeypatch.delenv("RECIPES_CACHE_DIR")
        assert files.default_cache_dir() == Path.home() / ".cache" / "keras-recipes"

    def test_a_cache_without_a_home_folder(self, monkeypatch):
        """As in a container whose user has no entry in /etc/passwd: `~` would be its name."""
        monkeypatch.delenv("RECIPES_CACHE_DIR")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
        with pytest.raises(DataError, match="no such home folder; set RECIPES_CACHE_DIR"):
            files.default_cache_dir()

    def test_home_folders_and_unknown_users(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))
        assert files.expand("~/a.txt") == tmp_path / "a.txt"
        assert files.expand("~nosuchuser/x") == Path("~nosuchuser/x")


class TestAtomic:
    @pytest.mark.parametrize("write", [write_file, write_folder])
    def test_it_appears_whole_and_replaces_what_was_there(self, tmp_path, write):
        for exists in (False, True):
            with files.atomic(tmp_path / "target") as temporary:
                write(temporary)
                assert (tmp_path / "target").exists() == exists
            assert os.listdir(tmp_path) == ["target"]
            assert (tmp_path / "target").is_dir() == (write is write_folder)

    @pytest.mark.parametrize("before", [write_file, write_folder])
    def test_what_fails_leaves_the_old_one(self, tmp_path, before, monkeypatch):
        before(tmp_path / "target")
        with pytest.raises(ValueError, match="broken"), files.atomic(tmp_path / "target") as new:
            write_folder(new)
            raise ValueError("broken")
        monkeypatch.setattr(os, "replace", lambda *paths: 1 / 0)
        with pytest.raises(ZeroDivisionError), files.atomic(tmp_path / "target") as new:
            before(new)
            (tmp_path / "target" / "old").write_text("") if before is write_folder else None
        assert os.listdir(tmp_path) == ["target"]
        assert before is write_file or (tmp_path / "target" / "old").exists()

    def test_an_error_names_the_target(self, tmp_path, monkeypatch):
        def refuse(path):
            raise PermissionError(errno.EROFS, "Read-only file system", path)

        for name, fails in (("remove", refuse), ("sync", refuse)):
            with monkeypatch.context() as patched:
                patched.setattr(files, name, fails)
                with pytest.raises(OSError) as raised, files.atomic(tmp_path / "target") as new:
                    write_file(new)
            assert raised.value.filename == str(tmp_path / "target")
        with pytest.raises(OSError) as raised, files.atomic(tmp_path / "target"):
            open(tmp_path / "none")
        assert raised.value.filename == str(tmp_path / "none")

    def test_what_a_killed_process_left_is_removed_and_nothing_else(self, tmp_path):
        write_file(tmp_path / "target")
        for name in (".target.123.partial", ".target.replaced", ".target2.123.partial"):
            (tmp_path / name).mkdir()
        for name in (".target.local", ".target.old", ".target.123"):  # of the user
            (tmp_path / name).mkdir()
        with files.atomic(tmp_path / "target") as temporary:
            write_file(temporary)
        left = sorted(set(os.listdir(tmp_path)) - {"target"})
        assert left == [".target.123", ".target.local", ".target.old", ".target2.123.partial"]

    def test_what_a_killed_process_set_aside_is_kept_until_it_is_replaced(self, tmp_path):
        write_folder(tmp_path / ".target.replaced")
        with pytest.raises(ValueError, match="broken"), files.atomic(tmp_path / "target"):
            raise ValueError("broken")
        assert os.listdir(tmp_path) == ["target"]
        assert (tmp_path / "target" / "one").exists()

    def test_everything_is_synced_before_it_gets_its_name(self, tmp_path, monkeypatch):
        order = syncs.recorded(monkeypatch)
        with files.atomic(tmp_path / "target") as temporary:
            write_folder(temporary)
        renamed = order.index(("rename", "target"))
        before, after = {name for _, name in order[:renamed]}, order[renamed + 1 :]
        assert before >= {"deep", "one", "two"}
        assert after == [("sync", tmp_path.name)]


@pytest.fixture
def folder(tmp_path):
    """A folder with two files and their checksums."""
    write_folder(tmp_path / "folder")
    files.write_checksums(tmp_path / "folder")
    return tmp_path / "folder"


class TestChecksums:
    def test_the_file_is_that_of_sha256sum(self, folder):
        files.write_checksums(folder)  # again: it does not name itself
        assert (folder / "SHA256SUMS").read_text().splitlines() == [
            f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}"
            for name in ("deep/two", "one")
        ]
        if shutil.which("sha256sum"):
            subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=folder, check=True)

    def test_without_checksums_nothing_is_wrong_unless_files_are_required(self, folder):
        (folder / "SHA256SUMS").unlink()
        assert files.damage(folder) is None
        assert files.damage(folder, ["one"]) == "SHA256SUMS is missing"

    @pytest.mark.parametrize(
        ("damage", "expected"),
        [
            (lambda f: flip_a_bit(f / "one"), "one does not match its checksum"),
            (lambda f: os.truncate(f / "one", 100), "one does not match its checksum"),
            (lambda f: (f / "deep" / "two").unlink(), "deep/two: No such file"),
            (lambda f: (f / "SHA256SUMS").write_bytes(b"\xff\xfe"), "does not name its files"),
            (lambda f: os.truncate(f / "SHA256SUMS", 75), "does not name its files"),
        ],
        ids=["flipped bit", "truncated", "gone", "binary", "cut at a line"],
    )
    def test_damage_is_named_in_one_line(self, folder, damage, expected):
        damage(folder)
        found = files.damage(folder, ["one", "deep/two"])
        assert expected in found and "\n" not in found


class TestBuildOnce:
    def test_builds_once(self, tmp_path):
        built = []

        def build(path):
            built.append(path)
            write_folder(path) if "folder" in path.name else write_file(path)

        for _ in range(3):
            files.build_once(tmp_path / "deep" / "file", build, "a file", SHA256)
            files.build_once(tmp_path / "deep" / "folder", build, "a folder")
        assert len(built) == 2
        assert sorted(visible(tmp_path / "deep")) == ["file", "folder"]
        assert (tmp_path / "deep" / "folder" / "SHA256SUMS").exists()

    @pytest.mark.parametrize(
        "damage",
        [
            lambda folder: flip_a_bit(folder / "one"),
            lambda folder: os.truncate(folder / "SHA256SUMS", 75),
            lambda folder: (folder / "three").write_text("3"),
            lambda folder: (shutil.rmtree(folder), folder.write_text("x")),
        ],
    )
    def test_a_damaged_folder_is_named_and_built_again(self, tmp_path, caplog, damage):
        target = tmp_path / "folder"
        files.build_once(target, write_folder, "some tokens")
        whole = tree(target)
        damage(target)
        files.build_once(target, write_folder, "some tokens")
        assert tree(target) == whole and visible(tmp_path) == ["folder"]
        (record,) = caplog.records
        assert record.name == "recipes" and record.levelname == "WARNING"
        assert str(target) in record.message and "some tokens" in record.message

    def test_a_killed_build_leaves_nothing_in_place_and_is_cleaned_up(self, tmp_path):
        target = tmp_path / "folder"
        process = start_slow_build(target, 60)
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not target.exists()
        # In a process of its own, which fails instead of waiting for a lock of the dead one.
        out, _ = start_slow_build(target, 0).communicate(timeout=60)
        assert out == "begun\ndone\n"
        assert visible(tmp_path) == ["folder"]
        assert sorted(os.listdir(target)) == ["SHA256SUMS", "half", "whole"]

    def test_of_two_processes_one_builds_and_the_other_waits(self, tmp_path):
        target = tmp_path / "folder"
        first = start_slow_build(target, 1)
        assert first.stdout.readline() == "begun\n"
        out, _ = start_slow_build(target, 0).communicate(timeout=60)
        assert out == "done\n", "the second process must not build"
        assert first.communicate(timeout=60)[0] == "done\n"
        assert sorted(os.listdir(target)) == ["SHA256SUMS", "half", "whole"]

    def test_who_waits_is_told_for_what(self, tmp_path, monkeypatch, caplog):
        taken = []

        def flock(file, how):
            taken.append(how)
            if how & fcntl.LOCK_NB:
                raise BlockingIOError
            write_folder(tmp_path / "folder")  # which the other process makes meanwhile
            files.write_checksums(tmp_path / "folder")

        monkeypatch.setattr(fcntl, "flock", flock)
        caplog.set_level("INFO", "recipes")
        files.build_once(tmp_path / "folder", lambda path: 1 / 0, "some tokens")
        assert taken == [fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX]
        assert caplog.messages == [
            f"some tokens: waiting for another process, which is making {tmp_path / 'folder'}"
        ]

    def test_what_cannot_be_made_is_a_data_error(self, tmp_path):
        def full(path):
            path.write_text("half")
            raise OSError(28, "No space left on device")

        with pytest.raises(DataError, match="a thing: cannot make .*No space left"):
            files.build_once(tmp_path / "file", full, "a thing")
        assert visible(tmp_path) == []
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(DataError, match="cannot make .* another cache folder"):
            files.build_once(tmp_path / "file" / "target", write_file, "a thing")


def test_a_dataset_is_the_same_by_any_path_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one.csv", "other.csv"):
        Path(name).write_text("text")
    assert files.is_same("one.csv", "./one.csv") and files.is_same(
        "one.csv", str(tmp_path / "one.csv")
    )
    assert files.is_same("auto", "auto") and files.is_same("gone.csv", "gone.csv")
    assert not files.is_same("one.csv", "other.csv") and not files.is_same("auto", "one.csv")
