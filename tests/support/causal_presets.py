"""Makes tiny random causal language models of KerasNLP, one per family, with tokenizers."""

import io

import keras
import keras_nlp

from data import byte_pairs

TEXT = (
    "the loss of a step is the mean over all replicas and batches of tokens",
    "a good film was seen by many who said it is very long",
    "what is the capital of France? Paris is.",
)
SIZES = dict(num_layers=2, hidden_dim=16, intermediate_dim=24)
BYTE_PAIRS = {  # family: special tokens of its tokenizer
    "GPT2": ("<|endoftext|>",),
    "OPT": ("</s>", "<pad>", "<unk>", "<mask>"),
    "Llama3": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
        *("<|start_header_id|>", "<|end_header_id|>"),
    ),
    "Qwen": ("<|endoftext|>",),
    "Qwen3": ("<|im_end|>", "<|endoftext|>"),
    "SmolLM3": ("<|end_of_text|>", "<|begin_of_text|>", "<think>", "</think>"),
    "Falcon": ("<|endoftext|>",),
    "Bloom": ("<s>", "</s>", "<pad>"),
    "GPTNeoX": ("<|endoftext|>",),
    "QwenMoe": ("<|endoftext|>",),
    "Qwen3Moe": ("<|im_end|>", "<|endoftext|>"),
    "Qwen3_5": ("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
    "Qwen3_5Moe": ("<|im_end|>", "<|endoftext|>", "<|im_start|>"),
    "GptOss": ("<|startoftext|>", "<|endoftext|>"),
}
LEARNED = dict(num_heads=2, max_sequence_length=64, dropout=0.0)
GROUPED = dict(num_query_heads=4, num_key_value_heads=2)
WINDOW = 6  # tokens that a sliding window has: fewer than the rows of the tests
MIXED_LAYERS = dict(
    sliding_window_size=WINDOW,
    head_dim=4,
    layer_types=["linear_attention", "full_attention"],
    partial_rotary_factor=0.5,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
)
BACKBONES = {
    "GPT2": LEARNED,
    "OPT": LEARNED,
    "Llama3": GROUPED,
    "Qwen": GROUPED,
    "Qwen3": GROUPED | dict(head_dim=4, sliding_window_size=WINDOW),
    "SmolLM3": dict(
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=False,
        attention_dropout=0.0,
        rope_layer_enabled_list=[True, False],
        layer_types=["full_attention"] * 2,
        mlp_bias=False,
        layer_norm_epsilon=1e-5,
        max_position_embeddings=64,
        rope_theta=10000.0,
        partial_rotary_factor=1.0,
    ),
    "Falcon": dict(num_attention_heads=2, attention_dropout_rate=0, feedforward_dropout_rate=0),
    "Bloom": LEARNED,
    "GPTNeoX": LEARNED,
    "QwenMoe": GROUPED
    | dict(
        moe_intermediate_dim=8,
        shared_expert_intermediate_dim=8,
        num_experts=2,
        top_k=1,
        norm_top_k_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coefficient=0.01,
    ),
    "Qwen3Moe": GROUPED
    | dict(
        head_dim=4,
        moe_intermediate_dim=8,
        num_experts=3,
        top_k=2,
        sliding_window_size=WINDOW,
    ),
    "Qwen3_5": GROUPED | MIXED_LAYERS,
    "Qwen3_5Moe": GROUPED
    | MIXED_LAYERS
    | dict(
        moe_intermediate_dim=8,
        shared_expert_intermediate_size=8,
        num_experts=3,
        top_k=2,
    ),
    "GptOss": GROUPED | dict(num_experts=3, top_k=2, sliding_window=WINDOW, head_dim=4),
    "Gemma": dict(num_query_heads=4, num_key_value_heads=1, head_dim=4),
    "Gemma2": GROUPED
    | dict(
        head_dim=4,
        use_sliding_window_attention=True,
        sliding_window_size=WINDOW,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        attention_logit_soft_cap=50.0,
        final_logit_soft_cap=30.0,
    ),
    "Gemma3": dict(
        num_query_heads=4,
        num_key_value_heads=1,
        head_dim=4,
        image_size=16,
        use_sliding_window_attention=True,
        sliding_window_size=WINDOW,
        use_query_key_norm=True,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
    ),
    "Llama": GROUPED,
    "Mistral": GROUPED | dict(sliding_window=WINDOW, head_dim=6),
    "Mixtral": GROUPED | dict(num_experts=3, top_k=2, sliding_window=WINDOW),
    "Phi3": GROUPED
    | dict(
        rope_scaling_type="su",
        rope_scaling_short_factor=[1.1, 1.3],
        rope_scaling_long_factor=[2.0, 5.0],
        pretraining_sequence_length=18,
        max_sequence_length=64,
    ),
}
FAMILIES = tuple(BACKBONES)
# Their experts' router adds a loss.
ROUTED = ("QwenMoe", "Qwen3Moe", "Qwen3_5Moe", "Mixtral")
# Each document has rows for itself.
OWN_ROWS = ("Gemma", "Gemma2", "Gemma3", "Qwen3_5", *ROUTED)
PRECISION = dict.fromkeys((*ROUTED, "Qwen3_5"), "float32")  # the others: float64


