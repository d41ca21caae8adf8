import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    matthews_corrcoef,
    precision_recall_fscore_support,
    precision_score,
    recall_score,
    roc_auc_score,
)

from distribution.keras_compat import patches
from models.metrics import (
    ExactMatch,
    LastClassF1,
    MacroF1,
    Matthews,
    MicroF1,
    Pearson,
    of_classes,
)
from tests.support import forked, replicas


@pytest.fixture
def counted():
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=50)
    logits = rng.normal(size=(50, 4)).astype("float32")
    return labels, logits, logits.argmax(axis=1)


def test_as_scikit_learn(counted):
    labels, logits, predicted = counted
    metric = MacroF1(5)  # the last class is neither there nor predicted
    logits = np.concatenate([logits, np.full((50, 1), -9.0, "float32")], axis=1)
    for part in (slice(0, 20), slice(20, 50)):
        metric.update_state(labels[part], logits[part])
    expected = f1_score(labels, predicted, average="macro")
    assert float(metric.result()) == pytest.approx(expected)


@pytest.fixture
def of_two():
    """Labels of two classes, and logits that are far from zero or equal for some examples."""
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=(60,))
    logits = rng.normal(scale=2, size=(60, 2)) + 50
    return labels, (logits + np.eye(2)[labels]).astype("float32")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_of_the_last_of_two_classes_as_scikit_learn(of_two, dtype):
    labels, logits = of_two
    predicted = logits.argmax(axis=1)
    expected = {
        "f1": f1_score(labels, predicted),
        "matthews": matthews_corrcoef(labels, predicted),
        "precision": precision_score(labels, predicted),
        "recall": recall_score(labels, predicted),
        "auc": roc_auc_score(labels, logits[:, 1] - logits[:, 0]),
    }
    for name, value in expected.items():
        metric = of_classes(name, 2)
        assert metric.name == name
        # The last batch is padded, as an evaluation's.
        metric.update_state(labels[:40], logits[:40].astype(dtype))
        padded = (np.concatenate([part[40:], part[:12]]) for part in (labels, logits))
        metric.update_state(*padded, np.array([1.0] * 20 + [0.0] * 12, dtype))
        assert float(metric.result()) == pytest.approx(value, abs=1e-3 if name == "auc" else 1e-6)
        config = keras.saving.serialize_keras_object(metric)
        made = keras.saving.deserialize_keras_object(config)
        assert type(made) is type(metric) and made.name == name


@pytest.mark.parametrize("mean", [-90, -8, 0, 8, 90])
def test_the_area_of_probabilities_near_0_or_1_as_scikit_learn(mean):
    """Their sigmoids are equal, or nearly; the order of the logits counts."""
    rng = np.random.default_rng(0)
    labels = (rng.random(2000) < 0.02).astype(np.int32)
    difference = (mean + 1.2 * rng.normal(size=2000) + 2 * labels).astype("float32")
    metric = of_classes("auc", 2)
    logits = np.stack([-difference / 2, difference / 2], axis=1)
    for part in (slice(0, 1200), slice(1200, 2000)):
        metric.update_state(labels[part], logits[part])
    expected = roc_auc_score(labels, difference)
    assert float(metric.result()) == pytest.approx(expected, abs=2e-2 if abs(mean) > 9 else 2e-3)
    assert 0.8 < expected < 0.95


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_several_labels_as_scikit_learn(dtype):
    rng = np.random.default_rng(0)
    # The last label neither occurs nor is predicted.
    labels = (rng.random((50, 4)) < [0.4, 0.4, 0.4, 0.0]).astype(np.int32)
    logits = (rng.normal(size=(50, 4)) + labels - [0, 0, 0, 9]).astype(dtype)
    predicted = logits > 0
    metrics = [MicroF1(4), MacroF1(4, several=True), ExactMatch()]
    expected = [
        f1_score(labels, predicted, average=name, zero_division=0.0) for name in ("micro", "macro")
    ]
    for metric, value in zip(metrics, [*expected, accuracy_score(labels, predicted)], strict=True):
        config = keras.saving.serialize_keras_object(metric)
        for counting in (metric, keras.saving.deserialize_keras_object(config)):
            for part in (slice(0, 20), slice(20, 50)):
                counting.update_state(labels[part], logits[part], np.ones(len(labels[part])))
            counting.update_state(1 - labels, logits, np.zeros(50))
            assert float(counting.result()) == pytest.approx(value)
    recalls = [numbers["recall"] for numbers in metrics[1].by_class("abcd").values()]
    assert recalls == pytest.approx(
        recall_score(labels, predicted, average=None, zero_division=0.0)
    )


