"""Classify or score sentences, or pairs of them: from your own BERT, a preset, or scratch.

    python -m recipes.text_classification --dataset folder_with_train_dev_test_tsv
    python -m recipes.text_classification --dataset reviews.csv --init-from runs/bert_mlm/first
    python -m recipes.text_classification --dataset reviews.csv --label-column stars --labels scores
    python -m recipes.text_classification --dataset posts.jsonl --label-column tags --labels several
    python -m recipes.text_classification --strategy mirrored --replicas 2

Reads sentences and labels (without --dataset: paragraphs of the installed packages' docstrings, to
be classified by package), and trains `keras_nlp.models.BertTextClassifier` with `model.fit()`:
AdamW, linear warm-up, PolynomialDecay to zero. A new model is initialised as a naive Bayes
classifier; token dropout masks half of the word pieces, redrawn every epoch. Labels may be scores
instead (STS-B, ratings): the same model with one output, trained on squared errors. Or a text may
have several labels, or none (topics, emotions): each is a yes or no.

From scratch on the docstrings: test accuracy 89.5%, macro F1 76.8% (most frequent class: accuracy
71.7%) in 60 to 90 seconds on 2 CPU cores; SST-2 in README.md.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import keras
import keras_nlp
import numpy as np
import scipy.special
import tensorflow as tf
from keras.optimizers.schedules import PolynomialDecay
from keras_nlp.models import BertTextClassifier, BertTextClassifierPreprocessor

from callbacks.predictions import ClassifiedSentences, outputs_of
from data import arrays, scores, sentences, tfidf, word_pieces
from data.errors import DataError, has_inputs, listed, read_each
from data.glue import PAIR
from data.sequences import cut_note
from models import bert, fine_tuning, label_kinds, presets, transformers_format
from models.initial_weights import (
    add_mean_layer,
    init_naive_bayes,
    init_probe,
    init_scores,
    init_several,
)
from training.artifacts import data_sha256
from training.command_line import command_line
from training.errors import OptionsError
from training.loaded_run import LoadedRun, top_k
from training.options import FineTuningOptions, HeldOutOptions, flag, option
from training.plan import Plan
from training.run import start_run
from training.schedules import WarmUp, reshaped

EXAMPLE_LENGTH = 60  # characters of a sentence in the printed `predict` command


@dataclasses.dataclass(kw_only=True)
class Options(FineTuningOptions, HeldOutOptions):
    """Options of `recipes.text_classification`."""

    EXAMPLE_INPUT: ClassVar[str] = "a small miracle of a film"
    EXPORT_TAKES_TEXTS: ClassVar[bool] = True

    dataset: str = option(
        "auto",
        "A folder of train.tsv, dev.tsv, test.tsv; one file; each a CSV, TSV, JSONL, JSON or "
        "Parquet; installed-docs, or auto.",
    )
    text_column: str | None = option(
        None, "Column of the sentences, or of the first of two (default: sentence or text)."
    )
    second_text_column: str | None = option(
        None,
        "Column of the second sentences, for pairs (default: sentence2, text_pair beside text, or "
        "those of GLUE's tasks; none with --text-column).",
    )
    label_column: tuple[str, ...] = option(
        (),
        "Column of the labels (default: label or labels); or several columns of 0 and 1, one for "
        "each of --labels several.",
    )
    labels: Literal["auto", "classes", "scores", "several"] = option(
        "auto",
        "classes; scores, numbers to predict (a regression); several, any number of labels for a "
        "text: a JSON list, or names separated by , or |; or auto: scores for STS-B and for more "
        "than 20 different numbers with decimals, several for lists in JSON or Parquet.",
    )
    metrics: tuple[Literal["f1", "matthews", "auc", "precision", "recall"], ...] = option(
        (),
        "Metrics of classes besides accuracy and macro F1: Matthews correlation; of the last of "
        "two classes F1, area under the ROC curve, precision, recall.",
    )
    preset: str = option(
        "scratch",
        "scratch, a preset of KerasNLP, hf://owner/model, or a preset's folder.",
    )
    init_from: Path | None = option(
        None,
        "Start from the word pieces and the encoder of a finished run of bert_mlm (or its best/, a "
        "checkpoint, a weights file); the head is new.",
    )
    num_layers: int = 1
    hidden_dim: int = 64
    dropout: float | None = option(
        None,
        "Dropout in the encoder and before the last layer (default: from scratch or from a run "
        "0.3, for scores and several labels 0.1; otherwise the preset's).",
        within="[0, 1)",
    )
    token_dropout: float | None = option(
        None,
        "Share of a training sentence's tokens to replace by the mask token, redrawn every epoch "
        "(default: 0.5 from scratch or from a run, 0 from a preset, for scores or several labels).",
        within="[0, 1)",
    )
    class_weights: Literal["none", "balanced"] = option(
        "none",
        "balanced: in the loss and the training metrics rare classes count as much as frequent "
        "ones; of several labels, in the losses both values of each count the same.",
    )
    label_smoothing: float = option(
        0.0,
        "Probability of a label to spread evenly over all classes (of several labels: over yes and "
        "no), in the losses of training and validation.",
        within="[0, 1)",
    )
    group_by_length: Literal["auto", "on", "off"] = option(
        "auto",
        "on: sentences of similar length share a batch, which is cut after the longest; auto: from "
        "a preset.",
    )
    sequence_length: int = option(
        64, "Tokens of a sentence, including [CLS] and [SEP]; the rest is cut.", within="[4, 512]"
    )
    base_learning_rate: float | None = option(
        None,
        "Peak learning rate for one replica (default: 5e-4 from scratch, 1e-3 from a run, 5e-5 "
        "from a preset, or 5e-4 from a preset with adapters or a frozen backbone).",
    )
    warmup_steps: int | None = option(
        None, "Steps of linear warm-up (default: 100, but at most a tenth of the run)."
    )
    epochs: int = 2

    @property
    def groups_by_length(self) -> bool:
        """Tells whether sentences of similar length share a batch."""
        if self.group_by_length != "auto":
            return self.group_by_length == "on"
        return self.preset != "scratch" and self.init_from is None

    @property
    def batch_shapes(self) -> int:
        """Counts the shapes that training batches may have."""
        if not self.groups_by_length:
            return 1
        return len(arrays.steps_of(self.sequence_length))

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        problems = super().problems() + presets.problems_of_presets(self)
        problems += refused(self, self.labels, f"not with --labels {self.labels}")
        if len(self.label_column) > 1 and self.labels not in ("auto", "several"):
            columns = " ".join(self.label_column)
            problems.append(f"--label-column {columns}: several need --labels several")
        repeated = [name for name in self.label_column if self.label_column.count(name) > 1]
        if repeated:
            problems.append(f"--label-column: names {repeated[0]} more than once")
        for name in ("freeze_backbone", "lora_rank"):
            if getattr(self, name) and self.preset == "scratch" and self.init_from is None:
                problems.append(
                    f"{flag(name)}: needs a trained encoder: pass --preset or --init-from"
                )
        return problems


def build_model(
    options: Options,
    num_classes: int,
    preset: str | None = None,
    *,
    evidence: np.ndarray | None = None,
    sample: dict[str, np.ndarray] | None = None,
    keep_head: bool = False,
    scale: keras.layers.Rescaling | None = None,
    sample_labels: np.ndarray | None = None,
    label_weights: np.ndarray | None = None,
) -> keras_nlp.models.TextClassifier:
    """Builds the model inside the strategy's scope, without its tokenizer.

    Args:
        options: sizes and dropout.
        num_classes: number of classes, or of several labels; 1 for scores.
        preset: a name, handle or folder of any family with a `TextClassifier`; None for a new
            `BertTextClassifier`.
        evidence: for a new model: its initial logits per word piece, float of shape (word pieces,
            classes); see `sentences.naive_bayes_evidence`, `scores.evidence` and
            `several_labels.evidence`.
        sample: for a BERT of a run or of sentence-transformers, whose [CLS] is untrained, and for a
            new model of scores or several labels: inputs of some hundred training sentences.
        keep_head: whether to use the head of the preset, a classifier of as many classes; an
            activation such as softmax is left out, since the loss and `predict()` expect logits.
        scale: of a head for scores that is new or of `transformers`; see `label_kinds.Scores`.
        sample_labels: for a new model of several labels: those of `sample`.
        label_weights: of the loss, for such a model; see `several_labels.balanced_weights`.

    Returns:
        A model whose inputs are token ids and whose outputs are logits of shape (batch, classes),
        or scores of shape (batch, 1).
    """
    head: dict[str, Any] = {"num_classes": num_classes, "activation": scale}
    dropout = options.dropout
    if dropout is None and (preset is None or options.init_from is not None):
        # Its noise is an error of every score, and of several labels.
        dropout = 0.3 if scale is None and sample_labels is None else 0.1
    if preset is None:
        assert evidence is not None
        options = dataclasses.replace(options, dropout=dropout)
        model = BertTextClassifier(
            bert.new_backbone(options, len(evidence)), **head, dropout=dropout
        )
        if sample is not None and sample_labels is not None:
            init_several(model, evidence, sample, sample_labels, label_weights)
        elif sample is not None and scale is not None:
            init_scores(model, evidence, sample)
        else:
            init_naive_bayes(model, evidence)
        return model
    drops = {} if dropout is None else {"dropout": dropout}
    untrained_cls = options.init_from is not None or transformers_format.pools_means(preset)
    if sample is not None and untrained_cls and not keep_head:
        backbone = presets.load_backbone(preset, dropout)
        presets.require_positions(backbone, preset, options.sequence_length)
        if isinstance(backbone, keras_nlp.models.BertBackbone):  # its pooler reads [CLS]
            backbone = add_mean_layer(backbone, sample)
            return BertTextClassifier(backbone, **head, **drops)
    if keep_head and transformers_format.has_head(preset, "TextClassifier"):
        head = {"activation": scale}  # its scores are in the labels' unit, without a scale
    elif keep_head:  # scores keep their unit, and a trained run that is evaluated is left as it is
        head = {} if scale is not None or options.evaluation is not None else {"activation": None}
    return presets.load_task(
        keras_nlp.models.TextClassifier,
        preset,
        backbone_dropout=dropout,
        sequence_length=options.sequence_length,
        **head,
        **drops,
    )


def main(options: Options) -> dict:
    """Trains, tests and saves; returns what `results.json` holds."""
    with start_run("text_classification", options) as run:
        if run.finished:
            return run.results
        # Sentences and labels; a tokenizer; token ids by split.
        data = load_data(options, run)
        preset, _ = presets.choose_preset(options, run.fact("preset"))
        preprocessor = make_preprocessor(options, preset, data, run.cache_dir)
        tokenizer = preprocessor.tokenizer
        run.note(*bert.vocabulary_notes(options, preset, data.as_text(), run.cache_dir))
        run.note(presets.added_tokens_note(preset, tokenizer))
        fine_tunes = preset is not None and options.init_from is None
        if fine_tunes and run.trained is None:
            data = in_order_of_head(data, str(preset))
        data = limited(options, data)
        run.note(data.note)
        if run.has_own_dataset:  # an evaluation on other data does not note their training split
            run.note(*sentences.repeated_notes(data.splits))
        run.note(*label_notes(options, data))
        inputs = sentences.encode_once(data.splits, preprocessor, run.cache_dir)
        labels = {name: numbers for name, (_, numbers) in data.splits.items()}
        for split, name in (("train", "training"), ("test", "test")):
            run.note(*token_notes(data.name, name, inputs[split]["token_ids"], tokenizer))
        token_dropout = chosen_token_dropout(options, data, preset, tokenizer, fine_tunes)
        is_token = inputs["train"]["token_ids"] != tokenizer.pad_token_id
        # Global batch, learning rate and steps for these replicas; options override the defaults.
        plan = run.plan(
            examples=len(labels["train"]),
            base_learning_rate=default_learning_rate(options, preset),
            batch_size_per_replica=32 if fine_tunes else 64,
            warmup_steps=100,
            tokens_per_example=float(is_token.sum(axis=1).mean()),
            about={"sentences": data.describe(), "model": preset or "from scratch"},
            dataset=data.name,
            preset=preset or "scratch",
            data_sha256=data_sha256(data.splits),
            vocabulary_sha256=word_pieces.vocabulary_sha256(word_pieces.vocabulary_of(tokenizer)),
        )
        train_data, valid_data, test_data = make_batches(
            options, plan, inputs, labels, tokenizer, token_dropout
        )
        # Classes: cross-entropy; accuracy and macro F1. Scores: squared errors; MAE, RMSE, Pearson.
        # Several labels: binary cross-entropy; accuracy, micro and macro F1, exact match.
        kind = label_kinds.KINDS[data.kind](data, options.metrics, options.class_weights)
        baseline = kind.baselines()
        run.note(baseline_note(data, baseline))
        # Model, schedule and loss, under the strategy.
        with run.strategy.scope():
            model = make_model(options, run, kind, preset, inputs["train"], tokenizer)
            fine_tuning.freeze_or_adapt(model, options)
            # Linear warm-up, then PolynomialDecay, or what --lr-schedule makes of it.
            decay = PolynomialDecay(plan.learning_rate, plan.decay_steps, plan.end_learning_rate)
            schedule = WarmUp(plan.warmup_steps, reshaped(decay, options, plan))
            metrics = kind.metrics()
            model.compile(
                # AdamW or Muon; biases and layer norms do not decay.
                optimizer=fine_tuning.make_optimizer(options, schedule, model),
                loss=kind.loss(options.label_smoothing),
                loss_weights=kind.loss_weights(),
                metrics=None,  # KerasHub would add one that counts the padding of the last batch
                weighted_metrics=metrics,
            )
            fine_tuning.save_only_trained(model, options)
        # Training and test; TensorBoard shows how sentences are classified.
        view = ClassifiedSentences(
            run.tensorboard, inputs["valid"], *data.splits["valid"], data.classes
        )
        fit_options = run.prepare(
            model, train_data, validation=valid_data, test=test_data, extra=[view]
        )
        model.fit(train_data, class_weight=kind.class_weight(), **fit_options)
        test = model.evaluate(test_data, return_dict=True, **run.evaluate_options)
        results = kind.results(test, metrics, lambda split: outputs_of(model, inputs[split]))
        results["metadata"]["pairs"] = data.pairs
        # `recipes.evaluate --examples` alone calls it.
        results["examples_table"] = lambda: worst_first(model, inputs["test"], kind)
        if run.has_own_dataset:  # as above
            results["test_sentences_in_training"] = sentences.in_training(data.splits)["test"]
        return run.finish(
            model,
            baseline=baseline,
            preprocessor=preprocessor,
            example_input=example_of(data),
            **results,
        )


def load_data(options: Options, run) -> sentences.Sentences:
    """Loads sentences and labels; of an evaluation, with the classes in the model's order.

    Args:
        options: the columns, and the kind of the labels.
        run: the run, or an evaluation.

    Raises:
        DataError: the files cannot be read, or are not what the model was trained on.
        OptionsError: an option is for labels of another kind.
    """
    known = (kind for kind in ("scores", "several") if run.metadata.get(kind))
    data = sentences.load_sentences(
        run.dataset,
        run.cache_dir,
        text_column=options.text_column,
        second_text_column=options.second_text_column,
        label_column=options.label_column,
        labels=next(known, options.labels),
        held_out=run.held_out,
        test_file=run.test_file,
    )
    require_kind(options, data)
    if run.trained is not None:
        classes = run.metadata.get("classes", ())
        data = data.with_classes(classes, run.metadata.get("several", False))
        data.require_pairs(run.metadata.get("pairs", data.pairs))
    return data


def make_model(
    options: Options,
    run,
    kind: label_kinds.Classes,
    preset: str | None,
    inputs: dict[str, np.ndarray],
    tokenizer,
) -> keras_nlp.models.TextClassifier:
    """Builds the model with the weights that its training begins with, and notes its head.

    A new model knows what a naive Bayes classifier of the training split knows. One of a preset
    keeps its head if that is for the same labels.

    Args:
        options: sizes, dropout, and what is trained.
        run: the run; or an evaluation, which loads the trained weights into this model.
        kind: that of the labels, with the sentences.
        preset: a name, handle or folder; None for a new model.
        inputs: the encoded training sentences.
        tokenizer: of KerasNLP.
    """
    data, is_new = kind.data, run.trained is None
    labels = data.splits["train"][1]
    keep_head = True  # of a run that is evaluated, with the scale of its scores
    if is_new:
        keep_head, about_head = choose_head(options, preset, data)
        run.note(*about_head)
    every = 1 + len(labels) // 500  # some 500 sentences
    model = build_model(
        options,
        len(data.classes) or 1,
        preset,
        evidence=kind.evidence(inputs, tokenizer) if preset is None else None,
        sample={name: rows[::every] for name, rows in inputs.items()} if is_new else None,
        keep_head=keep_head,
        scale=kind.scale(),
        sample_labels=labels[::every] if data.several else None,
        label_weights=kind.label_weights(),
    )
    run.note(presets.check_vocabulary(model, tokenizer, str(preset)))
    if options.freeze_backbone and not (keep_head or run.resumes):
        init_probe(model, inputs, labels, kind.class_weight() or kind.label_weights())
    return model


def refused(options: Options, kind: str, reason: str) -> list[str]:
    """Returns a line for each option that labels of a kind do not have.

    Args:
        options: the options.
        kind: what the labels are, one of `sentences.KINDS`, or "auto".
        reason: how a line ends.
    """
    lines = []
    if kind == "scores" and options.class_weights != "none":
        lines.append(f"--class-weights {options.class_weights}: {reason}")
    if kind == "scores" and options.label_smoothing:
        lines.append(f"--label-smoothing {options.label_smoothing}: {reason}")
    if kind in ("scores", "several") and options.metrics:
        lines.append(f"--metrics {' '.join(options.metrics)}: {reason}")
    return lines


def require_kind(options: Options, data: sentences.Sentences) -> None:
    """Rejects options that the labels of the data do not have.

    Raises:
        OptionsError: with a line for each.
        DataError: its scores are too large, or too close together.
    """
    lines = refused(options, data.kind, f"{data.name} has {sentences.KINDS[data.kind]}")
    of_two = [name for name in options.metrics if name in label_kinds.OF_TWO]
    if data.kind == "classes" and of_two and len(data.classes) != 2:
        needs = f"{data.name} has {len(data.classes):,} classes, expected two"
        lines.append(f"--metrics {' '.join(of_two)}: {needs}")
    best = (options.keep_best or "").removeprefix("val_")
    is_measured = best in {*options.metrics, *data.metrics} or options.evaluation is not None
    if data.kind == "classes" and best in label_kinds.OF_CLASSES and not is_measured:
        lines.append(f"--keep-best {options.keep_best}: needs --metrics {best}")
    if data.scores and best == "spearman" and not is_measured:
        lines.append(
            f"--keep-best {options.keep_best}: the rank correlation is computed at the end of the "
            "run; use val_pearson"
        )
    if lines:
        raise OptionsError("\n".join(lines))
    reason = scores.out_of_range(data.splits, options.precision) if data.scores else None
    if reason is not None:
        raise DataError(f"{data.name}: {reason}")


def undefined_area(options: Options, data: sentences.Sentences) -> list[str]:
    """Returns a note for each split without an area under the curve: all its labels are equal.

    Raises:
        OptionsError: `--keep-best` compares these areas.
    """
    notes = []
    for split, name in (("valid", "validation"), ("test", "test")):
        labels = data.splits[split][1]
        if "auc" not in options.metrics or np.ptp(labels):
            continue
        reason = f"all sentences of the {name} split are of the class {data.classes[labels[0]]!r}"
        if (split, options.keep_best, options.evaluation) == ("valid", "val_auc", None):
            raise OptionsError(f"--keep-best val_auc: {reason}")
        notes.append(f"the {name} auc is 0: {reason}")
    return notes


def label_notes(options: Options, data: sentences.Sentences) -> list[str | None]:
    """Returns notes about labels that are not balanced, learned or measured as one may expect."""
    return [
        *undefined_area(options, data),
        unbalanced_note(options, data),
        unlearnable_note(options, data),
    ]


def unbalanced_note(options: Options, data: sentences.Sentences) -> str | None:
    """Returns a note about labels with one value in training, which no weights can balance."""
    if options.class_weights == "none" or not data.several:
        return None
    is_constant = np.ptp(data.splits["train"][1], axis=0) == 0
    names = [repr(name) for name, found in zip(data.classes, is_constant, strict=True) if found]
    if not names:
        return None
    return (
        f"--class-weights balanced: the weights of {listed(names)} are 1: all training sentences "
        "have the label, or none has"
    )


def unlearnable_note(options: Options, data: sentences.Sentences) -> str | None:
    """Returns a note about labels that a training split cut by `--max-examples` does not teach."""
    labels = data.splits["train"][1]
    if options.max_examples is None or options.evaluation is not None:
        return None
    cut = f"--max-examples {options.max_examples}"
    if data.scores:
        return f"{cut}: all training scores are equal" if np.ptp(labels) == 0 else None
    if data.several:
        missing = np.ptp(labels, axis=0) == 0
        what = "differ in"
    else:
        missing = np.bincount(labels, minlength=len(data.classes)) == 0
        what = "are of"
    names = [repr(data.classes[index][:100]) for index in np.flatnonzero(missing)]
    return f"{cut}: no training sentences {what} {listed(names)}" if names else None


def choose_head(
    options: Options, preset: str | None, data: sentences.Sentences
) -> tuple[bool, list[str | None]]:
    """Tells whether a training begins with the head of its preset, and returns notes about it."""
    if preset is None:
        return False, []
    if options.init_from is not None:
        return False, [unused_head_note(options.init_from, preset, data)]
    keeps, about_head = presets.kept_head(preset, data.classes, data.several)
    is_frozen = options.freeze_backbone or options.lora_rank is not None
    return keeps, [about_head, None if keeps else presets.new_pooler(preset, is_frozen)]


def in_order_of_head(data: sentences.Sentences, preset: str) -> sentences.Sentences:
    """Returns sentences whose classes have the order of a preset's head, if it is for the same."""
    classes = presets.classes_of_head(preset)
    if data.scores or sorted(classes) != sorted(data.classes):
        return data
    return data.with_classes(classes, data.several)


