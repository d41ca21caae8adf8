"""Answer a text with another one: summarise, translate, correct, with BART, T5 or T5Gemma.

    python -m recipes.seq2seq
    python -m recipes.seq2seq --dataset pairs.csv --prompt-column article --response-column summary
    python -m recipes.seq2seq --preset bart_base_en --dataset pairs.jsonl
    python -m recipes.predict runs/seq2seq/first "cumsum(x, axis=None)"

Trains a small BART from scratch, with a byte-level BPE vocabulary learned from the text, or
fine-tunes a preset of any family that has a `keras_nlp.models.Seq2SeqLM`: its encoder reads the
prompt, its decoder predicts the response token by token. Without --dataset: the signatures of the
installed packages' functions, and the first sentences of their docstrings. Reports cross-entropy
and accuracy per token of the responses; of answers that the model writes itself, by the likeliest
tokens or with `--num-beams`, how many equal the response, BLEU and ROUGE. `model/` is a preset:
`keras_nlp.models.Seq2SeqLM.from_preset("RUN/model").generate("cumsum(x, axis=None)")`.

On the signatures of the installed packages: test cross-entropy 3.95 (unigram model: 6.40), BLEU
0.029, ROUGE-L 0.195 in 20 minutes on 2 CPU cores.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import keras
import keras_nlp
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import PolynomialDecay

from callbacks.averages import averaged
from callbacks.generated import GeneratedTexts
from callbacks.tensorboard import escape
from data import (
    arrays,
    baselines,
    batches,
    byte_pairs,
    next_tokens,
    pairs,
    prompts,
    summaries,
    word_pieces,
)
from data.errors import has_inputs
from data.live_line import live_line
from data.splits import held_out_files, instead_note
from data.text_scores import bleu, rouge
from models import encoder_decoders, fine_tuning, presets, samplers
from models.losses import smoothed_cross_entropy
from training.command_line import command_line
from training.errors import OptionsError
from training.loaded_run import LoadedRun
from training.options import HIDDEN, FineTuningOptions, HeldOutOptions, option
from training.plan import Plan
from training.run import start_run
from training.schedules import WarmUp, reshaped

AT_ONCE = 64  # answers
TOP_K = 40  # tokens that `predict` draws among


@dataclasses.dataclass(kw_only=True)
class Options(FineTuningOptions, HeldOutOptions):
    """Options of `recipes.seq2seq`."""

    EXAMPLE_INPUT: ClassVar[str] = "cumsum(x, axis=None, dtype=None)"

    dataset: str = option(
        "auto",
        "A JSONL, JSON, CSV, TSV or Parquet file, or a folder of them, with prompt and response; "
        "installed-docs, or auto.",
    )
    prompt_column: str | None = option(
        None, "Column of the prompts (default: prompt, instruction or question)."
    )
    response_column: str | None = option(
        None, "Column of the responses (default: response, completion, output or answer)."
    )
    prefix: str | None = option(
        None, "Text before each prompt, such as 'summarize: ' for T5 (default: none)."
    )
    preset: str = option(
        "scratch",
        "scratch, a preset of Kaggle or Hugging Face (hf://...), or a preset's folder; of any "
        "family with a Seq2SeqLM.",
    )
    vocabulary: Path | None = option(
        None, "Merges of a byte-level BPE, as GPT-2's merges.txt (default: learned from the text)."
    )
    vocabulary_size: int = option(
        4096,
        "Tokens of the vocabulary, bytes and special tokens included; a small text gives fewer.",
        within="[264, 1e6]",
        overridden_by=("vocabulary", "preset"),
    )
    num_layers: int = option(2, "Layers of the encoder, and of the decoder, of a new model.")
    num_heads: int = 4
    hidden_dim: int = 128
    dropout: float | None = option(
        None, "Dropout (default: 0.1 from scratch, otherwise the preset's own).", within="[0, 1)"
    )
    freeze_backbone: bool = option(False, HIDDEN)  # refused: the head is the token embedding
    lora_rank: int | None = option(
        None, "Train low-rank adapters (LoRA, see --lora-layers) only; 8 is usual."
    )
    sequence_length: int = option(64, "Tokens of a prompt; the rest is cut.", within="[4, 1e5]")
    response_length: int = option(
        32, "Tokens of a response; the rest is cut.", within="[4, 1e5]", group="data"
    )
    group_by_length: Literal["on", "off"] = option(
        "on",
        "on: pairs of similar length share a batch, whose prompts and responses are cut after the "
        "longest.",
        group="data",
    )
    label_smoothing: float = option(
        0.0,
        "Probability of a token to spread evenly over the vocabulary, in the losses of training "
        "and validation; 0.1 is usual for BART.",
        within="[0, 1)",
    )
    answered_examples: int = option(
        200,
        "Test prompts to answer for exact_match, bleu and rouge, spread over all of them.",
        within="[0, 1e9]",
        resume="free",
    )
    num_beams: int = option(
        1,
        "Beginnings of an answer that are kept at each token, of which the likeliest answer is "
        "taken (beam search); 1 takes the likeliest token.",
        within="[1, 100]",
        resume="free",
    )
    no_repeat_ngram_size: int = option(
        0,
        "Never write the same N tokens in a row twice within an answer; 0 allows it, 3 is usual "
        "for summaries.",
        within="[0, 1000]",
        resume="free",
    )
    base_learning_rate: float | None = option(
        None,
        "Peak learning rate for one replica (default: 1e-3 from scratch, 5e-5 from a preset, of T5 "
        "3e-4, or 2e-4 with adapters).",
    )
    epochs: int = 10

    @property
    def batch_shapes(self) -> int:
        """Counts the shapes that training batches may have."""
        if self.group_by_length == "off":
            return 1
        lengths = self.sequence_length, self.response_length
        return math.prod(len(arrays.steps_of(length)) for length in lengths)

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        problems = super().problems() + presets.problems_of_presets(self)
        if self.freeze_backbone:
            problems.append("--freeze-backbone: leaves nothing to train; use --lora-rank")
        if self.lora_rank is not None and self.preset == "scratch":
            problems.append("--lora-rank: needs a trained model: pass --preset")
        return problems + samplers.repetition_problems(1.0, self.no_repeat_ngram_size)


def build_model(
    options: Options, vocabulary_size: int, preset: str | None = None
) -> keras_nlp.models.Seq2SeqLM:
    """Builds the model inside the strategy's scope, without its preprocessor.

    Args:
        options: sizes and dropout.
        vocabulary_size: number of tokens.
        preset: a name or folder to take architecture and weights from; None for a new BART.

    Returns:
        A model from token ids and padding masks of prompts and responses to the logits of the
        responses' next tokens, of shape (batch, response length, tokens).
    """
    if preset is None:
        return encoder_decoders.new_task(options, vocabulary_size)
    lengths = options.sequence_length, options.response_length
    return encoder_decoders.load_task(preset, options.dropout, *lengths)


def main(options: Options) -> dict:
    """Trains, tests and saves; returns what `results.json` holds."""
    with start_run("seq2seq", options) as run:
        if run.finished:
            return run.results
        # Prompts and responses; a tokenizer; tokens by split.
        data = load_pairs(options, run)
        run.note(data.note)
        preset, _ = presets.choose_preset(options, run.fact("preset"))
        preprocessor = make_preprocessor(options, preset, data, run.cache_dir)
        tokenizer = preprocessor.tokenizer
        run.note(presets.added_tokens_note(preset, tokenizer))
        splits = limited(options, pairs.of_texts(data))
        encoded = pairs.encode_once(splits, preprocessor, run.cache_dir, options.prefix or "")
        for split, title in (("train", "training"), ("test", "test")):
            run.note(*pairs.cut_notes(encoded[split], title))
        if run.has_own_dataset:  # an evaluation on other data does not note their training split
            run.note(*data.repeated_notes())
        run.note(next_tokens.special_note(data.as_text().splits["train"], tokenizer))
        # Global batch, learning rate and steps for these replicas; options override the defaults.
        plan = run.plan(
            examples=len(splits["train"]),
            base_learning_rate=default_learning_rate(options, preset, preprocessor),
            warmup_steps=200,
            tokens_per_example=tokens_per_example(encoded["train"]),
            about={
                "text": f"{data.name}: {len(splits['train']):,} training prompts",
                "model": preset or "BART from scratch",
            },
            dataset=data.name,
            text_sha256=data.sha256,
            preset=preset or "scratch",
            vocabulary_sha256=word_pieces.vocabulary_sha256(word_pieces.vocabulary_of(tokenizer)),
        )
        train_data, valid_data, test_data = make_batches(options, plan, encoded)
        baseline = compute_baselines(encoded, word_pieces.number_of_ids(tokenizer))
        # Model, schedule and loss, under the strategy.
        with run.strategy.scope():
            model = build_model(options, tokenizer.vocabulary_size(), preset)
            run.note(presets.check_vocabulary(model, tokenizer, str(preset)))
            fine_tuning.freeze_or_adapt(model, options)
            # Linear warm-up, then PolynomialDecay, or what --lr-schedule makes of it.
            decay = PolynomialDecay(plan.learning_rate, plan.decay_steps, plan.end_learning_rate)
            schedule = WarmUp(plan.warmup_steps, reshaped(decay, options, plan))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            if options.label_smoothing:
                loss = smoothed_cross_entropy(options.label_smoothing)
            model.compile(
                # AdamW or Muon; biases and layer norms do not decay.
                optimizer=fine_tuning.make_optimizer(options, schedule, model),
                loss=loss,
                weighted_metrics=[  # padding has weight 0
                    keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True),
                    keras.metrics.SparseCategoricalAccuracy("accuracy"),
                ],
            )
            fine_tuning.save_only_trained(model, options)
        # Training and test; TensorBoard shows the answers to some prompts.
        shown = GeneratedTexts(
            run.tensorboard,
            "answers/prompt",
            lambda: shown_answers(model, preprocessor, splits["valid"][:4], options),
        )
        fit_options = run.prepare(
            model,
            train_data,
            validation=valid_data,
            test=test_data,
            extra=[shown],
            perplexity_of="cross_entropy",
        )
        model.fit(train_data, **fit_options)
        test = model.evaluate(test_data, return_dict=True, **run.evaluate_options)
        test = {name: test[name] for name in ("cross_entropy", "accuracy")}
        # Answers to test prompts beside the responses; the prompts, copied, are the baseline.
        indices = arrays.spaced(len(splits["test"]), options.answered_examples)
        prompted = [splits["test"][index] for index in indices]
        answered = answer(model, preprocessor, prompted, options)
        if answered:
            test |= compare(answered)
            copied = compare([(prompt, response, prompt) for prompt, response, _ in answered])
            for name in ("bleu", "rougeL"):
                if name in test:
                    baseline[f"copied_{name}"] = copied[name]
        return run.finish(
            model,
            test=test,
            baseline=baseline,
            preprocessor=preprocessor,
            example_input=min((prompt for prompt, _ in splits["valid"]), key=len),
            # `recipes.evaluate --examples` alone calls it.
            examples_table=lambda: worst_first(
                answer(model, preprocessor, splits["test"], options)
            ),
            answered_examples=len(answered),
        )


def load_pairs(options: Options, run) -> prompts.Prompts:
    """Loads the dataset: the user's prompts and responses, or those of the installed packages."""
    columns = prompts.Columns.of(options.prompt_column, options.response_column)
    columns = dataclasses.replace(columns, hint=prompts.COLUMNS_HINT)
    if run.dataset in ("auto", summaries.NAME):
        data = summaries.load_summaries(run.cache_dir)
        given = held_out_files(run.held_out, run.test_file)
        read = {path: prompts.read_pairs(path, columns) for path in dict.fromkeys(given.values())}
        splits = data.splits | {split: read[path] for split, path in given.items()}
        note = instead_note(data.name, run.held_out, run.test_file)
        return dataclasses.replace(data, splits=splits, note=note)
    return prompts.load_prompts(
        run.dataset, held_out=run.held_out, test_file=run.test_file, columns=columns
    )


