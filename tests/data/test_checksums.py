import hashlib
import os
import shutil
import subprocess

import pytest

from data import checksums
from tests.support.damaged import flip_a_bit


@pytest.fixture
def folder(tmp_path):
    """A folder with two files and their checksums."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "one").write_bytes(bytes(range(256)))
    (tmp_path / "deep" / "two").write_bytes(b"2")
    checksums.write(tmp_path)
    return tmp_path


def test_the_file_is_that_of_sha256sum(folder):
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    assert lines == [
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}"
        for name in ("deep/two", "one")
    ]
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


def test_written_again_it_does_not_name_itself(folder):
    before = (folder / "SHA256SUMS").read_text()
    checksums.write(folder)
    assert (folder / "SHA256SUMS").read_text() == before


def test_only_some_files(folder):
    checksums.write(folder, ["one"])
    (folder / "deep" / "two").write_bytes(b"changed")
    assert checksums.problem(folder) is None
    assert checksums.problem(folder, ["one"]) is None
    assert "does not name its files" in checksums.problem(folder, ["one", "deep/two"])


def test_what_was_written_is_right(folder):
    assert checksums.problem(folder) is None
    assert checksums.problem(folder, ["one", "deep/two"]) is None


def test_without_checksums_nothing_is_wrong_unless_files_are_asked_for(tmp_path):
    (tmp_path / "one").write_bytes(b"1")
    assert checksums.problem(tmp_path) is None
    assert checksums.problem(tmp_path, ["one"]) == "SHA256SUMS is missing"
    assert checksums.problem(tmp_path, []) == "SHA256SUMS is missing"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: flip_a_bit(f / "one"), "one does not match its checksum"),
        (lambda f: os.truncate(f / "one", 100), "one does not match its checksum"),
        (lambda f: os.truncate(f / "deep" / "two", 0), "deep/two does not match its checksum"),
        (lambda f: (f / "deep" / "two").unlink(), "deep/two: No such file"),
        (lambda f: (f / "SHA256SUMS").write_bytes(b"\xff\xfe"), "SHA256SUMS: "),
        (lambda f: (f / "SHA256SUMS").write_text("no sums\n"), "does not name its files"),
        (lambda f: os.truncate(f / "SHA256SUMS", 70), "does not name its files"),
    ],
    ids=["flipped bit", "truncated", "empty", "gone", "binary", "no sums", "cut"],
)
def test_damage_is_named_in_one_line(folder, damage, expected):
    damage(folder)
    found = checksums.problem(folder, ["one", "deep/two"])
    assert expected in found and "\n" not in found


def test_a_folder_in_the_place_of_a_file(folder):
    (folder / "one").unlink()
    (folder / "one").mkdir()
    assert "one: Is a directory" in checksums.problem(folder)
    (folder / "SHA256SUMS").unlink()
    (folder / "SHA256SUMS").mkdir()
    assert "SHA256SUMS: Is a directory" in checksums.problem(folder)


def test_an_empty_list_vouches_for_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "SHA256SUMS").touch()
    assert checksums.problem(tmp_path) == "SHA256SUMS does not name its files"
