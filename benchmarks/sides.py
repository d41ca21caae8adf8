"""Runs one side of a comparison: a training that takes steps on request.

    python benchmarks/sides.py NAME FOLDER [SIZES]

`pipelines.py`, `fine_tuning.py`, `generation.py` and `gpu.py` start these and let them take turns.
A line "5" on standard input asks for five steps; the answer is a line of JSON with their seconds,
the number of text tokens, and the seconds since the imports. FOLDER holds what the `prepare` of
these programs wrote there; SIZES is JSON with other sizes and with options of the recipe.

Every side is a complete training as its users run it: the recipe's `main`, the tutorial's `fit()`,
the Trainer's `train()`. A callback pauses it before a step until steps are requested.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Sizes that are options of the recipe, and the default model.
OPTIONS = ("precision", "jit", "strategy", "replicas", "steps_per_execution")
BERT_TINY = {"layers": 2, "heads": 2, "width": 128, "precision": "float32", "strategy": "none"}
ENDLESS = 10_000  # epochs: the driver ends a side by closing its standard input


def answers_apart() -> TextIO:
    """Returns standard output, reserved for answers; redirects other output to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


class Gate:
    """Pauses a training between the turns.

    Args:
        answers: stream for the answers.
    """

    def __init__(self, answers: TextIO):
        self.answers = answers
        self.tokens_per_step = 0.0  # that carry text, on average; the side says how many
        self.wanted = self.left = 0
        self.imported = self.last = time.perf_counter()

    def before_step(self) -> None:
        """Waits for a turn, or starts the next step of this one."""
        if self.left == 0:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            self.wanted = self.left = int(line)
            self.begun = time.perf_counter()

    def after_step(self) -> None:
        """Counts a step; answers after the last one of the turn."""
        self.left -= 1
        self.last = time.perf_counter()
        if self.left == 0:
            self.answer(self.last - self.begun, self.wanted * self.tokens_per_step)

    def skip(self) -> None:
        """Excludes the time since the last step, for instance of an evaluation or a save."""
        self.begun += time.perf_counter() - self.last

    def answer(self, seconds: float, tokens: float) -> None:
        """Writes the answer."""
        found = {"seconds": seconds, "tokens": tokens, "since_imports": self.last - self.imported}
        print(json.dumps(found), file=self.answers, flush=True)


def keras_callback(gate: Gate):
    """Returns the gate as a Keras callback."""
    from callbacks.steps import StepCallback

    class Turns(StepCallback):  # a run reads nothing for it
        def on_epoch_begin(self, epoch, logs=None):
            if gate.left:
                gate.skip()

        def on_train_batch_begin(self, batch, logs=None):
            gate.before_step()

        def on_train_batch_end(self, batch, logs=None):
            if gate.left == 1:
                float(logs["loss"])  # the steps of the turn are over
            gate.after_step()

    return Turns()


def insert(callbacks, first, model) -> None:
    """Inserts a callback before those of a run; its own list, which reads lazily, stays in use."""
    first.set_model(model)
    callbacks.callbacks.insert(0, first)


