"""Fine-tunes tiny random presets of each family with a CausalLM, as plain KerasNLP does."""

import json
import os
import signal

import keras
import keras_nlp
import numpy as np
import pytest

from callbacks.errors import Stopped
from callbacks.stopping import StopAtStep
from data import batches, files
from distribution.keras_compat import generation
from models import decoders
from recipes import causal_lm, evaluate
from tests.support import causal_presets, plain_keras
from training import numerics
from training.loaded_run import load_run

pytestmark = pytest.mark.long

# The others compute norms or positions in float32, whatever the precision.
FLOAT64 = ("GPT2", "OPT", "Bloom")
LENGTH = 24
COMMON = plain_keras.COMMON | dict(epochs=20, global_batch_size=4, sequence_length=LENGTH)
PAIRS = [(f"{n} and {n}", "even good" if n % 2 else "odd") for n in range(48)]


@pytest.fixture
def data(tmp_path):
    """Prompts and responses, of which two or three fill a row."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, pairs in (("train", PAIRS[:32]), ("valid", PAIRS[32:40]), ("test", PAIRS[40:])):
        lines = [json.dumps({"prompt": p, "response": r}) for p, r in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def one_by_one(rows, indices):
    """The examples of some rows, one per row, as plain KerasNLP takes them: without packing."""
    inputs, labels, weights = (
        keras.tree.map_structure(np.asarray, part) for part in rows.make_batch()(indices, 0)
    )
    found = []
    # The router of Qwen's experts counts padding too.
    padding = inputs["token_ids"][inputs["padding_mask"] == 0][:1]
    for row, documents in enumerate(inputs["padding_mask"]):
        for number in range(1, documents.max() + 1):
            mine = np.flatnonzero(documents == number)
            ids, y, w, mask = (np.zeros(LENGTH, np.int32) for _ in range(4))
            ids[:] = padding if padding.size else 0
            ids[: len(mine)], y[: len(mine)] = inputs["token_ids"][row, mine], labels[row, mine]
            w[: len(mine)], mask[: len(mine)] = weights[row, mine], 1
            found.append((ids, mask, y, w))
    ids, mask, y, w = map(np.stack, zip(*found, strict=True))
    # Keras divides by all slots; the loss of a run is the mean over what is predicted.
    return {"token_ids": ids, "padding_mask": mask}, y, w * (w.size / w.sum())


def train_plainly(preset, options):
    """The weights before and after `STEPS` of KerasNLP's own training, one example per row."""
    models = keras_nlp.models
    with numerics.precision(options.precision):
        task = models.CausalLM.from_preset(preset, dtype=options.precision, preprocessor=None)
        first = task.get_weights()
        tokenizer = models.CausalLMPreprocessor.from_preset(preset).tokenizer
        together = decoders.can_share_rows(task)
        prompts = causal_lm.prompts.load_prompts(options.dataset)
        cache_dir = files.default_cache_dir()
        rows = causal_lm.make_rows(options, prompts, tokenizer, together, cache_dir)["train"]
        plain_keras.compile_plainly(task)
        order = batches.training_batches(len(rows), 4, 0, lambda indices, epoch: indices)
        for indices in order.take(plain_keras.STEPS):
            x, y, w = one_by_one(rows, indices)
            named = dict(sample_weight=w, batch_size=len(y), shuffle=False, verbose=0)
            keras.Model.fit(task, x, y, **named)
    return first, task.get_weights(), together


