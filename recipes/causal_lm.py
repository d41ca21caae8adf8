"""Continue a text, or answer a prompt: Llama, GPT-2 or any causal language model of KerasNLP.

    python -m recipes.causal_lm
    python -m recipes.causal_lm --dataset my_text.txt --epochs 8
    python -m recipes.causal_lm --preset gpt2_base_en --dataset prompts.jsonl
    python -m recipes.predict runs/causal_lm/first "The station was built in" --temperature 0.8

Trains a small Llama or GPT-2 from scratch, with a byte-level BPE vocabulary learned from the text,
or fine-tunes a preset of any family that has a `keras_nlp.models.CausalLM`. A document is a line of
the text, which for WikiText is a paragraph, or a prompt with its response (JSONL or CSV), of which
only the response is trained on. Documents are packed into full rows, and attention does not cross
from one to another, unless `--context row` declares that lines follow one another. Reports
perplexity per token; for text also per word and per byte, line ends included, so that models with
other vocabularies compare. `model/` is a preset:
`keras_nlp.models.CausalLM.from_preset("RUN/model").generate("The station")`.

On the docstrings of the installed packages, the default without a network: test cross-entropy 3.92
(Kneser-Ney n-grams: 3.95), perplexity 50 in 5 to 9 minutes on 2 CPU cores. On ten million words of
novels (--dataset novels --epochs 1): 4.18 (Kneser-Ney: 4.49), perplexity 65 in 20 minutes.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import keras
import keras_nlp
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import PolynomialDecay

from callbacks.generated import GeneratedTexts
from callbacks.tensorboard import escape
from data import (
    arrays,
    baselines,
    batches,
    byte_pairs,
    next_tokens,
    prompts,
    templates,
    word_pieces,
)
from data.errors import DataError, has_inputs, read_each
from data.kneser_ney import KneserNey, counted_note
from data.live_line import Waiting, live_line
from data.next_tokens import Ends
from data.splits import TITLES, with_notes
from data.templates import Template
from data.text import Text, load_text
from models import decoders, fine_tuning, likelihoods, presets, samplers
from training.command_line import command_line
from training.errors import OptionsError
from training.loaded_run import LoadedRun
from training.options import HIDDEN, FineTuningOptions, HeldOutOptions, flag, option
from training.plan import Plan
from training.run import start_run
from training.schedules import WarmUp, reshaped


@dataclasses.dataclass(kw_only=True)
class Options(FineTuningOptions, HeldOutOptions):
    """Options of `recipes.causal_lm`."""

    EXAMPLE_INPUT: ClassVar[str] = "This function returns"

    dataset: str = option(
        "auto",
        "wikitext-2[-raw], wikitext-103[-raw], novels, installed-docs, a path or glob, or auto; or "
        "a JSONL, JSON, CSV, TSV or Parquet file, or a folder of them, with prompt and response.",
    )
    text_column: str | None = option(
        None,
        "Column of the text in a CSV, TSV, JSONL or Parquet (default: text), even if it has "
        "prompts.",
    )
    prompt_column: str | None = option(
        None, "Column of the prompts (default: prompt, instruction or question)."
    )
    response_column: str | None = option(
        None, "Column of the responses (default: response, completion, output or answer)."
    )
    preset: str = option(
        "scratch",
        "scratch, a preset of Kaggle or Hugging Face (hf://...), or a preset's folder; of any "
        "family with a CausalLM.",
    )
    architecture: Literal["llama", "gpt2"] = option(
        "llama",
        "Architecture of a new model; llama has rotary positions, RMSNorm, and SwiGLU layers 8/3 "
        "as wide as the model.",
        overridden_by=("preset",),
    )
    vocabulary: Path | None = option(
        None, "Merges of a byte-level BPE, as GPT-2's merges.txt (default: learned from the text)."
    )
    vocabulary_size: int = option(
        8192,
        "Tokens of the vocabulary, bytes and special tokens included; a small text gives fewer.",
        within="[264, 1e6]",
        overridden_by=("vocabulary", "preset"),
    )
    num_layers: int = 4
    num_heads: int = 4
    optimizer: Literal["auto", "adamw", "muon"] = option(  # type: ignore[assignment]
        "auto",
        "Optimizer; muon uses Muon for the kernels of attention (head by head) and feed-forward "
        "layers, and AdamW for the rest; auto: muon from scratch, adamw from a preset.",
    )
    template: str = option(
        "auto",
        "A text with {prompt} and {response}, trained on {response} only; chat: the chat format of "
        "Gemma, Llama 3 or ChatML that the preset's tokenizer supports; auto: that of the run that "
        "saved the preset, chat for presets named instruct, it or chat, otherwise prompt and "
        "response on separate lines.",
    )
    dropout: float | None = option(
        None, "Dropout (default: 0 from scratch, otherwise the preset's own).", within="[0, 1)"
    )
    hidden_dim: int = option(
        128,
        "Width of a new model; feed-forward layers are 8/3 (llama) or 4 (gpt2) times as wide.",
    )
    freeze_backbone: bool = option(False, HIDDEN)  # refused: the head is the token embedding
    lora_rank: int | None = option(
        None, "Train low-rank adapters (LoRA, see --lora-layers) only; 8 is usual."
    )
    sequence_length: int = option(128, "Tokens of a row.", within="[4, 1e5]")
    context: Literal["document", "row"] = option(
        "document",
        "document lets a token attend to its own document only; row lets it attend to its whole "
        "row so far, for a text whose lines follow one another, such as a novel's paragraphs.",
    )
    n_grams: bool = option(
        True,
        "Compare with Kneser-Ney n-grams of the training text, which take about 120 bytes of "
        "memory per token.",
        resume="free",
    )
    base_learning_rate: float | None = option(
        None,
        "Peak learning rate for one replica (default: 4e-3 from scratch, 5e-5 from a preset, 2e-4 "
        "with adapters).",
    )
    epochs: int = 4

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        problems = super().problems()
        if self.text_column is not None:
            named = [name for name in ("prompt_column", "response_column") if getattr(self, name)]
            problems += [f"--text-column and {flag(name)}: pass only one of them" for name in named]
        problems += presets.problems_of_presets(self, "architecture")
        if self.preset == "scratch" and self.optimizer == "auto" and self.layer_decay != 1.0:
            problems.append(
                "--layer-decay: a new model trains with Muon, which has one learning rate; pass "
                "--optimizer adamw"
            )
        if self.preset == "scratch" and self.architecture == "llama" and self.num_heads > 0:
            width = self.hidden_dim // self.num_heads
            if width % 2:
                problems.append(
                    f"--hidden-dim {self.hidden_dim}: llama's heads need an even width, not {width}"
                )
        if self.freeze_backbone:
            problems.append("--freeze-backbone: leaves nothing to train; use --lora-rank")
        if self.lora_rank is not None and self.preset == "scratch":
            problems.append("--lora-rank: needs a trained model: pass --preset")
        problem = templates.problem_of(self.template)
        if problem:
            problems.append(f"--template {self.template!r}: {problem}")
        return problems


def build_model(
    options: Options, vocabulary_size: int, preset: str | None = None
) -> keras_nlp.models.CausalLM:
    """Builds the model inside the strategy's scope, without its preprocessor.

    Args:
        options: architecture, sizes and dropout.
        vocabulary_size: number of tokens.
        preset: a name or folder to take architecture and weights from; None for a new model.

    Returns:
        A model from token ids and padding mask to the logits of each next token.
    """
    if preset is not None:
        return decoders.load_task(preset, options.dropout, options.sequence_length)
    return decoders.new_task(options, vocabulary_size)


def load_data(options: Options, run) -> Text | prompts.Prompts:
    """Loads the dataset: prompts with responses if its files have them, text otherwise.

    Raises:
        OptionsError: an option is for the other kind.
    """
    columns = prompts.Columns.of(options.prompt_column, options.response_column)
    if options.text_column is None and prompts.find_files(run.dataset, columns, run.held_out):
        if options.context == "row":
            raise OptionsError("--context row: prompts do not follow one another; leave it out")
        return prompts.load_prompts(
            run.dataset, held_out=run.held_out, test_file=run.test_file, columns=columns
        )
    if options.template != "auto" and run.trained is None:
        raise OptionsError(
            f"--template: {run.dataset} is text; prompts and responses are a JSONL, CSV, TSV or "
            "Parquet file with prompt and response, or a folder of them"
        )
    return load_text(
        run.dataset,
        run.cache_dir,
        contiguous=options.context == "row",  # whose rows need lines that follow one another
        text_column=options.text_column,
        held_out=run.held_out,
        test_file=run.test_file,
    )


def main(options: Options) -> dict:
    """Trains, tests and saves; returns what `results.json` holds."""
    with start_run("causal_lm", options) as run:
        if run.finished:
            return run.results
        # Text, or prompts with responses; a tokenizer; rows of tokens by split.
        data = load_data(options, run)
        preset, _ = presets.choose_preset(options, run.fact("preset"))
        run.note(data.note, vocabulary_note(options, preset, data), other_kind_note(run, data))
        preprocessor = make_preprocessor(options, preset, data, run.cache_dir)
        tokenizer = preprocessor.tokenizer
        run.note(presets.added_tokens_note(preset, tokenizer))
        template = choose_template(options, run, data, preset, tokenizer)
        with run.strategy.scope():
            task = build_model(options, tokenizer.vocabulary_size(), preset)
            run.note(presets.check_vocabulary(task, tokenizer, str(preset)))
            fine_tuning.freeze_or_adapt(task, options)
            if run.trained is None:  # only training computes the losses of experts' routers
                parts = run.strategy.num_replicas_in_sync * options.accumulate_steps
                decoders.require_whole_batches(task, parts)
        # Documents share rows where the model's attention keeps them apart.
        together = options.context == "row" or decoders.can_share_rows(task)
        run.note(None if together else own_rows_note(task))
        rows = make_rows(
            options, data, tokenizer, together, run.cache_dir, template or templates.TEXT
        )
        run.note(*special_lines(data, tokenizer), *cut_examples(options, data, rows))
        if run.has_own_dataset:  # an evaluation on other data does not note their training split
            run.note(*data.repeated_notes())
        label_counts = {name: sum(map(len, split.labels())) for name, split in rows.items()}
        # Global batch, learning rate and steps for these replicas; options override the defaults.
        plan = run.plan(
            examples=len(rows["train"]),
            base_learning_rate=default_learning_rate(options, preset),
            warmup_steps=200,
            tokens_per_example=label_counts["train"] / len(rows["train"]),
            about={
                "text": f"{data.name}: {len(rows['train']):,} training sequences",
                "model": preset or f"{options.architecture} from scratch",
            },
            dataset=data.name,
            text_sha256=data.sha256,
            preset=preset or "scratch",
            vocabulary_sha256=word_pieces.vocabulary_sha256(word_pieces.vocabulary_of(tokenizer)),
        )
        train_data, valid_data, test_data = make_batches(options, plan, rows)
        baseline = compute_baselines(rows, word_pieces.number_of_ids(tokenizer), options.n_grams)
        if "kneser_ney_cross_entropy" in baseline:
            run.note(counted_note(rows["train"].tokens))
        # Schedule and loss, under the strategy.
        with run.strategy.scope():
            # The same weights, with the documents of a row kept apart, and the logits computed in
            # chunks: `model` trains, `task` is saved.
            model = decoders.learner(task)
            # Linear warm-up, then PolynomialDecay, or what --lr-schedule makes of it.
            decay = PolynomialDecay(plan.learning_rate, plan.decay_steps, plan.end_learning_rate)
            schedule = WarmUp(plan.warmup_steps, reshaped(decay, options, plan))
            model.compile(
                # AdamW or Muon; biases and layer norms do not decay.
                optimizer=fine_tuning.make_optimizer(
                    options, schedule, task, default="adamw" if preset else "muon"
                ),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                weighted_metrics=[  # padding and prompts have weight 0
                    keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True),
                    keras.metrics.SparseCategoricalAccuracy("accuracy"),
                ],
            )
            fine_tuning.save_only_trained(model, options)
        # Training and test; TensorBoard shows how the model continues texts.
        begun = beginnings(options, data, tokenizer, template)
        shown = GeneratedTexts(
            run.tensorboard,
            "continuations/text",
            lambda: continuations(task, preprocessor, begun, template, options.seed),
        )
        fit_options = run.prepare(
            model,
            train_data,
            validation=valid_data,
            test=test_data,
            extra=[shown] if begun else [],
            perplexity_of="cross_entropy",
            saves=task,
        )
        model.fit(train_data, **fit_options)
        test = model.evaluate(test_data, return_dict=True, **run.evaluate_options)
        test = {name: test[name] for name in ("cross_entropy", "accuracy")}
        if isinstance(data, Text):  # also per word and per byte: comparable across vocabularies
            nats = test["cross_entropy"] * label_counts["test"]
            found, notes = perplexities_or_notes(nats, data.splits["test"], tokenizer)
            test |= found
            run.note(*notes)
        return run.finish(
            task,
            test=test,
            baseline=baseline,
            metadata={"template": template},
            preprocessor=preprocessor,
            example_input=example_of(data),
        )


def choose_template(
    options: Options, run, data: Text | prompts.Prompts, preset: str | None, tokenizer
) -> str | None:
    """Returns the template of prompts, noted if it was chosen for a preset; None for text.

    Of an evaluation it is the one that the model was trained with.
    """
    if run.trained is not None:
        return run.metadata["template"]
    if not isinstance(data, prompts.Prompts):
        return None
    template, chosen = templates.choose(options.template, preset, tokenizer)
    run.note(chosen)
    return template


def own_rows_note(task: keras_nlp.models.CausalLM) -> str:
    """Returns the note about a task whose documents do not share rows."""
    return (
        f"{type(task).__name__}: its layers cannot keep documents of a row apart, so each document "
        "gets its own rows"
    )


def default_learning_rate(options: Options, preset: str | None) -> float:
    """Returns the default peak learning rate for one replica."""
    if preset is None:
        return 4e-3
    return 5e-5 if options.lora_rank is None else 2e-4


def make_batches(options: Options, plan: Plan, rows: dict) -> list[tf.data.Dataset]:
    """Makes the batches of training, validation and test.

    Args:
        options: the seed.
        plan: batch size, and where training starts.
        rows: of tokens, by split; see `make_rows`.
    """
    train = batches.training_batches(
        len(rows["train"]),
        seed=options.seed,
        make_batch=rows["train"].make_batch(),
        **plan.batches,
    )
    evaluated = [
        batches.evaluation_batches(
            len(rows[split]), plan.global_batch_size, rows[split].make_batch()
        )
        for split in ("valid", "test")
    ]
    return [train, *evaluated]


def example_of(data: Text | prompts.Prompts) -> str | None:
    """Returns an input for the printed `predict` command; None where the usual one suits."""
    if not isinstance(data, prompts.Prompts):
        return None
    return min((prompts.as_input(prompt) for prompt, _ in data.splits["valid"]), key=len)


def make_preprocessor(options: Options, preset: str | None, data, cache_dir: Path):
    """Loads a preset's preprocessor and tokenizer, or makes those of a new model."""
    if preset is not None:
        return decoders.load_preprocessor(preset, options.sequence_length)
    if options.vocabulary is not None:
        merges = byte_pairs.read_merges(options.vocabulary)
    else:
        size = options.vocabulary_size - decoders.special_tokens(options.architecture)
        merges = byte_pairs.merges_once(data.as_text(), size, cache_dir)
    return decoders.make_preprocessor(options.architecture, merges, options.sequence_length)