def trainer_callback(gate: Gate):
    """Returns the gate as a callback of the `Trainer`."""
    import torch
    import transformers as hf

    class Turns(hf.TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            gate.before_step()

        def on_step_end(self, args, state, control, **others):
            if gate.left == 1 and torch.cuda.is_available():
                torch.cuda.synchronize()  # the steps of the turn are over
            gate.after_step()

    return Turns()


def run_recipe(folder: Path, sizes: dict, watch: Callable, **changes) -> None:
    """Runs the recipe with its defaults, except the sizes and the vocabulary.

    Args:
        folder: see above.
        sizes: see above.
        watch: gets the stock model and returns a callback of Keras for its training.
        changes: other options.
    """
    import recipes  # noqa: F401 (picks the backend)

    import keras  # isort: skip

    from recipes import bert_mlm

    stock_fit, stock_build, built = keras.Model.fit, bert_mlm.build_model, []

    def build_model(*words):
        built.append(stock_build(*words))
        return built[-1]

    def fit(self, *words, callbacks, **named):
        # First, since the run measures the peak after the first step, outside the step.
        insert(callbacks, watch(built[0]), self)
        return stock_fit(self, *words, callbacks=callbacks, **named)

    bert_mlm.build_model, keras.Model.fit = build_model, fit
    bert_mlm.main(
        bert_mlm.Options(
            dataset=str(folder / "text"),
            vocabulary=folder / "vocabulary.txt",
            cache_dir=folder / "cache",
            run_dir=folder / f"run-{os.getpid()}",
            preset="scratch",
            initial_mlm_probability=0.15,  # as the other sides
            global_batch_size=sizes["batch_size"],
            sequence_length=sizes["length"],
            num_layers=sizes["layers"],
            num_heads=sizes["heads"],
            hidden_dim=sizes["width"],
            **{name: sizes[name] for name in OPTIONS if name in sizes},
            **changes,
        )
    )


def recipe(folder: Path, sizes: dict, gate: Gate) -> None:
    """Runs the recipe."""
    # A packed sequence is full; its [CLS] is counted as the tutorial's is. A call of the gate is an
    # execution, whose steps must divide those of an epoch.
    import numpy as np

    from recipes import bert_mlm  # noqa: F401

    gate.imported = time.perf_counter()
    together = sizes["batch_size"] * sizes.get("steps_per_execution", 1)
    gate.tokens_per_step = together * sizes["length"]
    examples = len(np.load(folder / "train.npy", mmap_mode="r")) // together * together
    changes = {"epochs": ENDLESS, "max_examples": examples}
    run_recipe(folder, sizes, lambda model: keras_callback(gate), **changes)


def tutorial_data(folder: Path, sizes: dict):
    """Builds the published tutorial's pipeline: one line per example, 512 positions, 96 slots.

    As in "Data Parallel Training with KerasHub and tf.distribute" (keras.io, 2023): lines of more
    than 100 bytes, shuffled among 500, batched and cached; each batch is tokenised and masked by
    the preset's preprocessor, here with our vocabulary in it.

    Returns:
        The batches as the model takes them.
    """
    import keras_nlp
    import tensorflow as tf

    tokenizer = keras_nlp.models.BertTokenizer(
        vocabulary=(folder / "vocabulary.txt").read_text().splitlines(), lowercase=True
    )
    preprocessor = keras_nlp.models.BertMaskedLMPreprocessor(tokenizer)
    lines = (
        tf.data.TextLineDataset(str(folder / "text" / "wiki.train.tokens"))
        .filter(lambda line: tf.strings.length(line) > 100)
        .shuffle(500)
        .batch(sizes["batch_size"])
        .cache()
        .prefetch(tf.data.AUTOTUNE)
    )
    batches = lines.map(preprocessor, num_parallel_calls=tf.data.AUTOTUNE)
    return batches.prefetch(tf.data.AUTOTUNE)


def tutorial_model(sizes: dict, learning_rate: float):
    """Builds a BERT of the recipe's sizes, compiled like the tutorial's preset."""
    import keras
    import keras_nlp

    backbone = keras_nlp.models.BertBackbone(
        vocabulary_size=sizes["vocabulary_size"],
        num_layers=sizes["layers"],
        num_heads=sizes["heads"],
        hidden_dim=sizes["width"],
        intermediate_dim=4 * sizes["width"],
        max_sequence_length=512,
    )
    backbone.pooled_dense.trainable = False
    model = keras_nlp.models.BertMaskedLM(backbone)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.AdamW(learning_rate),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
        jit_compile=False,
    )
    return model