def limited(options: Options, data: sentences.Sentences) -> sentences.Sentences:
    """Returns sentences with at most as many for training and validation as the options say."""
    splits = arrays.draw_examples(
        data.splits, options.max_examples, options.seed, options.max_validation_examples
    )
    return dataclasses.replace(data, splits=splits)


def make_batches(
    options: Options,
    plan: Plan,
    inputs: dict[str, dict[str, np.ndarray]],
    labels: dict[str, np.ndarray],
    tokenizer,
    token_dropout: float,
) -> list[tf.data.Dataset]:
    """Makes the batches of training, validation and test, of similar length if asked for.

    Args:
        options: seed, accumulated batches, and whether to group by length.
        plan: batch size, and where training starts.
        inputs: encoded sentences, by split.
        labels: theirs, by split.
        tokenizer: of KerasNLP.
        token_dropout: share of the word pieces of training sentences to mask.
    """
    lengths = dict.fromkeys(inputs)
    if options.groups_by_length:
        lengths = {split: sentences.lengths(rows) for split, rows in inputs.items()}
    hide = None
    if token_dropout:
        hide = sentences.hide_word_pieces(token_dropout, tokenizer, options.seed)
    train = arrays.training_data(
        inputs["train"],
        labels["train"],
        seed=options.seed,
        change=hide,
        lengths=lengths["train"],
        batches_per_update=options.accumulate_steps,
        **plan.batches,
    )
    evaluated = [
        arrays.evaluation_data(
            inputs[split],
            labels[split],
            batch_size=plan.global_batch_size,
            lengths=lengths[split],
        )
        for split in ("valid", "test")
    ]
    return [train, *evaluated]


