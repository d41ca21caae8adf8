import keras_nlp
import numpy as np
import pytest

from data import arrays, sentence_inputs

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fine", "##st", "film", "."]


@pytest.fixture(scope="module")
def tokenizer():
    return keras_nlp.models.BertTokenizer(vocabulary=PIECES, lowercase=True)


@pytest.fixture(scope="module")
def inputs(tokenizer):
    preprocessor = keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, 6)
    return sentence_inputs.encode(["Finest film.", "?", "film film film film film"], preprocessor)


def test_encode(inputs):
    assert {name: value.dtype for name, value in inputs.items()} == {
        "token_ids": np.int32,
        "segment_ids": np.int32,
        "padding_mask": np.int32,
    }
    assert inputs["token_ids"].tolist() == [
        [2, 5, 6, 7, 8, 3],
        [2, 1, 3, 0, 0, 0],
        [2, 7, 7, 7, 7, 3],
    ]
    assert inputs["padding_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0], [1] * 6]
    assert not inputs["segment_ids"].any()


def test_evidence_by_hand(inputs, tokenizer):
    labels = np.array([1, 0, 0], np.int32)
    found = sentence_inputs.naive_bayes_evidence(inputs, labels, tokenizer, 2)
    # Sentences that hold a piece, and one: fine 1 and 2, film 2 and 2; special tokens count one.
    counts = np.array([[1, 1]] * 5 + [[1, 2], [1, 2], [2, 2], [1, 2]], float)
    share = np.log(counts / counts.sum(axis=0))
    expected = share - share.mean(axis=1, keepdims=True)
    expected[:5] = 0
    np.testing.assert_allclose(found, expected)


def batches(inputs, share, first_batch=0, seed=3):
    labels = np.arange(3, dtype=np.int32)
    hide = sentence_inputs.hide_word_pieces(share, 4, seed)
    data = arrays.training_data(
        inputs, labels, seed=seed, batch_size=3, first_batch=first_batch, change=hide
    )
    return data.as_numpy_iterator()


def test_words_alone_are_hidden(inputs):
    hidden = words = 0
    for _, (x, y, weights) in zip(range(200), batches(inputs, 0.4), strict=False):
        whole = inputs["token_ids"][y]
        changed = x["token_ids"] != whole
        assert (x["token_ids"][changed] == 4).all()
        assert not changed[np.isin(whole, (0, 2, 3))].any()
        hidden, words = hidden + changed.sum(), words + (~np.isin(whole, (0, 2, 3))).sum()
        assert weights.tolist() == [1, 1, 1]
        assert (x["padding_mask"] == inputs["padding_mask"][y]).all()
    assert 0.35 < hidden / words < 0.45


def test_hidden_words_change_from_epoch_to_epoch_and_not_from_run_to_run(inputs):
    first, second, third = (next(batches(inputs, 0.5, start))[0] for start in (0, 1, 0))
    ids = [np.sort(x["token_ids"], axis=0).tolist() for x in (first, second, third)]
    assert ids[0] == ids[2] != ids[1]


def test_none_is_hidden_without_dropout(inputs):
    x, y, _ = next(batches(inputs, 0.0))
    assert (x["token_ids"] == inputs["token_ids"][y]).all()
