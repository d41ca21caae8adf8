"""Predict the temperature at which a DNA oligo melts: a Transformer encoder as a regression.

    python -m recipes.dna_melting
    python -m recipes.dna_melting --dataset my_oligos.csv      # columns: sequence, tm (degrees C)
    python -m recipes.dna_melting --strategy mirrored --replicas 2

Draws oligos of 8 to 60 bases, labels them by nearest-neighbour thermodynamics, and trains
`keras_nlp.layers.TransformerEncoder` on one token a base with `model.fit()`: Huber loss, Adam under
the inverse-square-root warm-up schedule of "Attention Is All You Need".

Measured on 2 CPU cores that were busy with other work, with the default options: a test error
(RMSE) of 0.62 degrees C after 6,250 steps (0.80 after 5,000, which took 6 minutes); a linear fit on
GC share and length misses by 7.41.
"""

import dataclasses
import logging

import keras
import keras_nlp
import numpy as np
import tensorflow as tf

from callbacks.evaluate_every import EvaluateEvery
from callbacks.learning_rate import LearningRatePrinter
from callbacks.restore import Restore
from callbacks.run_log import RunLog
from callbacks.stop_at_step import StopAtStep
from callbacks.stop_on_bad_loss import StopOnBadLoss
from data import batches, oligos
from data.errors import DataError
from distribution import strategies
from distribution.global_loss import GlobalMean
from distribution.optimizers import in_order
from distribution.scaling import make_plan
from recipes import run as runs
from recipes.options import SharedOptions, fraction, positive
from recipes.schedules import InverseSquareRoot

log = logging.getLogger("recipes")


@dataclasses.dataclass(kw_only=True)
class Options(SharedOptions):
    """Options of `recipes.dna_melting`."""

    METRICS = ("loss", "huber", "rmse")

    dataset: str = oligos.NEAREST_NEIGHBOUR
    """nearest-neighbour (drawn from the seed), or a CSV with the columns sequence and tm."""
    oligos: int = 40_000
    """Training oligos to draw; a CSV gives what it has."""
    layers: int = 2
    """Transformer layers."""
    heads: int = 2
    """Attention heads."""
    width: int = 64
    """Width of the model, also in the schedule; the feed-forward layers are twice as wide."""
    dropout: float = 0.0
    """Dropout of the Transformer layers."""
    base_learning_rate: float | None = None
    """Peak learning rate for one replica (default: half the paper's (width x warmup)^-0.5)."""
    warmup_steps: int = 400
    """Steps in which the learning rate grows."""
    epochs: int = 5
    """Passes over the training split."""

    def faults(self) -> list[str]:
        """What is wrong with the values."""
        found = super().faults()
        for name in ("oligos", "layers", "heads", "width", "warmup_steps"):
            found += positive(name, getattr(self, name))
        found += fraction("dropout", self.dropout)
        if self.heads > 0 and self.width > 0 and self.width % self.heads:
            found.append(f"--width {self.width}: must be a multiple of --heads {self.heads}")
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
    token_ids = keras.Input((oligos.LONGEST,), dtype="int32", name="token_ids")
    embedding = keras_nlp.layers.TokenAndPositionEmbedding(
        vocabulary_size=1 + len(oligos.BASES),
        sequence_length=oligos.LONGEST,
        embedding_dim=options.width,
        mask_zero=True,
    )
    # The layer around it makes the mask; without this line Keras warns that it is lost.
    embedding.position_embedding.supports_masking = True
    x = embedding(token_ids)
    for _ in range(options.layers):
        x = keras_nlp.layers.TransformerEncoder(
            intermediate_dim=2 * options.width, num_heads=options.heads, dropout=options.dropout
        )(x)
    x = keras.layers.GlobalAveragePooling1D()(x)  # over the bases: the padding is masked
    # In full precision, also under a mixed policy: half precision has steps of 0.06 at 100.
    full = keras.config.floatx()
    standardised = keras.layers.Dense(1, dtype=full)(x)
    celsius = keras.layers.Rescaling(scale=deviation, offset=mean, dtype=full)(standardised)
    return keras.Model(token_ids, celsius, name="melting_temperature")


