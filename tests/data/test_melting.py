import collections
import csv
import dataclasses
import functools
import itertools
import json
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import linear_model

from data import melting
from data.errors import DataError, InputError
from data.melting import END, INTERNAL, LOOP, PAIR, Molecule


def shown(sequence, structure):
    return melting.columns(Molecule(sequence, structure, 0.05))


class TestColumns:
    def test_a_duplex(self):
        assert shown("ACG+CGT", "(((+)))") == [("A", "T", PAIR), ("C", "G", PAIR), ("G", "C", PAIR)]

    def test_a_hairpin_with_a_bulge_and_a_loop(self):
        assert shown("ACGGAAACGT", "((.(...)))") == [
            ("A", "T", PAIR),
            ("C", "G", PAIR),
            ("G", "-", INTERNAL),
            ("G", "C", PAIR),
            ("A", "-", LOOP),
            ("A", "-", LOOP),
            ("A", "-", LOOP),
        ]

    def test_the_example_of_the_export_page(self):
        inputs = melting.encode([Molecule("CGAAAACG", "((....))", melting.SODIUM)], width=6)
        assert inputs["columns"].tolist() == [[14, 18, 56, 56, 56, 56]]
        assert inputs["conditions"].tolist() == [[0.0, 0.0]]

    def test_mismatches_face_each_other_and_ends_dangle(self):
        assert shown("TACAG+CTTT", ".(.((+)).)") == [
            ("T", "-", END),
            ("A", "T", PAIR),
            ("C", "T", INTERNAL),
            ("A", "T", PAIR),
            ("G", "C", PAIR),
        ]

    @pytest.mark.parametrize(
        ("sequence", "bracketed", "dotted"),
        [
            ("CGAG+CTTG", "((((+))))", "(.((+)).)"),  # within: a mismatch
            ("GACG+CGTT", "((((+))))", ".(((+)))."),  # outside: an end
            ("CATG+TATG", "((((+))))", "(((.+.)))"),  # inside of a duplex: an end
            ("CAGAAATTG", "(((...)))", "((.....))"),  # inside of a hairpin: its loop
        ],
    )
    def test_g_and_t_are_a_mismatch_also_within_brackets(self, sequence, bracketed, dotted):
        assert shown(sequence, bracketed) == shown(sequence, dotted)

    def test_unpaired_bases_at_the_inner_ends_of_two_strands(self):
        assert shown("ACGA+TTGT", "((..+..))")[2:] == [("G", "T", END), ("A", "T", END)]

    @pytest.mark.parametrize(
        ("sequence", "structure", "said"),
        [
            ("ACGU", "(())", "found U; RNA is not supported"),
            ("ACGT&ACGT", "((((.))))", "found '&'; two strands are joined by [+]"),
            ("AC ACGT", "((.()))", "found ' '; two strands are joined by [+]"),
            ("GATCAAGGTC", ".((.....))", "A at 2 is paired with C at 10; write a mismatch as"),
            ("GAAAT", "(...)", "no pair of A and T"),
            ("ACGT", "(()", "of the same length"),
            ("ACGT", "((()", "without its partner"),
            ("ACGT", "())(", "branches"),
            ("AC+GT", "((.))", "'[+]' at the same place"),
            ("ACGT", "....", "no pair"),
            ("AAACGTTACGT", "(((.))(..))", "branches"),
            ("A+CG+T", "(+()+)", "at most one"),
            ("A" * 70 + "+" + "T" * 70, "(" * 70 + "+" + ")" * 70, "at most 64"),
        ],
    )
    def test_what_is_refused(self, sequence, structure, said):
        with pytest.raises(DataError, match=said):
            melting.columns(Molecule(sequence, structure, 0.05), "row 3")


def strands(most=3):
    return st.text("ACGT", max_size=most)


PAIRED = st.sampled_from(["AT", "CG", "GC", "TA"])
UNPAIRED = st.tuples(strands(), strands())


