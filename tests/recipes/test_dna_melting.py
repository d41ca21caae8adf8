import json
import math
from pathlib import Path

import keras
import numpy as np
import pytest

from data import melting, melting_errors, tables
from models import fine_tuning
from recipes import dna_melting, predict
from recipes import evaluate as evaluation
from tests.support.strategy_run import write_molecules
from training.errors import OptionsError, RunError
from training.loaded_run import evaluate, load_run
from training.report import verdict

TINY = dict(
    strategy="none",
    num_layers=1,
    num_heads=2,
    hidden_dim=8,
    dropout=0.0,
    max_examples=64,
    epochs=2,
    global_batch_size=16,
    base_learning_rate=0.01,
    log_every=1,
    quiet=True,
)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("molecules") / "molecules.csv"
    write_molecules(path, 200)
    return path


@pytest.fixture(scope="module")
def run(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dna") / "run"
    options = TINY | dict(dataset=str(table), run_dir=folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(melting_errors, "FEWEST", 3)
        return folder, dna_melting.main(dna_melting.Options(**options))


@pytest.fixture(scope="module")
def molecules(table):
    return melting.load_melting(str(table), Path(), seed=0, count=1)


def test_pictures_are_of_the_validation_split(table, molecules, tmp_path, monkeypatch):
    class Shown(Exception):
        pass

    def summaries(board, inputs, truth, **named):
        raise Shown(truth)

    monkeypatch.setattr(dna_melting, "RegressionSummaries", summaries)
    with pytest.raises(Shown) as shown:
        dna_melting.main(dna_melting.Options(**TINY, dataset=str(table), run_dir=tmp_path / "run"))
    assert np.array_equal(shown.value.args[0], melting.temperatures(molecules["valid"]))


@pytest.fixture
def handed(monkeypatch):
    """The arrays of each call of `arrays.training_data`, in order."""
    calls = []
    stock = dna_melting.arrays.training_data

    def training_data(*arrays, **named):
        calls.append(arrays)
        return stock(*arrays, **named)

    monkeypatch.setattr(dna_melting.arrays, "training_data", training_data)
    return calls


def errors(model, molecules, width=melting.LONGEST):
    """Mean absolute and root mean squared error, by hand."""
    found = keras.ops.convert_to_numpy(model(melting.encode(molecules, width), training=False))
    miss = found[:, 0].astype(np.float64) - melting.temperatures(molecules)[:, 0]
    return np.abs(miss).mean(), np.sqrt((miss**2).mean())


def test_results(run, molecules):
    folder, results = run
    assert results["steps"] == 8 and results["learning_rate"] == 0.01
    assert set(results["test"]) == {"mae", "rmse", "r2", "perfect_duplex_mae"}
    assert results["notes"] == []
    shown = json.loads((folder / "options.json").read_text())["shown"]
    assert shown["warmup_steps"] == 0 and "- `warmup_steps`: 0\n" in (
        folder / "model" / "README.md"
    ).read_text(encoding="utf-8")
    assert results["baseline"]["nearest_neighbour_mae"] < results["baseline"]["mean_mae"]
    assert json.loads((folder / "results.json").read_text())["test"] == results["test"]
    assert sum(len(part) for part in molecules.values()) == 200
    drawn = np.random.default_rng(0).permutation(len(molecules["train"]))[: TINY["max_examples"]]
    trained = melting.temperatures([molecules["train"][index] for index in drawn])
    assert load_run(folder).metadata["mean"] == pytest.approx(trained.mean(), rel=1e-6)
    model = keras.saving.load_model(folder / "model" / "model.keras", compile=False)
    mae, rmse = errors(model, molecules["test"])
    assert results["test"]["mae"] == pytest.approx(mae, rel=1e-5)
    assert results["test"]["rmse"] == pytest.approx(rmse, rel=1e-5)
    r2 = 1 - rmse**2 / melting.temperatures(molecules["test"]).var(dtype=np.float64)
    assert results["test"]["r2"] == pytest.approx(r2, rel=1e-4)
    perfect = [m for m in molecules["test"] if np.isfinite(melting.formula(m))]
    assert 0 < len(perfect) < len(molecules["test"])
    found = results["test"]["perfect_duplex_mae"]
    assert found == pytest.approx(errors(model, perfect)[0], rel=1e-5)


@pytest.mark.parametrize(
    "options, spread, is_noted",
    [
        (dict(early_stopping=2, keep_best="val_mae"), {"hairpin": 1.0}, True),
        (dict(early_stopping=2, keep_best="val_mae"), {}, False),
        (dict(early_stopping=2, keep_best="loss"), {"hairpin": 1.0}, False),
        (dict(keep_best="val_mae"), {"hairpin": 1.0}, False),  # tested are the last weights
    ],
)
def test_weights_that_the_validation_split_chose_are_noted(options, spread, is_noted):
    note = dna_melting.small_spread_note(dna_melting.Options(**options), spread)
    assert bool(note) == is_noted


@pytest.mark.long
def test_the_formula_is_a_second_source_of_training_alone(table, molecules, tmp_path, handed):
    """Its duplexes count as much as they are told to, and none has a measured sequence."""
    options = TINY | dict(dataset=str(table), epochs=1, oligos=48, formula_weight=0.25)
    options["max_examples"] = None
    results = dna_melting.main(dna_melting.Options(**options, run_dir=tmp_path / "run"))
    ((inputs, celsius, weights),) = handed
    count = len(molecules["train"])
    assert weights.tolist() == [1.0] * count + [0.25] * 48
    assert results["steps"] == (count + 48) // 16
    drawn = melting.formula_duplexes(0, 48, molecules)
    np.testing.assert_array_equal(celsius[count:], melting.temperatures(drawn))
    measured = {m.group for part in molecules.values() for m in part}
    assert len({m.group for m in drawn} - measured) == 48
    # The reference temperature and the tests are the measured ones'.
    folder = tmp_path / "run"
    mean = melting.temperatures(molecules["train"]).mean()
    assert load_run(folder).metadata["mean"] == pytest.approx(mean, rel=1e-6)
    model = keras.saving.load_model(folder / "model" / "model.keras", compile=False)
    assert results["test"]["mae"] == pytest.approx(errors(model, molecules["test"])[0], rel=1e-5)


def test_the_uncertainty_is_that_of_the_validation_split(run, molecules):
    """By hand: 68 % of the validation molecules of a kind are at most that far off."""
    folder, results = run
    loaded = load_run(folder)
    found = loaded.metadata["plus_minus"]
    kinds = {m.kind for m in molecules["valid"]}
    assert set(found) <= kinds and found
    model, off = loaded.load_model(), {}
    for split in ("valid", "test"):
        celsius = keras.ops.convert_to_numpy(model(melting.encode(molecules[split])))
        off[split] = np.abs(celsius - melting.temperatures(molecules[split]))[:, 0]
    for kind, value in found.items():
        here = {split: off[split][[m.kind == kind for m in molecules[split]]] for split in off}
        # The quantile of the validation errors, and one example more for those never seen.
        inside, n = (here["valid"] <= value * (1 + 1e-5)).sum(), len(here["valid"])
        assert 0.68 * (n + 1) <= inside < 0.68 * (n + 1) + 1
        assert np.isclose(here["valid"], value, rtol=1e-4).any(), "it is the error of one of them"
        assert results["within_plus_minus"][kind] == pytest.approx(
            np.mean(here["test"] <= value * (1 + 1e-5))
        )
    strand = "ACGTTGCATGCCA"
    asked = {
        "perfect duplex": (strand, 0.1),
        "hairpin": ("GACGTTGAAAAACGTC:((((((....))))))", 0.05),
    }
    for kind, (text, sodium) in asked.items():
        ((answer,),) = dna_melting.predict(loaded, [text], sodium=sodium)
        assert answer.get("plus_minus") == found.get(kind) and "note" not in answer
    assert predict.format_value("plus_minus", 1.449) == "± 1.4"


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "conditions", "said"),
    [
        ("ACGTTGCATGCCA", {"sodium": 0.12}, None),
        (
            "ACGTTGCATGCCA",
            {"sodium": 1.0},
            "no ±: 1 mol/l sodium, outside the training range (0.1)",
        ),
        (
            "ACGTTGCATGCCA",
            {"sodium": 0.1, "strand_concentration": 1e-8},
            "no ±: 1e-08 mol/l strands, outside the training range (2e-06)",
        ),
        (
            "ACGTTGCATGCCA" * 2,
            {"sodium": 0.1},
            "no ±: 26 positions, outside the training range (4 to 18)",
        ),
        (
            "ACGTTGCA+TGCGACGT:((((.(((+))).))))",
            {"sodium": 0.1},
            "no ±: no duplex was in training",
        ),
        (
            "TGACGTAGCAAAAGCAACGTCA:((((((.((....)).))))))",
            {},
            "no ±: a mismatch or bulge of A and A was",
        ),
        (
            "GACGAAAGTC:(((....)))",
            {"sodium": 0.063},
            "no ±: 7 positions, outside the training range (9 to 24)",
        ),
        ("GACGTTGAAAAACGTC:((((((....))))))", {"strand_concentration": 1e-9}, None),
    ],
)
def test_what_is_unlike_training_has_a_note_instead(run, text, conditions, said):
    ((answer,),) = dna_melting.predict(load_run(run[0]), [text], **conditions)
    assert ("note" in answer) != ("plus_minus" in answer)
    if said is None:
        assert "note" not in answer
    else:
        assert answer["note"].startswith(said)


