"""Makes tiny random presets of KerasNLP's families, like a user's `save_to_preset()`."""

import io

import keras
import keras_nlp

WORDS = "the loss of a step is mean over all replicas and batches not good film bad".split()
FAMILIES = (
    *("Bert", "DistilBert", "Roberta", "DebertaV3", "Albert", "XLMRoberta", "FNet"),
    "RoformerV2",
)
SIZES = dict(num_layers=1, hidden_dim=8, intermediate_dim=16, max_sequence_length=32)
# Arguments of some constructors only.
MORE = {"Albert": dict(embedding_dim=8), "DebertaV3": dict(bucket_size=4)}


def save(family: str, task: str, folder, sequence_length: int = 12, **sizes) -> str:
    """Saves a random `<family><task>` with its tokenizer; returns the folder.

    Args:
        family: one of `FAMILIES`.
        task: "TextClassifier" (of two classes) or "MaskedLM".
        folder: must not exist.
        sequence_length: of the preprocessor.
        **sizes: of the backbone, instead of `SIZES`.
    """
    keras.utils.set_random_seed(7)
    made = tokenizer(family)
    sizes = SIZES | MORE.get(family, {}) | dict(dropout=0.1) | sizes
    if family == "RoformerV2":
        del sizes["max_sequence_length"]
        sizes["head_size"] = sizes["hidden_dim"] // 2
    if family != "FNet":
        sizes |= dict(num_heads=2)
    models = keras_nlp.models
    backbone = getattr(models, f"{family}Backbone")(vocabulary_size=made.vocabulary_size(), **sizes)
    preprocessor = getattr(models, f"{family}{task}Preprocessor")(
        made, sequence_length=sequence_length
    )
    more = dict(num_classes=2) if task == "TextClassifier" else {}
    model = getattr(models, f"{family}{task}")(
        backbone, preprocessor=preprocessor, compile=False, **more
    )
    for weight in model.weights:  # a real one's are larger than Keras's first ones
        if weight.path.endswith(("kernel", "embeddings")):
            weight.assign(weight * 10.0)
    model.save_to_preset(str(folder))
    return str(folder)


def tokenizer(family: str):
    """Makes a tokenizer of `WORDS`."""
    models = keras_nlp.models
    if family in ("Bert", "DistilBert", "RoformerV2"):
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        pieces = [*special, *WORDS, "##s", "st", "##ep", "."]
        return getattr(models, f"{family}Tokenizer")(vocabulary=pieces, lowercase=True)
    if family == "Roberta":
        letters = sorted({letter for word in WORDS for letter in word} | {"."})
        pieces = ["<s>", "<pad>", "</s>", "<unk>", *letters, "Ġ", "th", "Ġth", "<mask>"]
        numbers = {piece: number for number, piece in enumerate(pieces)}
        return models.RobertaTokenizer(vocabulary=numbers, merges=["t h", "Ġ th"])
    special = dict(pad_id=0, unk_id=1, bos_id=2, eos_id=3, user_defined_symbols="[MASK]")
    special |= dict(pad_piece="<pad>", unk_piece="<unk>", bos_piece="[CLS]", eos_piece="[SEP]")
    if family == "DebertaV3":
        special |= dict(pad_piece="[PAD]", unk_piece="[UNK]")
    if family == "XLMRoberta":
        special = dict(unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
    return getattr(models, f"{family}Tokenizer")(proto=_sentence_piece(special))


def _sentence_piece(special: dict) -> bytes:
    import sentencepiece

    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS)] * 3),
        model_writer=proto,
        model_type="word",
        vocab_size=100,
        hard_vocab_limit=False,
        minloglevel=2,
        **special,
    )
    return proto.getvalue()
