"""Loads text: WikiText or novels by name, the installed packages' docstrings, or any files."""

import collections
import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import math
import random
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from data import download, files, installed_docs, novels, tables
from data.errors import DataError, listed
from data.live_line import live_line
from data.splits import (
    EXAMPLE,
    NO_FILES,
    SPLITS,
    TITLES,
    files_by_split,
    held_out_files,
    instead_note,
    layout_hint,
    missing_from,
    of_each,
    split_of,
    with_notes,
)

TEXT = "text"  # the usual column of a table, or field of JSON, that holds the text
HINT = "; --text-column names another"
PLAIN = (".txt", ".tokens", ".raw", ".txt.gz", ".tokens.gz", ".raw.gz")
ENDINGS = (*PLAIN, *tables.ENDINGS)
CONTENT_TYPES = "[Content_Types].xml"  # in the archives that Excel and Word write
LEARNED_FROM = 200_000_000  # characters of text to learn a vocabulary from, at most
LONGEST_HEADING = 8  # words
MOST_COMPARED = 1_000_000  # test lines, in some 100 bytes of memory each
FEW_REPEATED = 0.01  # share of the test lines that may be training lines without a note
TEST_SHARE = 0.05  # of the training lines, if there is no test file


class Lines:
    """The lines of text files; each iteration reads them again, none stays in memory.

    A line is a paragraph without its newline; empty lines are skipped. Of a table, of JSON
    or Parquet one column is read, whose fields have one line or several.

    Args:
        sources: Paths, each with the name of a member if it is a zip archive.
        split: Keeps only the lines that are drawn into this split.
        start: The first line to read, counted from 0 without empty lines.
        stop: The line after the last one to read; None for all.
        column: Its name in tables and JSON.
        draw: Draws the splits, by default by hashes; shared by the splits of the same sources.

    Raises (while iterating):
        DataError: A file is not UTF-8 text, or lacks a field.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Path, str | None]],
        split: str | None = None,
        start: int = 0,
        stop: int | None = None,
        column: str = TEXT,
        draw: "Draw | None" = None,
    ):
        self.sources, self.split, self.start, self.stop = sources, split, start, stop
        self.column, self.draw = column, draw or Draw(split_of)

    def __iter__(self) -> Iterator[str]:
        return itertools.islice(self._read(), self.start, self.stop)

    def _read(self) -> Iterator[str]:
        every = itertools.chain.from_iterable(
            _lines_of(*source, self.column) for source in self.sources
        )
        lines = (line for line in every if line and not line.isspace())
        return lines if self.split is None else self.draw.of_split(lines, self.split)


class Draw:
    """Draws a split for each line of a text, and remembers it, in a byte.

    A large text is read a dozen times before training begins; only the first time its lines are
    taken apart and hashed.

    Args:
        split_of: Returns the split of a line, whose words have single spaces between them:
            indented, it is the same text.
    """

    def __init__(self, split_of: Callable[[str], str]):
        self.split_of = split_of
        self._drawn: bytes | None = None  # the number of each line's split

    def of_split(self, lines: Iterable[str], split: str) -> Iterator[str]:
        """Yields the lines of a split.

        Args:
            lines: All lines, the same each time.
            split: The split.
        """
        number = SPLITS.index(split)
        if self._drawn is not None:
            is_wanted = self._drawn.translate(bytes(n == number for n in range(256)))
            yield from itertools.compress(lines, is_wanted)
            return
        drawn = bytearray()
        for line in lines:
            drawn.append(SPLITS.index(self.split_of(" ".join(line.split()))))
            if drawn[-1] == number:
                yield line
        self._drawn = bytes(drawn)


def _lines_of(path: Path, member: str | None, column: str) -> Iterator[str]:
    """Yields the lines of a file, without their newlines."""
    if member is None and tables.is_table(path.name):
        for where, (text,) in tables.read_table(path, (column,), hint=HINT):
            if "\0" in text:
                raise DataError(f"{where}: not UTF-8 text")
            yield from text.split("\n")
        return
    if member is None and tables.has_objects(path.name):
        for where, row in tables.read_objects(path, (column,)):
            value = row.get(column) if isinstance(row, dict) else None
            if value is None and isinstance(row, dict) and column in row:
                value = ""  # null is like the empty cell of a table
            if not isinstance(value, str):
                found = type(row).__name__
                if isinstance(row, dict):  # of Parquet it has no other columns
                    found = ", ".join(row or tables.header_of(path))
                about = f"found {found:.100}"
                if isinstance(row, dict) and column in row:
                    about = f"its value is {json.dumps(value, default=repr):.40}"
                raise DataError(f"{where}: expected a text in the field {column}; {about}{HINT}")
            # Half of a surrogate pair is not text either.
            if "\0" in value or value != value.encode(errors="ignore").decode():
                raise DataError(f"{where}: not UTF-8 text")
            yield from value.split("\n")
        return
    with files.open_bytes(path, member) as stream:
        beginning = b""
        for number, raw in enumerate(stream, 1):
            beginning = beginning or raw
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if "\0" in line:
                    raise ValueError
            except ValueError as error:  # UnicodeDecodeError is one
                where, hint = f"{path}, line {number}", files.how_to_convert(beginning + raw)
                raise DataError(f"{where}: not UTF-8 text; {hint}") from error
            yield line


@dataclasses.dataclass(frozen=True)
class Text:
    """Lines of text by split. WikiText keeps its headings and its `<unk>`."""

    name: str  # A known dataset, or a path.
    splits: Mapping[str, Iterable[str]]  # Keys "train", "valid" and "test".
    english_wikitext: bool = False  # Whether to try a pretrained English preset.
    note: str | None = None  # One line about a fallback for a source or a split.

    @property
    def sha256(self) -> str:
        """Returns a fingerprint of the lines of each split (hex)."""
        return self._read_once[0]

    def repeated_notes(self) -> list[str]:
        """Returns a line for validation and test if more than a few lines are in training too.

        Lines of `LONGEST_HEADING` words or fewer do not count: headings, and what is often said.
        """
        _, _, counts = self._read_once
        return [
            f"{repeated:,} of {count:,} {TITLES[split]} lines of more than {LONGEST_HEADING} words "
            "are training lines too (spaces ignored)"
            for split in with_notes(self.splits)
            for repeated, count in [counts[split]]
            if repeated > FEW_REPEATED * count
        ]

    def as_text(self) -> "Text":
        """Returns itself, like the other kinds of data what a vocabulary is learned from."""
        return self

    def to_learn_from(self) -> tuple[Iterable[str], str | None]:
        """Returns the training lines for a vocabulary, and a note if they are a part of the text.

        These are all, or lines spread over the text, of about `LEARNED_FROM` characters, since a
        trainer holds each distinct word.
        """
        lines, characters = self.splits["train"], self._read_once[1]
        every = -(-characters // LEARNED_FROM)
        if every <= 1:
            return lines, None
        return _one_of_each(lines, every), (
            f"the vocabulary is learned from one line in {every}: the training text has "
            f"{characters:,} characters, more than {LEARNED_FROM:,}"
        )

    @functools.cached_property
    def _read_once(self) -> tuple[str, int, dict[str, tuple[int, int]]]:
        """Returns the fingerprint, and numbers of training characters and of repeated lines.

        The latter for "valid" and "test", each with the number of lines that were compared.
        """
        waiting = {split: self._lines_to_compare(split) for split in ("valid", "test")}
        counts = {split: lines.total() for split, lines in waiting.items()}
        repeated, characters = dict.fromkeys(waiting, 0), 0
        digest = hashlib.sha256()
        for split in SPLITS:
            digest.update(f"\0{split}\n".encode())
            for line in live_line(self.splits[split], f"reading {split}"):
                digest.update(f"{line}\n".encode())
                if split == "train":
                    characters += len(line)
                    key = hash(" ".join(line.split()))
                    for other, lines in waiting.items():
                        repeated[other] += lines.pop(key, 0)
        found = {other: (repeated[other], counts[other]) for other in waiting}
        return digest.hexdigest(), characters, found

    def _lines_to_compare(self, split: str) -> collections.Counter[int]:
        """Counts the hashes of a split's lines that are longer than a heading."""
        lines = map(str.split, itertools.islice(self.splits[split], MOST_COMPARED))
        return collections.Counter(
            hash(" ".join(words)) for words in lines if len(words) > LONGEST_HEADING
        )