def vocabulary_note(options: Options, preset: str | None, data) -> str | None:
    """Returns a note if the vocabulary of a new model is learned from a part of the text."""
    if preset is not None or options.vocabulary is not None:
        return None
    return data.as_text().to_learn_from()[1]


def other_kind_note(run, data) -> str | None:
    """Returns a note if a run that learned prompts is evaluated on text, or the reverse."""
    learned_prompts = run.trained is not None and run.metadata["template"] is not None
    if run.trained is None or learned_prompts == isinstance(data, prompts.Prompts):
        return None
    kinds = ("prompts and responses", "text")
    learned, found = kinds if learned_prompts else kinds[::-1]
    return f"{data.name}: {found}, and the run learned {learned}"


def make_rows(
    options: Options,
    data,
    tokenizer,
    together: bool,
    cache_dir: Path,
    template: str = templates.TEXT,
) -> dict:
    """Returns rows of tokens by split: `next_tokens.Rows`, or `prompts.PromptRows`."""
    if isinstance(data, prompts.Prompts):
        pairs = dict(data.splits)
        drawn = arrays.draw(len(pairs["train"]), options.max_examples, options.seed)
        pairs["train"] = [pairs["train"][index] for index in drawn]
        spaced = arrays.spaced(len(pairs["valid"]), options.max_validation_examples)
        pairs["valid"] = [pairs["valid"][index] for index in spaced]
        return prompts.rows_once(
            pairs,
            tokenizer,
            cache_dir,
            template=template,
            length=options.sequence_length,
            together=together,
        )
    length = options.sequence_length
    rows = next_tokens.rows_once(
        data, tokenizer, cache_dir, length=length, together=together, context=options.context
    )
    return rows | {
        "train": rows["train"].first(options.max_examples),
        "valid": rows["valid"].spaced(options.max_validation_examples),
    }


