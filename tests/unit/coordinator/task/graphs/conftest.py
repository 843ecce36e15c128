"""Graphs that are compiled once, and torch's global state."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.unit.coordinator.task.graphs.oracle import (
    LEVELS,
    MODELS,
    Compiled,
    CompiledModel,
    compiled_once,
    task_of,
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The models are small: waiting for a second core costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def compiled(shared: Path) -> CompiledModel:
    """Gives a model of the zoo with its graphs."""

    @cache
    def compiled(name: str) -> Compiled:
        task = task_of(MODELS[name])
        return Compiled(MODELS[name], task, compiled_once(task, shared, LEVELS))

    return compiled