def _one_of_each(lines: Iterable[str], every: int) -> Iterator[str]:
    """Yields a random line of each `every` lines: kinds of lines, such as turns, may alternate."""
    draw, left = random.Random(0), iter(lines)
    while group := list(itertools.islice(left, every)):
        yield draw.choice(group)


# Plain http as well, for machines that reject the certificate: the hash is checked anyway.
_SMERITY = ("https://wikitext.smerity.com/", "http://wikitext.smerity.com/")
_HUGGING_FACE = "https://huggingface.co/datasets"
_GGML = f"{_HUGGING_FACE}/ggml-org/ci/resolve/927b3642933080f1b0e811e2f916e14c292992f9/"
# Mirrors, and the SHA-256 of the zip archive NAME-v1.zip.
WIKITEXT = {
    "wikitext-2": (_SMERITY, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
    "wikitext-2-raw": (
        (_GGML, *_SMERITY),
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    ),
    "wikitext-103": (_SMERITY, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
    "wikitext-103-raw": (
        (*_SMERITY, f"{_HUGGING_FACE}/segyges/wikitext-103/resolve/main/"),
        "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
    ),
}


def load_text(
    dataset: str,
    cache_dir: Path,
    *,
    contiguous: bool = False,
    text_column: str | None = None,
    held_out: Mapping[str, Path] = NO_FILES,
    test_file: Path | None = None,
) -> Text:
    """Loads a text and its three splits.

    Args:
        dataset: `wikitext-2`, `wikitext-2-raw`, `wikitext-103`, `wikitext-103-raw`; `novels`;
            `installed-docs`; `auto` (`wikitext-2` if it is cached or a mirror answers, otherwise
            `installed-docs`); or a path: a folder with train, valid (or val or dev) and test files
            (of those that are missing, the last twentieth of the training lines is the test split,
            the twentieth at the end of the others the validation split), one
            text file or a glob of several (split 90/5/5 by a hash of each line), or a WikiText zip.
            Files are text, JSONL, JSON, CSV or TSV, also compressed (`.gz`), or Parquet; those of a
            folder may be in shards, such as train-00000-of-00002.jsonl.
        cache_dir: The cache of downloads and parsed docstrings.
        contiguous: Whether one file, or a glob, is split into its first 90 percent of lines and
            two parts of 5, instead of by hashes, since its lines follow one another.
        text_column: The column of tables, or the field of JSON; None for `text`.
        held_out: Files by split ("valid", "test"), which replace those of the dataset; such a split
            is not cut from training, and a glob that matches them does not train on them.
        test_file: A file, all of which is the test split instead, while training stays as it is.

    Returns:
        The text; no split is empty.

    Raises:
        DataError: There is no such dataset or path, no mirror delivers, a file is empty, binary
            or not UTF-8, or a split is missing.
    """
    column = text_column or TEXT
    paths = held_out_files(held_out, test_file)
    # One file may be two splits.
    lines_of = {path: Lines([(path, None)], column=column) for path in paths.values()}
    every = {split: lines_of[path] for split, path in paths.items()}
    for split, lines in every.items():
        if not _has_lines(lines):
            raise DataError(f"{paths[split]}: no line of text")
    given = {split: every[split] for split in held_out}  # a test file leaves training as it is
    text = _load_known(dataset, cache_dir)
    if text is None:
        text = _load_files(dataset, contiguous, column, given, held_out.values())
    elif given:
        instead = instead_note(text.name, held_out, test_file)
        text = dataclasses.replace(text, note="; ".join(filter(None, (text.note, instead))) or None)
    text = dataclasses.replace(text, splits={**text.splits, **every})
    if text_column is None or any(map(_has_columns, text.splits.values())):
        return text
    unused = f"--text-column {text_column}: {dataset} has no columns"
    return dataclasses.replace(text, note="; ".join(filter(None, (text.note, unused))))


def _has_columns(lines: Iterable[str]) -> bool:
    sources = lines.sources if isinstance(lines, Lines) else ()
    return any(
        not member and path.name.lower().endswith(tables.ENDINGS) for path, member in sources
    )


def _load_known(dataset: str, cache_dir: Path) -> Text | None:
    """Loads a dataset that has a name; returns None for a path."""
    if dataset == "auto":
        try:
            return _load_wikitext("wikitext-2", cache_dir)
        except DataError as error:
            note = f"{error}; the installed packages' docstrings are used instead"
            return dataclasses.replace(load_text("installed-docs", cache_dir), note=note)
    if dataset == "installed-docs":
        docs = installed_docs.load_labelled_docs(cache_dir)
        return Text(dataset, {split: [text for text, _ in pairs] for split, pairs in docs.items()})
    if dataset in WIKITEXT:
        return _load_wikitext(dataset, cache_dir)
    if dataset == novels.NAME:
        return _load_folder(dataset, novels.fetch_novels(cache_dir), TEXT, {})
    return None


def _load_files(
    dataset: str,
    contiguous: bool,
    column: str,
    given: dict[str, Lines],
    held_out: Collection[Path],
) -> Text:
    """Loads a folder, a zip archive, a file or a glob.

    Args:
        dataset: As of `load_text`.
        contiguous: As of `load_text`.
        column: Of tables and JSON.
        given: Splits of other files.
        held_out: The files that were held out in training, which `given` need not read.
    """
    path = files.expand(dataset)
    if path.is_dir():
        return _load_folder(dataset, path, column, given)
    if path.is_file() and zipfile.is_zipfile(path):
        return _load_zip(dataset, path, given)
    matches = [path, *map(Path, sorted(glob.glob(str(path), recursive=True)))]
    sources = [(match, None) for match in dict.fromkeys(matches) if match.is_file()]
    if not sources:
        known = ", ".join(["auto", "installed-docs", novels.NAME, *WIKITEXT])
        raise DataError(
            f"{dataset!r} is neither a known dataset ({known}) nor an existing file, folder or glob"
        )
    others = {file.resolve() for file in held_out}
    left_out = [file.name for file, _ in sources if file.resolve() in others]
    note = None
    if 0 < len(left_out) < len(sources):
        sources = [(file, None) for file, _ in sources if file.resolve() not in others]
        note = f"files of other splits are not training text: {listed(left_out)}"
    every = Lines(sources, column=column)
    if contiguous:
        return _not_empty(Text(dataset, _cut({"train": every, **given})[0], note=note))
    cut = missing_from(given)

    def draw(line: str) -> str:
        split = split_of(line)
        return split if split in cut else "train"

    def drawn_by(split_of: Callable[[str], str]) -> dict[str, Lines]:
        shared = Draw(split_of)
        return {
            split: given.get(split) or Lines(sources, split, column=column, draw=shared)
            for split in SPLITS
        }

    splits = drawn_by(draw)
    if not all(map(_has_lines, splits.values())):  # there are few
        different = dict.fromkeys(" ".join(line.split()) for line in every)
        splits = drawn_by(of_each(different, draw, cut, TEST_SHARE).__getitem__)
    return _not_empty(Text(dataset, splits, note=note))


def _load_wikitext(name: str, cache_dir: Path) -> Text:
    mirrors, sha256 = WIKITEXT[name]
    path = Path(cache_dir) / f"{name}.zip"
    urls = [f"{mirror}{name}-v1.zip" for mirror in mirrors]
    download.fetch(urls, sha256, path, name)
    return _load_zip(name, path, {})


def _load_folder(name: str, path: Path, column: str, given: Mapping[str, Lines]) -> Text:
    sources = {file.name: (file, None) for file in path.iterdir()}
    return _with_splits(name, sources, column, given)


def _load_zip(name: str, path: Path, given: Mapping[str, Lines]) -> Text:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
            if CONTENT_TYPES in members:
                raise DataError(f"{name}: a file of Excel or Word: save it as CSV, or as text")
    except zipfile.BadZipFile as error:
        raise DataError(f"{name}: damaged zip archive ({error})") from error
    return _with_splits(name, {member: (path, member) for member in members}, TEXT, given)


def _with_splits(
    name: str,
    sources: Mapping[str, tuple[Path, str | None]],
    column: str,
    given: Mapping[str, Lines],
) -> Text:
    """Picks the source of each split by name; cuts those that are missing from training.

    Args:
        name: Name of the text, for messages.
        sources: By file name, in an archive with its folders.
        column: Of tables and JSON.
        given: Splits of other files, which come first.
    """
    # A Mac stores a file's attributes in another one.
    sources = {file: source for file, source in sources.items() if Path(file).name[:2] != "._"}
    is_folder = all(member is None for _, member in sources.values())
    endings = ENDINGS if is_folder else PLAIN  # tables and JSON are not read from an archive
    source_of = {
        Path(file): source for file, source in sources.items() if file.lower().endswith(endings)
    }
    found = files_by_split(
        source_of, name, lambda file: _holds_text(*source_of[file], column), but=given
    )
    if "train" not in found:  # its reader names the column that it lacks
        found = files_by_split(source_of, name, but=given)
    if "train" in found:
        own = {
            split: Lines([source_of[file] for file in files], column=column)
            for split, files in found.items()
        }
        splits, note = _cut({**own, **given})
        read = [path for lines in splits.values() for path, member in lines.sources if not member]
        unread = None
        if is_folder:
            unread = tables.unread_note(read[0].parent, read, (column,), ENDINGS)
        note = "; ".join(filter(None, (note, unread))) or None
        is_wikitext = "wiki." in str(found["train"][0])
        return _not_empty(Text(name, splits, is_wikitext, note))
    names = ", ".join(sorted(sources)[:5]) or "nothing"
    raise DataError(
        f"{name}: found {names}; expected one train, and perhaps one valid (or val or dev) and one "
        "test file called wiki.*.tokens, wiki.*.raw, *.txt, *.jsonl, *.csv or *.tsv, each also "
        ".gz, or *.parquet (a zip archive may contain text only; unpack other files), or its "
        f"shards, called for instance {EXAMPLE}; or, of files without splits, a quoted glob, such "
        f"as 'FOLDER/*.txt'{layout_hint(files.expand(name))}"
    )


def _holds_text(path: Path, member: str | None, column: str) -> bool:
    """Returns whether a file is plain text, or a table or JSON with the column."""
    is_plain = member is not None or not path.name.lower().endswith(tables.ENDINGS)
    return is_plain or tables.has_field(path, column)


def _cut(splits: Mapping[str, Lines]) -> tuple[dict[str, Lines], str | None]:
    """Cuts the splits that are missing from the end of the training lines.

    The end, not random lines: paragraphs next to trained ones would be easier to predict.

    Returns:
        All splits, in their order, and a note about those that were cut.
    """
    train, notes = splits["train"], []
    missing = missing_from(splits)[::-1]
    if not missing:
        return {split: splits[split] for split in SPLITS}, None
    count = stop = sum(1 for _ in train)
    size, cut = math.ceil(count * TEST_SHARE), {}
    for split in missing:
        start = max(0, stop - size)
        cut[split] = Lines(train.sources, start=start, stop=stop, column=train.column)
        which = f"the last {size:,} of {count:,} training lines are"
        if stop < count:
            which = f"the {size:,} lines before them are"
        title = TITLES[split]
        notes.append(f"no {title} file: {which} the {title} split")
        stop = start
    cut["train"] = Lines(train.sources, stop=stop, column=train.column)
    return {split: {**splits, **cut}[split] for split in SPLITS}, "; ".join(notes)


def _has_lines(lines: Iterable[str]) -> bool:
    return next(iter(lines), None) is not None


def _not_empty(text: Text) -> Text:
    for split, lines in text.splits.items():
        if not _has_lines(lines):
            raise DataError(
                f"{text.name}: no line of text for the {split} split; expected more lines (each is "
                "a paragraph, and in one split), or a folder with train, valid and test files"
            )
    return text