def default_learning_rate(options: Options, preset: str | None, preprocessor) -> float:
    """Returns the default peak learning rate for one replica."""
    if preset is None:
        return 1e-3
    task_name = type(preprocessor).__name__.removesuffix("Preprocessor")
    return encoder_decoders.RATES.get(task_name, 5e-5) if options.lora_rank is None else 2e-4


def make_preprocessor(
    options: Options, preset: str | None, data: prompts.Prompts, cache_dir: Path
) -> keras_nlp.models.Seq2SeqLMPreprocessor:
    """Loads a preset's preprocessor and tokenizer, or makes those of a new BART."""
    lengths = options.sequence_length, options.response_length
    if preset is not None:
        return encoder_decoders.load_preprocessor(preset, *lengths)
    if options.vocabulary is not None:
        merges = byte_pairs.read_merges(options.vocabulary)
    else:
        size = options.vocabulary_size - len(encoder_decoders.BART_TOKENS)
        merges = byte_pairs.merges_once(data.as_text(), size, cache_dir)
    return encoder_decoders.make_preprocessor(merges, *lengths)


def limited(
    options: Options, splits: dict[str, list[pairs.TextPair]]
) -> dict[str, list[pairs.TextPair]]:
    """Returns at most as many pairs for training and validation as the options say."""
    drawn = arrays.draw(len(splits["train"]), options.max_examples, options.seed)
    spaced = arrays.spaced(len(splits["valid"]), options.max_validation_examples)
    return splits | {
        "train": [splits["train"][index] for index in drawn],
        "valid": [splits["valid"][index] for index in spaced],
    }


