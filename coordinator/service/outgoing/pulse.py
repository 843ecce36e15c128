"""Notices a broker that stands still, so that its silence makes no device late.

While a deadline runs and nothing has been heard for `BEAT_S`, the coordinator sends itself an echo.
If nothing at all is heard for `STALL_S` after that, the broker, the network or this program stands
still, and has since the last thing heard: time since then does not count. A deadline passes only if
something was heard after it.
"""

from __future__ import annotations

BEAT_S = 2.0
"""Seconds of silence after which an echo is sent."""
STALL_S = 3.0
"""Seconds to wait for any sign of life after an echo was sent."""


class Pulse:
    """When something was last heard, and whether an echo is under way. Times are those of a clock.

    A pulse that is not `trusted` vouches for everything: the broker gives no echoes.
    """

    def __init__(self, now: float) -> None:
        self.trusted = True
        self.heard_s = now
        """Time of the last sign of life."""
        self._sent_s: float | None = None

    def hear(self, now: float) -> None:
        """Note a sign of life."""
        self.heard_s, self._sent_s = now, None

    def send(self, now: float) -> None:
        """Note that an echo was sent."""
        self._sent_s = now

    def is_due(self, now: float, deadline_s: float) -> bool:
        """True if an echo should be sent, while a deadline runs that ends at `deadline_s`."""
        if not self.trusted or self._sent_s is not None:
            return False
        return now - self.heard_s >= BEAT_S or (now >= deadline_s and not self.vouches(deadline_s))

    def stalls(self, now: float) -> bool:
        """True if the broker stands still."""
        return self.trusted and self._sent_s is not None and now - self._sent_s >= STALL_S

    def vouches(self, at_s: float) -> bool:
        """True if the broker was alive at that time or later."""
        return not self.trusted or self.heard_s >= at_s
