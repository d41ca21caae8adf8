"""Who may import whom: a table, held against the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "recipes": {"recipes", "callbacks", "data", "distribution"},
    "callbacks": {"callbacks", "distribution"},
    "data": {"data"},
    "distribution": {"distribution"},
}
PRIVATE = ("keras.src", "keras_hub.src", "keras_nlp.src")
FILES = [path.relative_to(ROOT) for folder in MAY_IMPORT for path in (ROOT / folder).glob("*.py")]
EVERYWHERE = [
    path.relative_to(ROOT)
    for folder in (*MAY_IMPORT, "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
]


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


def is_recipe(path):
    """Whether a file of recipes/ is run by a person."""
    return "command_line(Options, main)" in (ROOT / path).read_text(encoding="utf-8")


def test_there_are_files():
    assert Path("recipes/bert_mlm.py") in FILES and len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=str)
def test_each_folder_imports_what_it_may(path):
    ours = {name.split(".")[0] for name in imports(path)} & {*MAY_IMPORT, "tests", "benchmarks"}
    assert ours <= MAY_IMPORT[path.parts[0]]


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[0] == "recipes"], ids=str)
def test_no_recipe_imports_another(path):
    recipes = {f"recipes.{p.stem}" for p in FILES if p.parts[0] == "recipes" and is_recipe(p)}
    assert {"recipes.bert_mlm", "recipes.fill_mask", "recipes.evaluate"} <= recipes
    assert not imports(path) & recipes


def test_data_never_sees_a_strategy():
    for path in FILES:
        if path.parts[0] == "data":
            assert "tf.distribute" not in (ROOT / path).read_text(encoding="utf-8"), path


@pytest.mark.parametrize("path", EVERYWHERE, ids=str)
def test_private_names_of_keras_stand_in_one_file(path):
    private = {name for name in imports(path) if name.startswith(PRIVATE)}
    assert not private or path == Path("distribution/keras_compat.py")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_keras_is_not_taken_from_tensorflow(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert "tf.keras" not in text and "tensorflow.keras" not in text
