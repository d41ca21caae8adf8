import keras
import keras_nlp
import numpy as np
import pytest

from data import word_pieces
from data.errors import DataError, InputError
from models import bert, likelihoods
from tests.support import tiny_presets

MASK, SEP = 4, 3
PIECES = [*word_pieces.SPECIAL_TOKENS, "the", "un", "##kind", "##ly", "word", "##s", "."]


@pytest.fixture(scope="module")
def tokenizer():
    return bert.tokenizer_of(PIECES)


@pytest.fixture(scope="module")
def model(tokenizer):
    keras.utils.set_random_seed(0)
    backbone = keras_nlp.models.BertBackbone(len(PIECES), 1, 2, 8, 16, max_sequence_length=32)
    model = keras_nlp.models.BertMaskedLM(backbone=backbone)
    for variable in backbone.trainable_variables:  # large enough for context to matter
        variable.assign(variable + keras.random.normal(variable.shape, seed=1))
    return model


def test_a_piece_is_masked_with_the_later_ones_of_its_word(model, tokenizer):
    text = bert.encode(tokenizer, "the unkindly words.", 32)
    assert [PIECES[i] for i in text[1:-1]] == "the un ##kind ##ly word ##s .".split()
    masked_with = [[1], [2, 3, 4], [3, 4], [4], [5, 6], [6], [7]]
    expected, alone = 0.0, 0.0
    for place, hidden in enumerate(masked_with, start=1):
        for total, positions in (("words", hidden), ("alone", [place])):
            ids = text.copy()
            ids[positions] = MASK
            logits = bert.masked_logits(model, ids[None], np.array([[place]], np.int32))[0, 0]
            share = float(keras.ops.log_softmax(logits)[text[place]])
            expected += share * (total == "words")
            alone += share * (total == "alone")
    (found,) = likelihoods.pseudo_log_likelihoods(model, tokenizer, ["the unkindly words."], 9)
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(alone - expected) > 0.1


def test_texts_of_all_lengths_keep_their_order_and_equal_ones_their_score(
    model, tokenizer, monkeypatch
):
    texts = "the unkindly word|| the word.|unkindly words.|the|<unk> word s|the unkindly word"
    texts = texts.split("|")
    score = likelihoods.pseudo_log_likelihoods
    expected = [score(model, tokenizer, [text], 32)[0] for text in texts]
    calls = []
    stock = bert.masked_logits
    count = lambda *arguments: calls.append(len(arguments[1])) or stock(*arguments)  # noqa: E731
    monkeypatch.setattr(bert, "masked_logits", count)
    monkeypatch.setattr(likelihoods, "ROWS", 10)
    found = score(model, tokenizer, texts, 32)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found[0] == found[-1] and found[1] == 0
    assert sorted(calls) == [1, 5, 6, 6], "two texts of three pieces at once, equal ones once"
    with pytest.raises(DataError, match="7 tokens, the model takes 6: 'the unkindly word'"):
        score(model, tokenizer, texts, 6)


@pytest.mark.long
@pytest.mark.parametrize("family", ["Roberta", "Albert"])
def test_any_family_with_a_masked_lm_scores_texts(family, tmp_path):
    """Later pieces of a word are masked by the marks of the family's tokenizer."""
    preset = tiny_presets.save(family, "MaskedLM", tmp_path / "preset")
    model = keras_nlp.models.MaskedLM.from_preset(preset)
    tokenizer, text = model.preprocessor.tokenizer, "the loss the step"
    special = word_pieces.SpecialTokens.of(tokenizer)
    pieces, mark = word_pieces.pieces_of(tokenizer), word_pieces.begins_words(tokenizer)
    ids = np.array([special.cls, *np.asarray(tokenizer(text)), special.sep], np.int32)
    expected = 0.0
    for place in range(1, len(ids) - 1):
        hidden = ids.copy()
        end = place + 1
        while end < len(ids) - 1 and not pieces[ids[end]].startswith(mark):
            end += 1
        hidden[place:end] = special.mask
        logits = bert.masked_logits(model, hidden[None], np.array([[place]], np.int32))[0, 0]
        expected += float(keras.ops.log_softmax(logits)[ids[place]])
    (found,) = likelihoods.pseudo_log_likelihoods(model, tokenizer, [text], 32)
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("nats", [-3000.0, float("-inf"), float("nan")])
def test_a_perplexity_that_is_no_number_names_the_text(nats):
    (answer,) = likelihoods.as_answers([-4.0], [4])
    assert answer == [{"log_likelihood": -4.0, "tokens": 4, "perplexity": pytest.approx(np.e)}]
    with pytest.raises(InputError, match="perplexity is not a finite number") as caught:
        likelihoods.as_answers([-4.0, nats], [4, 4])
    assert caught.value.index == 1
