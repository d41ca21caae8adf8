"""Tests `models.samplers` on tables of probabilities; see tests/recipes for whole models."""

import numpy as np
import pytest
import tensorflow as tf

from models import samplers

STOP, LENGTH = 1, 5
ANY = {STOP: 0.24, 2: 0.28, 3: 0.24, 4: 0.24}  # after what a table does not have


def search(tables: list[dict], num_beams: int, ids=None, **repetition) -> list[list[int]]:
    """Searches texts of at most four new tokens of 0 to 4; 1 ends a text.

    Args:
        tables: of each text: a dict from what was written to the probabilities of the next tokens.
        num_beams: beginnings to keep.
        ids: those that tokens have.
        **repetition: of the search.
    """
    sampler = samplers.BeamSearch(num_beams, **repetition)
    sampler.ids = ids

    def log_probabilities(prompt, text, index):
        found = np.full((len(prompt), 5), -50.0, np.float32)
        for row, (tokens, number) in enumerate(zip(prompt, text, strict=True)):
            written = tuple(int(token) for token in tokens[1:index])
            for token, probability in tables[number].get(written, ANY).items():
                found[row, token] = np.log(probability)
        return found

    def next_logits(prompt, cache, index):
        logits = tf.numpy_function(log_probabilities, [prompt, cache, index], tf.float32)
        return tf.ensure_shape(logits, [None, 5]), None, cache

    prompt = np.zeros((len(tables), LENGTH), np.int32)
    found = sampler(
        next_logits,
        tf.constant(prompt),
        cache=tf.range(len(tables)),
        index=1,
        mask=tf.constant(np.arange(LENGTH) < 1)[None] & tf.ones((len(tables), 1), tf.bool),
        stop_token_ids=[STOP],
    )
    texts = [row[1:] for row in found.numpy().tolist()]
    return [text[: text.index(STOP) + 1] if STOP in text else text for text in texts]


# The likeliest first token, 2, leads to less likely texts than the second one, 3.
TABLE = {
    (): {2: 0.6, 3: 0.4},
    (2,): {2: 0.35, 3: 0.35, STOP: 0.3},
    (3,): {STOP: 0.9, 2: 0.1},
} | {(2, *[token] * count): {token: 0.7, 4: 0.3} for token in (2, 3) for count in (1, 2)}


def test_a_likelier_text_may_begin_with_a_less_likely_token():
    assert search([TABLE], 1)[0][0] == 2
    assert search([TABLE], 2) == [[3, STOP]]


def test_a_text_that_has_ended_stays_while_others_of_the_batch_go_on():
    longer = {(): {4: 1.0}, (4,): {4: 0.5, 3: 0.5}, (4, 4): {3: 1.0}, (4, 3): {3: 1.0}}
    assert search([TABLE, longer], 2)[0] == [3, STOP]
    assert search([longer], 2) == search([TABLE, longer], 2)[1:]


def test_a_longer_text_is_compared_by_its_tokens():
    """0.3 for one token is likelier than 0.7 * 0.6 * 0.6, which is likelier by the token."""
    table = {(): {STOP: 0.3, 2: 0.7}, (2,): {2: 0.6, 4: 0.4}, (2, 2): {STOP: 0.6, 4: 0.4}}
    assert search([table], 3) == [[2, 2, STOP]]


def test_ids_that_no_token_has_are_never_written():
    assert search([TABLE], 2, ids=np.array([0, 1, 2, 4]))[0][0] == 2


@pytest.mark.parametrize("num_beams", [1, 2, 4])
def test_texts_without_an_end_fill_their_length(num_beams):
    table = {(): {2: 1.0}, (2,): {2: 1.0}, (2, 2): {2: 1.0}, (2, 2, 2): {2: 1.0}}
    assert search([table], num_beams) == [[2, 2, 2, 2]]


def draw(rows: list[list[int]], num_samples: int) -> list[list[int]]:
    """Draws texts of four new tokens after each first token, all tokens being equally likely."""
    sampler = samplers.Sampler(seed=3, num_samples=num_samples)
    prompt = tf.constant(np.pad(rows, ((0, 0), (0, LENGTH - 1))), tf.int32)
    found = sampler(
        lambda prompt, cache, index: (tf.zeros((len(rows), 1000)), None, cache),
        prompt,
        cache=tf.zeros(len(rows)),
        index=1,
        mask=tf.constant(np.arange(LENGTH) < 1)[None] & tf.ones((len(rows), 1), tf.bool),
        stop_token_ids=[STOP],
    )
    return found.numpy().tolist()


def test_each_sample_of_a_prompt_has_its_own_draws_and_the_first_is_the_one_drawn_alone():
    sampler = samplers.Sampler(num_samples=3)
    assert samplers.repeat([[7], [8]], sampler) == [[7]] * 3 + [[8]] * 3
    alone, several, two = draw([[7], [8]], 1), draw([[7]] * 3 + [[8]] * 3, 3), draw([[7]] * 2, 2)
    assert several[::3] == alone and several[:2] == two
    assert len(set(map(tuple, several))) == 6
    assert several == draw([[7]] * 3 + [[8]] * 3, 3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((1.0, 40, 1.0, 0), "--num-samples 0: must be in [1, 1000]"),
        ((1.0, 40, 1.0, 1001), "--num-samples 1001: must be in [1, 1000]"),
        ((0.0, 40, 1.0, 2), "all would be equal, since --temperature 0.0 takes the most likely"),
        ((1e-9, 40, 1.0, 2), "all would be equal, since --temperature 1e-09 takes"),
        ((1.0, 1, 1.0, 2), "all would be equal, since --top-k 1 takes the most likely token; pass"),
    ],
)
def test_samples_that_would_be_equal_or_too_many_are_refused(settings, expected):
    (problem,) = samplers.sampling_problems(*settings)
    assert expected in problem


