import html
import json
import os
import re
import shutil
import signal
import types

import keras
import keras_nlp
import numpy as np
import pytest

from callbacks.errors import Stopped
from callbacks.stopping import StopAtStep
from data import batches, next_tokens
from data.errors import DataError
from data.kneser_ney import KneserNey
from data.text import load_text
from models import decoders
from recipes import causal_lm, evaluate, predict
from tests.support import causal_presets, chat_presets
from tests.support.processes import ROOT
from training.errors import OptionsError
from training.loaded_run import load_run
from training.options import all_problems

TINY = dict(
    strategy="none",
    vocabulary_size=320,
    num_layers=2,
    hidden_dim=16,
    dropout=0.1,
    sequence_length=16,
    epochs=6,
    max_steps=100,
    global_batch_size=8,
    base_learning_rate=0.02,
    jit="off",
    quiet=True,
)


@pytest.fixture(scope="module")
def finished(tiny_text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal") / "run"
    options = causal_lm.Options(**TINY, dataset=str(tiny_text), run_dir=folder)
    return folder, causal_lm.main(options)


def test_it_learns_and_reports_perplexity_by_token_word_and_byte(finished, tiny_text, tmp_path):
    folder, results = finished
    test = results["test"]
    baseline = results["baseline"]
    assert baseline["kneser_ney_cross_entropy"] < baseline["unigram_cross_entropy"]
    assert test["cross_entropy"] < baseline["unigram_cross_entropy"]
    assert test["perplexity"] == pytest.approx(np.exp(test["cross_entropy"]))
    # All tokens of the test lines, each from what is before it in its own row.
    lines = list(load_text(str(tiny_text), tmp_path).splits["test"])
    tokenizer = load_run(folder).load_model().preprocessor.tokenizer
    tokens = sum(len(tokenizer(line)) + 1 for line in lines)
    nats = test["cross_entropy"] * tokens
    words = sum(len(line.split()) + 1 for line in lines)
    assert test["perplexity_per_word"] == pytest.approx(np.exp(nats / words))
    size = sum(len(f"{line}\n".encode()) for line in lines)
    assert test["perplexity_per_byte"] == pytest.approx(np.exp(nats / size))


def test_the_test_metrics_are_of_the_test_split(finished, tiny_text, tmp_path):
    """The saved model, evaluated by hand on each of the two splits."""
    folder, results = finished
    task = load_run(folder).load_model("float32")
    text, found = load_text(str(tiny_text), tmp_path), {}
    rows = next_tokens.rows_once(
        text, task.preprocessor.tokenizer, tmp_path, length=16, together=True
    )
    states = decoders.apart(task.backbone)
    logits = task.backbone.token_embedding(states.output, reverse=True)
    model = keras.Model(states.input, logits)
    for split in ("valid", "test"):
        metric = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
        data = batches.evaluation_batches(len(rows[split]), 8, rows[split].make_batch())
        for inputs, labels, weights in data:
            metric.update_state(labels, model(inputs, training=False), weights)
        found[split] = float(metric.result())
    assert results["test"]["cross_entropy"] == pytest.approx(found["test"], rel=1e-4)
    assert results["history"]["val_cross_entropy"][-1] == pytest.approx(found["valid"], rel=1e-4)
    assert abs(found["valid"] - found["test"]) > 1e-3


def test_the_page_generates_from_the_model(finished, capsys):
    page = (ROOT / "docs" / "causal_lm.md").read_text(encoding="utf-8")
    codes = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (code,) = [code for code in codes if '"runs/causal_lm/first/model"' in code]
    code = code.replace("runs/causal_lm/first", str(finished[0]))
    # The tiny model has 16 positions.
    code = code.replace("The station was built in", "the").replace("max_length=64", "max_length=16")
    exec(code, {})
    printed = capsys.readouterr().out
    assert printed.startswith("the") and len(printed) > len("the\n")


def test_a_perplexity_that_is_no_number_is_left_out(finished):
    """Of lines without spaces, as in Chinese, each of which is one word."""
    tokenizer = load_run(finished[0]).load_model().preprocessor.tokenizer
    found = causal_lm.perplexities(3000.0, ["字" * 400], tokenizer)
    assert list(found) == ["perplexity_per_byte"]
    assert "lines without spaces" in causal_lm.missing_perplexities(found)[0]
    assert causal_lm.missing_perplexities({"perplexity_per_word": 2.0}) == []
    assert found["perplexity_per_byte"] == pytest.approx(np.exp(3000 / 1201))


@pytest.mark.long
def test_lines_without_tokens_do_not_count(finished, tiny_text, tmp_path):
    """Neither do they end a document, nor do separators; characters of several bytes are bytes."""
    path = tmp_path / "text"
    path.mkdir()
    lines = tiny_text.read_text().splitlines()
    found = []
    for gaps in ("\n", "\n \n\t\n", "\n<|end_of_text|>\n"):
        for split in ("train", "valid", "test"):
            (path / f"{split}.txt").write_text(gaps.join(f"{line} é東京" for line in lines[:30]))
        run = load_run(finished[0])
        changed = evaluate.evaluate(run, dataset=str(path), batch_size=8, cache_dir=tmp_path)
        found.append(changed["test"])
    assert found[0] == found[1] == found[2]
    test = found[0]
    size = sum(len(f"{line} é東京\n".encode()) for line in lines[:30])
    tokenizer = run.load_model().preprocessor.tokenizer
    tokens = sum(len(tokenizer(f"{line} é東京")) + 1 for line in lines[:30])
    expected = np.exp(test["cross_entropy"] * tokens / size)
    assert test["perplexity_per_byte"] == pytest.approx(expected)


@pytest.mark.long
def test_a_line_that_is_several_documents_has_no_perplexity_per_word(finished, tiny_text, tmp_path):
    path = tmp_path / "text"
    path.mkdir()
    lines = tiny_text.read_text().splitlines()[:30]
    for split in ("train", "valid", "test"):
        (path / f"{split}.txt").write_text("\n".join(lines))
    (path / "test.txt").write_text("\n".join([*lines, "a line<|end_of_text|>and another"]))
    run = load_run(finished[0])
    found = evaluate.evaluate(run, dataset=str(path), batch_size=8, cache_dir=tmp_path)
    assert set(found["test"]) == {"cross_entropy", "accuracy", "perplexity"}
    assert any("a test line contains the name of the token" in note for note in found["notes"])


@pytest.mark.long
def test_a_stopped_run_resumes_identically(finished, tiny_text, tmp_path, monkeypatch):
    folder, results = finished
    stock = StopAtStep.on_step_end

    def on_step_end(self, step, logs):
        stock(self, step, logs)
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    options = causal_lm.Options(**TINY, dataset=str(tiny_text), run_dir=tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(StopAtStep, "on_step_end", on_step_end)
        with pytest.raises(Stopped):
            causal_lm.main(options)
    again = causal_lm.main(options)
    assert again["resumed_from_step"] == 7
    assert again["weights_sha256"] == results["weights_sha256"] and again["test"] == results["test"]


@pytest.mark.long
def test_it_is_evaluated_and_continues_texts(finished, tmp_path, command_line):
    folder, results = finished
    moved = shutil.copytree(folder, tmp_path / "moved")
    status, out, err = command_line(evaluate, moved, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)["test"]
    assert {name: found[name] for name in results["test"]} == pytest.approx(results["test"])
    command = ("the loss of", "a step", "--temperature", 0.8, "--top-k", 20, "--max-length", 14)
    status, out, err = command_line(predict, moved, *command)
    assert (status, err) == (0, "")
    first, loss, second, step = out.splitlines()
    assert (first, second) == ("the loss of", "a step")
    assert loss.strip().startswith("the loss of") and step.strip().startswith("a step")
    assert command_line(predict, moved, *command)[1] == out
    assert command_line(predict, moved, *command, "--seed", 1)[1] != out
    status, out, err = command_line(predict, moved, *command, "--num-samples", 3)
    assert (status, err) == (0, "")
    of_loss, of_step = out.splitlines()[1:4], out.splitlines()[5:]
    assert (of_loss[0], of_step[0]) == (loss, step) and len(set(of_loss)) == len(set(of_step)) == 3
    stop = loss.strip()[len("the loss of") + 1 :][:3]
    status, out, err = command_line(predict, moved, *command, "--stop", "never written", stop)
    assert (status, err) == (0, "")
    assert out.splitlines()[1].strip() == loss.strip().partition(stop)[0].strip()
    status, _, err = command_line(predict, moved, *command, "--stop", "a", "")
    assert status == 2 and "--stop ['a', '']: expected texts, none of them empty" in err
    status, _, err = command_line(predict, moved, "the " * 16)
    assert status == 2 and "tokens leave no room for more within 16: 'the the" in err
    (tmp_path / "a.txt").write_text("the loss of\n" + "the " * 16 + "\na step")
    status, out, err = command_line(
        predict, moved, "--file", tmp_path / "a.txt", "--json", *command[2:]
    )
    assert status == 2 and "a.txt, input 2: 17 tokens leave no room for more within 14" in err
    loss_again, refused, step_again = (answer for (answer,) in json.loads(out))
    assert [loss_again["text"], step_again["text"]] == [loss.strip(), step.strip()]
    assert "17 tokens" in refused["error"]
    words = ("--file", tmp_path / "a.txt", "--json", *command[2:], "--num-samples", 3)
    status, out, err = command_line(predict, moved, *words)
    assert status == 2 and "a.txt, input 2: 17 tokens leave no room" in err
    assert [len(answers) for answers in json.loads(out)] == [3, 1, 3]
    wrong = ("--temperature", -1, "--top-p", 0, "--top-k", -1, "--max-length", 1)
    status, _, err = command_line(predict, moved, "a", *wrong)
    assert status == 2 and len(err.splitlines()) == 4
    # Rotary positions have no last one.
    assert command_line(predict, moved, "a", "--max-length", 17)[0] == 0


@pytest.mark.long
def test_kerasnlp_alone_loads_it_and_generates_the_same(finished):
    folder, _ = finished
    run = load_run(folder)
    texts = ["the loss of", "a step", "the mean over all"]
    answers = [found[0]["text"] for found in causal_lm.predict(run, texts, temperature=0.0)]
    task = keras_nlp.models.CausalLM.from_preset(str(folder / "model"))
    task.compile(sampler="greedy", jit_compile=False)
    assert isinstance(task, keras_nlp.models.Llama3CausalLM)
    assert list(task.generate(texts)) == answers and len(set(answers)) == 3


@pytest.mark.long
def test_log_likelihoods_are_those_of_each_next_token(finished):
    run = load_run(finished[0])
    task = run.load_model()
    tokenizer = task.preprocessor.tokenizer
    text = "the loss of a step"
    ids, expected = [tokenizer.start_token_id], 0.0
    for piece in tokenizer(text).tolist():
        inputs = {"token_ids": np.array([ids]), "padding_mask": np.ones((1, len(ids)))}
        expected += np.log(float(keras.ops.softmax(task(inputs)[0, -1])[piece]))
        ids.append(piece)
    other = "step a of loss the"
    found = causal_lm.log_likelihoods(run, [text, other])
    assert len(ids) > 5 and found[0] == pytest.approx(expected, rel=1e-5)
    assert found[0] > found[1]
    with pytest.raises(DataError, match="tokens, the model takes 16"):
        causal_lm.log_likelihoods(run, ["the " * 17])
    # Of several lengths, more than are computed at once.
    words = text.split()
    many = [" ".join(words[: 1 + number % 5] + ["of"] * (number % 3)) for number in range(200)]
    alone = {each: causal_lm.log_likelihoods(run, [each])[0] for each in set(many)}
    assert len(set(np.round(list(alone.values()), 3))) == len(alone) > 10
    assert causal_lm.log_likelihoods(run, many) == pytest.approx([alone[each] for each in many])


@pytest.mark.long
def test_without_epochs_a_preset_is_tested_as_it_is(finished, tiny_text, tmp_path):
    folder, results = finished
    preset = folder / "model"
    sizes = {name: TINY[name] for name in ("strategy", "sequence_length", "global_batch_size")}
    options = dict(dataset=str(tiny_text), preset=str(preset), epochs=0, n_grams=False)
    found = causal_lm.main(causal_lm.Options(**sizes, **options, run_dir=tmp_path / "run"))
    assert (found["steps"], found["epochs"], found["history"]) == (0, 0, {})
    assert found["weights_sha256"] == results["weights_sha256"]
    assert found["test"] == pytest.approx(results["test"], rel=1e-5)
    run = load_run(tmp_path / "run")
    answers = causal_lm.predict(run, ["the loss"], temperature=0)
    assert answers == causal_lm.predict(load_run(folder), ["the loss"], temperature=0)
    again = evaluate.main(evaluate.Options(run_dir=tmp_path / "run"))
    assert again["test"] == pytest.approx(results["test"], rel=1e-5)


def test_texts_are_scored(finished, tmp_path, command_line):
    folder, results = finished
    run = load_run(folder)
    texts = ["the loss of a step", "step a of loss the"]
    (tmp_path / "texts.txt").write_text("\n".join([*texts, "", "the " * 17]))
    words = ("--score", "--file", tmp_path / "texts.txt")
    status, out, err = command_line(predict, folder, *words, "--json")
    first, second, empty, (too_long,) = json.loads(out)
    assert status == 2 and re.search(r"input 4: \d+ tokens, the model takes 16", err)
    assert empty == [] and "tokens, the model takes 16" in too_long["error"]
    tokenizer = run.load_model().preprocessor.tokenizer
    for text, nats, (answer,) in zip(
        texts, causal_lm.log_likelihoods(run, texts), (first, second), strict=True
    ):
        count = len(tokenizer(text))
        assert answer.keys() == {"log_likelihood", "tokens", "perplexity"}
        assert answer["tokens"] == count == 5
        assert answer["log_likelihood"] == pytest.approx(nats, rel=1e-5)
        assert answer["perplexity"] == pytest.approx(np.exp(-nats / count), rel=1e-5)
    assert first[0]["perplexity"] < second[0]["perplexity"]
    status, out, err = command_line(predict, folder, texts[0], "--score")
    assert (status, err) == (0, "") and f"  {first[0]['tokens']} tokens  " in out
    assert causal_lm.predict(run, [], score=True) == []
    with pytest.raises(OptionsError, match="--score: generates no text; leave out the options"):
        causal_lm.predict(run, texts, score=True, temperature=0.5)


@pytest.mark.long
def test_a_text_repeats_no_n_gram(finished):
    run = load_run(finished[0])
    tokenizer = run.load_model().preprocessor.tokenizer

    def pairs_of(**settings):
        """All pairs of neighbouring tokens of a text."""
        settings |= dict(temperature=0, max_length=16)
        ((answer,),) = causal_lm.predict(run, ["the the the"], **settings)
        ids = tokenizer(answer["text"]).tolist()
        return list(zip(ids, ids[1:], strict=False))

    free, once = pairs_of(), pairs_of(no_repeat_ngram_size=2)
    prompt = len(tokenizer("the the the")) - 1
    assert len(set(free)) < len(free)
    assert len(set(once[prompt:])) == len(once[prompt:]) > 3
    assert pairs_of(repetition_penalty=5.0) != free
    with pytest.raises(
        OptionsError, match="--repetition-penalty 0: .*\n--no-repeat-ngram-size 1: "
    ):
        causal_lm.predict(run, ["the"], repetition_penalty=0, no_repeat_ngram_size=1)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_n_grams_score_a_text_as_the_beginning_of_a_document(architecture, tiny_text, tmp_path):
    """The same as the training line that it is, wherever that stands in its row."""
    options = causal_lm.Options(**TINY, architecture=architecture)
    data = load_text(str(tiny_text), tmp_path)
    preprocessor = causal_lm.make_preprocessor(options, None, data, tmp_path)
    tokenizer = preprocessor.tokenizer
    rows = causal_lm.make_rows(options, data, tokenizer, True, tmp_path)["train"]
    stream = np.concatenate([rows.tokens[0], *(row[1:] for row in rows.tokens[1:])])
    n_grams = KneserNey(rows.tokens, tokenizer.vocabulary_size(), separator=rows.ends.end)
    scores = n_grams.log_probabilities(stream[None])[0]
    second = list(data.splits["train"])[1]
    first_end, second_end = np.flatnonzero(stream[1:] == rows.ends.end)[:2]
    expected = scores[first_end + 1 : second_end].sum()
    run = types.SimpleNamespace(
        resolved={"dataset": str(tiny_text), "text_sha256": data.sha256},
        metadata={"template": None},
        options=options,
        load_model=lambda: types.SimpleNamespace(preprocessor=preprocessor),
    )
    found = causal_lm.n_gram_log_likelihoods(run, [second], tmp_path)
    assert found == pytest.approx([expected], rel=0.01)


@pytest.mark.long
def test_continuations_begin_where_a_document_begins(
    tiny_text, tmp_path, monkeypatch, command_line
):
    written = {}

    def write(tag, text):
        if tag.startswith("continuations/"):
            written[tag] = text

    monkeypatch.setattr(causal_lm.tf.summary, "text", write)
    options = causal_lm.Options(**(TINY | dict(max_steps=2, architecture="gpt2")))
    options.dataset, options.run_dir = str(tiny_text), tmp_path / "run"
    causal_lm.main(options)
    lines = list(load_text(str(tiny_text), tmp_path).splits["valid"])
    assert len(written) == 4
    for number, text in enumerate(written.values()):
        begun, _, drawn = text.removeprefix("**").partition("**")
        begun = " ".join(lines[number].split()[:5]).startswith(html.unescape(begun))
        assert begun and drawn and "endoftext" not in text
    status, _, err = command_line(predict, tmp_path / "run", "a", "--max-length", 17)
    assert status == 2 and "--max-length 17: the model takes at most 16 tokens" in err


@pytest.mark.long
def test_a_run_continues_where_continuations_fail(tiny_text, tmp_path, monkeypatch, capsys):
    """Its checkpoint is saved after them."""

    def generate(*arguments, **settings):
        raise IndexError("no such piece\nin a line")

    monkeypatch.setattr(causal_lm.decoders, "generate", generate)
    options = causal_lm.Options(**(TINY | dict(max_steps=2, epochs=2, architecture="gpt2")))
    options.dataset, options.run_dir = str(tiny_text), tmp_path / "run"
    results = causal_lm.main(options)
    assert results["steps"] == 2 and (tmp_path / "run" / "checkpoints").is_dir()
    said = [line for line in "".join(capsys.readouterr()).splitlines() if "continuations" in line]
    assert said == ["no continuations/text in TensorBoard: IndexError: no such piece"]


def test_prompts_are_shown_whose_template_leaves_room(tiny_text, tmp_path):
    """A template longer than the row would end the run in its first epoch."""
    data = load_text(str(tiny_text), tmp_path)
    options = causal_lm.Options(**TINY)
    tokenizer = causal_lm.make_preprocessor(options, None, data, tmp_path).tokenizer
    pairs = [("a", "b"), ("a " * 30, "b")] * 3
    asked = causal_lm.prompts.Prompts("x", dict.fromkeys(("train", "valid", "test"), pairs))
    shown = causal_lm.beginnings(options, asked, tokenizer, "{prompt}:{response}")
    assert shown == ["a"] * 3
    long = "one two three four five six seven eight nine: {prompt}:{response}"
    assert causal_lm.beginnings(options, asked, tokenizer, long) == []
    assert causal_lm.special_lines(asked, tokenizer) == []
    named = causal_lm.prompts.Prompts("x", {"train": [("a", "b <|end_of_text|> c")]})
    (note,) = causal_lm.special_lines(named, tokenizer)
    assert note.startswith("1 training prompts and responses contain") and "end_of_text" in note
    # Not the whole split is searched for one.
    many = causal_lm.prompts.Prompts("x", {"valid": [pairs[1]] * 1000 + [pairs[0]]})
    assert causal_lm.beginnings(options, many, tokenizer, "{prompt}:{response}") == []


def test_the_baseline_of_n_grams_can_be_left_out(tiny_text, tmp_path):
    data = load_text(str(tiny_text), tmp_path)
    options = causal_lm.Options(**TINY)
    tokenizer = causal_lm.make_preprocessor(options, None, data, tmp_path).tokenizer
    rows = causal_lm.make_rows(options, data, tokenizer, True, tmp_path)
    found = causal_lm.compute_baselines(rows, tokenizer.vocabulary_size())
    assert found.pop("kneser_ney_cross_entropy") > 0
    assert causal_lm.compute_baselines(rows, tokenizer.vocabulary_size(), n_grams=False) == found


@pytest.mark.long
def test_a_run_of_text_is_evaluated_on_prompts_of_any_columns(finished, tmp_path, command_line):
    folder, _ = finished
    lines = ["q,a", *(f"the loss of {n},a step" for n in range(90))]
    (tmp_path / "pairs.csv").write_text("\n".join(lines) + "\n")
    words = (folder, "--dataset", tmp_path / "pairs.csv")
    status, _, err = command_line(evaluate, *words)
    assert status == 2 and "q" in err
    named = ("--prompt-column", "q", "--response-column", "a", "--json")
    status, out, err = command_line(evaluate, *words, *named)
    assert (status, err) == (0, "")
    notes = json.loads(out)["notes"]
    assert f"{tmp_path / 'pairs.csv'}: prompts and responses, and the run learned text" in notes
    with pytest.raises(DataError, match="expected a list of inputs"):
        causal_lm.predict(load_run(folder), "the loss")
    assert causal_lm.predict(load_run(folder), []) == []


@pytest.mark.long
def test_a_llama_on_prompts_learns_the_responses_alone(tmp_path, command_line):
    pairs = [(f"{n} is", "even" if n % 2 == 0 else "odd") for n in range(400)]
    lines = [json.dumps({"prompt": prompt, "response": answer}) for prompt, answer in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    options = causal_lm.Options(
        **(TINY | dict(dropout=0.0, vocabulary_size=270, epochs=40, max_steps=150)),
        architecture="llama",
        dataset=str(tmp_path / "pairs.jsonl"),
        template="{prompt} {response}",
        run_dir=tmp_path / "run",
    )
    results = causal_lm.main(options)
    # Half of the answers are "even": the last digit decides, which the prompt's loss would not pay.
    assert results["test"]["accuracy"] > 0.95 > results["baseline"]["most_frequent_accuracy"]
    assert results["test"].keys() == {"cross_entropy", "accuracy", "perplexity"}
    status, _, err = command_line(predict, tmp_path / "run", "1234 is even", "--score")
    assert status == 2 and "--score: the run learned responses to prompts; recipes.evaluate" in err
    inputs = ("1234 is", "77 is", "--temperature", 0)
    status, out, err = command_line(predict, tmp_path / "run", *inputs)
    assert (status, err) == (0, "") and out == "1234 is\n  even\n77 is\n  odd\n"
    status, out, _ = command_line(evaluate, tmp_path / "run", "--json")
    assert json.loads(out)["test"] == pytest.approx(results["test"])
    (tmp_path / "a.txt").write_text("".join(f"{n} is even\n" for n in range(0, 400, 2)))
    text = evaluate.main(
        evaluate.Options(run_dir=tmp_path / "run", dataset=str(tmp_path / "a.txt"))
    )
    assert f"{tmp_path / 'a.txt'}: text, and the run learned prompts and responses" in text["notes"]
    # A file of the form of chats.
    turns = [{"role": "user", "content": "1234 is"}]
    lines = [{"messages": turns}, {"messages": [*turns, {"role": "assistant", "content": "even"}]}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    file = ("--file", tmp_path / "chats.jsonl", "--text-column", "messages", "--json")
    status, out, err = command_line(predict, tmp_path / "run", *file, "--temperature", 0)
    answers = [answer for (answer,) in json.loads(out)]
    assert status == 2 and "leave out the assistant's last message" in answers[1]["error"]


def tuned_on_pairs(folder, **options):
    """Returns the results of a run in `folder` of its preset `tiny_instruct` on `pairs.jsonl`."""
    options |= dict(strategy="none", epochs=40, global_batch_size=8, base_learning_rate=0.02)
    return causal_lm.main(
        causal_lm.Options(
            preset=str(folder / "tiny_instruct"),
            dataset=str(folder / "pairs.jsonl"),
            jit="off",
            quiet=True,
            run_dir=folder / "run",
            **options,
        )
    )


@pytest.mark.long
def test_a_chat_is_learned_and_answered_in_its_turns(tmp_path, command_line):
    """The answer ends with its turn, whose token ends no text; it is not printed."""
    chat_presets.make_task().save_to_preset(str(tmp_path / "tiny_instruct"))
    names = ["even", "odd"]
    lines = []
    for n in range(400):
        turns = [("user", f"{n} is"), ("assistant", names[n % 2])]
        if n % 3 == 0:
            turns = [("system", "Say it."), *turns, ("user", f"{n + 1} is")]
            turns.append(("assistant", names[(n + 1) % 2]))
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    results = tuned_on_pairs(tmp_path, sequence_length=96, max_steps=200)
    assert results["test"]["accuracy"] > 0.95
    assert any("template: the turns of chatml" in line for line in results["notes"])
    status, _, err = command_line(predict, tmp_path / "run", "1234 is even", "--score")
    assert status == 2 and "--score: the run learned responses to prompts; recipes.evaluate" in err
    inputs = ("1234 is", "77 is", "--temperature", 0)
    status, out, err = command_line(predict, tmp_path / "run", *inputs)
    assert (status, err) == (0, "") and out == "1234 is\n  even\n77 is\n  odd\n"
    turns = [("system", "Say it."), ("user", "4 is"), ("assistant", "even"), ("user", "77 is")]
    chat = json.dumps([{"role": role, "content": content} for role, content in turns])
    asked = ("--temperature", 0, "--json")
    status, out, err = command_line(predict, tmp_path / "run", chat, *asked)
    assert (status, err) == (0, "") and json.loads(out) == [[{"text": "odd"}]]
    (tmp_path / "chats.jsonl").write_text(f'{{"messages": {chat}}}\n')
    file = ("--file", tmp_path / "chats.jsonl", "--text-column", "messages")
    status, out, err = command_line(predict, tmp_path / "run", *file, *asked)
    assert (status, err) == (0, "") and json.loads(out) == [[{"text": "odd"}]]
    status, _, err = command_line(predict, tmp_path / "run", "5<|im_end|>")
    assert (status, err.count("\n")) == (2, 1)
    assert "<|im_end|> is a special token of the template" in err
    status, out, _ = command_line(evaluate, tmp_path / "run", "--json")
    assert json.loads(out)["test"] == pytest.approx(results["test"])


@pytest.mark.long
def test_ids_may_leave_gaps(tmp_path, command_line):
    """KerasHub leaves out reserved tokens of Llama 3, before the one that ends a turn."""
    chat_presets.make_task("Llama3", gap=3).save_to_preset(str(tmp_path / "tiny_instruct"))
    lines = [json.dumps({"prompt": f"{n}", "response": "two"}) for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    results = tuned_on_pairs(tmp_path, sequence_length=48, max_steps=40)
    assert results["test"]["accuracy"] == 1.0
    status, out, err = command_line(predict, tmp_path / "run", "1234", "--temperature", 0)
    assert (status, err, out) == (0, "", "1234\n  two\n")


def test_baselines_by_hand():
    """Counts of the training rows, measured on the test rows; what is not predicted is left out."""
    ends = next_tokens.Ends(3, 3)
    known, asked = (
        next_tokens.Rows(np.array(rows, np.int32), ends, True)
        for rows in ([[3, 0, 0, 1, 3]], [[3, 1, 3, 3, 3], [3, 0, 3, 3, 3]])
    )
    found = causal_lm.compute_baselines({"train": known, "test": asked}, 4)
    share = np.array([2.1, 1.1, 0.1, 1.1]) / 4.4
    # The test rows predict 1 and 0 once, and the end twice.
    expected = -np.log(share[[1, 3, 0, 3]]).mean()
    assert found["unigram_cross_entropy"] == pytest.approx(expected)
    assert found["most_frequent_accuracy"] == 0.25
    learned = KneserNey(known.tokens, 4, separator=3).log_probabilities(asked.tokens)
    expected = -np.mean([learned[0, 0], learned[0, 1], learned[1, 0], learned[1, 1]])
    assert found["kneser_ney_cross_entropy"] == pytest.approx(expected)


@pytest.mark.parametrize("context", ["document", "row"])
def test_a_token_reads_its_document_or_its_row(context, finished, tiny_text, tmp_path):
    """Another token in a document changes what is predicted in the next one, or does not."""
    data = load_text(str(tiny_text), tmp_path)
    task = load_run(finished[0]).load_model()
    options = causal_lm.Options(**TINY, context=context)
    rows = causal_lm.make_rows(options, data, task.preprocessor.tokenizer, True, tmp_path)
    inputs, _, _ = rows["test"].make_batch()(np.arange(len(rows["test"])), 0)
    ids, mask = (np.array(inputs[name]) for name in ("token_ids", "padding_mask"))
    start = task.preprocessor.tokenizer.start_token_id
    row, place = next(found for found in np.argwhere(ids == start) if 2 < found[1] < 14)
    model, answers = decoders.learner(task).hidden, []
    for token in (0, 1):
        ids[row, place - 1] = token
        answers.append(np.asarray(model({"token_ids": ids, "padding_mask": mask}))[row, place:])
    assert np.array_equal(*answers) == (context == "document")


def test_prompts_do_not_follow_one_another(tmp_path, command_line):
    lines = [json.dumps({"prompt": f"{n} is", "response": "a number"}) for n in range(100)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    status, _, err = command_line(
        *(causal_lm, "--dataset", tmp_path / "pairs.jsonl", "--context", "row"),
        *("--run-dir", tmp_path / "run"),
    )
    assert status == 2 and "--context row: prompts do not follow one another" in err


def test_a_tokenizer_larger_than_its_model_is_refused(tiny_text, tmp_path, command_line):
    """On a GPU it would train without an error."""
    task = causal_presets.make_task("GPT2", vocabulary_size=280)
    task.save_to_preset(str(tmp_path / "preset"))
    asked = ("--dataset", tiny_text, "--preset", tmp_path / "preset", "--run-dir", tmp_path / "run")
    status, _, err = command_line(causal_lm, *asked, "--sequence-length", 16, "--strategy", "none")
    assert (status, err.count("\n")) == (2, 1) and "its model 280 embeddings" in err


def test_a_template_for_text_is_refused(tmp_path, command_line):
    (tmp_path / "a.txt").write_text("\n".join(f"line {n}" for n in range(200)))
    words = ("--dataset", tmp_path / "a.txt", "--template", "{prompt} {response}")
    status, _, err = command_line(causal_lm, *words, "--run-dir", tmp_path / "run")
    assert status == 2 and "a.txt is text; prompts and responses are a JSONL" in err


def test_options_that_do_not_go_together_are_named():
    found = all_problems(
        causal_lm.Options(preset="gpt2_base_en", hidden_dim=64, architecture="gpt2", template="x")
    )
    assert found == [
        "--architecture: leave it out, the preset gpt2_base_en has its own",
        "--hidden-dim: leave it out, the preset gpt2_base_en has its own",
        "--template 'x': must be auto, chat, or have {prompt} and then {response}, each once",
    ]
    assert all_problems(causal_lm.Options(architecture="llama", hidden_dim=6, num_heads=2)) == [
        "--hidden-dim 6: llama's heads need an even width, not 3"
    ]
    assert all_problems(causal_lm.Options(layer_decay=0.9)) == [
        "--layer-decay: a new model trains with Muon, which has one learning rate; pass "
        "--optimizer adamw"
    ]
    assert not all_problems(causal_lm.Options(layer_decay=0.9, optimizer="adamw"))
    assert not all_problems(causal_lm.Options(preset="gpt2_base_en", layer_decay=0.9))
    assert not all_problems(causal_lm.Options(preset="gpt2_base_en", lora_rank=8))
    assert all_problems(causal_lm.Options(vocabulary_size=200)) == [
        "--vocabulary-size 200: must be in [264, 1e6]"
    ]


@pytest.mark.long
def test_prompts_that_are_trained_on_and_tested_are_noted(tmp_path):
    lines = [json.dumps({"prompt": f"{n} is", "response": "a number"}) for n in range(40)]
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    options = causal_lm.Options(
        **(TINY | dict(vocabulary_size=264, max_steps=1)),
        dataset=str(folder),
        run_dir=tmp_path / "run",
    )
    notes = causal_lm.main(options)["notes"]
    assert any("40 of 40 test prompts are in training too, with the same" in line for line in notes)