def make_batches(
    options: Options, plan: Plan, encoded: dict[str, dict[str, np.ndarray]]
) -> list[tf.data.Dataset]:
    """Makes the batches of training, validation and test, of similar length if asked for."""
    lengths = dict.fromkeys(encoded)
    if options.group_by_length == "on":
        lengths = {split: pairs.lengths(rows) for split, rows in encoded.items()}
    counts = {split: len(rows[pairs.LABELS]) for split, rows in encoded.items()}
    train = batches.training_batches(
        counts["train"],
        seed=options.seed,
        make_batch=pairs.make_batch(encoded["train"]),
        lengths=lengths["train"],
        batches_per_update=options.accumulate_steps,
        **plan.batches,
    )
    evaluated = [
        batches.evaluation_batches(
            counts[split],
            plan.global_batch_size,
            pairs.make_batch(encoded[split]),
            lengths=lengths[split],
        )
        for split in ("valid", "test")
    ]
    return [train, *evaluated]


def tokens_per_example(encoded: dict[str, np.ndarray]) -> float:
    """Returns the mean number of tokens of a prompt and its response, without padding."""
    masks = encoded["encoder_padding_mask"], encoded["decoder_padding_mask"]
    return float(sum(mask.sum(axis=1, dtype=np.int64).mean() for mask in masks))


