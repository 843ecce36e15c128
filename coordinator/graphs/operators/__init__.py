"""How each operator that torch leaves us is written in ONNX.

A handler takes the builder and a step whose references are filled in, and returns the value or the
values of the step.
"""

from coordinator.graphs.operators import indexing, layers, pointwise, products, shaping
from coordinator.graphs.operators.registry import HANDLERS

__all__ = ["HANDLERS", "indexing", "layers", "pointwise", "products", "shaping"]
