"""The documentation's commands parse, its imports exist, its links lead somewhere."""

import ast
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from training.command_line import parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ON_A_PAGE = {"recipes.tumours", "callbacks.weight_norm"}  # modules that the pages write
PACKAGES = (
    *("recipes", "training", "models", "data", "callbacks", "distribution"),
    *("launch", "machine", "exports"),
)
FOLDERS = "|".join((*PACKAGES, "tests", "benchmarks", "notebooks"))


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands():
    """Each command of the pages' shell blocks, on one line and without its comment."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                yield page.name, re.sub(r"(^|\s{2,})#.*$", "", line).strip()


def recipe_commands():
    """(page, module, words) of each command that runs one of our modules, or makes a recipe."""
    for page, line in commands():
        made = re.search(r'make (?:PYTHON=\S+ )?([a-z_]+)(?: ARGS="(.*?)")?$', line)
        if made and (ROOT / "recipes" / f"{made[1]}.py").exists():
            yield page, f"recipes.{made[1]}", shlex.split(made[2] or "")
        line = line.replace("<date-time>", "date-time")
        for module, rest in re.findall(r"-m (recipes\.\w+)([^|&>]*)", line):
            if module not in ON_A_PAGE:
                yield page, module, shlex.split(rest)


SHOWN = list(recipe_commands())


def test_the_pages_show_commands():
    assert len(SHOWN) > 10 and {"recipes.bert_mlm", "recipes.compare"} <= {m for _, m, _ in SHOWN}


@pytest.mark.parametrize("page, module, words", SHOWN, ids=lambda part: str(part)[-60:])
def test_a_command_parses(page, module, words):
    if "--options" in words:  # a file that a run has written
        at = words.index("--options")
        words = words[:at] + words[at + 2 :]
    # It exits where an option is not known or a value is of no use.
    parse(importlib.import_module(module).Options, module, arguments=words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_imports_what_exists(page):
    for block in blocks(page, "python"):
        for line in re.findall(r"^\s*(from [\w.]+ import (?:\([^)]*\)|.*))$", block, re.M):
            (node,) = ast.parse(line.strip()).body
            for name in [alias.name for alias in node.names if node.module not in ON_A_PAGE]:
                module = importlib.import_module(node.module)
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_no_merge_is_half_done(page):
    assert not re.findall(r"^(?:<{7}|>{7}).*", page.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "mailto:")):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path) if path else page
            assert linked.exists(), target
            titles = re.findall(r"^#+ (.*)$", linked.read_text("utf-8"), re.M) if anchor else []
            slugs = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert not anchor or anchor in slugs, target
    for path in re.findall(rf"`((?:{FOLDERS})/[\w/]+\.\w+)(?:::\w+)*`", text):
        name = path.removesuffix(".py").replace("/", ".")
        assert (
            any((base / path).exists() for base in (ROOT, ROOT / "tests")) or name in ON_A_PAGE
        ), path


def test_targets_and_modules_exist():
    """Also those in the middle of a sentence."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    targets = " ".join(re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:`|^)make (?:PYTHON=\S+ )?([a-z][\w-]*)", text, re.MULTILINE))
    assert "test" in named and named - set(targets.split()) == set()
    modules = set(re.findall(r"python -m ([a-z_]+\.[a-z0-9_.]*[a-z0-9_])", text)) - ON_A_PAGE
    assert [name for name in modules if not importlib.util.find_spec(name)] == []


def test_the_tree_names_every_file():
    """Those of `docs/architecture.md`, each under its folder."""
    tree = blocks(ROOT / "docs" / "architecture.md", "text")[0]
    _, *split = re.split(r"^([a-z]+)/ ", tree, flags=re.MULTILINE)
    parts = dict(zip(split[::2], split[1::2], strict=True))
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*.py"):
            named = re.search(rf"\b{path.stem}\b", parts[folder])
            assert named or path.stem == "__init__" or path.name == "__main__.py", path
