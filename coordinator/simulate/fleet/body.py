"""The body of a simulated device: its time, battery and warmth as it waits, trains and transfers.

Rules, which are those of an emulated device (`edge_sdk/decide/emulation`) where both have them:

- A step takes three forward passes of the submodel, with SAM six, counted in multiply-accumulates,
  at the speed of all of the board's cores less what other programs use, times the population's
  `work`.
- While training, the device draws `train_w`; while waiting `idle_w`, and the share of the
  difference that equals the load of other programs. A charger gives `CHARGER_W`. The battery stays
  between empty and full, and an empty device goes on: gates are there to prevent that.
- A board whose profile has `throttle_c` has a warmth, 0 at the temperature around it and 1 at
  `throttle_c`. Training and rest move it exponentially; `warm_s` of training take a cool device to
  1. From there on it is as slow as `sustained_ratio` says, if that is known.
- A gate that closes during training stops it after the step in which it closed. It is looked for
  at the end and, if closed there, by halving: a gate that closes and opens again within one
  training is not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from coordinator.simulate.fleet.population import DeviceKind, DevicePopulation
from edge_sdk.decide.budget import DAY_S
from edge_sdk.decide.emulation.emulation import CHARGER_W, MIB, REFERENCE_MACS_PER_S
from edge_sdk.decide.gates import DAY_MINUTES, Gate, closed_gate
from edge_sdk.machine.board import Quantity
from edge_sdk.machine.snapshot import Battery, Heat, MemoryState, Network, Snapshot, Trip, Zone
from edge_sdk.protocol.streams import stream

HOTTEST = 1 / (1 - math.exp(-1))
"""Warmth that endless training leads to; `warm_s` lead to 1."""
NO_BATTERY = Battery(present=False)
UNKNOWN = Heat()
METERED, FREE = Network(metered=True), Network(metered=False)


@dataclass(frozen=True)
class Nature:
    """Properties that the devices of a kind share, as plain numbers."""

    kind: DeviceKind
    population: DevicePopulation

    @cached_property
    def macs_per_s(self) -> float:
        """Multiply-accumulates of training per second, with nothing else running."""
        return REFERENCE_MACS_PER_S.value * _value(self.kind.board.speed.speed_ratio)

    @cached_property
    def train_w(self) -> float:
        """Watts while training."""
        return _value(self.kind.board.power.train_w)

    @cached_property
    def idle_w(self) -> float:
        """Watts while nothing happens."""
        return _value(self.kind.board.power.idle_w)

    @cached_property
    def capacity_j(self) -> float | None:
        """Joules of a full battery; None: there is none."""
        battery = self.kind.board.battery
        return None if battery is None else 3600 * battery.battery_wh.value

    @cached_property
    def throttle_c(self) -> float | None:
        """Temperature at which the board slows down; None: unknown."""
        throttle = self.kind.board.heat.throttle_c
        if throttle is None or throttle.value <= self.population.ambient_c:
            return None
        return throttle.value

    @cached_property
    def sustained(self) -> float:
        """Speed when hot over speed when cold."""
        ratio = self.kind.board.heat.sustained_ratio
        return 1.0 if ratio is None or self.throttle_c is None else ratio.value

    @cached_property
    def down_bytes_s(self) -> float:
        """Bytes per second that a device receives."""
        return 1e6 / 8 * (self.kind.down_mbit_s or _value(self.kind.board.network.down_mbit_s))

    @cached_property
    def up_bytes_s(self) -> float:
        """Bytes per second that a device sends."""
        return 1e6 / 8 * (self.kind.up_mbit_s or _value(self.kind.board.network.up_mbit_s))

    @cached_property
    def radio_w(self) -> tuple[float, float]:
        """Watts of receiving and of sending; 0 where the profile has none."""
        power = self.kind.board.power
        return _value(power.wifi_receive_w), _value(power.wifi_send_w)

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """Levels whose costs a device predicts, largest first."""
        return tuple(sorted({1.0, *self.kind.policy.offered_levels()}, reverse=True))

    @cached_property
    def trips(self) -> tuple[Trip, ...]:
        """The temperature at which the system acts."""
        celsius = self.throttle_c
        return () if celsius is None else (Trip(kind="passive", celsius=celsius),)


class Body:
    """One device, as far as physics goes. Made when the device first acts."""

    __slots__ = (
        "battery_j",
        "load",
        "lowest_j",
        "memory",
        "nature",
        "now_s",
        "plugged",
        "shift",
        "train_j",
        "train_s",
        "warmth",
    )

    def __init__(self, nature: Nature, name: str, seed: int) -> None:
        """The device draws what is its own from a stream of its name."""
        kind, draws = nature.kind, stream(seed, name, "habits")
        percent = 0.0 if kind.battery_percent is None else draws.uniform(*kind.battery_percent)
        self.nature = nature
        self.now_s = 0.0
        """Time of the device's clock, in seconds since the simulation began."""
        self.load = float(draws.uniform(*kind.background_load))
        self.shift = int(draws.integers(-kind.spread_minutes, kind.spread_minutes, endpoint=True))
        """Minutes by which its hours are later than its kind's."""
        capacity = nature.capacity_j
        self.battery_j = None if capacity is None else capacity * float(percent) / 100
        self.lowest_j = self.battery_j
        """The least that was ever in the battery."""
        self.plugged = (0.0, False)
        """Until when what is known of its charger holds, and if it is on it."""
        self.warmth = 0.0
        self.train_s = 0.0
        """Seconds of training so far."""
        self.train_j = 0.0
        """Joules of training and of transfers so far, above what the device draws anyway."""
        memory = kind.board.memory
        self.memory = MemoryState(
            total_bytes=MIB * memory.memory_mb.value,
            # Assumes that others use the same share of memory as of the processor.
            available_bytes=None
            if memory.app_mb is None
            else MIB * memory.app_mb.value * (1 - self.load),
        )

    # -- what it is now -----------------------------------------------------------------------

    @property
    def minute(self) -> int:
        """Minute of the local day."""
        return (self.nature.population.starts + int(self.now_s // 60)) % DAY_MINUTES

    @property
    def charging(self) -> bool:
        """True while it is on its charger."""
        if self.now_s >= self.plugged[0]:
            self.plugged = self._plugged_s(), self._is_within(self.nature.kind.charging_hours)
        return self.plugged[1]

    @property
    def metered(self) -> bool:
        """True while its traffic costs money."""
        kind = self.nature.kind
        return kind.network == "mobile" and not self._is_within(kind.wifi_hours)

    @property
    def lowest_percent(self) -> float | None:
        """Lowest charge of the battery so far; None: there is no battery."""
        capacity = self.nature.capacity_j
        return None if self.lowest_j is None or not capacity else 100 * self.lowest_j / capacity

    def snapshot(self) -> Snapshot:
        """Return the device's state, as its probe would; see `Probe`."""
        capacity, throttle_c = self.nature.capacity_j, self.nature.throttle_c
        battery, heat = NO_BATTERY, UNKNOWN
        if self.battery_j is not None and capacity is not None:
            battery = Battery(
                present=True,
                percent=min(100.0, 100 * self.battery_j / capacity),
                charging=self.charging,
                capacity_wh=capacity / 3600,
            )
        if throttle_c is not None:
            celsius = self._celsius(throttle_c)
            heat = Heat(zones=(Zone(name="board", celsius=celsius, trips=self.nature.trips),))
        return Snapshot(
            memory=self.memory,
            battery=battery,
            heat=heat,
            network=METERED if self.metered else FREE,
        )

    def _celsius(self, throttle_c: float) -> float:
        """Return the temperature of a board that slows down at this one."""
        ambient_c = self.nature.population.ambient_c
        return ambient_c + self.warmth * (throttle_c - ambient_c)

    def gate(self) -> Gate | None:
        """Return the gate that forbids training now; None: all are open."""
        return closed_gate(self.nature.kind.policy.limits, self.snapshot(), self.minute)

    def train_time_s(self, macs: float) -> float:
        """Seconds that this many multiply-accumulates of training take a cool device."""
        nature = self.nature
        return nature.population.work * macs / (nature.macs_per_s * (1 - self.load))

    # -- what it does -------------------------------------------------------------------------

    def wait_until(self, now_s: float) -> None:
        """Let time pass, waiting; nothing happens if it is later already."""
        if now_s > self.now_s:
            nature = self.nature
            watts = nature.idle_w + self.load * (nature.train_w - nature.idle_w)
            self._pass(now_s - self.now_s, watts, 0.0)

    def receive(self, size_bytes: float) -> None:
        """Let the time of a download pass."""
        seconds = size_bytes / self.nature.down_bytes_s
        self.wait_until(self.now_s + seconds)
        self._spend(seconds, self.nature.radio_w[0])

    def sending_s(self, size_bytes: float) -> float:
        """Return the seconds of an upload and draw its energy; time passes as it may."""
        seconds = size_bytes / self.nature.up_bytes_s
        self._spend(seconds, self.nature.radio_w[1])
        return seconds

    def train(self, macs: float, steps: int) -> int:
        """Train so many equal steps and return how many were done when a gate closed.

        `macs` are those of all steps together.
        """
        before = (
            self.now_s,
            self.battery_j,
            self.lowest_j,
            self.warmth,
            self.train_s,
            self.train_j,
        )
        self._train(macs)
        if self._is_safe() or self.gate() is None:
            return steps
        done, most = 0, steps  # open after `done` steps, closed after `most`
        while most - done > 1:
            half = (done + most) // 2
            self._back_to(before)
            self._train(macs * half / steps)
            done, most = (done, half) if self.gate() is not None else (half, most)
        self._back_to(before)
        self._train(macs * most / steps)
        # A gate that closed in the last step stops nothing any more.
        return most

    def _back_to(
        self, before: tuple[float, float | None, float | None, float, float, float]
    ) -> None:
        self.now_s, self.battery_j, self.lowest_j, self.warmth, self.train_s, self.train_j = before
        self.plugged = (0.0, False)

    def _is_safe(self) -> bool:
        """True if no gate can be closed, as far as a quick look tells."""
        nature, limits = self.nature, self.nature.kind.policy.limits
        capacity, throttle_c = nature.capacity_j, nature.throttle_c
        if limits.quiet_hours is not None:
            return False
        if throttle_c is not None and self._celsius(throttle_c) >= throttle_c - (
            limits.heat_margin_c + 1
        ):
            return False
        if nature.kind.network == "mobile":
            return False
        if self.battery_j is None or capacity is None:
            return True
        return self.battery_j > capacity * (limits.battery_floor + 1) / 100

    def _train(self, macs: float) -> None:
        nature, seconds = self.nature, self.train_time_s(macs)
        if nature.sustained < 1:
            cool_s = self._until_hot_s()
            if seconds > cool_s:
                seconds = cool_s + (seconds - cool_s) / nature.sustained
        self._pass(seconds, nature.train_w, HOTTEST)
        self.train_s += seconds
        self.train_j += (nature.train_w - nature.idle_w) * seconds

    def _until_hot_s(self) -> float:
        """Seconds of training until the board slows itself down."""
        if self.warmth >= 1:
            return 0.0
        return self.nature.population.warm_s * math.log((HOTTEST - self.warmth) / (HOTTEST - 1))

    def _spend(self, seconds: float, watts: float) -> None:
        """Draw energy beyond that of the time that passes."""
        self.train_j += watts * seconds
        if self.battery_j is not None and not self.charging:
            self._charge_to(max(0.0, self.battery_j - watts * seconds))

    def _pass(self, seconds: float, watts: float, warmth: float) -> None:
        """Let time pass at this power, in pieces where a charger comes and goes."""
        end_s, capacity = self.now_s + seconds, self.nature.capacity_j
        if self.battery_j is None or capacity is None:
            self.now_s = end_s
        while self.now_s < end_s and self.battery_j is not None and capacity is not None:
            fed = CHARGER_W.value if self.charging else 0.0
            until_s = min(end_s, self.plugged[0])
            charge = self.battery_j + (fed - watts) * (until_s - self.now_s)
            self._charge_to(min(capacity, max(0.0, charge)))
            self.now_s = until_s
        if self.nature.throttle_c is not None:
            kept = math.exp(-seconds / self.nature.population.warm_s)
            self.warmth = warmth + (self.warmth - warmth) * kept

    def _charge_to(self, joules: float) -> None:
        self.battery_j = joules
        if self.lowest_j is None or joules < self.lowest_j:
            self.lowest_j = joules

    def _plugged_s(self) -> float:
        """Time at which the charger is next plugged in or out."""
        hours = self.nature.kind.charging_hours
        if hours is None:
            return math.inf
        starts = self.nature.population.starts
        marks = (60.0 * (minute + self.shift - starts) for minute in hours)
        return min(mark + DAY_S * ((self.now_s - mark) // DAY_S + 1) for mark in marks)

    def _is_within(self, hours: tuple[int, int] | None) -> bool:
        if hours is None:
            return False
        start, end = hours
        minute = (self.minute - self.shift) % DAY_MINUTES
        return start <= minute < end if start <= end else minute >= start or minute < end


def _value(quantity: Quantity | None) -> float:
    return 0.0 if quantity is None else quantity.value
