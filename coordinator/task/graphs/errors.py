"""Errors of compiling a task's graphs."""

from __future__ import annotations

from coordinator.errors import CoordinatorError


class GraphCompileError(CoordinatorError):
    """A task cannot be compiled to ONNX; the text names the operator and the module it is in."""


class NotSymbolicError(GraphCompileError):
    """One graph cannot serve every size; the caller falls back to graphs of fixed sizes."""


class WrongGraphError(GraphCompileError):
    """A graph does not compute what torch computes."""


class CoarseError(GraphCompileError):
    """A graph in float16 differs from torch by more than its rounding explains."""
