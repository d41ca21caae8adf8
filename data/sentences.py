"""Reads labelled sentences or pairs from tables or docstrings, and encodes them for a model."""

import collections
import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import keras_nlp
import numpy as np
import scipy.sparse
import tensorflow as tf

from data import (
    batches,
    class_folders,
    files,
    glue,
    installed_docs,
    label_fields,
    sequences,
    word_pieces,
)
from data.errors import DataError, listed
from data.live_line import live_line
from data.splits import (
    EXAMPLE,
    NO_FILES,
    SPLITS,
    TITLES,
    files_by_split,
    fold,
    hash_of,
    held_out_files,
    instead_note,
    layout_hint,
    missing_from,
    of_each,
    with_notes,
)
from data.tables import ENDINGS, has_lists, has_objects, quoted, read_table, unread_note
from data.text import Text
from data.word_pieces import special_ids

INSTALLED_DOCS = "installed-docs"

SEPARATOR = "\t"  # between the two sentences of a pair; fields of a table have none

HELD_OUT = 0.1  # of a file without splits, for validation and again for test

# Package names: they would give the label away. A dot after a name is removed too, so that
# `tf.data.Dataset` becomes `data.Dataset`.
PACKAGE_NAMES = re.compile(
    r"(?<!\w)(tensorflow|tf|keras|keras[ _-]?(hub|nlp|cv)|numpy|np)(?!\w)\.?", re.IGNORECASE
)

SENTENCES_AT_ONCE = 1000  # that are encoded: KerasNLP holds some 10 KB for each

# A label; of a file of numbers 1.0 is the class 1: a column of pandas with a gap has floats.
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
SCORE = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
FRACTION = re.compile(r"[.eE]")  # in a number that is not written as an integer
# In a column of numbers: no label.
MISSING = {"nan", "na", "n/a", "none", "null"}
MISSING |= {sign + name for sign in ("", "+", "-") for name in ("inf", "infinity")}
MANY_CLASSES, FEW_OF_A_CLASS = 50, 10  # above, with fewer examples, there is a note
MOST_FRACTIONS = 20  # different labels that are not integers; more are scores
MOST_LABELS = 20_000  # of which a sentence may have several; more are free text

SEVERAL_HINT = "--labels several reads lists, and names separated by , or |, empty for none"

KINDS = {
    "classes": "classes",
    "scores": "scores",
    "several": "several labels for a sentence",
}

Row = tuple[str, str]  # a sentence and its label


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Labelled sentences in three splits.

    Attributes:
        name: "installed-docs" or a path.
        splits: "train", "valid" and "test", each a pair of n stripped sentences and their labels:
            int32 of shape (n,), indices of `classes`; or scores, float64 of shape (n, 1); or
            several labels, int8 of shape (n, labels), 1 for those that the sentence has.
        classes: The labels of the file, two or more: integers sorted by value, names by letters,
            columns as they were named; empty for scores.
        note: One line that names the default dataset, the split without test labels, rows that are
            left out, files that are not read and similar classes; or None.
        metrics: Metrics of the benchmark besides accuracy and macro F1, see `glue.Columns`.
    """

    name: str
    splits: dict[str, tuple[list[str], np.ndarray]]
    classes: tuple[str, ...]
    note: str | None = None
    metrics: tuple[str, ...] = ()

    @property
    def pairs(self) -> bool:
        """Returns whether each example has two sentences."""
        return SEPARATOR in self.splits["train"][0][0]

    @property
    def scores(self) -> bool:
        """Returns whether the labels are scores, not classes."""
        return not self.classes

    @property
    def several(self) -> bool:
        """Returns whether each example has any number of labels."""
        return bool(self.classes) and self.splits["train"][1].ndim == 2

    @property
    def kind(self) -> str:
        """Returns what the labels are, one of `KINDS`."""
        return "scores" if self.scores else "several" if self.several else "classes"

    def mean_and_deviation(self) -> tuple[float, float]:
        """Returns the mean and the standard deviation of the training split's scores, 1 for 0."""
        scores = self.splits["train"][1]
        return float(scores.mean()), float(scores.std()) or 1.0

    def as_text(self) -> Text:
        """Returns the sentences without their labels, for instance to learn a vocabulary from."""
        lines = {
            split: [line for text in sentences for line in text.split(SEPARATOR)]
            for split, (sentences, _) in self.splits.items()
        }
        return Text(self.name, lines)

    def with_classes(self, classes: Sequence[str], several: bool = False) -> "Sentences":
        """Returns the same sentences, labels numbered by the order of `classes`.

        Args:
            classes: Those that a run has learned; none if it has learned scores.
            several: Whether it has learned several labels for a sentence.

        Raises:
            DataError: `classes` lacks one of the labels, or these are of another kind.
        """
        learned = "scores" if not classes else "several" if several else "classes"
        if self.kind != learned:
            raise DataError(
                f"{self.name}: has {KINDS[self.kind]}, the run learned {KINDS[learned]}"
            )
        if self.scores:
            return self
        known = set(classes)
        unknown = [name for name in self.classes if name not in known]
        if unknown:
            raise DataError(
                f"{self.name}: class {unknown[0][:100]!r}, the run knows {_shown(classes)}: "
                "rename the classes of the data"
            )
        number_of = {name: number for number, name in enumerate(classes)}
        number = np.array([number_of[name] for name in self.classes], np.int32)
        splits = {}
        for split, (texts, labels) in self.splits.items():
            if several:
                columns = np.zeros((len(texts), len(classes)), labels.dtype)
                columns[:, number] = labels
            splits[split] = (texts, columns if several else number[labels])
        return dataclasses.replace(self, splits=splits, classes=tuple(classes))

    def require_pairs(self, pairs: bool) -> None:
        """Rejects pairs of sentences for a model of single ones, and the reverse.

        Raises:
            DataError: names both.
        """
        if self.pairs != pairs:
            kinds = ("single sentences", "pairs of sentences")
            raise DataError(f"{self.name}: has {kinds[self.pairs]}, the run learned {kinds[pairs]}")

    def describe(self) -> str:
        """Describes the sentences in one line."""
        counts = ", ".join(f"{len(labels):,} {split}" for split, (_, labels) in self.splits.items())
        if self.several:
            mean = self.splits["train"][1].sum(axis=1).mean()
            return (
                f"{self.name}: {counts}; {len(self.classes):,} labels, {mean:.2g} for a sentence: "
                f"{_shown(self.classes)}"
            )
        if not self.scores:
            return f"{self.name}: {counts}; {len(self.classes):,} classes: {_shown(self.classes)}"
        scores, (mean, deviation) = self.splits["train"][1], self.mean_and_deviation()
        return (
            f"{self.name}: {counts}; scores from {scores.min():g} to {scores.max():g}, mean "
            f"{mean:.4g} ± {deviation:.4g}"
        )


