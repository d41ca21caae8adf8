"""Changes one expression of a file at a time, and lists the changes that its tests do not notice.

    make mutation ARGS="training/plan.py tests/training/test_plan.py --number 30 --seed 1"

For breadth, beside the named breaks of `make check-tests`: comparisons are turned, numbers moved by
one, conditions negated, sums become differences. Some of what survives changes nothing that counts.
"""

import argparse
import ast
import concurrent.futures
import copy
import os
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.check_tests import ROOT, Break, Copies, DoesNotApply, broken_source  # noqa: E402

OTHER = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
}


def changed(node: ast.AST) -> ast.expr | None:
    """Returns the expression with one change, or None."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            new.ops = [OTHER[type(op)]()]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OTHER:
            new.op = OTHER[type(op)]()
        case ast.UnaryOp(op=ast.Not()):
            return new.operand
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float()):
            new.value += 1
        case _:
            return None
    return new


def mutants(file: str, tests: str) -> list[Break]:
    """Returns all changes of a file's functions that can be told apart by their code."""
    found = []

    def visit(node: ast.AST, path: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            is_named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            inside = (*path, child.name) if is_named else path
            new = changed(child) if path else None
            if new is not None:
                old, code = ast.unparse(child), ast.unparse(new)
                name = f"{'.'.join(path)}, line {child.lineno}: {old}  ->  {code}"
                found.append(Break(name, file, old, code, tests, ".".join(path)))
            visit(child, inside)

    def applies(mutant: Break) -> bool:
        try:
            return bool(broken_source(mutant))
        except DoesNotApply:
            return False

    visit(ast.parse((ROOT / file).read_text(encoding="utf-8")), ())
    return [mutant for mutant in found if applies(mutant)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="of the package")
    parser.add_argument("tests", nargs="+", help="files or node ids")
    parser.add_argument("--number", type=int, default=30, help="changes to try, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    every = mutants(options.file, options.tests[0])
    tried = random.Random(options.seed).sample(every, min(options.number, len(every)))
    with (
        tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        copies = Copies(Path(folder))
        print(f"{options.file}: {len(every)} changes, {len(tried)} of them tried", flush=True)
        assert copies.run(options.tests)[0] == "passes", "the tests fail without a change"
        outcomes = pool.map(lambda mutant: copies.run(options.tests, mutant)[0], tried)
        alive = [m for m, how in zip(tried, outcomes, strict=True) if how == "passes"]
    print("\n".join([m.name for m in alive] + [f"{len(alive)} of {len(tried)} were not noticed"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
