"""Evaluate a trained model on its own test data again, or on other data.

    python -m recipes.evaluate RUN_DIR
    python -m recipes.evaluate RUN_DIR --dataset my_text.txt
    python -m recipes.evaluate RUN_DIR --dataset wikitext-2-raw --split valid --json

RUN_DIR is the folder of a finished run of any recipe of this package. The data are prepared as the
run did it (a text is cut into sequences and masked, with masks that the run's seed fixes), so the
run's own dataset, the default, gives the numbers of its `results.json` again. Of another dataset
every example is taken: the run has seen none of it. Runs on one device.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import keras
import keras_nlp
import numpy as np

from callbacks.records import perplexity
from data import arrays, cache, images, masked_lm, oligos, sentence_inputs, sentences, word_pieces
from data import text as text_sources
from data.errors import DataError
from data.sequences import cut, sequences_once
from distribution.global_batch import GlobalMean
from models import bert
from models.metrics import MacroF1
from training.artifacts import data_sha256, load_keras_file
from training.checks import precision
from training.command_line import command_line
from training.errors import RunError
from training.options import ProgramOptions, check, option
from training.run_folder import open_finished, require_keys, require_settings


@dataclasses.dataclass(kw_only=True)
class Options(ProgramOptions):
    """Options of `recipes.evaluate`."""

    run_dir: Path = option(help="Folder of a finished run.", positional=True)
    dataset: str | None = option(
        None, "As for the recipe: a name, a path or a glob (default: the run's own dataset)."
    )
    split: Literal["train", "valid", "test", "all"] | None = option(
        None, "Part of the data (default: test of the run's own dataset, all of another one)."
    )
    batch_size: int = option(32, "Examples per batch.", within="[1, 1024]")
    cache_dir: Path | None = option(
        None,
        "Folder for downloads and tokens (default: $RECIPES_CACHE_DIR, else "
        "~/.cache/keras-recipes).",
    )
    json: bool = option(False, "Print the numbers as one JSON object.")


@dataclasses.dataclass(frozen=True)
class Question:
    """What is evaluated, on what.

    Attributes:
        options: of this program.
        settings, facts, results: the run's options, what they came to, and its results.
        dataset, split, cache_dir: what is evaluated, and where downloads are kept.
    """

    options: Options
    settings: dict
    facts: dict
    results: dict
    dataset: str
    split: str
    cache_dir: Path

    @property
    def model_dir(self) -> Path:
        """Of the run."""
        return self.options.run_dir / "model"

    @property
    def is_own(self) -> bool:
        """Whether the run was trained on this dataset."""
        return self.options.dataset in (None, self.facts["dataset"])

    @property
    def max_examples(self) -> int | None:
        """How many training examples are taken: of the run's own, as many as it was trained on."""
        return self.settings["max_examples"] if self.is_own else None

    @property
    def options_file(self) -> Path:
        """Where the run's options stand."""
        return self.options.run_dir / "options.json"

    def batch_size(self, examples: int) -> int:
        """No batch is larger than the data."""
        return min(self.options.batch_size, examples)

    def note_of(self, sha256: str) -> str | None:
        """A line that says that the run's own data have changed since it was trained, or None."""
        if not self.is_own or self.facts.get("data_sha256") in (None, sha256):
            return None
        return f"{self.dataset}: not the data any more that the run was trained on"


def main(options: Options) -> dict:
    """Evaluates a run's model, prints the metrics and returns what `--json` prints."""
    check(options)
    run, results = open_finished(options.run_dir, *EVALUATE)
    settings, facts = run["options"], run["resolved"]
    path = options.run_dir / "options.json"
    require_settings(path, settings, "precision", "seed", "max_examples")
    require_keys(path, facts, dataset=str)
    question = Question(
        options=options,
        settings=settings,
        facts=facts,
        results=results,
        dataset=options.dataset or facts["dataset"],
        split=options.split or ("test" if options.dataset in (None, facts["dataset"]) else "all"),
        cache_dir=(options.cache_dir or cache.default_cache_dir()).expanduser(),
    )
    with precision(settings["precision"]):
        found = EVALUATE[run["recipe"]](question)
    evaluated = {
        "run_dir": str(options.run_dir),
        "recipe": run["recipe"],
        "steps": results["steps"],
        "split": question.split,
        **found,
    }
    if options.json:
        print(json.dumps(evaluated))
    else:
        print_table(evaluated)
    return evaluated


