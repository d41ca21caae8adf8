"""Makes tokenizers with the special tokens of chats, and a tiny model with one."""

import io

import keras
import keras_nlp
import sentencepiece

from data import byte_pairs

TEXT = ["user model assistant", "What is two and two?", "It is four, he said."] * 2
LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>"),
)
BYTE_PAIRS = {
    "Qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "Qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "SmolLM3": (*LLAMA, "<think>", "</think>", "<|im_start|>", "<|im_end|>"),
    "Llama3": LLAMA,
    "GPT2": ("<|endoftext|>",),
}


def make_tokenizer(family: str, gap: int = 0):
    """Makes a tokenizer of a family, learned from `TEXT`.

    Args:
        family: one of `BYTE_PAIRS`, or Gemma.
        gap: ids without a token before each special token of byte pairs.
    """
    kind = getattr(keras_nlp.models, f"{family}Tokenizer")
    if family == "Gemma":
        proto = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT),
            model_writer=proto,
            vocab_size=300,
            model_type="BPE",
            byte_fallback=True,
            hard_vocab_limit=False,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            user_defined_symbols=["<start_of_turn>", "<end_of_turn>", "\n"],
            minloglevel=2,
            **dict(pad_id=0, eos_id=1, bos_id=2, unk_id=3),
            **dict(pad_piece="<pad>", bos_piece="<bos>", eos_piece="<eos>"),
        )
        return kind(proto=proto.getvalue())
    merges = byte_pairs.learn_merges(TEXT, 280)
    special = BYTE_PAIRS[family]
    vocabulary = byte_pairs.vocabulary_of(merges, special)
    vocabulary |= {
        token: vocabulary[token] + gap * number for number, token in enumerate(special, start=1)
    }
    return kind(vocabulary=vocabulary, merges=merges)


def make_task(family: str = "Qwen", gap: int = 0) -> keras_nlp.models.CausalLM:
    """Makes a random model whose tokenizer has the tokens of a chat.

    Args:
        family: Qwen, with ChatML's, of which none ends a text; or Llama3.
        gap: see `make_tokenizer`; the model has a row for each id.
    """
    keras.utils.set_random_seed(1)
    tokenizer = make_tokenizer(family, gap)
    backbone = getattr(keras_nlp.models, f"{family}Backbone")(
        vocabulary_size=max(tokenizer.vocabulary.values()) + 1,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=32,
        intermediate_dim=48,
    )
    preprocessor = getattr(keras_nlp.models, f"{family}CausalLMPreprocessor")
    task = getattr(keras_nlp.models, f"{family}CausalLM")
    return task(backbone=backbone, preprocessor=preprocessor(tokenizer, sequence_length=32))