@given(
    pairs=st.lists(st.tuples(PAIRED, UNPAIRED), min_size=1, max_size=6),
    ends=UNPAIRED,
    loop=strands(6),
    nick=st.booleans(),
)
def test_columns_are_what_a_molecule_is_built_from(pairs, ends, loop, nick):
    """From the outside in: dangling ends, then pairs, each followed by what is unpaired."""
    left, right = ends[0], ends[1]
    brackets = ["." * len(left), "." * len(right)]
    longer = max(map(len, ends))  # the bases beside the helix face each other
    beside = (end.rjust(longer, "-") for end in ends)
    expected = [(*column, END) for column in zip(*beside, strict=True)]
    for number, (pair, inner) in enumerate(pairs):
        expected.append((*pair, PAIR))
        if number == len(pairs) - 1:
            inner = inner if nick else (loop, "")
        kind = INTERNAL if number < len(pairs) - 1 else END if nick else LOOP
        expected += [(*c, kind) for c in itertools.zip_longest(*inner, fillvalue="-")]
        left, right = left + pair[0] + inner[0], right + pair[1] + inner[1]
        brackets[0] += "(" + "." * len(inner[0])
        brackets[1] += ")" + "." * len(inner[1])
    joint = "+" if nick else ""
    sequence, structure = left + joint + right[::-1], brackets[0] + joint + brackets[1][::-1]
    assert shown(sequence, structure) == expected


def test_either_strand_first_gives_the_same_columns():
    molecule = melting.Molecule("AAGCGC+GCGCT", "..((((+)))).", 1.0, 1e-6)
    read = melting.columns(molecule)
    assert [(b, a, kind) for a, b, kind in reversed(read)] == melting.columns(molecule.turned)


@settings(max_examples=100)
@given(st.text("().+", max_size=12), st.data())
def test_any_structure_is_read_whole_or_refused(structure, data):
    bases = "+" if data.draw(st.integers(0, 9)) == 0 else "ACGT"
    sequence = "".join("+" if c == "+" else data.draw(st.sampled_from(bases)) for c in structure)
    try:
        found = shown(sequence, structure)
    except DataError:
        return
    read = [base for column in found for base in column[:2] if base != "-"]
    assert sorted(read) == sorted(sequence.replace("+", ""))
    pairs = [left + right for left, right, kind in found if kind == PAIR]
    assert set(pairs) <= {"AT", "CG", "GC", "TA"}
    # Brackets of G and T, too, are read as a mismatch.
    assert 1 <= len(pairs) <= structure.count("(") == structure.count(")")


def test_encode_tells_apart_what_differs():
    duplex = melting.plain_duplex("ACGTTGCA", 0.05, 1e-6)
    others = [
        dataclasses.replace(duplex, sodium=0.1),
        dataclasses.replace(duplex, strand_concentration=2e-6),
        melting.plain_duplex("ACGTTGCC", 0.05, 1e-6),
        dataclasses.replace(duplex, structure="(.((((((+)))))).)"),
    ]
    inputs = melting.encode([duplex, *others], width=10)
    assert inputs["columns"].shape == (5, 10) and (inputs["columns"][:, 8:] == 0).all()
    rows = np.concatenate([inputs["columns"], inputs["conditions"]], axis=1)
    assert len(np.unique(rows, axis=0)) == 5
    # The strands differ, so a quarter of them counts (SantaLucia 1998).
    assert inputs["conditions"][0] == pytest.approx([math.log(0.05 / 0.063), math.log(2.5e-7)])
    symmetric = melting.plain_duplex("GCGAATTCGC", 0.063, 1e-6)
    assert melting.encode([symmetric])["conditions"][0] == pytest.approx([0, math.log(5e-7)])
    assert (melting.encode([shortest()])["conditions"] == 0).all()  # a hairpin's array conditions


# A dangling base, a mismatch, a bulge and a hairpin.
TWO_STRANDS = [
    Molecule("ACGTTGCA+TGCAACG", ".(((((((+)))))))", 0.063),
    Molecule("ACGTTGCA+TGCGACGT", "((((.(((+))).))))", 0.063),
    Molecule("ACGTTTGCA+TGCACGT", "((((..(((+)))))))", 0.063),
]


@pytest.mark.parametrize("molecule", TWO_STRANDS)
def test_no_strand_of_a_duplex_is_the_first(molecule):
    other = molecule.turned
    assert other.sequence == "+".join(reversed(molecule.sequence.split("+")))
    assert other.turned == molecule
    both = melting.encode([molecule, other])
    np.testing.assert_array_equal(*both["columns"])
    np.testing.assert_array_equal(*both["conditions"])
    # Turning the columns gives the reading of the duplex with its strands swapped.
    read = [columns_of(m) for m in (molecule, other)]
    turned = melting.from_other_end(melting.encode([molecule]))["columns"][0]
    assert sorted(read) == sorted([row(both["columns"][0]), row(turned)])


