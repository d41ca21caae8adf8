"""Sentences and their labels: read from tables or docstrings, encoded and hidden for a BERT."""

import dataclasses
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from data import batches, files, installed_docs
from data.errors import DataError
from data.tables import read_table
from data.text import SPLITS, Text
from data.word_pieces import special_ids

INSTALLED_DOCS = "installed-docs"

HELD_OUT = 0.1  # of a file without splits of its own, for validation and again for test

# What tells a docstring's package without reading it. A name before a dot goes with its dot, so
# that `tf.data.Dataset` becomes `data.Dataset`.
PACKAGE_NAMES = re.compile(
    r"(?<!\w)(tensorflow|tf|keras|keras[ _-]?(hub|nlp|cv)|numpy|np)(?!\w)\.?", re.IGNORECASE
)

# The most frequent n-grams that the baseline keeps; SST-2 has 81,000. It bounds the seconds that a
# long text costs.
MOST_NGRAMS = 100_000

Row = tuple[str, str]  # a sentence and its label


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
        """Returns the sentences without their labels, for instance to learn a vocabulary from."""
        lines = {split: sentences for split, (sentences, _) in self.splits.items()}
        return Text(self.name, lines)

    def with_classes(self, classes: Sequence[str]) -> "Sentences":
        """Returns the same sentences with their labels numbered by other classes' names.

        Raises:
            DataError: One of the classes is not among these.
        """
        unknown = [name for name in self.classes if name not in classes]
        if unknown:
            raise DataError(
                f"{self.name}: class {unknown[0][:100]!r}, the run knows {_shown(classes)}"
            )
        number = np.array([list(classes).index(name) for name in self.classes], np.int32)
        splits = {split: (texts, number[labels]) for split, (texts, labels) in self.splits.items()}
        return dataclasses.replace(self, splits=splits, classes=tuple(classes))

    def describe(self) -> str:
        """Describes the sentences in one line."""
        counts = ", ".join(f"{len(labels):,} {split}" for split, (_, labels) in self.splits.items())
        return f"{self.name}: {counts}; {len(self.classes):,} classes: {_shown(self.classes)}"