def evaluate_masked_lm(question: Question) -> dict:
    """Cross-entropy, perplexity and accuracy of masked words."""
    settings, facts, split = question.settings, question.facts, question.split
    refuse_damaged_text(question.options_file, settings, facts)
    # The text, tokenised with the run's word pieces.
    text = text_sources.load_text(question.dataset, question.cache_dir)
    preset = str(question.model_dir)
    tokenizer = bert.load(keras_nlp.models.BertTokenizer, preset)
    sequences = sequences_of(text, tokenizer, question.cache_dir, split, settings)
    if not len(sequences):
        raise DataError(
            f"{text.name}: the {split} split gives no sequence of "
            f"{settings['sequence_length']} tokens"
        )

    # What a model without context reaches that has counted the run's training text.
    whose = "the run's training text"
    training_text = text_sources.load_unchanged(
        facts["dataset"], facts["text_sha256"], question.cache_dir
    )
    if training_text is None:
        training_text, whose = text, "this text's train split"
    counted = sequences_of(training_text, tokenizer, question.cache_dir, "train", settings)
    masking = masked_lm.Masking.of(
        tokenizer,
        settings["mlm_probability"],
        settings["sequence_length"],
        settings["seed"],
        settings.get("whole_word_masking", False),
    )
    baseline = masked_lm.baselines(counted[: settings["max_examples"]], sequences, masking)
    masked_lm.require_predictions({split: sequences}, masking)

    # The model, and the metrics that the run reported.
    model = bert.load_masked_lm(preset, None, settings["sequence_length"])
    batch_size = question.batch_size(len(sequences))
    data = masked_lm.evaluation_data(sequences, masking, batch_size=batch_size, split=split)
    found = evaluate_classes(model, data)
    return {
        "dataset": text.name,
        "note": text.note,
        "sequences": len(sequences),
        "tokens": settings["sequence_length"],
        "cross_entropy": found["cross_entropy"],
        "perplexity": perplexity(found["cross_entropy"]),
        "accuracy": found["accuracy"],
        "baseline": baseline,
        "baseline_of": whose,
    }


def evaluate_sentences(question: Question) -> dict:
    """Accuracy and macro F1 of classes."""
    results_file = question.options.run_dir / "results.json"
    require_keys(results_file, question.results, classes=list)
    known = [str(name) for name in question.results["classes"]]
    kind, policy = keras_nlp.models.BertTextClassifier, keras.config.dtype_policy()
    model = bert.load(kind, str(question.model_dir), dtype=policy, compile=False)
    if model.num_classes != len(known):
        raise RunError(
            f"{results_file}: damaged, it has {len(known)} classes and the model "
            f"{model.num_classes}"
        )
    loaded = sentences.load_sentences(
        question.dataset, question.cache_dir, question.settings["seed"]
    )
    unknown = [name for name in loaded.classes if name not in known]
    if unknown:
        raise DataError(
            f"{loaded.name}: class {unknown[0]!r}, the run knows {', '.join(known)[:200]}"
        )
    splits = arrays.first_examples(loaded.splits, question.max_examples)
    note = question.note_of(data_sha256(splits))
    texts, labels = joined(splits, question.split)
    # Another dataset may have fewer classes, in another order.
    labels = np.asarray([known.index(name) for name in loaded.classes], np.int32)[labels]

    inputs = sentence_inputs.encode(texts, model.preprocessor)
    model.preprocessor = None  # the data are encoded
    data = arrays.evaluation_data(inputs, labels, batch_size=question.batch_size(len(labels)))
    found = evaluate_classes(model, data, MacroF1(len(known)))
    return {
        "dataset": loaded.name,
        "note": note,
        "sentences": len(labels),
        "accuracy": found["accuracy"],
        "macro_f1": found["macro_f1"],
        "baseline": most_frequent(labels),
        "baseline_of": "these sentences",
    }


def evaluate_images(question: Question) -> dict:
    """Loss and accuracy of classes."""
    loaded = images.load_images(question.dataset, question.cache_dir)
    splits = arrays.first_examples(loaded.splits, question.max_examples)
    note = question.note_of(data_sha256(splits))
    pixels, labels = joined(splits, question.split)
    model = load_keras_file(question.model_dir)
    data = arrays.evaluation_data(pixels, labels, batch_size=question.batch_size(len(labels)))
    found = evaluate_classes(model, data)
    return {
        "dataset": loaded.name,
        "note": loaded.note or note,
        "images": len(labels),
        "loss": found["cross_entropy"],
        "accuracy": found["accuracy"],
        "baseline": most_frequent(labels),
        "baseline_of": "these images",
    }


def evaluate_oligos(question: Question) -> dict:
    """Huber loss and root mean squared error in degrees C."""
    count = question.settings.get("oligos")
    if not isinstance(count, int) or not 0 < count <= 10**7:
        raise RunError(f"{question.options_file}: damaged, --oligos {count}: must be more than 0")
    loaded = oligos.load_oligos(question.dataset, question.settings["seed"], count)
    splits = {name: (ids, tm[:, np.newaxis]) for name, (ids, tm) in loaded.splits.items()}
    splits = arrays.first_examples(splits, question.max_examples)
    note = question.note_of(data_sha256(splits))
    ids, celsius = joined(splits, question.split)
    model = load_keras_file(question.model_dir)
    model.compile(
        loss=GlobalMean(keras.losses.Huber(delta=1.0)),
        weighted_metrics=[
            keras.metrics.MeanMetricWrapper(keras.losses.huber, name="huber", delta=1.0),
            keras.metrics.RootMeanSquaredError("rmse"),
        ],
    )
    data = arrays.evaluation_data(ids, celsius, batch_size=question.batch_size(len(celsius)))
    found = model.evaluate(data, return_dict=True, verbose=0)
    return {
        "dataset": loaded.name,
        "note": note,
        "oligos": len(celsius),
        "huber": found["huber"],
        "rmse": found["rmse"],
        "baseline": {"mean_rmse": float(np.std(celsius, dtype=np.float64))},
        "baseline_of": "these oligos",
    }