@pytest.mark.long
def test_predict_reads_a_table_like_those_to_train_on(run, tmp_path, command_line):
    """Each row has its own structure and conditions; options are for those without."""
    table = tmp_path / "new.csv"
    rows = ["ACGTTGCATGCCA,,0.1", "GACGTTGAAAAACGTC,((((((....)))))),0.063", "ACGTTGCATGCCA,,"]
    table.write_text("\n".join(["sequence,structure,sodium", *rows]) + "\n")
    status, printed, _ = command_line(
        predict, run[0], "--file", table, "--json", "--sodium", "0.12"
    )
    assert status == 0
    found = [row[0]["°C"] for row in json.loads(printed)]
    for one, text, sodium in zip(
        found,
        ("ACGTTGCATGCCA", "GACGTTGAAAAACGTC:((((((....))))))", "ACGTTGCATGCCA"),
        (0.1, 0.063, 0.12),
        strict=True,
    ):
        ((answer,),) = dna_melting.predict(load_run(run[0]), [text], sodium=sodium)
        assert one == pytest.approx(answer["°C"], abs=1e-4)
    assert len(set(found)) == 3
    status, printed, said = command_line(predict, run[0], "--file", table)
    assert "GACGTTGAAAAACGTC:((((((....)))))), 0.063 mol/l sodium\n" in printed and not said
    answers = predict.main(predict.Options(run_dir=run[0], file=table, json=True))
    assert len(answers) == 3
    status, printed, said = command_line(
        predict, run[0], "--file", table, "--text-column", "sequence"
    )
    assert status == 0 and "sodium" not in printed.splitlines()[0]
    assert said.startswith("--text-column sequence: that column alone is read; without the option")
    table.write_text("sequence,Na\nACGTTGCATGCCA,1\n")
    status, _, said = command_line(predict, run[0], "--file", table)
    assert (status, said) == (0, "new.csv: columns that are not read: 'Na'\n")


