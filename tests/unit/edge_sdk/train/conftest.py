"""One thread: the models are small, and waiting for a second core costs more than it brings."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    if find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
