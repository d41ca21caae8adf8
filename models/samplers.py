"""Chooses the tokens that KerasNLP's `generate()` writes: draws, and the search with beams."""

import functools
import inspect
import math
from collections.abc import Sequence

import keras_nlp
import numpy as np
import tensorflow as tf

from data import batches

# A lower temperature takes the likeliest token: logits that are divided by it may overflow.
COLDEST = 1e-6
MOST_SAMPLES = 1000  # of a prompt; they are drawn in one batch


class _Restricted:
    """Leaves out ids that no token has (a preset's table may have more rows, or gaps), and repeats.

    Args:
        repetition_penalty: see `lowered()`.
        no_repeat_ngram_size: see `would_repeat()`; 0 allows all n-grams.
    """

    ids: np.ndarray | None = None  # those that tokens have; None for all
    num_samples = 1  # texts of each prompt, which are consecutive rows of a batch

    def __init__(self, repetition_penalty: float = 1.0, no_repeat_ngram_size: int = 0):
        super().__init__()
        self.repetition_penalty = repetition_penalty
        self.no_repeat_ngram_size = no_repeat_ngram_size

    def of_tokens(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns logits of shape (texts, ids), -inf where no token of the tokenizer has the id."""
        if self.ids is None:
            return logits
        is_token = np.isin(np.arange(logits.shape[-1]), self.ids)
        return logits if is_token.all() else tf.where(is_token, logits, -np.inf)

    def without_repetition(
        self, scores: tf.Tensor, written: tf.Tensor, index: tf.Tensor, ends: Sequence[int]
    ) -> tf.Tensor:
        """Lowers the scores of tokens that a text has, and forbids n-grams that it has, with -inf.

        Args:
            scores: logits or log probabilities of the next tokens, float32 of shape (texts, ids).
            written: token ids of shape (texts, length).
            index: how many of them a text has, its prompt included; a scalar.
            ends: the tokens that end a text, which stay as they are.
        """
        size, index = scores.shape[-1], tf.cast(index, tf.int32)
        may_change = ~np.isin(np.arange(size), ends)
        if self.repetition_penalty != 1:
            is_written = tf.range(written.shape[1]) < index
            seen = _marked(written, is_written & tf.ones_like(written, tf.bool), size)
            scores = tf.where(seen & may_change, self.lowered(scores), scores)
        if 0 < self.no_repeat_ngram_size <= written.shape[1]:
            repeats = _marked(written, self.would_repeat(written, index), size)
            scores = tf.where(repeats & may_change, -np.inf, scores)
        return scores

    def lowered(self, scores: tf.Tensor) -> tf.Tensor:
        """Returns the scores of tokens that a text has (Keskar et al., CTRL, arXiv 1909.05858).

        Positive ones are divided by the penalty and negative ones multiplied, as in `transformers`.
        """
        penalty = self.repetition_penalty
        return tf.where(scores > 0, scores / penalty, scores * penalty)

    def would_repeat(self, written: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """Marks tokens that, written once more, would repeat an n-gram of the text.

        These are the ones that follow tokens which equal the last n - 1.

        Returns:
            Booleans of the shape of `written`.
        """
        before, length = self.no_repeat_ngram_size - 1, written.shape[1]
        places = tf.range(before, length)
        follows = (places < index) & tf.ones_like(written[:, before:], tf.bool)
        for place in range(before):
            last = tf.gather(written, tf.maximum(index - before + place, 0), axis=1)
            follows &= written[:, place : length - before + place] == last[:, None]
        return tf.pad(follows, [[0, 0], [before, 0]])


def _marked(tokens: tf.Tensor, chosen: tf.Tensor, size: int) -> tf.Tensor:
    """Returns booleans of shape (texts, size), true for the ids of the chosen tokens of a text."""
    columns = tf.where(chosen, tf.cast(tokens, tf.int32), size)  # one more for all others
    rows = tf.range(tf.shape(tokens)[0])[:, None] + tf.zeros_like(columns)
    shape = [tf.shape(tokens)[0], size + 1]
    counts = tf.scatter_nd(tf.stack([rows, columns], axis=-1), tf.ones_like(columns), shape)
    return counts[:, :size] > 0


class Sampler(_Restricted, keras_nlp.samplers.GreedySampler):
    """Draws tokens so that a text does not depend on the others in its batch.

    KerasNLP's samplers draw for a whole batch from one stream. Here the largest of logits plus
    Gumbel noise is taken, which draws from their softmax (Gumbel, 1954); the noise is a function of
    the seed, the prompt, the number of the sample, the position and the token.

    Args:
        temperature: divides the logits; 0, and less than `COLDEST`, takes the likeliest token.
        top_k: draw among the K likeliest tokens; None among all.
        top_p: draw among the likeliest tokens whose probabilities add up to P; 1 among all.
        seed: decides the draws.
        num_samples: texts of each prompt. The first one is the text that is drawn alone.
        **repetition: `repetition_penalty` and `no_repeat_ngram_size`, see `_Restricted`.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        num_samples: int = 1,
        **repetition,
    ):
        super().__init__(**repetition)
        self.scale = temperature if temperature >= COLDEST else 0.0
        self.top_k, self.top_p = top_k, top_p
        self.num_samples = num_samples
        self.noise_seed = batches.stream_seed(seed, "sampling")
        self.keys: tf.Tensor | None = None  # of the prompts that an encoder reads, see `draw_by`

    def __call__(self, next, prompt, *arguments, mask=None, **named):  # noqa: A002
        """Draws until all texts have ended; see `keras_nlp.samplers.Sampler`."""
        keys = self.keys
        if keys is None:
            keys = self.keys_of(prompt, tf.ones_like(prompt) if mask is None else mask)
        ends = named.get("stop_token_ids") or ()

        def drawn(prompt, cache, index):
            logits, states, cache = next(prompt, cache, index)
            logits = self.of_tokens(tf.cast(logits, tf.float32))
            logits = self.without_repetition(logits, prompt, index, ends)
            if self.scale > 0:
                logits = self.with_noise(logits, index, keys)
            return logits, states, cache

        return super().__call__(drawn, prompt, *arguments, mask=mask, **named)

    def keys_of(self, prompts: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        """Returns a number for each text to draw, by its prompt's tokens and the sample's number.

        Args:
            prompts: token ids of shape (texts, length), each prompt once per sample.
            mask: which of them are the prompt's, of the same shape.

        Returns:
            int64 of shape (texts,).
        """
        tokens = tf.cast(prompts, tf.int64)
        places = tf.range(tf.shape(tokens, tf.int64)[1])
        hashed = batches.uniform(self.noise_seed, places, tokens) * 2.0**24
        prompt = tf.reduce_sum(tf.cast(hashed, tf.int64) * tf.cast(mask, tf.int64), axis=1)
        sample = tf.range(tf.shape(tokens, tf.int64)[0]) % self.num_samples
        return prompt + sample * 2**48  # a prompt's number is smaller

    def with_noise(self, logits: tf.Tensor, index: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        """Returns logits whose largest one is the token that is drawn.

        Args:
            logits: float32 of shape (texts, tokens).
            index: the position, a scalar.
            keys: of the texts, int64 of shape (texts,).
        """
        size, logits = logits.shape[-1], logits / self.scale
        if self.top_k is not None and self.top_k < size:
            smallest = tf.math.top_k(logits, self.top_k).values[:, -1:]
            logits = tf.where(logits < smallest, -np.inf, logits)
        if self.top_p < 1:
            ordered = tf.sort(logits, direction="DESCENDING")
            shares = tf.nn.softmax(ordered)
            kept = tf.cumsum(shares, axis=1, exclusive=True) < self.top_p
            smallest = tf.reduce_min(tf.where(kept, ordered, np.inf), axis=1, keepdims=True)
            logits = tf.where(logits < smallest, -np.inf, logits)
        place = tf.cast(index, tf.int64)
        uniform = batches.uniform(self.noise_seed, keys[:, None], place, tf.range(size))
        # In (0, 1), so that the noise is finite: the sum alone is rounded to 1 at times.
        uniform = tf.minimum(uniform + 2.0**-25, 1 - 2.0**-24)
        return logits - tf.math.log(-tf.math.log(uniform))


class BeamSearch(_Restricted, keras_nlp.samplers.Sampler):
    """Keeps several beginnings of each text, the likeliest ones, and returns the best text.

    Unlike KerasNLP's BeamSampler it leaves a beginning that has ended as it is: that one adds
    tokens, and their probabilities, until each beginning of each text in the batch has ended. The
    best text is the one with the highest mean of the logarithms of its tokens' probabilities, the
    usual choice (Wu et al., arXiv 1609.08144, section 7, with alpha = 1): their sum prefers short
    texts. KerasNLP's also takes several times as long on a CPU: it gathers caches number by number.

    Args:
        num_beams: beginnings of each text; 1 always takes the likeliest token.
        **repetition: `repetition_penalty` and `no_repeat_ngram_size`, see `_Restricted`.
    """

    def __init__(self, num_beams: int, **repetition):
        super().__init__(**repetition)
        self.num_beams = num_beams

    def __call__(  # noqa: D417
        self,
        next,  # noqa: A002
        prompt,
        cache,
        index,
        mask,
        stop_token_ids,
        hidden_states=None,
        model=None,
    ):
        """Searches until all beginnings have ended; see `keras_nlp.samplers.Sampler`.

        Args:
            mask: which tokens of `prompt` are given: those before `index`, in each text.
        """
        count, beams, length = tf.shape(prompt)[0], self.num_beams, prompt.shape[1]
        texts = tf.repeat(tf.range(count), beams)  # of each beginning
        ids, cache = tf.nest.map_structure(lambda rows: tf.gather(rows, texts), (prompt, cache))
        is_new = tf.range(length) >= index
        totals = tf.where(tf.range(beams) == 0, 0.0, [[-np.inf]]) + tf.zeros([count, 1])

        def has_ended(ids: tf.Tensor) -> tf.Tensor:
            return tf.reduce_any(_is_one_of(ids, stop_token_ids) & is_new, axis=-1)

        def has_unfinished(ids, cache, totals, place):
            return ~tf.reduce_all(has_ended(ids))

        def add_token(ids, cache, totals, place):
            logits, _, cache = next(ids, cache, place)
            after = tf.nn.log_softmax(self.of_tokens(tf.cast(logits, tf.float32)))
            after = self.without_repetition(after, ids, place, stop_token_ids)
            size = after.shape[1]
            stays = tf.where(tf.range(size) == stop_token_ids[0], 0.0, -np.inf)
            after = tf.where(has_ended(ids)[:, None], stays, after)
            candidates = totals[..., None] + tf.reshape(after, [count, beams, size])
            totals, best = tf.math.top_k(tf.reshape(candidates, [count, beams * size]), beams)
            kept = tf.reshape(tf.range(count)[:, None] * beams + best // size, [-1])
            ids, cache = tf.nest.map_structure(
                lambda rows: tf.ensure_shape(tf.gather(rows, kept), rows.shape), (ids, cache)
            )
            tokens = tf.cast(tf.reshape(best % size, [-1, 1]), ids.dtype)
            return tf.where(tf.range(length) == place, tokens, ids), cache, totals, place + 1

        place = tf.cast(index, tf.int32)
        ids, _, totals, _ = tf.while_loop(
            has_unfinished,
            add_token,
            (ids, cache, totals, place),
            maximum_iterations=length - place,
        )
        is_end = _is_one_of(ids, stop_token_ids) & is_new
        is_counted = is_new & (tf.cumsum(tf.cast(is_end, tf.int32), axis=1, exclusive=True) == 0)
        counts = tf.reduce_sum(tf.cast(is_counted, tf.float32), axis=1)
        scores = totals / tf.maximum(tf.reshape(counts, [count, beams]), 1)
        return tf.gather(ids, tf.range(count) * beams + tf.argmax(scores, 1, tf.int32))


def _is_one_of(tokens: tf.Tensor, wanted: Sequence[int]) -> tf.Tensor:
    return tf.reduce_any(tokens[..., None] == tf.constant(wanted, tokens.dtype), axis=-1)


def repetition_problems(repetition_penalty: float, no_repeat_ngram_size: int) -> list[str]:
    """Returns a line for each option of `_Restricted` that is out of range."""
    problems = []
    if not 0 < repetition_penalty < math.inf:
        problems.append(f"--repetition-penalty {repetition_penalty}: must be in (0, inf)")
    if no_repeat_ngram_size < 0 or no_repeat_ngram_size == 1:
        problems.append(f"--no-repeat-ngram-size {no_repeat_ngram_size}: must be 0 or at least 2")
    return problems


def sampling_problems(
    temperature: float, top_k: int, top_p: float, num_samples: int = 1
) -> list[str]:
    """Returns a line for each option of a `Sampler` that is out of range; `top_k` 0 is for all."""
    problems = []
    if not 0 <= temperature < math.inf:
        problems.append(f"--temperature {temperature}: must be in [0, inf)")
    if top_k < 0:
        problems.append(f"--top-k {top_k}: must be at least 0")
    if not 0 < top_p <= 1:
        problems.append(f"--top-p {top_p}: must be in (0, 1]")
    if not 1 <= num_samples <= MOST_SAMPLES:
        problems.append(f"--num-samples {num_samples}: must be in [1, {MOST_SAMPLES}]")
    elif num_samples > 1 and (0 <= temperature < COLDEST or top_k == 1):
        cause = f"--top-k {top_k}" if top_k == 1 else f"--temperature {temperature}"
        remedy = "a larger one" if top_k == 1 else "a higher one, such as 0.8"
        problems.append(
            f"--num-samples {num_samples}: all would be equal, since {cause} takes the most likely "
            f"token; pass {remedy}"
        )
    return problems


def repeat(prompts: Sequence, sampler: Sampler | BeamSearch) -> list:
    """Returns each prompt once per sample, as a sampler expects them."""
    return [prompt for prompt in prompts for _ in range(sampler.num_samples)]


def by_prompt(texts: Sequence[str], num_samples: int) -> list[list[dict]]:
    """Returns the answers of a recipe's `predict()`: the texts of each prompt.

    Args:
        texts: those of the first prompt, then those of the second, and so on.
        num_samples: texts of each prompt.
    """
    starts = range(0, len(texts), num_samples)
    return [[{"text": text} for text in texts[at : at + num_samples]] for at in starts]


def _repeat_encoded(task: keras_nlp.models.Seq2SeqLM) -> None:
    """Repeats what the encoder made for each beginning, where the cache does not hold it.

    T5Gemma's `generate_step()` keeps the encoder's outputs apart; BART's and T5's are in the cache.
    """
    stock = task.call_decoder_with_cache
    if "encoder_output" not in inspect.signature(stock).parameters:
        return

    def call_decoder_with_cache(*, decoder_token_ids, encoder_output, encoder_padding_mask, **more):
        beams = tf.shape(decoder_token_ids)[0] // tf.shape(encoder_output)[0]
        return stock(
            decoder_token_ids=decoder_token_ids,
            encoder_output=tf.repeat(encoder_output, beams, axis=0),
            encoder_padding_mask=tf.repeat(encoder_padding_mask, beams, axis=0),
            **more,
        )

    task.call_decoder_with_cache = call_decoder_with_cache


def draw_by(task: keras_nlp.models.CausalLM, sampler: Sampler | BeamSearch) -> None:
    """Makes the model's own `generate()` draw tokens by a sampler.

    Not by `compile()`, which would replace the optimizer of a model in training.

    Args:
        task: a causal language model, or an encoder-decoder.
        sampler: how tokens are drawn.
    """
    if task.__dict__.get("sampler") is sampler:
        return
    task.sampler, task.generate_function = sampler, None
    task.jit_compile = bool(tf.config.list_logical_devices("GPU"))
    for replaced in ("generate_step", "call_decoder_with_cache"):  # for another sampler
        task.__dict__.pop(replaced, None)
    if isinstance(sampler, BeamSearch):
        _repeat_encoded(task)
    if isinstance(task, keras_nlp.models.Seq2SeqLM) and isinstance(sampler, Sampler):
        # The keys are those of the prompts: its responses all begin with the same token.
        step = functools.partial(type(task).generate_step, task)

        def generate_step(inputs, stop_token_ids=None):
            prompts = inputs["encoder_token_ids"], inputs["encoder_padding_mask"]
            sampler.keys = sampler.keys_of(*prompts)
            return step(inputs, stop_token_ids=stop_token_ids)

        task.generate_step = generate_step
    stock = task.make_generate_function()

    def generate_function(*arguments, **named):
        # Families that take images return None for them beside a text.
        return {k: v for k, v in stock(*arguments, **named).items() if v is not None}

    task.generate_function = generate_function
