import re

import keras
import keras_nlp
import numpy as np
import pytest
import tensorflow as tf

from distribution import attention, step
from distribution.keras_compat import fitting, patches
from models import chunked_head
from models.chunked_head import chunked_masked_lm, weighted_cross_entropy
from tests.support import forked, replicas

VOCABULARY, WIDTH, PREDICTIONS = 37, 8, 23
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy


@pytest.fixture
def numbers():
    rng = np.random.default_rng(0)
    return {
        "hidden": tf.constant(rng.normal(size=(PREDICTIONS, WIDTH))),
        "kernel": tf.constant(rng.normal(size=(VOCABULARY, WIDTH))),
        "bias": tf.constant(rng.normal(size=VOCABULARY)),
        "labels": tf.constant(rng.integers(0, VOCABULARY, PREDICTIONS), tf.int32),
        "weights": tf.constant(rng.integers(0, 3, PREDICTIONS).astype(np.float64)),
    }


def stock(hidden, kernel, bias, labels, weights):
    logits = tf.matmul(hidden, kernel, transpose_b=True) + bias
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    hit = tf.cast(tf.argmax(logits, axis=1, output_type=tf.int32) == labels, tf.float64)
    return tf.reduce_sum(weights * losses), losses, hit


def with_gradients(function, numbers, factor=1.0):
    inputs = [numbers[name] for name in ("hidden", "kernel", "bias")]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        total, *others = function(**numbers)
        scaled = factor * total
    return [total, *others, *tape.gradient(scaled, inputs)]


@pytest.mark.long
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("rows", [1, 5, PREDICTIONS, 100])
def test_sum_scores_and_gradients_are_those_of_whole_logits(numbers, rows, jit, monkeypatch):
    """The number of predictions is known while tracing for XLA, and not without it."""
    known = [PREDICTIONS] if jit else [None]

    @tf.function(
        jit_compile=jit,
        input_signature=[
            tf.TensorSpec([*known, WIDTH], tf.float64),
            tf.TensorSpec(known, tf.int32),
            tf.TensorSpec(known, tf.float64),
        ],
    )
    def ours(hidden, labels, weights):
        some = numbers | {"hidden": hidden, "labels": labels, "weights": weights}
        return with_gradients(weighted_cross_entropy, some, 0.3)

    monkeypatch.setattr(chunked_head, "LOGITS_AT_ONCE", rows * VOCABULARY)
    found = ours(numbers["hidden"], numbers["labels"], numbers["weights"])
    expected = with_gradients(stock, numbers, 0.3)
    counts = numbers["weights"] > 0
    for scores in (found, expected):  # without weight a score means nothing
        scores[1:3] = [tf.boolean_mask(score, counts) for score in scores[1:3]]
    for ours_, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours_, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("filled", [0, 1, 8, PREDICTIONS])
