import types

import keras_nlp
import numpy as np

from data.word_pieces import special_ids
from models import bert, presets


def test_operations_of_an_example():
    """2 layers of width 128, 128 tokens, 19 predictions of 1,000 pieces; counted by hand."""
    token = 2 * (4 * 128**2 + 8 * 128**2 + 2 * 128 * 128)
    prediction = 128**2 + 128 * 1000
    backbone = types.SimpleNamespace(
        num_layers=2, hidden_dim=128, intermediate_dim=512, vocabulary_size=1000
    )
    assert bert.training_operations(backbone, 128, 19) == 6 * (128 * token + 19 * prediction)


def test_fills_are_read_at_each_mask(tiny_run):
    """Two masks and no special token among the fills; each row is the logits' of its position."""
    kind = keras_nlp.models.BertTokenizer
    folder = str(tiny_run.folder / "model")
    tokenizer = presets.load(kind, folder, special_tokens_in_strings=True)
    ids = bert.encode(tokenizer, "the [MASK] of <unk> a [MASK]", 512)
    assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert (ids == tokenizer.token_to_id("[UNK]")).sum() == 1
    for space in "\xa0", "\u2003":  # as other white space in training, not a letter
        other = bert.encode(tokenizer, f"the [MASK]{space}of{space}<unk>{space}a [MASK]", 512)
        assert other.tolist() == ids.tolist()
    found = bert.fill_masks(tiny_run.model, tokenizer, ids)
    (places,) = np.nonzero(ids == tokenizer.mask_token_id)
    ones = np.ones((1, len(ids)), np.int32)
    every = {"token_ids": ids[None], "segment_ids": 0 * ones, "padding_mask": ones}
    every["mask_positions"] = np.arange(len(ids), dtype=np.int32)[None]
    logits = np.array(tiny_run.model(every, training=False), np.float64)[0][places]
    logits[:, special_ids(tokenizer)] = -np.inf
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert np.abs(found[0] - found[1]).max() > 1e-4

    class WithMoreRows:
        """As of a preset whose embedding has more rows than there are word pieces."""

        input = tiny_run.model.input

        def __call__(self, inputs, training):
            return np.pad(tiny_run.model(inputs, training=training), [(0, 0)] * 2 + [(0, 5)])

    again = bert.fill_masks(WithMoreRows(), tokenizer, ids)
    np.testing.assert_array_equal(again, found)
