"""Recipes that run again and again in one process, as in a notebook or a sweep."""

import gc
import weakref

import keras
import pytest
import tensorflow as tf

from recipes import bert_mlm, causal_lm, mnist
from tests.support import strategy_run

SHORT = dict(strategy="none", max_steps=1, epochs=1, max_examples=64)
# In float64. The gradient of a layer that is computed a second time refers to the model.
RECOMPUTED = SHORT | dict(num_layers=2, gradient_checkpointing=True)
OPTIONS = {
    bert_mlm: strategy_run.TINY_TEXT | RECOMPUTED,
    causal_lm: strategy_run.TINY_CAUSAL | RECOMPUTED | dict(n_grams=False),
    mnist: strategy_run.TINY_IMAGES | SHORT,
}


def alive(kind):
    """The objects of a class that are in use."""
    gc.collect()
    gc.collect()  # a step, once the dictionary of steps has lost its model
    return [each for each in gc.get_objects() if isinstance(each, kind)]


@pytest.mark.parametrize(
    "recipe", [bert_mlm, pytest.param(causal_lm, marks=pytest.mark.long), mnist]
)
def test_a_run_leaves_no_model_and_no_graph(recipe, tiny_text, tmp_path):
    if recipe is mnist:
        strategy_run.write_images(tmp_path / "images")
    dataset = tmp_path / "images" if recipe is mnist else tiny_text
    kinds = (keras.Model, keras.optimizers.Optimizer, tf.Graph)
    tf.compat.v1.get_default_graph()  # the process's own, which stays
    before = weakref.WeakSet(alive(kinds))  # of other tests
    recipe.main(recipe.Options(**OPTIONS[recipe], dataset=str(dataset), run_dir=tmp_path / "run"))
    assert [each for each in alive(kinds) if each not in before] == []
