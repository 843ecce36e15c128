"""Makes a profile of this machine from measurements, for the emulator and the cost model.

Speed is counted in multiply-accumulates of training per second, as the emulator counts them, over
those of a reference core: the median over families and levels. The shipped profiles use a different
measure, Geekbench's; a profile made here gives the seconds that this SDK takes on this machine. One
number cannot be right for every model: `profile_errors` tells its error.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.device.own_profile.profiling import Endurance, Pace
from benchmarks.device.results import Machine
from benchmarks.device.trial.machine import LEAST_RISE, others, power_sensor, usable_threads
from benchmarks.report.figures import Figure, FigureError
from edge_sdk.decide.emulation.emulation import MIB, REFERENCE_MACS_PER_S, Emulation
from edge_sdk.decide.emulation.fleet import FleetMember
from edge_sdk.machine.board import (
    LIMITS,
    BatterySpec,
    Board,
    CoreSpec,
    HeatSpec,
    Kind,
    MemorySpec,
    PowerSpec,
    Quantity,
    Sensor,
    SpeedSpec,
)
from edge_sdk.machine.probe import ProbeName
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Names of a machine, and the conditions of its numbers."""

    name: str
    title: str
    kind: Kind
    soc: str
    core: str
    circumstances: str
    """Date, system, versions, power mode, cooling: appended to the source of every number."""


def identify(
    files: Files,
    probe: ProbeName,
    machine: Machine,
    *,
    name: str,
    date: str,
    title: str | None = None,
    kind: Kind | None = None,
) -> Identity:
    """Identify the machine; values given by the owner take precedence (None: not given)."""
    core = _core(files)
    compatible = (files.text("proc/device-tree/compatible") or "").split("\0")[-1]
    return Identity(
        name=name,
        title=title or machine.model or core,
        kind=kind or _kind(probe, files),
        soc=compatible or core,
        core=core,
        circumstances=_circumstances(machine, date),
    )


def _core(files: Files) -> str:
    cpuinfo = files.text("proc/cpuinfo") or ""
    if named := re.search(r"^model name\s*:\s*(\S.*)$", cpuinfo, re.M):
        return named[1].strip()
    core = "unknown"
    if files.is_machine:
        core = platform.processor() or platform.machine() or core
    parts = set(re.findall(r"^CPU part\s*:\s*(0x[0-9a-f]+)$", cpuinfo, re.M))
    return f"{core}, CPU part {parts.pop()}" if len(parts) == 1 else core


def _kind(probe: ProbeName, files: Files) -> Kind:
    if probe == "android":
        return "phone"
    boards = ("raspberry-pi", "jetson")
    return "board" if probe in boards or files.text("proc/device-tree/model") else "computer"


def _circumstances(machine: Machine, date: str) -> str:
    packages = ("tessera-fl", "onnxruntime")
    said = {
        "power mode": machine.power_mode,
        "cooling": machine.cooling,
        "fed by": machine.fed_by,
    }
    return ", ".join(
        [
            f"`tessera-bench profile`, {date}, {machine.system}, Python {machine.python}",
            *(f"{name} {machine.versions[name]}" for name in packages if name in machine.versions),
            *(f"{what} {text}" for what, text in said.items() if text),
        ]
    )


# -- the profile ---------------------------------------------------------------------------------


def make_profile(
    identity: Identity,
    snapshot: Snapshot,
    paces: Sequence[Pace],
    endurance: Endurance | None,
    *,
    idle_w: float | None,
    heat: bool,
) -> tuple[Board, list[str]]:
    """Return a profile, and a sentence for each number that it lacks.

    `snapshot` and `idle_w` (None: no sensor) are from before the machine had work. `heat`: the long
    training was long enough to show the effect of heat. Raises `ConfigError` for impossible values,
    such as a phone without a battery.
    """
    lacking: list[str] = []
    if (beside := others(snapshot)) is not None:
        identity = replace(identity, circumstances=f"{identity.circumstances}, {beside}")
    board = Board(
        name=identity.name,
        title=identity.title,
        kind=identity.kind,
        soc=identity.soc,
        cores=_cores(identity, snapshot, lacking),
        memory=_memory(identity, snapshot, lacking),
        speed=_speed(identity, paces, lacking),
        power=_power(identity, snapshot, idle_w, endurance, lacking),
        battery=_battery(identity, snapshot),
        heat=_heat(identity, snapshot, endurance if heat else None, lacking),
    )
    if board.battery is None and snapshot.battery.present is not False:
        lacking.append("battery.battery_wh: no battery tells its capacity")
    if board.battery is not None and board.power.train_w is None:
        lacking.append("with a battery and without watts this profile cannot be emulated")
    lacking.append(
        "network: nothing was sent; measure your link (iperf3, say) and add [network] with link, "
        "up_mbit_s and down_mbit_s"
    )
    return board, lacking


