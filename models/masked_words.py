"""What a masked language model thinks of a text's [MASK]s."""

import re

import keras
import numpy as np

MASK = "[MASK]"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", MASK)  # no fills


def encode(tokenizer, text: str) -> np.ndarray:
    """[CLS], the pieces of the text, [SEP]; int32 of shape (tokens,). `<unk>` becomes [UNK]."""
    ids = [tokenizer.cls_token_id]
    for number, part in enumerate(re.split(r"(?<!\S)<unk>(?!\S)", text)):
        if number:
            ids.append(tokenizer.token_to_id("[UNK]"))
        ids.extend(tokenizer(part))
    return np.asarray([*ids, tokenizer.sep_token_id], np.int32)


def predict(model, tokenizer, token_ids: np.ndarray) -> np.ndarray:
    """Probabilities of all word pieces at each [MASK].

    Args:
        model: a `BertMaskedLM`.
        tokenizer: its tokenizer.
        token_ids: int32 of shape (tokens,).

    Returns:
        float array of shape (masks, vocabulary size); special tokens have probability 0.
    """
    places = np.flatnonzero(token_ids == tokenizer.mask_token_id).astype(np.int32)
    inputs = {
        "token_ids": token_ids[None],
        "segment_ids": np.zeros_like(token_ids)[None],
        "padding_mask": np.ones_like(token_ids)[None],
        "mask_positions": places[None],
    }
    logits = keras.ops.convert_to_numpy(model(inputs, training=False))[0]
    return probabilities(logits, tokenizer)


def probabilities(logits: np.ndarray, tokenizer) -> np.ndarray:
    """Probabilities of all word pieces that are no special tokens.

    Args:
        logits: of shape (masks, vocabulary size).
        tokenizer: the model's.

    Returns:
        float64 of the same shape; special tokens have probability 0.
    """
    logits = logits.astype(np.float64)
    logits[:, [tokenizer.token_to_id(token) for token in SPECIAL]] = -np.inf
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)
