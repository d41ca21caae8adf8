"""Tests `recipes.seq2seq`: training, answers, evaluation, and what it refuses."""

import csv
import dataclasses
import functools
import itertools
import json
import re
import types

import keras
import keras_nlp
import numpy as np
import pytest
import tensorflow as tf

from data import batches, pairs, prompts, summaries, tables
from data.errors import DataError
from models import decoders, encoder_decoders, samplers
from recipes import evaluate, export, predict, seq2seq
from tests.support import plain_keras, seq2seq_presets, strategy_run
from training import numerics
from training.errors import OptionsError
from training.loaded_run import load_run

WORDS = "zero one two three four five six seven eight nine".split()
TINY = strategy_run.TINY_ANSWERS | dict(strategy="none", precision="float32", max_steps=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    strategy_run.write_pairs(path, 400)
    return path


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """The options and the results of a tiny run."""
    folder = tmp_path_factory.mktemp("runs")
    options = seq2seq.Options(
        **TINY, dataset=str(data), run_dir=folder / "run", cache_dir=folder / "cache"
    )
    return options, seq2seq.main(options)


def test_a_run_reports_tokens_and_answers(run):
    _, results = run
    assert set(results["test"]) == {
        *("cross_entropy", "accuracy", "perplexity"),
        *("exact_match", "rouge1", "rouge2", "rougeL"),  # no BLEU: the responses have two words
    }
    assert set(results["baseline"]) == {
        *("unigram_cross_entropy", "most_frequent_accuracy", "copied_rougeL")
    }
    assert results["answered_examples"] == 3 and results["steps"] == 4
    assert results["test"]["cross_entropy"] < 6  # 300 tokens by chance: 5.7


def test_a_run_is_evaluated_and_answers(run, tmp_path):
    options, results = run
    found = evaluate.main(
        evaluate.Options(
            run_dir=options.run_dir,
            cache_dir=options.cache_dir,
            examples=tmp_path / "examples.csv",
        )
    )
    assert found["test"] == pytest.approx(results["test"], rel=1e-5)
    with open(tmp_path / "examples.csv", encoding="utf-8-sig") as file:
        header, *rows = csv.reader(file)
    assert header == ["prompt", "response", "answer", "is_equal"] and len(rows) > 3  # all
    rows = rows[:3]
    asked = [row[0] for row in rows]
    answers = predict.main(predict.Options(run_dir=options.run_dir, inputs=tuple(asked)))
    assert [answer[0]["text"] for answer in answers] == [row[2] for row in rows]
    # The answer to a prompt does not depend on the others, also where tokens are drawn.
    trained = load_run(options.run_dir)
    drawn = seq2seq.predict(trained, asked, temperature=2.0, seed=1)
    assert seq2seq.predict(trained, asked[1:2], temperature=2.0, seed=1) == drawn[1:2]
    assert seq2seq.predict(trained, []) == []
    with pytest.raises(DataError, match="expected a list of inputs"):
        seq2seq.predict(trained, "one")
    assert seq2seq.predict(trained, asked, temperature=2.0, seed=2) != drawn
    for wrong in (("a", ""), "a"):
        with pytest.raises(OptionsError, match="--stop .*: expected texts, none of them empty"):
            seq2seq.predict(trained, asked, stop=wrong)
    # Other prompts have other draws, also where all tokens are about as likely.
    drawn = seq2seq.predict(trained, asked, temperature=1e3, top_k=0)
    assert len({answer[0]["text"] for answer in drawn}) == len(asked)


@pytest.mark.long
def test_several_answers_are_drawn_and_their_table_continues(
    run, tmp_path, command_line, monkeypatch
):
    options, _ = run
    asked = ["the sum of one and two is 21", "the sum of two and one is 12", "one"]
    path, table = tmp_path / "asked.txt", tmp_path / "answers.csv"
    path.write_text("\n".join(asked))
    words = (options.run_dir, "--file", path, "--temperature", 2.0, "--seed", 1)
    status, out, err = command_line(predict, *words, "--json")
    alone = json.loads(out)
    status, out, err = command_line(predict, *words, "--num-samples", 3, "--json")
    assert (status, err) == (0, "")
    drawn = json.loads(out)
    assert [answers[:1] for answers in drawn] == alone
    assert all(len({answer["text"] for answer in answers}) == 3 for answers in drawn)
    # A column per sample; a table that is not complete is continued.
    parts = []
    stock = seq2seq.predict
    monkeypatch.setattr(predict, "AT_ONCE", 7)

    @functools.wraps(stock)  # its options
    def seen(run, inputs, **more):
        parts.append(inputs)
        return stock(run, inputs, **more)

    monkeypatch.setattr(seq2seq, "predict", seen)
    words = (*words, "--num-samples", 3, "--csv", table)
    assert command_line(predict, *words)[0] == 0
    assert parts == [asked[:2], asked[2:]]  # two inputs make six answers
    header, rows = tables.read_rows(table)
    assert header == ["input", "text", "text_2", "text_3"]
    expected = [[each["text"].strip() for each in answers] for answers in drawn]
    assert [[cell.strip() for cell in row[1:]] for row in rows] == expected
    whole = table.read_bytes()
    tables.write_csv(table, [header, *rows[:1]])
    status, out, err = command_line(predict, *words)
    assert (status, err) == (0, "") and "has 1 of 3 rows, the others follow" in out
    assert table.read_bytes() == whole
    tables.write_csv(table, [header, *rows[:1]])
    status, _, err = command_line(predict, *words, "--num-samples", 2)
    assert status == 2 and "has other answers to row 1 than this run with these options" in err


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(), "--temperature 0.0 takes the most likely token; pass a higher one, such as 0.8"),
        (dict(num_beams=4), "--num-beams 4: finds a single answer; leave it out to draw --num-sam"),
    ],
)
def test_several_answers_without_draws_are_refused(run, settings, expected):
    options, _ = run
    with pytest.raises(OptionsError, match=f"^.*{re.escape(expected)}.*$"):  # in one line
        seq2seq.predict(load_run(options.run_dir), ["one"], num_samples=2, **settings)