def worst_first(
    model: keras.Model, inputs: dict[str, np.ndarray], kind: label_kinds.Classes
) -> list[list]:
    """Returns the rows of `recipes.evaluate --examples`, a header first.

    Args:
        model: the trained model.
        inputs: its inputs for the test split.
        kind: of the labels, with the sentences.

    Returns:
        `input` (and `second_input` of pairs), and the columns of `kind.worst_first()`, in its
        order.
    """
    texts, _ = kind.data.splits["test"]
    columns, order = kind.worst_first(outputs_of(model, inputs).astype(np.float64))
    header = ["input", "second_input"] if kind.data.pairs else ["input"]
    rows = [
        [*texts[index].split(sentences.SEPARATOR), *(column[index] for column in columns.values())]
        for index in order
    ]
    return [[*header, *columns], *rows]


def example_of(data: sentences.Sentences) -> str | None:
    """Returns an input for the printed `predict` command: a short sentence, or pair, of the data.

    Of the validation split, and of four words or more where there is one; cut after
    `EXAMPLE_LENGTH` characters.
    """
    # The command line takes a text with a hyphen in front for an option.
    texts = [text for text in data.splits["valid"][0] if not text.startswith("-")]
    if not texts:
        return None
    text = min(texts, key=lambda text: (len(text.split()) < 4, len(text)))
    return PAIR.join(map(shortened, text.split(sentences.SEPARATOR)))


