"""Learns a WordPiece vocabulary from text, and turns lines into ids with any tokenizer.

Keras's tokenizer makes the ids, so that training, prediction and the saved preset agree. It is
called once for each distinct word: three million tokens per second on one core, several times as
fast as `tokenizers` on whole lines with two.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import keras_nlp
import numpy as np
import scipy.sparse
import tensorflow as tf

from data import byte_pairs, files
from data.errors import DataError
from data.live_line import Waiting, live_line
from data.text import Text

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
UNKNOWN_IN_TEXT = "<unk>"  # WikiText's rare words

# A longer word is one [UNK] in Keras's tokenizer, as in BERT's (there 100 letters).
MAX_WORD_BYTES = 100
# White space beside ASCII's, which is all that Keras's tokenizers of word pieces know. It separates
# words in `str.split()`, and so in training text, and most of it in BERT's own tokenizer.
OTHER_WHITE_SPACE = r"[\x1c-\x1f\x{85}\p{Z}]"
# Control and format characters, such as a soft hyphen, and what could not be decoded: BERT's own
# tokenizer leaves them out, Keras's cuts a word there or takes it for unknown.
INVISIBLE = r"[\x00-\x08\x0e-\x1b\x7f-\x{84}\x{86}-\x{9f}\p{Cf}\p{Co}\x{FFFD}]"
NOTES = "notes.txt"  # beside a learned vocabulary
MANY_UNKNOWN = 0.05  # of a text's tokens; a few are rare characters
# Numbers of lines and words in memory at once, and of a word's repeats in one string.
LINES_AT_ONCE = 1000
KNOWN_WORDS = 1_000_000
REPEATED = 10_000
# Distinct words that the trainer learns from: it takes about a kilobyte for each.
MOST_WORDS = 1_000_000
# Characters of text that are counted before they are taken apart: a line without spaces, as of
# Chinese, is a distinct word until then.
CHARACTERS_AT_ONCE = 100_000_000
TEXTS_AT_ONCE = 16_384  # whose pieces are marked


def special_ids(tokenizer) -> list[int]:
    """Returns the ids of a KerasNLP tokenizer's `SpecialTokens`."""
    return list(SpecialTokens.of(tokenizer).all())


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The ids of special tokens, which are never masked and never predicted.

    Named as in BERT: [CLS] begins a sequence, [SEP] ends it or a line. A family without an unknown
    token, since it spells words in bytes, has the padding token instead.
    """

    pad: int
    unknown: int
    cls: int
    sep: int
    mask: int

    @classmethod
    def of(cls, tokenizer) -> "SpecialTokens":
        """Returns the special tokens of a KerasNLP tokenizer of a family with a `MaskedLM`."""
        pad = tokenizer.pad_token_id
        return cls(
            pad=pad,
            unknown=_unknown_id(tokenizer, pad),
            cls=tokenizer.start_token_id,
            sep=tokenizer.end_token_id,
            mask=tokenizer.mask_token_id,
        )

    def all(self) -> tuple[int, ...]:
        """Returns the five ids."""
        return dataclasses.astuple(self)


def _unknown_id(tokenizer, otherwise: int) -> int:
    pieces = set(pieces_of(tokenizer))
    name = next((name for name in ("[UNK]", UNKNOWN_IN_TEXT) if name in pieces), None)
    return otherwise if name is None else int(tokenizer.token_to_id(name))


def unknown_share(blocks: Iterable[np.ndarray], tokenizer) -> float:
    """Returns the share of [UNK] among the tokens of a text, other special tokens left out.

    Args:
        blocks: Token ids, integers of any shape.
        tokenizer: Of KerasNLP; the share is 0 if its family spells words in bytes.
    """
    unknown_id = _unknown_id(tokenizer, tokenizer.pad_token_id)
    if unknown_id == tokenizer.pad_token_id:
        return 0.0
    others = [number for number in tokenizer.special_token_ids if number != unknown_id]
    unknown = tokens = 0
    for block in blocks:
        unknown += int((block == unknown_id).sum())
        tokens += int(np.isin(block, others, invert=True).sum())
    return unknown / max(tokens, 1)


def presence(token_ids: np.ndarray, tokenizer) -> scipy.sparse.csr_array:
    """Marks the pieces that each text has, without special tokens.

    Args:
        token_ids: Integers of shape (texts, length).
        tokenizer: Of KerasNLP, of a family with a `MaskedLM`.

    Returns:
        1 for each piece of a text, otherwise 0; float64 of shape (texts, vocabulary size), the
        pieces of a text in ascending order.
    """
    special, pieces, counts = special_ids(tokenizer), [], [np.zeros(1, np.int64)]
    for start in range(0, len(token_ids), TEXTS_AT_ONCE):
        ids = np.sort(token_ids[start : start + TEXTS_AT_ONCE], axis=1)
        is_first = np.isin(ids, special, invert=True)
        is_first[:, 1:] &= ids[:, 1:] != ids[:, :-1]
        pieces.append(ids[is_first])
        counts.append(is_first.sum(axis=1))
    columns, ends = np.concatenate(pieces), np.cumsum(np.concatenate(counts))
    shape = (len(token_ids), tokenizer.vocabulary_size())
    return scipy.sparse.csr_array((np.ones(len(columns)), columns, ends), shape)


def unknown_note(share: float, split: str = "training") -> str | None:
    """Returns a line about an `unknown_share` of a split that is large, or None."""
    if share <= MANY_UNKNOWN:
        return None
    return (
        f"{share:.0%} of the {split} tokens are [UNK]: words of more than {MAX_WORD_BYTES} bytes, "
        "or a vocabulary that does not fit the text"
    )


def pieces_of(tokenizer) -> list[str]:
    """Returns the pieces of any KerasNLP tokenizer, in the order of their ids."""
    numbers = getattr(tokenizer, "vocabulary", None)
    if isinstance(numbers, dict):  # byte-level BPE
        return sorted(numbers, key=lambda piece: numbers[piece])
    return list(tokenizer.get_vocabulary())


def ids_of(tokenizer) -> np.ndarray:
    """Returns the ids of the pieces of any KerasNLP tokenizer, int64, in ascending order.

    They may leave gaps, which `vocabulary_size()` does not count: KerasHub leaves out the reserved
    tokens of Llama 3, some of which come before `<|eot_id|>`.
    """
    numbers = getattr(tokenizer, "vocabulary", None)
    if isinstance(numbers, dict):  # byte-level BPE
        return np.sort(np.fromiter(numbers.values(), np.int64))
    return np.arange(tokenizer.vocabulary_size())


def number_of_ids(tokenizer) -> int:
    """Returns one more than the largest id of a KerasNLP tokenizer: the size of a table of ids."""
    return int(ids_of(tokenizer)[-1]) + 1


def vocabulary_of(tokenizer) -> list[str]:
    """Returns everything that determines how a tokenizer splits words: pieces, and BPE merges."""
    return [*pieces_of(tokenizer), *(getattr(tokenizer, "merges", None) or ())]


def begins_words(tokenizer) -> str:
    """Returns the mark of pieces that begin a word, or "" if `##` marks the others."""
    if getattr(tokenizer, "merges", None) is not None:
        return "\u0120"  # a space, as byte-level BPE writes it
    return "\u2581" if getattr(tokenizer, "proto", None) is not None else ""


def continuations(tokenizer) -> tuple[int, ...]:
    """Returns the ids of the pieces that continue a word."""
    mark = begins_words(tokenizer)
    return tuple(
        number
        for number, piece in enumerate(pieces_of(tokenizer))
        if (not piece.startswith(mark) if mark else piece.startswith("##"))
    )


def texts_of_pieces(tokenizer) -> list[str]:
    """Returns the text of each piece of a KerasNLP tokenizer, a space where it begins a word.

    A byte-pair piece that ends within a character ends with a replacement character.
    """
    pieces = pieces_of(tokenizer)
    if getattr(tokenizer, "merges", None) is None:
        return [piece.replace("\u2581", " ") for piece in pieces]
    numbers = dict(zip(byte_pairs.BYTES, byte_pairs.VALUES, strict=True))
    texts = []
    for piece in pieces:
        known = all(character in numbers for character in piece)
        values = bytes(numbers[character] for character in piece) if known else piece.encode()
        texts.append(values.decode(errors="replace"))
    return texts


def learn_vocabulary(lines: Iterable[str], size: int, notes: list[str] | None = None) -> list[str]:
    """Learns word pieces from text: lower case, accents stripped, words of at most 100 bytes.

    The `tokenizers` trainer numbers characters in the order of a hash map and breaks ties by these
    numbers, so its vocabulary varies from run to run. Passing all characters as special tokens
    fixes their numbers, and so the result.

    Of more than `MOST_WORDS` distinct words the rarest are left out.

    Args:
        lines: The training text.
        size: Number of pieces wanted, including the five special ones.
        notes: Gets a line if words are left out.

    Returns:
        At most `size` pieces, special tokens first; the same for the same text.

    Raises:
        DataError: The size is too small for the characters of the text.
    """
    import tokenizers

    words, is_cut = _count_words(lines)
    if is_cut and notes is not None:
        notes.append(
            f"the vocabulary is learned from the {MOST_WORDS:,} most frequent words: the text has "
            "more different ones"
        )
    counts: collections.Counter[str] = collections.Counter()
    for word, count in words.items():
        for character in set(word):
            counts[character] += count
    # Rare characters become [UNK]: at most a sixteenth of the pieces are first characters.
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    alphabet = sorted(ranked[: max(26, size // 16)])
    known = set(alphabet)
    words = {word: count for word, count in words.items() if known.issuperset(word)}
    inner = sorted({character for word in words for character in word[1:]})
    fixed = [*SPECIAL_TOKENS, *alphabet, *(f"##{character}" for character in inner)]
    if len(fixed) >= size:
        raise DataError(
            f"--vocabulary-size {size} has no room for the text's characters: "
            f"use at least {len(fixed) + 1}"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=fixed, show_progress=False
    )
    # In parts: the trainer keeps the places of all words of a string, and commas are millions.
    repeated = (
        " ".join([word] * min(words[word] - start, REPEATED))
        for word in sorted(words)
        for start in range(0, words[word], REPEATED)
    )
    with Waiting("learning the vocabulary"):
        tokenizer.train_from_iterator(repeated, trainer)
    pieces = tokenizer.get_vocab()
    return sorted(pieces, key=lambda piece: pieces[piece])


def fold_case(word: str) -> str:
    """Folds case as KerasHub does (NFKC_Casefold of Unicode), which composes characters."""
    if word.isascii():
        return word.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", word).casefold())


def _count_words(lines: Iterable[str]) -> tuple[dict[str, int], bool]:
    """Counts words as KerasHub's tokenizer looks them up.

    Accents are stripped, punctuation is apart, and then the case is folded (NFKC_Casefold), which
    also composes characters that the stripping of accents took apart, such as Korean syllables.

    Returns:
        At most `MOST_WORDS` words with their counts, and whether rarer ones are left out.
    """
    words: dict[str, int] = {}
    chunks: collections.Counter[str] = collections.Counter()
    characters, is_cut = 0, False
    for line in lines:
        chunks.update(line.split())
        characters += len(line)
        if len(chunks) > MOST_WORDS or characters > CHARACTERS_AT_ONCE:
            _add_words(words, chunks)
            chunks.clear()
            characters = 0
            if len(words) > 2 * MOST_WORDS:  # a word that becomes frequent later loses few counts
                words, is_cut = _most_frequent(words, 2 * MOST_WORDS), True
    _add_words(words, chunks)
    if len(words) > MOST_WORDS:
        words, is_cut = _most_frequent(words, MOST_WORDS), True
    return words, is_cut


def _add_words(words: dict[str, int], chunks: collections.Counter[str]) -> None:
    """Adds the words of chunks, which are separated by white space in a text, with their counts."""
    import tokenizers

    chunks.pop(UNKNOWN_IN_TEXT, None)
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False, strip_accents=True)
    splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
    for chunk, count in chunks.items():
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(chunk)):
            word = fold_case(word)
            # A longer one is always [UNK], and the trainer takes quadratic time for it. The fold of
            # "´" holds a space, and no piece may: KerasHub strips the lines of a vocabulary.
            if len(word.encode()) <= MAX_WORD_BYTES and not any(map(str.isspace, word)):
                words[word] = words.get(word, 0) + count


def _most_frequent(words: dict[str, int], most: int) -> dict[str, int]:
    """Returns the most frequent words; of equally frequent ones evenly spaced ones.

    Args:
        words: The words with their counts, more than `most`.
        most: Number of words to keep.
    """
    sizes = collections.Counter(words.values())  # how many words occur so often
    left = most
    for count in sorted(sizes, reverse=True):
        if sizes[count] > left:
            break
        left -= sizes[count]
    tied = sorted(word for word, times in words.items() if times == count)
    spaced = {tied[place * len(tied) // left] for place in range(left)}
    return {word: times for word, times in words.items() if times > count or word in spaced}


def vocabulary_once(text: Text, size: int, cache_dir: Path) -> list[str]:
    """Learns the vocabulary of a text's training split, or reads it from the cache.

    Args:
        text: A `data.text.Text`.
        size: Number of pieces wanted.
        cache_dir: The cache; vocabularies are stored in its folder `vocabularies`.
    """
    target = _place(text, size, cache_dir)

    def build(folder: Path) -> None:
        found, note = text.to_learn_from()
        notes = [note] if note is not None else []
        pieces = learn_vocabulary(live_line(found, "reading words"), size, notes)
        folder.mkdir()
        (folder / NOTES).write_text("".join(f"{line}\n" for line in notes), encoding="utf-8")
        (folder / "vocabulary.txt").write_text(
            "".join(f"{piece}\n" for piece in pieces), encoding="utf-8"
        )

    files.build_once(target, build, "vocabulary")
    return read_vocabulary(target / "vocabulary.txt")


def _place(text: Text, size: int, cache_dir: Path) -> Path:
    import tokenizers

    name = f"{text.sha256[:24]}-{size}-folded-tokenizers-{tokenizers.__version__}"
    return Path(cache_dir) / "vocabularies" / name


def vocabulary_notes(text: Text, size: int, cache_dir: Path) -> list[str]:
    """Returns lines about what `vocabulary_once` did not learn from; args as there."""
    notes = _place(text, size, cache_dir) / NOTES
    return notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []


def read_vocabulary(path: str | Path) -> list[str]:
    """Reads a vocabulary file: UTF-8, one piece per line.

    Raises:
        DataError: It cannot be read, is not UTF-8, repeats a piece, or lacks a special token.
    """
    try:
        with files.open_bytes(files.expand(path)) as stream:
            # Not splitlines(): it cuts at characters that a piece may hold, such as U+2028.
            lines = stream.read().decode().removesuffix("\n").split("\n")
            pieces = [line.removesuffix("\r") for line in lines]
    except UnicodeDecodeError as error:
        raise DataError(f"--vocabulary {path}: not UTF-8 at byte {error.start}") from error
    missing = [token for token in SPECIAL_TOKENS if token not in pieces]
    if missing:
        raise DataError(
            f"--vocabulary {path}: lacks {', '.join(missing)}; a BERT vocabulary has one piece per "
            f"line and contains {', '.join(SPECIAL_TOKENS)}"
        )
    ((piece, count),) = collections.Counter(pieces).most_common(1)
    if count > 1:
        raise DataError(f"--vocabulary {path}: the piece {piece!r} is repeated")
    return pieces


def vocabulary_sha256(pieces: Sequence[str]) -> str:
    """Returns the checksum of a vocabulary file with one piece per line."""
    content = "".join(f"{piece}\n" for piece in pieces)
    # A byte-level BPE from elsewhere may name half of a surrogate pair.
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()


def rules_of(layer) -> str:
    """Returns everything that determines what a KerasNLP layer makes of a text, for a cache's key.

    Args:
        layer: A tokenizer, or a preprocessor with one.
    """
    tokenizer = getattr(layer, "tokenizer", layer)
    settings = json.dumps(_settings(layer.get_config()), default=repr)
    proto = getattr(tokenizer, "proto", None)  # of SentencePiece: the pieces with their scores
    vocabulary = vocabulary_sha256(vocabulary_of(tokenizer))
    made_from = [type(layer).__name__, settings, vocabulary, proto, keras_nlp.__version__]
    if isinstance(tokenizer, keras_nlp.tokenizers.WordPieceTokenizer):
        made_from.append("without what is invisible")
    if getattr(tokenizer, "splits_words", False):
        made_from.append("words")
    return repr(tuple(made_from))


def _settings(config):
    """Returns a layer's configuration in one order, without its name and a model's precision."""
    if isinstance(config, dict):
        kept = config.keys() - {"name", "dtype"}
        return {key: _settings(config[key]) for key in sorted(kept)}
    if isinstance(config, list):  # KerasNLP lists special tokens in the order of a set
        return sorted((_settings(each) for each in config), key=repr)
    return config


def tokenize(lines: Iterable[str], tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Turns lines into token ids with Keras's tokenizer, each distinct word once.

    Any white space separates words, also a no-break space, which is a letter to Keras's tokenizer.
    Byte-level BPE gets one space before each word except a line's first. `<unk>` becomes [UNK], and
    so does a word of more than 100 bytes, by the rule of Keras's BERT tokenizer.

    Args:
        lines: The text; reads `LINES_AT_ONCE` of them at a time.
        tokenizer: Of KerasNLP, of a family with a `MaskedLM`.

    Yields:
        Per block of lines: the ids, int32 of shape (tokens,), and the number of ids of each line,
        int64 of shape (lines,).
    """
    space = " " if getattr(tokenizer, "merges", None) is not None else ""
    unknown_id = SpecialTokens.of(tokenizer).unknown
    unknown = {word: [unknown_id] for word in (UNKNOWN_IN_TEXT, space + UNKNOWN_IN_TEXT)}
    ids_of = IdsByWord(tokenizer, unknown)
    lines = iter(lines)
    while block := list(itertools.islice(lines, LINES_AT_ONCE)):
        rows = ids_of(block)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        yield np.fromiter(itertools.chain(*rows), np.int32, lengths.sum()), lengths


