"""Extracts English prose that every machine has: the docstrings of the installed packages."""

import ast
import hashlib
import importlib
import inspect
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data import files
from data.splits import hash_of, split_of
from machine.cores import cores

PACKAGES = ("tensorflow", "keras", "keras_hub", "numpy")

# Part of the cache's name. Raise it when the extraction or the file format changes, so that no
# older result is read.
RULES_VERSION = 4

# Tests contain little prose, and `_api` and `_tf_keras` repeat other modules. NumPy has `distutils`
# for Python 3.11 alone.
SKIPPED_FOLDERS = {"_api", "_tf_keras", "distutils", "testing", "tests", "__pycache__"}
GENERATED_NAME = re.compile(r"(gen_.*|.*_pb2(_grpc)?|.*_generated|test_.*|.*_test|conftest)\.py")
GENERATED_MARK = re.compile(
    r"machine[- ]generated|do not edit|auto(matically)?[- ]?generated", re.IGNORECASE
)

# "Args:" or "Example usage:", alone on its line.
HEADING = re.compile(r"[A-Z][\w ,/`'()-]{0,60}:")
# "---" or "===" below a title, rows of tables ("| a | b |", "a   b   c"), "@compatibility(eager)".
RULE = re.compile(r"[-=~^*+#| ]{3,}|[|+@].*|.*\S {3,}\S.* {3,}\S.*")
BULLET = re.compile(r"([-*+•]|\(?\d{1,2}[.)]|\(?[a-z]\))\s+")
# "name: ...", "name, other: ...", "*args: ...", "ValueError: ...", "name (int): ..."
ARGUMENT = re.compile(r"[`'\"*]*\w[\w.]*[`'\"]*(, ?[`'\"*]*\w+[`'\"]*)*( ?\([^()]*\))?:\s+")
# "name : array_like, optional", which is how NumPy names an argument.
NUMPY_ARGUMENT = re.compile(r"[*\w, .]+ : \S.*")
CODE = re.compile(
    r"(>>>|\.\.\.(\s|$)|@\w|(import|from|def|class|return|print|assert|del|raise)\b[^.]*$"
    r"|(with|for|if|while|elif|else|try|except)\b.*:$"
    r"|[\w.\[\], '\"]+ [-+*/]?= ?\S|[\w.]+\(.*\)?[,;]?$|[)\]}]+[,;]?$|#|\$ |\.\. )"
)

WORD = re.compile(r"\(?[A-Za-z][a-z]*([-'/][A-Za-z]+)*\)?[.,;:!?]*\)?[.,]?")
COMMON = frozenset(
    "a an and are as be by can for from has have if in is it its not of on or that the this to"
    " was when which will with you".split()
)
MINIMUM_WORDS = 6

MODULES_PER_PROCESS = 500  # at least; starting a process takes as long as reading some hundred


def load_labelled_docs(cache_dir: Path) -> dict[str, list[list[str]]]:
    """Returns the paragraphs of the docstrings, each with its package.

    Parsing the packages takes some seconds; the result is cached under a fingerprint of their
    versions.

    Args:
        cache_dir: The folder of the cached result.

    Returns:
        Pairs of a paragraph and its package ("tensorflow", "keras", "keras_hub" or "numpy") by
        split: "train", "valid" and "test", about 90/5/5, decided by a hash of the module's path, so
        that no module is in two splits. A paragraph is one line. None appears twice: one that
        several packages contain belongs to the first of them.

    """
    return extracted_once(cache_dir, "installed-docs", RULES_VERSION, extract_prose)


