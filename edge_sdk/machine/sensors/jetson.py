"""Sensors that a Jetson has beyond any Linux: power rails, GPU, power mode, unified memory.

INA3221 chips with three channels each measure the rails. Channels are found by their labels:
addresses and numbers differ between boards. JetPack 4 shows them as `iio` devices, later versions
as `hwmon`. Their sum or total is that of the module, without the carrier board.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterator

from edge_sdk.machine.sensors.commands import Command
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.snapshot import Gpu, MemoryState, Power, Snapshot

I2C = "sys/bus/i2c/drivers"
DEVFREQ = "sys/class/devfreq"

TOTALS = ("VDD_IN", "POM_5V_IN")
"""Rails that feed all others. The AGX boards have none, so their rails are summed: where one feeds
another, the sum is too high, never too low."""

GPUS = ("gpu", "gm20b", "gp10b", "gv11b", "ga10b")
"""GPU names in the device tree."""

UDEV_HINT = (
    "a power rail cannot be read; if only root may read it, chmod a+r it at boot (with a udev "
    "rule), or install jetson-stats"
)

READ_JTOP = """
import json
from jtop import jtop
with jtop() as jetson:
    power, mode = jetson.power, jetson.nvpmodel
rails = {name: rail["power"] for name, rail in power["rail"].items()}
print(json.dumps({"total": power["tot"]["power"], "rails": rails, "mode": str(mode or "")}))
"""
"""Run by another Python: the user installs jetson-stats (AGPL), and its service may hang."""


def is_jetson(files: Files, model: str) -> bool:
    """True by the device tree's model or, in a container that hides it, NVIDIA's release file."""
    return (
        "jetson" in model.lower()
        or "nvidia,tegra" in (files.text("proc/device-tree/compatible") or "")
        or files.exists("etc/nv_tegra_release")
    )


def read_power(files: Files) -> Snapshot:
    """Read the watts of every rail, their total, and the power mode."""
    rails: dict[str, float] = {}
    complete = True
    for label, watts in _channels(files):
        if watts is None:
            complete = False
        else:
            rails[label] = watts
    total = next((rails[name] for name in TOTALS if name in rails), None)
    if total is None and complete and rails:
        total = sum(rails.values())
    return Snapshot(power=Power(rails=rails or None, total_watts=total, mode=_mode(files)))


def read_gpu(files: Files) -> Snapshot:
    """Read the load that the GPU's driver measures, in 1/1000."""
    for name in files.names(DEVFREQ) or ():
        device = f"{DEVFREQ}/{name}/device"
        kind = files.text(f"{device}/of_node/name") or name.rpartition(".")[2]
        if kind in GPUS:
            load = files.number(f"{device}/load")
            return Snapshot(gpu=Gpu(busy=None if load is None else load / 1000))
    return Snapshot()


def read_unified() -> Snapshot:
    """Report unified memory: CPU and GPU share one memory on every Jetson."""
    return Snapshot(memory=MemoryState(unified=True))


def nvpmodel(files: Files) -> Command:
    """The power mode, for when the file that stores it cannot be read."""

    def parse(output: str) -> Snapshot:
        match = re.search(r"^NV Power Mode: *(\S+)$", output, re.M)
        return Snapshot(power=Power(mode=match[1] if match else None))

    return Command(
        argv=("nvpmodel", "-q"), program=files.program, parse=parse, fills=("power.mode",)
    )


def jtop(files: Files) -> Command:
    """Rails from the service of jetson-stats, if it is installed and we may not read them."""

    def interpreter(_: str) -> str | None:
        installed = files.is_machine and importlib.util.find_spec("jtop") is not None
        return sys.executable if installed else None

    return Command(
        argv=("jtop", "-c", READ_JTOP),
        program=interpreter,
        parse=parse_jtop,
        fills=("power.total_watts",),
        every_s=5.0,
    )


def parse_jtop(output: str) -> Snapshot:
    """Parse `READ_JTOP`'s output, in milliwatts. Raises `ValueError`, `TypeError`, `KeyError`."""
    content = json.loads(output)
    rails = {str(name): float(milli) / 1000 for name, milli in content["rails"].items()}
    return Snapshot(
        power=Power(
            rails=rails or None,
            total_watts=float(content["total"]) / 1000,
            mode=content["mode"] or None,
        )
    )


def _channels(files: Files) -> Iterator[tuple[str, float | None]]:
    """Yield label and watts of every connected channel; None: unreadable."""
    for driver in ("ina3221x", "ina3221"):
        for address in files.names(f"{I2C}/{driver}", "*-*") or ():
            chip = f"{I2C}/{driver}/{address}"
            for name in files.names(chip, "iio:device*") or ():
                yield from _iio_channels(files, f"{chip}/{name}")
            for name in files.names(f"{chip}/hwmon", "hwmon*") or ():
                yield from _hwmon_channels(files, f"{chip}/hwmon/{name}")


def _iio_channels(files: Files, folder: str) -> Iterator[tuple[str, float | None]]:
    for name in files.names(folder, "rail_name_*") or ():
        label = files.text(f"{folder}/{name}")
        milliwatts = files.number(f"{folder}/in_power{name.removeprefix('rail_name_')}_input")
        if label is None or milliwatts is None:
            files.tell(folder, UDEV_HINT)
        yield from _labelled(label, None if milliwatts is None else milliwatts / 1000)


def _hwmon_channels(files: Files, folder: str) -> Iterator[tuple[str, float | None]]:
    for name in files.names(folder, "in[1-3]_label") or ():
        label, number = files.text(f"{folder}/{name}"), name[2]
        millivolts = files.number(f"{folder}/in{number}_input")
        milliamperes = files.number(f"{folder}/curr{number}_input")
        if millivolts is None or milliamperes is None:
            files.tell(folder, UDEV_HINT)
            yield from _labelled(label, None)
        else:
            yield from _labelled(label, millivolts * milliamperes / 1e6)


def _labelled(label: str | None, watts: float | None) -> Iterator[tuple[str, float | None]]:
    if label is None:
        yield "", None
    elif label and label != "NC":  # not connected
        credible = watts is not None and 0 <= watts < math.inf
        yield label, watts if credible else None


def _mode(files: Files) -> str | None:
    """Return nvpmodel's mode, by name if its table is readable, else by number."""
    match = re.search(r"pmode:0*([0-9]{1,4})\b", files.text("var/lib/nvpmodel/status") or "")
    if match is None:
        return None
    table = files.text("etc/nvpmodel.conf") or ""
    entries = re.findall(r"<\s*POWER_MODEL\s+ID=([0-9]{1,4})\s+NAME=([^\s>]+)", table)
    return dict(entries).get(match[1], match[1])
