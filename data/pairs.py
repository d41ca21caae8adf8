"""Prompts and responses as the inputs of an encoder and a decoder, encoded once."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from data import arrays, sequences, word_pieces
from data.errors import DataError
from data.live_line import live_line
from data.prompts import Prompts

TextPair = tuple[str, str]
AT_ONCE = 1000  # pairs
LABELS, WEIGHTS = "labels", "weights"


def of_texts(data: Prompts) -> dict[str, list[TextPair]]:
    """Returns the pairs by split, whose prompts are texts.

    Raises:
        DataError: a prompt is the turns of a chat.
    """
    found: dict[str, list[TextPair]] = {}
    for split, pairs in data.splits.items():
        texts = [(prompt, response) for prompt, response in pairs if isinstance(prompt, str)]
        if len(texts) < len(pairs):
            raise DataError(
                f"{data.name}: {len(pairs) - len(texts):,} of {len(pairs):,} prompts of the split "
                f"{split} are chats or have system messages; an encoder reads one text "
                "(recipes.causal_lm trains on chats)"
            )
        found[split] = texts
    return found


def encode(pairs: Sequence[TextPair], preprocessor, prefix: str = "") -> dict[str, np.ndarray]:
    """Encodes pairs as the model's own preprocessor does.

    Args:
        pairs: prompts and responses, both texts.
        preprocessor: a `keras_nlp.models.Seq2SeqLMPreprocessor`.
        prefix: what to write before each prompt.

    Returns:
        `encoder_token_ids` and `encoder_padding_mask` of shape (pairs, prompt length);
        `decoder_token_ids`, `decoder_padding_mask`, `labels` (the next token of each) and `weights`
        (0 where that is padding, or a token that each response begins with, as BART's do) of shape
        (pairs, response length). Integers of 32 bits; masks and weights are 0 or 1, uint8.
    """
    blocks = list(_encoded_blocks(pairs, preprocessor, prefix))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _encoded_blocks(
    pairs: Sequence[TextPair], preprocessor, prefix: str
) -> Iterator[dict[str, np.ndarray]]:
    """Yields what `encode` returns, `AT_ONCE` pairs at a time."""
    given = begins_with(preprocessor) - 1
    with live_line(what="tokenising", total=len(pairs)) as bar:
        for start in range(0, len(pairs), AT_ONCE):
            some = pairs[start : start + AT_ONCE]
            inputs, labels, weights = preprocessor(
                {
                    "encoder_text": [prefix + prompt for prompt, _ in some],
                    "decoder_text": [response for _, response in some],
                }
            )
            encoded = {}
            for name, part in (inputs | {LABELS: labels, WEIGHTS: weights}).items():
                kind = np.uint8 if name == WEIGHTS or name.endswith("mask") else np.int32
                encoded[name] = np.asarray(part).astype(kind)
            encoded[WEIGHTS][:, :given] = 0
            yield encoded
            bar.update(len(some))


def begins_with(preprocessor) -> int:
    """Returns how many tokens `generate()` gives each response: its start, of BART another one."""
    begun = preprocessor.generate_preprocess({"encoder_text": [""], "decoder_text": [""]})
    return int(np.sum(begun["decoder_padding_mask"]))


def encode_once(
    splits: dict[str, list[TextPair]], preprocessor, cache_dir: Path, prefix: str = ""
) -> dict[str, dict[str, np.ndarray]]:
    """Encodes each split as `encode`, or takes it from the cache, from its folder `sequences`."""
    lengths = preprocessor.encoder_sequence_length, preprocessor.decoder_sequence_length
    rules = type(preprocessor).__name__, *lengths, word_pieces.rules_of(preprocessor.tokenizer)

    def of_split(pairs: list[TextPair]) -> dict[str, np.ndarray]:
        made_from = (sequences.sha256_of(pairs), "pairs 2", prefix, rules)
        return sequences.blocks_once(
            cache_dir, made_from, lambda: _encoded_blocks(pairs, preprocessor, prefix), len(pairs)
        )

    return {split: of_split(pairs) for split, pairs in splits.items()}


def lengths(encoded: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the tokens of prompts and responses, by which `data.batches` groups pairs.

    Args:
        encoded: a split that `encode` returned.

    Returns:
        int32 of shape (pairs, 2). Those of prompts are the time steps that the prompts are cut to:
        among the pairs of one number, the responses' tokens decide.
    """
    prompts, responses = encoded["encoder_padding_mask"], encoded["decoder_padding_mask"]
    steps = np.array(arrays.steps_of(prompts.shape[1]))
    cut_to = steps[np.searchsorted(steps, prompts.sum(axis=1, dtype=np.int32))]
    return np.stack([cut_to, responses.sum(axis=1, dtype=np.int32)], axis=1).astype(np.int32)


def make_batch(encoded: dict[str, np.ndarray]) -> Callable:
    """Returns a function from indices to batches, for `data.batches`.

    Args:
        encoded: a split that `encode` returned.

    Returns:
        A function of indices, int64 of shape (batch,), the epoch, and perhaps the largest of
        `lengths`, int32 of shape (2,), after which prompts and responses are cut, to the model's
        inputs, labels and sample weights.
    """
    kept, floatx = (
        {name: arrays.as_tensor(rows) for name, rows in encoded.items()},
        keras.config.floatx(),
    )

    def batch_of(indices, epoch, longest=None):
        batch = {name: tf.gather(rows, indices) for name, rows in kept.items()}
        if longest is not None:
            batch = {
                name: arrays.cut(rows, longest[0 if name.startswith("encoder") else 1])
                for name, rows in batch.items()
            }
        labels, weights = batch.pop(LABELS), tf.cast(batch.pop(WEIGHTS), floatx)
        return {name: tf.cast(part, tf.int32) for name, part in batch.items()}, labels, weights

    return batch_of


def predicted(encoded: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the tokens of a split that are predicted, integers of shape (tokens,)."""
    return encoded[LABELS][encoded[WEIGHTS] == 1]


def cut_notes(encoded: dict[str, np.ndarray], split: str) -> list[str | None]:
    """Returns lines about prompts and responses that fill their sequences, if many do.

    Args:
        encoded: a split that `encode` returned.
        split: its name.
    """
    prompts, responses = encoded["encoder_padding_mask"], encoded["decoder_padding_mask"]
    return [
        sequences.cut_note(prompts, 0, "prompts", split),
        sequences.cut_note(responses, 0, "responses", split, "--response-length"),
    ]