def special_lines(data, tokenizer) -> list[str]:
    """Returns notes about lines of a text, or prompts and responses, that name special tokens."""
    if not isinstance(data, prompts.Prompts):
        lines = live_line(data.splits["train"], "searching for special tokens")
        return next_tokens.special_notes(lines, tokenizer)
    note = next_tokens.special_note(data.as_text().splits["train"], tokenizer)
    return [] if note is None else [note]


def cut_examples(options: Options, data: Text | prompts.Prompts, rows: dict) -> list[str]:
    """Returns a line for each split with prompts and responses that are longer than a row."""
    titles = {"train": "training"} | {split: TITLES[split] for split in with_notes(data.splits)}
    return [
        f"{rows[split].cut:,} {title} examples are longer than --sequence-length "
        f"{options.sequence_length}: truncated, or left out if the prompt alone fills it"
        for split, title in titles.items()
        if getattr(rows[split], "cut", 0)
    ]


def perplexities_or_notes(
    nats: float, lines: Iterable[str], tokenizer
) -> tuple[dict[str, float], list[str]]:
    """Returns `perplexities()` and notes; only notes where not all tokens of a line are predicted.

    Args as `perplexities`.
    """
    left_out = "perplexity_per_word and perplexity_per_byte are left out:"
    if Ends.of(tokenizer).start is None:
        return {}, [
            f"{left_out} this family has no token that starts a document, so the first token of a "
            "line is not predicted"
        ]
    if next_tokens.has_ends_within(lines, tokenizer):
        return {}, [
            f"{left_out} a test line contains the name of the token that ends a document, and the "
            "first token of the next document may not be predicted"
        ]
    found = perplexities(nats, lines, tokenizer)
    return found, missing_perplexities(found)


