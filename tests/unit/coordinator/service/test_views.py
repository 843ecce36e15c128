"""What a run tells dashboards over MQTT."""

from __future__ import annotations

import json
from typing import Any

from coordinator.service.overview.rows import COLUMNS, new_row, shown
from coordinator.service.overview.views import ESSENTIAL, MAX_VIEW_BYTES, pack_fleet
from tests.unit.coordinator.service.service_world import TOPICS, World, Worlds, rounds_config


def told(world: World, topic: str) -> Any:
    data = world.broker.retained.get(topic)
    return None if not data else json.loads(data)


def test_status_and_fleet_are_retained_and_cleared_at_the_end(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=1, rounds=9), view_s=5.0)
    world.add("one", sends=False)
    world.settle()
    world.wait(6.0)
    status, fleet = told(world, TOPICS.view_status), told(world, TOPICS.view_fleet)
    assert (status["task"], status["state"]) == ("tiny", "running")
    assert [set(row) for row in fleet["devices"]] == [set(COLUMNS)]
    assert (fleet["omitted"], fleet["devices"][0]["state"]) == (0, "training")
    world.stop()
    assert told(world, TOPICS.view_status) is None
    assert told(world, TOPICS.view_fleet) is None


def test_they_are_told_at_most_every_few_seconds(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=9), view_s=5.0)
    world.settle()
    world.wait(6.0)
    first = told(world, TOPICS.view_fleet)
    world.add("one")
    world.wait(1.0)
    world.wait(1.0)
    assert told(world, TOPICS.view_fleet) == first
    world.wait(4.0)
    assert [row["device"] for row in told(world, TOPICS.view_fleet)["devices"]] == ["one"]


def test_run_that_is_not_asked_to_tells_nothing(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=1))
    world.add("one")
    world.settle()
    world.wait(10.0)
    assert told(world, TOPICS.view_status) is None


def test_large_fleet_has_fewer_columns_and_then_fewer_rows() -> None:
    rows = [shown(new_row(f"device-{n}"), counted=0, newest=0) for n in range(3000)]
    some = json.loads(pack_fleet(rows[:50], 1.0))
    assert (len(some["devices"]), set(some["devices"][0])) == (50, set(COLUMNS))
    most = json.loads(pack_fleet(rows[:800], 1.0))
    assert (len(most["devices"]), most["omitted"]) == (800, 0)
    assert set(most["devices"][0]) == set(ESSENTIAL)
    data = pack_fleet(rows, 1.0)
    all_of_them = json.loads(data)
    assert len(data) <= MAX_VIEW_BYTES
    assert all_of_them["omitted"] == 3000 - len(all_of_them["devices"]) > 0
