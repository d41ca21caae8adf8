"""Sort sentences into classes: from a BERT of yours, from a preset, or from scratch.

    python -m recipes.text_classification --dataset folder_with_train_dev_test_tsv
    python -m recipes.text_classification --dataset reviews.csv --init-from runs/bert_mlm/first
    python -m recipes.text_classification --strategy mirrored --replicas 2

Reads sentences and labels (or, where no dataset is named, asks which of the installed packages a
docstring's paragraph is from), and trains `keras_nlp.models.BertTextClassifier` with `model.fit()`:
AdamW, linear warm-up, PolynomialDecay to zero. From scratch the model begins as naive Bayes, and
half of the word pieces are hidden in training, others in each epoch.

What came out, in what time and on what machine: the table in README.md, which `make results` wrote.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
from keras.optimizers.schedules import PolynomialDecay
from keras_nlp.models import BertTextClassifier, BertTextClassifierPreprocessor

from data import arrays, sentences, word_pieces
from distribution.global_batch import GlobalMean, reduce_before_clipping
from models import bert, fine_tuning
from models.initial_weights import add_mean_layer, init_naive_bayes
from models.metrics import MacroF1
from training.artifacts import data_sha256
from training.command_line import command_line
from training.loaded_run import LoadedRun, likeliest
from training.options import FineTuningOptions, TextOptions, flag, option
from training.run import start_run
from training.schedules import WarmUp


@dataclasses.dataclass(kw_only=True)
class Options(FineTuningOptions, TextOptions):
    """Options of `recipes.text_classification`."""

    dataset: str = option(
        "auto",
        "A folder of train.tsv, dev.tsv, test.tsv; one CSV or TSV file; installed-docs, or auto.",
    )
    preset: str = option(
        "scratch", "scratch, a BERT preset of Kaggle or Hugging Face, or a preset's folder."
    )
    init_from: Path | None = option(
        None, "A finished run of bert_mlm, whose word pieces and encoder are used."
    )
    num_layers: int = 1
    hidden_dim: int = 64
    dropout: float = option(
        0.3, "Dropout in the encoder (not a preset's) and before the last layer.", within="[0, 1)"
    )
    token_dropout: float = option(
        0.5,
        "Share of a training sentence's word pieces to replace by [MASK], others in each epoch.",
        within="[0, 1)",
    )
    sequence_length: int = option(
        64, "Tokens of a sentence, including [CLS] and [SEP]; the rest is cut.", within="[4, 512]"
    )
    base_learning_rate: float | None = option(
        None,
        "Peak learning rate for one replica (default: 5e-4 from scratch, 1e-3 from a run, 2e-4 "
        "from a preset).",
    )
    warmup_steps: int = 100
    epochs: int = 2

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        found = super().problems() + bert.problems_of_presets(self)
        for name in ("freeze_backbone", "lora_rank"):
            if getattr(self, name) and self.preset == "scratch" and self.init_from is None:
                found.append(f"{flag(name)}: needs a trained encoder: pass --preset or --init-from")
        return found


def build_model(
    options: Options,
    evidence: np.ndarray,
    preset: str | None = None,
    sample: dict[str, np.ndarray] | None = None,
) -> BertTextClassifier:
    """Builds the model inside the strategy's scope, without its tokenizer.

    Args:
        options: sizes and dropout.
        evidence: what a new model knows of the word pieces at first, float of shape (word pieces,
            classes); see `sentences.naive_bayes_evidence`.
        preset: a name or folder to take the encoder from; None for a new one.
        sample: inputs of some hundred training sentences, for the encoder of a run, whose [CLS]
            is untrained.

    Returns:
        A model from token ids to logits.
    """
    pieces, classes = evidence.shape
    if preset is not None:
        backbone = bert.load_backbone(preset, options.dropout, options.sequence_length)
        if sample is not None:
            backbone = add_mean_layer(backbone, sample)
        return BertTextClassifier(backbone, classes, dropout=options.dropout)
    backbone = bert.new_backbone(options, pieces)
    model = BertTextClassifier(backbone, classes, dropout=options.dropout)
    init_naive_bayes(model, evidence)
    return model


def main(options: Options) -> dict:
    """Trains, tests and saves; returns what `results.json` holds."""
    with start_run("text_classification", options) as run:
        if run.finished:
            return run.results
        # Sentences as word pieces, and their labels, by split.
        data = sentences.load_sentences(run.dataset, run.cache_dir, options.seed)
        if run.metadata:  # a trained run is evaluated: its classes, in its order
            data = data.with_classes(run.metadata["classes"])
        splits = arrays.draw_examples(data.splits, options.max_examples, options.seed)
        run.note(data.note, sentences.repeated_note(splits))
        preset, _ = bert.choose_preset(options, run.fact("preset"))
        tokenizer = bert.make_tokenizer(options, preset, data.as_text(), run.cache_dir)
        preprocessor = BertTextClassifierPreprocessor(tokenizer, options.sequence_length)
        inputs = {
            name: sentences.encode(texts, preprocessor) for name, (texts, _) in splits.items()
        }
        labels = {n: found for n, (_, found) in splits.items()}
        base_learning_rate = 2e-4 if preset else 5e-4
        if options.init_from is not None:
            base_learning_rate = 1e-3
        plan = run.plan(
            examples=len(labels["train"]),
            base_learning_rate=base_learning_rate,
            batch_size_per_replica=64,
            tokens_per_example=float(inputs["train"]["padding_mask"].sum(axis=1).mean()),
            about={"sentences": data.describe(), "model": preset or "from scratch"},
            dataset=data.name,
            preset=preset or "scratch",
            data_sha256=data_sha256(splits),
            vocabulary_sha256=word_pieces.vocabulary_sha256(tokenizer.vocabulary),
        )
        hide = sentences.hide_word_pieces(
            options.token_dropout, tokenizer.mask_token_id, options.seed
        )
        train_data = arrays.training_data(
            inputs["train"], labels["train"], seed=options.seed, change=hide, **plan.batches
        )
        batch_size = plan.global_batch_size
        valid_data = arrays.evaluation_data(inputs["valid"], labels["valid"], batch_size=batch_size)
        test_data = arrays.evaluation_data(inputs["test"], labels["test"], batch_size=batch_size)
        baseline = sentences.baselines(splits)
        if "tfidf_accuracy" not in baseline:
            run.note("no TF-IDF baseline: one class, or no word of two or more letters")
        # Model, schedule and loss, under the strategy.
        with run.strategy.scope():
            evidence = sentences.naive_bayes_evidence(
                inputs["train"], labels["train"], tokenizer, len(data.classes)
            )
            sample = None
            if options.init_from is not None and not run.metadata:
                every = 1 + len(labels["train"]) // 500
                sample = {name: rows[::every] for name, rows in inputs["train"].items()}
            model = build_model(options, evidence, preset, sample)
            if not run.metadata:
                fine_tuning.freeze(model, options)
            warmup = plan.warmup_steps(options.warmup_steps)
            decay = PolynomialDecay(plan.learning_rate, plan.total_steps - warmup, 0.0)
            model.compile(
                optimizer=reduce_before_clipping(
                    fine_tuning.adamw(options, WarmUp(warmup, decay), model)
                ),
                loss=GlobalMean(keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
                metrics=None,  # KerasHub would add one that counts the padding of the last batch
                weighted_metrics=[
                    keras.metrics.SparseCategoricalAccuracy("accuracy"),
                    MacroF1(len(data.classes)),
                ],
                **plan.compile_options,
            )
            if not run.metadata:
                fine_tuning.attach(model, options)
        # Training and test.
        fit_options = plan.fit_options(model, train_data, validation=valid_data, test=test_data)
        model.fit(train_data, **fit_options)
        test = model.evaluate(test_data, return_dict=True, **plan.evaluate_options)
        return run.finish(
            model,
            test={"accuracy": test["accuracy"], "macro_f1": test["macro_f1"]},
            baseline=baseline,
            metadata={"classes": data.classes},
            test_sentences_in_training=sentences.repeated_in_test(splits),
            preprocessor=preprocessor,
        )


def predict(run: LoadedRun, inputs: Sequence[str]) -> list[list[dict]]:
    """Returns the likeliest classes of texts.

    Args:
        run: a finished run of this recipe.
        inputs: texts; a long one is cut as in training.
    """
    model = run.load_model("float32")
    logits = model(sentences.encode(inputs, model.preprocessor))
    probabilities = keras.ops.convert_to_numpy(keras.ops.softmax(logits))
    return [likeliest(row, run.metadata["classes"]) for row in probabilities]


if __name__ == "__main__":
    command_line(Options, main)
