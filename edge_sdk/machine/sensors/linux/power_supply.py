"""The battery in Linux's /sys/class/power_supply.

Several batteries count as one; those of mice and other devices do not count. Files are in µW, µWh,
µA, µAh and µV; drivers differ in which of them they provide.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.snapshot import Battery, Snapshot

SUPPLIES = "sys/class/power_supply"


@dataclass(frozen=True, slots=True)
class _Cell:
    """One battery, as its files describe it."""

    status: str
    percent: float | None
    watts: float | None
    full_wh: float | None


def read_battery(files: Files) -> Snapshot:
    """Read the battery; its presence is unknown if the kernel shows no supplies at all."""
    names = files.names(SUPPLIES)
    if names is None:
        return Snapshot()
    cells = []
    fed: list[bool] = []
    unclear = False
    for name in names:
        folder = f"{SUPPLIES}/{name}"
        kind = (files.text(f"{folder}/type") or "").lower()
        unclear |= not kind
        if files.text(f"{folder}/scope") == "Device":
            continue
        if kind in ("battery", "ups"):
            if files.number(f"{folder}/present") != 0:
                cells.append(_cell(files, folder))
        elif (online := files.number(f"{folder}/online")) is not None:
            fed.append(online > 0)
    if not cells:
        return Snapshot(battery=Battery(present=None if unclear else False))
    charging = _charging([cell.status for cell in cells], fed)
    watts = [cell.watts for cell in cells if cell.watts is not None]
    drained = charging is False and len(watts) == len(cells)
    return Snapshot(
        battery=Battery(
            present=True,
            percent=_percent(cells),
            charging=charging,
            watts=sum(watts) if drained else None,
            capacity_wh=_sum([cell.full_wh for cell in cells]),
        )
    )


def _cell(files: Files, folder: str) -> _Cell:
    def micro(name: str) -> float | None:
        number = files.number(f"{folder}/{name}")
        # Some drivers sign currents; the status gives the direction more reliably.
        return None if number is None else abs(number) / 1e6

    volts, amperes, watts = micro("voltage_now"), micro("current_now"), micro("power_now")
    if watts is None and volts is not None and amperes is not None:
        watts = volts * amperes
    full_wh, full_ah = micro("energy_full"), micro("charge_full")
    nominal = micro("voltage_min_design") or volts
    if full_wh is None and full_ah is not None and nominal is not None:
        full_wh = full_ah * nominal
    return _Cell(
        status=(files.text(f"{folder}/status") or "Unknown").lower(),
        percent=files.number(f"{folder}/capacity"),
        watts=watts,
        full_wh=full_wh,
    )


def _charging(statuses: list[str], fed: list[bool]) -> bool | None:
    if "discharging" in statuses:
        return False
    if "charging" in statuses:
        return True
    if fed:
        return any(fed)
    # Only a powered battery stays full for long; "not charging" alone leaves it open.
    return True if all(status == "full" for status in statuses) else None


def _percent(cells: list[_Cell]) -> float | None:
    """Percentage by energy where known, else of the emptiest battery: it fails first."""
    percents = [cell.percent for cell in cells if cell.percent is not None]
    if len(percents) != len(cells):
        return None
    full = [cell.full_wh for cell in cells if cell.full_wh]
    if len(full) != len(cells):
        return min(percents)
    return sum(share * wh for share, wh in zip(percents, full, strict=True)) / sum(full)


def _sum(amounts: list[float | None]) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known and len(known) == len(amounts) else None
