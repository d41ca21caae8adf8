"""Fine-tunes tiny random presets of each family of KerasNLP, as plain KerasNLP does."""

import keras
import keras_nlp
import numpy as np
import pytest
import tensorflow as tf

from data import arrays, sentences
from recipes import evaluate, text_classification
from tests.support import tiny_presets
from training.loaded_run import load_run

# BERT is everywhere in the tests; the others repeat what this one shows.
QUICK = ("Roberta",)
EACH_FAMILY = [
    pytest.param(family, marks=() if family in QUICK else pytest.mark.long)
    for family in tiny_presets.FAMILIES
]
STEPS = 5
COMMON = dict(
    max_steps=STEPS,
    global_batch_size=8,
    sequence_length=12,
    dropout=0.0,
    weight_decay=0.0,
    warmup_steps=0,
    lr_scaling="none",
    base_learning_rate=0.01,
    precision="float64",
    jit="off",
    strategy="none",
    quiet=True,
)


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


class AddingRows(keras.optimizers.AdamW):
    """Adds up the gradients of an embedding's row, which Keras's optimizers leave apart."""

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.convert_to_tensor(grad) for grad in grads], trainable_variables)


def plain_keras(preset, folder, weights):
    """The weights after `STEPS` of KerasNLP's own compile() and fit() on the same batches."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    models = keras_nlp.models
    backbone = models.Backbone.from_preset(preset, dtype="float64", dropout=0.0)
    model = models.TextClassifier.from_preset(
        preset, backbone=backbone, num_classes=2, dropout=0.0, preprocessor=None
    )
    model.set_weights(weights)
    preprocessor = models.TextClassifierPreprocessor.from_preset(preset, sequence_length=12)
    texts, labels = sentences.load_sentences(str(folder), folder).splits["train"]
    inputs = {n: np.asarray(v, np.int32) for n, v in preprocessor(texts).items()}
    schedule = keras.optimizers.schedules.PolynomialDecay(np.float64(0.01), STEPS, 0.0)
    model.compile(
        AddingRows(schedule, weight_decay=0.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    batches = arrays.training_data(inputs, labels, seed=0, batch_size=8)
    keras.Model.fit(model, batches.take(STEPS), shuffle=False, verbose=0)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    return model.get_weights()


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

    theirs = plain_keras(preset, folder, initial["weights"])
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
