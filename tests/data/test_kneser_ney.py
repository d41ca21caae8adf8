import collections

import numpy as np
import pytest

from data import kneser_ney
from data.kneser_ney import DEFAULT_DISCOUNTS, KneserNey, discounts

SEP = 1
SIZE = 120


def test_bigrams_by_hand():
    """Bigrams 01, 12 twice, 21; the tokens before 1 are 0 and 2, before 2 there is 1 alone."""
    train, test = np.array([[0, 1, 2, 1, 2]]), np.array([[1, 2, 3, 1, 3]])
    # Too little for estimates: 0.5 once, 1 twice. Unigrams: counts 0, 2, 1, 0 of 3; 1.5 is freed.
    shared = 1.5 / 3 / 4
    unigram = [shared, (2 - 1) / 3 + shared, (1 - 0.5) / 3 + shared, shared]
    assert sum(unigram) == pytest.approx(1)
    # 12 twice, 21 once, nothing after 3.
    expected = [1 / 2 + 1 / 2 * unigram[2], 0.5 * unigram[3], unigram[1], 1 / 2 * unigram[3]]
    found = np.exp(KneserNey(train, 4, order=2).log_probabilities(test))
    assert found == pytest.approx(np.array([expected]))


def test_an_order_that_the_text_does_not_have():
    """Documents of four tokens have no n-grams of five: what they do have decides."""
    train = [[0, 1, 2, 3]] * 3
    model = KneserNey(train, 6, order=5)
    assert len(model.orders[4].keys) == 0
    found = np.exp(model.log_probabilities([[0, 1, 2, 3, token] for token in range(6)]))
    assert found[:, 3].sum() == pytest.approx(1)
    assert found[0, :3] == pytest.approx(np.exp(model.log_probabilities(train))[0])


def test_discounts_by_hand():
    """Ten n-grams once, five twice, three three times, two four times: the share is a half."""
    count = np.repeat([0, 1, 2, 3, 4, 9], [7, 10, 5, 3, 2, 1])
    assert discounts(count) == pytest.approx((1 - 0.5, 2 - 0.9, 3 - 4 / 3))
    assert discounts(np.array([1, 1, 2, 3, 9])) == DEFAULT_DISCOUNTS  # none four times


def documents(sequences, separator):
    """Sequences cut at the separator, which ends a document and begins the next one."""
    for sequence in sequences:
        document = []
        for token in map(int, sequence):
            document.append(token)
            if token == separator and len(document) > 1:
                yield document
                document = [token]
        yield document


class Reference:
    """The textbook's recursion, with dictionaries."""

    def __init__(self, sequences, size, order, separator=None):
        self.size, self.order = size, order
        self.counts = [None] + [collections.Counter() for _ in range(order)]
        preceded_by = collections.defaultdict(set)
        for document in documents(sequences, separator):
            for end in range(1, len(document)):
                for length in range(1, min(order, end + 1) + 1):
                    start = end + 1 - length
                    gram = tuple(document[start : end + 1])
                    if length == order or start == 0:
                        self.counts[length][gram] += 1
                    else:
                        preceded_by[gram].add(document[start - 1])
        for gram, tokens in preceded_by.items():
            self.counts[len(gram)][gram] += len(tokens)
        self.discounts = [None]
        for counts in self.counts[1:]:
            n = collections.Counter(counts.values())
            y = n[1] / (n[1] + 2 * n[2])
            self.discounts.append([0] + [c - (c + 1) * y * n[c + 1] / n[c] for c in (1, 2, 3)])
            assert all(d > 0 for d in self.discounts[-1][1:])

    def probability(self, context, token):
        below = self.probability(context[1:], token) if context else 1 / self.size
        length = len(context) + 1
        counts, discounts = self.counts[length], self.discounts[length]
        after = [counts[(*context, other)] for other in range(self.size)]
        if not sum(after):
            return below
        count = counts[(*context, token)]
        freed = sum(discounts[min(c, 3)] for c in after)
        return (count - discounts[min(count, 3)] + freed * below) / sum(after)

    def log_likelihood(self, sequence, separator=None):
        found = []
        for document in documents([sequence], separator):
            for end in range(1, len(document)):
                context = tuple(document[max(0, end + 1 - self.order) : end])
                found.append(np.log(self.probability(context, document[end])))
        return np.array(found)


@pytest.fixture(scope="module")
def text():
    """Rows of a text with structure: tokens that follow from others, 1 the separator, rare ones."""
    rng = np.random.default_rng(0)
    stream = [0]
    while len(stream) < 10_800:
        likely = rng.random() < 0.8
        stream.append((3 * stream[-1] + rng.integers(3)) % 40 if likely else rng.zipf(1.5) % SIZE)
    return np.array(stream).reshape(-1, 27)


@pytest.mark.parametrize("separator", [None, SEP])
def test_it_is_the_textbooks_recursion_of_five_tokens_over_the_whole_text(separator, text):
    train, test = text[:-6], text[-6:]
    reference = Reference(train, SIZE, 5, separator)
    expected = [reference.log_likelihood(row, separator) for row in test]
    found = KneserNey(train.astype(np.uint16), SIZE, separator=separator).log_probabilities(test)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("as_list", [False, True])
def test_of_more_tokens_than_memory_is_for_some_sequences_are_counted(text, as_list, monkeypatch):
    known = list(text[:-6]) if as_list else text[:-6]
    assert kneser_ney.counted_note(text) is None
    monkeypatch.setattr(kneser_ney, "MOST_TOKENS", text[:-6].size // 2 - 1)
    found = KneserNey(known, SIZE, separator=SEP).log_probabilities(text[-6:])
    note = kneser_ney.counted_note(text)
    monkeypatch.undo()
    some = KneserNey(text[:-6][::3], SIZE, separator=SEP)
    np.testing.assert_array_equal(found, some.log_probabilities(text[-6:]))
    assert note.startswith("the n-grams learn from one of 3 training sequences")


def test_likelihoods_of_sequences_of_any_length(text):
    model = KneserNey(text, SIZE, separator=SEP)
    sequences = [text[5, :9], text[7, 3:4], text[9, 2:26]]
    reference = Reference(text, SIZE, 5, SEP)
    expected = [reference.log_likelihood(sequence, SEP).sum() for sequence in sequences]
    np.testing.assert_allclose(model.log_likelihoods(sequences), expected, rtol=1e-9, atol=1e-12)


def test_probabilities_sum_to_one_after_every_context(text):
    rng = np.random.default_rng(0)
    contexts = np.concatenate([text[:5, 5:9], rng.integers(0, SIZE, (5, 4))])
    rows = np.array([[*context, token] for context in contexts for token in range(SIZE)])
    found = np.exp(KneserNey(text, SIZE).log_probabilities(rows)[:, -1])
    assert (found > 0).all() and found.reshape(10, SIZE).sum(axis=1) == pytest.approx(np.ones(10))
