"""Classify small pictures: convolutions, batch normalisation, dropout, named losses and metrics."""

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
    with start_run("convnet", options) as run:
        if run.finished:
            return run.results
        rng = np.random.default_rng(0)
        labels = rng.integers(0, 3, 66)
        pictures = rng.normal(size=(66, 8, 8, 1)) + labels[:, None, None, None]
        plan = run.plan(examples=40, base_learning_rate=1e-2)
        train = arrays.training_data(pictures[:40], labels[:40], seed=options.seed, **plan.batches)
        size = plan.global_batch_size
        valid = arrays.evaluation_data(pictures[40:51], labels[40:51], batch_size=size)
        test = arrays.evaluation_data(pictures[51:], labels[51:], batch_size=size)

        with run.strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((8, 8, 1)),
                    keras.layers.Conv2D(4, 3, kernel_regularizer="l2"),
                    keras.layers.BatchNormalization(),
                    keras.layers.ReLU(),
                    keras.layers.Flatten(),
                    keras.layers.Dropout(0.3),
                    keras.layers.Dense(3, activation="softmax"),
                ]
            )
            model.compile(
                optimizer=keras.optimizers.SGD(plan.learning_rate, momentum=0.9, clipnorm=0.5),
                loss="sparse_categorical_crossentropy",
                metrics=["accuracy"],
            )
        fit_options = run.prepare(model, train, validation=valid, test=test)
        model.fit(train, **fit_options)
        scores = model.evaluate(test, return_dict=True, **run.evaluate_options)
        return run.finish(model, test=scores, baseline={})


if __name__ == "__main__":
    command_line(Options, main)