def columns_of(molecule):
    return [
        1 + 25 * kind + 5 * melting.BASES.index(left) + melting.BASES.index(right)
        for left, right, kind in melting.columns(molecule)
    ]


def row(ids):
    return [int(i) for i in ids if i]


def test_a_hairpin_has_one_end_and_padding_stays_last():
    molecules = [*TWO_STRANDS, shortest()]
    inputs = melting.encode(molecules, width=12)
    turned = melting.from_other_end(inputs)
    np.testing.assert_array_equal(turned["columns"][3], inputs["columns"][3])
    np.testing.assert_array_equal(np.equal(turned["columns"], 0), inputs["columns"] == 0)
    assert (np.asarray(turned["columns"])[:3] != inputs["columns"][:3]).any(axis=1).all()
    again = melting.from_other_end(turned)
    np.testing.assert_array_equal(again["columns"], inputs["columns"])


def test_half_of_the_duplexes_are_turned_in_each_epoch():
    hairpin = shortest()
    molecules = [*TWO_STRANDS, hairpin] * 50
    inputs = melting.encode(molecules, 10)
    turned = np.asarray(melting.from_other_end(inputs)["columns"])
    change = melting.turn_duplexes(seed=0)
    indices, seen = np.arange(200), []
    for epoch in (0, 1):
        found = change(inputs, tf.constant(indices, tf.int64), tf.constant(epoch, tf.int64))
        assert found["conditions"] is inputs["conditions"]
        is_turned = (found["columns"].numpy() == turned).all(axis=1)
        kept = (found["columns"].numpy() == inputs["columns"]).all(axis=1)
        assert (is_turned | kept).all() and kept[3::4].all()
        seen.append(is_turned & ~kept)
        assert seen[-1].sum() == pytest.approx(75, abs=20)  # deviation 6
    assert (seen[0] != seen[1]).any()
    two = {name: rows[7:9] for name, rows in inputs.items()}
    part = change(two, tf.constant([7, 8], tf.int64), tf.constant(1, tf.int64))
    np.testing.assert_array_equal(
        (part["columns"] != inputs["columns"][7:9]).numpy().any(1), seen[1][7:9]
    )


def shortest():
    return Molecule("ACGAAAGT", "((....))", 0.063)


def test_a_strand_written_first_or_second_is_one_sequence():
    assert Molecule("AC+GT", "", 1).group == Molecule("GT+AC", "", 1).group


def table(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for row in rows for name in row}))
        writer.writeheader()
        writer.writerows(rows)
    return path


def hairpins(count, **more):
    strands = itertools.product("ACGT", repeat=6)
    return [
        dict(
            sequence=f"G{''.join(strand)}C",
            structure="(......)",
            sodium="0.063",
            tm=str(20 + place % 30),
            **more,
        )
        for place, strand in enumerate(itertools.islice(strands, count))
    ]


def load(dataset, **changes):
    return melting.load_melting(str(dataset), dataset, **(dict(seed=0, count=20) | changes))