def main(options: Options) -> dict:
    """Trains, tests and saves; returns what `results.json` holds."""
    # Where the work runs.
    strategy = runs.prepare(options)
    if strategies.serves_others(strategy):
        return {}
    with runs.open_run("dna_melting", options, strategy) as run:
        if run.results is not None:
            log.info("the run in %s is finished: nothing to do", run.folder)
            return run.results

        # Oligos and temperatures by split, and what a model has to beat.
        data = oligos.load_oligos(options.dataset, options.seed, options.oligos)
        splits = dict(data.splits)
        splits["train"] = tuple(array[: options.max_examples] for array in splits["train"])
        train_ids, train_tm = splits["train"]
        mean, deviation = (float(f(train_tm, dtype=np.float64)) for f in (np.mean, np.std))
        if not deviation > 0:
            raise DataError(
                f"{data.name}: all {len(train_tm)} training oligos melt at {mean:g} degrees C; "
                "there is nothing to learn"
            )
        baseline = {
            "linear_rmse": oligos.linear_baseline(splits),
            "mean_rmse": float(np.sqrt(np.mean((splits["test"][1] - mean) ** 2))),
        }

        # The plan: what this many replicas do. The paper's rate has its peak, (width x
        # warm-up)^-0.5, at the end of the warm-up; the default is half of it.
        papers_peak = (options.width * options.warmup_steps) ** -0.5
        plan = make_plan(
            replicas=strategies.replicas(strategy),
            examples=len(train_tm),
            batch_size_per_replica=options.batch_size_per_replica
            or (32 if options.global_batch_size is None else None),
            global_batch=options.global_batch_size,
            accumulate_steps=options.accumulate_steps,
            base_learning_rate=options.base_learning_rate or papers_peak / 2,
            lr_scaling=options.lr_scaling,
            epochs=options.epochs,
            max_steps=options.max_steps,
            resumed=run.resolved,
        )
        factor = plan.learning_rate / papers_peak
        schedule = InverseSquareRoot(factor, options.width, options.warmup_steps)
        run.resolve(dataset=data.name, data_sha256=runs.data_sha256(splits), **plan.trajectory())
        run.say_plan(
            plan,
            f"oligos         {data.name}: "
            + ", ".join(f"{len(tm):,} {split}" for split, (_, tm) in splits.items())
            + f"; melting at {mean:.1f} +- {deviation:.1f} degrees C",
            f"schedule       {factor:g} x width^-0.5 x min(step^-0.5, step x warm-up^-1.5), width "
            f"{options.width}, warm-up {options.warmup_steps} steps",
        )

        train_data = batches.training_batches(
            len(train_tm),
            plan.global_batch_size,
            options.seed,
            gather_from(*splits["train"]),
            batches_per_epoch=plan.steps_per_epoch * plan.accumulate_steps,
            first_batch=run.steps_done * plan.accumulate_steps,
        )
        valid_data, test_data = (
            batches.evaluation_batches(
                len(splits[split][1]), plan.global_batch_size, gather_from(*splits[split])
            )
            for split in ("valid", "test")
        )

        # Model, schedule and loss, under the strategy.
        with strategy.scope():
            model = build_model(options, mean, deviation)
            optimizer = keras.optimizers.Adam(
                learning_rate=schedule,
                beta_1=0.9,
                beta_2=0.98,
                epsilon=1e-9,
                global_clipnorm=options.clip_norm,
            )
            model.compile(
                optimizer=in_order(optimizer),
                # In degrees C: squared up to an error of one degree, linear beyond.
                loss=GlobalMean(keras.losses.Huber(delta=1.0)),
                weighted_metrics=[
                    keras.metrics.MeanMetricWrapper(keras.losses.huber, name="huber", delta=1.0),
                    keras.metrics.RootMeanSquaredError("rmse"),
                ],
                jit_compile={"auto": "auto", "on": True, "off": False}[options.jit],
                steps_per_execution=run.steps_per_execution(plan),
            )
        run.build(model, plan, train_data)
        run.require_space(model, options.keep_checkpoints)

        # Training.
        run_log = RunLog(
            run.folder if run.is_chief else None,
            steps_per_epoch=plan.steps_per_epoch,
            total_steps=plan.total_steps,
            examples_per_step=plan.global_batch_size * plan.accumulate_steps,
            tokens_per_example=float((train_ids > 0).sum(axis=1).mean()),
            log_every=options.log_every,
        )
        saver = run.checkpoints(plan, run_log)
        validator = EvaluateEvery(
            run_log, valid_data, "validation", options.validate_every, [saver]
        )
        tester = EvaluateEvery(run_log, test_data, "test", options.test_every, [saver])
        saver.with_state |= {"validator": validator, "tester": tester}
        with run.stoppable(saver):
            model.fit(
                train_data,
                epochs=plan.epochs,
                initial_epoch=run.epochs_done,
                steps_per_epoch=plan.steps_per_epoch,
                validation_data=valid_data,
                verbose=0,
                shuffle=False,  # the data are shuffled already
                callbacks=[
                    Restore(run.saved, saver.with_state),
                    StopAtStep(plan.steps_per_epoch, plan.total_steps),
                    StopOnBadLoss(plan.steps_per_epoch, saver.newest_name),
                    run_log,
                    LearningRatePrinter(),
                    validator,
                    tester,
                    saver,
                ],
            )
            test = model.evaluate(test_data, return_dict=True, verbose=0, callbacks=[saver])

        # What is left behind.
        log.info(
            "test error (RMSE) %.3f degrees C; a linear fit on GC share and length: %.3f; always "
            "the mean: %.3f",
            *(test["rmse"], baseline["linear_rmse"], baseline["mean_rmse"]),
        )
        if run.is_chief:
            runs.save_keras_file(model, run.folder / "model" / "model.keras")
        return run.finish(
            {
                "dataset": data.name,
                "preset": None,
                "vocabulary_sha256": None,
                **plan.summary(),
                "history": run_log.history,
                "test": {"huber": test["huber"], "rmse": test["rmse"]},
                "baseline": baseline,
                **run_log.speed(),
                "weights_sha256": runs.weights_sha256(model),
            }
        )


def gather_from(ids: np.ndarray, temperatures: np.ndarray):
    """How a batch comes from the numbers of its examples: ids, degrees C and weights of one.

    Args:
        ids: int32 of shape (n, 60).
        temperatures: float32 of shape (n,).
    """
    dtype = keras.config.floatx()
    # A column, as the model's answers are: (batch,) against (batch, 1) would broadcast to
    # (batch, batch) wherever a loss or a metric does not look at the shapes.
    column = tf.constant(temperatures[:, np.newaxis], dtype)
    id_table = tf.constant(ids)

    def make_batch(examples, epoch):
        found = tf.gather(column, examples)
        return tf.gather(id_table, examples), found, tf.ones_like(found[:, 0])

    return make_batch


if __name__ == "__main__":
    runs.command_line(Options, main)
