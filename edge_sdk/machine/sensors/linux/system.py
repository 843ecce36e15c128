"""Cores, memory and network of any Linux, from /proc and /sys, without root.

Android and the boards build on these sources; each gives its part of a snapshot.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable

from edge_sdk.machine.sensors.commands import Command
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.linux.cgroup import read_cpus, read_memory
from edge_sdk.machine.sensors.rates import Rates
from edge_sdk.machine.snapshot import CoreClass, Cpu, MemoryState, Network, Snapshot

CPU = "sys/devices/system/cpu"
MAX_CPUS = 8192
"""Most cores Linux can be built for."""

NETWORK_MANAGER = (
    *("busctl", "--timeout=5", "--auto-start=no", "get-property"),
    *("org.freedesktop.NetworkManager", "/org/freedesktop/NetworkManager"),
    *("org.freedesktop.NetworkManager", "Metered"),
)
METERED = {1: True, 2: False, 3: True, 4: False}
"""NMMetered: yes, no, guessed yes, guessed no; 0 is unknown."""


class LinuxSources:
    """Sources that remember counters, to compute what was used between two readings."""

    def __init__(self, files: Files, clock: Callable[[], float]) -> None:
        self._files = files
        self._cpu_time = Rates(clock)
        self._traffic = Rates(clock)

    def cpu(self) -> Snapshot:
        """Read the cores we may use, and the load of the machine."""
        usable = usable_cpus(self._files)
        quota = read_cpus(self._files)
        classes, mhz = _clocks(self._files, usable or frozenset())
        peaks = [each.max_mhz for each in classes if each.max_mhz is not None]
        return Snapshot(
            cpu=Cpu(
                cores=None if usable is None or quota is None else min(float(len(usable)), quota),
                load=self._load(),
                busy=self._busy(),
                mhz=mhz,
                max_mhz=max(peaks, default=None),
                pressure=pressure(self._files, "cpu"),
                classes=classes or None,
            )
        )

    def memory(self) -> Snapshot:
        """Read what the machine and our control groups have left."""
        amounts = {
            match[1]: float(match[2]) * 1024
            for match in re.finditer(
                r"^(\w+): *([0-9]{1,20}) kB$", self._files.text("proc/meminfo") or "", re.M
            )
        }
        limit, left = read_memory(self._files)
        return Snapshot(
            memory=MemoryState(
                total_bytes=_least(amounts.get("MemTotal"), limit),
                available_bytes=_least(amounts.get("MemAvailable"), left),
                pressure=pressure(self._files, "memory"),
            )
        )

    def network(self) -> Snapshot:
        """Read the outgoing link's traffic, and if it is a modem."""
        interface = default_interface(self._files)
        if interface is None:
            return Snapshot()
        uevent = self._files.text(f"sys/class/net/{interface}/uevent") or ""
        modem = "DEVTYPE=wwan" in uevent or interface.startswith(("rmnet", "ccmni", "wwan"))
        down = up = None
        for line in (self._files.text("proc/net/dev") or "").splitlines():
            name, _, counters = line.strip().partition(":")
            numbers = re.findall(r"[0-9]{1,20}", counters)
            if name == interface and len(numbers) >= 9:
                rates = self._traffic.since(interface, float(numbers[0]), float(numbers[8]))
                down, up = rates or (None, None)
        return Snapshot(
            network=Network(
                metered=True if modem else None, up_bytes_per_s=up, down_bytes_per_s=down
            )
        )

    def _load(self) -> float | None:
        match = re.match(r"[0-9]{1,9}\.[0-9]{1,9}", self._files.text("proc/loadavg") or "")
        if match:
            return float(match[0])
        if not self._files.is_machine:
            return None
        try:
            # Android hides the file but answers the system call.
            return os.getloadavg()[0]
        except (OSError, AttributeError):
            return None

    def _busy(self) -> float | None:
        first, _, _ = (self._files.text("proc/stat") or "").partition("\n")
        numbers = [float(each) for each in re.findall(r" ([0-9]{1,20})(?= |$)", first)]
        if not first.startswith("cpu ") or len(numbers) < 5:
            return None
        # user nice system idle iowait irq softirq steal; guests already count as user.
        total = sum(numbers[:8])
        rates = self._cpu_time.since("cpu", total - numbers[3] - numbers[4], total)
        return rates[0] / rates[1] if rates and rates[1] > 0 else None


