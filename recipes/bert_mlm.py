"""Fill in masked words: a BERT masked language model, trained on WikiText or on text of yours.

    python -m recipes.bert_mlm
    python -m recipes.bert_mlm --dataset my_text.txt --vocabulary vocab.txt --epochs 3
    python -m recipes.bert_mlm --strategy mirrored --replicas 2

Downloads WikiText-2, or takes the prose of the installed packages' docstrings where there is no
network, learns a WordPiece vocabulary, packs the text into full sequences, and trains
`keras_nlp.models.BertMaskedLM` with `model.fit()`: AdamW, linear warm-up, PolynomialDecay to zero.

What came out, in what time and on what machine: the table in README.md, which `make results` wrote.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import keras
import keras_nlp
import numpy as np
from keras.optimizers.schedules import PolynomialDecay

from callbacks.predictions import MaskedSamples
from data import masked_lm, word_pieces
from data.errors import DataError
from data.sequences import sequences_once
from data.text import load_text
from distribution.global_batch import GlobalMean, reduce_before_clipping
from models import bert, fine_tuning, presets
from models.chunked_head import chunked_masked_lm
from models.initial_weights import init_local_attention, init_unigram_bias
from training.command_line import command_line
from training.loaded_run import LoadedRun, likeliest
from training.options import TextOptions, option
from training.run import start_run
from training.schedules import WarmUp


@dataclasses.dataclass(kw_only=True)
class Options(TextOptions):
    """Options of `recipes.bert_mlm`."""

    # On 2 cores compiling took 5 s more, and a step 0.1 s less (`make bench`).
    JIT_MIN_STEPS: ClassVar[int] = 300

    dataset: str = option(
        "auto", "wikitext-2[-raw], wikitext-103[-raw], installed-docs, a path or glob, or auto."
    )
    preset: str = option(
        "auto", "scratch, a preset of Kaggle or Hugging Face, a preset's folder, or auto."
    )
    init_from: Path | None = option(
        None, "A finished run, whose word pieces, sizes and weights are used, with a new schedule."
    )
    dropout: float | None = option(
        None, "Dropout (default: 0 from scratch, otherwise the preset's own).", within="[0, 1)"
    )
    text_mode: Literal["packed", "lines"] = option(
        "packed", "Full sequences, or one line per example with padding."
    )
    sequence_length: int = option(128, "Tokens of a sequence, including [CLS].", within="[4, 512]")
    head: Literal["chunked", "stock"] = option(
        "chunked", "Compute predictions in chunks, or all logits at once; the numbers are equal."
    )
    mlm_probability: float = option(0.15, "Share of tokens to predict.", within="(0, 1]")
    base_learning_rate: float | None = option(
        None, "Peak learning rate for one replica (default: 1.5e-3 from scratch, 1e-4 otherwise)."
    )
    beta_2: float = option(0.98, "AdamW's decay of the variance.", within="[0, 1)")
    epochs: int = 8

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        return super().problems() + presets.problems_of_presets(self)


def build_model(
    options: Options,
    vocabulary_size: int,
    preset: str | None = None,
    log_frequency: np.ndarray | None = None,
) -> keras_nlp.models.BertMaskedLM:
    """Builds the model inside the strategy's scope, without its tokenizer.

    Args:
        options: sizes and dropout.
        vocabulary_size: number of word pieces.
        preset: a name or folder to take architecture and weights from; None for a new model.
        log_frequency: what a new model predicts at first (`masked_lm.log_frequency`), or None.

    Returns:
        A model whose inputs are token ids. The pooler, which the masked words do not need, is
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
    model.backbone.pooled_dense.trainable = False
    return model