def test_chunks_without_a_weight_are_left_out(numbers, filled, jit, monkeypatch):
    monkeypatch.setattr(chunked_head, "FEWEST_ROWS", 4)
    a_chunk = 6  # a quarter of 23
    weights = np.zeros(PREDICTIONS)
    chosen = np.random.default_rng(filled).permutation(PREDICTIONS)[:filled]
    weights[chosen] = 2.0
    some = numbers | {"weights": tf.constant(weights)}
    ours = tf.function(lambda: with_gradients(weighted_cross_entropy, some), jit_compile=jit)
    found = [value.numpy() for value in ours()]
    expected = [value.numpy() for value in with_gradients(stock, some)]
    computed = np.flatnonzero(found[1])
    assert len(computed) == min(PREDICTIONS, max(1, -(-filled // a_chunk)) * a_chunk)
    assert set(chosen) <= set(computed)
    for scores in (found, expected):
        scores[1:3] = [score[computed] for score in scores[1:3]]
    for our, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(our, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("jit", [False, True])
def test_all_predictions_are_one_chunk_on_large_gpus(numbers, jit, monkeypatch):
    monkeypatch.setattr(attention, "has_hopper_gpus", lambda: True)
    monkeypatch.setattr(chunked_head, "FEWEST_ROWS", 4)
    weights = np.zeros(PREDICTIONS)
    weights[5] = 2.0
    some = numbers | {"weights": tf.constant(weights)}
    ours = tf.function(lambda: with_gradients(weighted_cross_entropy, some), jit_compile=jit)
    found, expected = ours(), with_gradients(stock, some)
    assert np.count_nonzero(found[1]) == PREDICTIONS
    for our, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(our, whole, rtol=1e-12, atol=1e-12)


def test_gradients_of_labels_are_added(numbers):
    """By XLA a GPU has one instruction for additions to places that several labels share."""

    @tf.function(jit_compile=True)
    def ours():
        return with_gradients(weighted_cross_entropy, numbers)

    program = ours.experimental_get_compiler_ir()(stage="hlo")
    combiners = set(re.findall(r" scatter\(.*to_apply=(%?[\w.-]+)", program))
    roots = {
        re.search(rf"\n{re.escape(name)} .*?ROOT .*? (\w+)\(", program, re.DOTALL)[1]
        for name in combiners
    }
    # The other one puts each prediction in its place.
    assert "add" in roots
    assert roots <= {"add", "parameter"}


def test_large_logits_do_not_overflow(numbers):
    large = {name: numbers[name] * 1e4 for name in ("hidden", "kernel")}
    found = with_gradients(weighted_cross_entropy, numbers | large)
    whole = with_gradients(stock, numbers | large)
    for ours_, stock_ in zip(found, whole, strict=True):
        assert np.isfinite(ours_).all()
        np.testing.assert_allclose(ours_, stock_, rtol=1e-9)


def test_of_equal_logits_the_first_is_the_prediction(numbers):
    """As `argmax` of whole logits: in half precision many are equal."""
    equal = {name: 0 * numbers[name] for name in ("hidden", "kernel", "bias")}
    sums = weighted_cross_entropy(**(numbers | equal))
    hits = np.asarray(sums[-1])
    np.testing.assert_array_equal(hits, numbers["labels"] == 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_as_near_to_float64_as_the_stock_head(numbers, dtype):
    """With a vocabulary so large that a share is below what float16 holds."""
    rng = np.random.default_rng(1)
    size = 60_000
    numbers |= {
        "kernel": tf.constant(rng.normal(size=(size, WIDTH)) * 0.1),
        "bias": tf.zeros(size, tf.float64),
        "hidden": numbers["hidden"] * 0.05,
    }
    exact = with_gradients(stock, numbers)[3:]
    low = {
        name: tf.cast(value, tf.float32)
        for name, value in numbers.items()
        if value.dtype == tf.float64
    }
    low["hidden"] = tf.cast(numbers["hidden"], dtype)
    found = with_gradients(weighted_cross_entropy, numbers | low)[3:]
    # The rows of the labels are far larger than the others, which would not be seen beside them.
    others = np.setdiff1d(np.arange(size), numbers["labels"])
    found.append(tf.gather(found[1], others))
    exact.append(tf.gather(exact[1], others))
    names = ("hidden", "kernel", "bias", "other rows of the kernel")
    for name, ours_, right in zip(names, found, exact, strict=True):
        error = np.linalg.norm(np.float64(ours_) - right) / np.linalg.norm(right)
        assert error < (0.003 if dtype == "float16" else 0.02), name


def test_half_precision_does_not_overflow_where_a_piece_is_frequent():
    """The sum of its probabilities and hidden states over a chunk is more than float16 holds."""
    rng = np.random.default_rng(0)
    rows, size = 512, 300
    hidden = tf.constant(rng.normal(size=(rows, WIDTH)) + 3.0, tf.float32)
    numbers = {
        "hidden": hidden,
        "kernel": tf.constant(rng.normal(size=(size, WIDTH)) * 0.02, tf.float32),
        "bias": tf.constant(np.where(np.arange(size) == 7, 6.0, 0.0), tf.float32),
        "labels": tf.constant(rng.integers(0, size, rows), tf.int32),
        "weights": tf.ones(rows),
    }
    expected = with_gradients(stock, numbers)
    found = with_gradients(weighted_cross_entropy, numbers | {"hidden": tf.cast(hidden, "float16")})
    for ours_, right in zip(found[3:], expected[3:], strict=True):
        assert np.isfinite(np.float64(ours_)).all()
        assert np.linalg.norm(np.float64(ours_) - right) < 0.01 * np.linalg.norm(right)


def make_model():
    keras.utils.set_random_seed(0)
    backbone = keras_nlp.models.BertBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=1,
        num_heads=2,
        hidden_dim=WIDTH,
        intermediate_dim=16,
        dropout=0.3,
        max_sequence_length=12,
    )
    return keras_nlp.models.BertMaskedLM(backbone=backbone)


def batch():
    rng = np.random.default_rng(0)
    x = {
        "token_ids": rng.integers(0, VOCABULARY, (4, 12)).astype(np.int32),
        "segment_ids": np.zeros((4, 12), np.int32),
        "padding_mask": np.arange(12)[None] < np.array([12, 5, 9, 12])[:, None],
        "mask_positions": rng.integers(0, 5, (4, 3)).astype(np.int32),
    }
    weights = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], np.float32)
    return x, rng.integers(0, VOCABULARY, (4, 3)).astype(np.int32), weights


def compiled(learner):
    """With the step that averages over the weights, as a run has it."""
    learner.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=CROSS_ENTROPY(from_logits=True),
        weighted_metrics=[
            keras.metrics.SparseCategoricalAccuracy("accuracy"),
            keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True),
        ],
    )
    fitting.build(learner, tf.data.Dataset.from_tensors(batch()))
    step.install(learner)
    return learner


