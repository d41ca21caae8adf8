"""The shape of the house, held against the source: who may import whom, and how long things are."""

import ast
from pathlib import Path

import pytest

from tests import check_tests

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "recipes": {"recipes", "training", "exports", "models", "callbacks", "distribution", "data"},
    "training": {"training", "callbacks", "distribution", "data"},
    "models": {"models", "distribution", "data"},
    "exports": {"exports", "models", "data", "training.errors"},
    "callbacks": {"callbacks", "distribution", "data.checksums"},
    "data": {"data"},
    "distribution": {"distribution"},
}
PRIVATE = ("keras.src", "keras_hub.src", "keras_nlp.src")
FILES = sorted(
    path.relative_to(ROOT) for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py")
)
EVERYWHERE = FILES + sorted(
    path.relative_to(ROOT)
    for folder in ("tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
LONGEST_FILE = 400  # lines, unless the docstring's first lines say why
LONGEST_MAIN = 60
LONGEST_REPEAT = 8


def source(path):
    return (ROOT / path).read_text(encoding="utf-8")


def imports(path):
    """Dotted names of all imports of a file, also of those within functions."""
    names = set()
    for node in ast.walk(ast.parse(source(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def module_of(path):
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imported_files(path):
    """Our own files that a file imports."""
    return {MODULES[name] for name in imports(path) if name in MODULES} - {path}


def is_program(path):
    """Whether a file of recipes/ is run by a person."""
    return "command_line(Options, main)" in source(path)


def main_of(path):
    functions = [n for n in ast.parse(source(path)).body if isinstance(n, ast.FunctionDef)]
    return next(node for node in functions if node.name == "main")


PROGRAMS = [path for path in FILES if path.parts[0] == "recipes" and is_program(path)]
TRAINING_RECIPES = [path for path in PROGRAMS if "training.run" in imports(path)]


def test_there_are_files():
    assert Path("recipes/bert_mlm.py") in FILES and len(FILES) > 50
    assert {"bert_mlm", "fill_mask", "evaluate"} <= {path.stem for path in PROGRAMS}
    assert {"bert_mlm", "mnist", "dna_melting"} <= {path.stem for path in TRAINING_RECIPES}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_each_folder_imports_what_it_may(path):
    allowed = MAY_IMPORT[path.parts[0]]
    for file in imported_files(path):
        module = module_of(file)
        if module != module.split(".")[0]:  # a folder's own __init__ comes with each of its files
            assert {module, module.split(".")[0]} & allowed, f"{path} imports {module}"
    foreign = {name.split(".")[0] for name in imports(path)} & {"tests", "benchmarks"}
    assert not foreign


@pytest.mark.parametrize("path", PROGRAMS, ids=str)
def test_no_recipe_imports_another(path):
    assert not imported_files(path) & set(PROGRAMS)


def test_no_circles():
    """Files import each other in one direction, so that each can be read from the ground up."""
    left = {path: imported_files(path) for path in FILES if path.name != "__init__.py"}
    while left:
        ready = [path for path, needs in left.items() if not needs & left.keys()]
        assert ready, "a circle among " + ", ".join(sorted(map(str, left)))
        for path in ready:
            del left[path]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_file_is_long_without_a_reason(path):
    text = source(path)
    opening = " ".join((ast.get_docstring(ast.parse(text)) or "").split()[:60])
    reason = "lines" in opening and "because" in opening
    assert len(text.splitlines()) <= LONGEST_FILE or reason


def test_no_block_stands_in_two_recipes():
    """A longer one belongs into training/, under a name of its own."""
    seen = {}
    for path in PROGRAMS:
        lines = [line.strip() for line in source(path).splitlines() if line.strip()]
        for start in range(len(lines) - LONGEST_REPEAT):
            block = tuple(lines[start : start + LONGEST_REPEAT + 1])
            assert seen.setdefault(block, path) == path, f"{path}, {seen[block]}: {block[0]}"


@pytest.mark.parametrize("path", TRAINING_RECIPES, ids=str)
def test_main_can_be_read_at_a_glance(path):
    main = main_of(path)
    assert main.end_lineno - main.lineno + 1 <= LONGEST_MAIN
    lines = source(path).splitlines()[main.lineno : main.end_lineno]
    for part in ("strategy.scope()", "model.compile(", "model.fit(", "model.evaluate("):
        assert any(part in line for line in lines), part


def test_data_never_sees_a_strategy():
    for path in FILES:
        if path.parts[0] == "data":
            assert "tf.distribute" not in source(path), path


@pytest.mark.parametrize("path", EVERYWHERE, ids=str)
def test_private_names_of_keras_stand_in_one_file(path):
    private = {name for name in imports(path) if name.startswith(PRIVATE)}
    assert not private or path == Path("distribution/keras_compat.py")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_keras_is_not_taken_from_tensorflow(path):
    text = source(path)
    assert "tf.keras" not in text and "tensorflow.keras" not in text


def test_every_break_applies():
    """Each of `tests/breaks.toml` finds its text once, and leaves Python."""
    breaks = check_tests.read_breaks()
    assert [b.name for b in breaks if check_tests.edited(b, ROOT) is None] == []
