"""When a device does not train at all."""

from __future__ import annotations

from typing import Any

import pytest

from edge_sdk.decide.gates import Limits, check_gates, closed_gate, parse_hours
from edge_sdk.machine.snapshot import (
    Battery,
    Heat,
    MemoryState,
    Network,
    Snapshot,
    Trip,
    Zone,
)
from edge_sdk.protocol.errors import ConfigError

MAINS = Battery(present=False)


def reason(snapshot: Snapshot, minute: int = 0, **limits: Any) -> str | None:
    gate = closed_gate(Limits(**limits), snapshot, minute)
    return None if gate is None else gate.reason


@pytest.mark.parametrize(
    ("battery", "closed"),
    [
        (MAINS, None),
        (Battery(present=True, percent=30, charging=False), None),
        (
            Battery(present=True, percent=24, charging=False),
            "battery 24 % < 30 % and not charging",
        ),
        (
            Battery(present=True, percent=29.8, charging=False),
            "battery 29.8 % < 30 % and not charging",
        ),
        (
            Battery(present=True, percent=29.996, charging=False),
            "battery 29.996 % < 30 % and not charging",
        ),
        (Battery(present=True, percent=5, charging=True), None),
        (Battery(present=True, percent=5), "battery 5 % < 30 % and not known to be charging"),
        (Battery(present=True, charging=False), "battery not known, not charging"),
        (Battery(), "battery not known, not known to be charging"),
        (Battery(present=True, charging=True), None),
    ],
)
def test_battery_gate(battery: Battery, closed: str | None) -> None:
    assert reason(Snapshot(battery=battery)) == closed


def test_battery_floor_of_zero_opens_the_gate_for_what_is_not_known() -> None:
    assert reason(Snapshot(), battery_floor=0) is None


CPU = Zone(name="cpu", celsius=71, trips=(Trip(kind="active", celsius=50),))


@pytest.mark.parametrize(
    ("heat", "closed"),
    [
        (Heat(), None),
        (Heat(status=1), None),
        (Heat(status=2), "thermal status 2 ≥ 2 (moderate)"),
        (Heat(throttling=True), "the processor is slowed down by heat"),
        (Heat(throttling=False, zones=(CPU,)), None),
        (
            Heat(zones=(Zone(name="soc", celsius=75, trips=(Trip(kind="passive", celsius=85),)),)),
            "soc 75 °C ≥ 75 °C, 10 below its trip point",
        ),
        (
            Heat(
                zones=(
                    CPU,
                    Zone(
                        name="gpu",
                        celsius=96,
                        trips=(Trip(kind="critical", celsius=105), Trip(kind="hot", celsius=100)),
                    ),
                )
            ),
            "gpu 96 °C ≥ 90 °C, 10 below its trip point",
        ),
        (
            Heat(zones=(Zone(name="soc", celsius=74, trips=(Trip(kind="passive", celsius=85),)),)),
            None,
        ),
    ],
)
def test_heat_gate(heat: Heat, closed: str | None) -> None:
    assert reason(Snapshot(battery=MAINS, heat=heat)) == closed


def test_open_heat_gate_names_the_zone_that_is_nearest_to_its_limit() -> None:
    zones = (
        Zone(name="cool", celsius=40, trips=(Trip(kind="passive", celsius=90),)),
        Zone(name="warm", celsius=60, trips=(Trip(kind="passive", celsius=90),)),
        Zone(name="strict", celsius=30, trips=(Trip(kind="passive", celsius=70),)),
    )
    gates = check_gates(Limits(), Snapshot(heat=Heat(zones=zones)), 0)
    assert [gate.reason for gate in gates if gate.name == "heat"] == ["warm 60 °C < 80 °C"]


def test_metered_network_closes_unless_the_owner_allows_it() -> None:
    paid = Snapshot(battery=MAINS, network=Network(metered=True))
    assert reason(paid) == "the network is metered"
    assert reason(paid, allow_metered=True) is None
    assert reason(Snapshot(battery=MAINS)) is None


def test_memory_pressure_closes() -> None:
    def pressed(percent: float) -> Snapshot:
        return Snapshot(battery=MAINS, memory=MemoryState(pressure=percent))

    assert reason(pressed(10)) is None
    assert reason(pressed(12.5)) == "memory pressure 12.5 % > 10 %"


@pytest.mark.parametrize(
    ("hours", "minute", "quiet"),
    [
        ("22:30-07:00", 22 * 60 + 29, False),
        ("22:30-07:00", 22 * 60 + 30, True),
        ("22:30-07:00", 0, True),
        ("22:30-07:00", 7 * 60, False),
        ("9:00-17:00", 12 * 60, True),
        ("9:00-17:00", 17 * 60, False),
        ("9:00-9:00", 9 * 60, False),
    ],
)
def test_quiet_hours(hours: str, minute: int, quiet: bool) -> None:
    seen = reason(Snapshot(battery=MAINS), minute, quiet_hours=parse_hours(hours))
    assert (seen is not None) is quiet
    if seen is not None:
        assert "quiet hours" in seen


@pytest.mark.parametrize("text", ["", "22-7", "24:00-07:00", "22:60-07:00", "22:30", "a:bc-d:ef"])
def test_hours_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"hours|day"):
        parse_hours(text)


@pytest.mark.parametrize(
    "limits",
    [
        {"battery_floor": 101},
        {"memory_pressure": -1},
        {"heat_margin_c": float("nan")},
        {"quiet_hours": (0, 1440)},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Limits(**limits)
