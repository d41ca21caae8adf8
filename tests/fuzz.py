"""Random options, damaged files and clusters: a command ends in a message, never in a traceback.

    python tests/fuzz.py --cases 1000 --seed 7
    python tests/fuzz.py --seed 7 --only 123   that case alone, with all that it prints

Allowed ends: status 0, 2 and 75, and 1 with a message. Not allowed: a traceback, death by a signal,
more than `SECONDS`, a folder that a refused command leaves behind. Each case is a fork of a process
that has imported TensorFlow and the recipes.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import processes, strategy_run  # noqa: E402

TRAINING = ("bert_mlm", "mnist", "dna_melting", "text_classification")
USING = ("evaluate", "predict", "export")
SECONDS = 120  # also where other work runs on the machine
BERT = "--vocabulary-size 120 --num-layers 1 --hidden-dim 16 --sequence-length 16"
SMALL = {
    "bert_mlm": f"--preset scratch {BERT}",
    "mnist": "--l2 0.01",
    "dna_melting": "--num-layers 1 --hidden-dim 8",
    "text_classification": BERT,
}
OPTIONS: dict[str, type] = {}

NUMBERS = (
    *(0, 1, 2, 7, -1, 2**31, 2**32, 2**63, 2**64, 10**9, 10**18, 10**400, -(2**63)),
    *("nan", "inf", "-inf", "1e-300", "1e-45", "1e38", "1e308", "1e400", "-0.0", "0.5", "0.999"),
)
WORDS = (
    *("", " ", "x" * 5000, "\udcff", "caf\udce9.txt", "None", "true", "[]", "{}", "1_0", "0x10"),
    *("٣", "--seed", "-", "--", "*", "%s%n", "{x}", "🙂", "a\nb", "\x1b[31mred", "val_loss"),
)
# In the folder of each case; nothing here lets a run write outside of it.
PATHS = (
    *("~nosuchuser/x", ".", "/dev/null", "/dev/full", "/proc/self", "loop/x", "a-file", "a-file/x"),
    *("empty", "new/a/b", "binary", "gone", "a-pipe", "x" * 256, "/".join(["y" * 200] * 25)),
)
JSONS = (
    *(None, True, 0, -1, 2**31, 10**400, 0.5, "", "x", "x" * 300, "\ud800", [], [1], [[]], {}),
    *({"a": 1}, {"options": 5}, "float64", "\0"),
)


def fitting_word(rng: random.Random, hint) -> str:
    """Returns a value, most often of the option's type, perhaps far from what it should be."""
    if rng.random() < 0.3:
        return str(rng.choice((*NUMBERS, *WORDS, *PATHS)))
    if "Literal" in str(hint):
        choices = [a for part in typing.get_args(hint) for a in (typing.get_args(part) or (part,))]
        return str(rng.choice([c for c in choices if c is not type(None)]))
    if "Path" in str(hint):
        return rng.choice(PATHS)
    is_number = "float" in str(hint) or "int" in str(hint)
    return str(rng.choice(NUMBERS if is_number else (*WORDS, *PATHS)))


def random_options(rng: random.Random, kind: type) -> dict[str, str | None]:
    hints = typing.get_type_hints(kind)
    # What keeps a case short and within its folder stays as it is.
    fixed = ("run_dir", "max_steps", "epochs", "inputs", "options")
    names = [f.name for f in dataclasses.fields(kind) if f.name not in fixed]
    found: dict[str, str | None] = {}
    for name in rng.sample(names, min(len(names), rng.randint(1, 4))):
        flag = "--" + name.replace("_", "-")
        if hints[name] is bool:
            found[rng.choice((flag, f"--no-{name}".replace("_", "-")))] = None
        else:
            found[flag] = fitting_word(rng, hints[name])
    return found


def changed_json(rng: random.Random, content):
    """Returns the same JSON with some value, at any depth, replaced, removed or added."""
    if not isinstance(content, dict) or not content or rng.random() < 0.1:
        return rng.choice(JSONS)
    name = rng.choice(list(content))
    if isinstance(content[name], dict) and rng.random() < 0.7:
        return content | {name: changed_json(rng, content[name])}
    if rng.random() < 0.2:
        return {key: value for key, value in content.items() if key != name}
    return content | {rng.choice((name, name, name, "x")): rng.choice(JSONS)}


def damage(rng: random.Random, path: Path) -> str:
    """Damages a file; returns how."""
    content = bytearray(path.read_bytes())
    how = rng.choice(["flipped", "cut", "removed", "longer"] + ["json"] * 4)
    if how == "json" and path.suffix == ".json" and content:
        text = json.dumps(changed_json(rng, json.loads(content)))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    elif how in ("flipped", "json") and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif how == "longer":
        path.write_bytes(content + rng.randbytes(rng.randint(1, 99)))
    else:
        path.unlink()
    return f"{path.parent.name}/{path.name}: {how}"


