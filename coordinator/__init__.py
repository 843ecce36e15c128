"""Tessera on the VM: traces models, runs rounds, puts the pieces together.

`import coordinator` loads no torch; the names below that need it do when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.task.task import Task, make_task
    from coordinator.task.tracing.trace import trace_plan

__all__ = ["Task", "make_task", "trace_plan"]

_HOMES = {
    "Task": "coordinator.task.task",
    "make_task": "coordinator.task.task",
    "trace_plan": "coordinator.task.tracing.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'coordinator' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
