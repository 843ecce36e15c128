"""Compile a task to plain ONNX graphs, which devices train and evaluate without torch.

`compile_graphs` compiles in this process. `compiled_graphs` compiles only what its cache lacks.
`compile_in_child` compiles in another process, so that this one never loads torch or onnx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.task.graphs.cache import compiled_graphs
    from coordinator.task.graphs.child import compile_in_child
    from coordinator.task.graphs.compilation import compile_graphs
    from coordinator.task.graphs.compiled import CompiledGraphs
    from coordinator.task.graphs.errors import GraphCompileError

__all__ = [
    "CompiledGraphs",
    "GraphCompileError",
    "compile_graphs",
    "compile_in_child",
    "compiled_graphs",
]

_HOMES = {
    "CompiledGraphs": "coordinator.task.graphs.compiled",
    "GraphCompileError": "coordinator.task.graphs.errors",
    "compile_graphs": "coordinator.task.graphs.compilation",
    "compile_in_child": "coordinator.task.graphs.child",
    "compiled_graphs": "coordinator.task.graphs.cache",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'coordinator.task.graphs' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
