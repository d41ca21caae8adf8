import keras
import keras_nlp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from data import several_labels
from data.text import load_text
from models import initial_weights
from models.initial_weights import (
    BERT_STDDEV,
    PROBE,
    add_mean_layer,
    init_local_attention,
    init_probe,
    init_unigram_bias,
)
from recipes import bert_mlm, text_classification
from tests.support import tiny_presets
from tests.support.strategy_run import write_sentences


def make_model(width, heads):
    keras.utils.set_random_seed(0)
    backbone = keras_nlp.models.BertBackbone(
        vocabulary_size=50,
        num_layers=2,
        num_heads=heads,
        hidden_dim=width,
        intermediate_dim=4 * width,
        dropout=0.0,
        max_sequence_length=40,
    )
    model = keras_nlp.models.BertMaskedLM(backbone=backbone)
    init_local_attention(model, seed=3)
    return model


def weights_of(model):
    return {w.path: keras.ops.convert_to_numpy(w) for w in model.trainable_variables}


def hits(model, layer):
    """By head, how often the place with the head's offset has the highest score."""
    weights = weights_of(model)
    ids = np.random.default_rng(0).integers(0, 50, 40)
    x = weights["token_embedding/embeddings"][ids] + weights["position_embedding/embeddings"][:40]
    x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    attention = f"transformer_layer_{layer}/self_attention_layer"
    query = np.einsum("td,dhc->htc", x, weights[f"{attention}/query/kernel"])
    key = np.einsum("td,dhc->htc", x, weights[f"{attention}/key/kernel"])
    found = []
    for head in range(len(query)):
        offset = (-1, 1, -2, 2, -3, 3, -4, 4)[layer * len(query) + head]
        place = np.arange(5, 35)
        best = (query[head] @ key[head].T).argmax(1)
        found.append((best[place] == place + offset).mean())
    return np.array(found)


@pytest.mark.parametrize(("width", "heads"), [(128, 2), (128, 4)])
def test_each_head_attends_to_its_neighbour(width, heads):
    model = make_model(width, heads)
    assert (hits(model, 0) > 0.9).all() and (hits(model, 1) > 0.9).all()


@pytest.mark.parametrize(("width", "heads"), [(9, 3), (6, 2), (5, 1), (16, 8)])
def test_any_width_and_number_of_heads(width, heads):
    """A column without a frequency keeps its random numbers: zeros would never be trained."""
    for path, value in weights_of(make_model(width, heads)).items():
        assert np.isfinite(value).all(), path
        if path.endswith(("query/kernel", "key/kernel")):
            assert np.sqrt((value**2).mean(axis=0)).min() > 0.3 * BERT_STDDEV / np.sqrt(width), path


class Built(Exception):
    """The model is built; nothing is trained."""


@pytest.fixture
def built(monkeypatch):
    """Runs a recipe until it has built its model, and returns the model."""

    def run(recipe, **options):
        stock, models = recipe.build_model, []

        def build_model(*arguments, **named):
            models.append(stock(*arguments, **named))
            raise Built

        monkeypatch.setattr(recipe, "build_model", build_model)
        with pytest.raises(Built):
            recipe.main(recipe.Options(quiet=True, strategy="none", jit="off", **options))
        return models[0]

    return run


def test_bert_mlm_knows_the_training_splits_shares_alone(built, tmp_path, tiny_text):
    """Letters that only the test split has are as rare to it as letters that no split has."""
    text = load_text(str(tiny_text), tmp_path).splits
    folder = tmp_path / "text"
    folder.mkdir()
    unseen = [line + " zqzqzq" for line in text["test"]]
    for name, lines in (("train", text["train"]), ("valid", text["valid"]), ("test", unseen)):
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "zqzqzq", "never", "the", "loss"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    options = dict(vocabulary=tmp_path / "vocab.txt", sequence_length=16, hidden_dim=16)
    model = built(bert_mlm, dataset=str(folder), run_dir=tmp_path / "run", **options)
    bias = dict(zip(vocabulary, weights_of(model)["mlm_head/output_bias"], strict=True))
    assert bias["zqzqzq"] == bias["never"] < bias["loss"] < bias["the"]


