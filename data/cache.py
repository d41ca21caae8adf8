"""The cache folder: what is made there is whole or absent, also when two ask for it at once."""

import contextlib
import errno
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from data.errors import DataError

# What a person can repair: no space, no permission, a file system that cannot lock.
REPAIRABLE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ENOLCK,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.ENOTSUP,
    errno.EPERM,
    errno.EROFS,
}


def default_cache_dir() -> Path:
    """Returns the folder in `RECIPES_CACHE_DIR`, otherwise `~/.cache/keras-recipes`."""
    folder = os.environ.get("RECIPES_CACHE_DIR") or "~/.cache/keras-recipes"
    return Path(folder).expanduser()


def build_once(target: Path, build: Callable[[Path], None], what: str) -> None:
    """Makes a file or folder unless it exists; it appears whole or not at all.

    `build` works on a temporary path beside `target`. Of several processes (or threads) that ask
    at once, one builds and the others wait. A kill at any moment leaves at most the temporary path
    and the lock file; the next call that builds the same target removes them.

    Args:
        target: The file or folder to make.
        build: Gets a path that does not exist, in a folder that does, and makes a file or a
            folder of it.
        what: What is made, for messages.

    Raises:
        DataError: The folder cannot be written or locked, or the disk is full.
    """
    target = Path(target)
    if target.exists():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f".{target.name}.lock"), what):
            if not target.exists():
                _build(target, build)
    except OSError as error:
        if error.errno not in REPAIRABLE:
            raise
        raise DataError(
            f"{what}: cannot make {target} ({error.strerror}); another cache folder can be given"
            " in RECIPES_CACHE_DIR"
        ) from error


def _build(target: Path, build: Callable[[Path], None]) -> None:
    # Whoever holds the lock is the only builder: what lies here was left by a dead process.
    temporary = target.with_name(f".{target.name}.building")
    _remove(temporary)
    try:
        build(temporary)
        _sync(temporary)
        os.replace(temporary, target)
        _sync_path(target.parent)
    finally:
        _remove(temporary)


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


def _sync(path: Path) -> None:
    """Brings a file, or a folder with all that it holds, to the disk."""
    if path.is_dir():
        for child in path.iterdir():
            _sync(child)
    _sync_path(path)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; the rename is still atomic there.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
