import json
import types

import keras
import keras_nlp
import numpy as np
import pytest

from data import masked_lm
from data.errors import DataError, InputError
from data.kneser_ney import KneserNey
from data.text import load_text
from data.word_pieces import SPECIAL_TOKENS
from models import bert, presets
from recipes import bert_mlm
from tests.support import processes
from training.errors import OptionsError
from training.loaded_run import load_run

KEYS = """
recipe module dataset preset vocabulary_sha256 strategy replicas workers workers_by_step
global_batch_size learning_rate
precision seed steps epochs history test baseline notes device weights_of_step
examples_per_second tokens_per_second mfu peak_operations_per_second seconds
time_to_first_step resumed_from_step weights_sha256 versions git
""".split()


def to_numpy(value):
    return keras.ops.convert_to_numpy(value)


@pytest.fixture(scope="module")
def other_run(run_bert, tmp_path_factory):
    """One step with another seed, and a decay that can be seen."""
    return run_bert(tmp_path_factory.mktemp("other") / "run", seed=1, weight_decay=0.5, max_steps=1)


class TestResults:
    def test_all_keys_are_there(self, tiny_run):
        results = json.loads((tiny_run.folder / "results.json").read_text())
        assert sorted(results) == sorted(KEYS)
        assert results == json.loads(json.dumps(tiny_run.results))
        assert sorted(results["test"]) == ["accuracy", "cross_entropy", "perplexity"]
        assert sorted(results["baseline"]) == ["most_frequent_accuracy", "unigram_cross_entropy"]
        assert results["recipe"] == "bert_mlm"
        assert (results["steps"], results["epochs"]) == (40, 2)
        assert results["resumed_from_step"] is None

    @pytest.mark.long
    def test_it_learns(self, run_bert, tmp_path, monkeypatch):
        """From where Keras begins: 40 steps teach the words' shares, and no more than that."""
        monkeypatch.setattr(bert_mlm, "init_unigram_bias", lambda *arguments: None)
        run = run_bert(tmp_path / "run")
        losses = [r["loss"] for r in run.records if r["event"] == "step"]
        assert losses[0] == pytest.approx(np.log(run.model.backbone.vocabulary_size), abs=0.5)
        assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 1.0

    def test_it_begins_as_the_unigram_model(self, tiny_run):
        losses = [r["loss"] for r in tiny_run.records if r["event"] == "step"]
        unigram = tiny_run.results["baseline"]["unigram_cross_entropy"]
        assert np.mean(losses[:5]) == pytest.approx(unigram, abs=0.5)


class TestModel:
    def test_the_pooler_is_frozen(self, tiny_run):
        pooler = tiny_run.model.backbone.pooled_dense
        assert not pooler.trainable
        trained = {id(v) for v in tiny_run.model.trainable_variables}
        assert not trained & {id(v) for v in pooler.variables}

    def test_the_optimizer_does_not_lie_beside_the_head(self, tiny_run):
        """It is twice the size of the weights."""
        names = processes.tensors_of(tiny_run.folder / "model" / "task.weights.h5")
        assert names and not [name for name in names if "optimizer" in name]

    @pytest.mark.long
    def test_biases_and_layer_norms_do_not_decay(self, other_run):
        optimizer, variables = other_run.model.optimizer, other_run.model.trainable_variables
        for variable in optimizer.variables:
            variable.assign(keras.ops.zeros_like(variable))
        for variable in variables:
            variable.assign(keras.ops.ones_like(variable))
        # With zero gradients and moments nothing but the decay is left of a step.
        optimizer.apply([keras.ops.zeros_like(v) for v in variables], variables)
        decayed = {v.path for v in variables if np.any(to_numpy(v) != 1)}
        kept = {v.path for v in variables} - decayed
        assert {path.rsplit("/", 1)[1] for path in kept} == {"bias", "output_bias", "gamma", "beta"}
        assert {path.rsplit("/", 1)[1] for path in decayed} == {"kernel", "embeddings"}


class TestRepeats:
    @pytest.mark.long
    def test_one_seed_and_empty_caches_give_the_same_run(self, tiny_run, run_bert, tmp_path):
        again = run_bert(tmp_path / "run", cache_dir=tmp_path / "cache")
        assert list((tmp_path / "cache" / "vocabularies").iterdir())
        for key in ("vocabulary_sha256", "weights_sha256", "test", "history", "baseline"):
            assert again.results[key] == tiny_run.results[key], key


