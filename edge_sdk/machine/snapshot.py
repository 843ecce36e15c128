"""The state of a device at one moment: cores, memory, battery, heat, power, network.

Rules:
- Every field may be None: *unknown*. Unknown is neither plenty nor zero; code that decides must say
  what it does without the value. A battery known to be absent is `Battery(present=False)`.
- Known values are finite and within the range of their field.
- `ages_s` gives the age of values; one that is not listed was read for this snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from edge_sdk.program.plain import ProfileError, from_plain, to_plain


def _within(low: float, high: float = math.inf) -> Any:
    """Make a field that is None unless given; known values are from `low` to `high`."""
    return field(default=None, metadata=_range(low, high))


def _range(low: float, high: float = math.inf) -> dict[str, Any]:
    return {"range": (low, high)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreClass:
    """Identical usable cores; a big.LITTLE processor has two or three such classes."""

    cores: int = field(metadata=_range(1))
    max_mhz: float | None = _within(0)
    capacity: float | None = _within(0)
    """Relative speed according to the kernel; its fastest core has 1024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Processor time that this program can get."""

    cores: float | None = _within(0)
    """Cores usable at once: online, allowed by affinity, within the quota (0.3: a third)."""
    load: float | None = _within(0)
    """Programs running or waiting on the whole machine, mean of the last minute."""
    busy: float | None = _within(0, 1)
    """Share of the machine's processor time in use since the previous snapshot."""
    mhz: float | None = _within(0)
    """Current clock, mean of the usable cores."""
    max_mhz: float | None = _within(0)
    """Highest clock of the fastest usable core."""
    pressure: float | None = _within(0, 100)
    """Percent of the last 10 s in which some program waited for a core (PSI some avg10)."""
    classes: tuple[CoreClass, ...] | None = None
    """Classes of cores, fastest first; one: all usable cores are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """Memory that this program can get."""

    total_bytes: float | None = _within(0)
    """Memory of the machine, or the tightest limit of a control group."""
    available_bytes: float | None = _within(0)
    """Memory left without swapping or being killed: the least of machine and groups."""
    pressure: float | None = _within(0, 100)
    """Percent of the last 10 s in which some program waited for memory (PSI some avg10)."""
    unified: bool | None = None
    """True: the GPU's memory is taken from this same memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Battery:
    """The device's battery; several count as one."""

    present: bool | None = None
    """False: known to have none, so it runs on mains."""
    percent: float | None = _within(0, 100)
    charging: bool | None = None
    """True: externally powered and not drained, whether charging, full or held at a limit."""
    watts: float | None = _within(0, 1_000)
    """Power drawn from the battery now; None while it charges, as it then says nothing."""
    capacity_wh: float | None = _within(0, 100_000)
    """Capacity when full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """A temperature at which the system acts; `kind` is the kernel's word."""

    kind: str
    """active (fan), passive (slows down), hot, critical (shuts down)."""
    celsius: float = field(metadata=_range(0, 250))


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """A place with a known temperature."""

    name: str
    celsius: float = field(metadata=_range(-100, 250))
    trips: tuple[Trip, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """The device's temperature, and its effect."""

    zones: tuple[Zone, ...] | None = None
    throttling: bool | None = None
    """True: the processor is slowed down now."""
    status: int | None = _within(0, 6)
    """Android's thermal status: 0 none, 1 light, 2 moderate, 3 severe, 4 critical, 5 emergency,
    6 shutdown. A host app on iOS pushes 0, 1, 3, 4 for nominal, fair, serious, critical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """The device's power draw, from any supply."""

    rails: Mapping[str, float] | None = None
    """Watts by sensor name; a rail may include others."""
    total_watts: float | None = _within(0, 10_000)
    """Power of the module, without its carrier board."""
    undervoltage: bool | None = None
    """True: the supply is too weak now."""
    mode: str | None = None
    """Power mode set by the owner, such as MAXN; times and watts hold for one mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The graphics processor."""

    busy: float | None = _within(0, 1)
    """Share of its time in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The outgoing link, by the default route."""

    metered: bool | None = None
    """True: the link is billed per byte, or the system guesses so."""
    up_bytes_per_s: float | None = _within(0)
    """Sent by all programs since the previous snapshot: the use of the link, not its capacity."""
    down_bytes_per_s: float | None = _within(0)


PARTS: dict[str, type[Any]] = {
    "cpu": Cpu,
    "memory": MemoryState,
    "battery": Battery,
    "heat": Heat,
    "power": Power,
    "gpu": Gpu,
    "network": Network,
}
"""Parts of a snapshot; a path is a part's name, a dot and a field's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that is known about a device at one moment. `Snapshot()` knows nothing."""

    cpu: Cpu = Cpu()
    memory: MemoryState = MemoryState()
    battery: Battery = Battery()
    heat: Heat = Heat()
    power: Power = Power()
    gpu: Gpu = Gpu()
    network: Network = Network()
    ages_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since a value was read, by path, such as `battery.percent`."""

    def known(self) -> dict[str, Any]:
        """Return every known value by its path."""
        found = {}
        for part, (nothing, names) in _FIELDS.items():
            content = getattr(self, part)
            if content is not nothing:
                for path, name in names:
                    value = getattr(content, name)
                    if value is not None:
                        found[path] = value
        return found

    def age_s(self, path: str) -> float | None:
        """Return the age of a value, such as `battery.percent`; None: it is unknown."""
        part, _, name = path.partition(".")
        if getattr(getattr(self, part), name) is None:
            return None
        return self.ages_s.get(path, 0.0)

    def filled_from(self, other: Snapshot) -> Snapshot:
        """Return this snapshot with unknown values taken from `other`.

        Zones and rails add up: those of `other` with new names are appended, and together they are
        as old as the older ones.
        """
        mine, theirs = self.known(), other.known()
        ages = dict(self.ages_s)
        for path, value in theirs.items():
            if path not in mine:
                mine[path] = value
                if path in other.ages_s:
                    ages[path] = other.ages_s[path]
        if self.heat.zones is not None and other.heat.zones is not None:
            names = {zone.name for zone in self.heat.zones}
            more = [zone for zone in other.heat.zones if zone.name not in names]
            mine["heat.zones"] = (*self.heat.zones, *more)
            _keep_older(ages, other.ages_s, "heat.zones")
        if self.power.rails is not None and other.power.rails is not None:
            mine["power.rails"] = {**other.power.rails, **self.power.rails}
            _keep_older(ages, other.ages_s, "power.rails")
        return _assembled(mine, ages)

    def aged(self, seconds: float) -> Snapshot:
        """Return this snapshot with every value this much older."""
        ages = {path: self.ages_s.get(path, 0.0) + seconds for path in self.known()}
        return replace(self, ages_s=ages)

    def no_older_than(self, max_age_s: float) -> Snapshot:
        """Return this snapshot without values that are too old."""
        return self._without({path for path, age in self.ages_s.items() if age > max_age_s})

    def credible(self) -> tuple[Snapshot, list[str]]:
        """Return this snapshot without impossible values, and a sentence for each of those."""
        wrong = {}
        for part, (nothing, _) in _FIELDS.items():
            content = getattr(self, part)
            if content is nothing:
                continue
            for path, value, (low, high) in _ranged(content, part):
                if not low <= value <= high or not math.isfinite(value):
                    wrong[path] = f"{path} = {value} is not from {low} to {high}"
        return self._without(set(wrong)), list(wrong.values())

    def _without(self, paths: set[str]) -> Snapshot:
        if not paths:
            return self
        kept = {path: value for path, value in self.known().items() if path not in paths}
        return _assembled(kept, {p: age for p, age in self.ages_s.items() if p in kept})

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values, for logs and JSON, without unknown ones."""
        return {name: value for name, value in to_plain(self).items() if value}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Snapshot:
        """Read what `to_dict` returned or a host app sent; missing or None means unknown.

        Raises `ProfileError` for unknown keys, wrong types and impossible values.
        """
        snapshot = from_plain(cls, content, "")
        known = snapshot.known()
        for path, age in snapshot.ages_s.items():
            if path not in known or age < 0:
                raise ProfileError(f"ages_s.{path} = {age}: give seconds, for a known value")
        _, wrong = snapshot.credible()
        if wrong:
            raise ProfileError(f"{'; '.join(wrong)}; leave out unknown values")
        return snapshot


_FIELDS = {
    part.name: (part.default, [(f"{part.name}.{each.name}", each.name) for each in fields(kind)])
    for part, kind in zip(fields(Snapshot), PARTS.values(), strict=False)
}
"""Of every part: the one that knows nothing, and its paths and names."""


class Probe(Protocol):
    """Tells what the device looks like now."""

    def snapshot(self) -> Snapshot:
        """At once; never raises."""
        ...


def _assembled(values: Mapping[str, Any], ages_s: Mapping[str, float]) -> Snapshot:
    parts: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        part, _, name = path.partition(".")
        parts.setdefault(part, {})[name] = value
    made: dict[str, Any] = {part: PARTS[part](**content) for part, content in parts.items()}
    return Snapshot(**made, ages_s=ages_s)


def _keep_older(ages: dict[str, float], others: Mapping[str, float], path: str) -> None:
    if path in others:
        ages[path] = max(ages.get(path, 0.0), others[path])


def _ranged(value: Any, path: str) -> list[tuple[str, float, tuple[float, float]]]:
    """Return numbers with a range in a dataclass; those inside its tuples have the tuple's path."""
    found: list[tuple[str, float, tuple[float, float]]] = []
    for each in fields(value):
        content = getattr(value, each.name)
        own = f"{path}.{each.name}" if path in PARTS else path
        if "range" in each.metadata and content is not None:
            found.append((own, content, each.metadata["range"]))
        elif isinstance(content, tuple):
            for item in content:
                found += _ranged(item, own)
        elif isinstance(content, Mapping):
            found += [(own, number, (0.0, 10_000.0)) for number in content.values()]
    return found
