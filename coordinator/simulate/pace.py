"""Durations of a device in virtual time: training, transfers, message latency.

`MemberTimes` says it in seconds, given by the caller or taken from an emulated device's profile; a
`DeviceClock` is what then passes as the device works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite

from coordinator.errors import ConfigError
from edge_sdk.data.arrays import Batch
from edge_sdk.decide.emulation.emulation import Emulation
from edge_sdk.train.backend import Backend, Job, TimedBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberTimes:
    """Seconds that what a device does takes. Raises `ConfigError` for what cannot be."""

    step_s: float = 0.0
    """A training step of the whole model; a submodel's takes its share of the
    multiply-accumulates. Not used for emulated devices, whose profile tells."""
    down_bytes_s: float = inf
    """Bytes per second from the coordinator; `up_bytes_s` likewise to it."""
    up_bytes_s: float = inf
    latency_s: float = 0.0
    """The way of a message, in either direction."""

    def __post_init__(self) -> None:
        for name in ("step_s", "latency_s"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name} must be 0 seconds or more, not {getattr(self, name)!r}")
        for name in ("down_bytes_s", "up_bytes_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)!r}")


def times_of(emulation: Emulation, *, latency_s: float = 0.0) -> MemberTimes:
    """The times of an emulated device's link. Raises `ConfigError` if its profile has none."""
    network = emulation.board.network
    if network.down_mbit_s is None or network.up_mbit_s is None:
        raise ConfigError(
            f"{emulation.member.name}: the profile of {emulation.board.name} does not say how fast "
            "its network is; give up_mbit_s and down_mbit_s, or the member's times"
        )
    return MemberTimes(
        down_bytes_s=1e6 / 8 * network.down_mbit_s.value,
        up_bytes_s=1e6 / 8 * network.up_mbit_s.value,
        latency_s=latency_s,
    )


class DeviceClock:
    """The time of a device that is not emulated. It passes only while it waits and works."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._now_s = 0.0

    def clock(self) -> float:
        """Virtual seconds since the run began."""
        return self._now_s

    def wait_until(self, now_s: float) -> None:
        """Let time pass; nothing happens if it is later already."""
        self._now_s = max(self._now_s, now_s)

    def emulated(self, backend: Backend) -> Backend:
        """A backend that trains as this one does, in this device's time."""
        plan = backend.plan
        whole = plan.submodel_macs(plan.all_groups())

        def stepping(job: Job) -> Callable[[Batch], None]:
            share = plan.submodel_macs(job.groups) / whole if whole else 1.0
            step_s = self._step_s * share
            return lambda _: self.wait_until(self._now_s + step_s)

        return TimedBackend(backend, stepping)