class TestWays:
    @pytest.mark.long
    def test_init_from_begins_where_the_other_run_ended(self, tiny_run, run_bert, tmp_path):
        run = run_bert(
            tmp_path / "run",
            **{name: getattr(bert_mlm.Options(), name) for name in presets.FROM_SCRATCH},
            init_from=tiny_run.folder,
            max_steps=1,
            base_learning_rate=1e-9,
            warmup_steps=0,
        )
        assert run.results["vocabulary_sha256"] == tiny_run.results["vocabulary_sha256"]
        for name, value in tiny_run.results["test"].items():
            assert run.results["test"][name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.long
def test_unknown_and_cut_tokens_are_noted(run_bert, tmp_path):
    text, vocabulary = tmp_path / "a.txt", tmp_path / "vocabulary.txt"
    text.write_text("\n".join(f"{'a b ж ' * 3}{n}" for n in range(300)))
    vocabulary.write_text("\n".join([*SPECIAL_TOKENS, "a", "b", *map(str, range(300))]))
    options = dict(dataset=str(text), vocabulary=vocabulary, max_steps=1, text_mode="lines")
    options["vocabulary_size"] = bert_mlm.Options.vocabulary_size  # that of the file
    notes = run_bert(tmp_path / "short", sequence_length=12, **options).results["notes"]
    assert any(note.startswith("30% of the training tokens are [UNK]") for note in notes)
    assert any("training lines have 12 tokens or more: what is beyond" in note for note in notes)
    notes = run_bert(tmp_path / "long", sequence_length=16, **options).results["notes"]
    assert not any("is cut" in note for note in notes)


@pytest.mark.long
def test_padding_is_no_useful_operation(run_bert, tmp_path, monkeypatch):
    text = tmp_path / "lines.txt"
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(list("abcdefgh"), 4 + line % 2 * 6)) for line in range(600)]
    text.write_text("\n".join(lines))
    counted = []
    stock = bert_mlm.bert.training_operations
    monkeypatch.setattr(
        bert_mlm.bert,
        "training_operations",
        lambda *arguments: counted.append(arguments[1:]) or stock(*arguments),
    )
    run_bert(
        tmp_path / "run",
        dataset=str(text),
        text_mode="lines",
        sequence_length=20,
        mlm_probability=0.2,
        initial_mlm_probability=0.2,
        max_examples=None,
        max_steps=1,
    )
    ((tokens, predictions),) = counted
    assert tokens == pytest.approx((6 + 12) / 2, abs=1)  # with [CLS] and [SEP]
    assert predictions == pytest.approx(0.2 * tokens)


def test_the_test_metrics_are_of_the_test_split(tiny_run, tmp_path):
    """The saved model, evaluated by hand on each of the two splits."""
    options = tiny_run.options
    text = load_text(options.dataset, tmp_path)
    preset = str(tiny_run.folder / "model")
    tokenizer = keras_nlp.models.BertTokenizer.from_preset(preset)
    sequences, masking = bert_mlm.make_sequences(options, text, tokenizer, tmp_path)
    model = keras_nlp.models.BertMaskedLM.from_preset(preset, preprocessor=None, compile=False)
    found = {}
    for split in ("valid", "test"):
        data = masked_lm.evaluation_data(sequences[split], masking, batch_size=8, split=split)
        metric = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
        for inputs, labels, weights in data:
            metric.update_state(labels, model(inputs, training=False), weights)
        found[split] = float(metric.result())
    assert tiny_run.results["test"]["cross_entropy"] == pytest.approx(found["test"], rel=1e-4)
    assert abs(found["valid"] - found["test"]) > 1e-3
    # So is what a model without context reaches there: learned from training, measured on test.
    found = masked_lm.baselines(sequences["train"], sequences["test"], masking)
    assert tiny_run.results["baseline"] == found
    for other in (("test", "test"), ("train", "valid"), ("valid", "test")):
        unigram = masked_lm.baselines(*(sequences[split] for split in other), masking)
        assert abs(unigram["unigram_cross_entropy"] - found["unigram_cross_entropy"]) > 1e-3


