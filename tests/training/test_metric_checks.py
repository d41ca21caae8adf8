"""Rejects metrics of several values, and those that do not add up over replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from data import arrays
from distribution.errors import DistributionError
from tests.support import forked, tiny_recipe
from tests.support.refusals import refused
from training import metric_checks
from training.errors import RunError


class TestMetrics:
    def test_one_of_several_values(self, tmp_path):
        def one_hot(x, y, **batches):
            return arrays.training_data(x, keras.utils.to_categorical(y, 2), **batches)

        def arguments():
            scores = keras.metrics.F1Score()
            return {"loss": "mse", "metrics": [scores]}

        said = refused(tmp_path, arguments=arguments, parts={"pipeline": one_hot})
        assert said.startswith("the metric f1_score has several values, of shape (2,): ")
        assert "F1Score(average='macro')" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"loss": 0.5, "note": "good"}, "): note is 'good', expected a number; pass other results"),
        ({"loss": "0.5"}, "): loss is '0.5', expected a number"),
        ({"recall": [0.5, 1.0]}, "): recall is [0.5, 1.0], expected a number"),
        ({"recall": np.ones(2)}, "): recall is array([1., 1.]), expected a number"),
        ([0.5, 0.25], ") got a list: expected numbers by name, as model.evaluate(..., return_dict"),
    ],
)
def test_metrics_of_a_recipe_that_are_no_numbers(values, found):
    with pytest.raises(RunError) as refused:
        metric_checks.as_numbers("test", values, "; do this")
    assert str(refused.value).startswith(f"run.finish(test=...{found}")
    assert str(refused.value).endswith("; do this")


class Of(keras.metrics.Metric):
    """A metric of one variable and a count of updates, for the errors of a batch."""

    def __init__(self, update, result=lambda value, count: value):
        super().__init__(name="own")
        self.value = self.add_variable((), "zeros", name="value")
        self.count = self.add_variable((), "zeros", name="count")
        self.update, self.compute = update, result

    def update_state(self, y_true, y_pred, sample_weight=None):
        labels = keras.ops.one_hot(y_true, 2, dtype=y_pred.dtype)
        self.value.assign(self.update(self.value, keras.ops.abs(labels - y_pred)))
        self.count.assign(self.count + 1)

    def result(self):
        return self.compute(self.value, self.count)


def largest(value, errors):
    return keras.ops.maximum(value, keras.ops.max(errors))


def last(value, errors):
    return keras.ops.mean(errors)


def total(value, errors):
    return value + keras.ops.sum(errors)


def mean_of_means(value, errors):
    return value + keras.ops.mean(errors)


def of_parts_alone(value, errors):
    if errors.shape[0] == 8 and tf.distribute.get_replica_context() is not None:
        raise ValueError("too many examples")
    return value + keras.ops.sum(errors)


def tried_metrics(folder):
    """Each metric on two replicas: the line of an error, or the notes of a run."""
    said = {}
    for update in (largest, last, total, mean_of_means, of_parts_alone):
        average = update is mean_of_means

        def arguments(options, rate, update=update, average=average):
            divide = {"result": lambda value, count: value / count} if average else {}
            return tiny_recipe.compile_arguments(options, rate) | {
                "weighted_metrics": [Of(update, **divide)]
            }

        options = tiny_recipe.Options(
            run_dir=folder / update.__name__, strategy="mirrored", replicas=2, max_steps=1
        )
        try:
            said[update.__name__] = tiny_recipe.main(
                options, arguments=arguments, left_out=("validation", "test")
            )["notes"]
        except DistributionError as error:
            said[update.__name__] = str(error)
    return said


@pytest.mark.long
def test_metrics_whose_states_do_not_add_up_are_refused(tmp_path):
    said = forked.run(tried_metrics, tmp_path)
    for name in ("largest", "last"):
        assert said[name].startswith("metric own: Of does not add up over the replicas")
    assert said["total"] == said["mean_of_means"] == []
    (note,) = said["of_parts_alone"]
    assert note.startswith("metric own: could not try whether it adds up over replicas (too")