def compute_baselines(encoded: dict[str, dict[str, np.ndarray]], tokens: int) -> dict[str, float]:
    """Computes the baselines of the responses' tokens: unigrams, and the most frequent one."""
    train, test = (
        np.bincount(pairs.predicted(encoded[split]), minlength=tokens)
        for split in ("train", "test")
    )
    return {
        "unigram_cross_entropy": baselines.unigram_cross_entropy(train, test),
        "most_frequent_accuracy": baselines.most_frequent_accuracy(train, test),
    }


def answer(
    model: keras_nlp.models.Seq2SeqLM,
    preprocessor,
    examples: Sequence[pairs.TextPair],
    options: Options,
) -> list[tuple[str, str, str]]:
    """Returns prompts, their responses, and the model's answers, the likeliest ones."""
    inputs = [(options.prefix or "") + prompt for prompt, _ in examples]
    answers: list[str] = []
    sampler = likeliest(options.num_beams, no_repeat_ngram_size=options.no_repeat_ngram_size)
    with (
        averaged(model),
        live_line(what="answering test prompts", total=len(inputs)) as bar,
    ):
        for start in range(0, len(inputs), AT_ONCE):
            batch = inputs[start : start + AT_ONCE]
            answers += encoder_decoders.generate(model, preprocessor, batch, sampler)
            bar.update(len(batch))
    return [(*example, answer) for example, answer in zip(examples, answers, strict=True)]


def likeliest(num_beams: int, **repetition) -> samplers.Sampler | samplers.BeamSearch:
    """Returns what chooses the tokens of the likeliest answers.

    Args:
        num_beams: beginnings of an answer that are kept.
        **repetition: see `samplers.Sampler`.
    """
    if num_beams > 1:
        return samplers.BeamSearch(num_beams, **repetition)
    return samplers.Sampler(temperature=0, **repetition)


def compare(answered: Sequence[tuple[str, str, str]]) -> dict[str, float]:
    """Returns the share of answers that equal the response, spaces aside, BLEU and ROUGE.

    Args:
        answered: prompts, responses and answers.
    """
    equal = [response.split() == text.split() for _, response, text in answered]
    texts = [(response, text) for _, response, text in answered]
    scores = {"exact_match": float(np.mean(equal)), "bleu": bleu(texts), **rouge(texts)}
    return {name: score for name, score in scores.items() if score is not None}


