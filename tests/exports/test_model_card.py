"""The card in `model/`, and that the model loads without this package."""

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import scipy.special

from data.templates import Template
from recipes import causal_lm, seq2seq, text_classification
from tests.support import causal_presets, chat_presets, strategy_run
from training.loaded_run import load_run
from training.report import model_card

NAMES = ("bert", "text", "mnist", "dna")

ALL_IN_TURN = """
import contextlib, io, os, sys
for folder in sys.argv[1:]:
    os.chdir(folder)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(open(os.path.join(os.path.dirname(folder), "snippet.py")).read(), {})
    print(next(line for line in said.getvalue().splitlines() if "Total params" in line))
ours = {"recipes", "models", "training", "callbacks", "distribution", "data", "exports"}
assert not ours & set(sys.modules), ours & set(sys.modules)
"""


def python_of(card):
    """The Python of a card's last section."""
    return re.findall(r"```python\n(.*?)```", card, re.S)[-1]


def generated_from(card):
    """The text that a card passes to `generate()`."""
    (literal,) = re.findall(r"^text = model.generate\((.*)\)$", card, re.MULTILINE)
    return ast.literal_eval(literal)


def run_python(folder, block, monkeypatch):
    """Runs a Python block of a card in its folder; returns the names that it sets."""
    blocks = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    names = {}
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(blocks[block], names)
    return names