def extracted_once(
    cache_dir: Path, name: str, rules_version: int, extract: Callable
) -> dict[str, list[list[str]]]:
    """Extracts pairs of texts from the installed packages, or takes them from the cache.

    Args:
        cache_dir: The folder of the cached result.
        name: Of the result, part of its folder's name.
        rules_version: Of the extraction; the versions of the packages decide, too.
        extract: Returns the pairs by split from the folders by package name.
    """
    modules = {package: importlib.import_module(package) for package in PACKAGES}
    versions = " ".join(f"{package} {module.__version__}" for package, module in modules.items())
    fingerprint = hashlib.sha256(f"{rules_version} {versions}".encode()).hexdigest()[:16]
    folder = Path(cache_dir) / f"{name}-{fingerprint}"

    def build(temporary: Path) -> None:
        roots = {package: Path(str(module.__file__)).parent for package, module in modules.items()}
        temporary.mkdir()
        (temporary / "prose.json").write_text(json.dumps(extract(roots)))

    files.build_once(folder, build, "reading the docstrings of the installed packages")
    return json.loads((folder / "prose.json").read_text())


def extract_prose(roots: dict[str, Path]) -> dict[str, list[list[str]]]:
    """Collects the prose of all docstrings below the folders of packages.

    Args:
        roots: Folders by package name.

    Returns:
        Pairs of a paragraph and its package by split, in the order of packages, paths and lines.
    """
    splits: dict[str, list[list[str]]] = {"train": [], "valid": [], "test": []}
    seen = set()
    print("reading the docstrings of the installed packages", file=sys.stderr, flush=True)
    modules = modules_of(roots)
    prose_of_modules = read_modules([path for _, _, path in modules])
    for (package, name, _), paragraphs in zip(modules, prose_of_modules, strict=True):
        for paragraph in paragraphs:
            # Copies that differ in case, spaces or punctuation alone are repeats, too.
            key = hash_of(re.sub(r"\W+", " ", paragraph.lower()))
            if key not in seen:
                seen.add(key)
                splits[split_of(f"{package}/{name}")].append([paragraph, package])
    return splits


def modules_of(roots: dict[str, Path]) -> list[tuple[str, str, Path]]:
    """Returns the modules that people wrote, in the order of packages and paths.

    Args:
        roots: Folders by package name.

    Returns:
        The package of each, its path below the package's folder, and its path.
    """
    modules = []
    for package, root in roots.items():
        paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
        for name, path in sorted(paths.items()):
            if SKIPPED_FOLDERS.intersection(name.split("/")) or GENERATED_NAME.fullmatch(path.name):
                continue
            modules.append((package, name, path))
    return modules