@pytest.mark.long
@pytest.mark.parametrize("family", seq2seq_presets.FAMILIES)
def test_the_saved_model_of_a_family_answers_without_this_package(family, data, tmp_path):
    seq2seq_presets.make_task(family).save_to_preset(str(tmp_path / "preset"))
    options = seq2seq.Options(
        **LENGTHS,
        strategy="none",
        max_steps=1,
        base_learning_rate=1e-6,
        answered_examples=1,
        dataset=str(data),
        preset=str(tmp_path / "preset"),
        run_dir=tmp_path / "run",
        quiet=True,
    )
    seq2seq.main(options)
    asked = [prompt for prompt, _ in prompts.load_prompts(str(data)).splits["test"][:6]]
    answers = seq2seq.predict(load_run(options.run_dir), asked)
    task = keras_nlp.models.Seq2SeqLM.from_preset(str(options.run_dir / "model"), dtype="float32")
    task.compile(sampler="greedy", jit_compile=False)
    assert list(task.generate(asked)) == [answer[0]["text"] for answer in answers]


def test_the_saved_model_answers_without_this_package(run):
    options, _ = run
    asked = ["the sum of one and two is 21"]
    (answer,) = seq2seq.predict(load_run(options.run_dir), asked)
    task = keras_nlp.models.Seq2SeqLM.from_preset(str(options.run_dir / "model"), dtype="float32")
    task.compile(sampler="greedy", jit_compile=False)
    assert list(task.generate(asked)) == [answer[0]["text"]]


@pytest.mark.long
def test_it_answers_up_to_a_stop_string(run, command_line):
    options, _ = run
    asked = ("the sum of one and two is 21", "--temperature", 2.0, "--json")
    _, out, _ = command_line(predict, options.run_dir, *asked)
    ((answer,),) = json.loads(out)
    stop = answer["text"][1:3]
    status, out, err = command_line(predict, options.run_dir, *asked, "--stop", "never", stop)
    assert (status, err) == (0, "")
    assert json.loads(out) == [[{"text": answer["text"].partition(stop)[0]}]] != [[answer]]