def test_samples_are_drawn_and_a_single_likeliest_text_is_not_refused():
    assert samplers.sampling_problems(0.8, 0, 0.9, 5) == []
    assert samplers.sampling_problems(0.0, 1, 1.0, 1) == []


def test_samples_are_the_answers_to_their_prompts():
    texts = ["a", "b", "c", "d"]
    assert samplers.by_prompt(texts, 2) == [
        [{"text": "a"}, {"text": "b"}],
        [{"text": "c"}, {"text": "d"}],
    ]
    assert samplers.by_prompt(texts[:1], 1) == [[{"text": "a"}]]


def greedy(logits: list[float], rows: list[list[int]], length: int = 8, **repetition):
    """Writes the likeliest tokens of these logits after each row; `STOP` is 1."""
    sampler = samplers.Sampler(temperature=0, **repetition)
    lengths = np.array([len(row) for row in rows])
    prompt = np.stack([np.pad(row, (0, length - len(row))) for row in rows])
    found = sampler(
        lambda prompt, cache, index: (tf.constant([logits] * len(rows)), None, cache),
        tf.constant(prompt, tf.int32),
        cache=tf.zeros(len(rows)),
        index=min(lengths),
        mask=tf.constant(np.arange(length) < lengths[:, None]),
        stop_token_ids=[STOP],
    )
    return found.numpy().tolist()


def test_a_penalty_lowers_the_tokens_that_a_text_has():
    logits = [-9.0, -5.0, 5.0, 4.0, 1.0]
    assert greedy(logits, [[0]]) == [[0, *[2] * 7]]
    # 2 has 2.5 after it was written, then 3 has 2.
    assert greedy(logits, [[0]], repetition_penalty=2.0) == [[0, 2, 3, 2, 2, 2, 2, 2]]
    assert greedy(logits, [[2]], repetition_penalty=2.0)[0][:3] == [2, 3, 2], "of the prompt, too"
    # The zeros behind it are padding.
    assert greedy([5.0, -5.0, 1.0, 4.0], [[2]], repetition_penalty=2.0)[0][:3] == [2, 0, 3]
    # Negative ones are multiplied.
    assert greedy([-9.0, -5.0, -1.0, -1.5, -4.0], [[2]], repetition_penalty=2.0)[0][1] == 3


def test_the_end_of_a_text_is_not_lowered():
    """It may stand in the prompt, as the ends of the turns of a chat do."""
    ends = [0.0, 5.0, 4.0, 0.0, 0.0]
    settings = dict(repetition_penalty=9.0, no_repeat_ngram_size=2)
    assert greedy(ends, [[2, STOP, 2]], **settings)[0][3] == STOP


def test_an_answer_is_the_same_alone_and_beside_a_longer_prompt():
    """Tokens after the end of a shorter prompt are not written yet."""
    logits, settings = [-9.0, -5.0, 5.0, 4.0, 3.0], dict(no_repeat_ngram_size=2)
    rows = [[0], [0, 3, 2, 4]]
    for more in (dict(repetition_penalty=1.5), {}):
        alone = [greedy(logits, [row], **settings, **more)[0] for row in rows]
        assert greedy(logits, rows, **settings, **more) == alone


@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_n_gram_is_written_once(size):
    rng = np.random.default_rng(size)
    sampler = samplers.Sampler(no_repeat_ngram_size=size)
    written = rng.integers(2, 5, (20, 12)).astype(np.int32)
    for index in range(1, 12):
        scores = tf.zeros((20, 6))
        found = sampler.without_repetition(scores, tf.constant(written), index, [STOP]).numpy()
        for row, scores in zip(written, found, strict=True):
            text = row[:index].tolist()
            grams = [text[at : at + size] for at in range(index - size + 1)]
            forbidden = [token for token in range(6) if [*text, token][-size:] in grams]
            expected = forbidden if index >= size - 1 else []
            assert np.flatnonzero(scores == -np.inf).tolist() == expected, (text, size)


def test_a_row_that_is_shorter_than_an_n_gram_has_none():
    assert greedy([0.0, 0.0, 1.0, 0.0], [[0]], length=3, no_repeat_ngram_size=4) == [[0, 2, 2]]


def test_beams_repeat_no_n_gram():
    table = {(): {2: 1.0}, (2,): {2: 0.9, 3: 0.1}, (2, 2): {2: 0.9, 3: 0.1}}
    assert search([table], 2)[0][:3] == [2, 2, 2]
    assert search([table], 2, no_repeat_ngram_size=2)[0][:3] == [2, 2, 3]
    # The logarithm of 0.9 times 30 is less than that of 0.1.
    assert search([table], 2, repetition_penalty=30.0)[0][:2] == [2, 3]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((0.0, 0), ["--repetition-penalty 0.0: must be in (0, inf)"]),
        ((float("nan"), 0), ["--repetition-penalty nan: must be in (0, inf)"]),
        ((1.2, 1), ["--no-repeat-ngram-size 1: must be 0 or at least 2"]),
        ((1.2, -1), ["--no-repeat-ngram-size -1: must be 0 or at least 2"]),
        ((1.2, 3), []),
    ],
)
def test_values_of_repetition_are_checked(settings, expected):
    assert samplers.repetition_problems(*settings) == expected
