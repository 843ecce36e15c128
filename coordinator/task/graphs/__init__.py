"""Compile a task to plain ONNX graphs, which devices train and evaluate without torch.

`compile_graphs` compiles in this process. `compiled_graphs` compiles only what its cache lacks.
`compile_in_child` compiles in another process, so that this one never loads torch or onnx.
"""
