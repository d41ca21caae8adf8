import keras
import keras_nlp
import numpy as np
import pytest

from models.initial_weights import OFFSETS, look_at_neighbours


def make_model(width, heads, num_layers=2, length=40):
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
    look_at_neighbours(model, seed=3)
    return model


@pytest.mark.parametrize(("width", "heads"), [(128, 2), (128, 4)])
def test_each_head_of_the_first_layer_looks_at_its_neighbour(width, heads):
    model = make_model(width, heads)
    weights = {
        weight.path: keras.ops.convert_to_numpy(weight) for weight in model.trainable_variables
    }
    ids = np.random.default_rng(0).integers(0, 50, 40)
    x = weights["token_embedding/embeddings"][ids] + weights["position_embedding/embeddings"]
    x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    attention = "transformer_layer_0/self_attention_layer"
    query = np.einsum("td,dhc->htc", x, weights[f"{attention}/query/kernel"])
    key = np.einsum("td,dhc->htc", x, weights[f"{attention}/key/kernel"])
    for head in range(heads):
        scores = query[head] @ key[head].T
        place = np.arange(5, 35)
        hit = scores.argmax(1)[place] == place + OFFSETS[head]
        assert hit.mean() > 0.9, head


@pytest.mark.parametrize(("width", "heads"), [(9, 3), (6, 2), (5, 1), (16, 8)])
def test_any_width_and_number_of_heads(width, heads):
    model = make_model(width, heads)
    for weight in model.trainable_variables:
        value = keras.ops.convert_to_numpy(weight)
        assert np.isfinite(value).all()
        # A column of zeros in both query and key would stay there for ever.
        if "query" in weight.path and weight.path.endswith("kernel"):
            assert (np.abs(value).max(axis=0) > 0).all()


def test_kernels_have_a_variance_of_one_over_their_inputs():
    model = make_model(128, 2)
    for path, inputs in (
        ("transformer_layer_0/self_attention_layer/value", 128),
        ("transformer_layer_0/self_attention_layer/attention_output", 128),
        ("transformer_layer_1/feedforward_output_dense", 512),
        ("mlm_head/intermediate_dense", 128),
    ):
        kernel = next(w for w in model.trainable_variables if w.path == f"{path}/kernel")
        # BERT cuts its normal distribution at two deviations, which takes an eighth of them.
        deviation = np.std(keras.ops.convert_to_numpy(kernel))
        assert deviation == pytest.approx(0.88 * inputs**-0.5, rel=0.05)
