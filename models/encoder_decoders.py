"""Encoder-decoder models of KerasNLP (BART, T5, T5Gemma): new ones, presets, generation."""

from collections.abc import Sequence

import keras
import keras_nlp

from data import byte_pairs, word_pieces
from data.errors import DataError
from distribution.keras_compat import generation
from models import decoders, presets, samplers

# The special tokens that BART's tokenizer requires.
BART_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
# Families that take more than two texts, and what.
REFUSED = {
    "BLIP2Seq2SeqLM": "each text needs an image",
    "EdRecSeq2SeqLM": "KerasNLP has no preprocessor for it",
    "MoonshineAudioToText": "it transcribes audio",
    "T5Gemma2Seq2SeqLM": "it takes images beside the text",
}
# Families whose masks overflow in float16, so that all outputs are NaN.
NOT_IN_FLOAT16 = ("T5Seq2SeqLM", "T5GemmaSeq2SeqLM")
# Families whose `generate()` puts no end behind a prompt, while their `fit()` does: none for both.
ENDLESS_PROMPTS = ("T5GemmaSeq2SeqLM",)
# Families whose usual learning rate is higher than that of the others.
RATES = {"T5Seq2SeqLM": 3e-4}


def make_preprocessor(merges: Sequence[str], prompt_length: int, response_length: int):
    """Makes the preprocessor of a new BART, with its tokenizer.

    Args:
        merges: see `data.byte_pairs`.
        prompt_length: tokens of a prompt, special ones included.
        response_length: tokens of a response, special ones included.
    """
    vocabulary = byte_pairs.vocabulary_of(merges, BART_TOKENS)
    tokenizer = keras_nlp.models.BartTokenizer(vocabulary=vocabulary, merges=list(merges))
    preprocessor = keras_nlp.models.BartSeq2SeqLMPreprocessor(
        tokenizer,
        encoder_sequence_length=prompt_length,
        decoder_sequence_length=response_length,
    )
    return _keep_lengths(preprocessor)


def _keep_lengths(preprocessor):
    """Adds the lengths to a preprocessor's saved configuration, where KerasHub 0.32 omits them.

    A model that is loaded without them packs 1,024 tokens, for which it may have no positions.
    """
    stock = preprocessor.get_config
    preprocessor.get_config = lambda: (
        stock()
        | {
            "encoder_sequence_length": preprocessor.encoder_sequence_length,
            "decoder_sequence_length": preprocessor.decoder_sequence_length,
        }
    )
    return preprocessor


def new_task(options, vocabulary_size: int) -> keras_nlp.models.Seq2SeqLM:
    """Makes a BART with random weights and without its preprocessor.

    Args:
        options: with `num_layers` (of the encoder, and of the decoder), `num_heads`, `hidden_dim`,
            `dropout` (None for 0.1), `sequence_length` and `response_length`.
        vocabulary_size: number of tokens.
    """
    backbone = keras_nlp.models.BartBackbone(
        vocabulary_size=vocabulary_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        hidden_dim=options.hidden_dim,
        intermediate_dim=4 * options.hidden_dim,
        dropout=0.1 if options.dropout is None else options.dropout,
        max_sequence_length=max(options.sequence_length, options.response_length),
    )
    decoders.draw_kernels(backbone)
    return keras_nlp.models.BartSeq2SeqLM(backbone=backbone)


def load_preprocessor(preset: str, prompt_length: int, response_length: int):
    """Loads a preset's preprocessor, with its tokenizer.

    Args:
        preset: a name, a handle, or a folder.
        prompt_length: tokens of a prompt, special ones included.
        response_length: tokens of a response, special ones included.

    Raises:
        DataError: the preset cannot be loaded, is of another task, takes more than texts, or fails
            in this precision.
    """
    models = keras_nlp.models
    presets.require_task(models.Seq2SeqLM, preset)
    preprocessor = presets.load(
        models.Seq2SeqLMPreprocessor,
        preset,
        encoder_sequence_length=prompt_length,
        decoder_sequence_length=response_length,
    )
    task = type(preprocessor).__name__.removesuffix("Preprocessor")
    if task in REFUSED:
        raise DataError(f"preset {preset}: {task} cannot be fine-tuned here: {REFUSED[task]}")
    policy = keras.config.dtype_policy()
    if task in NOT_IN_FLOAT16 and policy.compute_dtype == "float16":
        raise DataError(
            f"preset {preset}: KerasNLP's {task.removesuffix('Seq2SeqLM')} fails in {policy.name}; "
            "pass --precision mixed_bfloat16 or float32"
        )
    if task in ENDLESS_PROMPTS:
        preprocessor.build(None)
        preprocessor.encoder_packer.end_value = None
    return _keep_lengths(preprocessor)


def load_task(
    preset: str, dropout: float | None, prompt_length: int, response_length: int
) -> keras_nlp.models.Seq2SeqLM:
    """Loads an encoder-decoder of any family under the current dtype policy.

    Args:
        preset: a name, a handle, or a folder.
        dropout: the backbone's; None keeps the preset's.
        prompt_length: tokens of a prompt.
        response_length: tokens of a response.

    Raises:
        DataError: the preset cannot be loaded, or has fewer positions.
    """
    task = presets.load_task(keras_nlp.models.Seq2SeqLM, preset, backbone_dropout=dropout)
    presets.require_positions(task.backbone, preset, prompt_length)
    presets.require_positions(task.backbone, preset, response_length, "--response-length")
    return task


def generate(
    task: keras_nlp.models.Seq2SeqLM,
    preprocessor,
    prompts: Sequence[str],
    sampler,
    stop: Sequence[str] = (),
) -> list[str]:
    """Answers prompts by the model's own `generate()`, with its cache, all in one batch.

    Args:
        task: an encoder-decoder.
        preprocessor: its preprocessor, with the lengths of prompts and responses.
        prompts: texts; long ones are cut as in training.
        sampler: of `models.samplers`, how tokens are drawn, and how many answers to each prompt.
        stop: texts before which an answer ends, see `decoders.before_stop`.

    Returns:
        The answers, without special tokens; several samples of an answer follow one another.
    """
    prompts = samplers.repeat(prompts, sampler)
    tokenizer = preprocessor.tokenizer
    sampler.ids = word_pieces.ids_of(tokenizer)  # a preset may have more rows, or gaps
    samplers.draw_by(task, sampler)
    inputs = preprocessor.generate_preprocess(
        {"encoder_text": prompts, "decoder_text": [""] * len(prompts)}
    )
    # A search compares whole answers: ended earlier, another one could be the likeliest.
    searches = isinstance(sampler, samplers.BeamSearch)
    ends = decoders.stop_tokens(tokenizer, () if searches else stop)
    attached, task.preprocessor = task.preprocessor, None
    try:
        with generation.integers_of_32_bits():
            outputs = keras_nlp.models.CausalLM.generate(task, inputs, stop_token_ids=sorted(ends))
    finally:
        task.preprocessor = attached
    answers = [str(text) for text in preprocessor.generate_postprocess(outputs)]
    return [decoders.before_stop(text, stop) for text in answers]
