import numpy as np
import pytest

from data import kneser_ney


def test_a_case_by_hand():
    """Bigrams 01, 12 twice, 21; before 1 stand two different tokens, before 2 one."""
    train, test = np.array([[0, 1, 2, 1, 2]]), np.array([[1, 2, 3, 1, 3]])
    # Discounts: 1 / 3 of the single tokens, 2 / 4 of the pairs; 2 / 9 are shared by four tokens.
    unigram = [1 / 18, (2 - 1 / 3) / 3 + 1 / 18, (1 - 1 / 3) / 3 + 1 / 18, 1 / 18]
    assert sum(unigram) == pytest.approx(1)
    expected = [(2 - 0.5) / 2 + 0.25 * unigram[2], 0.5 * unigram[3], unigram[1]]
    expected.append(0.25 * unigram[3])
    found = np.exp(kneser_ney.log_probabilities(train, test, 4, order=2))
    assert found == pytest.approx(np.array([expected]))


def test_probabilities_sum_to_one_after_every_context():
    rng = np.random.default_rng(0)
    train = rng.choice(9, (90, 5), p=np.arange(9) / 36)  # the token 0 never comes
    contexts = np.concatenate([train[:5, :4], rng.integers(0, 9, (5, 4))])
    rows = [[*context, token] for context in contexts for token in range(9)]
    found = np.exp(kneser_ney.log_probabilities(train, np.array(rows), 9)[:, -1])
    assert (found > 0).all() and found.reshape(10, 9).sum(axis=1) == pytest.approx(np.ones(10))
    again = kneser_ney.log_probabilities(train.astype(np.uint16), np.array(rows[:1]), 9)
    assert again[0, -1] == pytest.approx(np.log(found[0]))  # of other test rows nothing is known
