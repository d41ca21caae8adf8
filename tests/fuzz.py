"""Wrong options, files and environments without end: each must end in a line, none in a traceback.

    python tests/fuzz.py                       200 cases; the seed is printed
    python tests/fuzz.py --cases 1000 --seed 7
    python tests/fuzz.py --seed 7 --only 123   that case alone, with all that it prints

A case is a command line of a recipe with some wild values, an `--options` file that no run wrote, a
run whose files were damaged, or a strange TF_CONFIG or SLURM variable. Allowed ends: status 0, 2 or
75, and 1 with a line that says why. Not allowed: a traceback, a death by a signal, more than 20
seconds, a folder that is left behind by a command that was refused, a `results.json` that is no
JSON. TensorFlow is imported once: each case is a fork of a process that has imported everything.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import multiprocessing
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data import checksums  # noqa: E402

TRAINING = ("bert_mlm", "mnist", "dna_melting", "text_classification")
ASKING = ("evaluate", "fill_mask", "classify")
SECONDS = 20  # of processing
PATIENCE = 180  # seconds of waiting, where other work runs beside it
# What native code writes, and Keras on a machine without GPUs.
NATIVE = re.compile(r"^([IWEF]\d{4} |WARNING: All log|\d{4}-\d\d-\d\d .*: [IWE] )")

# The smallest runs there are.
SMALL = {
    "bert_mlm": "--preset scratch --vocabulary-size 120 --num-layers 1 --hidden-dim 16 "
    "--sequence-length 16",
    "mnist": "--l2 0.01",
    "dna_melting": "--num-layers 1 --hidden-dim 8",
    "text_classification": "--vocabulary-size 120 --num-layers 1 --hidden-dim 16 "
    "--sequence-length 16",
}
DATA = {
    "bert_mlm": "text.txt",
    "mnist": "images",
    "dna_melting": "oligos.csv",
    "text_classification": "sentences",
}
SHORT = ("--epochs", "1", "--global-batch-size", "8", "--max-steps", "2", "--jit", "off")

INTEGERS = (
    *(0, 1, 2, 3, 7, -1, -7, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**9, 10**9 + 1, 10**18),
    *(10**400, -(10**400), -(2**63)),
)
NUMBERS = ("nan", "NaN", "inf", "-inf", "1e-300", "1e-45", "1e38", "1e308", "1e400", "-0.0", "0.5")
WORDS = (
    *("", " ", "x" * 300, "x" * 5000, "\udcff", "caf\udce9.txt", "None", "null", "true"),
    *("[]", "{}", "1_0", "0x10", "1e3", "٣", "--seed", "-", "--", "*", "[", "%s%n", "{x}", "🙂"),
    *("a\nb", "\x1b[31mred", "val_loss", "val_nonsense", "loss", "scratch", "float64"),
)
# In the folder of each case; nothing here lets a run write outside of it.
PATHS = (
    *("~nosuchuser", "~nosuchuser/x", "~", ".", "/dev/null", "/dev/full", "/proc/self/mem"),
    *("/proc/self", "loop", "loop/x", "a-file", "a-file/x", "empty", "empty-file", "new/a/b"),
    *("binary", "gone", "a-pipe", "x" * 255, "x" * 256, "/".join(["y" * 200] * 25), "not-utf8.csv"),
)
JSONS = (
    *(None, True, False, 0, 1, -1, 2**31, 10**400, 0.5, 1e308, "", "x", "x" * 300, "~nosuchuser"),
    *("\ud800", [], [1], [[]], {}, {"a": 1}, {"options": 5}, "float64", "none", "\0"),
)
TASKS = ("worker", "chief", "ps", "evaluator", "", None, 5, [])


@dataclasses.dataclass
class Case:
    """A command, and what it finds.

    Attributes:
        recipe: the program.
        words: its command line.
        environ: variables that are set.
        what: what was done, for a person.
    """

    recipe: str
    words: list[str]
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    what: list[str] = dataclasses.field(default_factory=list)


# --- What is wild ---


def wild_word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return str(rng.choice(INTEGERS))
    if kind < 0.45:
        return rng.choice(NUMBERS)
    return rng.choice(WORDS if kind < 0.7 else PATHS)


def fitting_word(rng: random.Random, hint) -> str:
    """A value of the type that the option has, perhaps far from what it should be."""
    text = str(hint)
    if typing.get_args(hint) and "Literal" in text:
        choices = [a for part in typing.get_args(hint) for a in (typing.get_args(part) or (part,))]
        return str(rng.choice([c for c in choices if c is not type(None)]))
    if "Path" in text:
        return rng.choice(PATHS)
    if "float" in text:
        return rng.choice((*NUMBERS, "0", "0.1", "1", "-1", "0.999"))
    if "int" in text:
        return str(rng.choice(INTEGERS))
    return rng.choice((*WORDS, *PATHS))


def wild_options(rng: random.Random, kind: type, most: int = 4) -> list[str]:
    words = []
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind) if f.name not in ("run_dir", "texts")]
    chosen = rng.sample(names, min(len(names), rng.randint(1, most)))
    if {"epochs", "max_steps"} <= set(chosen):
        chosen.remove("max_steps")  # one of them keeps the run short
    for name in chosen:
        flag = "--" + name.replace("_", "-")
        if hints[name] is bool:
            words.append(rng.choice((flag, f"--no-{name}", f"{flag}={rng.choice(WORDS)}")))
            continue
        value = fitting_word(rng, hints[name]) if rng.random() < 0.7 else wild_word(rng)
        words += [f"{flag}={value}"] if rng.random() < 0.3 else [flag, value]
    return words


def wild_json(rng: random.Random, content):
    """The same JSON with some value, at any depth, replaced, taken away or added."""
    content = json.loads(json.dumps(content))
    if not isinstance(content, dict) or not content or rng.random() < 0.1:
        return rng.choice(JSONS)
    at = content
    while True:
        name = rng.choice(list(at))
        if isinstance(at[name], dict) and at[name] and rng.random() < 0.7:
            at = at[name]
            continue
        kind = rng.random()
        if kind < 0.7:
            at[name] = rng.choice(JSONS)
        elif kind < 0.9:
            del at[name]
        else:
            at[rng.choice(WORDS)] = rng.choice(JSONS)
        return content


def write_json(path: Path, content) -> None:
    path.write_bytes(json.dumps(content).encode("utf-8", "surrogatepass"))


def damage(rng: random.Random, path: Path) -> str:
    """Spoils a file; returns how."""
    kinds = ["flipped", "cut", "emptied", "removed", "folder", "loop", "0xff", "longer"]
    if path.suffix == ".json":
        kinds += ["json"] * 12
    kind = rng.choice(kinds)
    content = bytearray(path.read_bytes()) if path.is_file() else bytearray()
    if kind in ("flipped", "cut", "0xff") and not content:
        kind = "removed"
    if kind == "json":
        try:
            write_json(path, wild_json(rng, json.loads(content)))
        except ValueError:
            kind = "emptied"
    if kind == "flipped":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "emptied":
        path.write_bytes(b"")
    elif kind == "0xff":
        place = rng.randrange(len(content))
        path.write_bytes(content[:place] + b"\xff" * rng.randint(1, 9) + content[place:])
    elif kind == "longer":
        path.write_bytes(content + rng.randbytes(rng.randint(1, 99)))
    elif kind in ("removed", "folder", "loop"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path.name)
    return kind


def remove(path: Path) -> None:
    """Removes what is there: a file, a link or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def wild_cluster(rng: random.Random) -> dict[str, str]:
    """TF_CONFIG and SLURM as no scheduler sets them; none of them waits for somebody else."""
    if rng.random() < 0.4:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
        chosen = rng.sample(names, rng.randint(1, 3))
        values = ("", "x", "-1", "1.5", "1", "0", "4(x2)", "9" * 400, "\udcff", "nan", "node[1-")
        return {name: rng.choice(values) for name in chosen}
    if rng.random() < 0.3:
        return {"TF_CONFIG": rng.choice(("{", "[]", "null", "5", '"x"', "\udcff", "[" * 10**5))}
    address = ("a:1", "127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1", ":1", "", "x" * 300, 5, None)
    tasks = {
        rng.choice(("chief", "evaluator", "")) if rng.random() < 0.2 else "worker": rng.choice(
            ("127.0.0.1:9", [], 5, {}, [rng.choice(address)], [rng.choice(address)] * 2)
        )
        for _ in range(rng.randint(0, 2))
    }
    tasks = {str(name): value for name, value in tasks.items()}
    task = {"type": rng.choice(TASKS), "index": rng.choice((0, -1, 1, "0", "x", 1.5, None, [], 9))}
    config = {"cluster": tasks, "task": task if rng.random() < 0.8 else rng.choice(JSONS)}
    if rng.random() < 0.2:
        config = wild_json(rng, config)
    return {"TF_CONFIG": json.dumps(config)}


