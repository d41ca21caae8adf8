"""Causal language models of KerasNLP: new ones, presets of any family, training, generation.

Training uses the stock model's layers: `apart()` reruns its graph with attention that stays within
a document, so that documents can share a row, and `learner()` adds the head in chunks. The stock
model itself is saved, and generates text.
"""

import inspect
import math
from collections.abc import Sequence

import keras
import keras_nlp
import tensorflow as tf

from data import byte_pairs, word_pieces
from data.errors import DataError, read_each
from data.next_tokens import Ends
from data.templates import Prompt, Template, last_text
from distribution.keras_compat import generation
from models import presets, samplers
from models.chunked_head import ChunkedHead
from models.initial_weights import kernels_with_inputs

# The special tokens that a new model's tokenizer requires.
GPT2_TOKENS = ("<|endoftext|>",)
LLAMA_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
# Families that are trained with the stock head, all logits at once, and why.
STOCK_HEAD = {
    "MixtralCausalLM": "its experts' router adds a loss",
    "Qwen3MoeCausalLM": "its experts' router adds a loss",
    "Qwen3_5MoeCausalLM": "its experts' router adds a loss",
    "QwenMoeCausalLM": "its experts' router adds a loss",
}
# Families whose layers take an attention mask and read other documents of a row nevertheless.
OWN_ROWS = {"Qwen3_5CausalLM": "its linear layers carry a state along a row"}
# Families that multiply float32 by what has another dtype in such a run, which fails.
NOT_IN_FLOAT64 = (*STOCK_HEAD, "Qwen3_5CausalLM")
NOT_IN_HALF = STOCK_HEAD
# Families that cannot be loaded, or not be trained on rows of text, and why.
REFUSED = {
    "BLIP2CausalLM": "each text needs an image",
    "Gemma3nCausalLM": "KerasNLP's computes other logits each time that it is loaded",
    "Gemma4CausalLM": "KerasNLP's CausalLM.from_preset() takes it for its assistant model",
    "PARSeqCausalLM": "it reads texts in images",
    "PaliGemmaCausalLM": "each text needs an image",
    "RWKV7CausalLM": "it takes texts that are padded on the left only",
}

# Ends of turns at which the families' own `generate()` stops: Gemma 3's and Phi-3's.
TURN_ENDS = ("<end_of_turn>", "<|end|>")


def special_tokens(architecture: str) -> int:
    """Returns how many special tokens a new model's vocabulary has."""
    return len(GPT2_TOKENS if architecture == "gpt2" else LLAMA_TOKENS)


def make_preprocessor(architecture: str, merges: Sequence[str], sequence_length: int):
    """Makes the preprocessor of a new model, with its tokenizer.

    Args:
        architecture: "gpt2" or "llama".
        merges: see `data.byte_pairs`.
        sequence_length: tokens of a text.
    """
    models = keras_nlp.models
    if architecture == "gpt2":
        vocabulary = byte_pairs.vocabulary_of(merges, GPT2_TOKENS)
        tokenizer = models.GPT2Tokenizer(vocabulary=vocabulary, merges=list(merges))
        return models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=sequence_length)
    vocabulary = byte_pairs.vocabulary_of(merges, LLAMA_TOKENS)
    tokenizer = models.Llama3Tokenizer(vocabulary=vocabulary, merges=list(merges))
    return models.Llama3CausalLMPreprocessor(tokenizer, sequence_length=sequence_length)


def new_task(options, vocabulary_size: int) -> keras_nlp.models.CausalLM:
    """Makes a GPT-2, or a Llama, with random weights and without its preprocessor.

    GPT-2: learned positions, tied embeddings, feed-forward layers four times as wide. Llama: rotary
    positions, RMSNorm, no biases, SwiGLU of 8/3 of the width, which has as many weights.

    Args:
        options: with `architecture`, `num_layers`, `num_heads`, `hidden_dim`, `dropout` (None for
            none) and `sequence_length`.
        vocabulary_size: number of tokens.
    """
    sizes = dict(
        vocabulary_size=vocabulary_size,
        num_layers=options.num_layers,
        hidden_dim=options.hidden_dim,
        dropout=options.dropout or 0.0,
    )
    if options.architecture == "gpt2":
        backbone = keras_nlp.models.GPT2Backbone(
            num_heads=options.num_heads,
            intermediate_dim=4 * options.hidden_dim,
            max_sequence_length=options.sequence_length,
            **sizes,
        )
        draw_kernels(backbone)
        _draw(backbone.token_embedding.embeddings, 0.02)  # as OpenAI's; KerasHub draws with 0.01
        return keras_nlp.models.GPT2CausalLM(backbone=backbone)
    backbone = keras_nlp.models.Llama3Backbone(
        num_query_heads=options.num_heads,
        num_key_value_heads=options.num_heads,
        intermediate_dim=8 * math.ceil(options.hidden_dim / 3),
        **sizes,
    )
    draw_kernels(backbone)
    return keras_nlp.models.Llama3CausalLM(backbone=backbone)