def profile_errors(board: Board, paces: Sequence[Pace]) -> list[float]:
    """|emulated ÷ measured − 1| of the seconds per step of each pace."""
    # Without the battery, whose watts may be unknown: seconds do not depend on them.
    fed = replace(board, kind="board", battery=None)
    most, errors = max(pace.threads for pace in paces), []
    for pace in paces:
        one = pace.threads < most and board.speed.one_core_ratio
        speed = SpeedSpec(speed_ratio=one) if one else board.speed
        emulation = Emulation(FleetMember(name="board", board=replace(fed, speed=speed)))
        errors.append(abs(emulation.step_s(pace.macs) / pace.step_s - 1))
    return errors


def profile_figures(board: Board, paces: Sequence[Pace]) -> list[Figure]:
    """Return the figures of a run."""
    errors = profile_errors(board, paces)
    figures = [
        Figure("profile.error", median(errors), "×"),
        Figure("profile.largest_error", max(errors), "×"),
    ]
    speeds = {"speed_ratio": board.speed.speed_ratio, "one_core_ratio": board.speed.one_core_ratio}
    figures += [
        Figure(f"profile.{key}", quantity.value, "×", better="higher")
        for key, quantity in speeds.items()
        if quantity is not None
    ]
    watts = {"idle_w": board.power.idle_w, "train_w": board.power.train_w}
    return figures + [
        Figure(f"profile.{key}", quantity.value, "W")
        for key, quantity in watts.items()
        if quantity is not None
    ]


def _cores(identity: Identity, snapshot: Snapshot, lacking: list[str]) -> tuple[CoreSpec, ...]:
    whole = usable_threads(snapshot)
    classes = snapshot.cpu.classes or ()
    if sum(each.cores for each in classes) != whole:
        # A quota leaves fewer cores than exist, of no particular class.
        classes = ()
    made = [
        CoreSpec(
            core=identity.core
            if each.capacity is None or len(classes) == 1
            else f"{identity.core}, capacity {each.capacity:g}",
            count=_measured(identity, each.cores, "cores that are online and allowed"),
            ghz=_within(
                "ghz",
                None if each.max_mhz is None else each.max_mhz / 1e3,
                identity,
                "cpuinfo_max_freq of cpufreq",
            ),
        )
        for each in classes
    ]
    if not made:
        peak = snapshot.cpu.max_mhz
        made = [
            CoreSpec(
                core=identity.core,
                count=_measured(identity, whole, "cores to be used at once, cut to the quota"),
                ghz=_within(
                    "ghz", None if peak is None else peak / 1e3, identity, "the fastest core's"
                ),
            )
        ]
    if any(each.ghz is None for each in made):
        lacking.append("cores.ghz: the system shows no highest clock (cpufreq)")
    return tuple(made)


def _memory(identity: Identity, snapshot: Snapshot, lacking: list[str]) -> MemorySpec:
    total, free = snapshot.memory.total_bytes, snapshot.memory.available_bytes
    if total is None:
        raise FigureError("the system does not tell how much memory there is; no profile is made")
    memory_mb = _measured(identity, total / MIB, "what the system or the tightest group has")
    app_mb = (
        None
        if free is None
        else _within(
            "app_mb",
            min(free / MIB, memory_mb.value),
            identity,
            "available before the measurement, with all else that ran",
        )
    )
    if app_mb is None:
        lacking.append("memory.app_mb: the system does not tell what is available")
    return MemorySpec(memory_mb=memory_mb, app_mb=app_mb)


def _speed(identity: Identity, paces: Sequence[Pace], lacking: list[str]) -> SpeedSpec:
    most = max(pace.threads for pace in paces)
    one, every = (_rate(paces, threads) for threads in (1, most))
    if one > every:
        lacking.append(
            f"speed.one_core_ratio: one thread was {one / every:.2f} times as fast as {most}, so "
            "it stands for no more than all of them; on a quiet machine measure again"
        )
        note = f"no more than with all cores, though one thread reached {_short(one)}; " + _paced(
            paces, most
        )
        return SpeedSpec(
            speed_ratio=_ratio(identity, every, _paced(paces, most)),
            one_core_ratio=_ratio(identity, every, note),
        )
    return SpeedSpec(
        speed_ratio=_ratio(identity, every, _paced(paces, most)),
        one_core_ratio=_ratio(identity, one, _paced(paces, 1)),
    )


def _rate(paces: Sequence[Pace], threads: int) -> float:
    rates = [pace.macs_per_s for pace in paces if pace.threads == threads]
    return float(f"{median(rates):.4g}")


