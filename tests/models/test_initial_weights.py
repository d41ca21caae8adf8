import keras
import keras_nlp
import numpy as np
import pytest

from data import masked_lm
from data.text import load_text
from models import bert
from models.initial_weights import (
    BERTS,
    OFFSETS,
    POSITIONS,
    init_local_attention,
    init_unigram_bias,
)
from recipes import bert_mlm
from tests.conftest import TINY_RUN


def make_model(width, heads, num_layers=2, length=40, seed=3):
    keras.utils.set_random_seed(0)
    backbone = keras_nlp.models.BertBackbone(
        vocabulary_size=50,
        num_layers=num_layers,
        num_heads=heads,
        hidden_dim=width,
        intermediate_dim=4 * width,
        dropout=0.0,
        max_sequence_length=length,
    )
    model = keras_nlp.models.BertMaskedLM(backbone=backbone)
    init_local_attention(model, seed=seed)
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
        offset = OFFSETS[(layer * len(query) + head) % len(OFFSETS)]
        place = np.arange(5, 35)
        best = (query[head] @ key[head].T).argmax(1)
        found.append((best[place] == place + offset).mean())
    return np.array(found)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("width", "heads"), [(128, 2), (128, 4)])
def test_each_head_looks_at_its_neighbour(width, heads, layer):
    assert (hits(make_model(width, heads), layer) > 0.9).all()


def test_the_recipe_begins_like_this():
    options = bert_mlm.Options(preset="scratch")
    keras.utils.set_random_seed(0)
    model = bert_mlm.build_model(options, 50)
    assert (hits(model, 0) > 0.9).all() and (hits(model, 1) > 0.9).all()


def test_positions_are_sinusoids_of_the_seeds_frequencies():
    positions = weights_of(make_model(128, 2))["position_embedding/embeddings"]
    np.testing.assert_allclose(np.sqrt((positions**2).mean(1)), POSITIONS, rtol=1e-5)
    product = positions @ positions.T / POSITIONS**2 / 128
    np.testing.assert_allclose(product.diagonal(), 1, rtol=1e-5)
    assert np.abs(product - np.eye(40)).max() < 0.5
    same = weights_of(make_model(128, 2))["position_embedding/embeddings"]
    other = weights_of(make_model(128, 2, seed=4))["position_embedding/embeddings"]
    np.testing.assert_array_equal(positions, same)
    assert np.abs(positions - other).max() > POSITIONS


@pytest.mark.parametrize(("width", "heads"), [(9, 3), (6, 2), (5, 1), (16, 8)])
def test_any_width_and_number_of_heads(width, heads):
    model = make_model(width, heads)
    for path, value in weights_of(model).items():
        assert np.isfinite(value).all(), path
        # A column without a frequency keeps its small random numbers: were it zero in both, it
        # would stay zero for ever.
        if path.endswith(("query/kernel", "key/kernel")):
            size = np.sqrt((value**2).mean(axis=0))
            assert size.min() > 0.3 * BERTS / np.sqrt(width), path
        if path.endswith("embeddings"):
            assert (np.abs(value).max(axis=0) > 0).all(), path


def test_kernels_have_a_variance_of_one_over_their_inputs():
    weights = weights_of(make_model(128, 2))
    for path, inputs in (
        ("transformer_layer_0/self_attention_layer/value", 128),
        ("transformer_layer_0/self_attention_layer/attention_output", 128),
        ("transformer_layer_1/feedforward_output_dense", 512),
        ("mlm_head/intermediate_dense", 128),
    ):
        # BERT cuts its normal distribution at two deviations, which takes an eighth of them.
        deviation = np.std(weights[f"{path}/kernel"])
        assert deviation == pytest.approx(0.88 * inputs**-0.5, rel=0.05)


def test_a_new_model_predicts_as_the_unigram_model(tiny_text, tmp_path):
    """Its cross-entropy on the test split, all tokens predicted, before any training."""
    options = bert_mlm.Options(**(TINY_RUN | {"mlm_probability": 1.0, "max_examples": None}))
    text = load_text(str(tiny_text), tmp_path)
    tokenizer = bert.make_tokenizer(options, None, text, tmp_path)
    sequences, masking = bert_mlm.make_sequences(options, text, tokenizer, tmp_path)
    unigram = masked_lm.baselines(sequences["train"], sequences["test"], masking)
    expected = unigram["unigram_cross_entropy"]

    keras.utils.set_random_seed(0)
    log_frequency = masked_lm.log_frequency(sequences["train"], masking)
    began = bert_mlm.build_model(options, masking.vocabulary_size, None, log_frequency)
    stock = bert_mlm.build_model(options, masking.vocabulary_size)
    data = masked_lm.evaluation_data(sequences["test"], masking, batch_size=64, split="test")
    found = []
    for model in (began, stock):
        total = count = 0.0
        for x, labels, weights in data:
            logits = model(x, training=False)
            loss = keras.ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            total += float(keras.ops.sum(loss * weights))
            count += float(keras.ops.sum(weights))
        found.append(total / count)
    assert found[0] == pytest.approx(expected, abs=0.1)
    assert found[1] > expected + 1, "without it, it begins with all pieces alike"


def test_the_bias_alone_is_set():
    model = make_model(16, 2)
    before = weights_of(model)
    log_frequency = np.log(np.random.default_rng(0).dirichlet(np.ones(50)))
    init_unigram_bias(model, log_frequency)
    for path, value in weights_of(model).items():
        if path.endswith("output_bias"):
            np.testing.assert_allclose(value, log_frequency, rtol=1e-6)
        else:
            np.testing.assert_array_equal(value, before[path])