@pytest.mark.long
def test_the_cards_python_loads_each_model_without_this_package(runs, tmp_path):
    """One process for all four, elsewhere: importing Keras takes longest."""
    folders = []
    for name in NAMES:
        folder = tmp_path / name / "model"
        folder.parent.mkdir()
        os.symlink(runs[name] / "model", folder)
        card = (folder / "README.md").read_text()
        (folder.parent / "snippet.py").write_text(python_of(card))
        folders.append(str(folder))
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KERAS_BACKEND")}
    script = tmp_path / "all.py"
    script.write_text(ALL_IN_TURN)
    done = subprocess.run(
        [sys.executable, "-P", str(script), *folders],
        cwd="/",
        env=environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("params") == len(NAMES)


@pytest.mark.long
def test_the_cards_call_classifies_and_scores_as_predict_does(runs, monkeypatch):
    for name in ("text", "scores"):
        run = load_run(str(runs[name]))
        outputs = run_python(run.model_dir, 0, monkeypatch)["outputs"][0]
        card = (run.model_dir / "README.md").read_text()
        (literal,) = re.findall(r"predict\((\[.*?\])", card)
        (answers,) = text_classification.predict(run, ast.literal_eval(literal), top=0)
        if name == "scores":
            assert outputs == pytest.approx([answers[0]["score"]])
            assert "Texts in; scores of shape (batch, 1), in the unit of the labels, out.\n" in card
            continue
        assert "logits of shape (batch, 3)" in card
        assert "of the classes 0 `0`, 1 `1`, 2 `2`.\n" in card
        by_name = {answer["class"]: answer["probability"] for answer in answers}
        found = dict(zip(("0", "1", "2"), scipy.special.softmax(outputs), strict=True))
        assert found == pytest.approx(by_name, rel=1e-4)


@pytest.mark.long
def test_the_cards_call_generates_as_predict_does(runs, monkeypatch):
    for name, recipe in (("causal", causal_lm), ("seq2seq_Bart", seq2seq)):
        run = load_run(runs[name])
        text = run_python(run.model_dir, 0, monkeypatch)["text"]
        example = generated_from((run.model_dir / "README.md").read_text())
        ((answer,),) = recipe.predict(run, [example], temperature=0.0)
        assert text == answer["text"]


@pytest.mark.long
def test_the_card_of_a_run_from_a_preset_of_byte_pairs_splits_texts_as_the_training(
    runs, tmp_path, monkeypatch
):
    task = causal_presets.make_task("GPT2")
    learned = task.preprocessor.tokenizer
    last = learned.merges[-1].replace(" ", "")
    pieces = {"ĠĠ" if name == last else name: i for name, i in learned.vocabulary.items()}
    learned.set_vocabulary_and_merges(pieces, ["Ġ Ġ", *learned.merges[:-1]])
    task.save_to_preset(str(tmp_path / "preset"))
    options = strategy_run.CONTINUED | dict(max_steps=1, precision="float32", n_grams=False)
    options |= dict(preset=str(tmp_path / "preset"), run_dir=tmp_path / "run")
    options |= dict(cache_dir=tmp_path / "cache", dataset=str(runs.root / "text.txt"))
    causal_lm.main(causal_lm.Options(**options))
    text = "the  loss   is 123456789,\n\n    and"
    run = load_run(tmp_path / "run")
    expected = np.asarray(run.load_model().preprocessor.tokenizer(text))
    plain, ours = (run_python(run.model_dir, block, monkeypatch)["model"] for block in (0, 1))
    np.testing.assert_array_equal(ours.preprocessor.tokenizer(text), expected)
    assert list(plain.preprocessor.tokenizer(text)) != list(expected)  # as the card says
    # Of byte pairs that the run itself has learned there is one block.
    assert (runs["causal"] / "model" / "README.md").read_text().count("```python") == 1


@pytest.mark.parametrize(
    ("example", "shown"),
    [
        ("who?", "who?"),
        (
            '[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "who?"}]',
            "who?",
        ),
        ('[{"role": "system", "content": "Be kind."}]', None),
        (None, causal_lm.Options.EXAMPLE_INPUT),
    ],
    ids=["text", "chat", "looks like a chat", "none"],
)
def test_a_card_shows_the_example_of_the_data(example, shown):
    task = chat_presets.make_task("Llama3")
    results = dict.fromkeys(("recipe", "dataset"), "causal_lm") | {"preset": None, "steps": 1}
    results |= {"weights_of_step": 1, "global_batch_size": 1, "notes": []}
    results |= {"test": {}, "baseline": {}, "versions": {}}
    options, metadata = causal_lm.Options(), {"template": "Q: {prompt}\nA: {response}."}
    card = model_card(task, results, options, {}, metadata, task.preprocessor, example)
    assert generated_from(card) == f"Q: {shown or example}\nA: "


@pytest.mark.parametrize(
    ("family", "template", "form"),
    [
        ("Llama3", "Q: {prompt}\nA: {response}.", "Q: {prompt}\nA: {response}."),
        ("Llama3", "llama3", "<|start_header_id|>user<|end_header_id|>\n\n{prompt}<|eot_id|>"),
        ("Qwen", "chatml", "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"),
    ],
    ids=["text", "chat", "chatml"],
)
def test_a_card_shows_the_form_of_prompts(family, template, form):
    """The text that it passes to `generate()` has the tokens of the training."""
    task = chat_presets.make_task(family)
    results = dict.fromkeys(("recipe", "dataset"), "causal_lm") | {"preset": None, "steps": 1}
    results |= {"weights_of_step": 1, "global_batch_size": 1, "notes": []}
    results |= {"test": {}, "baseline": {}, "versions": {}}
    options, preprocessor = causal_lm.Options(), task.preprocessor
    card = model_card(task, results, options, {}, {"template": template}, preprocessor)
    assert f"in this form: {json.dumps(form)[:-1]}" in card
    if family == "Qwen":  # of whose tokenizer these tokens are words
        assert "does not read them so" in card and "generate(" not in card
        return
    inputs = preprocessor.generate_preprocess([generated_from(card)], sequence_length=64)
    expected = Template(template, preprocessor.tokenizer).prompt(options.EXAMPLE_INPUT)
    count = int(np.sum(np.asarray(inputs["padding_mask"])[0]))
    assert list(np.asarray(inputs["token_ids"])[0][:count]) == expected
