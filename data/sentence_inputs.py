"""Sentences as a BERT takes them: token ids, some of them hidden in training."""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from data import batches
from data.word_pieces import SPECIAL_TOKENS


def encode(sentences: Sequence[str], preprocessor) -> dict[str, np.ndarray]:
    """Turns sentences into what `keras_nlp.models.BertTextClassifier` takes.

    Args:
        sentences: n sentences.
        preprocessor: a `keras_nlp.models.BertTextClassifierPreprocessor`; it cuts sentences that
            are longer than its `sequence_length`.

    Returns:
        `token_ids` ([CLS], word pieces, [SEP], padding), `segment_ids` (zeros) and `padding_mask`
        (1 where there is a token), each int32 of shape (n, length).
    """
    inputs = preprocessor(tf.constant(list(sentences), tf.string))
    # Also the mask, which Keras makes a bool: it averages the first batch over the replicas.
    return {name: np.asarray(value, np.int32) for name, value in inputs.items()}


def encode_splits(splits: dict, preprocessor) -> tuple[dict, dict]:
    """Encodes each split's sentences; returns what `encode` makes, and the labels, by split.

    Args:
        splits: as in `sentences.Sentences.splits`.
        preprocessor: as for `encode`.
    """
    inputs = {name: encode(texts, preprocessor) for name, (texts, _) in splits.items()}
    return inputs, {name: labels for name, (_, labels) in splits.items()}


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
    special = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    counts = np.ones((tokenizer.vocabulary_size(), num_classes))
    for ids, label in zip(inputs["token_ids"], labels, strict=True):
        counts[np.unique(ids), label] += 1
    counts[special] = 1
    log_share = np.log(counts) - np.log(counts.sum(axis=0))
    evidence = log_share - log_share.mean(axis=1, keepdims=True)
    evidence[special] = 0
    return evidence


def hide_word_pieces(share: float, mask_id: int, seed: int) -> Callable:
    """Returns a `change` for `arrays.training_data` that hides word pieces, others in each epoch.

    Which ones depends on (seed, epoch, example) alone.

    Args:
        share: Share of the word pieces that are hidden, in [0, 1); [CLS], [SEP] and padding are
            not.
        mask_id: What they are replaced by.
        seed: The run's seed.
    """
    stream = batches.stream_seed(seed, "token dropout")

    def change(x: dict, indices: tf.Tensor, epoch: tf.Tensor) -> dict:
        ids, filled = x["token_ids"], x["padding_mask"]
        place = tf.range(ids.shape[1], dtype=tf.int64)[None, :]
        count = tf.cast(tf.reduce_sum(filled, axis=1, keepdims=True), tf.int64)
        is_word = (place > 0) & (place < count - 1)
        hidden = batches.uniform(stream, epoch, indices[:, None], place) < share
        return {**x, "token_ids": tf.where(is_word & hidden, mask_id, ids)}

    return change
