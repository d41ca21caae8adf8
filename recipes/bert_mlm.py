"""Fill in masked words: BERT and its relatives, trained on WikiText or your own text.

    python -m recipes.bert_mlm
    python -m recipes.bert_mlm --dataset my_text.txt --vocabulary vocab.txt --epochs 3
    python -m recipes.bert_mlm --preset roberta_base_en --dataset my_text.txt --whole-word-masking
    python -m recipes.bert_mlm --strategy mirrored --replicas 2

Downloads WikiText-2 and continues the pretraining of Google's BERT-Tiny, or of any family's
`MaskedLM` (`--preset`). Without a network, or with `--preset scratch`, it learns a WordPiece
vocabulary and trains a new `keras_nlp.models.BertMaskedLM`; without a network the text is the prose
of the installed packages' docstrings. Packs the text into full sequences and trains with
`model.fit()`: AdamW, linear warm-up, PolynomialDecay to zero.

From scratch on the docstrings: test cross-entropy 3.54, accuracy 39.3%, perplexity 34.3 (unigram
model: cross-entropy 6.21) in 5 to 11 minutes on 2 CPU cores.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import keras
import keras_nlp
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import PolynomialDecay

from callbacks.predictions import MaskedSamples
from data import arrays, masked_lm, word_pieces
from data.errors import DataError, has_inputs, read_each
from data.sequences import cut_note, in_blocks, sequences_once
from data.text import load_text
from models import bert, fine_tuning, likelihoods, presets
from models.chunked_head import chunked_masked_lm, has_tied_logits
from models.initial_weights import init_local_attention, init_unigram_bias
from training.command_line import command_line
from training.errors import OptionsError
from training.loaded_run import LoadedRun, top_k
from training.options import HeldOutOptions, TextOptions, option
from training.run import start_run
from training.schedules import WarmUp, reshaped


@dataclasses.dataclass(kw_only=True)
class Options(TextOptions, HeldOutOptions):
    """Options of `recipes.bert_mlm`."""

    EXAMPLE_INPUT: ClassVar[str] = "the loss is [MASK] over the batch"
    EXPORT_TAKES_TEXTS: ClassVar[bool] = True

    # On 2 cores compiling took 5 s more, and a step 0.1 s less (`make bench`).
    JIT_MIN_STEPS: ClassVar[int] = 300
    GPU_JIT_IS_DETERMINISTIC: ClassVar[bool] = True  # `make test-gpu` runs it twice

    dataset: str = option(
        "auto",
        "wikitext-2[-raw], wikitext-103[-raw], novels, installed-docs, a path or glob, or auto.",
    )
    text_column: str | None = option(
        None, "Column of the text in a CSV, TSV, JSONL or Parquet (default: text)."
    )
    preset: str = option(
        "auto",
        "scratch, a preset of Kaggle or Hugging Face, a preset's folder, or auto: "
        "bert_tiny_en_uncased for WikiText where it can be had and neither a size nor a vocabulary "
        "is passed, otherwise scratch.",
    )
    init_from: Path | None = option(
        None,
        "Start from the word pieces, sizes and weights of a finished run (or its best/, a "
        "checkpoint, a weights file), with a new schedule.",
    )
    dropout: float | None = option(
        None, "Dropout (default: 0 from scratch, otherwise the preset's).", within="[0, 1)"
    )
    text_mode: Literal["packed", "lines"] = option(
        "packed", "Full sequences, or one line per example with padding."
    )
    min_line_bytes: int = option(
        0,
        "Skip lines of fewer bytes, such as headings; Keras's guides skip those below 101.",
        within="[0, 1e6]",
    )
    sequence_length: int = option(128, "Tokens of a sequence, including [CLS].", within="[4, 512]")
    head: Literal["chunked", "stock"] = option(
        "chunked",
        "chunked computes the logits in chunks, if they are hidden states times embeddings plus a "
        "bias; stock computes them all at once. The results are the same.",
    )
    whole_word_masking: bool = option(False, "Mask all word pieces of a chosen word.")
    mlm_probability: float = option(0.15, "Share of tokens to predict.", within="(0, 1]")
    initial_mlm_probability: float | None = option(
        None,
        "That share in the first training step; it falls linearly to --mlm-probability, which "
        "validation and test have throughout (default: 0.4 from scratch, otherwise the same).",
        within="(0, 1]",
    )
    base_learning_rate: float | None = option(
        None, "Peak learning rate for one replica (default: 1.5e-3 from scratch, 1e-4 otherwise)."
    )
    beta_2: float = 0.98
    epochs: int = 8

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        return super().problems() + presets.problems_of_presets(self)

    def initial_probability(self, preset: str | None) -> float:
        """Returns the share of tokens to predict in the first training step.

        Args:
            preset: the preset that is trained; None for a new model.
        """
        if self.initial_mlm_probability is not None:
            return self.initial_mlm_probability
        return self.mlm_probability if preset else max(0.4, self.mlm_probability)


def build_model(
    options: Options,
    vocabulary_size: int,
    preset: str | None = None,
    log_frequency: np.ndarray | None = None,
) -> keras_nlp.models.MaskedLM:
    """Builds the model inside the strategy's scope, without its tokenizer.

    Args:
        options: sizes and dropout.
        vocabulary_size: number of word pieces.
        preset: a name, handle or folder of any family with a `MaskedLM`; None for a new
            `BertMaskedLM`.
        log_frequency: initial output bias of a new model (`masked_lm.log_frequency`), or None.

    Returns:
        A model whose inputs are token ids. The pooler, which masked words do not use, is
        frozen.
    """
    if preset is not None:
        model = presets.load_task(
            keras_nlp.models.MaskedLM,
            preset,
            backbone_dropout=options.dropout,
            sequence_length=options.sequence_length,
        )
    else:
        model = keras_nlp.models.BertMaskedLM(backbone=bert.new_backbone(options, vocabulary_size))
        init_local_attention(model, options.seed)
        if log_frequency is not None:
            init_unigram_bias(model, log_frequency)
    pooler = getattr(model.backbone, "pooled_dense", None)
    if pooler is not None:
        pooler.trainable = False
    return model


def main(options: Options) -> dict:
    """Trains, tests and saves; returns what `results.json` holds."""
    with start_run("bert_mlm", options) as run:
        if run.finished:
            return run.results
        # Text; a tokenizer; fixed-length sequences of word pieces by split.
        text = load_text(
            run.dataset,
            run.cache_dir,
            text_column=options.text_column,
            held_out=run.held_out,
            test_file=run.test_file,
        )
        preset, why = presets.choose_preset(options, run.fact("preset"), text.english_wikitext)
        run.note(text.note, why)
        tokenizer = load_tokenizer(options, run, preset, text)
        preprocessor = make_preprocessor(options, preset, tokenizer)
        # Names of the model's inputs: some families have no segments.
        inputs = tuple(preprocessor(tf.constant(["a text"]))[0])
        sequences, masking = make_sequences(
            options, text, tokenizer, run.cache_dir, inputs, options.initial_probability(preset)
        )
        if run.has_own_dataset:  # an evaluation on other data does not note their training split
            run.note(*text.repeated_notes())
        run.note(*sequence_notes(options, sequences, tokenizer))
        tokens = masked_lm.tokens_per_sequence(sequences["train"], masking)
        # Global batch, learning rate and steps for these replicas; options override the defaults.
        plan = run.plan(
            examples=len(sequences["train"]),
            base_learning_rate=1e-4 if preset else 1.5e-3,
            warmup_steps=200,
            tokens_per_example=tokens,
            about={
                "text": f"{text.name}: {len(sequences['train']):,} training sequences",
                "model": preset or "from scratch",
                "masks": masking.describe(),
            },
            dataset=text.name,
            text_sha256=text.sha256,
            preset=preset or "scratch",
            vocabulary_sha256=word_pieces.vocabulary_sha256(word_pieces.vocabulary_of(tokenizer)),
        )
        batch_size = plan.global_batch_size
        train_data = masked_lm.training_data(
            sequences["train"],
            masking,
            steps=plan.total_steps,
            batches_per_step=plan.accumulate_steps,
            **plan.batches,
        )
        valid_data = masked_lm.evaluation_data(
            sequences["valid"], masking, batch_size=batch_size, split="valid"
        )
        test_data = masked_lm.evaluation_data(
            sequences["test"], masking, batch_size=batch_size, split="test"
        )
        baseline = masked_lm.baselines(sequences["train"], sequences["test"], masking)
        # Model, schedule and loss, under the strategy.
        with run.strategy.scope():
            log_frequency = masked_lm.log_frequency(sequences["train"], masking)
            network = build_model(options, masking.vocabulary_size, preset, log_frequency)
            run.note(presets.check_vocabulary(network, tokenizer, str(preset)))
            # The same weights with logits in chunks: `model` trains, `network` is saved.
            chunked = options.head == "chunked" and has_tied_logits(network)
            model = chunked_masked_lm(network) if chunked else network
            # Linear warm-up, then PolynomialDecay, or what --lr-schedule makes of it.
            decay = PolynomialDecay(plan.learning_rate, plan.decay_steps, plan.end_learning_rate)
            schedule = WarmUp(plan.warmup_steps, reshaped(decay, options, plan))
            # AdamW or Muon; biases and layer norms do not decay.
            optimizer = fine_tuning.make_optimizer(options, schedule)
            model.compile(
                optimizer=optimizer,
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                weighted_metrics=[  # unused slots for predictions have weight 0
                    keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True),
                    keras.metrics.SparseCategoricalAccuracy("accuracy"),
                ],
            )
        # Training and test; TensorBoard shows the model's predictions.
        samples = MaskedSamples(
            run.tensorboard, valid_data, word_pieces.pieces_of(tokenizer), predictor=network
        )
        fit_options = run.prepare(
            model,
            train_data,
            validation=valid_data,
            test=test_data,
            extra=[samples],
            perplexity_of="cross_entropy",
            operations_per_example=operations_per_example(
                network, tokens, masking, options.sequence_length
            ),
            saves=network,
        )
        model.fit(train_data, **fit_options)
        test = model.evaluate(test_data, return_dict=True, **run.evaluate_options)
        return run.finish(
            network,
            test={"cross_entropy": test["cross_entropy"], "accuracy": test["accuracy"]},
            baseline=baseline,
            preprocessor=preprocessor,
        )


def load_tokenizer(options: Options, run, preset: str | None, text):
    """Loads a preset's tokenizer, or makes one from a vocabulary that is read or learned.

    Args:
        options: of the vocabulary.
        run: takes the notes.
        preset: a name, handle or folder of any family with a `MaskedLM`; None for a new model.
        text: a `data.text.Text`, to learn word pieces from.

    Raises:
        DataError: the preset is not for masked words, or the vocabulary cannot be read.
    """
    if preset is not None:
        presets.require_task(keras_nlp.models.MaskedLM, preset)
    tokenizer = bert.make_tokenizer(options, preset, text, run.cache_dir)
    run.note(*bert.vocabulary_notes(options, preset, text, run.cache_dir))
    run.note(presets.added_tokens_note(preset, tokenizer))
    if preset is not None:
        presets.require_mask_token(tokenizer, preset, "masked language modelling")
        if run.trained is None:
            run.note(presets.new_masked_lm_head(preset))
    return tokenizer


def sequence_notes(options: Options, sequences: dict, tokenizer) -> list[str | None]:
    """Returns notes about splits with many unknown word pieces, or whose lines are cut."""
    notes = []
    for split, name in (("train", "training"), ("test", "test")):
        unknown = word_pieces.unknown_share(in_blocks(sequences[split]), tokenizer)
        notes.append(word_pieces.unknown_note(unknown, name))
        if options.text_mode == "lines":
            padding = word_pieces.SpecialTokens.of(tokenizer).pad
            notes.append(cut_note(sequences[split], padding, "lines", name))
    return notes


def operations_per_example(
    network: keras_nlp.models.MaskedLM, tokens: float, masking: masked_lm.Masking, length: int
) -> int | None:
    """Counts the floating-point operations of training on one example.

    Args:
        network: the stock model.
        tokens: of an example without padding, on average.
        masking: how it is masked.
        length: tokens of a full sequence.

    Returns:
        See `bert.training_operations()`; None for a family without attention.
    """
    if not hasattr(network.backbone, "num_heads"):
        return None
    predictions = masking.mean_predictions * tokens / length
    return bert.training_operations(network.backbone, tokens, predictions)


def make_preprocessor(options: Options, preset: str | None, tokenizer):
    """Loads a preset's preprocessor, or builds BERT's, with the recipe's masking options."""
    room = masked_lm.most_predictions(options.mlm_probability, options.sequence_length)
    settings = dict(
        sequence_length=options.sequence_length,
        mask_selection_rate=options.mlm_probability,
        mask_selection_length=room,
    )
    if preset is None:
        return keras_nlp.models.BertMaskedLMPreprocessor(tokenizer, **settings)
    return presets.load(keras_nlp.models.MaskedLMPreprocessor, preset, **settings)


