"""Compares fine-tuning a DistilBERT by the recipe and by Hugging Face's Trainer.

    python benchmarks/fine_tuning.py --trainer-python PYTHON [--turns 5] [--json FILE]

A random preset of DistilBERT's size (6 layers of 768, 30,522 word pieces), sentences that fill 128
tokens and, in a second comparison, sentences of 5 to 128 tokens, for which the Trainer pads each
batch to its longest sentence; AdamW, dropout 0.1. Both sides begin with the same weights: before
anything is timed, their logits must agree to 1e-3. The processes take turns, as in `pipelines.py`.
"""

import argparse
import csv
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import pipelines  # noqa: E402

WARM_UP = 2  # steps
STEPS = 3  # of a turn
DISTILBERT = {"layers": 6, "heads": 12, "width": 768, "vocabulary_size": 30_522, "length": 128}
SHORTEST = 5  # tokens of a sentence, where lengths differ
TINY = {"layers": 1, "heads": 2, "width": 16, "vocabulary_size": 100, "length": 16}
SIDES = ("fine_tuning", "trainer_fine_tuning")


def prepare(folder: Path, sizes: dict) -> None:
    """Writes the input of both sides: preset, sentences, their tokens, weights, logits.

    Args:
        folder: must not exist.
        sizes: as `DISTILBERT`, with `batch_size`, and with `shortest`, the tokens of the shortest
            sentence.
    """
    import recipes  # noqa: F401 (picks the backend)

    import keras  # isort: skip
    import keras_nlp
    import numpy as np

    from benchmarks import in_torch

    folder.mkdir(parents=True)
    (folder / "sizes.json").write_text(json.dumps(sizes))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"w{number}" for number in range(sizes["vocabulary_size"] - len(special))]
    models = keras_nlp.models
    tokenizer = models.DistilBertTokenizer(vocabulary=special + words, lowercase=True)
    preprocessor = models.DistilBertTextClassifierPreprocessor(tokenizer, sizes["length"])
    keras.utils.set_random_seed(1)
    backbone = models.DistilBertBackbone(
        vocabulary_size=sizes["vocabulary_size"],
        num_layers=sizes["layers"],
        num_heads=sizes["heads"],
        hidden_dim=sizes["width"],
        intermediate_dim=4 * sizes["width"],
        dropout=0.1,
        max_sequence_length=max(512, sizes["length"]),
    )
    task = models.DistilBertTextClassifier(backbone, 2, preprocessor=preprocessor)
    task.save_to_preset(str(folder / "preset"))
    # No epoch ends while steps are timed.
    rng = np.random.default_rng(1)
    lengths = rng.integers(sizes["shortest"], sizes["length"] + 1, 120 * sizes["batch_size"])
    sentences = [" ".join(rng.choice(words, length - 2)) for length in lengths]
    labels = np.arange(len(sentences)) % 2
    with (folder / "sentences.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("sentence", "label"), *zip(sentences, labels, strict=True)])
    tokens = preprocessor(sentences[: 10 * sizes["batch_size"]])
    np.savez(
        folder / "batches.npz",
        tokens=np.asarray(tokens["token_ids"]),
        mask=np.asarray(tokens["padding_mask"]),
        labels=labels[: 10 * sizes["batch_size"]],
        mean_length=lengths.mean(),  # of all, which the recipe trains on
        mean_length_of_batches=np.asarray(tokens["padding_mask"]).sum(1).mean(),
        logits=np.asarray(task({name: rows[:4] for name, rows in tokens.items()}, training=False)),
    )
    in_torch.save_weights(task, folder / "weights.npz")


def compare(
    folder: Path, pythons: dict[str, str], turns: int, about: str, steps: int = STEPS
) -> dict:
    """Computes recipe ÷ Trainer in tokens per second; of one side alone its rate.

    Args:
        folder: written by `prepare`.
        pythons: the command that starts Python, by side.
        turns: of each side.
        about: the sentences, for the row.
        steps: of a turn; batches of sentences that differ in length need more.

    Returns:
        A row of the table.
    """
    started = [
        pipelines.Side(name, python, folder, CUDA_VISIBLE_DEVICES="-1")
        for name, python in pythons.items()
    ]
    try:
        for side in started:
            side.steps(WARM_UP)
        rates = pipelines.take_turns(started, [steps] * len(started), turns)
    finally:
        for side in started:
            side.close()
    per_second = {"tokens_per_second": [round(statistics.median(each)) for each in rates]}
    if len(rates) == 1:
        measure = f"fine-tuning by the recipe, {about}, tokens/s"
        return pipelines.row(measure, rates[0]) | per_second
    ratios = [ours / theirs for ours, theirs in zip(*rates, strict=True)]
    measure = f"fine-tuning, {about}: recipe ÷ Trainer, tokens/s"
    return pipelines.row(measure, ratios) | per_second


def main() -> None:
    """Measures, prints the row, and writes it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainer-python", help="a Python with PyTorch and transformers")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a model that shows nothing but works")
    parser.add_argument("--json", type=Path, help="file for the row")
    chosen = parser.parse_args()
    sizes = (TINY if chosen.tiny else DISTILBERT) | {"batch_size": chosen.batch_size}
    pythons = {SIDES[0]: sys.executable}
    if chosen.trainer_python:
        pythons[SIDES[1]] = chosen.trainer_python
    rows = []
    for shortest, steps in ((sizes["length"], STEPS), (SHORTEST, 8 * STEPS)):
        tokens = sizes["length"] if shortest > SHORTEST else f"{SHORTEST} to {sizes['length']}"
        with tempfile.TemporaryDirectory(prefix="fine-tuning-") as temporary:
            folder = Path(temporary) / "work"
            prepare(folder, sizes | {"shortest": shortest})
            rows.append(compare(folder, pythons, chosen.turns, f"{tokens} tokens", steps))
    for row in rows:
        print(
            f"{row['measure']:44} {row['median']:7.2f}  {row['smallest']:6.2f}  "
            f"{row['largest']:6.2f}   (tokens/s: {row['tokens_per_second']})"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(sizes | {"turns": chosen.turns, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