# --- Cases ---


def make_case(seed: int, number: int, base: Path, folder: Path) -> Case:
    """A case, its files written below `folder`."""
    rng = random.Random(f"{seed}/{number}")
    folder.mkdir()
    for name in ("empty", "closed"):
        (folder / name).mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "a-file").write_text("one line of text\n" * 3)
    (folder / "empty-file").touch()
    (folder / "binary").write_bytes(rng.randbytes(1000) + b"\0")
    (folder / "not-utf8.csv").write_bytes(b"sentence,label\n\xff\xfe,1\n")
    os.mkfifo(folder / "a-pipe")
    (folder / "gone").symlink_to("nowhere")
    kind = rng.random()
    make = (
        case_of_options
        if kind < 0.45
        else case_of_an_options_file
        if kind < 0.6
        else case_of_a_damaged_run
        if kind < 0.9
        else case_of_a_cluster
    )
    return make(rng, base, folder)


def training_words(recipe: str, base: Path, run_dir: Path) -> list[str]:
    words = [*SMALL[recipe].split(), "--dataset", str(base / DATA[recipe]), "--run-dir"]
    return [*words, str(run_dir), *SHORT]


def options_of(recipe: str) -> type:
    return importlib.import_module(f"recipes.{recipe}").Options


def case_of_options(rng: random.Random, base: Path, folder: Path) -> Case:
    recipe = rng.choice(TRAINING + TRAINING + ASKING)
    wild = wild_options(rng, options_of(recipe))
    if recipe in ASKING:
        run = {"classify": "text_classification"}.get(recipe, "bert_mlm")
        run_dir = str(base / "runs" / run) if rng.random() < 0.7 else rng.choice(PATHS + WORDS)
        texts = (
            [] if recipe == "evaluate" else [rng.choice((*WORDS, "the [MASK] of", "[MASK]" * 9))]
        )
        return Case(recipe, [run_dir, *texts, *wild], what=["options"])
    words = training_words(recipe, base, folder / "run")
    if rng.random() < 0.1:
        wild += ["--run-dir", rng.choice(PATHS)]
    # What was given twice is given once: the wild one.
    return Case(recipe, without(words, wild) + wild, what=["options"])