def _ratio(identity: Identity, rate: float, how: str) -> Quantity:
    reference = REFERENCE_MACS_PER_S.value
    return Quantity(
        float(f"{rate / reference:.4g}"),
        f"= {_short(rate)} / {_short(reference)}: multiply-accumulates of training per second over "
        f"those of a reference core; {how}; {identity.circumstances}",
        "derived",
    )


def _paced(paces: Sequence[Pace], threads: int) -> str:
    own = [pace for pace in paces if pace.threads == threads]
    families = ", ".join(dict.fromkeys(pace.family for pace in own))
    levels = " and ".join(f"{level:.0%}" for level in dict.fromkeys(pace.level for pace in own))
    rates = sorted(pace.macs_per_s for pace in own)
    return (
        f"median of {len(own)}, from {_short(rates[0])} to {_short(rates[-1])}: {families} at "
        f"{levels}, onnx, {threads} thread{'s' if threads > 1 else ''}"
    )


def _power(
    identity: Identity,
    snapshot: Snapshot,
    idle_w: float | None,
    endurance: Endurance | None,
    lacking: list[str],
) -> PowerSpec:
    why = _why_no_watts(snapshot, idle_w, endurance)
    if why is not None or endurance is None:
        lacking.append(f"power.idle_w, power.train_w: {why}")
        return PowerSpec()
    where = power_sensor(snapshot) or "a sensor that fell silent"
    return PowerSpec(
        idle_w=_within("idle_w", idle_w, identity, f"{where}, at rest"),
        train_w=_within(
            "train_w",
            endurance.train_w,
            identity,
            f"{where}, mean of {endurance.seconds:g} s of training with all cores, read "
            f"{endurance.sensor_hz or 0:.0f} times a second",
        ),
    )


def _why_no_watts(
    snapshot: Snapshot, idle_w: float | None, endurance: Endurance | None
) -> str | None:
    """Explain why watts are unknown; None: they are known."""
    if endurance is None or endurance.train_w is None or idle_w is None:
        if snapshot.battery.charging:
            return "the battery charges, and so does not tell what is drawn: unplug it"
        return (
            "no sensor tells what is drawn; read a meter at the wall, at rest and while "
            "`tessera-bench device` runs with all cores, and add [power]"
        )
    if endurance.train_w - idle_w <= LEAST_RISE * idle_w:
        return (
            f"the sensor does not follow the training: {idle_w:.3g} W at rest, "
            f"{endurance.train_w:.3g} W with all cores busy"
        )
    return None


def _battery(identity: Identity, snapshot: Snapshot) -> BatterySpec | None:
    capacity = _within(
        "battery_wh", snapshot.battery.capacity_wh, identity, "as the battery says, when full"
    )
    return None if capacity is None else BatterySpec(battery_wh=capacity)


def _heat(
    identity: Identity, snapshot: Snapshot, endurance: Endurance | None, lacking: list[str]
) -> HeatSpec:
    trips = [
        (trip.celsius, zone.name)
        for zone in snapshot.heat.zones or ()
        for trip in zone.trips
        if trip.kind == "passive"
    ]
    celsius, name = min(trips, default=(None, ""))
    throttle_c = _within("throttle_c", celsius, identity, f"lowest passive trip, of zone {name}")
    if throttle_c is None:
        lacking.append("heat.throttle_c: no thermal zone has a passive trip point")
    sustained = None
    if endurance is None:
        lacking.append("heat.sustained_ratio: only a run without --quick is long enough")
    else:
        first, last = endurance.first_per_s, endurance.last_per_s
        sustained = _within(
            "sustained_ratio",
            min(1.0, last / first),
            identity,
            f"steps per second in the last third of {endurance.seconds:g} s over the first, at "
            f"most 1: {last:.4g} and {first:.4g}",
        )
    place: Sensor = "skin" if "skin" in name.lower() else "chip"
    sensor = None if throttle_c is None else place
    return HeatSpec(sensor=sensor, throttle_c=throttle_c, sustained_ratio=sustained)


def _within(key: str, value: float | None, identity: Identity, how: str) -> Quantity | None:
    """Return a measured number; None: there is none, or none allowed in a profile."""
    if value is None or not LIMITS[key].holds(value):
        return None
    return _measured(identity, value, how)


def _measured(identity: Identity, value: float, how: str) -> Quantity:
    return Quantity(
        float(f"{value:.4g}") if value < 1000 else float(round(value)),
        f"{how}; {identity.circumstances}",
        "measured",
    )


def _short(number: float) -> str:
    """Format with four significant digits, as in 5.12e9."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{number:.4g}")