def predict(
    run: LoadedRun, inputs: Sequence[str], *, top: int = 5, score: bool = False
) -> list[list[dict]]:
    """Returns the most likely word pieces for each [MASK] of texts, or how likely texts are.

    Args:
        run: a finished run of this recipe.
        inputs: texts with one [MASK] or more, or texts to score. Special tokens are never
            predicted.
        top: number of word pieces for each [MASK]; 0 for all.
        score: return the pseudo-log-likelihood of each text and its perplexity per word piece.

    Raises:
        OptionsError: `top` beside `score`.
    """
    if score and top != 5:  # the default
        raise OptionsError(f"--top {top}: leave it out; --score predicts no word pieces")
    if not has_inputs(inputs):
        return []
    model = run.load_model("float32")
    tokenizer = model.preprocessor.tokenizer
    if score:
        longest = model.preprocessor.sequence_length
        predicted = [len(pieces) for pieces in likelihoods.encode(tokenizer, inputs, longest)]
        return likelihoods.as_answers(log_likelihoods(run, inputs), predicted)
    pieces = word_pieces.pieces_of(tokenizer)
    mask_token = pieces[tokenizer.mask_token_id]
    pieces = word_pieces.texts_of_pieces(tokenizer)
    max_length = model.preprocessor.sequence_length  # later positions were not trained

    def read(text: str) -> tuple[str, np.ndarray]:
        text = text.replace(mask_token, bert.MASK)
        if bert.MASK not in text:
            raise DataError(f"no {bert.MASK} in {text[:60]!r}")
        return text, bert.encode(tokenizer, text, max_length)

    return [
        fills(text, bert.fill_masks(model, tokenizer, token_ids), pieces, top)
        for text, token_ids in read_each(read, inputs)
    ]