def without(words: list[str], others: list[str]) -> list[str]:
    """The words without the options that others name; sizes that cannot wait stay."""
    named = {word.partition("=")[0] for word in others if word.startswith("--")}
    kept = []
    for name, value in zip(words[::2], words[1::2], strict=True):
        if name not in named:
            kept += [name, value]
    return kept


def case_of_an_options_file(rng: random.Random, base: Path, folder: Path) -> Case:
    recipe = rng.choice(TRAINING)
    path = folder / "options.json"
    shutil.copy(base / "runs" / recipe / "options.json", path)
    if rng.random() < 0.8:
        content = json.loads(path.read_text())
        for _ in range(rng.randint(1, 3)):
            content = wild_json(rng, content)
        # What a run may last stays as it is; without a dataset it would read all docstrings first.
        values = content.get("options", content) if isinstance(content, dict) else None
        if isinstance(values, dict):
            dataset = json.loads(path.read_text())["options"]["dataset"]
            values |= {"max_steps": 2, "epochs": 1, "dataset": values.get("dataset", dataset)}
        write_json(path, content)
        how = "json"
    else:
        how = damage(rng, path)
    words = ["--options", str(path), "--run-dir", str(folder / "run"), "--max-steps", "2"]
    return Case(recipe, words, what=[f"options file: {how}"])


