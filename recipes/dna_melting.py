"""Predict the temperature at which a DNA oligo melts: a Transformer encoder as a regression.

    python -m recipes.dna_melting
    python -m recipes.dna_melting --dataset my_oligos.csv      # columns: sequence, tm (degrees C)
    python -m recipes.dna_melting --strategy mirrored --replicas 2

Draws oligos of 8 to 60 bases, labels them by nearest-neighbour thermodynamics, and trains
a convolution and `keras_nlp.layers.TransformerEncoder` on one token a base with `model.fit()`:
Huber loss, Adam, linear warm-up, PolynomialDecay to zero.

What came out, in what time and on what machine: the table in README.md, which `make results` wrote.
"""

import dataclasses
from collections.abc import Sequence

import keras
import keras_nlp
import numpy as np
from keras.optimizers.schedules import PolynomialDecay

from callbacks.pictures import RegressionSummaries
from data import arrays
from data.errors import DataError
from data.oligos import (
    BASES,
    LONGEST,
    checked,
    encode,
    linear_baseline,
    load_oligos,
    nearest_neighbour_baseline,
)
from distribution.global_batch import GlobalMean, reduce_before_clipping
from training.artifacts import data_sha256
from training.command_line import command_line
from training.loaded_run import LoadedRun
from training.options import SharedOptions, option
from training.run import start_run
from training.schedules import WarmUp


@dataclasses.dataclass(kw_only=True)
class Options(SharedOptions):
    """Options of `recipes.dna_melting`."""

    dataset: str = option(
        "nearest-neighbour",
        "nearest-neighbour (drawn from the seed), or a CSV with the columns sequence and tm.",
    )
    oligos: int = option(
        40_000, "Training oligos to draw, where they are drawn.", within="[1, 1e7]"
    )
    num_layers: int = option(1, "Transformer layers.", within="[1, 1000]")
    num_heads: int = option(2, "Attention heads.", within="[1, 1000]")
    hidden_dim: int = option(
        64, "Width of the model; feed-forward layers are twice as wide.", within="[1, 1e5]"
    )
    dropout: float = option(0.0, "Dropout of the Transformer layers.", within="[0, 1)")
    base_learning_rate: float | None = option(
        None, "Peak learning rate for one replica (default: 3e-3)."
    )
    warmup_steps: int = option(200, "Steps of linear warm-up.", within="[0, 1e9]")
    epochs: int = 10

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        found = super().problems()
        if self.num_heads > 0 and self.hidden_dim % self.num_heads:
            found.append(
                f"--hidden-dim {self.hidden_dim}: must be a multiple of --num-heads "
                f"{self.num_heads}"
            )
        return found


def build_model(options: Options, mean: float, deviation: float) -> keras.Model:
    """Builds the model inside the strategy's scope.

    Args:
        options: sizes and dropout.
        mean: mean of the training split's temperatures, in degrees C.
        deviation: their standard deviation, in degrees C.

    Returns:
        A `keras.Model`: token ids, int32 of shape (batch, 60), 0 for padding, in; degrees C, of
        shape (batch, 1), out.
    """
    token_ids = keras.Input((LONGEST,), dtype="int32", name="token_ids")
    embedding = keras_nlp.layers.TokenAndPositionEmbedding(
        vocabulary_size=1 + len(BASES),
        sequence_length=LONGEST,
        embedding_dim=options.hidden_dim,
        embeddings_initializer=keras.initializers.RandomUniform(-1.0, 1.0),
    )
    # Neighbours stack on each other; attention alone takes thousands of steps to find them.
    x = keras.layers.Conv1D(options.hidden_dim, 3, padding="same")(embedding(token_ids))
    # Passed explicitly: a convolution loses Keras's own mask when a saved model is loaded.
    is_base = keras.ops.not_equal(token_ids, 0)
    for _ in range(options.num_layers):
        x = keras_nlp.layers.TransformerEncoder(
            intermediate_dim=2 * options.hidden_dim,
            num_heads=options.num_heads,
            dropout=options.dropout,
            normalize_first=True,
        )(x, padding_mask=is_base)
    x = keras.layers.GlobalAveragePooling1D()(x, mask=is_base)  # over the bases
    x = keras.layers.Dense(options.hidden_dim, activation="relu")(x)
    # In full precision, also under a mixed policy: half precision has steps of 0.06 at 100.
    full = keras.config.floatx()
    standardised = keras.layers.Dense(1, dtype=full)(x)
    celsius = keras.layers.Rescaling(scale=deviation, offset=mean, dtype=full)(standardised)
    return keras.Model(token_ids, celsius, name="melting_temperature")


