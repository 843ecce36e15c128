"""macOS and Windows: psutil, and commands for what it does not report.

Linux does not use psutil: it ignores control groups, knows one battery only, and reads no /sys but
the machine's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from edge_sdk.machine.sensors.commands import Command
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.rates import Rates
from edge_sdk.machine.snapshot import Battery, Cpu, Heat, MemoryState, Network, Snapshot, Zone

POWERSHELL = """
$ErrorActionPreference = 'SilentlyContinue'
$b = @(Get-CimInstance -Namespace root/wmi -ClassName BatteryStatus)
$f = @(Get-CimInstance -Namespace root/wmi -ClassName BatteryFullChargedCapacity)
[void][Windows.Networking.Connectivity.NetworkInformation, Windows, ContentType=WindowsRuntime]
$p = [Windows.Networking.Connectivity.NetworkInformation]::GetInternetConnectionProfile()
@{ discharge_mw = @($b | % { $_.DischargeRate }); full_mwh = @($f | % { $_.FullChargedCapacity });
   cost = $(if ($p) { [string]$p.GetConnectionCost().NetworkCostType } else { '' })
} | ConvertTo-Json -Compress
"""


class PsutilSources:
    """Sources for systems without /proc. psutil is loaded when the first one is read."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._traffic = Rates(clock)
        self._cpu_time = Rates(clock)

    def cpu(self) -> Snapshot:
        """Read cores, clock and use; the load average only where the system has one."""
        import psutil

        process = psutil.Process()
        affinity = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else None
        times = psutil.cpu_times()
        rates = self._cpu_time.since("cpu", sum(times) - times.idle, sum(times))
        clock = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
        # Windows has no load average; psutil's starts at 0.
        load = None if psutil.WINDOWS else psutil.getloadavg()[0]
        return Snapshot(
            cpu=Cpu(
                cores=affinity or psutil.cpu_count(),
                load=load,
                busy=rates[0] / rates[1] if rates and rates[1] > 0 else None,
                # psutil reports 0 for unknown clocks.
                mhz=(clock.current or None) if clock else None,
                max_mhz=(clock.max or None) if clock else None,
            )
        )

    def memory(self) -> Snapshot:
        """Read the machine's memory."""
        import psutil

        memory = psutil.virtual_memory()
        return Snapshot(
            memory=MemoryState(total_bytes=memory.total, available_bytes=memory.available)
        )

    def battery(self) -> Snapshot:
        """Read the percentage, and if it is plugged in."""
        import psutil

        battery = psutil.sensors_battery()
        if battery is None:
            return Snapshot(battery=Battery(present=False))
        return Snapshot(
            battery=Battery(present=True, percent=battery.percent, charging=battery.power_plugged)
        )

    def network(self) -> Snapshot:
        """Read the traffic of all interfaces except loopback."""
        import psutil

        counters = {
            name: each
            for name, each in psutil.net_io_counters(pernic=True).items()
            if not name.lower().startswith("lo")
        }
        sent = sum(each.bytes_sent for each in counters.values())
        received = sum(each.bytes_recv for each in counters.values())
        up, down = self._traffic.since(frozenset(counters), sent, received) or (None, None)
        return Snapshot(network=Network(up_bytes_per_s=up, down_bytes_per_s=down))


# -- macOS ---------------------------------------------------------------------------------------


def ioreg(files: Files) -> Command:
    """The battery as its driver sees it: watts, capacity, temperature."""
    return Command(
        argv=("ioreg", "-a", "-r", "-n", "AppleSmartBattery"),
        program=files.program,
        parse=parse_ioreg,
        fills=("battery.watts",),
    )


def pmset(files: Files) -> Command:
    """Reports if the processor is slowed down because of heat."""
    return Command(
        argv=("pmset", "-g", "therm"),
        program=files.program,
        parse=parse_pmset,
        fills=("heat.throttling",),
        every_s=5.0,
    )


def parse_ioreg(output: str) -> Snapshot:
    """Parse a property list, in mV, mA, mAh and 1/100 °C; empty if there is no battery."""
    import plistlib

    if not output.strip():
        return Snapshot()
    said: dict[str, Any] = plistlib.loads(output.encode())[0]
    volts = said["Voltage"] / 1000
    amperes = said.get("InstantAmperage", said.get("Amperage", 0))
    if amperes >= 1 << 63:  # a negative number, printed without its sign
        amperes -= 1 << 64
    drained = amperes < 0 and not said.get("ExternalConnected", False)
    # Apple's chips give MaxCapacity in percent and the charge under another name.
    milliampere_hours = said.get("AppleRawMaxCapacity", said.get("MaxCapacity", 0))
    celsius = said.get("Temperature", 0) / 100
    return Snapshot(
        battery=Battery(
            watts=-amperes * volts / 1000 if drained else None,
            capacity_wh=milliampere_hours * volts / 1000 if milliampere_hours > 100 else None,
        ),
        heat=Heat(zones=(Zone(name="battery", celsius=celsius),) if celsius > 0 else None),
    )


def parse_pmset(output: str) -> Snapshot:
    """Parse limits in percent; no record means that nothing was slowed down since the start."""
    limits = re.findall(r"^\s*CPU_(?:Speed|Scheduler)_Limit\s*=\s*([0-9]{1,3})\s*$", output, re.M)
    if limits:
        return Snapshot(heat=Heat(throttling=any(int(limit) < 100 for limit in limits)))
    none_yet = "No CPU power status has been recorded" in output
    return Snapshot(heat=Heat(throttling=False if none_yet else None))


# -- Windows -------------------------------------------------------------------------------------


def powershell(files: Files) -> Command:
    """Power drawn from the battery, its capacity, and the cost of the network."""
    return Command(
        argv=("powershell", "-NoProfile", "-NonInteractive", "-Command", POWERSHELL),
        program=files.program,
        parse=parse_powershell,
        fills=("battery.watts", "network.metered"),
        every_s=60.0,
        timeout_s=30.0,
    )


def parse_powershell(output: str) -> Snapshot:
    """Parse one object, in mW and mWh; the cost is as in the network profile."""
    said: dict[str, Any] = json.loads(output)
    discharge, full = sum(said["discharge_mw"]), sum(said["full_mwh"])
    costs = {"Unrestricted": False, "Fixed": True, "Variable": True}
    return Snapshot(
        battery=Battery(
            watts=discharge / 1000 if discharge > 0 else None,
            capacity_wh=full / 1000 if full > 0 else None,
        ),
        network=Network(metered=costs.get(said["cost"])),
    )