def load_sentences(
    dataset: str,
    cache_dir: Path,
    *,
    text_column: str | None = None,
    second_text_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    labels: str = "auto",
    held_out: Mapping[str, Path] = NO_FILES,
    test_file: Path | None = None,
) -> Sentences:
    """Loads sentences, or pairs of sentences, and labels: classes, scores, or several of each.

    A folder in GLUE's layout holds train.tsv, dev.tsv and test.tsv, with the columns of any of
    GLUE's tasks (see `glue.TASKS`). The validation file may be called valid, validation
    or val too, and each may be in shards, such as train-00000-of-00002.jsonl. GLUE's test files
    have no labels: then the dev split becomes the test split. For a split that is missing, 10
    percent of the training sentences are cut off, as of a single file.

    A single file is a CSV, a TSV if its header contains a tab, JSON or Parquet. Some 80 percent of
    its different sentences go to the training split and 10 to each of the others (at least one; of
    each class, if labels are classes), by a hash of the sentence: the same for every seed of a run,
    and rows that are added later move no others. All rows of a repeated sentence, also in other
    case or spacing, go to one split.

    Folders of classes, as of aclImdb, hold a `.txt` file for each text and are named after the
    class; they are in train, test and perhaps valid, or in the folder itself, which is then split
    like a file.

    In both layouts a header names the columns `sentence` (or `text`) and `label`; `sentence2`
    beside one of them or `sentence1`, or `text_pair` beside `text`, makes a pair. Other columns are
    ignored. Where all labels of a file are numbers, 1.0 is the class 1. A CSV has quoting, a TSV
    has none. An unusable file is an error.

    `installed-docs`, the value of `auto`, needs neither files nor a network: the task is to tell
    which of the installed packages a docstring's paragraph belongs to. The packages' names
    would give it away and are removed from the paragraphs (tensorflow, tf, keras, keras_hub,
    keras_nlp, keras_cv, numpy, np, also in front of a dot). Names of classes and functions stay:
    words decide more than sentences, and TF-IDF is a strong baseline.

    Args:
        dataset: A folder, a file, `installed-docs` or `auto`.
        cache_dir: The cache of parsed docstrings.
        text_column: The column of the sentences, or of the first ones; None for the names above.
        second_text_column: The column of the second sentences.
        label_column: The column of the labels; or several columns of 0 and 1, one for each label.
        labels: "classes"; "scores", finite numbers; "several", lists, see
            `label_fields.names_of`; or "auto": scores for STS-B, and where there are more than
            `MOST_FRACTIONS` different numbers, not all of them integers; several where JSON or
            Parquet has lists, and of several columns.
        held_out: Files of the same columns by split ("valid", "test"), which replace those of the
            dataset; such a split is not cut from training.
        test_file: A file of the same columns, all of which is the test split instead, while
            training stays as it is.

    Returns:
        The sentences. The same call gives the same ones in the same order.

    Raises:
        DataError: A file or a column is missing, a split has several files, a line is malformed,
            training lacks a label of another file, there is only one class or score, or a score is
            not a number.
    """
    if dataset in (INSTALLED_DOCS, "auto"):
        if labels == "scores":
            raise DataError(
                f"--labels scores: the labels of {INSTALLED_DOCS} are names, not numbers"
            )
        if labels == "several":
            raise DataError(f"--labels several: each text of {INSTALLED_DOCS} has one label")
        labels = "classes"
        rows = {
            split: [(without_names(text), label) for text, label in pairs]
            for split, pairs in installed_docs.load_labelled_docs(cache_dir).items()
        }
        note = (
            "no dataset was named: the task is which of the installed packages a paragraph of a "
            "docstring belongs to, with the packages' names removed"
        )
        name, notes = INSTALLED_DOCS, [note] if dataset == "auto" else []
        notes += filter(None, [instead_note(name, held_out, test_file)])
        columns = glue.Columns()
    else:
        name, path = dataset, files.expand(dataset)
        label_columns = (label_column,) if isinstance(label_column, str) else label_column or ()
        named = (text_column, second_text_column, tuple(label_columns))
        if path.is_dir():
            rows, notes, columns, labels = _load_folder(name, path, named, labels, held_out)
        elif path.is_file():
            columns, notes = _columns(path, *named), []
            every, labels = _read_training([path], columns, notes, labels)
            rows, more = _with_all_splits(name, every, held_out, by_class=labels == "classes")
            notes += more
        else:
            raise DataError(
                f"dataset {dataset!r}: no such file or folder; expected {INSTALLED_DOCS}, a folder "
                "with train.tsv, dev.tsv and test.tsv (or .csv, .jsonl, .json, .parquet), a folder "
                "with a folder of text files for each class, or one such table"
            )
    given = held_out_files(held_out, test_file)
    read: dict[Path, list[Row]] = {}  # one file may be two splits
    for split, path in given.items():
        if path not in read:
            hint = f"; a {TITLES[split]} file has the columns of the training data: rename its own"
            read[path] = _plain_numbers(_read([path], columns, notes, labels, hint), rows["train"])
        rows[split] = read[path]
        if labels == "several":
            _require_learned(path, rows[split], rows["train"], columns)
    if labels == "scores":
        return _scored(name, rows, notes)
    if labels == "several":
        return _with_several(name, rows, notes, columns.flags)
    return _numbered(name, rows, notes, columns, given)