def case_of_a_damaged_run(rng: random.Random, base: Path, folder: Path) -> Case:
    name = rng.choice(sorted(path.name for path in (base / "runs").iterdir()))
    recipe = name.removesuffix("-stopped")
    run_dir = shutil.copytree(base / "runs" / name, folder / "run", symlinks=True)
    case = Case(recipe, training_words(recipe, base, run_dir))
    if name.endswith("-stopped"):
        case.words[case.words.index("--max-steps") + 1] = "6"
    cache = shutil.copytree(base / "cache", folder / "cache", symlinks=True)
    case.environ["RECIPES_CACHE_DIR"] = str(cache)
    kind = rng.random()
    if name == "bert_mlm" and kind < 0.6:
        case.recipe = rng.choice(("evaluate", "fill_mask"))
        case.words = [str(run_dir)] + ["the [MASK] of"] * (case.recipe == "fill_mask")
    elif name == "text_classification" and kind < 0.6:
        case.recipe, case.words = "classify", [str(run_dir), "a text"]
    elif name == "bert_mlm" and kind < 0.8:
        case.recipe = rng.choice(("bert_mlm", "text_classification"))
        words = training_words(case.recipe, base, folder / "from")
        case.words = [*words, "--init-from", str(run_dir)]
    files = [p for p in sorted(run_dir.rglob("*")) if p.is_file()]
    if rng.random() < 0.5:
        files = [p for p in files if p.suffix in (".json", ".jsonl") or p.name == "SHA256SUMS"]
    if rng.random() < 0.15:
        files = [p for p in sorted(cache.rglob("*")) if p.is_file()]
    for path in rng.sample(files, min(len(files), rng.randint(1, 3))):
        case.what.append(f"{path.relative_to(folder)}: {damage(rng, path)}")
    if rng.random() < 0.25:
        for path in (run_dir / "model").glob("SHA256SUMS"):
            if path.is_file():
                path.unlink()
                case.what.append("model/SHA256SUMS: removed")
    if rng.random() < 0.2:  # as if somebody had edited them, and their checksums
        for folder_ in {p.parent for p in files if p.parent.name == "model" and p.parent.is_dir()}:
            remove(folder_ / checksums.SUMS)
            kept = [p.name for p in folder_.iterdir() if p.is_file()]
            checksums.write(folder_, kept)
        case.what.append("checksums: right again")
    if rng.random() < 0.1 and case.recipe in TRAINING:
        case.words += ["--resume", rng.choice(("extend", "never"))]
    return case


def case_of_a_cluster(rng: random.Random, base: Path, folder: Path) -> Case:
    recipe = rng.choice(TRAINING)
    words = training_words(recipe, base, folder / "run")
    environ = wild_cluster(rng)
    if rng.random() < 0.2:
        environ["RECIPES_CACHE_DIR"] = rng.choice([p for p in PATHS if p not in (".", "~")])
    if rng.random() < 0.3:
        words += ["--strategy", rng.choice(("none", "mirrored", "multi_worker", "central_storage"))]
    return Case(recipe, words, environ, what=["cluster"])


# --- Running them ---


def run_in_fork(recipe: str, words: list[str], environ: dict, cwd: str, stop: int) -> None:
    """The whole work of a forked process: a recipe as its command line."""
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(cwd, name), os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    for name in [n for n in os.environ if n.startswith("SLURM_") or n == "TF_CONFIG"]:
        del os.environ[name]
    os.environ.update(environ)
    sys.argv[:] = [recipe, *words]
    if stop:
        from tests.support.strategy_run import stop_after

        stop_after(stop)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from training.command_line import command_line

    module = importlib.import_module(f"recipes.{recipe}")
    command_line(module.Options, module.main)


class Runner:
    """Forks a process for each case."""

    def __init__(self, base: Path):
        self.base = base
        os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
        os.environ |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        # Nothing is downloaded, and nothing is asked of anybody.
        nobody = "http://127.0.0.1:9"
        os.environ |= {"http_proxy": nobody, "https_proxy": nobody, "HF_HUB_OFFLINE": "1"}
        os.environ.pop("TF_CONFIG", None)
        self.forks = multiprocessing.get_context("forkserver")
        self.forks.set_forkserver_preload([f"recipes.{name}" for name in TRAINING + ASKING])

    def run(self, case: Case, folder: Path, stop: int = 0) -> tuple[int | None, float, str]:
        """The exit status (None: it had to be killed), seconds of processing, and stderr."""
        environ = {"HOME": str(folder), "RECIPES_CACHE_DIR": str(self.base / "cache")}
        arguments = (case.recipe, case.words, environ | case.environ, str(folder), stop)
        process = self.forks.Process(target=run_in_fork, args=arguments)
        process.start()
        end, used = time.monotonic() + PATIENCE, 0.0
        while process.is_alive() and time.monotonic() < end and used < 2 * SECONDS:
            process.join(0.05)
            used = max(used, seconds_of(process.pid))
        status = process.exitcode
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass
        process.kill()
        process.join()
        text = (folder / "stderr").read_bytes() if (folder / "stderr").exists() else b""
        return status, used, text.decode(errors="backslashreplace")


