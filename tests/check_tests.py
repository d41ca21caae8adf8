"""Breaks the code on purpose, one named break at a time, and sees whether the tests notice.

    make check-tests
    make check-tests ARGS="checkpoint --jobs 4"     # the breaks whose name or file holds this word
    make check-tests ARGS="--list"

`tests/breaks.toml` names each break: the promise that it breaks, the file, what stands there and
what stands there instead, and the tests that must fail. Each is made in a copy of the checkout. It
is caught by a test that fails; a test that cannot be collected or set up, or does not end, catches
nothing. First the tests must pass in an unbroken copy.

TensorFlow is imported once: the tests of each break run in a fork of a process that has imported
what is not ours, and take the broken copy's modules.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import io
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BREAKS = ROOT / "tests" / "breaks.toml"
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "runs", "__pycache__", ".*_cache", "*.egg-info"
)
IMPORTED_ONCE = ["keras", "keras_nlp", "tensorflow_text", "pytest", "tokenizers", "tyro", "sklearn"]
SECONDS = 300  # a break whose tests take longer is not caught

CAUGHT, UNSEEN, GONE = "caught", "NOT caught", "edit no longer applies"


@dataclasses.dataclass(frozen=True)
class Break:
    """A fault that is put into the code.

    Attributes:
        name: what is broken, in words.
        promise: what the README, the documentation or the module says, and is true no more.
        file: the file, relative to the checkout.
        old: text that stands there exactly once.
        new: what takes its place.
        tests: node ids, one of which must fail.
    """

    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How it went.

    Attributes:
        state: `CAUGHT`, `UNSEEN` or `GONE`.
        why: the test that failed, or why none did.
        seconds: how long it took.
    """

    state: str
    why: str
    seconds: float = 0.0


def read_breaks() -> list[Break]:
    found = tomllib.loads(BREAKS.read_text(encoding="utf-8"))["break"]
    breaks = [Break(**entry | {"tests": tuple(entry["tests"])}) for entry in found]
    twice = [n for n, count in collections.Counter(b.name for b in breaks).items() if count > 1]
    if twice:
        sys.exit(f"{BREAKS}: two breaks have the name {twice[0]!r}")
    return breaks


def edited(broken: Break, root: Path) -> str | None:
    """The file with the break in it; None where the edit does not apply, or leaves no Python."""
    try:
        content = (root / broken.file).read_text(encoding="utf-8")
    except OSError:
        return None
    if content.count(broken.old) != 1 or broken.old == broken.new:
        return None
    content = content.replace(broken.old, broken.new)
    if broken.file.endswith(".py"):
        try:
            ast.parse(content)
        except SyntaxError:
            return None
    return content


def run_tests(root: str, tests: list[str], words: list[str], output: str, pipe) -> None:
    """Runs tests of a copy of the checkout; the whole work of one forked process."""
    import pytest

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.path[:] = [root, *(p for p in sys.path if Path(p).resolve() not in (ROOT, ROOT / "tests"))]
    os.environ["PYTHONPATH"] = root
    os.chdir(root)
    # What tests fork themselves (tests/support/forked.py) comes from the same server.
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None
    found = {"failed": [], "error": [], "passed": [], "skipped": []}

    class Recorder:
        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.outcome != "passed":
                kind = report.outcome
                if report.when != "call" and kind == "failed":
                    kind = "error"
                found[kind].append(report.nodeid)

        def pytest_collectreport(self, report):
            if report.failed:
                found["error"].append(report.nodeid)

    words += ["--rootdir", root, "-c", f"{root}/pyproject.toml", "-p", "no:xdist"]
    pytest.main([*words, "--basetemp", f"{root}/.tmp", *tests], plugins=[Recorder()])
    for package in ("recipes", "training", "data", "callbacks", "distribution", "models"):
        module = sys.modules.get(package)
        if module is not None and not str(module.__file__).startswith(root):
            found["error"].append(f"{package} came from {module.__file__}")
    sys.stdout.flush()
    pipe.send(found)


class Copies:
    """Runs tests in copies of the checkout, each in a fork of one process."""

    def __init__(self, folder: Path):
        # Read by the server that is forked from.
        os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
        os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ.pop("TF_CONFIG", None)
        self.forks = multiprocessing.get_context("forkserver")
        self.forks.set_forkserver_preload(IMPORTED_ONCE)
        # Its standard error would tell of CUDA, and of what tests that were ended left behind.
        stderr = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        multiprocessing.forkserver.ensure_running()
        os.dup2(stderr, 2)
        self.folder = folder
        self.sound = folder / "sound"
        shutil.copytree(ROOT, self.sound, ignore=NOT_COPIED, symlinks=True)

    def run(self, number: int, tests, broken: Break | None = None) -> tuple[dict | None, str]:
        """What came of each test, None after the time limit; and what was printed."""
        root = self.folder / str(number)
        shutil.copytree(self.sound, root, symlinks=True)
        if broken is not None:
            (root / broken.file).write_text(edited(broken, root), encoding="utf-8")
        output = root / ".output"
        ours, theirs = self.forks.Pipe()
        words, seconds = (["-x"], SECONDS) if broken else ([], 5 * SECONDS)
        arguments = (str(root), list(tests), words, str(output), theirs)
        process = self.forks.Process(target=run_tests, args=arguments)
        process.start()
        theirs.close()
        try:
            found = ours.recv() if ours.poll(seconds) else None
            process.join(5 if found else 0)
        except EOFError:
            found = {"failed": [], "error": ["the process ended without a word"]}
        finally:
            process.kill()
            process.join()
            kill_all_in(root)
        text = output.read_text(errors="replace") if output.exists() else ""
        shutil.rmtree(root, ignore_errors=True)
        return found, text


