"""Evaluate a trained masked language model on another text.

    python -m recipes.evaluate RUN_DIR
    python -m recipes.evaluate RUN_DIR --dataset my_text.txt
    python -m recipes.evaluate RUN_DIR --dataset wikitext-2-raw --split valid --json

RUN_DIR is the folder of a finished run of `recipes.bert_mlm`. The text is cut into sequences and
masked as the run did it, with masks that the run's seed fixes, so the run's own dataset (the
default) gives the numbers of its `results.json` again. Of another text every line is taken: the
run has seen none of it. Runs on one device.
"""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Literal

import keras
import keras_nlp
import numpy as np
import tyro

from callbacks.records import perplexity
from data import cache, masked_lm, word_pieces
from data import text as text_sources
from data.errors import DataError
from distribution.global_loss import GlobalMean
from models import presets
from training.checks import precision
from training.command_line import command_line
from training.errors import RunError
from training.options import SharedOptions, check, fraction, positive, problems_of_types
from training.run_folder import open_finished, require_keys

LARGEST_BATCH = 1024  # 20 predictions of 30,000 word pieces each: 2.5 GB of logits


@dataclasses.dataclass(kw_only=True)
class Options:
    """Options of `recipes.evaluate`."""

    run_dir: tyro.conf.Positional[Path] = tyro.MISSING
    """Folder of a finished run."""
    dataset: str | None = None
    """As for the recipe: a name, a path or a glob (default: the run's own dataset)."""
    split: Literal["train", "valid", "test", "all"] | None = None
    """Part of the text (default: test of the run's own dataset, all of another text)."""
    batch_size: int = 32
    """Examples of a batch, at most 1,024."""
    cache_dir: Path | None = None
    """Downloads and tokens (default: $RECIPES_CACHE_DIR, else ~/.cache/keras-recipes)."""
    json: bool = False
    """Prints the numbers as one JSON object."""

    def problems(self) -> list[str]:
        """What is wrong with the values."""
        return problems_of_types(self) or positive(
            "batch_size", self.batch_size, most=LARGEST_BATCH
        )


def main(options: Options) -> dict:
    """Evaluates a run's model, prints the metrics and returns what `--json` prints."""
    check(options)
    run, results = open_finished(options.run_dir, "bert_mlm")
    settings, facts = run["options"], run["resolved"]
    refuse_damaged(options.run_dir / "options.json", settings, facts)
    another = options.dataset not in (None, facts["dataset"])
    split = options.split or ("all" if another else "test")
    with precision(settings["precision"]):
        # The text, tokenised with the run's word pieces.
        cache_dir = (options.cache_dir or cache.default_cache_dir()).expanduser()
        text = text_sources.load_text(options.dataset or facts["dataset"], cache_dir)
        preset = str(options.run_dir / "model")
        tokenizer = presets.load(keras_nlp.models.BertTokenizer, preset)
        special = masked_lm.SpecialTokens.of(tokenizer)
        sequences = cut(text, tokenizer, cache_dir, split, settings)
        if not len(sequences):
            raise DataError(
                f"{text.name}: the {split} split gives no sequence of "
                f"{settings['sequence_length']} tokens"
            )

        # What a model without context reaches that has counted the run's training text.
        training_text, whose = load_training_text(facts, cache_dir), "the run's training text"
        if training_text is None:
            training_text, whose = text, "this text's train split"
        counted = cut(training_text, tokenizer, cache_dir, "train", settings)
        masking = masked_lm.Masking.of(
            special,
            len(tokenizer.vocabulary),
            settings["mlm_probability"],
            settings["sequence_length"],
            settings["seed"],
        )
        baseline = masked_lm.baselines(counted[: settings["max_examples"]], sequences, masking)

        # The model, and the metrics that the run reported.
        model = presets.load_model(preset, dropout=None)
        model.compile(
            loss=GlobalMean(keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
            weighted_metrics=[
                keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True),
                keras.metrics.SparseCategoricalAccuracy("accuracy"),
            ],
        )
        batch_size = min(options.batch_size, len(sequences))
        data = masked_lm.evaluation_data(sequences, masking, batch_size=batch_size, split=split)
        found = model.evaluate(data, return_dict=True, verbose=0)

    evaluated = {
        "run_dir": str(options.run_dir),
        "steps": results["steps"],
        "dataset": text.name,
        "note": text.note,
        "split": split,
        "sequences": len(sequences),
        "cross_entropy": found["cross_entropy"],
        "perplexity": perplexity(found["cross_entropy"]),
        "accuracy": found["accuracy"],
        "baseline": baseline,
        "baseline_of": whose,
    }
    if options.json:
        print(json.dumps(evaluated))
    else:
        print_table(evaluated, settings["sequence_length"])
    return evaluated


