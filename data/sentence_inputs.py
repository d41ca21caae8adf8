"""Sentences as what a BERT takes: token ids, and batches in which some word pieces are hidden."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from data import arrays, batches
from data.word_pieces import SPECIAL_TOKENS


@dataclasses.dataclass(frozen=True)
class TokenDropout:
    """Which word pieces of a training sentence are hidden: others in each epoch.

    Attributes:
        share: share of the word pieces, in [0, 1).
        mask_id: what stands in their place.
    """

    share: float
    mask_id: int


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
    """What `encode` makes of each split's sentences, and the labels, both by split.

    Args:
        splits: as in `sentences.Sentences.splits`.
        preprocessor: as for `encode`.
    """
    inputs = {name: encode(texts, preprocessor) for name, (texts, _) in splits.items()}
    return inputs, {name: labels for name, (_, labels) in splits.items()}


def naive_bayes_evidence(
    inputs: dict[str, np.ndarray], labels: np.ndarray, tokenizer, num_classes: int
) -> np.ndarray:
    """What each word piece says of the classes: Bernoulli naive Bayes, one added to each count.

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


def training_data(
    inputs: dict[str, np.ndarray],
    labels: np.ndarray,
    dropped: TokenDropout,
    *,
    seed: int,
    batch_size: int,
    batches_per_epoch: int | None = None,
    first_batch: int = 0,
):
    """Endless global batches, shuffled anew in each epoch, some word pieces hidden.

    Which pieces are hidden depends on (seed, epoch, example) alone.

    Args:
        inputs: what `encode` returned, int32 of shape (sentences, length).
        labels: int32 of shape (sentences,).
        dropped: which pieces are hidden; [CLS], [SEP] and padding are not.
        seed: the run's seed.
        batch_size: examples of a global batch.
        batches_per_epoch: where an epoch ends, see `batches.training_batches`.
        first_batch: the batch of the run that comes first: a resumed run starts there.

    Returns:
        A `tf.data.Dataset` of (inputs, labels, weights of one).
    """
    gather = arrays.gather(inputs, labels)
    stream = batches.stream_seed(seed, "token dropout")
    place = tf.range(inputs["token_ids"].shape[1], dtype=tf.int64)[None, :]

    def make_batch(indices, epoch):
        x, y, weights = gather(indices, epoch)
        ids, filled = x["token_ids"], x["padding_mask"]
        count = tf.cast(tf.reduce_sum(filled, axis=1, keepdims=True), tf.int64)
        is_word = (place > 0) & (place < count - 1)
        hidden = batches.uniform(stream, epoch, indices[:, None], place) < dropped.share
        ids = tf.where(is_word & hidden, dropped.mask_id, ids)
        return {**x, "token_ids": ids}, y, weights

    return batches.training_batches(
        len(labels),
        batch_size,
        seed,
        make_batch,
        batches_per_epoch=batches_per_epoch,
        first_batch=first_batch,
    )
