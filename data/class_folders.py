"""Reads folders of texts, a file for each text and a folder for each class, as of aclImdb."""

from collections.abc import Sequence
from pathlib import Path

from data import files
from data.errors import DataError, listed
from data.live_line import live_line
from data.splits import named

UNLABELLED = "unsup"  # of aclImdb


def splits_of(folder: Path) -> dict[str, list[Path]]:
    """Returns the folders of classes by split.

    Args:
        folder: holds them, or a folder for each split that holds them.

    Returns:
        Keys "train" and the other splits that exist; or "" where there are no splits. Empty if
        these are no folders of texts.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        split, form = named(path.name) or ("", None)
        if form == 0 and _classes_in(path):
            found.setdefault(split, []).extend(_classes_in(path))
    if "train" in found:
        return found
    classes = _classes_in(folder)
    return {"": classes} if len(classes) > 1 else {}


def _classes_in(folder: Path) -> list[Path]:
    """Returns the folders that contain texts, by name; hidden ones are none."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    folders = [path for path in inside if path.is_dir() and path.name[0] != "."]
    return [path for path in folders if any(map(_is_text, path.iterdir()))]


def _is_text(path: Path) -> bool:
    return path.suffix.lower() == ".txt" and path.name[0] != "."


def unread_note(folder: Path, classes: Sequence[Path]) -> str | None:
    """Returns a line about other files than texts in the folders of classes, or None.

    Args:
        folder: What names are relative to; hidden files do not count.
        classes: Folders of classes; that of texts without labels is left out.
    """
    names = []
    for each in classes:
        if each.name == UNLABELLED:
            continue
        for path in sorted(each.rglob("*")):
            is_read = path.parent == each and _is_text(path)
            is_hidden = any(part[0] == "." for part in path.relative_to(each).parts)
            if path.is_file() and not is_read and not is_hidden:
                names.append(str(path.relative_to(folder)))
    return f"{len(names):,} files that are not read: {listed(names)}" if names else None


def read(classes: Sequence[Path]) -> list[tuple[str, str]]:
    """Reads texts and their classes, in the order of classes and names.

    Args:
        classes: folders of classes; that of texts without labels is left out.

    Raises:
        DataError: a file is empty, or is not UTF-8.
    """
    rows = []
    labelled = [folder for folder in classes if folder.name != UNLABELLED]
    paths = [path for folder in labelled for path in sorted(folder.iterdir()) if _is_text(path)]
    for path in live_line(paths, "reading texts"):
        with files.open_bytes(path) as stream:
            content = stream.read()
        try:
            text = content.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            hint = files.how_to_convert(content)
            raise DataError(f"{path}: not UTF-8 at byte {error.start}; {hint}") from error
        if not text:
            raise DataError(f"{path}: the text is empty: remove the file")
        # A tab would separate the two sentences of a pair.
        rows.append((text.replace("\t", " "), path.parent.name))
    return rows
