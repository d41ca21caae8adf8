"""A LiteRT (TensorFlow Lite) file of the model; a BERT's takes token ids."""

import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from exports import compare
from exports.trained import Trained

FILE = "model.tflite"


def write(trained: Trained, folder: Path) -> dict[str, float]:
    """Writes `model.tflite`, runs it with the interpreter, and compares it with the Keras model.

    Only ops that LiteRT itself has are used, so the interpreter of a phone runs it. Batch and
    length may be any: `resize_tensor_input()`, or `get_signature_runner()`, which does it itself.

    Args:
        trained: what is exported.
        folder: a folder that is not there yet.

    Returns:
        The largest difference from the Keras model.

    Raises:
        RunError: it differs from the Keras model.
    """
    folder.mkdir()
    builtins = {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS]}
    trained.model.export(str(folder / FILE), format="litert", verbose=False, target_spec=builtins)
    found = run(interpreter(folder / FILE), trained.inputs)
    name = "celsius" if trained.recipe == "dna_melting" else "logits"
    return {name: compare.require_same_logits("litert", trained.outputs, found)}


def interpreter(path: Path):
    """LiteRT's own interpreter where it is installed, else that of TensorFlow."""
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        Interpreter = tf.lite.Interpreter
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*tf.lite.Interpreter is deprecated")
        return Interpreter(str(path))


def run(interpreter, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """What an interpreter (TensorFlow's, or that of `ai_edge_litert`) gives for a batch.

    Args:
        interpreter: of `model.tflite`.
        inputs: as in `Trained.inputs`.
    """
    runner = interpreter.get_signature_runner()
    names = list(runner.get_input_details())
    if len(names) == 1:
        inputs = {names[0]: next(iter(inputs.values()))}
    (found,) = runner(**inputs).values()
    return keras.ops.convert_to_numpy(found)


def how_to_load(trained: Trained) -> str:
    """Python that loads the folder it is run in, without Keras."""
    return (
        "from ai_edge_litert.interpreter import Interpreter\n\n"
        f'serve = Interpreter("{FILE}").get_signature_runner()\n'
        "print(serve.get_input_details(), serve.get_output_details())"
    )
