"""Conditions of measured numbers: the machine, its clocks, cooling and power, and versions."""

from __future__ import annotations

import platform
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.device.results import Amount, CoreClock, Machine
from benchmarks.device.trial.process import SENSOR_PERIOD_S, SETTLE_S
from benchmarks.device.validity import MOST_LOAD
from benchmarks.report.figures import environment
from edge_sdk.decide.emulation.emulation import MIB
from edge_sdk.machine.board import Board, find_board, load_board, shipped_boards
from edge_sdk.machine.energy import MAX_AGE_S, EnergyMeter, probed_watts
from edge_sdk.machine.probe import LocalProbe, choose_probe
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.snapshot import Snapshot

PACKAGES = ("tessera-fl", "numpy", "onnxruntime", "torch", "zstandard")
CPU = "sys/devices/system/cpu/cpufreq"
LEAST_RISE = 0.05
"""Smallest rise in watts during training; a sensor that shows less does not follow it."""
OTHER_MEMORY = 0.3
"""Share by which a board's memory may differ from its profile: systems reserve some."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A machine, and the probe that observes it."""

    machine: Machine
    board: Board | None
    """Profile whose watts count if no sensor tells."""
    probe: LocalProbe


def look(root: Path = Path("/"), *, board: Board | None = None, cooling: str | None = None) -> Seen:
    """Describe the machine below a root.

    `board` None: the shipped profile whose title is in the machine's own name, if any. `cooling`:
    the owner's description; None: the fans the kernel knows.
    """
    files = Files(root)
    probe = choose_probe(root)
    probe.snapshot()
    probe.settle(SETTLE_S)
    snapshot = probe.snapshot()
    model = _model(files)
    board = board or recognised(model, snapshot.memory.total_bytes)
    versions = environment(*PACKAGES)["versions"]
    machine = Machine(
        model=model,
        board=None if board is None else board.name,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cores=snapshot.cpu.cores,
        clocks=_clocks(files, snapshot),
        memory_bytes=snapshot.memory.total_bytes,
        power_mode=snapshot.power.mode or files.text("sys/firmware/acpi/platform_profile"),
        cooling=cooling or _fans(files),
        fed_by=_fed_by(snapshot),
        load=snapshot.cpu.load,
        versions={name: found for name, found in versions.items() if found},
    )
    return Seen(machine, board, probe)


def rest(seen: Seen, seconds: float) -> Seen:
    """Return the same with the power at rest; returns at once if there is no sensor."""
    watts = probed_watts(seen.probe)
    if watts() is None:
        return seen
    with EnergyMeter(watts, period_s=SENSOR_PERIOD_S) as meter:
        time.sleep(seconds)
    energy = meter.energy
    if energy is None:
        return seen
    machine = replace(
        seen.machine,
        idle_w=Amount(value=energy.gross_j / energy.seconds, provenance="measured"),
        power_sensor=power_sensor(seen.probe.snapshot()),
        sensor_hz=meter.hz,
    )
    return replace(seen, machine=machine)


def named_board(text: str) -> Board:
    """Find a profile by its name or its file. Raises `ConfigError`."""
    return load_board(Path(text)) if text.endswith(".toml") else find_board(text)


def recognised(model: str | None, memory_bytes: float | None = None) -> Board | None:
    """Return the shipped profile whose title is in a machine's name; None: there is none.

    The longest title counts: an Orin Nano is not a Nano. A different amount of memory means a
    different board.
    """
    if model is None:
        return None
    called = model.replace(" Plus", "+")
    boards = [find_board(name) for name in shipped_boards()]
    board = max(
        (board for board in boards if _calls(called, board.title)),
        key=lambda board: len(_plain(board.title)),
        default=None,
    )
    if board is None or memory_bytes is None:
        return board
    size = MIB * board.memory.memory_mb.value
    return board if abs(memory_bytes / size - 1) < OTHER_MEMORY else None


def _calls(called: str, title: str) -> bool:
    """True if the machine's name has this title; NVIDIA's also need one of the maker's words."""
    if title.startswith("NVIDIA ") and not re.search("NVIDIA|Jetson", called):
        return False
    return re.search(rf"\b{re.escape(_plain(title))}(?!\w)", called) is not None


def _plain(title: str) -> str:
    """Remove the variant in brackets and the makers' words that only some systems use."""
    return re.sub(r" \(.*\)", "", title).removeprefix("NVIDIA ").removeprefix("Jetson ")


def usable_threads(snapshot: Snapshot) -> int:
    """Number of whole cores usable at once; 1 if unknown."""
    return max(1, int(snapshot.cpu.cores or 1))


def others(snapshot: Snapshot) -> str | None:
    """Describe the load of other programs; None: too little to matter, or unknown."""
    load = snapshot.cpu.load
    if load is None or load <= MOST_LOAD * usable_threads(snapshot):
        return None
    return f"beside other programs (load {load:.1f})"


def power_sensor(snapshot: Snapshot) -> str | None:
    """Name the sensor of the whole device's watts; None: there is none."""
    snapshot = snapshot.no_older_than(MAX_AGE_S)
    if snapshot.power.total_watts is not None:
        rails = ", ".join(snapshot.power.rails or ())
        return f"rails: {rails}" if rails else "rails"
    return None if snapshot.battery.watts is None else "battery, while it discharges"


def _model(files: Files) -> str | None:
    if found := files.text("proc/device-tree/model"):
        return found
    for line in (files.text("proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or None if files.is_machine else None


def _clocks(files: Files, snapshot: Snapshot) -> tuple[CoreClock, ...]:
    """Return the clocks of every class of cores; without cpufreq, what the probe found."""
    found = []
    for policy in files.names(CPU, "policy*") or ():
        folder = f"{CPU}/{policy}"
        members = (files.text(f"{folder}/affected_cpus") or "").split()
        low = files.number(f"{folder}/scaling_min_freq")
        high = files.number(f"{folder}/scaling_max_freq")
        if members:
            found.append(
                CoreClock(
                    cores=len(members),
                    max_mhz=None if high is None else high / 1000,
                    governor=files.text(f"{folder}/scaling_governor"),
                    pinned=None if low is None or high is None else low == high,
                )
            )
    if found:
        return tuple(found)
    return tuple(
        CoreClock(cores=each.cores, max_mhz=each.max_mhz) for each in snapshot.cpu.classes or ()
    )


def _fans(files: Files) -> str | None:
    """List the kernel's fans and their speed settings; None: it knows none."""
    fans = []
    folder = "sys/class/thermal"
    for name in files.names(folder, "cooling_device*") or ():
        kind = files.text(f"{folder}/{name}/type") or ""
        state = files.number(f"{folder}/{name}/cur_state")
        most = files.number(f"{folder}/{name}/max_state")
        if "fan" in kind.lower() and state is not None and most is not None:
            fans.append(f"{kind} at {state:g} of {most:g}")
    for name in files.names("sys/class/hwmon", "hwmon*") or ():
        for speed in files.names(f"sys/class/hwmon/{name}", "fan*_input") or ():
            rpm = files.number(f"sys/class/hwmon/{name}/{speed}")
            if rpm is not None:
                fans.append(f"{speed.removesuffix('_input')} at {rpm:g} rpm")
    return ", ".join(fans) or None


def _fed_by(snapshot: Snapshot) -> Literal["mains", "battery"] | None:
    battery = snapshot.battery
    if battery.present is False or battery.charging:
        return "mains"
    return "battery" if battery.present and battery.charging is False else None
