"""Predict the temperature at which DNA melts: energies of facing bases, added up.

    python -m recipes.dna_melting                        # a formula's temperatures, needs no file
    python -m recipes.dna_melting --dataset nnn          # 30,000 measured ones, downloaded
    python -m recipes.dna_melting --dataset my_table.csv # columns: sequence, structure, tm ...

Reads duplexes and hairpins with mismatches, bulges and loops from their outside in, one token per
pair of facing bases. Convolutions see neighbours, which stack on each other, and predict the
energies of a token; `keras_nlp.layers.TransformerEncoder` sees the whole molecule and corrects
them. They add up, and the temperature follows from thermodynamics, given the concentration of the
strands and the salt. Trained with `model.fit()`: mean absolute error in degrees C, AdamW or Muon,
linear warm-up, PolynomialDecay to zero.

The default data are labelled by SantaLucia's formula (1998), which misses temperatures of perfect
duplexes that were measured by UV melting by about 1.4 degrees C: use it to try the recipe, not to
draw conclusions. Measured temperatures are noisy and need other options: --epochs 30 --dropout 0.1
--optimizer muon --base-learning-rate 0.002 --members 2.

On the formula's duplexes: mean absolute error 0.08 degrees C in 2 minutes on 2 CPU cores; on
measured molecules 1.36 degrees C in 32 minutes on one core (README.md).
"""

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import keras
import keras_nlp
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import PolynomialDecay

from callbacks.pictures import RegressionSummaries
from callbacks.predictions import outputs_of
from data import arrays, melting
from data.errors import InputError, has_inputs, read_each
from data.melting_errors import (
    error_beside_formula,
    errors,
    errors_by_dataset,
    outside,
    plus_minus,
    ranges,
    share_within,
    worst_first,
)
from models import fine_tuning
from training.artifacts import data_sha256
from training.command_line import command_line
from training.errors import OptionsError
from training.loaded_run import LoadedRun
from training.options import HeldOutOptions, TransformerOptions, option
from training.plan import Plan
from training.run import start_run
from training.schedules import WarmUp, reshaped


@dataclasses.dataclass(kw_only=True)
class Options(TransformerOptions, HeldOutOptions):
    """Options of `recipes.dna_melting`."""

    EXAMPLE_INPUT: ClassVar[str] = "ACGTTGCATGCCA"
    INPUTS_AND_OUTPUTS: ClassVar[str] = (
        "A dict of two arrays in; degrees Celsius of shape (batch, 1) out.\n\n"
        "`columns`, int32 of shape (batch, columns): a molecule from its outside in, 0 for padding "
        "behind it. A column is 1 + 25 · kind + 5 · first + second. Kind: 0 a Watson-Crick pair, 1 "
        "a mismatch, bulge or internal loop, 2 an unpaired base in the loop of a hairpin, 3 a "
        "dangling end. First: the base of the 5' side, second: the opposite one; 0 where no base "
        "is, 1 to 4 for A, C, G and T.\n\n"
        "`conditions`, float32 of shape (batch, 2): ln([Na⁺] / 0.063 M) and ln C. C is 1 M for a "
        "hairpin, a quarter of all strands' concentration for a duplex, and half of it for a "
        "self-complementary one.\n\n"
        "The hairpin `CGAAAACG` at 0.063 M is `[14, 18, 56, 56, 56, 56]` and `[0, 0]`."
    )

    dataset: str = option(
        "nearest-neighbour",
        "nearest-neighbour (computed), nnn (measured), a CSV, or a folder with a CSV per split.",
    )
    fold: int = option(
        9, "Tenth of the sequences to test on where no test split is given.", within="[0, 9]"
    )
    oligos: int = option(12_000, "Training duplexes to draw for the formula.", within="[1, 1e7]")
    formula_weight: float = option(
        0.0,
        "Weight in the loss of each of --oligos formula duplexes, added to the measured training "
        "molecules; 0 adds none.",
        within="[0, 1000]",
    )
    enthalpy_weight: float = option(
        0.0,
        "Also train on measured enthalpies (column dh): an error of 1 kcal/mol counts as this many "
        "degrees C; 0 leaves them out.",
        within="[0, 1000]",
    )
    members: int = option(
        1,
        "Networks to train side by side; the mean of their answers is tested and saved, and has "
        "smaller errors.",
        within="[1, 100]",
    )
    num_heads: int = 4
    hidden_dim: int = option(128, "Width of the model; feed-forward layers are twice as wide.")
    dropout: float = option(0.0, "Dropout of the Transformer.", within="[0, 1)")
    base_learning_rate: float = 2e-3
    beta_2: float = 0.98
    warmup_steps: int | None = option(
        None, "Steps of linear warm-up (default: 50, but at most a tenth of the run)."
    )
    epochs: int = 8

    def problems(self) -> list[str]:
        """Returns a line for each pair of options that do not work together."""
        problems = super().problems()
        of_the_formula = self.dataset == melting.FORMULA and self.evaluation is None
        if self.formula_weight and of_the_formula:
            problems.append("--formula-weight: all molecules are the formula's; pass --dataset")
        if self.enthalpy_weight and of_the_formula:
            problems.append("--enthalpy-weight: the formula has no measured enthalpies")
        if self.fold != type(self).fold and self.evaluation is None:
            if self.dataset in (melting.FORMULA, melting.NNN):
                remedy = "leave it out, or pass another --dataset"
                problems.append(f"--fold: {self.dataset} has fixed splits; {remedy}")
            elif self.validation_file is not None and self.test_file is not None:
                problems.append(
                    "--fold: has no effect beside --validation-file and --test-file; leave it out"
                )
        if self.oligos != type(self).oligos and not (
            self.formula_weight or self.dataset == melting.FORMULA or self.evaluation is not None
        ):
            problems.append("--oligos: needs --formula-weight, or the formula's --dataset")
        if self.formula_weight and self.max_examples is not None:
            problems.append(
                "--max-examples and --formula-weight: pass only one of them; --oligos limits the "
                "formula's duplexes"
            )
        return problems