class TestSplits:
    def test_no_sequence_is_in_two_splits_and_folds_share_no_test(self, tmp_path):
        rows = hairpins(300)
        file = table(tmp_path / "all.csv", rows + [row | {"sodium": "1"} for row in rows])
        tests = []
        for fold in range(10):
            groups = [{m.group for m in part} for part in load(file, fold=fold).values()]
            assert sum(map(len, groups)) == len(set.union(*groups)) == len(rows)
            tests.append(groups[2])
        assert sum(map(len, tests)) == len(set.union(*tests)) == len(rows)

    def test_the_strands_of_a_duplex_in_either_order_are_in_one_split(self, tmp_path):
        pairs = [
            (f"AAC{''.join(bases)}", melting.plain_duplex(f"AAC{''.join(bases)}", 1, 1).sequence)
            for bases in itertools.product("ACGT", repeat=3)
        ]
        either = [order for _, pair in pairs for order in (pair, "+".join(pair.split("+")[::-1]))]
        rows = [
            dict(sequence=sequence, structure="((((((+))))))", sodium="0.1", tm="40")
            for sequence in either
        ]
        splits = load(table(tmp_path / "all.csv", rows))
        # Of a duplex both orders are counted in one split: all counts are even, none is shared.
        seen = {
            split: collections.Counter(frozenset(m.sequence.split("+")) for m in molecules)
            for split, molecules in splits.items()
        }
        assert sum(map(len, seen.values())) == len(pairs)
        assert {count for counts in seen.values() for count in counts.values()} == {2}

    def test_a_folder_keeps_its_validation_and_cuts_a_test(self, tmp_path):
        table(tmp_path / "train.csv", hairpins(100))
        table(tmp_path / "valid.csv", hairpins(3, dataset="here"))
        splits = load(tmp_path)
        assert len(splits["valid"]) == 3 and splits["valid"][0].dataset == "here"
        assert len(splits["train"]) > 70 and len(splits["test"]) > 3
        # The rows of the test split are taken out of the training split.
        trained, tested = ({m.sequence for m in splits[name]} for name in ("train", "test"))
        assert len(trained | tested) == len(splits["train"]) + len(splits["test"]) == 100
        table(tmp_path / "test.csv", hairpins(7))
        assert [len(part) for part in load(tmp_path).values()] == [100, 3, 7]

    def test_the_test_split_of_a_folder_has_no_sequence_of_its_validation(self, tmp_path):
        table(tmp_path / "train.csv", hairpins(100))
        table(tmp_path / "valid.csv", hairpins(60))
        splits = load(tmp_path)
        validated, tested = ({m.group for m in splits[name]} for name in ("valid", "test"))
        assert tested and not tested & validated
        assert len(splits["train"]) + len(splits["test"]) == 100
        assert melting.in_training(splits, "valid") == 60  # as the tables say

    def test_a_column_names_the_split(self, tmp_path):
        names = [("train", "valid", "test")[i % 3] for i in range(9)]
        rows = [row | {"split": name} for row, name in zip(hairpins(9), names, strict=True)]
        assert [len(part) for part in load(table(tmp_path / "x.csv", rows)).values()] == [3, 3, 3]

    def test_each_row_has_its_own_conditions(self, tmp_path):
        salts, strands, temperatures = (
            ("0.02", "0.3", "1"),
            ("2e-7", "", "4e-4"),
            ("-5", "40", "90"),
        )
        rows = [
            dict(
                sequence="GACGTC+GACGTC",
                structure="((((((+))))))",
                sodium=salt,
                strand_concentration=concentration,
                tm=tm,
                split=split,
            )
            for salt, concentration, tm, split in zip(
                salts, strands, temperatures, melting.SPLITS, strict=True
            )
        ]
        found = sum(load(table(tmp_path / "x.csv", rows)).values(), [])
        assert [m.sodium for m in found] == [0.02, 0.3, 1.0]
        assert [m.strand_concentration for m in found] == [2e-7, 1e-6, 4e-4]
        assert melting.temperatures(found).tolist() == [[-5.0], [40.0], [90.0]]
        # Self-complementary: half of the strands, not a quarter.
        conditions = [
            [math.log(0.02 / 0.063), math.log(1e-7)],
            [math.log(0.3 / 0.063), math.log(5e-7)],
            [math.log(1 / 0.063), math.log(2e-4)],
        ]
        np.testing.assert_allclose(melting.encode(found)["conditions"], conditions, rtol=1e-6)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"tm": "warm"}, r"line 3: tm is 'warm'"),
            ({"tm": ""}, r"line 3: tm is missing"),
            ({"tm": "nan"}, r"line 3: tm is 'nan', expected degrees C from -273.15 to 1000"),
            ({"tm": "1e39"}, r"line 3: tm is '1e39'"),
            ({"sodium": "nan"}, r"line 3: sodium is 'nan', expected mol/l from 1e-06 to 10"),
            ({"sodium": "-inf"}, r"line 3: sodium is '-inf'"),
            ({"sodium": "50"}, r"line 3: sodium is '50'"),
            ({"strand_concentration": "NaN"}, r"line 3: strand_concentration is 'NaN'"),
            ({"strand_concentration": "inf"}, r"line 3: strand_concentration is 'inf'"),
            ({"sodium": "-1"}, r"line 3: sodium is '-1'"),
            ({"structure": "((....)"}, r"line 3: .* same length"),
            ({"sequence": "acgx", "structure": ""}, r"line 3: 'ACGX': expected .* found X$"),
            ({"sequence": "A" * 70, "structure": ""}, r"line 3: 'A{70}': 70 columns, expected"),
            ({"split": "dev"}, r"line 3: split is 'dev'"),
        ],
    )
    def test_a_wrong_row_is_named(self, tmp_path, change, said):
        rows = hairpins(30)
        rows[1] |= change
        with pytest.raises(DataError, match=said):
            load(table(tmp_path / "x.csv", rows))

    @pytest.mark.parametrize(
        ("dh", "said"),
        [
            ("60", "all enthalpies in dh are positive"),
            ("-150", "the median of dh is -38 for each pair, probably kJ/mol"),
        ],
    )
    def test_enthalpies_of_another_sign_or_unit_are_refused(self, tmp_path, dh, said):
        rows = [
            dict(sequence=f"GACG{loop}CGTC", structure="((((..))))", tm="40", dh=dh)
            for loop in ("AT", "TA", "CC")
        ]
        for row, split in zip(rows, melting.SPLITS, strict=True):
            row["split"] = split
        found = sum(load(table(tmp_path / "x.csv", rows)).values(), [])
        with pytest.raises(DataError, match=f"x.csv: {said}"):
            melting.require_folding(found, "x.csv")
        usual = [row | {"dh": "-35" if number else ""} for number, row in enumerate(rows)]
        found = sum(load(table(tmp_path / "x.csv", usual)).values(), [])
        melting.require_folding(found, "x.csv")
        assert len(found) == 3

    @pytest.mark.parametrize(
        ("sequence", "is_right"), [("ACGTT+AACGT", True), ("ACGTT+AACGA", False)]
    )
    def test_two_strands_without_a_structure_are_perfect_complements(self, sequence, is_right):
        row = {"sequence": sequence, "structure": " "}
        if is_right:
            assert melting.molecule_of(row) == melting.molecule_of({"sequence": "ACGTT"})
            return
        with pytest.raises(DataError, match="not perfect complements: also pass the structure"):
            melting.molecule_of(row)

    def test_strands_in_another_unit_are_refused(self):
        row = {"sequence": "ACGTT", "strand_concentration": "0.25"}  # micromoles
        with pytest.raises(DataError, match="'0.25', expected mol/l from 1e-12 to 0.01"):
            melting.molecule_of(row)

    def test_a_row_without_a_split_follows_its_sequence(self, tmp_path):
        rows = [row | {"split": "test"} for row in hairpins(60)]
        rows += [row | {"sodium": "1", "split": ""} for row in hairpins(60)]
        rows += [dict(rows[0], sequence=f"C{'ACGT'[k]}AAAAAG", split="valid") for k in range(3)]
        rows += [dict(rows[0], sequence="CTTTTTTG", split="train")]
        splits = load(table(tmp_path / "x.csv", rows))
        assert [len(splits[name]) for name in melting.SPLITS] == [1, 3, 120]
        assert melting.in_training(splits, "test") == 0
        splits["train"] += splits["test"][:2]
        assert melting.in_training(splits, "test") == 4  # each under two conditions

    def test_a_table_to_predict_needs_no_temperature(self, tmp_path):
        rows = [
            dict(sequence="ACGTT", structure="", sodium="", note="one"),
            dict(sequence="GACGAAAGTC", structure="(((....)))", sodium="0.3", note=""),
            dict(sequence="", structure="", sodium="", note="none"),
        ]
        found = melting.read_molecules(
            table(tmp_path / "x.csv", rows), sodium=0.1, strand_concentration=3e-6
        )
        assert found == [
            melting.plain_duplex("ACGTT", 0.1, 3e-6),
            Molecule("GACGAAAGTC", "(((....)))", 0.3, 3e-6),
            "",
        ]
        wrong = rows[0] | {"sequence": "GACX"}
        first, error = melting.read_molecules(table(tmp_path / "x.csv", [rows[0], wrong]))
        assert first == melting.plain_duplex("ACGTT", 0.05, melting.STRANDS)
        assert isinstance(error, InputError) and "x.csv, line 3: 'GACX'" in str(error)
        with pytest.raises(DataError, match="x.csv, line 2: '' with '[(][)]'"):
            melting.read_molecules(table(tmp_path / "x.csv", [rows[2] | {"structure": "()"}]))
        with pytest.raises(DataError, match="x.csv: no row with a sequence"):
            melting.read_molecules(table(tmp_path / "x.csv", [rows[2]]))

    def test_what_is_missing(self, tmp_path):
        with pytest.raises(DataError, match="none.csv"):
            load(tmp_path / "none.csv")
        with pytest.raises(DataError, match="no column tm or Tm"):
            load(table(tmp_path / "x.csv", [{"sequence": "ACGT"}]))

    @pytest.mark.parametrize("ending", ["csv", "jsonl"])
    def test_case_and_spaces_of_a_column_do_not_matter(self, tmp_path, ending):
        rows = [
            {
                "SEQUENCE": row["sequence"],
                "targetstruct": row["structure"],
                " Sodium ": "0.3",
                "Strand_Concentration": "2e-7",
                "TM": row["tm"],
                "DH": "-9",
            }
            for row in hairpins(100)
        ]
        path = table(tmp_path / "x.csv", rows)
        if ending == "jsonl":
            path = tmp_path / "x.jsonl"
            path.write_text("\n".join(map(json.dumps, rows)))
        found = sum(load(path).values(), [])
        assert {(m.sodium, m.strand_concentration, m.dh) for m in found} == {(0.3, 2e-7, -9.0)}
        assert len(found) == 100 and melting.unread_note(str(path)) is None

    def test_two_columns_of_one_name_are_refused(self, tmp_path):
        path = table(tmp_path / "x.csv", [row | {"Sodium": "1"} for row in hairpins(30)])
        with pytest.raises(DataError, match="line 1: 2 columns sodium, expected one"):
            load(path)

    def test_a_home_that_does_not_exist_is_no_home(self):
        with pytest.raises(DataError, match="~no-such-user/x.csv"):
            load("~no-such-user/x.csv")

    def test_kelvin_is_refused(self, tmp_path):
        rows = [row | {"tm": str(300 + number)} for number, row in enumerate(hairpins(100))]
        with pytest.raises(DataError, match="x.csv: all temperatures .* above 200, .* °C"):
            load(table(tmp_path / "x.csv", rows))
        rows[7]["tm"] = "30"
        assert sum(map(len, load(table(tmp_path / "x.csv", rows)).values())) == 100

    def test_columns_and_files_that_are_not_read_are_named(self, tmp_path):
        row = {"Na": "1", "dG_37": "1", "buffer": ""}
        for name in ("train", "valid", "old"):
            table(tmp_path / f"{name}.csv", [each | row for each in hairpins(100)])
        expected = "columns that are not read: 'Na', 'buffer'"
        assert melting.unread_note(str(tmp_path / "train.csv")) == expected
        both = f"{expected}; files that are not read: old.csv"
        assert melting.unread_note(str(tmp_path)) == both
        assert melting.unread_note(melting.FORMULA) is melting.unread_note(melting.NNN) is None
        file = tmp_path / "old.csv"
        assert melting.unread_note(melting.FORMULA, test_file=file) == f"old.csv: {expected}"


