import dataclasses
import random
import subprocess
import sys

import keras_nlp
import pytest

from data import byte_pairs, word_pieces
from data import text as text_module
from data.errors import DataError
from data.text import Text

END = "<|endoftext|>"
RANDOM = random.Random(0)
WORDS = ["".join(RANDOM.choices("aeiouéklmnst", k=RANDOM.randint(1, 9))) for _ in range(300)]
LINES = [
    f"  The {' '.join(RANDOM.choices(WORDS, k=8))}, isn't it?\tÉtude № {n % 7} 東京 {'x' * (n % 5)}"
    for n in range(60)
]
LEARN = """
import sys
from data import byte_pairs
print(byte_pairs.learn_merges(open(sys.argv[1], encoding="utf-8"), 500))
"""


def tokenizer_of(merges):
    vocabulary = byte_pairs.vocabulary_of(merges, [END])
    return keras_nlp.models.GPT2Tokenizer(vocabulary=vocabulary, merges=list(merges))


def test_the_same_text_gives_the_same_merges_in_any_process(tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(LINES), encoding="utf-8")
    here = byte_pairs.learn_merges(LINES, 500)
    for _ in range(3):
        assert byte_pairs.learn_merges(LINES, 500) == here
    command = [sys.executable, "-c", LEARN, str(tmp_path / "text.txt")]
    there = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(here)
    assert 200 < len(here) <= 244 and len(set(here)) == len(here)


def test_tokens_give_any_text_back_with_its_case():
    merges = byte_pairs.learn_merges(LINES, 500)
    tokenizer = tokenizer_of(merges)
    strange = "No such CHARACTERS: ß 🎉 \u200b\u3000  двa  \x07 in  the  text"
    for line in [*LINES, strange]:
        assert tokenizer.detokenize(tokenizer(line)) == line
    assert len(tokenizer("The")) == 1 < len(tokenizer("tHE"))
    # As GPT-2's: "!" is 0, which KerasNLP pads with, and the special token is the last.
    assert tokenizer("!").tolist() == [0]
    assert tokenizer.end_token_id == tokenizer.vocabulary_size() - 1 == 256 + len(merges)


@pytest.mark.parametrize(("before", "is_cut"), [(998, False), (999, True), (1000, False)])
def test_a_long_run_of_letters_is_cut_to_learn_from(before, is_cut):
    """Behind each thousandth letter: the trainer takes quadratic time for a word."""
    run = f"in {'a' * before}xy{'a' * 10} it"
    merges = byte_pairs.learn_merges([run, run], 400)
    assert any("xy" in merge.replace(" ", "") for merge in merges) != is_cut
    assert tokenizer_of(merges).detokenize(tokenizer_of(merges)(run)) == run


def test_merges_are_learned_once_and_from_the_training_split_alone(tmp_path, monkeypatch):
    def text(valid):
        return Text("t", {"train": LINES, "valid": valid, "test": valid})

    first = byte_pairs.merges_once(text(["abc abc"]), 400, tmp_path)
    assert byte_pairs.merges_once(text(["zq zq zq zq"]), 400, tmp_path) == first
    assert len(first) == 144
    monkeypatch.setattr(byte_pairs, "learn_merges", lambda *arguments: 1 / 0)
    assert byte_pairs.merges_once(text(["abc abc"]), 400, tmp_path) == first


def test_merges_of_a_large_text_are_learned_from_evenly_spaced_lines(tmp_path, monkeypatch):
    lines = ["abab abab", "cdcd cdcd", "efef efef"] * 20
    text = Text("t", {"train": lines, "valid": ["a"], "test": ["b"]})
    assert text.to_learn_from() == (lines, None)
    monkeypatch.setattr(text_module, "LEARNED_FROM", 200)
    kept, note = text.to_learn_from()
    kept = list(kept)
    assert kept == list(text.to_learn_from()[0])
    assert len(kept) == 20 and {*kept} == {*lines}, "they repeat every three lines"
    assert note == (
        "the vocabulary is learned from one line in 3: the training text has 540 characters, "
        "more than 200"
    )
    merges = byte_pairs.merges_once(text, 400, tmp_path)
    assert merges == byte_pairs.learn_merges(kept, 400)
    assert {"a b", "c d", "e f"} <= set(merges)
    numbers = map(str, range(10_000))
    spread = dataclasses.replace(text, splits={**text.splits, "train": [*numbers]})
    every = -(-38_890 // 200)
    for group, number in enumerate(spread.to_learn_from()[0]):
        assert int(number) // every == group


def test_a_file_of_merges(tmp_path):
    path = tmp_path / "merges.txt"
    path.write_text("#version: 0.2\nt h\nth e\nĠ the\n", encoding="utf-8")
    assert byte_pairs.read_merges(path) == ["t h", "th e", "Ġ the"]
    for wrong in ("t h e", "th e", "the", "t  h"):
        path.write_text(f"a b\n{wrong}\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"merges.txt, line 2: .* is not a merge; expected two"):
            byte_pairs.read_merges(path)
    path.write_bytes(b"a b\n\xff")
    with pytest.raises(DataError, match="not UTF-8 at byte 4"):
        byte_pairs.read_merges(path)


def test_a_text_without_a_repeated_pair_is_refused():
    with pytest.raises(DataError, match="too little text to learn a vocabulary from"):
        byte_pairs.learn_merges(["a b c"], 400)


def test_the_checksum_tells_vocabularies_apart():
    sums = {
        word_pieces.vocabulary_sha256(word_pieces.vocabulary_of(tokenizer_of(merges)))
        for merges in (["a b"], ["a b", "ab c"], ["a b", "b c", "ab c"], ["a b", "b c", "a bc"])
    }
    assert len(sums) == 4