OUTPUT_LAYERS = "from_(neighbours|column|molecule)"  # the layers that predict energies
GAS_CONSTANT = 1.987e-3  # kcal/(mol K)
# Sizes of a stack's -dS and of its part that salt changes, in units of R: SantaLucia's (1998) are
# about 11 and 0.185. A column has softplus(0) = 0.69 of them before training.
ENTROPY = 15.0
SALT = 0.25


def build_model(options: Options, mean: float) -> keras.Model:
    """Builds the model inside the strategy's scope.

    Args:
        options: sizes and dropout.
        mean: mean of the training split's temperatures, in degrees C.

    Returns:
        A `keras.Model` from "columns", int32 of shape (batch, width) with 0 for padding, and
        "conditions", float of shape (batch, 2), to degrees C of shape (batch, 1).
    """
    columns = keras.Input((None,), dtype="int32", name="columns")
    conditions = keras.Input((2,), name="conditions")
    # Passed explicitly: a convolution drops Keras's own mask.
    is_column = keras.ops.not_equal(columns, 0)
    weights = keras.ops.expand_dims(keras.ops.cast(is_column, conditions.dtype), -1)

    x = keras.layers.Embedding(melting.COLUMN_IDS, options.hidden_dim)(columns)
    for _ in range(2):
        x = x * keras.ops.cast(weights, x.dtype)
        stacked = keras.layers.Conv1D(options.hidden_dim, 3, padding="same", activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + stacked)
    neighbours = x
    # Positions count from the inner end; from the outer end the convolutions see where it begins.
    position = keras.ops.flip(keras.ops.cumsum(keras.ops.flip(weights, 1), 1), 1)
    position = keras.ops.cast(keras.ops.squeeze(position, -1), "int32")
    x += keras.layers.Embedding(melting.LONGEST + 1, options.hidden_dim)(position)
    for _ in range(options.num_layers):
        x = keras_nlp.layers.TransformerEncoder(
            intermediate_dim=2 * options.hidden_dim,
            num_heads=options.num_heads,
            dropout=options.dropout,
            activation="gelu",
            normalize_first=True,
        )(x, padding_mask=is_column)
    molecule = keras.layers.LayerNormalization()(x)
    # In full precision, also under a mixed policy: half precision has steps of 0.06 at 100.
    full = keras.config.floatx()
    small = keras.initializers.RandomNormal(stddev=0.001)
    energies = keras.layers.Dense(3, dtype=full, name="from_neighbours")(neighbours)
    # The rest of the molecule corrects them, by next to nothing before training: each column, and
    # then all columns equally, since energies that were measured do not simply add up.
    own = keras.layers.Dense(3, dtype=full, kernel_initializer=small, name="from_column")
    energies += own(molecule)
    total = keras.ops.sum(molecule * keras.ops.cast(weights, molecule.dtype), axis=1)
    mean_column = total / keras.ops.cast(keras.ops.sum(weights, axis=1), total.dtype)
    pooled = keras.layers.Concatenate()([total / 10.0, mean_column])
    pooled = keras.layers.Dense(options.hidden_dim, activation="gelu")(pooled)
    pooled = keras.layers.Dropout(options.dropout)(pooled)
    common = keras.layers.Dense(3, dtype=full, kernel_initializer=small, name="from_molecule")
    shared = keras.ops.expand_dims(common(pooled), 1)
    energies = keras.layers.Add(dtype=full, name="energies")([energies, shared])
    celsius = melting_temperature(energies, weights, conditions, mean)
    inputs = {"columns": columns, "conditions": conditions}
    return keras.Model(inputs, celsius)


