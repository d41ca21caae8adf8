import dataclasses
import re
import shlex

import keras
import numpy as np
import pytest
import tensorflow as tf

from callbacks.tensorboard import escape
from data import arrays, sentences, tables
from data.errors import DataError
from data.word_pieces import SPECIAL_TOKENS
from models import presets
from models.initial_weights import init_probe
from recipes import evaluate, export, text_classification
from tests.support import processes
from tests.support.strategy_run import write_sentences
from training.errors import OptionsError
from training.loaded_run import load_run
from training.options import all_problems

TINY = dict(
    vocabulary_size=60,
    num_layers=1,
    num_heads=2,
    hidden_dim=16,
    sequence_length=12,
    epochs=2,
    global_batch_size=8,
    quiet=True,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentences")
    write_sentences(path)
    return path


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    options = text_classification.Options(**TINY, dataset=str(folder), run_dir=run_dir)
    return run_dir, text_classification.main(options)


def test_results(finished):
    _, results = finished
    assert set(results["test"]) == {"accuracy", "macro_f1"}
    assert set(results["baseline"]) == {
        *("most_frequent_accuracy", "tfidf_accuracy", "tfidf_macro_f1"),
    }


def test_the_printed_command_asks_about_a_sentence_of_the_data(finished, folder):
    said = (finished[0] / "worker-0.log").read_text()
    command = shlex.split(said.partition("predict  ")[2].splitlines()[0])
    data = sentences.load_sentences(str(folder), None)
    assert command[-1] in data.splits["valid"][0]


@pytest.mark.parametrize(
    ("texts", "example"),
    [
        (["good", "it's a $5 film", "a very long film of many words"], "it's a $5 film"),
        (["--json is an option", "good", "bad film"], "good"),
        (["-"], None),
        ([f"{'long ' * 20}film"], "long " * 11 + "long"),
        ([f"{'long ' * 11}long film"], "long " * 11 + "long"),
        (["x" * 70], "x" * 60),
        (["two\nlines   of a field"], "two lines of a field"),
        (["is it\tlong " + "words " * 12], "is it ||| long " + "words " * 8 + "words"),
    ],
    ids=range(8),
)
def test_the_example_is_short(texts, example):
    none = np.zeros(1, np.int32)
    splits = {"train": (["a", "b"], none), "valid": (texts, none), "test": (["a"], none)}
    data = sentences.Sentences("data", splits, ("no", "yes"))
    assert text_classification.example_of(data) == example


@pytest.mark.long
def test_batches_are_cut_to_their_longest_sentence(folder, tmp_path, monkeypatch):
    """In training, if it is asked for, and evaluations; accumulated batches are parts of one."""
    made = []

    def keep(stock):
        def make(*arguments, **named):
            made.append((named, stock(*arguments, **named)))
            return made[-1][1]

        return make

    for name in ("training_data", "evaluation_data"):
        monkeypatch.setattr(arrays, name, keep(getattr(arrays, name)))
    options = TINY | dict(sequence_length=40, accumulate_steps=2, max_steps=1, dataset=str(folder))
    for group in ("on", "auto"):
        run_dir = tmp_path / group
        text_classification.main(
            text_classification.Options(**options, run_dir=run_dir, group_by_length=group)
        )
    assert len(made) == 6 and made[0][0]["batches_per_update"] == 2
    for _, data in made[3:]:
        assert data.element_spec[0]["token_ids"].shape == (8, 40)
    for _, data in made[:3]:
        for x, *_ in data.take(3):
            longest = int(x["padding_mask"].numpy().sum(axis=1).max())
            width = x["token_ids"].shape[1]
            assert width == next(n for n in (8, 12, 16, 24, 32, 40) if n >= longest)


def test_tensorboard_shows_sentences_of_the_validation_split(finished, folder):
    run_dir, _ = finished
    shown = [event for event in processes.events(run_dir) if event[0] == "sentences"]
    assert len({step for _, step, _ in shown}) == 2  # an epoch each
    sentence, label = (folder / "dev.tsv").read_text().splitlines()[1].split("\t")
    row = shown[-1][2].decode().splitlines()[2]
    assert row.startswith(f"| {escape(sentence)} | {escape(label)} | ")


def test_the_test_metrics_are_those_of_the_test_split(finished, folder):
    """Counted from what the saved model answers to each sentence of the file."""
    run_dir, results = finished
    run = load_run(run_dir)
    right = {}
    for name in ("dev", "test"):
        rows = [line.split("\t") for line in (folder / f"{name}.tsv").read_text().splitlines()]
        answers = text_classification.predict(run, [text for text, _ in rows[1:]])
        pairs = zip(answers, rows[1:], strict=True)
        right[name] = np.mean([found[0]["class"] == label for found, (_, label) in pairs])
    assert right["test"] != right["dev"]
    assert results["test"]["accuracy"] == pytest.approx(right["test"])
    assert results["history"]["val_accuracy"][-1] == pytest.approx(right["dev"])


def test_auto_is_no_preset_here():
    (problem,) = all_problems(text_classification.Options(preset="auto", lora_rank=8))
    assert problem.startswith("--preset auto: pass scratch, the name of a preset")


def test_a_frozen_encoder_has_no_rates_by_layer():
    options = text_classification.Options(
        preset="bert_tiny_en_uncased", freeze_backbone=True, layer_decay=0.9
    )
    expected = "--freeze-backbone: the head alone is trained; leave out --layer-decay"
    assert all_problems(options) == [expected]


@pytest.mark.long
def test_pairs_of_sentences(tmp_path):
    """MRPC's columns: both sentences are read, F1 is reported, --max-examples is what is said."""
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    for name, count in (("train", 40), ("dev", 9), ("test", 9)):
        rows = [f"{n % 2}\t0\t0\tA film {n}\t{('bad', 'good')[n % 2]} {n}" for n in range(count)]
        (tmp_path / f"{name}.tsv").write_text("\n".join([header, *rows]) + "\n")
    options = TINY | dict(dataset=str(tmp_path), run_dir=tmp_path / "run", max_examples=24)
    results = text_classification.main(text_classification.Options(**options))
    assert set(results["test"]) == {"accuracy", "macro_f1", "f1"}
    said = (tmp_path / "run" / "worker-0.log").read_text()
    assert ": 24 train, 9 valid, 9 test" in said
    assert re.search(r"predict  .*recipes.predict .*'A film \d+ \|\|\| (bad|good) \d+'", said)
    run = load_run(tmp_path / "run")
    inputs = run.load_model().preprocessor((["a film"], ["good"]), None)
    assert set(np.asarray(inputs["segment_ids"]).ravel()) == {0, 1}
    # One at a time: on some CPUs the last bits depend on how many there are.
    (answer,) = text_classification.predict(run, ["a film ||| good"])
    (other,) = text_classification.predict(run, ["a film ||| bad"])
    assert {found["class"] for found in answer} == {"0", "1"} and answer != other
    # As the card says.
    card = (run.model_dir / "README.md").read_text()
    assert 'model.predict((["the first text"], ["the second text"]))' in card
    outputs = run.load_model("float32").predict((["a film"], ["good"]), verbose=0)
    probability = float(np.max(keras.ops.softmax(outputs)))
    assert probability == pytest.approx(answer[0]["probability"], rel=1e-4)
    assert text_classification.predict(run, ["a\tfilm ||| good"]) == [answer]
    # The fields of two columns may contain anything.
    (odd,) = text_classification.predict(run, [("a film", "good ||| bad")])
    assert odd == text_classification.predict(run, [("a\tfilm", "good ||| bad ")])[0] != answer
    assert text_classification.predict(run, [("a film", "good")], top=1) == [answer[:1]]
    assert text_classification.predict(run, ["a film ||| good"], top=0) == [answer]
    with pytest.raises(DataError, match=r'expected two sentences, "first \|\|\| second"'):
        text_classification.predict(run, ["a film"])
    evaluate.main(evaluate.Options(run_dir=tmp_path / "run", examples=tmp_path / "worst.csv"))
    names, rows = tables.read_rows(tmp_path / "worst.csv")
    assert names == ["input", "second_input", "label", "predicted", "probability"]
    assert sorted(rows)[1][:3] == ["A film 1", "good 1", "1"] and len(rows) == 9
    exported = export.main(export.Options(run_dir=tmp_path / "run", to="saved_model"))
    serve = tf.saved_model.load(str(exported)).signatures["serving_default"]
    served = serve(texts=tf.constant(["a film"]), second_texts=tf.constant(["good"]))
    assert served["classes"].numpy()[0, 0].decode() == answer[0]["class"]


@pytest.mark.long
def test_balanced_classes_count_the_same(tmp_path):
    """Of a text that says nothing the rare class has nearly seven times the odds."""
    labels = np.array([0, 0, 0, 0, 0, 0, 0, 1] * 12)
    weights = sentences.balanced_class_weights(labels, 3)
    assert [84 * weights[0], 12 * weights[1], weights[2]] == pytest.approx([48, 48, 1])
    rows = [f"a film {n},{label}" for n, label in enumerate(labels)]
    (tmp_path / "films.csv").write_text("\n".join(["sentence,label", *rows]))
    options = TINY | dict(dataset=str(tmp_path / "films.csv"), base_learning_rate=0.02, epochs=8)
    odds = {}
    for name in ("none", "balanced"):
        run_dir = tmp_path / name
        text_classification.main(
            text_classification.Options(**options, class_weights=name, run_dir=run_dir)
        )
        (answers,) = text_classification.predict(load_run(run_dir), ["a film"])
        share = {answer["class"]: answer["probability"] for answer in answers}["1"]
        odds[name] = share / (1 - share)
    assert odds["balanced"] / odds["none"] > 5


@pytest.mark.long
def test_smoothed_labels_bound_the_probabilities(tmp_path):
    """Without them a model of these sentences is certain."""
    rows = [f"a {'good' if n % 2 else 'bad'} film {n},{n % 2}" for n in range(96)]
    (tmp_path / "films.csv").write_text("\n".join(["sentence,label", *rows]))
    options = TINY | dict(dataset=str(tmp_path / "films.csv"), base_learning_rate=0.02, epochs=24)
    options |= dict(dropout=0.0, token_dropout=0.0)
    run_dir = tmp_path / "run"
    results = text_classification.main(
        text_classification.Options(**options, label_smoothing=0.6, run_dir=run_dir)
    )
    (answers,) = text_classification.predict(load_run(run_dir), ["a good film"])
    assert answers[0]["class"] == "1" and answers[0]["probability"] == pytest.approx(0.7, abs=0.1)
    # The entropy of the smoothed labels is the least that the loss can be.
    least = -(0.7 * np.log(0.7) + 0.3 * np.log(0.3))
    assert results["history"]["val_loss"][-1] > least


def write_reviews(path, words):
    """Writes 60 reviews of that many words, every third of them letters that a file lacks."""
    lines = [
        f"{' '.join(['good', 'film', 'ж'] * (words // 3))} {n},{'ab'[n % 2]}" for n in range(60)
    ]
    path.write_text("sentence,label\n" + "\n".join(lines))


@pytest.mark.long
def test_unknown_and_cut_tokens_are_noted(tmp_path, monkeypatch):
    """And that TF-IDF does not learn from all sentences."""
    vocabulary = tmp_path / "vocabulary.txt"
    pieces = [*SPECIAL_TOKENS, "good", "film", *map(str, range(60))]
    vocabulary.write_text("\n".join(pieces))
    write_reviews(tmp_path / "reviews.csv", words=12)
    options = {name: value for name, value in TINY.items() if name != "vocabulary_size"}
    options |= dict(
        dataset=str(tmp_path / "reviews.csv"),
        vocabulary=vocabulary,
        max_steps=1,
        run_dir=tmp_path / "run",
    )
    notes = text_classification.main(text_classification.Options(**options))["notes"]
    # Of 12 tokens ten are text.
    assert [note for note in notes if "[UNK]" in note] == [
        f"30% of the {split} tokens are [UNK]: words of more than 100 bytes, or a vocabulary that "
        "does not fit the text"
        for split in ("training", "test")
    ]
    for split, cut in zip(
        ("training", "test"), [note for note in notes if "is cut" in note], strict=True
    ):
        assert re.fullmatch(
            rf"(\d+) of \1 {split} sentences have 12 tokens or more: .* is cut", cut
        )
    options |= dict(sequence_length=64, run_dir=tmp_path / "longer")
    notes = text_classification.main(text_classification.Options(**options))["notes"]
    assert not [note for note in notes if "is cut" in note or "TF-IDF" in note]
    monkeypatch.setattr(text_classification.tfidf, "MOST_SENTENCES", 20)
    options |= dict(sequence_length=12, run_dir=tmp_path / "fewer")
    notes = text_classification.main(text_classification.Options(**options))["notes"]
    assert "the TF-IDF baseline learns from at most 20 sentences" in notes
    vocabulary.write_text("\n".join([*SPECIAL_TOKENS, "other"]))
    options |= dict(run_dir=tmp_path / "unknown")
    with pytest.raises(DataError, match="all tokens of the training split are .UNK.; use a --voc"):
        text_classification.main(text_classification.Options(**options))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_new_model_begins_as_naive_bayes(layers):
    """Its first answers are those of naive Bayes, counted here without the code that is tested."""
    rng = np.random.default_rng(0)
    pieces, count, length = 200, 400, 12
    labels = np.arange(count) % 3
    ids = np.where(
        rng.random((count, length)) < 0.4,
        5 + 60 * labels[:, None] + rng.integers(60, size=(count, length)),
        rng.integers(5, pieces, size=(count, length)),
    ).astype(np.int32)
    ids = np.concatenate([np.full((count, 1), 2, np.int32), ids], axis=1)  # [CLS]
    present = np.zeros((count, pieces))
    np.put_along_axis(present, ids, 1, axis=1)
    shares = np.stack([1 + present[labels == label].sum(axis=0) for label in range(3)])
    shares = np.log(shares / shares.sum(axis=1, keepdims=True))
    by_hand = np.array([shares[:, row[1:]].sum(axis=1) for row in ids]).argmax(axis=1)

    tokenizer = FakeTokenizer(pieces)
    inputs = {"token_ids": ids}
    evidence = sentences.naive_bayes_evidence(inputs, labels, tokenizer, 3)
    options = text_classification.Options(num_layers=layers, num_heads=2, hidden_dim=64)
    keras.utils.set_random_seed(1)
    model = text_classification.build_model(options, 3, evidence=evidence)
    inputs |= {"segment_ids": np.zeros_like(ids), "padding_mask": np.ones_like(ids)}
    answers = np.asarray(model(inputs, training=False)).argmax(axis=1)
    assert (answers == by_hand).mean() > 0.95
    assert (by_hand == labels).mean() > 0.8


@pytest.mark.long
@pytest.mark.parametrize("same_classes", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_classifier_is_trained_further(same_classes, finished, folder, tmp_path):
    """A step at a rate of almost zero: what is saved is what it began with."""
    run_dir, _ = finished
    data = tmp_path / "data"
    data.mkdir()
    for file in folder.glob("*.tsv"):
        text = file.read_text()
        if not same_classes:
            text = re.sub(r"\t(\d)$", r"\tclass \1", text, flags=re.M)
        (data / file.name).write_text(text)
    results = text_classification.main(
        text_classification.Options(
            dataset=str(data),
            preset=str(run_dir / "model"),
            sequence_length=12,
            base_learning_rate=1e-12,
            max_steps=1,
            global_batch_size=8,
            run_dir=tmp_path / "run",
            quiet=True,
        )
    )
    heads = [
        load_run(folder).load_model("float32").get_layer("logits").get_weights()[0]
        for folder in (run_dir, tmp_path / "run")
    ]
    assert np.allclose(*heads, atol=1e-6) is same_classes
    said = "is trained further" if same_classes else "a new head: that of "
    assert any(said in note for note in results["notes"])


class FakeTokenizer:
    def __init__(self, size):
        self.size = size

    def vocabulary_size(self):
        return self.size

    pad_token_id, start_token_id, end_token_id, mask_token_id = 0, 2, 3, 4

    def get_vocabulary(self):
        return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

    def token_to_id(self, token):
        return self.get_vocabulary().index(token)


@pytest.mark.long
def test_words_of_one_letter(tmp_path):
    """No word is one for TF-IDF: that is noted before the training, which goes to its end."""
    rows = "".join(
        f"{'ab'[n % 2]} {'cdefghij'[n // 2 % 8]} {'klmnop'[n // 16]}\t{n % 2}\n" for n in range(90)
    )
    for name, lines in (("train", rows), ("dev", rows), ("test", rows)):
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\n" + lines)
    options = TINY | dict(dataset=str(tmp_path), run_dir=tmp_path / "run", max_steps=2)
    found = text_classification.main(text_classification.Options(**options))
    assert found["baseline"].keys() == {"most_frequent_accuracy"}
    assert any("no TF-IDF baseline" in note for note in found["notes"])


@pytest.mark.long
@pytest.mark.parametrize("same_classes", [True, False])
def test_init_from_a_classifier_notes_that_its_head_is_not_used(
    same_classes, finished, folder, tmp_path
):
    data = folder
    if not same_classes:
        lines = ["sentence\tlabel", *(f"a film {n}\t{'abc'[n % 3]}" for n in range(60))]
        data = tmp_path / "three.tsv"
        data.write_text("\n".join(lines))
    options = {k: v for k, v in TINY.items() if k not in presets.FROM_SCRATCH}
    options |= dict(dataset=str(data), init_from=finished[0], max_steps=2)
    options = text_classification.Options(**options, run_dir=tmp_path / "run")
    notes = text_classification.main(options)["notes"]
    said = f"--init-from {finished[0]}: takes the encoder alone, with a new head"
    (note,) = [note for note in notes if note.startswith(said)]
    assert note.endswith(f"; --preset {finished[0] / 'model'} keeps its head") == same_classes


@pytest.mark.long
def test_the_head_of_a_frozen_encoder_begins_as_a_regression(
    finished, folder, tmp_path, monkeypatch
):
    """Which a resumed run, or one that keeps the head of its preset, does not compute."""
    heads = []

    def init(model, *given):
        init_probe(model, *given)
        heads.append(model.output_dense.get_weights())

    monkeypatch.setattr(text_classification, "init_probe", init)
    options = {k: v for k, v in TINY.items() if k not in presets.FROM_SCRATCH}
    options |= dict(dataset=str(folder), freeze_backbone=True, epochs=1, base_learning_rate=1e-9)
    ours = options | dict(init_from=finished[0], run_dir=tmp_path / "run")
    results = text_classification.main(text_classification.Options(**ours))
    (head,) = heads
    trained = load_run(ours["run_dir"]).load_model().output_dense.get_weights()
    for one, other in zip(head, trained, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert np.ptp(head[0]) > 0.1
    assert results["test"]["accuracy"] > results["baseline"]["most_frequent_accuracy"]
    longer = ours | dict(epochs=2, resume="extend")
    again = text_classification.main(text_classification.Options(**longer))
    assert again["resumed_from_step"] == results["steps"]
    kept = options | dict(preset=str(finished[0] / "model"), run_dir=tmp_path / "kept")
    text_classification.main(text_classification.Options(**kept))
    assert len(heads) == 1


@pytest.mark.long
def test_it_begins_from_a_run_of_bert_mlm(folder, tiny_run, tmp_path):
    options = TINY | dict(init_from=tiny_run.folder, max_steps=3, sequence_length=12)
    options = {k: v for k, v in options.items() if k not in presets.FROM_SCRATCH}
    options = text_classification.Options(
        **options, dataset=str(folder), run_dir=tmp_path / "run", cache_dir=tmp_path / "cache"
    )
    results = text_classification.main(options)
    assert results["vocabulary_sha256"] == tiny_run.results["vocabulary_sha256"]
    assert results["preset"] == str(tiny_run.folder / "model")
    # Its own model has the layer for [CLS] already.
    found = evaluate.main(evaluate.Options(run_dir=tmp_path / "run"))
    assert found["test"] == pytest.approx(results["test"])


@pytest.mark.parametrize(
    "changes, expected",
    [
        (dict(init_from="a", preset="b"), "--init-from and --preset: pass only one of them"),
        (dict(hidden_dim=15), "--hidden-dim 15: must be a multiple of --num-heads 2"),
        (dict(token_dropout=1.0), "--token-dropout 1.0: must be in [0, 1)"),
    ],
)
def test_what_is_wrong_ends_in_a_line(folder, tmp_path, changes, expected):
    options = TINY | dict(dataset=str(folder), run_dir=tmp_path / "run") | changes
    with pytest.raises((OptionsError, DataError), match=re.escape(expected)):
        text_classification.main(text_classification.Options(**options))
    assert not (tmp_path / "run").exists()


def test_inputs_lose_the_packages_names_as_the_docstrings_did(finished):
    """Of a run on `installed-docs` alone."""
    run = load_run(str(finished[0]))
    named, cleaned = "the film np.was a tensorflow film", "the film was a film"

    def answers(dataset):
        trained = dataclasses.replace(run, resolved=run.resolved | {"dataset": dataset})
        return [text_classification.predict(trained, [text]) for text in (named, cleaned)]

    one, other = answers("installed-docs")
    assert one == other
    one, other = answers("reviews.csv")
    assert one != other


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("classes", "no training sentences are of 'b', 'c'"),
        ("several", "no training sentences differ in 'a', 'b', 'c'"),
        ("scores", "all training scores are equal"),
    ],
)
def test_what_a_cut_training_split_does_not_teach_is_noted(kind, note):
    numbers = np.array([0] * 9 + [1, 2])
    made = {"classes": numbers, "several": np.eye(3, dtype=np.int8)[numbers]}
    labels = made.get(kind, numbers[:, None] * 1.0)
    texts = [f"film {n}" for n in numbers]
    names = () if kind == "scores" else ("a", "b", "c")
    for count, expected in ((11, None), (9, f"--max-examples 9: {note}")):
        splits = {"train": (texts[:count], labels[:count])}
        data = sentences.Sentences("films", splits, names)
        options = text_classification.Options(max_examples=count)
        assert text_classification.unlearnable_note(options, data) == expected