class TestFormula:
    """Sums by hand of the unified parameters: SantaLucia 1998, table 2, and its salt correction."""

    @staticmethod
    def by_hand(enthalpy, entropy, stacks, sodium, concentration):
        """Degrees C of kcal/mol and cal/(mol K); the concentration is the formula's C/4 or C."""
        salt = 0.368 * stacks * math.log(sodium)
        return 1000 * enthalpy / (entropy + salt + 1.987 * math.log(concentration)) - 273.15

    @pytest.mark.parametrize("sodium", [1.0, 0.05])
    @pytest.mark.parametrize("strands", [4e-4, 1e-7])
    def test_two_different_strands(self, sodium, strands):
        enthalpy = -10.6 - 8.4 - 7.9 - 8.5 - 8.2 + 0.1 + 2.3  # CGTTGA: CG GT TT TG GA, two ends
        entropy = -27.2 - 22.4 - 22.2 - 22.7 - 22.2 - 2.8 + 4.1
        found = melting.formula(melting.plain_duplex("CGTTGA", sodium, strands))
        expected = self.by_hand(enthalpy, entropy, 5, sodium, strands / 4)
        assert found == pytest.approx(expected, abs=0.01)

    def test_a_published_temperature(self):
        # The example of SantaLucia 1998: CGTTGA at 0.4 mmol/l of strands, 1 mol/l of sodium.
        assert melting.formula(melting.plain_duplex("CGTTGA", 1.0, 4e-4)) == pytest.approx(
            35.0, abs=0.2
        )

    @pytest.mark.parametrize("sodium", [1.0, 0.1])
    def test_all_strands_of_a_self_complementary_duplex_count(self, sodium):
        enthalpy = 2 * (-9.8 - 10.6 - 8.2 - 7.9) - 7.2 + 2 * 0.1  # GC CG GA AA, AT in the middle
        entropy = 2 * (-24.4 - 27.2 - 22.2 - 22.2) - 20.4 + 2 * -2.8 - 1.4  # ... and symmetry
        found = melting.formula(melting.plain_duplex("GCGAATTCGC", sodium, 1e-6))
        assert found == pytest.approx(self.by_hand(enthalpy, entropy, 9, sodium, 1e-6), abs=0.01)
        assert sodium != 1.0 or found == pytest.approx(50.93, abs=0.01)

    def test_it_applies_to_perfect_duplexes_only(self):
        assert math.isnan(melting.formula(shortest()))
        mismatch = Molecule("ACGTA+TAAGT", "((.((+)).))", 0.05, 1e-6)
        assert math.isnan(melting.formula(mismatch))

    def test_drawn_molecules_repeat_and_depend_on_the_seed(self, monkeypatch):
        monkeypatch.setattr(melting, "HELD_OUT", 50)
        once, again, other = (load(melting.FORMULA, seed=seed) for seed in (1, 1, 2))
        assert once == again and once != other
        assert len(once["train"]) == 20 and len({m.sodium for m in once["train"]}) == 20
        assert len({m.strand_concentration for m in once["train"]}) == 20
        assert once["test"] == other["test"] and once["valid"] == other["valid"]
        assert not {m.group for m in once["train"]} & {m.group for m in other["train"]}
        more = load(melting.FORMULA, seed=1, count=30)
        assert more["test"] == once["test"] and more["train"][:20] == once["train"]

    def test_seed_0_draws_one_sequence_of_duplexes(self, monkeypatch):
        """The training duplexes are those after the test and the validation split."""
        monkeypatch.setattr(melting, "HELD_OUT", 50)
        splits = load(melting.FORMULA, seed=0)
        drawn = melting._drawn(0, 120, set(), 60)
        assert [*splits["test"], *splits["valid"], *splits["train"]] == drawn

    def test_no_duplex_is_drawn_twice(self, monkeypatch):
        """Nor with its strands swapped: every strand is drawn, and then its complement."""
        rng, drawn = np.random.default_rng(0), []

        class Repeating:
            integers, uniform = rng.integers, rng.uniform

            @staticmethod
            def choice(letters, size, p):
                drawn.append("".join(rng.choice(letters, size=size, p=p)))
                if len(drawn) % 2:
                    return list(drawn[-1])
                return list(drawn[-2].translate(str.maketrans("ACGT", "TGCA"))[::-1])

        monkeypatch.setattr(melting, "HELD_OUT", 5)
        monkeypatch.setattr(np.random, "default_rng", lambda seed: Repeating)
        splits = load(melting.FORMULA, count=10)
        strands = [frozenset(m.sequence.split("+")) for part in splits.values() for m in part]
        assert len(strands) == len(set(strands)) == 20 and len(drawn) == 39


