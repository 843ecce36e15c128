"""What a device tells its operator, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from edge_sdk import __version__
from edge_sdk.decide.budget import DAY_S, History
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.gates import Limits
from edge_sdk.decide.observer import Observer
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.telling import TELL_S, Telling
from edge_sdk.machine.snapshot import Battery, Heat, MemoryState, Snapshot, Zone
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.round import MAX_REASON_CHARACTERS, Bid
from edge_sdk.protocol.messages.wire import encode_message

KNOWN = Snapshot(
    battery=Battery(present=True, percent=25.0, charging=False, capacity_wh=10.0),
    memory=MemoryState(total_bytes=4e9, available_bytes=1.5e9),
    heat=Heat(zones=(Zone(name="cpu", celsius=41.0), Zone(name="gpu", celsius=52.5))),
)


class Fixed:
    """A probe that sees one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def snapshot(self) -> Snapshot:
        return self._snapshot


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def telling(
    snapshot: Snapshot = KNOWN, *, profile: str | None = None, **settings: Any
) -> tuple[Telling, Clock]:
    clock = Clock()
    policy = Policy(limits=replace(Limits(), energy_wh_per_day=1.0))
    config = DeviceConfig(task="t", name="pi", data="d", policy=policy, **settings)
    observer = Observer(policy, Fixed(snapshot))
    return Telling(config, observer, profile=profile, clock=clock), clock


def failed(reason: str) -> Bid:
    return Bid(device="pi", round=1, level=None, reason=reason, code="failed")


def test_everything_that_is_known_is_told() -> None:
    found, _ = telling(profile="raspberry_pi_4", labels={"site": "berlin"})
    assert found.due(failed("skip: no room")) == [
        Condition(
            device="pi",
            battery=0.25,
            charging=False,
            temperature_c=52.5,
            memory_free_mb=1500.0,
            memory_mb=4000.0,
            energy_today_j=0.0,
            energy_budget_j=3600.0,
            labels={"site": "berlin"},
            profile="raspberry_pi_4",
            version=__version__,
            last_error="skip: no room",
        )
    ]


def test_energy_of_a_day_that_is_over_is_not_told_as_todays() -> None:
    found, clock = telling()
    observer = found._observer
    observer._wall = lambda: 1e6 + clock.now
    observer._remember(History(day_from_s=1e6, spent_j=50.0))
    assert found.condition().energy_today_j == 50.0
    clock.now += DAY_S
    assert found.condition().energy_today_j == 0.0


def test_what_is_not_known_is_left_out() -> None:
    found, _ = telling(Snapshot())
    told = found.condition()
    assert (told.battery, told.charging, told.temperature_c, told.memory_mb) == (None,) * 4
    mains, _ = telling(Snapshot(battery=Battery(present=False)))
    assert mains.condition().battery is None
    assert mains.condition().energy_budget_j is None
    nonsense, _ = telling(Snapshot(memory=MemoryState(total_bytes=1e300)), profile="No Name")
    assert (nonsense.condition().memory_mb, nonsense.condition().profile) == (None, None)


def test_it_is_told_at_most_every_few_seconds() -> None:
    found, clock = telling()
    assert len(found.due()) == 1
    clock.now += TELL_S / 2
    assert found.due() == []
    clock.now += TELL_S / 2
    assert len(found.due()) == 1
    found.again()
    assert len(found.due()) == 1, "the coordinator was started again"


def test_owner_can_keep_it() -> None:
    found, _ = telling(share_condition=False)
    assert found.due(failed("skip: no room")) == []


def test_largest_condition_fits_into_what_a_device_may_send() -> None:
    labels: Mapping[str, str] = {f"{number:x}" * 30: "x" * 34 for number in range(16)}
    found, _ = telling(labels=dict(labels), profile="p" * 64)
    (told,) = found.due(failed("\U0001f600" * MAX_REASON_CHARACTERS))
    assert len(encode_message(told)) < 4096


@pytest.mark.parametrize(
    "labels", [{"Site": "x"}, {"site": ""}, {"site": "a\nb"}, {f"{n}": "x" * 64 for n in range(17)}]
)
def test_labels_that_cannot_be_sent_are_refused_in_the_settings(labels: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="label"):
        DeviceConfig(task="t", name="pi", data="d", labels=labels)
