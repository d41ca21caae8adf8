"""Measures the time to a target quality: the recipe beside the published tutorial's pipeline.

    python benchmarks/quality.py [--dataset FILE] [--vocabulary FILE] [--json FILE]

The same text, architecture and evaluator: the seconds of training until the cross-entropy of the
validation text, packed and masked as the recipe does it, is 0.5 nats below that of a unigram model.
Tracing and compiling count, evaluating does not. Each side is tried at three peak rates, with a
process each, and counts with its best one. A rate is stopped when it has taken as long as the best
one before it, or is behind it after an eighth of that time (and half a minute, most of which may be
compiling). The recipe's best is run again with other
seeds, and its median counts. A tutorial that needs more than `--patience` times as long is stopped,
and the ratio then is a lower bound.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import pipelines, sides  # noqa: E402

# What was best for a side before comes first, which saves time: a later one is stopped when it is
# slower.
RATES = {"recipe": (3e-3, 1e-3, 3e-4), "tutorial": (1e-3, 3e-3, 3e-4)}
SOON = 30  # seconds before a training may be stopped
BELOW_UNIGRAM = 0.5  # nats
EVERY = 3  # seconds of training between two evaluations, or this share of the time so far:
SHARE = 0.1
EVALUATED = 192  # validation sequences


class Goal:
    """Evaluates a model at intervals, with the clock stopped, until it reaches the goal.

    Args:
        folder: holds `train.npy`, `valid.npy` and `vocabulary.txt`.
        limit: seconds of training after which it gives up.
        best: the seconds and cross-entropies of the best rate so far, which it must keep up with.
        answers: where the result goes.
    """

    def __init__(self, folder: Path, limit: float, best: list, answers: TextIO):
        import keras_nlp
        import numpy as np
        import tensorflow as tf

        from data import masked_lm

        self.answers, self.best = answers, best
        pieces = (folder / "vocabulary.txt").read_text().splitlines()
        tokenizer = keras_nlp.models.BertTokenizer(vocabulary=pieces, lowercase=True)
        train, valid = (np.load(folder / f"{split}.npy") for split in ("train", "valid"))
        masking = masked_lm.Masking.of(
            tokenizer, probability=0.15, sequence_length=valid.shape[1], seed=0
        )
        unigram = masked_lm.baselines(train, valid, masking)["unigram_cross_entropy"]
        self.wanted = unigram - BELOW_UNIGRAM
        data = masked_lm.evaluation_data(valid[:EVALUATED], masking, batch_size=32, split="valid")
        self.batches = list(data)
        self.tf, self.limit, self.seconds, self.found = tf, limit, 0.0, []
        self.function = None

    def evaluate(self, model) -> float:
        """Returns the cross-entropy of the stock model in nats."""
        tf = self.tf
        if self.function is None:

            @tf.function
            def sums(x, y, weights):
                logits = tf.cast(model(x, training=False), tf.float32)
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
                return tf.reduce_sum(loss * weights), tf.reduce_sum(weights)

            self.function = sums
        losses, weights = zip(*(self.function(*batch) for batch in self.batches), strict=True)
        return float(sum(losses) / sum(weights))

    def callback(self, stock_model):
        """Returns a callback that stops the clock, evaluates, and ends the process at the goal."""
        import keras

        goal = self

        class Watch(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                self.resumed = self.last = time.perf_counter()

            def on_epoch_begin(self, epoch, logs=None):
                # What came since the last step is evaluation and saving.
                self.resumed += time.perf_counter() - self.last

            def on_train_batch_end(self, batch, logs=None):
                self.last = time.perf_counter()
                if time.perf_counter() - self.resumed < max(EVERY, SHARE * goal.seconds):
                    return
                float(logs["loss"])  # the step is over
                goal.seconds += time.perf_counter() - self.resumed
                goal.found.append((goal.seconds, goal.evaluate(stock_model)))
                late = goal.seconds > goal.limit or is_behind(goal.found, goal.best)
                if late or goal.found[-1][1] <= goal.wanted:
                    goal.end()
                self.resumed = self.last = time.perf_counter()

            def on_train_end(self, logs=None):
                goal.seconds += self.last - self.resumed
                goal.found.append((goal.seconds, goal.evaluate(stock_model)))
                goal.end()

        return Watch()

    def end(self) -> None:
        """Prints the result and ends this process."""
        answer = {"seconds": reached_after(self.found, self.wanted), "curve": self.found}
        self.answers.write(json.dumps(answer))
        self.answers.flush()
        os._exit(0)


def reached_after(found: list, wanted: float) -> float | None:
    """Interpolates the seconds at which the cross-entropy reached the wanted one.

    Args:
        found: seconds and cross-entropies so far, of which only the last one may be good enough.
        wanted: nats.

    Returns:
        None if even the last one is not good enough.
    """
    seconds, value = found[-1]
    if value > wanted:
        return None
    if len(found) == 1:
        return seconds
    before, above = found[-2]
    return before + (seconds - before) * (above - wanted) / (above - value)


def is_behind(found: list, best: list) -> bool:
    """Returns whether a training is behind another one that had done an eighth of its way.

    Args:
        found: seconds and cross-entropies so far.
        best: those of the other one, to its end; empty if there is none.
    """
    seconds, value = found[-1]
    if not best or seconds < max(SOON, best[-1][0] / 8):
        return False
    return value > min([value for then, value in best if then <= seconds], default=math.inf)


def one_side(name: str, folder: Path, rate: float, seed: int, limit: float, best: list) -> None:
    """Trains one side until it reaches the goal; prints JSON."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    sizes = json.loads((folder / "sizes.json").read_text())
    answers = sides.answers_apart()

    def watch(model):
        return Goal(folder, limit, best, answers).callback(model)

    if name == "recipe":
        sides.run_recipe(folder, sizes, watch, base_learning_rate=rate, seed=seed)
        return
    import keras

    keras.utils.set_random_seed(seed)
    data = sides.tutorial_data(folder, sizes)
    model = sides.tutorial_model(sizes, rate)
    model.fit(data, epochs=sides.ENDLESS, callbacks=[watch(model)], verbose=0)


