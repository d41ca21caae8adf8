"""`tokenizer.json`: Keras's BERT tokenizer in the words of the `tokenizers` package."""

# What stands between words, and what is a word of its own; as in KerasHub's WordPieceTokenizer.
BETWEEN_WORDS = r"[ \t\n\r\f\p{Cc}\p{Cf}]"
PUNCTUATION = r"[!-/:-@\[-`{-~\p{P}]"
IDEOGRAPHS = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}"
    r"\x{2B740}-\x{2B81F}\x{2B820}-\x{2CEAF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}]"
)
LONGEST_WORD = 100  # bytes to Keras's, letters here; a longer one is [UNK]


def tokenizer_json(tokenizer) -> str:
    """The JSON text; it puts [CLS] before a text, and [SEP] after it.

    One thing cannot be said in it: Keras's folds compatibility characters after it has cut words
    out (three dots in one character become a word of three dots). A line with such a
    character is cut into other pieces.

    Args:
        tokenizer: a `keras_nlp.models.BertTokenizer`.
    """
    import tokenizers
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

    pieces = {piece: number for number, piece in enumerate(tokenizer.get_vocabulary())}
    made = tokenizers.Tokenizer(
        models.WordPiece(pieces, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD)
    )
    steps = []
    if tokenizer.strip_accents:
        steps += [normalizers.NFD(), normalizers.Replace(Regex(r"\p{Mn}"), "")]
    if tokenizer.lowercase:
        steps.append(normalizers.Lowercase())
    made.normalizer = normalizers.Sequence(steps)
    alone = f"{PUNCTUATION}|{IDEOGRAPHS}" if tokenizer.split_on_cjk else PUNCTUATION
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(BETWEEN_WORDS), "removed"),
            pre_tokenizers.Split(Regex(alone), "isolated"),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, pieces[name]) for name in ("[CLS]", "[SEP]")],
    )
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return made.to_str()
