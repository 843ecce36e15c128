"""Every step of a run, failed in every way: what survives.

    point      <case>:<step>:<kind>[:<cut>]      as in  ram-fed:137:lost:zeros

A point survives if the run comes to its end in later processes and

- in rounds, the model's bits, the history and the last word on every movement are those of the run
  that nobody disturbed;
- asynchronously, every checkpoint that a process starts from has the bits of the same version in
  the process before, every movement with a receipt `counted` is in the model exactly once, and
  the history has a line for every report.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, cast, get_args

from benchmarks.aggregate.durability.disk import CUTS, DiskStep, Fault, FaultKind
from benchmarks.aggregate.durability.site import (
    ASYNCHRONOUS,
    CASES,
    ROUNDS,
    STEERED,
    STEERED_ROUNDS,
    UPDATES,
    CrashSite,
    RunResult,
    Stuck,
    quiet,
)
from edge_sdk import TesseraError

_KINDS = "|".join(each for each in get_args(FaultKind) if each != "lost")
_POINT = re.compile(rf"({'|'.join(CASES)}):(\d+):(?:({_KINDS})|lost:({'|'.join(CUTS)}))")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  a disk in memory, and a folder of our own in it


@dataclass(frozen=True, slots=True)
class Point:
    """A moment of a run, and what happens in it."""

    case: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.case}:{self.fault}"


@dataclass(frozen=True, slots=True)
class PointOutcome:
    """The outcome of a point; `problem` is empty if it survived."""

    point: str
    operation: str
    problem: str

    @property
    def survived(self) -> bool:
        """True if nothing was lost."""
        return not self.problem


def parse_point(text: str) -> Point:
    """Read a point. Raises `ValueError`."""
    found = _POINT.fullmatch(text)
    if found is None:
        kinds = ", ".join(get_args(FaultKind))
        raise ValueError(
            f"{text!r} is not a point such as ram-fed:137:lost:zeros: a case "
            f"({', '.join(CASES)}), a step, a fault ({kinds}), and what a cut leaves "
            f"({', '.join(CUTS)})"
        )
    case, step, kind, cut = found.groups()
    return Point(case, Fault(int(step), cast(FaultKind, kind or "lost"), cut or ""))


def points_of(
    case: str, steps: Sequence[DiskStep], cuts: Mapping[int, Sequence[str]]
) -> Iterator[Point]:
    """Return all points of a case, of which these are the steps, and the cuts that differ."""
    for step in steps:
        kinds: list[FaultKind] = ["kill", "unsent"]
        if step.is_file:
            kinds.append("error")
        if step.operation in ("open", "write", "pwrite", "reserve", "mkdir", "commit"):
            kinds.append("full")
        if step.writes:
            kinds += ["torn", "short"]
        for kind in kinds:
            yield Point(case, Fault(step.number, kind))
        if step.is_file:
            for cut in cuts.get(step.number, CUTS):
                yield Point(case, Fault(step.number, "lost", cut))


def sampled(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most so many points, always the same, spread over all of them."""
    if len(points) <= most:
        return list(points)
    stride = len(points) / most
    # A stride that is no multiple of the kinds at a step: all kinds come up.
    return [points[int(number * stride)] for number in range(most)]


@cache
def undisturbed(case: str) -> tuple[RunResult, tuple[DiskStep, ...]]:
    """Return the result and the steps of a run that nobody disturbs."""
    with scratch() as folder, quiet():
        site = CrashSite(case, folder)
        return site.run(), tuple(site.steps)


def try_point(point: Point) -> PointOutcome:
    """Act a point out without a word, and compare the run with the undisturbed one."""
    with quiet():
        return act_out(point)[0]


def act_out(point: Point) -> tuple[PointOutcome, list[str]]:
    """Act a point out: the outcome, and how the processes ended that did not finish the run."""
    _, steps = undisturbed(point.case)
    number = point.fault.step
    operation = str(steps[number]) if number < len(steps) else "after the last step"
    with scratch() as folder:
        site = CrashSite(point.case, folder, faults=(point.fault,))
        try:
            problem = _differences(site, site.run())
        except (Stuck, TesseraError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
    return PointOutcome(str(point), operation, problem), site.deaths


def _differences(site: CrashSite, result: RunResult) -> str:
    if site.case in ASYNCHRONOUS:
        return "; ".join(_lost_updates(site, result))
    expected, _ = undisturbed(site.case)
    return "; ".join((*_compared(expected, result, site.case), *site.doubts))


def _compared(expected: RunResult, result: RunResult, case: str) -> Iterator[str]:
    if result.orders != expected.orders:
        yield f"the audit has {result.orders}, not {expected.orders}"
    if len(result.rounds) != (STEERED_ROUNDS if case == STEERED else ROUNDS):
        yield f"the history has rounds {list(result.rounds)}"
        return
    if result.digest != expected.digest:
        yield "the model has other bits"
    for old, new in zip(expected.history, result.history, strict=True):
        if names := [name for name in old if old[name] != new.get(name)]:
            changed = {name: (old[name], new.get(name)) for name in names}
            yield f"history of round {old['round']}: {_shortened(changed)}"
    if result.receipts != expected.receipts:
        yield f"receipts {result.receipts}, not {expected.receipts}"


def _lost_updates(site: CrashSite, result: RunResult) -> Iterator[str]:
    if not result.rounds or result.rounds[-1] != UPDATES:
        yield f"the history has updates {list(result.rounds)}"
    if list(result.rounds) != sorted(set(result.rounds)):
        yield f"a line of history is there twice: {list(result.rounds)}"
    calm, _ = undisturbed(site.case)
    if result.rounds != calm.rounds:
        yield f"the history has updates {list(result.rounds)}, not {list(calm.rounds)}"
    counted = sum(line["movements"]["counted"] for line in result.history)
    if counted != UPDATES:
        yield f"the history counts {counted} movements of {UPDATES}"
    told = [
        (device.name, round)
        for device in site.devices
        for round, words in device.receipts.items()
        if "counted" in words
    ]
    if len(told) > UPDATES:
        yield f"{len(told)} receipts for {UPDATES} updates"
    yield from site.doubts


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}…"


def all_points(cases: Iterable[str] = CASES, *, distinct: bool = True) -> list[Point]:
    """Return every point of these cases; not `distinct`: at once, with cuts that do not differ."""
    found: list[Point] = []
    for case in cases:
        cuts: Mapping[int, Sequence[str]] = {}
        if distinct:
            with scratch() as folder, quiet():
                site = CrashSite(case, folder, looks=True)
                site.run()
                cuts = site.disks[0].cuts
        found += points_of(case, undisturbed(case)[1], cuts)
    return found


class scratch:  # noqa: N801  a context manager, as `TemporaryDirectory` is one
    """A folder in memory where there is one, else on disk; removed afterwards."""

    def __init__(self) -> None:
        usable = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2**26
        place = SHARED_MEMORY if usable else Path(gettempdir())
        self._folder = TemporaryDirectory(prefix="tessera-crash-", dir=place)

    def __enter__(self) -> Path:
        return Path(self._folder.__enter__())

    def __exit__(self, *error: Any) -> None:
        self._folder.__exit__(*error)
