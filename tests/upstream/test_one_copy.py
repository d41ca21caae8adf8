"""What breaks where all replicas share one copy of a variable."""

import keras

from distribution import keras_compat
from tests.upstream.support import (
    asking_keras,
    assert_close,
    batches,
    central_storage,
    linear_model,
    numbers,
    only_if,
    repair,
)


@repair("add_in_place", "Variable.assign_add reads and assigns (no thread known)")
def test_a_metric_over_two_batches(repaired):
    x, y = numbers()
    with only_if(repaired, keras_compat.add_in_place()):
        with central_storage().scope():
            error = keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error, name="error")
            model = linear_model(keras.optimizers.SGD(0.0), metrics=[error])
        with asking_keras():
            found = model.evaluate(batches(x, y), verbose=0, return_dict=True)
            assert_close(found["error"], (y**2).mean(), "mean")


@repair("share_dropout_seeds", "the seed variable has no aggregation (no thread known)")
def test_a_step_with_dropout(repaired):
    with only_if(repaired, keras_compat.share_dropout_seeds()):
        with central_storage().scope():
            layers = [keras.layers.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile(optimizer="sgd", loss="mse")
        with asking_keras():
            model.fit(batches(*numbers()), verbose=0)
