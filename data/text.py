"""Text: WikiText by name, the installed packages' docstrings, or files of one's own."""

import dataclasses
import functools
import glob
import hashlib
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from data import download, files, installed_docs
from data.errors import DataError

SPLITS = ("train", "valid", "test")

# `auto` may look for a mirror this long; the rest of its ten seconds is left to the machine.
AUTO_SECONDS = 8.0


class Lines:
    """The lines of text files, read again by each iteration: none is held in memory.

    A line is a paragraph without its newline; empty lines are left out.

    Args:
        sources: Paths, each with the name of a member where it is a zip archive.
        split: Takes only the lines whose hash falls to this split.

    Raises (while iterating):
        DataError: A file is not UTF-8 text, or was changed since this object was made.
    """

    def __init__(self, sources: Sequence[tuple[Path, str | None]], split: str | None = None):
        self.sources, self.split = sources, split
        self._stamps = [_stamp(path) for path, _ in sources]

    def __iter__(self) -> Iterator[str]:
        for (path, member), stamp in zip(self.sources, self._stamps, strict=True):
            with files.open_bytes(path, member) as stream:
                for line in _lines_of(stream, f"{path}/{member}" if member else str(path)):
                    if self.split is None or installed_docs.split_of(line) == self.split:
                        yield line
            if _stamp(path) != stamp:
                raise DataError(f"{path}: was changed while it was in use; start again")


@dataclasses.dataclass(frozen=True)
class Text:
    """Lines of text by split. WikiText keeps its headings and its `<unk>`."""

    name: str  # A known dataset, or the path that was given.
    splits: Mapping[str, Iterable[str]]  # Keys "train", "valid" and "test".
    english_wikitext: bool  # Decides whether a pretrained English preset is tried.
    note: str | None = None  # One line where something else than the first choice is used, and why.

    @functools.cached_property
    def sha256(self) -> str:
        """Fingerprint of the lines and of the splits that they are in (hex)."""
        digest = hashlib.sha256()
        for split in SPLITS:
            digest.update(f"\0{split}\n".encode())
            for line in self.splits[split]:
                digest.update(f"{line}\n".encode())
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Archive:
    """A zip archive: what it is called, where to get it, and what it must be."""

    file_name: str
    mirrors: tuple[str, ...]
    sha256: str


# Plain http as well, for machines on which the certificate does not pass: what is trusted is the
# hash.
_SMERITY = ("https://wikitext.smerity.com/", "http://wikitext.smerity.com/")
_HUGGING_FACE = "https://huggingface.co/datasets"
_GGML = f"{_HUGGING_FACE}/ggml-org/ci/resolve/927b3642933080f1b0e811e2f916e14c292992f9/"
WIKITEXT = {
    "wikitext-2": Archive(
        "wikitext-2-v1.zip",
        _SMERITY,
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    ),
    "wikitext-2-raw": Archive(
        "wikitext-2-raw-v1.zip",
        (_GGML, *_SMERITY),
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    ),
    "wikitext-103": Archive(
        "wikitext-103-v1.zip",
        _SMERITY,
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    ),
    "wikitext-103-raw": Archive(
        "wikitext-103-raw-v1.zip",
        (*_SMERITY, f"{_HUGGING_FACE}/segyges/wikitext-103/resolve/main/"),
        "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
    ),
}


