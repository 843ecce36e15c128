"""Write symbolic graphs as ONNX."""
