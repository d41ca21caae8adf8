"""Makes tiny random encoder-decoders of KerasNLP, one per family, with tokenizers."""

import keras
import keras_nlp

from data import byte_pairs
from models.encoder_decoders import BART_TOKENS
from tests.support.causal_presets import TEXT, train_sentence_pieces

ENDS = dict(pad_id=0, eos_id=1, unk_id=2)
BACKBONES = {
    "Bart": dict(
        num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=24, max_sequence_length=64
    ),
    "T5": dict(num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=24),
    "T5Gemma": {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in dict(
            hidden_dim=16,
            intermediate_dim=24,
            num_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            layer_types=["sliding_attention", "full_attention"],
        ).items()
    }
    | dict(
        sliding_window=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        cross_attention_hidden_size=16,
    ),
}
FAMILIES = tuple(BACKBONES)


def make_tokenizer(family: str):
    """Makes a tokenizer of a family, learned from `TEXT`."""
    kind = getattr(keras_nlp.models, f"{family}Tokenizer")
    if family == "Bart":
        merges = byte_pairs.learn_merges(TEXT * 2, 290)
        return kind(vocabulary=byte_pairs.vocabulary_of(merges, BART_TOKENS), merges=merges)
    if family == "T5":
        return kind(proto=train_sentence_pieces(**ENDS | dict(bos_id=-1)))
    names = dict(pad_piece="<pad>", bos_piece="<bos>", eos_piece="<eos>")
    return kind(proto=train_sentence_pieces(**ENDS | dict(bos_id=3), **names))


def make_task(family: str, dropout: float = 0.0) -> keras_nlp.models.Seq2SeqLM:
    """Makes a random model of a family with its preprocessor.

    Args:
        family: one of `FAMILIES`.
        dropout: of the backbone.
    """
    keras.utils.set_random_seed(1)
    tokenizer = make_tokenizer(family)
    name = "dropout_rate" if family == "T5Gemma" else "dropout"
    backbone = getattr(keras_nlp.models, f"{family}Backbone")(
        vocabulary_size=tokenizer.vocabulary_size(), **BACKBONES[family], **{name: dropout}
    )
    preprocessor = getattr(keras_nlp.models, f"{family}Seq2SeqLMPreprocessor")(
        tokenizer, encoder_sequence_length=24, decoder_sequence_length=16
    )
    made = getattr(keras_nlp.models, f"{family}Seq2SeqLM")(
        backbone=backbone, preprocessor=preprocessor
    )
    for weight in made.weights:  # a new model has nearly the same output for all inputs
        if weight.path.endswith(("kernel", "embeddings")):
            weight.assign(4 * weight)
    return made