def refuse_damaged(path: Path, settings: dict, facts: dict) -> None:
    """Refuses a run's `options.json` without what is read of it.

    Raises:
        RunError: names what is missing.
    """
    require_keys(
        path,
        settings,
        precision=str,
        text_mode=str,
        sequence_length=int,
        mlm_probability=float | int,
        seed=int,
        max_examples=int | None,
    )
    require_keys(path, facts, dataset=str, text_sha256=str)
    wrong = fraction("mlm_probability", settings["mlm_probability"], one=True)
    wrong += positive("seed", settings["seed"], zero=True, most=2**31 - 1)
    wrong += positive("max_examples", settings["max_examples"])
    if not 4 <= settings["sequence_length"] <= 10**6:
        wrong.append("--sequence-length")
    if settings["precision"] not in typing.get_args(SharedOptions.__annotations__["precision"]):
        wrong.append("--precision")
    if wrong:
        raise RunError(f"{path}: damaged, {wrong[0]}")


def cut(text, tokenizer, cache_dir: Path, split: str, settings: dict) -> np.ndarray:
    """Sequences of one split, or of all, as the run cut them; int32 of shape (n, length)."""
    lines = settings["text_mode"] == "lines"
    tokens = word_pieces.tokenize_once(text, tokenizer, cache_dir, drop_short=lines)
    chosen = [tokens[name] for name in (text_sources.SPLITS if split == "all" else (split,))]
    ids = np.concatenate([ids for ids, _ in chosen])
    lengths = np.concatenate([np.diff(offsets) for _, offsets in chosen])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    cutter = masked_lm.line_sequences if lines else masked_lm.packed_sequences
    special = masked_lm.SpecialTokens.of(tokenizer)
    return cutter(ids, offsets, settings["sequence_length"], special)


def load_training_text(facts: dict, cache_dir: Path):
    """The text that the run was trained on, or None where it is not there any more.

    Nothing is downloaded for it.
    """
    name = facts["dataset"]
    if name in text_sources.wikitext_archives() and not (cache_dir / name).is_dir():
        return None
    try:
        text = text_sources.load_text(name, cache_dir)
    except DataError:
        return None
    return text if text_sources.text_sha256(text) == facts["text_sha256"] else None


def print_table(evaluated: dict, length: int) -> None:
    """Prints the numbers, a line each."""
    baseline = evaluated["baseline"]
    if evaluated["note"]:
        print(evaluated["note"])
    rows = (
        ("run", f"{evaluated['run_dir']}, {evaluated['steps']:,} steps"),
        (
            "text",
            f"{evaluated['dataset']}, {evaluated['split']}: {evaluated['sequences']:,} sequences "
            f"of {length} tokens",
        ),
        ("cross-entropy", f"{evaluated['cross_entropy']:.4f}"),
        ("perplexity", f"{evaluated['perplexity']:.2f}"),
        ("accuracy", f"{evaluated['accuracy']:.2%}"),
        (
            "unigram model",
            f"cross-entropy {baseline['unigram_cross_entropy']:.4f}, most frequent piece "
            f"{baseline['most_frequent_accuracy']:.2%} ({evaluated['baseline_of']})",
        ),
    )
    for name, value in rows:
        print(f"{name:14} {value}")


if __name__ == "__main__":
    command_line(Options, main)
