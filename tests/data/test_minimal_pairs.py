import json

import pytest

from data import minimal_pairs


def write(folder, name, count, **fields):
    rows = [
        {"sentence_good": f"{name} {n} good", "sentence_bad": f"{name} {n} bad"} | fields
        for n in range(count)
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


@pytest.fixture
def sets(tmp_path):
    write(tmp_path, "wh_island", 4, field="syntax", linguistics_term="island_effects")
    write(tmp_path, "adjunct_island", 2, field="syntax", linguistics_term="island_effects")
    write(tmp_path, "anaphor", 2, field="morphology", linguistics_term="anaphor_agreement")
    write(tmp_path, "mine", 1)
    return minimal_pairs.read_pairs(tmp_path)


def scored(sets, right):
    """A model that is right in the first pairs of each set; in the others there is a tie."""
    likelihoods = []
    for found in sets:
        for number in range(len(found.pairs)):
            likelihoods += [-1.0, -2.0 if number < right[found.name] else -1.0]
    return minimal_pairs.score(sets, {"model": likelihoods})


def test_what_is_read(sets):
    assert [found.name for found in sets] == ["adjunct_island", "anaphor", "mine", "wh_island"]
    assert sets[1].pairs == [
        ("anaphor 0 good", "anaphor 0 bad"),
        ("anaphor 1 good", "anaphor 1 bad"),
    ]
    assert (sets[1].field, sets[1].phenomenon) == ("morphology", "anaphor_agreement")
    assert (sets[2].field, sets[2].phenomenon) == ("", "")
    found = minimal_pairs.sentences(sets)
    assert len(found) == 18 and found[:2] == ["adjunct_island 0 good", "adjunct_island 0 bad"]


def test_accuracies_and_standard_errors_by_set_and_phenomenon(sets):
    rows = scored(sets, {"wh_island": 1, "adjunct_island": 2, "anaphor": 1, "mine": 0})
    expected = [
        ("phenomenon", "anaphor_agreement", "morphology", 2, 1 / 2, (1 / 4 / 6) ** 0.5),
        ("set", "anaphor", "morphology", 2, 1 / 2, (1 / 4 / 6) ** 0.5),
        ("phenomenon", "island_effects", "syntax", 6, 3 / 6, (1 / 4 / 10) ** 0.5),
        ("set", "adjunct_island", "syntax", 2, 1.0, (4 / 6 * 2 / 6 / 6) ** 0.5),
        ("set", "wh_island", "syntax", 4, 1 / 4, (3 / 8 * 5 / 8 / 8) ** 0.5),
        ("set", "mine", "", 1, 0.0, (2 / 5 * 3 / 5 / 5) ** 0.5),
        ("all", "all pairs", "", 9, 4 / 9, (6 / 13 * 7 / 13 / 13) ** 0.5),
    ]
    for row, (part, name, field, pairs, accuracy, error) in zip(rows, expected, strict=True):
        assert (row["part"], row["name"], row["field"], row["pairs"]) == (part, name, field, pairs)
        assert row["model"]["accuracy"] == pytest.approx(accuracy)
        assert row["model"]["standard_error"] == pytest.approx(error)


def test_the_columns_of_the_table_align(sets):
    rows = scored(sets, {"wh_island": 1, "adjunct_island": 2, "anaphor": 1, "mine": 0})
    lines = minimal_pairs.format_table(rows, ["model"]).splitlines()
    assert lines[3].split() == "island_effects (syntax) 6 50.0 ± 15.8".split()
    assert lines[4].startswith("  adjunct_island ") and len(set(map(len, lines))) == 1


def test_a_file_of_several_sets_has_them_all(tmp_path):
    """All of BLiMP in one file, an empty line at its end."""
    write(tmp_path, "a", 2, UID="wh_island", field="syntax", linguistics_term="islands")
    write(tmp_path, "b", 3, UID="anaphor", field="morphology", linguistics_term="agreement")
    lines = [(tmp_path / f"{name}.jsonl").read_text() for name in "ab"]
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "blimp.jsonl").write_text("".join(lines) + "\n")
    found = minimal_pairs.read_pairs(tmp_path / "one")
    assert [(each.name, len(each.pairs), each.phenomenon) for each in found] == [
        ("wh_island", 2, "islands"),
        ("anaphor", 3, "agreement"),
    ]
