"""Breaks the code on purpose, one named break at a time, and checks that a test fails.

    make check-tests
    make check-tests ARGS="checkpoint --jobs 4"     # breaks whose name or file contains the word
    make check-tests ARGS="--match"                 # does each break still find its code?

`tests/breaks.toml` lists the breaks: `in` the file and function (`Class.method`; none: the whole
file), the code to replace and its replacement, and the test that must fail. Code is compared as
syntax, so moving or reformatting it does not matter; it must occur exactly once in its function.
Each break is made in a copy of the checkout. A test that cannot be collected or set up, or does not
end, catches nothing. The tests must pass in an unbroken copy first.

Breaks that were caught are remembered in `runs/check_tests.json` until the file, the test file or
the break changes; `--again` ignores that. TensorFlow is imported once: the tests run in forks of a
process that has imported everything but our own code.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
BREAKS = ROOT / "tests" / "breaks.toml"
CAUGHT = ROOT / "runs" / "check_tests.json"
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "runs", "__pycache__", ".*_cache", "*.egg-info"
)
IMPORTED_ONCE = ["keras", "keras_nlp", "tensorflow_text", "pytest", "tokenizers", "sklearn"]
SECONDS = 300  # of one test, broken or not


@dataclasses.dataclass(frozen=True)
class Break:
    """An error to put into the code.

    Attributes:
        name: what goes wrong.
        file: the file, relative to the checkout.
        old: an expression, a statement or a keyword argument.
        new: the code that replaces it.
        test: node id of the test that must fail.
        function: where the code is, such as `Checkpoint.save`; the whole file if empty.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    function: str = ""

    def key(self) -> str:
        """Returns a checksum of the break, the file and the test file."""
        files = [self.file, self.test.partition("::")[0]]
        parts = [repr(self).encode(), *((ROOT / file).read_bytes() for file in files)]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()


class DoesNotApply(Exception):
    """The break does not find its code, or finds it more than once."""


def read_breaks(patterns: list[str] = ()) -> list[Break]:
    entries = tomllib.loads(BREAKS.read_text(encoding="utf-8"))
    breaks = []
    for name, entry in entries.items():
        file, _, function = entry.pop("in").partition("::")
        breaks.append(Break(name, file, function=function, **entry))
    return [b for b in breaks if not patterns or any(p in b.name or p in b.file for p in patterns)]


@functools.cache
def parsed(content: bytes) -> ast.Module:
    """Returns the tree of a file, which nothing changes; many breaks are in the same one."""
    return ast.parse(content)


# The code of a node of such a tree, in Python's own layout.
unparsed = functools.cache(ast.unparse)


@functools.cache
def definitions(node: ast.AST) -> list[ast.AST]:
    """Returns the functions and classes in a node, its own before what they contain."""
    every = [*getattr(node, "body", []), *ast.walk(node)]
    return [child for child in every if isinstance(child, ast.FunctionDef | ast.ClassDef)]


def find_function(tree: ast.Module, qualified: str) -> ast.AST:
    """Returns the node of a function or class, found by its qualified name."""
    node: ast.AST = tree
    for name in filter(None, qualified.split(".")):
        named = [child for child in definitions(node) if child.name == name]
        inside = named[:1] if named and named[0] in node.body else named
        if len(inside) != 1:
            raise DoesNotApply(f"{len(inside)} definitions of {qualified}")
        (node,) = inside
    return node


def find_code(where: ast.AST, old: str) -> ast.AST:
    """Returns the one node in `where` that is the code `old`."""
    (wanted,) = ast.parse(old).body
    kinds: tuple = (type(wanted),)
    text = ast.unparse(wanted)
    if isinstance(wanted, ast.Expr):
        kinds = (type(wanted.value),)
    elif isinstance(wanted, ast.Assign):  # it looks like a keyword argument
        kinds = (ast.Assign, ast.keyword)
    texts = (text, text.replace(" = ", "=", 1))
    found = [n for n in ast.walk(where) if isinstance(n, kinds) and unparsed(n) in texts]
    if len(found) != 1:
        raise DoesNotApply(f"{len(found)} times in the function: {old}")
    return found[0]


def broken_source(broken: Break, root: Path = ROOT) -> str:
    """Returns the file's content with the break in it.

    Raises:
        DoesNotApply: the code is not there exactly once, or the result is no Python.
    """
    try:
        content = (root / broken.file).read_bytes()
        tree = parsed(content)
        node = find_code(find_function(tree, broken.function), broken.old)
        starts = [0, *itertools.accumulate(map(len, content.splitlines(keepends=True)))]
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        new = f"({broken.new})" if isinstance(node, ast.expr) else broken.new
        new = new.replace("\n", "\n" + " " * node.col_offset)
        edited = content[:begin] + new.encode() + content[end:]
        # Of the whole file, only the statement around it can have become no Python.
        around = next(n for n in tree.body if node.lineno <= n.end_lineno)
        first = min(n.lineno for n in (around, *getattr(around, "decorator_list", ())))
        after = starts[around.end_lineno] + len(edited) - len(content)
        ast.parse(edited[starts[first - 1] : after])
        if ast.dump(ast.parse(broken.new)) == ast.dump(ast.parse(broken.old)):
            raise DoesNotApply("nothing changes")
    except (OSError, SyntaxError) as error:
        raise DoesNotApply(str(error)) from None
    return edited.decode()


