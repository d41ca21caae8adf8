"""Tag tokens: a bidirectional LSTM whose embedding masks the padding, normalised or not."""

import dataclasses

import keras
import numpy as np

from data import arrays
from training.command_line import command_line
from training.options import SharedOptions, option
from training.run import start_run


@dataclasses.dataclass(kw_only=True)
class Options(SharedOptions):
    """Options of the program."""

    normalise: bool = option(False, "Normalise the embeddings over the batch, padding left out.")


def main(options: Options) -> dict:
    """Trains and tests."""
    with start_run("masked_tokens", options) as run:
        if run.finished:
            return run.results
        rng = np.random.default_rng(1)
        tokens = rng.integers(1, 12, (66, 7))
        tokens[np.arange(7) >= rng.integers(1, 8, 66)[:, None]] = 0  # padding
        tags = (tokens % 3 == 0).astype("int32")
        importance = rng.uniform(0.2, 2.0, 66)  # of the sentences
        plan = run.plan(examples=40, base_learning_rate=1e-2)
        train = arrays.training_data(
            tokens[:40], tags[:40], importance[:40], seed=options.seed, **plan.batches
        )
        size = plan.global_batch_size
        valid = arrays.evaluation_data(tokens[40:51], tags[40:51], batch_size=size)
        test = arrays.evaluation_data(tokens[51:], tags[51:], batch_size=size)

        with run.strategy.scope():
            normalised = [keras.layers.BatchNormalization()] if options.normalise else []
            model = keras.Sequential(
                [
                    keras.Input((7,), dtype="int32"),
                    keras.layers.Embedding(12, 4, mask_zero=True),
                    *normalised,
                    keras.layers.Bidirectional(keras.layers.LSTM(3, return_sequences=True)),
                    keras.layers.Dense(2),
                ]
            )
            model.compile(
                optimizer=keras.optimizers.Adam(plan.learning_rate, global_clipnorm=0.2),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
                weighted_metrics=[keras.metrics.SparseCategoricalAccuracy("weighted")],
            )
        fit_options = run.prepare(model, train, validation=valid, test=test)
        model.fit(train, **fit_options)
        scores = model.evaluate(test, return_dict=True, **run.evaluate_options)
        return run.finish(model, test=scores, baseline={})


if __name__ == "__main__":
    command_line(Options, main)