@pytest.mark.long
def test_label_smoothing_is_in_the_losses_alone(run):
    options, plain = run
    smoothed = dataclasses.replace(
        options, label_smoothing=0.5, answered_examples=0, run_dir=options.run_dir.parent / "smooth"
    )
    results = seq2seq.main(smoothed)
    for split in ("", "val_"):
        plain_gap, gap = (
            found["history"][f"{split}loss"][-1] - found["history"][f"{split}cross_entropy"][-1]
            for found in (plain, results)
        )
        # A trained model is farther from the even distribution than from the responses.
        assert abs(plain_gap) < 0.05 < gap


@pytest.mark.long
def test_it_is_exported_as_a_saved_model_alone(run, tmp_path):
    options, _ = run
    export.main(export.Options(run_dir=options.run_dir, folder=tmp_path / "out", to="saved_model"))
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    inputs = loaded.signatures["serving_default"].structured_input_signature[1]
    assert set(inputs) == {
        f"{part}_{name}"
        for part in ("encoder", "decoder")
        for name in ("token_ids", "padding_mask")
    }
    with pytest.raises(OptionsError, match="KerasHub does not write BartSeq2SeqLM"):
        export.main(
            export.Options(run_dir=options.run_dir, folder=tmp_path / "other", to="huggingface")
        )


@pytest.mark.long
def test_a_file_of_prompts_is_read_as_in_training(run, tmp_path, capsys):
    options, _ = run
    rows = [{"instruction": "the sum of one", "input": "and two is"}, {"instruction": "the sum"}]
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(json.dumps(row | {"title": "one"}) for row in rows))

    def asked(column):
        predict.main(predict.Options(run_dir=options.run_dir, file=path, text_column=column))
        return capsys.readouterr().out

    assert asked("instruction").startswith("the sum of one\n\nand two is\n  ")
    assert asked("title").startswith("one\n  ")  # another table


@pytest.mark.long
def test_a_prefix_comes_before_each_prompt(run, data):
    options, _ = run
    whole = dataclasses.replace(options, prefix="add: ", run_dir=options.run_dir.parent / "prefix")
    seq2seq.main(whole)
    trained = load_run(whole.run_dir)
    asked = "the sum of one and two is 21"
    (answer,) = seq2seq.predict(trained, [asked])
    task = trained.load_model("float32")
    sampler = samplers.Sampler(temperature=0)
    texts = [f"add: {asked}", asked]
    ours, plain = encoder_decoders.generate(task, task.preprocessor, texts, sampler)
    assert answer == [{"text": ours}]
    mask = pairs.encode([(asked, "")], task.preprocessor, "add: ")["encoder_padding_mask"]
    assert mask.sum() > pairs.encode([(asked, "")], task.preprocessor)["encoder_padding_mask"].sum()
    card = (whole.run_dir / "model" / "README.md").read_text()
    assert 'text = model.generate("add: the sum of ' in card  # of the data, not of the options


@pytest.mark.long
def test_without_a_dataset_it_learns_what_functions_do(run, tmp_path, monkeypatch):
    options, _ = run
    known = {
        split: [(f"f{n}(x)", f"Returns {n} of x.") for n in range(9)]
        for split in ("train", "valid", "test")
    }
    monkeypatch.setattr(
        summaries, "load_summaries", lambda cache_dir: prompts.Prompts(summaries.NAME, known)
    )
    options = dataclasses.replace(options, dataset="auto", run_dir=tmp_path / "run", max_steps=1)
    results = seq2seq.main(options)
    assert results["dataset"] == "installed-docs"
    (tmp_path / "own.csv").write_text("prompt,response\nf(x),Returns x.\n")
    asked = dict(test_file=tmp_path / "own.csv", cache_dir=options.cache_dir)
    found = evaluate.main(evaluate.Options(run_dir=options.run_dir, **asked))
    assert found["answered_examples"] == 1


@pytest.mark.parametrize(
    "changes, problem",
    [
        (dict(preset="bart_base_en", num_layers=3), "--num-layers: leave it out"),
        (dict(freeze_backbone=True, preset="x"), "--freeze-backbone: leaves nothing to train"),
        (dict(lora_rank=2), "--lora-rank: needs a trained model"),
        (dict(lora_alpha=2.0), "--lora-alpha: scales adapters; pass --lora-rank, too"),
        (
            dict(lora_layers="all_linear"),
            "--lora-layers: chooses the layers that get adapters; pass --lora-rank",
        ),
        (dict(no_repeat_ngram_size=1), "--no-repeat-ngram-size 1: must be 0 or at least 2"),
        (dict(preset="auto"), "--preset auto: pass scratch"),
    ],
)
def test_options_that_do_not_work_together(changes, problem):
    assert any(problem in line for line in seq2seq.Options(**changes).problems())


