import itertools
import os
import pickle
import random

import pytest

from data import lines as lying
from data import text
from data.errors import DataError
from tests.data.closed_paths import close

CONTENT = (
    "\ufeffThe first line\r\n\n  \n naïve façades \r\r\n東京\n"
    + "long " * 3000
    + "\n𝄞\u2028 one line\nlast"
)
LINES = ["The first line", " naïve façades ", "東京", "long " * 3000, "𝄞\u2028 one line", "last"]


def read(*paths):
    """All lines of some files, in their order."""
    return text._read_files(paths, lambda line: "train")["train"]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(CONTENT.encode())
    return path


@pytest.fixture(params=[1, 20, 5000, lying.BLOCK_BYTES])
def small_blocks(request, monkeypatch):
    monkeypatch.setattr(lying, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(lying, "LINES_AT_ONCE", min(request.param, 3))


class TestLines:
    def test_are_those_of_the_file(self, path, small_blocks):
        found = read(path)
        assert list(found) == LINES
        assert [found[index] for index in range(-6, 6)] == LINES * 2
        assert len(found) == 6 and "東京" in found and found.index("last") == 5
        assert found.sizes.tolist() == [len(line.encode()) for line in LINES]

    def test_slices_read_nothing(self, path, small_blocks):
        found = read(path)
        for part in (slice(1, 4), slice(None, None, 2), slice(None, None, -1), slice(-2, None)):
            assert isinstance(found[part], lying.Lines) and list(found[part]) == LINES[part]
        assert list(found[2:][1:]) == LINES[3:] and list(found[3:3]) == []
        part = found[1:]
        path.unlink()
        assert len(part) == 5

    def test_no_such_line(self, path):
        with pytest.raises(IndexError):
            read(path)[6]

    def test_of_several_files(self, tmp_path, small_blocks):
        generator = random.Random(0)
        expected = []
        for number in range(5):
            lines = ["x" * generator.randint(1, 30) for _ in range(20)]
            (tmp_path / f"{number}.txt").write_text("\n\n".join(lines))
            expected += lines
        found = read(*sorted(tmp_path.iterdir()))
        assert list(found) == expected and list(found[::-1]) == expected[::-1]
        assert [found[index] for index in range(100)] == expected

    def test_equal_a_list_or_others_of_the_same_content(self, path, tmp_path):
        (tmp_path / "b.txt").write_text("\n".join(LINES))
        found = read(path)
        assert found == LINES and LINES == found and found == read(tmp_path / "b.txt")
        assert found != LINES[1:] and found != [*LINES[:-1], "other"] and found != tuple(LINES)

    def test_can_be_sent_to_a_process(self, path):
        sent = pickle.dumps(read(path)[1:3])
        assert len(sent) < 2000 and pickle.loads(sent) == LINES[1:3]

    def test_longer_ones_are_chosen_by_their_bytes(self, path):
        for size in (0, 4, 6, 16, 17, 20_000):
            expected = [line for line in LINES if len(line.encode()) > size]
            assert lying.longer_than(read(path), size) == expected
            assert lying.longer_than(LINES, size) == expected

    def test_sizes_are_those_of_lines_in_memory(self, path):
        """A text that is unpacked meanwhile has the same blocks."""
        found = lying.sizes_of(read(path))
        assert lying.sizes_of(LINES).tolist() == found.tolist()
        assert lying.sizes_of([]).tolist() == []

    def test_need_little_memory(self, path):
        path.write_text("a line of text\n" * 10_000)
        found = read(path)
        assert found._starts.nbytes + found.sizes.nbytes == 12 * 10_000


class TestChangedFiles:
    @pytest.mark.parametrize(
        "change", ["cut", "cut to nothing", "other bytes", "more", "gone", "closed"]
    )
    def test_an_error_names_the_file(self, path, monkeypatch, change):
        found = read(path)
        half_way = iter(read(path))
        monkeypatch.setattr(lying, "BLOCK_BYTES", 20)
        assert next(half_way) == LINES[0]
        os.utime(path, ns=(0, os.stat(path).st_mtime_ns - 1_000_000_000))
        if change == "cut":
            os.truncate(path, 100)
        elif change == "cut to nothing":
            os.truncate(path, 0)
        elif change == "other bytes":
            path.write_bytes(CONTENT.encode().replace(b"long", b"l\xffng"))
        elif change == "more":
            path.write_bytes(CONTENT.encode() + b" line")
        elif change == "gone":
            path.unlink()
        else:
            close(path, monkeypatch)
        for ask in (
            lambda: list(half_way),
            lambda: list(found),
            lambda: found[1],
            lambda: found[-1],
        ):
            with pytest.raises(DataError, match="a.txt: (was changed|cannot be read)"):
                ask()

    def test_also_when_nobody_can_tell_by_its_time(self, path, monkeypatch):
        """As on a file system with coarse time stamps."""
        found, stamp = read(path), os.stat(path).st_mtime_ns
        path.write_bytes(CONTENT.encode().replace(b"long", b"l\xffng"))
        os.utime(path, ns=(stamp, stamp))
        assert found[0] == LINES[0]
        with pytest.raises(DataError, match="a.txt: was changed"):
            list(found)

    def test_also_when_it_is_cut_between_look_and_read(self, path, monkeypatch):
        found, pread = read(path), os.pread

        def cut_first(descriptor, size, at):
            os.truncate(path, 40)
            return pread(descriptor, size, at)

        monkeypatch.setattr(os, "pread", cut_first)
        with pytest.raises(DataError, match="a.txt: was changed"):
            list(found)


class TestText:
    def test_the_fingerprint_is_that_of_the_lines(self, path, tmp_path):
        folder = tmp_path / "folder"
        folder.mkdir()
        for split in text.SPLITS:
            (folder / f"{split}.txt").write_bytes(CONTENT.encode())
        lists = text.Text("any", dict.fromkeys(text.SPLITS, LINES), False)
        loaded = text.load_text(str(folder), tmp_path)
        assert all(isinstance(lines, lying.Lines) for lines in loaded.splits.values())
        assert text.text_sha256(loaded) == text.text_sha256(lists)
        # As it always was: resumed runs compare it.
        expected = "5bd4fbd94998a3231ac8b9e87b51b9d2"
        assert text.text_sha256(lists).startswith(expected)

    def test_a_compressed_file_among_others_keeps_its_place(self, path, tmp_path):
        import gzip

        (tmp_path / "b.txt.gz").write_bytes(gzip.compress("\n".join(map(str, range(500))).encode()))
        loaded = text.load_text(str(tmp_path / "*.txt*"), tmp_path)
        found = list(itertools.chain(*loaded.splits.values()))
        assert sorted(found) == sorted([*LINES, *map(str, range(500))])
