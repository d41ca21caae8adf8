"""Scores texts against references by the words that they share: BLEU and ROUGE."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import keras_nlp
import tensorflow as tf

# Words of the longest groups that BLEU counts.
BLEU_WORDS = 4
# SacreBLEU's tokenizer 13a, that of mteval-v13a: what it replaces, after spaces around the text.
REPLACED_13A = (
    (r"([\{-\~\[-\` -\&\(-\+\:-\@\/])", r" \1 "),
    (r"([^0-9])([\.,])", r"\1 \2 "),
    (r"([\.,])([^0-9])", r" \1 \2"),
    (r"([0-9])(-)", r"\1 \2 "),
)
ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))


def bleu(texts: Iterable[tuple[str, str]]) -> float | None:
    """Computes BLEU (Papineni et al., 2002) over all texts, by words as SacreBLEU counts them.

    Args:
        texts: pairs of a reference and a text.

    Returns:
        A number in [0, 1]; None where most references have fewer than four words, of which groups
        BLEU has nothing to count.
    """
    pairs = [(words_13a(reference), words_13a(text)) for reference, text in texts]
    if 2 * sum(len(reference) >= BLEU_WORDS for reference, _ in pairs) < len(pairs):
        return None
    if not any(written for _, written in pairs):  # KerasHub's would divide by their number
        return 0.0
    metric = keras_nlp.metrics.Bleu(tokenizer=tf.strings.split)
    metric.update_state(
        [[" ".join(reference)] for reference, _ in pairs],
        [" ".join(written) for _, written in pairs],
    )
    return float(metric.result())


def words_13a(text: str) -> list[str]:
    """Returns words and punctuation as SacreBLEU's tokenizer 13a does.

    KerasHub's own does not split a full stop after a digit at the end of a text, nor at white space
    that is not ASCII's.
    """
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, character in ENTITIES:
        text = text.replace(entity, character)
    text = f" {text} "
    for pattern, replacement in REPLACED_13A:
        text = re.sub(pattern, replacement, text)
    return text.split()


def rouge(texts: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Computes ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004), each the mean of F1 over all texts.

    Words are runs of letters and digits, in lower case and as they stand, as in the package
    `rouge_score` without its stemmer; that one leaves out all letters but a to z.

    Args:
        texts: pairs of a reference and a text.

    Returns:
        `rouge1`, `rouge2` and `rougeL`, in [0, 1].

    Raises:
        ValueError: there are no texts.
    """
    found: dict[str, list[float]] = {"rouge1": [], "rouge2": [], "rougeL": []}
    for reference, text in texts:
        expected, written = words(reference), words(text)
        for count, name in ((1, "rouge1"), (2, "rouge2")):
            some, others = groups(expected, count), groups(written, count)
            found[name].append(f1((some & others).total(), some.total(), others.total()))
        shared = longest_common_subsequence(expected, written)
        found["rougeL"].append(f1(shared, len(expected), len(written)))
    if not found["rouge1"]:
        raise ValueError("no texts")
    return {name: sum(each) / len(each) for name, each in found.items()}


def words(text: str) -> list[str]:
    """Returns the words of a text, in lower case; vowel signs and accents belong to letters."""
    kept = (char if unicodedata.category(char)[0] in "LMN" else " " for char in text.lower())
    return "".join(kept).split()


def groups(found: Sequence[str], count: int) -> Counter:
    """Returns how often each group of `count` successive words occurs."""
    return Counter(zip(*(found[first:] for first in range(count)), strict=False))


def longest_common_subsequence(some: Sequence[str], others: Sequence[str]) -> int:
    """Returns the number of words of the longest sequence that is part of both, in order."""
    lengths = [0] * (len(others) + 1)
    for word in some:
        before = 0  # of the words before both
        for place, other in enumerate(others, start=1):
            above = lengths[place]
            lengths[place] = before + 1 if word == other else max(above, lengths[place - 1])
            before = above
    return lengths[-1]


def f1(shared: int, expected: int, written: int) -> float:
    """Returns the harmonic mean of recall and precision; 0 where nothing is shared."""
    return 2 * shared / (expected + written) if shared else 0.0
