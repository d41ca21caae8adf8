"""Measures the speed of a training step of the default BERT in variants, side by side.

    python benchmarks/steps.py [--vocabulary-size 30522] [--pairs 7] [--json FILE]

Variants of the same step (the head in chunks or stock, compiled by XLA or not, precision, steps
of an execution) take turns within one process, and a ratio is the median over the turns, with the
smallest and the largest; the first steps, which trace and compile, are excluded. The machine should
do nothing else meanwhile. Token ids are random: a step's time does not depend on them.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recipes  # noqa: E402, F401 (picks the backend)
from benchmarks.pipelines import row  # noqa: E402

LENGTH, LAYERS, WIDTH = 128, 2, 128
# Name: (head, XLA, precision, steps of an execution).
WAYS = {
    "stock": ("stock", False, "float32", 1),
    "stock, XLA": ("stock", True, "float32", 1),
    "chunked": ("chunked", False, "float32", 1),
    "chunked, XLA": ("chunked", True, "float32", 1),
    "chunked, XLA, bfloat16": ("chunked", True, "mixed_bfloat16", 1),
    "chunked, XLA, 10 steps at once": ("chunked", True, "float32", 10),
}
RATIOS = (  # of speeds: the first over the second
    ("chunked", "stock"),
    ("stock, XLA", "stock"),
    ("chunked, XLA", "chunked"),
    ("chunked, XLA", "stock"),
    ("chunked, XLA, bfloat16", "chunked, XLA"),
    ("chunked, XLA, 10 steps at once", "chunked, XLA"),
    ("evaluation", "chunked, XLA"),
    ("chunked, XLA", "matrix product"),
)


def make_way(name: str, data, vocabulary_size: int):
    """Returns a function that takes some steps, their number, and its model."""
    import keras

    from distribution.keras_compat import fitting
    from distribution.step import install
    from models import fine_tuning
    from models.chunked_head import chunked_masked_lm
    from recipes import bert_mlm

    head, jit, precision, steps = WAYS[name]
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(0)
    options = bert_mlm.Options()
    bert = bert_mlm.build_model(options, vocabulary_size)
    model = chunked_masked_lm(bert) if head == "chunked" else bert
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=fine_tuning.make_optimizer(options, 1e-3),
        loss=cross_entropy,
        weighted_metrics=[
            keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True),
            keras.metrics.SparseCategoricalAccuracy("accuracy"),
        ],
    )
    fitting.build(model, data)
    install(model, updates_per_execution=steps, jit_compile=jit)
    return model, steps


def measure(vocabulary_size: int, batch_size: int, pairs: int) -> dict:
    """Measures the seconds of a step by variant, turn by turn."""
    import numpy as np
    import tensorflow as tf

    from data import masked_lm
    from distribution.keras_compat import patches
    from machine import mfu
    from models.bert import training_operations
    from recipes import bert_mlm

    ids = np.random.default_rng(0).integers(5, vocabulary_size, (2000, LENGTH)).astype(np.int32)
    special = masked_lm.SpecialTokens(0, 1, 2, 3, 4)
    masking = masked_lm.Masking(special, vocabulary_size, 0.15, round(0.15 * LENGTH), 0)
    data = masked_lm.training_data(ids, masking, batch_size=batch_size)
    turns, seconds = {}, {}
    with patches.patch_keras_for(tf.distribute.get_strategy()):
        for name in WAYS:
            model, steps = make_way(name, data, vocabulary_size)
            begun = time.perf_counter()
            step = _stepper(model.train_function, iter(data))
            step()
            print(f"{name}: first step {time.perf_counter() - begun:.1f} s", file=sys.stderr)
            turns[name] = (step, steps)
            if name == "chunked, XLA":
                test = _stepper(model.test_function, iter(data))
                test()
                turns["evaluation"] = (test, 1)
        turns["matrix product"] = (mfu.matrix_products(2048, 1, "float32"), 1)
        for turn in range(pairs):
            for name, (step, steps) in turns.items():
                repeats = max(1, 4 // steps)
                begun = time.perf_counter()
                for _ in range(repeats):
                    step()
                seconds.setdefault(name, []).append((time.perf_counter() - begun) / repeats / steps)
            print(f"turn {turn + 1} of {pairs}", file=sys.stderr)
    # As the time that the step's operations would take at the product's rate.
    backbone = bert_mlm.build_model(bert_mlm.Options(), vocabulary_size).backbone
    operations = batch_size * training_operations(backbone, LENGTH, masking.max_predictions)
    share = operations / (2 * 2048**3)
    seconds["matrix product"] = [share * value for value in seconds["matrix product"]]
    return seconds


def _stepper(function, iterator):
    def step():
        float(function(iterator)["loss"])

    return step


def table(seconds: dict[str, list[float]], batch_size: int) -> list[dict]:
    """Returns one row per ratio: median, smallest, largest, and the first's tokens per second."""
    rows = []
    for first, second in RATIOS:
        ratios = [b / a for a, b in zip(seconds[first], seconds[second], strict=True)]
        tokens = round(batch_size * LENGTH / statistics.median(seconds[first]))
        rows.append(row(f"{first} ÷ {second}", ratios) | {"tokens_per_second": tokens})
    return rows


def main() -> None:
    """Measures, prints the table, and writes it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary-size", type=int, default=30_522)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=7, help="turns of each way")
    parser.add_argument("--json", type=Path, help="where the table is written too")
    chosen = parser.parse_args()
    rows = table(
        measure(chosen.vocabulary_size, chosen.batch_size, chosen.pairs), chosen.batch_size
    )
    print(
        f"\nBERT, {LAYERS} layers of {WIDTH}, vocabulary {chosen.vocabulary_size:,}, batch "
        f"{chosen.batch_size} x {LENGTH} (speeds; the median of {chosen.pairs} turns)\n"
    )
    print(f"{'':44} {'median':>7}  {'from':>6}  {'to':>6}  {'tokens/s':>9}")
    for each in rows:
        print(
            f"{each['measure']:44} {each['median']:7.2f}  {each['smallest']:6.2f}  "
            f"{each['largest']:6.2f}  {each['tokens_per_second']:9,}"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(vars(chosen) | {"json": None, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