def worst_first(answered: Sequence[tuple[str, str, str]]) -> list[list]:
    """Returns the rows of `recipes.evaluate --examples`, a header first: other answers first."""
    others: list[list] = []
    equal: list[list] = []
    for prompt, response, text in answered:
        is_equal = response.split() == text.split()
        (equal if is_equal else others).append([prompt, response, text, is_equal])
    return [["prompt", "response", "answer", "is_equal"], *others, *equal]


def shown_answers(
    model: keras_nlp.models.Seq2SeqLM,
    preprocessor,
    examples: Sequence[pairs.TextPair],
    options: Options,
) -> list[str]:
    """Answers prompts for TensorBoard; returns Markdown with the responses in brackets."""
    inputs = [(options.prefix or "") + prompt for prompt, _ in examples]
    sampler = likeliest(options.num_beams, no_repeat_ngram_size=options.no_repeat_ngram_size)
    answers = encoder_decoders.generate(model, preprocessor, inputs, sampler)
    return [
        f"**{escape(prompt)}** {escape(text)} *({escape(response)})*"
        for (prompt, response), text in zip(examples, answers, strict=True)
    ]


def predict(
    run: LoadedRun,
    inputs: Sequence[str],
    *,
    num_beams: int = 0,
    temperature: float = 0.0,
    top_k: int = TOP_K,
    top_p: float = 1.0,
    num_samples: int = 1,
    seed: int = 0,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int | None = None,
    stop: tuple[str, ...] = (),
) -> list[list[dict]]:
    """Answers prompts, all in one batch; the answer to one does not depend on the others.

    Args:
        run: a finished run of this recipe.
        inputs: prompts; long ones are cut as in training.
        num_beams: beginnings of an answer that are kept at each token; 0 for the run's number.
        temperature: divides the logits; 0 takes the likeliest tokens, the only way with beams.
        top_k: sample among the K most likely tokens; 0 for all.
        top_p: sample among the most likely tokens whose probabilities add up to P.
        num_samples: answers to each input, with --temperature; the first one is the same with any
            number.
        seed: seed of the sampling.
        repetition_penalty: lowers the logits of tokens that an answer has; 1.1 to 1.3 are usual.
        no_repeat_ngram_size: never write the same N tokens in a row twice (default: the run's N).
        stop: texts before the first of which an answer ends, such as '###' or a line break.

    Raises:
        OptionsError: a value is out of range.
    """
    drawn = num_samples if num_beams < 2 else 1
    problems = samplers.sampling_problems(temperature, top_k, top_p, drawn)
    if "" in stop:
        problems.append(f"--stop {stop!r}: expected texts, none of them empty")
    if temperature == 0 and (top_k, top_p) != (TOP_K, 1.0) and not problems:
        cause = f"--top-p {top_p}" if top_k == TOP_K else f"--top-k {top_k}"
        if num_beams > 1:
            problems.append(f"{cause}: leave it out; --num-beams {num_beams} draws no tokens")
        else:
            problems.append(f"{cause}: needs a --temperature to draw with, such as 0.8")
    if not 0 <= num_beams <= 100:
        problems.append(f"--num-beams {num_beams}: must be in [0, 100]")
    elif num_beams > 1 and temperature > 0:
        problems.append(f"--num-beams {num_beams}: searches; leave out --temperature, which draws")
    elif num_beams > 1 and num_samples > 1:
        problems.append(
            f"--num-beams {num_beams}: finds a single answer; leave it out to draw --num-samples"
        )
    size = (
        run.options.no_repeat_ngram_size if no_repeat_ngram_size is None else no_repeat_ngram_size
    )
    problems += samplers.repetition_problems(repetition_penalty, size)
    if problems:
        raise OptionsError("\n".join(problems))
    if not has_inputs(inputs):
        return []
    repetition: dict = {"repetition_penalty": repetition_penalty, "no_repeat_ngram_size": size}
    if temperature > 0:
        draws = temperature, top_k or None, top_p, seed, num_samples
        sampler = samplers.Sampler(*draws, **repetition)
    else:
        sampler = likeliest(num_beams or run.options.num_beams, **repetition)
    task = run.load_model("float32")
    prompted = [(run.options.prefix or "") + text for text in inputs]
    answers = encoder_decoders.generate(task, task.preprocessor, prompted, sampler, stop)
    return samplers.by_prompt(answers, num_samples)


if __name__ == "__main__":
    command_line(Options, main)
