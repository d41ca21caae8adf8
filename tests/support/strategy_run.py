"""Runs recipes under one strategy in a separate process: the subject of the equality tests.

    python tests/support/strategy_run.py '{"strategy": "mirrored", "replicas": 2, ...}' FOLDER

Each run's options are in RUNS below; FOLDER/<run> is its run folder. With TF_CONFIG set the process
is one of several workers. `runs` chooses some, also of the other dicts; `stop_after` makes the
process send itself SIGTERM after N steps, `kill_after` SIGKILL; other keys are options.
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import recipes  # noqa: E402, F401 (picks the backend)
from tests.support import causal_presets, seq2seq_presets, tiny_presets  # noqa: E402

COMMON = dict(
    epochs=2,
    max_steps=20,
    lr_scaling="none",
    precision="float64",
    global_batch_size=8,
    log_every=1,
    jit="off",  # compiling would take longer than training
    quiet=True,
)
TINY_BERT = COMMON | dict(
    vocabulary_size=120,
    num_layers=1,
    num_heads=2,
    hidden_dim=16,
    sequence_length=16,
    base_learning_rate=0.01,
)
TINY_TEXT = TINY_BERT | dict(preset="scratch")
TINY_CAUSAL = TINY_BERT | dict(vocabulary_size=280)
TINY_SENTENCES = TINY_BERT | dict(dropout=0.0, group_by_length="on")
TINY_IMAGES = COMMON | dict(dropout=0.0, l2=0.01, base_learning_rate=0.002)
TINY_OLIGOS = COMMON | dict(
    num_layers=1,
    num_heads=2,
    hidden_dim=8,
    dropout=0.0,
    base_learning_rate=0.001,
)
# Short and long lines: the accumulated batches have different sums of weights.
LINES = TINY_TEXT | dict(text_mode="lines", sequence_length=32)
TOGETHER = dict(clip_norm=0.5, accumulate_steps=2, global_batch_size=4, validate_every=6)

RUNS = {
    "bert_packed": ("bert_mlm", TINY_TEXT),
    "bert_lines": ("bert_mlm", LINES | dict(head="stock")),
    "bert_together": ("bert_mlm", LINES | TOGETHER | dict(initial_mlm_probability=0.5)),
    "causal": ("causal_lm", TINY_CAUSAL),
    "causal_together": (
        "causal_lm",
        TINY_CAUSAL | TOGETHER | dict(architecture="gpt2", optimizer="adamw"),
    ),
    "mnist": ("mnist", TINY_IMAGES),
    "mnist_together": ("mnist", TINY_IMAGES | TOGETHER),
    "dna": ("dna_melting", TINY_OLIGOS | dict(warmup_steps=5)),
    "dna_together": (
        "dna_melting",
        TINY_OLIGOS | TOGETHER | dict(optimizer="muon", members=2),
    ),
    "text": ("text_classification", TINY_SENTENCES),
    "text_together": ("text_classification", TINY_SENTENCES | TOGETHER),
    "scores": ("text_classification", TINY_SENTENCES | dict(labels="scores")),
    "scores_together": (
        "text_classification",
        TINY_SENTENCES | TOGETHER | dict(labels="scores", token_dropout=0.5),
    ),
    "several": ("text_classification", TINY_SENTENCES | dict(labels="several")),
}

# Plain Keras programs, whose dropout is on. Batches that two and three replicas can share.
TINY_PROGRAM = COMMON | dict(
    max_steps=5, global_batch_size=12, validate_every=2, checkpoint_every=2
)
PROGRAMS = {
    name: (f"tests.programs.{name}", TINY_PROGRAM)
    for name in (
        *("convnet", "masked_tokens", "two_outputs", "autoencoder", "time_series"),
        "kerasnlp_task",
    )
}
PROGRAMS["masked_normalised"] = ("tests.programs.masked_tokens", TINY_PROGRAM | {"normalise": True})
TINY_ANSWERS = TINY_BERT | dict(
    vocabulary_size=300, sequence_length=24, response_length=8, answered_examples=3
)
# Fine-tune the preset FOLDER/../presets/<preset>. The custom loop does not support these.
SIZES = ("vocabulary_size", "num_layers", "num_heads", "hidden_dim")
SENTENCES = {name: TINY_SENTENCES[name] for name in TINY_SENTENCES if name not in SIZES}
CONTINUED = {name: TINY_CAUSAL[name] for name in TINY_CAUSAL if name not in SIZES}
ANSWERS = {name: TINY_ANSWERS[name] for name in TINY_ANSWERS if name not in SIZES}
RATES = dict(layer_decay=0.5, ema=0.9, lr_schedule="wsd", min_lr_ratio=0.1)
ADAPTERS = dict(lora_rank=2, lora_alpha=4.0, ema=0.9, lr_schedule="cosine")
TUNED = SENTENCES | dict(preset="classifier_DistilBert", validate_every=6)
CAUSAL_TUNED = CONTINUED | dict(preset="causal_GPT2", validate_every=6)
FINE_TUNED = {
    "tuned": ("text_classification", TUNED | RATES),
    "adapters": ("text_classification", TUNED | ADAPTERS),
    "causal_tuned": ("causal_lm", CAUSAL_TUNED | RATES),
    "causal_adapters": ("causal_lm", CAUSAL_TUNED | ADAPTERS | dict(lora_layers="all_linear")),
    "muon": (
        "causal_lm",
        TINY_CAUSAL | TOGETHER | dict(optimizer="muon", ema=0.9, context="row"),
    ),
}
# Each family for a few steps, with the dropout of its preset.
FEW_STEPS = dict(max_steps=5, checkpoint_every=2, dropout=None)
FAMILIES = {
    **{
        f"classifier_{family}": ("text_classification", SENTENCES | FEW_STEPS)
        for family in tiny_presets.FAMILIES
    },
    **{
        f"causal_{family}": (
            "causal_lm",
            CONTINUED | FEW_STEPS | dict(precision=causal_presets.PRECISION.get(family, "float64")),
        )
        for family in causal_presets.FAMILIES
    },
    **{
        f"seq2seq_{family}": ("seq2seq", ANSWERS | FEW_STEPS) for family in seq2seq_presets.FAMILIES
    },
}
for name, (_, values) in FAMILIES.items():
    values["preset"] = name


def write_text(path: Path) -> None:
    """Writes a small text of predictable words, with some unknown ones."""
    words = "the loss of a step is the mean over all replicas and batches of tokens".split()
    lines = []
    for number in range(260):
        count = 18 + number % 23
        line = [
            words[(number * 7 + place * (1 + number % 3)) % len(words)] for place in range(count)
        ]
        if number % 5 == 0:
            line[3] = "<unk>"
        lines.append(" ".join(line) + f" {number} .")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_images(folder: Path, train: int = 101, test: int = 37) -> None:
    """Writes four IDX files: a bright square in noise, whose position determines the class."""
    import numpy as np

    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for half, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) * 7 % 10).astype(np.uint8)
        images = rng.integers(0, 128, (count, 28, 28), np.uint8)
        for image, label in zip(images, labels, strict=True):
            top, left = 4 + 5 * (label // 3), 4 + 7 * (label % 3)
            image[top : top + 5, left : left + 5] = 255
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (folder / f"{half}-{name}-ubyte").write_bytes(head + array.tobytes())


def write_molecules(path: Path, count: int = 130) -> None:
    """Writes a CSV of duplexes and hairpins; length and GC share determine the temperatures."""
    import random

    rng = random.Random(0)
    lines = ["dataset,sequence,structure,sodium,strand_concentration,tm"]
    for number in range(count):
        strand = "".join(rng.choices("ACGT", k=rng.randint(4, 20)))
        other = strand.translate(str.maketrans("ACGT", "TGCA"))[::-1]
        strong = sum(strand.count(base) for base in "CG") / len(strand)
        tm = f"{81.5 + 41 * strong - 200 / len(strand) - 20:.2f}"
        opened, closed = "(" * len(strand), ")" * len(strand)
        if number % 3:
            lines.append(f"hairpins,{strand}GAAA{other},{opened}....{closed},0.063,,{tm}")
        else:
            lines.append(f"duplexes,{strand}+{other},{opened}+{closed},0.1,2e-6,{tm}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_sentences(folder: Path, train: int = 101, other: int = 37) -> None:
    """Writes a folder of three TSV files: one word usually determines the class."""
    words = "the film was seen by many who said it is very long and the end comes late".split()
    folder.mkdir(parents=True, exist_ok=True)
    for place, (name, count) in enumerate((("train", train), ("dev", other), ("test", other))):
        lines = ["sentence\tlabel"]
        for number in range(count):
            label = number * 7 % 3
            telling = ("good", "poor", "fair")[label if number % 11 else (label + 1) % 3]
            around = [words[(number * 5 + k * (1 + place)) % len(words)] for k in range(8)]
            lines.append(f"{' '.join(around[: 2 + number % 7])} {telling} {number}\t{label}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_pairs(path: Path, count: int = 130) -> None:
    """Writes prompts and responses as JSONL: a sum in words, and its last digit."""
    digits = "zero one two three four five six seven eight nine".split()
    lines = []
    for number in range(count):
        one, other = number % 10, number // 10 % 10
        prompt = f"the sum of {digits[one]} and {digits[other]} is {number}"
        lines.append(json.dumps({"prompt": prompt, "response": digits[(one + other) % 10]}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_data(folder: Path) -> None:
    """Writes the datasets of all runs."""
    write_pairs(folder / "pairs.jsonl")
    write_text(folder / "text.txt")
    write_images(folder / "images")
    write_molecules(folder / "molecules.csv")
    write_sentences(folder / "sentences")


def write_preset(name: str, folder: Path) -> None:
    """Writes the preset of a run of `FAMILIES`, with dropout, where the run takes it from."""
    kind, _, family = name.partition("_")
    path = folder / "presets" / name
    if kind == "classifier":
        tiny_presets.save(family, "TextClassifier", path, sequence_length=16, num_layers=2)
    elif kind == "seq2seq":
        seq2seq_presets.make_task(family, dropout=0.1).save_to_preset(str(path))
    else:
        task = causal_presets.make_task(family, **causal_presets.dropout_of(family))
        task.save_to_preset(str(path))


def data_options(module: str, folder: Path) -> dict:
    """Returns the options for a recipe's data in a folder of `write_data`."""
    names = {
        "bert_mlm": "text.txt",
        "causal_lm": "text.txt",
        "mnist": "images",
        "dna_melting": "molecules.csv",
        "text_classification": "sentences",
        "seq2seq": "pairs.jsonl",
    }
    return {"dataset": str(folder / names[module])}


