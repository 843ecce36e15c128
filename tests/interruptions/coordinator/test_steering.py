"""The coordinator is steered through the command line, and killed in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from coordinator.cli import main
from tests.interruptions.coordinator.test_stops import open_round
from tests.interruptions.world import World, Worlds

Typed = Callable[..., Any]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """Type a command about a run, and return its answer."""

    def type_it(world: World, command: str, *words: str) -> Any:
        capsys.readouterr()
        code = main([command, str(world.run_folder), *words, "--json"])
        said = capsys.readouterr()
        assert code == 0, said.err
        return json.loads(said.out)

    return type_it


def steered(worlds: Worlds, typed: Typed, *, killed: bool) -> World:
    """A run of two rounds that gets another learning rate and a third round.

    One that is not killed is stopped while it is paused.
    """
    world = worlds.make(rounds=2, chunk_bytes=1024)
    open_round(world)
    typed(world, "set", "learning_rate", "0.02")
    typed(world, "pause")
    if killed:
        world.coordinator.kill()
    for hold in world.proxy("one").holds:
        hold.release()
    if killed:
        world.coordinator.start()
        world.coordinator.wait_for("resumed", round=1)
    world.coordinator.wait_for("waiting", match="paused by")
    assert world.outcome().rounds == [1]
    if not killed:
        assert typed(world, "stop")["stopping"] == "round"
        assert world.coordinator.wait() == 0
        last = world.coordinator.last()
        world.coordinator.start()
        world.coordinator.wait_for("connected", after=last)
    typed(world, "rounds", "+1")
    typed(world, "resume")
    world.setup = replace(world.setup, rounds=3)
    return world


def test_coordinator_killed_after_orders(worlds: Worlds, typed: Typed) -> None:
    """The coordinator is killed (`kill -9`) once it has answered `set` and `pause`"""
    calm = steered(worlds, typed, killed=False)
    calm.finish()
    assert typed(calm, "quarantined") == []
    world = steered(worlds, typed, killed=True)
    world.finish()
    assert world.digest() == calm.digest()
    assert [line["what"] for line in typed(world, "audit")] == ["set", "pause", "rounds", "resume"]
    rows = {row["name"]: row for row in typed(world, "set")}
    assert (rows["learning_rate"]["value"], rows["learning_rate"]["file"]) == (0.02, 0.1)
    world.note("it was killed, and its model is that of the run that was not")