def load_sentences(dataset: str, cache_dir: Path, seed: int = 0) -> Sentences:
    """Loads sentences and labels.

    A folder in GLUE's layout holds train.tsv, dev.tsv and test.tsv. One file is a CSV, or a TSV if
    its header holds a tab; per class, 80 percent of its different sentences go to the training
    split and 10 to each of the others (at least one), by a permutation that the seed and the class
    decide. A sentence that is repeated, in other case or spaces too, goes to one split with all
    its rows. In both layouts a
    header names the columns `sentence` (or `text`) and `label`; other columns are ignored. A TSV
    has no quoting, a CSV has. What cannot be used is an error.

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
            split: [(_without_names(text), label) for text, label in found]
            for split, found in installed_docs.load_labelled_docs(cache_dir).items()
        }
        note = (
            "no dataset was named: the task is which of the installed packages a paragraph of a "
            "docstring belongs to, with the packages' names removed"
        )
        return _numbered(INSTALLED_DOCS, rows, note if dataset == "auto" else None)
    path = files.expand(dataset)
    if path.is_dir():
        found = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}
        return _numbered(dataset, {split: _read(path / name) for split, name in found.items()})
    if path.is_file():
        return _numbered(dataset, _split(dataset, _read(path), seed))
    raise DataError(
        f"dataset {dataset!r}: no such file or folder; expected {INSTALLED_DOCS}, a folder with "
        "train.tsv, dev.tsv and test.tsv, or one CSV or TSV file"
    )


def baselines(splits: dict[str, tuple[list[str], np.ndarray]]) -> dict[str, float]:
    """Measures a baseline without a model, and one that counts words.

    Args:
        splits: As in `Sentences.splits`.

    Returns:
        On the test split: `most_frequent_accuracy`, of always saying the training split's most
        frequent class; `tfidf_accuracy` and `tfidf_macro_f1` (the mean of the classes' F1 scores),
        of logistic regression on TF-IDF of single words and pairs of words, left out where the
        training sentences hold one class or no word of two or more letters. From 0 to 1.
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
        model = LogisticRegression(C=10, max_iter=1000).fit(features, labels)
    except ValueError:  # no word of two or more letters, or one class
        return found
    predictions = model.predict(vectorizer.transform(test_sentences))
    return found | {
        "tfidf_accuracy": float(accuracy_score(test_labels, predictions)),
        "tfidf_macro_f1": float(f1_score(test_labels, predictions, average="macro")),
    }


def _without_names(paragraph: str) -> str:
    return re.sub(r"\s+", " ", PACKAGE_NAMES.sub("", paragraph)).strip()


def fold(sentence: str) -> str:
    """Returns a sentence without differences of case and white space."""
    return " ".join(sentence.casefold().split())


def repeated_in_test(splits: dict[str, tuple[list[str], np.ndarray]]) -> int:
    """Counts the test sentences that are training sentences too, case and spaces folded.

    Args:
        splits: As in `Sentences.splits`.
    """
    known = set(map(fold, splits["train"][0]))
    return sum(fold(sentence) in known for sentence in splits["test"][0])


def repeated_note(splits: dict[str, tuple[list[str], np.ndarray]]) -> str | None:
    """Says in one line what `repeated_in_test` counts, or None where it counts nothing."""
    repeated = repeated_in_test(splits)
    if not repeated:
        return None
    return (
        f"{repeated:,} of {len(splits['test'][0]):,} test sentences are training sentences too "
        "(case and spaces ignored)"
    )


def _numbered(name: str, rows: dict[str, list[Row]], note: str | None = None) -> Sentences:
    """Numbers the labels."""
    found = {split: {label for _, label in rows[split]} for split in SPLITS}
    integers = all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", label) for label in found["train"])
    classes = tuple(sorted(found["train"], key=int if integers else None))
    if len(classes) < 2:
        raise DataError(
            f"{name}: the only label is {_shown(classes)}, expected two classes or more"
        )
    for split in SPLITS:
        if found[split] != found["train"]:
            wrong = sorted(found[split] ^ found["train"])
            raise DataError(
                f"{name}, training and {split} split: the label {_shown(wrong)} is in one of them "
                "alone, expected examples of every class in every split"
            )
    number = {label: index for index, label in enumerate(classes)}
    splits = {
        split: (
            [sentence for sentence, _ in rows[split]],
            np.array([number[label] for _, label in rows[split]], np.int32),
        )
        for split in SPLITS
    }
    return Sentences(name, splits, classes, note)


def _shown(labels: Sequence[str]) -> str:
    """Lists labels for a message, at most five of them."""
    return ", ".join(repr(label[:100]) for label in labels[:5]) + ", ..." * (len(labels) > 5)


def _split(name: str, rows: list[Row], seed: int) -> dict[str, list[Row]]:
    """Splits the rows of one file per class; each split keeps the order of the file."""
    class_of: dict[str, str] = {}  # by folded sentence; the first row's label where rows disagree
    for sentence, label in rows:
        class_of.setdefault(fold(sentence), label)
    sentences: dict[str, list[str]] = {}
    for sentence, label in class_of.items():
        sentences.setdefault(label, []).append(sentence)
    split_of: dict[str, str] = {}
    for label, found in sentences.items():
        if len(found) < len(SPLITS):
            raise DataError(
                f"{name}: too few different sentences of the label {label[:100]!r}: {len(found)}, "
                "expected 3 or more, one for each split"
            )
        # Of the label, not of its number: a class that is added changes no other class's split.
        rng = np.random.default_rng([seed, zlib.crc32(label.encode())])
        order = rng.permutation(len(found))
        held_out = max(1, round(HELD_OUT * len(found)))
        for place, index in enumerate(order):
            split = "test" if place < held_out else "valid" if place < 2 * held_out else "train"
            split_of[found[index]] = split
    return {split: [row for row in rows if split_of[fold(row[0])] == split] for split in SPLITS}


def _read(path: Path) -> list[Row]:
    rows = []
    for where, (sentence, label) in read_table(path, ("sentence", "text"), ("label",)):
        if not sentence or not label:
            raise DataError(f"{where}: the {'label' if sentence else 'sentence'} is empty")
        rows.append((sentence, label))
    if not rows:
        raise DataError(f"{path}: no row after the header, expected sentences and their labels")
    return rows


def encode(sentences: Sequence[str], preprocessor) -> dict[str, np.ndarray]:
    """Turns sentences into what a `keras_nlp.models.TextClassifier` takes.

    Args:
        sentences: n sentences.
        preprocessor: a `keras_nlp.models.TextClassifierPreprocessor`; it cuts sentences that are
            longer than its `sequence_length`.

    Returns:
        `token_ids` (begin, pieces, end, padding) and, where the family has them, `segment_ids`
        and `padding_mask` (1 where there is a token), each int32 of shape (n, length).
    """
    # With a second argument: KerasNLP takes a pair alone for inputs and labels.
    inputs = preprocessor(tf.constant(list(sentences), tf.string), None)
    # Also the mask, which Keras makes a bool: it averages the first batch over the replicas.
    return {name: np.asarray(value, np.int32) for name, value in inputs.items()}


def naive_bayes_evidence(
    inputs: dict[str, np.ndarray], labels: np.ndarray, tokenizer, num_classes: int
) -> np.ndarray:
    """Counts what each word piece says of the classes: Bernoulli naive Bayes, add-one smoothed.

    Args:
        inputs: what `encode` made of the training sentences.
        labels: int32 of shape (sentences,).
        tokenizer: a `keras_nlp.models.BertTokenizer`; its special tokens say nothing.
        num_classes: number of classes.

    Returns:
        Logarithms of the pieces' shares in each class, less their mean over the classes; float64 of
        shape (vocabulary size, classes).
    """
    special = special_ids(tokenizer)
    counts = np.ones((tokenizer.vocabulary_size(), num_classes))
    for ids, label in zip(inputs["token_ids"], labels, strict=True):
        counts[np.unique(ids), label] += 1
    counts[special] = 1
    log_share = np.log(counts) - np.log(counts.sum(axis=0))
    evidence = log_share - log_share.mean(axis=1, keepdims=True)
    evidence[special] = 0
    return evidence


def hide_word_pieces(share: float, tokenizer, seed: int) -> Callable:
    """Returns a `change` for `arrays.training_data` that hides word pieces, others in each epoch.

    Which ones depends on (seed, epoch, example) alone.

    Args:
        share: Share of the word pieces that are hidden, in [0, 1); special tokens are not.
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
