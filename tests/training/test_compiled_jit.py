"""Tests `compile(jit_compile=...)`: it holds unless `--jit` is on or off."""

import types

import keras
import pytest
import tensorflow as tf

from distribution.keras_compat import patches
from training.errors import OptionsError
from training.run import Run


def decided(compiled, by_plan, option, strategy="none", layer=None):
    """Returns whether XLA compiles the step, and the notes."""
    notes = []
    run = types.SimpleNamespace(
        _jit=by_plan,
        options=types.SimpleNamespace(jit=option),
        strategy_name=strategy,
        note=notes.append,
    )
    with patches.patch_keras_for(tf.distribute.get_strategy()):
        model = keras.Sequential([keras.Input((4, 4, 1)), layer or keras.layers.Flatten()])
        model.compile("sgd", "mse", **({} if compiled is None else {"jit_compile": compiled}))
    return Run._jit_of(run, model), notes


@pytest.mark.parametrize(
    "compiled, by_plan, option, expected",
    [
        (False, True, "auto", False),
        (True, False, "auto", True),
        (True, "auto", "auto", True),
        (False, "auto", "auto", False),
        ("auto", True, "auto", True),
        (None, True, "auto", True),
        (None, False, "auto", False),
        (False, True, "on", True),
        (True, False, "off", False),
    ],
)
def test_the_option_takes_precedence(compiled, by_plan, option, expected):
    assert decided(compiled, by_plan, option) == (expected, [])


@pytest.mark.parametrize("compiled, notes", [(True, 1), (None, 0)])
def test_a_layer_that_xla_cannot_compile(compiled, notes):
    layer = keras.layers.RandomRotation(0.1)
    jit, found = decided(compiled, True, "auto", layer=layer)
    assert not jit and len(found) == notes
    assert all(f"XLA cannot compile {layer.name} here" in note for note in found)


def test_weights_that_all_replicas_share():
    with pytest.raises(OptionsError, match="the shared weights of central_storage; leave it out"):
        decided(True, "auto", "auto", strategy="central_storage")
    assert decided(False, "auto", "auto", strategy="central_storage") == (False, [])
