import numpy as np
import pytest

from data import arrays, next_tokens
from data.next_tokens import Ends
from data.text import Text

# GPT-2's kind (one token for both ends), Llama's (two), and Qwen's (no start).
KINDS = {"gpt2": Ends(9, 9), "llama": Ends(8, 9), "qwen": Ends(None, 9)}
DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 1, 2, 3, 4], [6, 6]]


class Letters:
    """A tokenizer of single bytes, without KerasNLP's weight."""

    start_token_id = end_token_id = 0
    merges = None
    special_tokens = ["<|end|>"]

    def __call__(self, text):
        if isinstance(text, list):
            return list(map(self, text))
        return list(text.replace("<|end|>", "\0").encode())

    def get_config(self):
        return {}

    def get_vocabulary(self):
        return list("abc")

    def vocabulary_size(self):
        return 256


def batch(documents, length, ends, together):
    rows = np.concatenate(list(next_tokens.CUT[together](documents, length, ends)))
    made = next_tokens.Rows(rows, ends, together)
    inputs, labels, weights = made.make_batch()(np.arange(len(rows)), 0)
    assert sum(map(len, made.labels())) == np.sum(weights)
    return [
        np.asarray(value)
        for value in (inputs["token_ids"], inputs["padding_mask"], labels, weights)
    ]


@pytest.mark.parametrize("length", [3, 4, 30])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [True, False])
def test_each_token_is_predicted_once_from_what_is_before_it(together, kind, length, monkeypatch):
    ends = KINDS[kind]
    ids, documents, labels, weights = batch(DOCUMENTS, length, ends, together)
    # Plain Python: pairs of a token and the next one, document by document.
    expected = []
    for document in filter(None, DOCUMENTS):
        whole = ends.around(document)
        expected += list(zip(whole, whole[1:], strict=False))
    real = weights == 1
    assert list(zip(ids[real], labels[real], strict=True)) == expected
    assert set(np.unique(weights)) <= {0, 1}
    # Tokens of one document share its number in a row, and no two documents do.
    number, place = 0, 0
    lengths = [len(ends.around(d)) - 1 for d in DOCUMENTS if d]
    seen = {}
    for row, column in zip(*np.nonzero(real), strict=True):
        key = (row, documents[row, column])
        assert documents[row, column] > 0 and seen.setdefault(key, number) == number
        place += 1
        if place == lengths[number]:
            number, place = number + 1, 0
    if not together:
        assert (documents == real).all(), "padding has no document"


@pytest.mark.parametrize("kind", KINDS)
def test_the_row_as_context_changes_nothing_but_what_a_token_may_read(kind):
    ends = KINDS[kind]
    rows = np.concatenate(list(next_tokens.packed(DOCUMENTS, 12, ends)))
    apart, whole = (
        next_tokens.Rows(rows, ends, together=True, context=context)
        for context in ("document", "row")
    )
    (mine, *targets), (theirs, *others) = (
        found.first(None).make_batch()(np.arange(len(rows)), 0) for found in (apart, whole)
    )
    assert np.max(mine["padding_mask"]) > 1 and np.all(theirs["padding_mask"] == 1)
    assert np.array_equal(mine["token_ids"], theirs["token_ids"])
    for ours, other in zip(targets, others, strict=True):
        assert np.array_equal(ours, other)


def test_rows_do_not_depend_on_how_the_stream_is_cut_into_blocks():
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 8, rng.integers(0, 9)).tolist() for _ in range(400)]
    for ends in KINDS.values():
        blocks = list(next_tokens.packed(documents, 4, ends))
        assert len(blocks) > 1
        rows = np.concatenate(blocks)
        assert (rows[1:, 0] == rows[:-1, -1]).all(), "overlap by one token"
        predicted = sum(len(ends.around(d)) - 1 for d in documents if d)
        labels = next_tokens.Rows(rows, ends, True).labels()
        assert sum(map(len, labels)) == predicted


def test_words_and_bytes_are_counted_with_line_ends():
    lines = ["  two words ", "", " \t", "née 東京"]
    lines += ["<|end|>", " <|end|><|end|>"]
    assert next_tokens.measure(lines, Letters()) == {"word": 6, "byte": 10 + 12}


def test_a_line_that_is_several_documents_is_found():
    """The first token of the second one is not predicted, but its bytes would count."""
    assert next_tokens.has_ends_within(["ab", "a<|end|>b"], Letters())
    assert next_tokens.has_ends_within(["ab<|end|>"], Letters())
    assert not next_tokens.has_ends_within(["ab", "<|end|>", " <|end|><|end|>", "<|end"], Letters())


def test_lines_of_special_tokens_alone_are_no_documents():
    lines = ["ab", "<|end|>", " <|end|><|end|>\t", "a<|end|>b", "<|end"]
    ids = list(next_tokens.tokenize(lines, Letters()))
    a, b = b"ab"
    assert ids[:4] == [[a, b], [], [], [a, 0, b]] and ids[4] == list(b"<|end")
    assert next_tokens.special_notes(lines, Letters()) == [
        "2 training lines are left out, as such lines of the other splits: they are names of "
        "special tokens alone (<|end|>)",
        "1 training lines contain the name of a special token (<|end|>), which is read as the "
        "token",
    ]
    assert next_tokens.special_notes(["ab", "<|end"], Letters()) == []


def test_rows_are_made_once_and_for_each_setting(tmp_path, monkeypatch):
    lines = {"train": ["abc ", "ab"] * 5, "valid": ["c"], "test": [" b", " "]}
    text, made = Text("t", lines), Letters()
    rows = next_tokens.rows_once(text, made, tmp_path, length=4, together=True)
    a, b, c = b"abc"
    assert rows["train"].tokens.dtype == np.uint16 and len(rows["train"]) == 9
    assert rows["train"].first(2).tokens.tolist() == [[0, a, b, c, 0], [0, a, b, 0, a]]
    every = rows["train"].tokens
    kept = arrays.spaced(len(every), 2)
    assert rows["train"].spaced(2).tokens.tolist() == every[kept].tolist()
    assert rows["train"].spaced(None).tokens is every
    assert rows["test"].tokens.tolist() == [[0, b, 0, 0, 0]]
    again = next_tokens.rows_once(text, made, tmp_path, length=4, together=False)
    assert len(again["train"]) == 10

    class Otherwise(Letters):
        """The same tokens, found by other rules."""

    monkeypatch.setattr(next_tokens, "tokenize", lambda lines, _: [[c] for _ in lines])
    other = next_tokens.rows_once(text, Otherwise(), tmp_path, length=4, together=False)
    assert other["train"].tokens[0].tolist() != again["train"].tokens[0].tolist()
    monkeypatch.setattr(next_tokens, "tokenize", lambda *arguments: 1 / 0)
    kept = next_tokens.rows_once(text, made, tmp_path, length=4, together=True)
    np.testing.assert_array_equal(kept["train"].tokens, rows["train"].tokens)