def _columns(
    path: Path, text: str | None, second: str | None, labels: tuple[str, ...]
) -> glue.Columns:
    """Returns the columns that the options name, otherwise those of the file's header."""
    columns = glue.columns_of(path, labels[0] if labels else None)
    if len(labels) > 1:
        columns = dataclasses.replace(columns, label=(), flags=labels)
    if text is not None:
        columns = dataclasses.replace(columns, text=(text,), second=())
    if second is not None:
        columns = dataclasses.replace(columns, second=(second,))
    return columns


def _load_folder(
    name: str,
    folder: Path,
    named: tuple[str | None, str | None, tuple[str, ...]],
    labels: str,
    held_out: Mapping[str, Path],
) -> tuple[dict[str, list[Row]], list[str], glue.Columns, str]:
    """Returns the rows of a folder by split, notes, the columns, and what labels are."""
    in_folder = [path for path in folder.iterdir() if path.name.lower().endswith(ENDINGS)]
    text, second, label = named
    paths = files_by_split(
        in_folder, name, lambda path: glue.is_labelled(path, text, *label[:1]), but=held_out
    )
    if "train" not in paths and class_folders.splits_of(folder):
        rows, notes = _load_class_folders(name, folder, labels, held_out)
        unused = [column for column in (text, second, *label) if column is not None]
        if unused:
            notes.append(f"the columns {listed(unused)} are not read: {name} has folders of texts")
        return rows, notes, glue.Columns(), "classes"
    if "train" not in paths:  # its reader names the columns that they lack
        paths = files_by_split(in_folder, name, but=held_out)
    if "train" not in paths:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise DataError(
            f"{name}: found {found}; expected train.tsv, dev.tsv and test.tsv (or valid or val "
            "for dev; or .csv, .jsonl, .json, each also .gz, or .parquet), each also in shards, "
            f"called for instance {EXAMPLE}; or a folder for each class with a .txt file for each "
            f"text, also below train and test{layout_hint(folder)}"
        )
    columns, notes = _columns(paths["train"][0], *named), []
    fields = (*columns.text, *columns.label, *columns.flags)
    read = [path for found in (*paths.values(), held_out.values()) for path in found]
    unread = unread_note(folder, read, fields)
    if unread is not None:
        notes.append(unread)
    train, labels = _read_training(paths["train"], columns, notes, labels)
    known, rows = {label for _, label in train}, {}
    if "test" in paths and not glue.has_labels(paths["test"], columns, known):
        instead = paths["valid"][0].name if "valid" in paths else "a part of training"
        notes.append(f"{paths.pop('test')[0].name} has no labels: {instead} is the test split")
        if "valid" in paths:
            paths["test"] = paths.pop("valid")
    for split in ("valid", "test"):
        if split in paths:
            rows[split] = _plain_numbers(_read(paths[split], columns, notes, labels), train)
            if labels == "several":
                _require_learned(paths[split][0], rows[split], train, columns)
    made, more = _with_all_splits(name, train, ["train", *rows, *held_out], labels == "classes")
    return made | rows, notes + more, columns, labels


def _load_class_folders(
    name: str, folder: Path, labels: str, held_out: Mapping[str, Path]
) -> tuple[dict[str, list[Row]], list[str]]:
    """Returns the rows of folders with a file for each text, by split, and notes."""
    if labels == "scores":
        raise DataError(f"--labels scores: {name} has folders of texts, whose names are classes")
    if labels == "several":
        raise DataError(f"--labels several: {name} has folders of texts, one for each class")
    paths = class_folders.splits_of(folder)
    classes = [each for found in paths.values() for each in found]
    unread = class_folders.unread_note(folder, classes)
    notes = [] if unread is None else [unread]
    if "" in paths:
        rows, more = _with_all_splits(name, class_folders.read(paths[""]), held_out)
        return rows, notes + more
    paths = {split: found for split, found in paths.items() if split not in held_out}
    rows = {split: class_folders.read(found) for split, found in paths.items()}
    unlabelled = [path for path in paths["train"] if path.name == class_folders.UNLABELLED]
    if unlabelled:
        notes.append(f"{unlabelled[0]} has no labels: left out")
    made, more = _with_all_splits(name, rows["train"], [*rows, *held_out])
    return rows | made, notes + more