EVALUATE: dict[str, Callable[[Question], dict]] = {
    "bert_mlm": evaluate_masked_lm,
    "text_classification": evaluate_sentences,
    "mnist": evaluate_images,
    "dna_melting": evaluate_oligos,
}


def evaluate_classes(model: keras.Model, data, *more: keras.metrics.Metric) -> dict[str, float]:
    """Cross-entropy, accuracy, and further metrics, of a model that gives logits."""
    model.compile(
        loss=GlobalMean(keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
        metrics=None,
        weighted_metrics=[
            keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True),
            keras.metrics.SparseCategoricalAccuracy("accuracy"),
            *more,
        ],
    )
    return model.evaluate(data, return_dict=True, verbose=0)


def joined(splits: dict[str, tuple], split: str) -> tuple:
    """The examples and the answers of one split, or of all of them."""
    if split != "all":
        return splits[split]
    examples, answers = zip(*splits.values(), strict=True)
    if isinstance(examples[0], list):
        return sum(examples, []), np.concatenate(answers)
    return np.concatenate(examples), np.concatenate(answers)


def most_frequent(labels: np.ndarray) -> dict[str, float]:
    """What is reached by always naming the class that is the most frequent one among these."""
    return {"most_frequent_accuracy": float(np.bincount(labels).max() / len(labels))}


def refuse_damaged_text(path: Path, settings: dict, facts: dict) -> None:
    """Refuses a run's `options.json` without what is read of it, or with values that cannot be.

    Raises:
        RunError: names what is missing or wrong.
    """
    require_keys(path, settings, text_mode=str, sequence_length=int, mlm_probability=float | int)
    require_keys(path, {"whole_word_masking": False} | settings, whole_word_masking=bool)
    require_keys(path, facts, text_sha256=str)
    found = []
    if not 0 < settings["mlm_probability"] <= 1:
        found.append("--mlm-probability: must be greater than 0 and at most 1")
    if not 4 <= settings["sequence_length"] <= bert.MAX_LENGTH:
        found.append(
            f"--sequence-length {settings['sequence_length']}: must lie between 4 and "
            f"{bert.MAX_LENGTH}"
        )
    if settings["text_mode"] not in ("packed", "lines"):
        found.append(f"--text-mode {settings['text_mode']!r}: must be packed or lines")
    if found:
        raise RunError(f"{path}: damaged, {found[0]}")


def sequences_of(text, tokenizer, cache_dir: Path, split: str, settings: dict) -> np.ndarray:
    """Token ids of shape (sequences, length) of a split, or of all lines.

    Those of a split are mapped into memory, from the run's file where it is still there.
    """
    mode, length = settings["text_mode"], settings["sequence_length"]
    if split != "all":
        return sequences_once(text, tokenizer, cache_dir, text_mode=mode, length=length)[split]
    tokens = word_pieces.tokenize_once(text, tokenizer, cache_dir, drop_short=mode == "lines")
    all_ids, all_offsets = zip(*(tokens[name] for name in text_sources.SPLITS), strict=True)
    ids, lengths = np.concatenate(all_ids), np.concatenate([np.diff(each) for each in all_offsets])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return cut(mode, ids, offsets, length, masked_lm.SpecialTokens.of(tokenizer))


COUNTED = ("sequences", "sentences", "images", "oligos")
TITLES = {"cross_entropy": "cross-entropy", "macro_f1": "macro F1", "rmse": "RMSE in °C"}


def print_table(evaluated: dict) -> None:
    """Prints the numbers, a line each."""
    if evaluated["note"]:
        print(evaluated["note"])
    what = next(name for name in COUNTED if name in evaluated)
    count = f"{evaluated[what]:,} {what}"
    if "tokens" in evaluated:
        count += f" of {evaluated['tokens']} tokens"
    rows = [
        ("run", f"{evaluated['run_dir']}, {evaluated['steps']:,} steps"),
        ("data", f"{evaluated['dataset']}, {evaluated['split']}: {count}"),
    ]
    rows += [
        (TITLES.get(name, name), in_words(name, value))
        for name, value in evaluated.items()
        if isinstance(value, float)
    ]
    simpler = ", ".join(
        f"{name.replace('_', ' ')} {in_words(name, value)}"
        for name, value in evaluated["baseline"].items()
    )
    rows.append(("to be beaten", f"{simpler} (counted in {evaluated['baseline_of']})"))
    for name, value in rows:
        print(f"{name:14} {value}")


def in_words(name: str, value: float) -> str:
    """A metric as a person reads it: shares in percent."""
    if name.endswith(("accuracy", "f1")):
        return f"{value:.2%}"
    return f"{value:.2f}" if name == "perplexity" else f"{value:.4f}"


if __name__ == "__main__":
    command_line(Options, main)
