"""Sentences and their labels: read from TSV or CSV files, or docstrings by their package."""

import csv
import dataclasses
import io
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from data import files, installed_docs
from data.errors import DataError
from data.text import Text

SPLITS = ("train", "valid", "test")
INSTALLED_DOCS = "installed-docs"

# A file without splits of its own: these shares go to validation and test, the rest to training.
VALID_SHARE = 0.1
TEST_SHARE = 0.1

# What tells a docstring's package without reading it. A name before a dot goes with its dot, so
# that `tf.data.Dataset` becomes `data.Dataset`.
PACKAGE_NAMES = re.compile(
    r"(?<!\w)(tensorflow|tf|keras|keras[ _-]?(hub|nlp|cv)|numpy|np)(?!\w)\.?", re.IGNORECASE
)

# The most frequent n-grams that the baseline keeps; SST-2 has 81,000. It bounds the seconds that a
# long text costs.
MOST_NGRAMS = 100_000


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Labelled sentences in three splits.

    Attributes:
        name: "installed-docs" or the path that was given.
        splits: "train", "valid" and "test", each a pair of n sentences, without white space at
            their ends, and their labels, int32 of shape (n,), numbers of `classes`. Every class has
            an example in every split.
        classes: The labels as they stand in the file, two or more: integers in the order of their
            values, names sorted.
        note: One line that says what is used where no dataset was named.
    """

    name: str
    splits: dict[str, tuple[list[str], np.ndarray]]
    classes: tuple[str, ...]
    note: str | None = None

    def as_text(self) -> Text:
        """The sentences without their labels, for instance to learn a vocabulary from."""
        lines = {split: sentences for split, (sentences, _) in self.splits.items()}
        return Text(self.name, lines, english_wikitext=False)

    def with_classes(self, classes: Sequence[str]) -> "Sentences":
        """Returns the same sentences with their labels numbered by other classes' names.

        Raises:
            DataError: one of the classes is not among these.
        """
        unknown = [name for name in self.classes if name not in classes]
        if unknown:
            known = ", ".join(classes)[:200]
            raise DataError(f"{self.name}: class {unknown[0]!r}, the run knows {known}")
        number = np.array([list(classes).index(name) for name in self.classes], np.int32)
        splits = {split: (texts, number[labels]) for split, (texts, labels) in self.splits.items()}
        return dataclasses.replace(self, splits=splits, classes=tuple(classes))

    def in_words(self) -> str:
        """One line for a person."""
        counts = ", ".join(f"{len(labels):,} {split}" for split, (_, labels) in self.splits.items())
        return f"{self.name}: {counts}; {len(self.classes):,} classes: {_listed(self.classes)}"


@dataclasses.dataclass(frozen=True)
class _Row:
    line: int
    sentence: str
    label: str


def load_sentences(dataset: str, cache_dir: Path, seed: int = 0) -> Sentences:
    """Loads sentences and labels.

    A folder in GLUE's layout holds train.tsv, dev.tsv and test.tsv. One file is a CSV, or a TSV if
    its header holds a tab; per class, 80 percent of its different sentences go to the training
    split and 10 to each of the others (at least one), by a permutation that the seed and the class
    decide. A sentence that is repeated goes to one split with all its rows. In both layouts a
    header names the columns `sentence` (or `text`) and `label`; other columns are ignored. A TSV
    has no quoting, a CSV has. No row is dropped: what cannot be used is an error.

    `installed-docs`, which `auto` stands for, needs neither files nor a network: the question is
    which of the installed packages a docstring's paragraph was written for. The packages' names
    would give it away and are removed from the paragraphs (tensorflow, tf, keras, keras_hub,
    keras_nlp, keras_cv, numpy, np, also in front of a dot). Names of classes and functions stay:
    the question is about words more than about sentences, and TF-IDF is good at it.

    Args:
        dataset: A folder, a file, `installed-docs` or `auto`.
        cache_dir: Where parsed docstrings are kept.
        seed: Decides the split of a single file.

    Returns:
        The sentences. The same call gives the same ones in the same order.

    Raises:
        DataError: A file or a column is missing, a line is not what it should be, a split has no
            example of a class, or there is only one class.
    """
    if dataset in (INSTALLED_DOCS, "auto"):
        rows = {
            split: [_Row(line, _without_names(text), label) for line, (text, label) in enumerate(p)]
            for split, p in installed_docs.load_labelled_docs(cache_dir).items()
        }
        note = None
        if dataset == "auto":
            note = (
                "no dataset was named: the task is which of the installed packages a paragraph of "
                "a docstring belongs to, with the packages' names removed"
            )
        return dataclasses.replace(_sentences(INSTALLED_DOCS, rows, {}), note=note)
    path = files.expand(dataset, "--dataset")
    if path.is_dir():
        found = {"train": path / "train.tsv", "valid": path / "dev.tsv", "test": path / "test.tsv"}
        missing = [f.name for f in found.values() if not f.is_file()]
        if missing:
            raise DataError(
                f"{dataset}: no {' and no '.join(missing)}; expected train.tsv, dev.tsv and "
                "test.tsv, or the path of one CSV or TSV file"
            )
        return _sentences(dataset, _read_folder(found), found)
    if path.is_file():
        return _sentences(dataset, _split(dataset, _read_file(path)[1], seed), {})
    raise DataError(
        f"dataset {dataset!r}: no such file or folder; expected {INSTALLED_DOCS}, a folder with "
        "train.tsv, dev.tsv and test.tsv, or one CSV or TSV file"
    )


def baselines(splits: dict[str, tuple[list[str], np.ndarray]]) -> dict[str, float]:
    """What a model has to beat: no model at all, and one that counts words.

    Args:
        splits: As in `Sentences.splits`.

    Returns:
        On the test split: `most_frequent_accuracy`, of always saying the training split's most
        frequent class; `tfidf_accuracy` and `tfidf_macro_f1` (the mean of the classes' F1 scores),
        of logistic regression on TF-IDF of single words and pairs of words, left out where the
        training sentences hold no word of two or more letters. From 0 to 1.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, f1_score

    sentences, labels = splits["train"]
    test_sentences, test_labels = splits["test"]
    most_frequent = np.bincount(labels).argmax()
    found = {"most_frequent_accuracy": float(np.mean(test_labels == most_frequent))}
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, max_features=MOST_NGRAMS)
    try:
        features = vectorizer.fit_transform(sentences)
    except ValueError:  # no word of two or more letters
        return found
    model = LogisticRegression(C=10, max_iter=1000).fit(features, labels)
    predictions = model.predict(vectorizer.transform(test_sentences))
    return found | {
        "tfidf_accuracy": float(accuracy_score(test_labels, predictions)),
        "tfidf_macro_f1": float(f1_score(test_labels, predictions, average="macro")),
    }


