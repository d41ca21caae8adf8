"""Builds BERTs: sizes, presets, tokenizer, weights, optimizer; fills in masked words."""

import math
import os
import re
import socket
from pathlib import Path

import keras
import keras_nlp
import numpy as np

from data import files, word_pieces
from data.errors import DataError, first_line

TINY = "bert_tiny_en_uncased"
MAX_LENGTH = 512  # positions of the published BERTs, and of a new one
# What only a new model reads.
FROM_SCRATCH = ("num_layers", "num_heads", "hidden_dim", "vocabulary_size", "vocabulary")
MASK = "[MASK]"


def problems_of_presets(options) -> list[str]:
    """Returns what is wrong with `--preset`, `--init-from` and sizes beside them, a line each.

    Args:
        options: with `preset`, `init_from` and `FROM_SCRATCH`.
    """
    named = [] if options.preset in ("auto", "scratch") else [f"the preset {options.preset}"]
    if options.init_from is not None:
        named.append("--init-from")
    if len(named) > 1:
        return ["--init-from and --preset: pass only one of them"]
    flags = ["--" + name.replace("_", "-") for name in given_sizes(options)]
    return [f"{flag}: {source} has its own" for source in named for flag in flags]


def given_sizes(options) -> list[str]:
    """Returns the names among `FROM_SCRATCH` that differ from the recipe's defaults."""
    default = type(options)()
    return [name for name in FROM_SCRATCH if getattr(options, name) != getattr(default, name)]


def choose_preset(
    options, known: str | None, english_wikitext: bool = False
) -> tuple[str | None, str | None]:
    """Chooses the preset: a run's, the named one; for `auto` the tiny one where it suits.

    Args:
        options: with `preset`, `init_from` and `FROM_SCRATCH`.
        known: the preset of an earlier part of this run, or None.
        english_wikitext: whether the text is what the tiny preset was trained on.

    Returns:
        The preset, or None for a model from scratch; and a line that says what is used instead of
        the first choice, and why, or None.

    Raises:
        DataError: `init_from` is no finished run.
    """
    asked = known or options.preset
    if known is None and options.init_from is not None:
        asked = str(options.init_from / "model")
        if not (options.init_from / "model" / "config.json").is_file():
            raise DataError(
                f"--init-from {options.init_from}: holds no model; pass a finished run of bert_mlm"
            )
    if asked != "auto":
        return (None if asked == "scratch" else asked), None
    if not english_wikitext or given_sizes(options):
        return None, None
    reason = _unreachable(TINY)
    if reason is None:
        return TINY, None
    return None, f"preset {TINY}: {reason}; the same architecture from scratch is used instead"


def _unreachable(name: str) -> str | None:
    """Returns why a preset of Kaggle cannot be had, or None; gives up after some seconds."""
    root = Path(os.environ.get("KAGGLEHUB_CACHE", "~/.cache/kagglehub")).expanduser()
    if list(root.glob(f"models/keras/bert/keras/{name}/*/config.json")):
        return None
    try:
        socket.create_connection(("www.kaggle.com", 443), timeout=5).close()
    except OSError:
        return "no network"
    try:
        keras_nlp.models.BertTokenizer.from_preset(name)
    except Exception as error:  # kagglehub raises whatever its HTTP client raises
        return re.sub(r"\S*://\S+", "...", first_line(error))[:80]
    return None


def make_tokenizer(options, preset: str | None, text, cache_dir: Path):
    """Loads the tokenizer of a preset, or makes one of a given or learned vocabulary.

    Raises:
        DataError: the preset or the vocabulary cannot be loaded.
    """
    if preset is not None:
        return load(keras_nlp.models.BertTokenizer, preset)
    return tokenizer_of(vocabulary(options, text, cache_dir))


def vocabulary(options, text, cache_dir: Path) -> list[str]:
    """Reads the given vocabulary, or learns one from the training split."""
    if options.vocabulary is not None:
        return word_pieces.read_vocabulary(options.vocabulary)
    return word_pieces.vocabulary_once(text, options.vocabulary_size, cache_dir)


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


def load_masked_lm(preset: str, dropout: float | None, sequence_length: int):
    """Loads a `BertMaskedLM` without its preprocessor; a preset without a head gets a new one.

    Args and Raises as `load_backbone`.
    """
    backbone = load_backbone(preset, dropout, sequence_length)
    model = keras_nlp.models.BertMaskedLM(backbone=backbone, compile=False)
    head = Path(preset) / "task.weights.h5"
    if head.is_file():
        try:
            model.load_task_weights(head)
        except (ValueError, KeyError) as error:
            raise DataError(f"preset {preset}: no masked LM ({first_line(error)})") from error
    return model


