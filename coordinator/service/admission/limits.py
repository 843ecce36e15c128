"""Rate limits for devices: token buckets for a bounded number of devices.

A bucket holds `burst` tokens and regains `per_s` of them every second. A device that finds it empty
is over its limit. Only the devices heard from most recently have a bucket; a forgotten device
starts again with a full one, so invented names take no memory.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate limit: `burst` times at once, `per_s` in the long run."""

    per_s: float
    burst: float


MAX_DEVICES = 10_000
"""Default limit on the device names that a run listens to."""
CONTROL = Rate(100.0, 500.0)
"""Control messages, or KiB of them: larger ones take longer to read, and honest ones are small. A
device that has to ask for every chunk of a large model sends the most."""
STRANGERS = Rate(200.0, 2000.0)
"""Messages of all unknown names together, besides one for every allowed device."""
PRESENCE = Rate(0.5, 30.0)
OFFER = Rate(2.0, 30.0)
"""Offers of further uploads for a round, each of which takes room on the disk."""
USELESS = Rate(100.0, 2000.0)
"""Useless chunks. Some are honest, because a link may deliver messages twice."""
WARNING = Rate(1 / 120, 5.0)
"""Warnings in the log about one device."""
COMPLAINT = Rate(1 / 600, 1.0)
"""Complaints to a device about its messages."""
MUTED_S = 10.0
"""Seconds a device is ignored after it sends too many useless chunks."""


class Buckets:
    """Buckets for the `most` devices heard from most recently."""

    def __init__(self, rate: Rate, most: int) -> None:
        self._rate = rate
        self._most = most
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """(tokens, time of that count) by device; the most recent device is last."""

    def __len__(self) -> int:
        return len(self._levels)

    def take(self, device: str, now: float, tokens: float = 1.0) -> bool:
        """Take tokens from a device's bucket; False, taking none, if it has too few.

        `now` is in seconds.
        """
        rate = self._rate
        level, then = self._levels.pop(device, (rate.burst, now))
        level = min(rate.burst, level + rate.per_s * max(0.0, now - then))
        granted = level >= tokens
        self._levels[device] = (level - tokens if granted else level, now)
        if len(self._levels) > self._most:
            self._levels.popitem(last=False)
        return granted
