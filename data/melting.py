"""DNA duplexes and hairpins with their melting temperatures: measured tables, or a formula's.

A molecule is read from its outside in, one *column* a step: the base of the 5' side, the base that
faces it, and their kind. A Watson-Crick pair, a mismatch, a bulge, a base of a hairpin's loop and a
dangling end are all one column each, so stacked neighbours are neighbours in the array, both in a
duplex of two strands and in a hairpin.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import keras
import numpy as np
import scipy.sparse
import tensorflow as tf

from data import batches, tables
from data.download import fetch
from data.errors import DataError, InputError, listed, require_some
from data.files import expand
from data.live_line import Waiting, live_line
from data.splits import (
    NO_FILES,
    SPLITS,
    TITLES,
    hash_of,
    held_out_files,
    instead_note,
    with_notes,
)
from data.tables import folded, header_of, read_table

FORMULA = "nearest-neighbour"
NNN = "nnn"

# A column's id is 1 + 25 * kind + 5 * left + right; 0 is padding, and base 0 a gap.
BASES = "-ACGT"
PAIR, INTERNAL, LOOP, END = range(4)
COLUMN_IDS = 1 + 4 * 25
LONGEST = 64  # columns
# Number of training molecules that the fit on nearest neighbours learns from, in 1 KB each.
MOST_MOLECULES = 1_000_000
USUAL = 30  # pairs of a duplex that is measured by UV melting, or a primer's, at most
COMPLEMENT = str.maketrans("ACGT", "TGCA")

# Reference conditions: those of the array that most hairpins were measured on.
SODIUM = 0.063  # mol/l
STRANDS = 1e-6  # mol/l
MOST_STRANDS = 0.01  # mol/l

# The measured set: "Measuring DNA folding with an array", Nature Communications 2025, MIT licence.
NNN_URL = (
    "https://raw.githubusercontent.com/GreenleafLab/nnn_paper/"
    "802cd6376400f2a0cfcfc3381c055c3456591e81/data/models/raw/"
)
NNN_FILES = {
    "combined_dataset.csv": "ead409bdced2956aec9d6dbd624c5216f9d8efe9a2d3f03f9e3e616c555a0986",
    "combined_data_split.json": "38839c04aa336a15145482d822dd7a72ae9cb829ec78d3e4ce404977901187d6",
}
# Names of a table's columns in any case, those of the measured set too; what may be missing has
# the name "".
COLUMNS = (
    ("sequence", "RefSeq"),
    ("structure", "TargetStruct", ""),
    ("sodium", ""),
    ("strand_concentration", "DNA_conc", ""),
    ("tm", "Tm"),
    ("dataset", ""),
    ("split", ""),
    ("id", "SEQID", ""),
    ("dh", "dH", ""),
)
PUBLISHED = ("dG_37",)  # the measured set's other columns, which need no mention
KELVIN = 200  # lowest temperature of a table in kelvin; no molecule is stable at 200 °C
# kcal/mol for each pair: nearest neighbours have 7 to 11, and 4.184 times as many kilojoules.
KILOJOULES = 15
HELD_OUT = 1_000  # molecules of the formula to test on, and as many to validate on
EVALUATION_SEED = 0  # draws these, so that runs of all seeds are tested on the same ones


@dataclasses.dataclass(frozen=True)
class Molecule:
    """A duplex or a hairpin under its conditions.

    Attributes:
        sequence: bases from 5' to 3', two strands joined by "+".
        structure: dot-bracket, of the same length.
        sodium: mol/l.
        strand_concentration: mol/l of all strands; without effect on a hairpin.
        tm: degrees C, or nan if unknown.
        dataset, id: where it was measured, and its name there.
        dh: enthalpy in kcal/mol, or nan if it was not measured.
    """

    sequence: str
    structure: str
    sodium: float
    strand_concentration: float = STRANDS
    tm: float = math.nan
    dataset: str = ""
    id: str = ""
    dh: float = math.nan

    def __str__(self) -> str:
        shown = f"{self.sequence}:{self.structure}, {self.sodium:g} mol/l sodium"
        if self.is_duplex:
            shown += f", {self.strand_concentration:g} mol/l strands"
        return shown

    @property
    def is_duplex(self) -> bool:
        """Returns whether it has two strands."""
        return "+" in self.sequence

    @property
    def kind(self) -> str:
        """Returns "hairpin", "perfect duplex" or "duplex", for its uncertainty."""
        if not self.is_duplex:
            return "hairpin"
        first, second = self.sequence.split("+")
        return "perfect duplex" if second == first[::-1].translate(COMPLEMENT) else "duplex"

    @property
    def group(self) -> str:
        """Returns one name for a sequence, whichever strand is written first."""
        return min(self.sequence, "+".join(reversed(self.sequence.split("+"))))

    @property
    def turned(self) -> "Molecule":
        """Returns the same duplex with its other strand written first; a hairpin as it is."""
        if not self.is_duplex:
            return self
        texts = (self.sequence, self.structure.translate(str.maketrans("()", ")(")))
        sequence, structure = ("+".join(reversed(text.split("+"))) for text in texts)
        return dataclasses.replace(self, sequence=sequence, structure=structure)

    @functools.cached_property
    def column_ids(self) -> bytes:
        """Returns the ids of its `columns()`, from its outside in, a byte each."""
        return bytes(column_id(*each) for each in columns(self))

    @property
    def effective_concentration(self) -> float:
        """Returns the concentration C of Tm = dH / (dS + R ln C): mol/l, and 1 for a hairpin.

        It is a quarter of all strands where the two strands differ. Of a self-complementary duplex
        it is half: all strands (SantaLucia 1998), halved by the twofold symmetry, whose entropy is
        -R ln 2.
        """
        if not self.is_duplex:
            return 1.0
        first, second = self.sequence.split("+")
        return self.strand_concentration / (2 if first == second else 4)


def plain_duplex(sequence: str, sodium: float, strand_concentration: float) -> Molecule:
    """Returns a strand with its perfect complement."""
    other = sequence.translate(COMPLEMENT)[::-1]
    paired = len(sequence)
    structure = "(" * paired + "+" + ")" * paired
    return Molecule(f"{sequence}+{other}", structure, sodium, strand_concentration)


def load_melting(
    dataset: str,
    cache_dir: Path,
    *,
    seed: int,
    count: int,
    fold: int = 9,
    held_out: Mapping[str, Path] = NO_FILES,
    test_file: Path | None = None,
) -> dict[str, list[Molecule]]:
    """Loads measured molecules, or draws duplexes and computes their temperatures.

    Args:
        dataset: "nearest-neighbour"; "nnn", which is downloaded; a CSV file; or a folder with
            train.csv, valid.csv and perhaps test.csv. The tables have the columns `sequence`,
            `structure`, `sodium`, `strand_concentration` and `tm`, and may have `dataset` and, in
            a single file, `split`.
        cache_dir: for downloads.
        seed: seed of the formula's training molecules.
        count: training molecules to draw by the formula.
        fold: 0 to 9, the tenth of the sequences that is the test split where the tables do not
            name one; in a single file the tenth after it is the validation split. No sequence is
            in two splits, unless the table says so.
        held_out: tables by split ("valid", "test"), which replace those of the dataset; such a
            split is not cut from training.
        test_file: a table, all of which is the test split instead, while training stays as it is.

    Returns:
        Molecules by split: "train", "valid" and "test".

    Raises:
        DataError: a file is missing or not what it should be, or its temperatures are in kelvin.
    """
    if dataset == FORMULA:
        splits = _draw(seed, count)
    elif dataset == NNN:
        splits = _load_published(cache_dir)
    else:
        splits = _load(dataset, fold, held_out)
    given = held_out_files(held_out, test_file)
    for file in dict.fromkeys(given.values()):  # one file may be two splits
        molecules = [molecule for molecule, _ in _read_table(file)]
        if not molecules:
            raise DataError(f"{file}: no rows")
        splits |= {split: molecules for split in given if given[split] == file}
    empty = [split for split, molecules in splits.items() if not molecules]
    if empty:
        raise DataError(f"{dataset}: no rows for {' and '.join(empty)}; too few sequences")
    return splits


def _load_published(cache_dir: Path) -> dict[str, list[Molecule]]:
    """Loads the measured molecules in the splits of their authors; downloads them once."""
    splits: dict[str, list[Molecule]] = {split: [] for split in SPLITS}
    split_of = _download(cache_dir)
    for molecule, _ in _read_table(cache_dir / NNN / "combined_dataset.csv"):
        if molecule.id in split_of:
            splits[split_of[molecule.id]].append(molecule)
    return splits


def _load(dataset: str, fold: int, held_out: Mapping[str, Path]) -> dict[str, list[Molecule]]:
    """Loads the splits of a folder or a table, but those of other files, `held_out`."""
    path = expand(dataset)
    splits: dict[str, list[Molecule]] = {split: [] for split in SPLITS}
    if path.is_dir():
        for split in SPLITS:
            file = path / f"{split}.csv"
            if split not in held_out and (split != "test" or file.exists()):
                splits[split] = [molecule for molecule, _ in _read_table(file)]
        if not splits["test"] and "test" not in held_out:
            validated = {molecule.group for molecule in splits["valid"]}
            rows, splits["train"] = splits["train"], []
            for molecule in rows:
                is_test = _tenth(molecule) == fold and molecule.group not in validated
                splits["test" if is_test else "train"].append(molecule)
    else:
        table = list(_read_table(path))
        # A row without a split follows the others of its sequence.
        named = {molecule.group: split for molecule, split in table if split}
        for molecule, split in table:
            valid = (fold + 1) % 10
            by_hash = {fold: "test", valid: "valid"}.get(_tenth(molecule), "train")
            if by_hash in held_out:
                by_hash = "train"
            splits[split or named.get(molecule.group) or by_hash].append(molecule)
    return splits


def formula_duplexes(seed: int, count: int, splits: dict[str, list[Molecule]]) -> list[Molecule]:
    """Draws perfect duplexes with the formula's temperatures, none of a measured sequence.

    They have at most `USUAL` pairs, or as many as the longest measured molecule has columns: all
    molecules of a batch are padded to the longest, so longer ones would make each step slower.

    Args:
        seed: seed of the draw.
        count: number of duplexes.
        splits: measured molecules, whose sequences are left out.
    """
    measured = [molecule for molecules in splits.values() for molecule in molecules]
    longest = max([USUAL, *(len(columns(molecule)) for molecule in measured)])
    return _drawn(seed, count, {molecule.group for molecule in measured}, longest)


def _tenth(molecule: Molecule) -> int:
    return hash_of(molecule.group) % 10


def _read_table(path: Path) -> Iterator[tuple[Molecule, str]]:
    """Yields the molecule and the split, or "", of each row of a CSV file."""
    coldest = math.inf
    for where, row in live_line(_rows(path, COLUMNS), f"reading {path.name}"):
        if row["split"] not in ("", *SPLITS):
            raise DataError(f"{where}: split is {row['split']!r}, expected train, valid or test")
        if not row["tm"]:
            raise DataError(f"{where}: tm is missing")
        molecule = molecule_of(row, where)
        coldest = min(coldest, molecule.tm)
        yield molecule, row["split"]
    if KELVIN < coldest < math.inf:
        raise DataError(
            f"{path}: all temperatures in tm are above {KELVIN}, probably kelvin; expected °C: "
            "subtract 273.15"
        )


def _rows(
    path: Path, wanted: Sequence[tuple[str, ...]], *, keeps_empty_rows: bool = False
) -> Iterator[tuple[str, dict]]:
    """Yields where it is and the texts by column of each row of a table."""
    rows = read_table(path, *wanted, any_case=True, keeps_empty_rows=keeps_empty_rows)
    for where, values in rows:
        row = dict(zip((names[0] for names in wanted), values, strict=True))
        # The measured set writes two strands as a list: "['ACG', 'CGT']".
        if row["sequence"].startswith("["):
            row["sequence"] = "+".join(re.findall(r"[^\[\]', ]+", row["sequence"]))
        yield where, row


def read_molecules(
    path: Path, *, sodium: float = 0.05, strand_concentration: float = STRANDS
) -> list[Molecule | str | InputError]:
    """Reads a table of molecules whose temperatures need not be known.

    Args:
        path: a table with the columns of `load_melting`, all but `sequence` optional; `tm` and `dh`
            are not read.
        sodium: mol/l, where the table has none.
        strand_concentration: mol/l of all strands, where the table has none.

    Returns:
        The molecule of each row; "" for an empty row, which keeps its place, and an error for one
        that is not a molecule.

    Raises:
        DataError: the file is missing or not what it should be, or has no molecule.
    """
    read = ("sequence", "structure", "sodium", "strand_concentration")
    wanted = [names for names in COLUMNS if names[0] in read]
    usual = {"sodium": str(sodium), "strand_concentration": str(strand_concentration)}
    molecules: list[Molecule | str | InputError] = []
    rows = _rows(path, wanted, keeps_empty_rows=True)
    for where, row in live_line(rows, f"reading {path.name}"):
        if not any(row.values()):
            molecules.append("")
            continue
        row |= {name: value for name, value in usual.items() if not row[name]}
        try:
            molecules.append(molecule_of(row, where))
        except DataError as error:
            molecules.append(InputError(str(error), len(molecules)))
    require_some(molecules, f"{path}: no row with a sequence")
    return molecules


def require_folding(molecules: Sequence[Molecule], name: str) -> None:
    """Refuses enthalpies of another sign or unit than those of folding in kcal/mol.

    Args:
        molecules: those without an enthalpy do not count.
        name: of the dataset.

    Raises:
        DataError: says what they probably are.
    """
    by_pair = [m.dh / m.structure.count("(") for m in molecules if not math.isnan(m.dh)]
    if by_pair and min(by_pair) > 0:
        raise DataError(
            f"{name}: all enthalpies in dh are positive; expected those of folding, which are "
            "negative"
        )
    if by_pair and statistics.median(by_pair) < -KILOJOULES:
        raise DataError(
            f"{name}: the median of dh is {statistics.median(by_pair):.0f} for each pair, probably "
            "kJ/mol; expected kcal/mol: divide by 4.184"
        )


def in_training(splits: dict[str, list[Molecule]], split: str) -> int:
    """Returns how many molecules of a split have a sequence of the training split."""
    trained = {molecule.group for molecule in splits["train"]}
    return sum(molecule.group in trained for molecule in splits[split])


def repeated_notes(splits: dict[str, list[Molecule]]) -> list[str]:
    """Returns a line for validation and test if molecules have a sequence of the training split."""
    counts = {split: in_training(splits, split) for split in with_notes(splits)}
    return [
        f"{count:,} {TITLES[split]} molecules have a sequence of the training split"
        for split, count in counts.items()
        if count
    ]


def unread_note(
    dataset: str, held_out: Mapping[str, Path] = NO_FILES, test_file: Path | None = None
) -> str | None:
    """Returns a line that names columns, tables and splits of a dataset that are not read, or None.

    Args:
        dataset: See `load_melting`; what it cannot read has no such line.
        held_out: tables by split that replace those of the dataset.
        test_file: a table of the test split, or None.
    """
    notes: list[str | None] = []
    path, has_splits = expand(dataset), dataset in (FORMULA, NNN)
    if not has_splits:
        named = [path / f"{split}.csv" for split in SPLITS if split not in held_out]
        files = [file for file in named if file.exists()] if path.is_dir() else [path]
        notes.append(_unread_columns(files))
        if path.is_dir():
            read = [*files, *held_out.values()]
            notes.append(tables.unread_note(path, read, COLUMNS[0]))
        else:
            has_splits = "split" in map(folded, header_of(path))
    if has_splits:
        notes.append(instead_note(dataset, held_out, test_file))
    for file in dict.fromkeys(held_out_files(held_out, test_file).values()):
        columns = _unread_columns([file])
        notes.append(columns and f"{file.name}: {columns}")
    return "; ".join(filter(None, notes)) or None


def _unread_columns(files: Sequence[Path]) -> str | None:
    """Returns a line that names columns of tables that are not read, or None."""
    known = {folded(name) for names in (*COLUMNS, PUBLISHED) for name in names}
    columns = [
        repr(name[:40])
        for name in dict.fromkeys(itertools.chain.from_iterable(map(header_of, files)))
        if folded(name) not in {*known, ""}
    ]
    return f"columns that are not read: {listed(columns)}" if columns else None


def molecule_of(row: dict, where: str = "") -> Molecule:
    """Checks a row of a table.

    Args:
        row: texts by column. Without a structure it is a plain duplex of `sequence` and its
            complement, which may be written after a "+".
        where: file and line, with which a message begins.

    Raises:
        DataError: names what is wrong.
    """
    begin = f"{where}: " if where else ""

    def number(name: str, default: float, lowest: float, highest: float, unit: str) -> float:
        text = row.get(name, "")
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not lowest <= value <= highest:  # nan is in no range
            raise DataError(
                f"{begin}{name} is {text[:40]!r}, expected {unit} from {lowest:g} to {highest:g}"
            )
        return value

    sequence, structure = row["sequence"].strip().upper(), row.get("structure", "").strip()
    shown = begin + _quoted(sequence, structure)
    sodium = number("sodium", 0.05, 1e-6, 10.0, "mol/l")
    # Strands are mixed at micromoles; a higher number is one of them in another unit.
    strands = number("strand_concentration", STRANDS, 1e-12, MOST_STRANDS, "mol/l")
    tm = number("tm", math.nan, -273.15, 1000.0, "degrees C")
    if not structure:
        first, nick, _ = sequence.partition("+")
        duplex = plain_duplex(first, sodium, strands)
        if nick and sequence != duplex.sequence and set(sequence) <= set("ACGT+"):
            raise DataError(
                f"{shown}: the strands are not perfect complements: also pass the structure, in "
                "dot-bracket"
            )
        structure = duplex.structure
        sequence = sequence if nick else duplex.sequence
    about = row.get("dataset", ""), row.get("id", "")
    dh = number("dh", math.nan, -1000.0, 1000.0, "kcal/mol")
    molecule = Molecule(sequence, structure, sodium, strands, tm, *about, dh)
    columns(molecule, shown)
    return molecule


def _quoted(sequence: str, structure: str) -> str:
    """Returns a molecule as a message shows it."""
    return f"{sequence[:80]!r}" + (f" with {structure[:80]!r}" if structure else "")


def columns(molecule: Molecule, shown: str = "") -> list[tuple[str, str, int]]:
    """Reads a molecule from its outside in.

    Args:
        molecule: is read.
        shown: how a message names it, by default by its sequence and structure.

    Returns:
        For each column the base of the 5' side, the base that faces it ("-" for none), and PAIR
        (Watson and Crick's), INTERNAL (mismatch, bulge, internal loop), LOOP (of a hairpin) or END
        (dangling). G and T are a mismatch, also where brackets pair them.

    Raises:
        DataError: letters other than A, C, G, T, a structure that does not fit, has branches, no
            pair or a pair of other bases, or more than 64 columns.
    """
    sequence, structure = molecule.sequence, molecule.structure
    shown = shown or _quoted(sequence, structure)
    strange = sorted(set(sequence) - set("ACGT+"))
    if strange:
        found = " ".join(letter if letter.isalnum() else repr(letter) for letter in strange)
        hint = ""
        if strange == ["U"]:
            hint = "; RNA is not supported"
        elif {"&", " ", "/", "-"} & set(strange):
            hint = "; two strands are joined by +"
        raise DataError(f"{shown}: expected bases A, C, G, T, found {found}{hint}")
    nicks, same = (re.sub("[^+]", ".", text) for text in (sequence, structure))
    if nicks != same or set(structure) - set("().+"):
        raise DataError(f"{shown}: expected dot-bracket of the same length, '+' at the same place")
    opened = [place for place, symbol in enumerate(structure) if symbol == "("]
    closed = [place for place, symbol in enumerate(structure) if symbol == ")"]
    if not opened or len(opened) != len(closed):
        raise DataError(f"{shown}: no pair, or a bracket without its partner")
    if opened[-1] > closed[0]:
        raise DataError(f"{shown}: structures with branches are not supported")

    pairs = []
    for left, right in zip(opened, reversed(closed), strict=True):
        bases = sequence[left] + sequence[right]
        if bases in ("AT", "TA", "CG", "GC"):
            pairs.append((left, right))
        elif bases not in ("GT", "TG"):
            raise DataError(
                f"{shown}: {bases[0]} at {left + 1} is paired with {bases[1]} at {right + 1}; "
                "write a mismatch as dots on both sides"
            )
    if not pairs:
        raise DataError(f"{shown}: no pair of A and T, or of C and G")

    read: list[tuple[str, str, int]] = []

    def facing(left: str, right: str, kind: int) -> None:
        for pair in itertools.zip_longest(left, right, fillvalue="-"):
            read.append((*pair, kind))

    outside, inside = -1, len(sequence)
    for left, right in pairs:
        before, after = sequence[outside + 1 : left], sequence[right + 1 : inside][::-1]
        if not read:  # the outer end: the bases beside the helix face each other
            longer = max(len(before), len(after))
            before, after = before.rjust(longer, "-"), after.rjust(longer, "-")
        facing(before, after, INTERNAL if read else END)
        read.append((sequence[left], sequence[right], PAIR))
        outside, inside = left, right
    first, nick, second = sequence[outside + 1 : inside].partition("+")
    facing(first, second[::-1], END if nick else LOOP)
    if any("+" in column[:2] for column in read):
        raise DataError(f"{shown}: expected at most one '+', between the innermost bases")
    if len(read) > LONGEST:
        raise DataError(f"{shown}: {len(read)} columns, expected at most {LONGEST}")
    return read


def encode(molecules: list[Molecule], width: int = LONGEST) -> dict[str, np.ndarray]:
    """Returns a model's inputs, the same whichever strand of a duplex is written first.

    Args:
        molecules: n of them.
        width: columns to pad to.

    Returns:
        "columns", int32 of shape (n, width), 0 for padding; and "conditions", float32 of shape
        (n, 2): the logarithms of sodium, relative to `SODIUM`, and of the effective concentration.
    """
    ids = np.zeros((len(molecules), width), np.int32)
    conditions = np.zeros((len(molecules), 2), np.float32)
    for row, molecule in enumerate(live_line(molecules, "encoding molecules")):
        # A hairpin has one reading.
        read = min(each.column_ids for each in (molecule, molecule.turned))
        ids[row, : len(read)] = list(read)
        conditions[row] = (
            math.log(molecule.sodium / SODIUM),
            math.log(molecule.effective_concentration),
        )
    return {"columns": ids, "conditions": conditions}


def column(number: int) -> tuple[str, str, int]:
    """Returns the column of an id of `column_id()`."""
    kind, bases = divmod(number - 1, 25)
    return BASES[bases // 5], BASES[bases % 5], kind


def column_id(left: str, right: str, kind: int) -> int:
    """Returns the id of a column of `columns()`, 1 to 100."""
    return 1 + 25 * kind + 5 * BASES.index(left) + BASES.index(right)


def from_other_end(inputs: dict) -> dict:
    """Returns duplexes read from their other end, and hairpins, which have one, as they are.

    The columns come in reverse order, and in each the two bases change places.

    Args:
        inputs: a batch as from `encode`: arrays, tensors, or inputs of a `keras.Model`.
    """
    ids, conditions = inputs["columns"], inputs["conditions"]
    bases = (ids + 24) % 25  # not of -1 for padding: ONNX has another remainder for it
    swapped = ids - bases + 5 * (bases % 5) + bases // 5  # padding stays 0
    place = keras.ops.cumsum(keras.ops.ones_like(ids), axis=1) - 1
    last = keras.ops.sum(keras.ops.cast(ids > 0, ids.dtype), axis=1, keepdims=True) - 1
    source = keras.ops.where(place <= last, last - place, place)
    reversed_ = keras.ops.take_along_axis(swapped, source, axis=1)
    # See `Molecule.effective_concentration`.
    is_hairpin = keras.ops.equal(conditions[:, 1:], 0)
    return {**inputs, "columns": keras.ops.where(is_hairpin, ids, reversed_)}


def turn_duplexes(seed: int) -> Callable:
    """Returns a `change` for `arrays.training_data` that reads half of the duplexes turned.

    Which ones depends on (seed, epoch, example) alone.

    Args:
        seed: the run's seed.
    """
    stream = batches.stream_seed(seed, "turned duplexes")

    def change(x: dict, indices: tf.Tensor, epoch: tf.Tensor) -> dict:
        is_turned = batches.uniform(stream, epoch, indices)[:, None] < 0.5
        turned = from_other_end(x)["columns"]
        return {**x, "columns": tf.where(is_turned, turned, x["columns"])}

    return change


def enthalpies(molecules: list[Molecule]) -> tuple[np.ndarray, np.ndarray]:
    """Returns measured enthalpies.

    Returns:
        kcal/mol, float32 of shape (n, 1), 0 where it was not measured; and weights of shape (n,),
        1 where it was and 0 where it was not.
    """
    values = np.array([[molecule.dh] for molecule in molecules], np.float32)
    return np.nan_to_num(values), np.isfinite(values[:, 0]).astype(np.float32)


def temperatures(molecules: Sequence[Molecule]) -> np.ndarray:
    """Returns degrees C, float32 of shape (n, 1)."""
    return np.array([[molecule.tm] for molecule in molecules], np.float32)


def formula(molecule: Molecule) -> float:
    """Computes degrees C by SantaLucia's nearest neighbours (1998), as Biopython has them.

    Returns:
        nan if the molecule is not a perfect duplex: the formula does not apply.
    """
    from Bio.SeqUtils import MeltingTemp

    strand = molecule.sequence.partition("+")[0]
    perfect = plain_duplex(strand, molecule.sodium, molecule.strand_concentration)
    if (molecule.sequence, molecule.structure) != (perfect.sequence, perfect.structure):
        return math.nan
    is_symmetric = strand == strand.translate(COMPLEMENT)[::-1]
    # Of each strand; a self-complementary duplex has one kind of strand.
    nanomolar = molecule.strand_concentration * 1e9 / (1 if is_symmetric else 2)
    return MeltingTemp.Tm_NN(
        strand,
        check=False,
        nn_table=MeltingTemp.DNA_NN3,
        dnac1=nanomolar,
        dnac2=nanomolar,
        Na=molecule.sodium * 1e3,
        saltcorr=5,
        selfcomp=is_symmetric,
    )


def formula_errors(molecules: Sequence[Molecule]) -> np.ndarray:
    """Returns the formula's temperatures minus the measured ones.

    Args:
        molecules: n of them.

    Returns:
        Degrees C, float64 of shape (n,); nan where the formula does not apply, and for molecules
        whose temperatures are the formula's.
    """
    found = [math.nan if m.dataset == FORMULA else formula(m) for m in molecules]
    return np.array(found) - temperatures(molecules)[:, 0]


def neighbour_features(molecules: Iterable[Molecule]) -> scipy.sparse.csr_array:
    """Counts the pairs of neighbouring columns of each molecule, its ends included.

    Args:
        molecules: n of them.

    Returns:
        float64 of shape (n, features): the counts of each pair, their shares times ten, the number
        of columns with both ends and its inverse, whether it is a duplex, and the logarithms of the
        conditions.
    """
    texts, conditions = [], []
    for molecule in molecules:
        texts.append(molecule.column_ids)
        length, strands = len(molecule.column_ids) + 2, 0.0
        if molecule.is_duplex:
            strands = math.log(molecule.strand_concentration)
        salt = math.log(molecule.sodium)
        conditions.append((length, 1 / length, molecule.is_duplex, salt, strands))
    # An end, the columns of a molecule, the end that is the next one's too, its columns, ...
    ids = np.frombuffer(b"\0" + b"\0".join(texts) + b"\0", np.uint8).astype(np.int32)
    pairs = ids[:-1] * COLUMN_IDS + ids[1:]
    rows = np.repeat(np.arange(len(texts)), [len(text) + 1 for text in texts])
    counted = (np.ones(len(pairs)), (rows, pairs))
    counts = scipy.sparse.csr_array(counted, (len(texts), COLUMN_IDS**2))  # sums equal pairs
    others = np.array(conditions, np.float64)
    shares = counts.multiply(10 * others[:, 1:2])
    return scipy.sparse.hstack([counts, shares, others], "csr")


def baselines(splits: dict[str, list[Molecule]]) -> dict[str, float]:
    """Returns mean absolute errors of simpler predictors on the test split, in degrees C.

    Returns:
        "mean_mae": the training split's mean; "nearest_neighbour_mae": a ridge regression on the
        counts of neighbouring columns (stacks, loops and ends), their shares, lengths and
        conditions, of `MOST_MOLECULES` training molecules at most, evenly spaced; and, of the
        molecules that have `formula_errors()`, "formula_perfect_duplex_mae", with "formula_share",
        their share of the test split.
    """
    from sklearn.linear_model import Ridge

    truth = temperatures(splits["test"])[:, 0].astype(np.float64)
    known = temperatures(splits["train"])[:, 0].astype(np.float64)
    every = math.ceil(len(known) / MOST_MOLECULES)
    learned = neighbour_features(live_line(splits["train"][::every], "counting neighbours"))
    test_features = neighbour_features(splits["test"])
    used = np.unique(learned.indices)
    fit = Ridge(alpha=1.0, solver="lsqr", tol=1e-10)
    with Waiting("fitting nearest neighbours"):
        fit.fit(learned[:, used], known[::every])
    fitted = fit.predict(test_features[:, used])
    errors_of = {
        "mean_mae": float(np.mean(np.abs(truth - known.mean()))),
        "nearest_neighbour_mae": float(np.mean(np.abs(truth - fitted))),
    }
    errors = formula_errors(splits["test"])
    applies = np.isfinite(errors)
    if applies.any():
        errors_of["formula_perfect_duplex_mae"] = float(np.mean(np.abs(errors[applies])))
        errors_of["formula_share"] = float(np.mean(applies))
    return errors_of


def _draw(seed: int, count: int) -> dict[str, list[Molecule]]:
    """Draws duplexes by the formula; those to validate and to test on are the same for all seeds.

    The training duplexes of seed 0 are those that its generator draws after them.
    """
    held_out = _drawn(EVALUATION_SEED, 2 * HELD_OUT, set(), 60)
    train = _drawn(seed, count, {duplex.group for duplex in held_out}, 60)
    return {"train": train, "valid": held_out[HELD_OUT:], "test": held_out[:HELD_OUT]}


def _drawn(seed: int, count: int, left_out: set, longest: int) -> list[Molecule]:
    """Draws different perfect duplexes of 8 to `longest` pairs."""
    rng = np.random.default_rng(seed)
    seen = set(left_out)
    drawn: list[Molecule] = []
    while len(drawn) < count:
        length, gc = rng.integers(8, longest, endpoint=True), rng.uniform(0.2, 0.8)
        weights = [(1 - gc) / 2, gc / 2, gc / 2, (1 - gc) / 2]
        strand = "".join(rng.choice(list("ACGT"), size=length, p=weights))
        sodium, strands = np.exp(rng.uniform(np.log([0.02, 1e-8]), np.log([1.0, 1e-5])))
        duplex = plain_duplex(strand, float(sodium), float(strands))
        if duplex.group not in seen:
            seen.add(duplex.group)
            drawn.append(dataclasses.replace(duplex, tm=formula(duplex), dataset=FORMULA))
    return drawn


def _download(cache_dir: Path) -> dict[str, str]:
    """Downloads the measured set, or takes it from the cache; returns the split of each id."""
    for name, sha256 in NNN_FILES.items():
        fetch([NNN_URL + name], sha256, cache_dir / NNN / name, what=name)
    parts = json.loads((cache_dir / NNN / "combined_data_split.json").read_text())
    names = zip(SPLITS, ("train_ind", "val_ind", "test_ind"), strict=True)
    return {molecule: split for split, part in names for molecule in parts[part]}