def melting_temperature(energies, weights, conditions, reference: float):
    """Adds up the energies of columns and computes the temperature at which they balance.

    Tm = dH / (dS + R ln C), where salt adds to dS in proportion to ln [Na+] (SantaLucia 1998).
    With dG = dH - T0 dS at a reference temperature T0 this is the same as
    Tm = T0 + (dG - T0 R ln C) / (dS + R ln C): energies near zero then mean T0, and an error of dS
    counts only where Tm is far from it.

    Args:
        energies: of shape (batch, width, 3), any real numbers. For each column its -dG at T0 in
            units of R T0; its -dS in units of R, before softplus and `ENTROPY`; and how much of
            the latter salt takes away for each ln [Na+], before softplus and `SALT`.
        weights: 1 for columns and 0 for padding, of shape (batch, width, 1).
        conditions: logarithms of sodium and concentration, of shape (batch, 2).
        reference: T0 in degrees C.

    Returns:
        Degrees C, of shape (batch, 1).
    """
    stability = keras.ops.sum(energies[..., :1] * weights, axis=1)
    order = ENTROPY * keras.ops.sum(keras.ops.softplus(energies[..., 1:2]) * weights, axis=1)
    salt = SALT * keras.ops.sum(keras.ops.softplus(energies[..., 2:]) * weights, axis=1)
    mixing = conditions[:, 1:] + salt * conditions[:, :1]
    # Without a bound a model that has learned little could divide by zero.
    entropy = keras.ops.maximum(order - mixing, 1.0)
    return reference + (reference + 273.15) * (stability + mixing) / entropy


def mean_of_both_ends(network: keras.Model) -> keras.Model:
    """Returns a model that reads duplexes from both ends and takes the mean of the two answers.

    Args:
        network: of `build_model()`; the weights are shared.

    Returns:
        A `keras.Model` with the same inputs and outputs.
    """
    # `call()` repeats the layers in this model; calling the network would nest it in there.
    other_end = network.call(melting.from_other_end(network.input))
    mean = keras.layers.Average(dtype=keras.config.floatx())([network.output, other_end])
    return keras.Model(network.input, mean)


def side_by_side(networks: Sequence[keras.Model]) -> keras.Model:
    """Returns a model that trains several networks at once, or the only one.

    Args:
        networks: of the same inputs and outputs, n of them.

    Returns:
        A `keras.Model` with their outputs, each of shape (batch, n), a column for each network. The
        mean absolute error of all columns is the mean of the networks' errors.
    """
    if len(networks) == 1:
        return networks[0]
    outputs = [network(networks[0].input) for network in networks]
    joined = [
        keras.layers.Concatenate(dtype=keras.config.floatx())(columns)
        for columns in zip(*map(keras.tree.flatten, outputs), strict=True)
    ]
    return keras.Model(networks[0].input, keras.tree.pack_sequence_as(outputs[0], joined))


def mean_of_members(models: Sequence[keras.Model]) -> keras.Model:
    """Returns a model that answers with the mean of the answers of several, or the only one.

    Networks that begin with other weights make other errors, which partly cancel out ("Simple and
    Scalable Predictive Uncertainty Estimation using Deep Ensembles", arXiv 1612.01474).

    Args:
        models: of the same inputs and outputs.
    """
    if len(models) == 1:
        return models[0]
    answers = [model(models[0].input) for model in models]
    mean = keras.layers.Average(dtype=keras.config.floatx())(answers)
    return keras.Model(models[0].input, mean)


