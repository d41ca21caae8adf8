"""Handles user paths, atomic writes, checksums, and a cache of files that are built once."""

import codecs
import contextlib
import errno
import fcntl
import glob
import gzip
import hashlib
import io
import json
import logging
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from data.errors import DataError

log = logging.getLogger("recipes")

# What a file is that is not text, by its first bytes.
BINARY = {
    b"PK\x03\x04": "a zip archive, or a file of Excel: unpack it, or save it as CSV",
    b"\xd0\xcf\x11\xe0": "a file of Excel or Word: save it as CSV, or as text",
    b"BZh": "packed by bzip2: unpack it",
    b"\xfd7zXZ": "packed by xz: unpack it",
    b"\x28\xb5\x2f\xfd": "packed by Zstandard: unpack it",
    b"\x1f\x8b": "packed by gzip: its name must end in .gz",
    b"%PDF": "a PDF: save its text",
    b"PAR1": "Parquet: its name must end in .parquet",
    b"ARROW1": "Arrow: write Parquet, for instance with to_parquet()",
}
CONVERT = "convert it, for instance with: iconv -f {} -t UTF-8"
SUMS = "SHA256SUMS"  # `sha256sum -c` reads it too
WEIGHTS, STATE = "model.weights.h5", "state.json"  # of a checkpoint
METADATA = "recipe.json"  # stored with a run's model, covered by its checksums
SPLITS_WORDS = "splits_words"  # in it: whether its tokenizer does
# Options of runs whose checkpoints do not hold the model that is tested: part of its weights, or
# those before their average.
NOT_WHOLE_WITH = ("ema", "lora_rank", "freeze_backbone")

# Ends of the hidden names of what is being written, and of what it replaces.
PARTIAL = ".partial"
REPLACED = ".replaced"

# RuntimeError: an encrypted member of a zip archive, or one that is compressed in an unknown way.
UNPACKING_ERRORS = (gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)


# Paths.


def default_cache_dir() -> Path:
    """Returns the folder in `RECIPES_CACHE_DIR`, otherwise `~/.cache/keras-recipes`.

    Raises:
        DataError: There is no home folder.
    """
    path = expand(os.environ.get("RECIPES_CACHE_DIR") or "~/.cache/keras-recipes")
    if str(path).startswith("~"):
        raise DataError(f"{path}: no such home folder; set RECIPES_CACHE_DIR to a cache folder")
    return path


def expand(path: str | Path) -> Path:
    """Returns a path with `~` and `~user` replaced by home folders."""
    return Path(os.path.expanduser(path))


def is_same(dataset: str, other: str) -> bool:
    """Tells whether two datasets have the same name, or are the same file or folder."""
    if dataset == other:
        return True
    path, second = expand(dataset), expand(other)
    return path.exists() and second.exists() and path.samefile(second)


def json_value(value):
    """Converts numbers and arrays of NumPy, and tensors of one number: `json.dumps(default=...)`.

    Raises:
        TypeError: it is neither.
    """
    return value.tolist() if hasattr(value, "tolist") else float(value)


def json_object(path: Path) -> dict:
    """Returns the object of a JSON file; an empty one if there is none, or it cannot be read."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def how_to_convert(beginning: bytes) -> str:
    """Returns what the message about a file that is not UTF-8 ends with.

    Args:
        beginning: The first bytes of the file, at least two; others may follow.
    """
    if beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return f"it is UTF-16: {CONVERT.format('UTF-16')}"
    for first, what in BINARY.items():
        if beginning.startswith(first):
            return f"it is {what}"
    if b"\0" in beginning:
        return "it has bytes that are zero: it is not a text file"
    return CONVERT.format("LATIN1")


@contextlib.contextmanager
def open_bytes(path: Path, member: str | None = None) -> Iterator[Any]:
    """Opens a file for `with`, unpacks `.gz`, and turns every read error into a `DataError`.

    Args:
        path: The file.
        member: The member to read, if the file is a zip archive.
    """
    try:
        if member is not None:
            with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
                yield gzip.open(stream) if member.lower().endswith(".gz") else stream
        else:
            with gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb") as stream:
                yield stream
    except UNPACKING_ERRORS as error:
        raise DataError(f"{path}: damaged archive ({error})") from error
    except io.UnsupportedOperation as error:  # seek(), of a pipe
        raise DataError(f"{path}: a table must be a file, not a pipe") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


# Writing.


@contextlib.contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """Writes a file or a folder that appears whole or not at all, also after a power failure.

    Undoes an earlier attempt that was killed: removes its remains, and puts the target back if it
    was set aside. There must be one writer at a time.

    ```python
    with atomic(folder / "results.json") as temporary:
        temporary.write_text(content)
    ```

    Args:
        target: The file or folder; an existing one is replaced.

    Yields:
        A path beside `target` that does not exist: write the file or make the folder there.

    Raises:
        OSError: It cannot be written; an existing target is unchanged.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL}")
    replaced = target.with_name(f".{target.name}{REPLACED}")
    try:
        if not target.exists() and replaced.exists():
            os.rename(replaced, target)
        remove(replaced)
        for left in target.parent.glob(f".{glob.escape(target.name)}.*{PARTIAL}"):
            remove(left)
        try:
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                sync(path)
            # os.replace() replaces only a file by a file.
            if target.exists() and (target.is_dir() or temporary.is_dir()):
                os.rename(target, replaced)
            os.replace(temporary, target)
            sync(target.parent)
        finally:
            if replaced.exists() and not target.exists():
                os.rename(replaced, target)
            remove(temporary)
            remove(replaced)
    except OSError as error:
        if str(error.filename) in (str(temporary), str(replaced)):
            error.filename = str(target)  # the name that the user knows
        raise


