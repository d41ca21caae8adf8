"""Lines of text that stay in their files: a corpus needs 12 bytes of memory a line.

What is read is read with `pread`, never mapped: a file that is cut while it is mapped kills the
process. A file that has changed since its lines were found is refused, whatever it holds now.

Workers import this module: it needs NumPy and the standard library alone.
"""

import array
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from data.errors import DataError

BLOCK_BYTES = 1_000_000  # read at once where lines follow each other
LINES_AT_ONCE = 8192  # looked at for the next block


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A file of lines, as it was when they were found.

    Attributes:
        path: where it lies.
        begin: number of its first byte, counted through all files of a text.
        size: its bytes.
        changed: when it was last changed, nanoseconds.
    """

    path: Path
    begin: int
    size: int
    changed: int

    def read(self, begin: int, end: int) -> bytes:
        """Some of its bytes.

        Args:
            begin: number of the first one, counted through all files.
            end: number of the first one after them.

        Raises:
            DataError: The file cannot be read, or is not what it was.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if (status.st_size, status.st_mtime_ns) != (self.size, self.changed):
                    raise self.is_another()
                found = b""
                while len(found) < end - begin:
                    at = begin - self.begin + len(found)
                    more = os.pread(descriptor, end - begin - len(found), at)
                    if not more:
                        raise self.is_another()
                    found += more
                return found
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})") from error

    def is_another(self) -> DataError:
        """The error for a file that has changed."""
        return DataError(f"{self.path}: was changed while it was in use; start again")


class Lines(Sequence[str]):
    """A read-only sequence of lines that lie in files.

    Args:
        files: in the order of their bytes' numbers.
        starts: int64, number of each line's first byte, counted through all files.
        sizes: uint32, bytes of each line, without what ends it.

    Raises (whatever reads a line):
        DataError: A file cannot be read, or has changed since its lines were found.
    """

    def __init__(self, files: Sequence[TextFile], starts: np.ndarray, sizes: np.ndarray):
        self._files = tuple(files)
        self._begins = np.array([file.begin for file in files], np.int64)
        self._starts = starts
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "Lines": ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return Lines(self._files, self._starts[index], self.sizes[index])
        begin, size = int(self._starts[index]), int(self.sizes[index])
        file = self._file_of(begin)
        return _decoded(file.read(begin, begin + size), file)

    def __iter__(self) -> Iterator[str]:
        at = 0
        while at < len(self):
            starts = self._starts[at : at + LINES_AT_ONCE]
            ends = starts + self.sizes[at : at + LINES_AT_ONCE]
            begin = int(starts[0])
            file = self._file_of(begin)
            last = max(int(ends[0]), min(begin + BLOCK_BYTES, file.begin + file.size))
            fits = (starts >= begin) & (ends <= last)
            count = len(fits) if fits.all() else int(fits.argmin())
            # Counted from the block's first byte.
            starts, ends = starts[:count] - begin, ends[:count] - begin
            block = file.read(begin, begin + int(ends.max()))
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                yield _decoded(block[start:end], file)
            at += count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lines | list):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def longer_than(self, size: int) -> "Lines":
        """The lines of more than so many bytes."""
        kept = self.sizes > size
        return Lines(self._files, self._starts[kept], self.sizes[kept])

    def _file_of(self, begin: int) -> TextFile:
        return self._files[int(np.searchsorted(self._begins, begin, "right")) - 1]


class Collector:
    """Notes where lines lie, file by file.

    Attributes:
        files: those that were begun, the last one is being read.
    """

    def __init__(self):
        self.files: list[TextFile] = []
        self._starts = array.array("q")
        self._sizes = array.array("I")

    def begin(self, path: Path, descriptor: int) -> None:
        """Begins the next file, which is open."""
        status = os.fstat(descriptor)
        begin = self.files[-1].begin + self.files[-1].size if self.files else 0
        self.files.append(TextFile(path, begin, status.st_size, status.st_mtime_ns))

    def add(self, start: int, size: int) -> None:
        """Notes a line.

        Args:
            start: its first byte, counted from its file's.
            size: its bytes, without what ends it.

        Raises:
            DataError: It has 4 GB or more.
        """
        file = self.files[-1]
        if size >= 2**32:
            raise DataError(f"{file.path}: a line of {size:,} bytes; expected less than 4 GB")
        self._starts.append(file.begin + start)
        self._sizes.append(size)

    def __len__(self) -> int:
        return len(self._starts)

    def lines(self) -> Lines:
        """All that were added; nothing can be added afterwards."""
        starts = np.frombuffer(self._starts, np.int64)
        return Lines(self.files, starts, np.frombuffer(self._sizes, np.uint32))


def sizes_of(lines: Sequence[str]) -> np.ndarray:
    """How many bytes each line has (UTF-8), wherever it lies."""
    if isinstance(lines, Lines):
        return lines.sizes
    return np.fromiter((len(line.encode()) for line in lines), np.uint32, len(lines))


def longer_than(lines: Sequence[str], size: int) -> Sequence[str]:
    """The lines of more than so many bytes (UTF-8)."""
    if isinstance(lines, Lines):
        return lines.longer_than(size)
    return [line for line in lines if len(line.encode()) > size]


def _decoded(content: bytes, file: TextFile) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise file.is_another() from error