def shortened(text: str) -> str:
    """Returns a text in one line of at most `EXAMPLE_LENGTH` characters, cut between two words."""
    line = " ".join(text.split())
    if len(line) <= EXAMPLE_LENGTH:
        return line
    words, _, _ = line[: EXAMPLE_LENGTH + 1].rpartition(" ")
    return words or line[:EXAMPLE_LENGTH]


def default_learning_rate(options: Options, preset: str | None) -> float:
    """Returns the default peak learning rate for one replica."""
    if options.init_from is not None:
        return 1e-3
    if preset is None or options.freeze_backbone or options.lora_rank is not None:
        return 5e-4
    return 5e-5


def chosen_token_dropout(
    options: Options, data: sentences.Sentences, preset: str | None, tokenizer, fine_tunes: bool
) -> float:
    """Returns the share of word pieces to mask in training: by default half, for new encoders.

    Args:
        options: the share, or None for the default.
        data: the sentences; scores and several labels have none by default.
        preset: named in the error.
        tokenizer: of KerasNLP.
        fine_tunes: whether a preset is trained further, which has none by default.

    Raises:
        DataError: the tokenizer has no mask token.
    """
    share = options.token_dropout
    if share is None:
        share = 0.0 if fine_tunes or data.kind != "classes" else 0.5
    if share:
        presets.require_mask_token(tokenizer, str(preset), f"--token-dropout {share}")
    return share