def perplexities(nats: float, lines: Iterable[str], tokenizer) -> dict[str, float]:
    """Returns the perplexity per word and per byte of lines, without what is not a finite number.

    Args:
        nats: minus the log-likelihood of all their tokens.
        lines: the lines, whose ends count as words and bytes.
        tokenizer: of KerasNLP; lines of its special tokens alone do not count.
    """
    return {
        f"perplexity_per_{unit}": math.exp(nats / count)
        for unit, count in next_tokens.measure(lines, tokenizer).items()
        if nats / count < likelihoods.LARGEST_EXPONENT
    }


def missing_perplexities(test: dict) -> list[str]:
    """Returns a note where the perplexity per word is left out."""
    if "perplexity_per_word" in test:
        return []
    return [
        "perplexity_per_word is left out: it is larger than any floating point number, since lines "
        "without spaces are one word each"
    ]


def compute_baselines(rows: dict, vocabulary_size: int, n_grams: bool = True) -> dict[str, float]:
    """Computes the baselines: unigrams, most frequent token, and Kneser-Ney n-grams of text."""
    train, test = (np.zeros(vocabulary_size, np.int64) for _ in range(2))
    for split, counts in (("train", train), ("test", test)):
        for labels in rows[split].labels():
            counts += np.bincount(labels, minlength=vocabulary_size)
    scores = {
        "unigram_cross_entropy": baselines.unigram_cross_entropy(train, test),
        "most_frequent_accuracy": baselines.most_frequent_accuracy(train, test),
    }
    train_rows, test_rows = rows["train"], rows["test"]
    if n_grams and isinstance(train_rows, next_tokens.Rows) and train_rows.together:
        # An end ends one document and begins the next; n-grams stay within a document.
        with Waiting("counting n-grams"):
            model = KneserNey(train_rows.tokens, vocabulary_size, separator=train_rows.ends.end)
        log_probabilities = model.log_probabilities(test_rows.tokens)
        mean = log_probabilities[next_tokens.is_predicted(test_rows.tokens, test_rows.ends)].mean()
        scores = {"kneser_ney_cross_entropy": float(-mean)} | scores
    return scores


