"""SavedModel, ONNX and LiteRT, as Keras writes them: the model's inputs and outputs."""

import functools
from pathlib import Path
from unittest import mock

import keras
import tensorflow as tf

# The format's name in `keras.Model.export`, the file, further arguments.
FORMATS = {
    "saved_model": ("tf_saved_model", "", {}),
    "onnx": ("onnx", "model.onnx", {"opset_version": 18}),
    "litert": ("litert", "model.tflite", {}),
}


def write(model: keras.Model, folder: Path, name: str) -> str:
    """Writes a model of any recipe.

    Args:
        model: in float32.
        folder: does not exist yet.
        name: one of `FORMATS`.

    Returns:
        A line that says what it takes.
    """
    kind, file, arguments = FORMATS[name]
    if hasattr(model, "input"):
        model(model.input)  # ONNX takes no model that was never called
    folder.mkdir()
    with mock.patch.object(tf.nn, "gelu", functools.partial(_gelu, tf.nn.gelu)):
        model.export(str(folder / file), format=kind, verbose=False, **arguments)
    return "takes and gives what the Keras model does"


def _gelu(stock, features, approximate=False, name=None):
    """Computes GELU by erf: onnxruntime has no `erfc`, which TensorFlow uses."""
    if approximate:  # by tanh
        return stock(features, approximate=True)
    return 0.5 * features * (1 + tf.math.erf(features * 0.5**0.5))
