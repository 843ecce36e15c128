"""What a run tells dashboards over MQTT: its state and its devices, as retained JSON.

    view/status    `Overview.status`
    view/fleet     {"time": …, "devices": [row …], "omitted": n}; rows of `Overview.devices`

They are published at most every few seconds, and only if something changed. They are cleared when
the coordinator ends as it should. A fleet that is too large for a message has fewer columns, and
then fewer rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from coordinator.service.overview.overview import Overview
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.transport.link import Link

log = logging.getLogger(__name__)

MAX_VIEW_BYTES = 2**17
"""Largest message: that of the smallest common limit of brokers."""
ESSENTIAL = ("device", "state", "level", "code", "battery", "charging", "temperature_c")
"""Columns of a large fleet's devices."""


class StatusTopics:
    """Publishes the overview of a run, for the loop's thread."""

    def __init__(
        self,
        link: Link,
        topics: Topics,
        overview: Overview,
        *,
        every_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`every_s`: least seconds between two publications."""
        self._link, self._topics, self._overview = link, topics, overview
        self._every_s, self._clock = every_s, clock
        self._due_s = clock()
        self._told: int | None = None
        """Sequence of what was published last; None: nothing was, or it may be lost."""

    def again(self) -> None:
        """Publish at the next occasion: the broker may have lost it."""
        self._told = None

    def tick(self) -> None:
        """Publish if it is time and there is news."""
        now, sequence = self._clock(), self._overview.sequence
        if now < self._due_s or sequence == self._told:
            return
        self._due_s = now + self._every_s
        status = json.dumps(self._overview.status()).encode()
        fleet = pack_fleet(self._overview.devices(), self._overview.status()["time"])
        sent = [
            self._link.publish(topic, payload, retain=True, bulk=True)
            for topic, payload in (
                (self._topics.view_status, status),
                (self._topics.view_fleet, fleet),
            )
        ]
        self._told = sequence if all(sent) else None

    def clear(self) -> None:
        """Leave nothing at the broker: nobody keeps it current any more."""
        for topic in (self._topics.view_status, self._topics.view_fleet):
            self._link.publish(topic, b"", retain=True, bulk=True)


def pack_fleet(rows: list[dict[str, Any]], time: float, limit: int = MAX_VIEW_BYTES) -> bytes:
    """Return the fleet as JSON of at most so many bytes."""
    data = _packed(rows, time, 0)
    if len(data) <= limit:
        return data
    rows = [{name: row[name] for name in ESSENTIAL} for row in rows]
    kept = len(rows)
    while len(data := _packed(rows[:kept], time, len(rows) - kept)) > limit:
        kept = min(kept - 1, kept * limit // len(data))
    return data


def _packed(rows: list[dict[str, Any]], time: float, omitted: int) -> bytes:
    return json.dumps({"time": time, "devices": rows, "omitted": omitted}).encode()
