"""Markdown as TensorBoard's page of texts shows it."""

import html
from collections.abc import Sequence

SPECIAL = "|*_`[]\\#~+-"


def plain(text) -> str:
    """A text in which nothing is taken for Markdown or HTML."""
    escaped = html.escape(str(text).replace("\n", " "), quote=False)
    return "".join(f"&#{ord(sign)};" if sign in SPECIAL else sign for sign in escaped)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; its cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