@pytest.mark.long
def test_lines_that_are_trained_on_and_tested_are_noted(run_bert, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [f"a line of words that the three splits have in common {n}" for n in range(60)]
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("\n".join(lines))
    run = run_bert(tmp_path / "run", dataset=str(folder), max_steps=1)
    said = "60 of 60 test lines of more than 8 words are training lines too (spaces ignored)"
    assert said in run.results["notes"]
    assert not any(
        "training lines too" in note
        for note in run_bert(tmp_path / "own", max_steps=1).results["notes"]
    )


def test_n_grams_score_a_text_as_a_document_of_the_training_split(tmp_path):
    pieces = [*SPECIAL_TOKENS, "the", "un", "##kind", "##ly", "word", "##s", "."]
    tokenizer = bert.tokenizer_of(pieces)
    sep = pieces.index("[SEP]")
    lines = ["the words.", "the unkind words.", "unkindly the word."] * 20
    for name, part in (("train", lines), ("valid", ["words words the"] * 9), ("test", lines[:4])):
        (tmp_path / f"{name}.txt").write_text("\n".join(part) + "\n")
    texts = ["the words.", "words", "the words the unkindly."]

    dataset, cache_dir = str(tmp_path), tmp_path / "cache"
    text = load_text(dataset, cache_dir)
    preprocessor = types.SimpleNamespace(tokenizer=tokenizer)

    def found(sha256=None, **options):
        run = types.SimpleNamespace(
            resolved={"dataset": dataset, "text_sha256": sha256 or text.sha256},
            options=bert_mlm.Options(**(dict(sequence_length=9) | options)),
            load_model=lambda: types.SimpleNamespace(preprocessor=preprocessor),
        )
        return bert_mlm.n_gram_log_likelihoods(run, texts, cache_dir)

    stream = [i for line in lines for i in [*bert.encode(tokenizer, line, 99)[1:-1], sep]]
    rows = np.array([[2, *stream[start : start + 8]] for start in range(0, len(stream) - 7, 8)])
    for count in (None, 3):
        model = KneserNey(rows[:count], len(pieces), order=5, separator=sep)
        ids = [[sep, *bert.encode(tokenizer, text, 99)[1:-1]] for text in texts]
        expected = [model.log_probabilities(np.array([row])).sum() for row in ids]
        np.testing.assert_allclose(found(max_examples=count), expected)
    # Of a run on a part of the lines the n-grams count these.
    some = [i for line in lines[:7] for i in [*bert.encode(tokenizer, line, 99)[1:-1], sep]]
    model = KneserNey(np.array([[sep, *some]]), len(pieces), order=5, separator=sep)
    expected = [model.log_probabilities(np.array([row])).sum() for row in ids]
    of_lines = dict(text_mode="lines", sequence_length=32)
    np.testing.assert_allclose(found(max_examples=7, **of_lines), expected)
    with pytest.raises(DataError, match="not the text that the run was trained on"):
        found("0" * 64)


def test_texts_are_scored(tiny_run):
    run = load_run(tiny_run.folder)
    texts = ["the loss of a step", "step"]
    answers = bert_mlm.predict(run, texts, score=True)
    tokenizer = run.load_model().preprocessor.tokenizer
    for text, nats, (answer,) in zip(
        texts, bert_mlm.log_likelihoods(run, texts), answers, strict=True
    ):
        count = len(bert.encode(tokenizer, text, 99)) - 2
        assert answer["tokens"] == count
        assert answer["log_likelihood"] == pytest.approx(nats, rel=1e-5)
        assert answer["perplexity"] == pytest.approx(np.exp(-nats / count), rel=1e-5)
    with pytest.raises(InputError, match="tokens, the model takes") as caught:
        bert_mlm.predict(run, ["step", "the " * 99], score=True)
    assert caught.value.index == 1
    with pytest.raises(InputError, match="a text without tokens has no perplexity"):
        bert_mlm.predict(run, ["step", " "], score=True)
    with pytest.raises(OptionsError, match="--top 2: leave it out; --score predicts no word pi"):
        bert_mlm.predict(run, texts, top=2, score=True)