def beginnings(
    options: Options, data, tokenizer, template: str | None = None
) -> list[templates.Prompt]:
    """Returns beginnings of the first validation documents, or prompts, for TensorBoard.

    At least a quarter of a row is left for their continuations.
    """
    of_prompts = Template(template, tokenizer) if template else None
    lines = itertools.islice(data.splits["valid"], 1000)  # in case none of them is short enough
    begun: list[templates.Prompt] = []
    while len(begun) < 4 and (line := next(lines, None)) is not None:
        is_prompt = isinstance(data, prompts.Prompts)
        prompt = line[0] if is_prompt else " ".join(line.split()[:5])
        ids = decoders.prompt_tokens(prompt, tokenizer, of_prompts)
        if ids and len(ids) <= options.sequence_length * 3 // 4:
            begun.append(prompt)
    return begun


def continuations(
    task: keras_nlp.models.CausalLM,
    preprocessor,
    begun: Sequence[templates.Prompt],
    template: str | None,
    seed: int,
) -> list[str]:
    """Continues beginnings of documents, or answers prompts, for TensorBoard, as Markdown."""
    texts = decoders.generate(
        task,
        preprocessor,
        begun,
        max_length=preprocessor.sequence_length,
        sampler=samplers.Sampler(top_k=40, seed=seed),
        strip_prompt=True,
        template=Template(template, preprocessor.tokenizer) if template else None,
    )
    return [
        f"**{escape(templates.last_text(prompt))}** {escape(text)}"
        for prompt, text in zip(begun, texts, strict=True)
    ]


