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
}
LEARNED = dict(num_heads=2, max_sequence_length=64, dropout=0.0)
GROUPED = dict(num_query_heads=4, num_key_value_heads=2)
BACKBONES = {
    "GPT2": LEARNED,
    "OPT": LEARNED,
    "Llama3": GROUPED,
    "Qwen": GROUPED,
    "Qwen3": GROUPED | dict(head_dim=4),
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
    "Gemma": dict(num_query_heads=4, num_key_value_heads=1, head_dim=4),
    "Mistral": GROUPED | dict(sliding_window=32),
    "Phi3": GROUPED,
}
FAMILIES = tuple(BACKBONES)


def make_tokenizer(family: str):
    """Makes a tokenizer of a family, learned from `TEXT`."""
    kind = getattr(keras_nlp.models, f"{family}Tokenizer")
    if family in BYTE_PAIRS:
        merges = byte_pairs.learn_merges(TEXT * 2, 290)
        vocabulary = byte_pairs.vocabulary_of(merges, BYTE_PAIRS[family])
        return kind(vocabulary=vocabulary, merges=merges)
    import sentencepiece

    proto = io.BytesIO()
    named = {
        "Gemma": dict(pad_piece="<pad>", bos_piece="<bos>", eos_piece="<eos>"),
        "Mistral": dict(pad_id=-1, unk_id=0, bos_id=1, eos_id=2),
        "Phi3": dict(pad_id=-1, unk_id=0, bos_id=1, eos_id=2, eos_piece="<|endoftext|>"),
    }[family]
    ids = dict(pad_id=0, eos_id=1, bos_id=2, unk_id=3)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=proto,
        vocab_size=290,
        model_type="BPE",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **(ids | named),
    )
    return kind(proto=proto.getvalue())


def make_task(family: str, **changes) -> keras_nlp.models.CausalLM:
    """Makes a random model of a family with its preprocessor; 64 positions at most.

    Args:
        family: one of `FAMILIES`.
        **changes: further arguments of the backbone.
    """
    keras.utils.set_random_seed(1)
    tokenizer = make_tokenizer(family)
    sizes = dict(SIZES)
    if family == "Gemma":
        sizes["intermediate_dim"] *= 2
    backbone = getattr(keras_nlp.models, f"{family}Backbone")(
        vocabulary_size=tokenizer.vocabulary_size(), **(sizes | BACKBONES[family] | changes)
    )
    preprocessor = getattr(keras_nlp.models, f"{family}CausalLMPreprocessor")
    task = getattr(keras_nlp.models, f"{family}CausalLM")
    made = task(backbone=backbone, preprocessor=preprocessor(tokenizer, sequence_length=32))
    for weight in made.weights:  # a new model has the same output for all inputs
        if weight.path.endswith(("kernel", "embeddings")):
            weight.assign(8 * weight)
    return made