class IdsByWord:
    """Turns lines into token ids with Keras's tokenizer, each distinct word once; see `tokenize`.

    Args:
        tokenizer: Of KerasNLP.
        fixed: Ids of the words that the tokenizer does not decide, by word.
    """

    def __init__(self, tokenizer, fixed: Mapping[str, list[int]] | None = None):
        self.tokenizer, self.fixed = tokenizer, dict(fixed or {})
        self._known = dict(self.fixed)
        self._space = " " if getattr(tokenizer, "merges", None) is not None else ""

    def __call__(self, lines: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each line."""
        words_of_lines = [_words(line, self._space) for line in lines]
        if len(self._known) > KNOWN_WORDS:
            self._known = dict(self.fixed)
        known = self._known
        new = list(set(itertools.chain(*words_of_lines)) - known.keys())
        if new:
            ids_of_new = as_lists(self.tokenizer(with_plain_spaces(new, self.tokenizer)))
            known.update(zip(new, ids_of_new, strict=True))
        return [
            list(itertools.chain.from_iterable(map(known.__getitem__, words)))
            for words in words_of_lines
        ]


def with_plain_spaces(texts, tokenizer) -> tf.Tensor:
    """Replaces all other white space by spaces, and leaves out what is `INVISIBLE`.

    Two words with a no-break space between them would be one [UNK] to a tokenizer of word pieces.
    Other kinds of tokenizer know what it is, or have it among their bytes.

    Args:
        texts: strings, of any shape.
        tokenizer: of KerasNLP, of any family.
    """
    if not isinstance(tokenizer, keras_nlp.tokenizers.WordPieceTokenizer):
        return tf.convert_to_tensor(texts)
    texts = tf.strings.regex_replace(texts, OTHER_WHITE_SPACE, " ")
    return tf.strings.regex_replace(texts, INVISIBLE, "")


def _words(line: str, space: str) -> list[str]:
    words = line.split()
    return words[:1] + [space + word for word in words[1:]] if space else words


def as_lists(ids) -> list:
    """Returns a KerasNLP tokenizer's ids of several texts as lists; some make a ragged tensor."""
    return ids.to_list() if hasattr(ids, "to_list") else ids
