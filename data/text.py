"""Text: WikiText by name, the installed packages' docstrings, or files of one's own."""

import dataclasses
import functools
import glob
import hashlib
import io
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from data import cache, download, installed_docs, paths
from data.errors import DataError
from data.lines import Collector

SPLITS = ("train", "valid", "test")

# `auto` may look for a mirror this long; the rest of its ten seconds is left to the machine.
AUTO_SECONDS = 8.0


@dataclasses.dataclass(frozen=True)
class Text:
    """Lines of text by split.

    A line is a paragraph without its newline; empty lines are dropped. WikiText keeps its headings
    and its `<unk>`. Lines of files that are not compressed stay there (`data.lines.Lines`); a file
    that is changed afterwards is an error at its next use.
    """

    name: str  # A known dataset, or the path that was given.
    splits: Mapping[str, Sequence[str]]  # Keys "train", "valid" and "test".
    english_wikitext: bool  # Decides whether a pretrained English preset is tried.
    note: str | None = None  # One line where something else than the first choice is used, and why.

    @functools.cached_property
    def sha256(self) -> str:
        """See `text_sha256`; a gigabyte is read once for it."""
        digest = hashlib.sha256()
        for split in SPLITS:
            lines = self.splits[split]
            digest.update(f"{split} {len(lines)}\n".encode())
            for line in lines:
                digest.update(f"{line}\n".encode())
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Archive:
    """A zip archive: where to get it, and what it must be."""

    urls: tuple[str, ...]
    sha256: str


def _smerity(name: str) -> tuple[str, str]:
    # Plain http as well, for machines on which the certificate does not pass: what is trusted is
    # the hash.
    return f"https://wikitext.smerity.com/{name}", f"http://wikitext.smerity.com/{name}"


