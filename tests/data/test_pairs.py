"""Tests prompts and responses as the inputs of an encoder and a decoder."""

import numpy as np
import pytest
import tensorflow as tf

from data import arrays, batches, pairs, prompts
from data.errors import DataError
from tests.support import seq2seq_presets

ASKED = [("the loss of a step", "is the mean"), ("a good film", "it is very long")]


@pytest.fixture(scope="module")
def preprocessor():
    return seq2seq_presets.make_task("Bart").preprocessor


def test_pairs_are_encoded_as_the_models_own_preprocessor_does(preprocessor, monkeypatch):
    monkeypatch.setattr(pairs, "AT_ONCE", 1)
    found = pairs.encode(ASKED, preprocessor, "say: ")
    theirs, labels, weights = preprocessor(
        {
            "encoder_text": [f"say: {prompt}" for prompt, _ in ASKED],
            "decoder_text": [response for _, response in ASKED],
        }
    )
    for name, value in theirs.items():
        np.testing.assert_array_equal(found[name], value)
    np.testing.assert_array_equal(found["labels"], labels)
    # BART's responses all begin with the same token, which is not predicted.
    np.testing.assert_array_equal(found["weights"][:, 1:], weights[:, 1:])
    assert not found["weights"][:, 0].any() and np.all(weights[:, 0])


def test_a_batch_has_inputs_labels_and_weights(preprocessor):
    encoded = pairs.encode(ASKED, preprocessor)
    inputs, labels, weights = pairs.make_batch(encoded)(tf.constant([1, 0, 1]), 0)
    assert {name: value.shape for name, value in inputs.items()} == {
        "encoder_token_ids": (3, 24),
        "encoder_padding_mask": (3, 24),
        "decoder_token_ids": (3, 16),
        "decoder_padding_mask": (3, 16),
    }
    assert labels.shape == weights.shape == (3, 16) and weights.dtype == tf.float32
    np.testing.assert_array_equal(labels[0], encoded["labels"][1])
    # All tokens of the responses and the one that ends them are predicted.
    tokenizer = preprocessor.tokenizer
    expected = [
        token
        for _, response in ASKED
        for token in [*map(int, tokenizer(response)), tokenizer.end_token_id]
    ]
    assert list(pairs.predicted(encoded)) == expected


def test_splits_are_encoded_once(preprocessor, tmp_path, monkeypatch):
    first = pairs.encode_once({"train": ASKED}, preprocessor, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(pairs, "_encoded_blocks", None)
        again = pairs.encode_once({"train": ASKED}, preprocessor, tmp_path)
    for name, value in first["train"].items():
        np.testing.assert_array_equal(again["train"][name], value)
    other = pairs.encode_once({"train": ASKED}, preprocessor, tmp_path, "say: ")
    assert not np.array_equal(
        other["train"]["encoder_token_ids"], first["train"]["encoder_token_ids"]
    )


def test_texts_that_are_cut_are_noted(preprocessor):
    encoded = pairs.encode([("the loss " * 30, "a"), ("a", "good film " * 20)], preprocessor)
    assert pairs.cut_notes(encoded, "training") == [
        "1 of 2 training prompts have 24 tokens or more: what is beyond --sequence-length 24 is "
        "cut",
        "1 of 2 training responses have 16 tokens or more: what is beyond --response-length 16 is "
        "cut",
    ]


def test_chats_are_refused():
    chat = ((("system", "be brief"), ("user", "hello")), "hi")
    data = prompts.Prompts("chats.jsonl", {"train": [ASKED[0]], "valid": [chat], "test": []})
    with pytest.raises(DataError, match="1 of 1 prompts of the split valid are.*recipes.causal_lm"):
        pairs.of_texts(data)


def test_pairs_of_similar_length_are_cut_after_the_longest(preprocessor):
    asked = [("a", "b " * count) for count in range(1, 9)] + [("a b c d e f g h i j " * 2, "a")] * 4
    encoded = pairs.encode(asked, preprocessor)
    lengths = pairs.lengths(encoded)
    np.testing.assert_array_equal(lengths[:, 1], encoded["decoder_padding_mask"].sum(axis=1))
    assert set(lengths[:8, 0]) == {8} and set(lengths[8:, 0]) == {24}
    make_batch = pairs.make_batch(encoded)
    data = batches.training_batches(12, 4, 0, make_batch, lengths=lengths).take(3)
    for inputs, labels, weights in data.as_numpy_iterator():
        for part, most in (("encoder", 24), ("decoder", 16)):
            mask = inputs[f"{part}_padding_mask"]
            steps = [step for step in arrays.steps_of(most) if step >= mask.sum(axis=1).max()]
            assert mask.shape == inputs[f"{part}_token_ids"].shape == (4, steps[0])
        assert labels.shape == weights.shape == inputs["decoder_token_ids"].shape
    whole = batches.training_batches(12, 12, 0, make_batch, lengths=lengths).take(1)
    ((_, _, weights),) = whole.as_numpy_iterator()
    assert weights.sum() == encoded["weights"].sum()
