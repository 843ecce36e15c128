"""A run that is down, as the page, the API and the metrics see it: its state is `failed`.

`waits_for` says why, and when it starts again. All else is what was known when it was served last.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from coordinator.errors import ConfigError
from coordinator.operate.http.viewed import RunView
from edge_sdk import __version__

FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DownView:
    """The view of a run that is not served, although it should be."""

    task: str
    why: str
    before: RunView | None = None
    """The view that it had while it was served; None: it was not."""

    @property
    def sequence(self) -> int:
        """See `RunView`."""
        return 1 if self.before is None else self.before.sequence + 1

    def status(self) -> dict[str, Any]:
        """See `RunView`."""
        known = _nothing(self.task) if self.before is None else self.before.status()
        return {
            **known,
            "task": self.task,
            "state": FAILED,
            "phase": None,
            "waits_for": self.why,
            "deadline_s": None,
            "time": time.time(),
            "broker_connected": False,
            "sequence": self.sequence,
        }

    def devices(self, since: int = 0) -> list[dict[str, Any]]:
        """See `RunView`."""
        return [] if self.before is None else self.before.devices(since)

    def device(self, name: str) -> dict[str, Any]:
        """See `RunView`."""
        if self.before is None:
            raise ConfigError(f"nothing is known of {name[:80]!r}: {self.task!r} was not served")
        return self.before.device(name)

    def rounds(self, since: int = 0) -> list[dict[str, Any]]:
        """See `RunView`."""
        return [] if self.before is None else self.before.rounds(since)

    def blocks(self) -> dict[str, Any]:
        """See `RunView`."""
        if self.before is None:
            return {"round": 0, "axes": [], "tensors": []}
        return self.before.blocks()

    def strip(self, rounds: int = 60) -> dict[str, Any]:
        """See `RunView`."""
        if self.before is None:
            return {"rounds": [], "devices": {}, "legend": {}}
        return self.before.strip(rounds)


def _nothing(task: str) -> dict[str, Any]:
    """Return the status of a run of which nothing is known."""
    counts = ("bytes_up", "bytes_down", "trained", "skipped", "late", "rejected")
    kinds = ("known", "present", "training", "quarantined", "paused")
    unknown = (
        *("folder", "rounds", "started", "accuracy", "deploy", "best", "paused", "stopping"),
        "delivery",
    )
    return {
        "task": task,
        "run": "",
        "asynchronous": False,
        "round": 0,
        "committed": 0,
        "version": __version__,
        "devices": dict.fromkeys(kinds, 0),
        "levels": {},
        "skips": {},
        "level_reports": [],
        "totals": {"seconds": 0.0, "joules": None, **dict.fromkeys(counts, 0)},
        "settings": {},
        **dict.fromkeys(unknown),
    }