def wikitext_archives() -> dict[str, Archive]:
    """Returns the WikiText archives by dataset name."""
    hugging_face = "https://huggingface.co/datasets"
    ggml = f"{hugging_face}/ggml-org/ci/resolve/927b3642933080f1b0e811e2f916e14c292992f9"
    return {
        "wikitext-2": Archive(
            _smerity("wikitext-2-v1.zip"),
            "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        ),
        "wikitext-2-raw": Archive(
            (f"{ggml}/wikitext-2-raw-v1.zip", *_smerity("wikitext-2-raw-v1.zip")),
            "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
        ),
        "wikitext-103": Archive(
            _smerity("wikitext-103-v1.zip"),
            "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        ),
        "wikitext-103-raw": Archive(
            (
                *_smerity("wikitext-103-raw-v1.zip"),
                f"{hugging_face}/segyges/wikitext-103/resolve/main/wikitext-103-raw-v1.zip",
            ),
            "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
        ),
    }


def load_text(dataset: str, cache_dir: Path, mirrors: dict[str, Archive] | None = None) -> Text:
    """Loads a text and its three splits.

    Args:
        dataset: `wikitext-2`, `wikitext-2-raw`, `wikitext-103`, `wikitext-103-raw`;
            `installed-docs`; `auto` (`wikitext-2` where it is cached or a mirror answers, otherwise
            `installed-docs`); or a path: a folder with train, valid and test files, one text file
            or a glob of several (split 90/5/5 by a hash of each line), or a WikiText zip. Text
            files may be compressed (`.gz`).
        cache_dir: Where downloads and parsed docstrings are kept.
        mirrors: Archives that replace those of `wikitext_archives()`, by name.

    Returns:
        The text; no split is empty.

    Raises:
        DataError: There is no such dataset or path, no mirror delivers, a file is empty, binary
            or not UTF-8, or a split is missing.
    """
    archives = {**wikitext_archives(), **(mirrors or {})}
    if dataset == "auto":
        try:
            return _load_wikitext("wikitext-2", archives, cache_dir, AUTO_SECONDS)
        except DataError as error:
            note = f"wikitext-2: {error.short}; the installed packages' docstrings are used instead"
            return dataclasses.replace(_load_installed_docs(cache_dir), note=note)
    if dataset == "installed-docs":
        return _load_installed_docs(cache_dir)
    if dataset in archives:
        return _load_wikitext(dataset, archives, cache_dir)
    if dataset:
        path = paths.expand(dataset, "dataset")
        kind = paths.kind_of(path, "dataset")
        if kind == "folder":
            return _load_folder(dataset, path)
        if kind == "file":
            path = paths.readable_file(path, "dataset")
            return _load_zip(dataset, path) if _is_zip(path) else _load_files(dataset, [path])
        if kind == "device":
            raise DataError(f"dataset {dataset}: a {kind}; expected a file or folder")
        if glob.has_magic(dataset):
            files = paths.matching_files(path, "dataset")
            if not files:
                raise DataError(f"no file matches {dataset!r}")
            return _load_files(dataset, files)
    known = ", ".join(["auto", "installed-docs", *archives])
    raise DataError(
        f"{dataset!r} is neither a known dataset ({known}) nor an existing file or folder"
    )


def load_unchanged(dataset: str, sha256: str, cache_dir: Path) -> Text | None:
    """A text that was loaded before, or None where it is not there any more as it was.

    Nothing is downloaded for it.

    Args:
        dataset: as for `load_text`.
        sha256: what `text_sha256` gave.
        cache_dir: as for `load_text`.
    """
    if dataset in wikitext_archives() and not (cache_dir / dataset).is_dir():
        return None
    try:
        text = load_text(dataset, cache_dir)
    except DataError:
        return None
    return text if text_sha256(text) == sha256 else None


def text_sha256(text: Text) -> str:
    """Returns a fingerprint of the lines and of the splits that they are in (hex)."""
    return text.sha256


def _load_installed_docs(cache_dir: Path) -> Text:
    splits = installed_docs.load_installed_docs(cache_dir)
    return Text("installed-docs", splits, english_wikitext=False)


def _load_wikitext(
    name: str, archives: dict[str, Archive], cache_dir: Path, answer_within: float | None = None
) -> Text:
    folder = Path(cache_dir) / name

    def build(temporary: Path) -> None:
        temporary.mkdir()
        archive = temporary / f"{name}.zip"
        download.fetch(
            archives[name].urls, archives[name].sha256, archive, 30.0, name, answer_within
        )
        with download.open_zip(archive, archive.name) as members:
            found = _find_splits(members.namelist(), archive.name)
            download.check_unpacked_size(members, found.values(), archive.name)
            for split, member in found.items():
                target = temporary / f"wiki.{split}{Path(member).suffix}"
                with members.open(member) as source, open(target, "wb") as file:
                    shutil.copyfileobj(source, file)
        archive.unlink()

    cache.build_once(folder, build, name)
    return dataclasses.replace(_load_folder(name, folder), english_wikitext=True)


def _load_folder(name: str, folder: Path) -> Text:
    found = _find_splits([path.name for path in paths.files_in(folder, "dataset")], name)
    splits = {
        split: _read_files([folder / file], lambda line: "train")["train"]
        for split, file in found.items()
    }
    return Text(name, splits, english_wikitext=_is_wikitext(found.values()))


def _load_zip(name: str, path: Path) -> Text:
    with download.open_zip(path, name) as members:
        found = _find_splits(members.namelist(), name)
        download.check_unpacked_size(members, found.values(), name)
        splits = {}
        for split, member in found.items():
            with members.open(member) as stream:
                splits[split] = _read_lines(stream, f"{name}/{member}")
    return Text(name, splits, english_wikitext=_is_wikitext(found.values()))


def _load_files(name: str, files: list[Path]) -> Text:
    splits = _read_files(files, installed_docs.split_of)
    for split in SPLITS:
        if not splits[split]:
            total = sum(map(len, splits.values()))
            raise DataError(
                f"{name}: too small to be split 90/5/5: of {total} lines none falls to {split};"
                " expected a longer text, or a folder with train, valid and test files"
            )
    return Text(name, splits, english_wikitext=_is_wikitext(str(file) for file in files))


def _is_zip(path: Path) -> bool:
    return path.suffix.lower() == ".zip" or zipfile.is_zipfile(path)


def _is_wikitext(names: Iterable[str]) -> bool:
    pattern = r"wiki\.(train|valid|test)\.(tokens|raw)(\.gz)?"
    return all(re.fullmatch(pattern, os.path.basename(name)) for name in names)


def _find_splits(names: list[str], where: str) -> dict[str, str]:
    """Picks the file of each split by name; the surest kind of name that has all three wins."""
    patterns = (
        r"wiki\.{}\.tokens",
        r"wiki\.{}\.raw",
        r"{}\.txt",
        r"(.*[^a-z])?{}([^a-z].*)?\.txt",
        r".*{}.*\.txt",
    )
    words = {"train": "train", "valid": "valid(?:ation)?", "test": "test"}
    seen: dict[str, set[str]] = {split: set() for split in SPLITS}
    for pattern in patterns:
        found = {}
        for split, word in words.items():
            compiled = re.compile(pattern.format(word) + r"(\.gz)?", re.IGNORECASE)
            matches = [name for name in names if compiled.fullmatch(os.path.basename(name))]
            seen[split].update(matches)
            if len(matches) == 1:
                found[split] = matches[0]
        if len(set(found.values())) == len(SPLITS):
            return found
    missing = [split for split in SPLITS if not seen[split]]
    if missing:
        raise DataError(
            f"{where}: no {' and no '.join(missing)} file; expected train, valid and test files"
            " called wiki.*.tokens, wiki.*.raw or *.txt, each also .gz"
        )
    choices = ", ".join(sorted(set.union(*seen.values())))
    raise DataError(f"{where}: it is not clear which of {choices} are train, valid and test")


def _read_files(
    files: Sequence[Path], split_of: Callable[[str], str]
) -> Mapping[str, Sequence[str]]:
    """The lines of files by split: where they lie, or themselves where a file is compressed."""
    held: dict[str, list[str]] = {split: [] for split in SPLITS}
    lying = {split: Collector() for split in SPLITS}
    compressed = any(file.suffix == ".gz" for file in files)
    for file in files:
        with paths.open_bytes(file) as stream:
            packed = os.fstat(stream.fileno()).st_size if file.suffix == ".gz" else None
            for collector in lying.values():
                collector.begin(file, stream.fileno())
            for start, size, line in _scan(stream, str(file), packed):
                if compressed:
                    held[split_of(line)].append(line)
                else:
                    lying[split_of(line)].add(start, size)
    return held if compressed else {split: each.lines() for split, each in lying.items()}


def _read_lines(
    stream: IO[bytes] | io.BufferedIOBase, name: str, packed: int | None = None
) -> list[str]:
    return [line for _, _, line in _scan(stream, name, packed)]


def _scan(
    stream: IO[bytes] | io.BufferedIOBase, name: str, packed: int | None = None
) -> Iterator[tuple[int, int, str]]:
    """Reads lines of UTF-8; `packed` are the bytes of the gzip file that the stream unpacks.

    Yields:
        First byte, bytes, and the line itself.
    """
    # Line by line, so that half a gigabyte of text does not lie in memory three times over.
    binary = DataError(f"{name}: a binary file (it holds NUL bytes); expected UTF-8 text")
    if b"\0" in stream.read(65536):
        raise binary
    stream.seek(0)
    left = paths.unpacked_limit(packed) if packed is not None else None
    found = False
    start = 0
    # A bound for each line, too: a bomb may hold a single one.
    read_line = stream.readline if left is None else lambda: stream.readline(left + 1)
    for number, raw in enumerate(iter(read_line, b""), 1):
        if left is not None and packed is not None:
            left -= len(raw)
            if left < 0:
                raise paths.too_large(name, packed)
        try:
            line = raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}, line {number}: byte 0x{raw[error.start]:02x} is not UTF-8"
            ) from error
        if "\0" in line:
            raise binary
        mark = 3 if number == 1 and line.startswith("\ufeff") else 0
        line = line[1:] if mark else line
        if line.strip():
            found = True
            yield start + mark, len(raw.rstrip(b"\r\n")) - mark, line
        start += len(raw)
    if not found:
        raise DataError(f"{name}: empty; expected lines of text")
