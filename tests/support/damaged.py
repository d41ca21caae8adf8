"""Damages files."""

from pathlib import Path


def flip_a_bit(path: Path) -> None:
    """Changes one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
