import keras
import numpy as np
import pytest

from callbacks.evaluate_every import EvaluateEvery, evaluate_aside
from callbacks.records import Records
from callbacks.throughput import Throughput


@pytest.fixture
def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse", weighted_metrics=["mae"], jit_compile=False)
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    made.train_on_batch(x, y)
    return made


@pytest.fixture
def data():
    x, y = np.full((6, 2), 3.0, "float32"), np.zeros((6, 1), "float32")
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(3)


def test_the_epochs_metrics_are_left_alone(model, data):
    before = model.get_metrics_result()
    found = evaluate_aside(model, data, [])
    assert found == pytest.approx(model.evaluate(data, verbose=0, return_dict=True))
    model.train_on_batch(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))
    before = {name: float(value) for name, value in model.get_metrics_result().items()}
    assert evaluate_aside(model, data, []) != before
    after = {name: float(value) for name, value in model.get_metrics_result().items()}
    assert after == before


def test_also_when_it_is_cut_off(model, data):
    class Stop(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    before = {name: float(value) for name, value in model.get_metrics_result().items()}
    with pytest.raises(KeyboardInterrupt):
        evaluate_aside(model, data, [Stop()])
    after = {name: float(value) for name, value in model.get_metrics_result().items()}
    assert after == before


@pytest.fixture
def made(model, data, listener):
    def make(every):
        records = Records([listener], Throughput(examples_per_step=1))
        callback = EvaluateEvery(records, data, "test", every).count_steps(5, 10)
        callback.set_model(model)
        return callback

    return make


def test_it_evaluates_where_it_is_due(made, listener):
    callback = made(2)
    for batch in range(5):
        callback.on_train_batch_end(batch, {})
    assert [(r["split"], r["step"]) for r in listener.records] == [("test", 2), ("test", 4)]
    assert listener.records[0].keys() >= {"loss", "mae"}


def test_never(made, listener):
    callback = made(None)
    callback.on_train_batch_end(0, {})
    callback.catch_up()
    assert listener.records == []


def test_an_evaluation_that_was_cut_off_is_made_up_for(made, listener):
    callback = made(2)
    callback.set_state({"evaluated": 2})
    callback.step = 4
    callback.catch_up()
    assert [r["step"] for r in listener.records] == [4]
    callback.catch_up()
    assert len(listener.records) == 1 and callback.get_state() == {"evaluated": 4}
