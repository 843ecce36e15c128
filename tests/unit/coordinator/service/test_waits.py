"""Every wait of a run says what it waits for."""

from __future__ import annotations

import pytest

from coordinator.service.courses.parts import WAIT_S, Wait, WaitLog, listed, missing_devices
from tests.unit.coordinator.service.service_world import Worlds, rounds_config


def test_missing_devices_are_said_at_once_and_whenever_their_number_changes() -> None:
    log = WaitLog()
    first = "waiting for devices: 0 of 2 are here (round.min_devices)"
    assert log.note(missing_devices(0, 2), 0.0) == first
    assert log.note(missing_devices(0, 2), 500.0) is None
    assert log.note(missing_devices(1, 2), 501.0) == first.replace("0 of", "1 of")
    assert log.note(Wait("bids", "round 1: bids of a"), 502.0) is None
    assert log.note(missing_devices(1, 2), 503.0) == first.replace("0 of", "1 of")


def test_wait_within_a_round_is_said_when_it_takes_long_and_then_less_and_less() -> None:
    log = WaitLog()
    said = [
        second
        for second in range(600)
        if log.note(Wait("movements", f"round 1: movements of {second}"), float(second))
    ]
    assert said == [60, 180, 540]
    assert log.note(None, 601.0) is None
    assert log.note(Wait("movements", "x"), 602.0) is None
    words = log.note(Wait("movements", "x"), 602.0 + WAIT_S)
    assert words == "waiting for x, for 60 s now"


def test_names_are_listed_in_order_up_to_a_few() -> None:
    assert listed(["b", "a"]) == "a, b"
    assert listed("hgfedcba") == "a, b, c, d, e and 3 more"


def test_run_says_what_it_waits_for_in_every_phase(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=2))
    course = world.service.course
    assert course.waits_for == missing_devices(0, 2)
    world.add("one", sends=False)
    world.settle()
    assert course.waits_for == missing_devices(1, 2)
    world.add("two", sends=False)
    world.settle()
    wait = course.waits_for
    assert wait is not None
    assert wait.kind in ("bids", "movements")
    assert "one, two" in wait.words


def test_run_below_min_devices_waits_and_says_so(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds.make(rounds_config(min_devices=2))
    world.add("one", sends=False)
    with caplog.at_level("INFO"):
        world.settle()
        world.clock.now += 1
        world.service.tick()
    assert "waiting for devices: 1 of 2 are here (round.min_devices)" in caplog.text