def predict(
    run: LoadedRun,
    inputs: Sequence[str],
    *,
    max_length: int = 0,
    temperature: float = 1.0,
    top_k: int = 40,
    top_p: float = 1.0,
    num_samples: int = 1,
    seed: int = 0,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    stop: tuple[str, ...] = (),
    score: bool = False,
) -> list[list[dict]]:
    """Continues texts, or answers prompts, all in one batch.

    The answer to an input does not depend on the others.

    Args:
        run: a finished run of this recipe.
        inputs: beginnings of texts; prompts, where the run was trained on prompts; also, with the
            turns of a chat, its messages as JSON, the last one of the user.
        max_length: maximum number of tokens, the input's included; 0 for the run's row length.
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: sample among the K most likely tokens; 0 for all.
        top_p: sample among the most likely tokens whose probabilities add up to P.
        num_samples: continuations of each input; the first one is the same with any number.
        seed: seed of the sampling.
        repetition_penalty: lowers the logits of tokens that a text has; 1.1 to 1.3 are usual.
        no_repeat_ngram_size: never write the same N tokens in a row twice; 0 allows it.
        stop: texts before the first of which a continuation ends, such as '###' or a line break.
        score: return the log-likelihood of each text and its perplexity per token instead.

    Raises:
        OptionsError: a value is out of range.
    """
    if score:
        written: list = [max_length, temperature, top_k, top_p, num_samples, seed]
        written += [repetition_penalty, no_repeat_ngram_size, len(stop)]
        if written != [0, 1.0, 40, 1.0, 1, 0, 1.0, 0, 0]:  # the defaults
            raise OptionsError("--score: generates no text; leave out the options of sampling")
        return scores(run, inputs)
    problems = samplers.sampling_problems(temperature, top_k, top_p, num_samples)
    problems += samplers.repetition_problems(repetition_penalty, no_repeat_ngram_size)
    if "" in stop:
        problems.append(f"--stop {stop!r}: expected texts, none of them empty")
    if max_length < 0 or max_length == 1:
        problems.insert(0, f"--max-length {max_length}: must be 0 or at least 2")
    if problems:
        raise OptionsError("\n".join(problems))
    if not has_inputs(inputs):
        return []
    task = run.load_model("float32")
    template = run.metadata["template"]
    begun = inputs if template is None else read_each(prompts.of_input, inputs)
    sampler = samplers.Sampler(
        temperature,
        top_k or None,
        top_p,
        seed,
        num_samples,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
    )
    texts = decoders.generate(
        task,
        task.preprocessor,
        begun,
        max_length=max_length or task.preprocessor.sequence_length,
        sampler=sampler,
        strip_prompt=template is not None,
        template=template and Template(template, task.preprocessor.tokenizer),
        stop=stop,
    )
    return samplers.by_prompt(texts, num_samples)