def _with_all_splits(
    name: str, train: list[Row], found: Collection[str] = (), by_class: bool = True
) -> tuple[dict[str, list[Row]], list[str]]:
    """Returns the training rows, the splits that are cut from them, and notes.

    Args:
        name: What an error begins with.
        train: Rows of the training files, or of a file without splits.
        found: The splits that have files; the others are cut. Without one the rows are those of a
            file without splits.
        by_class: Whether each split gets rows of each label.
    """
    missing = missing_from(found)[::-1]
    if not missing:
        return {"train": train}, []
    made, notes = _split(name, train, held_out=missing, by_class=by_class)
    if found:
        part = "a tenth of the training sentences is the"
        notes = [*(f"{part} {TITLES[split]} split" for split in missing), *notes]
    return made, notes


def _read_training(
    paths: Sequence[Path], columns: glue.Columns, notes: list[str], labels: str
) -> tuple[list[Row], str]:
    """Returns the rows of the training split, or of a file without splits, and what labels are.

    Args:
        paths: A file or its shards.
        columns: The names of its columns.
        notes: Gets a line if "auto" chooses scores or several.
        labels: One of `KINDS` or "auto".

    Returns:
        The rows, and one of `KINDS`.
    """
    chosen = labels
    if labels == "auto" and columns.scores:
        chosen = "scores"
    elif labels == "auto" and (columns.flags or has_lists(paths[0], columns.label)):
        chosen = "several"
        notes.append("each sentence has any number of labels")
    elif chosen != "several" and has_lists(paths[0], columns.label):
        raise DataError(f"{paths[0]}: the labels are lists: --labels several reads them")
    read = _read(paths, columns, notes, chosen)
    rows = _plain_numbers(read, read)
    different = {label for _, label in rows}
    if chosen == "auto":
        # Not of codes: 01997 is written as an integer, and so is a number of 20 digits.
        fractions = any(map(FRACTION.search, different))
        many = len(different) > MOST_FRACTIONS and all(map(_is_score, different))
        chosen = "scores" if fractions and many else "classes"
    if labels == "auto" and chosen == "scores":
        notes.append(
            f"labels are scores, {len(different):,} different numbers; with --labels classes each "
            "is a class"
        )
    if labels == "auto" and chosen == "classes" and label_fields.are_like_lists(different):
        notes.append(f"each combination of labels is a class: {SEVERAL_HINT}")
    if chosen == "several" and not columns.flags and not has_lists(paths[0], columns.label):
        if all(len(json.loads(names)) == 1 for names in different):
            notes.append("each sentence has one label: --labels classes chooses one")
    fields = (field for text, _ in rows for field in text.split(SEPARATOR))
    count = 0 if has_objects(paths[0].name) else quoted(fields)
    if count:
        notes.append(
            f"{paths[0].name}: {count:,} sentences are quoted as in a CSV, and a TSV has no "
            "quoting: write a CSV or JSONL"
        )
    forms: dict[str, set[str]] = {}
    for (_, written), (_, label) in zip(read, rows, strict=True):
        forms.setdefault(label, set()).add(written)
    alike = sorted(form for same in forms.values() if len(same) > 1 for form in same)
    if chosen == "classes" and alike:
        notes.append(f"labels that are the same number are one class: {_shown(alike)}")
    return rows, chosen


def _plain_numbers(rows: list[Row], training: list[Row]) -> list[Row]:
    """Returns rows whose labels are written as short as numbers can be: 1 for 1.0, 2.5 for 2.50.

    Where a label of the training rows is not a number, labels are names and stay as they are.
    """
    if not all(NUMBER.fullmatch(label) for _, label in training):
        return rows
    return [(text, re.sub(r"\.0+$|(\.[0-9]*[1-9])0+$", r"\1", label)) for text, label in rows]


def balanced_class_weights(labels: np.ndarray, num_classes: int) -> dict[int, float]:
    """Returns weights with which each class counts the same in the loss, for `fit(class_weight=)`.

    Args:
        labels: Of the training split, integers of shape (n,).
        num_classes: Number of classes.

    Returns:
        By class, n / (classes x its number of examples), as scikit-learn's "balanced"; the mean
        over the examples is 1.
    """
    counts = np.bincount(labels, minlength=num_classes)
    present = np.count_nonzero(counts)
    return {n: len(labels) / (present * count) if count else 1.0 for n, count in enumerate(counts)}


def without_names(paragraph: str) -> str:
    """Returns a paragraph of `installed-docs` without the names of packages."""
    return re.sub(r"\s+", " ", PACKAGE_NAMES.sub("", paragraph)).strip()


def in_training(splits: dict[str, tuple[list[str], np.ndarray]]) -> dict[str, int]:
    """Counts the validation and test sentences that are also in training, by split.

    Args:
        splits: As in `Sentences.splits`; case and spaces are ignored.
    """
    known = set(map(fold, splits["train"][0]))
    return {
        split: sum(fold(sentence) in known for sentence in splits[split][0])
        for split in ("valid", "test")
    }


