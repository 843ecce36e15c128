"""Energy: read a power sensor repeatedly while the device works, and integrate.

A device with a sensor knows its power (`Power.total_watts` of its rails, or the power drawn from
its battery); the meter reads it ten times a second in its own thread. Without a sensor there is
nothing to measure, and the result is None.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_sdk.machine.snapshot import Probe

PERIOD_S = 0.1
MAX_AGE_S = 2.0
"""Largest age of a value that counts as current; slower sensors cannot follow training."""
MAX_GAP_S = 5.0
"""Longest time between two readings; over a longer gap the energy is unknown."""

Watts = Callable[[], float | None]
"""Returns the power drawn now; None: unknown. Any thread may call it."""


def probed_watts(probe: Probe) -> Watts:
    """Return a reader of the whole device's power: from its rails, else from its battery.

    It reads no other sensors of this machine, so that the measurement itself adds little.
    """
    only = getattr(probe, "only", None)
    sensors: Probe = probe if only is None else only("power", "battery")

    def watts() -> float | None:
        snapshot = sensors.snapshot().no_older_than(MAX_AGE_S)
        total = snapshot.power.total_watts
        return snapshot.battery.watts if total is None else total

    return watts


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy drawn over some seconds."""

    seconds: float
    gross_j: float
    idle_w: float | None = None
    """Power drawn without the work; None: unknown."""

    @property
    def net_j(self) -> float | None:
        """Energy above idle, never negative; None: idle power is unknown."""
        if self.idle_w is None:
            return None
        return max(0.0, self.gross_j - self.idle_w * self.seconds)

    @property
    def net_w(self) -> float | None:
        """Average power above idle; None: unknown."""
        return None if self.net_j is None or not self.seconds else self.net_j / self.seconds


def integrate(readings: Sequence[tuple[float, float]]) -> float | None:
    """Integrate readings (seconds of a clock, watts), in order, by trapezoids; returns joules.

    None: fewer than two readings, or a gap of more than `MAX_GAP_S`.
    """
    if len(readings) < 2:
        return None
    joules = 0.0
    for (start, before), (end, after) in pairwise(readings):
        if end - start > MAX_GAP_S:
            return None
        joules += (end - start) * (before + after) / 2
    return joules


class EnergyMeter:
    """Reads watts in a thread while its block runs.

    with EnergyMeter(probed_watts(probe), idle_w=2.1) as meter:
        train()
    meter.energy
    """

    def __init__(
        self,
        watts: Watts,
        *,
        idle_w: float | None = None,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watts = watts
        self._idle_w = idle_w
        self._period_s = period_s
        self._clock = clock
        self._readings: list[tuple[float, float]] = []
        self._silent = False
        """True if the sensor gave no value at the end."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="energy", daemon=True)

    def __enter__(self) -> EnergyMeter:
        self._read()
        if self._readings:
            self._thread.start()  # a device without a sensor needs no thread
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread.is_alive():
            self._done.set()
            self._thread.join()
            self._silent = not self._read()

    @property
    def energy(self) -> Energy | None:
        """Energy drawn from the beginning of the block to its end; None: unknown.

        A sensor that fell silent on the way, such as a battery that now charges, gives None.
        """
        joules = integrate(self._readings)
        if joules is None or self._silent:
            return None
        seconds = self._readings[-1][0] - self._readings[0][0]
        return Energy(seconds=seconds, gross_j=joules, idle_w=self._idle_w)

    @property
    def hz(self) -> float | None:
        """Average readings per second; None: the sensor was not read."""
        if len(self._readings) < 2:
            return None
        return (len(self._readings) - 1) / (self._readings[-1][0] - self._readings[0][0])

    def _run(self) -> None:
        while not self._done.wait(self._period_s):
            self._read()

    def _read(self) -> bool:
        watts = self._watts()
        if watts is not None:
            self._readings.append((self._clock(), watts))
        return watts is not None


def idle_watts(watts: Watts, seconds: float = 1.0) -> float | None:
    """Measure the power of the device while it idles for this long; None: no sensor."""
    if watts() is None:
        return None
    with EnergyMeter(watts) as meter:
        time.sleep(seconds)
    return None if meter.energy is None else meter.energy.gross_j / meter.energy.seconds
