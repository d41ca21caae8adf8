"""Checks a folder before a run is stored there; imports neither Keras nor TensorFlow."""

import contextlib
import re
import stat
import time
from collections.abc import Iterable
from pathlib import Path

TOKEN = ".shared"  # a file by which the workers of a run see that they share a folder
DATE_TIME = "%Y%m%d-%H%M%S"  # in the names of folders


def not_a_run(folder: Path) -> list[str]:
    """Returns one line if a folder, which need not exist, cannot be that of a run, otherwise none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return [f"--run-dir {folder}: is a link to nothing"] if folder.is_symlink() else []
    if not is_folder:
        return [f"--run-dir {folder}: is a file, not a folder"]
    # Files that the launcher and the run write before options.json; a new disk has lost+found.
    ours = re.compile(
        r"\.(lock|shared)|(worker|ps|chief)-\d+\.log|\.options\.json\.\d+\.partial|lost\+found"
    )
    names = sorted(path.name for path in folder.iterdir() if not ours.fullmatch(path.name))
    if not names or (folder / "options.json").exists():
        return []
    return [
        f"--run-dir {folder}: not a run directory (contains {', '.join(names[:3])}); pass a new or"
        " empty one"
    ]


def missing_folders(folder: Path) -> list[Path]:
    """Lists those of a folder and its parents that do not exist, innermost first.

    Raises:
        OSError: the file system rejects the name.
    """
    return [path for path in (folder, *folder.parents) if not path.exists()]


def make_new_folder(recipe: str) -> tuple[Path, list[Path]]:
    """Creates `runs/RECIPE/<date-time>`, which no other run has.

    Returns:
        The folder, and those of it and its parents that were created, innermost first.

    Raises:
        OSError: the folder cannot be created.
    """
    while True:
        folder = Path("runs", recipe, time.strftime(DATE_TIME))
        made = missing_folders(folder)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:  # of another run that began in the same second
            time.sleep(1)
        else:
            return folder, made


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes folders, innermost first, but not those that another run uses."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
