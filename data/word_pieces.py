"""WordPiece: a vocabulary learned from text, and text turned into token ids once, for all runs.

Keras's own `BertTokenizer` does the tokenising, so that training, `fill_mask` and the saved preset
agree to the letter. It works on each distinct word once, which makes it quick.
"""

import collections
import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tqdm

from data import cache, large_text, paths
from data.errors import DataError
from data.lines import longer_than
from data.pieces import pieces_by
from data.text import Text, text_sha256
from data.words import UNKNOWN_IN_TEXT, ids_of, numbered

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# A longer word is [UNK] as a whole, to Keras's tokenizer as to BERT's (there 100 letters).
MAX_WORD_BYTES = 100


def learn_vocabulary(lines: Iterable[str], size: int) -> list[str]:
    """Learns word pieces from text: lower case, accents stripped, words of at most 100 bytes.

    The `tokenizers` trainer numbers characters in the order of a hash map and breaks ties by these
    numbers, so it gives another vocabulary on each run. With all characters among the special
    tokens their numbers are fixed, and with them the result.

    Args:
        lines: the training text.
        size: number of pieces wanted, the five special ones included.

    Returns:
        At most `size` pieces, special tokens first; the same ones for the same text.

    Raises:
        DataError: the size has no room for the characters of the text.
    """
    import tokenizers

    words = _count_words(lines)
    counts: collections.Counter[str] = collections.Counter()
    for word, count in words.items():
        for character in set(word):
            counts[character] += count
    # Rare characters (a sixteenth of the pieces at most are first characters) become [UNK].
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    alphabet = sorted(ranked[: max(26, size // 16)])
    known = set(alphabet)
    words = {word: count for word, count in words.items() if known.issuperset(word)}
    inner = sorted({character for word in words for character in word[1:]})
    fixed = [*SPECIAL_TOKENS, *alphabet, *(f"##{character}" for character in inner)]
    if len(fixed) >= size:
        raise DataError(
            f"--vocabulary-size {size} has no room for the text's characters: "
            f"take at least {len(fixed) + 1}"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=fixed, show_progress=False
    )
    repeated = (" ".join([word] * count) for word, count in sorted(words.items()))
    tokenizer.train_from_iterator(repeated, trainer)
    pieces = tokenizer.get_vocab()
    return sorted(pieces, key=lambda piece: pieces[piece])


def vocabulary_once(text: Text, size: int, cache_dir: Path) -> list[str]:
    """Learns the vocabulary of a text's training split, or takes it from the cache.

    Args:
        text: a `data.text.Text`.
        size: number of pieces wanted.
        cache_dir: where `vocabularies/` lies.
    """
    target = Path(cache_dir) / "vocabularies" / f"{text_sha256(text)[:24]}-{size}"

    def build(folder: Path) -> None:
        pieces = learn_vocabulary(
            _with_progress(text.splits["train"], "learning the vocabulary"), size
        )
        folder.mkdir()
        content = "".join(f"{piece}\n" for piece in pieces)
        (folder / "vocabulary.txt").write_text(content, encoding="utf-8")

    cache.build_once(target, build, "vocabulary")
    return read_vocabulary(target / "vocabulary.txt")


def _with_progress(lines: Sequence[str], what: str):
    # Without a terminal there is no bar.
    return tqdm.tqdm(lines, desc=what, unit=" lines", disable=None)


def _count_words(lines: Iterable[str]) -> dict[str, int]:
    """Counts words as BERT splits them: lower case, accents stripped, punctuation apart.

    A word that every tokenizer takes for [UNK] has nothing to teach, and the trainer would take
    quadratic time for one of millions of letters.
    """
    import tokenizers

    chunks: collections.Counter[str] = collections.Counter()
    for line in lines:
        chunks.update(line.split())
    chunks.pop(UNKNOWN_IN_TEXT, None)
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
    words: collections.Counter[str] = collections.Counter()
    for chunk, count in chunks.items():
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(chunk)):
            if len(word.encode()) <= MAX_WORD_BYTES:
                words[word] += count
    return words


def read_vocabulary(path: str | Path) -> list[str]:
    """Reads a vocabulary file: UTF-8, one piece a line.

    Raises:
        DataError: no file that can be read, not UTF-8, a piece that stands twice, or a special
            token missing.
    """
    found = paths.readable_file(path, "--vocabulary")
    try:
        pieces = found.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"--vocabulary {path}: not UTF-8 at byte {error.start}") from error
    missing = [token for token in SPECIAL_TOKENS if token not in pieces]
    if missing:
        raise DataError(
            f"--vocabulary {path}: lacks {', '.join(missing)}; a BERT vocabulary has one piece a "
            f"line and holds {', '.join(SPECIAL_TOKENS)}"
        )
    if len(set(pieces)) != len(pieces):
        twice = next(p for p, n in collections.Counter(pieces).items() if n > 1)
        raise DataError(f"--vocabulary {path}: the piece {twice!r} stands there twice")
    return pieces


def vocabulary_sha256(pieces: Sequence[str]) -> str:
    """The checksum of a vocabulary, as its file with one piece a line has it."""
    return hashlib.sha256("".join(f"{piece}\n" for piece in pieces).encode()).hexdigest()


def tokenize(
    lines: Sequence[str], tokenizer, progress: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Turns lines into token ids with Keras's tokenizer, each distinct word once.

    Words are what stands between white space; `<unk>` becomes [UNK], and so does, by the rule of
    Keras's tokenizer, a run of more than 100 bytes without white space, punctuation or ideographs.
    The time is linear in the length of the text, whatever it holds.

    Args:
        lines: the text.
        tokenizer: a `keras_nlp.models.BertTokenizer`.
        progress: what the progress bar says, or None for no bar.

    Returns:
        ids, int32 of shape (tokens,), all lines concatenated, and offsets, int64 of shape
        (lines + 1,), where each line begins.
    """
    words = numbered(_with_progress(lines, progress) if progress else lines, tokenizer.split_on_cjk)
    pieces = pieces_by(tokenizer)(words.distinct)
    starts = np.cumsum(pieces.sizes, dtype=np.int64) - pieces.sizes
    return ids_of(words.numbers, words.in_line, pieces, starts)


def tokenize_once(
    text: Text, tokenizer, cache_dir: Path, drop_short: bool = False
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Tokenises all splits of a text, or takes them from the cache.

    A large split is tokenised on all cores and, stopped anywhere, resumed (`data.large_text`).

    Args:
        text: a `data.text.Text`.
        tokenizer: a `keras_nlp.models.BertTokenizer`.
        cache_dir: where `tokens/` lies.
        drop_short: leaves out lines of 100 bytes or fewer, headings mostly.

    Returns:
        (ids, offsets) by split, see `tokenize`.
    """
    target = Path(cache_dir) / "tokens" / tokens_key(text, tokenizer, drop_short)
    parts = target.with_name(f".{target.name}.parts")

    def build(folder: Path) -> None:
        folder.mkdir()
        for split, lines in text.splits.items():
            if drop_short:
                lines = longer_than(lines, 100)
            files = folder / f"{split}-ids.npy", folder / f"{split}-offsets.npy"
            what = f"tokenising {split}"
            if large_text.is_large(lines):
                large_text.tokenize_to_files(
                    lines,
                    tokenizer.split_on_cjk,
                    pieces_by(tokenizer),
                    parts / split,
                    *files,
                    what,
                )
            else:
                for file, array in zip(files, tokenize(lines, tokenizer, what), strict=True):
                    np.save(file, array)
        made_from = json.dumps(_fingerprint(text, tokenizer, drop_short), indent=1, sort_keys=True)
        (folder / "made-from.json").write_text(made_from)

    cache.build_once(target, build, "tokens")
    shutil.rmtree(parts, ignore_errors=True)
    return {
        split: (
            np.load(target / f"{split}-ids.npy", mmap_mode="r"),
            np.load(target / f"{split}-offsets.npy", mmap_mode="r"),
        )
        for split in text.splits
    }


def tokens_key(text: Text, tokenizer, drop_short: bool = False) -> str:
    """What the tokens of a text are called in the cache: whatever decides them is in it."""
    fingerprint = json.dumps(_fingerprint(text, tokenizer, drop_short), sort_keys=True)
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:24]


def _fingerprint(text: Text, tokenizer, drop_short: bool) -> dict:
    return {
        "text": text_sha256(text),
        "lines": drop_short,
        "vocabulary": vocabulary_sha256(tokenizer.vocabulary),
        "lowercase": tokenizer.lowercase,
        "strip_accents": tokenizer.strip_accents,
        "split_on_cjk": tokenizer.split_on_cjk,
        "version": 1,
    }
