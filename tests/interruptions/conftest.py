"""The worlds of interruption cases, and what the matrix is told of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.operate.broker.embedded import find_mosquitto
from tests.interruptions.world import Worlds


@pytest.fixture
def worlds(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    shared: Path,
    record_property: Callable[[str, object], None],
) -> Iterator[Worlds]:
    """Makes worlds. What they have come to is recorded for `matrix.py`."""
    if find_mosquitto() is None:
        pytest.skip("needs mosquitto")
    worlds = Worlds(tmp_path, shared)
    try:
        yield worlds
    finally:
        worlds.close()
        record_property("done", " ".join((request.function.__doc__ or "").split()))
        for world in worlds.made:
            outcome = world.outcome()
            asynchronous, wanted = world.setup.asynchronous, world.setup.rounds
            rounds = max(outcome.rounds, default=0) if asynchronous else len(outcome.rounds)
            unit = "updates" if asynchronous else "rounds"
            record_property("happened", f"{rounds} of {wanted} {unit} finished")
            if not asynchronous:
                record_property("happened", f"{outcome.movements} movements counted, each once")
            for note in world.notes:
                record_property("happened", note)
