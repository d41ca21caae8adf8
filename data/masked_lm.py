"""Masks token ids for masked language modelling: sequences in, batches with masks out."""

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from data import batches
from data.arrays import as_tensor
from data.baselines import SMOOTHING, most_frequent_accuracy, unigram_cross_entropy
from data.errors import DataError
from data.sequences import in_blocks
from data.word_pieces import SpecialTokens, continuations

NOT_CHOSEN = 2.0  # the score of a position that is not chosen; random numbers are below 1
# Draws the masks of validation and test, so that runs of all seeds are tested on the same ones.
EVALUATION_SEED = 0


@dataclasses.dataclass(frozen=True)
class Masking:
    """Describes how to choose and replace positions (Devlin et al., arXiv 1810.04805, section 3.1).

    Attributes:
        special: ids that are never chosen and never inserted.
        vocabulary_size: random replacements are drawn from [0, vocabulary_size).
        probability: share of an example's tokens that are predicted.
        max_predictions: slots for masked positions per example; empty slots have weight zero.
        seed: the run's seed, for the order and the masks of training.
        continuations: ids of the pieces that continue a word, to choose whole words; None to
            choose pieces.
        inputs: the names of the model's inputs.
        initial_probability: that share in the first step of training, from which it changes
            linearly to `probability`; None for no change.
    """

    special: SpecialTokens
    vocabulary_size: int
    probability: float
    max_predictions: int
    seed: int
    continuations: tuple[int, ...] | None = None
    inputs: tuple[str, ...] = ("token_ids", "segment_ids", "padding_mask", "mask_positions")
    initial_probability: float | None = None

    @classmethod
    def of(
        cls,
        tokenizer,
        *,
        probability: float,
        sequence_length: int,
        seed: int,
        whole_words: bool = False,
        inputs: tuple[str, ...] | None = None,
        initial_probability: float | None = None,
    ) -> "Masking":
        """Returns a masking with slots for the predictions of a full sequence.

        Args:
            tokenizer: of KerasNLP, of a family with a `MaskedLM`.
            probability: share of an example's tokens that are predicted.
            sequence_length: tokens of a sequence.
            seed: the run's seed.
            whole_words: whether to choose whole words.
            inputs: the names of the model's inputs; None for BERT's.
            initial_probability: `probability` in the first step of training; None for no change.
        """
        most = max(probability, initial_probability or 0.0)
        return cls(
            special=SpecialTokens.of(tokenizer),
            vocabulary_size=tokenizer.vocabulary_size(),
            probability=probability,
            max_predictions=most_predictions(most, sequence_length),
            seed=seed,
            continuations=continuations(tokenizer) if whole_words else None,
            inputs=inputs or cls.inputs,
            initial_probability=initial_probability,
        )

    @property
    def mean_predictions(self) -> float:
        """Returns the slots of an example that are filled on average, over the whole training."""
        first, last = self.initial_probability or self.probability, self.probability
        return self.max_predictions * (first + last) / 2 / max(first, last)

    def describe(self) -> str:
        """Returns a line of the plan."""
        first, last = self.initial_probability or self.probability, self.probability
        if first == last:
            return f"{last:.0%} of the tokens"
        return f"{first:.0%} of the tokens in the first step, {last:.0%} in the last"


def most_predictions(probability: float, sequence_length: int) -> int:
    """Returns the number of masked positions in a full sequence."""
    return max(1, int(np.rint(probability * sequence_length)))