@pytest.mark.long
def test_test_molecules_of_training_are_counted(run, tmp_path):
    rows = ["sequence,structure,sodium,strand_concentration,tm,Na"]
    trained = melting.load_melting(run[1]["dataset"], Path(), seed=0, count=1)["train"][:7]
    rows += [
        f"{m.sequence},{m.structure},{m.sodium},{m.strand_concentration},{m.tm},1" for m in trained
    ]
    file = tmp_path / "seen.csv"
    file.write_text("\n".join(rows) + "\n")
    assert run[1]["test_molecules_in_training"] == 0
    found = evaluate(load_run(run[0]), dataset=None, batch_size=32, test_file=file)
    assert 0 < found["test_molecules_in_training"] <= 7  # some examples were not drawn
    count = found["test_molecules_in_training"]
    assert found["notes"] == [
        "seen.csv: columns that are not read: 'Na'",
        f"{count} test molecules have a sequence of the training split",
    ]
    # The model has not seen the training split of other data.
    other = tmp_path / "other.csv"
    other.write_text(Path(run[1]["dataset"]).read_text())
    found = evaluate(load_run(run[0]), dataset=str(other), batch_size=32)
    assert "test_molecules_in_training" not in found


@pytest.mark.long
def test_examples_with_the_largest_errors_first(run, tmp_path):
    folder, results = run
    evaluation.main(evaluation.Options(run_dir=folder, examples=tmp_path / "worst.csv"))
    names, rows = tables.read_rows(tmp_path / "worst.csv")
    assert names[:2] == ["sequence", "structure"] and names[-2:] == ["tm", "predicted"]
    missed = [abs(float(row[-1]) - float(row[-2])) for row in rows]
    assert missed == sorted(missed, reverse=True)
    assert np.mean(missed) == pytest.approx(results["test"]["mae"], rel=1e-4)
    # The file is a table like those to train on.
    molecules = melting.read_molecules(tmp_path / "worst.csv")
    assert [molecule.sequence for molecule in molecules] == [row[0] for row in rows]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--fold", "3"],
            "--fold: nearest-neighbour has fixed splits; leave it out, or pass another --dataset",
        ),
        (["--fold", "3", "--dataset", "nnn"], "--fold: nnn has fixed splits"),
        (
            ["--fold", "3", "--dataset", "x", "--validation-file", "y", "--test-file", "z"],
            "--fold: has no effect beside --validation-file and --test-file",
        ),
        (["--dataset", "x.csv", "--oligos", "77"], "--oligos: needs --formula-weight"),
    ],
)
def test_options_without_effect_are_refused(command_line, options, said):
    status, _, found = command_line(dna_melting, *options)
    assert status == 2 and said in found


