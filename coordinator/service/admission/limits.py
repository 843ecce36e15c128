"""Rate limits of devices: token buckets, for a bounded number of devices.

A bucket holds `burst` tokens and gets `per_s` of them back every second. Whoever finds none is over
its limit. Only the devices heard of last have a bucket; one that was forgotten starts with a full
one, so made-up names cost no memory, and nobody a bucket of its own.
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
"""Names of devices that a run listens to, by default."""
CONTROL = Rate(50.0, 500.0)
"""Control messages, or KiB of them: reading takes as long as they are large, and honest ones are
small. Most come of a device that has to ask for every chunk of a large model."""
STRANGERS = Rate(200.0, 2000.0)
"""Messages of all names together that are not known, beside one for every device there may be."""
PRESENCE = Rate(0.5, 30.0)
OFFER = Rate(2.0, 30.0)
"""Offers of uploads that there is no room for yet: each takes room on the disk."""
USELESS = Rate(100.0, 2000.0)
"""Chunks that nobody waits for. A link may double all that it brings."""
WARNING = Rate(1 / 120, 5.0)
"""Warnings in the log about one device."""
COMPLAINT = Rate(1 / 600, 1.0)
"""Complaints to a device about what it sends."""
MUTED_S = 10.0
"""Seconds a device is ignored after it sends too many useless chunks."""


class Buckets:
    """A bucket for each of the `most` devices that were heard of last."""

    def __init__(self, rate: Rate, most: int) -> None:
        self._rate = rate
        self._most = most
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tokens, and when that was, by device; the one heard of last is last."""

    def __len__(self) -> int:
        return len(self._levels)

    def take(self, device: str, now: float, tokens: float = 1.0) -> bool:
        """Take this many tokens of a device; True if it had them.

        Who wants more than the bucket holds is over its limit. `now` in seconds.
        """
        rate = self._rate
        level, then = self._levels.pop(device, (rate.burst, now))
        level = min(rate.burst, level + rate.per_s * max(0.0, now - then))
        granted = level >= tokens
        self._levels[device] = (level - tokens if granted else level, now)
        if len(self._levels) > self._most:
            self._levels.popitem(last=False)
        return granted
