"""Translations to ONNX of the operators that remain after torch's decompositions.

A handler takes the builder and a step whose references are resolved, and returns the step's value
or values.
"""

from coordinator.task.graphs.onnx.operators import (
    convolutions,
    indexing,
    norms,
    pointwise,
    pooling,
    products,
    recurrence,
    resampling,
    shaping,
)
from coordinator.task.graphs.onnx.operators.registry import HANDLERS

__all__ = [
    "HANDLERS",
    "convolutions",
    "indexing",
    "norms",
    "pointwise",
    "pooling",
    "products",
    "recurrence",
    "resampling",
    "shaping",
]
