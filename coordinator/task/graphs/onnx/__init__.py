"""Writing symbolic graphs as ONNX."""
