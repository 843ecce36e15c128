"""Curves from the rows of sweeps and studies: cases that differ in their seed alone are one curve.

    rounds, hours, joules, bytes    may be the axis along which a curve goes
    accuracy, loss                  may be what it shows

Where seeds were measured at different places, as along hours, each is interpolated between its own
measurements; a curve ends where its first seed does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.fleet.sweep.rows import LINES, TABLE, SweepRow, columns, read_rows
from benchmarks.report.options import UsageError
from edge_sdk.program.settings import nearest

XAxis = Literal["rounds", "hours", "joules", "bytes"]
YAxis = Literal["accuracy", "loss"]
Floats = NDArray[np.float64]

X_AXES: Mapping[XAxis, tuple[str, Callable[[SweepRow], float]]] = {
    "rounds": ("rounds", lambda row: float(row["round"])),
    "hours": ("simulated hours", lambda row: row["time_s"] / 3600),
    "joules": ("J, all devices", lambda row: float(row["joules"])),
    "bytes": ("B, all devices", lambda row: float(row["bytes_down"] + row["bytes_up"])),
}
"""Words for an axis, and its value in a row."""
SEED = "run.seed"
NOT_VARIED = ("id", SEED, "simulation.processes", "simulation.cohort")
POINTS = 200
"""Places at which seeds that were measured at different ones are compared."""


@dataclass(frozen=True, slots=True, eq=False)
class SeedCurve:
    """One line of a plot: the mean over seeds, and the lowest and highest of them."""

    label: str
    seeds: int
    x: Floats
    mean: Floats
    low: Floats
    high: Floats

    def plain(self) -> dict[str, Any]:
        """Return it as values that JSON can hold."""
        arrays = {name: getattr(self, name).tolist() for name in ("x", "mean", "low", "high")}
        return {"label": self.label, "seeds": self.seeds, **arrays}


def read_results(path: Path) -> list[SweepRow]:
    """Read rows of a sweep's folder or file, or of a study's `--json`. Raises `UsageError`."""
    if path.is_dir():
        found = next((path / name for name in (LINES, TABLE) if (path / name).exists()), None)
        if found is None:
            raise UsageError(f"{path} holds no {LINES} and no {TABLE}: give a sweep's folder")
        return read_rows(found)
    if not path.exists():
        raise UsageError(f"{path} is not there: give the folder of a sweep, or a file of results")
    return _study_rows(path) if path.suffix == ".json" else read_rows(path)


def _study_rows(path: Path) -> list[SweepRow]:
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        config, rounds = written["config"], written["rounds"]
        return [{"id": str(path), "case": path.stem, **config, **row} for row in rounds]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no result of `tessera-bench fleet --population … --json`: {error}"
        ) from error


def varied_keys(rows: Iterable[SweepRow]) -> list[str]:
    """Return the settings that tell cases apart, but for their seed.

    Names come first: a setting that follows from those before it is left out.
    """
    first = list({row["id"]: row for row in rows}.values())
    keys = [key for key in columns(first) if "." in key and key not in NOT_VARIED]
    named = [key for key in keys if key.endswith(".name") or key == "run.recipe"]
    found: list[str] = []
    apart = 1
    for key in ["case", *named, *(key for key in keys if key not in named)]:
        more = {tuple(_text(row.get(each)) for each in (*found, key)) for row in first}
        if len(more) > apart:
            found.append(key)
            apart = len(more)
    return found


def grouped(
    rows: Sequence[SweepRow], by: Sequence[str] | None = None
) -> dict[str, list[list[SweepRow]]]:
    """Return the rows of every case, those of one label together.

    `by` are the settings that tell labels apart; None: all that vary but the seed. Raises
    `UsageError` for a setting that no row has.
    """
    known = columns(rows)
    for key in by or ():
        if key not in known:
            raise UsageError(f"no row has {key!r}{nearest(key, known)}")
    keys = varied_keys(rows) if by is None else list(by)
    cases: dict[str, list[SweepRow]] = {}
    for row in rows:
        cases.setdefault(row["id"], []).append(row)
    found: dict[str, list[list[SweepRow]]] = {}
    for case in cases.values():
        found.setdefault(label_of(case[0], keys), []).append(case)
    return found


def label_of(row: SweepRow, keys: Sequence[str]) -> str:
    """Name a case by its values of these settings."""
    words = []
    for key in keys:
        value, last = row.get(key), key.split(".")[-1]
        if key == "case" or last == "name":
            words.append("–" if value is None else str(value))
        elif value is not None:
            words.append(f"{last} {_text(value)}")
    return ", ".join(words) or "all"


def curves_of(
    rows: Sequence[SweepRow], x: XAxis, y: YAxis, by: Sequence[str] | None = None
) -> list[SeedCurve]:
    """Return a curve for every label; none for labels without a measurement."""
    found = []
    for label, cases in grouped(rows, by).items():
        points = [_points(case, x, y) for case in cases]
        known = [(at, value) for at, value in points if len(at)]
        if known:
            found.append(_curve(label, known, x))
    return found


def _points(case: Sequence[SweepRow], x: XAxis, y: YAxis) -> tuple[Floats, Floats]:
    place = X_AXES[x][1]
    pairs = [(place(row), row[y]) for row in case if row.get(y) is not None and "round" in row]
    pairs.sort()
    at, value = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return at, value


def _curve(label: str, seeds: Sequence[tuple[Floats, Floats]], x: XAxis) -> SeedCurve:
    first = max(at[0] for at, _ in seeds)
    last = max(first, min(at[-1] for at, _ in seeds))
    if len(seeds) == 1:
        grid = seeds[0][0]
    elif x == "rounds":
        every = np.unique(np.concatenate([at for at, _ in seeds]))
        grid = every[(every >= first) & (every <= last)]
    else:
        grid = np.linspace(first, last, POINTS)
    values = np.stack([np.interp(grid, at, value) for at, value in seeds])
    return SeedCurve(label, len(seeds), grid, values.mean(0), values.min(0), values.max(0))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_text(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
