"""Repairs conversion, tokenizers and adapters of KerasHub's models; reads their masked-LM head."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from distribution.keras_compat.replacing import replaced


def convert_without(part: str) -> contextlib.AbstractContextManager:
    """Makes KerasHub leave weights of models of `transformers` as they are initialised.

    Args:
        part: occurs in the names of their tensors, which the model may lack.
    """
    from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader

    def make(stock):
        def port_weight(self, keras_variable, hf_weight_key, hook_fn=None):
            if part not in hf_weight_key:
                stock(self, keras_variable, hf_weight_key, hook_fn)

        return port_weight

    return replaced(SafetensorLoader, "port_weight", make)


def convert_llama() -> contextlib.AbstractContextManager:
    """Makes KerasHub read two settings of a Llama in the format of `transformers`.

    Breaks: its converter leaves out `rms_norm_eps`, so every Llama has 1e-6 instead of 1e-5, and
    the scaling of rotary positions where `transformers` 5 writes it, in `rope_parameters` (no
    thread known). Does: passes both on.
    """
    from keras_hub.src.utils.transformers import convert_llama3

    def make(stock):
        def convert_backbone_config(config):
            rope = config.get("rope_parameters") or {}
            if rope.get("rope_type") == "llama3":
                config = config | {"rope_scaling": rope}
            found = stock(config)
            if "rms_norm_eps" in config:
                found["layer_norm_epsilon"] = config["rms_norm_eps"]
            return found

        return convert_backbone_config

    return replaced(convert_llama3, "convert_backbone_config", make)


def convert_bart() -> contextlib.AbstractContextManager:
    """Makes KerasHub read the number of layers of a BART in the format of `transformers`.

    Breaks: its converter reads `num_hidden_layers`, which `transformers` 5 no longer writes (no
    thread known). Does: passes on `encoder_layers`, which both have.
    """
    from keras_hub.src.utils.transformers import convert_bart

    def make(stock):
        def convert_backbone_config(config):
            layers = config.get("encoder_layers", config.get("num_hidden_layers"))
            return stock(config if layers is None else config | {"num_hidden_layers": layers})

        return convert_backbone_config

    return replaced(convert_bart, "convert_backbone_config", make)


# Tokenizers of KerasHub whose families split a text into words as GPT-2, Llama 3 or Qwen 2 do.
LIKE_GPT2 = ("GPT2", "Roberta", "Bart", "OPT", "GPTNeoX")
LIKE_LLAMA3 = ("Llama3", "SmolLM3")
LIKE_QWEN2 = ("Qwen2", "Qwen", "QwenMoe", "Qwen3", "Qwen3Moe")


def split_words(tokenizer) -> None:
    """Makes a byte-pair tokenizer of KerasHub split a text into words before it merges pairs.

    Breaks: `BytePairTokenizer` passes its pattern of words to `tokenizers` as a text to look for,
    not as a `Regex` (no thread known), so a text is one word: runs of spaces and long numbers get
    other tokens than in the pretraining of a preset, and than in a `tf.data` pipeline of KerasHub's
    own. Does: splits as the family's own tokenizer does. Families with yet other rules, and
    tokenizers of other kinds, stay as they are.

    Args:
        tokenizer: of a preset that was pretrained elsewhere, or of a run from one.
    """
    import tokenizers
    from keras_hub.src.tokenizers.byte_pair_tokenizer import SPLIT_PATTERN_TOKENIZERS

    parts = tokenizers.pre_tokenizers
    family = type(tokenizer).__name__.removesuffix("Tokenizer")
    merges = getattr(tokenizer, "_tokenizer", None)
    if not isinstance(merges, tokenizers.Tokenizer):
        return
    if family in LIKE_GPT2:  # the pattern that ByteLevel has itself
        words: Any = parts.ByteLevel(tokenizer.add_prefix_space, use_regex=True)
    elif family in (*LIKE_LLAMA3, *LIKE_QWEN2):
        pattern = SPLIT_PATTERN_TOKENIZERS
        if family in LIKE_QWEN2:  # a digit is a word
            pattern = pattern.replace(r"\p{N}{1,3}", r"\p{N}")
        words = parts.Sequence(
            [
                parts.Split(tokenizers.Regex(pattern), "isolated"),
                parts.ByteLevel(tokenizer.add_prefix_space, use_regex=False),
            ]
        )
    else:
        return
    merges.pre_tokenizer = words
    if family == "Llama3":  # a word that is a token is not merged from parts
        merges.model.ignore_merges = True
    if family in (*LIKE_QWEN2, "GPTNeoX"):
        merges.normalizer = tokenizers.normalizers.NFC()
    tokenizer.splits_words = True


def words_of(tokenizer, text: str) -> list[str] | None:
    """Returns the words in which a byte-pair tokenizer merges pairs; None where it has none.

    Lacks: KerasHub's tokenizers have no public name for their rules.

    Args:
        tokenizer: of KerasNLP, after `split_words()`.
        text: to split.
    """
    if not getattr(tokenizer, "splits_words", False):
        return None
    merges = tokenizer._tokenizer
    return words_by(merges.normalizer, merges.pre_tokenizer, text)


def words_by(normalizer, pre_tokenizer, text: str) -> list[str]:
    """Returns the words in which two rules of `tokenizers` split a text.

    Args:
        normalizer: of `tokenizers.normalizers`, or None.
        pre_tokenizer: of `tokenizers.pre_tokenizers`, or None.
        text: to split.
    """
    if normalizer is not None:
        text = normalizer.normalize_str(text)
    if pre_tokenizer is None:
        return [text]
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]


# What T5, SmolLM 3 and RoFormer-v2 call the layers that other families call query and value.
# GPT-NeoX has one layer for queries, keys and values; peft adapts it as a whole, too.
QUERIES_AND_VALUES = (
    *("query_projector", "value_projector"),
    *("q_proj", "v_proj"),
    *("q_dense_layer", "v_dense_layer"),
    "query_key_value",
)


def enable_lora(backbone, rank: int, alpha: float | None = None, all_linear: bool = False) -> None:
    """Adds low-rank adapters to a KerasNLP backbone, in float64 where its weights are.

    Breaks: Keras makes adapters in float32, and adds the norms of all gradients, which fails with
    float64. KerasHub does not pass on the `lora_alpha` of Keras's layers. Does: makes adapters in
    float64 beside weights of float64, and sets `lora_alpha`.

    Args:
        backbone: as `from_preset()` returns it.
        rank: of the adapters.
        alpha: their product is multiplied by alpha / rank; None for a factor of 1.
        all_linear: whether all linear layers have adapters, instead of queries and values alone.
    """

    def make(stock):
        def add_weight(self, *args, name=None, dtype=None, **kwargs):
            if str(name).startswith("lora_") and self.variable_dtype == "float64":
                dtype = "float64"
            return stock(self, *args, name=name, dtype=dtype, **kwargs)

        return add_weight

    with replaced(keras.layers.Layer, "add_weight", make):
        # By their names in KerasNLP; it knows those of some families only.
        names = [*backbone.default_lora_layer_names(), *QUERIES_AND_VALUES]
        if all_linear:
            linear = keras.layers.Dense, keras.layers.EinsumDense
            layers = backbone._flatten_layers(include_self=False)
            names = sorted({layer.name for layer in layers if isinstance(layer, linear)})
        backbone.enable_lora(rank, target_layer_names=names)
    for layer in _adapted(backbone) if alpha is not None else ():
        layer.lora_alpha = alpha


def _adapted(backbone) -> list[keras.layers.Layer]:
    """Returns the layers with adapters."""
    layers = backbone._flatten_layers(include_self=False)
    return [layer for layer in layers if getattr(layer, "lora_enabled", False)]


def save_adapters(backbone, path: str) -> None:
    """Saves the adapters of a backbone for `load_lora_weights()`.

    Breaks: KerasHub's file holds no alpha, so that it is loaded with a factor of 1. Does: writes
    the second matrices multiplied by alpha / rank.

    Args:
        backbone: with adapters; unchanged afterwards.
        path: ends with `.lora.h5`.
    """
    scaled = [layer for layer in _adapted(backbone) if layer.lora_alpha != layer.lora_rank]
    before = [keras.ops.convert_to_numpy(layer.lora_kernel_b) for layer in scaled]
    for layer, value in zip(scaled, before, strict=True):
        layer.lora_kernel_b.assign(value * (layer.lora_alpha / layer.lora_rank))
    try:
        backbone.save_lora_weights(path)
    finally:
        for layer, value in zip(scaled, before, strict=True):
            layer.lora_kernel_b.assign(value)


@contextlib.contextmanager
def merge_adapters_in_full() -> Iterator[None]:
    """Adds low-rank adapters to their kernels in the dtype of the weights within it.

    Breaks: Keras rounds the sum to the dtype of the computation, so a model that was trained in
    mixed precision is saved with kernels of half precision, in which most of what an adapter
    learned is lost (no thread known). Does: lets the layers compute in their weights' dtype. Save
    within it; do not call a model.
    """

    def make(stock):
        return property(lambda self: self.variable_dtype)

    with contextlib.ExitStack() as stack:
        for kind in (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding):
            stack.enter_context(replaced(kind, "compute_dtype", make))
        yield


def transform_of(head) -> list[keras.layers.Layer]:
    """Returns the layers of a `keras_nlp.layers.MaskedLMHead` before its logits.

    Lacks: the head has no public name for them.
    """
    return [head._intermediate_dense, head._intermediate_layer_norm]


def output_bias_of(head) -> keras.Variable:
    """Returns the bias of a `keras_nlp.layers.MaskedLMHead`, of shape (vocabulary size,).

    Lacks: the head has no public name for it.
    """
    return head._bias
