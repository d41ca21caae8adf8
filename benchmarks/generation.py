"""Compares generation by the recipe and by transformers' `generate()`: tokens per second.

    python benchmarks/generation.py --trainer-python PYTHON [--turns 5] [--json FILE]

A random GPT-2 of the small one's size (12 layers of 768, 50,257 tokens), prompts of 32 tokens, 96
more by greedy search, with a cache, batches of 1 and 8. Both sides have the same weights and must
answer with the same tokens, or nothing is measured. The processes take turns, as in `pipelines.py`.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import pipelines  # noqa: E402

GPT2 = {"layers": 12, "heads": 12, "width": 768, "vocabulary_size": 50_257}
GPT2 |= {"prompt": 32, "new": 96}
TINY = {"layers": 1, "heads": 2, "width": 16, "vocabulary_size": 300, "prompt": 4, "new": 8}
BATCH_SIZES = (1, 8)
SIDES = ("generation", "transformers_generation")


def prepare(folder: Path, sizes: dict) -> None:
    """Writes the input of both sides: a preset, its weights, prompts.

    Args:
        folder: must not exist.
        sizes: as `GPT2`.
    """
    import recipes  # noqa: F401 (picks the backend)

    import keras  # isort: skip
    import keras_nlp
    import numpy as np

    from benchmarks import in_torch
    from data import byte_pairs

    folder.mkdir(parents=True)
    (folder / "sizes.json").write_text(json.dumps(sizes))
    models = keras_nlp.models
    # A token for each byte, one for a pair, and others that no text becomes.
    merges = ["Z Z"]
    known = byte_pairs.vocabulary_of(merges, ())
    fillers = [f"w{number}" for number in range(sizes["vocabulary_size"] - len(known) - 1)]
    vocabulary = {token: number for number, token in enumerate([*known, *fillers, "<|endoftext|>"])}
    tokenizer = models.GPT2Tokenizer(vocabulary=vocabulary, merges=merges)
    keras.utils.set_random_seed(1)
    backbone = models.GPT2Backbone(
        vocabulary_size=sizes["vocabulary_size"],
        num_layers=sizes["layers"],
        num_heads=sizes["heads"],
        hidden_dim=sizes["width"],
        intermediate_dim=4 * sizes["width"],
        max_sequence_length=max(1024, sizes["prompt"] + sizes["new"]),
    )
    rng = np.random.default_rng(1)
    for weight in backbone.weights:  # larger than new ones, so that no two tokens are as likely
        if weight.path.endswith(("kernel", "embeddings")):
            weight.assign(rng.normal(0, 0.05, weight.shape))
    table = backbone.token_embedding.embeddings
    embeddings = keras.ops.convert_to_numpy(table).copy()
    embeddings[-1] = 0  # its logit is zero: the likeliest token is never the end
    table.assign(embeddings)
    preprocessor = models.GPT2CausalLMPreprocessor(
        tokenizer, sequence_length=sizes["prompt"] + sizes["new"]
    )
    task = models.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor)
    task.save_to_preset(str(folder / "preset"))
    # One token is the start of a text.
    letters = rng.choice(list("abcdefghijklmnopqrstuvwxyz "), (max(BATCH_SIZES), sizes["prompt"]))
    texts = ["x" + "".join(row[2:]) for row in letters]
    tokens = np.array([[vocabulary["<|endoftext|>"], *tokenizer(text)] for text in texts], np.int32)
    (folder / "prompts.json").write_text(json.dumps(texts))
    logits = task({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, training=False)
    np.savez(folder / "batches.npz", tokens=tokens, logits=np.asarray(logits)[:2])
    in_torch.save_weights(task, folder / "weights.npz")


def compare(folder: Path, pythons: dict[str, str], batch_size: int, turns: int) -> dict:
    """Returns the row recipe ÷ transformers in tokens per second; of one side alone its rate."""
    started = [
        pipelines.Side(name, python, folder, {"batch_size": batch_size}, CUDA_VISIBLE_DEVICES="-1")
        for name, python in pythons.items()
    ]
    try:
        for side in started:
            side.steps(1)
        answers = [json.loads((folder / f"{name}.json").read_text()) for name in pythons]
        if any(each != answers[0] for each in answers):
            raise SystemExit("the two sides do not answer with the same tokens")
        rates = pipelines.take_turns(started, [1] * len(started), turns)
    finally:
        for side in started:
            side.close()
    name = f"generation, {batch_size} at once"
    per_second = {"tokens_per_second": [round(statistics.median(each), 1) for each in rates]}
    if len(rates) == 1:
        return pipelines.row(f"{name}, tokens/s", rates[0]) | per_second
    ratios = [ours / theirs for ours, theirs in zip(*rates, strict=True)]
    return pipelines.row(f"{name}: recipe ÷ transformers, tokens/s", ratios) | per_second


def main() -> None:
    """Measures, prints the rows, and writes them to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainer-python", help="a Python with PyTorch and transformers")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a model that shows nothing but works")
    parser.add_argument("--json", type=Path, help="file for the rows")
    chosen = parser.parse_args()
    sizes = TINY if chosen.tiny else GPT2
    pythons = {SIDES[0]: sys.executable}
    if chosen.trainer_python:
        pythons[SIDES[1]] = chosen.trainer_python
    with tempfile.TemporaryDirectory(prefix="generation-") as temporary:
        folder = Path(temporary) / "work"
        prepare(folder, sizes)
        rows = [compare(folder, pythons, size, chosen.turns) for size in BATCH_SIZES]
    for row in rows:
        print(
            f"{row['measure']:56} {row['median']:7.2f}  {row['smallest']:6.2f}  "
            f"{row['largest']:6.2f}   (tokens/s: {row['tokens_per_second']})"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(sizes | {"turns": chosen.turns, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