def with_enthalpy(model: keras.Model, reference: float) -> keras.Model:
    """Returns a model of the same layers that predicts the enthalpy beside the temperature.

    dH = dG + T0 dS is the sum of the columns' energies; salt and concentration do not change it.

    Args:
        model: of `build_model()`.
        reference: its mean temperature T0 in degrees C.

    Returns:
        A `keras.Model` with outputs "celsius" and "enthalpy", kcal/mol, each of shape (batch, 1).
    """
    energies = model.get_layer("energies").output
    is_column = keras.ops.not_equal(model.input["columns"], 0)
    weights = keras.ops.expand_dims(keras.ops.cast(is_column, energies.dtype), -1)
    columns = energies[..., :1] + ENTROPY * keras.ops.softplus(energies[..., 1:2])
    enthalpy = -GAS_CONSTANT * (reference + 273.15) * keras.ops.sum(columns * weights, axis=1)
    return keras.Model(model.input, {"celsius": model.output, "enthalpy": enthalpy})


def load_molecules(options: Options, run) -> dict[str, list[melting.Molecule]]:
    """Loads the molecules of each split.

    Raises:
        OptionsError: no molecule has an enthalpy to train on.
    """
    molecules = melting.load_melting(
        run.dataset,
        run.cache_dir,
        seed=options.seed,
        count=options.oligos,
        fold=options.fold,
        held_out=run.held_out,
        test_file=run.test_file,
    )
    run.note(melting.unread_note(run.dataset, run.held_out, run.test_file))
    if options.enthalpy_weight:
        melting.require_folding(
            [each for split in molecules.values() for each in split], run.dataset
        )
    kept = {
        "train": arrays.draw(len(molecules["train"]), options.max_examples, options.seed),
        "valid": arrays.spaced(len(molecules["valid"]), options.max_validation_examples),
    }
    for split, indices in kept.items():
        molecules[split] = [molecules[split][index] for index in indices]
    has_enthalpies = melting.enthalpies(molecules["train"])[1].any()
    if options.enthalpy_weight and not (has_enthalpies or run.trained is not None):
        raise OptionsError(
            f"--enthalpy-weight: no molecule of {run.dataset} has an enthalpy (column dh)"
        )
    return molecules


def main(options: Options) -> dict:
    """Trains, tests and saves; returns what `results.json` holds."""
    with start_run("dna_melting", options) as run:
        if run.finished:
            return run.results
        # Molecules as columns and conditions, and their temperatures in degrees C, by split.
        molecules = load_molecules(options, run)
        drawn = []  # duplexes with the formula's temperatures, for the training alone
        if options.formula_weight:
            drawn = melting.formula_duplexes(options.seed, options.oligos, molecules)
        measured = melting.temperatures(molecules["train"])
        known = itertools.chain(drawn, *molecules.values())
        width = max(len(molecule.column_ids) for molecule in known)
        used = molecules | {"train": molecules["train"] + drawn}
        splits = {name: to_arrays(split, width) for name, split in used.items()}
        train_inputs, train_tm = splits["train"]
        weights = None
        if drawn:
            weights = np.repeat([1.0, options.formula_weight], [len(measured), len(drawn)])
        learned: dict[str, Any] = dict(splits)  # the same when the run resumes
        if options.enthalpy_weight:
            learned["enthalpies"] = [melting.enthalpies(split) for split in used.values()]
        # A trained run that is evaluated keeps its own scale.
        mean = run.metadata.get("mean", float(np.mean(measured, dtype=np.float64)))
        counts = ", ".join(f"{len(split):,} {name}" for name, split in molecules.items())
        if drawn:
            counts += f", and {len(drawn):,} of the formula"
        # Global batch, learning rate and steps for these replicas; options override the defaults.
        plan = run.plan(
            examples=len(train_tm),
            base_learning_rate=options.base_learning_rate,
            batch_size_per_replica=64,
            warmup_steps=50,
            tokens_per_example=float((train_inputs["columns"] > 0).sum(axis=1).mean()),
            about={"molecules": f"{run.dataset}: {counts}; mean {mean:.1f} °C"},
            dataset=run.dataset,
            data_sha256=data_sha256(learned),
        )
        if np.ptp(splits["test"][1]) == 0:
            run.note("r2 is left out: all temperatures of the test split are equal")
        train_data, valid_data, test_data = make_batches(options, plan, used, splits, weights)
        baseline = melting.baselines(molecules)
        if run.has_own_dataset:  # an evaluation on other data does not note their training split
            run.note(*melting.repeated_notes(molecules))
        # Networks, schedule and loss in degrees C, under the strategy.
        with run.strategy.scope():
            networks = [build_model(options, mean) for _ in range(options.members)]
            answering = networks
            if options.enthalpy_weight:
                answering = [with_enthalpy(network, mean) for network in networks]
            model = side_by_side(answering)
            # Tested and saved, not trained.
            melting_model = mean_of_members([mean_of_both_ends(network) for network in networks])
            # Linear warm-up, then PolynomialDecay, or what --lr-schedule makes of it.
            decay = PolynomialDecay(plan.learning_rate, plan.decay_steps, plan.end_learning_rate)
            schedule = WarmUp(plan.warmup_steps, reshaped(decay, options, plan))
            # AdamW or Muon; biases and layer norms do not decay.
            optimizer = fine_tuning.make_optimizer(options, schedule, output_layers=OUTPUT_LAYERS)
            # Measured temperatures have outliers, which a squared error would follow.
            loss, loss_weights = keras.losses.MeanAbsoluteError(), None
            metrics: list | dict = [
                keras.metrics.MeanAbsoluteError("mae"),
                keras.metrics.RootMeanSquaredError("rmse"),
            ]
            if options.enthalpy_weight:
                loss = {"celsius": loss, "enthalpy": keras.losses.MeanAbsoluteError()}
                loss_weights = {"celsius": 1.0, "enthalpy": options.enthalpy_weight}
                metrics = {"celsius": metrics}
            model.compile(
                optimizer=optimizer, loss=loss, loss_weights=loss_weights, weighted_metrics=metrics
            )
        # Training and test; TensorBoard shows predicted and measured temperatures.
        scatter = RegressionSummaries(
            run.tensorboard, *splits["valid"], unit="°C", predictor=melting_model
        )
        fit_options = run.prepare(
            model,
            train_data,
            validation=valid_data,
            test=test_data,
            extra=[scatter],
            saves=melting_model,
        )
        model.fit(train_data, **fit_options)
        missed = {
            name: outputs_of(melting_model, splits[name][0]) - splits[name][1]
            for name in ("valid", "test")
        }
        trained_on = run.metadata.get("trained_on") or ranges(
            used["train"], train_inputs["columns"]
        )
        results = results_of(options, run, molecules, missed)
        results["metadata"] |= {"mean": mean, "trained_on": trained_on}
        is_usual = "perfect duplex" in trained_on["kinds"]
        return run.finish(
            melting_model,
            baseline=baseline,
            example_input=None if is_usual else usual_input(molecules["test"][0]),
            **results,
        )