def signal_after(last: int, number: int) -> None:
    """Makes this process send itself a signal after this step."""
    from callbacks.stopping import StopAtStep

    stock = StopAtStep.on_step_end

    def on_step_end(self, step, logs):
        stock(self, step, logs)
        if step == last:
            os.kill(os.getpid(), number)

    StopAtStep.on_step_end = on_step_end


def recipe_of(name: str, output: Path, **chosen):
    """Returns the module of a run, and its options.

    Args:
        name: of the run.
        output: the folder of its run folder.
        **chosen: options instead of the run's.
    """
    import importlib

    module, options = (RUNS | FINE_TUNED | FAMILIES | PROGRAMS)[name]
    extra = dict(run_dir=output / name, cache_dir=output.parent / "cache")
    if name not in PROGRAMS:
        extra |= data_options(module, output.parent)
        module = f"recipes.{module}"
    if name in FINE_TUNED | FAMILIES and "preset" in options:
        extra["preset"] = str(output.parent / "presets" / options["preset"])
    recipe = importlib.import_module(module)
    return recipe, recipe.Options(**(options | extra | chosen))


def main(chosen: dict, output: Path) -> None:
    from callbacks.errors import Stopped

    which = chosen.pop("runs", None) or list(RUNS)
    for key, number in (("stop_after", signal.SIGTERM), ("kill_after", signal.SIGKILL)):
        if key in chosen:
            signal_after(chosen.pop(key), number)
    for name in which:
        recipe, options = recipe_of(name, output, **chosen)
        try:
            results = recipe.main(options)
        except Stopped:
            sys.exit(75)
        if results and os.environ.get("STRATEGY_RUN_PRINT"):
            print(name, json.dumps(results["test"]), results["weights_sha256"][:12])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