def draw_kernels(backbone) -> None:
    """Draws the kernels of a new model with a variance of one over their inputs.

    KerasHub draws all of them with a standard deviation of 0.02, which is small for a model of a
    width below 2,500: a layer's output is then negligible beside the embeddings, and the model
    stays a unigram model for longer ("Efficient BackProp", LeCun et al., 1998; measured in
    docs/notes/causal_lm.md). One initializer draws Llama's query, key, value and output kernels,
    so they begin equal; this function draws each separately.
    """
    for kernel, inputs in kernels_with_inputs(backbone):
        _draw(kernel, inputs**-0.5)


def _draw(weight, stddev: float) -> None:
    draw = keras.initializers.RandomNormal(stddev=stddev)  # a new one draws from a new seed
    weight.assign(draw(weight.shape, weight.dtype))


def load_preprocessor(preset: str, sequence_length: int):
    """Loads a preset's preprocessor, with its tokenizer.

    Raises:
        DataError: the preset cannot be loaded, is of another task or too large, or its tokenizer
            has no token that ends a text.
    """
    presets.require_task(keras_nlp.models.CausalLM, preset)
    kind = keras_nlp.models.CausalLMPreprocessor
    preprocessor = presets.load(kind, preset, sequence_length=sequence_length)
    require_family(preset, type(preprocessor).__name__.removesuffix("Preprocessor"))
    if getattr(preprocessor.tokenizer, "end_token_id", None) is None:
        raise DataError(f"preset {preset}: its tokenizer has no token that ends a text")
    return preprocessor


def require_family(preset: str, task: str) -> None:
    """Rejects a family that cannot be trained here.

    Args:
        preset: named in the message.
        task: the name of the family's class, for instance "GPT2CausalLM".

    Raises:
        DataError: with the reason.
    """
    family = task.removesuffix("CausalLM")
    if task in REFUSED:
        raise DataError(f"preset {preset}: {family} cannot be fine-tuned here: {REFUSED[task]}")
    precision = keras.config.dtype_policy().name
    fails_in = NOT_IN_FLOAT64 if precision == "float64" else NOT_IN_HALF
    if task in fails_in and precision != "float32":
        raise DataError(
            f"preset {preset}: KerasNLP's {family} fails in {precision}; pass --precision float32"
        )


def load_task(
    preset: str, dropout: float | None, sequence_length: int
) -> keras_nlp.models.CausalLM:
    """Loads a causal language model of any family under the current dtype policy.

    Args:
        preset: a name of Kaggle or Hugging Face (`hf://...`), or a folder.
        dropout: the backbone's; None keeps the preset's.
        sequence_length: tokens of the run's rows.

    Raises:
        DataError: the preset cannot be loaded, has fewer positions, or takes more than text.
    """
    task = presets.load_task(
        keras_nlp.models.CausalLM,
        preset,
        backbone_dropout=dropout,
        sequence_length=sequence_length,
    )
    more = sorted(set(task.backbone.input) - {"token_ids", "padding_mask"})
    if more:
        raise DataError(
            f"preset {preset}: takes {', '.join(more)} too; pass a preset for text alone, as "
            "gemma3_4b_text is of gemma3_4b"
        )
    _keep_tied_embeddings(task.backbone)
    return task


def _keep_tied_embeddings(backbone) -> None:
    """Adds `tie_word_embeddings` to Llama's saved configuration, where KerasHub 0.32 omits it."""
    stock, name = backbone.get_config, "tie_word_embeddings"
    if getattr(backbone, name, False) and name not in stock():
        backbone.get_config = lambda: stock() | {name: True}


def require_whole_batches(task: keras_nlp.models.CausalLM, parts: int) -> None:
    """Rejects split batches if a layer adds a loss that is computed over the whole batch.

    The loss of experts' routers is a product of two means over the batch's tokens: the mean over
    the parts of a batch is not that of the batch.

    Args:
        task: a causal language model.
        parts: replicas times accumulated batches.

    Raises:
        DataError: names the options.
    """
    name = type(task).__name__
    if name in STOCK_HEAD and parts > 1:
        raise DataError(
            f"{name}: {STOCK_HEAD[name]}, which needs whole batches; pass --strategy none, and "
            "leave out --accumulate-steps"
        )


