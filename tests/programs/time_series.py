"""Classify time series: Conv1D, pooling, and classes of unequal weight."""

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
    with start_run("time_series", options) as run:
        if run.finished:
            return run.results
        rng = np.random.default_rng(4)
        labels = (rng.uniform(size=66) < 0.3).astype("int32")
        series = (
            rng.normal(size=(66, 12, 1)) + labels[:, None, None] * np.sin(np.arange(12))[:, None]
        )
        plan = run.plan(examples=40, base_learning_rate=1e-2)
        train = arrays.training_data(series[:40], labels[:40], seed=options.seed, **plan.batches)
        size = plan.global_batch_size
        valid = arrays.evaluation_data(series[40:51], labels[40:51], batch_size=size)
        test = arrays.evaluation_data(series[51:], labels[51:], batch_size=size)

        with run.strategy.scope():
            inputs = keras.Input((12, 1))
            hidden = keras.layers.Conv1D(4, 3, padding="same")(inputs)
            hidden = keras.layers.BatchNormalization()(hidden)
            hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.ReLU()(hidden))
            hidden = keras.layers.Dropout(0.25)(hidden)
            model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
            model.compile(
                optimizer=keras.optimizers.AdamW(plan.learning_rate, weight_decay=0.01),
                loss="binary_crossentropy",
                metrics=["accuracy", keras.metrics.AUC(name="auc")],
            )
        fit_options = run.prepare(model, train, validation=valid, test=test)
        model.fit(train, class_weight={0: 1.0, 1: 3.0}, **fit_options)
        scores = model.evaluate(test, return_dict=True, **run.evaluate_options)
        return run.finish(model, test=scores, baseline={})


if __name__ == "__main__":
    command_line(Options, main)