def remove(path: Path) -> None:
    """Removes a file, or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk.

    Raises:
        OSError: It cannot be opened or written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; a rename is still atomic there.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


# Checksums.


def sha256_of(path: Path) -> str:
    """Returns the checksum of a file, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def kind_of(checksum: str) -> str:
    """Returns "sha256", or "md5" for 32 hex digits: some publishers publish only MD5."""
    return "md5" if len(checksum) == 32 else "sha256"


def checksum_like(path: Path, checksum: str) -> str:
    """Returns the checksum of a file, hex, by the algorithm of `checksum`."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind_of(checksum)).hexdigest()


def _names_in(folder: Path) -> list[str]:
    """Returns the paths of the files below a folder, but that of the checksums."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def write_checksums(folder: Path) -> None:
    """Writes `SHA256SUMS`, with a line for each file of a folder."""
    lines = (f"{sha256_of(folder / name)}  {name}\n" for name in _names_in(folder))
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def damage(folder: Path, required: Iterable[str] | None = None) -> str | None:
    """Describes the first damaged file of a folder; returns None if all are intact.

    Args:
        folder: The folder; without `SHA256SUMS` it counts as intact.
        required: Files that `SHA256SUMS` must list; it must then exist.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None if required is None else f"{SUMS} is missing"
    sums = {name: wanted for wanted, _, name in (line.partition("  ") for line in lines)}
    # A truncated list must not vouch for files that it omits.
    if not sums or not sums.keys() >= set(required or ()):
        return f"{SUMS} does not name its files"
    for name, wanted in sums.items():
        try:
            if (folder / name).exists() and not (folder / name).is_file():
                return f"{name} is not a regular file"
            if sha256_of(folder / name) != wanted:
                return f"{name} does not match its checksum"
        except (OSError, ValueError) as error:
            return f"{name}: {getattr(error, 'strerror', None) or error}"
    return None


# The cache.


def build_once(
    target: Path, build: Callable[[Path], None], what: str, checksum: str | None = None
) -> None:
    """Builds a folder, or a file with a known checksum, unless it exists undamaged.

    It appears whole or not at all. If several processes need it at once, one builds it and the
    others wait. A folder gets a file `SHA256SUMS`. An existing target is verified; a damaged one is
    reported in a warning and built again.

    Args:
        target: The folder or file to build.
        build: Called with a path that does not exist; creates a folder there, or a file if there is
            a `checksum`.
        what: Name of the target, for messages.
        checksum: SHA-256 or MD5 of the file that `build` makes, hex; None for a folder.

    Raises:
        DataError: The folder cannot be written, or the disk is full.
    """
    target = Path(target)

    def is_whole() -> bool:
        if not target.exists():
            return False
        if checksum is None:
            return damage(target, _names_in(target)) is None
        return checksum_like(target, checksum) == checksum

    try:
        if is_whole():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_name(f".lock-{target.name}"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("%s: waiting for another process, which is making %s", what, target)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if is_whole():  # another process has built it meanwhile
                return
            if target.exists():
                log.warning("%s: %s is damaged and is built again", what, target)
            with atomic(target) as temporary:
                build(temporary)
                if checksum is None:
                    write_checksums(temporary)
    except OSError as error:
        raise DataError(
            f"{what}: cannot make {target} ({error.strerror or error}); another cache folder can "
            "be given in RECIPES_CACHE_DIR"
        ) from error