def can_share_rows(task: keras_nlp.models.CausalLM) -> bool:
    """Tells whether documents can share a row: a plain head, and layers with an attention mask."""
    if type(task).__name__ in OWN_ROWS:
        return False
    return _has_plain_head(task) and any(
        _takes(layer, "decoder_attention_mask") for layer in task.backbone.layers
    )


def _has_plain_head(task: keras_nlp.models.CausalLM) -> bool:
    """Tells whether the logits are hidden states times embeddings, and the loss theirs alone."""
    embedding = getattr(task.backbone, "token_embedding", None)
    return (
        isinstance(embedding, keras.layers.ReversibleEmbedding)
        and embedding.logit_soft_cap is None
        and type(task).__name__ not in STOCK_HEAD
    )


def _takes(layer, name: str) -> bool:
    return name in inspect.signature(layer.call).parameters


def apart(backbone) -> keras.Model:
    """Rebuilds a backbone's graph with the documents of a row kept apart.

    A token attends to itself and the earlier tokens of its document. Learned positions count from
    the document's beginning, as in `generate()`; rotary ones and ALiBi depend on distances alone.

    Args:
        backbone: a KerasNLP backbone whose layers take `decoder_attention_mask`.

    Returns:
        A model with the same layers and inputs; `padding_mask` numbers the documents of a row from
        1 on, 0 is padding.
    """
    inputs = {
        name: keras.Input((None,), dtype="int32", name=name)
        for name in ("token_ids", "padding_mask")
    }
    document, ops = inputs["padding_mask"], keras.ops
    same = ops.equal(ops.expand_dims(document, 2), ops.expand_dims(document, 1))
    place = ops.cumsum(ops.ones_like(document), axis=1)
    come = ops.greater_equal(ops.expand_dims(place, 2), ops.expand_dims(place, 1))
    # How many tokens of its document have come before a token.
    positions = ops.sum(ops.cast(ops.logical_and(same, come), "int32"), axis=2) - 1
    positional = (
        keras_nlp.layers.PositionEmbedding,
        keras_nlp.layers.TokenAndPositionEmbedding,
    )

    def call(layer, *arguments, **named):
        if isinstance(layer, positional):
            named["positions"] = positions
        if "decoder_padding_mask" in named:
            named["decoder_padding_mask"] = ops.minimum(document, 1)
            named["decoder_attention_mask"] = same
        return layer(*arguments, **named)

    return keras.models.clone_model(
        backbone, input_tensors=inputs, clone_function=lambda layer: layer, call_function=call
    )


def learner(task: keras_nlp.models.CausalLM) -> keras.Model:
    """Returns the model to train and evaluate, which avoids a matrix of all logits where it can.

    Args:
        task: a causal language model without its preprocessor.

    Returns:
        A `ChunkedHead` with the model's own weights; the model itself where its logits are more
        than hidden states times embeddings, or its layers add a loss (`STOCK_HEAD`).
    """
    if not _has_plain_head(task):
        return task
    embedding = task.backbone.token_embedding
    hidden = apart(task.backbone) if can_share_rows(task) else task.backbone
    if embedding.reverse_dtype is not None:
        states = keras.ops.cast(hidden.output, embedding.reverse_dtype)
        hidden = keras.Model(hidden.input, states)
    kernel = embedding.embeddings if embedding.tie_weights else embedding.reverse_embeddings
    return ChunkedHead(task, hidden, kernel, transposed=not embedding.tie_weights)


def stop_tokens(tokenizer, stop: Sequence[str] = ()) -> set[int]:
    """Returns the tokens that end a text: those at which KerasNLP's `generate()` stops.

    Args:
        tokenizer: of KerasNLP.
        stop: stop strings; the token of each that is one token, and reads the same, is added.
    """
    tokens = {int(tokenizer.end_token_id)}
    if hasattr(tokenizer, "end_token2_id"):  # Llama 3 has one more
        tokens.add(int(tokenizer.end_token2_id))
    known = set(tokenizer.get_vocabulary())
    tokens |= {int(tokenizer.token_to_id(turn)) for turn in TURN_ENDS if turn in known}
    for text in stop:
        ids = list(map(int, tokenizer(text)))
        if len(ids) == 1 and tokenizer.detokenize(ids) == text:
            tokens.add(ids[0])
    return tokens


