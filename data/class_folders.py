"""Reads folders of texts, a file for each text and a folder for each class, as of aclImdb."""

from collections.abc import Sequence
from pathlib import Path

from data import files, glue
from data.errors import DataError
from data.live_line import live_line

UNLABELLED = "unsup"  # of aclImdb


def splits_of(folder: Path) -> dict[str, list[Path]]:
    """Returns the folders of classes by split.

    Args:
        folder: holds them, or a folder for each split that holds them.

    Returns:
        Keys "train" and the other splits that exist; or "" where there are no splits. Empty if
        these are no folders of texts.
    """
    found = {}
    for split, names in glue.FILES.items():
        classes = [path for name in names for path in _classes_in(folder / name)]
        if classes:
            found[split] = classes
    if "train" in found:
        return found
    classes = _classes_in(folder)
    return {"": classes} if len(classes) > 1 else {}


def _classes_in(folder: Path) -> list[Path]:
    """Returns the folders that contain texts, by name."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in inside if path.is_dir() and next(path.glob("*.txt"), None) is not None]


def read(classes: Sequence[Path]) -> list[tuple[str, str]]:
    """Reads texts and their classes, in the order of classes and names.

    Args:
        classes: folders of classes; that of texts without labels is left out.

    Raises:
        DataError: a file is empty, or is not UTF-8.
    """
    rows = []
    labelled = [folder for folder in classes if folder.name != UNLABELLED]
    paths = [path for folder in labelled for path in sorted(folder.glob("*.txt"))]
    for path in live_line(paths, "reading texts"):
        with files.open_bytes(path) as stream:
            content = stream.read()
        try:
            text = content.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 at byte {error.start}; {files.CONVERT}") from error
        if not text:
            raise DataError(f"{path}: the text is empty: remove the file")
        rows.append((text, path.parent.name))
    return rows
