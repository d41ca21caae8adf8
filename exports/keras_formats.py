"""Exports SavedModel, ONNX and LiteRT with Keras's writers."""

import functools
import warnings
from pathlib import Path

import keras
import tensorflow as tf

from exports.comparison import declares_inputs, random_inputs, require_equal, symbolic_inputs

# Per format: its name in `keras.Model.export`, the file, further arguments.
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
        One line that describes its inputs and outputs.
    """
    kind, file, arguments = FORMATS[name]
    # Keras requires a model that was called.
    if declares_inputs(model):
        model(model.input)
    elif symbolic_inputs(model) is not None:
        model(random_inputs(model))
    folder.mkdir()
    stock = tf.nn.gelu
    tf.nn.gelu = functools.partial(_gelu, stock)
    try:
        model.export(str(folder / file), format=kind, verbose=False, **arguments)
    finally:
        tf.nn.gelu = stock
    return "same inputs and outputs as the Keras model"


def compare(model: keras.Model, folder: Path, name: str) -> float:
    """Runs an export and returns its largest difference from the Keras model, on random inputs.

    Args:
        model: the exported model.
        folder: the export.
        name: one of `FORMATS`.

    Raises:
        Differs: the outputs differ.
    """
    inputs = random_inputs(model)
    return require_equal(run(folder, name, inputs), model(inputs, training=False))


def run(folder: Path, name: str, inputs) -> list:
    """Returns the outputs of an export, run by the program of its format.

    Args:
        folder: the export.
        name: one of `FORMATS`.
        inputs: arrays in the structure of the model's inputs.
    """
    path, arrays = str(folder / FORMATS[name][1]), keras.tree.flatten(inputs)
    if name == "saved_model":
        loaded = tf.saved_model.load(path)  # its variables live as long as it does
        return keras.tree.flatten(loaded.serve(inputs))
    if name == "onnx":
        import onnxruntime  # of an extra

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [item.name for item in session.get_inputs()]
        return session.run(None, dict(zip(names, arrays, strict=True)))
    plain = tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its interpreter will move to another package
        reader = tf.lite.Interpreter(path, experimental_op_resolver_type=plain)
    runner = reader.get_signature_runner()
    names = runner.get_input_details()
    named = inputs if isinstance(inputs, dict) else dict(zip(names, arrays, strict=True))
    return list(runner(**named).values())


def _gelu(stock, features, approximate=False, name=None):
    """Computes GELU by erf: onnxruntime has no `erfc`, which TensorFlow uses."""
    if approximate:  # by tanh
        return stock(features, approximate=True)
    return 0.5 * features * (1 + tf.math.erf(features * 0.5**0.5))
