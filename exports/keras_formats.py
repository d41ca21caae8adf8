"""SavedModel, ONNX and LiteRT, as Keras writes them: the model's inputs and outputs."""

import functools
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from data.errors import DataError

# The format's name in `keras.Model.export`, the file, further arguments.
FORMATS = {
    "saved_model": ("tf_saved_model", "", {}),
    "onnx": ("onnx", "model.onnx", {"opset_version": 18}),
    "litert": ("litert", "model.tflite", {}),
}
TOLERANCE = 1e-4  # of the largest output


def write(model: keras.Model, folder: Path, name: str) -> str:
    """Writes a model of any recipe, reads it again, and compares the outputs for random inputs.

    Args:
        model: in float32. Of a subclassed model, whose inputs are not known, nothing is compared.
        folder: does not exist yet.
        name: one of `FORMATS`.

    Returns:
        A line that says how far the outputs differ.

    Raises:
        DataError: they differ by more than 1e-4 of the largest output.
    """
    kind, file, arguments = FORMATS[name]
    known = hasattr(model, "input")
    inputs = keras.tree.map_structure(_random, model.input) if known else None
    expected = keras.tree.flatten(model(inputs, training=False)) if known else []
    folder.mkdir()
    with mock.patch.object(tf.nn, "gelu", functools.partial(_gelu, tf.nn.gelu)):
        model.export(str(folder / file), format=kind, verbose=False, **arguments)
    if not known:
        return "the outputs were not compared: the model does not tell its inputs"
    found = outputs(folder, name, inputs)
    expected = [keras.ops.convert_to_numpy(value) for value in expected]
    differences = [
        np.abs(ours - theirs).max() / max(1.0, np.abs(ours).max())
        for ours, theirs in zip(expected, found, strict=True)
    ]
    difference = np.max(differences)  # not a number where one is not
    if not difference <= TOLERANCE:
        raise DataError(f"{name}: its outputs differ from the Keras model's by {difference:.3g}")
    return f"outputs for random inputs differ from the Keras model's by {difference:.1g}"


def _gelu(stock, features, approximate=False, name=None):
    """Computes GELU by erf: onnxruntime has no `erfc`, which TensorFlow uses."""
    if approximate:  # by tanh
        return stock(features, approximate=True)
    return 0.5 * features * (1 + tf.math.erf(features * 0.5**0.5))


def _random(tensor: keras.KerasTensor) -> np.ndarray:
    """Draws zeros and ones for integers, which fit any vocabulary and mask, else from [0, 1)."""
    shape = [size or 16 for size in tensor.shape]
    rng = np.random.default_rng(0)
    numbers = rng.random(shape) if "float" in tensor.dtype else rng.integers(0, 2, shape)
    return numbers.astype(tensor.dtype)


def outputs(folder: Path, name: str, inputs) -> list[np.ndarray]:
    """Runs an export with the runtime that it is for.

    Args:
        folder: what `write` made.
        name: one of `FORMATS`.
        inputs: an array, or arrays by name or in order, as the Keras model takes them.

    Returns:
        The model's outputs.
    """
    path, values = folder / FORMATS[name][1], keras.tree.flatten(inputs)
    if name == "saved_model":
        loaded = tf.saved_model.load(str(path))
        found = keras.tree.flatten(loaded.serve(inputs))
    elif name == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [item.name for item in session.get_inputs()]
        found = session.run(None, dict(zip(names, values, strict=True)))
    else:
        runner = tf.lite.Interpreter(str(path)).get_signature_runner()
        names = runner.get_input_details()
        by_name = inputs if isinstance(inputs, dict) else dict(zip(names, values, strict=True))
        found = list(runner(**by_name).values())
    return [keras.ops.convert_to_numpy(value) for value in found]
