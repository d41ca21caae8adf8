from data import splits


def test_the_split_is_the_same_on_every_machine():
    assert splits.hash_of("keras/src/models/model.py") == 18098391734310996729
    counts = {"train": [], "valid": [], "test": []}
    for number in range(2000):
        counts[splits.split_of(f"module {number}")].append(number)
    assert counts["valid"][:5] == [4, 11, 24, 65, 71] and counts["test"][:3] == [18, 43, 73]
    counts = {split: len(found) for split, found in counts.items()}
    assert counts["train"] > 1700 and min(counts.values()) > 60