@pytest.mark.parametrize("family", causal_presets.FAMILIES)
def test_a_causal_model_of_each_family(family, data, tmp_path):
    """Trains as KerasNLP does on the same examples, each alone; then it is used."""
    causal_presets.make_task(family).save_to_preset(str(tmp_path / "preset"))
    preset = str(tmp_path / "preset")
    options = causal_lm.Options(
        **COMMON | dict(precision=causal_presets.PRECISION.get(family, "float64")),
        dataset=str(data),
        preset=preset,
        run_dir=tmp_path / "run",
    )
    results = causal_lm.main(options)
    assert results["preset"] == preset
    first, theirs, together = train_plainly(preset, options)
    assert together == (family not in causal_presets.OWN_ROWS)
    run = load_run(tmp_path / "run")
    ours = run.load_model(options.precision).get_weights()
    moved, apart = (
        np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(ours, others, strict=True)))
        for others in (first, theirs)
    )
    print(f"{family}: {apart / moved:.1e} of the distance moved")
    assert moved > 0.1 and apart < moved * (1e-9 if family in FLOAT64 else 1e-3)
    # Queried and evaluated like any other run; KerasNLP alone generates the same.
    found = evaluate.main(evaluate.Options(run_dir=tmp_path / "run"))
    assert found["test"] == pytest.approx(results["test"])
    asked = ["1 and 1", "22 and 22"]
    answers = [found[0]["text"] for found in causal_lm.predict(run, asked, temperature=0.0)]
    task = keras_nlp.models.CausalLM.from_preset(str(tmp_path / "run" / "model"), dtype="float32")
    task.compile(sampler="greedy", jit_compile=False)
    texts = [f"{text}\n" for text in asked]
    # The base class's: Gemma 3's own also stops at <unk>, which stands for a token it lacks here.
    stop = sorted(decoders.stop_tokens(task.preprocessor.tokenizer))
    generate = keras_nlp.models.CausalLM.generate
    with generation.patch_generation_for(LENGTH):
        assert list(generate(task, texts, stop_token_ids=stop, strip_prompt=True)) == answers


def test_a_family_without_a_start_token_has_no_perplexity_of_words(tiny_text, tmp_path):
    """The first token of a line is not predicted, so words and bytes would be too cheap."""
    causal_presets.make_task("Qwen").save_to_preset(str(tmp_path / "preset"))
    options = causal_lm.Options(
        **COMMON | dict(max_steps=1, precision="float32"),
        dataset=str(tiny_text),
        preset=str(tmp_path / "preset"),
        run_dir=tmp_path / "run",
    )
    results = causal_lm.main(options)
    assert set(results["test"]) == {"cross_entropy", "accuracy", "perplexity"}
    assert any("perplexity_per_word" in note for note in results["notes"])


@pytest.mark.parametrize(
    ("family", "adapted"), [("GPT2", {"query", "value"}), ("GPTNeoX", {"query_key_value"})]
)
def test_adapters_alone_are_trained_and_saved_merged(family, adapted, data, tmp_path, monkeypatch):
    """And a run of them that is stopped resumes identically, from a checkpoint without the rest."""
    causal_presets.make_task(family).save_to_preset(str(tmp_path / "preset"))
    options = causal_lm.Options(
        **(COMMON | dict(precision="float32")),
        dataset=str(data),
        preset=str(tmp_path / "preset"),
        lora_rank=2,
    )
    runs = [causal_lm.dataclasses.replace(options, run_dir=tmp_path / name) for name in "ab"]
    results = causal_lm.main(runs[0])
    stock = StopAtStep.on_step_end

    def on_step_end(self, step, logs):
        stock(self, step, logs)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(StopAtStep, "on_step_end", on_step_end)
        with pytest.raises(Stopped):
            causal_lm.main(runs[1])
    again = causal_lm.main(runs[1])
    assert again["resumed_from_step"] == 3
    assert again["weights_sha256"] == results["weights_sha256"] and again["test"] == results["test"]
    before, after = (
        keras_nlp.models.CausalLM.from_preset(str(folder))
        for folder in (tmp_path / "preset", tmp_path / "a" / "model")
    )
    changed = {
        one.path.split("/")[-2]
        for one, other in zip(before.weights, after.weights, strict=True)
        if not np.array_equal(one, other)
    }
    assert changed == adapted
    found = evaluate.main(evaluate.Options(run_dir=tmp_path / "a"))
    assert found["test"] == pytest.approx(results["test"], rel=1e-5)
