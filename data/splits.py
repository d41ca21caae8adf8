"""The splits of a dataset, by the names that every module uses, and the shards of their files."""

import hashlib
import re
import types
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.errors import DataError, listed
from data.files import expand

SPLITS = ("train", "valid", "test")
TITLES = {"valid": "validation", "test": "test"}  # of the splits that are not trained on

# What loaders take as `held_out` by default: no files of `--validation-file` and `--test-file`.
NO_FILES: Mapping[str, Path] = types.MappingProxyType({})

# Of a file in parts: their number, how many there are, and a hash that some names have.
SHARD = r"-(\d{5})-of-(\d{5})(-[0-9a-f]{16})?"
EXAMPLE = "train-00000-of-00002.jsonl"

# Names of the files and folders of splits, in any case: those of GLUE and usual others; longer ones
# that contain the word, of which the first one counts; and words such as trainset.
_WORD = "train|valid(?:ation)?|val|dev|test"
_NAMES = (
    rf"({_WORD})(_matched)?({SHARD})?(\.[a-z]+)?(\.gz)?",
    rf".*?(?<![a-z])({_WORD})(?![a-z]).*",
    rf".*?(?<![a-z])({_WORD})(ing|elopment|set|data)(?![a-z]).*",
)


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


def of_each(
    texts: Iterable[str], draw: Callable[[str], str], held_out: Sequence[str], share: float
) -> dict[str, str]:
    """Returns the split of each text: the drawn one, or by rank if that leaves a split empty.

    Args:
        texts: Different ones, more than `held_out`; of fewer some split stays empty.
        draw: Returns a text's split by its hash, so that texts that are added move no others.
        held_out: The splits besides "train".
        share: Of the texts in each of these splits; by rank each has at least one.
    """
    drawn = {text: draw(text) for text in texts}
    if len(drawn) > len(held_out) and not {"train", *held_out} <= set(drawn.values()):
        count = max(1, round(share * len(drawn)))
        for rank, text in enumerate(sorted(drawn, key=hash_of)):
            drawn[text] = (*held_out, "train")[min(rank // count, len(held_out))]
    return drawn


def named(name: str) -> tuple[str, int] | None:
    """Returns the split that a file or a folder is named after, or None.

    Returns:
        The split and the place of the name's form in `_NAMES`: 0 for train.csv, 1 for
        my_train.csv, 2 for trainset.csv.
    """
    for form, pattern in enumerate(_NAMES):
        match = re.fullmatch(pattern, name, re.IGNORECASE)
        if match is not None:
            word = match[1].lower()
            return (word if word in SPLITS else "valid"), form
    return None


def missing_from(found: Iterable[str]) -> tuple[str, ...]:
    """Returns the splits besides training that are not among those that were found."""
    return tuple(split for split in SPLITS[1:] if split not in found)


def held_out_files(held_out: Mapping[str, Path], test_file: Path | None) -> dict[str, Path]:
    """Returns the file to read for each split that has one.

    An evaluation of a test file needs none of the files that were held out in training. For those
    that are gone it reads the test file, so that their splits stay uncut from training.

    Args:
        held_out: Files of `--validation-file` and `--test-file` by split.
        test_file: The test split of an evaluation, or None.
    """
    if test_file is None:
        return dict(held_out)
    test = expand(test_file)
    found = {split: path for split, path in held_out.items() if split != "test" and path.is_file()}
    return dict.fromkeys([*held_out, "test"], test) | found


def with_notes(splits: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns which of "valid" and "test" are named in notes: the test alone where both are one.

    An evaluation reads its test file for a validation file that is gone, see `held_out_files`.

    Args:
        splits: What was read for each split.
    """
    return ("test",) if splits["valid"] == splits["test"] else ("valid", "test")


def instead_note(
    dataset: str, held_out: Mapping[str, Path], test_file: Path | None = None
) -> str | None:
    """Returns a line about files that replace splits of a dataset, or None.

    Args:
        dataset: Has all splits.
        held_out: Files by split.
        test_file: The test split of an evaluation, which needs no such line; or None.
    """
    notes = [
        f"{held_out[split]} is the {TITLES[split]} split, instead of that of {dataset}"
        for split in SPLITS
        if split in held_out and test_file is None
    ]
    return "; ".join(notes) or None


def files_by_split(
    paths: Iterable[Path],
    dataset: str,
    holds: Callable[[Path], bool] = lambda path: True,
    but: Collection[str] = (),
) -> dict[str, list[Path]]:
    """Returns the file of each split, or its shards in their order, by their names.

    Files called train, valid (or validation, val, dev) and test come first; where there is none for
    a split, a longer name such as my_train.csv counts.

    Args:
        paths: Of all files that may be one, for instance the tables of a folder; hidden ones are
            left out.
        dataset: What an error begins with.
        holds: Tells whether a file of a longer name has examples: train_args.json may have none.
        but: Splits of other files, for which none is looked for.

    Raises:
        DataError: There are several for a split, or a shard is missing.
    """
    forms: dict[tuple[str, int], list[Path]] = {}
    for path in sorted(paths):
        split_and_form = named(path.name)
        if split_and_form is None or split_and_form[0] in but:
            continue
        if path.name[0] != ".":
            forms.setdefault(split_and_form, []).append(path)
    found: dict[str, list[Path]] = {}
    for (split, form), files in sorted(forms.items()):
        if split in found:
            continue
        meant = [path for path in files if form == 0 or holds(path)]
        whole = as_one_file(meant, dataset) if meant else []
        if whole is None:
            raise DataError(
                f"{dataset}: several {split} files, {listed([path.name for path in meant])}; "
                f"expected one, or its shards, called for instance {EXAMPLE}"
            )
        if whole:
            found[split] = whole
    return found


def layout_hint(folder: Path) -> str:
    """Returns what the message about a folder without training files ends with.

    It names the folder within it that has such files, as a clone of a dataset of Hugging Face has,
    and the way out of a folder that its library's `save_to_disk()` has written.
    """
    if not folder.is_dir():
        return ""
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    for path in [folder, *inside]:
        if any(file.suffix == ".arrow" for file in path.iterdir()):
            return (
                "; this is what save_to_disk() writes: write each split to a file instead, such as "
                'dataset["train"].to_parquet("train.parquet")'
            )
    for path in inside:
        files = [file.name for file in path.iterdir() if file.is_file() and file.suffix]
        if any((named(name) or ("",))[0] == "train" for name in files):
            return f"; pass {path}, which has training files"
    return ""


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