def read_modules(paths: Sequence[Path]) -> list[list[str]]:
    """Returns the prose of each module's docstrings, as a list of paragraphs.

    Large packages are read by a process per core: parsing takes most of the time, and threads would
    take turns.

    Args:
        paths: Python files.
    """
    processes = min(cores(), len(paths) // MODULES_PER_PROCESS)
    if processes < 2 or not sys.executable:
        return [
            [paragraph for docstring in _docstrings(path) for paragraph in prose(docstring)]
            for path in paths
        ]

    def read(part: Sequence[Path]) -> list[list[str]]:
        reader = subprocess.run(
            [sys.executable, "-m", __spec__.name],
            input=json.dumps(list(map(str, part))),
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[1],
            text=True,
            check=True,
            start_new_session=True,  # Ctrl-C is answered by the run, not by a traceback of each
        )
        return json.loads(reader.stdout)

    with ThreadPoolExecutor(processes) as pool:
        parts = list(pool.map(read, (paths[start::processes] for start in range(processes))))
    return [parts[number % processes][number // processes] for number in range(len(paths))]


def parsed(path: Path) -> ast.Module | None:
    """Returns the syntax tree of a module; None of one that is generated or has wrong syntax."""
    source = path.read_text("utf-8", errors="replace")
    if GENERATED_MARK.search(source[:2000]):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Invalid escapes in other people's strings.
        try:
            return ast.parse(source)
        except SyntaxError:
            return None


def _docstrings(path: Path) -> Iterator[str]:
    """Yields a module's docstrings in the order of their lines."""
    tree = parsed(path)
    if tree is None:
        return
    for node in [tree, *_statements(tree.body)]:
        docstring = None
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            # NumPy attaches the docstrings of C functions separately: add_newdoc("module", "name",
            # "docstring"), the last one also as ("method", "docstring").
            if getattr(node.value.func, "id", "") == "add_newdoc" and node.value.args:
                last = node.value.args[-1]
                last = last.elts[-1] if isinstance(last, ast.Tuple) else last
                if isinstance(last, ast.Constant) and isinstance(last.value, str):
                    docstring = inspect.cleandoc(last.value)
        if docstring:
            yield docstring


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields statements and nested statements in order, without those within expressions."""
    for node in body:
        yield node
        for field in ("body", "handlers", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, []))


def prose(docstring: str) -> Iterator[str]:
    """Yields the paragraphs of a docstring that read as English, each as one line.

    Drops code, tables, headings, lists of names and short fragments. Keeps the description of an
    argument without its name.

    Args:
        docstring: A docstring without its indentation.
    """
    for block in _blocks(docstring):
        if sum(bool(CODE.match(line.strip())) for line in block) * 3 > len(block):
            continue
        for paragraph in _paragraphs(block):
            text = plain(paragraph)
            if _reads_as_english(text):
                yield text


def _blocks(docstring: str) -> Iterator[list[str]]:
    """Yields the lines between empty lines, without fenced code, doctests and literal blocks."""
    block: list[str] = []
    fenced = False
    doctest = False  # Lasts until an empty line.
    literal = -1  # Indentation of the line that announced a literal block, or -1.
    for line in [*docstring.expandtabs().splitlines(), ""]:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if text.startswith("```"):
            fenced = not fenced and text.count("```") == 1
            continue
        doctest = bool(text) and (doctest or text.startswith(">>>"))
        if fenced or doctest:
            continue
        if text and literal >= 0:
            if indent > literal:
                continue
            literal = -1
        if text.startswith(".. "):
            literal = indent
            continue
        if text.endswith("::"):
            literal = indent
            line = line.rstrip().removesuffix(":")
        if text:
            block.append(line)
        elif block:
            yield block
            block = []


def _paragraphs(block: list[str]) -> Iterator[str]:
    """Splits a block where a list item begins or the indentation decreases."""
    paragraph: list[str] = []
    start = 0
    for line in block:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if HEADING.fullmatch(text) or RULE.fullmatch(text) or NUMPY_ARGUMENT.fullmatch(text):
            yield " ".join(paragraph)
            paragraph = []
            continue
        item = BULLET.match(text) or ARGUMENT.match(text)
        if item or indent < start:
            yield " ".join(paragraph)
            paragraph = []
        if not paragraph:
            start = indent
        paragraph.append(text[item.end() :] if item else text)
    yield " ".join(paragraph)


def plain(text: str) -> str:
    """Removes markup: roles, links, backticks, asterisks."""
    text = re.sub(r":[a-z:]+:`~?([^`<]*)[^`]*`", r"\1", text)
    text = re.sub(r"!?\[([^\[\]]*)\]\([^()]*\)", r"\1", text)
    text = re.sub(r"`([^`<]*) <[^`>]*>`_+", r"\1", text)
    text = re.sub(r"\*\*|`+_*", "", text)
    return re.sub(r"\s+", " ", text).strip()


def _reads_as_english(text: str) -> bool:
    parts = text.split()
    if len(parts) < MINIMUM_WORDS or not text.endswith((".", "!", "?", ":", ".)", '."')):
        return False
    words = sum(bool(WORD.fullmatch(part)) for part in parts)
    common = sum(part.lower().strip("(,.;:)") in COMMON for part in parts)
    return words >= 0.7 * len(parts) and common >= 0.1 * len(parts)


if __name__ == "__main__":  # a process of `read_modules()`, which reads its part alone
    MODULES_PER_PROCESS = sys.maxsize
    json.dump(read_modules([Path(path) for path in json.load(sys.stdin)]), sys.stdout)