def before_stop(text: str, stop: Sequence[str], begin: int = 0) -> str:
    """Returns a text up to the stop string that is complete first, or all of it.

    Args:
        text: which the model has written from `begin` on.
        stop: stop strings.
        begin: where the search begins.
    """
    found = [(at + len(each), at) for each in stop if (at := text.find(each, begin)) >= 0]
    return text[: min(found)[1]] if found else text


def prompt_tokens(prompt: Prompt, tokenizer, template: Template | None = None) -> list[int]:
    """Returns the tokens that `generate()` continues, the document's start included.

    Args:
        prompt: a beginning of a text, or a prompt that the template is for.
        tokenizer: of KerasNLP.
        template: makes tokens of the prompt.
    """
    if template is not None:
        return template.prompt(prompt)
    text = last_text(prompt)
    return Ends.of(tokenizer).around(list(map(int, tokenizer(text))))[:-1]


def generate(
    task: keras_nlp.models.CausalLM,
    preprocessor,
    prompts: Sequence[Prompt],
    *,
    max_length: int,
    sampler: samplers.Sampler,
    strip_prompt: bool = False,
    template: Template | None = None,
    stop: Sequence[str] = (),
) -> list[str]:
    """Continues texts by the model's own `generate()`, with its cache, all in one batch.

    Args:
        task: a causal language model.
        preprocessor: its preprocessor.
        prompts: beginnings of texts, or prompts that a template is for, perhaps turns of a chat.
        max_length: tokens of a text, the prompt's and special ones included.
        sampler: how tokens are drawn, and how many texts of each prompt.
        strip_prompt: whether to leave out the prompts.
        template: makes tokens of the prompts, and names the one that ends a response.
        stop: texts before which a continuation ends, see `before_stop`.

    Returns:
        The texts, without special tokens; several samples of a prompt follow one another.

    Raises:
        InputError: a prompt leaves no room for a token, or names a special token.
        DataError: the model has fewer positions.
    """
    most = getattr(task.backbone, "max_sequence_length", None) or max_length
    if max_length > most:
        raise DataError(f"--max-length {max_length}: the model takes at most {most} tokens")
    tokenizer = preprocessor.tokenizer

    def tokens_of(prompt: Prompt) -> list[int]:
        ids = prompt_tokens(prompt, tokenizer, template)
        if len(ids) >= max_length:
            text = last_text(prompt)
            raise DataError(
                f"{len(ids)} tokens leave no room for more within {max_length}: {text[:60]!r}"
            )
        return ids

    given = samplers.repeat(read_each(tokens_of, prompts), sampler)
    texts = samplers.repeat(list(map(last_text, prompts)), sampler)
    ends = stop_tokens(tokenizer, stop)
    if template is not None:
        ends.add(template.end)
    sampler.ids = word_pieces.ids_of(tokenizer)  # a preset may have more rows, or gaps
    samplers.draw_by(task, sampler)
    inputs = preprocessor.generate_preprocess(texts, sequence_length=max_length)
    if template is not None:  # its special tokens are not text that a tokenizer could read
        padding = getattr(tokenizer, "pad_token_id", 0)
        rows = [ids + [padding] * (max_length - len(ids)) for ids in given]
        is_prompt = tf.sequence_mask([len(ids) for ids in given], max_length)
        inputs["token_ids"] = tf.constant(rows, tf.int32)
        inputs["padding_mask"] = tf.cast(is_prompt, inputs["padding_mask"].dtype)
    attached, task.preprocessor = task.preprocessor, None
    try:
        with generation.patch_generation_for(max_length):
            # Not the family's own, which may add stop tokens or take no `strip_prompt` (Phi-3).
            outputs = keras_nlp.models.CausalLM.generate(
                task, inputs, stop_token_ids=sorted(ends), strip_prompt=strip_prompt
            )
    finally:
        task.preprocessor = attached
    if template is not None:  # the token that ends a turn is not special to every tokenizer
        outputs["padding_mask"] = outputs["padding_mask"] & (outputs["token_ids"] != template.end)
    generated = [str(text) for text in preprocessor.generate_postprocess(outputs)]
    if stop:
        begins = [0] * len(generated)
        if not strip_prompt:
            begins = [len(str(text)) for text in preprocessor.generate_postprocess(inputs)]
        generated = [
            before_stop(text, stop, begin) for text, begin in zip(generated, begins, strict=True)
        ]
    if template is None:
        return generated
    return [text.removesuffix(template.after) for text in generated]  # learned as its end
