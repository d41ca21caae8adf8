"""A recipe of about a second that uses every feature of a run.

A dense network with dropout on numbers: 72 examples make 9 steps an epoch, of which there are two.
"""

import dataclasses

import keras
import numpy as np

from callbacks.steps import StepCallback
from data import arrays
from training.artifacts import data_sha256
from training.command_line import command_line
from training.options import SharedOptions
from training.run import start_run

NAME = "tiny_recipe"
STEPS_PER_EPOCH = 9


@dataclasses.dataclass(kw_only=True)
class Options(SharedOptions):
    """Options of the tiny recipe."""

    strategy: SharedOptions.__annotations__["strategy"] = "none"
    jit: SharedOptions.__annotations__["jit"] = "off"
    epochs: int = 2
    global_batch_size: int | None = 8
    base_learning_rate: float | None = 0.01
    checkpoint_every: int = 4
    log_every: int = 2
    quiet: bool = True
    dropout: float = 0.2


class Counter(StepCallback):
    """A stateful callback of the recipe: counts its calls over all processes."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def on_step_end(self, step, logs):
        self.count += 1

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]


class StopAfter(keras.callbacks.Callback):
    """Interrupts a new run in the step after a step that is saved."""

    def __init__(self, step):
        super().__init__()
        self.left = step + 1

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def splits(seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns splits of six numbers per example; the class is the sign of their sum."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, count in (("train", 72), ("valid", 20), ("test", 30)):
        x = rng.normal(size=(count, 6)).astype("float32")
        made[name] = (x, (x.sum(axis=1) > 0).astype("int32"))
    return made


def build_model(options: Options) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            # Not relu, which turns NaN into 0 on some processors.
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dropout(options.dropout),
            keras.layers.Dense(2, dtype=keras.config.floatx()),
        ]
    )


def compile_arguments(options: Options, learning_rate) -> dict:
    """Returns the arguments of `compile()`, without those that the run adds."""
    optimizer = keras.optimizers.Adam(
        keras.optimizers.schedules.PolynomialDecay(learning_rate, 100, 0.0),
        global_clipnorm=options.clip_norm,
    )
    return dict(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.SparseCategoricalCrossentropy("cross_entropy", from_logits=True),
            keras.metrics.SparseCategoricalAccuracy("accuracy"),
        ],
    )


def main(
    options: Options,
    data=None,
    arguments=compile_arguments,
    extra=(),
    inside=None,
    build=build_model,
    pipeline=arrays.training_data,
    saved_part=lambda model: model,
    left_out=(),
    notes=(),
    fit=lambda model, data, fit_options: model.fit(data, **fit_options),
) -> dict:
    """Trains, tests and saves.

    Args:
        options: the options.
        data: examples by split; the usual ones by default.
        arguments: returns the arguments of `compile()`.
        extra: additional callbacks.
        inside: called with the run and the model before `fit()`.
        build: returns the model for the options.
        pipeline: returns the training batches, like `arrays.training_data`.
        saved_part: returns the model to save, of the one that is trained.
        notes: lines about the data, for `run.note()`.
        left_out: which of "validation" and "test" `run.prepare()` does not get.
        fit: called with the model, the training batches and what `run.prepare()` returns.
    """
    with start_run(NAME, options) as run:
        if run.finished:
            return run.results
        data = data or splits()
        run.note(*notes)
        plan = run.plan(
            examples=len(data["train"][1]),
            base_learning_rate=0.01,
            dataset="numbers",
            data_sha256=data_sha256(data),
        )
        train_data = pipeline(*data["train"], seed=options.seed, **plan.batches)
        valid_data, test_data = (
            arrays.evaluation_data(*data[split], batch_size=plan.global_batch_size)
            for split in ("valid", "test")
        )
        with run.strategy.scope():
            model = build(options)
            model.compile(**arguments(options, plan.learning_rate))
        saved = saved_part(model)
        fit_options = run.prepare(
            model,
            train_data,
            validation=None if "validation" in left_out else valid_data,
            test=None if "test" in left_out else test_data,
            extra=list(extra),
            saves=saved,
        )
        if inside is not None:
            inside(run, model)
        fit(model, train_data, fit_options)
        test = model.evaluate(test_data, return_dict=True, **run.evaluate_options)
        return run.finish(saved, test=test, baseline={"accuracy": 0.5})


if __name__ == "__main__":
    command_line(Options, main)
