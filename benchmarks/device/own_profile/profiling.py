"""Measures the speed and power of training on this machine, for a profile (`profile.py`).

Every training runs in a fresh process on the onnx backend (`pace.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.device.kit import Kit, read_task
from benchmarks.device.trial.fresh import ProcessFailed, call_fresh
from benchmarks.report.figures import FigureError
from benchmarks.report.progress import Begin, silent


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingConfig:
    """Models to train, and for how long."""

    families: tuple[str, ...]
    reps: int = 3
    """Fresh processes for each family and number of threads."""
    burst_s: float = 1.5
    """Seconds timed in each, at each of two levels."""
    rest_s: float = 10.0
    """Seconds metered before anything is trained."""
    endure_s: float = 180.0
    """Seconds of training with all cores, metered."""
    heat: bool = True
    """True if that is long enough to show the effect of heat; if not, only watts matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One level of one family, with a number of threads."""

    family: str
    level: float
    threads: int
    macs: float
    """Multiply-accumulates of a step of a whole batch, as the emulator counts them."""
    step_s: float
    """Median time of a step."""

    @property
    def macs_per_s(self) -> float:
        """Multiply-accumulates of training per second."""
        return self.macs / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Endurance:
    """A long training with all cores. None: no sensor."""

    seconds: float
    first_per_s: float
    """Steps per second, in the first third."""
    last_per_s: float
    train_w: float | None = None
    """Mean power."""
    sensor_hz: float | None = None
    """Sensor readings per second."""


# -- measuring -----------------------------------------------------------------------------------


def measure_paces(
    folder: Path, kit: Kit, config: ProfilingConfig, threads: int, begin: Begin = silent
) -> list[Pace]:
    """Time the kit's smallest and largest level, with one thread and with `threads`.

    `begin` is called with each family, its result after every process. Raises `FigureError`.
    """
    levels = ",".join(map(str, sorted({max(kit.levels), min(kit.levels)}, reverse=True)))
    paces = []
    for family in config.families:
        tick = begin(family)
        for count in sorted({1, threads}):
            runs: dict[float, list[dict[str, float]]] = {}
            for _ in range(config.reps):
                for row in _child(
                    "pace", folder / family, levels, count, kit.batch, config.burst_s
                ):
                    runs.setdefault(row["level"], []).append(row)
                tick()
            paces += [
                Pace(
                    family=family,
                    level=level,
                    threads=count,
                    macs=rows[0]["macs"],
                    step_s=median(row["step_s"] for row in rows),
                )
                for level, rows in runs.items()
            ]
    return paces


def measure_endurance(
    folder: Path, kit: Kit, config: ProfilingConfig, threads: int, root: Path
) -> Endurance:
    """Train the largest level of the family with the most work, with all cores, and measure it.

    `root`: folder of the sensors' files. Raises `FigureError`.
    """
    level = max(kit.levels)
    macs = {family: read_task(folder, family)[0].cost_at(level).macs for family in config.families}
    family = max(macs, key=lambda family: macs[family])
    asked = (level, threads, kit.batch, config.endure_s)
    return Endurance(**_child("endure", folder / family, *asked, root))


def _child(function: str, *arguments: object) -> Any:
    try:
        return call_fresh("benchmarks.device.trial.pace", function, *map(str, arguments))
    except ProcessFailed as error:
        raise FigureError(f"training on {arguments[0]} failed: {error}") from error