def test_the_fit_on_nearest_neighbours_has_converged(monkeypatch):
    """Where a solver that stops early stops depends on the processor, and so did the error."""
    monkeypatch.setattr(melting, "HELD_OUT", 100)
    splits = load(melting.FORMULA, count=300)
    found = melting.baselines(splits)["nearest_neighbour_mae"]
    exact = functools.partial(linear_model.Ridge, alpha=1.0, solver="sparse_cg", tol=1e-13)
    monkeypatch.setattr(linear_model, "Ridge", lambda **options: exact())
    expected = melting.baselines(splits)["nearest_neighbour_mae"]
    assert found == pytest.approx(expected, rel=1e-7)


def test_neighbours_are_counted_with_the_ends(monkeypatch):
    monkeypatch.setattr(melting, "HELD_OUT", 20)
    molecules = [*load(melting.FORMULA, count=5)["test"], shortest()]
    found = melting.neighbour_features(iter(molecules)).toarray()
    kinds = melting.COLUMN_IDS**2
    for molecule, row in zip(molecules, found, strict=True):
        read = [0, *(melting.column_id(*each) for each in melting.columns(molecule)), 0]
        assert bytes(read[1:-1]) == molecule.column_ids
        pairs = collections.Counter(a * melting.COLUMN_IDS + b for a, b in itertools.pairwise(read))
        expected = np.zeros(kinds)
        expected[list(pairs)] = list(pairs.values())
        np.testing.assert_array_equal(row[:kinds], expected)
        np.testing.assert_allclose(row[kinds : 2 * kinds], 10 * expected / len(read))
        strands = math.log(molecule.strand_concentration) if molecule.is_duplex else 0
        about = [len(read), 1 / len(read), molecule.is_duplex, math.log(molecule.sodium), strands]
        np.testing.assert_allclose(row[2 * kinds :], about)


