"""Parts of Keras that are imported at their first use, with the installed Keras."""

import subprocess
import sys

import pytest

from tests.support.processes import ROOT

BEGIN = """
import inspect, sys
import recipes.bert_mlm
import keras
print([name for name in ("sklearn", "matplotlib") if name in sys.modules])
inspect.getmodule(sys._getframe())  # reads attributes of every module
print([name for name in ("sklearn", "matplotlib") if name in sys.modules])
"""
END = """
from keras.src.visualization.plot_image_gallery import plot_image_gallery
from keras.src.wrappers.sklearn_wrapper import SKLearnClassifier
from sklearn.base import BaseEstimator
print(gallery is keras.visualization.plot_image_gallery is plot_image_gallery)
print(keras.wrappers.SKLearnClassifier is SKLearnClassifier)
print(issubclass(SKLearnClassifier, BaseEstimator))
print("plot_image_gallery" in dir(keras.visualization), hasattr(keras.wrappers, "missing"))
print(keras.visualization.__file__ == sys.modules["keras.visualization"].__file__)
"""
USES = {
    "an attribute": "gallery = keras.visualization.plot_image_gallery",
    "an import": "from keras.visualization import plot_image_gallery as gallery",
    "all names": "from keras.visualization import *\ngallery = plot_image_gallery",
    "a module in it": "import keras.src.visualization.plot_image_gallery as module\n"
    "gallery = module.plot_image_gallery",
    "the other one first": "keras.wrappers.SKLearnClassifier\n"
    "gallery = keras.visualization.plot_image_gallery",
}
QUICK = "a module in it"


@pytest.mark.long
@pytest.mark.parametrize(
    "use", [pytest.param(use, marks=() if use == QUICK else pytest.mark.long) for use in USES]
)
def test_they_are_imported_at_their_first_use_and_are_keras_s_own(use):
    program = f"{BEGIN}{USES[use]}\n{END}"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    *imported, same, same_class, inherits, names, located = ended.stdout.splitlines()
    assert imported == ["[]", "[]"]
    assert same == same_class == inherits == located == "True"
    assert names == "True False"  # one that is there and one that is not


@pytest.mark.upstream
def test_stock_keras_imports_them_at_once():
    """Where it does not, `machine/late_modules.py` is no longer needed: remove it."""
    program = "import keras, sys; print('sklearn' in sys.modules and 'matplotlib' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "True\n"