def repeated_notes(splits: dict[str, tuple[list[str], np.ndarray]]) -> list[str]:
    """Returns a line for validation and test if training sentences are among theirs."""
    counts = in_training(splits)
    return [
        f"{counts[split]:,} of {len(splits[split][0]):,} {TITLES[split]} sentences are training "
        "sentences too (case and spaces ignored)"
        for split in with_notes({split: texts for split, (texts, _) in splits.items()})
        if counts[split]
    ]


def _numbered(
    name: str,
    rows: dict[str, list[Row]],
    notes: Sequence[str] = (),
    columns: glue.Columns | None = None,
    given: Mapping[str, Path] = NO_FILES,
) -> Sentences:
    """Numbers the labels; those that are not in validation or test are noted."""
    labels = {split: {label for _, label in rows[split]} for split in SPLITS}
    integers = all(INTEGER.fullmatch(label) for label in labels["train"])
    classes = tuple(sorted(labels["train"], key=int if integers else None))
    if len(classes) < 2:
        raise DataError(
            f"{name}: the only label is {_shown(classes)}, expected two classes or more"
        )
    notes = list(notes)
    if not integers and all(NUMBER.fullmatch(label) for label in classes):
        notes.append(
            "labels are numbers: each different one is a class, without an order; --labels scores "
            "predicts them as numbers"
        )
    notes += _no_label_note(classes)
    if len(classes) > MANY_CLASSES and len(classes) > len(rows["train"]) / FEW_OF_A_CLASS:
        numbers = all(map(_is_score, classes))
        notes.append(
            f"{len(classes):,} classes, fewer than {FEW_OF_A_CLASS} training sentences for each on "
            "average: are the labels classes"
            + ("? --labels scores predicts numbers" if numbers else ", or free text?")
        )
    notes += _several_labels_note(rows)
    cases = collections.Counter(map(str.casefold, classes))
    alike = [name for name in classes if cases[name.casefold()] > 1]
    if alike:
        notes.append(f"classes that differ only by case: {_shown(alike)}")
    for split in ("valid", "test"):
        unknown = sorted(labels[split] - labels["train"])
        if unknown:
            raise DataError(
                f"{given.get(split, name)}: the label {_shown(unknown)} is in the {split} split, "
                "not in training: add training examples of it, or remove these rows"
            )
    for split in with_notes(rows):
        missing = [label for label in classes if label not in labels[split]]
        if missing:
            notes.append(f"the {split} split has no example of {_shown(missing)}")
    number = {label: index for index, label in enumerate(classes)}
    splits = {
        split: (
            [sentence for sentence, _ in rows[split]],
            np.array([number[label] for _, label in rows[split]], np.int32),
        )
        for split in SPLITS
    }
    metrics = columns.metrics if columns is not None and len(classes) == 2 else ()
    return Sentences(name, splits, classes, "; ".join(notes) or None, metrics)


def _scored(name: str, rows: dict[str, list[Row]], notes: Sequence[str]) -> Sentences:
    """Returns sentences whose labels, all of them numbers, are scores."""
    splits = {
        split: (
            [sentence for sentence, _ in rows[split]],
            np.array([[float(label)] for _, label in rows[split]]),
        )
        for split in SPLITS
    }
    scores = splits["train"][1]
    if np.ptp(scores) == 0:
        raise DataError(
            f"{name}: all scores of the training split are {scores[0, 0]:g}, expected others too"
        )
    notes = [*notes, *_several_labels_note(rows)]
    if np.ptp(splits["test"][1]) == 0:
        notes.append("the correlations are 0: all scores of the test split are equal")
    return Sentences(name, splits, (), "; ".join(notes) or None)


def _with_several(
    name: str, rows: dict[str, list[Row]], notes: Sequence[str], flags: tuple[str, ...]
) -> Sentences:
    """Returns sentences that have any number of labels; `flags` names them where columns do."""
    lists = {split: [json.loads(label) for _, label in rows[split]] for split in SPLITS}
    found = {split: {label for names in lists[split] for label in names} for split in SPLITS}
    every = set().union(*found.values())
    integers = all(map(INTEGER.fullmatch, every))
    classes = flags or tuple(sorted(every, key=int if integers else None))
    if len(classes) < 2:
        shown = _shown(classes) or "none"
        raise DataError(f"{name}: the only label is {shown}, expected two labels or more")
    if len(classes) > MOST_LABELS:
        raise DataError(
            f"{name}: {len(classes):,} different labels, expected at most {MOST_LABELS:,}: names "
            "are separated by , and |, or in a JSON list"
        )
    each = [set(names) for names in lists["train"]]
    if all(names == each[0] for names in each):
        same = f"the labels {_shown(sorted(each[0]))}" if each[0] else "no label"
        hint = f"; of lists of 0 and 1 {label_fields.AS_NAMES}" if each[0] == {"0", "1"} else ""
        raise DataError(f"{name}: all training sentences have {same}, expected others too{hint}")
    notes = list(notes)
    for split in ("train", *with_notes(rows)):
        missing = [label for label in classes if label not in found[split]]
        if missing:
            lost = ", which cannot be learned" if split == "train" else ""
            notes.append(f"the {split} split has no example of {_shown(missing)}{lost}")
    always = sorted(set.intersection(*each))
    if always:
        notes.append(f"all training sentences have {_shown(always)}, which cannot be learned")
    without = sum(not names for names in lists["train"])
    if without:
        notes.append(f"{without:,} of {len(lists['train']):,} training sentences have no label")
    number = {label: index for index, label in enumerate(classes)}
    splits = {}
    for split in SPLITS:
        labels = np.zeros((len(rows[split]), len(classes)), np.int8)
        for row, names in zip(labels, lists[split], strict=True):
            row[[number[label] for label in names]] = 1
        splits[split] = ([sentence for sentence, _ in rows[split]], labels)
    notes += _several_labels_note(rows)
    return Sentences(name, splits, classes, "; ".join(notes) or None)