def test_text_classification_knows_the_training_splits_evidence_alone(built, tmp_path):
    folder = tmp_path / "sentences"
    write_sentences(folder)
    lines = (folder / "test.tsv").read_text().splitlines()
    unseen = [lines[0], *(line.replace("\t", " zqzqzq\t") for line in lines[1:])]
    (folder / "test.tsv").write_text("\n".join(unseen) + "\n")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "zqzqzq", "never", "good"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    options = dict(vocabulary=tmp_path / "vocab.txt", sequence_length=16, hidden_dim=16)
    model = built(text_classification, dataset=str(folder), run_dir=tmp_path / "run", **options)
    evidence = weights_of(model)["token_embedding/embeddings"][:, :3]
    rows = dict(zip(vocabulary, evidence, strict=True))
    np.testing.assert_array_equal(rows["zqzqzq"], rows["never"])
    assert rows["good"].argmax() == 0 and np.ptp(rows["good"]) > 0.01


def test_the_bias_alone_is_set():
    model = make_model(16, 2)
    before = weights_of(model)
    share = np.random.default_rng(0).dirichlet(np.ones(50))
    init_unigram_bias(model, np.log(share))
    for path, value in weights_of(model).items():
        if not path.endswith("output_bias"):
            np.testing.assert_array_equal(value, before[path])
    ids = np.random.default_rng(1).integers(0, 50, (8, 40)).astype(np.int32)
    inputs = {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": 0 * ids + 1}
    inputs["mask_positions"] = 0 * ids + np.arange(40, dtype=np.int32)
    predicted = np.array(keras.ops.softmax(model(inputs, training=False)))
    divergence = (predicted * np.log(predicted / share)).sum(axis=-1)
    assert divergence.mean() < 0.1 < np.log(50) + (share * np.log(share)).sum()


def test_cls_begins_as_the_standardised_mean_of_the_tokens():
    backbone = make_model(width=32, heads=2).backbone
    ids = np.random.default_rng(0).integers(5, 50, (60, 12)).astype(np.int32)
    mask = (np.arange(12) < np.arange(60)[:, None] % 9 + 3).astype(np.int32)
    inputs = {"token_ids": ids * mask, "segment_ids": 0 * ids, "padding_mask": mask}
    tokens = keras.ops.convert_to_numpy(backbone(inputs)["sequence_output"])
    means = (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)

    deeper = add_mean_layer(backbone, inputs)
    found = {name: keras.ops.convert_to_numpy(value) for name, value in deeper(inputs).items()}
    for column in range(32):
        assert np.corrcoef(means[:, column], found["sequence_output"][:, 0, column])[0, 1] > 0.7
    pooled = found["pooled_output"]
    assert np.abs(pooled.mean(0)).max() < 0.1 and 0.35 < pooled.std(0).min() < 0.5
    # What the run has learned stays as it is.
    for old, new in zip(backbone.transformer_layers, deeper.transformer_layers, strict=False):
        for a, b in zip(old.get_weights(), new.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def preset(tmp_path_factory):
    return tiny_presets.save(
        "DistilBert", "TextClassifier", tmp_path_factory.mktemp("preset") / "it"
    )


class TestProbe:
    """A frozen encoder's head begins as scikit-learn's own regression on what it reads."""

    def make(self, preset, num_classes, activation=None):
        keras.utils.set_random_seed(0)  # of the layer below the head
        model = keras_nlp.models.TextClassifier.from_preset(
            preset, num_classes=num_classes, activation=activation, load_weights=True
        )
        ids = np.random.default_rng(0).integers(5, 20, (90, 12)).astype(np.int32)
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        return model, inputs, (ids == 7).sum(axis=1) + (ids[:, 0] == 9)

    def features(self, model, inputs):
        found = keras.Model(model.inputs, model.get_layer("logits").input)(inputs, training=False)
        return keras.ops.convert_to_numpy(found).astype(np.float64)

    @pytest.mark.long
    @pytest.mark.parametrize("class_weight", [None, {0: 0.5, 1: 4.0, 2: 1.0}])
    @pytest.mark.parametrize("classes", [2, 3])
    def test_of_classes(self, preset, classes, class_weight):
        model, inputs, counts = self.make(preset, classes)
        labels = np.minimum(counts, classes - 1)
        features = self.features(model, inputs)
        init_probe(model, inputs, labels, class_weight)
        weights = None if class_weight is None else [class_weight[label] for label in labels]
        pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=PROBE, tol=1e-10))
        pipeline.fit(features, labels, logisticregression__sample_weight=weights)
        found = keras.ops.convert_to_numpy(keras.ops.softmax(model(inputs, training=False)))
        np.testing.assert_allclose(found, pipeline.predict_proba(features), atol=1e-3)
        assert np.ptp(found[:, 0]) > 0.005

    @pytest.mark.parametrize("is_balanced", [False, True])
    def test_of_several_labels(self, preset, is_balanced):
        model, inputs, counts = self.make(preset, 2)
        labels = np.stack([counts > 1, counts < 1], axis=1).astype(np.int8)
        features = self.features(model, inputs)
        weights = several_labels.balanced_weights(labels) if is_balanced else None
        init_probe(model, inputs, labels, weights)
        found = keras.ops.convert_to_numpy(keras.ops.sigmoid(model(inputs, training=False)))
        for column, rows in enumerate(labels.T):
            balanced = "balanced" if is_balanced else None
            logistic = LogisticRegression(C=PROBE, tol=1e-10, class_weight=balanced)
            pipeline = make_pipeline(StandardScaler(), logistic).fit(features, rows)
            expected = pipeline.predict_proba(features)[:, 1]
            np.testing.assert_allclose(found[:, column], expected, atol=1e-3)

    def test_of_scores(self, preset):
        scale = keras.layers.Rescaling(20.0, 300.0)
        model, inputs, counts = self.make(preset, 1, scale)
        features = self.features(model, inputs)
        init_probe(model, inputs, 300.0 + 5.0 * counts)
        pipeline = make_pipeline(StandardScaler(), RidgeCV(10.0 ** np.arange(6)))
        expected = pipeline.fit(features, 300.0 + 5.0 * counts).predict(features)
        found = keras.ops.convert_to_numpy(model(inputs, training=False))[:, 0]
        np.testing.assert_allclose(found, expected, atol=1e-2)
        assert np.ptp(found) > 3

    def test_a_class_without_an_example_is_unlikely(self, preset):
        model, inputs, counts = self.make(preset, 4)
        init_probe(model, inputs, np.where(counts > 0, 3, 1))
        found = keras.ops.convert_to_numpy(keras.ops.softmax(model(inputs, training=False)))
        assert (found[:, [0, 2]] < 0.02).all() and (found[:, [1, 3]] > 0.02).all()

    @pytest.mark.parametrize("classes", [1, 3])
    def test_of_one_class_or_too_many_there_is_none(self, preset, classes, monkeypatch):
        monkeypatch.setattr(initial_weights, "MOST_PROBED_CLASSES", 2)
        model, inputs, _ = self.make(preset, max(classes, 2))
        before = model.output_dense.get_weights()
        init_probe(model, inputs, np.arange(90) % classes)
        for one, other in zip(before, model.output_dense.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_of_many_sentences_it_takes_some(self, preset, monkeypatch):
        """Of all classes, whatever their order."""
        model, inputs, _ = self.make(preset, 2)
        before = model.output_dense.get_weights()[0]
        totals = []
        monkeypatch.setattr(initial_weights, "MOST_PROBED", 45)
        stock = initial_weights.live_line
        monkeypatch.setattr(
            initial_weights, "live_line", lambda **named: totals.append(named) or stock(**named)
        )
        init_probe(model, inputs, np.arange(90) % 2)
        assert totals[0]["total"] == 45
        assert (model.output_dense.get_weights()[0] != before).all()
