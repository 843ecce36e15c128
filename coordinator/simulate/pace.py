"""Durations of a device in virtual time: training, transfers, message latency.

`MemberTimes` holds them in seconds, given by the caller or taken from an emulated device's profile;
a `DeviceClock` advances by them as the device works.
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
    """Durations of a device's work. Raises `ConfigError` for impossible values."""

    step_s: float = 0.0
    """Seconds of a training step on the whole model; a submodel's step takes its share of the
    multiply-accumulates, of each width it trains. Ignored for emulated devices, which have a
    profile."""
    down_bytes_s: float = inf
    """Bytes per second from the coordinator; `up_bytes_s` is the rate to it."""
    up_bytes_s: float = inf
    latency_s: float = 0.0
    """Latency of a message in either direction, in seconds."""

    def __post_init__(self) -> None:
        for name in ("step_s", "latency_s"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name} must be 0 seconds or more, not {getattr(self, name)!r}")
        for name in ("down_bytes_s", "up_bytes_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)!r}")


def times_of(emulation: Emulation, *, latency_s: float = 0.0) -> MemberTimes:
    """Return the times of an emulated device's link. Raises `ConfigError` if it has none."""
    network = emulation.board.network
    if network.down_mbit_s is None or network.up_mbit_s is None:
        raise ConfigError(
            f"{emulation.member.name}: the profile of {emulation.board.name} has no network speed; "
            "set up_mbit_s and down_mbit_s, or give the member's times"
        )
    return MemberTimes(
        down_bytes_s=1e6 / 8 * network.down_mbit_s.value,
        up_bytes_s=1e6 / 8 * network.up_mbit_s.value,
        latency_s=latency_s,
    )


class DeviceClock:
    """The clock of a device that is not emulated. It advances only as the device waits or works."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._now_s = 0.0

    def clock(self) -> float:
        """Virtual seconds since the run began."""
        return self._now_s

    def wait_until(self, now_s: float) -> None:
        """Advance to this time; does nothing if it has already passed."""
        self._now_s = max(self._now_s, now_s)

    def spend(self, steps: float) -> None:
        """Advance by the time of this many training steps on the whole model."""
        self.wait_until(self._now_s + self._step_s * steps)

    def emulated(self, backend: Backend) -> Backend:
        """Return a backend that trains as this one does, in this device's time."""
        plan = backend.plan
        whole = plan.submodel_macs(plan.all_groups())

        def stepping(job: Job) -> Callable[[Batch], None]:
            macs = job.step_macs(plan)

            def stepped(_: Batch) -> None:
                share = next(macs) / whole if whole else 1.0
                self.wait_until(self._now_s + self._step_s * share)

            return stepped

        return TimedBackend(backend, stepping)
