"""What a run's folder tells about the run, whether or not somebody serves it.

Costs of a round are what its devices report: seconds of the round, joules and bytes. Joules are
`None` where no device measures them, or in lines of an earlier version. Rounds that a rollback
undid are left out, and what they cost is, too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coordinator.errors import ConfigError
from coordinator.operate.serve.start import read_start
from coordinator.rounds.report import accuracy_of
from coordinator.run.folder import ABOUT, About, is_run, read_about, read_history
from coordinator.run.steering.audit import words_of
from coordinator.run.steering.orders import Steered, read_steered
from coordinator.run.steering.settings import length_of
from coordinator.service.overview.facts import kept_facts
from coordinator.service.overview.lines import joules_of
from edge_sdk.program.control import is_served

CostName = Literal["rounds", "hours", "joules", "bytes"]
COSTS: tuple[CostName, ...] = ("rounds", "hours", "joules", "bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost:
    """A committed round: its accuracy, and what the run had cost by its end."""

    round: int
    accuracy: float | None
    """That of the level to deploy, else of the whole model."""
    hours: float
    joules: float | None
    bytes: int

    def spent(self, cost: CostName, number: int) -> float | None:
        """Return a cost by this round, which is the `number`-th."""
        return float(number) if cost == "rounds" else getattr(self, cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTotal:
    """A device's part in a run."""

    device: str
    trained: int = 0
    skipped: int = 0
    bytes: int = 0
    train_s: float = 0.0
    joules: float | None = None
    reason: str = ""
    """That of its newest skip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run, as its folder tells."""

    folder: Path
    about: About
    state: str
    """served, stopped or finished."""
    lines: Sequence[Mapping[str, Any]]
    """Lines of history of the rounds that stand."""
    news: Sequence[tuple[int, str]]
    """Other news: the round before, and words."""
    costs: Sequence[RoundCost]
    settings: Mapping[str, Any]
    """As they are now, with what operators changed."""
    versions: Mapping[str, str]
    changed: float
    """Unix seconds of the newest change."""

    @property
    def last(self) -> RoundCost | None:
        """The newest round; None before the first."""
        return self.costs[-1] if self.costs else None

    @property
    def best(self) -> RoundCost | None:
        """The earliest round with the best accuracy; None if no accuracy is known."""
        known = [each for each in self.costs if each.accuracy is not None]
        return max(known, key=lambda each: each.accuracy or 0.0, default=None)

    @property
    def skips(self) -> Counter[str]:
        """Skips of devices, by the first words of their reasons."""
        found: Counter[str] = Counter()
        for line in self.lines:
            found.update(skip_kind(each) for each in line["devices"] if each["level"] is None)
        return found

    @property
    def trained(self) -> int:
        """Trainings that devices took part in."""
        return sum(e["level"] is not None for line in self.lines for e in line["devices"])

    def within(self, cost: CostName, most: float) -> RoundCost | None:
        """Return the newest round with a known accuracy by which the run had cost no more."""
        found = None
        for number, each in enumerate(self.costs, 1):
            spent = each.spent(cost, number)
            if spent is not None and spent <= most and each.accuracy is not None:
                found = each
        return found

    def devices(self) -> list[DeviceTotal]:
        """Return the part of every device, by name."""
        found: dict[str, dict[str, Any]] = {}
        for line in self.lines:
            for each in line["devices"]:
                own = found.setdefault(
                    each["device"],
                    {"trained": 0, "skipped": 0, "bytes": 0, "train_s": 0.0, "joules": None},
                )
                own["trained" if each["level"] is not None else "skipped"] += 1
                own["bytes"] += each["bytes_up"] + each["bytes_down"]
                own["train_s"] += each["train_s"]
                if each.get("energy_j") is not None:
                    own["joules"] = (own["joules"] or 0.0) + each["energy_j"]
                if each["level"] is None:
                    own["reason"] = each["reason"]
        return [DeviceTotal(device=name, **found[name]) for name in sorted(found)]


def skip_kind(device: Mapping[str, Any]) -> str:
    """Return a word for why a device skipped: its code, else the beginning of its reason."""
    if device.get("code"):
        return str(device["code"])
    words = str(device["reason"]).removeprefix("skip: ").partition(";")[0]
    return " ".join("".join(c if c.isalpha() else " " for c in words).split()[:3]) or "no reason"


def read_record(folder: Path) -> RunRecord:
    """Read a run's record, even while the run is served. Raises `ConfigError`, `RunError`."""
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run's folder: it has no {ABOUT}")
    about, _ = read_about(folder)
    lines: list[Mapping[str, Any]] = []
    news: list[tuple[int, str]] = []
    for line in read_history(folder):
        if "devices" in line:
            lines.append(line)
            continue
        words = words_of(line)
        if words is not None:
            news.append((lines[-1]["round"] if lines else 0, words))
        if (back := line.get("rolled_back")) is not None:
            lines = [each for each in lines if each["round"] <= back["to"]]
    start, steered = read_start(folder), read_steered(folder)
    return RunRecord(
        folder=folder,
        about=about,
        state=_state(folder, steered, lines),
        lines=lines,
        news=news,
        costs=_costs(lines),
        settings={
            "task.source": about.source,
            "run.batch_size": about.batch_size,
            **start.settings,
            **_changed(steered, start.settings),
        },
        versions=start.versions,
        changed=lines[-1].get("time", 0.0) if lines else (folder / ABOUT).stat().st_mtime,
    )


def _state(folder: Path, steered: Steered, lines: Sequence[Mapping[str, Any]]) -> str:
    if is_served(folder):
        return "served"
    kept = kept_facts(folder)
    ended, length = kept.get("finished"), steered.settings.get(length_of(steered.file))
    longer = length is not None and length > (kept.get("rounds") or length)
    return "finished" if lines and ended == lines[-1]["round"] and not longer else "stopped"


def _changed(steered: Steered, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that operators changed, by the paths of their keys."""
    return {
        next((key for key in (f"run.{name}", f"round.{name}") if key in known), name): value
        for name, value in steered.settings.items()
    }


def _costs(lines: Sequence[Mapping[str, Any]]) -> list[RoundCost]:
    found, seconds, joules, sent = [], 0.0, None, 0
    for line in lines:
        seconds += line["seconds"]
        own = joules_of(line["devices"])
        joules = joules if own is None else (joules or 0.0) + own
        sent += sum(each["bytes_up"] + each["bytes_down"] for each in line["devices"])
        found.append(
            RoundCost(
                round=line["round"],
                accuracy=accuracy_of(line),
                hours=seconds / 3600,
                joules=joules,
                bytes=sent,
            )
        )
    return found


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(place) / name).lstat().st_size
            except FileNotFoundError:  # noqa: PERF203  a served run removes files
                continue
    return total
