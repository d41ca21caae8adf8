"""Fill in masked words: a BERT masked language model, trained on WikiText or on text of yours.

    python -m recipes.bert_mlm
    python -m recipes.bert_mlm --dataset my_text.txt --vocabulary vocab.txt --epochs 3
    python -m recipes.bert_mlm --strategy mirrored --replicas 2

Downloads WikiText-2, or takes the prose of the installed packages' docstrings where there is no
network, learns a WordPiece vocabulary, packs the text into full sequences, and trains
`keras_nlp.models.BertMaskedLM` with `model.fit()`: AdamW, linear warm-up, PolynomialDecay to zero.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Literal

import keras
import keras_nlp
import numpy as np

from callbacks.evaluate_every import EvaluateEvery
from callbacks.learning_rate import LearningRatePrinter
from callbacks.restore import Restore
from callbacks.run_log import RunLog, perplexity
from callbacks.stop_at_step import StopAtStep
from callbacks.stop_on_bad_loss import StopOnBadLoss
from data import cache, masked_lm, word_pieces
from data import text as text_sources
from data.errors import DataError
from distribution import strategies
from distribution.global_loss import GlobalMean
from distribution.optimizers import in_order
from distribution.scaling import make_plan
from recipes import presets
from recipes import run as runs
from recipes.initial_weights import look_at_neighbours
from recipes.options import SharedOptions, fraction, positive
from recipes.schedules import WarmUp

log = logging.getLogger("recipes")


@dataclasses.dataclass(kw_only=True)
class Options(SharedOptions):
    """Options of `recipes.bert_mlm`."""

    METRICS = ("loss", "cross_entropy", "accuracy")

    dataset: str = "auto"
    """wikitext-2[-raw], wikitext-103[-raw], installed-docs, a path or glob, or auto."""
    preset: str = "auto"
    """scratch, a preset of Kaggle or Hugging Face, a preset's folder, or auto."""
    init_from: Path | None = None
    """A run's folder or a weights file: a new schedule starts from these weights."""
    vocabulary: Path | None = None
    """A WordPiece vocabulary, one piece a line (default: learned from the training text)."""
    vocabulary_size: int = 8192
    """Word pieces to learn."""
    layers: int = 2
    """Transformer layers, from scratch."""
    heads: int = 2
    """Attention heads, from scratch."""
    width: int = 128
    """Width of the model, from scratch; the feed-forward layers are four times as wide."""
    dropout: float | None = None
    """Dropout (default: 0 from scratch, the preset's own otherwise)."""
    text_mode: Literal["packed", "lines"] = "packed"
    """Full sequences, or one line per example with padding as in the published tutorial."""
    sequence_length: int = 128
    """Tokens of a sequence, [CLS] counted."""
    mlm_probability: float = 0.15
    """Share of the tokens that are predicted."""
    base_learning_rate: float | None = None
    """Peak learning rate for one replica (default: 1.5e-3 from scratch, 1e-4 otherwise)."""
    warmup_steps: int = 200
    """Steps in which the learning rate grows; at most a tenth of the run is used."""
    weight_decay: float = 0.01
    """AdamW's; not on biases and layer norms."""
    beta_1: float = 0.9
    """AdamW's decay of the mean."""
    beta_2: float = 0.98
    """AdamW's decay of the variance."""
    epochs: int = 7
    """Passes over the training split."""

    def faults(self) -> list[str]:
        """What is wrong with the values."""
        found = super().faults()
        for name in ("vocabulary_size", "layers", "heads", "width"):
            found += positive(name, getattr(self, name))
        found += positive("warmup_steps", self.warmup_steps, zero=True)
        found += positive("weight_decay", self.weight_decay, zero=True)
        for name in ("beta_1", "beta_2"):
            found += fraction(name, getattr(self, name))
        if self.dropout is not None:
            found += fraction("dropout", self.dropout)
        found += fraction("mlm_probability", self.mlm_probability, one=True)
        if self.sequence_length < 4:
            found.append(f"--sequence-length {self.sequence_length}: must be 4 or more")
        if self.sequence_length > presets.MAX_LENGTH and self.preset in ("scratch", "auto"):
            found.append(
                f"--sequence-length {self.sequence_length}: the model takes at most "
                f"{presets.MAX_LENGTH} tokens"
            )
        if self.heads > 0 and self.width > 0 and self.width % self.heads:
            found.append(f"--width {self.width}: must be a multiple of --heads {self.heads}")
        if self.vocabulary is not None and self.preset not in ("auto", "scratch"):
            found.append(f"--vocabulary: the preset {self.preset} has its own")
        return found