def test_a_measured_sequence_is_not_drawn_from_the_formula():
    first, second = melting.formula_duplexes(0, 2, {})
    assert melting.formula_duplexes(0, 1, {"test": [first]}) == [second]


def test_the_formula_draws_no_longer_duplexes_than_are_measured():
    """Every batch is padded to the longest molecule: longer ones would slow down all steps."""
    long = melting.plain_duplex("ACGT" * 10, 0.1, 1e-6)
    for measured, longest in (([], melting.USUAL), ([long], 40)):
        drawn = melting.formula_duplexes(0, 400, {"test": measured})
        assert max(len(melting.columns(molecule)) for molecule in drawn) == longest


def test_the_formula_alone_takes_no_weight(command_line):
    status, _, said = command_line(dna_melting, "--formula-weight", "0.5", "--max-examples", "9")
    assert status == 2 and "--formula-weight: all molecules are the formula's" in said
    assert "--max-examples and --formula-weight: pass only one of them" in said


@pytest.mark.long
def test_equal_test_temperatures_lose_no_training(tmp_path):
    rows = []
    for number in range(47):
        strand = "ACGT"[number % 4] + "GC" + "ACGT"[number // 4 % 4] + "ACGT"[number // 16]
        split = "test" if number >= 40 else "valid" if number >= 32 else "train"
        tm = 47.859 if split == "test" else 30 + number / 2
        rows.append(f"{'one' if number % 2 else 'two'},{strand},{split},{tm}")
    path = tmp_path / "molecules.csv"
    path.write_text("\n".join(["dataset,sequence,split,tm", *rows]) + "\n")
    options = TINY | dict(dataset=str(path), epochs=1, run_dir=tmp_path / "run")
    results = dna_melting.main(dna_melting.Options(**options))
    assert set(results["test"]) == {"mae", "rmse", "perfect_duplex_mae"}
    assert results["steps"] == 2
    for found in results["test_by_dataset"].values():
        assert set(found) == {"molecules", "mae", "rmse"}
    assert results["notes"] == ["r2 is left out: all temperatures of the test split are equal"]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_each_dataset_of_a_held_out_split_has_its_errors(run, molecules, split):
    folder, results = run
    model = keras.saving.load_model(folder / "model" / "model.keras", compile=False)
    assert set(results[f"{split}_by_dataset"]) == {"duplexes", "hairpins"}
    for name, found in results[f"{split}_by_dataset"].items():
        part = [m for m in molecules[split] if m.dataset == name]
        mae, rmse = errors(model, part)
        assert found["molecules"] == len(part) and len(part) % 16
        assert found["mae"] == pytest.approx(mae, rel=1e-5)
        assert found["rmse"] == pytest.approx(rmse, rel=1e-5)


def test_the_verdict_leaves_out_the_formula_where_it_labelled_the_data(monkeypatch):
    """Its error there is 0, which no model beats."""
    monkeypatch.setattr(melting, "HELD_OUT", 50)
    drawn = melting.load_melting(melting.FORMULA, Path(), seed=0, count=100)
    (line,) = verdict({"mae": 0.1}, melting.baselines(drawn), {})
    assert line == "beats the mean of training in mae, the fit on nearest neighbours in mae"


def test_padding_changes_no_answer(molecules):
    model = dna_melting.build_model(dna_melting.Options(**TINY), 60.0)
    several = molecules["test"][:5]
    assert len({len(melting.columns(m)) for m in several}) > 1
    longest = max(len(melting.columns(m)) for m in several)
    assert errors(model, several) == pytest.approx(errors(model, several, longest), rel=1e-5)


def test_a_duplex_melts_at_the_mean_of_its_two_readings(molecules):
    network = dna_melting.build_model(dna_melting.Options(**TINY), 60.0)
    for weight in network.trainable_variables:  # a new model hardly tells molecules apart
        weight.assign(weight + 0.1 * np.random.default_rng(0).normal(size=weight.shape))
    inputs = melting.encode([m for m in molecules["test"] if m.is_duplex])
    one, other = (
        keras.ops.convert_to_numpy(network(each, training=False))
        for each in (inputs, keras.tree.map_structure(np.asarray, melting.from_other_end(inputs)))
    )
    model = dna_melting.mean_of_both_ends(network)
    found = keras.ops.convert_to_numpy(model(inputs, training=False))
    np.testing.assert_allclose(found, (one + other) / 2, rtol=1e-5)
    assert np.abs(one - other).max() > 0.1
    hairpins = melting.encode([m for m in molecules["test"] if not m.is_duplex])
    np.testing.assert_allclose(model(hairpins), network(hairpins), rtol=1e-5)


@pytest.mark.parametrize("change", ["sodium", "strand_concentration", "sequence"])
def test_every_input_has_an_effect(change):
    model = dna_melting.build_model(dna_melting.Options(**TINY), 60.0)
    duplex = melting.plain_duplex("ACGTACGT", 0.05, 1e-6)
    other = {
        "sodium": melting.plain_duplex("ACGTACGT", 0.5, 1e-6),
        "strand_concentration": melting.plain_duplex("ACGTACGT", 0.05, 1e-5),
        "sequence": melting.plain_duplex("ACGTACGA", 0.05, 1e-6),
    }[change]
    one, two = model(melting.encode([duplex, other]), training=False)
    assert not math.isclose(float(one[0]), float(two[0]), rel_tol=1e-6)


class TestMeltingTemperature:
    """Of known energies, held against Tm = dH / (dS + R ln C)."""

    GAS = 1.987e-3  # kcal/(mol K)

    def predicted(self, stacks, *, sodium, concentration, reference=50.0):
        """Gives each column the energies of one stack: kcal/mol, kcal/(mol K), and salt's share."""
        enthalpy, entropy, salt = (np.asarray(value) for value in zip(*stacks, strict=True))
        zero = reference + 273.15
        stability = -(enthalpy - zero * entropy) / (self.GAS * zero)
        softplus = [-entropy / self.GAS / dna_melting.ENTROPY, salt / dna_melting.SALT]
        energies = np.stack([stability, *(np.log(np.expm1(share)) for share in softplus)], -1)
        padded = np.concatenate([energies, np.full((3, 3), 7.0)])[None]
        weights = np.array([1.0] * len(stacks) + [0.0] * 3)[None, :, None]
        conditions = np.array([[np.log(sodium / melting.SODIUM), np.log(concentration)]])
        found = dna_melting.melting_temperature(padded, weights, conditions, reference)
        return float(found[0, 0])

    @pytest.mark.parametrize("reference", [20.0, 70.0])
    @pytest.mark.parametrize(("sodium", "concentration"), [(0.063, 1.0), (1.0, 2.5e-7)])
    def test_energies_of_columns_add_up(self, sodium, concentration, reference):
        stacks = [(-7.9, -0.0222, 0.185), (-10.6, -0.0272, 0.185), (-3.3, -0.0081, 0.1)]
        enthalpy, entropy, salt = (sum(values) for values in zip(*stacks, strict=True))
        logarithms = np.log(concentration) + salt * np.log(sodium / melting.SODIUM)
        expected = enthalpy / (entropy + self.GAS * logarithms) - 273.15
        found = self.predicted(
            stacks, sodium=sodium, concentration=concentration, reference=reference
        )
        assert found == pytest.approx(expected, abs=1e-3)


def test_a_new_model_begins_near_the_mean(molecules):
    keras.utils.set_random_seed(0)
    model = dna_melting.build_model(dna_melting.Options(**TINY), 60.0)
    found = model(melting.encode(molecules["train"]), training=False)
    assert np.abs(keras.ops.convert_to_numpy(found) - 60).mean() < 40


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "50000"])
@pytest.mark.parametrize("name", ["sodium", "strand_concentration"])
def test_conditions_that_cannot_be_are_refused(run, name, value, command_line):
    flag = f"--{name.replace('_', '-')}={value}"
    status, printed, errors_ = command_line(predict, run[0], "ACGTACGT", flag)
    assert status == 2 and not printed and errors_.count("\n") == 1
    assert f"{name} is '{float(value)}', expected mol/l" in errors_