def kill_all_in(folder: Path) -> None:
    """Ends what tests that were cut off have left: each has the copy as its working folder."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(link)).is_relative_to(folder):
                os.kill(int(link.parent.name), signal.SIGKILL)


def check(number: int, broken: Break, copies: Copies) -> Outcome:
    begun = time.monotonic()
    found, _ = copies.run(number, broken.tests, broken)
    seconds = time.monotonic() - begun
    if found is None:
        return Outcome(UNSEEN, f"no end within {SECONDS} s", seconds)
    if found["failed"]:
        return Outcome(CAUGHT, found["failed"][0], seconds)
    if found["error"]:
        return Outcome(UNSEEN, f"could not be run: {found['error'][0]}", seconds)
    return Outcome(UNSEEN, "its tests pass", seconds)


def baseline(number: int, tests: list[str], copies: Copies) -> dict[str, str]:
    """What is wrong with tests of one file in the unbroken copy, by node id; empty if nothing."""
    found, text = copies.run(number, tests)
    if found is None:
        return dict.fromkeys(tests, f"no end within {5 * SECONDS} s")
    wrong = {}
    for test in tests:
        ran = {kind: [n for n in names if belongs(n, test)] for kind, names in found.items()}
        if not ran.get("passed") or ran["failed"] or found["error"]:
            wrong[test] = text[-3000:]
    return wrong


def belongs(node: str, test: str) -> bool:
    return node == test or node.startswith((f"{test}[", f"{test}::"))


def chosen(breaks: list[Break], patterns: list[str]) -> list[Break]:
    def fits(broken: Break, pattern: str) -> bool:
        return any(
            fnmatch.fnmatchcase(text, pattern) or pattern in text
            for text in (broken.name, broken.file)
        )

    return [b for b in breaks if not patterns or any(fits(b, p) for p in patterns)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the code; do the tests notice?")
    parser.add_argument("patterns", nargs="*", help="parts of names or files (default: all)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--list", action="store_true", help="print the breaks and their promises")
    options = parser.parse_args()
    breaks = chosen(read_breaks(), options.patterns)
    if not breaks:
        sys.exit(f"no break is called like {' or '.join(options.patterns)}")
    if options.list:
        for broken in breaks:
            print(f"{broken.file}: {broken.name}\n    {broken.promise}")
        return 0
    # A line at a time, also into a pipe.
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, "utf-8", line_buffering=True)
    begun = time.monotonic()
    outcomes: dict[str, Outcome] = {
        b.name: Outcome(GONE, b.file) for b in breaks if edited(b, ROOT) is None
    }
    left = [b for b in breaks if b.name not in outcomes]
    by_file = collections.defaultdict(set)
    for test in (test for broken in left for test in broken.tests):
        by_file[test.partition("::")[0]].add(test)
    with (
        tempfile.TemporaryDirectory(prefix="check-tests-", ignore_cleanup_errors=True) as folder,
        concurrent.futures.ThreadPoolExecutor(max(1, options.jobs)) as pool,
    ):
        copies = Copies(Path(folder))
        tests = sum(map(len, by_file.values()))
        print(f"{len(breaks)} breaks; first {tests} tests of {len(by_file)} files, unbroken")
        jobs = {
            pool.submit(baseline, 10_000 + n, sorted(group), copies): file
            for n, (file, group) in enumerate(by_file.items())
        }
        wrong: dict[str, str] = {}
        for count, done in enumerate(concurrent.futures.as_completed(jobs), 1):
            wrong |= done.result()
            if done.result():
                print(f"{jobs[done]} unbroken:\n{next(iter(done.result().values()))}")
            if count % 10 == 0:
                print(f"unbroken: {count} of {len(jobs)} files")
        print(f"unbroken: {tests - len(wrong)} of {tests} pass, {time.monotonic() - begun:.0f} s")
        for broken in left:
            bad = [test for test in broken.tests if test in wrong]
            if bad:
                outcomes[broken.name] = Outcome(UNSEEN, f"not sound without the break: {bad[0]}")
        left = [b for b in left if b.name not in outcomes]
        jobs = {pool.submit(check, n, b, copies): b for n, b in enumerate(left)}
        for count, done in enumerate(concurrent.futures.as_completed(jobs), 1):
            broken, outcome = jobs[done], done.result()
            outcomes[broken.name] = outcome
            print(
                f"[{count}/{len(left)}] {outcome.state:10} {outcome.seconds:5.1f} s  "
                f"{broken.file}: {broken.name}" + f"; {outcome.why}" * (outcome.state != CAUGHT)
            )
    return print_table(breaks, outcomes, time.monotonic() - begun)


def print_table(breaks: list[Break], outcomes: dict[str, Outcome], seconds: float) -> int:
    print()
    for broken in sorted(breaks, key=lambda b: (outcomes[b.name].state == CAUGHT, b.file)):
        outcome = outcomes[broken.name]
        print(f"{outcome.state:22} {broken.file}: {broken.name}")
        print(f"{'':22} {outcome.why}")
    counts = collections.Counter(outcome.state for outcome in outcomes.values())
    print(f"\n{len(breaks)} breaks in {seconds:.0f} s: ", end="")
    print(", ".join(f"{counts[state]} {state}" for state in (CAUGHT, UNSEEN, GONE)))
    return 0 if counts[CAUGHT] == len(breaks) else 1


if __name__ == "__main__":
    sys.exit(main())