def _require_learned(
    path: Path, rows: list[Row], training: list[Row], columns: glue.Columns
) -> None:
    """Rejects lists of names that training lacks; columns for each label are known without one."""
    learned = {label for _, names in training for label in json.loads(names)}
    unknown = {label for _, names in rows for label in json.loads(names)} - learned
    if unknown and not columns.flags:
        raise DataError(
            f"{path}: the label {_shown(sorted(unknown))} is not in training: add training "
            "examples of it, or remove it"
        )


def _no_label_note(classes: Sequence[str]) -> list[str]:
    """Returns a line about a class that may mark the sentences without a label."""
    others = set(classes) - {"-1", "-100", "-"}
    numbers = all(INTEGER.fullmatch(label) and int(label) >= 0 for label in others)
    marks = [label for label in classes if label not in others and (label != "-") == numbers]
    if not marks or len(others) < 2:
        return []
    return [
        f"the label {_shown(marks)} is a class; datasets often mark rows without a label so: "
        "remove them"
    ]


def _several_labels_note(rows: dict[str, list[Row]]) -> list[str]:
    """Returns a line with the number of different sentences that have more than one label."""
    pairs = {(fold(sentence), label) for split in SPLITS for sentence, label in rows[split]}
    counts = collections.Counter(text for text, _ in pairs).values()
    several = sum(count > 1 for count in counts)
    if not several:
        return []
    return [f"sentences repeated with other labels: {several:,} (case and spaces ignored)"]


def _shown(labels: Sequence[str]) -> str:
    """Lists labels for a message, at most five of them."""
    return listed([repr(label[:100]) for label in labels])


def _split(
    name: str,
    rows: list[Row],
    held_out: tuple[str, ...] = ("test", "valid"),
    by_class: bool = True,
) -> tuple[dict[str, list[Row]], list[str]]:
    """Splits the rows of one file by hash; each split keeps the order of the file.

    A class with too few different sentences for all splits is in training alone; the notes that are
    returned say so. Scores are split without regard to their values.
    """
    class_of: dict[str, str] = {}  # by folded sentence; the first row's label if rows disagree
    for sentence, label in rows:
        class_of.setdefault(fold(sentence), label if by_class else "")
    sentences_of: dict[str, list[str]] = {}
    for sentence, label in class_of.items():
        sentences_of.setdefault(label, []).append(sentence)
    split_of: dict[str, str] = {}
    rare = {label for label, found in sentences_of.items() if len(found) <= len(held_out)}
    if rare and not by_class:
        raise DataError(
            f"{name}: {len(class_of)} different sentences, expected {len(held_out) + 1} or more, "
            "one for each split"
        )
    if len(rare) == len(sentences_of):
        raise DataError(
            f"{name}: too few different sentences: no label has {len(held_out) + 1} or more, one "
            f"for each split; found {_shown(sorted(rare))}"
            + ("; pass --labels scores to predict numbers" if all(map(_is_score, rare)) else "")
        )
    for label, sentences in sentences_of.items():
        if label in rare:
            split_of |= dict.fromkeys(sentences, "train")
            continue
        split_of |= of_each(sentences, functools.partial(_drawn, held_out), held_out, HELD_OUT)
    found = {
        split: [row for row in rows if split_of[fold(row[0])] == split]
        for split in ("train", *held_out)
    }
    sizes = ", ".join(f"{len(rows):,} {split}" for split, rows in found.items())
    notes = [f"{len(rows):,} rows without splits: {sizes}"] if len(held_out) == 2 else []
    # A row of another label beside the first of its sentence is where that sentence is.
    rare -= {label for split in held_out for _, label in found[split]}
    if rare:
        fewer = f"fewer than {len(held_out) + 1} different sentences"
        notes.append(f"in training alone, since there are {fewer}: {_shown(sorted(rare))}")
    return found, notes


def _drawn(held_out: tuple[str, ...], sentence: str) -> str:
    """Returns the split of a sentence by its hash: one of those held out, or "train"."""
    number = int(hash_of(sentence) / 2**64 / HELD_OUT)
    return held_out[number] if number < len(held_out) else "train"