def test_values_of_sampling_are_checked(run):
    options, _ = run
    trained = load_run(options.run_dir)
    with pytest.raises(OptionsError, match=r"--temperature -1: .*\n--top-p 0: "):
        seq2seq.predict(trained, ["a"], temperature=-1, top_p=0)
    with pytest.raises(OptionsError, match=r"--num-beams 101: must be in \[0, 100\]"):
        seq2seq.predict(trained, ["a"], num_beams=101)
    with pytest.raises(OptionsError, match="--num-beams 2: searches; leave out --temperature"):
        seq2seq.predict(trained, ["a"], num_beams=2, temperature=0.5)
    for ignored, said in ((dict(top_k=5), "--top-k 5"), (dict(top_p=0.9), "--top-p 0.9")):
        with pytest.raises(OptionsError, match=f"^{said}: needs a --temperature to draw with"):
            seq2seq.predict(trained, ["a"], **ignored)
        with pytest.raises(
            OptionsError, match=f"^{said}: leave it out; --num-beams 2 draws no tok"
        ):
            seq2seq.predict(trained, ["a"], num_beams=2, **ignored)
        assert seq2seq.predict(trained, ["a"], temperature=0.8, **ignored)


@pytest.mark.parametrize("num_beams", [0, 3])
def test_an_answer_repeats_no_n_gram(num_beams):
    """With the run's number, unless another one is passed."""
    task = seq2seq_presets.make_task("Bart")
    options = seq2seq.Options(no_repeat_ngram_size=2)
    run = types.SimpleNamespace(options=options, load_model=lambda dtype: task)
    rows, stock = [], task.preprocessor.generate_postprocess

    def seen(outputs):
        ids, mask = (np.array(outputs[f"decoder_{name}"]) for name in ("token_ids", "padding_mask"))
        rows[:] = [row[kept.astype(bool)].tolist() for row, kept in zip(ids, mask, strict=True)]
        return stock(outputs)

    task.preprocessor.generate_postprocess = seen

    def repeats(**settings):
        """Tells whether an answer has a pair of neighbouring tokens twice."""
        asked = ["the loss of a step", "what is the capital of France? Paris is."]
        seq2seq.predict(run, asked, num_beams=num_beams, **settings)
        assert min(map(len, rows)) > 3
        return any(len(set(itertools.pairwise(row))) < len(row) - 1 for row in rows)

    assert repeats(no_repeat_ngram_size=0) and not repeats()
    with pytest.raises(OptionsError, match="--no-repeat-ngram-size 1: must be 0 or at least 2"):
        seq2seq.predict(run, ["a"], no_repeat_ngram_size=1)


@pytest.mark.parametrize(
    "name, problem",
    [
        ("gone.csv", "no such file or folder; expected a JSONL"),
        ("notes.txt", "no files of prompts and responses; expected"),
        ("other.csv", "no column prompt .*--response-column name others$"),
    ],
)
def test_data_without_prompts_are_named(name, problem, tmp_path):
    (tmp_path / "notes.txt").write_text("a\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    options = seq2seq.Options(
        dataset=str(tmp_path / name), run_dir=tmp_path / "run", strategy="none", quiet=True
    )
    with pytest.raises(DataError, match=problem):
        seq2seq.main(options)


def test_a_preset_of_another_task_is_refused(tmp_path):
    from tests.support import causal_presets

    causal_presets.make_task("GPT2").save_to_preset(str(tmp_path / "preset"))
    with pytest.raises(DataError, match="GPT2 has no Seq2SeqLM in KerasNLP.*Bart"):
        encoder_decoders.load_preprocessor(str(tmp_path / "preset"), 8, 8)


def test_the_length_that_is_too_long_is_named(tmp_path):
    seq2seq_presets.make_task("Bart").save_to_preset(str(tmp_path / "preset"))
    for lengths, option in (((8, 99), "--response-length 99"), ((99, 8), "--sequence-length 99")):
        with pytest.raises(DataError, match=f"{option}: the preset .* takes at most 64 tokens"):
            encoder_decoders.load_task(str(tmp_path / "preset"), None, *lengths)


