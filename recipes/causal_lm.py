"""Continue a text: a causal language model like GPT-2, trained from scratch on your text.

    python -m recipes.causal_lm
    python -m recipes.causal_lm --dataset my_text.txt --epochs 3
    python -m recipes.predict runs/causal_lm/first "The station was built in"

Takes the same text and WordPiece vocabulary as `recipes.bert_mlm`, packs the lines into full
sequences, and trains KerasNLP's `TransformerDecoder` layers, arranged as in GPT-2, to predict each
next token. A document is a line of the text, which for WikiText is a paragraph; attention does not
cross from one to another in the same sequence. Reports perplexity per token and, to compare
vocabularies, per byte of the text (case and words that the vocabulary lacks are not told apart).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import keras
import keras_nlp
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import PolynomialDecay

from callbacks.steps import StepCallback
from callbacks.tensorboard import escape
from data import batches, word_pieces
from data.kneser_ney import KneserNey
from data.sequences import as_tensor, sequences_once
from data.text import load_text
from models import bert, fine_tuning, likelihoods
from models.chunked_head import ChunkedHead
from training.command_line import command_line
from training.loaded_run import LoadedRun
from training.options import TextOptions, option
from training.run import start_run
from training.schedules import WarmUp

CHOICES = 40  # a continuation is drawn from so many of the likeliest tokens


@dataclasses.dataclass(kw_only=True)
class Options(TextOptions):
    """Options of `recipes.causal_lm`."""

    EXAMPLE_INPUT: ClassVar[str] = "the model is"

    dataset: str = option(
        "auto", "wikitext-2[-raw], wikitext-103[-raw], installed-docs, a path or glob, or auto."
    )
    dropout: float = option(0.0, "Dropout.", within="[0, 1)")
    sequence_length: int = option(128, "Tokens of a sequence.", within="[4, 1e5]")
    base_learning_rate: float = option(2e-3, "Peak learning rate for one replica.")
    epochs: int = 4


def build_model(options: Options, vocabulary_size: int, separator: int) -> keras.Model:
    """Builds the model inside the strategy's scope.

    Args:
        options: sizes and dropout.
        vocabulary_size: number of word pieces.
        separator: the token that begins a document.

    Returns:
        A model from token ids, int32 of shape (batch, length), to the logits of each next token.
    """
    small = keras.initializers.RandomNormal(stddev=0.02)  # as in GPT-2
    token_ids = keras.Input((None,), dtype="int32", name="token_ids")
    begins = keras.ops.cast(keras.ops.equal(token_ids, separator), "int32")
    document = keras.ops.cumsum(begins, axis=1)
    same_document = keras.ops.equal(
        keras.ops.expand_dims(document, 2), keras.ops.expand_dims(document, 1)
    )
    embedding = keras_nlp.layers.ReversibleEmbedding(
        vocabulary_size, options.hidden_dim, embeddings_initializer=small, name="token_embedding"
    )
    x = embedding(token_ids)
    x += keras_nlp.layers.PositionEmbedding(options.sequence_length, initializer=small)(x)
    x = keras.layers.Dropout(options.dropout)(x)
    for _ in range(options.num_layers):
        layer = keras_nlp.layers.TransformerDecoder(
            intermediate_dim=4 * options.hidden_dim,
            num_heads=options.num_heads,
            dropout=options.dropout,
            activation="gelu",
            kernel_initializer=small,
            normalize_first=True,
        )
        x = layer(x, decoder_attention_mask=same_document)
    states = keras.layers.LayerNormalization(name="states")(x)
    return keras.Model(token_ids, embedding(states, reverse=True), name="causal_lm")


def in_chunks(model: keras.Model) -> ChunkedHead:
    """Returns what trains and evaluates the model without a matrix of all logits."""
    hidden = keras.Model(model.input, model.get_layer("states").output)
    return ChunkedHead(model, hidden, model.get_layer("token_embedding").embeddings)


def main(options: Options) -> dict:
    """Trains, tests and saves; returns what `results.json` holds."""
    with start_run("causal_lm", options) as run:
        if run.finished:
            return run.results
        text = load_text(run.dataset, run.cache_dir)
        run.note(text.note)
        pieces = run.metadata.get("vocabulary") or bert.vocabulary(options, text, run.cache_dir)
        tokenizer = bert.tokenizer_of(pieces)
        rows = sequences_once(
            text,
            tokenizer,
            run.cache_dir,
            text_mode="packed",
            length=options.sequence_length + 1,
        )
        rows["train"] = rows["train"][: options.max_examples]
        plan = run.plan(
            examples=len(rows["train"]),
            base_learning_rate=options.base_learning_rate,
            tokens_per_example=float(options.sequence_length),
            about={"text": f"{text.name}: {len(rows['train']):,} training sequences"},
            dataset=text.name,
            text_sha256=text.sha256,
            vocabulary_sha256=word_pieces.vocabulary_sha256(pieces),
        )
        train_data = batches.training_batches(
            len(rows["train"]),
            seed=options.seed,
            make_batch=next_tokens(rows["train"]),
            **plan.batches,
        )
        valid_data, test_data = (
            batches.evaluation_batches(
                len(rows[split]), plan.global_batch_size, next_tokens(rows[split])
            )
            for split in ("valid", "test")
        )
        baseline = baselines(rows, len(pieces), tokenizer.sep_token_id)
        tokens_per_byte = count_tokens_per_byte(text.splits["test"], tokenizer)
        with run.strategy.scope():
            model = build_model(options, len(pieces), tokenizer.sep_token_id)
            learner = in_chunks(model)
            warmup = plan.warmup_steps(options.warmup_steps)
            decay = PolynomialDecay(plan.learning_rate, plan.total_steps - warmup, 0.0)
            learner.compile(
                optimizer=fine_tuning.adamw(options, WarmUp(warmup, decay)),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                weighted_metrics=[
                    keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True),
                    keras.metrics.SparseCategoricalAccuracy("accuracy"),
                ],
            )
        fit_options = run.prepare(
            learner,
            train_data,
            validation=valid_data,
            test=test_data,
            extra=[Continuations(run.tensorboard, model, tokenizer, rows["valid"], options)],
            perplexity_of="cross_entropy",
            saves=model,
        )
        learner.fit(train_data, **fit_options)
        test = learner.evaluate(test_data, return_dict=True, **run.evaluate_options)
        nats_per_byte = test["cross_entropy"] * tokens_per_byte
        return run.finish(
            model,
            test={
                "cross_entropy": test["cross_entropy"],
                "accuracy": test["accuracy"],
                "perplexity_per_byte": float(np.exp(nats_per_byte)),
            },
            baseline=baseline,
            metadata={"vocabulary": list(pieces)},
        )


def next_tokens(rows: np.ndarray):
    """Returns a function from indices to (token ids, next tokens, weights of one).

    Args:
        rows: token ids of shape (sequences, length + 1).
    """
    table, floatx = as_tensor(rows), keras.config.floatx()

    def make_batch(indices, epoch):
        tokens = tf.cast(tf.gather(table, indices), tf.int32)
        return tokens[:, :-1], tokens[:, 1:], tf.ones_like(tokens[:, 1:], floatx)

    return make_batch


def baselines(
    rows: dict[str, np.ndarray], vocabulary_size: int, separator: int
) -> dict[str, float]:
    """Returns what counts of the training split reach on the test split: of tokens, of n-grams.

    Args:
        rows: token ids by split, of shape (sequences, length + 1).
        vocabulary_size: number of word pieces.
        separator: the token that begins a document; n-grams see what the model sees.
    """
    train, test = (
        np.bincount(rows[split][:, 1:].ravel(), minlength=vocabulary_size)
        for split in ("train", "test")
    )
    share = (train + 0.1) / (train + 0.1).sum()
    n_grams = KneserNey(rows["train"], vocabulary_size, separator=separator)
    return {
        "kneser_ney_cross_entropy": float(-n_grams.log_probabilities(rows["test"]).mean()),
        "unigram_cross_entropy": float(-(test * np.log(share)).sum() / test.sum()),
        "most_frequent_accuracy": float(test[train.argmax()] / test.sum()),
    }


def count_tokens_per_byte(lines, tokenizer) -> float:
    """Returns the tokens of some lines, [SEP] counted, for each of their UTF-8 bytes."""
    size = sum(len(line.encode()) + 1 for line in lines)
    tokens = sum(len(ids) + len(lengths) for ids, lengths in word_pieces.tokenize(lines, tokenizer))
    return tokens / size


class Continuations(StepCallback):
    """Writes continuations of the first validation texts to TensorBoard, each epoch."""

    def __init__(self, tensorboard, model, tokenizer, rows: np.ndarray, options: Options):
        super().__init__()
        self.tensorboard, self.asked, self.tokenizer = tensorboard, model, tokenizer
        self.prompts = [row[1:9].astype(np.int32).tolist() for row in rows[:4]]
        self.length, self.seed = options.sequence_length, options.seed

    def on_epoch_end(self, epoch, logs=None):
        """Draws and writes them."""
        if self.tensorboard.folder is None:
            return
        with self.tensorboard.writing(self.step):
            for number, prompt in enumerate(self.prompts, start=1):
                ids = continued(self.asked, self.tokenizer, prompt, self.length, self.seed)
                given, drawn = (
                    escape(self.tokenizer.detokenize(part)) for part in (prompt, ids[len(prompt) :])
                )
                tf.summary.text(f"continuations/text_{number}", f"**{given}** {drawn}")


def continued(model, tokenizer, prompt: list[int], length: int, seed: int) -> list[int]:
    """Draws next tokens from the likeliest ones until the document ends or the model is full.

    Args:
        model: from token ids to logits.
        tokenizer: its tokenizer.
        prompt: token ids of the beginning of a text.
        length: tokens that the model takes.
        seed: decides the draws.

    Returns:
        The token ids, the prompt's first.
    """
    rng = np.random.default_rng(seed)
    ids = [tokenizer.cls_token_id, tokenizer.sep_token_id, *prompt]
    never = set(word_pieces.special_ids(tokenizer)) - {tokenizer.sep_token_id}
    while len(ids) < length:
        logits = keras.ops.convert_to_numpy(model(np.array([ids], np.int32), training=False))
        logits = logits[0, -1].astype(np.float64)
        logits[list(never)] = -np.inf
        best = np.argsort(-logits)[:CHOICES]
        shares = np.exp(logits[best] - logits[best[0]])
        token = int(rng.choice(best, p=shares / shares.sum()))
        if token == tokenizer.sep_token_id:
            break
        ids.append(token)
    return ids[2:]


def predict(run: LoadedRun, inputs: Sequence[str]) -> list[list[dict]]:
    """Continues texts.

    Args:
        run: a finished run of this recipe.
        inputs: beginnings of texts.
    """
    model, length = run.load_model("float32"), run.options.sequence_length
    tokenizer = bert.tokenizer_of(run.metadata["vocabulary"])
    answers = []
    for text in inputs:
        prompt = bert.encode(tokenizer, text, length - 1)[1:-1].tolist()
        ids = continued(model, tokenizer, prompt, length, run.options.seed)
        answers.append([{"text": tokenizer.detokenize(ids)}])
    return answers


def log_likelihoods(run: LoadedRun, texts: Sequence[str]) -> list[float]:
    """Returns the log-likelihood of each text as a document's beginning, in nats.

    Args:
        run: a finished run of this recipe.
        texts: as many tokens as a sequence of the run has, at most.
    """
    model, length = run.load_model("float32"), run.options.sequence_length
    tokenizer = bert.tokenizer_of(run.metadata["vocabulary"])
    return likelihoods.next_token_log_likelihoods(model, tokenizer, texts, length)


def n_gram_log_likelihoods(run: LoadedRun, texts: Sequence[str], cache_dir: Path) -> list[float]:
    """Returns the log-likelihood of each text by n-grams of the run's training text, in nats.

    Raises:
        DataError: the run's dataset cannot be loaded, or has changed.
    """
    return likelihoods.n_gram_log_likelihoods(
        run.resolved["dataset"],
        bert.tokenizer_of(run.metadata["vocabulary"]),
        texts,
        cache_dir,
        text_sha256=run.resolved["text_sha256"],
        sequence_length=run.options.sequence_length + 1,
        max_examples=run.options.max_examples,
    )


if __name__ == "__main__":
    command_line(Options, main)
