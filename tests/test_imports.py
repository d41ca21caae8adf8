"""Checks, in the source, which packages import which, and that some names occur once."""

import ast
import collections
from pathlib import Path

import pytest

from tests import check_tests

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "recipes": {"training", "exports", "models", "callbacks", "distribution", "data", "machine"},
    "training": {"callbacks", "distribution", "data", "machine"},
    "launch": {"training", "distribution", "machine"},
    "exports": {"models", "data"},
    "models": {"distribution", "data"},
    "callbacks": {"distribution", "data", "machine"},
    "data": set(),
    "distribution": set(),
    "machine": set(),
}
OTHERS = ("tests", "benchmarks")
PRIVATE = ("keras.src", "keras_hub.src", "keras_nlp.src")


def files_in(*folders):
    return sorted(
        path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py")
    )


FILES = files_in(*MAY_IMPORT)


def imports(path):
    """Dotted names of all imports of a file, also of those within functions."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
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
    return {MODULES[name] for name in imports(path) if name in MODULES} - {path}


def test_there_are_files():
    assert Path("recipes/bert_mlm.py") in FILES and {p.parts[0] for p in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_each_folder_imports_what_it_may(folder):
    allowed = MAY_IMPORT[folder] | {folder}
    for path in files_in(folder):
        ours = {name.split(".")[0] for name in imports(path)} & {*MAY_IMPORT, *OTHERS}
        assert ours <= allowed, f"{path} imports {sorted(ours - allowed)}"


def test_no_recipe_imports_another():
    recipes = {path for path in files_in("recipes") if path.name != "__init__.py"}
    for path in recipes:
        assert not imported_files(path) & recipes, path


def test_no_circles():
    """Files import each other in one direction, so that each can be read from the ground up."""
    left = {path: imported_files(path) for path in FILES if path.name != "__init__.py"}
    while left:
        ready = [path for path, needs in left.items() if not needs & left.keys()]
        assert ready, "a circle among " + ", ".join(sorted(map(str, left)))
        for path in ready:
            del left[path]


def test_no_two_files_have_the_same_name():
    by_name = collections.defaultdict(list)
    for path in FILES:
        by_name[path.name].append(str(path))
    allowed = {"__init__.py", "__main__.py", "errors.py"}
    assert {n: p for n, p in by_name.items() if len(p) > 1 and n not in allowed} == {}


def test_data_never_sees_a_strategy():
    for path in files_in("data"):
        assert "tf.distribute" not in (ROOT / path).read_text(encoding="utf-8"), path


def test_private_names_of_keras_are_in_one_file():
    for path in files_in(*MAY_IMPORT, *OTHERS):
        private = {name for name in imports(path) if name.startswith(PRIVATE)}
        assert not private or path == Path("distribution/keras_compat.py"), path


def test_keras_is_not_taken_from_tensorflow():
    for path in files_in(*MAY_IMPORT):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert "tf.keras" not in text and "tensorflow.keras" not in text, path


def test_every_break_finds_its_code():
    """Each of `tests/breaks.toml` applies once and names a test that exists."""
    assert check_tests.mismatches(check_tests.read_breaks()) == []