def test_t5_needs_a_wider_float16(tmp_path):
    seq2seq_presets.make_task("T5").save_to_preset(str(tmp_path / "preset"))
    with (
        numerics.precision("mixed_float16"),
        pytest.raises(DataError, match="T5 fails in mixed_fl"),
    ):
        encoder_decoders.load_preprocessor(str(tmp_path / "preset"), 8, 8)


LENGTHS = dict(sequence_length=24, response_length=8)


@pytest.mark.long
@pytest.mark.parametrize("family", seq2seq_presets.FAMILIES)
def test_a_family_trains_as_in_plain_kerasnlp(family, data, tmp_path):
    """The same examples by KerasNLP's own `fit()`; then its own `generate()`."""
    preset = str(tmp_path / "preset")
    seq2seq_presets.make_task(family).save_to_preset(preset)
    common = plain_keras.COMMON | dict(epochs=20, global_batch_size=4, precision="float64")
    common |= dict(group_by_length="off")
    options = seq2seq.Options(
        **common | LENGTHS, dataset=str(data), preset=preset, run_dir=tmp_path / "run"
    )
    seq2seq.main(options)
    models = keras_nlp.models
    with numerics.precision("float64"):
        task = models.Seq2SeqLM.from_preset(preset, dtype="float64")
        task.preprocessor.encoder_sequence_length = options.sequence_length
        task.preprocessor.decoder_sequence_length = options.response_length
        first = task.get_weights()
        plain_keras.compile_plainly(task)
        known = prompts.load_prompts(str(data)).splits["train"]
        for indices in batches.training_batches(len(known), 4, 0, lambda i, e: i).take(
            plain_keras.STEPS
        ):
            some = [known[index] for index in indices]
            x, y, weights = task.preprocessor(
                {"encoder_text": [p for p, _ in some], "decoder_text": [r for _, r in some]}
            )
            if family == "T5Gemma":  # prompts as its own generate() encodes them
                begun = task.preprocessor.generate_preprocess(
                    {"encoder_text": [p for p, _ in some], "decoder_text": [r for _, r in some]}
                )
                x |= {name: begun[name] for name in x if name.startswith("encoder")}
            weights = np.asarray(weights, float)
            if family == "Bart":
                weights[:, 0] = 0  # its responses all begin with the same token
            # The loss of a run is that of what is predicted.
            weights *= weights.size / weights.sum()
            named = dict(sample_weight=weights, batch_size=len(some), shuffle=False, verbose=0)
            keras.Model.fit(task, x, y, **named)
    ours, theirs = load_run(options.run_dir).load_model("float64").get_weights(), task.get_weights()
    moved, apart = (
        np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(ours, others, strict=True)))
        for others in (first, theirs)
    )
    print(f"{family}: {apart / moved:.1e} of the distance moved")
    assert moved > 0.1 and apart < 1e-5 * moved


@pytest.mark.long
@pytest.mark.parametrize("num_beams", [0, 3])
@pytest.mark.parametrize("family", seq2seq_presets.FAMILIES)
def test_an_answer_ends_before_a_stop_string(family, num_beams, monkeypatch):
    """A search compares whole answers, so that it finds the one that it finds without."""
    task = seq2seq_presets.make_task(family)
    tokenizer = task.preprocessor.tokenizer
    stock = decoders.stop_tokens(tokenizer)
    texts = {tokenizer.detokenize([token]): token for token in range(tokenizer.vocabulary_size())}
    words = [text for text in texts if decoders.stop_tokens(tokenizer, [text]) > stock]
    words = [text for text in words if text.isprintable() and text not in tokenizer.special_tokens]
    words = words[-6:]  # the model writes these alone, so that answers have some of them
    ids = np.sort([*stock, *(texts[text] for text in words)])
    monkeypatch.setattr(encoder_decoders.word_pieces, "ids_of", lambda tokenizer: ids)
    sampler = samplers.BeamSearch(num_beams) if num_beams else samplers.Sampler(3.0, seed=1)

    def answers(stop):
        asked = ["the loss of a step", "what is the capital of France? Paris is."]
        return encoder_decoders.generate(task, task.preprocessor, asked, sampler, stop)

    whole = answers(())
    for stop in ([words[0]], words[1:2], words[2:], [text[1:4] or "x" for text in whole]):
        assert answers(stop) == [decoders.before_stop(text, stop) for text in whole]


