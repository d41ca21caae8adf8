"""A trained run for other programs: TensorFlow, Hugging Face, ONNX, LiteRT."""