def test_a_molecule_is_read_once(monkeypatch):
    molecule, read, stock = shortest(), [], melting.columns
    monkeypatch.setattr(melting, "columns", lambda *a: read.append(a) or stock(*a))
    melting.encode([molecule])
    melting.neighbour_features([molecule])
    assert len(read) == 1


def test_baselines_know_only_the_training_split(monkeypatch):
    monkeypatch.setattr(melting, "HELD_OUT", 200)
    splits = load(melting.FORMULA, count=400)
    found = melting.baselines(splits)
    # The formula's own temperatures say nothing about the formula.
    assert set(found) == {"mean_mae", "nearest_neighbour_mae"}
    trained, tested = (melting.temperatures(splits[name]) for name in ("train", "test"))
    assert found["mean_mae"] == pytest.approx(np.abs(tested - trained.mean()).mean(), rel=1e-6)
    assert found["nearest_neighbour_mae"] < found["mean_mae"] / 3
    warmer = [dataclasses.replace(m, tm=m.tm + 50) for m in splits["train"]]
    moved = melting.baselines(splits | {"train": warmer})
    assert moved["nearest_neighbour_mae"] > 40  # the test split's own level is not used
    assert moved["mean_mae"] > 40
    # The formula's own error, and the share of the molecules that it applies to.
    warmer = [dataclasses.replace(m, tm=m.tm + 3, dataset="uv") for m in splits["test"][:50]]
    hairpins = [dataclasses.replace(shortest(), tm=30.0)] * 100
    found = melting.baselines(splits | {"test": splits["test"][50:100] + warmer + hairpins})
    assert found["formula_perfect_duplex_mae"] == pytest.approx(3, abs=1e-3)
    assert found["formula_share"] == 0.25