def to_arrays(molecules: list[melting.Molecule], width: int) -> tuple[dict, np.ndarray]:
    """Returns a model's inputs and its answers."""
    return melting.encode(molecules, width), melting.temperatures(molecules)


def answers(
    molecules: list[melting.Molecule], enthalpy_weight: float, weights: np.ndarray | None = None
) -> tuple:
    """Returns the true values of molecules and their weights in the loss.

    Args:
        molecules: n of them.
        enthalpy_weight: the option.
        weights: of the molecules, of shape (n,); None for equal ones.

    Returns:
        Temperatures in degrees C, of shape (n, 1), and the weights; or both for the outputs of
        `with_enthalpy()`, where a molecule without a measured enthalpy weighs zero.
    """
    tm = melting.temperatures(molecules)
    if not enthalpy_weight:
        return tm, weights
    enthalpies, measured = melting.enthalpies(molecules)
    weights = np.ones(len(molecules)) if weights is None else weights
    return {"celsius": tm, "enthalpy": enthalpies}, {"celsius": weights, "enthalpy": measured}


def make_batches(
    options: Options,
    plan: Plan,
    molecules: dict[str, list[melting.Molecule]],
    splits: dict[str, tuple[dict, np.ndarray]],
    weights: np.ndarray | None,
) -> list[tf.data.Dataset]:
    """Makes the batches of training, validation and test.

    Args:
        options: the seed, and whether enthalpies are learned, too.
        plan: batch size, and where training starts.
        molecules: by split.
        splits: the same molecules, encoded by `to_arrays()`.
        weights: of the training molecules, or None for equal ones.
    """
    train = arrays.training_data(
        splits["train"][0],
        *answers(molecules["train"], options.enthalpy_weight, weights),
        seed=options.seed,
        change=melting.turn_duplexes(options.seed),
        **plan.batches,
    )
    evaluated = [
        arrays.evaluation_data(
            splits[split][0],
            *answers(molecules[split], options.enthalpy_weight),
            batch_size=plan.global_batch_size,
        )
        for split in ("valid", "test")
    ]
    return [train, *evaluated]


