"""The cache folder: what is made there is whole or absent, also when two ask for it at once.

Every folder in it holds its checksums, and they are verified before it is used: a flipped bit or a
truncated file is named and built again, not trained on.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from data import checksums
from data.errors import DataError
from data.paths import expand

log = logging.getLogger("recipes")

# What a person can repair: no space, no permission, a file system that cannot lock.
REPAIRABLE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOLCK,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.ENOTSUP,
    errno.EPERM,
    errno.EROFS,
}


def default_cache_dir() -> Path:
    """Returns the folder in `RECIPES_CACHE_DIR`, otherwise `~/.cache/keras-recipes`.

    Raises:
        DataError: `RECIPES_CACHE_DIR` is no path.
    """
    folder = os.environ.get("RECIPES_CACHE_DIR") or "~/.cache/keras-recipes"
    return expand(folder, "RECIPES_CACHE_DIR")


def build_once(
    target: Path, build: Callable[[Path], None], what: str, sha256: str | None = None
) -> None:
    """Makes a folder, or a file with a known checksum, unless it is there and undamaged.

    It appears whole or not at all. `build` works on a temporary path beside `target`. Of several
    processes (or threads) that ask at once, one builds and the others wait. A kill at any moment
    leaves at most temporary paths and the lock file; the next call that builds the same target
    removes them.

    A folder gets a file `SHA256SUMS`. What exists is verified on its first use in each process, and
    again when a size or a time stamp has changed since. What is damaged, or has no `SHA256SUMS`, is
    named in a warning and built again; it is replaced only when that succeeds.

    Args:
        target: The folder or file to make.
        build: Gets a path that does not exist, in a folder that does, and makes a folder of it
            (a file where `sha256` is given).
        what: What is made, for messages.
        sha256: Hex digest of the file that `build` makes; None where it makes a folder.

    Raises:
        DataError: The folder cannot be written or locked, or the disk is full.
    """
    target = Path(target)
    has_folder = False
    try:
        if _damage(target, sha256) is None:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        has_folder = True
        with _lock(target.with_name(f".{target.name}.lock"), what):
            # Another process may have built it meanwhile.
            damage = _damage(target, sha256)
            if damage is None:
                return
            if os.path.lexists(target):
                log.warning("%s: %s is damaged (%s) and is built again", what, target, damage)
            _build(target, build, sha256)
    except OSError as error:
        if has_folder and error.errno not in REPAIRABLE:
            raise
        raise DataError(
            f"{what}: cannot make {target} ({error.strerror}); another cache folder can be given"
            " in RECIPES_CACHE_DIR"
        ) from error


def _build(target: Path, build: Callable[[Path], None], sha256: str | None) -> None:
    # Whoever holds the lock is the only builder: what lies here was left by a dead process.
    temporary = target.with_name(f".{target.name}.building")
    replaced = target.with_name(f".{target.name}.replaced")
    _remove(temporary)
    _remove(replaced)
    try:
        build(temporary)
        if sha256 is None:
            checksums.write(temporary, _names(temporary))
        checksums.sync(temporary)
        if target.is_dir():  # os.replace puts nothing in the place of a folder that holds something
            os.rename(target, replaced)
        elif sha256 is None:
            target.unlink(missing_ok=True)
        os.replace(temporary, target)
        checksums.sync(target.parent, deep=False)
        _verified[target] = _stamps(target)
    finally:
        _remove(temporary)
        _remove(replaced)


# What was verified in this process, and how its files looked then.
_verified: dict[Path, list[tuple]] = {}


def _damage(target: Path, sha256: str | None) -> str | None:
    """Returns in a few words what is wrong with a target, or None."""
    try:
        stamps = _stamps(target)
        if _verified.get(target) == stamps:
            return None
        if sha256 is not None:
            found = checksums.sha256_of(target)
            damage = None if found == sha256.lower() else f"sha256 {found}, expected {sha256}"
        else:
            damage = checksums.problem(target, _names(target))
    except OSError as error:
        return f"{error.filename or target}: {error.strerror}"
    if damage is None:
        _verified[target] = stamps
    return damage


def _names(folder: Path) -> list[str]:
    """The files of a folder; hidden ones (file managers leave some) do not belong to it."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    names = (file.as_posix() for file in files if not file.name.startswith("."))
    return sorted(name for name in names if name != checksums.SUMS)


def _stamps(target: Path) -> list[tuple]:
    """What changes when somebody writes to a target: cheap to compare, unlike its content."""
    paths = [target]
    if target.is_dir():
        paths += [target / name for name in (*_names(target), checksums.SUMS)]
    found = ((path, os.stat(path)) for path in paths if path.exists())
    return [(str(p), s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in found]


@contextlib.contextmanager
def _lock(path: Path, what: str) -> Iterator[None]:
    """Holds an exclusive lock; the kernel releases it when the process dies."""
    asked = time.monotonic()
    said = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if _try_lock(descriptor) and _is_same_file(descriptor, path):
                break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not said and time.monotonic() - asked > 2:
            print(f"waiting for another process: {what} ({path})", file=sys.stderr, flush=True)
            said = True
        time.sleep(0.05)
    try:
        yield
    finally:
        # Removed while held: a process that has the old file open sees that its name is gone.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