def load_backbone(preset: str, dropout: float | None, sequence_length: int):
    """Loads a `BertBackbone` under the current dtype policy.

    Args:
        preset: a name of Kaggle or Hugging Face, or a folder.
        dropout: the backbone's; None keeps the preset's.
        sequence_length: tokens of the run's sequences.

    Raises:
        DataError: the preset cannot be loaded, or has fewer positions.
    """
    changes = {} if dropout is None else {"dropout": dropout}
    policy = keras.config.dtype_policy()
    backbone = load(keras_nlp.models.BertBackbone, preset, dtype=policy, **changes)
    if sequence_length > backbone.max_sequence_length:
        raise DataError(
            f"--sequence-length {sequence_length}: the preset {preset} takes at most "
            f"{backbone.max_sequence_length} tokens"
        )
    return backbone


def load(kind, preset: str, **changes):
    """Calls `kind.from_preset(preset, **changes)`, whose errors become one line.

    Args:
        kind: a class of KerasNLP.
        preset: a name of Kaggle or Hugging Face, or a folder.
        **changes: what `from_preset()` takes.

    Raises:
        DataError: the preset cannot be loaded, or does not match its checksums.
    """
    problem = files.damage(Path(preset)) if os.path.isdir(preset) else None
    if problem:
        raise DataError(f"preset {preset}: damaged ({problem})")
    try:
        return kind.from_preset(preset, **changes)
    except Exception as error:  # kagglehub raises whatever its HTTP client raises
        raise DataError(f"preset {preset}: cannot be loaded ({first_line(error)})") from error


def training_operations(backbone, sequence_length: int, predictions: int) -> int:
    """Counts the floating-point operations that training on one example mathematically needs.

    A product of (m, k) and (k, n) takes 2 m k n. A token takes, in each layer, 4 width^2
    multiplications in the projections of attention, 2 width x inner width in the feed-forward
    layers, 2 length x width in scores and mix; a prediction takes width^2 in the head's dense layer
    and width x vocabulary in the logits. The backward pass takes twice the forward pass. Only
    matrix products count (as in Kaplan et al., arXiv 2001.08361, section 2.1).

    Args:
        backbone: with the sizes of a `BertBackbone`.
        sequence_length: tokens of an example.
        predictions: masked positions that an example has room for.
    """
    width = backbone.hidden_dim
    attention = 4 * width**2 + 2 * sequence_length * width
    token = backbone.num_layers * (attention + 2 * width * backbone.intermediate_dim)
    prediction = width**2 + width * backbone.vocabulary_size
    return 3 * 2 * (sequence_length * token + predictions * prediction)


def encode(tokenizer, text: str, longest: int) -> np.ndarray:
    """Encodes a text as [CLS], its pieces, [SEP]; WikiText's `<unk>` becomes [UNK].

    Args:
        tokenizer: a `keras_nlp.models.BertTokenizer`.
        text: the text.
        longest: tokens that the model takes.

    Returns:
        int32 of shape (tokens,).

    Raises:
        DataError: the text has more tokens.
    """
    parts = re.split(r"(?<!\S)<unk>(?!\S)", text)
    ids = [tokenizer.cls_token_id, *tokenizer(parts[0])]
    for part in parts[1:]:
        ids += [tokenizer.token_to_id("[UNK]"), *tokenizer(part)]
    ids.append(tokenizer.sep_token_id)
    if len(ids) > longest:
        raise DataError(f"{len(ids)} tokens, the model takes {longest}: {text[:60]!r}")
    return np.asarray(ids, np.int32)


def fill_masks(model, tokenizer, token_ids: np.ndarray) -> np.ndarray:
    """Computes the probabilities of all word pieces at each [MASK].

    Args:
        model: a `BertMaskedLM`.
        tokenizer: its tokenizer.
        token_ids: int32 of shape (tokens,).

    Returns:
        float64 of shape (masks, vocabulary size); special tokens have probability 0.
    """
    positions = np.flatnonzero(token_ids == tokenizer.mask_token_id).astype(np.int32)
    logits = masked_logits(model, token_ids[None], positions[None])[0].astype(np.float64)
    logits[:, word_pieces.special_ids(tokenizer)] = -np.inf
    return keras.ops.convert_to_numpy(keras.ops.softmax(logits))


def masked_logits(model, token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Computes the logits of masked words.

    Args:
        model: a `BertMaskedLM`.
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
    return keras.ops.convert_to_numpy(model(inputs, training=False))


def sum_of_log_shares(logits, pieces: np.ndarray) -> float:
    """Returns the log-likelihood of word pieces in nats; equal logits give equal sums.

    Args:
        logits: of shape (pieces, vocabulary size).
        pieces: ids, of shape (pieces,).
    """
    log_shares = keras.ops.convert_to_numpy(keras.ops.log_softmax(logits))
    return math.fsum(log_shares[np.arange(len(pieces)), pieces].tolist())