def network_manager(files: Files) -> Command:
    """Reports if the link is metered, as NetworkManager knows or guesses."""

    def parse(output: str) -> Snapshot:
        match = re.fullmatch(r"u ([0-9])", output.strip())
        return Snapshot(network=Network(metered=METERED.get(int(match[1])) if match else None))

    return Command(
        argv=NETWORK_MANAGER, program=files.program, parse=parse, fills=("network.metered",)
    )


def usable_cpus(files: Files) -> frozenset[int] | None:
    """Return cores that are online and allowed by our affinity; None: unknown."""
    status = files.text("proc/self/status") or ""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.M)
    allowed = parse_cpus(match[1]) if match else None
    online = files.text(f"{CPU}/online")
    if allowed is None or online is None:
        return allowed
    running = parse_cpus(online)
    return None if running is None else allowed & running


def parse_cpus(text: str) -> frozenset[int] | None:
    """Parse core numbers from a list such as `0-3,6`; None: not a list."""
    numbers: set[int] = set()
    for part in re.split(r"[,\s]+", text):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part, re.ASCII)
        if match is None or max(int(match[1]), int(match[2] or 0)) >= MAX_CPUS:
            return None
        numbers |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(numbers)


def pressure(files: Files, what: str) -> float | None:
    """Percent of the last 10 s in which some program waited for `what`; None: unknown."""
    content = files.text(f"proc/pressure/{what}") or ""
    match = re.search(r"^some avg10=([0-9]{1,3}\.[0-9]{1,9}) ", content, re.M)
    return float(match[1]) if match else None


def default_interface(files: Files) -> str | None:
    """Return the interface of the default route with the lowest metric; None: unknown."""
    routes = []
    for line in (files.text("proc/net/route") or "").splitlines():
        columns = line.split()
        if len(columns) >= 8 and columns[1] == columns[7] == "00000000" and columns[6].isdecimal():
            routes.append((int(columns[6][:10]), columns[0]))
    return min(routes)[1] if routes else None


def _clocks(files: Files, usable: frozenset[int]) -> tuple[tuple[CoreClass, ...], float | None]:
    """Return classes of the usable cores, and their mean clock in MHz now."""
    classes, policies = files.lasting(("cores", usable), lambda: _classes(files, usable))
    clocks: dict[int, float] = {}
    for folder, members in policies.items():
        khz = files.number(f"{folder}/scaling_cur_freq")
        if khz is not None and khz > 0:
            clocks |= dict.fromkeys(members, khz / 1000)
    return classes, sum(clocks.values()) / len(clocks) if clocks else None


def _classes(
    files: Files, usable: frozenset[int]
) -> tuple[tuple[CoreClass, ...], dict[str, frozenset[int]]]:
    """Return classes of the usable cores, and the cores of every folder with a clock."""
    peaks: dict[int, float] = {}
    policies: dict[str, frozenset[int]] = {}
    for policy in files.names(f"{CPU}/cpufreq", "policy*") or ():
        folder = f"{CPU}/cpufreq/{policy}"
        members = parse_cpus(files.text(f"{folder}/affected_cpus") or "") or frozenset()
        policies[folder] = members & usable
        khz = files.number(f"{folder}/cpuinfo_max_freq")
        if khz is not None and khz > 0:
            peaks |= dict.fromkeys(members & usable, khz / 1000)
    alike: dict[tuple[float | None, float | None], int] = {}
    for cpu in sorted(usable):
        kind = (peaks.get(cpu), files.number(f"{CPU}/cpu{cpu}/cpu_capacity"))
        alike[kind] = alike.get(kind, 0) + 1
    classes = [
        CoreClass(cores=cores, max_mhz=mhz, capacity=capacity)
        for (mhz, capacity), cores in alike.items()
        if mhz is not None or capacity is not None
    ]
    classes.sort(key=lambda each: (each.capacity or 0, each.max_mhz or 0), reverse=True)
    return tuple(classes), policies


def _least(machine: float | None, groups: float | None) -> float | None:
    if machine is None or groups is None:
        return None
    return min(machine, groups) if math.isfinite(machine) else None