def main(options: Options) -> dict:
    """Trains, tests and saves; returns what `results.json` holds."""
    with start_run("bert_mlm", options) as run:
        if run.finished:
            return run.results
        # Text: word pieces by split, and the sequences that are cut from them.
        text = load_text(run.dataset, run.cache_dir)
        preset, why = presets.choose_preset(options, run.fact("preset"), text.english_wikitext)
        run.note(text.note, why)
        tokenizer = bert.make_tokenizer(options, preset, text, run.cache_dir)
        sequences, masking = make_sequences(options, text, tokenizer, run.cache_dir)
        plan = run.plan(
            examples=len(sequences["train"]),
            base_learning_rate=1e-4 if preset else 1.5e-3,
            tokens_per_example=masked_lm.tokens_per_sequence(sequences["train"], masking),
            about={
                "text": f"{text.name}: {len(sequences['train']):,} training sequences",
                "model": preset or "from scratch",
            },
            dataset=text.name,
            text_sha256=text.sha256,
            preset=preset or "scratch",
            vocabulary_sha256=word_pieces.vocabulary_sha256(tokenizer.vocabulary),
        )
        batch_size = plan.global_batch_size
        train_data = masked_lm.training_data(sequences["train"], masking, **plan.batches)
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
            model = chunked_masked_lm(network) if options.head == "chunked" else network
            warmup = plan.warmup_steps(options.warmup_steps)
            decay = PolynomialDecay(plan.learning_rate, plan.total_steps - warmup, 0.0)
            optimizer = fine_tuning.adamw(options, WarmUp(warmup, decay), beta_2=options.beta_2)
            model.compile(
                optimizer=reduce_before_clipping(optimizer),
                loss=GlobalMean(keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
                weighted_metrics=[
                    keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True),
                    keras.metrics.SparseCategoricalAccuracy("accuracy"),
                ],
                **plan.compile_options,
            )
        # Training and test; TensorBoard shows what the model fills in.
        samples = MaskedSamples(
            run.tensorboard, valid_data, tokenizer.vocabulary, predictor=network
        )
        fit_options = plan.fit_options(
            model,
            train_data,
            validation=valid_data,
            test=test_data,
            extra=[samples],
            perplexity_of="cross_entropy",
            operations_per_example=bert.training_operations(
                network.backbone, options.sequence_length, masking.max_predictions
            ),
            saves=network,
        )
        model.fit(train_data, **fit_options)
        test = model.evaluate(test_data, return_dict=True, **plan.evaluate_options)
        return run.finish(
            network,
            test={"cross_entropy": test["cross_entropy"], "accuracy": test["accuracy"]},
            baseline=baseline,
            preprocessor=keras_nlp.models.BertMaskedLMPreprocessor(
                tokenizer,
                sequence_length=options.sequence_length,
                mask_selection_rate=masking.probability,
                mask_selection_length=masking.max_predictions,
            ),
        )


def predict(run: LoadedRun, inputs: Sequence[str]) -> list[list[dict]]:
    """Returns the likeliest word pieces for each [MASK] of texts.

    Args:
        run: a finished run of this recipe.
        inputs: texts with one [MASK] or more. Special tokens are no fills.
    """
    model = run.load_model("float32")
    tokenizer = presets.load(
        keras_nlp.models.BertTokenizer, str(run.preset), special_tokens_in_strings=True
    )
    longest = model.preprocessor.sequence_length  # beyond that of the training, positions are noise
    answers = []
    for text in inputs:
        if bert.MASK not in text:
            raise DataError(f"no {bert.MASK} in {text[:60]!r}")
        token_ids = bert.encode(tokenizer, text, longest)
        probabilities = bert.fill_masks(model, tokenizer, token_ids)
        answers.append(fills(text, probabilities, tokenizer.get_vocabulary()))
    return answers


def log_likelihoods(run: LoadedRun, texts: Sequence[str]) -> list[float]:
    """Returns the pseudo-log-likelihood of each text (Salazar et al., arXiv 1910.14659), in nats.

    That is the sum over its word pieces, each one masked alone.

    Args:
        run: a finished run of this recipe.
        texts: as many tokens as a sequence of the run has, at most.
    """
    model = run.load_model("float32")
    tokenizer = presets.load(keras_nlp.models.BertTokenizer, str(run.preset))
    longest = model.preprocessor.sequence_length
    found = []
    for text in texts:
        token_ids = bert.encode(tokenizer, text, longest)
        pieces = token_ids[1:-1]
        positions = np.arange(1, len(pieces) + 1, dtype=np.int32)
        masked = np.tile(token_ids, (len(pieces), 1))
        masked[positions - 1, positions] = tokenizer.mask_token_id
        logits = bert.masked_logits(model, masked, positions[:, None])[:, 0]
        found.append(bert.sum_of_log_shares(logits, pieces))
    return found


def fills(text: str, probabilities: np.ndarray, pieces: list[str]) -> list[dict]:
    """Returns the five likeliest pieces for each [MASK] of a text, and the text with each of them.

    Args:
        text: with as many [MASK]s as `probabilities` has rows; the other ones stay.
        probabilities: of shape (masks, word pieces).
        pieces: the vocabulary.
    """
    parts = text.split(bert.MASK)
    found = []
    for mask, row in enumerate(probabilities):
        before, after = bert.MASK.join(parts[: mask + 1]), bert.MASK.join(parts[mask + 1 :])
        for answer in likeliest(row, pieces, most=5):
            piece = answer["class"]
            filled = {"piece": piece, "text": before + piece + after}
            found.append({"probability": answer["probability"]} | filled)
    return found


def make_sequences(options: Options, text, tokenizer, cache_dir: Path):
    """Token ids of all splits, and how they are masked.

    Returns:
        sequences by split, of shape (sequences, length), and a `masked_lm.Masking`.
    """
    sequences = sequences_once(
        text,
        tokenizer,
        cache_dir,
        text_mode=options.text_mode,
        length=options.sequence_length,
    )
    sequences["train"] = sequences["train"][: options.max_examples]
    masking = masked_lm.Masking.of(
        tokenizer,
        options.mlm_probability,
        options.sequence_length,
        options.seed,
    )
    masked_lm.require_predictions(sequences, masking)
    return sequences, masking


if __name__ == "__main__":
    command_line(Options, main)