def load_text(dataset: str, cache_dir: Path) -> Text:
    """Loads a text and its three splits.

    Args:
        dataset: `wikitext-2`, `wikitext-2-raw`, `wikitext-103`, `wikitext-103-raw`;
            `installed-docs`; `auto` (`wikitext-2` where it is cached or a mirror answers, otherwise
            `installed-docs`); or a path: a folder with train, valid and test files, one text file
            or a glob of several (split 90/5/5 by a hash of each line), or a WikiText zip. Text
            files may be compressed (`.gz`).
        cache_dir: Where downloads and parsed docstrings are kept.

    Returns:
        The text; no split is empty.

    Raises:
        DataError: There is no such dataset or path, no mirror delivers, a file is empty, binary
            or not UTF-8, or a split is missing.
    """
    if dataset == "auto":
        try:
            return _load_wikitext("wikitext-2", cache_dir, AUTO_SECONDS)
        except DataError as error:
            note = f"wikitext-2: {error.short}; the installed packages' docstrings are used instead"
            return dataclasses.replace(load_text("installed-docs", cache_dir), note=note)
    if dataset == "installed-docs":
        splits = installed_docs.load_installed_docs(cache_dir)
        return Text("installed-docs", splits, english_wikitext=False)
    if dataset in WIKITEXT:
        return _load_wikitext(dataset, cache_dir)
    path = files.expand(dataset, "--dataset")
    if path.is_dir():
        try:
            found = {name: (path / name, None) for name in os.listdir(path)}
        except OSError as error:
            raise DataError(f"{dataset}: cannot be listed ({error.strerror})") from error
        return _with_splits(dataset, found)
    if path.is_file() and zipfile.is_zipfile(path):
        return _load_zip(dataset, path)
    matches = [path, *map(Path, sorted(glob.glob(str(path), recursive=True)))]
    sources = [(match, None) for match in dict.fromkeys(matches) if match.is_file()]
    if sources:
        splits = {split: Lines(sources, split) for split in SPLITS}
        return _not_empty(dataset, splits, [str(source) for source, _ in sources])
    known = ", ".join(["auto", "installed-docs", *WIKITEXT])
    raise DataError(
        f"{dataset!r} is neither a known dataset ({known}) nor an existing file, folder or glob"
    )


def _load_wikitext(name: str, cache_dir: Path, answer_within: float | None = None) -> Text:
    archive, path = WIKITEXT[name], Path(cache_dir) / f"{name}.zip"
    urls = [mirror + archive.file_name for mirror in archive.mirrors]
    download.fetch(urls, archive.sha256, path, name, answer_within)
    return dataclasses.replace(_load_zip(name, path), english_wikitext=True)


def _load_zip(name: str, path: Path) -> Text:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
    except (*files.UNPACKING_ERRORS, OSError) as error:
        raise DataError(f"{name}: damaged zip archive ({error})") from error
    return _with_splits(name, {member: (path, member) for member in members})


def _with_splits(name: str, sources: dict[str, tuple[Path, str | None]]) -> Text:
    """Picks the source of each split by its name; the surest kind of name that has all three wins.

    Args:
        name: What the text is called.
        sources: By file name.
    """
    words = {"train": "train", "valid": "valid(?:ation)?", "test": "test"}
    seen: dict[str, list[str]] = {}
    for kind in (r"wiki\.{}\.tokens", r"wiki\.{}\.raw", r"(.*[^a-z])?{}([^a-z].*)?\.txt"):
        for split, word in words.items():
            pattern = re.compile(kind.format(word) + r"(\.gz)?", re.IGNORECASE)
            seen[split] = [found for found in sources if pattern.fullmatch(Path(found).name)]
        if all(len(found) == 1 for found in seen.values()):
            chosen = [found for (found,) in seen.values()]
            splits = {split: Lines([sources[found]]) for split, (found,) in seen.items()}
            return _not_empty(name, splits, chosen)
    found = ", ".join(sorted(sources)[:5]) or "nothing"
    raise DataError(
        f"{name}: found {found}; expected one train, one valid and one test file called "
        "wiki.*.tokens, wiki.*.raw or *.txt, each also .gz"
    )


def _not_empty(name: str, splits: dict[str, Lines], names: Sequence[str]) -> Text:
    for split, lines in splits.items():
        if next(iter(lines), None) is None:
            raise DataError(
                f"{name}: no line of text for the {split} split; expected more text, or a folder "
                "with train, valid and test files"
            )
    pattern = re.compile(r"wiki\.(train|valid|test)\.(tokens|raw)(\.gz)?")
    return Text(name, splits, all(pattern.fullmatch(Path(found).name) for found in names))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return status.st_size, status.st_mtime_ns


def _lines_of(stream: IO[bytes], name: str) -> Iterator[str]:
    for number, raw in enumerate(stream, 1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}, line {number}: byte 0x{raw[error.start]:02x} is not UTF-8"
            ) from error
        if "\0" in line:
            raise DataError(f"{name}: a binary file (it holds NUL bytes); expected UTF-8 text")
        if line.strip():
            yield line