def _without_names(paragraph: str) -> str:
    return re.sub(r"\s+", " ", PACKAGE_NAMES.sub("", paragraph)).strip()


def _sentences(name: str, rows: dict[str, list[_Row]], files: dict[str, Path]) -> Sentences:
    """Numbers the labels; `files` are named in messages where each split has one of its own."""
    classes = _classes(row.label for row in rows["train"])
    number = {label: index for index, label in enumerate(classes)}
    where = {split: files.get(split, f"{name}, {split} split") for split in SPLITS}
    if len(classes) < 2:
        raise DataError(
            f"{where['train']}: the only label is {classes[0]!r}, expected two classes or more"
        )
    for split in SPLITS:
        for row in rows[split]:
            if row.label not in number:
                raise DataError(
                    f"{where[split]}, line {row.line}: label {row.label!r} does not occur in the "
                    f"training split, expected {_listed(classes)}"
                )
        found = {row.label for row in rows[split]}
        absent = [label for label in classes if label not in found]
        if absent:
            raise DataError(
                f"{where[split]}: no example of the label {_listed(absent)}, expected one or more "
                "of every class in every split"
            )
    splits = {
        split: (
            [row.sentence for row in rows[split]],
            np.array([number[row.label] for row in rows[split]], np.int32),
        )
        for split in SPLITS
    }
    return Sentences(name, splits, classes)


def _classes(labels: Iterable[str]) -> tuple[str, ...]:
    found = set(labels)
    integers = all(re.fullmatch(r"0|-?[1-9][0-9]*", label) for label in found)
    return tuple(sorted(found, key=int if integers else None))


def _listed(labels: Sequence[str]) -> str:
    """The labels for a message, not more than five of them."""
    return ", ".join(map(repr, labels[:5])) + (", ..." if len(labels) > 5 else "")