def test_a_strange_letter_is_shown_in_its_strand(run, command_line):
    status, _, said = command_line(predict, run[0], "ACGTNA")
    assert (status, said) == (2, "predict: 'ACGTNA': expected bases A, C, G, T, found N\n")


def test_muon_updates_kernels_but_no_energies():
    """The layers that predict energies have three outputs: AdamW's, like biases and embeddings."""
    options = dna_melting.Options(**TINY, optimizer="muon")
    model = dna_melting.build_model(options, 60.0)
    optimizer = fine_tuning.make_optimizer(options, 1e-3, output_layers=dna_melting.OUTPUT_LAYERS)
    optimizer.build(model.trainable_variables)
    by_muon = {
        variable.path
        for variable in model.trainable_variables
        if not optimizer._should_use_adamw(variable)
    }
    assert any("attention" in path for path in by_muon)
    assert any("feedforward" in path for path in by_muon)
    assert not any("from_" in path or path.endswith("bias") for path in by_muon)


class TestEnthalpies:
    """`--enthalpy-weight`: a second output in training alone."""

    @pytest.fixture(scope="class")
    def measured(self, table, tmp_path_factory):
        """Two of three molecules have an enthalpy, more of it the longer they are."""
        path = tmp_path_factory.mktemp("enthalpies") / "molecules.csv"
        header, *rows = table.read_text().splitlines()
        dh = [f"{-2.0 * len(row):.1f}" if number % 3 else "" for number, row in enumerate(rows)]
        lines = [f"{header},dh", *map(",".join, zip(rows, dh, strict=True))]
        path.write_text("\n".join(lines) + "\n")
        return path

    def test_a_hairpin_melts_where_enthalpy_and_entropy_balance(self):
        """By hand from the energies of the columns, at the reference conditions: Tm = dH / dS."""
        model = dna_melting.build_model(dna_melting.Options(**TINY), 47.0)
        both = dna_melting.with_enthalpy(model, 47.0)
        hairpins = [melting.Molecule("ACGAAAGT", "((....))", melting.SODIUM)]
        hairpins.append(melting.Molecule("GGCTTTTGCC", "(((....)))", melting.SODIUM))
        inputs = melting.encode(hairpins, 12)
        energies = keras.Model(model.input, model.get_layer("energies").output)(inputs)
        energies = np.asarray(keras.ops.convert_to_numpy(energies), np.float64)
        outputs = {name: np.array(value) for name, value in both(inputs).items()}
        for row, hairpin in enumerate(hairpins):
            columns = energies[row, : len(melting.columns(hairpin))]
            stability, order = columns[:, 0].sum(), 15 * np.log1p(np.exp(columns[:, 1])).sum()
            enthalpy, entropy = -1.987e-3 * 320.15 * (stability + order), -1.987e-3 * order
            assert outputs["enthalpy"][row, 0] == pytest.approx(enthalpy, rel=1e-5)
            celsius = enthalpy / entropy - 273.15
            assert outputs["celsius"][row, 0] == pytest.approx(celsius, abs=1e-3)
        np.testing.assert_array_equal(outputs["celsius"], np.array(model(inputs)))

    @pytest.mark.long
    @pytest.mark.parametrize("members", [1, 2])
    def test_a_run(self, members, measured, tmp_path, handed):
        options = TINY | dict(dataset=str(measured), keep_best="val_celsius_mae", max_examples=48)
        options["members"] = members
        runs = {}
        for weight in (0.0, 0.2) if members == 1 else (0.2,):
            folder = tmp_path / str(weight)
            changed = {} if weight else {"keep_best": None}
            runs[weight] = dna_melting.main(
                dna_melting.Options(**(options | changed), enthalpy_weight=weight, run_dir=folder)
            )
        if members == 1:
            assert runs[0.0]["weights_sha256"] != runs[0.2]["weights_sha256"]
        _, targets, weights = handed[-1]
        train = melting.load_melting(str(measured), Path(), seed=0, count=1)["train"]
        train = [train[index] for index in dna_melting.arrays.draw(len(train), 48, seed=0)]
        assert weights["celsius"].tolist() == [1.0] * 48
        assert weights["enthalpy"].tolist() == [float(np.isfinite(m.dh)) for m in train]
        assert 0 < weights["enthalpy"].sum() < 48
        known = weights["enthalpy"] == 1
        assert targets["enthalpy"][known, 0].tolist() == [m.dh for m in train if np.isfinite(m.dh)]
        # What is saved, tested and exported has one output, as without the option.
        folder = tmp_path / "0.2"
        model = keras.saving.load_model(folder / "model" / "model.keras", compile=False)
        test = melting.load_melting(str(measured), Path(), seed=0, count=1)["test"]
        assert set(runs[0.2]["test"]) == {"mae", "rmse", "r2", "perfect_duplex_mae"}
        assert runs[0.2]["test"]["mae"] == pytest.approx(errors(model, test)[0], rel=1e-5)
        perfect = [m for m in test if np.isfinite(melting.formula(m))]
        found = runs[0.2]["test"]["perfect_duplex_mae"]
        assert 0 < len(perfect) < len(test)
        assert found == pytest.approx(errors(model, perfect)[0], rel=1e-5)
        by_dataset = runs[0.2]["test_by_dataset"]
        hairpins = [m for m in test if m.dataset == "hairpins"]
        assert by_dataset["hairpins"]["rmse"] == pytest.approx(errors(model, hairpins)[1], rel=1e-5)
        evaluated = evaluate(load_run(folder), dataset=None, batch_size=8)
        assert evaluated["test"]["mae"] == pytest.approx(runs[0.2]["test"]["mae"], rel=1e-6)
        assert evaluate(load_run(folder), dataset="nearest-neighbour", batch_size=8)["test"]
        best = load_run(folder, best=True).load_model()
        assert best.output_shape == (None, 1)
        # The checkpoint is of the model that was trained, which reads one end.
        mean = load_run(folder).metadata["mean"]
        networks = [
            dna_melting.build_model(dna_melting.Options(**options), mean) for _ in range(members)
        ]
        trained = [dna_melting.with_enthalpy(network, mean) for network in networks]
        dna_melting.side_by_side(trained).load_weights(folder / "best" / "model.weights.h5")
        answers = [dna_melting.mean_of_both_ends(network) for network in networks]
        inputs = melting.encode(test)
        by_hand = np.mean([model(inputs, training=False) for model in answers], axis=0)
        np.testing.assert_allclose(best(inputs, training=False), by_hand, rtol=1e-6)
        if members == 2:
            assert np.abs(answers[0](inputs) - answers[1](inputs)).max() > 0.01

    @pytest.mark.long
    def test_changed_ones_are_noticed(self, measured, tmp_path):
        changed = tmp_path / "changed.csv"
        changed.write_text(measured.read_text())
        options = TINY | dict(dataset=str(changed), enthalpy_weight=0.2, run_dir=tmp_path / "run")
        dna_melting.main(dna_melting.Options(**options))
        text = measured.read_text().replace(".0\n", ".5\n")
        assert text != measured.read_text()
        changed.write_text(text)
        with pytest.raises(RunError, match="data_sha256: was"):
            dna_melting.main(dna_melting.Options(**options | {"epochs": 3, "resume": "extend"}))

    def test_a_table_without_them_is_refused(self, table, tmp_path):
        for dataset, message in ((table, "has an enthalpy"), (melting.FORMULA, "the formula has")):
            options = TINY | dict(dataset=str(dataset), run_dir=tmp_path / "run")
            with pytest.raises(OptionsError, match=f"--enthalpy-weight: .*{message}"):
                dna_melting.main(dna_melting.Options(**options, enthalpy_weight=0.1))
            assert not (tmp_path / "run").exists()
