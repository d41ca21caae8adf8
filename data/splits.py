"""The splits of a dataset, by the names that every module uses, and the shards of their files."""

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from data.errors import DataError

SPLITS = ("train", "valid", "test")

# Of a file in parts: their number, how many there are, and a hash that some names have.
SHARD = r"-(\d{5})-of-(\d{5})(-[0-9a-f]{16})?"
EXAMPLE = "train-00000-of-00002.jsonl"


def fold(text: str) -> str:
    """Returns a text with case, white space and composed characters normalised."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def hash_of(text: str) -> int:
    """Returns a 64-bit hash that is the same on every machine (unlike `hash`)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_of(text: str) -> str:
    """Returns "train", "valid" or "test" for 90, 5 and 5 percent of texts, by hash."""
    percent = hash_of(text) % 100
    return "train" if percent < 90 else "valid" if percent < 95 else "test"


def as_one_file(paths: Sequence[Path], dataset: str) -> list[Path] | None:
    """Returns the parts of one file in their order, or the only path.

    Args:
        paths: Of the files of a split, at least one.
        dataset: What an error begins with.

    Returns:
        None if these are several files.

    Raises:
        DataError: One of the shards is missing, or is there twice.
    """
    names = [re.fullmatch(rf"(.*){SHARD}(\..*)", path.name) for path in paths]
    shards = [match for match in names if match is not None]
    if not shards:
        return list(paths) if len(paths) == 1 else None
    if len(shards) < len(paths) or len({match.group(1, 3, 5) for match in shards}) > 1:
        return None
    count = int(shards[0][3])
    path_of: dict[int, Path] = {}
    for path, match in zip(paths, shards, strict=True):
        number = int(match[2])
        if number in path_of:
            raise DataError(f"{dataset}: {path_of[number].name} and {path.name} are the same shard")
        path_of[number] = path
    missing = [number for number in range(count) if number not in path_of]
    if missing:
        begin, end = shards[0].group(1, 5)
        raise DataError(f"{dataset}: lacks the shard {begin}-{missing[0]:05}-of-{count:05}{end}")
    return [path_of[number] for number in sorted(path_of)]
