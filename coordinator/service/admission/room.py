"""A full disk: said at once, waited for, and nobody's fault.

- An upload that finds no room is not taken. Its device is told to wait, with the reason, and offers
  the upload again later.
- Files of the run itself wait: what found no room is tried again, until there is some.

The state machine's clock stands still meanwhile, so that no device is late because of the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from edge_sdk.program.files import DiskFull, free_bytes

log = logging.getLogger(__name__)

LOG_S = 60.0
"""Seconds between two lines that say that the disk is still full."""


class Room:
    """The time without room on the disk. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._full: DiskFull | None = None
        self._since = self._log_due_s = 0.0
        self._lost_s = 0.0

    @property
    def full(self) -> DiskFull | None:
        """The file that last found no room; None: there is room."""
        return self._full

    @property
    def lost_s(self) -> float:
        """Seconds without room so far."""
        return self._lost_s + (0.0 if self._full is None else self._clock() - self._since)

    def lacks(self, full: DiskFull) -> None:
        """Note, and say at once, that a file found no room."""
        now = self._clock()
        if self._full is None:
            self._since, self._log_due_s = now, now
        self._full = full
        if now < self._log_due_s:
            return
        self._log_due_s = now + LOG_S
        log.error(
            "the disk is full: %s needs %s bytes, and %s are free; devices wait, and the run goes "
            "on when there is room",
            full.path,
            f"{full.needed:,}",
            f"{full.free:,}",
            extra={
                "facts": {
                    "event": "disk_full",
                    "path": str(full.path),
                    "needed_bytes": full.needed,
                    "free_bytes": full.free,
                }
            },
        )

    def look(self) -> None:
        """Look whether what found no room would find it now."""
        if self._full is not None and free_bytes(self._full.path) > self._full.needed:
            self.found()

    def found(self) -> None:
        """Note that there is room."""
        if self._full is not None:
            self._lost_s, self._full = self.lost_s, None
            log.info("the disk has room again", extra={"facts": {"event": "disk_room"}})
