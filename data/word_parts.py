"""Parts of a large text on the disk: the numbered words of a block of lines, whole or not there.

`python -m data.word_parts` is the worker that makes them, see `workers.serve`; it needs NumPy and
the standard library alone.
"""

import io
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data import workers
from data.words import NumberedWords, numbered

CHECKSUM_BYTES = 4


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays aside, then renames them: a CRC-32, then what `np.savez` makes of them.

    Args:
        path: the file.
        arrays: by name.
    """
    # The archive's own checksums leave out its tables, and are looked at too late.
    buffer = io.BytesIO(bytes(CHECKSUM_BYTES))
    buffer.seek(CHECKSUM_BYTES)
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    with buffer.getbuffer() as content:
        content[:CHECKSUM_BYTES] = _checksum(content)
        # A process that outlives its parent may still be writing the same part.
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_bytes(content)
    os.replace(aside, path)


def load(path: Path) -> dict[str, np.ndarray] | None:
    """What `save` wrote, or None where there is no such file or it is damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if content[:CHECKSUM_BYTES] != _checksum(memoryview(content)):
        return None
    with np.load(io.BytesIO(memoryview(content)[CHECKSUM_BYTES:])) as found:
        return dict(found)


def make_part(job: tuple[Sequence[str], bool, Path]) -> int:
    """Numbers the words of some lines and saves them: the lines, `split_on_cjk`, and the file.

    Returns:
        How many lines there were.
    """
    lines, split_on_cjk, path = job
    words = numbered(lines, split_on_cjk)
    # No word holds white space.
    distinct = np.frombuffer(" ".join(words.distinct).encode(), np.uint8)
    save(path, {"distinct": distinct, "numbers": words.numbers, "in_line": words.in_line})
    return len(lines)


def load_part(path: Path) -> NumberedWords | None:
    """What `make_part` saved, or None where there is no such file or it is damaged."""
    found = load(path)
    if found is None:
        return None
    distinct = found["distinct"].tobytes().decode()
    words = distinct.split(" ") if distinct else []
    return NumberedWords(words, found["numbers"], found["in_line"])


def _checksum(content: memoryview) -> bytes:
    return zlib.crc32(content[CHECKSUM_BYTES:]).to_bytes(CHECKSUM_BYTES, "little")


if __name__ == "__main__":
    workers.serve(make_part)
