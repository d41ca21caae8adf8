"""Paths that a person names, and compressed files: what is wrong is said in one line."""

import errno
import fnmatch
import glob
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.errors import DataError

# A compressed file may always unpack to this many bytes (WikiText-103: 540 million), and above that
# to this many times its own size. Text shrinks to a third or a quarter; deflate can pack zeros
# 1,032 to 1.
UNPACKED_BYTES = 1_000_000_000
UNPACKED_RATIO = 20


def expand(path: str | Path, what: str) -> Path:
    """Turns what a person wrote into a path: `~` and `~user` become home folders.

    Args:
        path: What was written.
        what: What the path is for, such as "--vocabulary"; begins the message.

    Raises:
        DataError: It is empty, holds a NUL byte or bytes that are no UTF-8, or names a user who
            does not exist.
    """
    text = os.fspath(path)
    if not text:
        raise DataError(f"{what}: empty; expected a path")
    if "\0" in text:
        raise DataError(f"{what} {text!a}: holds a NUL byte; expected a path")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # how Python holds bytes of a command line
        raise DataError(f"{what} {text!a}: not UTF-8; expected a path") from error
    expanded = os.path.expanduser(text)
    if text.startswith("~") and expanded == text:
        raise DataError(f"{what} {text}: there is no user {text[1:].split('/')[0]!r}")
    return Path(expanded)


def kind_of(path: Path, what: str) -> str | None:
    """Returns "file", "folder", "device" (pipes and sockets, too), or None for nothing at all.

    `Path.is_file()` raises where a folder is closed or a name too long.

    Args:
        path: The path; links are followed.
        what: Begins the message.

    Raises:
        DataError: It cannot be said, and why.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise DataError(f"{what} {path}: {error.strerror}") from error
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "device"


def read_text(path: Path) -> str:
    """Returns the text of a file, UTF-8, and of nothing else.

    A pipe would be waited for, and `/dev/full` has no end.

    Raises:
        OSError: It cannot be read, or is a folder or a device; `strerror` says it.
        UnicodeDecodeError: It is not UTF-8.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "a device; expected a file", str(path))
    return path.read_text(encoding="utf-8")


def readable_file(path: str | Path, what: str) -> Path:
    """Returns the path of a file that can be opened.

    Args:
        path: What a person wrote.
        what: What the path is for, such as "--vocabulary"; begins the message.

    Raises:
        DataError: It is no path, there is nothing, it is no file, or it cannot be opened.
    """
    found = expand(path, what)
    kind = kind_of(found, what)
    if kind is None:
        raise DataError(f"{what} {path}: no such file")
    if kind != "file":
        raise DataError(f"{what} {path}: a {kind}; expected a file")
    try:
        found.open("rb").close()
    except OSError as error:
        raise DataError(f"{what} {path}: cannot be read ({error.strerror})") from error
    return found


def files_in(folder: Path, what: str) -> list[Path]:
    """Returns the files that lie in a folder, sorted; what lies deeper is left out.

    Args:
        folder: The folder; links are followed.
        what: Begins the message.

    Raises:
        DataError: The folder cannot be listed.
    """
    names = _names_in(folder, what)
    return [folder / name for name in names if kind_of(folder / name, what) == "file"]


def matching_files(pattern: Path, what: str) -> list[Path]:
    """Returns the files that match a pattern, as `glob.glob(pattern, recursive=True)` would.

    Unlike it, this follows links without walking in circles, takes a file once, however many links
    lead to it, and does not leave out what lies in a folder that cannot be read.

    Args:
        pattern: A path with `*`, `?`, `[...]` or `**` (any number of folders) in it. They match no
            hidden files.
        what: Begins the message.

    Raises:
        DataError: A folder on the way cannot be read.
    """
    parts = pattern.parts
    if parts[-1] == "**":
        parts += ("*",)
    found, seen = [], set()
    waiting = [(Path(parts[0]), parts[1:]) if pattern.is_absolute() else (Path(), parts)]
    while waiting:
        path, parts = waiting.pop()
        try:
            status = os.stat(path)
        except OSError as error:
            # A link that leads nowhere or to itself, or a name that is not there.
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                continue
            raise DataError(f"{what} {path}: {error.strerror}") from error
        place = (status.st_dev, status.st_ino, len(parts))
        if place in seen:
            continue
        seen.add(place)
        if not parts:
            if stat.S_ISREG(status.st_mode):
                found.append(path)
        elif stat.S_ISDIR(status.st_mode):
            # The first to be looked at comes last.
            waiting += reversed(list(_one_deeper(path, parts, what)))
    return sorted(found, key=str)


def _one_deeper(folder: Path, parts: tuple[str, ...], what: str) -> Iterator[tuple]:
    """Yields where to look next, each with the parts of the pattern that are left."""
    part, *rest = parts
    if not glob.has_magic(part):
        yield folder / part, tuple(rest)
        return
    if part == "**":
        yield folder, tuple(rest)
    for name in _names_in(folder, what):
        if name.startswith(".") and not part.startswith("."):
            continue
        if part == "**":
            yield folder / name, parts
        elif fnmatch.fnmatchcase(name, part):
            yield folder / name, tuple(rest)


def _names_in(folder: Path, what: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(f"{what} {folder}: cannot be listed ({error.strerror})") from error


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedIOBase]:
    """Opens a file, unpacking `.gz`, for `with`; every error of reading becomes a `DataError`.

    Args:
        path: The file.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream:
            yield stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error}), expected a whole one") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def unpacked_limit(packed: int) -> int:
    """How many bytes a compressed file may unpack to: what is in proportion and fits into memory.

    Args:
        packed: Bytes of the compressed file.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(max(UNPACKED_BYTES, UNPACKED_RATIO * packed), memory)


def too_large(name: str, packed: int, found: int | None = None) -> DataError:
    """The error for a compressed file that unpacks to more than `unpacked_limit`.

    Args:
        name: The file.
        packed: Its bytes.
        found: Bytes that it says it unpacks to, where it says that.
    """
    limit = unpacked_limit(packed)
    unpacked = f"{found:,}" if found is not None else f"more than {limit:,}"
    return DataError(
        f"{name}: {packed:,} bytes that unpack to {unpacked}, expected at most {limit:,}; if "
        "that is right, unpack it and give the files"
    )
