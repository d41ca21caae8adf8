"""Recipes that run again and again in one process, as in a notebook or a sweep."""

import gc
import weakref

import keras
import pytest
import tensorflow as tf

from recipes import bert_mlm, causal_lm, mnist
from tests.support import strategy_run

SHORT = dict(strategy="none", max_steps=1, epochs=1, max_examples=64)
OPTIONS = {  # in float64
    bert_mlm: strategy_run.TINY_TEXT | SHORT,
    causal_lm: strategy_run.TINY_CAUSAL
    | SHORT
    | dict(n_grams=False, num_layers=2, gradient_checkpointing=True),
    mnist: strategy_run.TINY_IMAGES | SHORT,
}


def alive(kind):
    """The objects of a class that are in use."""
    gc.collect()
    gc.collect()  # a step, once the dictionary of steps has lost its model
    return [each for each in gc.get_objects() if isinstance(each, kind)]


@pytest.mark.parametrize("recipe", OPTIONS, ids=lambda recipe: recipe.__name__)
def test_a_run_leaves_no_model_and_no_graph(recipe, tiny_text, tmp_path):
    if recipe is mnist:
        strategy_run.write_images(tmp_path / "images")
    dataset = tmp_path / "images" if recipe is mnist else tiny_text
    kinds = (keras.Model, keras.optimizers.Optimizer, tf.Graph)
    before = weakref.WeakSet(alive(kinds))  # of other tests
    recipe.main(recipe.Options(**OPTIONS[recipe], dataset=str(dataset), run_dir=tmp_path / "run"))
    assert [each for each in alive(kinds) if each not in before] == []