def mask_batch(
    token_ids: tf.Tensor,
    indices: tf.Tensor,
    epoch: tf.Tensor,
    masking: Masking,
    split: str,
    probability: tf.Tensor | None = None,
) -> tuple:
    """Chooses positions; replaces 80 % by [MASK], 10 % by a random piece, and keeps 10 %.

    The choice depends on (seed, epoch, example) alone. Each piece of a whole word is replaced
    independently and predicted by itself.

    Args:
        token_ids: int32 of shape (batch, length).
        indices: int64 of shape (batch,), the numbers of these sequences.
        epoch: int64 scalar.
        masking: how to mask.
        split: "train", "valid" or "test": each has different masks.
        probability: share of the tokens to predict, float scalar; None for that of `masking`.

    Returns:
        (x, labels, weights) for a `MaskedLM`: x has those of `masking.inputs`, int32
        `token_ids`, `segment_ids` and `padding_mask` of shape (batch, length) and `mask_positions`
        of shape (batch, max_predictions); labels are int32 and weights float32 of that shape.
    """
    length = token_ids.shape[1]
    run_seed = masking.seed if split == "train" else EVALUATION_SEED
    seed = functools.partial(batches.stream_seed, run_seed)
    place = tf.range(length, dtype=tf.int64)[None, :]
    example = indices[:, None]

    eligible = tf.ones_like(token_ids, tf.bool)
    for token in masking.special.all():
        eligible &= token_ids != token
    padding_mask = tf.cast(token_ids != masking.special.pad, tf.int32)

    # Chooses the eligible positions with the smallest random numbers; ineligible ones come last.
    # Ties (24 bits) go to the first position.
    score = batches.uniform(seed(f"{split} places"), epoch, example, place)
    score = tf.where(eligible, score, NOT_CHOSEN)
    tokens = tf.reduce_sum(padding_mask, axis=1, keepdims=True)
    share = masking.probability if probability is None else tf.cast(probability, tf.float32)
    wanted = tf.round(share * tf.cast(tokens, tf.float32))
    wanted = tf.clip_by_value(tf.cast(wanted, tf.int32), 1, masking.max_predictions)
    if masking.continuations is not None:
        score = keep_whole_words(score, token_ids, wanted, masking)
    negated, positions = tf.math.top_k(-score, masking.max_predictions)
    place_number = tf.range(masking.max_predictions)[None, :]
    chosen = (negated > -NOT_CHOSEN) & (place_number < wanted)

    labels = tf.gather(token_ids, positions, batch_dims=1)
    place = tf.cast(positions, tf.int64)
    kind = batches.uniform(seed(f"{split} kinds"), epoch, example, place)
    ordinary = np.setdiff1d(np.arange(masking.vocabulary_size), masking.special.all())
    draw = batches.uniform(seed(f"{split} pieces"), epoch, example, place)
    draw = tf.cast(draw * float(len(ordinary)), tf.int32)
    random_piece = tf.gather(tf.constant(ordinary, tf.int32), draw)
    replaced = tf.where(
        kind < 0.8, masking.special.mask, tf.where(kind < 0.9, random_piece, labels)
    )
    replaced = tf.where(chosen, replaced, labels)

    rows = tf.repeat(tf.range(tf.shape(token_ids)[0]), masking.max_predictions)
    where = tf.stack([rows, tf.reshape(positions, [-1])], axis=1)
    masked = tf.tensor_scatter_nd_update(token_ids, where, tf.reshape(replaced, [-1]))
    x = {
        "token_ids": masked,
        "segment_ids": tf.zeros_like(token_ids),
        # int32, not bool: Keras averages the first batch over the replicas to learn its shape.
        "padding_mask": padding_mask,
        "mask_positions": tf.where(chosen, positions, 0),
    }
    x = {name: x[name] for name in masking.inputs}
    return x, tf.where(chosen, labels, 0), tf.cast(chosen, tf.float32)


def keep_whole_words(
    score: tf.Tensor, token_ids: tf.Tensor, wanted: tf.Tensor, masking: Masking
) -> tf.Tensor:
    """Chooses words instead of positions, by the rule of Google's BERT.

    The rule (github.com/google-research/bert, `create_masked_lm_predictions` with
    `do_whole_word_mask`): visit words in random order; skip one that would exceed the number of
    predictions; stop when the number is reached. So words of many pieces are chosen a little less
    often, and a sequence may get fewer predictions than wanted. In this implementation a special
    token ends a word, and a word that is cut at a sequence's edge counts as a word.

    Args:
        score: float32 of shape (batch, length), a random number in [0, 1) per position;
            `NOT_CHOSEN` for ineligible ones. A word's number is that of its first piece.
        token_ids: int32 of shape (batch, length).
        wanted: int32 of shape (batch, 1), the largest number of pieces to choose.
        masking: its `continuations` are used.

    Returns:
        float32 of shape (batch, length): the score of each position's word, `NOT_CHOSEN` if the
        word is not chosen. Sorting by it keeps the pieces of a word together.
    """
    shape = tf.shape(score)
    eligible = score < NOT_CHOSEN
    follows = np.zeros(masking.vocabulary_size, bool)
    follows[list(masking.continuations or ())] = True
    after_a_piece = tf.pad(eligible[:, :-1], [[0, 0], [1, 0]])
    is_first = eligible & ~(tf.gather(tf.constant(follows), token_ids) & after_a_piece)

    # Numbers the words of each sequence; computes their number of pieces and their score.
    number = tf.maximum(tf.cumsum(tf.cast(is_first, tf.int32), axis=1) - 1, 0)
    segment = tf.range(shape[0])[:, None] * shape[1] + number
    segments = shape[0] * shape[1]
    sizes = tf.math.unsorted_segment_sum(tf.cast(eligible, tf.int32), segment, segments)
    scores = tf.math.unsorted_segment_min(tf.where(is_first, score, NOT_CHOSEN), segment, segments)
    sizes, scores = tf.reshape(sizes, shape), tf.reshape(scores, shape)

    def take(state, size):
        room, _ = state
        fits = (size > 0) & (size <= room)
        return tf.where(fits, room - size, room), fits

    # The smallest scores come first; ties (24 bits) go to the first word.
    order = tf.math.top_k(-scores, score.shape[1]).indices
    sizes_in_order = tf.transpose(tf.gather(sizes, order, batch_dims=1))
    room = wanted[:, 0]
    _, fits = tf.scan(take, sizes_in_order, (room, tf.zeros_like(room, tf.bool)))
    chosen = tf.gather(tf.transpose(fits), tf.argsort(order, axis=1), batch_dims=1)
    is_chosen = eligible & tf.gather(chosen, number, batch_dims=1)
    return tf.where(is_chosen, tf.gather(scores, number, batch_dims=1), NOT_CHOSEN)


