"""`SHA256SUMS`: what lies in a folder is what was written there; `sha256sum -c` reads it too.

And how a folder gets its name: once all of it is on the disk.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

SUMS = "SHA256SUMS"


def sha256_of(path: Path) -> str:
    """The checksum of a file, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(folder: Path, names: Iterable[str] | None = None) -> None:
    """Writes the checksums of a folder's files into the folder.

    Args:
        folder: where the files lie.
        names: the files, relative to the folder; by default all that are there.
    """
    if names is None:
        found = (path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
        names = [path.relative_to(folder).as_posix() for path in found]
    lines = (f"{sha256_of(folder / name)}  {name}\n" for name in sorted(names))
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def problem(folder: Path, names: Iterable[str] | None = None) -> str | None:
    """What is wrong with a folder's files, or None.

    Args:
        folder: where `SHA256SUMS` lies; without it nothing is known, and nothing wrong.
        names: files that it must name, besides what it does name; then it must be there.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return f"{SUMS} is missing" if names is not None else None
    except (OSError, UnicodeDecodeError) as error:
        return f"{SUMS}: {getattr(error, 'strerror', None) or error}"
    sums = {name: wanted for wanted, gap, name in (line.partition("  ") for line in lines) if gap}
    empty = names is None and not sums  # cut to nothing, it would vouch for everything
    if empty or len(sums) != len(lines) or not set(names or ()) <= set(sums):
        return f"{SUMS} does not name its files"
    for name, wanted in sums.items():
        try:
            if sha256_of(folder / name) != wanted:
                return f"{name} does not match its checksum"
        except (OSError, ValueError) as error:
            return f"{name}: {getattr(error, 'strerror', None) or error}"
    return None


def put_in_place(temporary: Path, target: Path) -> None:
    """Gives a folder its name, in the place of what has it, once all of it is on the disk.

    Raises:
        OSError: it cannot be; what had the name has it, or lies beside it.
    """
    sync(temporary)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(temporary, target)
    sync(target.parent, deep=False)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path, deep: bool = True) -> None:
    """Brings a file, or a folder with all that it holds, to the disk.

    Args:
        path: the file or the folder.
        deep: False for the names that stand in a folder alone.

    Raises:
        OSError: it cannot be.
    """
    if deep and path.is_dir():
        for child in path.iterdir():
            sync(child)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; a rename is still atomic there.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
