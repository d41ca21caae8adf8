"""Compares the recipe with others on a GPU, side by side in turns, for `make bench-gpu`.

    python benchmarks/gpu.py [--trainer-python PYTHON] [--minutes 12] [--only WORD ...]
    python benchmarks/gpu.py --tiny      # a tiny model, on the CPU too: does this program work?

In each group the recipe trains beside others, each in a separate process, and they take turns
(`sides.py`); each speed and ratio is the median over the turns. `mfu` is the speed over that of a
large matrix product, which takes turns like the others. The seconds to the first step count from
the end of the imports, with an empty cache and with that of a first process, while nothing else
runs. `--together N` starts N others at a time: most of their first steps is compilation, on
processor cores, but the memory of the GPU must be enough for N + 1 models. The table is written
after each of these, as JSON, and as Markdown beside it, with what was not measured below.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import pipelines  # noqa: E402

BFLOAT16 = {"precision": "mixed_bfloat16"}
BASE = {"layers": 12, "heads": 12, "width": 768}
LARGE = BFLOAT16 | {"layers": 24, "heads": 16, "width": 1024, "batch_size": 128}
SPLIT = {"strategy": "mirrored", "replicas": 2}
# XLA's flags, each measured beside the recipe with the flags that it has anyway
# (`machine/xla_cache.py`). The first is XLA's default, for its seconds to the first step beside the
# others'.
XLA_FLAGS = (
    "--xla_gpu_autotune_level=4",
    "--xla_gpu_autotune_level=2",
    "--xla_gpu_enable_triton_gemm=true",
    "--xla_gpu_experimental_enable_fusion_autotuner=true",
    "--xla_gpu_enable_command_buffer=",
    "--xla_gpu_enable_cublaslt=true",
    "--xla_gpu_enable_cudnn_layer_norm=true",
)
# What the recipe is compared with: the side, what differs in its sizes and options, and flags of
# XLA. Two replicas share the global batch; "masked" scores only masked positions, as the recipe
# does.
OTHERS: dict[str, tuple[str, dict, str]] = {
    "matrix product": ("matrix_product", {}, ""),
    "without XLA": ("recipe", {"jit": "off"}, ""),
    "10 steps per execution": ("recipe", {"steps_per_execution": 10}, ""),
    "bfloat16": ("recipe", BFLOAT16, ""),
    "split in two": ("recipe", SPLIT | {"jit": "on"}, ""),
    "split in two, without XLA": ("recipe", SPLIT | {"jit": "off"}, ""),
    "tutorial": ("tutorial", {}, ""),
    "Trainer": ("transformers", {}, ""),
    "Trainer, masked": ("transformers_masked", {}, ""),
    "Trainer, masked, torch.compile": ("transformers_masked", {"torch_compile": True}, ""),
    **{flag: ("recipe", {}, flag) for flag in XLA_FLAGS},
}
SPLITS = ["split in two", "split in two, without XLA"]
TRAINERS = ["Trainer", "Trainer, masked", "Trainer, masked, torch.compile"]
# By name: sizes, others, and whether the first step is timed with a warm cache too. The last ones
# are those that are left out first.
GROUPS = {
    "BERT-tiny, batch 32, float32": (
        {"batch_size": 32},
        ["10 steps per execution", "tutorial", *TRAINERS[:2]],
        True,
    ),
    "BERT-base, batch 256, bfloat16": (
        BASE | BFLOAT16 | {"batch_size": 256},
        ["matrix product", "without XLA", *TRAINERS, SPLITS[0]],
        True,
    ),
    "BERT-tiny, batch 64, float32": ({"batch_size": 64}, SPLITS, False),
    "BERT-large, batch 128, bfloat16": (LARGE, ["matrix product"], False),
    "BERT-tiny, batch 512, float32": ({"batch_size": 512}, ["matrix product", "bfloat16"], False),
    "BERT-base, batch 128, float32": (BASE | {"batch_size": 128}, ["matrix product"], True),
    "BERT-base, batch 256, bfloat16, flags of XLA": (
        BASE | BFLOAT16 | {"batch_size": 256},
        list(XLA_FLAGS),
        False,
    ),
}
TINY_GROUPS = {
    "a tiny BERT, batch 4": (
        {"layers": 1, "width": 16, "batch_size": 4},
        ["matrix product", "10 steps per execution", XLA_FLAGS[1], SPLITS[1], TRAINERS[1]],
        True,
    )
}


class Bench:
    """Runs the groups; collects rows and missing measurements.

    Args:
        folder: the folder written by `pipelines.prepare`.
        trainer_python: the words that start a Python with PyTorch, or None.
        turns, seconds: turns of each side, and seconds of a turn.
        minutes: time after which no side is started.
        together: others that are started at a time.
        write: is called when there are new rows.
    """

    def __init__(self, folder: Path, trainer_python, turns, seconds, minutes, together, write):
        self.folder, self.trainer_python = folder, trainer_python
        self.turns, self.seconds = turns, seconds
        self.end = time.monotonic() + 60 * minutes
        self.together, self.write = together, write
        self.rows: list[dict] = []
        self.missing: list[str] = []
        self.failed = False

    def start(self, measure: str, name: str, sizes: dict, flags: str = ""):
        """Starts a side: it, the seconds to its first step, and the steps of a turn; or None."""
        python = self.trainer_python if name.startswith("transformers") else sys.executable
        reason = "" if python else "no --trainer-python"
        if time.monotonic() > self.end:
            reason = "no time left"
        if not reason:
            environ = {}
            if flags:
                environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
            side = pipelines.Side(name, python, self.folder, sizes, **environ)
            try:
                first = side.steps(1)["since_imports"]
                side.steps(pipelines.WARM_UP)
                took = side.steps(2)["seconds"] / 2
                return side, first, max(1, round(self.seconds / took))
            except SystemExit as error:
                side.close()
                self.failed = True
                reason = str(error)
        self.missing.append(f"{measure}: {reason}")
        return None

    def run(self, name: str, sizes: dict, others: list[str], warm: bool) -> None:
        """Measures a group."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        measure = f"{name}: seconds to the first step"
        # Another group may have had the same program.
        shutil.rmtree(self.folder / "cache" / "programs", ignore_errors=True)
        started = self.start(measure, "recipe", sizes)
        if started is None:
            return
        recipe, first, steps = started
        self.rows.append(pipelines.row(measure, [first]))
        self.write(self)
        measure += ", warm cache"
        started = self.start(measure, "recipe", sizes) if warm else None
        if started is not None:
            again, first, _ = started
            again.close()
            self.rows.append(pipelines.row(measure, [first]))
        speeds: list[float] = []
        try:
            for first_of in range(0, len(others), self.together):
                these = others[first_of : first_of + self.together]
                speeds += self.compare(name, sizes, these, recipe, steps)
                self.write(self)
        finally:
            recipe.close()
        if speeds:
            self.rows.append(pipelines.row(f"{name}: tokens/s", speeds))
        self.write(self)

    def compare(self, name: str, sizes: dict, others: list[str], recipe, steps) -> list[float]:
        """Adds the rows of some others; returns the recipe's speeds in its turns, if any."""

        def begin(other: str):
            kind, changes, flags = OTHERS[other]
            return self.start(measures[other], kind, sizes | changes, flags)

        measures = {other: f"{name} ÷ {other}" for other in others}
        if "matrix product" in measures:
            measures["matrix product"] = f"{name}: mfu"
        with concurrent.futures.ThreadPoolExecutor(len(others)) as pool:
            found = zip(others, pool.map(begin, others), strict=True)
            started = {other: side for other, side in found if side is not None}
        if not started:
            return []
        try:
            ours, *rates = pipelines.take_turns(
                [recipe, *(side for side, _, _ in started.values())],
                [steps, *(its_steps for _, _, its_steps in started.values())],
                self.turns,
            )
        except SystemExit as error:  # a side ended within its turn
            self.failed = True
            self.missing += [f"{measures[other]}: {error}" for other in started]
            return []
        finally:
            for side, _, _ in started.values():
                side.close()
        for (other, (_, first, _)), theirs in zip(started.items(), rates, strict=True):
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            medians = [round(statistics.median(each)) for each in (ours, theirs)]
            row = pipelines.row(measures[other], ratios) | {"tokens_per_second": medians}
            self.rows.append(row | ({} if other == "matrix product" else {"first_step": first}))
        return ours


