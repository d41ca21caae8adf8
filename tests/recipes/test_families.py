"""Fine-tunes tiny random presets of each family of KerasNLP, as plain KerasNLP does."""

import keras_nlp
import numpy as np
import pytest

from data import masked_lm, sentences
from recipes import bert_mlm, evaluate, text_classification
from tests.support import plain_keras, tiny_presets
from training import numerics
from training.loaded_run import load_run

# BERT is everywhere in the tests; the others repeat what this one shows.
EACH_FAMILY = plain_keras.each_family(tiny_presets.FAMILIES, quick=("Roberta",))
COMMON = plain_keras.COMMON | dict(global_batch_size=8, sequence_length=12, dropout=0.0)


def write_sentences(folder):
    """Words decide; each split has its own sentences."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for name, count in (("train", 40), ("dev", 12), ("test", 13)):
        rows = ["sentence\tlabel"]
        for number in range(count):
            words = [
                *rng.choice(tiny_presets.WORDS[:11], 3 + number % 3),
                ("bad", "good")[number % 2],
            ]
            rows.append(f"{' '.join(words)}\t{number % 2}")
        (folder / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def initial(monkeypatch):
    """The weights with which the recipe begins."""
    kept = {}
    stock = text_classification.build_model

    def build_model(*args, **kwargs):
        model = stock(*args, **kwargs)
        kept.setdefault("weights", model.get_weights())
        return model

    monkeypatch.setattr(text_classification, "build_model", build_model)
    return kept


def train_plainly(preset, folder, weights):
    """The weights after `STEPS` of KerasNLP's own compile() and fit(), on uncut batches."""
    models = keras_nlp.models
    with numerics.precision("float64"):
        backbone = models.Backbone.from_preset(preset, dtype="float64", dropout=0.0)
        model = models.TextClassifier.from_preset(
            preset, backbone=backbone, num_classes=2, dropout=0.0, preprocessor=None
        )
        model.set_weights(weights)
        preprocessor = models.TextClassifierPreprocessor.from_preset(preset, sequence_length=12)
        texts, labels = sentences.load_sentences(str(folder), folder).splits["train"]
        inputs = {n: np.asarray(v, np.int32) for n, v in preprocessor(texts).items()}
        plain_keras.compile_plainly(model)
        data = plain_keras.in_full(inputs, labels, seed=0, batch_size=8)
        plain_keras.fit(model, data)
    return model.get_weights()


@pytest.mark.long
@pytest.mark.parametrize("family", EACH_FAMILY)
def test_a_classifier_of_each_family(family, tmp_path, initial):
    """Trains as KerasNLP's own compile() and fit() do on the same batches; then it is used."""
    folder = write_sentences(tmp_path / "data")
    preset = tiny_presets.save(family, "TextClassifier", tmp_path / "preset")
    options = text_classification.Options(
        **COMMON, dataset=str(folder), preset=preset, run_dir=tmp_path / "run"
    )
    results = text_classification.main(options)
    assert results["preset"] == preset

    theirs = train_plainly(preset, folder, initial["weights"])
    run = load_run(tmp_path / "run")
    ours = run.load_model("float64")
    moved = 0.0
    for our, their, first in zip(ours.get_weights(), theirs, initial["weights"], strict=True):
        np.testing.assert_allclose(our, their, rtol=0, atol=1e-9 * max(1, np.abs(their).max()))
        moved = max(moved, np.abs(our - first).max())
    assert moved > 0.005
    # Queried and evaluated like any other run.
    answers = text_classification.predict(run, ["the loss is good", "a film is bad"])
    assert all(sum(answer["probability"] for answer in found) > 0.999 for found in answers)
    found = evaluate.main(evaluate.Options(run_dir=tmp_path / "run"))
    assert found["test"] == pytest.approx(results["test"])


def write_text(path):
    """Lines of known words; each next one follows from the one before."""
    words = tiny_presets.WORDS
    lines = [
        " ".join(words[(number + place * (1 + number % 3)) % len(words)] for place in range(20))
        for number in range(200)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def train_masked_lm_plainly(preset, batches):
    """The weights after `STEPS` of KerasNLP's own compile() and fit() on these batches."""
    models = keras_nlp.models
    with numerics.precision("float64"):
        backbone = models.Backbone.from_preset(preset, dtype="float64", dropout=0.0)
        model = models.MaskedLM.from_preset(preset, backbone=backbone, preprocessor=None)
        if hasattr(backbone, "pooled_dense"):
            backbone.pooled_dense.trainable = False
        plain_keras.compile_plainly(model, beta_2=0.98)
        plain_keras.fit(model, batches)
    return model.get_weights()


@pytest.mark.long
@pytest.mark.parametrize("family", tiny_presets.FAMILIES)
def test_a_masked_lm_of_each_family(family, tmp_path, monkeypatch):
    """The chunked head trains as KerasNLP's own compile() and fit(); then it fills masks."""
    text = write_text(tmp_path / "text.txt")
    preset = tiny_presets.save(family, "MaskedLM", tmp_path / "preset", sequence_length=16)
    made = {}
    stock = masked_lm.training_data

    def training_data(sequences, masking, **batches):
        made["data"] = stock(sequences, masking, **batches)
        return stock(sequences, masking, **batches)

    monkeypatch.setattr(masked_lm, "training_data", training_data)
    options = bert_mlm.Options(
        **COMMON | dict(sequence_length=16),
        dataset=str(text),
        preset=preset,
        whole_word_masking=family != "Roberta",  # its tiny words are longer than the share
        mlm_probability=0.2,
        cache_dir=tmp_path / "cache",
        run_dir=tmp_path / "run",
    )
    results = bert_mlm.main(options)
    assert all((weights.numpy() == 1).all() for *_, weights in made["data"].take(plain_keras.STEPS))
    theirs = train_masked_lm_plainly(preset, made["data"])
    run = load_run(tmp_path / "run")
    ours = run.load_model("float64").get_weights()
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=0, atol=1e-9 * max(1, np.abs(their).max()))
    (found,) = bert_mlm.predict(run, ["the [MASK] a step"])
    assert len(found) == 5 and found[0]["text"].startswith("the ")
    assert evaluate.main(evaluate.Options(run_dir=tmp_path / "run", cache_dir=tmp_path / "cache"))[
        "test"
    ] == pytest.approx(results["test"])
