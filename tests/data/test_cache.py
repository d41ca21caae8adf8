import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from data import cache, checksums
from data.errors import DataError
from tests.support import syncs
from tests.support.damaged import flip_a_bit

ROOT = Path(__file__).resolve().parents[2]

# Builds `target` (argv 1) slowly, and says when it has begun.
SLOW_BUILD = """
import sys, time
from pathlib import Path
from data import cache

def build(path):
    path.mkdir()
    (path / "half").write_text("half")
    print("begun", flush=True)
    time.sleep(float(sys.argv[2]))
    (path / "whole").write_text("whole")

cache.build_once(Path(sys.argv[1]), build, "a slow thing")
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


def test_default_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("RECIPES_CACHE_DIR", str(tmp_path))
    assert cache.default_cache_dir() == tmp_path
    monkeypatch.delenv("RECIPES_CACHE_DIR")
    assert cache.default_cache_dir() == Path.home() / ".cache" / "keras-recipes"


@pytest.mark.parametrize("folder", ["~nosuchuser/cache", "caf\udce9"])
def test_a_default_cache_dir_that_is_no_path(monkeypatch, folder):
    monkeypatch.setenv("RECIPES_CACHE_DIR", folder)
    with pytest.raises(DataError, match="RECIPES_CACHE_DIR"):
        cache.default_cache_dir()


SHA256 = hashlib.sha256(b"content").hexdigest()


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


@pytest.fixture
def new_process(monkeypatch):
    """Lets the process forget what it has verified, as a new one would know nothing of it."""
    return lambda: monkeypatch.setattr(cache, "_verified", {})


def test_builds_once_and_leaves_nothing_else(tmp_path, new_process):
    calls = []

    def build(path):
        calls.append(path)
        write_folder(path) if path.name.startswith(".folder") else write_file(path)

    for again in range(3):
        cache.build_once(tmp_path / "deep" / "file", build, "a file", SHA256)
        cache.build_once(tmp_path / "deep" / "folder", build, "a folder")
        if again:
            new_process()
    assert (tmp_path / "deep" / "file").read_text() == "content"
    assert len(calls) == 2
    assert sorted(os.listdir(tmp_path / "deep")) == ["file", "folder"]


def test_the_sums_are_those_of_sha256sum(tmp_path):
    cache.build_once(tmp_path / "folder", write_folder, "a folder")
    expected = "".join(
        f"{hashlib.sha256((tmp_path / 'folder' / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("deep/two", "one")
    )
    assert (tmp_path / "folder" / "SHA256SUMS").read_text() == expected


DAMAGE = {
    "flipped bit": lambda folder: flip_a_bit(folder / "one"),
    "truncated": lambda folder: os.truncate(folder / "one", 1000),
    "empty": lambda folder: os.truncate(folder / "deep" / "two", 0),
    "missing": lambda folder: (folder / "deep" / "two").unlink(),
    "one more": lambda folder: (folder / "deep" / "three").write_text("3"),
    "dangling link": lambda folder: (folder / "three").symlink_to("nowhere"),
    "sums flipped": lambda folder: flip_a_bit(folder / "SHA256SUMS"),
    "sums binary": lambda folder: (folder / "SHA256SUMS").write_bytes(b"\xff\xfe"),
    "sums empty": lambda folder: os.truncate(folder / "SHA256SUMS", 0),
    "sums cut": lambda folder: os.truncate(folder / "SHA256SUMS", 75),
    "no sums": lambda folder: (folder / "SHA256SUMS").unlink(),
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_text("x")),
    "nothing": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_named_and_built_again(tmp_path, caplog, new_process, damage, restart):
    folder = tmp_path / "folder"
    cache.build_once(folder, write_folder, "some tokens")
    whole = tree(folder)
    DAMAGE[damage](folder)
    if restart:
        new_process()
    else:
        # Time stamps are coarse: let this change be seen as a later one.
        os.utime(folder / "one", (1, 1)) if (folder / "one").exists() else None
    cache.build_once(folder, write_folder, "some tokens")
    assert tree(folder) == whole
    assert os.listdir(tmp_path) == ["folder"]
    (record,) = caplog.records
    assert record.name == "recipes" and record.levelname == "WARNING"
    assert str(folder) in record.message and "some tokens" in record.message
    assert "\n" not in record.message


def test_a_damaged_file_is_named_and_made_again(tmp_path, caplog, new_process):
    cache.build_once(tmp_path / "file", write_file, "a file", SHA256)
    (tmp_path / "file").write_text("contend")
    new_process()
    cache.build_once(tmp_path / "file", write_file, "a file", SHA256.upper())
    assert (tmp_path / "file").read_text() == "content"
    assert os.listdir(tmp_path) == ["file"]
    assert f"expected {SHA256.upper()}" in caplog.text


def test_what_is_damaged_stays_until_it_can_be_replaced(tmp_path, new_process):
    """Otherwise an older cache would be gone, and no network there to fetch it again."""
    cache.build_once(tmp_path / "folder", write_folder, "a folder")
    (tmp_path / "folder" / "SHA256SUMS").unlink()
    new_process()

    def build(path):
        raise DataError("no network")

    for _ in range(2):
        with pytest.raises(DataError, match="no network"):
            cache.build_once(tmp_path / "folder", build, "a folder")
    assert sorted(tree(tmp_path)) == ["folder/deep/two", "folder/one"]


def test_a_process_hashes_once(tmp_path, monkeypatch, new_process):
    cache.build_once(tmp_path / "folder", write_folder, "a folder")
    new_process()
    hashed = []
    stock = checksums.sha256_of
    monkeypatch.setattr(
        checksums, "sha256_of", lambda path: hashed.append(path.name) or stock(path)
    )
    for _ in range(3):
        cache.build_once(tmp_path / "folder", write_folder, "a folder")
    assert sorted(hashed) == ["one", "two"]


def test_what_a_file_manager_leaves_is_no_damage(tmp_path, caplog, new_process):
    cache.build_once(tmp_path / "folder", write_folder, "a folder")
    (tmp_path / "folder" / ".DS_Store").write_text("x")
    new_process()
    cache.build_once(tmp_path / "folder", None, "a folder")
    assert not caplog.records


def test_a_failed_build_leaves_nothing(tmp_path):
    def build(path):
        path.mkdir()
        (path / "half").write_text("half")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        cache.build_once(tmp_path / "folder", build, "a folder")
    assert os.listdir(tmp_path) == []


def test_a_killed_build_leaves_nothing_in_place_and_is_cleaned_up(tmp_path):
    target = tmp_path / "folder"
    process = start_slow_build(target, 60)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not target.exists()

    def build(path):
        assert not path.exists(), "the dead process's temporary folder must be gone"
        path.mkdir()

    cache.build_once(target, build, "a folder")
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(target) == ["SHA256SUMS"]


def test_of_two_processes_one_builds_and_the_other_waits_and_says_so(tmp_path):
    target = tmp_path / "folder"
    first = start_slow_build(target, 2.7)
    assert first.stdout.readline() == "begun\n"
    second = start_slow_build(target, 0)
    out, err = second.communicate(timeout=30)
    assert out == "done\n", "the second process must not build"
    assert err.count("\n") == 1 and "waiting for another process: a slow thing" in err
    assert first.communicate(timeout=30)[0] == "done\n"
    assert os.listdir(tmp_path) == ["folder"]
    assert sorted(os.listdir(target)) == ["SHA256SUMS", "half", "whole"]


def test_many_threads_build_once(tmp_path):
    calls = []

    def build(path):
        calls.append(path)
        time.sleep(0.05)
        path.write_text("content")

    arguments = (tmp_path / "file", build, "a file", SHA256)
    threads = [threading.Thread(target=cache.build_once, args=arguments) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_made_is_a_data_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot make .* another cache folder"):
        cache.build_once(tmp_path / "file" / "target", lambda path: None, "a thing")
    with pytest.raises(DataError, match="cannot make .*File name too long"):
        cache.build_once(tmp_path / ("x" * 300) / "target", lambda path: None, "a thing")
    with pytest.raises(DataError, match="a thing: cannot make /proc/self/tokens/x "):
        cache.build_once(Path("/proc/self/tokens/x"), lambda path: None, "a thing")


def test_a_full_disk_is_a_data_error(tmp_path):
    def build(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="No space left"):
        cache.build_once(tmp_path / "file", build, "a thing")
    assert os.listdir(tmp_path) == []


def test_everything_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    order = syncs.recorded(monkeypatch)
    cache.build_once(tmp_path / "target", write_folder, "a thing")
    renamed = order.index(("rename", "target"))
    before, after = {name for _, name in order[:renamed]}, order[renamed + 1 :]
    assert before >= {*os.listdir(tmp_path / "target"), "SHA256SUMS"}
    assert after == [("sync", tmp_path.name)]
