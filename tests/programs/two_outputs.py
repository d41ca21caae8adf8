"""Predict a number and a class: two inputs, two outputs, two losses with weights."""

import dataclasses

import keras
import numpy as np

from data import arrays
from training.command_line import command_line
from training.options import SharedOptions
from training.run import start_run


@dataclasses.dataclass(kw_only=True)
class Options(SharedOptions):
    """Options of the program."""


def main(options: Options) -> dict:
    """Trains and tests."""
    with start_run("two_outputs", options) as run:
        if run.finished:
            return run.results
        rng = np.random.default_rng(2)
        x = {"left": rng.normal(size=(66, 3)), "right": rng.normal(size=(66, 2))}
        price = x["left"].sum(axis=1, keepdims=True)
        y = {"price": price, "kind": (price[:, 0] > 0).astype("int32")}
        weights = {"price": rng.uniform(0.5, 1.5, 66), "kind": rng.uniform(0.0, 1.0, 66)}

        def part(arrays_by_name, begin, end):
            return {name: array[begin:end] for name, array in arrays_by_name.items()}

        plan = run.plan(examples=40, base_learning_rate=1e-2)
        train = arrays.training_data(
            *(part(group, 0, 40) for group in (x, y, weights)), seed=options.seed, **plan.batches
        )
        size = plan.global_batch_size
        valid = arrays.evaluation_data(part(x, 40, 51), part(y, 40, 51), batch_size=size)
        test = arrays.evaluation_data(part(x, 51, 66), part(y, 51, 66), batch_size=size)

        with run.strategy.scope():
            left, right = keras.Input((3,), name="left"), keras.Input((2,), name="right")
            hidden = keras.layers.Concatenate()([left, right])
            hidden = keras.layers.Dense(6, activation="tanh")(hidden)
            frozen = keras.layers.Dense(6, trainable=False)(hidden)
            outputs = {
                "price": keras.layers.Dense(1, name="price")(frozen),
                "kind": keras.layers.Dense(2, activation="softmax", name="kind")(hidden),
            }
            model = keras.Model({"left": left, "right": right}, outputs)
            model.compile(
                optimizer=keras.optimizers.RMSprop(plan.learning_rate, clipvalue=0.05),
                loss={"price": keras.losses.Huber(), "kind": "sparse_categorical_crossentropy"},
                loss_weights={"price": 2.0, "kind": 0.5},
                metrics={"price": ["mae"], "kind": ["accuracy"]},
            )
        fit_options = run.prepare(model, train, validation=valid, test=test)
        model.fit(train, **fit_options)
        scores = model.evaluate(test, return_dict=True, **run.evaluate_options)
        return run.finish(model, test=scores, baseline={})


if __name__ == "__main__":
    command_line(Options, main)
