"""How each operator that torch leaves us is written in ONNX.

A handler takes the builder and a step whose references are filled in, and returns the value or the
values of the step.
"""

from coordinator.task.graphs.onnx.operators import (
    convolutions,
    indexing,
    pointwise,
    pooling,
    products,
    shaping,
)
from coordinator.task.graphs.onnx.operators.registry import HANDLERS

__all__ = ["HANDLERS", "convolutions", "indexing", "pointwise", "pooling", "products", "shaping"]