def mismatches(breaks: list[Break]) -> list[str]:
    """Returns what is wrong with breaks that do not apply, or whose test does not exist."""
    found = []
    for broken in breaks:
        try:
            broken_source(broken)
            file, *names = broken.test.split("::")
            body = parsed((ROOT / file).read_bytes()).body
            for name in names:
                named = [n for n in body if getattr(n, "name", None) == name.partition("[")[0]]
                if not named:
                    raise DoesNotApply(f"no test {broken.test}")
                body = named[0].body
        except (DoesNotApply, OSError) as error:
            found.append(f"{broken.file} {broken.function}: {broken.name}\n    {error}")
    return found


class Copies:
    """Runs tests in copies of the checkout."""

    def __init__(self, folder: Path):
        from tests.support import processes  # not needed to list or match breaks

        self.processes = processes
        # Read by the process that all others are forked from; it imports nothing of ours.
        os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
        os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ.pop("TF_CONFIG", None)
        self.processes.FORKS.set_forkserver_preload(IMPORTED_ONCE)
        self.folder = folder
        self.whole = shutil.copytree(ROOT, folder / "whole", ignore=NOT_COPIED, symlinks=True)

    def run(self, tests: list[str], broken: Break | None = None) -> tuple[str, str]:
        """Returns "passes", "fails", "cannot be run" or "does not end", and the output."""
        root = Path(tempfile.mkdtemp(dir=self.folder))
        shutil.copytree(self.whole, root, symlinks=True, dirs_exist_ok=True)
        if broken is not None:
            (root / broken.file).write_text(broken_source(broken, root), encoding="utf-8")
        words = ["-m", "pytest", "-x", "-n", "0", "-rfE", "--basetemp", str(root / ".tmp")]
        process = self.processes.Forked(*words, *tests, cwd=root, PYTHONPATH=str(root))
        try:
            output, _ = process.communicate(SECONDS * len(tests))
        except subprocess.TimeoutExpired:
            return "does not end", ""
        finally:
            process.kill()
            for link in Path("/proc").glob("[0-9]*/cwd"):  # what a killed test left behind
                with contextlib.suppress(OSError):
                    if Path(os.readlink(link)).is_relative_to(root):
                        os.kill(int(link.parent.name), signal.SIGKILL)
            shutil.rmtree(root, ignore_errors=True)
        if process.returncode == 0 and " skipped" not in output:
            return "passes", output
        has_failed = process.returncode == 1 and "\nFAILED " in output
        return ("fails" if has_failed else "cannot be run"), output


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the code; do the tests notice?")
    parser.add_argument("patterns", nargs="*", help="parts of names or files (default: all)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--match", action="store_true", help="list them: does each find its code?")
    parser.add_argument("--again", action="store_true", help="also what was caught before")
    options = parser.parse_args()
    breaks = read_breaks(options.patterns)
    wrong = mismatches(breaks)
    if wrong or options.match:
        print("\n".join(f"{b.file} {b.function}: {b.name}" for b in breaks), end="\n\n")
        print("\n".join([*wrong, f"{len(breaks) - len(wrong)} of {len(breaks)} find their code"]))
        return 1 if wrong else 0

    caught = json.loads(CAUGHT.read_text()) if CAUGHT.exists() else []
    states = {b.name: "caught before" for b in breaks if b.key() in caught and not options.again}
    left = [b for b in breaks if b.name not in states]
    by_file = collections.defaultdict(set)
    for broken in left:
        by_file[broken.test.partition("::")[0]].add(broken.test)
    with (
        tempfile.TemporaryDirectory(prefix="check-tests-", ignore_cleanup_errors=True) as folder,
        concurrent.futures.ThreadPoolExecutor(max(1, options.jobs)) as pool,
    ):
        copies = Copies(Path(folder))
        outcomes = pool.map(copies.run, map(sorted, by_file.values()))
        for (file, tests), (outcome, output) in zip(by_file.items(), outcomes, strict=True):
            if outcome != "passes":
                print(f"{file} without a break: {outcome}\n{output[-3000:]}", flush=True)
                states |= {b.name: "NOT tried" for b in left if b.test in tests}
        left = [b for b in left if b.name not in states]
        jobs = {pool.submit(copies.run, [broken.test], broken): broken for broken in left}
        for count, done in enumerate(concurrent.futures.as_completed(jobs), 1):
            broken, (outcome, _) = jobs[done], done.result()
            states[broken.name] = "caught" if outcome == "fails" else f"NOT caught: test {outcome}"
            print(f"[{count}/{len(left)}] {states[broken.name]}: {broken.name}", flush=True)
            if outcome == "fails":
                caught.append(broken.key())
                CAUGHT.parent.mkdir(exist_ok=True)
                CAUGHT.write_text(json.dumps(caught))
    print()
    for broken in sorted(breaks, key=lambda b: (states[b.name].startswith("caught"), b.file)):
        print(f"{states[broken.name]:30} {broken.file} {broken.function}: {broken.name}")
    number = sum(state.startswith("caught") for state in states.values())
    print(f"\n{number} of {len(breaks)} breaks caught")
    return 0 if number == len(breaks) else 1


if __name__ == "__main__":
    sys.exit(main())
