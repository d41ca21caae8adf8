"""`tokenizer.json`: Keras's BERT tokenizer in the words of the `tokenizers` package.

Keras's cuts words out and folds them then (case, and by NFKC "²" to "2", "…" to three dots);
`tokenizers` folds first. For almost all characters that is the same. Where the fold would be cut
again the word is [UNK] to Keras's, unless the vocabulary has such a piece; so such a character
becomes one that no vocabulary has.
"""

import unicodedata

# What stands between words, and what is a word of its own; as in KerasHub's WordPieceTokenizer.
BETWEEN_WORDS = r"[ \t\n\r\f\p{Cc}\p{Cf}]"
PUNCTUATION = r"[!-/:-@\[-`{-~\p{P}]"
IDEOGRAPHS = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}"
    r"\x{2B740}-\x{2B81F}\x{2B820}-\x{2CEAF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}]"
)
UNKNOWN_PUNCTUATION = "\u2e2e"  # a word of its own
UNKNOWN_LETTER = "\ue000"  # part of a word
LONGEST_WORD = 100  # bytes to Keras's, letters here; a longer one is [UNK]


def tokenizer_json(tokenizer) -> str:
    """The JSON text; it puts [CLS] before a text, and [SEP] after it.

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
        alone, within = _cut_again()
        steps += [
            normalizers.Replace(Regex(f"[{alone}]"), UNKNOWN_PUNCTUATION),
            normalizers.Replace(Regex(f"[{within}]"), UNKNOWN_LETTER),
            *(normalizers.NFKC(), normalizers.Lowercase()),
            # Lower case is not all of a case fold.
            *(normalizers.Replace("ß", "ss"), normalizers.Replace("ς", "σ")),
        ]
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


def _cut_again() -> tuple[str, str]:
    """Characters whose NFKC fold would be cut: those that are punctuation, and the others."""
    alone, within = [], []
    for letter in map(chr, [*range(0x80, 0xD800), *range(0xE000, 0x20000)]):
        folded = unicodedata.normalize("NFKC", letter)
        if folded == letter:
            continue
        if _is_punctuation(letter):
            if len(folded) > 1:
                alone.append(letter)
        elif len(folded) > 1 and any(map(_is_cut_at, folded)) or folded.isspace():
            within.append(letter)
    return "".join(alone), "".join(within)


def _is_punctuation(letter: str) -> bool:
    return unicodedata.category(letter).startswith("P") or letter in "$+<=>^`|~"


def _is_cut_at(letter: str) -> bool:
    ideograph = unicodedata.name(letter, "").startswith("CJK UNIFIED")
    return _is_punctuation(letter) or letter.isspace() or ideograph