def _split(name: str, rows: list[_Row], seed: int) -> dict[str, list[_Row]]:
    """Splits the rows of one file per class; each split keeps the order of the file."""
    class_of: dict[str, str] = {}  # by sentence; the first row's label where rows disagree
    for row in rows:
        class_of.setdefault(row.sentence, row.label)
    sentences: dict[str, list[str]] = {}
    for sentence, label in class_of.items():
        sentences.setdefault(label, []).append(sentence)
    split_of: dict[str, str] = {}
    for label, found in sentences.items():
        if len(found) < len(SPLITS):
            raise DataError(
                f"{name}: too few different sentences of the label {label!r}: {len(found)}, "
                "expected 3 or more, one for each split"
            )
        # Of the label, not of its number: a class that is added changes no other class's split.
        rng = np.random.default_rng([seed, zlib.crc32(label.encode())])
        order = rng.permutation(len(found))
        test = max(1, round(TEST_SHARE * len(found)))
        valid = max(1, round(VALID_SHARE * len(found)))
        for place, index in enumerate(order):
            split = "test" if place < test else "valid" if place < test + valid else "train"
            split_of[found[index]] = split
    return {split: [row for row in rows if split_of[row.sentence] == split] for split in SPLITS}


def _read_folder(files: dict[str, Path]) -> dict[str, list[_Row]]:
    rows, headers = {}, {}
    for split, path in files.items():
        headers[split], rows[split] = _read_file(path, delimiter="\t")
        if headers[split] != headers["train"]:
            raise DataError(
                f"{path}, line 1: the columns are {', '.join(headers[split])}, expected "
                f"{', '.join(headers['train'])} as in {files['train'].name}"
            )
    return rows


def _read_file(path: Path, delimiter: str | None = None) -> tuple[list[str], list[_Row]]:
    """Reads a file's header and its checked rows; without a delimiter the header tells it."""
    lines = _lines(path, delimiter)
    (_, header), rest = lines[0], lines[1:]
    header = [name.strip() for name in header]
    label_column = _column(path, header, ("label",))
    sentence_column = _column(path, header, ("sentence", "text"))
    rows = []
    for line, fields in rest:
        where = f"{path}, line {line}"
        if len(fields) != len(header):
            raise DataError(
                f"{where}: {len(fields)} fields, expected {len(header)} as in the header"
            )
        sentence, label = fields[sentence_column].strip(), fields[label_column].strip()
        if not sentence or not label:
            empty = header[label_column if sentence else sentence_column]
            raise DataError(f"{where}: the {empty} is empty")
        rows.append(_Row(line, sentence, label))
    if not rows:
        raise DataError(f"{path}: no line after the header, expected sentences and their labels")
    return header, rows


def _column(path: Path, header: list[str], names: tuple[str, ...]) -> int:
    """The one column of these names."""
    found = [index for index, name in enumerate(header) if name in names]
    if len(found) == 1:
        return found[0]
    wanted = " or ".join(names)
    counted = f"{len(found)} columns" if found else "no column"
    hint = ""
    if not found and names == ("label",) and path.name == "test.tsv":
        hint = " (GLUE publishes its test sets without labels: split dev.tsv, for instance)"
    raise DataError(
        f"{path}, line 1: {counted} {wanted}; found {', '.join(header)}, expected sentence (or "
        f"text) and label, each once{hint}"
    )


def _lines(path: Path, delimiter: str | None) -> list[tuple[int, list[str]]]:
    """Reads a file's lines as (number of the line, fields), without empty lines at the end."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        # Spreadsheets write a byte order mark; with plain utf-8 it would be part of the first name.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8, expected text"
        ) from error
    if "\0" in text:
        raise DataError(f"{path}: a binary file (it holds NUL bytes), expected UTF-8 text")
    if not text.strip():
        raise DataError(f"{path}: empty, expected a header with the columns sentence and label")
    if delimiter == "\t" or "\t" in text.partition("\n")[0]:
        # Not `splitlines`, which splits at characters that may stand inside a sentence.
        lines = text.rstrip("\r\n").split("\n")
        return [(n, line.split("\t")) for n, line in enumerate(lines, 1)]
    # `strict`: a quote that is never closed is an error, not one long sentence.
    reader = csv.reader(io.StringIO(text.rstrip("\r\n"), newline=""), strict=True)
    found, line = [], 1
    try:
        for fields in reader:
            found.append((line, fields))
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: not a row of a CSV file ({error})") from error
    return found
