"""The condition of the device, told to the coordinator's operator if the owner shares it.

It is told when the device has joined and with its bids, also the one that withdraws an offer
because training failed, but not more often than every `TELL_S` seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from edge_sdk import __version__
from edge_sdk.decide.decision import MB
from edge_sdk.decide.observer import Observer
from edge_sdk.device.config import DeviceConfig
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.condition import (
    MAX_VERSION_CHARACTERS,
    RANGES,
    Condition,
)
from edge_sdk.protocol.messages.round import MAX_REASON_CHARACTERS, Bid
from edge_sdk.protocol.messages.topics import check_name

TELL_S = 5.0
"""Least seconds between two messages."""


class Telling:
    """Tells how a device is, now and then. For the thread that decides and trains."""

    def __init__(
        self,
        config: DeviceConfig,
        observer: Observer,
        *,
        profile: str | None,
        clock: Callable[[], float],
    ) -> None:
        """`profile` is the name of the machine's, or of the emulated one; None: it has none."""
        self._config, self._observer, self._clock = config, observer, clock
        self._told_s = -math.inf
        self._error: str | None = None
        self._profile = _name(profile)

    def due(self, bid: Bid | None = None) -> list[Condition]:
        """Return the condition if it is time to tell it; `bid` is what goes with it."""
        if bid is not None and bid.code == "failed":
            self._error = bid.reason[:MAX_REASON_CHARACTERS]
        now = self._clock()
        if not self._config.share_condition or now - self._told_s < TELL_S:
            return []
        self._told_s = now
        return [self.condition()]

    def again(self) -> None:
        """Tell it at the next occasion: the coordinator may not know it any more."""
        self._told_s = -math.inf

    def condition(self) -> Condition:
        """Return how the device is."""
        snapshot, policy = self._observer.snapshot(), self._config.policy
        battery, memory = snapshot.battery, snapshot.memory
        allowance = policy.allowance(battery)
        zones = [zone.celsius for zone in snapshot.heat.zones or ()]
        percent = None if battery.present is False else battery.percent
        return Condition(
            device=self._config.name,
            battery=None if percent is None else _known("battery", percent / 100),
            charging=battery.charging,
            temperature_c=_known("temperature_c", max(zones, default=None)),
            memory_free_mb=_known("memory_free_mb", _mb(memory.available_bytes)),
            memory_mb=_known("memory_mb", _mb(memory.total_bytes)),
            energy_today_j=_known("energy_today_j", self._observer.today_j),
            energy_budget_j=_known(
                "energy_budget_j", None if allowance is None else allowance.joules_per_day
            ),
            labels=self._config.labels,
            profile=self._profile,
            version=__version__[:MAX_VERSION_CHARACTERS],
            last_error=self._error,
        )


def _mb(size: float | None) -> float | None:
    return None if size is None else round(size / MB, 3)


def _known(name: str, value: float | None) -> float | None:
    """Return a value that may be told; a sensor's nonsense is unknown."""
    least, most = RANGES[name]
    return value if value is not None and least <= value <= most else None


def _name(profile: str | None) -> str | None:
    try:
        return None if profile is None else check_name(profile)
    except MessageError:
        return None