def test_the_measured_set_is_read_as_published(tmp_path, monkeypatch):
    rows = [
        {"dataset": "arr", "SEQID": "A1", "RefSeq": "ACGAAAGT", "TargetStruct": "((....))"},
        {"dataset": "ov", "SEQID": "D1", "RefSeq": "['ACG', 'CGT']", "TargetStruct": "(((+)))"},
        {"dataset": "arr", "SEQID": "A2", "RefSeq": "AGGAAACT", "TargetStruct": "((....))"},
    ]
    conditions = {"sodium": "0.063", "DNA_conc": "", "Tm": "40.5", "dH": "-9", "dG_37": "1"}
    rows[1]["DNA_conc"] = "2e-06"
    rows = [conditions | row for row in rows]
    split = '{"train_ind": ["A1"], "val_ind": ["D1"], "test_ind": ["A2"]}'

    def fetch(urls, sha256, target, what):
        target.parent.mkdir(exist_ok=True)
        if target.suffix == ".json":
            target.write_text(split)
        else:
            table(target, rows)

    monkeypatch.setattr(melting, "fetch", fetch)
    found = melting.load_melting("nnn", tmp_path, seed=0, count=1)
    assert [len(part) for part in found.values()] == [1, 1, 1]
    (duplex,) = found["valid"]
    assert (duplex.sequence, duplex.tm) == ("ACG+CGT", 40.5)
    assert (duplex.sodium, duplex.strand_concentration) == (0.063, 2e-6)