def results_of(
    options: Options,
    run,
    molecules: dict[str, list[melting.Molecule]],
    missed: dict[str, np.ndarray],
) -> dict[str, Any]:
    """Returns arguments of `run.finish()`: errors by dataset, and how far predictions may be off.

    Args:
        options: what chose the weights.
        run: the run, or an evaluation.
        molecules: by split.
        missed: predicted minus measured temperatures of validation and test, in degrees C, each of
            shape (n, 1).
    """
    spread = run.metadata.get("plus_minus", plus_minus(molecules["valid"], missed["valid"]))
    run.note(small_spread_note(options, spread))
    measured = melting.temperatures(molecules["test"])
    results = {
        "test": errors(missed["test"], measured)
        | error_beside_formula(molecules["test"], missed["test"]),
        "valid_by_dataset": errors_by_dataset(molecules["valid"], missed["valid"]),
        "test_by_dataset": errors_by_dataset(molecules["test"], missed["test"]),
        "within_plus_minus": share_within(spread, molecules["test"], missed["test"]),
        "metadata": {"plus_minus": spread},
        "examples_table": lambda: worst_first(molecules["test"], missed["test"]),
    }
    if run.has_own_dataset:  # as in main
        results["test_molecules_in_training"] = melting.in_training(molecules, "test")
    return results


def small_spread_note(options: Options, spread: dict[str, float]) -> str | None:
    """Returns a note if the errors of `plus_minus` chose the weights, or None."""
    chooses = options.early_stopping is not None and str(options.keep_best).startswith("val_")
    if not chooses or not spread:
        return None
    return (
        "the ± of predictions may be too small: it is computed from the validation split, by which "
        "--early-stopping chose the weights"
    )


def usual_input(molecule: melting.Molecule) -> str:
    """Returns a molecule as `predict()` takes it."""
    return f"{molecule.sequence}:{molecule.structure}"


def predict(
    run: LoadedRun,
    inputs: Sequence[str | melting.Molecule],
    *,
    sodium: float = 0.05,
    strand_concentration: float = melting.STRANDS,
) -> list[list[dict]]:
    """Returns the temperatures at which molecules melt, and how far off they may be.

    About two in three molecules that are like those of the validation split have an error of at
    most `plus_minus`. It is missing for a kind of molecule with too few validation sequences
    (`melting_errors.FEWEST`), for the formula's kinds, and, with a `note` that says why, for
    molecules and conditions that are unlike all in training.

    Args:
        run: a finished run of this recipe.
        inputs: strands, each with its perfect complement; SEQUENCE:STRUCTURE, two strands joined by
            "+" and the structure in dot-bracket; or molecules of `read_table()`.
        sodium: mol/l: 50 mM are 0.05.
        strand_concentration: mol/l of all strands: 1 µM is 1e-6; without effect on a hairpin.
    """
    if not has_inputs(inputs):
        return []

    def read(text: str | melting.Molecule) -> melting.Molecule:
        if isinstance(text, melting.Molecule):
            return text
        sequence, _, structure = text.partition(":")
        row = {"sequence": sequence, "structure": structure, "sodium": str(sodium)}
        row["strand_concentration"] = str(strand_concentration)
        return melting.molecule_of(row)

    molecules = read_each(read, inputs)
    celsius = run.load_model("float32")(melting.encode(molecules), training=False)
    spread, answers = run.metadata["plus_minus"], []
    trained_on = run.metadata["trained_on"]
    for molecule, row in zip(molecules, keras.ops.convert_to_numpy(celsius), strict=True):
        answer: dict[str, float | str] = {"°C": float(row[0])}
        unlike = outside(molecule, trained_on)
        if unlike:
            answer["note"] = f"no ±: {unlike}"
        elif molecule.kind in spread:
            answer["plus_minus"] = spread[molecule.kind]
        answers.append([answer])
    return answers


def read_table(
    path: Path, *, sodium: float = 0.05, strand_concentration: float = melting.STRANDS
) -> list[melting.Molecule | str | InputError]:
    """Reads inputs of `predict()` from a table like those to train on; `tm` may be missing.

    Columns that are not read are named on standard error.

    Args:
        path: of the table.
        sodium: mol/l, for rows without it.
        strand_concentration: mol/l of all strands, for rows without it.
    """
    note = melting.unread_note(melting.FORMULA, test_file=path)
    if note:
        print(note, file=sys.stderr)
    return melting.read_molecules(path, sodium=sodium, strand_concentration=strand_concentration)


if __name__ == "__main__":
    command_line(Options, main)
