"""Checks, in the source, which packages import which, and that some names occur once."""

import ast
import collections
import re
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
    "data": {"machine"},
    "distribution": {"machine"},
    "machine": set(),
}
OTHERS = ("tests", "benchmarks")
PUBLIC = ("keras", "keras_hub", "keras_nlp", "tensorflow")  # whose private names are looked for
PRIVATE = re.compile(r"(keras|keras_hub|keras_nlp)\.src\b|tensorflow\.(python|compiler|core)\b")
# The package and the files that may use such names, and which.
KEEPERS = {
    Path("distribution/keras_compat"): "",
    Path("distribution/attention.py"): "tensorflow.compiler.tf2xla.ops",
    Path("machine/late_modules.py"): "keras.src.visualization",
}


def files_in(*folders):
    return sorted(
        path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py")
    )


FILES = files_in(*MAY_IMPORT)


def parsed(path):
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def imports(path):
    """Dotted names of all imports of a file, also of those within functions."""
    return imports_in(parsed(path))


def imports_in(tree):
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def names_used_in(tree):
    """Dotted names of what is imported, and of attributes of that, under their full names."""
    meaning = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                meaning[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            meaning |= {
                each.asname or each.name: f"{node.module}.{each.name}" for each in node.names
            }
    names = imports_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *more = ast.unparse(node).split(".")
            if first in meaning and all(map(str.isidentifier, more)):
                names.add(".".join([meaning[first], *more]))
    return names


def private_names_in(tree):
    """Names of Keras, KerasHub and TensorFlow that they may change at any time."""
    found = set()
    for name in names_used_in(tree):
        first, *more = name.split(".")
        is_hidden = any(part.startswith("_") and not part.endswith("__") for part in more)
        if PRIVATE.match(name) or (first in PUBLIC and is_hidden):
            found.add(name)
    return found


def private_modules_in_texts(tree):
    """Private modules that are imported by their names, as a text."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    texts = {text for text in texts if isinstance(text, str) and re.fullmatch(r"[\w.]+", text)}
    return set(filter(PRIVATE.match, texts))


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
        used = {name for name in names_used_in(parsed(path)) if "tensorflow.distribute" in name}
        assert not used, path


def test_private_names_are_in_one_package():
    for path in files_in(*MAY_IMPORT, *OTHERS):
        tree = parsed(path)
        private = private_names_in(tree)
        if path in FILES:
            private |= private_modules_in_texts(tree)
        allowed = next((KEEPERS[each] for each in (path, *path.parents) if each in KEEPERS), None)
        private = {name for name in private if allowed is None or not name.startswith(allowed)}
        assert not private, f"{path}: {sorted(private)}"


@pytest.mark.parametrize(
    "code",
    [
        "from tensorflow.python.framework import config",
        "from tensorflow.compiler.tf2xla.ops import gen_xla_ops",
        "def f():\n    import keras_hub.src.models as models",
        "import keras\nkeras.src.backend.Variable",
        "import tensorflow as tf\ntf.python.ops.math_ops",
        "import tensorflow as tf\ntf.data.Dataset._inputs",
        "from keras import layers as parts\nparts.Layer._losses = 1",
        "from keras.layers import _Merge",
    ],
)
def test_private_names_are_seen(code):
    assert private_names_in(ast.parse(code))
    (found,) = private_modules_in_texts(ast.parse("f('keras.src.saving', 'keras.saving', 3)"))
    assert found == "keras.src.saving"


def test_public_names_are_no_private_ones():
    code = "import tensorflow as tf\ntf.__version__\ntf.distribute.Strategy\nself._x\nmodel._y"
    assert private_names_in(ast.parse(code)) == set()
    assert "tensorflow.distribute.Strategy" in names_used_in(ast.parse(code))


def test_keras_is_not_taken_from_tensorflow():
    for path in files_in(*MAY_IMPORT):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert "tf.keras" not in text and "tensorflow.keras" not in text, path


def test_every_break_finds_its_code():
    """Each of `tests/breaks.toml` applies once and names a test that exists."""
    assert check_tests.mismatches(check_tests.read_breaks()) == []