def _read(
    paths: Sequence[Path],
    columns: glue.Columns,
    notes: list[str],
    kind: str = "classes",
    hint: str = "; --text-column, --second-text-column and --label-column name others",
) -> list[Row]:
    """Returns the rows of a file or its shards; adds a line to `notes` about those left out.

    If `kind` is "scores", each label must be a finite number; if it is "several", that of a row is
    a JSON list of names. A message about a missing column ends with `hint`.
    """
    rows, left_out, empty, missing, lists = [], 0, [], [], []
    of_texts = [names for names in (columns.text, columns.second) if names]
    skips = columns.skips_broken_rows
    shards = (
        read_table(
            path,
            *of_texts,
            *columns.labels,
            header=columns.header,
            empties_broken_rows=skips,
            list_columns=columns.label if kind == "several" else (),
            hint=hint,
        )
        for path in paths
    )
    read = live_line(itertools.chain.from_iterable(shards), f"reading {paths[0].name}")
    for where, fields in read:
        texts, labels = fields[: len(of_texts)], fields[len(of_texts) :]
        label = labels[0]
        if kind == "several" and all(texts):
            if columns.flags:
                names = label_fields.flagged(where, columns.flags, labels)
            else:
                names = label_fields.names_of(where, label)
                lists.append(names)
            label = json.dumps(sorted(set(names)))
        if not all(texts) or not label:
            if skips:
                left_out += 1
                continue
            what = "label" if all(texts) else "sentence"
            empty.append(f"{where}: the {what} is empty: remove the row")
            continue
        if kind == "scores" and not _is_score(label):
            missing.append(f"{where}: the label is {label[:100]!r}, expected a number")
        elif label.casefold() in MISSING:
            missing.append(f"{where}: the label is {label!r}, the others are numbers")
        rows.append((SEPARATOR.join(text.replace(SEPARATOR, " ") for text in texts), label))
    like_lists = kind == "auto" and label_fields.are_like_lists({"", *(row[1] for row in rows)})
    _require_none(empty, f"; {SEVERAL_HINT}" if like_lists else "")
    length = label_fields.length_of_flags(lists)
    if length is not None:
        raise DataError(
            f"{paths[0]}: each list of labels is {length} times 0 or 1: {label_fields.AS_NAMES}"
        )
    if left_out:
        notes.append(
            f"{paths[0].name}: {left_out:,} of {len(rows) + left_out:,} rows left out: a sentence "
            "or the label is empty, or the row is cut short"
        )
    if not rows:
        raise DataError(f"{paths[0]}: no row after the header, expected sentences and their labels")
    if kind == "scores":
        _require_none(missing)
    present = {label for _, label in rows if label.casefold() not in MISSING}
    if present and all(map(SCORE.fullmatch, present)):
        _require_none(missing)
    return rows


def _is_score(label: str) -> bool:
    return bool(SCORE.fullmatch(label)) and math.isfinite(float(label))


def _require_none(problems: list[str], hint: str = "") -> None:
    """Raises a DataError with the first problem, the number of the others and a hint."""
    if problems:
        more = f"; likewise {len(problems) - 1:,} more" if len(problems) > 1 else ""
        raise DataError(f"{problems[0]}{more}{hint}")


def encode(sentences: Sequence[str], preprocessor) -> dict[str, np.ndarray]:
    """Encodes sentences as inputs of a `keras_nlp.models.TextClassifier`.

    Args:
        sentences: n sentences, or n pairs joined by `SEPARATOR`.
        preprocessor: a `keras_nlp.models.TextClassifierPreprocessor`; it truncates
            sentences to its `sequence_length`.

    Returns:
        `token_ids` (begin, pieces, end, padding) and, if the family has them, `segment_ids` and
        `padding_mask` (1 for tokens, 0 for padding), each int32 of shape (n, length).
    """
    blocks = list(_encoded_blocks(sentences, preprocessor))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _encoded_blocks(sentences: Sequence[str], preprocessor) -> Iterator[dict[str, np.ndarray]]:
    """Yields what `encode` returns, `SENTENCES_AT_ONCE` sentences at a time."""
    encode_block: Callable = functools.partial(_preprocess, preprocessor)
    if type(preprocessor).__module__.startswith("keras_hub."):  # another may do more
        encode_block = _in_parts(preprocessor, len(sentences))
    with live_line(what="encoding sentences", total=len(sentences)) as bar:
        for start in range(0, len(sentences), SENTENCES_AT_ONCE):
            block = sentences[start : start + SENTENCES_AT_ONCE]
            parts = tuple(zip(*(text.split(SEPARATOR) for text in block), strict=True))
            # The mask too, a bool in Keras: Keras averages the first batch over the replicas.
            yield {name: np.asarray(value, np.int32) for name, value in encode_block(parts).items()}
            bar.update(len(block))


def _preprocess(preprocessor, parts: tuple[Sequence[str], ...]) -> dict:
    """Returns what a preprocessor makes of sentences, or of the first and the second of pairs."""
    texts = tuple(
        word_pieces.with_plain_spaces(tf.constant(part), preprocessor.tokenizer) for part in parts
    )
    # With a second argument: KerasNLP would treat a pair alone as inputs and labels.
    return preprocessor(texts if len(texts) > 1 else texts[0], None)


def _preprocess_one(preprocessor, parts: tuple[Sequence[str], ...]) -> dict:
    """Does as `_preprocess`, for a preprocessor that takes no pairs.

    Raises:
        DataError: there are pairs.
    """
    if len(parts) > 1:
        family = type(preprocessor).__name__.removesuffix("Preprocessor")
        raise DataError(f"{family} takes no pairs of sentences: leave one column out")
    return _preprocess(preprocessor, parts)