def log_likelihoods(run: LoadedRun, texts: Sequence[str]) -> list[float]:
    """Returns the pseudo-log-likelihood of each text (Salazar et al., arXiv 1910.14659), in nats.

    That is the sum over its word pieces, each masked with the later pieces of its word.

    Args:
        run: a finished run of this recipe.
        texts: each of at most as many tokens as a sequence of the run.
    """
    model = run.load_model("float32")
    tokenizer = model.preprocessor.tokenizer
    max_length = model.preprocessor.sequence_length
    return likelihoods.pseudo_log_likelihoods(model, tokenizer, texts, max_length)


def n_gram_log_likelihoods(run: LoadedRun, texts: Sequence[str], cache_dir: Path) -> list[float]:
    """Returns the log-likelihood of each text by n-grams of the run's training text, in nats.

    Raises:
        DataError: the run's dataset cannot be loaded, or has changed.
    """
    options = run.options
    text = load_text(
        run.resolved["dataset"],
        cache_dir,
        text_column=options.text_column,
        held_out=options.held_out,
    )
    likelihoods.require_training_text(text, run.resolved["text_sha256"])
    tokenizer = run.load_model().preprocessor.tokenizer
    part_of_lines = options.text_mode == "lines" and options.max_examples is not None
    sequences = sequences_once(
        text,
        tokenizer,
        cache_dir,
        text_mode="lines" if part_of_lines else "packed",
        length=options.sequence_length,
        min_line_bytes=options.min_line_bytes,
    )
    special = word_pieces.SpecialTokens.of(tokenizer)
    train = sequences["train"][: options.max_examples]
    if part_of_lines:  # as one row: each line is a document
        train = np.asarray(train)[~np.isin(train, (special.pad, special.cls))]
        train = np.concatenate([[special.sep], train])[np.newaxis]
    begun = [[special.sep, *ids] for ids in likelihoods.encode(tokenizer, texts)]
    return likelihoods.n_gram_log_likelihoods(
        train, tokenizer.vocabulary_size(), special.sep, begun
    )