def training_data(
    sequences: np.ndarray,
    masking: Masking,
    *,
    batch_size: int,
    batches_per_epoch: int | None = None,
    first_batch: int = 0,
    steps: int = 1,
    batches_per_step: int = 1,
) -> tf.data.Dataset:
    """Yields endless global batches, shuffled and masked differently in each epoch.

    Args:
        sequences: int32 token ids of shape (sequences, length).
        masking: how to mask; its seed also shuffles.
        batch_size: sequences of a global batch.
        batches_per_epoch: batches of an epoch, see `batches.training_batches`.
        first_batch: number of the batch to start at, for a resumed run.
        steps: of the whole run; the share of predicted tokens changes, from that of
            `masking.initial_probability` in the first one, until the last one.
        batches_per_step: batches that one step accumulates.

    Returns:
        Batches of `mask_batch`.
    """
    table = as_tensor(sequences)

    def make_batch(indices, epoch, position):
        probability = None
        if masking.initial_probability is not None:
            step = tf.cast(position // (batch_size * batches_per_step), tf.float64)
            rest = 1.0 - tf.minimum(step / max(1, steps - 1), 1.0)
            change = masking.initial_probability - masking.probability
            probability = masking.probability + change * rest
        token_ids = tf.cast(tf.gather(table, indices), tf.int32)
        return mask_batch(token_ids, indices, epoch, masking, "train", probability)

    return batches.training_batches(
        len(sequences),
        batch_size,
        masking.seed,
        make_batch,
        batches_per_epoch=batches_per_epoch,
        first_batch=first_batch,
        with_position=True,
    )


def evaluation_data(
    sequences: np.ndarray, masking: Masking, *, batch_size: int, split: str
) -> tf.data.Dataset:
    """Yields every sequence once, with masks that never change.

    Args:
        sequences: int32 token ids of shape (sequences, length).
        masking: how to mask; `EVALUATION_SEED` draws the masks.
        batch_size: sequences of a global batch; the last one is padded with sequences of weight
            zero.
        split: "valid" or "test": each has different masks.

    Returns:
        Batches of `mask_batch`.
    """
    table = as_tensor(sequences)

    def make_batch(indices, epoch):
        token_ids = tf.cast(tf.gather(table, indices), tf.int32)
        return mask_batch(token_ids, indices, epoch, masking, split)

    return batches.evaluation_batches(len(sequences), batch_size, make_batch)


def require_predictions(sequences: dict[str, np.ndarray], masking: Masking) -> None:
    """Rejects a split without a token to predict: its loss would be 0, the best possible.

    Args:
        sequences: int32 token ids of shape (sequences, length), by split.
        masking: Its special tokens are never predicted.

    Raises:
        DataError: Names all such splits.
    """
    empty = [split for split, rows in sequences.items() if not _counts(rows, masking).any()]
    if empty:
        raise DataError(
            f"{', '.join(empty)}: no word piece to predict; use more text, longer "
            "sequences, or a vocabulary that fits the text"
        )


def tokens_per_sequence(sequences: np.ndarray, masking: Masking) -> float:
    """Returns the mean number of tokens per sequence, without padding."""
    text = sum(int((block != masking.special.pad).sum()) for block in in_blocks(sequences))
    return text / len(sequences)


def baselines(train: np.ndarray, test: np.ndarray, masking: Masking) -> dict[str, float]:
    """Measures a model without context: an add-0.1 unigram model of the training text.

    Args:
        train: int32 token ids of the training text, any shape.
        test: int32 token ids of the test text, any shape.
        masking: its vocabulary counts, without the special tokens.

    Returns:
        `unigram_cross_entropy` in nats per token, and `most_frequent_accuracy`: the share of test
        tokens that are the training text's most frequent one.
    """
    special = masking.special.all()
    counts = [np.delete(_counts(token_ids, masking), special) for token_ids in (train, test)]
    return {
        "unigram_cross_entropy": unigram_cross_entropy(*counts),
        "most_frequent_accuracy": most_frequent_accuracy(*counts),
    }


def log_frequency(train: np.ndarray, masking: Masking) -> np.ndarray:
    """Returns the logarithm of each word piece's share in a text, 0.1 added to each count.

    Args:
        train: int32 token ids, any shape.
        masking: its vocabulary counts; special tokens, which are never predicted, get the share of
            a piece that does not occur.

    Returns:
        float64 of shape (vocabulary size,); the shares of the pieces that are not special sum to 1.
    """
    counts = _counts(train, masking) + SMOOTHING
    return np.log(counts) - np.log(counts.sum() - SMOOTHING * len(masking.special.all()))


def _counts(token_ids: np.ndarray, masking: Masking) -> np.ndarray:
    """Counts each word piece; special tokens count as if they did not occur."""
    counts = np.zeros(masking.vocabulary_size, np.float64)
    for block in in_blocks(token_ids):
        counts += np.bincount(block.ravel(), minlength=masking.vocabulary_size)
    counts[list(masking.special.all())] = 0
    return counts
