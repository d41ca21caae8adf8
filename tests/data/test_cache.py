import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from data import cache
from data.errors import DataError

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


def test_builds_once_and_leaves_nothing_else(tmp_path):
    calls = []

    def build(path):
        calls.append(path)
        path.write_text("content")

    for _ in range(2):
        cache.build_once(tmp_path / "deep" / "file", build, "a file")
    assert (tmp_path / "deep" / "file").read_text() == "content"
    assert len(calls) == 1
    assert os.listdir(tmp_path / "deep") == ["file"]


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
    assert os.listdir(target) == []


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
    assert sorted(os.listdir(target)) == ["half", "whole"]


def test_many_threads_build_once(tmp_path):
    calls = []

    def build(path):
        calls.append(path)
        time.sleep(0.05)
        path.write_text("content")

    threads = [
        threading.Thread(target=cache.build_once, args=(tmp_path / "file", build, "a file"))
        for _ in range(8)
    ]
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


def test_a_full_disk_is_a_data_error(tmp_path):
    def build(path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="No space left"):
        cache.build_once(tmp_path / "file", build, "a thing")
    assert os.listdir(tmp_path) == []
