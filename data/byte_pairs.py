"""Byte-level byte-pair encoding (BPE), as GPT-2's: merges learned from text, lossless and cased.

A vocabulary is the 256 bytes, one token for each merge, and a model's special tokens at the end,
so a file of merges is all that describes it. Any text has tokens, and they give it back byte for
byte.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from data import files
from data.errors import DataError
from data.live_line import live_line
from data.text import Text

RULES_VERSION = 2  # part of the cache's name: raise it when the same text gives other merges

MERGES = "merges.txt"  # the name that GPT-2, transformers and KerasNLP give it
# GPT-2 writes a byte as a character: itself where it is printable, otherwise one from 256 on.
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(0xAE, 0x100)]
BYTES = [chr(byte) for byte in PRINTABLE] + [chr(256 + n) for n in range(256 - len(PRINTABLE))]
# The byte of each of these characters.
VALUES = [*PRINTABLE, *(byte for byte in range(256) if byte not in PRINTABLE)]
# The trainer takes quadratic time for a word, so runs of letters are cut: no merge is as long.
LONG_RUN = re.compile(r"(\S{1000})(?=\S)")


def learn_merges(lines: Iterable[str], size: int) -> list[str]:
    """Learns merges from text, split into words as GPT-2 does.

    The `tokenizers` trainer numbers the bytes in a fixed order and breaks ties by these numbers, so
    the same text gives the same merges (unlike its WordPiece trainer).

    Args:
        lines: The training text.
        size: Tokens wanted, the 256 bytes included.

    Returns:
        At most `size` - 256 merges of the form "left right"; fewer where no pair of tokens is left
        that occurs twice.

    Raises:
        DataError: No pair of bytes within a word occurs twice.
    """
    import json

    import tokenizers

    words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = words
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, initial_alphabet=words.alphabet(), show_progress=False
    )
    parts = (LONG_RUN.sub(r"\1\n", line.strip()) for line in lines)
    tokenizer.train_from_iterator(parts, trainer)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    if not merges:
        raise DataError("too little text to learn a vocabulary from: no pair of letters recurs")
    return merges


def merges_once(text: Text, size: int, cache_dir: Path) -> list[str]:
    """Learns the merges of a text's training split, or takes them from the cache.

    Args:
        text: A `data.text.Text`; of a large one a part is read, see `Text.to_learn_from`.
        size: Tokens wanted, the 256 bytes included.
        cache_dir: The cache; merges are stored in its folder `vocabularies`.
    """
    import tokenizers

    rules = f"rules-{RULES_VERSION}-tokenizers-{tokenizers.__version__}"
    target = Path(cache_dir) / "vocabularies" / f"{text.sha256[:24]}-bytes-{size}-{rules}"

    def build(folder: Path) -> None:
        lines = live_line(text.to_learn_from()[0], "learning the vocabulary")
        content = "".join(f"{merge}\n" for merge in learn_merges(lines, size))
        folder.mkdir()
        (folder / MERGES).write_text(content, encoding="utf-8")

    files.build_once(target, build, "vocabulary")
    return read_merges(target / MERGES)


def read_merges(path: str | Path) -> list[str]:
    """Reads a file of merges: UTF-8, one merge per line, "left right", in the order of learning.

    Raises:
        DataError: It cannot be read, is not UTF-8, or a line is not a merge of known tokens.
    """
    try:
        with files.open_bytes(files.expand(path)) as stream:
            lines = stream.read().decode().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"--vocabulary {path}: not UTF-8 at byte {error.start}") from error
    known, merges = set(BYTES), []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not known.issuperset(pair):
            raise DataError(
                f"--vocabulary {path}, line {number}: {line[:40]!r} is not a merge; expected two "
                "tokens with a space between them, each a byte or the result of a line above, as "
                f"in GPT-2's {MERGES}"
            )
        known.add("".join(pair))
        merges.append(line)
    return merges


def vocabulary_of(merges: Sequence[str], special: Sequence[str]) -> dict[str, int]:
    """Numbers the bytes, the results of the merges, and the special tokens.

    Special tokens come last, as in GPT-2: KerasNLP pads with token 0, which must not end a text.
    """
    tokens = dict.fromkeys([*BYTES, *(merge.replace(" ", "") for merge in merges), *special])
    return {token: number for number, token in enumerate(tokens)}