def on_a_line(words: dict[str, str | None]) -> list[str]:
    return [word for pair in words.items() for word in pair if word is not None]


def training_words(recipe: str, base: Path, run_dir: Path) -> dict[str, str | None]:
    words = f"{SMALL[recipe]} --epochs 1 --global-batch-size 8 --max-steps 2 --jit off".split()
    data = strategy_run.data_options(recipe, base)
    extra = {"--dataset": data["dataset"], "--run-dir": str(run_dir)}
    return dict(zip(words[::2], words[1::2], strict=True)) | extra


def make_case(seed: int, number: int, base: Path, folder: Path) -> tuple[str, list[str], dict, str]:
    """Returns a program, its command line, variables of its environment, and what was done."""
    rng = random.Random(f"{seed}/{number}")
    (folder / "empty").mkdir(parents=True)
    (folder / "loop").symlink_to("loop")
    (folder / "gone").symlink_to("nowhere")
    (folder / "a-file").write_text("one line of text\n" * 3)
    (folder / "binary").write_bytes(rng.randbytes(1000) + b"\0")
    os.mkfifo(folder / "a-pipe")
    recipe, program, kind = rng.choice(TRAINING), rng.choice(USING), rng.random()
    words, environ = training_words(recipe, base, folder / "run"), {}
    inputs = [rng.choice(("a [MASK]", *WORDS))] if program == "predict" else []
    if kind < 0.5:
        words |= random_options(rng, OPTIONS[recipe])
        return recipe, on_a_line(words), environ, "options"
    if kind < 0.6:
        run_dir = rng.choice((str(base / "runs" / recipe), *PATHS))
        options = on_a_line(random_options(rng, OPTIONS[program]))
        return program, [run_dir, *inputs, *options], environ, "options"
    if kind < 0.7:
        address = rng.choice(("a:1", "127.0.0.1:99999", "127.0.0.1:0", ":1", "", 5, None))
        task = {"type": rng.choice(("worker", "chief", "", 5)), "index": rng.choice(JSONS)}
        cluster = changed_json(rng, {"cluster": {"worker": [address]}, "task": task})
        return recipe, on_a_line(words), {"TF_CONFIG": json.dumps(cluster)}, "cluster"
    shutil.copytree(base / "runs" / recipe, folder / "run")
    files = [path for path in sorted((folder / "run").rglob("*")) if path.is_file()]
    what = ", ".join(damage(rng, path) for path in rng.sample(files, rng.randint(1, 3)))
    if kind < 0.85:
        return recipe, on_a_line(words), environ, what
    return program, [str(folder / "run"), *inputs], environ, what


def run(program: str, words: list[str], base: Path, folder: Path, **environ) -> tuple:
    """Returns the exit status (None: it had to be killed) and the output."""
    environ = {"HOME": str(folder), "RECIPES_CACHE_DIR": str(base / "cache"), **environ}
    process = processes.Forked("-m", f"recipes.{program}", *words, cwd=folder, **environ)
    try:
        output, _ = process.communicate(SECONDS)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        process.kill()


def problem_of(is_new: bool, folder: Path, status: int | None, output: str) -> str | None:
    """Returns what is not allowed about an end, or None."""
    if status is None:
        return f"no end within {SECONDS} s"
    if "Traceback" in output or "Exception ignored" in output:
        return "a traceback"
    if status not in (0, 1, 2, 75) or (status and not output.strip()):
        return f"status {status}"
    if status == 2 and is_new and (folder / "run").exists():
        return "a refused command left a folder behind"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, nargs="+", help="these cases of the seed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    numbers, failures = options.only or range(options.cases), []
    for name in (*TRAINING, *USING):  # before there are threads
        OPTIONS[name] = importlib.import_module(f"recipes.{name}").Options
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as name,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        base = Path(name)
        strategy_run.write_data(base)
        for recipe in TRAINING:  # the runs that are damaged later
            words = on_a_line(training_words(recipe, base, base / "runs" / recipe))
            status, output = run(recipe, words, base, base)
            assert status == 0, f"{recipe} ended with {status}\n{output}"

        def one(number: int):
            folder = base / f"case-{number}"
            program, words, environ, what = make_case(options.seed, number, base, folder)
            is_new = not (folder / "run").exists()
            status, output = run(program, words, base, folder, **environ)
            problem = problem_of(is_new, folder, status, output)
            shutil.rmtree(folder, ignore_errors=True)
            if problem or options.only:
                words = [word[:99] for word in words]
                print(f"\ncase {number}: {problem}, status {status}, {what} {environ}\n")
                print(f"recipes.{program} {words!a}\n{output[-2000:]!a}", flush=True)
            return [number] if problem else []

        for found in pool.map(one, numbers):
            failures += found
    print(f"seed {options.seed}: {len(numbers)} cases, {len(failures)} not allowed {failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