def make_preprocessor(options: Options, preset: str | None, data, cache_dir: Path):
    """Loads a preset's preprocessor, or builds BERT's with a vocabulary from a file or learned."""
    kind = keras_nlp.models.TextClassifierPreprocessor
    if preset is not None:
        presets.require_task(keras_nlp.models.TextClassifier, preset)
        return presets.load(kind, preset, sequence_length=options.sequence_length)
    tokenizer = bert.make_tokenizer(options, None, data.as_text(), cache_dir)
    return BertTextClassifierPreprocessor(tokenizer, options.sequence_length)


def unused_head_note(init_from: Path, preset: str, data: sentences.Sentences) -> str | None:
    """Returns a note if `--init-from` names a classifier, whose head it does not use."""
    classes = in_order_of_head(data, preset).classes
    fits, about_head = presets.kept_head(preset, classes, data.several)
    if about_head is None:
        return None
    remedy = f"; --preset {preset} keeps its head" if fits else ""
    return f"--init-from {init_from}: takes the encoder alone, with a new head{remedy}"


def baseline_note(data: sentences.Sentences, baseline: dict[str, float]) -> str | None:
    """Returns a note if there is no TF-IDF baseline, or if it learns from a part of the data."""
    if tfidf.too_many_classes(len(data.classes) or 1):
        return f"no TF-IDF baseline: {len(data.classes):,} classes"
    if not {"tfidf_accuracy", "tfidf_micro_f1", "ridge_mae"} & set(baseline):
        return "no TF-IDF baseline: one class, or no word of two or more letters"
    most = tfidf.most_sentences(len(data.classes) or 1)
    if len(data.splits["train"][0]) > most:
        return f"the TF-IDF baseline learns from at most {most:,} sentences"
    return None