def fills(text: str, probabilities: np.ndarray, pieces: list[str], top: int = 5) -> list[dict]:
    """Returns the most likely pieces for each [MASK] of a text, and the text with each.

    Args:
        text: contains one [MASK] per row of `probabilities`. Each is filled alone; the others
            stay.
        probabilities: of shape (masks, word pieces).
        pieces: the vocabulary.
        top: number of pieces; 0 for all.
    """
    parts = text.split(bert.MASK)
    answers = []
    for mask, row in enumerate(probabilities):
        before, after = bert.MASK.join(parts[: mask + 1]), bert.MASK.join(parts[mask + 1 :])
        for candidate in top_k(row, pieces, top):
            piece = candidate["class"]
            # A piece of byte-level BPE includes the space before it.
            shown = piece.lstrip() if not before or before.endswith(" ") else piece
            filled = {"piece": piece, "text": before + shown + after}
            answers.append({"probability": candidate["probability"]} | filled)
    return answers


def make_sequences(
    options: Options,
    text,
    tokenizer,
    cache_dir: Path,
    inputs: tuple[str, ...] | None = None,
    initial_probability: float | None = None,
):
    """Returns the token ids of all splits, and how they are masked.

    Args:
        options: lengths, shares, and the seed.
        text: a `data.text.Text`.
        tokenizer: of KerasNLP.
        cache_dir: folder in which sequences are cached.
        inputs: names of the model's inputs; None for BERT's.
        initial_probability: share of tokens to predict in the first step; None for the same in
            all.

    Returns:
        Sequences by split, int of shape (sequences, length), and a `masked_lm.Masking`.
    """
    sequences = sequences_once(
        text,
        tokenizer,
        cache_dir,
        text_mode=options.text_mode,
        length=options.sequence_length,
        min_line_bytes=options.min_line_bytes,
    )
    sequences["train"] = sequences["train"][: options.max_examples]
    if options.max_validation_examples is not None:
        kept = arrays.spaced(len(sequences["valid"]), options.max_validation_examples)
        sequences["valid"] = sequences["valid"][kept]
    masking = masked_lm.Masking.of(
        tokenizer,
        probability=options.mlm_probability,
        sequence_length=options.sequence_length,
        seed=options.seed,
        whole_words=options.whole_word_masking,
        inputs=inputs,
        initial_probability=initial_probability,
    )
    masked_lm.require_predictions(sequences, masking)
    return sequences, masking


if __name__ == "__main__":
    command_line(Options, main)
