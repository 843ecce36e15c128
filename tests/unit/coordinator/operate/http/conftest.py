"""A page over a staged run, for tests of its server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.staged_runs import StagedPage, staged_page


@pytest.fixture
def page(tmp_path: Path) -> Iterator[StagedPage]:
    with staged_page(tmp_path) as found:
        yield found
