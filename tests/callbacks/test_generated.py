"""Generated texts in TensorBoard."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from callbacks.generated import GeneratedTexts
from callbacks.tensorboard import TensorBoard


@pytest.fixture
def written(monkeypatch):
    """Texts by tag, as TensorBoard would get them."""
    texts = {}
    monkeypatch.setattr(tf.summary, "text", lambda tag, text: texts.setdefault(tag, text))
    return texts


@pytest.fixture
def shown(tmp_path):
    """Makes the callback of a model whose weight is 3 and has the average 2."""

    class Board(TensorBoard):
        @contextlib.contextmanager
        def writing(self, step):
            yield

    def make(generate):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.0, use_ema=True, ema_momentum=0.5), "mse")
        model.set_weights([np.array([[1.0]])])
        model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
        model.set_weights([np.array([[3.0]])])
        model.optimizer._model_variables_moving_average[0].assign([[2.0]])
        made = GeneratedTexts(Board(tmp_path), "answers/prompt", lambda: generate(model))
        made.set_model(model)
        return made

    return make


def test_texts_are_numbered_and_generated_by_the_averages(shown, written):
    made = shown(lambda model: ["a", str(model.get_weights()[0].item())])
    made.on_epoch_end(0)
    assert written == {"answers/prompt_1": "a", "answers/prompt_2": "2.0"}
    assert made.model.get_weights()[0].item() == 3.0


def test_training_continues_where_no_text_can_be_generated(shown, written, caplog):
    calls = []

    def generate(model):
        calls.append(model)
        raise IndexError("no such piece\nin a line")

    made = shown(generate)
    for epoch in range(2):
        made.on_epoch_end(epoch)
    assert written == {} and len(calls) == 1
    assert caplog.messages == ["no answers/prompt in TensorBoard: IndexError: no such piece"]
    assert made.model.get_weights()[0].item() == 3.0