def tutorial(folder: Path, sizes: dict, gate: Gate) -> None:
    """Runs the published tutorial's pipeline."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import numpy as np

    data = tutorial_data(folder, sizes)
    gate.tokens_per_step = float(np.mean([int(np.sum(x["padding_mask"])) for x, _, _ in data]))
    gate.imported = time.perf_counter()  # nor does that pass over the text count
    model = tutorial_model(sizes, 1e-3)
    model.fit(data, epochs=ENDLESS, callbacks=[keras_callback(gate)], verbose=0)


def transformers(folder: Path, sizes: dict, gate: Gate, only_masked: bool = False) -> None:
    """Runs Hugging Face's `Trainer` with `BertForMaskedLM`, on the recipe's packed sequences.

    Args:
        folder: see above.
        sizes: see above.
        gate: holds it between the turns.
        only_masked: the head scores the masked positions alone, as ours does; the stock one scores
            every position.
    """
    import numpy as np
    import torch
    import transformers as hf

    used = (hf.Trainer, hf.BertForMaskedLM, hf.BertTokenizerFast)  # which imports them
    assert all(used)
    gate.imported = time.perf_counter()

    class OnlyMasked(hf.BertForMaskedLM):
        def forward(self, input_ids, labels, attention_mask=None, **others):
            hidden = self.bert(input_ids, attention_mask=attention_mask)[0]
            chosen = labels != -100
            logits = self.cls(hidden[chosen])
            return {"loss": torch.nn.functional.cross_entropy(logits, labels[chosen])}

    on_gpu = torch.cuda.is_available()
    if on_gpu:  # as TensorFlow does
        torch.set_float32_matmul_precision("high")
    ids = np.load(folder / "train.npy").astype(np.int64)
    config = hf.BertConfig(
        vocab_size=sizes["vocabulary_size"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        hidden_size=sizes["width"],
        intermediate_size=4 * sizes["width"],
        max_position_embeddings=sizes["length"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = (OnlyMasked if only_masked else hf.BertForMaskedLM)(config)
    tokenizer = hf.BertTokenizerFast(str(folder / "vocabulary.txt"))
    gate.tokens_per_step = sizes["batch_size"] * sizes["length"]

    hf.Trainer(
        model=model,
        args=hf.TrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=sizes["batch_size"],
            learning_rate=1e-3,
            num_train_epochs=ENDLESS,
            save_strategy="no",
            report_to=[],
            use_cpu=not on_gpu,
            bf16=sizes["precision"] == "mixed_bfloat16",
            torch_compile=sizes.get("torch_compile", False),
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "attention_mask": np.ones_like(row)} for row in ids],
        data_collator=hf.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
        callbacks=[trainer_callback(gate)],
    ).train()


def transformers_masked(folder: Path, sizes: dict, gate: Gate) -> None:
    """Runs the `Trainer` with only the masked positions scored."""
    transformers(folder, sizes, gate, only_masked=True)


def matrix_product(folder: Path, sizes: dict, gate: Gate) -> None:
    """Measures tokens per second at the rate of a large matrix product, without training."""
    import types

    import recipes  # noqa: F401 (picks the backend)
    from machine import mfu
    from models.bert import training_operations

    model = types.SimpleNamespace(
        hidden_dim=sizes["width"],
        num_layers=sizes["layers"],
        intermediate_dim=4 * sizes["width"],
        vocabulary_size=sizes["vocabulary_size"],
    )
    predictions = round(0.15 * sizes["length"])
    operations = training_operations(model, sizes["length"], predictions) / sizes["length"]
    for _ in sys.stdin:
        gate.answer(1.0, mfu.measure_peak(sizes["precision"].removeprefix("mixed_")) / operations)


def fine_tuning(folder: Path, sizes: dict, gate: Gate) -> None:
    """Runs `text_classification` on the preset and the sentences of `fine_tuning.prepare`."""
    import recipes  # noqa: F401 (picks the backend)

    import keras  # isort: skip
    import numpy as np

    from recipes import text_classification

    gate.imported = time.perf_counter()
    with np.load(folder / "batches.npz") as stored:
        gate.tokens_per_step = sizes["batch_size"] * float(stored["mean_length"])
    stock_fit = keras.Model.fit

    def fit(self, *words, callbacks, **named):
        insert(callbacks, keras_callback(gate), self)
        return stock_fit(self, *words, callbacks=callbacks, **named)

    keras.Model.fit = fit
    text_classification.main(
        text_classification.Options(
            dataset=str(folder / "sentences.csv"),
            preset=str(folder / "preset"),
            cache_dir=folder / "cache",
            run_dir=folder / f"run-{os.getpid()}",
            global_batch_size=sizes["batch_size"],
            sequence_length=sizes["length"],
            epochs=ENDLESS,
            **{name: sizes[name] for name in OPTIONS if name in sizes},
        )
    )


def trainer_fine_tuning(folder: Path, sizes: dict, gate: Gate) -> None:
    """Runs the `Trainer` on the same sentences, from the same weights."""
    import numpy as np
    import torch
    import transformers as hf

    from benchmarks import in_torch

    config = hf.DistilBertConfig(
        vocab_size=sizes["vocabulary_size"],
        n_layers=sizes["layers"],
        n_heads=sizes["heads"],
        dim=sizes["width"],
        hidden_dim=4 * sizes["width"],
        max_position_embeddings=max(512, sizes["length"]),
    )
    model = hf.DistilBertForSequenceClassification(config).eval()
    in_torch.fill_distilbert(model, in_torch.load_weights(folder / "weights.npz"))
    with np.load(folder / "batches.npz") as stored:
        tokens, mask, labels, logits = (
            torch.tensor(stored[name]).long() if name != "logits" else stored[name]
            for name in ("tokens", "mask", "labels", "logits")
        )
        mean_length = float(stored["mean_length_of_batches"])
        gate.tokens_per_step = sizes["batch_size"] * mean_length
    few = slice(len(logits))
    with torch.no_grad():
        found = model(input_ids=tokens[few], attention_mask=mask[few]).logits.numpy()
    in_torch.require_equal(logits, found)
    rows = [
        {"input_ids": tokens[n], "attention_mask": mask[n], "labels": labels[n]}
        for n in range(len(labels))
    ]

    def pad_to_longest(rows: list[dict]) -> dict:  # as transformers' DataCollatorWithPadding
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        longest = int(batch["attention_mask"].sum(1).max())
        cut = {name: batch[name][:, :longest] for name in ("input_ids", "attention_mask")}
        return {**batch, **cut}

    hf.Trainer(
        model=model,
        args=hf.TrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=sizes["batch_size"],
            num_train_epochs=ENDLESS,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=pad_to_longest,
        callbacks=[trainer_callback(gate)],
    ).train()


def generation(folder: Path, sizes: dict, gate: Gate) -> None:
    """Continues the prompts of `generation.prepare` as `recipes.predict` does."""
    import recipes  # noqa: F401 (picks the backend)
    from models import decoders, samplers

    length = sizes["prompt"] + sizes["new"]
    preprocessor = decoders.load_preprocessor(str(folder / "preset"), length)
    task = decoders.load_task(str(folder / "preset"), None, length)
    prompts = json.loads((folder / "prompts.json").read_text())[: sizes["batch_size"]]
    gate.tokens_per_step = sizes["batch_size"] * sizes["new"]
    sampler = samplers.Sampler(temperature=0)
    stock = preprocessor.generate_postprocess

    def postprocess(outputs):
        rows = outputs["token_ids"][:, : sizes["new"]].tolist()
        (folder / "generation.json").write_text(json.dumps(rows))
        return stock(outputs)

    preprocessor.generate_postprocess = postprocess
    while True:
        gate.before_step()
        decoders.generate(
            task, preprocessor, prompts, max_length=length, sampler=sampler, strip_prompt=True
        )
        gate.after_step()


def transformers_generation(folder: Path, sizes: dict, gate: Gate) -> None:
    """Continues the same prompts with the same weights by `generate()` of transformers."""
    import numpy as np
    import torch
    import transformers as hf

    from benchmarks import in_torch

    end = sizes["vocabulary_size"] - 1
    config = hf.GPT2Config(
        vocab_size=sizes["vocabulary_size"],
        n_layer=sizes["layers"],
        n_head=sizes["heads"],
        n_embd=sizes["width"],
        n_positions=max(1024, sizes["prompt"] + sizes["new"]),
        bos_token_id=end,
        eos_token_id=end,
    )
    model = hf.GPT2LMHeadModel(config).eval()
    in_torch.fill_gpt2(model, in_torch.load_weights(folder / "weights.npz"))
    with np.load(folder / "batches.npz") as stored:
        tokens, logits = torch.tensor(stored["tokens"]).long(), stored["logits"]
    with torch.no_grad():
        in_torch.require_equal(logits, model(tokens[: len(logits)]).logits.numpy())
    tokens = tokens[: sizes["batch_size"]]
    gate.tokens_per_step = sizes["batch_size"] * sizes["new"]
    while True:
        gate.before_step()
        found = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=sizes["new"],
            do_sample=False,
            pad_token_id=end,
        )
        rows = found[:, sizes["prompt"] :].tolist()
        (folder / "transformers_generation.json").write_text(json.dumps(rows))
        gate.after_step()


SIDES = (
    *(recipe, tutorial, transformers, transformers_masked, matrix_product),
    *(fine_tuning, trainer_fine_tuning, generation, transformers_generation),
)


def main() -> None:
    """Runs one side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sides = {each.__name__: each for each in SIDES}
    parser.add_argument("name", choices=sides)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sizes", type=json.loads, nargs="?", default={})
    chosen = parser.parse_args()
    sizes = json.loads((chosen.folder / "sizes.json").read_text()) | chosen.sizes
    sides[chosen.name](chosen.folder, sizes, Gate(answers_apart()))


if __name__ == "__main__":
    main()
