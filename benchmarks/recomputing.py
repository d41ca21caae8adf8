"""Measures what `--gradient-checkpointing` saves and costs: memory and seconds of a step.

    python benchmarks/recomputing.py [--turns 3] [--json FILE]

A Llama of 8 layers (256 wide) on batches of 32 x 256 tokens. By how much the resident memory of a
process grows at most from the built model to the end of the third step, and the seconds of the two
last steps; each side in a process of its own, in turns. Under XLA the memory includes compiling.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.costs import resident  # noqa: E402
from benchmarks.pipelines import row  # noqa: E402

SIDES = {  # whether blocks are computed twice, and XLA compiles the step
    "kept": (False, False),
    "recomputed": (True, False),
    "kept, XLA": (False, True),
    "recomputed, XLA": (True, True),
}
BATCH, LENGTH, VOCABULARY = 32, 256, 1000


def measure_side(name: str) -> None:
    """Prints the memory of three steps in bytes, and the seconds of one of the last two."""
    import keras
    import keras_nlp
    import numpy as np
    import tensorflow as tf

    from distribution import step
    from distribution.keras_compat import fitting, patches

    checkpointing, jit = SIDES[name]
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (4 * BATCH, LENGTH))
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    data = tf.data.Dataset.from_tensor_slices((inputs, np.zeros((4 * BATCH, LENGTH, 1))))
    data = data.batch(BATCH, drop_remainder=True)
    with patches.patch_keras_for(tf.distribute.get_strategy()):
        keras.utils.set_random_seed(0)
        backbone = keras_nlp.models.LlamaBackbone(
            vocabulary_size=VOCABULARY,
            num_layers=8,
            num_query_heads=8,
            num_key_value_heads=8,
            hidden_dim=256,
            intermediate_dim=704,
        )
        outputs = keras.layers.Dense(1)(backbone.output)
        model = keras.Model(backbone.input, outputs)
        model.compile(optimizer="adam", loss="mse")
        fitting.build(model, data)
        step.install(model, jit_compile=jit, gradient_checkpointing=checkpointing)
        iterator = iter(data)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident("VmRSS")
        float(model.train_function(iterator)["loss"])
        begun = time.perf_counter()
        for _ in range(2):
            float(model.train_function(iterator)["loss"])
        seconds = (time.perf_counter() - begun) / 2
    print(json.dumps({"bytes": resident("VmHWM") - before, "seconds": seconds}))


def compare(turns: int) -> list[dict]:
    """Measures the rows of the table."""
    found: dict = {name: [] for name in SIDES}
    for _ in range(turns):
        for name, values in found.items():
            words = [sys.executable, __file__, "--side", name]
            done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            values.append(json.loads(done.stdout))
            print(f"{name}: {values[-1]}", file=sys.stderr)
    rows = []
    for suffix in ("", ", XLA"):
        kept, twice = found[f"kept{suffix}"], found[f"recomputed{suffix}"]
        for quantity, what in (("bytes", "memory"), ("seconds", "seconds")):
            ratios = [a[quantity] / b[quantity] for a, b in zip(kept, twice, strict=True)]
            rows.append(row(f"{what} of a step{suffix}: kept ÷ recomputed", ratios))
            rows[-1][quantity] = [
                round(statistics.median(each[quantity] for each in side), 3)
                for side in (kept, twice)
            ]
    return rows


def main() -> None:
    """Measures, prints the table, and writes it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        measure_side(chosen.side)
        return
    rows = compare(chosen.turns)
    for each in rows:
        print(
            f"{each['measure']:48} {each['median']:8.2f} {each['smallest']:8.2f} "
            f"{each['largest']:8.2f}"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