TEXT_ONLY = {  # families that also take images: what leaves those out
    "Gemma3": dict(has_vision_tokens=False),
    "Qwen3_5": dict(has_vision_tokens=False),
    "Qwen3_5Moe": dict(has_vision_tokens=False),
}
GEMMA_PIECES = dict(pad_piece="<pad>", bos_piece="<bos>", eos_piece="<eos>")
NO_PADDING = dict(pad_id=-1, unk_id=0, bos_id=1, eos_id=2)
SENTENCE_PIECES = {  # family: ids and names of special tokens
    "Gemma": GEMMA_PIECES,
    "Gemma2": GEMMA_PIECES,
    "Gemma3": GEMMA_PIECES,
    "Llama": NO_PADDING,
    "Mistral": NO_PADDING,
    "Mixtral": NO_PADDING,
    "Phi3": NO_PADDING | dict(eos_piece="<|endoftext|>"),
}


def class_of(family: str, suffix: str):
    """Returns a class of a family, for instance its `Tokenizer`; Gemma 2 has those of Gemma."""
    return getattr(keras_nlp.models, ("Gemma" if family == "Gemma2" else family) + suffix)


def make_tokenizer(family: str):
    """Makes a tokenizer of a family, learned from `TEXT`."""
    kind = class_of(family, "Tokenizer")
    more = TEXT_ONLY.get(family, {})
    if family in BYTE_PAIRS:
        merges = byte_pairs.learn_merges(TEXT * 2, 290)
        vocabulary = byte_pairs.vocabulary_of(merges, BYTE_PAIRS[family])
        return kind(vocabulary=vocabulary, merges=merges, **more)
    ids = dict(pad_id=0, eos_id=1, bos_id=2, unk_id=3)
    return kind(proto=train_sentence_pieces(**(ids | SENTENCE_PIECES[family])), **more)


def train_sentence_pieces(**special) -> bytes:
    """Returns a SentencePiece model of `TEXT`, with these ids and names of special tokens."""
    import sentencepiece

    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=proto,
        vocab_size=290,
        model_type="BPE",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **special,
    )
    return proto.getvalue()


def dropout_of(family: str, rate: float = 0.1) -> dict[str, float]:
    """Returns the arguments of a family's backbone that turn dropout on."""
    named = {
        "Falcon": ("attention_dropout_rate", "feedforward_dropout_rate"),
        "SmolLM3": ("attention_dropout",),
    }
    return dict.fromkeys(named.get(family, ("dropout",)), rate)


def make_task(family: str, **changes) -> keras_nlp.models.CausalLM:
    """Makes a random model of a family with its preprocessor; 64 positions at most.

    Args:
        family: one of `FAMILIES`.
        **changes: further arguments of the backbone.
    """
    keras.utils.set_random_seed(1)
    tokenizer = make_tokenizer(family)
    sizes = dict(SIZES)
    if family.startswith("Gemma"):
        sizes["intermediate_dim"] *= 2
    backbone = class_of(family, "Backbone")(
        **(dict(vocabulary_size=tokenizer.vocabulary_size()) | sizes | BACKBONES[family] | changes)
    )
    preprocessor = class_of(family, "CausalLMPreprocessor")(tokenizer, sequence_length=32)
    made = class_of(family, "CausalLM")(backbone=backbone, preprocessor=preprocessor)
    for weight in made.weights:  # a new model has the same output for all inputs
        if weight.path.endswith(("kernel", "embeddings")):
            weight.assign(8 * weight)
    return made
