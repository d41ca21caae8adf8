import keras
import numpy as np
import pytest

from callbacks.metric_direction import direction


@pytest.mark.parametrize(
    "better, names",
    [
        (
            "max",
            "accuracy val_macro_f1 val_auc val_auc_2 precision_at_5 recall r2_score",
        ),
        ("max", "val_mean_io_u val_f1_score cosine_accuracy"),
        ("min", "loss cross_entropy val_rmse perplexity accuracy_loss val_binary_crossentropy"),
        ("min", "mean_absolute_error precision_error val_kl_divergence huber"),
        (None, "wings val_true_positives lossless inaccuracy"),
    ],
)
def test_by_name(better, names):
    assert {name: direction(name) for name in names.split()} == dict.fromkeys(names.split(), better)


def test_what_a_person_says_counts():
    assert direction("loss", mode="max") == "max" and direction("wings", mode="min") == "min"


@pytest.fixture(scope="module")
def model():
    """Metrics whose names tell nothing, or the wrong thing."""
    inputs = keras.Input((2,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("left", "right")}
    model = keras.Model(inputs, outputs)
    metrics = [
        keras.metrics.AUC(name="area"),
        keras.metrics.BinaryCrossentropy("bits"),
        keras.metrics.MeanIoU(2, name="overlap_error"),
        keras.metrics.MeanMetricWrapper(lambda y, p: y, name="wings"),
        keras.metrics.MeanMetricWrapper(lambda y, p: y, name="own_accuracy"),
    ]
    model.compile("sgd", "mse", weighted_metrics={"left": metrics, "right": []})
    x = np.zeros((2, 2), "float32")
    model.evaluate(x, {"left": x[:, :1], "right": x[:, :1]}, verbose=0)
    return model


@pytest.mark.parametrize(
    "name, better",
    [
        ("val_left_area", "max"),
        ("left_bits", "min"),
        ("left_overlap_error", "max"),
        ("left_wings", None),
        ("left_own_accuracy", "max"),
        ("left_loss", "min"),
        ("loss", "min"),
    ],
)
def test_by_the_metric_that_the_model_was_compiled_with(model, name, better):
    assert name.removeprefix("val_") in model.get_metrics_result()
    assert direction(name, model) == better


def test_a_name_that_only_ends_like_a_metric_tells_nothing(model):
    assert direction("left_area", model) == "max" and direction("left_subarea", model) is None
