"""What a command line is told before TensorFlow is imported, which takes ten times as long.

That is `--help`, `--version`, a shell's completion, and a line that does not parse. A recipe
imports Keras at its top, where a reader looks for it; so the class of its options is taken out of
the source, with the imports and constants that its fields name and no others.
"""

import ast
import re
import sys
import types
from pathlib import Path

from training.command_line import run_as_command, understand

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def options_of(path: Path) -> type | None:
    """The class `Options` of a program's source, made without the rest of the program.

    Its fields and docstrings are complete. Its methods lack the names that they take from the file:
    `problems()` is for the program itself.

    Args:
        path: the program's file.

    Returns:
        The class; None where there is none, or where it takes more than imports and constants.
    """
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    found = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Options"]
    if not found:
        return None
    needed = _names_outside_of_functions(found[0])
    body: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = [a for a in statement.names if (a.asname or a.name.split(".")[0]) in needed]
            if names:
                statement.names = names
                body.append(statement)
        elif isinstance(statement, ast.Assign):
            targets = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
            if targets & needed:
                body.append(statement)
    module = types.ModuleType(f"recipes.{path.stem} (options)", ast.get_docstring(tree))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where the fields' explanations are looked for
    tree.body = [*body, found[0]]
    try:
        exec(compile(tree, str(path), "exec"), vars(module))
    except (ImportError, NameError):
        return None
    return module.Options


def _names_outside_of_functions(node: ast.AST) -> set[str]:
    names = {node.id} if isinstance(node, ast.Name) else set()
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            names |= _names_outside_of_functions(child)
    return names


def programs() -> dict[str, str]:
    """The recipes and programs by name, and what each docstring says first."""
    found = {}
    for path in sorted(RECIPES.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(n, ast.ClassDef) and n.name == "Options" for n in tree.body):
            found[path.stem] = re.split(r"[:.\n]", ast.get_docstring(tree) or "")[0]
    return found


def started_as() -> str | None:
    """The program that `python -m recipes.X` is about to import; None in any other process.

    Python sets `sys.argv[0]` to "-m" for as long as it looks for the module.
    """
    if sys.argv[:1] != ["-m"]:
        return None
    named = sys.orig_argv[len(sys.orig_argv) - len(sys.argv)]
    match = re.fullmatch(r"(?:-\w*m)?recipes\.(\w+)", named)
    return match[1] if match else None


def answer(name: str, prog: str) -> None:
    """Answers the process's command line if that takes no TensorFlow, and exits then.

    Args:
        name: a program of this package.
        prog: the command that `--help` shows.
    """
    path = RECIPES / f"{name}.py"
    kind = options_of(path) if path.is_file() else None
    if kind is not None:
        run_as_command(name, lambda: understand(kind, prog=prog), leave_if_done=False)