def seconds_of(pid: int) -> float:
    """Seconds of processing of a process that runs; there may be two cores at work for it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prepare(runner: Runner, base: Path, pool: concurrent.futures.Executor) -> None:
    """The data, and runs that are finished or stopped; they fill the cache, too."""
    from tests.support import strategy_run

    strategy_run.write_data(base)
    (base / "runs").mkdir()

    def one(made: tuple[str, str, str, int]) -> None:
        name, suffix, steps, stop = made
        folder = base / f"prepare-{name}{suffix}"
        folder.mkdir()
        words = training_words(name, base, base / "runs" / f"{name}{suffix}")
        words[words.index("--max-steps") + 1] = steps
        words += ["--checkpoint-every", "1"] if suffix else []
        status, _, errors = runner.run(Case(name, words), folder, stop)
        if status != (75 if stop else 0):
            raise RuntimeError(f"{name}{suffix} ended with {status}\n{errors}")

    lengths = (("", "2", 0), ("-stopped", "6", 4))
    list(pool.map(one, [(name, *length) for name in TRAINING for length in lengths]))


def wrong(new: bool, folder: Path, status: int | None, used: float, errors: str) -> str | None:
    """What is not allowed about an end, or None."""
    if status is None:
        return f"no end: {used:.0f} s of processing"
    if "Traceback" in errors or "Exception ignored" in errors:
        return "a traceback"
    if status not in (0, 1, 2, 75):
        return f"status {status}"
    lines = [line for line in errors.splitlines() if line.strip() and not NATIVE.match(line)]
    if status in (1, 2) and not lines:
        return f"status {status} without a word"
    if status == 1 and len(lines) > 3:
        return f"status 1 and {len(lines)} lines"
    results = folder / "run" / "results.json"
    if status == 0 and results.is_file():
        try:
            json.loads(results.read_text(), parse_constant=lambda name: 1 / 0)
        except (ValueError, ZeroDivisionError):
            return "results.json is no JSON"
    if status == 2 and ((folder / "new").exists() or (new and (folder / "run").exists())):
        return "a refused command left a folder behind"
    return None


def fuzz(seed: int, numbers: list[int], jobs: int, verbose: bool = False) -> int:
    """Runs cases; returns how many ended as none may."""
    failures, counts, begun = [], {}, time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as name,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        base = Path(name)
        runner = Runner(base)
        prepare(runner, base, pool)
        print(f"seed {seed}, {len(numbers)} cases; prepared in {time.monotonic() - begun:.0f} s")

        def one(number: int):
            folder = base / f"case-{number}"
            case = make_case(seed, number, base, folder)
            new = not (folder / "run").exists()
            status, used, errors = runner.run(case, folder)
            problem = wrong(new, folder, status, used, errors)
            shutil.rmtree(folder, ignore_errors=True)
            return number, case, status, used, errors, problem

        slowest = 0.0
        for done in concurrent.futures.as_completed([pool.submit(one, n) for n in numbers]):
            if done.exception():  # of this program itself
                pool.shutdown(wait=False, cancel_futures=True)
            number, case, status, used, errors, problem = done.result()
            counts[status] = counts.get(status, 0) + 1
            slowest = max(slowest, used)
            if problem or verbose:
                shown = [f"{k}={v!a}"[:300] for k, v in case.environ.items() if "CACHE" not in k]
                words = shlex.join([w if len(w) < 99 else w[:60] + "..." for w in case.words])
                print(f"\ncase {number}: {problem}, status {status}, {'; '.join(case.what)}")
                print(f"  {' '.join(shown)} recipes.{case.recipe} {words!a}")
                print("  " + "\n  ".join(errors.splitlines()[-25:]))
            if problem:
                failures.append(number)
            total = sum(counts.values())
            if total % 50 == 0:
                print(f"{total} of {len(numbers)}, {time.monotonic() - begun:.0f} s", flush=True)
    ends = ", ".join(
        f"{count} x status {status}" for status, count in sorted(counts.items(), key=str)
    )
    print(f"seed {seed}: {ends}; the longest took {slowest:.1f} s of processing")
    print(f"{len(numbers)} cases in {time.monotonic() - begun:.0f} s, {len(failures)} not allowed")
    if failures:
        print(f"again: python tests/fuzz.py --seed {seed} --only {failures[0]}")
    return len(failures)


def main() -> int:
    parser = argparse.ArgumentParser(description="Wild options, files and environments.")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, nargs="+", help="these cases of the seed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    numbers = options.only or list(range(options.cases))
    return 1 if fuzz(options.seed, numbers, options.jobs, bool(options.only)) else 0


if __name__ == "__main__":
    sys.exit(main())
