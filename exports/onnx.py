"""An ONNX file of the model; a BERT's takes token ids."""

from pathlib import Path

import keras
import numpy as np

from exports import compare
from exports.trained import Trained

FILE = "model.onnx"
OPSET = 18


def write(trained: Trained, folder: Path) -> dict[str, float]:
    """Writes `model.onnx`, runs it with onnxruntime, and compares it with the Keras model.

    Inputs have the names of the Keras model's; batch and length may be any.

    Args:
        trained: what is exported.
        folder: a folder that is not there yet.

    Returns:
        The largest difference from the Keras model.

    Raises:
        RunError: it differs from the Keras model.
    """
    import onnxruntime

    folder.mkdir()
    if trained.recipe == "bert_mlm":
        # TensorFlow computes exact GELU by erfc, which onnxruntime has no kernel for.
        trained.model.masked_lm_head._intermediate_dense.activation = gelu_by_erf
    trained.model.export(str(folder / FILE), format="onnx", verbose=False, opset_version=OPSET)
    session = onnxruntime.InferenceSession(folder / FILE, providers=["CPUExecutionProvider"])
    found = run(session, trained.inputs)
    name = "celsius" if trained.recipe == "dna_melting" else "logits"
    return {name: compare.require_same_logits("onnx", trained.outputs, found)}


def gelu_by_erf(x):
    """Exact GELU (Hendrycks and Gimpel, arXiv 1606.08415): x times the normal distribution of x."""
    return 0.5 * x * (1.0 + keras.ops.erf(x / np.sqrt(2.0).astype(np.float32)))


def run(session, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """What an `onnxruntime.InferenceSession` gives for a batch.

    Args:
        session: of `model.onnx`.
        inputs: as in `Trained.inputs`.
    """
    names = [item.name for item in session.get_inputs()]
    if len(names) == 1:
        inputs = {names[0]: next(iter(inputs.values()))}
    (found,) = session.run(None, inputs)
    return found


def how_to_load(trained: Trained) -> str:
    """Python that loads the folder it is run in, without Keras."""
    return (
        "import onnxruntime\n\n"
        f'session = onnxruntime.InferenceSession("{FILE}")\n'
        "print([(item.name, item.type, item.shape) for item in session.get_inputs()])"
    )
