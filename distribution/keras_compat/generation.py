"""Patches KerasHub's families while a model generates: `patch_generation_for`."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from distribution.keras_compat.custom_gradients import free_custom_gradients
from distribution.keras_compat.replacing import replaced


@contextlib.contextmanager
def patch_generation_for(length: int) -> Iterator[None]:
    """Makes `generate()` of KerasHub's families continue a text as a forward pass of it would.

    Args:
        length: of the rows, in tokens: prompts and what is generated.
    """
    with (
        integers_of_32_bits(),
        free_custom_gradients(),  # those of tf.nn.silu
        slide_windows_while_generating(),
        read_prompts_once(),
        rotate_by_length(length),
        rotate_by_place(),
    ):
        yield


@contextlib.contextmanager
def integers_of_32_bits() -> Iterator[None]:
    """Makes `keras.ops.arange()` of Python integers int32 where floatx is float64, too.

    Breaks: with floatx float64 they are int64, which the sliding windows of KerasHub's Mistral and
    Mixtral add to the int32 position of `generate()`: a TypeError. Does: sets floatx to float32;
    layers keep the dtype that they were made with. Generate within it.
    """
    floatx = keras.config.floatx()
    keras.config.set_floatx("float32")
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)


@contextlib.contextmanager
def slide_windows_while_generating() -> Iterator[None]:
    """Makes KerasHub's Qwen and Qwen MoE generate with sliding windows.

    Breaks: their attention asks `if cache_update_index`, which is a tensor in `generate()`: an
    OperatorNotAllowedInGraphError (no thread known). Does: computes it by the function of Qwen 3,
    which asks `is not None` and is the same otherwise. Generate within it.
    """
    from keras_hub.src.models.qwen import qwen_attention
    from keras_hub.src.models.qwen3 import qwen3_attention
    from keras_hub.src.models.qwen_moe import qwen_moe_attention

    def make(stock):
        def _compute_attention(self, *arguments, **named):
            if not self.use_sliding_window_attention:
                return stock(self, *arguments, **named)
            named.pop("training", None)  # Qwen MoE's, which does not use it
            return qwen3_attention.Qwen3Attention._compute_attention(self, *arguments, **named)

        return _compute_attention

    with (
        replaced(qwen_attention.QwenAttention, "_compute_attention", make),
        replaced(qwen_moe_attention.QwenMoeAttention, "_compute_attention", make),
    ):
        yield


@contextlib.contextmanager
def read_prompts_once() -> Iterator[None]:
    """Makes KerasHub's Qwen 3.5 and Qwen 3.5 MoE generate with the states of their linear layers.

    Breaks: `generate()` reads the whole rows, then the tokens from the end of the shortest prompt
    on again. Keys are replaced, but these layers carry a state along a row, which then has tokens
    twice; and it fades at each padding, since their rule ignores its mask (no thread known). Does:
    reads that end but once, and lets padding change nothing. Generate within it.
    """
    import keras_hub
    from keras_hub.src.models.qwen3_5 import qwen3_5_gated_delta_net as linear

    def make_rule(stock):
        def _chunk_gated_delta_rule(*arguments, g, beta, padding_mask=None, **named):
            if padding_mask is not None:
                is_text = tf.cast(padding_mask, tf.bool)[:, :, None]
                g, beta = (tf.where(is_text, part, tf.zeros_like(part)) for part in (g, beta))
            return stock(*arguments, g=g, beta=beta, padding_mask=padding_mask, **named)

        return _chunk_gated_delta_rule

    def make(stock):
        def _build_cache(self, token_ids, padding_mask, **named):
            lengths = tf.reduce_sum(tf.cast(padding_mask, tf.int32), axis=1)
            is_read_later = tf.range(tf.shape(token_ids)[1]) >= tf.reduce_min(lengths) - 1
            padding_mask = tf.where(is_read_later, tf.zeros_like(padding_mask), padding_mask)
            return stock(self, token_ids, padding_mask, **named)

        return _build_cache

    kinds = (keras_hub.models.Qwen3_5CausalLM, keras_hub.models.Qwen3_5MoeCausalLM)
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(linear, "_chunk_gated_delta_rule", make_rule))
        for kind in kinds:
            stack.enter_context(replaced(kind, "_build_cache", make))
        yield


def rotate_by_length(length: int) -> contextlib.AbstractContextManager:
    """Makes KerasHub's Phi-3 rotate all places of a generated text by the same factors.

    Breaks: scaling of the type "su" has other factors beyond the length of the pretraining.
    `generate()` reads prompts in rows as long as the text may become, but each new token by its own
    place: queries and keys are rotated by different factors (no thread known). Does: chooses by
    the length of the rows, as in training. Generate within it.

    Args:
        length: of the rows, in tokens.
    """
    from keras_hub.src.models.phi3.phi3_rotary_embedding import Phi3SuScaledRotaryEmbedding

    def make(stock):
        def _compute_cos_sin_embedding(self, inputs, start_index=0, positions=None):
            if positions is None:
                positions = self._compute_positions(inputs, start_index)
            return stock(self, inputs, length - keras.ops.shape(inputs)[1], positions)

        return _compute_cos_sin_embedding

    return replaced(Phi3SuScaledRotaryEmbedding, "_compute_cos_sin_embedding", make)


@contextlib.contextmanager
def rotate_by_place() -> Iterator[None]:
    """Makes KerasHub's GPT-NeoX rotate the query of a generated token by its place.

    Breaks: it is rotated as the first one of a text (keras-hub#2870, open). Does: rotates it
    further, by where its row begins in the cache. Generate within it.
    """
    from keras_hub.src.models.gpt_neo_x.gpt_neo_x_attention import GPTNeoXAttention

    begin = None

    def make_call(stock):
        def call(self, *arguments, cache_update_index=None, **named):
            nonlocal begin
            begin = cache_update_index
            return stock(self, *arguments, cache_update_index=cache_update_index, **named)

        return call

    def make(stock):
        def _compute_attention(self, query, *arguments, **named):
            if begin is not None:
                rotated, rest = query[..., : self.rotary_dim], query[..., self.rotary_dim :]
                places = tf.fill([keras.ops.shape(query)[1]], begin)
                rotated = self.rotary_embedding_layer(rotated, positions=places)
                query = tf.concat([rotated, rest], axis=-1)
            return stock(self, query, *arguments, **named)

        return _compute_attention

    with (
        replaced(GPTNeoXAttention, "call", make_call),
        replaced(GPTNeoXAttention, "_compute_attention", make),
    ):
        yield