def token_notes(name: str, split: str, token_ids: np.ndarray, tokenizer) -> list[str | None]:
    """Returns notes about sentences with many unknown tokens, or that are cut.

    Args:
        name: name of the dataset.
        split: name of the split.
        token_ids: of its sentences, of shape (sentences, length).
        tokenizer: of KerasNLP.

    Raises:
        DataError: all tokens are unknown.
    """
    unknown = word_pieces.unknown_share([token_ids], tokenizer)
    if unknown == 1:
        raise DataError(
            f"{name}: all tokens of the {split} split are [UNK]; use a --vocabulary or a "
            "--preset that fits the text"
        )
    cut = cut_note(token_ids, tokenizer.pad_token_id, "sentences", split)
    return [word_pieces.unknown_note(unknown, split), cut]


def predict(
    run: LoadedRun,
    inputs: Sequence[str | tuple[str, str]],
    *,
    top: int | None = None,
    threshold: float = 0.5,
) -> list[list[dict]]:
    """Returns the most likely classes of texts, the labels that they have, or their scores.

    Args:
        run: a finished run of this recipe.
        inputs: texts; long ones are truncated as in training, and of a run on `installed-docs` the
            packages' names are removed as there. The two sentences of a pair are separated by
            "|||", or are a tuple.
        top: number of classes of each answer, 0 for all; without effect on scores (default: 3; of
            several labels those whose probability reaches --threshold).
        threshold: smallest probability of the labels that a text has, of several labels.

    Raises:
        OptionsError: the threshold is not in [0, 1], or the run did not learn several labels.
    """
    if not 0 <= threshold <= 1:
        raise OptionsError(f"--threshold {threshold}: must be in [0, 1]")
    if threshold != 0.5 and not run.metadata.get("several"):
        raise OptionsError(f"--threshold {threshold}: the run did not learn several labels")
    if threshold != 0.5 and top:
        raise OptionsError(f"--threshold {threshold}: leave it out, --top {top} has {top} labels")
    if not has_inputs(inputs):
        return []
    if run.metadata.get("pairs"):
        texts = read_each(_pair, inputs)
    else:
        texts = [each if isinstance(each, str) else PAIR.join(each) for each in inputs]
        texts = [text.replace(sentences.SEPARATOR, " ") for text in texts]  # as in training
        if run.resolved.get("dataset") == sentences.INSTALLED_DOCS:
            texts = list(map(sentences.without_names, texts))
    model = run.load_model("float32")
    logits = outputs_of(model, sentences.encode(texts, model.preprocessor))
    if run.metadata.get("scores"):
        return [[{"score": float(score)}] for score in logits[:, 0]]
    classes = run.metadata["classes"]
    if not run.metadata.get("several"):
        probabilities = keras.ops.convert_to_numpy(keras.ops.softmax(logits))
        return [top_k(row, classes, 3 if top is None else top) for row in probabilities]
    probabilities = scipy.special.expit(logits)
    if top is not None:
        return [top_k(row, classes, top) for row in probabilities]
    counts = (probabilities >= threshold).sum(axis=1)  # there may be thousands of others
    return [
        top_k(row, classes, count) if count else []
        for row, count in zip(probabilities, counts, strict=True)
    ]


def _pair(text: str | tuple[str, str]) -> str:
    """Returns a pair of sentences as in training."""
    parts = text.split(PAIR.strip()) if isinstance(text, str) else text
    parts = [part.replace(sentences.SEPARATOR, " ").strip() for part in parts]
    if len(parts) != 2 or not all(parts):
        raise DataError(
            f'{text[:60]!r}: expected two sentences, "first ||| second" (of a table, name the '
            "columns with --text-column and --second-text-column)"
        )
    return sentences.SEPARATOR.join(parts)


if __name__ == "__main__":
    command_line(Options, main)
