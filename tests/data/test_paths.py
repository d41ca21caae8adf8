import gzip
import os
from pathlib import Path

import pytest

from data import paths
from data.errors import DataError
from tests.data.closed_paths import close


def error_of(function, *arguments):
    with pytest.raises(DataError) as caught:
        function(*arguments, "--thing")
    message = str(caught.value)
    message.encode()  # a log in UTF-8 takes it
    assert "\n" not in message and message.startswith("--thing")
    return message


@pytest.mark.parametrize(
    "path, words",
    [
        ("", "empty"),
        ("~nosuchuser", "there is no user 'nosuchuser'"),
        ("~nosuchuser/deep/x", "there is no user 'nosuchuser'"),
        ("a\0b", "NUL"),
        (os.fsdecode(b"caf\xe9"), "not UTF-8"),
        ("\ud800", "not UTF-8"),
        ("x" * 300, "File name too long"),
        ("x/" * 3000, "File name too long"),
        ("nowhere", "no such file"),
        (__file__ + "/below", "no such file"),
        ("/", "a folder; expected a file"),
        ("/dev/null", "a device; expected a file"),
    ],
)
def test_what_is_no_readable_file(path, words):
    assert words in error_of(paths.readable_file, path)


def test_home_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.expand("~/x", "--thing") == tmp_path / "x"
    assert paths.expand("a~/x", "--thing") == Path("a~/x")


def test_a_closed_file_and_a_closed_folder(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    for name in ("one", "folder/two"):
        (tmp_path / name).write_text("x")
        assert paths.readable_file(tmp_path / name, "--thing") == tmp_path / name
    close(tmp_path / "one", monkeypatch)
    assert "cannot be read (Permission denied)" in error_of(paths.readable_file, tmp_path / "one")
    close(tmp_path / "folder", monkeypatch)
    for function in (paths.readable_file, paths.kind_of):
        assert "Permission denied" in error_of(function, tmp_path / "folder" / "two")
    for function in (paths.files_in, lambda path, what: paths.matching_files(path / "*", what)):
        message = error_of(function, tmp_path / "folder")
        assert f"{tmp_path / 'folder'}: cannot be listed (Permission denied)" in message


def test_a_link_to_itself(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert "Too many levels of symbolic links" in error_of(paths.kind_of, tmp_path / "loop")


class TestMatchingFiles:
    @pytest.fixture
    def tree(self, tmp_path):
        names = ("a.txt", "b.md", "deep/a.txt", "deep/er/c.txt", ".hidden.txt", ".git/x.txt")
        for name in names:
            path = tmp_path / "tree" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        return tmp_path / "tree"

    @pytest.mark.parametrize(
        "pattern",
        "*.txt **/*.txt * **/* ** deep/** */*.txt **/er/*.txt **/[ab].* .*.txt ?.txt x* "
        "deep/../*.txt **/**/*.txt ./*.txt".split(),
    )
    def test_equals_glob(self, tree, pattern, monkeypatch):
        import glob

        monkeypatch.chdir(tree)
        for name in (pattern, str(tree / pattern)):
            found = [str(path) for path in paths.matching_files(Path(name), "--thing")]
            expected = glob.glob(name, recursive=True)
            expected = sorted({str(Path(name)) for name in expected if os.path.isfile(name)})
            assert found == expected

    def test_links_to_the_folder_itself(self, tree):
        expected = paths.matching_files(tree / "**" / "*.txt", "--thing")
        assert len(expected) == 3
        for number in range(3):
            (tree / f"link{number}").symlink_to(".")
            (tree / "deep" / f"up{number}").symlink_to("..")
        (tree / "self.txt").symlink_to("self.txt")
        (tree / "nowhere.txt").symlink_to("missing")
        found = paths.matching_files(tree / "**" / "*.txt", "--thing")
        assert [path.resolve() for path in found] == expected

    def test_a_linked_folder_is_followed_and_a_file_counts_once(self, tree, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "z.txt").write_text("z")
        (tree / "part").symlink_to(tmp_path / "elsewhere")
        (tree / "again.txt").symlink_to("a.txt")
        found = [path.resolve().name for path in paths.matching_files(tree / "**/*.txt", "--thing")]
        assert sorted(found) == ["a.txt", "a.txt", "c.txt", "z.txt"]

    def test_a_closed_folder_on_the_way_is_not_left_out(self, tree, monkeypatch):
        close(tree / "deep", monkeypatch)
        assert "deep: cannot be listed" in error_of(paths.matching_files, tree / "**" / "*.txt")


class TestOpenBytes:
    @pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
    def test_what_it_reads(self, tmp_path, name):
        content = gzip.compress(b"text") if name.endswith(".gz") else b"text"
        (tmp_path / name).write_bytes(content)
        with paths.open_bytes(tmp_path / name) as stream:
            assert stream.read() == b"text"

    @pytest.mark.parametrize(
        "content", [b"text", gzip.compress(b"text" * 100)[:-5]], ids=["no gzip", "cut"]
    )
    def test_a_damaged_gzip_file(self, tmp_path, content):
        (tmp_path / "a.gz").write_bytes(content)
        with pytest.raises(DataError, match="a.gz: damaged gzip file"):
            with paths.open_bytes(tmp_path / "a.gz") as stream:
                stream.read()
