"""Builds new BERTs: sizes, vocabulary, tokenizer; encodes texts and fills in masked words."""

import math
import re
from pathlib import Path

import keras
import keras_nlp
import numpy as np

from data import word_pieces
from data.errors import DataError
from models import presets

MAX_LENGTH = 512  # positions of the published BERTs and of new ones
MASK = "[MASK]"


def make_tokenizer(options, preset: str | None, text, cache_dir: Path):
    """Loads the tokenizer of a preset, or makes one from a given or learned vocabulary.

    Raises:
        DataError: the preset or the vocabulary cannot be loaded.
    """
    if preset is not None:
        return presets.load(keras_nlp.models.Tokenizer, preset)
    return tokenizer_of(vocabulary(options, text, cache_dir))


def vocabulary(options, text, cache_dir: Path) -> list[str]:
    """Reads the given vocabulary, or learns one from the training split."""
    if options.vocabulary is not None:
        return word_pieces.read_vocabulary(options.vocabulary)
    return word_pieces.vocabulary_once(text, options.vocabulary_size, cache_dir)


def vocabulary_notes(options, preset: str | None, text, cache_dir: Path) -> list[str]:
    """Returns lines about what the vocabulary of a new model was not learned from."""
    if preset is not None or options.vocabulary is not None:
        return []
    return word_pieces.vocabulary_notes(text, options.vocabulary_size, cache_dir)


def tokenizer_of(pieces: list[str]):
    """Makes an uncased `BertTokenizer` that strips accents."""
    return keras_nlp.models.BertTokenizer(
        vocabulary=pieces, lowercase=True, strip_accents=True, special_tokens_in_strings=False
    )


def new_backbone(options, vocabulary_size: int):
    """Makes a `BertBackbone`; its feed-forward layers are four times as wide as the model.

    Args:
        options: with `num_layers`, `num_heads`, `hidden_dim` and `dropout` (None for none).
        vocabulary_size: number of word pieces.
    """
    return keras_nlp.models.BertBackbone(
        vocabulary_size=vocabulary_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        hidden_dim=options.hidden_dim,
        intermediate_dim=4 * options.hidden_dim,
        dropout=options.dropout or 0.0,
        max_sequence_length=MAX_LENGTH,
    )


def training_operations(backbone, sequence_length: float, predictions: float) -> int:
    """Counts the floating-point operations that training on one example mathematically needs.

    A product of (m, k) and (k, n) needs 2 m k n. A token needs, in each layer, 4 width^2
    multiplications in the projections of attention, 2 width x inner width in the feed-forward
    layers, 2 length x width in scores and mix; a prediction needs width^2 in the head's dense layer
    and width x vocabulary in the logits. The backward pass needs twice the forward pass. Only
    matrix products count (as in Kaplan et al., arXiv 2001.08361, section 2.1).

    Args:
        backbone: with the sizes of a `BertBackbone`.
        sequence_length: tokens of an example without padding, on average.
        predictions: masked positions per example, on average.
    """
    width = backbone.hidden_dim
    attention = 4 * width**2 + 2 * sequence_length * width
    token = backbone.num_layers * (attention + 2 * width * backbone.intermediate_dim)
    prediction = width**2 + width * backbone.vocabulary_size
    return round(3 * 2 * (sequence_length * token + predictions * prediction))


def encode(tokenizer, text: str, longest: int) -> np.ndarray:
    """Encodes a text as [CLS], its pieces, [SEP]; WikiText's `<unk>` becomes [UNK].

    Args:
        tokenizer: of KerasNLP, of a family with a `MaskedLM`; `[MASK]` in the text is its mask.
        text: the text.
        longest: the model's largest number of tokens.

    Returns:
        int32 of shape (tokens,).

    Raises:
        DataError: the text has more tokens.
    """
    special = word_pieces.SpecialTokens.of(tokenizer)
    stand_for = {MASK: special.mask, word_pieces.UNKNOWN_IN_TEXT: special.unknown}
    ids = [special.cls]
    # The space before a mask belongs to it, as with other words of byte-level BPE.
    for part in re.split(r"\s*(\[MASK\]|(?<!\S)<unk>(?!\S))", text):
        if part in stand_for:
            ids.append(stand_for[part])
        elif part:
            part = word_pieces.with_plain_spaces(part, tokenizer)
            ids += np.asarray(tokenizer(part)).tolist()
    ids.append(special.sep)
    if len(ids) > longest:
        raise DataError(f"{len(ids)} tokens, the model takes {longest}: {text[:60]!r}")
    return np.asarray(ids, np.int32)


def fill_masks(model, tokenizer, token_ids: np.ndarray) -> np.ndarray:
    """Computes the probabilities of all word pieces at each mask.

    Args:
        model: a `MaskedLM` of any family.
        tokenizer: its tokenizer.
        token_ids: int32 of shape (tokens,).

    Returns:
        float64 of shape (masks, vocabulary size); special tokens have probability 0.
    """
    positions = np.flatnonzero(token_ids == tokenizer.mask_token_id).astype(np.int32)
    logits = masked_logits(model, token_ids[None], positions[None])[0].astype(np.float64)
    logits = logits[:, : tokenizer.vocabulary_size()]  # a preset may have more rows than pieces
    logits[:, word_pieces.special_ids(tokenizer)] = -np.inf
    return keras.ops.convert_to_numpy(keras.ops.softmax(logits))


def masked_logits(model, token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Computes the logits of masked words.

    Args:
        model: a `MaskedLM` of any family.
        token_ids: int32 of shape (texts, tokens), without padding.
        positions: int32 of shape (texts, masks).

    Returns:
        float of shape (texts, masks, vocabulary size).
    """
    inputs = {
        "token_ids": token_ids,
        "segment_ids": np.zeros_like(token_ids),
        "padding_mask": np.ones_like(token_ids),
        "mask_positions": positions,
    }
    inputs = {name: inputs[name] for name in model.input}
    return keras.ops.convert_to_numpy(model(inputs, training=False))


def sum_of_log_shares(logits, pieces: np.ndarray) -> float:
    """Returns the log-likelihood of word pieces in nats; equal logits give equal sums.

    Args:
        logits: of shape (pieces, vocabulary size).
        pieces: ids, of shape (pieces,).
    """
    log_shares = keras.ops.convert_to_numpy(keras.ops.log_softmax(logits))
    return math.fsum(log_shares[np.arange(len(pieces)), pieces].tolist())