def with_and_without_a_weight(count):
    """Trains and evaluates either head, with and without a batch that has nothing to predict."""
    strategy = replicas.strategy_of(count)
    x, labels, weights = batch()
    some = tf.data.Dataset.from_tensors((x, labels, weights))
    none = tf.data.Dataset.from_tensors((x, labels, 0 * weights))
    found = []
    for wrap in (lambda model: model, chunked_masked_lm):
        with patches.patch_keras_for(strategy):
            with strategy.scope():
                learner = compiled(wrap(make_model()))
            fitted = learner.fit(some.concatenate(none), verbose=0, shuffle=False).history
            logs = [
                learner.evaluate(data, verbose=0, return_dict=True)
                for data in (some, some.concatenate(none), none.concatenate(some))
            ]
            found.append([{name: values[-1] for name, values in fitted.items()}, *logs])
    return [[{name: float(logs[name]) for name in logs} for logs in each] for each in found]


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_without_predictions_changes_no_metric(count):
    stock_logs, logs = forked.run(with_and_without_a_weight, count)
    for ours_, whole in zip(logs, stock_logs, strict=True):
        assert ours_ == pytest.approx(whole, rel=1e-5)
    for fewer in logs[2:]:
        assert fewer == pytest.approx(logs[1], rel=1e-6)


@pytest.mark.long
def test_a_model_trains_and_evaluates_as_with_the_stock_head():
    """With the same dropout in the backbone: the layers draw from the same seeds."""
    results = []
    for wrap in (lambda model: model, chunked_masked_lm):
        model = make_model()
        learner = compiled(wrap(model))
        logs = [learner.train_on_batch(*batch(), return_dict=True) for _ in range(3)]
        logs.append(learner.test_on_batch(*batch(), return_dict=True))
        results.append((logs, model.get_weights()))
    (stock_logs, stock_weights), (logs, weights) = results
    for ours_, whole in zip(logs, stock_logs, strict=True):
        assert ours_.keys() == whole.keys()
        assert [ours_[name] for name in whole] == pytest.approx(list(whole.values()), rel=1e-5)
    for ours_, whole in zip(weights, stock_weights, strict=True):
        np.testing.assert_allclose(ours_, whole, atol=2e-6)


@pytest.mark.long
def test_frozen_embeddings_get_no_gradient_and_the_rest_the_same(numbers):
    """As under adapters: a gradient of their size is neither computed nor held."""
    whole = with_gradients(weighted_cross_entropy, numbers)

    def frozen(**some):
        return weighted_cross_entropy(**some, kernel_trains=False)

    *found, kernel, bias = with_gradients(frozen, numbers)
    assert kernel is None
    for ours_, expected in zip([*found, bias], [*whole[:4], whole[5]], strict=True):
        np.testing.assert_allclose(ours_, expected, rtol=1e-12)
    asked, results, stock_chunks = [], [], chunked_head._all_chunks
    for wrap in (lambda model: model, chunked_masked_lm):
        model = make_model()
        model.backbone.trainable = False
        learner = compiled(wrap(model))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                chunked_head, "_all_chunks", lambda *w: asked.append(w[-2:]) or stock_chunks(*w)
            )
            for _ in range(3):
                learner.train_on_batch(*batch())
        results.append(model.get_weights())
    assert set(asked) == {(True, False)}
    for ours_, stock_ in zip(*results, strict=True):
        np.testing.assert_allclose(ours_, stock_, atol=2e-6)


@pytest.mark.long
def test_files_of_weights_and_optimizer_are_the_same_with_either_head(tmp_path):
    trained, other = compiled(chunked_masked_lm(make_model())), compiled(make_model())
    for learner, steps in ((trained, 3), (other, 1)):
        for _ in range(steps):
            learner.train_on_batch(*batch())
    trained.save_weights(tmp_path / "a.weights.h5")
    other.load_weights(tmp_path / "a.weights.h5")
    for ours_, theirs in zip(trained.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(ours_, theirs)
    optimizers = [[np.array(v) for v in m.optimizer.variables] for m in (trained, other)]
    assert any(np.abs(value).max() > 0 for value in optimizers[0][2:])
    for ours_, theirs in zip(*optimizers, strict=True):
        np.testing.assert_array_equal(ours_, theirs)


@pytest.mark.long
def test_what_is_saved_is_the_model_that_predicts(tmp_path):
    learner = compiled(chunked_masked_lm(make_model()))
    learner.train_on_batch(*batch())
    learner.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    x, *_ = batch()
    np.testing.assert_array_equal(loaded(x), learner.whole(x))


def test_another_loss_or_metric_is_refused():
    ours = CROSS_ENTROPY(from_logits=True)
    for loss, metrics in (
        ("sparse_categorical_crossentropy", []),
        (CROSS_ENTROPY(from_logits=False), []),
        (keras.losses.MeanSquaredError(), []),
        (None, []),
        (ours, [keras.metrics.SparseTopKCategoricalAccuracy()]),
    ):
        with pytest.raises(ValueError, match="stock head"):
            chunked_masked_lm(make_model()).compile(loss=loss, weighted_metrics=metrics)