def _in_parts(preprocessor, count: int) -> Callable:
    """Returns a function that does as `_preprocess`, several times as fast.

    Calls the tokenizer and the packer of KerasHub's preprocessor itself: word pieces are looked up
    once for each distinct word, and `packer.call()` skips Keras's search of the arguments for
    tensors, which examines each token. It examines each token of its answer, too, unless it runs in
    a graph, which pays for many sentences.

    Args:
        preprocessor: of KerasHub.
        count: sentences that will be encoded.
    """
    tokenizer, names = preprocessor.tokenizer, tuple(_preprocess(preprocessor, (("",),)))
    if not isinstance(preprocessor.packer, keras_nlp.layers.MultiSegmentPacker):  # ESM's proteins
        return functools.partial(_preprocess_one, preprocessor)
    is_by_word = isinstance(tokenizer, keras_nlp.tokenizers.WordPieceTokenizer)
    ids_of_words = word_pieces.IdsByWord(tokenizer)

    def ids_of(texts: Sequence[str]) -> list[list[int]]:
        return ids_of_words(texts) if is_by_word else word_pieces.as_lists(tokenizer(texts))

    @functools.cache
    def graph_of(sentences: int) -> Callable:
        signature = [(tf.RaggedTensorSpec([None, None], tf.int32),) * sentences]
        return tf.function(lambda parts: preprocessor.packer.call(parts), signature)

    def pack(rows: tuple[list[list[int]], ...]) -> tuple:
        if count <= SENTENCES_AT_ONCE:
            return preprocessor.packer.call(rows)
        return graph_of(len(rows))(tuple(map(_as_ragged, rows)))

    def encode_block(parts: tuple[Sequence[str], ...]) -> dict:
        token_ids, segment_ids = pack(tuple(map(ids_of, parts)))
        token_ids = np.asarray(token_ids)
        made = {"token_ids": token_ids, "segment_ids": segment_ids}
        made["padding_mask"] = token_ids != tokenizer.pad_token_id
        return {name: made[name] for name in names}

    return encode_block


def _as_ragged(rows: Sequence[Sequence[int]]) -> tf.RaggedTensor:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.fromiter(itertools.chain.from_iterable(rows), np.int32, lengths.sum())
    return tf.RaggedTensor.from_row_lengths(ids, lengths, validate=False)


def encode_once(
    splits: dict[str, tuple[list[str], np.ndarray]], preprocessor, cache_dir: Path
) -> dict[str, dict[str, np.ndarray]]:
    """Encodes the sentences of each split, or takes their tokens from the cache; see `encode`.

    Args:
        splits: As in `Sentences.splits`.
        preprocessor: a `keras_nlp.models.TextClassifierPreprocessor`.
        cache_dir: The cache; tokens are stored in its folder `sequences`.
    """
    rules = word_pieces.rules_of(preprocessor)
    return {
        split: sequences.blocks_once(
            cache_dir,
            (sequences.sha256_of(texts), "sentences 2", rules),
            functools.partial(_encoded_blocks, texts, preprocessor),
            len(texts),
        )
        for split, (texts, _) in splits.items()
    }


def lengths(inputs: dict[str, np.ndarray]) -> np.ndarray | None:
    """Returns the number of tokens of each sentence up to its last one, int32 of shape (n,).

    Args:
        inputs: sentences, encoded by `encode`.

    Returns:
        None if the family takes no padding mask: its models read the padding too (FNet).
    """
    mask = inputs.get("padding_mask")
    if mask is None:
        return None
    padding = np.argmax(mask[:, ::-1] != 0, axis=1)
    return (mask.shape[1] - padding).astype(np.int32)


def naive_bayes_evidence(
    inputs: dict[str, np.ndarray], labels: np.ndarray, tokenizer, num_classes: int
) -> np.ndarray:
    """Computes each word piece's evidence for the classes by naive Bayes, add-one smoothed.

    The binarised multinomial model: a sentence counts a piece once.

    Args:
        inputs: the training sentences, encoded by `encode`.
        labels: int32 of shape (sentences,).
        tokenizer: a `keras_nlp.models.BertTokenizer`; its special tokens are no evidence.
        num_classes: number of classes.

    Returns:
        Logarithms of the pieces' shares in each class, less their mean over the classes; float64 of
        shape (vocabulary size, classes).
    """
    present = word_pieces.presence(inputs["token_ids"], tokenizer)
    examples = np.arange(len(labels))
    classes = scipy.sparse.csr_array(
        (np.ones(len(labels)), (examples, labels)), (len(labels), num_classes)
    )
    counts = 1 + (present.T @ classes).toarray(order="C")
    totals = counts.sum(axis=0)
    # In place: of thousands of classes the table takes a gigabyte.
    evidence = np.log(counts, out=counts)
    evidence -= np.log(totals)
    evidence -= evidence.mean(axis=1, keepdims=True)
    evidence[special_ids(tokenizer)] = 0
    return evidence


def hide_word_pieces(share: float, tokenizer, seed: int) -> Callable:
    """Returns a `change` for `arrays.training_data` that masks word pieces, redrawn every epoch.

    The choice depends on (seed, epoch, example) alone.

    Args:
        share: Share of the word pieces to mask, in [0, 1); special tokens are never masked.
        tokenizer: Of KerasNLP: its mask token replaces them.
        seed: The run's seed.
    """
    stream = batches.stream_seed(seed, "token dropout")
    mask_id, special = tokenizer.mask_token_id, tokenizer.special_token_ids

    def change(x: dict, indices: tf.Tensor, epoch: tf.Tensor) -> dict:
        ids = x["token_ids"]
        place = tf.range(ids.shape[1], dtype=tf.int64)[None, :]
        is_word = tf.reduce_all(ids[..., None] != tf.constant(special, ids.dtype), axis=-1)
        hidden = batches.uniform(stream, epoch, indices[:, None], place) < share
        return {**x, "token_ids": tf.where(is_word & hidden, mask_id, ids)}

    return change