def scores(run: LoadedRun, texts: Sequence[str]) -> list[list[dict]]:
    """Returns the log-likelihood, the number of tokens and the perplexity of each text.

    Args:
        run: a finished run of this recipe on text.
        texts: as in `log_likelihoods`.

    Raises:
        OptionsError: the run learned prompts and responses.
    """
    if run.metadata["template"] is not None:
        raise OptionsError(
            "--score: the run learned responses to prompts; recipes.evaluate RUN --test-file FILE "
            "has their cross-entropy"
        )
    if not has_inputs(texts):
        return []
    preprocessor = run.load_model("float32").preprocessor
    encoded = likelihoods.encode_beginnings(
        preprocessor.tokenizer, texts, preprocessor.sequence_length
    )
    # The first token is given: the one that starts a document, where the family has one.
    predicted = [len(ids) - 1 for ids in encoded]
    return likelihoods.as_answers(log_likelihoods(run, texts), predicted)


def log_likelihoods(run: LoadedRun, texts: Sequence[str]) -> list[float]:
    """Returns the log-likelihood of each text as a document's beginning, in nats.

    Args:
        run: a finished run of this recipe.
        texts: as many tokens as a row of the run has, at most.
    """
    task = run.load_model("float32")
    tokenizer, longest = task.preprocessor.tokenizer, task.preprocessor.sequence_length
    return likelihoods.next_token_log_likelihoods(task, tokenizer, texts, longest)


def n_gram_log_likelihoods(run: LoadedRun, texts: Sequence[str], cache_dir: Path) -> list[float]:
    """Returns the log-likelihood of each text by n-grams of the run's training text, in nats.

    Raises:
        DataError: the run was not trained on text, or the text cannot be loaded or has changed.
    """
    dataset = run.resolved["dataset"]
    if run.metadata["template"] is not None:
        raise DataError(f"{dataset}: prompts and responses, of which no n-grams are counted")
    text = load_text(
        dataset,
        cache_dir,
        contiguous=run.options.context == "row",
        text_column=run.options.text_column,
        held_out=run.options.held_out,
    )
    likelihoods.require_training_text(text, run.resolved["text_sha256"])
    tokenizer = run.load_model().preprocessor.tokenizer
    rows = make_rows(run.options, text, tokenizer, True, cache_dir)["train"]
    size = word_pieces.number_of_ids(tokenizer)
    # A family's own token that starts a document follows the one that ends the document before.
    end = [] if rows.ends.start == rows.ends.end else [rows.ends.end]
    begun = [end + rows.ends.around(ids)[:-1] for ids in next_tokens.tokenize(texts, tokenizer)]
    return likelihoods.n_gram_log_likelihoods(rows.tokens, size, rows.ends.end, begun)


if __name__ == "__main__":
    command_line(Options, main)
