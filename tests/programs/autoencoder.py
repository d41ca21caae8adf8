"""Compress numbers: an autoencoder with a loss of its own, a penalty by a layer, and a sampling."""

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


@keras.saving.register_keras_serializable("programs")
class Sparse(keras.layers.Layer):
    """Adds the mean absolute code to the loss."""

    def call(self, codes):
        """Returns the codes."""
        self.add_loss(0.1 * keras.ops.mean(keras.ops.abs(codes)))
        return codes


@keras.saving.register_keras_serializable("programs")
class Autoencoder(keras.Model):
    """Reconstructs its inputs; adds their mean squared error by `compute_loss()`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encoder = keras.layers.Dense(2, activation="tanh")
        self.sparse = Sparse()
        self.decoder = keras.layers.Dense(6)

    def call(self, inputs):
        """Returns reconstructions of shape (batch, 6)."""
        return self.decoder(self.sparse(self.encoder(inputs)))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        """Adds the reconstruction error to what `compile()` and the layers give."""
        error = keras.ops.mean(keras.ops.square(y_pred - x))
        return super().compute_loss(x, y, y_pred, sample_weight) + error


def main(options: Options) -> dict:
    """Trains and tests."""
    with start_run("autoencoder", options) as run:
        if run.finished:
            return run.results
        x = np.random.default_rng(3).normal(size=(66, 6)).cumsum(axis=1)
        plan = run.plan(examples=42, base_learning_rate=1e-2)
        train = arrays.training_data(x[:42], x[:42], seed=options.seed, **plan.batches)
        size = plan.global_batch_size
        valid = arrays.evaluation_data(x[42:54], x[42:54], batch_size=size)
        test = arrays.evaluation_data(x[54:], x[54:], batch_size=size)

        with run.strategy.scope():
            model = Autoencoder()
            model.compile(optimizer=keras.optimizers.Adam(plan.learning_rate), loss="mae")
        fit_options = run.prepare(model, train, validation=valid, test=test)
        model.fit(train, **fit_options)
        scores = model.evaluate(test, return_dict=True, **run.evaluate_options)
        return run.finish(model, test=scores, baseline={})


if __name__ == "__main__":
    command_line(Options, main)