def markdown(title: str, rows: list[dict], missing: list[str]) -> str:
    """Returns the table as Markdown."""
    lines = [title, "", "| measure | median | from, to | tokens/s | other's first step, s |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        digits = 0 if row["median"] >= 1000 else 2 if row["median"] >= 1 else 3
        names = ("median", "smallest", "largest")
        median, *spread = (f"{row[name]:,.{digits}f}" for name in names)
        tokens = "; ".join(f"{each:,}" for each in row.get("tokens_per_second", []))
        first = f"{row['first_step']:.0f}" if "first_step" in row else ""
        cells = (row["measure"], median, " to ".join(spread), tokens, first)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- Not measured: {line.splitlines()[0]}" for line in missing)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measures all; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pipelines.text_options(parser)
    parser.add_argument("--trainer-python", help="a Python with PyTorch and transformers")
    parser.add_argument("--minutes", type=float, default=12, help="nothing is begun afterwards")
    parser.add_argument("--turns", type=int, default=3, help="of each side")
    parser.add_argument("--seconds", type=float, default=2, help="of each turn")
    parser.add_argument("--together", type=int, default=1, help="others started at a time")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of groups")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on the CPU too")
    parser.set_defaults(json=ROOT / "benchmarks" / "last" / "gpu.json")
    chosen = parser.parse_args()
    begun = time.monotonic()
    # Several processes share the GPU, also where one has split it; this one prepares the data.
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"

    import tensorflow as tf

    from tests.support import strategy_run
    from training import artifacts, run_folder

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus and not chosen.tiny:
        print("no GPU here: nothing was measured (--tiny tries the program)", file=sys.stderr)
        return 1
    name = tf.config.experimental.get_device_details(gpus[0])["device_name"] if gpus else "CPU"
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    known = {"versions": artifacts.versions(), "git": run_folder.git_state()}

    def write(bench: Bench) -> str:
        """Writes what is known so far; returns it as Markdown."""
        title = f"{name}, {datetime.date.today()}, {(time.monotonic() - begun) / 60:.0f} minutes"
        found = {"title": title} | known | {"rows": bench.rows, "missing": bench.missing}
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
        table = markdown(title, bench.rows, bench.missing)
        chosen.json.with_suffix(".md").write_text(table)
        return table

    with tempfile.TemporaryDirectory(prefix="gpu-") as temporary:
        folder, dataset = Path(temporary) / "work", chosen.dataset
        sizes = {"length": 128, "vocabulary_size": chosen.vocabulary_size}
        if chosen.tiny:
            dataset = str(Path(temporary) / "text.txt")
            strategy_run.write_text(Path(dataset))
            sizes = {"length": 32, "vocabulary_size": 100}
        pipelines.prepare(folder, dataset, chosen.vocabulary, sizes)
        minutes = chosen.minutes - (time.monotonic() - begun) / 60
        turns = (chosen.turns, 0.2 if chosen.tiny else chosen.seconds)
        bench = Bench(folder, chosen.trainer_python, *turns, minutes, chosen.together, write=write)
        for group, what in (TINY_GROUPS if chosen.tiny else GROUPS).items():
            if any(word in group for word in chosen.only):
                bench.run(group, *what)
    print(write(bench))
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
