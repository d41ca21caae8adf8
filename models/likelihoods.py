"""Computes the likelihood of texts under masked and causal language models and n-grams."""

import collections
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras_nlp
import numpy as np

from data import next_tokens, word_pieces
from data.errors import DataError, InputError
from data.kneser_ney import KneserNey
from data.live_line import live_line
from data.next_tokens import Ends
from data.text import Text
from data.word_pieces import SpecialTokens
from models import bert

LARGEST_EXPONENT = math.log(sys.float_info.max)

ROWS = 256  # of a batch, about; all texts of a batch have the same length


def pseudo_log_likelihoods(model, tokenizer, texts: Sequence[str], longest: int) -> list[float]:
    """Sums the log-likelihoods of a text's word pieces, masked one at a time.

    The later pieces of its word are masked too, since they would give the piece away
    (PLL-word-l2r; Kauf and Ivanova, arXiv 2305.10588).

    Args:
        model: a `MaskedLM` of any family.
        tokenizer: its tokenizer.
        texts: the texts.
        longest: the model's largest number of tokens, including [CLS] and [SEP].

    Returns:
        Nats; equal word pieces give equal sums.

    Raises:
        InputError: a text has more tokens.
    """
    special = SpecialTokens.of(tokenizer)
    encoded = [[special.cls, *ids, special.sep] for ids in encode(tokenizer, texts, longest)]
    continues_word = np.zeros(tokenizer.vocabulary_size(), bool)
    continues_word[list(word_pieces.continuations(tokenizer))] = True

    def score(batch: np.ndarray) -> list[float]:
        length = batch.shape[1] - 2
        if not length:
            return [0.0] * len(batch)
        positions = np.arange(1, length + 1)
        # For each piece the later ones, up to the next piece that begins a word.
        words = np.cumsum(~continues_word[batch[:, 1:-1]], axis=1)
        hidden = (words[:, :, None] == words[:, None, :]) & (positions >= positions[:, None])
        masked = np.repeat(batch[:, None], length, axis=1)
        masked[:, :, 1:-1] = np.where(hidden, special.mask, masked[:, :, 1:-1])
        logits = bert.masked_logits(
            model,
            masked.reshape(-1, length + 2),
            np.tile(positions.astype(np.int32), len(batch))[:, None],
        )
        logits = logits.reshape(len(batch), length, -1)
        return [bert.sum_of_log_shares(*text) for text in zip(logits, batch[:, 1:-1], strict=True)]

    return _by_length(encoded, score, lambda length: ROWS // max(1, length - 2))


def next_token_log_likelihoods(
    task: keras_nlp.models.CausalLM, tokenizer, texts: Sequence[str], longest: int
) -> list[float]:
    """Sums the log-likelihoods of a text's tokens as the beginning of a document.

    Args:
        task: a causal language model.
        tokenizer: its tokenizer; where it has no token that starts a text, a text's first token is
            given, not predicted.
        texts: the texts; the white space around them does not count.
        longest: tokens that the model takes.

    Returns:
        Nats; equal tokens give equal sums.

    Raises:
        InputError: a text has more tokens, or none to predict.
    """
    encoded = encode_beginnings(tokenizer, texts, longest)

    def score(batch: np.ndarray) -> list[float]:
        inputs = {"token_ids": batch[:, :-1], "padding_mask": np.ones_like(batch[:, :-1])}
        logits = task(inputs, training=False)
        return [bert.sum_of_log_shares(*text) for text in zip(logits, batch[:, 1:], strict=True)]

    return _by_length(encoded, score, lambda length: ROWS // length)


def encode_beginnings(tokenizer, texts: Sequence[str], longest: int) -> list[list[int]]:
    """Returns the tokens of each text as the beginning of a document, a start token included.

    Args:
        tokenizer: of a causal language model.
        texts: the texts.
        longest: largest number of tokens.

    Raises:
        InputError: a text has more tokens, or none after the first.
    """
    ends = Ends.of(tokenizer)
    encoded = [ends.around(ids)[:-1] for ids in next_tokens.tokenize(texts, tokenizer)]
    for index, (text, ids) in enumerate(zip(texts, encoded, strict=True)):
        if len(ids) > longest:
            message = f"{len(ids)} tokens, the model takes {longest}: {text[:60]!r}"
            raise InputError(message, index)
        if len(ids) < 2:
            raise InputError(f"no token to predict in {text[:60]!r}", index)
    return encoded


def encode(tokenizer, texts: Sequence[str], longest: int = sys.maxsize) -> list[list[int]]:
    """Returns the word pieces of each text, tokenised like training text.

    Args:
        tokenizer: of a family with a `MaskedLM`.
        texts: the texts.
        longest: largest number of tokens, including [CLS] and [SEP].

    Raises:
        InputError: a text has more tokens.
    """
    encoded: list[list[int]] = []
    for ids, lengths in word_pieces.tokenize(texts, tokenizer):
        encoded += [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
    for index, (text, pieces) in enumerate(zip(texts, encoded, strict=True)):
        if len(pieces) + 2 > longest:
            message = f"{len(pieces) + 2} tokens, the model takes {longest}: {text[:60]!r}"
            raise InputError(message, index)
    return encoded


def as_answers(likelihoods: Sequence[float], predicted: Sequence[int]) -> list[list[dict]]:
    """Returns the answers of a recipe's `predict(score=True)`.

    Args:
        likelihoods: of each text its log-likelihood, in nats.
        predicted: how many tokens that is the sum of.

    Returns:
        Per text the log-likelihood, the number of tokens, and their perplexity.

    Raises:
        InputError: a text has no tokens, or a perplexity that is not finite.
    """
    if 0 in predicted:
        raise InputError("a text without tokens has no perplexity", predicted.index(0))
    for index, (nats, count) in enumerate(zip(likelihoods, predicted, strict=True)):
        if not -nats / count < LARGEST_EXPONENT:  # also where it is not a number
            raise InputError("its perplexity is not a finite number", index)
    return [
        [{"log_likelihood": nats, "tokens": count, "perplexity": math.exp(-nats / count)}]
        for nats, count in zip(likelihoods, predicted, strict=True)
    ]


def _by_length(
    encoded: Sequence[Sequence[int]],
    score: Callable[[np.ndarray], list[float]],
    batch_size: Callable[[int], int],
) -> list[float]:
    """Scores texts in batches of equal length, without padding; each distinct text once."""
    texts = [tuple(ids) for ids in encoded]
    scores: dict[tuple[int, ...], float] = {}
    with live_line(what="scoring texts", total=len(set(texts))) as bar:
        for batch in _batches(texts, batch_size):
            scores.update(zip(batch, score(np.array(batch, np.int32)), strict=True))
            bar.update(len(batch))
    return [scores[text] for text in texts]


def _batches(texts: Sequence[tuple[int, ...]], batch_size) -> Iterator[list[tuple[int, ...]]]:
    same_length = collections.defaultdict(list)
    for text in dict.fromkeys(texts):
        same_length[len(text)].append(text)
    for length, group in same_length.items():
        size = max(1, batch_size(length))
        for start in range(0, len(group), size):
            yield group[start : start + size]


def require_training_text(text: Text, text_sha256: str) -> None:
    """Rejects a text that is not the one that a run was trained on.

    Args:
        text: the run's dataset, as it is now.
        text_sha256: the checksum of the text that the run was trained on.

    Raises:
        DataError: the text has changed.
    """
    if text.sha256 != text_sha256:
        raise DataError(f"{text.name}: not the text that the run was trained on")


def n_gram_log_likelihoods(
    rows: np.ndarray, vocabulary_size: int, separator: int, begun: Iterable[Sequence[int]]
) -> list[float]:
    """Computes the log-likelihoods of texts by n-grams of a training text.

    Args:
        rows: its token ids, of shape (rows, length).
        vocabulary_size: number of tokens.
        separator: the token between two documents.
        begun: the tokens of each text, with what precedes a document.

    Returns:
        Nats.
    """
    n_grams = KneserNey(rows, vocabulary_size, separator=separator)
    return n_grams.log_likelihoods([np.array(ids) for ids in begun]).tolist()