def build_model(options: Options, vocabulary_size: int, preset: str | None):
    """Builds the model inside the strategy's scope, without its tokenizer.

    Args:
        options: sizes and dropout.
        vocabulary_size: number of word pieces.
        preset: a name or folder to take architecture and weights from; None for a new model.

    Returns:
        A `keras_nlp.models.BertMaskedLM`; its inputs are token ids. The pooler, which the masked
        words do not need, is frozen.
    """
    if preset is not None:
        model = presets.load_model(preset, options.dropout)
        longest = model.backbone.max_sequence_length
        if options.sequence_length > longest:
            raise DataError(
                f"--sequence-length {options.sequence_length}: the preset {preset} takes at most "
                f"{longest} tokens"
            )
    else:
        backbone = keras_nlp.models.BertBackbone(
            vocabulary_size=vocabulary_size,
            num_layers=options.layers,
            num_heads=options.heads,
            hidden_dim=options.width,
            intermediate_dim=4 * options.width,
            dropout=options.dropout or 0.0,
            max_sequence_length=presets.MAX_LENGTH,
        )
        model = keras_nlp.models.BertMaskedLM(backbone=backbone)
        look_at_neighbours(model, options.seed)
    model.backbone.pooled_dense.trainable = False
    return model


def main(options: Options) -> dict:
    """Trains, tests and saves; returns what `results.json` holds."""
    # Where the work runs.
    strategy = runs.prepare(options)
    if strategies.serves_others(strategy):
        return {}
    with runs.open_run("bert_mlm", options, strategy) as run:
        if run.results is not None:
            log.info("the run in %s is finished: nothing to do", run.folder)
            return run.results

        # Text: word pieces by split, and the sequences that are cut from them.
        cache_dir = options.cache_dir or cache.default_cache_dir()
        text = text_sources.load_text(run.resolved.get("dataset", options.dataset), cache_dir)
        if text.note:
            log.warning("%s", text.note)
        preset, note = presets.choose(options, text.english_wikitext, run.resolved.get("preset"))
        if note:
            log.warning("%s", note)
        tokenizer = presets.make_tokenizer(options, preset, text, cache_dir)
        sequences, masking = make_sequences(options, text, tokenizer, cache_dir)
        padding, filled = masked_lm.fill(sequences["train"], masking)
        baseline = masked_lm.baselines(
            sequences["train"], sequences["test"], masking.special, masking.vocabulary_size
        )

        # The plan: what this many replicas do.
        base_rate = options.base_learning_rate
        if base_rate is None:
            base_rate = 1.5e-3 if preset is None and options.init_from is None else 1e-4
        plan = make_plan(
            replicas=strategies.replicas(strategy),
            examples=len(sequences["train"]),
            batch_size_per_replica=options.batch_size_per_replica
            or (32 if options.global_batch_size is None else None),
            global_batch=options.global_batch_size,
            accumulate_steps=options.accumulate_steps,
            base_learning_rate=base_rate,
            lr_scaling=options.lr_scaling,
            epochs=options.epochs,
            max_steps=options.max_steps,
            resumed=run.resolved,
        )
        run.resolve(
            dataset=text.name,
            text_sha256=text_sources.text_sha256(text),
            preset=preset or "scratch",
            vocabulary_sha256=word_pieces.vocabulary_sha256(tokenizer.vocabulary),
            **plan.trajectory(),
        )
        run.say_plan(
            plan,
            f"text           {text.name}: {len(sequences['train']):,} training sequences of "
            f"{options.sequence_length} tokens, {padding:.1%} padding, {filled:.1%} of the "
            f"{masking.slots} prediction slots filled",
            f"model          {preset or 'from scratch'}, {len(tokenizer.vocabulary):,} word pieces",
        )

        train_data = masked_lm.training_data(
            sequences["train"],
            masking,
            plan.global_batch_size,
            batches_per_epoch=plan.steps_per_epoch * plan.accumulate_steps,
            first_batch=run.steps_done * plan.accumulate_steps,
        )
        valid_data, test_data = (
            masked_lm.evaluation_data(sequences[split], masking, plan.global_batch_size, split)
            for split in ("valid", "test")
        )

        # Model, schedule and loss, under the strategy.
        with strategy.scope():
            model = build_model(options, len(tokenizer.vocabulary), preset)
            if options.init_from is not None and run.saved is None:
                presets.load_weights(model, options.init_from)
            warmup_steps = min(options.warmup_steps, plan.total_steps // 10)
            schedule = WarmUp(
                plan.learning_rate,
                warmup_steps,
                keras.optimizers.schedules.PolynomialDecay(
                    # A plain float would be rounded to float32, also in float64 runs.
                    initial_learning_rate=np.float64(plan.learning_rate),
                    decay_steps=plan.total_steps - warmup_steps,
                    end_learning_rate=0.0,
                ),
            )
            optimizer = keras.optimizers.AdamW(
                learning_rate=schedule,
                weight_decay=options.weight_decay,
                beta_1=options.beta_1,
                beta_2=options.beta_2,
                global_clipnorm=options.clip_norm,
            )
            # The patterns are matched against a variable's own name, not its path.
            optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
            model.compile(
                optimizer=in_order(optimizer),
                loss=GlobalMean(keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
                weighted_metrics=[
                    keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True),
                    keras.metrics.SparseCategoricalAccuracy("accuracy"),
                ],
                jit_compile={"auto": "auto", "on": True, "off": False}[options.jit],
                steps_per_execution=run.steps_per_execution(plan),
            )
        run.build(model, plan, train_data)
        run.require_space(model, options.keep_checkpoints)

        # Training.
        run_log = RunLog(
            run.folder if run.is_chief else None,
            steps_per_epoch=plan.steps_per_epoch,
            total_steps=plan.total_steps,
            examples_per_step=plan.global_batch_size * plan.accumulate_steps,
            tokens_per_example=options.sequence_length * (1 - padding),
            log_every=options.log_every,
            perplexity_of="cross_entropy",
        )
        saver = run.checkpoints(plan, run_log)
        validator = EvaluateEvery(
            run_log, valid_data, "validation", options.validate_every, [saver]
        )
        tester = EvaluateEvery(run_log, test_data, "test", options.test_every, [saver])
        saver.with_state |= {"validator": validator, "tester": tester}
        with run.stoppable(saver):
            model.fit(
                train_data,
                epochs=plan.epochs,
                initial_epoch=run.epochs_done,
                steps_per_epoch=plan.steps_per_epoch,
                validation_data=valid_data,
                verbose=0,
                shuffle=False,  # the data are shuffled already
                callbacks=[
                    Restore(run.saved, saver.with_state),
                    StopAtStep(plan.steps_per_epoch, plan.total_steps),
                    StopOnBadLoss(plan.steps_per_epoch, saver.newest_name),
                    run_log,
                    LearningRatePrinter(),
                    validator,
                    tester,
                    saver,
                ],
            )
            test = model.evaluate(test_data, return_dict=True, verbose=0, callbacks=[saver])

        # What is left behind.
        log.info(
            "test cross-entropy %.4f (unigram model %.4f), accuracy %.1f %% (always the most "
            "frequent piece: %.1f %%)",
            *(test["cross_entropy"], baseline["unigram_cross_entropy"]),
            *(100 * test["accuracy"], 100 * baseline["most_frequent_accuracy"]),
        )
        if run.is_chief:
            presets.save(model, tokenizer, masking, options.sequence_length, run.folder / "model")
        return run.finish(
            {
                "dataset": text.name,
                "preset": preset or "scratch",
                "vocabulary_sha256": word_pieces.vocabulary_sha256(tokenizer.vocabulary),
                **plan.summary(),
                "history": run_log.history,
                "test": {
                    "cross_entropy": test["cross_entropy"],
                    "perplexity": perplexity(test["cross_entropy"]),
                    "accuracy": test["accuracy"],
                },
                "baseline": baseline,
                **run_log.speed(),
                "weights_sha256": runs.weights_sha256(model),
            }
        )


def make_sequences(options: Options, text, tokenizer, cache_dir: Path):
    """Token ids of all splits, and how they are masked.

    Returns:
        sequences by split, int32 of shape (sequences, length), and a `masked_lm.Masking`.
    """
    tokens = word_pieces.tokenize_once(
        text, tokenizer, cache_dir, drop_short=options.text_mode == "lines"
    )
    special = masked_lm.SpecialTokens(
        *(tokenizer.token_to_id(token) for token in word_pieces.SPECIAL_TOKENS)
    )
    cut = {"packed": masked_lm.packed_sequences, "lines": masked_lm.line_sequences}
    sequences = {
        split: cut[options.text_mode](*tokens[split], options.sequence_length, special)
        for split in tokens
    }
    for split, found in sequences.items():
        if not len(found):
            raise DataError(
                f"{text.name}: the {split} split gives no sequence of {options.sequence_length} "
                "tokens; take more text or a shorter --sequence-length"
            )
    if options.max_examples is not None:
        sequences["train"] = sequences["train"][: options.max_examples]
    slots = max(1, int(np.rint(options.mlm_probability * options.sequence_length)))
    masking = masked_lm.Masking(
        special, len(tokenizer.vocabulary), options.mlm_probability, slots, options.seed
    )
    return sequences, masking


if __name__ == "__main__":
    runs.command_line(Options, main)
