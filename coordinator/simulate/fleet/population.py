"""A population: how many devices of which kind a simulated fleet has, and how they live.

A population is a TOML file: settings of the day, then one table `[[kinds]]` for each kind of
device; docs/fleets.md describes it. Where a key takes two numbers, every device draws its own
between them, from a stream of its name: the same seed gives the same devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from coordinator.errors import ConfigError
from coordinator.simulate.fleet.trace import Availability, read_trace
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation.fleet import BoardProfile, Fleet, FleetMember, Minute
from edge_sdk.decide.gates import DAY_MINUTES, Hours
from edge_sdk.machine.board import LIMITS, LinkKind
from edge_sdk.program.settings import (
    Count,
    Example,
    Seconds,
    Spelling,
    Within,
    check_fields,
    read_table,
    read_toml,
)
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.topics import check_device

Draw = tuple[float, float]
"""From and to; a device's own number lies between."""


def _read_draw(value: Any, _: Path) -> Draw:
    ends = value if isinstance(value, list) else [value, value]
    if len(ends) != 2 or any(isinstance(each, bool) for each in ends):
        raise ValueError
    return float(ends[0]), float(ends[1])


Drawn = Annotated[
    Draw, Spelling(_read_draw, "a number, or two as in [20, 90]", lambda draw: str(list(draw)))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Devices of one kind. Raises `ConfigError` for an impossible one."""

    board: BoardProfile
    """Profile of the devices: a name from docs/devices.md, or a file relative to this one."""
    count: Count = 1
    """Number of these devices."""
    name: str = ""
    """Beginning of their names, which is followed by a number; without it, that of the profile."""
    battery_percent: Drawn | None = None
    """Charge of the battery at the start; devices without a battery have none."""
    charging_hours: Hours | None = None
    """Hours of the day on the charger; without it, never."""
    spread_minutes: Annotated[int, Within(least=0, most=DAY_MINUTES // 2)] = 0
    """Minutes by which a device's hours are earlier or later than those given, at most."""
    background_load: Drawn = (0.0, 0.0)
    """Share of the CPU that other programs use."""
    network: LinkKind = "wifi"
    """Network they are on; mobile ones are metered."""
    wifi_hours: Hours | None = None
    """Hours of the day in which devices on a mobile network have Wi-Fi."""
    up_mbit_s: Annotated[float | None, LIMITS["up_mbit_s"], Example(8)] = None
    """Megabits per second that they send; without it, what the profile says is usual."""
    down_mbit_s: Annotated[float | None, LIMITS["down_mbit_s"], Example(40)] = None
    """Megabits per second that they receive; without it, what the profile says is usual."""
    latency_s: Annotated[float, Within(least=0, most=3600)] = 0.05
    """Seconds that a message takes in either direction."""
    drop_out: Annotated[float, Within(least=0, most=1)] = 0.0
    """Share of trainings in which a device vanishes half-way and has to begin again."""
    back_s: Seconds = 600.0
    """Seconds until a device that vanished is back."""
    policy: Policy = field(default_factory=Policy)
    """Limits that the devices' owners set."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.board.name.replace("_", "-"))
        try:
            check_device(self.name_of(self.count - 1))
        except MessageError as error:
            raise ConfigError(f"name: {error}") from error
        check_fields(self)
        _check_draw("background_load", self.background_load, 0.0, 0.99)
        if self.battery_percent is not None:
            _check_draw("battery_percent", self.battery_percent, 0.0, 100.0)
        if (self.battery_percent is None) != (self.board.battery is None):
            has = "has no battery" if self.board.battery is None else "has a battery"
            raise ConfigError(f"battery_percent = {self.battery_percent}: {self.board.name} {has}")
        if self.charging_hours is not None and self.board.battery is None:
            raise ConfigError(f"charging_hours: {self.board.name} has no battery")
        if self.wifi_hours is not None and self.network != "mobile":
            raise ConfigError(f'wifi_hours: for network = "mobile", not {self.network!r}')
        power, needed = self.board.power, {"speed.speed_ratio": self.board.speed.speed_ratio}
        if self.board.battery is not None:
            needed |= {"power.idle_w": power.idle_w, "power.train_w": power.train_w}
        for key, quantity in needed.items():
            if quantity is None:
                raise ConfigError(
                    f"{self.board.name} cannot be simulated: its profile has no {key}"
                )
        for key in ("up_mbit_s", "down_mbit_s"):
            if getattr(self, key) is None and getattr(self.board.network, key) is None:
                raise ConfigError(f"{key}: the profile of {self.board.name} has none; give it here")

    def name_of(self, number: int) -> str:
        """Return the name of the n-th device of this kind, from 0; alone, it has no number."""
        if self.count == 1:
            return self.name
        return f"{self.name}-{number:0{len(str(self.count - 1))}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePopulation:
    """The devices of a simulated fleet, and their day. Raises `ConfigError`."""

    kinds: tuple[DeviceKind, ...]
    """The kinds of devices, in the order of the file."""
    starts: Minute = 12 * 60
    """Time of the day at which the simulation begins."""
    work: Annotated[float, Within(least=1e-3, most=1e9)] = 1.0
    """Steps of a device that one step of the run stands for."""
    ambient_c: Annotated[float, Within(least=-40, most=60)] = 22.0
    """Temperature around the devices."""
    warm_s: Seconds = 600.0
    """Seconds of training after which a cool device is so warm that it slows itself down."""
    price_per_gb: Annotated[float, Within(least=0)] = 0.0
    """Price of a gigabyte of metered traffic, in any currency."""
    trace: Annotated[Path | None, Example("availability.csv")] = None
    """File with the times at which devices are reachable (docs/fleets.md); without it, always."""
    repeat_s: Annotated[Seconds | None, Example(172_800)] = None
    """Period of the trace in seconds, after which it comes again; without it, it does not."""

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ConfigError("kinds: give at least one, as a table [[kinds]]")
        check_fields(self)
        if self.repeat_s is not None and self.trace is None:
            raise ConfigError("repeat_s: there is no trace to repeat")
        (name, count), *_ = Counter(kind.name for kind in self.kinds).most_common(1)
        if count > 1:
            raise ConfigError(f"kinds: two are called {name!r}; give one another name")

    def __len__(self) -> int:
        """Return the number of devices."""
        return sum(kind.count for kind in self.kinds)

    def devices(self) -> Iterator[tuple[str, DeviceKind]]:
        """Yield the name and the kind of every device."""
        for kind in self.kinds:
            for number in range(kind.count):
                yield kind.name_of(number), kind

    def availability(self) -> Availability | None:
        """Read the trace; None if there is none. Raises `ConfigError`."""
        return None if self.trace is None else read_trace(self.trace, repeat_s=self.repeat_s)


def load_population(path: str | Path) -> DevicePopulation:
    """Read a population from its file. Raises `ConfigError`: which file, kind and key."""
    return read_table(DevicePopulation, read_toml(path), label=f"{path}: ", base=Path(path).parent)


def population_of(
    fleet: Fleet, devices: int | None = None, policy: Policy | None = None
) -> DevicePopulation:
    """Make a population of a fleet's members, each as often as `devices` have place for.

    `devices` None: each once. `policy`: the owners' limits; None: those that are usual.
    """
    total = len(fleet) if devices is None else devices
    counts = [total // len(fleet) + (place < total % len(fleet)) for place in range(len(fleet))]
    kinds = [
        _kind_of(member, count, policy or Policy())
        for member, count in zip(fleet, counts, strict=True)
        if count
    ]
    return DevicePopulation(kinds=tuple(kinds), starts=fleet.starts, work=fleet.work)


def _kind_of(member: FleetMember, count: int, policy: Policy) -> DeviceKind:
    percent, load = member.battery_percent, member.background_load
    return DeviceKind(
        board=member.board,
        count=count,
        name=member.name,
        battery_percent=None if percent is None else (percent, percent),
        charging_hours=(0, DAY_MINUTES) if member.charging else member.charging_hours,
        background_load=(load, load),
        network=member.network,
        wifi_hours=member.wifi_hours,
        up_mbit_s=member.up_mbit_s,
        down_mbit_s=member.down_mbit_s,
        policy=policy,
    )


def _check_draw(key: str, draw: Draw, least: float, most: float) -> None:
    if not least <= draw[0] <= draw[1] <= most:
        raise ConfigError(f"{key} = {list(draw)}: must be from {least:g} to {most:g}, lower first")
