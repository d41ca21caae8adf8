"""onnxruntime and LiteRT's own interpreter; needs the packages of `make test-export`."""

import numpy as np
import pytest

from exports import litert
from exports import onnx as onnx_module

pytestmark = pytest.mark.export
NAMES = ("bert", "text", "mnist", "dna")


@pytest.mark.parametrize("name", NAMES)
def test_onnxruntime_says_what_the_keras_model_says(load, name, tmp_path, monkeypatch):
    import onnx
    import onnxruntime

    trained = load(name)
    (difference,) = onnx_module.write(trained, tmp_path / "out").values()
    largest = max(1, np.abs(trained.outputs).max())
    assert difference < 2e-5 * largest
    path = tmp_path / "out" / "model.onnx"
    graph = onnx.load(path).graph
    assert "Erfc" not in {node.op_type for node in graph.node}
    # Another batch, of one example: neither size is fixed.
    one = {key: value[:1] for key, value in trained.inputs.items()}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert np.abs(onnx_module.run(session, one) - trained.outputs[:1]).max() < 2e-5 * largest
    if trained.is_bert:
        assert {item.name for item in session.get_inputs()} == set(trained.inputs)
    monkeypatch.chdir(tmp_path / "out")
    exec(onnx_module.how_to_load(trained), {})


@pytest.mark.parametrize("name", NAMES)
def test_litert_without_tensorflow_says_what_the_keras_model_says(load, name, tmp_path):
    """A phone's interpreter knows no ops of TensorFlow's."""
    from ai_edge_litert.interpreter import Interpreter

    trained = load(name)
    litert.write(trained, tmp_path / "out")
    assert isinstance(litert.interpreter(tmp_path / "out" / litert.FILE), Interpreter)
    found = litert.run(Interpreter(str(tmp_path / "out" / litert.FILE)), trained.inputs)
    largest = max(1, np.abs(trained.outputs).max())
    assert np.abs(found - trained.outputs).max() < 2e-5 * largest