@pytest.mark.long
@pytest.mark.parametrize("num_beams", [0, 1, 3])
@pytest.mark.parametrize("family", seq2seq_presets.FAMILIES)
def test_the_likeliest_answers_are_those_of_whole_passes(family, num_beams):
    """With the cache tokens have the same probabilities as in training; 0 is for no search."""
    task = seq2seq_presets.make_task(family)
    preprocessor, stop = task.preprocessor, task.preprocessor.tokenizer.end_token_id
    preprocessor.decoder_sequence_length = 10
    asked = ["the loss of a step", "what is the capital of France? Paris is."]
    sampler = samplers.BeamSearch(num_beams) if num_beams else samplers.Sampler(temperature=0)
    answers = encoder_decoders.generate(task, preprocessor, asked, sampler)
    alone = [encoder_decoders.generate(task, preprocessor, [text], sampler)[0] for text in asked]
    assert answers == alone
    texts = {"encoder_text": asked, "decoder_text": ["", ""]}
    inputs, _, _ = preprocessor(texts)
    begun = preprocessor.generate_preprocess(texts)
    inputs |= {name: begun[name] for name in inputs if name.startswith("encoder")}
    first = int(np.sum(begun["decoder_padding_mask"][0]))
    length = begun["decoder_token_ids"].shape[1]
    is_token = np.isin(np.arange(task.backbone.vocabulary_size), sampler.ids)

    def log_probabilities(row: int, beginnings: list[list[int]]) -> np.ndarray:
        """Those of the tokens after each beginning, of shape (beginnings, tokens)."""
        place = len(beginnings[0])
        ids = np.zeros((len(beginnings), length), int)
        ids[:, :place] = beginnings
        given = {name: np.repeat(rows[row : row + 1], len(ids), 0) for name, rows in inputs.items()}
        given |= {
            "decoder_token_ids": ids,
            "decoder_padding_mask": np.broadcast_to(np.arange(length) < place, ids.shape),
        }
        logits = task(keras.tree.map_structure(keras.ops.convert_to_tensor, given))
        logits = np.where(is_token, np.array(logits)[:, place - 1], -np.inf)
        return np.array(keras.ops.log_softmax(logits))

    for row, answer in enumerate(answers):
        start = [int(token) for token in begun["decoder_token_ids"][row][:first]]
        kept = [(0.0, start)]
        while any(stop not in ids[first:] for _, ids in kept) and len(kept[0][1]) < length:
            after = log_probabilities(row, [ids for _, ids in kept])
            found = []
            for (total, ids), more in zip(kept, after, strict=True):
                if stop in ids[first:]:
                    found.append((total, [*ids, stop]))
                else:
                    found += [(total + more[token], [*ids, token]) for token in range(len(more))]
            kept = sorted(found, reverse=True)[: max(num_beams, 1)]

        def score(total: float, ids: list[int]) -> float:
            ended = [*ids[first:], stop].index(stop) + 1  # tokens, the end included
            return total / min(ended, length - first)

        _, best = max(kept, key=lambda each: score(*each))
        ended = [*best[first:], stop].index(stop) + first
        expected = preprocessor.generate_postprocess(
            {
                "decoder_token_ids": np.array([best]),
                "decoder_padding_mask": np.arange(len(best))[None] <= ended,
            }
        )
        assert answer == str(expected[0])


@pytest.mark.long
def test_it_learns_to_answer(tmp_path):
    """Digits of words: each prompt of the test is new."""
    rows = [
        {"prompt": f"{a} {b} {c}", "response": f"{c} {b} {a}"}
        for a in WORDS
        for b in WORDS
        for c in WORDS
    ]
    (tmp_path / "turned.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = seq2seq.Options(
        dataset=str(tmp_path / "turned.jsonl"),
        vocabulary_size=300,
        hidden_dim=64,
        num_layers=1,
        sequence_length=20,
        response_length=20,
        epochs=40,
        strategy="none",
        quiet=True,
        run_dir=tmp_path / "run",
    )
    assert seq2seq.main(options)["test"]["exact_match"] > 0.9
