import json
import os
import shutil
import signal

import keras
import numpy as np
import pytest

from callbacks.errors import Stopped
from callbacks.stopping import StopAtStep
from data import word_pieces
from data.errors import DataError
from data.files import default_cache_dir
from data.kneser_ney import KneserNey
from data.sequences import sequences_once
from data.text import load_text
from models import bert
from recipes import causal_lm, evaluate, predict
from training.loaded_run import load_run

SEP = 3
TINY = dict(
    strategy="none",
    vocabulary_size=120,
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


def model_and_batch(dropout=0.0):
    keras.utils.set_random_seed(0)
    options = causal_lm.Options(**(TINY | dict(dropout=dropout)))
    ids = np.random.default_rng(0).integers(5, 50, (3, 12)).astype(np.int32)
    ids[:, 0], ids[:2, 5] = 2, SEP  # the last one has one document
    return causal_lm.build_model(options, 50, SEP), ids


def test_a_token_sees_what_is_before_it_in_its_document_alone():
    model, ids = model_and_batch()
    logits = np.array(model(ids, training=False))
    for place, seen_by in ((2, [[2, 3, 4], range(2, 12)]), (8, [range(8, 12), range(8, 12)])):
        changed = ids.copy()
        changed[:, place] += 1
        moved = np.abs(np.array(model(changed, training=False)) - logits).max(axis=-1) > 1e-7
        for row, places in zip((0, 2), seen_by, strict=True):
            assert np.flatnonzero(moved[row]).tolist() == list(places)


def test_chunks_train_as_the_whole_logits_do():
    logs = []
    for wrap in (causal_lm.in_chunks, lambda model: model):
        model, ids = model_and_batch(dropout=0.3)
        learner = wrap(model)
        learner.compile(
            optimizer=keras.optimizers.SGD(0.5),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")],
        )
        labels, weights = np.roll(ids, -1, axis=1), np.ones(ids.shape, "float32")
        logs.append([learner.train_on_batch(ids, labels, weights) for _ in range(3)])
    np.testing.assert_allclose(*logs, rtol=1e-5)
    assert np.ptp([loss for loss, _ in logs[0]]) > 0.01


def test_labels_are_the_next_tokens():
    rows = np.arange(30, dtype=np.uint16).reshape(5, 6)
    x, y, weights = causal_lm.next_tokens(rows)(np.array([3, 1]), 0)
    assert x.numpy().tolist() == [[18, 19, 20, 21, 22], [6, 7, 8, 9, 10]]
    np.testing.assert_array_equal(y, x + 1)
    assert weights.shape == y.shape


def test_it_learns_and_reports_perplexity_by_token_and_by_byte(finished, tiny_text, tmp_path):
    folder, results = finished
    test = results["test"]
    baseline = results["baseline"]
    assert baseline["kneser_ney_cross_entropy"] < baseline["unigram_cross_entropy"]
    assert test["cross_entropy"] < baseline["unigram_cross_entropy"]
    lines = list(load_text(str(tiny_text), tmp_path).splits["test"])
    tokenizer = bert.tokenizer_of(load_run(folder).metadata["vocabulary"])
    tokens = sum(len(ids) + len(lengths) for ids, lengths in word_pieces.tokenize(lines, tokenizer))
    nats = test["cross_entropy"] * tokens / sum(len(f"{line}\n".encode()) for line in lines)
    assert test["perplexity_per_byte"] == pytest.approx(np.exp(nats))
    assert test["perplexity"] == pytest.approx(np.exp(test["cross_entropy"]))


def test_metrics_and_baselines_are_of_the_test_split(finished, tiny_text, tmp_path):
    """The saved model, evaluated by hand on each of the two splits; the n-grams likewise."""
    folder, results = finished
    run = load_run(folder)
    model, pieces = run.load_model(), run.metadata["vocabulary"]
    rows = sequences_once(
        load_text(str(tiny_text), tmp_path),
        bert.tokenizer_of(pieces),
        tmp_path,
        text_mode="packed",
        length=17,
    )
    found = {}
    for split in ("valid", "test"):
        shares = keras.ops.log_softmax(model(np.int32(rows[split][:, :-1]), training=False))
        labels = rows[split][:, 1:].astype(np.int32)
        found[split] = -np.take_along_axis(np.array(shares), labels[..., None], 2).mean()
    assert results["test"]["cross_entropy"] == pytest.approx(found["test"], rel=1e-4)
    assert abs(found["valid"] - found["test"]) > 1e-3
    assert results["baseline"] == causal_lm.baselines(rows, len(pieces), SEP)


def test_baselines_learn_from_training_and_predict_test():
    """Three splits of different tokens, so that no split can stand in for another one."""
    rng = np.random.default_rng(0)
    rows = {
        split: rng.choice(range(4, 9), (count, 7), p=shares).astype(np.uint16)
        for split, count, shares in (
            ("train", 30, (0.5, 0.2, 0.1, 0.1, 0.1)),
            ("valid", 9, (0.1, 0.1, 0.1, 0.2, 0.5)),
            ("test", 6, (0.1, 0.5, 0.2, 0.1, 0.1)),
        )
    }
    rows["train"][::3, 3] = rows["test"][::3, 2] = SEP
    found = causal_lm.baselines(rows, 10, SEP)
    train, test = rows["train"][:, 1:].ravel().tolist(), rows["test"][:, 1:].ravel().tolist()
    nats = [-np.log((train.count(token) + 0.1) / (len(train) + 10 * 0.1)) for token in test]
    assert found["unigram_cross_entropy"] == pytest.approx(np.mean(nats))
    assert found["most_frequent_accuracy"] == test.count(4) / len(test)
    assert train.count(4) > train.count(5) and test.count(4) < test.count(5)
    n_grams = KneserNey(rows["train"], 10, order=5, separator=SEP).log_probabilities(rows["test"])
    assert found["kneser_ney_cross_entropy"] == pytest.approx(-n_grams.mean())


def test_tokens_are_counted_per_byte_not_per_character():
    tokenizer = bert.tokenizer_of([*word_pieces.SPECIAL_TOKENS, "cafe", "no"])
    # Six bytes and five with their line ends; a piece and a [SEP] for each.
    assert causal_lm.count_tokens_per_byte(["café", "nono"], tokenizer) == 4 / 11
    assert causal_lm.count_tokens_per_byte(["no no"], tokenizer) == 3 / 6


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


def test_it_is_evaluated_and_continues_texts(finished, tmp_path, command_line):
    folder, results = finished
    moved = shutil.copytree(folder, tmp_path / "moved")
    status, out, err = command_line(evaluate, moved, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)["test"]
    assert {name: found[name] for name in results["test"]} == pytest.approx(results["test"])
    status, out, err = command_line(predict, moved, "the loss of", "a step")
    assert (status, err) == (0, "")
    first, loss, second, step = out.splitlines()
    assert (first, second) == ("the loss of", "a step")
    assert loss.strip().startswith("the loss of ") and step.strip().startswith("a step ")
    assert command_line(predict, moved, "the loss of", "a step")[1] == out
    status, _, err = command_line(predict, moved, "the " * 14)
    assert status == 2 and "16 tokens, the model takes 15" in err


def test_log_likelihoods_are_those_of_each_next_token(finished):
    run = load_run(finished[0])
    model, tokenizer = run.load_model(), bert.tokenizer_of(run.metadata["vocabulary"])
    text = "the loss of a step"
    ids, expected = [2, SEP], 0.0
    for piece in tokenizer(text).tolist():
        shares = keras.ops.softmax(model(np.array([ids]))[0, -1])
        expected += np.log(float(shares[piece]))
        ids.append(piece)
    other = "step a of loss the"
    found = causal_lm.log_likelihoods(run, [text, other])
    assert len(ids) > 5 and found[0] == pytest.approx(expected, rel=1e-5)
    assert found[0] > found[1]
    texts = [text, other]
    assert np.diff(causal_lm.n_gram_log_likelihoods(run, texts, default_cache_dir())) < 0
    with pytest.raises(DataError, match="19 tokens, the model takes 16"):
        causal_lm.log_likelihoods(run, ["the " * 17])
