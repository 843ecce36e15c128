"""Availability traces: when each device is reachable, from a file with one interval per line.

    # device,from_s,to_s
    phone-17,0,5400
    phone-17,28800,61200
    tablet,3600,86400

- The first column names a device of the trace; the names mean nothing else. Devices of the fleet
  take the trace's devices in order of their first line, from the beginning again where the fleet is
  larger.
- Times are seconds since the simulation began, `to_s` after `from_s`. A device's lines are in order
  of time and do not overlap; the lines of different devices may be mixed.
- Empty lines, and what follows a `#`, are left out.
- With a period (`repeat_s`), the whole trace comes again after so many seconds, without end.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from coordinator.errors import ConfigError

ALWAYS: tuple[tuple[float, float], ...] = ((0.0, math.inf),)
"""The intervals of a device without a trace."""


@dataclass(frozen=True, slots=True, eq=False)
class Availability:
    """The intervals of many devices, as numbers side by side: sixteen bytes each."""

    first: array[int]
    """Per device, the place of its first interval; one more at the end."""
    times: array[float]
    """Begin and end of every interval."""
    repeat_s: float | None = None
    """Seconds after which all intervals come again; None: never."""

    def __len__(self) -> int:
        """Return the number of devices."""
        return len(self.first) - 1

    def intervals(self, number: int) -> Iterator[tuple[float, float]]:
        """Yield the intervals of the trace's device for the fleet's n-th device, in order."""
        device = number % len(self)
        places = range(self.first[device], self.first[device + 1])
        if not places:
            return
        for turn in count():
            past_s = turn * (self.repeat_s or 0.0)
            for place in places:
                yield past_s + self.times[2 * place], past_s + self.times[2 * place + 1]
            if self.repeat_s is None:
                return


def read_trace(path: str | Path, *, repeat_s: float | None = None) -> Availability:
    """Read a trace. Raises `ConfigError` with the line that is wrong."""
    try:
        with Path(path).open(encoding="utf-8") as lines:
            return parse_trace(lines, where=str(path), repeat_s=repeat_s)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error


def parse_trace(
    lines: Iterable[str], *, where: str = "trace", repeat_s: float | None = None
) -> Availability:
    """Read the lines of a trace. Raises `ConfigError`; `where` is the file's name in it."""
    found: dict[str, array[float]] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, start, end = _interval(text, f"{where}:{number}")
        times = found.setdefault(name, array("d"))
        if times and start < times[-1]:
            raise ConfigError(
                f"{where}:{number}: {name!r} is there from {start:g} s, but an earlier line has it "
                f"until {times[-1]:g} s: sort its lines, and join intervals that overlap"
            )
        if repeat_s is not None and end > repeat_s:
            raise ConfigError(
                f"{where}:{number}: the interval ends at {end:g} s, after the trace's period of "
                f"{repeat_s:g} s (repeat_s)"
            )
        times.extend((start, end))
    if not found:
        raise ConfigError(f"{where}: the trace has no interval: write device,from_s,to_s lines")
    first, times = array("q", [0]), array("d")
    for each in found.values():
        times.extend(each)
        first.append(len(times) // 2)
    return Availability(first, times, repeat_s)


def _interval(text: str, where: str) -> tuple[str, float, float]:
    fields = [field.strip() for field in text.split(",")]
    try:
        name, start, end = fields[0], float(fields[1]), float(fields[2])
    except (IndexError, ValueError):
        name, start, end = "", math.nan, math.nan
    if len(fields) != 3 or not name or not 0 <= start < end < math.inf:
        raise ConfigError(
            f"{where}: {text!r:.80} is no interval: write device,from_s,to_s, with seconds from 0 "
            "and to_s after from_s"
        )
    return name, start, end