@pytest.mark.parametrize("metric", [MacroF1, LastClassF1, Matthews])
def test_keras_saves_and_loads_it(metric, counted):
    labels, logits, _ = counted
    made = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(metric(4)))
    assert type(made) is metric and made.name == metric(4).name
    expected = metric(4)
    for counting in (made, expected):
        counting.update_state(labels, logits)
    assert float(made.result()) == float(expected.result()) != 0


def test_what_glue_reports_as_scikit_learn(counted):
    labels, logits, predicted = counted
    metrics = LastClassF1(4), Matthews(4)
    for metric in metrics:
        for part in (slice(0, 20), slice(20, 50)):
            metric.update_state(labels[part], logits[part])
    f1, matthews = (float(metric.result()) for metric in metrics)
    assert f1 == pytest.approx(f1_score(labels == 3, predicted == 3))
    assert matthews == pytest.approx(matthews_corrcoef(labels, predicted), abs=1e-6)
    one_class = Matthews(4)
    one_class.update_state(np.zeros(5), np.eye(4)[[0] * 5])
    assert float(one_class.result()) == 0


@pytest.mark.parametrize("of", ["labels", "predictions"])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_matthews_of_one_class_is_zero(classes, of):
    """Not what rounding leaves of weighted sums, whose square root may not be a number."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        metric = Matthews(classes)
        for _ in range(20):
            drawn, same = rng.integers(classes, size=64), np.zeros(64, np.int32)
            labels, predicted = (same, drawn) if of == "labels" else (drawn, same)
            weights = np.linspace(0.3, 4.1, classes)[drawn] * rng.random(64)
            logits = np.eye(classes, dtype="float32")[predicted]
            metric.update_state(labels, logits, weights.astype("float32"))
        assert float(metric.result()) == 0.0
    assert metric.result().dtype == "float32"


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("prediction", [0, 1])
def test_of_one_class_of_two_as_scikit_learn(label, prediction):
    """Nothing is not a number, also of no examples."""
    labels, predicted = np.full(6, label), np.full(6, prediction)
    expected = {
        "f1": f1_score(labels, predicted, zero_division=0.0),
        "matthews": 0.0,
        "precision": precision_score(labels, predicted, zero_division=0.0),
        "recall": recall_score(labels, predicted, zero_division=0.0),
        "auc": 0.0,  # which is not defined
    }
    for name, value in expected.items():
        metric = of_classes(name, 2)
        assert float(metric.result()) == 0.0
        for weights in (np.ones(6), np.zeros(6)):
            metric.update_state(labels, np.eye(2, dtype="float32")[predicted], weights)
        assert float(metric.result()) == value


def test_by_class_as_scikit_learn(counted):
    labels, logits, predicted = counted
    logits = np.concatenate([logits, np.full((50, 1), -9.0, "float32")], axis=1)
    metric = MacroF1(5)
    metric.update_state(labels[:20], logits[:20])
    metric.reset_state()
    for part in (slice(0, 20), slice(20, 50)):
        metric.update_state(labels[part], logits[part])
    found = metric.by_class(names := [*"abcde"])
    expected = precision_recall_fscore_support(
        labels, predicted, labels=range(5), zero_division=0.0
    )
    columns = zip(("precision", "recall", "f1", "examples"), expected, strict=True)
    for column, values in columns:
        assert [found[name][column] for name in names] == pytest.approx(values.tolist())
    assert sum(part["examples"] for part in found.values()) == 50
    with pytest.raises(ValueError):
        metric.by_class("abcd")


def test_confusion_as_scikit_learn(counted):
    labels, logits, predicted = counted
    metric = MacroF1(4)
    metric.update_state(labels[:20], logits[:20])
    metric.reset_state()
    for part in (slice(0, 20), slice(20, 50)):
        metric.update_state(labels[part], logits[part])
    expected = confusion_matrix(labels, predicted)
    found = metric.confusion("abcd")
    assert [list(row.values()) for row in found.values()] == expected.tolist()
    assert found["b"]["a"] == np.sum((labels == 1) & (predicted == 0)) > 0
    assert (expected != expected.T).any()


@pytest.mark.parametrize("count, several", [(51, False), (4, True)])
def test_no_confusion_of_many_classes_or_several_labels(count, several):
    assert MacroF1(count, several=several).confusion([*map(str, range(count))]) is None


def test_examples_of_weight_zero_do_not_count(counted):
    labels, logits, predicted = counted
    metric = MacroF1(4)
    metric.update_state(labels, logits, np.array([1.0] * 30 + [0.0] * 20))
    confusion = [list(row.values()) for row in metric.confusion("abcd").values()]
    assert confusion == confusion_matrix(labels[:30], predicted[:30]).tolist()
    expected = f1_score(labels[:30], predicted[:30], average="macro")
    assert float(metric.result()) == pytest.approx(expected)
    assert expected != pytest.approx(f1_score(labels, predicted, average="macro"))


@pytest.fixture
def scored():
    """Scores of a large mean, whose squares float32 could not tell apart."""
    rng = np.random.default_rng(0)
    truth = 5000 + rng.normal(size=(50, 1))
    return truth, (truth + rng.normal(size=(50, 1))).astype("float32")


def test_pearson_as_scipy(scored):
    truth, predicted = scored
    metric = Pearson()
    metric.update_state(truth, predicted)
    metric.reset_state()
    # The last batch is padded, as an evaluation's.
    metric.update_state(truth[:32], predicted[:32])
    padded = (np.concatenate([part[32:], np.zeros((14, 1))]) for part in scored)
    metric.update_state(*padded, np.array([1.0] * 18 + [0.0] * 14, "float32"))
    expected = scipy.stats.pearsonr(truth.ravel(), predicted.ravel().astype("float64")).statistic
    assert float(metric.result()) == pytest.approx(expected, rel=1e-9)
    assert metric.result().dtype == "float64"
    config = keras.saving.serialize_keras_object(Pearson("r"))
    assert keras.saving.deserialize_keras_object(config).name == "r"


@pytest.mark.parametrize("value", [0.0, 0.1, 4999.7])
def test_pearson_of_equal_predictions_is_zero(value, scored):
    """Not what rounding leaves of their variance."""
    for pair in ((scored[0], np.full((50, 1), value)), (np.full((50, 1), value), scored[1])):
        metric = Pearson()
        metric.update_state(*pair)
        assert float(metric.result()) == 0.0


def count_on_two_replicas(metric, labels, logits):
    """Each replica counts half of the examples, in one copy of the variables."""
    strategy = tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=["CPU:0", "CPU:1"], parameter_device="CPU:0"
    )
    with patches.patch_keras_for(strategy), strategy.scope():
        metric = metric()
        parts = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices((labels, logits)).batch(len(labels) // 5)
        )

        @tf.function
        def count(part):
            strategy.run(metric.update_state, args=part)

        for part in parts:
            count(part)
        return float(metric.result())


def macro_f1():
    return MacroF1(4)


def auc():
    return of_classes("auc", 2)


def of_one_class_on_two_replicas():
    """Evaluates labels of one class, weighted, on replicas with a state each; returns logs."""
    labels = np.zeros(12, np.int32)
    logits = np.random.default_rng(0).normal(size=(12, 2))
    weights = np.linspace(0.1, 2.3, 12)
    names = ("f1", "matthews", "auc", "precision", "recall")

    def build():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile(
            keras.optimizers.SGD(0.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[],
            weighted_metrics=[MacroF1(2), *(of_classes(name, 2) for name in names)],
        )
        return model

    data = replicas.dataset((logits, labels, weights), 6)
    return [replicas.fit(count, build, data, evaluated=data) for count in (1, 2)]


@pytest.mark.long
def test_metrics_of_one_class_are_numbers_on_replicas_too():
    one, two = forked.run(of_one_class_on_two_replicas)
    for found in (one, two):
        for logs in (found["logs"], found["evaluated"]):
            assert logs["matthews"] == logs["auc"] == logs["f1"] == logs["recall"] == 0.0
            assert 0 < logs["macro_f1"] < 1
    assert two["evaluated"] == pytest.approx(one["evaluated"], rel=1e-9)


@pytest.mark.long
def test_replicas_that_share_one_copy_add_up(counted, scored, of_two):
    labels, logits = of_two
    found = forked.run(count_on_two_replicas, auc, *of_two)
    expected = roc_auc_score(labels, logits[:, 1] - logits[:, 0])
    assert found == pytest.approx(expected, abs=2e-3)
    labels, logits, predicted = counted
    found = forked.run(count_on_two_replicas, macro_f1, labels, logits)
    assert found == pytest.approx(f1_score(labels, predicted, average="macro"))
    truth, predicted = scored
    found = forked.run(count_on_two_replicas, Pearson, truth, predicted)
    expected = scipy.stats.pearsonr(truth.ravel(), predicted.ravel()).statistic
    assert found == pytest.approx(expected, rel=1e-5)
