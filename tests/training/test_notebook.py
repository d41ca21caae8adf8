"""What a notebook is told; a real kernel is in tests/notebooks/."""

import sys
import types

from tests.support import tiny_recipe
from training import notebook


def test_the_line_gives_the_same_options():
    options = tiny_recipe.Options(seed=3, base_learning_rate=0.5, keep_best="val_loss", epochs=7)
    line = notebook.call("tiny_recipe", options)
    namespace = types.SimpleNamespace(Options=tiny_recipe.Options, main=lambda options: options)
    assert eval(line, {"tiny_recipe": namespace}) == options


def test_a_terminal_with_ipython_is_no_notebook(monkeypatch):
    shell = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert not notebook.in_notebook()
    shell.kernel = object()
    assert notebook.in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not notebook.in_notebook()
