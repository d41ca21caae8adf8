"""Extracts pairs that every machine has: functions of the installed packages, and what they do."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from data import installed_docs
from data.live_line import live_line
from data.prompts import Prompts
from data.splits import fold, split_of

NAME = "installed-docs"
# Part of the cache's name: raise it when the same packages give other pairs.
RULES_VERSION = 1
# Words of a summary. Longer ones tell how a function works, not what it does.
WORDS = range(3, 25)
LONGEST_DEFAULT = 20  # characters of a default value; a longer one is shown as "..."
SENTENCE = re.compile(r"(.+?[.!?])(\s+[A-Z`\"(]|\s*$)")


def load_summaries(cache_dir: Path) -> Prompts:
    """Returns signatures of functions and classes, each with the first sentence of its docstring.

    Parsing the packages takes some seconds; the result is cached.

    Args:
        cache_dir: The folder of the cached result.

    Returns:
        Pairs such as ("cumsum(x, axis=None)", "Returns the cumulative sum of elements along a given
        axis.") by split, about 90/5/5, decided by a hash of the module's path, so that no module is
        in two splits. No signature and no sentence appears twice, also in other case or spacing.
    """
    stored = installed_docs.extracted_once(
        cache_dir, "installed-summaries", RULES_VERSION, extract_summaries
    )
    return Prompts(NAME, {split: [(a, b) for a, b in pairs] for split, pairs in stored.items()})


def extract_summaries(roots: dict[str, Path]) -> dict[str, list[tuple[str, str]]]:
    """Collects the summaries below the folders of packages.

    Args:
        roots: Folders by package name.

    Returns:
        Pairs of a signature and a sentence by split, in the order of packages, paths and lines.
    """
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "valid": [], "test": []}
    signatures: set[str] = set()
    sentences: set[str] = set()
    modules = installed_docs.modules_of(roots)
    for package, name, path in live_line(modules, "reading the installed packages"):
        for signature, sentence in summaries(path):
            keys = fold(signature), fold(sentence)
            if keys[0] in signatures or keys[1] in sentences:
                continue
            signatures.add(keys[0])
            sentences.add(keys[1])
            splits[split_of(f"{package}/{name}")].append((signature, sentence))
    return splits


def summaries(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the signature and the summary of each function and class of a module.

    Args:
        path: A Python file.
    """
    tree = installed_docs.parsed(path)
    if tree is not None:
        yield from _in_body(tree.body, "")


def _in_body(body: list[ast.stmt], owner: str) -> Iterator[tuple[str, str]]:
    """Yields pairs from statements, and from the classes among them."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            sentence = first_sentence(ast.get_docstring(node) or "")
            if sentence is not None:
                yield owner + _signature(node), sentence
        if isinstance(node, ast.ClassDef):
            yield from _in_body(node.body, f"{node.name}.")


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Returns a name with the names and short defaults of its arguments, or with its bases."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}({', '.join(ast.unparse(base) for base in node.bases)})"
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    for defaults in (arguments.defaults, arguments.kw_defaults):
        for place, default in enumerate(defaults):
            if default is not None and len(ast.unparse(default)) > LONGEST_DEFAULT:
                defaults[place] = ast.Constant(...)
    first = [*arguments.posonlyargs, *arguments.args][:1]
    listed = ast.unparse(arguments)
    if first and first[0].arg in ("self", "cls"):
        listed = listed.removeprefix(first[0].arg).removeprefix(", ")
    return f"{node.name}({listed})"


def first_sentence(docstring: str) -> str | None:
    """Returns the first sentence of a docstring as one line; None where it has none.

    Args:
        docstring: Without its indentation.
    """
    paragraph = docstring.strip().split("\n\n")[0]
    found = SENTENCE.match(installed_docs.plain(paragraph))
    if found is None or len(found[1].split()) not in WORDS:
        return None
    return found[1]