def main(options: Options) -> dict:
    """Trains, tests and saves; returns what `results.json` holds."""
    with start_run("dna_melting", options) as run:
        if run.finished:
            return run.results
        # Oligos as token ids, and their temperatures in degrees C, by split.
        data = load_oligos(run.dataset, options.seed, options.oligos)
        splits = {name: (ids, tm[:, np.newaxis]) for name, (ids, tm) in data.splits.items()}
        splits = arrays.first_examples(splits, options.max_examples)
        train_ids, train_tm = splits["train"]
        # A trained run that is evaluated keeps its own scale.
        mean = run.metadata.get("mean", float(np.mean(train_tm, dtype=np.float64)))
        deviation = run.metadata.get("deviation", float(np.std(train_tm, dtype=np.float64)))
        if not deviation > 0:
            raise DataError(f"{data.name}: all training oligos melt at {mean:g} degrees C")
        counts = ", ".join(f"{len(tm):,} {split}" for split, (_, tm) in splits.items())
        plan = run.plan(
            examples=len(train_tm),
            base_learning_rate=3e-3,
            batch_size_per_replica=64,
            tokens_per_example=float((train_ids > 0).sum(axis=1).mean()),
            about={"oligos": f"{data.name}: {counts}; {mean:.1f} +- {deviation:.1f} degrees C"},
            dataset=data.name,
            data_sha256=data_sha256(splits),
        )
        batch_size = plan.global_batch_size
        train_data = arrays.training_data(*splits["train"], seed=options.seed, **plan.batches)
        valid_data = arrays.evaluation_data(*splits["valid"], batch_size=batch_size)
        test_data = arrays.evaluation_data(*splits["test"], batch_size=batch_size)
        baseline = {
            "nearest_neighbour_rmse": nearest_neighbour_baseline(data.splits),
            "linear_rmse": linear_baseline(data.splits),
            "mean_rmse": float(np.sqrt(np.mean((splits["test"][1] - mean) ** 2))),
        }
        # The encoder, its schedule and its loss in degrees C, under the strategy.
        with run.strategy.scope():
            model = build_model(options, mean, deviation)
            warmup = plan.warmup_steps(options.warmup_steps)
            decay = PolynomialDecay(plan.learning_rate, plan.total_steps - warmup, 0.0)
            optimizer = keras.optimizers.Adam(
                WarmUp(warmup, decay), beta_2=0.98, epsilon=1e-9, global_clipnorm=options.clip_norm
            )
            model.compile(
                optimizer=reduce_before_clipping(optimizer),
                # In degrees C: squared up to an error of one degree, linear beyond.
                loss=GlobalMean(keras.losses.Huber(delta=1.0)),
                weighted_metrics=[
                    keras.metrics.MeanMetricWrapper(keras.losses.huber, name="huber", delta=1.0),
                    keras.metrics.RootMeanSquaredError("rmse"),
                ],
                **plan.compile_options,
            )
        # Training and test; TensorBoard shows predicted and true temperatures.
        scatter = RegressionSummaries(run.tensorboard, *splits["test"], unit="°C")
        fit_options = plan.fit_options(
            model, train_data, validation=valid_data, test=test_data, extra=[scatter]
        )
        model.fit(train_data, **fit_options)
        test = model.evaluate(test_data, return_dict=True, **plan.evaluate_options)
        return run.finish(
            model,
            test={"huber": test["huber"], "rmse": test["rmse"]},
            baseline=baseline,
            metadata={"mean": mean, "deviation": deviation},
        )


def predict(run: LoadedRun, inputs: Sequence[str]) -> list[list[dict]]:
    """Returns the temperatures at which oligos melt, in degrees C.

    Args:
        run: a finished run of this recipe.
        inputs: oligos of 8 to 60 bases.
    """
    sequences = [checked(text, repr(text[:80])) for text in inputs]
    celsius = keras.ops.convert_to_numpy(run.load_model("float32")(encode(sequences)))
    return [[{"°C": float(temperature)}] for temperature in celsius[:, 0]]


if __name__ == "__main__":
    command_line(Options, main)