def run(name: str, folder: Path, rate: float, seed: int, limit: float, best: list) -> dict:
    """Runs one training in a separate process."""
    words = [__file__, "--side", name, "--folder", str(folder)]
    words += ["--rate", str(rate), "--seed", str(seed), "--limit", str(limit)]
    words += ["--best", json.dumps(best)]
    with open(folder / f"quality-{name}.log", "w") as log:
        done = subprocess.run(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        )
    if done.returncode or not done.stdout:
        raise SystemExit((folder / f"quality-{name}.log").read_text()[-3000:])
    found = json.loads(done.stdout) | {"rate": rate, "seed": seed}
    said = f"not within {found['curve'][-1][0]:.0f} s"
    if found["seconds"]:
        said = f"{found['seconds']:.1f} s"
    lowest = min(value for _, value in found["curve"])
    print(f"{name}, {rate:g}, seed {seed}: {said} (lowest {lowest:.3f})", file=sys.stderr)
    return found


def best_of_rates(name: str, folder: Path, limit: float, repeats: int) -> tuple[list, list]:
    """Runs all trainings of a side; returns them and the seconds at its best rate."""
    tried, best_so_far, curve = [], limit, []
    for rate in RATES[name]:
        tried.append(run(name, folder, rate, 0, best_so_far, curve))
        if tried[-1]["seconds"]:
            best_so_far, curve = tried[-1]["seconds"], tried[-1]["curve"]
        curve = curve or tried[-1]["curve"]  # no rate has reached the goal yet
    reached = [each for each in tried if each["seconds"]]
    if not reached:
        return tried, []
    best = min(reached, key=lambda each: each["seconds"])
    again = [run(name, folder, best["rate"], seed, limit, []) for seed in range(1, repeats)]
    return [*tried, *again], [each["seconds"] or limit for each in (best, *again)]


def main() -> None:
    """Measures, prints the result, and writes it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    pipelines.text_options(parser)
    parser.add_argument("--repeats", type=int, default=3, help="seeds of the recipe")
    parser.add_argument("--patience", type=float, default=12.5)
    for name in ("--side", "--folder", "--rate", "--seed", "--limit", "--best"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        one_side(
            chosen.side,
            Path(chosen.folder),
            float(chosen.rate),
            int(chosen.seed),
            float(chosen.limit),
            json.loads(chosen.best),
        )
        return
    sizes = {"batch_size": 32, "length": 128, "vocabulary_size": chosen.vocabulary_size}
    with tempfile.TemporaryDirectory(prefix="quality-") as temporary:
        folder = Path(temporary) / "work"
        pipelines.prepare(folder, chosen.dataset, chosen.vocabulary, sizes)
        tried, ours = best_of_rates("recipe", folder, 600.0, chosen.repeats)
        if not ours:
            raise SystemExit("the recipe does not get there: take more text")
        limit = chosen.patience * statistics.median(ours)
        others, theirs = best_of_rates("tutorial", folder, limit, repeats=1)
    ratio = (statistics.median(theirs) if theirs else limit) / statistics.median(ours)
    row = {
        "measure": "seconds to 0.5 nats below the unigram model, tutorial ÷ recipe",
        "median": round(ratio, 2),
        "lower_bound": not theirs,
        "smallest": round((min(theirs) if theirs else limit) / max(ours), 2),
        "largest": round((max(theirs) if theirs else limit) / min(ours), 2),
        "recipe_seconds": ours,
        "tutorial_seconds": theirs,
    }
    print(
        f"\n{row['measure']}: {'more than ' if row['lower_bound'] else ''}{row['median']} "
        f"({row['smallest']} to {row['largest']}); recipe {statistics.median(ours):.1f} s"
    )
    if chosen.json:
        kept = {"recipe": tried, "tutorial": others}
        chosen.json.write_text(json.dumps(sizes | {"rows": [row], "runs": kept}, indent=2))


if __name__ == "__main__":
    main()
